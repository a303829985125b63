//! The kernels against the scalar definitions: every instruction set, several numbers of threads, equal bits.

use quant::{Affine, BlockType, ExpertMatrices, ScaleType, SlotMatrix};
use units::ExpertIndex;

use super::test_data::{Random, weights};
use super::*;
use crate::backend::{Gate, HeadOrder, Heads, KvType, RecurrentShape, Role};
use crate::kernels::{ExpertGroup, KvRows, Pair};
use crate::reference::ReferenceKernels;

const THREADS: [usize; 4] = [1, 2, 4, 7];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Runs `kernel` with the definitions and with every variant; it returns everything that it wrote.
fn check(
    what: &str,
    activations: Activations,
    mut kernel: impl FnMut(&mut dyn Kernels) -> Vec<f32>,
) {
    let expected = kernel(&mut ReferenceKernels::new(activations));
    assert!(expected.iter().all(|y| y.is_finite()), "{what}: a test of numbers");
    for isa in Isa::available() {
        for threads in THREADS {
            let options = Options { threads, activations, kv: KvType::F16 };
            let mut kernels = CpuKernels::with_isa(isa, options);
            // Twice: scratch of an earlier call must not show.
            for _ in 0..2 {
                let found = kernel(&mut kernels);
                let what = format!("{what}, {}, {threads} threads", isa.name());
                assert_eq!(bits(&found), bits(&expected), "{what}");
            }
        }
    }
}

fn affine(bits: u32, group: u32) -> BlockType {
    BlockType::Affine(Affine::new(bits, group, ScaleType::Bf16).unwrap())
}

#[test]
fn products_are_the_same_for_every_number_of_rows_and_threads() {
    let mut random = Random(3);
    let types = [
        BlockType::F32,
        BlockType::Bf16,
        BlockType::Q8_0,
        BlockType::Q4K,
        BlockType::Q6K,
        BlockType::Iq2S,
        BlockType::Fp8(ScaleType::F32),
        affine(4, 64),
        affine(5, 128),
    ];
    for ty in types {
        for (n_out, n_in) in [(1, 256), (75, 512), (24, 768)] {
            let bytes = weights(&mut random, ty, n_out, n_in);
            let interleaved = false;
            let w = Matrix { block_type: ty, n_in, n_out, bytes: &bytes, interleaved };
            for n_rows in [1, 2, 3, 4, 7, 67] {
                let x = random.floats(n_rows * n_in);
                for activations in [Activations::Q8, Activations::F32] {
                    check(&format!("{ty}, {n_rows} rows"), activations, |kernels| {
                        let mut out = vec![f32::NAN; 2 * n_rows * n_out];
                        let (plain, again) = out.split_at_mut(n_rows * n_out);
                        kernels.mat_mul(w, &x, plain);
                        let (mut bytes, mut interleaved) = (bytes.clone(), false);
                        if kernels.interleaves(ty, n_out) {
                            kernels.interleave(ty, w.row_bytes(), &mut bytes);
                            interleaved = true;
                        }
                        kernels.mat_mul(Matrix { bytes: &bytes, interleaved, ..w }, &x, again);
                        out
                    });
                }
            }
        }
    }
}

/// An expert in a slot: gate, up, down, one after the other.
fn slot(
    random: &mut Random,
    [gate, up, down]: [BlockType; 3],
    (hidden, width): (usize, usize),
) -> (Vec<u8>, ExpertMatrices) {
    let mut bytes = random.bytes(24);
    let mut add = |block_type, n_out: usize, n_in: usize| {
        let place = bytes.len() as u64;
        bytes.extend(weights(random, block_type, n_out, n_in));
        SlotMatrix { place, block_type, n_in: n_in as u32, n_out: n_out as u32 }
    };
    let gate = add(gate, width, hidden);
    let up = add(up, width, hidden);
    let down = add(down, hidden, width);
    (bytes, ExpertMatrices { gate, up, down })
}

/// The slot with those matrices interleaved that the kernels want so.
fn interleaved(kernels: &mut dyn Kernels, group: &ExpertGroup<'_>) -> Vec<u8> {
    let mut slot = group.slot.to_vec();
    for matrix in group.matrices.all() {
        if kernels.interleaves(matrix.block_type, matrix.n_out as usize) {
            let rows = &mut slot[matrix.range()];
            kernels.interleave(matrix.block_type, matrix.row_bytes(), rows);
        }
    }
    slot
}

#[test]
fn experts_are_the_same_for_every_number_of_threads() {
    let mut random = Random(4);
    let (hidden, width, n_rows, top_k) = (512, 256, 70, 5);
    let types = [
        [BlockType::Q4K, BlockType::Q4K, BlockType::Q6K],
        [BlockType::Q4K, BlockType::Q8_0, BlockType::Q5_0],
        [BlockType::F16, BlockType::Q4_0, BlockType::Q3K],
        [affine(4, 64), affine(8, 32), affine(3, 128)],
        [BlockType::Fp8(ScaleType::Bf16), affine(6, 128), affine(2, 64)],
    ];
    let slots = types.map(|types| slot(&mut random, types, (hidden, width)));
    // Small activations, so that the products of products stay finite.
    let x: Vec<f32> = random.floats(n_rows * hidden).iter().map(|v| v * 1e-3).collect();
    // Expert 0 serves every row, expert 1 every third, expert 2 one, the others a few.
    let mut pairs = Vec::new();
    let mut groups = Vec::new();
    for (e, (slot, matrices)) in slots.iter().enumerate() {
        let first_pair = pairs.len();
        let rows = (0..n_rows).filter(|r| [true, r % 3 == 1, *r == 41, r % 9 == 2, r % 11 == 5][e]);
        pairs.extend(rows.map(|row| Pair { row, output: row * top_k + e }));
        let n_pairs = pairs.len() - first_pair;
        let (matrices, interleaved) = (*matrices, false);
        groups.push(ExpertGroup { slot, matrices, interleaved, first_pair, n_pairs });
    }
    for activations in [Activations::Q8, Activations::F32] {
        for groups in [&groups[..], &groups[1..2], &groups[2..3], &groups[3..]] {
            check(&format!("{} experts", groups.len()), activations, |kernels| {
                let mut outputs = vec![0.5; 2 * n_rows * top_k * hidden];
                let (plain, again) = outputs.split_at_mut(n_rows * top_k * hidden);
                let (x, pairs) = (&x[..], &pairs[..]);
                kernels.experts(Experts { x, hidden, width, groups, pairs, outputs: plain });
                let mixed: Vec<_> = groups.iter().map(|g| interleaved(kernels, g)).collect();
                let with = |(g, slot): (&_, _)| ExpertGroup { slot, interleaved: true, ..*g };
                let slots = mixed.iter().map(Vec::as_slice);
                let groups: Vec<_> = groups.iter().zip(slots).map(with).collect();
                let groups = &groups[..];
                kernels.experts(Experts { x, hidden, width, groups, pairs, outputs: again });
                outputs
            });
        }
    }
}

#[test]
fn attention_is_the_same_for_every_number_of_threads() {
    let mut random = Random(5);
    for (count, kv_heads, dim, gated) in [(8, 2, 64, true), (6, 3, 80, false), (4, 4, 40, true)] {
        let stride = if gated { 2 * dim } else { dim };
        let heads = Heads { count, dim, stride };
        for (first_position, n_rows) in [(0, 1), (0, 5), (62, 4), (300, 1)] {
            let positions = first_position + n_rows;
            let q: Vec<f32> = random.floats(n_rows * count * stride);
            let keys: Vec<f32> = random.floats(positions * kv_heads * dim);
            let values: Vec<f32> = random.floats(positions * kv_heads * dim);
            let half = |v: &[f32]| v.iter().map(|v| quant::f32_to_f16(*v)).collect::<Vec<u16>>();
            let (keys_f16, values_f16) = (half(&keys), half(&values));
            let caches = [
                (KvRows::F32(&keys), KvRows::F32(&values)),
                (KvRows::F16(&keys_f16), KvRows::F16(&values_f16)),
            ];
            for (keys, values) in caches {
                let what = format!("attention, {count} heads of {dim}, {positions} positions");
                check(&what, Activations::Q8, |kernels| {
                    let mut out = vec![f32::NAN; n_rows * count * dim];
                    let (q, q_width) = (&q[..], count * stride);
                    let job = Attend {
                        q,
                        q_width,
                        heads,
                        gated,
                        kv_heads,
                        keys,
                        values,
                        first_position,
                        out: &mut out,
                    };
                    kernels.attend(job);
                    out
                });
            }
        }
    }
}

#[test]
fn the_delta_rule_is_the_same_for_every_number_of_threads() {
    let mut random = Random(6);
    for (order, role, n_rows, gate) in [
        (HeadOrder::Grouped, Role::Generated, 3, Gate::Sigmoid),
        (HeadOrder::Tiled, Role::Prompt, 70, Gate::Silu),
        (HeadOrder::Grouped, Role::Prompt, 1, Gate::Sigmoid),
    ] {
        let shape = RecurrentShape {
            layers: 1,
            key_heads: 2,
            value_heads: 6,
            key_dim: 32,
            value_dim: 48,
            conv_kernel: 4,
            order,
        };
        let (nv, dv) = (shape.value_heads, shape.value_dim);
        let mut small = |n| -> Vec<f32> { random.floats(n).iter().map(|v| v / 64.0).collect() };
        let conv = small(n_rows * shape.conv_channels());
        let (z, ba) = (small(n_rows * nv * dv), small(n_rows * 2 * nv));
        let a: Vec<f32> = small(nv).iter().map(|v| -v.abs()).collect();
        let (dt_bias, norm, state) = (small(nv), small(dv), small(nv * shape.key_dim * dv));
        check(&format!("delta rule, {role:?}"), Activations::Q8, |kernels| {
            let (mut state, mut out) = (state.clone(), vec![f32::NAN; n_rows * nv * dv]);
            kernels.delta_rule(DeltaRule {
                shape,
                role,
                first_position: 128,
                conv: &conv,
                z: &z,
                ba: &ba,
                a: &a,
                dt_bias: &dt_bias,
                norm: &norm,
                eps: 1e-6,
                gate,
                state: &mut state,
                out: &mut out,
            });
            out.extend(state);
            out
        });
    }
}

#[test]
fn small_kernels_are_the_same_for_every_number_of_threads() {
    let mut random = Random(7);
    for (n_rows, n) in [(1, 33), (3, 2_048), (40, 1_000)] {
        let (x, weight) = (random.floats(n_rows * n), random.floats(n));
        let each = |what: &str, kernel: &mut dyn FnMut(&mut dyn Kernels) -> Vec<f32>| {
            check(&format!("{what}, {n_rows} rows of {n}"), Activations::Q8, kernel);
        };
        each("norm", &mut |kernels| {
            let mut out = vec![f32::NAN; n_rows * n];
            kernels.rms_norm(&x, &weight, 1e-6, &mut out);
            out
        });
        each("gate", &mut |kernels| {
            let mut gate = x.clone();
            let up: Vec<f32> = x.iter().rev().copied().collect();
            kernels.silu_mul_in_place(&mut gate, &up);
            gate
        });
        each("convolution", &mut |kernels| {
            let (taps, mut out) = (3, vec![f32::NAN; n_rows * n]);
            let weight: Vec<f32> = weight.iter().flat_map(|w| [*w, 0.5 - w, w * 0.1]).collect();
            let dilation = 1 + n % 3;
            let state = x[..n].iter().chain(&weight[..n]).cycle();
            let mut state: Vec<f32> = state.take(2 * dilation * n).copied().collect();
            let job = ShortConv {
                x: &x,
                channels: n,
                weight: &weight,
                taps,
                dilation,
                state: &mut state,
                out: &mut out,
            };
            kernels.short_conv(job);
            out.extend(state);
            out
        });
        each("router", &mut |kernels| {
            let mut out = vec![Routed { expert: ExpertIndex(0), weight: 0.0 }; n_rows * 8];
            kernels.route(&x, n, true, &mut out).unwrap();
            out.iter().flat_map(|r| [r.expert.0 as f32, r.weight]).collect()
        });
        each("combination", &mut |kernels| {
            let routed = |i| Routed { expert: ExpertIndex(i), weight: 0.1 + i as f32 };
            let routes: Vec<Routed> = (0..2 * n_rows as u32).map(routed).collect();
            let outputs = [&x[..], &x[..]].concat();
            let shared = Some((&x[..], &weight[..n_rows.min(n)]));
            let (routes, outputs, top_k, hidden) = (&routes[..], &outputs[..], 2, n);
            let mut both = [x.clone(), x.clone()];
            for (to, set) in both.iter_mut().zip([false, true]) {
                kernels.combine(Combine { routes, top_k, outputs, shared, hidden, set, to });
            }
            both.concat()
        });
    }
}

#[test]
fn heads_are_normed_and_rotated_the_same_for_every_number_of_threads() {
    let mut random = Random(8);
    let (heads, width) = (Heads { count: 5, dim: 40, stride: 70 }, 360);
    for n_rows in [1, 50] {
        let (x, weight) = (random.floats(n_rows * width), random.floats(heads.dim));
        let angles = random.floats(n_rows * 24);
        check(&format!("heads of {n_rows} rows"), Activations::Q8, |kernels| {
            let mut x = x.clone();
            let (weight, angles) = (&weight[..], &angles[..]);
            let job =
                HeadNormRope { x: &mut x, width, heads, weight, eps: 1e-5, angles, rotary_dim: 24 };
            kernels.head_norm_rope(job);
            x
        });
    }
}

#[test]
fn the_first_bad_logit_is_named_for_every_number_of_threads() {
    let (n_rows, n) = (5_000, 64);
    let mut logits = Random(9).floats(n_rows * n);
    for (row, expert) in [(4_711, 1), (1_234, 60), (1_234, 63), (4_999, 0)] {
        logits[row * n + expert] = f32::INFINITY;
    }
    for threads in THREADS {
        let options = Options { threads, activations: Activations::Q8, kv: KvType::F16 };
        let mut out = vec![Routed { expert: ExpertIndex(0), weight: 0.0 }; n_rows * 8];
        let found = CpuKernels::new(options).route(&logits, n, true, &mut out);
        assert_eq!(found, Err(BadLogit { row: 1_234, expert: 60, value: f32::INFINITY }));
    }
}

#[test]
fn streams_are_the_same_for_every_number_of_threads() {
    let mut random = Random(10);
    for (n_rows, streams, hidden) in [(1, 4, 2_560), (3, 2, 77), (19, 4, 1_030)] {
        let wide = streams * hidden;
        let (k, q) = (random.floats(n_rows * wide), random.floats(n_rows * wide));
        let (y, logits) = (random.floats(n_rows * hidden), random.floats(n_rows * streams));
        let weight = random.floats(wide);
        let each = |what: &str, kernel: &mut dyn FnMut(&mut dyn Kernels) -> Vec<f32>| {
            let what = format!("{what}, {n_rows} rows of {streams} streams of {hidden}");
            check(&what, Activations::Q8, kernel);
        };
        each("norm of groups", &mut |kernels| {
            let mut out = vec![f32::NAN; n_rows * wide];
            kernels.group_norm(&k, &weight, GroupNorm { groups: streams, eps: 1e-6 }, &mut out);
            out
        });
        each("scaled silu", &mut |kernels| {
            let mut x = k.clone();
            kernels.scaled_silu(&mut x, 0.25);
            x
        });
        each("mix", &mut |kernels| {
            let mut out = vec![f32::NAN; n_rows * hidden];
            kernels.stream_mix(&k, &q, hidden, &mut out);
            out
        });
        each("inject", &mut |kernels| {
            let mut to = k.clone();
            kernels.inject(&logits, &y, hidden, &mut to);
            to
        });
        each("gated value", &mut |kernels| {
            let mut out = vec![f32::NAN; n_rows * wide];
            let (k, q, v) = (&k[..], &q[..], &y[..]);
            kernels.gated_value(GatedValue { k, q, v, hidden, out: &mut out });
            out
        });
    }
}

fn halves(values: &[f32]) -> Vec<u16> {
    values.iter().map(|v| quant::f32_to_f16(*v)).collect()
}

/// Selected attention over a cache of 1,600 positions.
struct Selection {
    heads: Heads,
    kv_heads: usize,
    index_heads: Heads,
    ratio: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
    index_keys: Vec<f32>,
    random: Random,
}

impl Selection {
    const POSITIONS: usize = 1_600;

    fn new(heads: Heads, kv_heads: usize, index_heads: Heads, ratio: usize) -> Self {
        let mut random = Random(11);
        let mut rows = |n: usize, width: usize| random.floats(n * width);
        let width = kv_heads * heads.dim;
        let (keys, values) = (rows(Self::POSITIONS, width), rows(Self::POSITIONS, width));
        let index_keys = rows(Self::POSITIONS / ratio, index_heads.dim);
        Self { heads, kv_heads, index_heads, ratio, keys, values, index_keys, random }
    }

    /// Every variant against the definition, at these rows, and whether it is attention to everything.
    fn check(&mut self, first_position: usize, n_rows: usize, blocks: usize) -> bool {
        let (q_width, out_width) =
            (self.heads.count * self.heads.stride, self.heads.count * self.heads.dim);
        let index_width = self.index_heads.count * self.index_heads.stride;
        // Small, so that every position that is seen has a weight.
        let q: Vec<f32> = self.random.floats(n_rows * q_width).iter().map(|q| q / 512.0).collect();
        let index_q = self.random.floats(n_rows * index_width);
        let Self { heads, kv_heads, index_heads, ratio, keys, values, index_keys, .. } = self;
        let (heads, kv_heads, index_heads, ratio) = (*heads, *kv_heads, *index_heads, *ratio);
        let half = [halves(keys), halves(values), halves(index_keys)];
        let caches = [
            [KvRows::F32(keys), KvRows::F32(values), KvRows::F32(index_keys)],
            [KvRows::F16(&half[0]), KvRows::F16(&half[1]), KvRows::F16(&half[2])],
        ];
        let mut dense = true;
        for [keys, values, index_keys] in caches {
            let run = |kernels: &mut dyn Kernels, selected: bool| {
                let mut out = vec![f32::NAN; n_rows * out_width];
                let attend = Attend {
                    q: &q,
                    q_width,
                    heads,
                    gated: true,
                    kv_heads,
                    keys,
                    values,
                    first_position,
                    out: &mut out,
                };
                if selected {
                    kernels.attend_selected(AttendSelected {
                        attend,
                        index_q: &index_q,
                        index_width,
                        index_heads,
                        index_keys,
                        ratio,
                        blocks,
                    });
                } else {
                    kernels.attend(attend);
                }
                out
            };
            let what = format!("{blocks} blocks of {ratio}, {n_rows} rows from {first_position}");
            check(&what, Activations::Q8, |kernels| run(kernels, true));
            let mut reference = ReferenceKernels::new(Activations::Q8);
            dense &= bits(&run(&mut reference, true)) == bits(&run(&mut reference, false));
        }
        dense
    }
}

#[test]
fn selected_attention_is_the_same_for_every_number_of_threads() {
    let shapes = [
        (Heads { count: 8, dim: 64, stride: 128 }, 2, Heads { count: 4, dim: 32, stride: 32 }, 4),
        (Heads { count: 3, dim: 40, stride: 80 }, 3, Heads { count: 3, dim: 24, stride: 30 }, 3),
        (Heads { count: 4, dim: 16, stride: 32 }, 1, Heads { count: 8, dim: 48, stride: 50 }, 24),
    ];
    for (heads, kv_heads, index_heads, ratio) in shapes {
        let mut selection = Selection::new(heads, kv_heads, index_heads, ratio);
        for (first_position, n_rows, blocks) in
            [(0, 5, 1), (6 * ratio - 3, 37, 5), (1_599, 1, 17), (1_550, 19, 40), (700, 1, 1)]
        {
            let dense = selection.check(first_position, n_rows, blocks);
            let last = first_position + n_rows;
            assert_eq!(dense, last / ratio <= blocks, "{last} positions, {blocks} blocks");
        }
        // One block fewer than the last row has, then as many.
        assert!(!selection.check(300, 30, 330 / ratio - 1));
        assert!(selection.check(300, 30, 330 / ratio));
    }
}

#[test]
fn equal_scores_are_decided_alike_by_every_variant() {
    // All keys alike: the lowest blocks are chosen, whatever the variant.
    let (dim, ratio, blocks, n) = (16, 4, 300, 1_400);
    let mut random = Random(12);
    let (keys, values) = (random.floats(n * dim), random.floats(n * dim));
    let index_keys = vec![0.5; n / ratio * dim];
    let q: Vec<f32> = random.floats(dim).iter().map(|q| q / 512.0).collect();
    let index_q = vec![1.0; 4 * dim];
    let heads = Heads { count: 1, dim, stride: dim };
    let run = |kernels: &mut dyn Kernels, positions: &[usize]| {
        let part = |x: &[f32]| -> Vec<f32> {
            positions.iter().flat_map(|p| x[p * dim..(p + 1) * dim].to_vec()).collect()
        };
        let (keys, values) = (part(&keys), part(&values));
        let mut out = vec![f32::NAN; dim];
        let whole = positions.len() == n;
        let attend = Attend {
            q: &q,
            q_width: dim,
            heads,
            gated: false,
            kv_heads: 1,
            keys: KvRows::F32(&keys),
            values: KvRows::F32(&values),
            first_position: positions.len() - 1,
            out: &mut out,
        };
        if whole {
            kernels.attend_selected(AttendSelected {
                attend,
                index_q: &index_q,
                index_width: 4 * dim,
                index_heads: Heads { count: 4, ..heads },
                index_keys: KvRows::F32(&index_keys),
                ratio,
                blocks,
            });
        } else {
            kernels.attend(attend);
        }
        out
    };
    let lowest: Vec<usize> = (0..blocks * ratio).collect();
    let expected = run(&mut ReferenceKernels::new(Activations::Q8), &lowest);
    let everything: Vec<usize> = (0..n).collect();
    check("ties", Activations::Q8, |kernels| {
        let found = run(kernels, &everything);
        assert_eq!(bits(&found), bits(&expected));
        found
    });
}

#[test]
fn keys_of_blocks_are_the_same_for_every_number_of_threads() {
    let mut random = Random(13);
    for (dim, ratio, n_blocks) in [(128, 4, 1), (128, 4, 70), (40, 3, 300)] {
        let raw = random.floats((n_blocks + 2) * ratio * dim);
        let (weight, angles) = (random.floats(dim), random.floats(n_blocks * 24));
        let half = halves(&raw);
        for raw in [KvRows::F32(&raw), KvRows::F16(&half)] {
            check(&format!("{n_blocks} keys of {dim}"), Activations::Q8, |kernels| {
                let mut out = vec![f32::NAN; n_blocks * dim];
                kernels.pool_keys(PoolKeys {
                    raw,
                    first_block: 2,
                    ratio,
                    weight: &weight,
                    eps: 1e-6,
                    angles: &angles,
                    rotary_dim: 24,
                    out: &mut out,
                });
                out
            });
        }
    }
}
