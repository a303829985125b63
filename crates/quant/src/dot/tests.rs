use super::*;

/// Bytes without a short period (splitmix64).
fn random_bytes(n: usize, mut state: u64) -> Vec<u8> {
    let next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as u8
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn check_bounds<F: Format>(format: F, shape: Shape, name: &str) {
    let mut unpacked = Unpacked::new();
    let (mut largest, mut largest_min) = (0, 0);
    for block in random_bytes(4000 * shape.bytes, 7).chunks_exact(shape.bytes) {
        format.unpack(block, &mut unpacked);
        for g in 0..shape.len / GROUP {
            for c in &unpacked.codes[GROUP * g..GROUP * (g + 1)] {
                let code = i32::from(*c) + i32::from(F::OFFSET);
                let product = i32::from(unpacked.scales[g]) * code;
                largest = largest.max(product.abs());
            }
            if F::LARGEST_MIN > 0 {
                assert!(unpacked.mins[g] >= 0, "{name}");
                largest_min = largest_min.max(i32::from(unpacked.mins[g]));
            }
        }
    }
    assert_eq!((largest, largest_min), (F::LARGEST, F::LARGEST_MIN), "{name}");
}

#[test]
fn products_of_codes_and_sub_scales_reach_their_stated_bound_and_never_pass_it() {
    for ty in BlockType::ALL {
        with_format!(ty, format, shape => check_bounds(format, shape, ty.name()), {});
    }
}

fn check_rounding<F: Format>(format: F, shape: Shape, ty: BlockType) {
    let wide = |affine: crate::Affine| affine.scales() == ScaleType::F32;
    let exact_products = !matches!(ty, BlockType::Affine(affine) if wide(affine));
    let mut unpacked = Unpacked::new();
    let mut values = [0.0; MAX_BLOCK];
    for block in random_bytes(400 * shape.bytes, 8).chunks_exact(shape.bytes) {
        decode_block(format, block, &mut unpacked, &mut values[..shape.len]);
        let has_min = F::LARGEST_MIN > 0;
        if !unpacked.scale.is_finite() || has_min && !unpacked.min_scale.is_finite() {
            continue;
        }
        for (i, value) in values[..shape.len].iter().enumerate() {
            let (sc, mn) = (unpacked.scales[i / GROUP], unpacked.mins[i / GROUP]);
            let code = f64::from(i16::from(unpacked.codes[i]) + F::OFFSET);
            let code = f64::from(unpacked.scale) * f64::from(sc) * code;
            let min = if has_min { f64::from(unpacked.min_scale) * f64::from(mn) } else { 0.0 };
            let error = (f64::from(*value) - (code + min)).abs();
            // Half a unit in the last place; f64 itself may round the sum, far below that.
            let half_ulp = |v: f32| f64::from(v.abs().next_up() - v.abs()) * 0.5;
            let mut allowed = if has_min { half_ulp(*value) * (1.0 + 1e-6) } else { 0.0 };
            if !exact_products {
                allowed += half_ulp(code as f32);
            }
            // The two largest MXFP4 scales overflow, and large ones of BF16 and F32.
            let overflow =
                value.is_infinite() && code.abs().max((code + min).abs()) > f64::from(f32::MAX);
            assert!(overflow || error <= allowed, "{ty} value {i}: {value:e}, off by {error:e}");
        }
    }
}

#[test]
fn values_without_a_minimum_are_exact_and_others_round_once_or_twice_with_wide_scales() {
    for ty in BlockType::ALL {
        with_format!(ty, format, shape => check_rounding(format, shape, ty), {});
    }
}
