//! Named promises, every state of small pools, and random plans against a naive model.

mod enumeration;
mod model;
mod policies;
mod promises;
mod world;

use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex};

use crate::{ClassSpec, PolicyKind, PoolSpec, SlotPool};

const POLICIES: [PolicyKind; 7] = PolicyKind::ALL;

/// Those whose every state, or whose model, is small enough to be written down.
const PLAIN: [PolicyKind; 2] = [PolicyKind::Clock, PolicyKind::Lru];

/// A pool of one size class.
fn pool(n_layers: u32, n_experts: u32, slots: u32, policy: PolicyKind) -> SlotPool {
    let classes = vec![ClassSpec { slots, slot_bytes: 4096 }];
    let class_of_layer = vec![0; n_layers as usize];
    SlotPool::new(
        PoolSpec { n_layers, n_experts, usual_selection: 1, classes, class_of_layer },
        policy,
    )
    .unwrap()
}

fn experts(ids: &[u32]) -> Vec<ExpertIndex> {
    ids.iter().copied().map(ExpertIndex).collect()
}

/// Experts whose bit is set.
fn experts_of(set: u32) -> Vec<ExpertIndex> {
    (0..u32::BITS).filter(|bit| set >> bit & 1 == 1).map(ExpertIndex).collect()
}

fn key(layer: u32, expert: u32) -> ExpertKey {
    ExpertKey::new(layer, expert)
}

/// Serves a selection to its end; the experts that were read, wave by wave.
fn serve(pool: &mut SlotPool, layer: u32, ids: &[u32], now: Epoch) -> Vec<Vec<u32>> {
    let layer = LayerIndex(layer);
    let mut waves = Vec::new();
    let mut next = pool.begin(layer, &experts(ids), now);
    loop {
        let mut tx = next.unwrap();
        pool.start(&mut tx);
        let loads: Vec<_> = tx.awaited().map(|(key, _)| key).collect();
        for key in &loads {
            pool.publish(&mut tx, *key);
        }
        waves.push(tx.loads.iter().map(|load| load.key.expert.0).collect());
        let deferred = tx.deferred.clone();
        pool.finish(tx, now);
        pool.check_invariants();
        if deferred.is_empty() {
            return waves;
        }
        next = pool.begin_next(layer, &deferred, now);
    }
}
