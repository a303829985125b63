//! Which unpinned expert leaves.

mod clock;
mod lru;

use std::ops::Range;

use units::SlotIndex;

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

/// Chooses victims. It sees slots only; what is in them, and whether they may go, is the pool's to know.
///
/// Choosing is tentative: [`Self::victim`] may change the policy's state, [`Self::undo`] takes back everything since
/// the last [`Self::commit`].
pub trait Policy {
    /// An expert became ready in a slot.
    fn inserted(&mut self, slot: SlotIndex);

    /// The expert in a slot was used.
    fn used(&mut self, slot: SlotIndex);

    /// A slot lost its expert.
    fn removed(&mut self, slot: SlotIndex);

    /// The slot of `class` to give up next, among those that `may_go`.
    fn victim(
        &mut self,
        class: Range<u32>,
        may_go: &dyn Fn(SlotIndex) -> bool,
    ) -> Option<SlotIndex>;

    /// Makes what was chosen final.
    fn commit(&mut self);

    /// Takes back what choosing changed.
    fn undo(&mut self);
}

/// The policy of a pool, with equality and hashing for tests that enumerate states.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum AnyPolicy {
    Clock(Clock),
    Lru(Lru),
}

impl AnyPolicy {
    /// `classes`: the slots of each class.
    pub(crate) fn new(kind: PolicyKind, classes: &[Range<u32>]) -> Self {
        match kind {
            PolicyKind::Clock => Self::Clock(Clock::new(classes)),
            PolicyKind::Lru => Self::Lru(Lru::new(classes)),
        }
    }

    pub(crate) fn get(&mut self) -> &mut dyn Policy {
        match self {
            Self::Clock(policy) => policy,
            Self::Lru(policy) => policy,
        }
    }
}
