//! Many weight rows times one to four activation rows: the type is looked up once.

use quant::{BlockType, Q8View};

use super::{affine, codebooks, float, small_blocks, super_blocks};

/// `out[c][o] = row o · xs[c]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) fn rows_q8<const N: usize>(
    ty: BlockType,
    rows: &[u8],
    xs: [Q8View<'_>; N],
    out: [&mut [f32]; N],
) {
    macro_rules! each {
        ($dot:path) => {
            each_row(ty, rows, xs[0].quants.len(), out, |row| $dot(row, xs))
        };
    }
    match ty {
        BlockType::Q4_0 => each!(small_blocks::q4_0),
        BlockType::Q4_1 => each!(small_blocks::q4_1),
        BlockType::Q5_0 => each!(small_blocks::q5_0),
        BlockType::Q5_1 => each!(small_blocks::q5_1),
        BlockType::Q8_0 => each!(small_blocks::q8_0),
        BlockType::Iq4Nl => each!(small_blocks::iq4_nl),
        BlockType::Mxfp4 => each!(small_blocks::mxfp4),
        BlockType::Q2K => each!(super_blocks::q2_k),
        BlockType::Q3K => each!(super_blocks::q3_k),
        BlockType::Q4K => each!(super_blocks::q4_k),
        BlockType::Q5K => each!(super_blocks::q5_k),
        BlockType::Q6K => each!(super_blocks::q6_k),
        BlockType::Iq1S => each!(codebooks::iq1_s),
        BlockType::Iq1M => each!(codebooks::iq1_m),
        BlockType::Iq2Xxs => each!(codebooks::iq2_xxs),
        BlockType::Iq2Xs => each!(codebooks::iq2_xs),
        BlockType::Iq2S => each!(codebooks::iq2_s),
        BlockType::Iq3Xxs => each!(codebooks::iq3_xxs),
        BlockType::Iq3S => each!(codebooks::iq3_s),
        BlockType::Iq4Xs => each!(codebooks::iq4_xs),
        BlockType::Affine(format) => affine::rows(format, rows, xs, out),
        BlockType::F32 | BlockType::F16 | BlockType::Bf16 | BlockType::Fp8(_) | BlockType::E4m3 => {
            panic!("{ty} weights are multiplied in float")
        }
    }
}

/// The same with weights stored as floats.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) fn rows_float<const N: usize>(
    ty: BlockType,
    rows: &[u8],
    xs: [&[f32]; N],
    out: [&mut [f32]; N],
) {
    let n_in = xs[0].len();
    match ty {
        BlockType::F32 => each_row(ty, rows, n_in, out, |row| float::f32(row, xs)),
        BlockType::F16 => each_row(ty, rows, n_in, out, |row| float::f16(row, xs)),
        BlockType::Bf16 => each_row(ty, rows, n_in, out, |row| float::bf16(row, xs)),
        BlockType::Fp8(scales) => each_row(ty, rows, n_in, out, |row| float::fp8(scales, row, xs)),
        BlockType::E4m3 => each_row(ty, rows, n_in, out, |row| float::e4m3(row, xs)),
        _ => unreachable!("{ty} is not a float type"),
    }
}

/// The same with decoded weights.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) fn rows_decoded<const N: usize>(
    rows: &[f32],
    xs: [&[f32]; N],
    mut out: [&mut [f32]; N],
) {
    for (o, row) in rows.chunks_exact(xs[0].len()).enumerate() {
        for (out, y) in out.iter_mut().zip(float::decoded(row, xs)) {
            out[o] = y;
        }
    }
}

/// Decodes one row.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) fn decode_row(ty: BlockType, row: &[u8], out: &mut [f32]) {
    quant::decode_row(ty, row, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn each_row<const N: usize>(
    ty: BlockType,
    rows: &[u8],
    n_in: usize,
    mut out: [&mut [f32]; N],
    mut dot: impl FnMut(&[u8]) -> [f32; N],
) {
    let bytes = ty.row_bytes(n_in).expect("rows are made of whole blocks");
    for (o, row) in rows.chunks_exact(bytes).enumerate() {
        for (out, y) in out.iter_mut().zip(dot(row)) {
            out[o] = y;
        }
    }
}
