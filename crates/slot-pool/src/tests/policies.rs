//! What sets the policies apart.

use super::*;

/// A pool of one layer that has served these selections, one after the other.
fn served(slots: u32, policy: PolicyKind, selections: &[&[u32]]) -> SlotPool {
    let mut pool = pool(1, 64, slots, policy);
    for selection in selections {
        serve(&mut pool, 0, selection, Epoch(0));
    }
    pool
}

/// Which of these are there.
fn there(pool: &SlotPool, ids: &[u32]) -> Vec<u32> {
    ids.iter().copied().filter(|id| pool.lookup(key(0, *id)).is_some()).collect()
}

/// One after the other, each once.
fn scan(pool: &mut SlotPool, ids: std::ops::Range<u32>) {
    for id in ids {
        serve(pool, 0, &[id], Epoch(0));
    }
}

#[test]
fn what_is_used_again_and_again_outlives_a_scan_unless_only_recency_counts() {
    let often: &[u32] = &[0, 1, 2];
    for (policy, outlives) in [
        (PolicyKind::Lru, false),
        (PolicyKind::PerLayer, false),
        (PolicyKind::Segmented, true),
        (PolicyKind::Frequency, true),
        (PolicyKind::S3Fifo, true),
        (PolicyKind::Arc, true),
    ] {
        let mut pool = served(10, policy, &[often, often, often, often]);
        scan(&mut pool, 20..32);
        assert_eq!(there(&pool, often).len() == often.len(), outlives, "{policy:?}");
    }
}

#[test]
fn old_uses_are_forgotten() {
    for policy in [PolicyKind::Frequency, PolicyKind::S3Fifo] {
        let mut pool = served(4, policy, &[&[0], &[0], &[0], &[0], &[0]]);
        for round in 0..20 {
            serve(&mut pool, 0, &[1 + round % 5, 2 + round % 5], Epoch(0));
        }
        assert_eq!(there(&pool, &[0]), [0; 0], "{policy:?}");
    }
}

#[test]
fn uses_of_an_earlier_stay_count() {
    let mut pool = served(2, PolicyKind::Frequency, &[&[0], &[0], &[0], &[1], &[1], &[1]]);
    // Both leave for a selection that needs all slots, and 0 comes back.
    serve(&mut pool, 0, &[2, 3], Epoch(0));
    serve(&mut pool, 0, &[0], Epoch(0));
    serve(&mut pool, 0, &[4], Epoch(0));
    assert_eq!(there(&pool, &[0, 2, 3]), [0]);
}

#[test]
fn who_comes_back_soon_goes_to_the_main_queue() {
    // A small queue of one slot. 0 leaves it unused, comes back, and outlives what is new.
    let mut pool = served(10, PolicyKind::S3Fifo, &[]);
    scan(&mut pool, 0..11);
    assert_eq!(there(&pool, &[0]), [0; 0]);
    serve(&mut pool, 0, &[0], Epoch(0));
    scan(&mut pool, 20..40);
    assert_eq!(there(&pool, &[0]), [0]);
}

#[test]
fn whoever_comes_back_gets_more_room_for_its_kind() {
    // 0 and 1 were used again; what is new fills the rest and pushes itself out.
    let mut pool = served(4, PolicyKind::Arc, &[&[0, 1], &[0, 1], &[2], &[3], &[4]]);
    assert_eq!(there(&pool, &[0, 1, 2, 3, 4]), [0, 1, 3, 4]);
    // 2 comes back: what is used once should have had more room, so now a veteran leaves before the last newcomer.
    serve(&mut pool, 0, &[2], Epoch(0));
    serve(&mut pool, 0, &[5], Epoch(0));
    assert_eq!(there(&pool, &[0]), [0; 0]);
    assert_eq!(there(&pool, &[2, 5]), [2, 5]);
}

#[test]
fn every_layer_keeps_its_share() {
    let mut pool = pool(2, 16, 8, PolicyKind::PerLayer);
    serve(&mut pool, 0, &[0], Epoch(0));
    for expert in 0..8 {
        serve(&mut pool, 1, &[expert], Epoch(0));
    }
    // Layer 1 had taken what was free; layer 0 gets back what it is short of.
    for expert in 1..4 {
        serve(&mut pool, 0, &[expert], Epoch(0));
    }
    for expert in 8..16 {
        serve(&mut pool, 1, &[expert], Epoch(0));
    }
    let of = |layer| (0..16).filter(|e| pool.lookup(key(layer, *e)).is_some()).collect::<Vec<_>>();
    assert_eq!((of(0), of(1)), (vec![0, 1, 2, 3], vec![12, 13, 14, 15]));
}
