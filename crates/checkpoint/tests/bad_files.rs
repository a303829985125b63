//! Malformed GGUF files, each with the class of error it must give; and their well-formed twins.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use checkpoint::{CheckpointError, bind, open};

/// Remembers the largest single allocation.
struct Watching;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code, reason = "an allocator is an unsafe trait; this one passes everything on")]
// SAFETY: every call is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures/bad"))
}

fn outcome(path: &std::path::Path) -> Result<(), CheckpointError> {
    bind(&open(path)?).map(|_| ())
}

#[test]
fn every_malformed_file_gives_its_class_and_every_twin_loads() {
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder().join("manifest.json")).unwrap()).unwrap();
    let cases: Vec<_> = manifest["cases"].as_array().unwrap().iter().collect();
    let gguf = cases
        .iter()
        .filter(|case| case["path"].as_str().is_some_and(|path| path.starts_with("gguf/")));
    let (mut checked, mut wrong) = (0, Vec::new());
    for case in gguf {
        checked += 1;
        let path = folder().join(case["path"].as_str().unwrap());
        assert!(path.exists(), "{}", path.display());
        let expected = case["expect"].as_str().unwrap();
        // Notes of the manifest that widen: numeric damage shows when the model runs, bad merges are skipped.
        let accepted_late = expected == "numeric" || path.ends_with("merges_bad.gguf");
        match outcome(&path) {
            Ok(()) if expected == "accept" || accepted_late => {}
            Err(error) if expected.split('|').any(|class| class == error.class().to_string()) => {
                let text = error.to_string();
                assert!(text.contains(".gguf"), "the message names the file: {text}");
            }
            other => wrong.push(format!("{}: {other:?}, expected {expected}", path.display())),
        }
    }
    assert_eq!(checked, 64);
    assert!(wrong.is_empty(), "{wrong:#?}");
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= 64 << 20, "an allocation of {largest} bytes while parsing");
}

#[test]
fn a_directory_and_a_pipe_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::create_dir(&path).unwrap();
    assert_eq!(outcome(&path).unwrap_err().class().to_string(), "io");
    let pipe = folder.path().join("pipe.gguf");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    assert_eq!(outcome(&pipe).unwrap_err().class().to_string(), "io");
    assert_eq!(outcome(&folder.path().join("absent.gguf")).unwrap_err().class().to_string(), "io");
}

#[test]
fn any_part_of_a_split_model_opens_the_whole() {
    let first = open(&folder().join("gguf/split_ok/m-00001-of-00002.gguf")).unwrap();
    let second = open(&folder().join("gguf/split_ok/m-00002-of-00002.gguf")).unwrap();
    assert_eq!(first.files.len(), 2);
    assert_eq!(first.directory.len(), second.directory.len());
}
