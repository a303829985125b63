//! Decoding allocates nothing: a store that is warm reads without it.
#![allow(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use checkpoint::{NgramTable, Piece, Pieces, TensorInfo};
use expert_store::{
    Destination, DirectMode, NgramOptions, NgramStore, Priority, ReadRequest, Store, StoreOptions,
};
use quant::BlockType;
use units::{ExpertKey, FileIndex};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, base: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(base, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Aligned as a backend's slots are, so that reads land in place.
#[repr(C, align(4096))]
struct Slot([u8; 16_384]);

/// Submits, adopts, cancels and awaits what two layers might.
fn two_layers(store: &Store, slots: &mut [Slot]) {
    for round in 0..2 {
        let mut cancelled = 0;
        for (i, slot) in slots.iter_mut().enumerate() {
            let mut pieces = Pieces::default();
            for part in 0..3u64 {
                let offset = 100 + part * 40_000 + i as u64;
                pieces.push(Piece {
                    file: FileIndex(0),
                    offset,
                    bytes: 2000,
                    place: part * 4096,
                    blocks: None,
                });
            }
            let base = NonNull::from(&mut slot.0).cast();
            // SAFETY: all reads are awaited or cancelled below, and `slots` is borrowed until then.
            let destination = unsafe { Destination::new(base, 16_384) };
            let request = ReadRequest { key: ExpertKey::new(round, i as u32), pieces, destination };
            let ticket = store.submit(request, Priority::ALL[i % 3]);
            if i % 6 == 2 {
                store.adopt(ticket);
            }
            if i % 6 == 5 {
                cancelled += usize::from(store.cancel(ticket));
            }
        }
        for _ in cancelled..slots.len() {
            store.wait_any().result.expect("the file is long enough");
        }
    }
}

/// Four rows of 100 bytes for a token, of 2000.
fn ngram_store(path: &std::path::Path) -> NgramStore {
    let tensor = TensorInfo {
        name: "rows".to_owned(),
        block_type: BlockType::F32,
        shape: vec![2000, 25],
        file: FileIndex(0),
        offset: 0,
        bytes: 200_000,
        foreign: None,
    };
    let options = NgramOptions {
        max_tokens: 4,
        heads: 4,
        cache_rows: 16,
        direct: DirectMode::Auto,
        mirrors: Vec::new(),
        notice: None,
        simulate: None,
        faults: None,
    };
    NgramStore::open(&[path.to_owned()], NgramTable { tensor }, options).expect("a regular file")
}

/// Allocations of the best of several rounds. A late thread may still be starting, and one round without is enough
/// to show that no read needs one.
fn fewest(mut round: impl FnMut(u64)) -> Option<u64> {
    let rounds = (0..20).map(|i| {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        round(i);
        ALLOCATIONS.load(Ordering::Relaxed) - before
    });
    rounds.min()
}

#[test]
fn a_warm_store_reads_without_allocating() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let path = folder.path().join("weights");
    std::fs::write(&path, vec![7; 200_000]).expect("a file for the test");
    let store =
        Store::open(std::slice::from_ref(&path), StoreOptions::default()).expect("a regular file");
    let mut slots: Vec<Slot> = (0..12).map(|_| Slot([0; 16_384])).collect();
    two_layers(&store, &mut slots);
    assert_eq!(fewest(|_| two_layers(&store, &mut slots)), Some(0));
    drop(store);
    let mut ngrams = ngram_store(&path);
    // Tokens one by one, rows known and new.
    let mut token = |i: u64| {
        ngrams.request((0..4).map(|head| (i * head * 97) % 2000));
        ngrams.wait().expect("the file is long enough");
        assert_eq!(ngrams.row(0, 3), [7; 100]);
    };
    (0..50).for_each(&mut token);
    assert_eq!(fewest(|i| token(1000 + i)), Some(0));
}
