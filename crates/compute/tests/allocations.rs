//! After the first tokens, decoding allocates nothing: not the host part, not the kernels, not their threads.
#![allow(unsafe_code, reason = "counts what the system's allocator does")]
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use compute::backend::{Activations, Backend, KvType, Role, Row};
use support::selected::{self, Bed};
use support::{Model, N_EXPERTS, N_LAYERS, rows};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    type Make = fn(compute::Options) -> Box<dyn Backend>;
    let backends: [(&str, Make); 2] = [("reference", compute::reference), ("cpu", compute::cpu)];
    for (name, make) in backends {
        for activations in [Activations::Q8, Activations::F32] {
            for threads in [1, 3] {
                // With everything resident, and while experts come and go.
                for n_slots in [N_LAYERS * N_EXPERTS, 4] {
                    let options = compute::Options { threads, activations, kv: KvType::F16 };
                    let mut model = Model::new(make(options), n_slots, 7, 64);
                    let count = allocations_of_decoding(&mut model);
                    assert_eq!(count, 0, "{name}, {options:?}, {n_slots} slots");
                }
            }
            for threads in [1, 3] {
                let options = compute::Options { threads, activations, kv: KvType::F16 };
                let count = allocations_of_selecting(&mut Bed::new(make(options)));
                assert_eq!(count, 0, "{name}, {options:?}, selected attention");
            }
        }
    }
}

fn allocations_of_decoding(model: &mut Model) -> usize {
    let sequence = model.open();
    let tokens: Vec<Vec<Row>> = (64..128)
        .map(|position| rows(sequence, position..position + 1, Role::Generated, 1))
        .collect();
    model.forward(&rows(sequence, 0..64, Role::Prompt, 1)).unwrap();
    let mut logits = [0.0; support::VOCABULARY];
    let mut decode = |tokens: &[Vec<Row>]| {
        for rows in tokens {
            model.forward(rows).unwrap();
            model.read(0, &mut logits);
        }
    };
    // Every expert has been published by then.
    decode(&tokens[..32]);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    decode(&tokens[32..]);
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

/// From where everything is seen to where most is not.
fn allocations_of_selecting(bed: &mut Bed) -> usize {
    let sequence = bed.open();
    let tokens: Vec<_> = (0..100)
        .map(|p| selected::rows(sequence, p..p + 1, Role::Generated, 1))
        .map(|rows| (selected::inputs(&rows), rows))
        .collect();
    let mut out = [0.0; selected::OUT];
    let mut decode = |tokens: &[([Vec<f32>; 6], Vec<Row>)]| {
        for (inputs, rows) in tokens {
            bed.forward(rows, inputs);
            bed.backend.read_back(bed.attended, 0, &mut out);
        }
    };
    decode(&tokens[..8]);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    decode(&tokens[8..]);
    ALLOCATIONS.load(Ordering::Relaxed) - before
}
