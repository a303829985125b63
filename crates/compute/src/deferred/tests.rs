#![allow(unsafe_code, reason = "looks at slots to see that they are poisoned")]

use quant::{BlockType, SlotMatrix};

use super::slots::POISON;
use super::*;
use crate::backend::{Activations, KvType, Role};
use crate::host::fill;

const WIDTH: usize = 16;
const SLOT: usize = 4096;

/// Two experts of `f32` matrices, one row that chooses expert 0, two slots.
struct Host {
    backend: Deferred,
    x: BufferId,
    router: RouterHandle,
    matrices: ExpertMatrices,
}

fn host() -> Host {
    let options = crate::Options { threads: 1, activations: Activations::F32, kv: KvType::F32 };
    let mut backend = Deferred::new(crate::reference(options), 3);
    let shape = RouterShape { n_experts: 2, top_k: 1, hidden: WIDTH, expert_width: WIDTH };
    let router = backend.alloc_router(1, shape).unwrap();
    let mut table = |values: &[f32]| {
        let shape = MatrixShape { n_out: 1, n_in: values.len(), block_type: BlockType::F32 };
        let table = backend.alloc_weight(shape).unwrap();
        let bytes: Vec<u8> = values.iter().copied().flat_map(f32::to_le_bytes).collect();
        fill(backend.weight_memory(table), &bytes);
        (table, backend.alloc_buffer(1, values.len()).unwrap())
    };
    let (x, logits) = (table(&[1.0; WIDTH]), table(&[2.0, 1.0]));
    backend.alloc_slots(&[SlotClass { slots: 2, stride: SLOT }]).unwrap();
    let row = Row { sequence: SequenceId(0), position: 0, role: Role::Prompt, token: 0 };
    backend.begin_pass(&[row]);
    for (table, out) in [x, logits] {
        backend.record(Op::Embed { table, out });
    }
    backend.record(Op::Route { logits: logits.1, router, normalize: true });
    let matrix = |i: u64| SlotMatrix {
        place: i * 4 * (WIDTH * WIDTH) as u64,
        block_type: BlockType::F32,
        n_in: WIDTH as u32,
        n_out: WIDTH as u32,
    };
    let matrices = ExpertMatrices { gate: matrix(0), up: matrix(1), down: matrix(2) };
    Host { backend, x: x.1, router, matrices }
}

impl Host {
    fn publish(&mut self, expert: u32, slot: u32) {
        fill(self.backend.slot_memory(SlotIndex(slot)), &[0; SLOT]);
        self.backend.publish(ExpertKey::new(0, expert), SlotIndex(slot), &self.matrices);
    }

    fn moe(&mut self) -> Moe {
        self.backend.moe(LayerIndex(0), self.x, self.router).unwrap()
    }

    /// How many bytes of the slot are poison.
    #[expect(clippy::naive_bytecount, reason = "a few thousand bytes")]
    fn poisoned(&self, slot: u32) -> usize {
        let (base, len) = self.backend.slot_memory(SlotIndex(slot));
        // SAFETY: these tests write slots on this thread, or on the worker before it completes an epoch that was
        // waited for.
        let bytes = unsafe { std::slice::from_raw_parts(base.as_ptr(), len) };
        bytes.iter().filter(|byte| **byte == POISON).count()
    }
}

#[test]
fn a_slot_that_nothing_used_is_poison_as_soon_as_it_is_unpublished() {
    let mut host = host();
    host.publish(1, 0);
    assert_eq!(host.poisoned(0), 0);
    host.backend.unpublish(ExpertKey::new(0, 1));
    assert_eq!((host.poisoned(0), host.poisoned(1)), (SLOT, 0));
}

#[test]
fn a_slot_in_use_keeps_its_bytes_until_its_epoch_completes() {
    let mut host = host();
    host.publish(0, 1);
    assert_eq!(host.moe(), Moe::AllResident);
    host.backend.unpublish(ExpertKey::new(0, 0));
    let epoch = host.backend.submit();
    host.backend.wait(epoch);
    assert_eq!((host.poisoned(1), host.backend.completed()), (SLOT, epoch));
    // Now it can be filled again.
    host.publish(1, 1);
    assert_eq!(host.poisoned(1), 0);
}

#[test]
#[should_panic(expected = "slot 0 was filled with layer 0 expert 1 while epoch Epoch(1)")]
fn a_slot_that_is_filled_while_it_is_in_use_is_found_out() {
    let mut host = host();
    host.publish(0, 0);
    host.moe();
    host.backend.unpublish(ExpertKey::new(0, 0));
    host.publish(1, 0);
}

#[test]
fn an_expert_that_came_late_is_in_use_from_then_on() {
    let mut host = host();
    assert_eq!(host.moe(), Moe::Missing);
    assert_eq!(host.backend.routes(host.router)[0].expert, ExpertIndex(0));
    host.publish(0, 0);
    host.backend.moe_more(LayerIndex(0), host.x, host.router);
    let first = host.backend.submit();
    // It has been run: a second look for late experts does not use it again.
    host.backend.moe_more(LayerIndex(0), host.x, host.router);
    host.backend.wait(first);
    host.backend.unpublish(ExpertKey::new(0, 0));
    assert_eq!(host.poisoned(0), SLOT);
}

#[test]
fn choices_are_poison_before_the_wait() {
    let mut host = host();
    let early = host.backend.routes(host.router);
    assert!(early.len() == 1 && early[0].expert == NOT_YET.expert && early[0].weight.is_nan());
    host.moe();
    assert_eq!(host.backend.routes(host.router)[0].weight.to_bits(), 1.0_f32.to_bits());
}

#[test]
fn a_host_that_polls_sees_epochs_complete() {
    let mut host = host();
    let epochs: Vec<Epoch> = (0..50).map(|_| host.backend.submit()).collect();
    assert_eq!(epochs[49], Epoch(50));
    let mut before = Epoch(0);
    while before < epochs[49] {
        let completed = host.backend.completed();
        assert!(before <= completed && completed <= epochs[49]);
        before = completed;
    }
}

#[test]
#[should_panic(expected = "index is 9")]
fn a_panic_of_late_work_reaches_the_owner() {
    let mut host = host();
    host.backend.reset(SequenceId(9));
    host.backend.submit();
}
