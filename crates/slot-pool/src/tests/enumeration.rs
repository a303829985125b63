//! Every state that small pools can reach.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::world::{Action, World};
use super::{PLAIN, POLICIES, pool};
use crate::{PolicyKind, PoolCounters};

/// Two equal prints of different states would only prune the search; at 64 bits that does not happen here.
fn fingerprint(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// All calls with epochs 0 and 1.
fn actions(n_layers: u32, n_experts: u32, n_txs: usize) -> Vec<Action> {
    let mut actions = vec![Action::Start];
    for layer in 0..n_layers {
        for set in 1..1 << n_experts {
            for epoch in [0, 1] {
                actions.push(Action::Begin { layer, set, completed: epoch });
            }
        }
        for expert in 0..n_experts {
            actions.push(Action::Touch { layer, set: 1 << expert, until: 1 });
            for by_turn in [false, true] {
                actions.push(Action::Reserve { layer, expert, completed: 0, by_turn });
            }
            actions.push(Action::Arrive { layer, expert });
            actions.push(Action::Cancel { layer, expert });
        }
        actions.push(Action::Shield { layer, expert: 0 });
    }
    for tx in 0..n_txs {
        for nth in 0..n_experts as usize {
            actions.push(Action::Publish { tx, nth });
        }
        for until in [0, 1] {
            actions.push(Action::Finish { tx, until });
            actions.push(Action::Abort { tx, until });
        }
    }
    actions
}

/// Follows all sequences of at most `depth` calls; how many states there are, and whether that is all of them.
fn explore(start: World, actions: &[Action], depth: usize) -> (usize, bool) {
    let mut seen = BTreeSet::from([fingerprint(&start)]);
    let mut frontier = VecDeque::from([(start, 0)]);
    let mut complete = true;
    while let Some((world, steps)) = frontier.pop_front() {
        if steps == depth {
            complete = false;
            continue;
        }
        for action in actions {
            let mut next = world.clone();
            if !next.apply(*action) {
                continue;
            }
            next.pool.counters = PoolCounters::default();
            if seen.insert(fingerprint(&next)) {
                frontier.push_back((next, steps + 1));
            }
        }
    }
    (seen.len(), complete)
}

fn check(
    policies: &[PolicyKind],
    n_layers: u32,
    n_experts: u32,
    slots: u32,
    n_txs: usize,
    depth: usize,
) -> Vec<(usize, bool)> {
    let explore = |policy: &PolicyKind| {
        let start = World::new(pool(n_layers, n_experts, slots, *policy), n_txs);
        explore(start, &actions(n_layers, n_experts, n_txs), depth)
    };
    policies.iter().map(explore).collect()
}

#[test]
fn every_state_of_two_slots_keeps_every_promise() {
    for (states, complete) in check(&PLAIN, 2, 2, 2, 1, usize::MAX) {
        assert!(complete && states > 1_000, "{states} states");
    }
}

#[test]
fn every_sequence_of_calls_with_two_open_transactions_keeps_every_promise() {
    for (states, _) in check(&PLAIN, 1, 3, 3, 2, 8) {
        assert!(states > 50_000, "{states} states");
    }
}

#[test]
fn every_sequence_of_calls_on_three_slots_keeps_every_promise() {
    for (states, _) in check(&PLAIN, 2, 3, 3, 1, 7) {
        assert!(states > 50_000, "{states} states");
    }
}

#[test]
fn every_short_sequence_of_calls_keeps_every_promise_under_every_policy() {
    for (states, _) in check(&POLICIES, 2, 3, 3, 1, 5) {
        assert!(states > 5_000, "{states} states");
    }
}
