//! What may be opened, and what happens to files that change while they are open.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;

use expert_store::{DirectMode, Priority, ReadError, Store, StoreError, StoreOptions};
use units::FileIndex;

use crate::support::{Load, MODES, TestFiles, make_fifo, options, write};

fn refusal(path: PathBuf) -> StoreError {
    let Err(error) = Store::open(&[path], StoreOptions::default()) else {
        panic!("it was opened");
    };
    error
}

#[test]
fn only_regular_files_are_opened() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    make_fifo(&fifo);
    let cases = [
        (fifo, "FIFO"),
        (folder.path().to_owned(), "directory"),
        (PathBuf::from("/dev/zero"), "device"),
    ];
    for (path, expected) in cases {
        match refusal(path.clone()) {
            StoreError::NotAFile { path: named, found } => {
                assert_eq!((named, found), (path, expected));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_missing_file_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("not-there.gguf");
    let error = refusal(path.clone());
    assert!(matches!(error, StoreError::Open { .. }), "{error:?}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}

#[test]
fn a_symbolic_link_is_followed() {
    let files = TestFiles::new(&[5000]);
    let link = files.folder.path().join("link");
    std::os::unix::fs::symlink(&files.paths[0], &link).unwrap();
    let store = Store::open(&[link], StoreOptions::default()).unwrap();
    let mut out = vec![0; 5000];
    store.read_blocking(FileIndex(0), 0, &mut out).unwrap();
    assert!(out == files.contents[0]);
}

#[test]
fn thread_counts_have_limits() {
    let files = TestFiles::new(&[1]);
    for threads in [0, expert_store::MAX_THREADS + 1, usize::MAX] {
        let Err(error) = Store::open(&files.paths, options(DirectMode::Auto, threads)) else {
            panic!("{threads} threads were started");
        };
        assert!(matches!(error, StoreError::ThreadCount { found, .. } if found == threads));
    }
}

#[test]
fn the_status_tells_size_and_way_of_reading() {
    let files = TestFiles::new(&[5000, 0]);
    let store = files.store(options(DirectMode::Off, 1));
    assert!(!store.direct());
    let status = store.files();
    assert_eq!(status.iter().map(|f| f.bytes).collect::<Vec<_>>(), [5000, 0]);
    assert!(status.iter().zip(&files.paths).all(|(f, path)| f.path == *path && !f.direct));
}

#[test]
fn bytes_behind_the_end_are_a_short_read_with_numbers() {
    let files = TestFiles::new(&[10_000]);
    for direct in MODES {
        let store = files.store(options(direct, 1));
        for (offset, bytes, expected) in
            [(9000, 1001, 1000), (10_000, 1, 0), (50_000, 9000, 0), (8192, 4096, 1808)]
        {
            let load = Load::new(0, &[(0, offset, bytes)]);
            store.submit(load.request(), Priority::Demand);
            match store.wait_any().result {
                Err(ReadError::Short { path, offset: at, found, needed, size_at_open }) => {
                    assert_eq!(path, files.paths[0]);
                    assert_eq!((at, found, needed), (offset, expected, bytes));
                    assert_eq!(size_at_open, 10_000);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(store.counters().demand.errors, 4);
        assert_eq!(store.counters().payload_bytes, 0);
    }
}

#[test]
fn offsets_that_no_file_has_are_errors_not_panics() {
    let files = TestFiles::new(&[10_000]);
    for direct in MODES {
        let store = files.store(options(direct, 1));
        for offset in [u64::MAX, u64::MAX - 4096, i64::MAX as u64, i64::MAX as u64 - 8192] {
            let error = store.read_blocking(FileIndex(0), offset, &mut [0; 100]).unwrap_err();
            assert!(error.to_string().contains("part-0"), "{error}");
        }
    }
}

#[test]
fn a_file_that_is_cut_while_open_is_noticed() {
    for direct in MODES {
        let files = TestFiles::new(&[100_000]);
        let store = files.store(options(direct, 2));
        let mut out = vec![0; 50_000];
        store.read_blocking(FileIndex(0), 0, &mut out).unwrap();
        File::options().write(true).open(&files.paths[0]).unwrap().set_len(30_000).unwrap();
        let error = store.read_blocking(FileIndex(0), 0, &mut out).unwrap_err();
        match error {
            ReadError::Short { found, needed, size_at_open, .. } => {
                assert_eq!((found, needed, size_at_open), (30_000, 50_000, 100_000));
            }
            other => panic!("{other}"),
        }
        // What is left could be read, but belongs to another file now.
        let error = store.read_blocking(FileIndex(0), 0, &mut out[..1000]).unwrap_err();
        assert!(matches!(error, ReadError::Changed { .. }), "{error}");
    }
}

#[test]
fn a_file_that_is_written_to_while_open_is_noticed() {
    for direct in MODES {
        let files = TestFiles::new(&[100_000]);
        // Old enough that a later write has another time, however coarse the clock of the file system.
        let before = std::time::SystemTime::now() - std::time::Duration::from_mins(1);
        File::options().write(true).open(&files.paths[0]).unwrap().set_modified(before).unwrap();
        let store = files.store(options(direct, 2));
        let mut writer = OpenOptions::new().write(true).open(&files.paths[0]).unwrap();
        writer.seek(SeekFrom::Start(10)).unwrap();
        writer.write_all(b"other bytes").unwrap();
        writer.sync_all().unwrap();
        let error = store.read_blocking(FileIndex(0), 0, &mut [0; 4096]).unwrap_err();
        assert!(matches!(error, ReadError::Changed { .. }), "{error}");
    }
}

#[test]
fn a_file_that_is_replaced_under_its_name_stays_readable() {
    let files = TestFiles::new(&[100_000]);
    let store = files.store(options(DirectMode::Auto, 2));
    let other = files.folder.path().join("other");
    write(&other, &vec![0; 100_000]);
    fs::rename(&other, &files.paths[0]).unwrap();
    let mut out = vec![0; 100_000];
    store.read_blocking(FileIndex(0), 0, &mut out).unwrap();
    assert!(out == files.contents[0]);
}
