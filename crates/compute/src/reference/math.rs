//! exp, sigmoid, SiLU, softplus: one formula each, in a fixed order of fused multiply-adds.
//!
//! The platform's libm differs between systems by an ulp here and there; these do not.

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts; the first has trailing zeros, so that `n · LN2_HI` is exact for every exponent `n`.
const LN2_HI: f32 = 0.693_145_75;
const LN2_LO: f32 = 1.428_606_8e-6;
/// Adding 1.5 · 2^23 rounds to an integer, to nearest even, and leaves it in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;
/// Below, e^x rounds to 0; above, to infinity.
const EXP_MIN: f32 = -104.0;
const EXP_MAX: f32 = 89.0;

/// `e^x` within 1 ulp. NaN stays NaN.
///
/// `x = n·ln 2 + r`, `e^r` by its Taylor polynomial of degree 7 (|r| ≤ 0.347, remainder 5e-9), times `2^n` in two
/// exact steps, so that subnormal results round once.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Written as selections, not as `clamp`: NaN must fall through.
    let x = if x < EXP_MIN { EXP_MIN } else { x };
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut p = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = r.mul_add(p, coefficient);
    }
    let n = shifted.to_bits().cast_signed().wrapping_sub(ROUND.to_bits().cast_signed());
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `2^n` for an exponent that a normal number can have.
#[inline(always)]
const fn power_of_two(n: i32) -> f32 {
    f32::from_bits(n.wrapping_add(127).cast_unsigned() << 23)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x · sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `ln(1 + e^x)` within 2 ulp, also for large `x`. NaN stays NaN.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    let positive = if x > 0.0 { x } else { 0.0 };
    positive + ln_1p(exp(-x.abs()))
}

/// `ln(1 + u)` for `u` in `[0, 1]`.
///
/// `2·atanh(s)` with `s = u / (2 + u) <= 1/3`, by its Taylor polynomial up to `s^17` (remainder 2e-10 of the result).
/// `s` is kept to more than single precision: the division's remainder is added as `tail`.
#[inline(always)]
fn ln_1p(u: f32) -> f32 {
    let divisor = 2.0 + u;
    let lost = u - (divisor - 2.0);
    let s = u / divisor;
    let remainder = s.mul_add(-lost, s.mul_add(-divisor, u));
    let (double, tail) = (2.0 * s, 2.0 * (remainder / divisor));
    let square = s * s;
    let mut p = 1.0 / 17.0;
    for coefficient in
        [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0]
    {
        p = square.mul_add(p, coefficient);
    }
    double + double.mul_add(square * p, tail)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "bits are the contract")]

    use super::*;

    fn ulps(a: f32, exact: f64) -> f64 {
        let nearest = exact as f32;
        let step =
            f64::from(f32::from_bits(nearest.abs().to_bits() + 1)) - f64::from(nearest.abs());
        (f64::from(a) - exact).abs() / step
    }

    #[test]
    fn exp_is_within_one_ulp_over_its_whole_range() {
        for i in 0..2_000_000 {
            let x = -87.3 + i as f32 * (88.7 + 87.3) / 2_000_000.0;
            let error = ulps(exp(x), f64::from(x).exp());
            assert!(error <= 1.0, "exp({x}) is off by {error} ulp");
        }
    }

    #[test]
    fn exp_handles_the_ends_of_the_line() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-100.0) > 0.0 && exp(-100.0) < 1e-43);
    }

    #[test]
    fn gates_agree_with_double_precision() {
        let mut worst = [0.0_f64; 3];
        for i in -870_000..870_000 {
            let x = i as f32 * 1e-4;
            let wide = f64::from(x);
            let sigmoid_of_x = 1.0 / (1.0 + (-wide).exp());
            let softplus_of_x = wide.max(0.0) + (-wide.abs()).exp().ln_1p();
            let found = [(sigmoid(x), sigmoid_of_x), (silu(x), wide * sigmoid_of_x)];
            for (worst, (y, exact)) in worst.iter_mut().zip(found) {
                *worst = worst.max(if x == 0.0 { 0.0 } else { ulps(y, exact) });
            }
            worst[2] = worst[2].max(ulps(softplus(x), softplus_of_x));
        }
        // Of the exponential's error and three roundings, two of which a quotient near a power of two can double.
        assert!(worst[0] <= 2.5 && worst[1] <= 2.5, "sigmoid, silu: {worst:?}");
        assert!(worst[2] <= 2.0, "softplus: {worst:?}");
    }

    #[test]
    fn gates_handle_the_ends_of_the_line() {
        assert_eq!((sigmoid(-1e9), sigmoid(1e9)), (0.0, 1.0));
        assert_eq!((silu(-1e9), silu(1e9)), (0.0, 1e9));
        assert_eq!((softplus(-1e9), softplus(1e9), softplus(100.0)), (0.0, 1e9, 100.0));
        assert_eq!((softplus(f32::INFINITY), softplus(f32::NEG_INFINITY)), (f32::INFINITY, 0.0));
        for gate in [sigmoid, silu, softplus] {
            assert!(gate(f32::NAN).is_nan());
        }
    }
}
