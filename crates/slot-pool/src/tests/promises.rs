//! One promise a test.

use super::*;
use crate::pool::Slot;
use crate::{PoolCounters, PoolError};

#[test]
fn a_pinned_slot_is_never_a_victim() {
    for policy in POLICIES {
        let mut pool = pool(1, 8, 3, policy);
        serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
        let tx = pool.begin(LayerIndex(0), &experts(&[1, 5, 6, 7]), Epoch(0)).unwrap();
        assert_eq!(tx.hits.len(), 1);
        assert_eq!(tx.loads.len(), 2, "two of the three slots are not pinned");
        assert!(tx.loads.iter().all(|load| load.evicted != Some(key(0, 1))));
        assert_eq!(tx.deferred, experts(&[7]));
        pool.abort(tx);
    }
}

#[test]
fn a_hit_late_in_a_selection_is_pinned_before_an_early_miss_takes_its_slot() {
    let mut pool = pool(1, 8, 2, PolicyKind::Lru);
    serve(&mut pool, 0, &[0, 1], Epoch(0));
    let tx = pool.begin(LayerIndex(0), &experts(&[7, 0]), Epoch(0)).unwrap();
    assert_eq!(tx.loads[0].evicted, Some(key(0, 1)), "0 is older but selected");
    pool.abort(tx);
}

#[test]
fn hits_that_fill_the_pool_are_served_alone() {
    for policy in POLICIES {
        let mut pool = pool(1, 8, 3, policy);
        serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
        let tx = pool.begin(LayerIndex(0), &experts(&[0, 1, 2, 3]), Epoch(0)).unwrap();
        assert_eq!((tx.hits.len(), tx.loads.len()), (3, 0));
        assert_eq!(tx.deferred, experts(&[3]));
        pool.abort(tx);
    }
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
fn what_a_device_reports_is_in_use_until_its_epoch() {
    let mut pool = pool(1, 4, 1, PolicyKind::Clock);
    serve(&mut pool, 0, &[0], Epoch(0));
    pool.touch(LayerIndex(0), &experts(&[0]), Epoch(3));
    let busy = pool.begin(LayerIndex(0), &experts(&[1]), Epoch(2));
    assert_eq!(busy.unwrap_err(), PoolError::Busy { layer: LayerIndex(0), until: Epoch(3) });
    assert_eq!((pool.counters().lookups, pool.counters().hits), (2, 1));
}

#[test]
fn only_slots_that_nothing_but_their_holders_can_free_make_a_pool_too_small() {
    let mut pool = pool(2, 4, 1, PolicyKind::Clock);
    let mut tx = pool.begin(LayerIndex(0), &experts(&[0]), Epoch(0)).unwrap();
    pool.start(&mut tx);
    let refused = pool.begin(LayerIndex(1), &experts(&[0]), Epoch(9));
    let too_small = PoolError::TooSmall { layer: LayerIndex(1), slots: 1, reading: 1 };
    assert_eq!(refused.unwrap_err(), too_small);
    pool.abort(tx);
    serve(&mut pool, 1, &[0], Epoch(0));
}

#[test]
fn an_expert_that_another_transaction_reads_is_left_to_it() {
    let mut pool = pool(1, 4, 3, PolicyKind::Clock);
    let mut first = pool.begin(LayerIndex(0), &experts(&[0]), Epoch(0)).unwrap();
    pool.start(&mut first);
    let refused = pool.begin(LayerIndex(0), &experts(&[0]), Epoch(0));
    assert_eq!(refused.unwrap_err(), PoolError::InFlight { key: key(0, 0) });
    let mut second = pool.begin(LayerIndex(0), &experts(&[0, 1]), Epoch(0)).unwrap();
    assert_eq!((second.loads.len(), &second.deferred), (1, &experts(&[0])));
    pool.start(&mut second);
    pool.publish(&mut first, key(0, 0));
    pool.publish(&mut second, key(0, 1));
    pool.finish(second, Epoch(0));
    let mut third = pool.begin_next(LayerIndex(0), &experts(&[0]), Epoch(0)).unwrap();
    assert_eq!(third.hits.len(), 1, "shared while the first still holds it");
    pool.start(&mut third);
    pool.finish(first, Epoch(0));
    pool.finish(third, Epoch(0));
    let expected = PoolCounters { lookups: 3, misses: 2, hits: 1, ..PoolCounters::default() };
    assert_eq!(pool.counters(), expected);
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
        assert_eq!(read, [0, 1, 4, 5, 6, 7, 8, 9], "each once, the hits not at all");
        let expected =
            PoolCounters { lookups: 12, hits: 2, misses: 10, evictions: 7, ..Default::default() };
        assert_eq!(pool.counters(), expected);
    }
}

#[test]
fn a_pool_of_top_k_and_one_serves_every_layer_and_any_union() {
    for policy in POLICIES {
        let mut pool = pool(4, 32, 5, policy);
        for token in 0..50 {
            for layer in 0..4 {
                let ids: Vec<u32> = (0..4).map(|i| (token * 7 + layer * 3 + i * 5) % 32).collect();
                assert_eq!(serve(&mut pool, layer, &ids, Epoch(0)).len(), 1, "one wave a token");
            }
        }
        let all: Vec<u32> = (0..32).collect();
        let ready = all.iter().filter(|expert| pool.lookup(key(3, **expert)).is_some()).count();
        assert!(ready >= 4, "the last selection is there");
        assert_eq!(serve(&mut pool, 3, &all, Epoch(0)).concat().len(), 32 - ready);
    }
}

#[test]
fn an_expert_forecast_between_two_waves_is_adopted_by_the_second() {
    let mut pool = pool(1, 8, 2, PolicyKind::Lru);
    let mut tx = pool.begin(LayerIndex(0), &experts(&[0, 1, 2]), Epoch(0)).unwrap();
    pool.start(&mut tx);
    pool.publish(&mut tx, key(0, 0));
    pool.publish(&mut tx, key(0, 1));
    let deferred = tx.deferred.clone();
    pool.finish(tx, Epoch(0));
    pool.reserve(key(0, 2), Epoch(0)).unwrap();
    pool.publish_speculative(key(0, 2));
    let mut tx = pool.begin_next(LayerIndex(0), &deferred, Epoch(0)).unwrap();
    pool.start(&mut tx);
    pool.finish(tx, Epoch(0));
    let found = pool.counters();
    assert_eq!((found.lookups, found.hits, found.misses, found.adopted), (3, 0, 2, 1));
}

#[test]
fn abort_restores_the_state_before() {
    for policy in POLICIES {
        let mut pool = pool(2, 6, 4, policy);
        serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
        serve(&mut pool, 1, &[3], Epoch(0));
        pool.reserve(key(1, 5), Epoch(0)).unwrap();
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
    for policy in POLICIES {
        let mut pool = pool(1, 6, 3, policy);
        serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
        let mut tx = pool.begin(LayerIndex(0), &experts(&[3, 4]), Epoch(0)).unwrap();
        pool.start(&mut tx);
        pool.publish(&mut tx, key(0, 4));
        pool.abort(tx);
        pool.check_invariants();
        assert!(pool.lookup(key(0, 4)).is_some());
        assert!(pool.lookup(key(0, 3)).is_none());
        assert_eq!(pool.slots.iter().filter(|slot| **slot == Slot::Free).count(), 1);
        serve(&mut pool, 0, &[3, 4, 5], Epoch(0));
    }
}

#[test]
fn an_abort_while_work_runs_keeps_what_arrived_until_its_epoch() {
    let mut pool = pool(1, 6, 1, PolicyKind::Clock);
    let mut tx = pool.begin(LayerIndex(0), &experts(&[0]), Epoch(0)).unwrap();
    pool.start(&mut tx);
    pool.publish(&mut tx, key(0, 0));
    pool.abort_until(tx, Epoch(5));
    let busy = pool.begin(LayerIndex(0), &experts(&[1]), Epoch(4));
    assert_eq!(busy.unwrap_err(), PoolError::Busy { layer: LayerIndex(0), until: Epoch(5) });
}

#[test]
fn the_order_in_which_reads_end_changes_nothing() {
    for policy in POLICIES {
        let run = |backwards: bool| {
            let mut pool = pool(1, 8, 3, policy);
            let mut tx = pool.begin(LayerIndex(0), &experts(&[0, 1, 2]), Epoch(0)).unwrap();
            pool.start(&mut tx);
            let mut order = vec![0, 1, 2];
            if backwards {
                order.reverse();
            }
            for expert in order {
                pool.publish(&mut tx, key(0, expert));
            }
            pool.finish(tx, Epoch(0));
            pool
        };
        assert_eq!(run(false), run(true));
    }
}

#[test]
fn a_forecast_is_adopted_on_first_use_and_never_counted_as_a_hit() {
    for arrived in [false, true] {
        let mut pool = pool(1, 6, 4, PolicyKind::Clock);
        let load = pool.reserve(key(0, 2), Epoch(0)).unwrap();
        if arrived {
            pool.publish_speculative(key(0, 2));
        }
        let mut tx = pool.begin(LayerIndex(0), &experts(&[1, 2]), Epoch(0)).unwrap();
        let found = if arrived { &tx.hits } else { &tx.adopted };
        assert_eq!(*found, [(key(0, 2), load.slot)]);
        assert_eq!(tx.loads.len(), 1);
        pool.start(&mut tx);
        pool.publish(&mut tx, key(0, 1));
        if !arrived {
            pool.publish(&mut tx, key(0, 2));
        }
        pool.finish(tx, Epoch(0));
        serve(&mut pool, 0, &[2], Epoch(0));
        let expected = PoolCounters {
            lookups: 3,
            misses: 1,
            adopted: 1,
            hits: 1,
            speculative: 1,
            ..PoolCounters::default()
        };
        assert_eq!(pool.counters(), expected, "the second use is a hit");
    }
}

#[test]
fn recency_follows_the_selection_whatever_has_arrived() {
    // 2 is chosen by most rows and so comes last; whether its read or that of 1 is the later one is chance.
    for arrived in [1, 2] {
        let mut pool = pool(1, 8, 4, PolicyKind::Lru);
        for expert in [1, 2] {
            pool.reserve(key(0, expert), Epoch(0)).unwrap();
            if expert == arrived {
                pool.publish_speculative(key(0, expert));
            }
        }
        let mut tx = pool.begin(LayerIndex(0), &experts(&[1, 2]), Epoch(0)).unwrap();
        assert_eq!((tx.hits.len(), tx.adopted.len()), (1, 1));
        pool.start(&mut tx);
        pool.publish(&mut tx, key(0, 3 - arrived));
        pool.finish(tx, Epoch(0));
        for expert in [3, 4, 5] {
            serve(&mut pool, 0, &[expert], Epoch(0));
        }
        assert!(pool.lookup(key(0, 1)).is_none() && pool.lookup(key(0, 2)).is_some());
    }
}

#[test]
fn a_forecast_that_nobody_used_is_wasted() {
    let mut pool = pool(1, 8, 2, PolicyKind::Lru);
    pool.reserve(key(0, 0), Epoch(0)).unwrap();
    pool.cancel_speculative(key(0, 0));
    pool.reserve(key(0, 1), Epoch(0)).unwrap();
    pool.publish_speculative(key(0, 1));
    serve(&mut pool, 0, &[2, 3], Epoch(0));
    assert_eq!((pool.counters().speculative, pool.counters().wasted), (2, 2));
}

#[test]
fn forecasts_leave_half_of_the_slots_to_demand() {
    let mut pool = pool(1, 8, 5, PolicyKind::Clock);
    assert!(pool.reserve(key(0, 0), Epoch(0)).is_some());
    assert!(pool.reserve(key(0, 1), Epoch(0)).is_some());
    assert!(pool.reserve(key(0, 2), Epoch(0)).is_none());
    pool.publish_speculative(key(0, 0));
    assert!(pool.reserve(key(0, 2), Epoch(0)).is_some(), "a read that has ended makes room");
}

#[test]
fn reads_in_idle_time_take_free_slots_only_and_leave_some() {
    let mut pool = pool(1, 8, 7, PolicyKind::Clock);
    serve(&mut pool, 0, &[0], Epoch(0));
    assert!(pool.preload(key(0, 0)).is_none(), "it is there");
    let loads = [1, 2].map(|expert| pool.preload(key(0, expert)).unwrap());
    assert_eq!(loads.map(|load| load.evicted), [None, None]);
    assert!(pool.preload(key(0, 1)).is_none(), "it is on its way");
    assert!(pool.preload(key(0, 3)).is_none(), "four slots stay free");
    pool.publish_speculative(key(0, 1));
    pool.cancel_speculative(key(0, 2));
    serve(&mut pool, 0, &[1, 2], Epoch(0));
    let PoolCounters { adopted, misses, wasted, evictions, .. } = pool.counters();
    assert_eq!((adopted, misses, wasted, evictions), (1, 2, 1, 0));
}

#[test]
fn a_shielded_expert_goes_last_and_never_for_a_forecast() {
    for policy in POLICIES {
        let mut pool = pool(1, 8, 4, policy);
        serve(&mut pool, 0, &[0, 1, 2, 3], Epoch(0));
        pool.shield(&[key(0, 0), key(0, 2), key(0, 3), key(0, 0)]);
        assert_eq!(pool.reserve(key(0, 5), Epoch(0)).unwrap().evicted, Some(key(0, 1)));
        assert!(pool.reserve(key(0, 4), Epoch(0)).is_none());
        let tx = pool.begin(LayerIndex(0), &experts(&[7]), Epoch(0)).unwrap();
        assert!(tx.loads[0].evicted.is_some(), "demand takes it when it must");
        pool.abort(tx);
        pool.shield(&[key(0, 0)]);
        let tx = pool.begin(LayerIndex(0), &experts(&[7]), Epoch(0)).unwrap();
        assert_eq!(tx.loads[0].evicted, Some(key(0, 2)), "a new forecast replaces the last");
        pool.abort(tx);
    }
}

#[test]
fn in_a_small_pool_the_layers_own_experts_go_first() {
    let mut pool = pool(2, 8, 6, PolicyKind::Lru);
    serve(&mut pool, 1, &[0, 1, 2], Epoch(0));
    serve(&mut pool, 0, &[0, 1, 2], Epoch(0));
    // Layer 1 is the older, but it is the next to be used.
    let tx = pool.begin(LayerIndex(0), &experts(&[5, 6]), Epoch(0)).unwrap();
    assert!(tx.loads.iter().all(|load| load.evicted.unwrap().layer == LayerIndex(0)));
    pool.abort(tx);
    // Two experts of each of two layers, twice: nine slots are not small.
    let mut pool = super::pool(2, 8, 9, PolicyKind::Lru);
    serve(&mut pool, 1, &[0, 1, 2, 3], Epoch(0));
    serve(&mut pool, 0, &[0, 1, 2, 3, 4], Epoch(0));
    let tx = pool.begin(LayerIndex(0), &experts(&[5, 6]), Epoch(0)).unwrap();
    assert!(tx.loads.iter().all(|load| load.evicted.unwrap().layer == LayerIndex(1)));
    pool.abort(tx);
}

#[test]
fn a_pool_below_one_selection_a_layer_keeps_some_hits() {
    for policy in POLICIES {
        let mut pool = pool(8, 8, 8, policy);
        for _ in 0..10 {
            for layer in 0..8 {
                serve(&mut pool, layer, &[0, 1], Epoch(0));
            }
        }
        // By recency every expert is gone when its layer's turn comes: no hit at all. By turns, traced by hand, the
        // nine passes after the first hit three or four of the four layers that fit.
        let hits: u64 = [8, 8, 8, 6, 6, 6, 6, 8, 8].iter().sum();
        assert_eq!(pool.counters().hits, hits, "{policy:?}");
    }
}

#[test]
fn lru_evicts_the_oldest_and_clock_gives_a_second_chance() {
    let mut lru = pool(1, 9, 3, PolicyKind::Lru);
    for expert in 0..3 {
        serve(&mut lru, 0, &[expert], Epoch(0));
    }
    lru.touch(LayerIndex(0), &experts(&[0]), Epoch(0));
    serve(&mut lru, 0, &[3], Epoch(0));
    assert!(lru.lookup(key(0, 1)).is_none() && lru.lookup(key(0, 0)).is_some());
    let mut clock = pool(1, 9, 3, PolicyKind::Clock);
    serve(&mut clock, 0, &[0, 1, 2], Epoch(0));
    // All bits are set: the hand clears them and comes back to slot 0.
    serve(&mut clock, 0, &[3], Epoch(0));
    assert!(clock.lookup(key(0, 0)).is_none());
    clock.touch(LayerIndex(0), &experts(&[1]), Epoch(0));
    serve(&mut clock, 0, &[4], Epoch(0));
    assert!(clock.lookup(key(0, 1)).is_some() && clock.lookup(key(0, 2)).is_none());
}

#[test]
fn layers_stay_in_slots_of_their_class() {
    let classes =
        vec![ClassSpec { slots: 2, slot_bytes: 4096 }, ClassSpec { slots: 3, slot_bytes: 8192 }];
    let class_of_layer = vec![0, 1];
    let spec = PoolSpec { n_layers: 2, n_experts: 5, usual_selection: 2, classes, class_of_layer };
    for policy in POLICIES {
        let mut pool = SlotPool::new(spec.clone(), policy).unwrap();
        for round in 0..4 {
            for layer in 0..2 {
                serve(&mut pool, layer, &[round, (round + 2) % 5], Epoch(0));
            }
        }
        let slots = |layer| (0..5).filter_map(|e| pool.lookup(key(layer, e))).collect::<Vec<_>>();
        assert!(slots(0).iter().all(|slot| slot.0 < 2) && !slots(0).is_empty());
        assert!(slots(1).iter().all(|slot| slot.0 >= 2) && !slots(1).is_empty());
    }
}

#[test]
fn a_contradictory_specification_is_refused() {
    let spec = |n_layers, n_experts, slots: &[u32], class_of_layer: &[u32]| PoolSpec {
        n_layers,
        n_experts,
        usual_selection: 1,
        classes: slots.iter().map(|slots| ClassSpec { slots: *slots, slot_bytes: 4096 }).collect(),
        class_of_layer: class_of_layer.to_vec(),
    };
    let refused = |spec| SlotPool::new(spec, PolicyKind::Clock).unwrap_err().to_string();
    assert!(SlotPool::new(spec(1, 2, &[1], &[0]), PolicyKind::Clock).is_ok());
    let no_slots = refused(spec(1, 2, &[0], &[0]));
    assert_eq!(no_slots, "slots of a size class: found 0, needed 1");
    let no_class = refused(spec(1, 2, &[1], &[1]));
    assert_eq!(no_class, "size classes: found 1, needed 2");
    let no_layer = refused(spec(2, 2, &[1], &[0]));
    assert_eq!(no_layer, "layers with a size class: found 1, needed 2");
    assert!(refused(spec(1, 2, &[u32::MAX, 1], &[0])).starts_with("slots of all size classes"));
    let huge = PoolSpec { n_experts: u32::MAX, ..spec(2, 0, &[1], &[0, 0]) };
    assert!(refused(huge).starts_with("experts of the whole model"));
}

#[test]
#[should_panic(expected = "layer 0 expert 3 occurs twice in a selection")]
fn a_selection_that_names_an_expert_twice_is_a_bug() {
    let _tx = pool(1, 8, 4, PolicyKind::Clock).begin(LayerIndex(0), &experts(&[3, 3]), Epoch(0));
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "neither finished nor aborted")]
fn a_forgotten_transaction_is_a_bug() {
    let mut pool = pool(1, 8, 4, PolicyKind::Clock);
    drop(pool.begin(LayerIndex(0), &experts(&[3]), Epoch(0)));
}

#[test]
fn a_layer_that_is_read_before_its_turn_takes_what_the_layers_before_it_have_used() {
    for policy in POLICIES {
        let mut pool = pool(6, 4, 16, policy);
        let all = [0, 1, 2, 3];
        (0..4).for_each(|layer| drop(serve(&mut pool, layer, &all, Epoch(0))));
        let mut tx = pool.begin(LayerIndex(4), &experts(&all), Epoch(0)).unwrap();
        assert!(tx.loads.iter().all(|load| load.evicted.unwrap().layer == LayerIndex(3)));
        pool.start(&mut tx);
        pool.shield(&all.map(|expert| key(5, expert)));
        // Layer 4 is in use, layer 3 has nothing left, and a layer keeps one: of 16 slots two layers need eight, and the
        // rest is for six.
        for (expert, layer) in [(0, 2), (1, 2), (2, 2), (3, 1)] {
            let load = pool.reserve_by_turn(key(5, expert), Epoch(0)).unwrap();
            assert_eq!(load.evicted.unwrap().layer, LayerIndex(layer));
        }
        assert_eq!(pool.reserve_by_turn(key(5, 0), Epoch(0)), None, "it is on its way");
        for expert in all {
            pool.publish(&mut tx, key(4, expert));
            pool.publish_speculative(key(5, expert));
        }
        pool.finish(tx, Epoch(0));
        assert!(serve(&mut pool, 5, &all, Epoch(0)).concat().is_empty(), "nothing is left to read");
        let expected = PoolCounters {
            lookups: 24,
            misses: 20,
            adopted: 4,
            evictions: 8,
            speculative: 4,
            ..PoolCounters::default()
        };
        assert_eq!(pool.counters(), expected);
        pool.check_invariants();
    }
}
