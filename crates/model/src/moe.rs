//! The mixture-of-experts block: router, routed experts as their bytes come, shared expert, sum in rank order.
//!
//! The order is the point. The router's choices are the layer's one wait. Then all misses are put in flight, and
//! only then does anything compute: the shared expert and the experts that are resident first, each arriving
//! expert as soon as it lands.

use compute::backend::{Backend, BufferId, ComputeError, Moe, Op, SharedOutput};
use units::LayerIndex;

use crate::layer::Pass;
use crate::load::{InputWeights, LayerWeights, SharedWeights};
use crate::network::{ForwardError, Geometry};

#[derive(Clone, Copy)]
pub(crate) struct Buffers {
    logits: BufferId,
    shared: Option<SharedBuffers>,
}

#[derive(Clone, Copy)]
struct SharedBuffers {
    gate: BufferId,
    up: BufferId,
    output: SharedOutput,
}

impl Buffers {
    pub(crate) fn alloc(
        backend: &mut dyn Backend,
        rows: usize,
        geometry: &Geometry,
    ) -> Result<Self, ComputeError> {
        let shared = match geometry.shared_width {
            Some(width) => Some(SharedBuffers {
                gate: backend.alloc_buffer(rows, width)?,
                up: backend.alloc_buffer(rows, width)?,
                output: SharedOutput {
                    y: backend.alloc_buffer(rows, geometry.hidden)?,
                    gate_logit: backend.alloc_buffer(rows, 1)?,
                },
            }),
            None => None,
        };
        Ok(Self { logits: backend.alloc_buffer(rows, geometry.router.n_experts)?, shared })
    }
}

/// `Σ w·expert(x) + sigmoid(g)·shared(x)`, added to the residual where that is one stream, else to `y`.
pub(crate) fn run(
    pass: &mut Pass<'_>,
    layer: LayerIndex,
    weights: &LayerWeights,
) -> Result<(), ForwardError> {
    let (x, router) = (pass.buffers.x, pass.buffers.router);
    let Buffers { logits, shared } = pass.buffers.moe;
    pass.mat_mul(weights.router, x, logits);
    pass.backend.record(Op::Route { logits, router, normalize: pass.geometry.norm_topk });
    pass.experts.collect(pass.backend);
    let found = pass.backend.moe(layer, x, router)?;
    if let Some(log) = &mut pass.routes {
        log.push(layer, pass.backend.routes(router));
    }
    pass.experts.select(layer, pass.backend.routes(router));
    pass.tell(layer, logits);
    let guessed = pass.guess(layer);
    let swept = pass.next_swept(layer);
    // What is resident is pinned before a guess may evict.
    let mut first = match found {
        Moe::AllResident if !guessed && swept.is_none() => None,
        Moe::AllResident | Moe::Missing => pass.experts.fetch(pass.backend, layer)?,
    };
    if guessed {
        pass.look_ahead();
    }
    if let Some(next) = swept {
        pass.experts.sweep(pass.backend, next);
    }
    if let (Some(buffers), Some(weights)) = (shared, &weights.shared) {
        record_shared(pass, buffers, weights);
    }
    let epoch = pass.backend.submit();
    if first.is_none() {
        pass.experts.touch(layer, epoch);
    }
    while let Some(wave) = first.take() {
        first = pass.experts.drain(pass.backend, wave, x, router)?;
    }
    let shared = shared.map(|s| s.output);
    let (to, set) = match &weights.experts_input {
        InputWeights::Norm(_) => (pass.buffers.h, false),
        InputWeights::Streams(_) => (pass.buffers.y, true),
    };
    pass.backend.record(Op::Combine { router, shared, to, set });
    Ok(())
}

fn record_shared(pass: &mut Pass<'_>, buffers: SharedBuffers, weights: &SharedWeights) {
    let SharedBuffers { gate, up, output } = buffers;
    let x = pass.buffers.x;
    pass.mat_mul(weights.gate_inp, x, output.gate_logit);
    pass.mat_mul(weights.gate, x, gate);
    pass.mat_mul(weights.up, x, up);
    pass.backend.record(Op::SiluMul { gate, up, out: gate });
    pass.mat_mul(weights.down, gate, output.y);
}
