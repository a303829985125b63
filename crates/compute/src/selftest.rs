//! Every kernel of this machine against its scalar definition, bit for bit.
//!
//! Each check runs one operation with the same inputs through the reference backend and through another, with both
//! kinds of activations and both kinds of KV cache, and compares every output bit.

mod selected;
mod streams;

use std::ops::Range;

use quant::slot::{ExpertMatrices, SlotMatrix};
use quant::{BlockType, ScaleType};
use units::{ExpertKey, LayerIndex, SlotIndex};

use crate::Options;
use crate::backend::{
    Activations, Backend, BufferId, ComputeError, ConvState, DeltaParams, Gate, HeadOrder, Heads,
    KvType, MatrixShape, Op, RecurrentShape, Role, RopeSpec, RouterShape, Row, SequenceId,
    SequenceShape, SharedOutput, SlotClass, WeightId,
};

/// What one check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelReport {
    /// The backend that was checked.
    pub backend: &'static str,
    /// The kernel and its variant.
    pub kernel: String,
    /// Whether all bits agree.
    pub equal: bool,
    /// The first difference, or how many values were compared.
    pub detail: String,
}

/// Checks every kernel of every backend of this machine.
pub fn selftest() -> Vec<KernelReport> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut reports = Vec::new();
    for (activations, kv) in [(Activations::Q8, KvType::F16), (Activations::F32, KvType::F32)] {
        let options = Options { threads, activations, kv };
        let late = || crate::deferred(crate::cpu(options), 7);
        for (kernel, check) in checks() {
            // Float activations change products only, and the cache's type changes attention only.
            let expected = check(&mut *crate::reference(options));
            for mut backend in [crate::cpu(options), late()] {
                let name = backend.name();
                let got = check(&mut *backend);
                reports.push(compare(
                    name,
                    format!("{kernel}, {activations:?} activations"),
                    &expected,
                    &got,
                ));
            }
        }
    }
    reports
}

type Outcome = Result<Vec<f32>, ComputeError>;
type Check = Box<dyn Fn(&mut dyn Backend) -> Outcome>;

fn compare(
    backend: &'static str,
    kernel: String,
    expected: &Outcome,
    got: &Outcome,
) -> KernelReport {
    let (equal, detail) = match (expected, got) {
        (Ok(expected), Ok(got)) => {
            let differs = |(_, (a, b)): &(usize, (&f32, &f32))| a.to_bits() != b.to_bits();
            match expected.iter().zip(got).enumerate().find(differs) {
                Some((at, (a, b))) => {
                    (false, format!("value {at} is {b:e}, the definition gives {a:e}"))
                }
                None => (expected.len() == got.len(), format!("{} values", got.len())),
            }
        }
        (expected, got) => (false, format!("{got:?}, the definition gives {expected:?}")),
    };
    KernelReport { backend, kernel, equal, detail }
}

fn checks() -> Vec<(String, Check)> {
    let mut checks: Vec<(String, Check)> = Vec::new();
    for block_type in BlockType::ALL {
        // An odd number of rows and of blocks, one row of activations and several.
        for rows in [1, 7] {
            let name = format!("product {block_type}, {rows} rows");
            checks.push((name, Box::new(move |backend| product(backend, block_type, rows))));
        }
        checks.push((
            format!("experts {block_type}"),
            Box::new(move |backend| experts(backend, block_type)),
        ));
    }
    checks.push(("rms norm".to_owned(), Box::new(rms_norm)));
    checks
        .push(("head norm and rotation, attention".to_owned(), Box::new(|b| attention(b, false))));
    checks.push(("gated attention".to_owned(), Box::new(|b| attention(b, true))));
    for (role, gate) in [(Role::Prompt, Gate::Silu), (Role::Generated, Gate::Sigmoid)] {
        let name = format!("convolution and delta rule, {role:?} rows, {gate:?} gate");
        checks.push((name, Box::new(move |backend| delta_net(backend, role, gate))));
    }
    checks.push(("streams".to_owned(), Box::new(streams::streams)));
    checks.push(("dilated convolution".to_owned(), Box::new(streams::dilated_conv)));
    for n_rows in [1, 40] {
        let name = format!("selected attention, passes of {n_rows} rows");
        checks.push((name, Box::new(move |backend| selected::attention(backend, n_rows))));
    }
    checks
}

/// Numbers in [-1, 1) without a short period.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Random blocks whose scales are small finite numbers.
fn blocks(block_type: BlockType, n_in: usize, n_out: usize, seed: u32) -> Vec<u8> {
    let row = block_type.row_bytes(n_in).expect("whole blocks");
    let mut bytes: Vec<u8> =
        noise(row * n_out, seed).iter().map(|v| (v.to_bits() >> 3) as u8).collect();
    for (i, block) in bytes.chunks_exact_mut(block_type.block_bytes()).enumerate() {
        let half = |block: &mut [u8], at: usize| {
            block[at..at + 2].copy_from_slice(&(0x2000_u16 + (i % 512) as u16).to_le_bytes());
        };
        for at in scale_places(block_type).iter().copied() {
            half(block, at);
        }
        match block_type {
            BlockType::Affine(affine) => {
                // Of both signs: a negative scale has its bias on the other side.
                let scale = (1.0 + (i % 64) as f32 / 64.0) * if i % 3 == 0 { -0.01 } else { 0.01 };
                let width = affine.scales().bytes();
                write_scale(affine.scales(), scale, &mut block[..width]);
                write_scale(affine.scales(), -7.0 * scale, &mut block[width..2 * width]);
            }
            BlockType::Fp8(scales) => {
                let (head, codes) = block.split_at_mut(scales.bytes());
                write_scale(scales, 0.001 * (1 + i % 64) as f32, head);
                // The largest magnitude instead of NaN.
                codes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code -= 1);
            }
            BlockType::E4m3 if block[0] & 0x7f == 0x7f => block[0] -= 1,
            BlockType::F32 => block.copy_from_slice(&(i as f32 * 0.37).sin().to_le_bytes()),
            BlockType::Bf16 => block[1] = 0x3c | block[1] & 0x80,
            BlockType::Mxfp4 => block[0] = 120 + block[0] % 8,
            // The scale's bits are spread over four words: their top nibbles.
            BlockType::Iq1M => {
                for (word, nibble) in [(48, 0x0), (50, 0x2), (52, 0x0), (54, 0x2)] {
                    block[word + 1] = block[word + 1] & 0x0f | nibble << 4;
                }
            }
            _ => {}
        }
    }
    bytes
}

/// Where a block keeps its half-precision scales.
const fn scale_places(block_type: BlockType) -> &'static [usize] {
    match block_type {
        BlockType::F32
        | BlockType::Bf16
        | BlockType::Mxfp4
        | BlockType::Iq1M
        | BlockType::Affine(_)
        | BlockType::Fp8(_)
        | BlockType::E4m3 => &[],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
        BlockType::Q2K => &[80, 82],
        BlockType::Q3K => &[108],
        BlockType::Q6K => &[208],
        _ => &[0],
    }
}

/// Writes a scale, cut off where its type is narrower.
fn write_scale(scales: ScaleType, scale: f32, out: &mut [u8]) {
    match scales {
        ScaleType::Bf16 => out.copy_from_slice(&scale.to_le_bytes()[2..]),
        ScaleType::F16 => out.copy_from_slice(&quant::f32_to_f16(scale).to_le_bytes()),
        ScaleType::F32 => out.copy_from_slice(&scale.to_le_bytes()),
    }
}

/// A backend with a weight, buffers and rows at hand.
struct Bench<'a> {
    backend: &'a mut dyn Backend,
    seed: u32,
}

impl Bench<'_> {
    fn weight(
        &mut self,
        block_type: BlockType,
        n_out: usize,
        n_in: usize,
    ) -> Result<WeightId, ComputeError> {
        self.seed += 1;
        let bytes = blocks(block_type, n_in, n_out, self.seed);
        let weight = self.backend.alloc_weight(MatrixShape { n_out, n_in, block_type })?;
        crate::host::fill(self.backend.weight_memory(weight), &bytes);
        Ok(weight)
    }

    fn vector(&mut self, n: usize, scale: f32, shift: f32) -> Result<WeightId, ComputeError> {
        self.seed += 1;
        let values = noise(n, self.seed).into_iter().map(|v| v * scale + shift);
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        let shape = MatrixShape { n_out: 1, n_in: n, block_type: BlockType::F32 };
        let weight = self.backend.alloc_weight(shape)?;
        crate::host::fill(self.backend.weight_memory(weight), &bytes);
        Ok(weight)
    }

    /// A buffer of noise: rows of a table, by token.
    fn input(&mut self, rows: usize, width: usize) -> Result<BufferId, ComputeError> {
        self.seed += 1;
        let bytes: Vec<u8> =
            noise(rows * width, self.seed).into_iter().flat_map(f32::to_le_bytes).collect();
        let table = self.backend.alloc_weight(MatrixShape {
            n_out: rows,
            n_in: width,
            block_type: BlockType::F32,
        })?;
        crate::host::fill(self.backend.weight_memory(table), &bytes);
        let buffer = self.backend.alloc_buffer(rows, width)?;
        self.backend.record(Op::Embed { table, out: buffer });
        Ok(buffer)
    }

    /// Writes noise from the host.
    fn upload(&mut self, buffer: BufferId, rows: usize, width: usize) {
        self.seed += 1;
        self.backend.upload(buffer, 0, &noise(rows * width, self.seed));
    }

    fn read(&mut self, buffer: BufferId, rows: usize, width: usize) -> Vec<f32> {
        let mut out = vec![0.0; rows * width];
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            self.backend.read_back(buffer, row, out);
        }
        out
    }
}

fn rows_of(range: Range<u32>, sequence: SequenceId, role: Role) -> Vec<Row> {
    let first = range.start;
    range.map(|position| Row { sequence, position, role, token: position - first }).collect()
}

fn product(backend: &mut dyn Backend, block_type: BlockType, n_rows: u32) -> Outcome {
    let (n_in, n_out) = (3 * 256, 37);
    let mut bench = Bench { backend, seed: 1 };
    bench.backend.begin_pass(&rows_of(0..n_rows, SequenceId(0), Role::Prompt));
    let x = bench.input(n_rows as usize, n_in)?;
    let weight = bench.weight(block_type, n_out, n_in)?;
    let out = bench.backend.alloc_buffer(n_rows as usize, n_out)?;
    bench.backend.record(Op::MatMul { weight, x, out, rows: 0..n_rows as usize });
    Ok(bench.read(out, n_rows as usize, n_out))
}

fn rms_norm(backend: &mut dyn Backend) -> Outcome {
    let mut bench = Bench { backend, seed: 50 };
    bench.backend.begin_pass(&rows_of(0..5, SequenceId(0), Role::Prompt));
    let x = bench.input(5, 333)?;
    let weight = bench.vector(333, 0.3, 1.0)?;
    let out = bench.backend.alloc_buffer(5, 333)?;
    bench.backend.record(Op::RmsNorm { x, weight, eps: 1e-6, out, rows: 0..5 });
    Ok(bench.read(out, 5, 333))
}

fn attention(backend: &mut dyn Backend, gated: bool) -> Outcome {
    let (dim, count, kv_heads, n_rows) = (32, 4, 2, 130_u32);
    let mut bench = Bench { backend, seed: 100 };
    let shape = SequenceShape {
        context_tokens: 256,
        kv_layers: 1,
        kv_heads,
        head_dim: dim,
        recurrent: None,
        extra_conv: None,
        index: None,
    };
    let sequence = bench.backend.open_sequence(shape)?;
    bench.backend.begin_pass(&rows_of(0..n_rows, sequence, Role::Prompt));
    let rows = n_rows as usize;
    let heads = Heads { count, dim, stride: if gated { 2 * dim } else { dim } };
    let q = bench.input(rows, count * heads.stride)?;
    let k = bench.input(rows, kv_heads * dim)?;
    let v = bench.input(rows, kv_heads * dim)?;
    let weight = bench.vector(dim, 0.3, 3.0)?;
    let rope = bench.backend.alloc_rope(RopeSpec { rotary_dim: 16, theta: 1e6, yarn: None });
    // The angles belong to a pass that knows the rope.
    bench.backend.submit();
    bench.backend.begin_pass(&rows_of(0..n_rows, sequence, Role::Prompt));
    let out = bench.backend.alloc_buffer(rows, count * dim)?;
    bench.backend.record(Op::HeadNormRope { x: q, heads, weight, eps: 1e-6, rope });
    let key_heads = Heads { count: kv_heads, dim, stride: dim };
    bench.backend.record(Op::HeadNormRope { x: k, heads: key_heads, weight, eps: 1e-6, rope });
    bench.backend.record(Op::KvAppend { layer: 0, k, v });
    bench.backend.record(Op::Attend { layer: 0, q, heads, gated, out });
    Ok(bench.read(out, rows, count * dim))
}

fn delta_net(backend: &mut dyn Backend, role: Role, gate: Gate) -> Outcome {
    let shape = RecurrentShape {
        layers: 1,
        key_heads: 2,
        value_heads: 4,
        key_dim: 32,
        value_dim: 48,
        conv_kernel: 4,
        order: HeadOrder::Tiled,
    };
    let mut bench = Bench { backend, seed: 200 };
    let sequence = bench.backend.open_sequence(SequenceShape {
        context_tokens: 0,
        kv_layers: 0,
        kv_heads: 0,
        head_dim: 0,
        recurrent: Some(shape),
        extra_conv: None,
        index: None,
    })?;
    let n_rows = 100_u32;
    let (rows, channels, values) =
        (n_rows as usize, shape.conv_channels(), shape.value_heads * shape.value_dim);
    bench.backend.begin_pass(&rows_of(0..n_rows, sequence, role));
    let x = bench.input(rows, channels)?;
    let z = bench.input(rows, values)?;
    let ba = bench.input(rows, 2 * shape.value_heads)?;
    let weight = bench.vector(channels * shape.conv_kernel, 0.5, 0.0)?;
    let params = DeltaParams {
        a: bench.vector(shape.value_heads, 0.5, -0.6)?,
        dt_bias: bench.vector(shape.value_heads, 0.5, 0.0)?,
        norm: bench.vector(shape.value_dim, 0.2, 1.0)?,
        eps: 1e-6,
    };
    let conv = bench.backend.alloc_buffer(rows, channels)?;
    let out = bench.backend.alloc_buffer(rows, values)?;
    bench.backend.record(Op::ShortConv { state: ConvState::Recurrent(0), x, weight, out: conv });
    bench.backend.record(Op::DeltaRule { layer: 0, conv, z, ba, params, gate, out });
    Ok(bench.read(out, rows, values))
}

/// Router, experts of this type, shared expert, combination.
fn experts(backend: &mut dyn Backend, block_type: BlockType) -> Outcome {
    let (n_experts, top_k, hidden, width, n_rows) = (4, 2, 512, 256, 5_u32);
    let rows = n_rows as usize;
    let mut bench = Bench { backend, seed: 300 };
    bench.backend.begin_pass(&rows_of(0..n_rows, SequenceId(0), Role::Prompt));
    let x = bench.input(rows, hidden)?;
    let to = bench.input(rows, hidden)?;
    let logits = bench.input(rows, n_experts)?;
    let y = bench.input(rows, hidden)?;
    let gate_logit = bench.input(rows, 1)?;
    let router = bench
        .backend
        .alloc_router(rows, RouterShape { n_experts, top_k, hidden, expert_width: width })?;
    let matrix = |place: u64, n_in: usize, n_out: usize| SlotMatrix {
        place,
        block_type,
        n_in: n_in as u32,
        n_out: n_out as u32,
    };
    let gate = matrix(64, hidden, width);
    let up = matrix(gate.place + gate.bytes() as u64 + 2, hidden, width);
    let down = matrix(up.place + up.bytes() as u64 + 2, width, hidden);
    let stride = (down.place as usize + down.bytes()).next_multiple_of(4096);
    bench.backend.alloc_slots(&[SlotClass { slots: n_experts, stride }])?;
    bench.backend.record(Op::Route { logits, router, normalize: true });
    for expert in 0..n_experts as u32 {
        let mut slot = vec![0; stride];
        for (i, m) in [gate, up, down].iter().enumerate() {
            let bytes =
                blocks(block_type, m.n_in as usize, m.n_out as usize, 400 + 10 * expert + i as u32);
            slot[m.place as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        crate::host::fill(bench.backend.slot_memory(SlotIndex(expert)), &slot);
        bench.backend.publish(
            ExpertKey::new(0, expert),
            SlotIndex(expert),
            &ExpertMatrices { gate, up, down },
        );
    }
    bench.backend.moe(LayerIndex(0), x, router)?;
    bench.backend.record(Op::SiluMul { gate: x, up: y, out: x });
    let shared = Some(SharedOutput { y, gate_logit });
    bench.backend.record(Op::Combine { router, shared, to, set: false });
    bench.backend.record(Op::Combine { router, shared: None, to: y, set: true });
    let mut out = bench.read(to, rows, hidden);
    out.extend(bench.read(y, rows, hidden));
    out.extend(
        bench
            .backend
            .routes(router)
            .iter()
            .flat_map(|routed| [routed.expert.0 as f32, routed.weight]),
    );
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_this_machine_equals_its_definition() {
        let reports = selftest();
        let wrong: Vec<_> = reports.iter().filter(|report| !report.equal).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert!(reports.len() > 600, "only {} checks", reports.len());
    }

    #[test]
    fn a_difference_in_one_bit_is_reported() {
        let one_ulp = f32::from_bits(1.0_f32.to_bits() + 1);
        let report =
            compare("cpu", "test".to_owned(), &Ok(vec![0.0, 1.0]), &Ok(vec![0.0, one_ulp]));
        assert!(!report.equal && report.detail.contains("value 1"));
        assert!(!compare("cpu", "test".to_owned(), &Ok(vec![0.0]), &Ok(vec![-0.0])).equal);
    }
}
