use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::pool::Slot;
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

fn pool(n_layers: u32, n_experts: u32, slots: u32, policy: PolicyKind) -> SlotPool {
    let classes = vec![ClassSpec { slots, slot_bytes: 4096 }];
    let class_of_layer = vec![0; n_layers as usize];
    SlotPool::new(PoolSpec { n_layers, n_experts, classes, class_of_layer }, policy).unwrap()
}

fn experts(ids: &[u32]) -> Vec<ExpertIndex> {
    ids.iter().copied().map(ExpertIndex).collect()
}

/// Serves a selection to its end; the experts that were read, wave by wave.
fn serve(pool: &mut SlotPool, layer: u32, ids: &[u32], now: Epoch) -> Vec<Vec<u32>> {
    let mut waves = Vec::new();
    let mut next = pool.begin(LayerIndex(layer), &experts(ids), now);
    loop {
        let mut tx = next.unwrap();
        pool.start(&mut tx);
        let loads: Vec<_> = tx.loads.iter().map(|load| load.key).collect();
        for key in &loads {
            pool.publish(&mut tx, *key);
        }
        waves.push(loads.iter().map(|key| key.expert.0).collect());
        let deferred = tx.deferred.clone();
        pool.finish(tx, now);
        pool.check_invariants();
        if deferred.is_empty() {
            return waves;
        }
        next = pool.begin_next(LayerIndex(layer), &deferred, now);
    }
}

const POLICIES: [PolicyKind; 2] = [PolicyKind::Clock, PolicyKind::Lru];

#[test]
fn a_pinned_slot_is_never_a_victim() {
    for policy in POLICIES {
        let mut pool = pool(1, 8, 3, policy);
        serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
        let mut tx = pool.begin(LayerIndex(0), &experts(&[1, 5, 6, 7]), Epoch(0)).unwrap();
        assert_eq!(tx.hits.len(), 1);
        assert_eq!(tx.loads.len(), 2, "two of the three slots are not pinned");
        assert!(tx.loads.iter().all(|load| load.evicted != Some(ExpertKey::new(0, 1))));
        assert_eq!(tx.deferred, experts(&[7]));
        pool.start(&mut tx);
        pool.abort(tx);
    }
}

#[test]
fn a_hit_late_in_a_selection_is_pinned_before_an_early_miss_takes_its_slot() {
    let mut pool = pool(1, 8, 2, PolicyKind::Lru);
    serve(&mut pool, 0, &[0, 1], Epoch(0));
    let tx = pool.begin(LayerIndex(0), &experts(&[7, 0]), Epoch(0)).unwrap();
    assert_eq!(tx.loads[0].evicted, Some(ExpertKey::new(0, 1)), "0 is older but selected");
    pool.abort(tx);
}

#[test]
fn a_slot_in_use_by_unfinished_work_is_never_a_victim() {
    for policy in POLICIES {
        let mut pool = pool(2, 4, 2, policy);
        serve(&mut pool, 0, &[0, 1], Epoch(7));
        let busy = pool.begin(LayerIndex(1), &experts(&[0]), Epoch(6));
        assert_eq!(busy.unwrap_err(), PoolError::Busy { layer: LayerIndex(1), until: Epoch(7) });
        serve(&mut pool, 1, &[0], Epoch(7));
    }
}

#[test]
fn a_union_larger_than_the_pool_is_served_in_waves() {
    for policy in POLICIES {
        let mut pool = pool(1, 16, 3, policy);
        serve(&mut pool, 0, &[2, 3], Epoch(0));
        let ids: Vec<u32> = (0..10).collect();
        let waves = serve(&mut pool, 0, &ids, Epoch(0));
        let mut read: Vec<u32> = waves.concat();
        read.sort_unstable();
        assert_eq!(
            read,
            [0, 1, 4, 5, 6, 7, 8, 9],
            "each distinct expert once, the hits not at all"
        );
        let counters = pool.counters();
        assert_eq!((counters.lookups, counters.hits, counters.misses), (12, 2, 10));
    }
}

#[test]
fn abort_restores_the_state_before() {
    for policy in POLICIES {
        let mut pool = pool(2, 6, 4, policy);
        serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
        serve(&mut pool, 1, &[3], Epoch(0));
        pool.reserve(ExpertKey::new(1, 5), Epoch(0)).unwrap();
        let before = pool.clone();
        let tx = pool.begin(LayerIndex(1), &experts(&[0, 3, 4, 5]), Epoch(0)).unwrap();
        assert_eq!((tx.hits.len(), tx.adopted.len(), tx.loads.len()), (1, 1, 2));
        assert_ne!(pool, before);
        pool.abort(tx);
        assert_eq!(pool, before);
    }
}

#[test]
fn an_abort_after_the_start_keeps_what_arrived_and_frees_the_rest() {
    let mut pool = pool(1, 6, 3, PolicyKind::Clock);
    serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
    let mut tx = pool.begin(LayerIndex(0), &experts(&[3, 4]), Epoch(0)).unwrap();
    pool.start(&mut tx);
    pool.publish(&mut tx, ExpertKey::new(0, 4));
    pool.abort(tx);
    pool.check_invariants();
    assert!(pool.lookup(ExpertKey::new(0, 4)).is_some());
    assert!(pool.lookup(ExpertKey::new(0, 3)).is_none());
    assert_eq!(pool.slots.iter().filter(|slot| **slot == Slot::Free).count(), 1);
}

#[test]
fn a_forecast_is_adopted_and_counts_as_neither_hit_nor_miss() {
    let mut pool = pool(1, 6, 3, PolicyKind::Clock);
    let key = ExpertKey::new(0, 2);
    let load = pool.reserve(key, Epoch(0)).unwrap();
    assert!(pool.reserve(key, Epoch(0)).is_none(), "it is on its way");
    let mut tx = pool.begin(LayerIndex(0), &experts(&[1, 2]), Epoch(0)).unwrap();
    assert_eq!(tx.adopted, [(key, load.slot)]);
    pool.start(&mut tx);
    pool.publish(&mut tx, key);
    pool.publish(&mut tx, ExpertKey::new(0, 1));
    pool.finish(tx, Epoch(1));
    let counters = pool.counters();
    assert_eq!((counters.lookups, counters.hits, counters.misses, counters.adopted), (2, 0, 1, 1));
}

#[test]
fn a_cancelled_forecast_frees_its_slot() {
    let mut pool = pool(1, 6, 1, PolicyKind::Lru);
    let key = ExpertKey::new(0, 2);
    pool.reserve(key, Epoch(0)).unwrap();
    assert!(matches!(
        pool.begin(LayerIndex(0), &experts(&[1]), Epoch(0)),
        Err(PoolError::TooSmall { slots: 1, .. })
    ));
    pool.cancel_speculative(key);
    pool.check_invariants();
    serve(&mut pool, 0, &[1], Epoch(0));
    pool.reserve(key, Epoch(0)).unwrap();
    pool.publish_speculative(key);
    assert!(pool.lookup(key).is_some());
}

#[test]
fn a_shielded_expert_goes_last_and_never_for_a_forecast() {
    for policy in POLICIES {
        let mut pool = pool(1, 6, 2, policy);
        serve(&mut pool, 0, &[0, 1], Epoch(0));
        pool.shield(&[ExpertKey::new(0, 0)]);
        assert_eq!(
            pool.reserve(ExpertKey::new(0, 5), Epoch(0)).unwrap().evicted,
            Some(ExpertKey::new(0, 1))
        );
        assert!(pool.reserve(ExpertKey::new(0, 4), Epoch(0)).is_none());
        let tx = pool.begin(LayerIndex(0), &experts(&[3]), Epoch(0)).unwrap();
        assert_eq!(
            tx.loads[0].evicted,
            Some(ExpertKey::new(0, 0)),
            "demand takes it when nothing else is left"
        );
        pool.abort(tx);
    }
}

#[test]
fn in_a_small_pool_the_layers_own_experts_go_first() {
    let mut pool = pool(2, 8, 6, PolicyKind::Lru);
    serve(&mut pool, 1, &[0, 1, 2], Epoch(0));
    serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
    // Layer 1 is the older, but layer 0's experts are needed again only after it.
    let tx = pool.begin(LayerIndex(0), &experts(&[5, 6]), Epoch(0)).unwrap();
    assert!(tx.loads.iter().all(|load| load.evicted.unwrap().layer == LayerIndex(0)));
    pool.abort(tx);
}

#[test]
fn lru_evicts_the_oldest_and_clock_gives_a_second_chance() {
    let mut lru = pool(1, 9, 3, PolicyKind::Lru);
    serve(&mut lru, 0, &[0], Epoch(0));
    serve(&mut lru, 0, &[1], Epoch(0));
    serve(&mut lru, 0, &[2], Epoch(0));
    lru.touch(LayerIndex(0), &experts(&[0]), Epoch(0));
    serve(&mut lru, 0, &[3], Epoch(0));
    assert!(
        lru.lookup(ExpertKey::new(0, 1)).is_none() && lru.lookup(ExpertKey::new(0, 0)).is_some()
    );
    let mut clock = pool(1, 9, 3, PolicyKind::Clock);
    serve(&mut clock, 0, &[0, 1, 2], Epoch(0));
    // All bits are set: the hand clears them and comes back to slot 0.
    serve(&mut clock, 0, &[3], Epoch(0));
    assert!(clock.lookup(ExpertKey::new(0, 0)).is_none());
    clock.touch(LayerIndex(0), &experts(&[1]), Epoch(0));
    serve(&mut clock, 0, &[4], Epoch(0));
    assert!(
        clock.lookup(ExpertKey::new(0, 1)).is_some()
            && clock.lookup(ExpertKey::new(0, 2)).is_none()
    );
}

#[test]
fn layers_stay_in_slots_of_their_class() {
    let classes =
        vec![ClassSpec { slots: 2, slot_bytes: 4096 }, ClassSpec { slots: 3, slot_bytes: 8192 }];
    let spec = PoolSpec { n_layers: 2, n_experts: 5, classes, class_of_layer: vec![0, 1] };
    let mut pool = SlotPool::new(spec, PolicyKind::Clock).unwrap();
    for round in 0..4 {
        for layer in 0..2 {
            serve(&mut pool, layer, &[round, (round + 2) % 5], Epoch(0));
        }
    }
    assert!((0..5).filter_map(|e| pool.lookup(ExpertKey::new(0, e))).all(|slot| slot.0 < 2));
    assert!((0..5).filter_map(|e| pool.lookup(ExpertKey::new(1, e))).all(|slot| slot.0 >= 2));
}

#[test]
fn a_contradictory_specification_is_refused() {
    let spec = |slots, class| PoolSpec {
        n_layers: 1,
        n_experts: 2,
        classes: vec![ClassSpec { slots, slot_bytes: 4096 }],
        class_of_layer: vec![class],
    };
    assert!(SlotPool::new(spec(1, 0), PolicyKind::Clock).is_ok());
    assert!(SlotPool::new(spec(0, 0), PolicyKind::Clock).is_err());
    assert!(SlotPool::new(spec(1, 1), PolicyKind::Clock).is_err());
}

/// One thing that can be done to a pool between transactions.
#[derive(Debug, Clone, Copy)]
enum Action {
    /// Selection as a bit set; how far it gets: aborted before the start, after it with one arrival, or finished.
    Serve {
        layer: u32,
        set: u32,
        until: u64,
        end: End,
    },
    Touch {
        layer: u32,
        set: u32,
        until: u64,
    },
    Reserve {
        layer: u32,
        expert: u32,
    },
    Arrive {
        layer: u32,
        expert: u32,
    },
    Cancel {
        layer: u32,
        expert: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    AbortEarly,
    AbortLate,
    Finish,
}

fn ids_of(set: u32) -> Vec<ExpertIndex> {
    (0..32).filter(|i| set >> i & 1 == 1).map(ExpertIndex).collect()
}

/// Does it if it can be done, checking what each step promises; epochs up to `completed` are over.
fn apply(pool: &mut SlotPool, action: Action, completed: Epoch) {
    match action {
        Action::Serve { layer, set, until, end } => {
            let selection = ids_of(set);
            let before = pool.clone();
            match pool.begin(LayerIndex(layer), &selection, completed) {
                Err(_) => assert_eq!(*pool, before, "a refusal changes nothing"),
                Ok(tx) => run(pool, tx, &before, &selection, (Epoch(until), end)),
            }
        }
        Action::Touch { layer, set, until } => {
            let selection = ids_of(set);
            if selection.iter().all(|e| pool.lookup(ExpertKey::new(layer, e.0)).is_some()) {
                pool.touch(LayerIndex(layer), &selection, Epoch(until));
            }
        }
        Action::Reserve { layer, expert } => {
            let key = ExpertKey::new(layer, expert);
            if let Some(load) = pool.reserve(key, completed) {
                assert_ne!(load.evicted, Some(key));
            }
        }
        Action::Arrive { layer, expert } | Action::Cancel { layer, expert } => {
            let key = ExpertKey::new(layer, expert);
            let reading = pool.index[pool.at(key)].is_some_and(|slot| {
                matches!(pool.slots[slot.get()], Slot::Reading { speculative: true, .. })
            });
            match action {
                Action::Arrive { .. } if reading => pool.publish_speculative(key),
                Action::Cancel { .. } if reading => pool.cancel_speculative(key),
                _ => {}
            }
        }
    }
    pool.check_invariants();
}

fn run(
    pool: &mut SlotPool,
    mut tx: Transaction,
    before: &SlotPool,
    selection: &[ExpertIndex],
    (until, end): (Epoch, End),
) {
    pool.check_invariants();
    let mut served: Vec<u32> = tx.places().map(|(key, _)| key.expert.0).collect();
    served.extend(tx.deferred.iter().map(|e| e.0));
    served.sort_unstable();
    assert_eq!(
        served,
        selection.iter().map(|e| e.0).collect::<Vec<_>>(),
        "every expert is served or deferred, once"
    );
    for load in &tx.loads {
        if let Some(evicted) = load.evicted {
            let selected = evicted.layer == tx.layer && selection.contains(&evicted.expert);
            assert!(!selected, "a victim is outside of the selection");
            let slot = before.lookup(evicted).expect("a victim was ready");
            assert!(matches!(before.slots[slot.get()], Slot::Ready { pins: 0, .. }));
        }
    }
    if end == End::AbortEarly {
        pool.abort(tx);
        assert_eq!(pool, before, "an early abort restores the state");
        return;
    }
    pool.start(&mut tx);
    let awaited: Vec<ExpertKey> = tx
        .loads
        .iter()
        .map(|load| load.key)
        .chain(tx.adopted.iter().map(|(key, _)| *key))
        .collect();
    for (i, key) in awaited.iter().enumerate() {
        if end == End::Finish || i == 0 {
            pool.publish(&mut tx, *key);
            pool.check_invariants();
        }
    }
    if end == End::Finish {
        pool.finish(tx, until);
    } else {
        pool.abort(tx);
    }
    let pinned = pool.slots.iter().any(|slot| matches!(slot, Slot::Ready { pins: 1.., .. }));
    assert!(!pinned, "no lease outlives its transaction");
}

#[test]
fn every_reachable_state_of_a_small_pool_keeps_the_invariants() {
    for policy in POLICIES {
        let mut actions = Vec::new();
        for layer in 0..2 {
            for set in 1..8 {
                for (until, end) in
                    [(0, End::AbortEarly), (0, End::AbortLate), (0, End::Finish), (1, End::Finish)]
                {
                    actions.push(Action::Serve { layer, set, until, end });
                }
            }
            actions.push(Action::Touch { layer, set: 1, until: 1 });
            for expert in 0..2 {
                actions.push(Action::Reserve { layer, expert });
                actions.push(Action::Arrive { layer, expert });
                actions.push(Action::Cancel { layer, expert });
            }
        }
        let start = pool(2, 3, 3, policy);
        let mut seen = std::collections::BTreeSet::from([fingerprint(&start)]);
        let mut frontier = VecDeque::from([start]);
        let mut steps = 0_u32;
        while let Some(state) = frontier.pop_front() {
            for action in &actions {
                for completed in [Epoch(0), Epoch(1)] {
                    let mut next = state.clone();
                    apply(&mut next, *action, completed);
                    steps += 1;
                    next.counters = PoolCounters::default();
                    if seen.len() < 12_000 && seen.insert(fingerprint(&next)) {
                        frontier.push_back(next);
                    }
                }
            }
        }
        assert!(steps > 100_000, "{policy:?}: only {steps} transitions were tried");
    }
}

/// The whole state as text, without counters.
fn fingerprint(pool: &SlotPool) -> String {
    format!("{pool:?}")
}

/// What an LRU pool of one class does, written as plainly as possible.
struct Naive {
    slots: usize,
    /// Oldest first.
    order: Vec<ExpertKey>,
    hits: u64,
    misses: u64,
}

impl Naive {
    fn serve(&mut self, layer: u32, ids: &BTreeSet<u32>, small: bool) {
        let keys: Vec<_> = ids.iter().map(|e| ExpertKey::new(layer, *e)).collect();
        let (hits, misses): (Vec<_>, Vec<_>) =
            keys.into_iter().partition(|key| self.order.contains(key));
        self.hits += hits.len() as u64;
        self.misses += misses.len() as u64;
        for key in &misses {
            if self.order.len() >= self.slots {
                let own = |k: &ExpertKey| {
                    small && k.layer.0 == layer && !hits.contains(k) && !misses.contains(k)
                };
                let any = |k: &ExpertKey| !hits.contains(k) && !misses.contains(k);
                let victim = self
                    .order
                    .iter()
                    .position(own)
                    .or_else(|| self.order.iter().position(any))
                    .unwrap();
                self.order.remove(victim);
            }
            self.order.push(*key);
        }
        // Hits are used when the transaction starts, before anything has arrived.
        self.order.retain(|key| !misses.contains(key));
        for key in hits.iter().chain(&misses) {
            self.order.retain(|k| k != key);
            self.order.push(*key);
        }
    }
}

proptest! {
    #[test]
    fn an_lru_pool_agrees_with_a_naive_model(
        passes in prop::collection::vec((0..3_u32, prop::collection::btree_set(0..12_u32, 1..4)), 1..200),
        slots in 4..20_u32,
    ) {
        let mut pool = pool(3, 12, slots, PolicyKind::Lru);
        let mut naive = Naive { slots: slots as usize, order: Vec::new(), hits: 0, misses: 0 };
        for (layer, set) in &passes {
            let ids: Vec<u32> = set.iter().copied().collect();
            let small = (slots as usize) < 2 * 3 * ids.len();
            serve(&mut pool, *layer, &ids, Epoch(0));
            naive.serve(*layer, set, small);
            let resident: BTreeMap<ExpertKey, SlotIndex> = (0..3)
                .flat_map(|l| (0..12).map(move |e| ExpertKey::new(l, e)))
                .filter_map(|key| Some((key, pool.lookup(key)?)))
                .collect();
            let mut expected = naive.order.clone();
            expected.sort_unstable();
            prop_assert_eq!(resident.keys().copied().collect::<Vec<_>>(), expected);
        }
        prop_assert_eq!((pool.counters().hits, pool.counters().misses), (naive.hits, naive.misses));
    }

    #[test]
    fn random_plans_keep_every_promise(
        plan in prop::collection::vec((0..5_u8, 0..4_u32, 1..256_u32, 0..4_u64, 0..3_u8, 0..4_u64), 1..120),
        slots in 1..14_u32,
        lru in any::<bool>(),
    ) {
        let mut pool = pool(4, 8, slots, if lru { PolicyKind::Lru } else { PolicyKind::Clock });
        for (kind, layer, set, until, end, completed) in plan {
            let expert = set % 8;
            let end = [End::AbortEarly, End::AbortLate, End::Finish][end as usize];
            let action = match kind {
                0 => Action::Reserve { layer, expert },
                1 => Action::Arrive { layer, expert },
                2 => Action::Cancel { layer, expert },
                3 => Action::Touch { layer, set: 1 << expert, until },
                _ => Action::Serve { layer, set, until, end },
            };
            apply(&mut pool, action, Epoch(completed));
        }
    }
}
