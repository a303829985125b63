//! Reads that fail: the error surfaces or the bytes are right, whichever read it is.

use std::time::Duration;

use expert_store::{
    DirectMode, Fault, FaultKind, FaultPlan, Priority, ReadError, ReaderKind, Store, StoreError,
    StoreOptions,
};
use units::FileIndex;

use crate::support::{Load, MODES, TestFiles, readers};

const EINTR: i32 = libc::EINTR;
const EAGAIN: i32 = libc::EAGAIN;
const EIO: i32 = libc::EIO;

fn faulty(files: &TestFiles, direct: DirectMode, threads: usize, plan: &FaultPlan) -> Store {
    let faults = Some(plan.clone());
    files.store(StoreOptions { threads, direct, faults, ..StoreOptions::default() })
}

fn loads() -> Vec<Load> {
    (0..5u64)
        .map(|i| {
            let parts =
                [(0, 1000 + i * 30_000, 20_000), (0, 7 + i * 11, 9000), (1, i * 4096, 4096)];
            Load::new(i as u32, &parts)
        })
        .collect()
}

/// Reads all loads and returns the errors. What succeeded is exact, and everything ends.
fn read_all(store: &Store, files: &TestFiles, loads: &[Load]) -> Vec<ReadError> {
    for load in loads {
        store.submit(load.request(), Priority::Demand);
    }
    let mut errors = Vec::new();
    for _ in loads {
        let completion = store.wait_any();
        let load = &loads[completion.key.expert.get()];
        match completion.result {
            Ok(bytes) => {
                assert_eq!(bytes, load.payload_bytes());
                assert!(load.is_exact(files), "wrong bytes in {}", load.key);
            }
            Err(error) => errors.push(error),
        }
    }
    assert_eq!(store.outstanding(), 0);
    errors
}

/// Hits every read in turn with `kind`, and checks the errors of each round.
fn for_every_read(kind: FaultKind, check: impl Fn(&[ReadError])) {
    let files = TestFiles::new(&[200_000, 30_000]);
    let ways = MODES.into_iter().flat_map(|mode| [(mode, 1), (mode, 3)]);
    for (reader, (direct, threads)) in
        readers().into_iter().flat_map(|reader| ways.clone().map(move |way| (reader, way)))
    {
        for read in 0.. {
            let plan = FaultPlan::nth(read, kind);
            let faults = Some(plan.clone());
            let how = StoreOptions { threads, direct, reader, faults, ..StoreOptions::default() };
            let store = files.store(how);
            let errors = read_all(&store, &files, &loads());
            let fired = plan.fired();
            if fired == 0 {
                assert!(read >= 15, "only {read} reads for 15 pieces");
                assert!(errors.is_empty(), "{errors:?}");
                break;
            }
            check(&errors);
            assert_eq!(store.counters().demand.errors, errors.len() as u64);
            // The store goes on, and so does the rest of its files.
            assert!(read_all(&store, &files, &loads()).is_empty());
        }
    }
}

#[test]
fn an_error_of_the_disk_fails_one_request_and_names_the_file() {
    for_every_read(FaultKind::Error(EIO), |errors| match errors {
        [ReadError::Io { path, source, .. }] => {
            assert!(path.to_str().unwrap().contains("part-"));
            assert_eq!(source.raw_os_error(), Some(EIO));
        }
        other => panic!("{other:?}"),
    });
}

#[test]
fn the_end_of_the_file_fails_one_request_with_what_was_found() {
    for_every_read(FaultKind::Short(0), |errors| match errors {
        [ReadError::Short { found: 0, needed, .. }] => {
            assert!([20_000, 9000, 4096].contains(needed));
        }
        other => panic!("{other:?}"),
    });
}

#[test]
fn a_short_read_is_continued() {
    for bytes in [1, 512, 4096, 5000, 8191] {
        for_every_read(FaultKind::Short(bytes), |errors| assert!(errors.is_empty(), "{errors:?}"));
    }
}

#[test]
fn an_interrupted_or_postponed_read_is_repeated() {
    for number in [EINTR, EAGAIN] {
        for_every_read(FaultKind::Error(number), |errors| assert!(errors.is_empty(), "{errors:?}"));
    }
}

#[test]
fn a_slow_read_changes_nothing_but_time() {
    let kind = FaultKind::Delay(Duration::from_millis(1));
    for_every_read(kind, |errors| assert!(errors.is_empty(), "{errors:?}"));
}

#[test]
fn reads_that_come_back_in_another_order_change_nothing() {
    let files = TestFiles::new(&[200_000, 30_000]);
    for read in 0..15 {
        let faults = [0, 1].map(|i| Fault { read: read + i, kind: FaultKind::Hold(4) });
        let plan = FaultPlan::new(faults.to_vec());
        let store = faulty(&files, DirectMode::Auto, 4, &plan);
        assert!(read_all(&store, &files, &loads()).is_empty());
        assert!(plan.fired() > 0);
    }
}

#[test]
fn a_reader_that_the_system_refuses_is_named_with_the_reason_and_the_other_one() {
    let source = std::io::Error::from_raw_os_error(libc::EPERM);
    let said = StoreError::Reader { kind: ReaderKind::IoUring, source }.to_string();
    for part in ["io_uring", "not permitted", "--reader pread"] {
        assert!(said.contains(part), "{said}");
    }
    let files = TestFiles::new(&[5000]);
    let reader = ReaderKind::IoUring;
    let opened = Store::open(&files.paths, StoreOptions { reader, ..StoreOptions::default() });
    // Where it is not refused, it reads; nothing else takes its place.
    match opened {
        Ok(store) => store.read_blocking(FileIndex(0), 0, &mut [0; 5000]).unwrap(),
        Err(error) => assert!(matches!(error, StoreError::Reader { .. }), "{error}"),
    }
}

#[test]
fn a_disk_that_is_interrupted_for_ever_is_an_error() {
    let files = TestFiles::new(&[200_000, 30_000]);
    let faults = (0..1000).map(|read| Fault { read, kind: FaultKind::Error(EINTR) }).collect();
    let plan = FaultPlan::new(faults);
    let store = faulty(&files, DirectMode::Auto, 1, &plan);
    let error = store.read_blocking(FileIndex(0), 0, &mut [0; 100]).unwrap_err();
    assert!(matches!(error, ReadError::Io { .. }), "{error}");
    assert!(plan.reads() < 1000);
}

#[test]
fn a_tensor_fails_at_every_read_or_is_exact() {
    let files = TestFiles::new(&[9_000_000]);
    for (direct, kind) in MODES.into_iter().flat_map(|mode| {
        [FaultKind::Error(EIO), FaultKind::Short(0), FaultKind::Short(70_000)].map(|k| (mode, k))
    }) {
        for read in 0.. {
            let plan = FaultPlan::nth(read, kind);
            let store = faulty(&files, direct, 2, &plan);
            let mut out = vec![0; 8_999_900];
            let result = store.read_blocking(FileIndex(0), 100, &mut out);
            let survives = plan.fired() == 0 || kind == FaultKind::Short(70_000);
            assert_eq!(result.is_ok(), survives, "{kind:?} at read {read}: {result:?}");
            assert!(!survives || out == files.contents[0][100..]);
            if plan.fired() == 0 {
                assert!(read > 0);
                break;
            }
        }
    }
}

#[test]
fn after_a_failed_tensor_nothing_writes_to_its_memory() {
    let files = TestFiles::new(&[9_000_000]);
    for read in 0..4 {
        let plan = FaultPlan::nth(read, FaultKind::Error(EIO));
        let store = faulty(&files, DirectMode::Auto, 4, &plan);
        let mut out = vec![0; 9_000_000];
        store.read_blocking(FileIndex(0), 0, &mut out).unwrap_err();
        out.fill(1);
        let begun = plan.reads();
        let mut other = vec![0; 100];
        store.read_blocking(FileIndex(0), 0, &mut other).unwrap();
        assert_eq!(plan.reads(), begun + 1, "reads of the failed tensor went on");
        assert!(out.iter().all(|&b| b == 1));
    }
}

#[test]
fn time_counts_while_an_expert_is_on_its_way_whether_anybody_waits_or_not() {
    let files = TestFiles::new(&[200_000, 30_000]);
    let delay = Duration::from_millis(5);
    let plan = FaultPlan::every(FaultKind::Delay(delay));
    let store = faulty(&files, DirectMode::Auto, 1, &plan);
    let load = Load::new(0, &[(0, 1000, 20_000), (1, 7, 9000)]);
    store.submit(load.request(), Priority::Speculative);
    let completion = loop {
        // Looked for, never waited for.
        if let Some(completion) = store.try_any() {
            break completion;
        }
        std::thread::yield_now();
    };
    completion.result.unwrap();
    let counters = store.counters();
    assert!(counters.pending_us >= 2 * delay.as_micros() as u64, "{counters:?}");
    assert_eq!(counters.wait_us, 0);
    std::thread::sleep(delay);
    assert_eq!(store.counters().pending_us, counters.pending_us, "nothing is on its way");
    drop(store);
}
