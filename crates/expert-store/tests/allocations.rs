//! Decoding allocates nothing: a store that is warm reads without it.
#![allow(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use checkpoint::{Piece, Pieces};
use expert_store::{Destination, Priority, ReadRequest, Store, StoreOptions};
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

#[test]
fn a_warm_store_reads_without_allocating() {
    let folder = tempfile::tempdir().expect("a folder for the test");
    let path = folder.path().join("weights");
    std::fs::write(&path, vec![7; 200_000]).expect("a file for the test");
    let store = Store::open(&[path], StoreOptions::default()).expect("a regular file");
    let mut slots: Vec<Slot> = (0..12).map(|_| Slot([0; 16_384])).collect();
    two_layers(&store, &mut slots);
    // A late thread may still be starting, so the best of several rounds counts: one without is enough to show
    // that no read needs one.
    let fewest = (0..20)
        .map(|_| {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            two_layers(&store, &mut slots);
            ALLOCATIONS.load(Ordering::Relaxed) - before
        })
        .min();
    assert_eq!(fewest, Some(0));
}
