//! Which unpinned expert leaves.

mod arc;
mod clock;
mod frequency;
mod list;
mod lru;
mod per_layer;
mod s3_fifo;
mod segmented;

use std::ops::Range;

use units::{ExpertKey, SlotIndex};

use arc::Arc;
use clock::Clock;
use frequency::Frequency;
use lru::Lru;
use per_layer::PerLayer;
use s3_fifo::S3Fifo;
use segmented::Segmented;

/// Which policy a pool runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PolicyKind {
    /// Second chance: the reference.
    Clock,
    /// Least recently used.
    Lru,
    /// Least recently used, in two segments: used once, used again.
    #[default]
    Segmented,
    /// Least often used, old uses counting for less.
    Frequency,
    /// Three queues, one of them of who has left.
    S3Fifo,
    /// Recency and frequency in a balance that it finds itself.
    Arc,
    /// Least recently used, with a share of the slots for every layer.
    PerLayer,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Clock,
        Self::Lru,
        Self::Segmented,
        Self::Frequency,
        Self::S3Fifo,
        Self::Arc,
        Self::PerLayer,
    ];
}

/// What policies are made for.
pub(crate) struct Shape<'a> {
    /// The slots of each size class.
    pub(crate) classes: &'a [Range<u32>],
    /// By layer.
    pub(crate) class_of_layer: &'a [u32],
    /// Of a layer.
    pub(crate) n_experts: usize,
    /// What a layer usually needs at once.
    pub(crate) usual_selection: usize,
}

impl Shape<'_> {
    /// Slots of all classes.
    fn slots(&self) -> usize {
        self.classes.last().map_or(0, |class| class.end) as usize
    }

    /// Layers whose experts live in a size class.
    fn layers_of(&self, class: usize) -> usize {
        self.class_of_layer.iter().filter(|of_layer| **of_layer as usize == class).count()
    }

    /// Experts of all layers.
    fn keys(&self) -> usize {
        self.class_of_layer.len() * self.n_experts
    }

    fn numbering(&self) -> Numbering {
        let classes = (0..).zip(self.classes);
        let class_of_slot =
            classes.flat_map(|(class, slots)| slots.clone().map(move |_| class)).collect();
        Numbering { class_of_slot, n_experts: self.n_experts }
    }
}

/// Slots and experts as numbers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Numbering {
    class_of_slot: Vec<u32>,
    n_experts: usize,
}

impl Numbering {
    fn class_of(&self, slot: SlotIndex) -> usize {
        self.class_of_slot[slot.get()] as usize
    }

    /// Place in `[n_layers, n_experts]`.
    fn key(&self, key: ExpertKey) -> u32 {
        (key.layer.get() * self.n_experts + key.expert.get()) as u32
    }
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

    /// Makes what was chosen final. Nothing is to be done where choosing changes nothing.
    fn commit(&mut self) {}

    /// Takes back what choosing changed.
    fn undo(&mut self) {}
}

/// The policies that a [`PolicyKind`] names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BuiltIn(Kind);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Kind {
    Clock(Clock),
    Lru(Lru),
    Segmented(Segmented),
    Frequency(Frequency),
    S3Fifo(S3Fifo),
    Arc(Arc),
    PerLayer(PerLayer),
}

impl BuiltIn {
    pub(crate) fn new(kind: PolicyKind, shape: &Shape<'_>) -> Self {
        Self(match kind {
            PolicyKind::Clock => Kind::Clock(Clock::new(shape)),
            PolicyKind::Lru => Kind::Lru(Lru::new(shape)),
            PolicyKind::Segmented => Kind::Segmented(Segmented::new(shape)),
            PolicyKind::Frequency => Kind::Frequency(Frequency::new(shape)),
            PolicyKind::S3Fifo => Kind::S3Fifo(S3Fifo::new(shape)),
            PolicyKind::Arc => Kind::Arc(Arc::new(shape)),
            PolicyKind::PerLayer => Kind::PerLayer(PerLayer::new(shape)),
        })
    }
}

/// Calls the policy that is there.
macro_rules! forward {
    ($self:ident, $policy:ident => $call:expr) => {
        match &mut $self.0 {
            Kind::Clock($policy) => $call,
            Kind::Lru($policy) => $call,
            Kind::Segmented($policy) => $call,
            Kind::Frequency($policy) => $call,
            Kind::S3Fifo($policy) => $call,
            Kind::Arc($policy) => $call,
            Kind::PerLayer($policy) => $call,
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
