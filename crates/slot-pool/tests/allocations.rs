//! A warm pool allocates nothing.
#![allow(unsafe_code, reason = "an allocator that counts has to be an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use slot_pool::{ClassSpec, PolicyKind, PoolSpec, SlotPool};
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System.alloc` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LAYERS: u32 = 6;
const EXPERTS: u32 = 64;

/// One pass over all layers: `n` experts of each, and forecasts for the next layer.
fn pass(pool: &mut SlotPool, selection: &mut Vec<ExpertIndex>, seed: u32, n: u32) {
    for layer in 0..LAYERS {
        selection.clear();
        selection.extend((0..n).map(|i| ExpertIndex((seed * 11 + layer * 5 + i * 7) % EXPERTS)));
        let forecast = ExpertKey::new((layer + 1) % LAYERS, seed % EXPERTS);
        pool.shield(&[forecast]);
        if pool.reserve(forecast, Epoch(0)).is_some() {
            pool.publish_speculative(forecast);
        }
        let mut first = true;
        while !selection.is_empty() {
            let begin = if first { SlotPool::begin } else { SlotPool::begin_next };
            let mut tx = begin(pool, LayerIndex(layer), selection, Epoch(0)).expect("slots");
            first = false;
            pool.start(&mut tx);
            for i in 0..tx.loads.len() {
                let key = tx.loads[i].key;
                pool.publish(&mut tx, key);
            }
            selection.clear();
            selection.extend_from_slice(&tx.deferred);
            pool.finish(tx, Epoch(0));
        }
    }
}

// The only test of this binary: the counter is the whole process's.
#[test]
fn a_warm_pool_allocates_nothing() {
    for policy in PolicyKind::ALL {
        let classes = vec![ClassSpec { slots: 40, slot_bytes: 4096 }];
        let class_of_layer = vec![0; LAYERS as usize];
        let spec = PoolSpec {
            n_layers: LAYERS,
            n_experts: EXPERTS,
            usual_selection: 8,
            classes,
            class_of_layer,
        };
        let mut pool = SlotPool::new(spec, policy).expect("a sound specification");
        let mut selection = Vec::with_capacity(EXPERTS as usize);
        pass(&mut pool, &mut selection, 0, 8);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for seed in 1..50 {
            pass(&mut pool, &mut selection, seed, if seed % 5 == 0 { EXPERTS } else { 8 });
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0, "{policy:?}");
        assert!(pool.counters().evictions > 1000, "{:?}", pool.counters());
    }
}
