//! One layer, start to end. This file only sequences: each block has its own file.

use compute::backend::{Backend, BufferId, Op, RopeId, RouterHandle};
use units::LayerIndex;

use crate::attention;
use crate::delta_net;
use crate::experts::ExpertStream;
use crate::load::{LayerWeights, MixerWeights};
use crate::moe;
use crate::network::{ForwardError, Geometry};
use crate::routes::RouteLog;

/// Activation buffers, all `[max_rows, …]`. Layers share them.
pub(crate) struct Buffers {
    /// The residual stream, `[hidden]`.
    pub(crate) h: BufferId,
    /// A block's normalised input, `[hidden]`.
    pub(crate) x: BufferId,
    /// A block's output, `[hidden]`.
    pub(crate) y: BufferId,
    pub(crate) attention: Option<attention::Buffers>,
    pub(crate) delta_net: Option<delta_net::Buffers>,
    pub(crate) moe: moe::Buffers,
    pub(crate) router: RouterHandle,
}

/// What all layers of a pass share.
pub(crate) struct Pass<'a> {
    pub(crate) backend: &'a mut dyn Backend,
    pub(crate) experts: &'a mut ExpertStream,
    pub(crate) geometry: &'a Geometry,
    pub(crate) buffers: &'a Buffers,
    pub(crate) rope: RopeId,
    pub(crate) n_rows: usize,
    pub(crate) routes: Option<&'a mut RouteLog>,
}

impl Pass<'_> {
    /// `h += mixer(norm(h)); h += experts(norm(h))`.
    pub(crate) fn layer(
        &mut self,
        layer: LayerIndex,
        state: usize,
        weights: &LayerWeights,
    ) -> Result<(), ForwardError> {
        let Buffers { h, x, y, .. } = *self.buffers;
        let eps = self.geometry.rms_eps;
        let rows = 0..self.n_rows;
        self.backend.record(Op::RmsNorm {
            x: h,
            weight: weights.pre_norm,
            eps,
            out: x,
            rows: rows.clone(),
        });
        match &weights.mixer {
            MixerWeights::Attention(weights) => attention::record(self, state, weights),
            MixerWeights::DeltaNet(weights) => delta_net::record(self, state, weights),
        }
        self.backend.record(Op::Add { x: y, to: h });
        self.backend.record(Op::RmsNorm { x: h, weight: weights.post_norm, eps, out: x, rows });
        moe::run(self, layer, weights)
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
