//! Random plans: against a model written as plainly as possible, and step by step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex};

use super::world::{Action, World};
use super::{PLAIN, POLICIES, pool};
use crate::{PolicyKind, PoolError, SlotPool};

/// What leaves next.
enum Order {
    /// When each expert was last used.
    Lru(BTreeMap<ExpertKey, u64>),
    /// Round and round: who is next, and who was used since.
    Clock(VecDeque<(u32, Option<ExpertKey>)>, BTreeSet<ExpertKey>),
}

/// A pool without slots, transactions or indices.
struct Model {
    slots: usize,
    layers: usize,
    order: Order,
    /// Resident experts, and the epoch until which each is used.
    until: BTreeMap<ExpertKey, u64>,
    shielded: BTreeSet<ExpertKey>,
    now: u64,
}

impl Model {
    fn new(slots: u32, layers: u32, policy: PolicyKind) -> Self {
        let order = match policy {
            PolicyKind::Lru => Order::Lru(BTreeMap::new()),
            PolicyKind::Clock => {
                Order::Clock((0..slots).map(|slot| (slot, None)).collect(), BTreeSet::new())
            }
            _ => unreachable!("no model of {policy:?}"),
        };
        let (slots, layers) = (slots as usize, layers as usize);
        let (until, shielded) = (BTreeMap::new(), BTreeSet::new());
        Self { slots, layers, order, until, shielded, now: 0 }
    }

    /// One wave: every read with what leaves for it, and what has to wait.
    fn wave(
        &mut self,
        layer: u32,
        wanted: &[u32],
        completed: u64,
    ) -> (Vec<(ExpertKey, Option<ExpertKey>)>, Vec<u32>) {
        let key = |expert: &u32| ExpertKey::new(layer, *expert);
        let (hits, missing): (Vec<u32>, Vec<u32>) =
            wanted.iter().partition(|expert| self.until.contains_key(&key(expert)));
        let small = self.slots < 2 * self.layers * wanted.len();
        let hits: BTreeSet<_> = hits.iter().map(key).collect();
        let mut empty = self.slots - self.until.len();
        let mut loads: Vec<(_, Option<ExpertKey>)> = Vec::new();
        let mut deferred = Vec::new();
        for expert in missing {
            if empty > 0 {
                empty -= 1;
                loads.push((key(&expert), None));
                continue;
            }
            let gone: BTreeSet<_> = loads.iter().filter_map(|(_, out)| *out).collect();
            let until = self.until.clone();
            let may = |k: &ExpertKey| {
                !hits.contains(k)
                    && !gone.contains(k)
                    && until.get(k).is_some_and(|u| *u <= completed)
            };
            let shielded = self.shielded.clone();
            let spared = |k: &ExpertKey| may(k) && !shielded.contains(k);
            // In a small pool: the layer at hand, the one before it, and so on round the clock.
            let layers = self.layers as u32;
            let mut turns =
                (0..if small { layers } else { 0 }).map(|back| (layer + layers - back) % layers);
            let of = |turn: u32| move |k: &ExpertKey| k.layer.0 == turn;
            let victim = turns
                .find_map(|turn| self.next(&|k| of(turn)(k) && spared(k)))
                .or_else(|| self.next(&spared))
                .or_else(|| self.next(&may));
            match victim {
                Some(victim) => loads.push((key(&expert), Some(victim))),
                None => deferred.push(expert),
            }
        }
        for hit in &hits {
            self.used(*hit);
        }
        for (key, evicted) in &loads {
            self.replace(*key, *evicted);
        }
        (loads, deferred)
    }

    fn next(&mut self, may: &dyn Fn(&ExpertKey) -> bool) -> Option<ExpertKey> {
        match &mut self.order {
            Order::Lru(last) => last
                .iter()
                .filter(|(key, _)| may(key))
                .min_by_key(|(_, when)| **when)
                .map(|(k, _)| *k),
            Order::Clock(dial, used) => {
                if !dial.iter().any(|(_, key)| key.as_ref().is_some_and(may)) {
                    return None;
                }
                loop {
                    let entry = dial.pop_front().unwrap();
                    dial.push_back(entry);
                    let Some(key) = entry.1.filter(may) else { continue };
                    if !used.remove(&key) {
                        return Some(key);
                    }
                }
            }
        }
    }

    fn used(&mut self, key: ExpertKey) {
        self.now += 1;
        match &mut self.order {
            Order::Lru(last) => drop(last.insert(key, self.now)),
            Order::Clock(_, used) => drop(used.insert(key)),
        }
    }

    fn replace(&mut self, key: ExpertKey, evicted: Option<ExpertKey>) {
        if let Some(evicted) = evicted {
            self.until.remove(&evicted);
        }
        self.until.insert(key, 0);
        match &mut self.order {
            Order::Lru(last) => {
                evicted.map(|evicted| last.remove(&evicted));
            }
            Order::Clock(dial, used) => {
                evicted.map(|evicted| used.remove(&evicted));
                // An empty slot with the lowest number, or the one that was left.
                let place = dial.iter_mut().filter(|(_, held)| *held == evicted);
                place.min_by_key(|(slot, _)| *slot).unwrap().1 = Some(key);
            }
        }
        self.used(key);
    }
}

/// A pass: layer, experts, the epoch in which its work ends, experts of the next layer to shield.
type Pass = (u32, BTreeSet<u32>, u64, BTreeSet<u32>);

/// Runs a pass in both; epochs up to `now` are complete.
fn agree(pool: &mut SlotPool, model: &mut Model, (layer, set, until, shield): &Pass, mut now: u64) {
    let shield: Vec<_> = shield.iter().map(|e| ExpertKey::new((layer + 1) % 3, *e)).collect();
    pool.shield(&shield);
    model.shielded = shield.into_iter().collect();
    let mut wanted: Vec<u32> = set.iter().copied().collect();
    let mut first = true;
    while !wanted.is_empty() {
        let selection: Vec<_> = wanted.iter().copied().map(ExpertIndex).collect();
        let begin = if first { SlotPool::begin } else { SlotPool::begin_next };
        let mut tx = match begin(pool, LayerIndex(*layer), &selection, Epoch(now)) {
            Err(PoolError::Busy { until, .. }) => {
                now = until.0;
                continue;
            }
            other => other.unwrap(),
        };
        first = false;
        pool.start(&mut tx);
        let loads: Vec<_> = tx.loads.iter().map(|load| (load.key, load.evicted)).collect();
        let deferred: Vec<_> = tx.deferred.iter().map(|expert| expert.0).collect();
        assert_eq!((loads, deferred.clone()), model.wave(*layer, &wanted, now));
        // Reads end in any order; that must not matter.
        let keys: Vec<_> = tx.loads.iter().map(|load| load.key).rev().collect();
        for key in keys {
            pool.publish(&mut tx, key);
        }
        pool.finish(tx, Epoch(*until));
        for expert in wanted.iter().filter(|expert| !deferred.contains(expert)) {
            let used = model.until.get_mut(&ExpertKey::new(*layer, *expert)).unwrap();
            *used = (*used).max(*until);
        }
        pool.check_invariants();
        wanted = deferred;
    }
}

fn subset(len: usize) -> impl Strategy<Value = BTreeSet<u32>> {
    prop::collection::btree_set(0..12_u32, 0..len)
}

fn action() -> impl Strategy<Value = Action> {
    let (layer, expert, set) = (0..3_u32, 0..8_u32, 1..256_u32);
    let place = (0..2_usize, 0..8_usize, 0..3_u64);
    (0..15_u8, layer, expert, set, place).prop_map(
        |(kind, layer, expert, set, (tx, nth, epoch))| match kind {
            0..=2 => Action::Begin { layer, set, completed: epoch },
            3..=5 => Action::Start,
            6 | 7 => Action::Publish { tx, nth: nth % 3 },
            8 => Action::Finish { tx, until: epoch },
            9 => Action::Abort { tx, until: epoch },
            10 => Action::Touch { layer, set: 1 << expert, until: epoch },
            11 => Action::Reserve { layer, expert, completed: epoch, by_turn: tx == 0 },
            12 => Action::Arrive { layer, expert },
            13 => Action::Preload { layer, expert },
            _ if nth == 0 => Action::Cancel { layer, expert },
            _ => Action::Shield { layer, expert },
        },
    )
}

proptest! {
    #[test]
    fn pool_and_model_read_and_evict_the_same(
        passes in prop::collection::vec((0..3_u32, subset(7), 0..6_u64, subset(4)), 1..120),
        lag in 0..4_u64,
        slots in 1..24_u32,
    ) {
        for policy in PLAIN {
            let mut pool = pool(3, 12, slots, policy);
            let mut model = Model::new(slots, 3, policy);
            let mut misses = 0;
            for (i, pass) in passes.iter().enumerate() {
                // Work of a pass ends some passes later.
                let now = i as u64;
                let pass = (pass.0, pass.1.clone(), now + pass.2.min(lag), pass.3.clone());
                let before = pool.counters();
                agree(&mut pool, &mut model, &pass, now);
                let counted = pool.counters().minus(&before);
                prop_assert_eq!(counted.lookups, pass.1.len() as u64);
                prop_assert_eq!(counted.lookups, counted.hits + counted.misses);
                misses += counted.misses;
            }
            let resident = model.until.len() as u64;
            prop_assert_eq!(pool.counters().evictions + resident, misses);
        }
    }

    #[test]
    fn random_plans_keep_every_promise(
        plan in prop::collection::vec(action(), 1..300),
        slots in 1..14_u32,
        policy in 0..POLICIES.len(),
    ) {
        let mut world = World::new(pool(3, 8, slots, POLICIES[policy]), 2);
        for action in plan {
            world.apply(action);
        }
    }
}
