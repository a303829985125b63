//! Activations in 8 bit: one scale per block of the weight that they meet.

/// Quants that share a group sum: the finest group that a format's minima use.
pub const GROUP: usize = 16;

/// A quantised activation row, or a part of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q8View<'a> {
    /// Values per scale: 32, 64, 128 or 256.
    pub block: usize,
    /// `[n / block]`.
    pub scales: &'a [f32],
    /// `[n]`.
    pub quants: &'a [i8],
    /// `Σ quants` over each group of [`GROUP`], `[n / 16]`.
    pub sums: &'a [i16],
}

/// Quantises `x`, a whole number of blocks: the definition that every faster kernel must equal bit for bit.
///
/// Per block, in IEEE single arithmetic:
///
/// - `scale = amax / 127`, `amax` being the largest magnitude
/// - `quant = x / scale` (a true division, so that no instruction set needs the same reciprocal), rounded to the
///   nearest integer, ties to even
///
/// Edges:
///
/// - A block of zeros, or of values so small that `amax / 127` rounds to zero, has scale 0 and quants 0.
/// - A block that holds NaN or infinity has scale NaN and quants 0, so that the damage stays visible in every product.
/// - Quants lie within ±127, but where the scale is subnormal (`amax` below 1.5e-36) it is coarse, quotients pass 127,
///   and the conversion saturates at -128 and 127. A kernel must therefore accept -128.
///
/// Lengths: `scales` `[n / block]`, `quants` `[n]`, `sums` `[n / 16]`.
///
/// # Panics
/// If `block` is not a positive multiple of [`GROUP`], or the lengths do not belong together.
#[inline(always)]
pub fn quantize_into(
    x: &[f32],
    block: usize,
    scales: &mut [f32],
    quants: &mut [i8],
    sums: &mut [i16],
) {
    let n = x.len();
    check_block(n, block);
    assert!(
        scales.len() == n / block && quants.len() == n && sums.len() == n / GROUP,
        "a scale per block, a quant per value and a sum per group"
    );
    let blocks = x.chunks_exact(block).zip(quants.chunks_exact_mut(block));
    for ((x, quants), scale) in blocks.zip(scales) {
        // Without their sign, floats order like integers, and NaN is above infinity.
        let amax = x.iter().fold(0_u32, |amax, v| amax.max(v.to_bits() & 0x7fff_ffff));
        let amax = f32::from_bits(amax);
        *scale = if amax.is_finite() { amax / 127.0 } else { f32::NAN };
        if *scale > 0.0 {
            for (quant, v) in quants.iter_mut().zip(x) {
                *quant = (v / *scale).round_ties_even() as i8;
            }
        } else {
            quants.fill(0);
        }
    }
    for (sum, group) in sums.iter_mut().zip(quants.as_chunks::<GROUP>().0) {
        *sum = group.iter().map(|q| i16::from(*q)).sum();
    }
}

#[inline(always)]
fn check_block(n: usize, block: usize) {
    assert!(block > 0 && block.is_multiple_of(GROUP), "a block of {block} is not made of groups");
    assert!(n.is_multiple_of(block), "a row of {n} is not made of blocks of {block}");
}

/// A row that owns its quants and can be filled again.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Q8Row {
    block: usize,
    scales: Vec<f32>,
    quants: Vec<i8>,
    sums: Vec<i16>,
}

impl Q8Row {
    /// An empty row; it allocates when it is filled for the first time, or with a longer row than before.
    pub const fn new() -> Self {
        Self { block: 0, scales: Vec::new(), quants: Vec::new(), sums: Vec::new() }
    }

    /// Quantises `x`, in place of what the row held; see [`quantize_into`].
    ///
    /// # Panics
    /// If `x` is not a whole number of blocks, or `block` not a positive multiple of [`GROUP`].
    pub fn quantize(&mut self, x: &[f32], block: usize) {
        check_block(x.len(), block);
        self.block = block;
        self.scales.resize(x.len() / block, 0.0);
        self.quants.resize(x.len(), 0);
        self.sums.resize(x.len() / GROUP, 0);
        quantize_into(x, block, &mut self.scales, &mut self.quants, &mut self.sums);
    }

    /// Values per scale.
    pub const fn block(&self) -> usize {
        self.block
    }

    /// `[n / block]`.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// `[n]`.
    pub fn quants(&self) -> &[i8] {
        &self.quants
    }

    /// Sums of the quants of each group of [`GROUP`], `[n / 16]`.
    pub fn sums(&self) -> &[i16] {
        &self.sums
    }

    /// The row as kernels take it.
    pub fn view(&self) -> Q8View<'_> {
        Q8View { block: self.block, scales: &self.scales, quants: &self.quants, sums: &self.sums }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(x: &[f32]) -> Q8Row {
        let mut row = Q8Row::new();
        row.quantize(x, x.len());
        row
    }

    #[test]
    fn the_largest_value_becomes_127_and_halves_go_to_even() {
        let mut x = [0.0; 32];
        x[..6].copy_from_slice(&[-127.0, 2.5, 3.5, -0.5, -1.5, 0.500_001]);
        let row = quantized(&x);
        assert_eq!(row.scales, [1.0]);
        assert_eq!(row.quants[..6], [-127, 2, 4, 0, -2, 1]);
        assert_eq!(row.sums, [-122, 0]);
    }

    #[test]
    fn every_quant_is_within_half_a_step_of_its_value() {
        let x: Vec<f32> = (0..256_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0)
            .collect();
        let row = quantized(&x);
        let scale = f64::from(row.scales[0]);
        for (x, q) in x.iter().zip(&row.quants) {
            // The division rounds too: by up to 127 · 2^-24 of a step.
            let error = (f64::from(*x) - scale * f64::from(*q)).abs();
            assert!(error <= scale * (0.5 + 127.0 / 16_777_216.0), "{x} {q}");
        }
        assert!(row.quants.iter().any(|q| q.unsigned_abs() == 127));
        for (sum, group) in row.sums.iter().zip(row.quants.chunks_exact(GROUP)) {
            assert_eq!(i32::from(*sum), group.iter().map(|q| i32::from(*q)).sum::<i32>());
        }
    }

    #[test]
    fn blocks_do_not_share_a_scale() {
        let x: Vec<f32> = (0..96).map(|i| [127.0, -254.0, 63.5][i / 32]).collect();
        let mut row = Q8Row::new();
        row.quantize(&x, 32);
        assert_eq!(row.scales(), [1.0, 2.0, 0.5]);
        assert_eq!(row.sums(), [2032, 2032, -2032, -2032, 2032, 2032]);
        row.quantize(&x[..32], 32);
        assert_eq!((row.scales().len(), row.quants().len(), row.sums().len()), (1, 32, 2));
    }

    #[test]
    fn zeros_have_scale_zero() {
        for zero in [0.0, -0.0, f32::from_bits(1), -f32::from_bits(63)] {
            let row = quantized(&[zero; 32]);
            assert_eq!((row.scales[0].to_bits(), row.quants[0]), (0, 0), "{zero:e}");
        }
    }

    #[test]
    fn quotients_of_a_subnormal_scale_saturate() {
        // 190 / 127 units round to a scale of one unit.
        let mut x = [f32::from_bits(190); 32];
        x[1] = -x[1];
        x[2] = f32::from_bits(100);
        let row = quantized(&x);
        assert_eq!(row.scales, [f32::from_bits(1)]);
        assert_eq!(row.quants[..3], [127, -128, 100]);
    }

    #[test]
    fn the_largest_floats_quantise_without_overflow() {
        let row = quantized(&[f32::MAX, -f32::MAX].repeat(16));
        assert_eq!(row.quants[..2], [127, -127]);
        assert!(row.scales[0].is_finite());
    }

    #[test]
    fn nan_and_infinity_poison_the_scale() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 64];
            x[17] = bad;
            let mut row = Q8Row::new();
            row.quantize(&x, 32);
            assert!(row.scales[0].is_nan() && row.quants[..32].iter().all(|q| *q == 0));
            assert_eq!(row.quants[32..], [127; 32], "the next block is unharmed");
        }
    }

    #[test]
    #[should_panic(expected = "not made of blocks of 32")]
    fn a_row_of_part_of_a_block_is_refused() {
        Q8Row::new().quantize(&[0.0; 48], 32);
    }
}
