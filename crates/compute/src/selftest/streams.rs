//! Parallel streams, and a convolution of their own.

use super::{Bench, Outcome, rows_of};
use crate::backend::{Backend, Columns, ConvShape, ConvState, Op, Role, SequenceId, SequenceShape};

const STREAMS: usize = 4;
const HIDDEN: usize = 300;

/// A stream repeated, normed, gated, mixed and injected into, as a hyper-connection does.
pub(super) fn streams(backend: &mut dyn Backend) -> Outcome {
    let (rows, wide) = (7, STREAMS * HIDDEN);
    let mut bench = Bench { backend, seed: 500 };
    bench.backend.begin_pass(&rows_of(0..rows as u32, SequenceId(0), Role::Prompt));
    let x = bench.input(rows, HIDDEN)?;
    let gates = bench.input(rows, wide)?;
    let weight = bench.vector(wide, 0.3, 1.0)?;
    let mut buffer = |width| bench.backend.alloc_buffer(rows, width);
    let (h, n, value) = (buffer(wide)?, buffer(wide)?, buffer(wide)?);
    let (mixed, logits) = (buffer(HIDDEN)?, buffer(STREAMS)?);
    bench.upload(logits, rows, STREAMS);
    bench.backend.record(Op::Repeat { x, out: h });
    bench.backend.record(Op::Add { x: gates, to: h });
    let columns = Columns { from: 2, to: HIDDEN + 7, width: HIDDEN - 40 };
    bench.backend.record(Op::Copy { x, out: h, columns, rows: 0..rows });
    let (groups, eps) = (STREAMS, 1e-6);
    bench.backend.record(Op::GroupNorm { x: h, weight, groups, eps, out: n, rows: 0..rows });
    bench.backend.record(Op::GatedValue { k: n, q: gates, v: x, out: value });
    bench.backend.record(Op::Add { x: value, to: h });
    bench.backend.record(Op::ScaledSilu { x: gates, scale: 0.25, rows: 1..rows });
    bench.backend.record(Op::StreamMix { mix: gates, n, out: mixed, rows: 0..rows });
    bench.backend.record(Op::Inject { logits, y: mixed, to: h });
    let mut out = bench.read(h, rows, wide);
    out.extend(bench.read(mixed, rows, HIDDEN));
    Ok(out)
}

/// Two of them, in passes shorter and longer than their state.
pub(super) fn dilated_conv(backend: &mut dyn Backend) -> Outcome {
    let shape = ConvShape { count: 2, channels: 150, taps: 4, dilation: 3 };
    let mut bench = Bench { backend, seed: 600 };
    let sequence = bench.backend.open_sequence(SequenceShape {
        context_tokens: 0,
        kv_layers: 0,
        kv_heads: 0,
        head_dim: 0,
        recurrent: None,
        extra_conv: Some(shape),
        index: None,
    })?;
    let channels = shape.channels;
    let weights = [(); 2].map(|()| bench.vector(channels * shape.taps, 0.5, 0.0));
    let (x, out) =
        (bench.backend.alloc_buffer(20, channels)?, bench.backend.alloc_buffer(20, channels)?);
    let mut all = Vec::new();
    for range in [0..20_u32, 20..22, 22..35] {
        let rows = range.len();
        bench.backend.begin_pass(&rows_of(range, sequence, Role::Generated));
        for (i, weight) in weights.iter().enumerate() {
            bench.upload(x, rows, channels);
            let (state, weight) = (ConvState::Extra(i), weight.clone()?);
            bench.backend.record(Op::ShortConv { state, x, weight, out });
            all.extend(bench.read(out, rows, channels));
        }
        bench.backend.submit();
    }
    Ok(all)
}
