//! What taps see and what routers then choose, for whoever fits a correction.
//!
//! A pass that records runs the tap on all of its rows and hands tap and router over, layer by layer. It computes
//! nothing else than a pass that does not.

use std::ops::Range;

use compute::backend::{Backend, BufferId, ComputeError, Op};
use units::LayerIndex;

use crate::layer;
use crate::load::LayerWeights;
use crate::network::Geometry;
use crate::streams;

/// A layer's tap and router on the rows of one pass.
#[derive(Debug, Clone, Copy)]
pub struct Tapped<'a> {
    /// The layer whose experts were guessed.
    pub layer: LayerIndex,
    /// What the tap's router saw, `[rows, hidden]`.
    pub x: &'a [f32],
    /// Its logits, `[rows, n_experts]`.
    pub guessed: &'a [f32],
    /// The router's logits when its turn came, `[rows, n_experts]`.
    pub actual: &'a [f32],
}

/// Takes what was tapped.
pub type TapSink<'a> = &'a mut dyn FnMut(Tapped<'_>);

/// Where taps of whole passes compute, and their values on the host.
pub(crate) struct Recorder {
    x: BufferId,
    logits: BufferId,
    hidden: usize,
    n_experts: usize,
    /// Of the layer that was tapped last.
    host_x: Vec<f32>,
    host_guessed: Vec<f32>,
    host_actual: Vec<f32>,
}

/// A recorder in a pass.
pub(crate) struct Recording<'a> {
    pub(crate) recorder: &'a mut Recorder,
    /// Layers whose guesses are wanted.
    pub(crate) layers: Range<u32>,
    pub(crate) sink: TapSink<'a>,
}

/// Memory that a recorder takes for passes of so many rows.
pub(crate) fn bytes(geometry: &Geometry, rows: u64) -> u64 {
    let (hidden, n_experts) = (geometry.hidden as u64, geometry.router.n_experts as u64);
    let values = (hidden + n_experts) + (hidden + 2 * n_experts);
    4 * rows * values + 2 * 4096
}

impl Recorder {
    pub(crate) fn alloc(
        backend: &mut dyn Backend,
        rows: usize,
        geometry: &Geometry,
    ) -> Result<Self, ComputeError> {
        let (hidden, n_experts) = (geometry.hidden, geometry.router.n_experts);
        Ok(Self {
            x: backend.alloc_buffer(rows, hidden)?,
            logits: backend.alloc_buffer(rows, n_experts)?,
            hidden,
            n_experts,
            host_x: vec![0.0; rows * hidden],
            host_guessed: vec![0.0; rows * n_experts],
            host_actual: vec![0.0; rows * n_experts],
        })
    }
}

impl Recording<'_> {
    /// Records the tap of the layer behind this one, if it is wanted.
    pub(crate) fn record(
        &self,
        backend: &mut dyn Backend,
        geometry: &Geometry,
        (buffers, n_rows): (&layer::Buffers, usize),
        (layer, next): (LayerIndex, &LayerWeights),
    ) {
        if !self.layers.contains(&(layer.0 + 1)) {
            return;
        }
        let Recorder { x, logits, .. } = *self.recorder;
        let tapped = layer::Buffers { x, ..*buffers };
        streams::record_input(backend, geometry, &tapped, &next.experts_input, 0..n_rows);
        backend.record(Op::MatMul { weight: next.router, x, out: logits, rows: 0..n_rows });
    }

    /// A layer's router has chosen: hands its logits over with what was tapped for it, and takes what was tapped for the
    /// next.
    pub(crate) fn chosen(
        &mut self,
        backend: &mut dyn Backend,
        layer: LayerIndex,
        actual: BufferId,
        n_rows: usize,
    ) {
        let Recorder { x, logits, hidden, n_experts, host_x, host_guessed, host_actual } =
            &mut *self.recorder;
        let (hidden, n_experts) = (*hidden, *n_experts);
        let mut read = |buffer, host: &mut [f32], width| {
            for (row, out) in host[..n_rows * width].chunks_exact_mut(width).enumerate() {
                backend.read_back(buffer, row, out);
            }
        };
        if self.layers.contains(&layer.0) {
            read(actual, host_actual, n_experts);
            (self.sink)(Tapped {
                layer,
                x: &host_x[..n_rows * hidden],
                guessed: &host_guessed[..n_rows * n_experts],
                actual: &host_actual[..n_rows * n_experts],
            });
        }
        if self.layers.contains(&(layer.0 + 1)) {
            read(*x, host_x, hidden);
            read(*logits, host_guessed, n_experts);
        }
    }
}
