//! Measuring a disk: with records of a model, and what happens when they cannot be read.

use std::path::{Path, PathBuf};

use expert_store::{FaultKind, FaultPlan, ProbeError, StoreOptions, probe};

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
