//! RMS norm, alone and per head with rotation.

use quant::lanes;

/// `out = x / sqrt(mean(x²) + eps) ∘ weight`.
///
/// Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = inverse_rms(x, eps);
    for ((y, x), w) in out.iter_mut().zip(x).zip(weight) {
        *y = x * scale * w;
    }
}

/// As [`rms_norm`], in place.
#[inline(always)]
pub(crate) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms(x, eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean = lanes::dot(x, x) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Rotates the first values of a head, halves as in GPT-NeoX: pair `j` with `j + half`.
///
/// `angles`: cosines, then as many sines.
///
/// Source: Su et al. 2021 (arXiv:2104.09864).
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], angles: &[f32]) {
    let half = angles.len() / 2;
    let (cos, sin) = angles.split_at(half);
    let (low, high) = head[..2 * half].split_at_mut(half);
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (a.mul_add(*c, -(*b * s)), b.mul_add(*c, *a * s));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "bits are the contract")]

    use super::*;

    #[test]
    fn the_norm_divides_by_the_root_mean_square() {
        let x: Vec<f32> = (0..35).map(|i| (i as f32 - 11.0) * 0.37).collect();
        let weight: Vec<f32> = (0..35).map(|i| 1.0 + i as f32 * 0.01).collect();
        let mut out = vec![0.0; 35];
        rms_norm(&x, &weight, 1e-6, &mut out);
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 35.0;
        for ((y, x), w) in out.iter().zip(&x).zip(&weight) {
            let exact = f64::from(*x) / (mean + 1e-6).sqrt() * f64::from(*w);
            assert!((f64::from(*y) - exact).abs() <= 4e-7 * exact.abs());
        }
        let mut in_place = x.clone();
        rms_norm_in_place(&mut in_place, &weight, 1e-6);
        assert_eq!(in_place, out);
    }

    #[test]
    fn a_quarter_turn_swaps_the_halves() {
        let mut head = [1.0, 2.0, 3.0, 4.0, 9.0];
        rotate(&mut head, &[0.0, 1.0, 1.0, 0.0]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0, 9.0]);
    }
}
