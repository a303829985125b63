//! Which unpinned expert leaves.

mod clock;
mod lru;

use std::ops::Range;

use units::{ExpertKey, SlotIndex};

use clock::Clock;
use lru::Lru;

/// Which policy a pool runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PolicyKind {
    /// Second chance: the reference.
    #[default]
    Clock,
    /// Least recently used.
    Lru,
}

/// Chooses victims; whether a slot may go at all is the pool's to know.
///
/// It is told what happens in an order that depends on selections only: an expert is inserted when its read is
/// decided, not when it ends. Keys come along so that a policy may remember experts that have left (ghost lists),
/// count uses beyond a stay, or know the future of a recorded trace.
///
/// Choosing is tentative: [`Self::victim`] may change the policy's state, [`Self::undo`] takes back all such changes
/// since the last [`Self::commit`], and no other method is called in between.
pub trait Policy {
    /// A slot that held nothing is to hold `key`.
    fn inserted(&mut self, slot: SlotIndex, key: ExpertKey);

    /// The expert in a slot was used.
    fn used(&mut self, slot: SlotIndex, key: ExpertKey);

    /// A slot lost its expert, or will not get it.
    fn removed(&mut self, slot: SlotIndex, key: ExpertKey);

    /// The slot of size class `class` to give up for `incoming`, among those that `may_go`; nothing if none may.
    fn victim(
        &mut self,
        class: usize,
        incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex>;

    /// Makes what was chosen final.
    fn commit(&mut self);

    /// Takes back what choosing changed.
    fn undo(&mut self);
}

/// The policies that a [`PolicyKind`] names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BuiltIn(Kind);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Kind {
    Clock(Clock),
    Lru(Lru),
}

impl BuiltIn {
    /// `classes`: the slots of each size class.
    pub(crate) fn new(kind: PolicyKind, classes: &[Range<u32>]) -> Self {
        Self(match kind {
            PolicyKind::Clock => Kind::Clock(Clock::new(classes)),
            PolicyKind::Lru => Kind::Lru(Lru::new(classes)),
        })
    }
}

/// Calls the policy that is there.
macro_rules! forward {
    ($self:ident, $policy:ident => $call:expr) => {
        match &mut $self.0 {
            Kind::Clock($policy) => $call,
            Kind::Lru($policy) => $call,
        }
    };
}

impl Policy for BuiltIn {
    fn inserted(&mut self, slot: SlotIndex, key: ExpertKey) {
        forward!(self, policy => policy.inserted(slot, key));
    }

    fn used(&mut self, slot: SlotIndex, key: ExpertKey) {
        forward!(self, policy => policy.used(slot, key));
    }

    fn removed(&mut self, slot: SlotIndex, key: ExpertKey) {
        forward!(self, policy => policy.removed(slot, key));
    }

    fn victim(
        &mut self,
        class: usize,
        incoming: ExpertKey,
        may_go: impl Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex> {
        forward!(self, policy => policy.victim(class, incoming, may_go))
    }

    fn commit(&mut self) {
        forward!(self, policy => policy.commit());
    }

    fn undo(&mut self) {
        forward!(self, policy => policy.undo());
    }
}

/// Slots of all classes.
fn slots_of(classes: &[Range<u32>]) -> usize {
    classes.last().map_or(0, |class| class.end) as usize
}
