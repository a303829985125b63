//! Rows whose scales lie elsewhere: put together block by block, from any bytes, in any order of arrival.

use checkpoint::{Blocks, FilePlace, Piece, Pieces, Tiles};
use expert_store::{Fault, FaultKind, FaultPlan, Priority, ReadRequest, StoreOptions};
use units::{ExpertKey, FileIndex};

use crate::support::{BLANK, MODES, Slot, TestFiles, options};

const fn at(file: u32, offset: u64) -> FilePlace {
    FilePlace { file: FileIndex(file), offset }
}

/// A piece as the definition says, byte by byte.
fn expected(files: &TestFiles, piece: &Piece) -> Vec<u8> {
    let blocks = piece.blocks.expect("a piece of blocks");
    let take = |place: FilePlace, index: u64, bytes: u32| {
        let start = (place.offset + index * u64::from(bytes)) as usize;
        &files.contents[place.file.get()][start..start + bytes as usize]
    };
    let mut out = Vec::new();
    for i in 0..piece.bytes / u64::from(blocks.codes) {
        let scale = blocks.tiles.map_or(i, |Tiles { blocks: row, rows, before }| {
            let (row, rows, before) = (u64::from(row), u64::from(rows), u64::from(before));
            (before + i / row) / rows * row + i % row
        });
        out.extend(take(blocks.scales, scale, blocks.scale));
        out.extend(blocks.biases.iter().flat_map(|biases| take(*biases, scale, blocks.scale)));
        out.extend(take(at(piece.file.0, piece.offset), i, blocks.codes));
    }
    out
}

/// Affine blocks of 4 bits by 64, of 3 bits by 32, and tiles that begin in the middle of one; scales in other files.
fn pieces() -> [Piece; 3] {
    let affine = |codes, scale, offset, n: u64| Piece {
        offset,
        bytes: n * u64::from(codes),
        blocks: Some(Blocks {
            codes,
            scale,
            scales: at(1, 4095),
            biases: Some(at(2, 1 + 7 * offset)),
            tiles: None,
        }),
        ..Piece::default()
    };
    let tiles = Some(Tiles { blocks: 5, rows: 3, before: 2 });
    let shared = Blocks { codes: 128, scale: 4, scales: at(1, 17), biases: None, tiles };
    [
        affine(32, 2, 13, 40_000),
        affine(12, 4, 8, 1_000),
        Piece { offset: 3, bytes: 5 * 11 * 128, blocks: Some(shared), ..Piece::default() },
    ]
}

fn files() -> TestFiles {
    TestFiles::new(&[1_500_000, 100_000, 100_000])
}

#[test]
fn blocks_are_put_together_as_defined() {
    let files = files();
    for (direct, threads) in MODES.into_iter().flat_map(|mode| [1, 4].map(|n| (mode, n))) {
        let store = files.store(options(direct, threads));
        let mut record = Pieces::default();
        let mut end = 1;
        for mut piece in pieces() {
            piece.place = end;
            end += piece.memory_bytes() + 1;
            record.push(piece);
        }
        let slot = Slot::new(end as usize);
        let key = ExpertKey::new(0, 0);
        let request = ReadRequest { key, pieces: record, destination: slot.destination() };
        store.submit(request, Priority::Demand);
        let completion = store.wait_any();
        let total: u64 = record.iter().map(Piece::memory_bytes).sum();
        assert_eq!(completion.result.unwrap(), total);
        let mut beside = 0;
        for piece in record.iter() {
            assert_eq!(slot.bytes()[beside as usize], BLANK, "between pieces");
            beside = piece.place + piece.memory_bytes();
            let got = &slot.bytes()[piece.place as usize..beside as usize];
            assert!(got == expected(&files, piece), "{direct:?}, {threads} threads: {piece:?}");
        }
    }
}

#[test]
fn a_resident_matrix_is_read_in_chunks() {
    let files = files();
    for direct in MODES {
        let store = files.store(options(direct, 3));
        for piece in pieces() {
            let mut out = vec![BLANK; piece.memory_bytes() as usize];
            store.read_piece(piece, &mut out).unwrap();
            assert!(out == expected(&files, &piece));
        }
    }
}

#[test]
fn a_run_that_fails_fails_the_piece() {
    let files = files();
    let piece = pieces()[0];
    for read in 0..4 {
        for kind in [FaultKind::Error(5), FaultKind::Short(0)] {
            let plan = FaultPlan::new(vec![Fault { read, kind }]);
            let store = files.store(StoreOptions {
                faults: Some(plan.clone()),
                threads: 1,
                ..options(MODES[1], 1)
            });
            let mut out = vec![0; piece.memory_bytes() as usize];
            let result = store.read_piece(piece, &mut out);
            let fired = plan.fired();
            assert_eq!(result.is_err(), fired > 0, "{kind:?} on read {read}: {result:?}");
            assert!(fired == 1 || read > 2, "three runs at least");
        }
    }
}

#[test]
fn scales_behind_the_end_of_their_file_are_an_error() {
    let files = files();
    let mut piece = pieces()[0];
    piece.blocks.as_mut().unwrap().scales = at(1, 99_000);
    let store = files.store(options(MODES[0], 2));
    let mut out = vec![0; piece.memory_bytes() as usize];
    let error = store.read_piece(piece, &mut out).unwrap_err().to_string();
    assert!(error.contains("part-1"), "{error}");
}
