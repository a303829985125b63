//! A small network on a backend, with a host that moves experts as an engine does: misses in any order, in waves, into
//! slots that are free once their epoch is complete.
#![allow(unsafe_code, reason = "writes the memory that a backend gives out")]
#![allow(dead_code, reason = "each test program uses a part")]

pub(crate) mod selected;

use std::ops::Range;
use std::ptr::NonNull;

use compute::backend::{
    Activations, Backend, BufferId, ComputeError, ConvState, DeltaParams, Gate, HeadOrder, Heads,
    KvType, MatrixShape, Moe, Op, RecurrentShape, Role, RopeId, RopeSpec, RouterHandle,
    RouterShape, Row, SequenceId, SequenceShape, SharedOutput, SlotClass, WeightId,
};
use quant::{BlockType, ExpertMatrices, SlotMatrix};
use units::{Epoch, ExpertKey, LayerIndex, SlotIndex};

pub(crate) const VOCABULARY: usize = 97;
pub(crate) const CONTEXT: usize = 400;
pub(crate) const N_EXPERTS: usize = 8;
pub(crate) const TOP_K: usize = 3;
pub(crate) const N_LAYERS: usize = 2;
const HIDDEN: usize = 256;
const WIDTH: usize = 256;
const SHARED_WIDTH: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const EPS: f32 = 1e-6;

const RECURRENT: RecurrentShape = RecurrentShape {
    layers: 1,
    key_heads: 2,
    value_heads: 4,
    key_dim: 16,
    value_dim: 32,
    conv_kernel: 4,
    order: HeadOrder::Grouped,
};

pub(crate) const SEQUENCE: SequenceShape = SequenceShape {
    context_tokens: CONTEXT,
    kv_layers: 1,
    kv_heads: KV_HEADS,
    head_dim: HEAD_DIM,
    recurrent: Some(RECURRENT),
    extra_conv: None,
    index: None,
};

/// Gate, up and down of the experts of each layer: both sizes of activation blocks in one expert, and floats.
const EXPERT_TYPES: [[BlockType; 3]; N_LAYERS] = [
    [BlockType::Q4K, BlockType::Q4K, BlockType::Q8_0],
    [BlockType::Q8_0, BlockType::Q6K, BlockType::F16],
];

/// splitmix64.
#[derive(Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    /// Blocks of a weight matrix with small scales.
    fn matrix(&mut self, block_type: BlockType, n_out: usize, n_in: usize) -> Vec<u8> {
        let n = n_out * block_type.row_bytes(n_in).unwrap();
        let mut bytes: Vec<u8> = (0..n).map(|_| self.next() as u8).collect();
        for block in bytes.chunks_exact_mut(block_type.block_bytes()) {
            let scales: &[usize] = match block_type {
                BlockType::Q8_0 | BlockType::Q4_0 | BlockType::F16 => &[0],
                BlockType::Q4K => &[0, 2],
                BlockType::Q6K => &[208],
                BlockType::F32 => {
                    block.copy_from_slice(&(self.float() * 0.15).to_le_bytes());
                    &[]
                }
                other => unreachable!("{other} is not used here"),
            };
            for at in scales {
                // Halves between 2^-10 and 2^-6; a weight of its own takes both signs.
                let sign = if block_type == BlockType::F16 { block[at + 1] & 0x80 } else { 0 };
                block[at + 1] = sign | (0x14 + block[at + 1] % 16);
            }
        }
        bytes
    }
}

fn fill((base, len): (NonNull<u8>, usize), bytes: &[u8]) {
    assert!(bytes.len() <= len);
    // SAFETY: the backend owns `len` bytes there, and these tests write them only before they are published or used.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.as_ptr(), bytes.len()) }
}

struct Mixer {
    /// Queries, keys and values; or q, k and v.
    inputs: [(WeightId, BufferId); 3],
    output: WeightId,
    inner: BufferId,
}

struct Layer {
    norms: [WeightId; 2],
    mixer: Mixer,
    router: WeightId,
    /// Gate, up, down, gate of the output.
    shared: [WeightId; 4],
}

struct Slot {
    key: Option<ExpertKey>,
    used_until: Epoch,
    /// Published, and no operation recorded that would run it.
    pending: bool,
}

/// The network and its host.
pub(crate) struct Model {
    pub(crate) backend: Box<dyn Backend>,
    layers: Vec<Layer>,
    params: DeltaParams,
    conv: (WeightId, BufferId),
    head_norms: [WeightId; 2],
    rope: RopeId,
    table: WeightId,
    head: (WeightId, BufferId),
    head_norm: WeightId,
    /// Residual stream, its norm, output of a mixer.
    h: BufferId,
    x: BufferId,
    projected: BufferId,
    logits: BufferId,
    shared: [BufferId; 4],
    router: RouterHandle,
    experts: Vec<Vec<(Vec<u8>, ExpertMatrices)>>,
    slots: Vec<Slot>,
    random: Random,
    missing: Vec<ExpertKey>,
}

fn expert(random: &mut Random, [gate, up, down]: [BlockType; 3]) -> (Vec<u8>, ExpertMatrices) {
    let mut bytes = vec![0xee; 48];
    let mut add = |block_type, n_out: usize, n_in: usize| {
        let place = bytes.len() as u64;
        bytes.extend(random.matrix(block_type, n_out, n_in));
        SlotMatrix { place, block_type, n_in: n_in as u32, n_out: n_out as u32 }
    };
    let gate = add(gate, WIDTH, HIDDEN);
    let up = add(up, WIDTH, HIDDEN);
    let down = add(down, HIDDEN, WIDTH);
    (bytes, ExpertMatrices { gate, up, down })
}

/// Makes weights and buffers; what they hold depends on the order of calls only.
struct Builder {
    backend: Box<dyn Backend>,
    random: Random,
    rows: usize,
}

impl Builder {
    fn weight(&mut self, block_type: BlockType, n_out: usize, n_in: usize) -> WeightId {
        let bytes = self.random.matrix(block_type, n_out, n_in);
        let weight = self.backend.alloc_weight(MatrixShape { n_out, n_in, block_type }).unwrap();
        fill(self.backend.weight_memory(weight), &bytes);
        weight
    }

    fn vector(&mut self, n: usize, shift: f32) -> WeightId {
        let shape = MatrixShape { n_out: 1, n_in: n, block_type: BlockType::F32 };
        let weight = self.backend.alloc_weight(shape).unwrap();
        let bytes: Vec<u8> =
            (0..n).flat_map(|_| (self.random.float() * 0.3 + shift).to_le_bytes()).collect();
        fill(self.backend.weight_memory(weight), &bytes);
        weight
    }

    fn buffer(&mut self, width: usize) -> BufferId {
        self.backend.alloc_buffer(self.rows, width).unwrap()
    }

    fn layer(&mut self, inputs: [(BlockType, usize); 3], inner: usize) -> Layer {
        Layer {
            norms: [self.vector(HIDDEN, 1.0), self.vector(HIDDEN, 1.0)],
            mixer: Mixer {
                inputs: inputs.map(|(block_type, width)| {
                    (self.weight(block_type, width, HIDDEN), self.buffer(width))
                }),
                output: self.weight(BlockType::Q8_0, HIDDEN, inner),
                inner: self.buffer(inner),
            },
            router: self.weight(BlockType::F32, N_EXPERTS, HIDDEN),
            shared: [
                self.weight(BlockType::Q8_0, SHARED_WIDTH, HIDDEN),
                self.weight(BlockType::Q4_0, SHARED_WIDTH, HIDDEN),
                self.weight(BlockType::Q8_0, HIDDEN, SHARED_WIDTH),
                self.weight(BlockType::F32, 1, HIDDEN),
            ],
        }
    }
}

impl Model {
    /// The same network for every backend; `seed` moves experts about, `rows` bounds a pass.
    pub(crate) fn new(backend: Box<dyn Backend>, n_slots: usize, seed: u64, rows: usize) -> Self {
        let mut b = Builder { backend, random: Random(1), rows };
        let (channels, values) =
            (RECURRENT.conv_channels(), RECURRENT.value_heads * RECURRENT.value_dim);
        let delta = [
            (BlockType::Q8_0, channels),
            (BlockType::Q4_0, values),
            (BlockType::F32, 2 * RECURRENT.value_heads),
        ];
        let attention = [
            (BlockType::Q4K, HEADS * 2 * HEAD_DIM),
            (BlockType::Q6K, KV_HEADS * HEAD_DIM),
            (BlockType::Q6K, KV_HEADS * HEAD_DIM),
        ];
        let layers = vec![b.layer(delta, values), b.layer(attention, HEADS * HEAD_DIM)];
        let params = DeltaParams {
            a: b.vector(RECURRENT.value_heads, -0.5),
            dt_bias: b.vector(RECURRENT.value_heads, 0.0),
            norm: b.vector(RECURRENT.value_dim, 1.0),
            eps: EPS,
        };
        let conv = (b.vector(channels * RECURRENT.conv_kernel, 0.1), b.buffer(channels));
        let head_norms = [b.vector(HEAD_DIM, 1.0), b.vector(HEAD_DIM, 1.0)];
        let table = b.weight(BlockType::Q8_0, VOCABULARY, HIDDEN);
        let head = (b.weight(BlockType::Q4K, VOCABULARY, HIDDEN), b.buffer(VOCABULARY));
        let head_norm = b.vector(HIDDEN, 1.0);
        let [h, x, projected, y] = std::array::from_fn(|_| b.buffer(HIDDEN));
        let logits = b.buffer(N_EXPERTS);
        let shared = [b.buffer(SHARED_WIDTH), b.buffer(SHARED_WIDTH), y, b.buffer(1)];
        let shape =
            RouterShape { n_experts: N_EXPERTS, top_k: TOP_K, hidden: HIDDEN, expert_width: WIDTH };
        let router = b.backend.alloc_router(rows, shape).unwrap();
        let rope =
            b.backend.alloc_rope(RopeSpec { rotary_dim: HEAD_DIM / 2, theta: 1e4, yarn: None });
        let experts: Vec<Vec<_>> = EXPERT_TYPES
            .iter()
            .map(|types| (0..N_EXPERTS).map(|_| expert(&mut b.random, *types)).collect())
            .collect();
        let largest = experts.iter().flatten().map(|(bytes, _)| bytes.len()).max().unwrap();
        let class = SlotClass { slots: n_slots, stride: largest.next_multiple_of(4096) };
        b.backend.alloc_slots(&[class]).unwrap();
        let slot = |_| Slot { key: None, used_until: Epoch(0), pending: false };
        Self {
            backend: b.backend,
            layers,
            params,
            conv,
            head_norms,
            rope,
            table,
            head,
            head_norm,
            h,
            x,
            projected,
            logits,
            shared,
            router,
            experts,
            slots: (0..n_slots).map(slot).collect(),
            random: Random(seed),
            missing: Vec::new(),
        }
    }

    pub(crate) fn open(&mut self) -> SequenceId {
        self.backend.open_sequence(SEQUENCE).unwrap()
    }

    /// Overwrites one value of a router's weights.
    pub(crate) fn damage_router(&mut self, layer: usize, expert: usize, value: f32) {
        let (base, len) = self.backend.weight_memory(self.layers[layer].router);
        let offset = 4 * expert * HIDDEN;
        // SAFETY: the row of `expert` begins inside the weight.
        let place = unsafe { base.add(offset) };
        fill((place, len - offset), &value.to_le_bytes());
    }

    fn mat_mul(&mut self, weight: WeightId, x: BufferId, out: BufferId, n_rows: usize) {
        self.backend.record(Op::MatMul { weight, x, out, rows: 0..n_rows });
    }

    fn norm(&mut self, weight: WeightId, n_rows: usize) {
        let (x, out) = (self.h, self.x);
        self.backend.record(Op::RmsNorm { x, weight, eps: EPS, out, rows: 0..n_rows });
    }

    fn delta_net(&mut self) {
        let Mixer { inputs: [(_, qkv), (_, z), (_, ba)], inner, .. } = self.layers[0].mixer;
        let (weight, conv) = self.conv;
        let state = ConvState::Recurrent(0);
        self.backend.record(Op::ShortConv { state, x: qkv, weight, out: conv });
        let params = self.params;
        let gate = Gate::Silu;
        self.backend.record(Op::DeltaRule { layer: 0, conv, z, ba, params, gate, out: inner });
    }

    fn attention(&mut self) {
        let Mixer { inputs: [(_, q), (_, k), (_, v)], inner, .. } = self.layers[1].mixer;
        let queries = Heads { count: HEADS, dim: HEAD_DIM, stride: 2 * HEAD_DIM };
        let keys = Heads { count: KV_HEADS, dim: HEAD_DIM, stride: HEAD_DIM };
        let rope = self.rope;
        for ((x, heads), weight) in [(q, queries), (k, keys)].into_iter().zip(self.head_norms) {
            self.backend.record(Op::HeadNormRope { x, heads, weight, eps: EPS, rope });
        }
        self.backend.record(Op::KvAppend { layer: 0, k, v });
        let heads = queries;
        self.backend.record(Op::Attend { layer: 0, q, heads, gated: true, out: inner });
    }

    fn shared_expert(&mut self, layer: usize, n_rows: usize) {
        let [gate, up, down, gate_inp] = self.layers[layer].shared;
        let [gate_out, up_out, y, gate_logit] = self.shared;
        self.mat_mul(gate_inp, self.x, gate_logit, n_rows);
        self.mat_mul(gate, self.x, gate_out, n_rows);
        self.mat_mul(up, self.x, up_out, n_rows);
        self.backend.record(Op::SiluMul { gate: gate_out, up: up_out, out: gate_out });
        self.mat_mul(down, gate_out, y, n_rows);
    }

    /// Runs a pass; afterwards the logits of its rows can be read.
    pub(crate) fn forward(&mut self, rows: &[Row]) -> Result<(), ComputeError> {
        let n = rows.len();
        self.backend.begin_pass(rows);
        self.backend.record(Op::Embed { table: self.table, out: self.h });
        for layer in 0..N_LAYERS {
            let Layer { norms, mixer, router, .. } = &self.layers[layer];
            let (norms, inputs, router) = (*norms, mixer.inputs, *router);
            let (output, inner) = (mixer.output, mixer.inner);
            self.norm(norms[0], n);
            for (weight, out) in inputs {
                self.mat_mul(weight, self.x, out, n);
            }
            if layer == 0 {
                self.delta_net();
            } else {
                self.attention();
            }
            self.mat_mul(output, inner, self.projected, n);
            self.backend.record(Op::Add { x: self.projected, to: self.h });
            self.norm(norms[1], n);
            self.mat_mul(router, self.x, self.logits, n);
            let (logits, router) = (self.logits, self.router);
            self.backend.record(Op::Route { logits, router, normalize: true });
            self.experts(layer, n)?;
            let [_, _, y, gate_logit] = self.shared;
            let shared = Some(SharedOutput { y, gate_logit });
            self.backend.record(Op::Combine { router, shared, to: self.h, set: false });
        }
        self.norm(self.head_norm, n);
        self.mat_mul(self.head.0, self.x, self.head.1, n);
        self.backend.submit();
        Ok(())
    }

    /// The experts of a layer, resident ones first, the others as they come.
    fn experts(&mut self, layer: usize, n_rows: usize) -> Result<(), ComputeError> {
        let (index, x, router) = (LayerIndex(layer as u32), self.x, self.router);
        let found = self.backend.moe(index, x, router)?;
        let mut missing = std::mem::take(&mut self.missing);
        missing.clear();
        for routed in self.backend.routes(router) {
            let key = ExpertKey { layer: index, expert: routed.expert };
            let resident = self.slots.iter().any(|slot| slot.key == Some(key));
            if !resident && !missing.contains(&key) {
                missing.push(key);
            }
        }
        assert_eq!(found == Moe::AllResident, missing.is_empty());
        self.shared_expert(layer, n_rows);
        self.run_pending(index, false);
        for i in 0..missing.len() {
            let next = i + self.random.below(missing.len() - i);
            missing.swap(i, next);
            self.load(missing[i]);
            let last = i + 1 == missing.len();
            if last || self.random.below(2) == 0 || self.slots.iter().all(|slot| slot.pending) {
                self.run_pending(index, true);
            }
        }
        self.missing = missing;
        Ok(())
    }

    /// Submits; everything of the layer that is published is in use until then.
    fn run_pending(&mut self, layer: LayerIndex, more: bool) {
        if more {
            self.backend.moe_more(layer, self.x, self.router);
        }
        let epoch = self.backend.submit();
        for slot in &mut self.slots {
            if slot.key.is_some_and(|key| key.layer == layer) {
                slot.used_until = epoch;
            }
            slot.pending = false;
        }
    }

    fn load(&mut self, key: ExpertKey) {
        let free = self.slots.iter().position(|slot| slot.key.is_none());
        let at = free.unwrap_or_else(|| {
            let start = self.random.below(self.slots.len());
            let mut order = (start..self.slots.len()).chain(0..start);
            order.find(|i| !self.slots[*i].pending).expect("one slot is not pending")
        });
        let index = SlotIndex(at as u32);
        self.backend.wait(self.slots[at].used_until);
        if let Some(evicted) = self.slots[at].key.take() {
            self.backend.unpublish(evicted);
        }
        let (bytes, matrices) = &self.experts[key.layer.get()][key.expert.get()];
        fill(self.backend.slot_memory(index), bytes);
        self.backend.publish(key, index, matrices);
        let slot = &mut self.slots[at];
        (slot.key, slot.pending) = (Some(key), true);
    }

    pub(crate) fn read(&mut self, row: usize, logits: &mut [f32]) {
        self.backend.read_back(self.head.1, row, logits);
    }

    /// Runs a pass and gives the bits of its logits, row by row.
    pub(crate) fn bits(&mut self, rows: &[Row]) -> Vec<Vec<u32>> {
        self.forward(rows).unwrap();
        let mut logits = [0.0; VOCABULARY];
        let mut bits = |row| {
            self.read(row, &mut logits);
            assert!(logits.iter().all(|y| y.is_finite()), "row {row} holds numbers");
            logits.iter().map(|y| y.to_bits()).collect()
        };
        (0..rows.len()).map(&mut bits).collect()
    }
}

/// A token that depends on its sequence and position.
pub(crate) fn rows(
    sequence: SequenceId,
    positions: Range<usize>,
    role: Role,
    text: u64,
) -> Vec<Row> {
    let row = |position: usize| Row {
        sequence,
        position: position as u32,
        role,
        token: (Random(text << 32 | position as u64).next() % VOCABULARY as u64) as u32,
    };
    positions.map(row).collect()
}

/// Every backend, and a name for messages.
pub(crate) fn backends(
    activations: Activations,
    kv: KvType,
) -> Vec<(&'static str, Box<dyn Backend>)> {
    let options = |threads| compute::Options { threads, activations, kv };
    vec![
        ("reference", compute::reference(options(1))),
        ("cpu, 1 thread", compute::cpu(options(1))),
        ("cpu, 3 threads", compute::cpu(options(3))),
        ("deferred reference", compute::deferred(compute::reference(options(1)), 5)),
        ("deferred cpu", compute::deferred(compute::cpu(options(2)), 6)),
    ]
}
