//! A pool, open transactions, and the checks that every single step must pass.

use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use super::experts_of;
use crate::pool::{Reader, Slot};
use crate::transaction::Phase;
use crate::{PoolError, SlotPool, Transaction};

/// One call. Selections are bit sets.
#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    Begin {
        layer: u32,
        set: u32,
        completed: u64,
    },
    Start,
    /// The `nth` outstanding read of a transaction ends.
    Publish {
        tx: usize,
        nth: usize,
    },
    Finish {
        tx: usize,
        until: u64,
    },
    Abort {
        tx: usize,
        until: u64,
    },
    Touch {
        layer: u32,
        set: u32,
        until: u64,
    },
    Reserve {
        layer: u32,
        expert: u32,
        completed: u64,
        by_turn: bool,
    },
    Preload {
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
    Shield {
        layer: u32,
        expert: u32,
    },
}

/// A transaction that may be dropped, and the pool as it was before it began.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Held {
    tx: Transaction,
    before: Option<Box<SlotPool>>,
}

impl Held {
    /// The transaction itself, for the pool.
    fn take(mut self) -> Transaction {
        let tx = self.tx.clone();
        self.tx.phase = Phase::Ended;
        tx
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.tx.phase = Phase::Ended;
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) pool: SlotPool,
    txs: Vec<Held>,
    max_txs: usize,
}

impl World {
    pub(super) fn new(pool: SlotPool, max_txs: usize) -> Self {
        Self { pool, txs: Vec::new(), max_txs }
    }

    /// Does it, if a caller that keeps the rules may do it now; whether it did.
    pub(super) fn apply(&mut self, action: Action) -> bool {
        let open = self.pool.reserving;
        let done = match action {
            Action::Start if open => self.start(),
            Action::Abort { tx, until } if tx < self.txs.len() => self.abort(tx, Epoch(until)),
            _ if open => false,
            Action::Begin { layer, set, completed } if self.txs.len() < self.max_txs => {
                self.begin(LayerIndex(layer), &experts_of(set), Epoch(completed))
            }
            Action::Publish { tx, nth } if tx < self.txs.len() => self.publish(tx, nth),
            Action::Finish { tx, until } if tx < self.txs.len() => self.finish(tx, Epoch(until)),
            Action::Touch { layer, set, until } => {
                self.touch(LayerIndex(layer), &experts_of(set), Epoch(until))
            }
            Action::Reserve { layer, expert, completed, by_turn } => {
                self.reserve(ExpertKey::new(layer, expert), Epoch(completed), by_turn)
            }
            Action::Preload { layer, expert } => self.preload(ExpertKey::new(layer, expert)),
            Action::Arrive { layer, expert } => {
                self.end_forecast(ExpertKey::new(layer, expert), SlotPool::publish_speculative)
            }
            Action::Cancel { layer, expert } => {
                self.end_forecast(ExpertKey::new(layer, expert), SlotPool::cancel_speculative)
            }
            Action::Shield { layer, expert } => {
                self.pool.shield(&[ExpertKey::new(layer, expert)]);
                true
            }
            _ => false,
        };
        self.pool.check_invariants();
        self.check_leases();
        done
    }

    fn begin(&mut self, layer: LayerIndex, selection: &[ExpertIndex], completed: Epoch) -> bool {
        let before = self.pool.clone();
        match self.pool.begin(layer, selection, completed) {
            Err(error) => {
                assert_eq!(self.pool, before, "a refusal changes nothing");
                check_refusal(&before, error, selection);
            }
            Ok(tx) => {
                check_reservation(&before, &self.pool, &tx, selection, completed);
                self.txs.push(Held { tx, before: Some(Box::new(before)) });
            }
        }
        true
    }

    fn start(&mut self) -> bool {
        let held = self.txs.last_mut().expect("an open reservation is the last transaction");
        held.before = None;
        let counters = self.pool.counters;
        self.pool.start(&mut held.tx);
        let counted = self.pool.counters.minus(&counters);
        let tx = &held.tx;
        assert_eq!(counted.misses, tx.loads.len() as u64);
        let found = (tx.hits.len() + tx.adopted.len()) as u64;
        assert_eq!(counted.hits + counted.adopted, found, "all that was found is a hit or adopted");
        assert!(counted.adopted >= tx.adopted.len() as u64, "an adopted read is never a hit");
        assert_eq!(counted.lookups, found + (tx.loads.len() + tx.deferred.len()) as u64);
        true
    }

    fn publish(&mut self, tx: usize, nth: usize) -> bool {
        let tx = &mut self.txs[tx].tx;
        let mut reading = tx.awaited().filter(|(_, slot)| !ready(&self.pool, *slot));
        let Some((key, slot)) = reading.nth(nth) else { return false };
        drop(reading);
        self.pool.publish(tx, key);
        assert_eq!(self.pool.lookup(key), Some(slot));
        true
    }

    fn finish(&mut self, tx: usize, until: Epoch) -> bool {
        if self.txs[tx].tx.awaiting > 0 {
            return false;
        }
        let tx = self.txs.remove(tx).take();
        self.pool.finish(tx, until);
        true
    }

    fn abort(&mut self, tx: usize, until: Epoch) -> bool {
        let reserved = self.txs[tx].tx.phase == Phase::Reserved;
        if self.pool.reserving && !reserved {
            return false;
        }
        let mut held = self.txs.remove(tx);
        let before = held.before.take();
        let tx = held.take();
        let arrived: Vec<_> =
            tx.awaited().map(|(key, slot)| (key, !reserved && ready(&self.pool, slot))).collect();
        self.pool.abort_until(tx, until);
        if let Some(before) = before {
            assert_eq!(self.pool, *before, "an abort before the start leaves no trace");
        } else {
            for (key, arrived) in arrived {
                assert_eq!(self.pool.index[self.pool.at(key)].is_some(), arrived, "{key}");
            }
        }
        true
    }

    fn touch(&mut self, layer: LayerIndex, selection: &[ExpertIndex], until: Epoch) -> bool {
        let keys = selection.iter().map(|expert| ExpertKey { layer, expert: *expert });
        let resident = keys.into_iter().all(|key| self.pool.lookup(key).is_some());
        if resident {
            self.pool.touch(layer, selection, until);
        }
        resident
    }

    fn reserve(&mut self, key: ExpertKey, completed: Epoch, by_turn: bool) -> bool {
        let before = self.pool.clone();
        let reserve = if by_turn { SlotPool::reserve_by_turn } else { SlotPool::reserve };
        let Some(load) = reserve(&mut self.pool, key, completed) else {
            assert_eq!(self.pool, before, "a refusal changes nothing");
            return true;
        };
        assert!(before.index[before.at(key)].is_none(), "what is there is not read again");
        match (load.evicted, before.slots[load.slot.get()]) {
            (None, Slot::Free) => {}
            (Some(evicted), Slot::Ready { stay, pins: 0 }) => {
                assert!(stay.key == evicted && stay.used_until <= completed);
                assert!(!before.shields.contains(before.at(evicted)), "a guess evicts no other");
            }
            other => panic!("a forecast took {other:?}"),
        }
        true
    }

    fn preload(&mut self, key: ExpertKey) -> bool {
        let before = self.pool.clone();
        let Some(load) = self.pool.preload(key) else {
            assert_eq!(self.pool, before, "a refusal changes nothing");
            return true;
        };
        assert!(before.index[before.at(key)].is_none(), "what is there is not read again");
        assert_eq!(before.slots[load.slot.get()], Slot::Free, "no expert goes in idle time");
        true
    }

    fn end_forecast(&mut self, key: ExpertKey, end: fn(&mut SlotPool, ExpertKey)) -> bool {
        let slot = self.pool.index[self.pool.at(key)];
        let reading = slot.is_some_and(|slot| reader(&self.pool, slot) == Some(Reader::Forecast));
        if reading {
            end(&mut self.pool, key);
        }
        reading
    }

    /// Every lease is on a ready slot that holds its expert, and no slot has other pins.
    fn check_leases(&self) {
        let mut pins = vec![0; self.pool.slots.len()];
        for held in &self.txs {
            for (key, slot) in held.tx.hits.iter().copied() {
                assert_eq!(self.pool.lookup(key), Some(slot), "a lease outlives everything");
                pins[slot.get()] += 1;
            }
            for (key, slot) in held.tx.awaited() {
                let found = self.pool.index[self.pool.at(key)];
                assert_eq!(found, Some(slot), "what a transaction awaits stays in its slot");
                pins[slot.get()] += u32::from(ready(&self.pool, slot));
            }
        }
        for (slot, expected) in self.pool.slots.iter().zip(pins) {
            let found = if let Slot::Ready { pins, .. } = slot { *pins } else { 0 };
            assert_eq!(found, expected, "pins are the leases of open transactions");
        }
    }
}

fn ready(pool: &SlotPool, slot: SlotIndex) -> bool {
    matches!(pool.slots[slot.get()], Slot::Ready { .. })
}

fn reader(pool: &SlotPool, slot: SlotIndex) -> Option<Reader> {
    match pool.slots[slot.get()] {
        Slot::Reading { reader, .. } => Some(reader),
        _ => None,
    }
}

/// Whether the slot could be given away, and whether it is shielded.
fn candidate(pool: &SlotPool, slot: u32, completed: Epoch) -> Option<bool> {
    match pool.slots[slot as usize] {
        Slot::Ready { stay, pins: 0 } if stay.used_until <= completed => {
            Some(pool.shields.contains(pool.at(stay.key)))
        }
        _ => None,
    }
}

fn check_reservation(
    before: &SlotPool,
    after: &SlotPool,
    tx: &Transaction,
    selection: &[ExpertIndex],
    completed: Epoch,
) {
    let layer = tx.layer;
    let mut named: Vec<_> = tx.hits.iter().map(|(key, _)| key.expert).collect();
    named.extend(tx.awaited().map(|(key, _)| key.expert));
    named.extend(&tx.deferred);
    named.sort_unstable();
    assert_eq!(named, selection, "every expert is served or deferred, once");
    let slot_before = |key: ExpertKey| before.index[before.at(key)];
    for expert in selection {
        let key = ExpertKey { layer, expert: *expert };
        let hit =
            tx.hits.iter().any(|(hit, slot)| *hit == key && before.lookup(key) == Some(*slot));
        assert_eq!(hit, before.lookup(key).is_some(), "hits are what was ready");
        let forecast = slot_before(key).filter(|s| reader(before, *s) == Some(Reader::Forecast));
        let adopted = tx.adopted.iter().find(|(k, _)| *k == key).map(|(_, slot)| *slot);
        assert_eq!(adopted, forecast, "adopted is what a forecast was reading");
    }
    for load in &tx.loads {
        assert_eq!(slot_before(load.key), None, "what is there is not read again");
        match (load.evicted, before.slots[load.slot.get()]) {
            (None, Slot::Free) => {}
            (Some(evicted), Slot::Ready { stay, pins: 0 }) => {
                assert!(stay.key == evicted && stay.used_until <= completed);
                let selected = evicted.layer == layer && selection.contains(&evicted.expert);
                assert!(!selected, "a victim is outside of the selection");
            }
            other => panic!("a transaction took {other:?}"),
        }
    }
    let class = after.class(layer).slots.clone();
    let left: Vec<bool> = class.filter_map(|slot| candidate(after, slot, completed)).collect();
    let shielded = |key: ExpertKey| before.shields.contains(before.at(key));
    if tx.loads.iter().filter_map(|load| load.evicted).any(shielded) {
        assert!(left.iter().all(|shielded| *shielded), "a shielded expert goes last");
    }
    for expert in &tx.deferred {
        let elsewhere = slot_before(ExpertKey { layer, expert: *expert }).is_some();
        let full = left.is_empty() && after.class(layer).free.is_empty();
        assert!(elsewhere || full, "as many as fit are served");
    }
}

/// A refusal says what would help.
fn check_refusal(before: &SlotPool, error: PoolError, selection: &[ExpertIndex]) {
    let mut pool = before.clone();
    match error {
        PoolError::Busy { layer, until } => {
            let earlier = Epoch(until.0 - 1);
            assert!(pool.begin(layer, selection, earlier).is_err(), "not before that epoch");
            let tx = pool.begin(layer, selection, until).expect("from that epoch on");
            pool.abort(tx);
        }
        PoolError::TooSmall { layer, slots, reading } => {
            let class = before.class(layer).slots.clone();
            assert_eq!(class.len(), slots as usize);
            assert!(class.clone().all(|slot| match before.slots[slot as usize] {
                Slot::Ready { pins, .. } => pins > 0,
                Slot::Reading { .. } => true,
                Slot::Free => false,
            }));
            let read = class.filter(|slot| !ready(before, SlotIndex(*slot))).count();
            assert_eq!(read, reading as usize);
        }
        PoolError::InFlight { key } => {
            let slot = before.index[before.at(key)].expect("it is on its way");
            assert!(matches!(reader(before, slot), Some(Reader::Transaction(_))));
        }
        PoolError::Spec { .. } => panic!("the specification was accepted"),
    }
}
