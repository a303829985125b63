//! Attention that is selected, and a convolution of its own, on inputs that the host uploads.

use std::ops::Range;

use compute::backend::{
    Backend, BufferId, ConvShape, ConvState, Heads, IndexShape, MatrixShape, Op, Role, RopeId,
    RopeSpec, Row, Selector, SequenceId, SequenceShape, WeightId,
};
use quant::BlockType;

use super::{Random, fill};

pub(crate) const CONTEXT: usize = 230;
pub(crate) const RATIO: usize = 4;
/// From position 35 on a row sees less than everything.
pub(crate) const BLOCKS: usize = 8;
pub(crate) const DIM: usize = 32;
pub(crate) const COUNT: usize = 4;
pub(crate) const KV_HEADS: usize = 2;
pub(crate) const INDEX_DIM: usize = 16;
pub(crate) const INDEX_HEADS: usize = 4;
pub(crate) const CHANNELS: usize = 40;
pub(crate) const CONV: ConvShape = ConvShape { count: 1, channels: CHANNELS, taps: 4, dilation: 3 };
pub(crate) const OUT: usize = COUNT * DIM;

pub(crate) const SHAPE: SequenceShape = SequenceShape {
    context_tokens: CONTEXT,
    kv_layers: 2,
    kv_heads: KV_HEADS,
    head_dim: DIM,
    recurrent: None,
    extra_conv: Some(CONV),
    index: Some(IndexShape { layers: 1, dim: INDEX_DIM, ratio: RATIO }),
};

pub(crate) type Bits = Vec<Vec<u32>>;

/// Queries, keys, values, index queries, index keys, channels.
pub(crate) const WIDTHS: [usize; 6] =
    [COUNT * DIM, KV_HEADS * DIM, KV_HEADS * DIM, INDEX_HEADS * INDEX_DIM, INDEX_DIM, CHANNELS];

pub(crate) struct Bed {
    pub(crate) backend: Box<dyn Backend>,
    inputs: [BufferId; 6],
    pub(crate) attended: BufferId,
    pub(crate) everything: BufferId,
    convolved: BufferId,
    norm: WeightId,
    taps: WeightId,
    rope: RopeId,
}

impl Bed {
    pub(crate) fn new(mut backend: Box<dyn Backend>) -> Self {
        let mut vector = |n: usize, seed: u64| {
            let shape = MatrixShape { n_out: 1, n_in: n, block_type: BlockType::F32 };
            let weight = backend.alloc_weight(shape).unwrap();
            let mut random = Random(seed);
            let bytes: Vec<u8> =
                (0..n).flat_map(|_| (1.0 + 0.3 * random.float()).to_le_bytes()).collect();
            fill(backend.weight_memory(weight), &bytes);
            weight
        };
        let (norm, taps) = (vector(INDEX_DIM, 1), vector(CHANNELS * CONV.taps, 2));
        let rope = backend.alloc_rope(RopeSpec { rotary_dim: 8, theta: 1e4, yarn: None });
        let mut buffer = |width| backend.alloc_buffer(2 * CONTEXT, width).unwrap();
        let inputs = WIDTHS.map(&mut buffer);
        let (attended, everything, convolved) = (buffer(OUT), buffer(OUT), buffer(CHANNELS));
        Self { backend, inputs, attended, everything, convolved, norm, taps, rope }
    }

    pub(crate) fn open(&mut self) -> SequenceId {
        self.backend.open_sequence(SHAPE).unwrap()
    }

    /// Runs a pass, given the inputs of its rows.
    pub(crate) fn forward(&mut self, rows: &[Row], inputs: &[Vec<f32>; 6]) {
        self.backend.begin_pass(rows);
        let half = rows.len() / 2;
        for ((buffer, width), values) in self.inputs.into_iter().zip(WIDTHS).zip(inputs) {
            // In two parts, the second first.
            self.backend.upload(buffer, half, &values[half * width..]);
            self.backend.upload(buffer, 0, &values[..half * width]);
        }
        let [q, k, v, index_q, index_k, x] = self.inputs;
        let heads = Heads { count: COUNT, dim: DIM, stride: DIM };
        let index_heads = Heads { count: INDEX_HEADS, dim: INDEX_DIM, stride: INDEX_DIM };
        let (k_norm, rope, eps) = (self.norm, self.rope, 1e-6);
        self.backend.record(Op::HeadNormRope {
            x: index_q,
            heads: index_heads,
            weight: k_norm,
            eps,
            rope,
        });
        self.backend.record(Op::KvAppend { layer: 1, k, v });
        self.backend.record(Op::IndexAppend { layer: 0, k: index_k, k_norm, eps, rope });
        let selector = Selector { layer: 0, q: index_q, heads: index_heads, blocks: BLOCKS };
        let (layer, gated) = (1, false);
        let out = self.attended;
        self.backend.record(Op::AttendSelected { layer, q, heads, gated, selector, out });
        self.backend.record(Op::Attend { layer, q, heads, gated, out: self.everything });
        let state = ConvState::Extra(0);
        let (weight, out) = (self.taps, self.convolved);
        self.backend.record(Op::ShortConv { state, x, weight, out });
        self.backend.submit();
    }

    /// Runs a pass; of each row the bits of what it attends to, then of its convolution.
    pub(crate) fn pass(&mut self, rows: &[Row]) -> Bits {
        self.forward(rows, &inputs(rows));
        let mut bits = |row| {
            let attended = self.bits(self.attended, OUT, row);
            [attended, self.bits(self.convolved, CHANNELS, row)].concat()
        };
        (0..rows.len()).map(&mut bits).collect()
    }

    pub(crate) fn bits(&mut self, buffer: BufferId, width: usize, row: usize) -> Vec<u32> {
        let mut values = vec![0.0; width];
        self.backend.read_back(buffer, row, &mut values);
        assert!(values.iter().all(|y| y.is_finite()), "row {row} holds numbers");
        values.iter().map(|y| y.to_bits()).collect()
    }

    pub(crate) fn passes(
        &mut self,
        sequence: SequenceId,
        text: u32,
        cuts: &[usize],
        role: Role,
    ) -> Bits {
        let rows = |range: &[usize]| rows(sequence, range[0]..range[1], role, text);
        cuts.windows(2).flat_map(|range| self.pass(&rows(range))).collect()
    }
}

/// Input `i` of a token.
pub(crate) fn input(token: u32, i: usize, width: usize) -> Vec<f32> {
    let mut random = Random(u64::from(token) << 8 | i as u64);
    (0..width).map(|_| 2.0 * random.float()).collect()
}

/// Inputs of the rows of a pass, `[rows, width]` each.
pub(crate) fn inputs(rows: &[Row]) -> [Vec<f32>; 6] {
    let all = |i: usize| rows.iter().flat_map(|row| input(row.token, i, WIDTHS[i])).collect();
    std::array::from_fn(all)
}

/// Rows of a text, whose tokens are all different.
pub(crate) fn rows(
    sequence: SequenceId,
    positions: Range<usize>,
    role: Role,
    text: u32,
) -> Vec<Row> {
    let row = |p: usize| Row { sequence, position: p as u32, role, token: text << 16 | p as u32 };
    positions.map(row).collect()
}
