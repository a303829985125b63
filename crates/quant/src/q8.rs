//! Activations in 8 bit: one scale per block of the weight that they meet.

/// Quants that share a group sum: the finest group that a format's minima use.
pub const GROUP: usize = 16;

/// A quantised activation row, or a part of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Q8View<'a> {
    /// Values per scale: 32 or 256.
    pub block: usize,
    /// `[n / block]`.
    pub scales: &'a [f32],
    /// `[n]`.
    pub quants: &'a [i8],
    /// `Σ quants` over each group of [`GROUP`], `[n / 16]`.
    pub sums: &'a [i16],
}

/// Quantises `x`, a whole number of blocks.
///
/// Per block: `scale = amax / 127`, `quant = round_half_even(x / scale)` in IEEE single arithmetic. A block of zeros
/// (or of values so small that the scale is zero) has scale 0 and quants 0. A block that holds NaN or infinity has
/// scale NaN and quants 0, so that the damage stays visible in every product.
///
/// # Panics
/// If the lengths do not belong together.
#[inline(always)]
pub fn quantize_into(x: &[f32], block: usize, scales: &mut [f32], quants: &mut [i8], sums: &mut [i16]) {
    assert!(x.len().is_multiple_of(block) && block.is_multiple_of(GROUP), "rows are made of whole blocks");
    assert!(scales.len() == x.len() / block && quants.len() == x.len() && sums.len() == x.len() / GROUP);
    for ((x, quants), scale) in x.chunks_exact(block).zip(quants.chunks_exact_mut(block)).zip(scales) {
        // Without their sign, floats order like integers, and NaN is above infinity.
        let amax = x.iter().fold(0_u32, |amax, v| amax.max(v.to_bits() & 0x7fff_ffff));
        *scale = if amax < 0x7f80_0000 { f32::from_bits(amax) / 127.0 } else { f32::NAN };
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

/// A row that owns its quants and can be filled again.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Q8Row {
    block: usize,
    scales: Vec<f32>,
    quants: Vec<i8>,
    sums: Vec<i16>,
}

impl Q8Row {
    /// An empty row.
    pub const fn new() -> Self {
        Self { block: 32, scales: Vec::new(), quants: Vec::new(), sums: Vec::new() }
    }

    /// Quantises `x`; see [`quantize_into`].
    pub fn quantize(&mut self, x: &[f32], block: usize) {
        self.block = block;
        self.scales.resize(x.len() / block, 0.0);
        self.quants.resize(x.len(), 0);
        self.sums.resize(x.len() / GROUP, 0);
        quantize_into(x, block, &mut self.scales, &mut self.quants, &mut self.sums);
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
        x[..4].copy_from_slice(&[-127.0, 2.5, 3.5, -0.5]);
        let row = quantized(&x);
        assert_eq!(row.scales, [1.0]);
        assert_eq!(row.quants[..4], [-127, 2, 4, 0]);
        assert_eq!(row.sums, [-121, 0]);
    }

    #[test]
    fn zeros_have_scale_zero() {
        let row = quantized(&[0.0; 32]);
        assert_eq!((row.scales[0], row.quants[0]), (0.0, 0));
        let tiny = quantized(&[f32::from_bits(1); 32]);
        assert_eq!((tiny.scales[0], tiny.quants[0]), (0.0, 0));
    }

    #[test]
    fn nan_and_infinity_poison_the_scale() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; 32];
            x[17] = bad;
            let row = quantized(&x);
            assert!(row.scales[0].is_nan() && row.quants.iter().all(|q| *q == 0));
        }
    }
}
