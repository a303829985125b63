//! Decoding and products of whole rows: the definitions that every faster kernel must equal bit for bit.

use crate::BlockType;
use crate::affine::ScaleType;
use crate::float::{bf16_to_f32, f8_to_f32, f16_to_f32};
use crate::formats::{self, Format, MAX_BLOCK, Unpacked};
use crate::lanes::{self, LANES};
use crate::q8::{GROUP, Q8View};

/// The size of a block.
#[derive(Clone, Copy)]
struct Shape {
    /// Values.
    len: usize,
    bytes: usize,
}

impl Shape {
    const fn of(ty: BlockType) -> Self {
        Self { len: ty.block_len(), bytes: ty.block_bytes() }
    }
}

/// Runs `$body` with `$format` bound to the format of a quantised type and `$shape` to the shape of its blocks;
/// `$float` for the others.
macro_rules! with_format {
    ($ty:expr, $format:ident, $shape:ident => $body:expr, $float:expr) => {{
        macro_rules! with {
            ($name:ident) => {{
                let ($format, $shape) = (formats::$name, const { Shape::of(BlockType::$name) });
                $body
            }};
            ($affine:ident, $bits:literal) => {{
                let $format = formats::Affine::<$bits>($affine);
                let $shape = Shape::of(BlockType::Affine($affine));
                $body
            }};
        }
        match $ty {
            BlockType::F32
            | BlockType::F16
            | BlockType::Bf16
            | BlockType::Fp8(_)
            | BlockType::E4m3 => $float,
            BlockType::Q4_0 => with!(Q4_0),
            BlockType::Q4_1 => with!(Q4_1),
            BlockType::Q5_0 => with!(Q5_0),
            BlockType::Q5_1 => with!(Q5_1),
            BlockType::Q8_0 => with!(Q8_0),
            BlockType::Q2K => with!(Q2K),
            BlockType::Q3K => with!(Q3K),
            BlockType::Q4K => with!(Q4K),
            BlockType::Q5K => with!(Q5K),
            BlockType::Q6K => with!(Q6K),
            BlockType::Iq1S => with!(Iq1S),
            BlockType::Iq1M => with!(Iq1M),
            BlockType::Iq2Xxs => with!(Iq2Xxs),
            BlockType::Iq2Xs => with!(Iq2Xs),
            BlockType::Iq2S => with!(Iq2S),
            BlockType::Iq3Xxs => with!(Iq3Xxs),
            BlockType::Iq3S => with!(Iq3S),
            BlockType::Iq4Nl => with!(Iq4Nl),
            BlockType::Iq4Xs => with!(Iq4Xs),
            BlockType::Mxfp4 => with!(Mxfp4),
            BlockType::Affine(affine) => match affine.bits() {
                2 => with!(affine, 2),
                3 => with!(affine, 3),
                4 => with!(affine, 4),
                5 => with!(affine, 5),
                6 => with!(affine, 6),
                8 => with!(affine, 8),
                bits => unreachable!("no format has codes of {bits} bits"),
            },
        }
    }};
}

/// Decodes a row, or any whole number of blocks, of `out.len()` values.
///
/// The values are those of GGML's own decoding, bit for bit. MLX's are not rounded to the 16 bits of their scales.
/// Damage stays visible: a NaN or infinite scale gives NaN or infinite values.
///
/// # Panics
/// If `row` is not exactly the bytes of `out.len()` values.
#[inline(always)]
pub fn decode_row(ty: BlockType, row: &[u8], out: &mut [f32]) {
    check_row(ty, row, out.len());
    with_format!(ty, format, shape => decode_blocks(format, shape, row, out), decode_floats(ty, row, out));
}

/// Takes `R` rows of `n_in` values apart: calls `each(block, rows)` for each block of all rows, with `unpacked` for work
/// space.
///
/// # Panics
/// If `ty` is a float type, or `rows` is not exactly the bytes of the rows.
#[inline(always)]
pub fn unpack_rows<const R: usize>(
    ty: BlockType,
    rows: &[u8],
    n_in: usize,
    unpacked: &mut [Unpacked; R],
    mut each: impl FnMut(usize, &[Unpacked; R]),
) {
    let bytes = rows.len() / R;
    assert_eq!(rows.len(), bytes * R, "rows of one length");
    check_row(ty, &rows[..bytes], n_in);
    with_format!(
        ty,
        format, shape => for block in 0..n_in / shape.len {
            for (row, unpacked) in rows.chunks_exact(bytes).zip(&mut *unpacked) {
                format.unpack(&row[block * shape.bytes..][..shape.bytes], unpacked);
            }
            each(block, unpacked);
        },
        panic!("{ty} weights have no integer codes")
    );
}

/// Takes one block of each of `R` rows apart.
///
/// # Panics
/// As [`unpack_rows`].
#[inline(always)]
pub fn unpack_blocks<const R: usize>(
    ty: BlockType,
    blocks: [&[u8]; R],
    unpacked: &mut [Unpacked; R],
) {
    with_format!(
        ty,
        format, shape => for (block, unpacked) in blocks.into_iter().zip(unpacked) {
            format.unpack(&block[..shape.bytes], unpacked);
        },
        panic!("{ty} weights have no integer codes")
    );
}

/// What is added to every code of a quantised type: 8-bit codes without a sign do not fit into [`Unpacked`].
pub fn code_offset(ty: BlockType) -> i16 {
    const fn of<F: Format>(_: F) -> i16 {
        F::OFFSET
    }
    with_format!(ty, format, _shape => of(format), 0)
}

/// Whether the groups of a quantised type have minima.
pub fn has_minima(ty: BlockType) -> bool {
    const fn of<F: Format>(_: F) -> bool {
        F::LARGEST_MIN > 0
    }
    with_format!(ty, format, _shape => of(format), false)
}

#[inline(always)]
fn check_row(ty: BlockType, row: &[u8], n_in: usize) {
    assert_eq!(ty.row_bytes(n_in), Some(row.len()), "the bytes of a {ty} row of {n_in} values");
}

#[inline(always)]
fn decode_blocks<F: Format>(format: F, shape: Shape, row: &[u8], out: &mut [f32]) {
    let mut unpacked = Unpacked::new();
    for (block, out) in row.chunks_exact(shape.bytes).zip(out.chunks_exact_mut(shape.len)) {
        decode_block(format, block, &mut unpacked, out);
    }
}

#[inline(always)]
fn decode_block<F: Format>(format: F, block: &[u8], unpacked: &mut Unpacked, out: &mut [f32]) {
    format.unpack(block, unpacked);
    let codes = unpacked.codes.as_chunks::<GROUP>().0.iter();
    let groups = unpacked.scales.iter().zip(&unpacked.mins).zip(codes);
    for (((scale, min), codes), out) in groups.zip(out.as_chunks_mut::<GROUP>().0) {
        let scale = unpacked.scale * f32::from(*scale);
        for (y, code) in out.iter_mut().zip(codes) {
            *y = scale * f32::from(i16::from(*code) + F::OFFSET);
        }
        if F::LARGEST_MIN > 0 {
            let min = unpacked.min_scale * f32::from(*min);
            for y in out {
                *y += min;
            }
        }
    }
}

#[inline(always)]
fn decode_floats(ty: BlockType, row: &[u8], out: &mut [f32]) {
    match ty {
        BlockType::F32 => {
            for (y, b) in out.iter_mut().zip(row.as_chunks().0) {
                *y = f32::from_le_bytes(*b);
            }
        }
        BlockType::F16 => {
            for (y, b) in out.iter_mut().zip(row.as_chunks().0) {
                *y = f16_to_f32(u16::from_le_bytes(*b));
            }
        }
        BlockType::Bf16 => {
            for (y, b) in out.iter_mut().zip(row.as_chunks().0) {
                *y = bf16_to_f32(u16::from_le_bytes(*b));
            }
        }
        BlockType::Fp8(scales) => decode_fp8(scales, row, out),
        BlockType::E4m3 => {
            for (y, bits) in out.iter_mut().zip(row) {
                *y = f8_to_f32(*bits);
            }
        }
        _ => unreachable!("{ty} has blocks of integers"),
    }
}

/// Blocks of 128 E4M3 floats behind a scale: `scale · float`, rounded once.
#[inline(always)]
fn decode_fp8(scales: ScaleType, row: &[u8], out: &mut [f32]) {
    for (block, out) in row.chunks_exact(scales.bytes() + 128).zip(out.as_chunks_mut::<128>().0) {
        let (scale, values) = formats::split_scale(scales, block);
        for (y, bits) in out.iter_mut().zip(values) {
            *y = scale * f8_to_f32(*bits);
        }
    }
}

/// `Σ w·x` with float activations: values decoded as by [`decode_row`], summed as by [`lanes::dot`].
///
/// # Panics
/// If `row` is not exactly the bytes of a row of `x.len()` values.
#[inline(always)]
pub fn dot_f32(ty: BlockType, row: &[u8], x: &[f32]) -> f32 {
    check_row(ty, row, x.len());
    with_format!(ty, format, shape => dot_decoded(format, shape, row, x), dot_floats(ty, row, x))
}

#[inline(always)]
fn dot_decoded<F: Format>(format: F, shape: Shape, row: &[u8], x: &[f32]) -> f32 {
    // Blocks are whole numbers of groups, so each starts at lane 0.
    const { assert!(GROUP == LANES) }
    let mut sums = [0.0; LANES];
    let mut unpacked = Unpacked::new();
    let mut values = [0.0; MAX_BLOCK];
    for (block, x) in row.chunks_exact(shape.bytes).zip(x.chunks_exact(shape.len)) {
        decode_block(format, block, &mut unpacked, &mut values[..shape.len]);
        lanes::accumulate(&mut sums, &values[..shape.len], x);
    }
    lanes::tree(sums)
}

#[inline(always)]
fn dot_floats(ty: BlockType, row: &[u8], x: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let mut values = [0.0; MAX_BLOCK];
    let piece_bytes = MAX_BLOCK / ty.block_len() * ty.block_bytes();
    for (piece, x) in row.chunks(piece_bytes).zip(x.chunks(MAX_BLOCK)) {
        decode_floats(ty, piece, &mut values[..x.len()]);
        lanes::accumulate(&mut sums, &values[..x.len()], x);
    }
    lanes::tree(sums)
}

/// `Σ w·x` with 8-bit activations: the definition that every faster kernel must equal bit for bit.
///
/// A block is a scale, integer sub-scales `sc` and minima `mn` per group of 16, and integer codes `c`. With quants `q`
/// and scale `dx` of the activation block, these are exact:
///
/// - `isum = Σ sc · c · q`
/// - `msum = Σ mn · Σ q`, the inner sum being the activations' group sum
///
/// Then in block order, in f32, each line rounding where a product is taken, an integer is converted (to nearest,
/// ties to even) and in the fused multiply-add:
///
/// - `acc = fma(scale · dx, isum, acc)`
/// - `acc = fma(min_scale · dx, msum, acc)` for the formats that have minima
///
/// | format | `scale` | `sc` | `c` | `abs(sc · c)` up to | `min_scale` | `mn` |
/// |---|---|---|---|---|---|---|
/// | `Q4_0` | d | 1 | q - 8 | 8 | | |
/// | `Q4_1` | d | 1 | q | 15 | m | 1 |
/// | `Q5_0` | d | 1 | q - 16 | 16 | | |
/// | `Q5_1` | d | 1 | q | 31 | m | 1 |
/// | `Q8_0` | d | 1 | q | 128 | | |
/// | `Q2_K` | d | 0 … 15 | q | 45 | -dmin | 0 … 15 |
/// | `Q3_K` | d | s - 32 | q - 4 | 128 | | |
/// | `Q4_K` | d | 0 … 63 | q | 945 | -dmin | 0 … 63 |
/// | `Q5_K` | d | 0 … 63 | q | 1,953 | -dmin | 0 … 63 |
/// | `Q6_K` | d | s8 | q - 32 | 4,096 | | |
/// | `IQ1_S`, `IQ1_M` | d / 8 | 2t + 1 | 8g ± 1 | 135 | | |
/// | `IQ2_XXS`, `IQ2_XS`, `IQ2_S` | d / 8 | 2t + 1 | ± g | 1,333 | | |
/// | `IQ3_XXS` | d / 4 | 2t + 1 | ± g | 1,922 | | |
/// | `IQ3_S` | d | 2t + 1 | ± g | 465 | | |
/// | `IQ4_NL` | d | 1 | level | 127 | | |
/// | `IQ4_XS` | d | s - 32 | level | 4,064 | | |
/// | `MXFP4` | 2^(e - 128) | 1 | level | 12 | | |
/// | `MLX2` … `MLX8` | scale | 1 | q | 2^bits - 1 | bias | 1 |
///
/// A block of 256 thus reaches at most 256 · 4,096 · 128 = 2^27 (`Q6_K`), and a format's `isum` fits an i32.
///
/// A NaN activation scale makes the product NaN, whatever the weights are; see [`crate::quantize_into`].
///
/// # Panics
/// If `ty` is a float type (F32, F16, BF16, FP8 and E4M3 weights are always multiplied in float), or lengths or blocks do not
/// belong together.
#[inline(always)]
pub fn dot_q8(ty: BlockType, row: &[u8], x: Q8View<'_>) -> f32 {
    check_row(ty, row, x.quants.len());
    assert_eq!(x.block, ty.activation_block(), "activations in blocks of the {ty} weight");
    let n = x.quants.len();
    assert!(
        x.scales.len() == n / x.block && x.sums.len() == n / GROUP,
        "a scale per block and a sum per group"
    );
    with_format!(
        ty,
        format, shape => dot_blocks(format, shape, row, x),
        panic!("{ty} weights are multiplied in float")
    )
}

#[inline(always)]
fn dot_blocks<F: Format>(format: F, shape: Shape, row: &[u8], x: Q8View<'_>) -> f32 {
    const {
        // The sums below cannot overflow: quants are at least -128, group sums at most 16 times that.
        let most = if F::LARGEST > F::LARGEST_MIN { F::LARGEST } else { F::LARGEST_MIN };
        assert!(MAX_BLOCK as i64 * most as i64 * 128 <= i32::MAX as i64);
        assert!(F::OFFSET == 0 || F::LARGEST_MIN == 1);
    }
    let mut unpacked = Unpacked::new();
    let mut acc = 0.0_f32;
    let blocks = row.chunks_exact(shape.bytes).zip(x.quants.chunks_exact(shape.len));
    let activations = x.scales.iter().zip(x.sums.chunks_exact(shape.len / GROUP));
    for ((block, quants), (dx, sums)) in blocks.zip(activations) {
        format.unpack(block, &mut unpacked);
        let mut isum = sum_products(&unpacked, quants);
        if F::OFFSET != 0 {
            // Formats with an offset have no sub-scales.
            isum += i32::from(F::OFFSET) * sums.iter().map(|sum| i32::from(*sum)).sum::<i32>();
        }
        acc = (unpacked.scale * dx).mul_add(isum as f32, acc);
        if F::LARGEST_MIN > 0 {
            let minima = unpacked.mins.iter().zip(sums);
            let msum: i32 = minima.map(|(min, sum)| i32::from(*min) * i32::from(*sum)).sum();
            acc = (unpacked.min_scale * dx).mul_add(msum as f32, acc);
        }
    }
    acc
}

/// `Σ sc · c · q` over the groups that `quants` has.
#[inline(always)]
fn sum_products(unpacked: &Unpacked, quants: &[i8]) -> i32 {
    let mut isum = 0;
    let codes = unpacked.codes.as_chunks::<GROUP>().0.iter();
    for ((quants, codes), scale) in
        quants.as_chunks::<GROUP>().0.iter().zip(codes).zip(&unpacked.scales)
    {
        let products = codes.iter().zip(quants).map(|(c, q)| i32::from(*c) * i32::from(*q));
        isum += i32::from(*scale) * products.sum::<i32>();
    }
    isum
}

#[cfg(test)]
mod tests;
