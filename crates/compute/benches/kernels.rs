//! Whole operations of the CPU backend, at the shapes of a model with 30 billion weights of which 3 are active.
#![allow(unsafe_code, reason = "weights are filled through the pointers that loaders use")]

use std::ptr::NonNull;

use compute::backend::{
    Activations, Backend, BufferId, ConvState, DeltaParams, Gate, HeadOrder, Heads, IndexShape,
    KvType, MatrixShape, Op, RecurrentShape, Role, RopeSpec, RouterShape, Row, Selector,
    SequenceId, SequenceShape, SlotClass, WeightId,
};
use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use quant::{BlockType, ExpertMatrices, SlotMatrix};
use units::{ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

const HIDDEN: usize = 2_048;
const WIDTH: usize = 768;
const N_EXPERTS: usize = 128;
const TOP_K: usize = 8;
const CONTEXT: usize = 4_096;
const RECURRENT: RecurrentShape = RecurrentShape {
    layers: 1,
    key_heads: 16,
    value_heads: 32,
    key_dim: 128,
    value_dim: 128,
    conv_kernel: 4,
    order: HeadOrder::Grouped,
};

fn main() {
    divan::main();
}

/// Kernel threads and rows of a pass.
#[derive(Debug, Clone, Copy)]
struct Load {
    threads: usize,
    rows: usize,
}

impl std::fmt::Display for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} threads, {} rows", self.threads, self.rows)
    }
}

fn loads(rows: &[usize]) -> Vec<Load> {
    let threads = [1, std::thread::available_parallelism().map_or(1, usize::from)];
    threads
        .into_iter()
        .flat_map(|threads| rows.iter().map(move |rows| Load { threads, rows: *rows }))
        .collect()
}

struct Bed {
    backend: Box<dyn Backend>,
    sequence: SequenceId,
    load: Load,
    random: u64,
}

impl Bed {
    fn new(load: Load) -> Self {
        let options = compute::Options {
            threads: load.threads,
            activations: Activations::Q8,
            kv: KvType::F16,
        };
        let mut backend = compute::cpu(options);
        let shape = SequenceShape {
            context_tokens: CONTEXT,
            kv_layers: 1,
            kv_heads: 4,
            head_dim: 128,
            recurrent: Some(RECURRENT),
            extra_conv: None,
            index: None,
        };
        let sequence = backend.open_sequence(shape).expect("memory");
        Self { backend, sequence, load, random: 1 }
    }

    /// Noise that holds neither infinities nor NaN, wherever scales are, and as f32 lies between -2 and 2.
    fn fill(&mut self, start: NonNull<u8>, n: usize) {
        for i in 0..n {
            self.random = self
                .random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // SAFETY: the backend gave `n` bytes from `start`, and nobody else uses them.
            unsafe { start.add(i).write((self.random >> 40) as u8 & 0xbf) };
        }
    }

    fn weight(&mut self, block_type: BlockType, n_out: usize, n_in: usize) -> WeightId {
        let shape = MatrixShape { n_out, n_in, block_type };
        let weight = self.backend.alloc_weight(shape).expect("memory");
        let (start, n) = self.backend.weight_memory(weight);
        self.fill(start, n);
        weight
    }

    /// A buffer, filled with noise.
    fn buffer(&mut self, width: usize) -> BufferId {
        let buffer = self.backend.alloc_buffer(self.load.rows, width).expect("memory");
        let table = self.weight(BlockType::F32, self.load.rows, width);
        self.begin(0, Role::Prompt);
        self.backend.record(Op::Embed { table, out: buffer });
        self.finish();
        buffer
    }

    fn begin(&mut self, position: usize, role: Role) {
        let row = |r: usize| Row {
            sequence: self.sequence,
            position: (position + r) as u32,
            role,
            token: r as u32,
        };
        let rows: Vec<Row> = (0..self.load.rows).map(row).collect();
        self.backend.begin_pass(&rows);
    }

    fn finish(&mut self) {
        let epoch = self.backend.submit();
        self.backend.wait(epoch);
    }
}

#[divan::bench(args = loads(&[1, 4, 64, 256]), consts = [12, 14, 8])]
fn matmul<const GGML_TYPE: u32>(bencher: Bencher<'_, '_>, load: Load) {
    let ty = BlockType::from_ggml(GGML_TYPE).expect("a type of ours");
    let mut bed = Bed::new(load);
    let weight = bed.weight(ty, HIDDEN, HIDDEN);
    let (x, out) = (bed.buffer(HIDDEN), bed.buffer(HIDDEN));
    let bytes = HIDDEN * ty.row_bytes(HIDDEN).expect("whole blocks");
    let products = HIDDEN * HIDDEN * load.rows;
    bencher.counter(BytesCount::new(bytes)).counter(ItemsCount::new(products)).bench_local(|| {
        bed.begin(0, Role::Prompt);
        bed.backend.record(Op::MatMul { weight, x, out, rows: 0..load.rows });
        bed.finish();
    });
}

/// One row times a matrix that no cache holds, as the head of a vocabulary.
#[divan::bench(args = loads(&[1]), consts = [12, 14])]
fn from_memory<const GGML_TYPE: u32>(bencher: Bencher<'_, '_>, load: Load) {
    const VOCAB: usize = 150_000;
    let ty = BlockType::from_ggml(GGML_TYPE).expect("a type of ours");
    let mut bed = Bed::new(load);
    let weight = bed.weight(ty, VOCAB, HIDDEN);
    let (x, out) = (bed.buffer(HIDDEN), bed.buffer(VOCAB));
    let bytes = VOCAB * ty.row_bytes(HIDDEN).expect("whole blocks");
    bencher.counter(BytesCount::new(bytes)).bench_local(|| {
        bed.begin(0, Role::Generated);
        bed.backend.record(Op::MatMul { weight, x, out, rows: 0..load.rows });
        bed.finish();
    });
}

#[divan::bench(args = loads(&[1, 64, 256]))]
fn experts(bencher: Bencher<'_, '_>, load: Load) {
    let mut bed = Bed::new(load);
    let layer = LayerIndex(0);
    let gate = SlotMatrix {
        place: 0,
        block_type: BlockType::Q4K,
        n_in: HIDDEN as u32,
        n_out: WIDTH as u32,
    };
    let up = SlotMatrix { place: gate.bytes() as u64, ..gate };
    let down = SlotMatrix {
        place: 2 * up.place,
        block_type: BlockType::Q6K,
        n_in: WIDTH as u32,
        n_out: HIDDEN as u32,
    };
    let bytes = down.place as usize + down.bytes();
    let stride = bytes.next_multiple_of(4_096);
    bed.backend.alloc_slots(&[SlotClass { slots: N_EXPERTS, stride }]).expect("memory");
    for e in 0..N_EXPERTS as u32 {
        let (start, n) = bed.backend.slot_memory(SlotIndex(e));
        bed.fill(start, n);
        let key = ExpertKey { layer, expert: ExpertIndex(e) };
        bed.backend.publish(key, SlotIndex(e), &ExpertMatrices { gate, up, down });
    }
    let shape =
        RouterShape { n_experts: N_EXPERTS, top_k: TOP_K, hidden: HIDDEN, expert_width: WIDTH };
    let router = bed.backend.alloc_router(load.rows, shape).expect("memory");
    let (x, logits) = (bed.buffer(HIDDEN), bed.buffer(N_EXPERTS));
    bencher
        .counter(BytesCount::new(TOP_K * bytes))
        .counter(ItemsCount::new(3 * HIDDEN * WIDTH * TOP_K * load.rows))
        .bench_local(|| {
            bed.begin(0, Role::Prompt);
            bed.backend.record(Op::Route { logits, router, normalize: true });
            bed.backend.moe(layer, x, router).expect("finite logits");
            bed.finish();
        });
}

#[divan::bench(args = loads(&[1, 64]), consts = [64, 2_048])]
fn attend<const POSITION: usize>(bencher: Bencher<'_, '_>, load: Load) {
    let mut bed = Bed::new(load);
    let heads = Heads { count: 32, dim: 128, stride: 128 };
    let (q, out) = (bed.buffer(4_096), bed.buffer(4_096));
    let (k, v) = (bed.buffer(512), bed.buffer(512));
    for position in (0..POSITION).step_by(load.rows) {
        bed.begin(position, Role::Prompt);
        bed.backend.record(Op::KvAppend { layer: 0, k, v });
        bed.finish();
    }
    bencher.counter(ItemsCount::new(2 * 4_096 * POSITION * load.rows)).bench_local(|| {
        bed.begin(POSITION, Role::Prompt);
        bed.backend.record(Op::KvAppend { layer: 0, k, v });
        bed.backend.record(Op::Attend { layer: 0, q, heads, gated: false, out });
        bed.finish();
    });
}

/// As in Qwen3.8-Flash-Next, after so many positions.
#[divan::bench(args = loads(&[1, 16]), consts = [4_096, 131_072])]
fn attend_selected<const POSITION: usize>(bencher: Bencher<'_, '_>, load: Load) {
    let mut bed = Bed::new(load);
    bed.backend.close_sequence(bed.sequence);
    let index = IndexShape { layers: 1, dim: 128, ratio: 4 };
    let shape = SequenceShape {
        context_tokens: POSITION + load.rows,
        kv_layers: 1,
        kv_heads: 2,
        head_dim: 256,
        recurrent: None,
        extra_conv: None,
        index: Some(index),
    };
    bed.sequence = bed.backend.open_sequence(shape).expect("memory");
    let heads = Heads { count: 24, dim: 256, stride: 512 };
    let index_heads = Heads { count: 4, dim: index.dim, stride: index.dim };
    let (q, out) = (bed.buffer(24 * 512), bed.buffer(24 * 256));
    let (k, v) = (bed.buffer(512), bed.buffer(512));
    let (index_q, index_k) = (bed.buffer(512), bed.buffer(128));
    let k_norm = bed.weight(BlockType::F32, 1, index.dim);
    let rope = bed.backend.alloc_rope(RopeSpec { rotary_dim: 64, theta: 1e7, yarn: None });
    let append = |bed: &mut Bed, position: usize| {
        bed.begin(position, Role::Prompt);
        bed.backend.record(Op::KvAppend { layer: 0, k, v });
        bed.backend.record(Op::IndexAppend { layer: 0, k: index_k, k_norm, eps: 1e-6, rope });
    };
    for position in (0..POSITION).step_by(load.rows) {
        append(&mut bed, position);
        bed.finish();
    }
    let selector = Selector { layer: 0, q: index_q, heads: index_heads, blocks: 512 };
    bencher.counter(ItemsCount::new(load.rows * POSITION / index.ratio)).bench_local(|| {
        append(&mut bed, POSITION);
        let (layer, gated) = (0, true);
        bed.backend.record(Op::AttendSelected { layer, q, heads, gated, selector, out });
        bed.finish();
    });
}

#[divan::bench(args = loads(&[1, 64]))]
fn delta_rule(bencher: Bencher<'_, '_>, load: Load) {
    let mut bed = Bed::new(load);
    let nv = RECURRENT.value_heads;
    let width = nv * RECURRENT.value_dim;
    let (x, conv) = (bed.buffer(RECURRENT.conv_channels()), bed.buffer(RECURRENT.conv_channels()));
    let (z, ba, out) = (bed.buffer(width), bed.buffer(2 * nv), bed.buffer(width));
    let weight = bed.weight(BlockType::F32, RECURRENT.conv_channels(), RECURRENT.conv_kernel);
    let mut vector = |n| bed.weight(BlockType::F32, 1, n);
    let (a, dt_bias, norm) = (vector(nv), vector(nv), vector(RECURRENT.value_dim));
    let params = DeltaParams { a, dt_bias, norm, eps: 1e-6 };
    let role = if load.rows == 1 { Role::Generated } else { Role::Prompt };
    bencher.counter(ItemsCount::new(load.rows)).bench_local(|| {
        bed.backend.reset(bed.sequence);
        bed.begin(0, role);
        bed.backend.record(Op::ShortConv { state: ConvState::Recurrent(0), x, weight, out: conv });
        bed.backend.record(Op::DeltaRule { layer: 0, conv, z, ba, params, gate: Gate::Silu, out });
        bed.finish();
    });
}

#[divan::bench(args = loads(&[1, 64]))]
fn small_operations(bencher: Bencher<'_, '_>, load: Load) {
    let mut bed = Bed::new(load);
    let norm = bed.weight(BlockType::F32, 1, HIDDEN);
    let (x, normed, out) = (bed.buffer(HIDDEN), bed.buffer(HIDDEN), bed.buffer(HIDDEN));
    bencher.counter(ItemsCount::new(load.rows * HIDDEN)).bench_local(|| {
        bed.begin(0, Role::Prompt);
        bed.backend.record(Op::RmsNorm {
            x,
            weight: norm,
            eps: 1e-6,
            out: normed,
            rows: 0..load.rows,
        });
        bed.backend.record(Op::SiluMul { gate: x, up: normed, out });
        bed.finish();
    });
}
