//! Exact conversions of floats of 8 and 16 bits, without run-time feature checks.

/// IEEE half to single: exact, also for subnormals, infinities and NaN.
#[inline(always)]
pub const fn f16_to_f32(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let magnitude = bits as u32 & 0x7fff;
    if magnitude >= 0x7c00 {
        return f32::from_bits(sign | 0x7f80_0000 | (magnitude & 0x3ff) << 13);
    }
    let value = if magnitude < 0x400 {
        // Subnormal halves count units of 2^-24. (Shifting them into place would make subnormal singles, on which
        // many CPUs take a hundred cycles, and block scales are often that small.)
        magnitude as f32 / 16_777_216.0
    } else {
        f32::from_bits((magnitude << 13) + (112 << 23))
    };
    f32::from_bits(value.to_bits() | sign)
}

/// The upper 16 bits of a single.
#[inline(always)]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// E4M3 (OCP's, "FN") to single: exact. It has no infinities; 0x7f and 0xff are NaN.
#[inline(always)]
pub const fn f8_to_f32(bits: u8) -> f32 {
    let sign = (bits as u32 & 0x80) << 24;
    let magnitude = bits as u32 & 0x7f;
    let value = if magnitude == 0x7f {
        f32::NAN
    } else if magnitude < 8 {
        // Subnormal: units of 2^-9.
        magnitude as f32 / 512.0
    } else {
        f32::from_bits((magnitude << 20) + (120 << 23))
    };
    f32::from_bits(value.to_bits() | sign)
}

/// Single to IEEE half, round to nearest even; overflow gives infinity.
#[inline(always)]
pub const fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | (magnitude >> 13) as u16 & 0x3ff;
    }
    // 65520 and above round to infinity.
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    if magnitude < 0x3880_0000 {
        // Subnormal half: adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the adder.
        let shifted = f32::from_bits(magnitude) + 0.5;
        return sign | (shifted.to_bits() - 0.5_f32.to_bits()) as u16;
    }
    let odd = (magnitude >> 13) & 1;
    let rounded = magnitude.wrapping_sub(112 << 23) + 0xfff + odd;
    sign | (rounded >> 13) as u16
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "the values are exact")]

    use super::*;

    #[test]
    fn every_half_converts_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32_const());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#06x}"
            );
            let ours = bf16_to_f32(bits);
            assert!(ours.to_bits() == u32::from(bits) << 16);
        }
    }

    #[test]
    fn every_e4m3_code_has_the_value_of_its_fields() {
        for bits in 0..=u8::MAX {
            let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
            let magnitude = match exponent {
                15 if mantissa == 7.0 => f32::NAN,
                0 => mantissa / 8.0 * 2.0_f32.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
            };
            let expected = if bits < 0x80 { magnitude } else { -magnitude };
            assert_eq!(f8_to_f32(bits).to_bits(), expected.to_bits(), "{bits:#04x}");
        }
        assert_eq!((f8_to_f32(0x7e), f8_to_f32(0x01)), (448.0, 0.001_953_125));
    }

    #[test]
    fn singles_round_to_half_as_the_half_crate_does() {
        let steps = (0..=u32::MAX).step_by(9_973).chain((0..=u16::MAX).flat_map(|h| {
            let exact = f16_to_f32(h).to_bits();
            [exact, exact + 1, exact.wrapping_sub(1), exact + 0x1000, exact + 0x1001, exact + 0xfff]
        }));
        for bits in steps {
            let value = f32::from_bits(bits);
            let (ours, theirs) = (f32_to_f16(value), half::f16::from_f32_const(value).to_bits());
            assert!(ours == theirs || value.is_nan(), "{value:e}: {ours:#06x} {theirs:#06x}");
        }
    }
}
