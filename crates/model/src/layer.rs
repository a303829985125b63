//! One layer, start to end. This file only sequences: each block has its own file.

use compute::backend::{Backend, BufferId, Op, RopeId, RouterHandle};
use units::LayerIndex;

use crate::attention;
use crate::delta_net;
use crate::experts::ExpertStream;
use crate::load::{InputWeights, LayerWeights, MixerWeights};
use crate::lookahead::Guesser;
use crate::lookahead::record::Recording;
use crate::moe;
use crate::network::verify::Inputs;
use crate::network::{ForwardError, Geometry};
use crate::ngram::{self, Ngrams};
use crate::routes::RouteLog;
use crate::streams;

/// Activation buffers, all `[max_rows, …]`. Layers share them.
#[derive(Clone, Copy)]
pub(crate) struct Buffers {
    /// The residual, `[streams·hidden]`.
    pub(crate) h: BufferId,
    /// A block's normalised input, `[hidden]`.
    pub(crate) x: BufferId,
    /// A block's output, `[hidden]`.
    pub(crate) y: BufferId,
    pub(crate) streams: Option<streams::Buffers>,
    pub(crate) ngram: Option<ngram::Buffers>,
    pub(crate) attention: Option<attention::Buffers>,
    pub(crate) delta_net: Option<delta_net::Buffers>,
    pub(crate) moe: moe::Buffers,
    pub(crate) router: RouterHandle,
}

/// What all layers of a pass share.
pub(crate) struct Pass<'a> {
    pub(crate) backend: &'a mut dyn Backend,
    pub(crate) experts: &'a mut ExpertStream,
    pub(crate) ngrams: Option<&'a mut Ngrams>,
    pub(crate) geometry: &'a Geometry,
    pub(crate) buffers: &'a Buffers,
    pub(crate) rope: RopeId,
    pub(crate) n_rows: usize,
    pub(crate) routes: Option<&'a mut RouteLog>,
    /// Where rows leave what recurrent updates take, if they may be taken back.
    pub(crate) verify: Option<&'a Inputs>,
    /// Layers of the trunk.
    pub(crate) n_layers: u32,
    /// Whether long passes read a layer's experts before its turn.
    pub(crate) sweep: bool,
    /// What the next layer may need; not of a draft.
    pub(crate) guesser: Option<&'a mut Guesser>,
    /// Whoever wants to see what taps see.
    pub(crate) recording: Option<Recording<'a>>,
}

impl Pass<'_> {
    /// `h += ngrams(h); h += mixer(norm(h)); h += experts(norm(h))`. `next` is the layer behind it, if any.
    pub(crate) fn layer(
        &mut self,
        layer: LayerIndex,
        state: usize,
        weights: &LayerWeights,
        next: Option<&LayerWeights>,
    ) -> Result<(), ForwardError> {
        if let Some(weights) = &weights.ngram {
            ngram::run(self, weights)?;
        }
        self.take_input(&weights.mixer_input);
        match &weights.mixer {
            MixerWeights::Attention(weights) => attention::record(self, state, weights),
            MixerWeights::DeltaNet(weights) => delta_net::record(self, state, weights),
        }
        let Buffers { h, y, .. } = *self.buffers;
        match &weights.mixer_input {
            InputWeights::Norm(_) => self.backend.record(Op::Add { x: y, to: h }),
            InputWeights::Streams(_) => streams::inject(self),
        }
        self.take_input(&weights.experts_input);
        if let (Some(guesser), Some(next)) = (&self.guesser, next) {
            let next = (LayerIndex(layer.0 + 1), next);
            guesser.record(self.backend, self.geometry, self.buffers, next);
        }
        if let (Some(recording), Some(next)) = (&self.recording, next) {
            let rows = (self.buffers, self.n_rows);
            recording.record(self.backend, self.geometry, rows, (layer, next));
        }
        moe::run(self, layer, weights)?;
        match &weights.experts_input {
            // The sum went there directly.
            InputWeights::Norm(_) => {}
            InputWeights::Streams(_) => streams::inject(self),
        }
        Ok(())
    }

    /// Takes what a layer chose and guesses what the next will, whose experts are shielded from here on. Whether there
    /// are guesses in this pass.
    pub(crate) fn guess(&mut self, layer: LayerIndex) -> bool {
        let Some(guesser) = &mut self.guesser else { return false };
        let (backend, experts) = (&*self.backend, &mut *self.experts);
        let routes = backend.routes(self.buffers.router);
        guesser.chosen(backend, layer, routes, |key| experts.is_absent(key));
        if guesser.shields() {
            experts.shield(guesser.guess().iter().map(|candidate| candidate.key));
        }
        guesser.is_active()
    }

    /// Hands over what a layer's router made of the rows, whose logits these are.
    pub(crate) fn tell(&mut self, layer: LayerIndex, logits: BufferId) {
        if let Some(recording) = &mut self.recording {
            recording.chosen(self.backend, layer, logits, self.n_rows);
        }
    }

    /// Puts reads of the guess in flight. The layer's own are, and what it uses is pinned.
    pub(crate) fn look_ahead(&mut self) {
        if let Some(guesser) = &self.guesser {
            self.experts.look_ahead(self.backend, guesser.worth_reading());
        }
    }

    /// The layer behind this one, if the pass is to read its experts ahead: nearly all are chosen when there are twice as
    /// many choices as experts.
    pub(crate) fn next_swept(&self, layer: LayerIndex) -> Option<LayerIndex> {
        let router = self.geometry.router;
        let swept = self.sweep && self.n_rows * router.top_k >= 2 * router.n_experts;
        (swept && layer.0 + 1 < self.n_layers).then(|| LayerIndex(layer.0 + 1))
    }

    /// A block's input from the residual into `x`.
    fn take_input(&mut self, weights: &InputWeights) {
        let (geometry, buffers) = (self.geometry, self.buffers);
        streams::record_input(self.backend, geometry, buffers, weights, 0..self.n_rows);
        if let InputWeights::Streams(weights) = weights {
            streams::record_logits(self, weights);
        }
    }

    /// `out = weight · x` for all rows of the pass.
    pub(crate) fn mat_mul(
        &mut self,
        weight: compute::backend::WeightId,
        x: BufferId,
        out: BufferId,
    ) {
        self.backend.record(Op::MatMul { weight, x, out, rows: 0..self.n_rows });
    }
}
