//! Copies on other disks: whatever they do, bytes are those of the file, and the run ends with the last copy only.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use expert_store::{
    DirectMode, Fault, FaultKind, FaultPlan, Mirror, Priority, ReadError, Store, StoreError,
    StoreOptions,
};
use units::FileIndex;

use crate::support::{Load, MODES, TestFiles, random_loads, write};

const EIO: i32 = libc::EIO;

/// Copies of the files whose numbers are given.
fn mirror(files: &TestFiles, name: &str, copied: &[usize], faults: &FaultPlan) -> Mirror {
    let folder = files.folder.path().join(name);
    std::fs::create_dir_all(&folder).expect("the folder is ours");
    let copy = |i: usize| -> PathBuf {
        let path = folder.join(files.paths[i].file_name().expect("a file has a name"));
        write(&path, &files.contents[i]);
        path
    };
    let copies = (0..files.paths.len()).map(|i| copied.contains(&i).then(|| copy(i))).collect();
    Mirror { files: copies, faults: Some(faults.clone()) }
}

fn open(
    files: &TestFiles,
    direct: DirectMode,
    threads: usize,
    own: &FaultPlan,
    mirrors: Vec<Mirror>,
) -> Store {
    let faults = Some(own.clone());
    files.store(StoreOptions { threads, direct, mirrors, faults, ..StoreOptions::default() })
}

/// Reads all loads and gives the errors; what succeeded is exact.
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
    errors
}

#[test]
fn equal_copies_share_the_reads_and_bytes_are_exact() {
    let files = TestFiles::new(&[300_000, 90_000]);
    for direct in MODES {
        let plans = [(); 3].map(|()| FaultPlan::default());
        let mirrors =
            vec![mirror(&files, "a", &[0, 1], &plans[1]), mirror(&files, "b", &[0, 1], &plans[2])];
        let store = open(&files, direct, 2, &plans[0], mirrors);
        assert_eq!((store.threads(), store.live_disks()), (6, 3));
        assert!(read_all(&store, &files, &random_loads(&files, 60, 1)).is_empty());
        assert!(plans.iter().all(|plan| plan.reads() > 0), "every disk has read something");
    }
}

#[test]
fn a_mirror_with_some_of_the_files_gets_reads_of_those() {
    let files = TestFiles::new(&[300_000, 90_000]);
    let (own, other) = (FaultPlan::default(), FaultPlan::default());
    let store = open(&files, DirectMode::Auto, 2, &own, vec![mirror(&files, "part", &[1], &other)]);
    let first: Vec<Load> =
        (0..20u64).map(|i| Load::new(i as u32, &[(0, i * 10_000, 9000)])).collect();
    assert!(read_all(&store, &files, &first).is_empty());
    assert_eq!(other.reads(), 0, "it has no copy of the first file");
    assert!(read_all(&store, &files, &random_loads(&files, 60, 2)).is_empty());
    assert!(other.reads() > 0);
}

#[test]
fn a_disk_that_fails_at_any_read_drops_out_and_nothing_else_happens() {
    let files = TestFiles::new(&[200_000, 30_000]);
    for (direct, kind) in MODES
        .into_iter()
        .flat_map(|mode| [FaultKind::Error(EIO), FaultKind::Short(0)].map(|kind| (mode, kind)))
    {
        for failing in [0, 1] {
            for read in 0.. {
                let mut plans = [FaultPlan::default(), FaultPlan::default()];
                plans[failing] = FaultPlan::nth(read, kind);
                let mirrors = vec![mirror(&files, "copy", &[0, 1], &plans[1])];
                let store = open(&files, direct, 1, &plans[0], mirrors);
                let errors = read_all(&store, &files, &random_loads(&files, 8, read));
                assert!(errors.is_empty(), "{kind:?} at read {read}: {errors:?}");
                let fired = plans[failing].fired() as usize;
                assert_eq!(store.live_disks(), 2 - fired);
                if fired == 0 {
                    assert!(read > 0);
                    break;
                }
                let begun = plans[failing].reads();
                assert!(read_all(&store, &files, &random_loads(&files, 8, read)).is_empty());
                assert_eq!(plans[failing].reads(), begun, "it is left out from then on");
            }
        }
    }
}

#[test]
fn a_tensor_and_what_is_bounced_survive_a_failing_disk_too() {
    let files = TestFiles::new(&[5_000_000]);
    for read in 0..6 {
        let (own, other) = (FaultPlan::nth(read, FaultKind::Error(EIO)), FaultPlan::default());
        let mirrors = vec![mirror(&files, "copy", &[0], &other)];
        let store = open(&files, DirectMode::Auto, 1, &own, mirrors);
        let mut out = vec![0; 4_999_000];
        store.read_blocking(FileIndex(0), 777, &mut out).unwrap();
        assert!(out == files.contents[0][777..777 + 4_999_000]);
    }
}

#[test]
fn only_when_all_copies_fail_there_is_an_error() {
    let files = TestFiles::new(&[200_000]);
    let always = || {
        let faults = (0..1000).map(|read| Fault { read, kind: FaultKind::Error(EIO) });
        FaultPlan::new(faults.collect())
    };
    let (own, other) = (always(), always());
    let mirrors = vec![mirror(&files, "copy", &[0], &other)];
    let store = open(&files, DirectMode::Auto, 2, &own, mirrors);
    let errors = read_all(&store, &files, &random_loads(&files, 5, 3));
    assert_eq!(errors.len(), 5);
    assert!(errors.iter().all(|error| matches!(error, ReadError::Io { .. })), "{errors:?}");
    assert_eq!(store.live_disks(), 1, "the last one is asked again each time");
    assert!(own.reads() > 0 && other.reads() > 0);
}

#[test]
fn a_file_that_only_a_failed_disk_has_is_still_read_from_it() {
    let files = TestFiles::new(&[200_000, 30_000]);
    let (own, other) = (FaultPlan::nth(0, FaultKind::Error(EIO)), FaultPlan::default());
    let store = open(&files, DirectMode::Auto, 1, &own, vec![mirror(&files, "part", &[1], &other)]);
    let [second, first] = [(1, 100, 5000), (0, 100, 5000)].map(|part| Load::new(0, &[part]));
    assert!(read_all(&store, &files, &[second]).is_empty());
    assert_eq!(store.live_disks(), 1);
    assert!(read_all(&store, &files, &[first]).is_empty());
    assert_eq!(own.reads(), 2);
}

#[test]
fn a_slow_disk_gets_fewer_reads() {
    let files = TestFiles::new(&[300_000]);
    let slow = || {
        let kind = FaultKind::Delay(Duration::from_millis(20));
        FaultPlan::new((0..10_000).map(|read| Fault { read, kind }).collect())
    };
    for slow_one in [0, 1] {
        let mut plans = [FaultPlan::default(), FaultPlan::default()];
        plans[slow_one] = slow();
        let mirrors = vec![mirror(&files, "copy", &[0], &plans[1])];
        let store = open(&files, DirectMode::Auto, 2, &plans[0], mirrors);
        for seed in 0..5 {
            assert!(read_all(&store, &files, &random_loads(&files, 40, seed)).is_empty());
        }
        let (slow, fast) = (plans[slow_one].reads(), plans[1 - slow_one].reads());
        assert!(slow < fast, "{slow} reads of the slow disk, {fast} of the fast one");
    }
}

#[test]
fn a_file_of_another_length_is_no_copy() {
    let files = TestFiles::new(&[5000]);
    let other = files.folder.path().join("other");
    write(&other, &[0; 4999]);
    let mirrors = vec![Mirror { files: vec![Some(other.clone())], faults: None }];
    let Err(error) = Store::open(&files.paths, StoreOptions { mirrors, ..StoreOptions::default() })
    else {
        panic!("it was taken");
    };
    match error {
        StoreError::NotACopy { path, found, needed } => {
            assert_eq!((path, found, needed), (other, 4999, 5000));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn more_mirrors_than_make_sense_are_refused() {
    let files = TestFiles::new(&[5000]);
    let copy = Mirror { files: vec![Some(files.paths[0].clone())], faults: None };
    for (n, fits) in [(expert_store::MAX_DISKS - 1, true), (expert_store::MAX_DISKS, false)] {
        let mirrors = vec![copy.clone(); n];
        let opened = Store::open(&files.paths, StoreOptions { mirrors, ..StoreOptions::default() });
        assert_eq!(opened.is_ok(), fits, "{n}");
    }
}

static NOTICES: Mutex<Vec<String>> = Mutex::new(Vec::new());

#[test]
fn a_disk_that_drops_out_is_told_of_once() {
    let files = TestFiles::new(&[200_000]);
    let faults = (0..1000).map(|read| Fault { read, kind: FaultKind::Error(EIO) }).collect();
    let (own, other) = (FaultPlan::new(faults), FaultPlan::default());
    let mirrors = vec![mirror(&files, "copy", &[0], &other)];
    let notice: expert_store::Notice = |line| NOTICES.lock().unwrap().push(line.to_owned());
    let store = files.store(StoreOptions {
        mirrors,
        notice: Some(notice),
        faults: Some(own),
        ..StoreOptions::default()
    });
    assert!(read_all(&store, &files, &random_loads(&files, 20, 4)).is_empty());
    let said = NOTICES.lock().unwrap();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("part-0") && said[0].contains("other copies"), "{said:?}");
    assert_eq!(said[0].lines().count(), 1);
}
