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

fn check_bounds<F: Format>(name: &str) {
    let mut unpacked = Unpacked::new();
    let (mut largest, mut largest_min) = (0, 0);
    for block in random_bytes(4000 * F::BYTES, 7).chunks_exact(F::BYTES) {
        F::unpack(block, &mut unpacked);
        for g in 0..F::LEN / GROUP {
            for c in &unpacked.codes[GROUP * g..GROUP * (g + 1)] {
                let product = i32::from(unpacked.scales[g]) * i32::from(*c);
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
        with_format!(ty, F => check_bounds::<F>(ty.name()), {});
    }
}

fn check_rounding<F: Format>(name: &str) {
    let mut unpacked = Unpacked::new();
    let mut values = [0.0; MAX_BLOCK];
    for block in random_bytes(400 * F::BYTES, 8).chunks_exact(F::BYTES) {
        decode_block::<F>(block, &mut unpacked, &mut values[..F::LEN]);
        let has_min = F::LARGEST_MIN > 0;
        if !unpacked.scale.is_finite() || has_min && !unpacked.min_scale.is_finite() {
            continue;
        }
        for (i, value) in values[..F::LEN].iter().enumerate() {
            let (sc, mn) = (unpacked.scales[i / GROUP], unpacked.mins[i / GROUP]);
            let code = f64::from(unpacked.scale) * f64::from(sc) * f64::from(unpacked.codes[i]);
            let min = if has_min { f64::from(unpacked.min_scale) * f64::from(mn) } else { 0.0 };
            let error = (f64::from(*value) - (code + min)).abs();
            // Half a unit in the last place; f64 itself may round the sum, far below that.
            let half_ulp = f64::from(value.abs().next_up() - value.abs()) * 0.5;
            let allowed = if has_min { half_ulp * (1.0 + 1e-6) } else { 0.0 };
            // The two largest MXFP4 scales overflow.
            let overflow = value.is_infinite() && code.abs() > f64::from(f32::MAX);
            assert!(overflow || error <= allowed, "{name} value {i}: {value:e}, off by {error:e}");
        }
    }
}

#[test]
fn values_without_a_minimum_are_exact_and_others_round_once() {
    for ty in BlockType::ALL {
        with_format!(ty, F => check_rounding::<F>(ty.name()), {});
    }
}
