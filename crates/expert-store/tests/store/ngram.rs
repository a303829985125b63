//! Rows of an n-gram table: exact whatever is cached, read or asked for twice; errors leave nothing to look at.

use checkpoint::{FilePlace, Foreign, NgramTable, Part, Scales, TensorInfo};
use expert_store::{DirectMode, FaultKind, FaultPlan, NgramCounters, NgramOptions, NgramStore};
use quant::BlockType;
use units::FileIndex;

use crate::support::{MODES, Random, TestFiles};

/// Values of a row of bytes: 100 bytes.
const WIDTH: u64 = 25;
const HEADS: usize = 4;
const OFFSET: u64 = 1234;

fn table(rows: u64) -> NgramTable {
    let tensor = TensorInfo {
        name: "rows".to_owned(),
        block_type: BlockType::F32,
        shape: vec![rows, WIDTH],
        file: FileIndex(0),
        offset: OFFSET,
        bytes: rows * WIDTH * 4,
        foreign: None,
    };
    NgramTable { tensor }
}

fn files(rows: u64) -> TestFiles {
    TestFiles::new(&[(OFFSET + rows * WIDTH * 4) as usize])
}

fn open(files: &TestFiles, rows: u64, options: NgramOptions) -> NgramStore {
    NgramStore::open(&files.paths, table(rows), options).expect("a regular file")
}

fn options(max_tokens: usize, cache_rows: usize, direct: DirectMode) -> NgramOptions {
    NgramOptions {
        max_tokens,
        heads: HEADS,
        cache_rows,
        direct,
        mirrors: Vec::new(),
        notice: None,
        simulate: None,
        faults: None,
    }
}

fn row_of(files: &TestFiles, row: u64) -> &[u8] {
    &files.contents[0][(OFFSET + row * 4 * WIDTH) as usize..][..4 * WIDTH as usize]
}

fn assert_exact(store: &NgramStore, files: &TestFiles, wanted: &[u64]) {
    for (i, row) in wanted.iter().enumerate() {
        assert!(store.row(i / HEADS, i % HEADS) == row_of(files, *row), "row {row} at {i}");
    }
}

/// Passes of a few tokens: rows next to each other, far apart, in the same pass and in earlier ones.
fn passes(rows: u64) -> Vec<Vec<u64>> {
    let mut random = Random(7);
    let pass = |n: usize| {
        (0..n * HEADS)
            .map(|i| if i % 3 == 0 { (i as u64) % rows } else { random.below(rows) })
            .collect()
    };
    [1, 7, 16, 1, 1, 16].map(pass).to_vec()
}

#[test]
fn rows_are_exact_whatever_the_cache_keeps_and_however_files_are_read() {
    let files = files(300);
    for (direct, cache_rows) in
        MODES.into_iter().flat_map(|mode| [0, 1, 40, 1000].map(|n| (mode, n)))
    {
        let mut store = open(&files, 300, options(16, cache_rows, direct));
        for wanted in passes(300) {
            store.request(wanted.iter().copied());
            store.wait().unwrap();
            assert_exact(&store, &files, &wanted);
        }
        let NgramCounters { rows, hits, payload_bytes, .. } = store.counters();
        assert_eq!(rows, 42 * HEADS as u64);
        assert_eq!(payload_bytes, (rows - hits) * 100, "what is no hit is read");
    }
}

#[test]
fn what_was_read_is_not_read_again_and_neighbours_are_one_read() {
    let files = files(300);
    let mut store = open(&files, 300, options(16, 300, DirectMode::Off));
    let mut counted = |wanted: &[u64]| {
        let before = store.counters();
        store.request(wanted.iter().copied());
        store.wait().unwrap();
        let NgramCounters { rows, hits, reads, .. } = store.counters().minus(&before);
        (rows, hits, reads)
    };
    // Rows 10 to 15 in any order, one of them three times: one read.
    assert_eq!(counted(&[12, 10, 11, 13, 15, 14, 12, 12]), (8, 2, 1));
    assert_eq!(counted(&[10, 12, 14, 15]), (4, 4, 0));
    assert_eq!(counted(&[14, 15, 16, 18]), (4, 2, 2));
}

#[test]
fn a_pass_may_need_more_reads_than_are_in_flight_at_once() {
    let files = files(60_000);
    let mut store = open(&files, 60_000, options(7000, 0, DirectMode::Off));
    // Every second row, so that none are neighbours: 3112 requests of nine.
    let wanted: Vec<u64> = (0..28_000).map(|i| 2 * ((i * 9973) % 28_000)).collect();
    store.request(wanted.iter().copied());
    store.wait().unwrap();
    assert_exact(&store, &files, &wanted);
    assert_eq!(store.counters().reads, 28_000);
}

#[test]
fn a_pass_that_nobody_waited_for_leaves_nothing_behind() {
    let files = files(300);
    let mut store = open(&files, 300, options(16, 300, DirectMode::Auto));
    store.request(0..16);
    store.request(100..104);
    store.wait().unwrap();
    assert_exact(&store, &files, &[100, 101, 102, 103]);
    store.request(0..16);
    drop(store);
}

/// Rows of two blocks of 18 bytes: scales of 2 bytes in the second file, codes of 16 in the first. Shards of unequal
/// length, the second of which lies before the first: rows, place of the codes, place of the scales.
const SHARDS: [(u64, u64, u64); 3] = [(130, 9000, 4000), (100, 500, 77), (70, 20_000, 9001)];

fn sharded() -> NgramTable {
    let at = |file, offset| FilePlace { file: FileIndex(file), offset };
    let part = |(rows, codes, scales)| Part {
        rows,
        place: at(0, codes),
        scales: Some(Scales { bytes: 2, scales: at(1, scales), biases: None, rows: 1 }),
    };
    let foreign = Foreign { parts: SHARDS.map(part).to_vec(), ..Foreign::default() };
    let tensor = TensorInfo {
        name: "rows".to_owned(),
        block_type: BlockType::Q4_0,
        shape: vec![300, 64],
        file: FileIndex(0),
        offset: SHARDS[0].1,
        bytes: 300 * 36,
        foreign: Some(Box::new(foreign)),
    };
    NgramTable { tensor }
}

fn sharded_row(files: &TestFiles, row: u64) -> Vec<u8> {
    let mut first = 0;
    for (rows, codes, scales) in SHARDS {
        if row < first + rows {
            let within = (row - first) as usize;
            let block = |i: usize| {
                let scale = &files.contents[1][scales as usize + (within * 2 + i) * 2..][..2];
                let codes = &files.contents[0][codes as usize + (within * 2 + i) * 16..][..16];
                [scale, codes].concat()
            };
            return [block(0), block(1)].concat();
        }
        first += rows;
    }
    panic!("row {row} of {first}");
}

#[test]
fn rows_in_shards_whose_scales_lie_elsewhere_are_put_together() {
    let files = TestFiles::new(&[24_000, 9400]);
    for direct in MODES {
        let options = options(75, 8, direct);
        let mut store =
            NgramStore::open(&files.paths, sharded(), options).expect("two regular files");
        for wanted in passes(300).into_iter().chain([(0..300).collect()]) {
            store.request(wanted.iter().copied());
            store.wait().unwrap();
            for (i, row) in wanted.iter().enumerate() {
                let found = store.row(i / HEADS, i % HEADS);
                assert!(found == sharded_row(&files, *row), "row {row}");
            }
        }
    }
}

#[test]
fn a_failed_read_is_an_error_at_every_read_and_the_next_pass_is_exact() {
    let files = files(300);
    for (direct, kind) in MODES
        .into_iter()
        .flat_map(|mode| [FaultKind::Error(5), FaultKind::Short(0)].map(|k| (mode, k)))
    {
        let mut failures = 0;
        for read in 0.. {
            let faults = FaultPlan::nth(read, kind);
            let options = NgramOptions { faults: Some(faults.clone()), ..options(16, 64, direct) };
            let mut store = open(&files, 300, options);
            for wanted in passes(300) {
                store.request(wanted.iter().copied());
                if store.wait().is_err() {
                    failures += 1;
                    assert_eq!(faults.fired(), 1);
                    let look = std::panic::AssertUnwindSafe(|| store.row(0, 0).len());
                    assert!(std::panic::catch_unwind(look).is_err(), "nothing looks valid");
                    store.request(wanted.iter().copied());
                    store.wait().unwrap();
                }
                assert_exact(&store, &files, &wanted);
            }
            if faults.fired() == 0 {
                break;
            }
        }
        assert!(failures > 20, "{failures}");
    }
}
