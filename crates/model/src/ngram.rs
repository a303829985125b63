//! Rows of the n-gram table: asked for when a pass begins, added to all residual streams at their layer.
//!
//! A token's rows follow from it and the few before it. Those are in the pass or earlier in the sequence, whose
//! tokens are kept by position: as with the KV cache, a sequence is cut by going on from a smaller one.

use checkpoint::NgramShape;
use compute::backend::{
    Backend, BufferId, ComputeError, ConvShape, ConvState, Op, Row, SequenceId,
};
use expert_store::{NgramCounters, NgramStore};

use crate::layer::{self, Pass};
use crate::load::NgramWeights;
use crate::network::verify::Inputs;
use crate::network::{ForwardError, Geometry};

/// Tokens whose rows are decoded and handed over at once.
pub(crate) const BLOCK: usize = 64;

/// The extra convolution, of which there is one.
const CONV: ConvState = ConvState::Extra(0);

/// Sizes of the block.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Values of all rows of a token.
    pub(crate) width: usize,
    /// Rows of a token.
    pub(crate) heads: usize,
    pub(crate) conv: ConvShape,
}

impl Shape {
    pub(crate) fn of(shape: &NgramShape, channels: usize) -> Self {
        Self {
            width: shape.width(),
            heads: shape.heads(),
            conv: ConvShape {
                count: 1,
                channels,
                taps: shape.conv_kernel as usize,
                dilation: shape.ngram_size as usize,
            },
        }
    }

    /// Widths of [`Buffers`].
    pub(crate) const fn widths(&self) -> [usize; 2] {
        [self.width, self.conv.channels]
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Buffers {
    /// Rows of the table, side by side.
    rows: BufferId,
    /// What is added, `[streams·hidden]`.
    sum: BufferId,
}

impl Buffers {
    pub(crate) fn alloc(
        backend: &mut dyn Backend,
        rows: usize,
        shape: &Shape,
    ) -> Result<Self, ComputeError> {
        let [values, sum] = shape.widths();
        Ok(Self {
            rows: backend.alloc_buffer(rows, values)?,
            sum: backend.alloc_buffer(rows, sum)?,
        })
    }
}

/// The table and what decides which of its rows are needed.
pub(crate) struct Ngrams {
    store: NgramStore,
    shape: NgramShape,
    /// Tokens by position.
    history: Vec<(SequenceId, Vec<u32>)>,
    /// `[rows of a pass, heads]`.
    wanted: Vec<u64>,
    /// `[BLOCK, width]`.
    values: Vec<f32>,
}

impl Ngrams {
    pub(crate) fn new(store: NgramStore, shape: NgramShape, max_rows: usize) -> Self {
        Self {
            history: Vec::new(),
            wanted: Vec::with_capacity(max_rows * shape.heads()),
            values: vec![0.0; BLOCK.min(max_rows) * shape.width()],
            store,
            shape,
        }
    }

    pub(crate) fn counters(&self) -> NgramCounters {
        self.store.counters()
    }

    /// Makes room for the tokens of a new sequence.
    pub(crate) fn open_sequence(&mut self, sequence: SequenceId, context_tokens: usize) {
        self.history.push((sequence, Vec::with_capacity(context_tokens)));
    }

    /// From here on the sequence holds these tokens.
    pub(crate) fn restore(&mut self, sequence: SequenceId, tokens: &[u32]) {
        let known = self.history.iter_mut().find(|(known, _)| *known == sequence);
        let (_, held) = known.expect("the sequence is open");
        held.clear();
        held.extend_from_slice(tokens);
    }

    /// Puts the rows of a pass in flight.
    pub(crate) fn request(&mut self, rows: &[Row]) {
        let heads = self.shape.heads();
        self.wanted.clear();
        self.wanted.resize(rows.len() * heads, 0);
        for (row, out) in rows.iter().zip(self.wanted.chunks_exact_mut(heads)) {
            let known = self.history.iter_mut().find(|(sequence, _)| *sequence == row.sequence);
            let (_, tokens) = known.expect("the sequence is open");
            let position = row.position as usize;
            assert!(position <= tokens.len(), "rows follow what their sequence holds");
            tokens.truncate(position);
            tokens.push(row.token);
            self.shape.rows(tokens, out);
        }
        self.store.request(self.wanted.iter().copied());
    }

    /// Waits for the rows of the pass and hands their values, times `scale` if there is one, to the backend.
    fn upload(
        &mut self,
        backend: &mut dyn Backend,
        (out, n_rows): (BufferId, usize),
        scale: Option<f32>,
    ) -> Result<(), ForwardError> {
        self.store.wait().map_err(|source| ForwardError::Ngram { source })?;
        let (width, row_width) = (self.shape.width(), self.shape.row_width as usize);
        let block_type = self.store.table().tensor.block_type;
        for start in (0..n_rows).step_by(BLOCK) {
            let end = n_rows.min(start + BLOCK);
            let values = &mut self.values[..(end - start) * width];
            for (token, values) in (start..end).zip(values.chunks_exact_mut(width)) {
                for (head, values) in values.chunks_exact_mut(row_width).enumerate() {
                    quant::decode_row(block_type, self.store.row(token, head), values);
                }
            }
            if let Some(scale) = scale {
                values.iter_mut().for_each(|value| *value *= scale);
            }
            backend.upload(out, start, values);
            // So that no more than a block is held twice.
            backend.submit();
        }
        Ok(())
    }
}

/// `h_s += u_s + conv(norm(u))_s` for every stream, with `u_s = gate(key_s, query_s) · value`: key and value are
/// projections of the rows, queries are the normed streams.
pub(crate) fn run(pass: &mut Pass<'_>, weights: &NgramWeights) -> Result<(), ForwardError> {
    let Geometry { rms_eps: eps, streams, .. } = *pass.geometry;
    let groups = streams.map_or(1, |shape| shape.count);
    let Buffers { rows, sum } = pass.buffers.ngram.expect("the model has an n-gram table");
    let streams = pass.buffers.streams.expect("the family has several streams");
    // Free until the mixer takes its input.
    let (a, b, value, h) = (streams.normed, streams.mix, pass.buffers.y, pass.buffers.h);
    let conv = pass.verify.map_or(a, Inputs::ngram);
    let ngrams = pass.ngrams.as_mut().expect("the model has an n-gram table");
    ngrams.upload(pass.backend, (rows, pass.n_rows), weights.scale)?;
    let n_rows = pass.n_rows;
    let norm = |x, weight, out| Op::GroupNorm { x, weight, groups, eps, out, rows: 0..n_rows };
    pass.mat_mul(weights.key, rows, a);
    pass.backend.record(norm(a, weights.key_norm, b));
    pass.backend.record(norm(h, weights.query_norm, a));
    pass.mat_mul(weights.value, rows, value);
    pass.backend.record(Op::GatedValue { k: b, q: a, v: value, out: sum });
    pass.backend.record(norm(sum, weights.conv_norm, conv));
    record_conv(pass.backend, pass.buffers, weights, conv);
    pass.backend.record(Op::Add { x: b, to: sum });
    pass.backend.record(Op::Add { x: sum, to: h });
    Ok(())
}

/// The convolution of `x` with what is remembered, into the buffer of stream mixing.
pub(crate) fn record_conv(
    backend: &mut dyn Backend,
    buffers: &layer::Buffers,
    weights: &NgramWeights,
    x: BufferId,
) {
    let streams = buffers.streams.expect("the family has several streams");
    backend.record(Op::ShortConv { state: CONV, x, weight: weights.conv, out: streams.mix });
}
