//! Guesses of the next layer's experts, while a token is decoded.
//!
//! A guess moves bytes ahead of need and shields experts from eviction. It never changes what is computed. After
//! layer *l*'s attention the *tap* runs the router of *l + 1*, with that layer's own norm, on the residual as it is
//! then: what it misses are the output of *l*'s experts and the attention of *l + 1*, a part of which
//! `correction.rs` adds where that was fitted (`record.rs` shows what to). Its operations are recorded before the layer's
//! one wait, so its choices come with the router's own. The other guess is that a token needs what
//! the token before it needed in the same layer.
//!
//! How much of a guess is read: candidates of a rank that was right often enough among those that had to be read, and
//! no more of them than the disk can read while it is idle. `switch.rs` decides whether anything is guessed at all.

pub(crate) mod correction;
pub(crate) mod record;
mod switch;

use compute::backend::{Backend, BufferId, ComputeError, Op, Routed, RouterHandle};
use units::{ExpertIndex, ExpertKey, LayerIndex};

use crate::layer;
use crate::load::LayerWeights;
use crate::network::Geometry;
use crate::streams;
use correction::{Correction, Corrections};
use switch::Switch;

/// A candidate is read if its rank was right at least so often among candidates that had to be read.
const LEAST_PRECISION: f32 = 0.5;
/// What is taken for a rank's precision before it is known.
const FIRST_PRECISION: f32 = 0.75;
/// Share of a new observation in the average.
const NEW: f32 = 1.0 / 64.0;

/// How the next layer's experts are guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lookahead {
    /// Not at all.
    #[default]
    Off,
    /// By its router on the state after this layer's attention.
    Tap,
    /// They are those of the token before.
    LastToken,
}

/// Guesses since the start. The unit is one expert that one token chose in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LookaheadCounters {
    /// Tokens that were decoded with guesses.
    pub tokens: u64,
    /// Trials that guesses lost, each of which turned them off for a while.
    pub losses: u64,
    /// Experts that were chosen in layers that had been guessed.
    pub chosen: u64,
    /// Of those, named by the guess, which names as many as are chosen.
    pub named: u64,
    /// Of those chosen, also chosen by the token before in the same layer.
    pub repeated: u64,
    /// Experts named by guesses that were neither there nor on their way.
    pub absent: u64,
    /// Of those, chosen.
    pub absent_chosen: u64,
}

/// Where the tap computes, one row each.
#[derive(Clone, Copy)]
struct TapBuffers {
    x: BufferId,
    logits: BufferId,
    router: RouterHandle,
}

/// A candidate for the next layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) key: ExpertKey,
    /// Whether it was neither there nor on its way when it was named.
    pub(crate) absent: bool,
}

/// Guesses, and how good they were.
pub(crate) struct Guesser {
    kind: Lookahead,
    tap: Option<TapBuffers>,
    /// What is added to the tap's logits, if anything.
    corrections: Option<Corrections>,
    top_k: usize,
    /// `[n_layers, top_k]`: what the last token chose, in rank order.
    last: Vec<ExpertIndex>,
    /// Whether `last` holds a token.
    seen: bool,
    /// For the layer that comes next, in rank order.
    guess: Vec<Candidate>,
    /// By rank: how often candidates that had to be read were chosen.
    precision: Vec<f32>,
    switch: Switch,
    /// Whether this pass is guessed in.
    active: bool,
    /// Whether shields of an earlier pass are left.
    shielding: bool,
    counters: LookaheadCounters,
}

/// Memory that guesses take.
pub(crate) fn bytes(geometry: &Geometry, n_layers: u64, correction: Option<&Correction>) -> u64 {
    let (hidden, router) = (geometry.hidden as u64, geometry.router);
    let (top_k, n_experts) = (router.top_k as u64, router.n_experts as u64);
    // The tap's input and logits; the outputs that its router has room for, and its choices; then what is kept here.
    let pages = |values: u64| (4 * values).next_multiple_of(4096);
    let tap = pages(hidden) + pages(n_experts) + pages(top_k * hidden) + 16 * top_k;
    let kept = 4 * n_layers * top_k + (4 + size_of::<Candidate>() as u64) * top_k;
    // Reads in flight, here and in the store.
    let reads = 2 * top_k * crate::experts::FLIGHT_BYTES as u64;
    tap + kept + reads + correction.map_or(0, |fitted| correction::bytes(fitted, geometry))
}

impl Guesser {
    /// `n_layers` with experts.
    pub(crate) fn new(
        backend: &mut dyn Backend,
        geometry: &Geometry,
        n_layers: usize,
        (kind, correction): (Lookahead, Option<&Correction>),
    ) -> Result<Self, ComputeError> {
        let router = geometry.router;
        let tap = match kind {
            Lookahead::Tap => Some(TapBuffers {
                x: backend.alloc_buffer(1, geometry.hidden)?,
                logits: backend.alloc_buffer(1, router.n_experts)?,
                router: backend.alloc_router(1, router)?,
            }),
            Lookahead::Off | Lookahead::LastToken => None,
        };
        let corrections = match (&tap, correction) {
            (Some(_), Some(correction)) => Some(Corrections::place(backend, geometry, correction)?),
            _ => None,
        };
        Ok(Self {
            kind,
            tap,
            corrections,
            top_k: router.top_k,
            last: vec![ExpertIndex(0); n_layers * router.top_k],
            seen: false,
            guess: Vec::with_capacity(router.top_k),
            precision: vec![FIRST_PRECISION; router.top_k],
            switch: Switch::new(),
            active: false,
            shielding: false,
            counters: LookaheadCounters::default(),
        })
    }

    pub(crate) const fn counters(&self) -> LookaheadCounters {
        LookaheadCounters { losses: self.switch.losses(), ..self.counters }
    }

    /// Whether the tap's logits are corrected.
    pub(crate) const fn is_corrected(&self) -> bool {
        self.corrections.is_some()
    }

    /// A pass begins. It is guessed in if it is one generated row, while guesses pay.
    pub(crate) fn begin_pass(&mut self, decodes: bool) {
        self.guess.clear();
        self.shielding |= self.active;
        self.active = decodes && self.kind != Lookahead::Off && self.switch.is_on();
        self.counters.tokens += u64::from(self.active);
    }

    /// Whether this pass is guessed in.
    pub(crate) const fn is_active(&self) -> bool {
        self.active
    }

    /// Whether shields are to be set, or those of an earlier pass to be taken away.
    pub(crate) fn shields(&mut self) -> bool {
        self.active || std::mem::take(&mut self.shielding)
    }

    /// A pass has ended without an error.
    pub(crate) fn end_pass(&mut self, decodes: bool, elapsed_us: u64) {
        if decodes && self.kind != Lookahead::Off {
            self.switch.observe(elapsed_us);
        }
        self.seen = true;
    }

    /// Records the tap for a layer and its weights, if it is wanted.
    pub(crate) fn record(
        &self,
        backend: &mut dyn Backend,
        geometry: &Geometry,
        buffers: &layer::Buffers,
        (layer, next): (LayerIndex, &LayerWeights),
    ) {
        let Some(TapBuffers { x, logits, router }) = self.tap.filter(|_| self.active) else {
            return;
        };
        let tapped = layer::Buffers { x, ..*buffers };
        streams::record_input(backend, geometry, &tapped, &next.experts_input, 0..1);
        backend.record(Op::MatMul { weight: next.router, x, out: logits, rows: 0..1 });
        if let Some(corrections) = &self.corrections {
            corrections.record(backend, layer.get(), x, logits);
        }
        backend.record(Op::Route { logits, router, normalize: false });
    }

    /// What a layer chose, after its wait: judges the guess for it, and makes the one for the next.
    pub(crate) fn chosen(
        &mut self,
        backend: &dyn Backend,
        layer: LayerIndex,
        routes: &[Routed],
        is_absent: impl Fn(ExpertKey) -> bool,
    ) {
        let start = layer.get() * self.top_k;
        // A draft block is one more layer, and nothing is guessed for it.
        if self.kind == Lookahead::Off || start >= self.last.len() {
            return;
        }
        let routes = &routes[routes.len() - self.top_k..];
        if !self.guess.is_empty() {
            self.judge(layer, routes);
            self.guess.clear();
        }
        for (last, routed) in self.last[start..].iter_mut().zip(routes) {
            *last = routed.expert;
        }
        let next = start + self.top_k..start + 2 * self.top_k;
        if !self.active || next.end > self.last.len() {
            return;
        }
        let layer = LayerIndex(layer.0 + 1);
        let candidate = |expert| {
            let key = ExpertKey { layer, expert };
            Candidate { key, absent: is_absent(key) }
        };
        match self.tap {
            Some(tap) => {
                let named = backend.routes(tap.router).iter().map(|routed| routed.expert);
                self.guess.extend(named.map(candidate));
            }
            None if self.seen => {
                self.guess.extend(self.last[next].iter().copied().map(candidate));
            }
            None => {}
        }
    }

    /// All candidates for the next layer.
    pub(crate) fn guess(&self) -> &[Candidate] {
        &self.guess
    }

    /// Candidates that are worth a read, the likeliest first.
    pub(crate) fn worth_reading(&self) -> impl Iterator<Item = ExpertKey> {
        let ranks = self.guess.iter().zip(&self.precision);
        ranks
            .filter(|(candidate, precision)| candidate.absent && **precision >= LEAST_PRECISION)
            .map(|(candidate, _)| candidate.key)
    }

    fn judge(&mut self, layer: LayerIndex, routes: &[Routed]) {
        let chose = |expert: ExpertIndex| routes.iter().any(|routed| routed.expert == expert);
        for (candidate, precision) in self.guess.iter().zip(&mut self.precision) {
            let right = chose(candidate.key.expert);
            self.counters.named += u64::from(right);
            if candidate.absent {
                self.counters.absent += 1;
                self.counters.absent_chosen += u64::from(right);
                *precision += NEW * (f32::from(u8::from(right)) - *precision);
            }
        }
        self.counters.chosen += routes.len() as u64;
        if self.seen {
            let last = &self.last[layer.get() * self.top_k..][..self.top_k];
            self.counters.repeated += last.iter().filter(|expert| chose(**expert)).count() as u64;
        }
    }
}
