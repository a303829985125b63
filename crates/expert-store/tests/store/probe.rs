//! Measuring a disk: with records of a model, and what happens when they cannot be read.

use std::path::{Path, PathBuf};
use std::time::Duration;

use expert_store::{
    DiskFile, FaultKind, FaultPlan, ProbeError, ReaderKind, Spot, StoreOptions, probe,
    sustained_rate,
};

use crate::support::{MODES, TestFiles, readers};

fn demo() -> (Vec<PathBuf>, checkpoint::Records) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf");
    let checkpoint = checkpoint::open(Path::new(path)).expect("the demo model is there");
    let records = checkpoint::bind(&checkpoint).expect("the demo model is whole").records;
    (checkpoint.files.into_iter().map(|file| file.path).collect(), records)
}

#[test]
fn a_probe_finds_a_rate_and_a_way_of_reading_that_a_store_takes() {
    let (files, records) = demo();
    let plan = FaultPlan::default();
    let options = StoreOptions { faults: Some(plan.clone()), ..StoreOptions::default() };
    let found = probe(&files, &records, &options, 8).unwrap();
    assert!(found.bytes_per_second > 0);
    assert!((1..=expert_store::MAX_THREADS).contains(&found.model.threads));
    assert!(plan.reads() > 0, "the model's own files were read");
    // Experts of the demo are shorter than any part.
    assert_eq!(found.model.part_bytes, u64::MAX);
}

#[test]
fn a_probe_that_cannot_read_says_so() {
    let (files, records) = demo();
    let faults = Some(FaultPlan::nth(20, FaultKind::Error(libc::EIO)));
    let options = StoreOptions { faults, ..StoreOptions::default() };
    let error = probe(&files, &records, &options, 8).unwrap_err();
    assert!(matches!(error, ProbeError::Read(_)), "{error}");
    let nowhere = [PathBuf::from("/nowhere.gguf")];
    let error = probe(&nowhere, &records, &StoreOptions::default(), 8).unwrap_err();
    assert!(matches!(error, ProbeError::Store(_)), "{error}");
}

#[test]
fn a_sustained_rate_is_of_the_models_own_reads_and_fails_with_them() {
    let (files, records) = demo();
    let plan = FaultPlan::default();
    let options = StoreOptions { faults: Some(plan.clone()), ..StoreOptions::default() };
    let rate = sustained_rate(&files, &records, &options, Duration::from_millis(20)).unwrap();
    assert!(rate > 0.0);
    assert!(plan.reads() >= 12, "a read for every slot at least: {}", plan.reads());
    let faults = Some(FaultPlan::nth(5, FaultKind::Error(libc::EIO)));
    let options = StoreOptions { faults, ..StoreOptions::default() };
    let error = sustained_rate(&files, &records, &options, Duration::from_mins(1)).unwrap_err();
    assert!(matches!(error, ProbeError::Read(_)), "{error}");
}

#[test]
fn a_spot_reads_for_its_time_in_every_way_that_the_system_has() {
    let files = TestFiles::new(&[1 << 20, 3000]);
    for direct in MODES {
        let file = DiskFile::open(&files.paths[0], direct).unwrap();
        assert_eq!(file.bytes(), 1 << 20);
        for reader in readers() {
            for (read_bytes, lanes) in [(4096, 1), (100_000, 3), (1 << 20, 2)] {
                let time = Duration::from_millis(5);
                let found = file.measure(&Spot { reader, read_bytes, lanes, time }).unwrap();
                assert!(found.reads >= lanes as u64 && found.bytes_per_second > 0.0, "{found:?}");
                assert!(found.p50 <= found.p99);
            }
        }
    }
}

#[test]
fn a_spot_that_makes_no_sense_is_refused_with_numbers() {
    let files = TestFiles::new(&[3000]);
    let file = DiskFile::open(&files.paths[0], expert_store::DirectMode::Auto).unwrap();
    let usual =
        Spot { reader: ReaderKind::Pread, read_bytes: 4096, lanes: 1, time: Duration::ZERO };
    for (spot, words) in [
        (Spot { read_bytes: 0, ..usual }, "reads of 0"),
        (Spot { read_bytes: u64::MAX, ..usual }, "1 to 67108864"),
        (Spot { lanes: 0, ..usual }, "lanes of 0"),
        (Spot { lanes: 65, ..usual }, "1 to 64"),
        (Spot { read_bytes: 5000, ..usual }, "has 3000 bytes, too few for reads of 8192"),
    ] {
        let error = file.measure(&spot).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}
