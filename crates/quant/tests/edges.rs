//! Hand-made blocks: scales and codes at the ends of their ranges, expected values worked out from the formulas.

mod outlined;

use outlined::{decode_row, dot_f32, dot_q8};
use quant::{Affine, BlockType, Q8Row, ScaleType, f16_to_f32};

fn quantised() -> impl Iterator<Item = BlockType> {
    BlockType::ALL.into_iter().filter(|ty| !ty.is_float())
}

/// Where a block of GGML keeps its f16 scales. `IQ1_M` spreads one over four words, `MXFP4` has none.
fn f16_scales(ty: BlockType) -> &'static [usize] {
    match ty {
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
        BlockType::Q2K => &[80, 82],
        BlockType::Q3K => &[108],
        BlockType::Q6K => &[208],
        BlockType::Iq1M | BlockType::Mxfp4 | BlockType::Affine(_) => &[],
        _ => &[0],
    }
}

/// A block of `fill` bytes with every scale set to the half `bits`, or what that is in another type.
fn block(ty: BlockType, fill: u8, bits: u16) -> Vec<u8> {
    let mut block = vec![fill; ty.block_bytes()];
    for at in f16_scales(ty) {
        block[*at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }
    if let BlockType::Affine(affine) = ty {
        let scale = scale_bytes(affine.scales(), bits);
        block[..2 * scale.len()].copy_from_slice(&scale.repeat(2));
    }
    if ty == BlockType::Iq1M {
        // The upper four bits of the words, the lowest first.
        for j in 0..4 {
            block[49 + 2 * j] = block[49 + 2 * j] & 0x0f | ((bits >> (4 * j)) as u8 & 15) << 4;
        }
    }
    block
}

/// A half as a scale of this type; NaN stays NaN.
fn scale_bytes(scales: ScaleType, half: u16) -> Vec<u8> {
    let single = f16_to_f32(half).to_le_bytes();
    match scales {
        ScaleType::Bf16 if half & 0x7fff > 0x7c00 => vec![0x81, 0x7f],
        ScaleType::Bf16 => single[2..].to_vec(),
        ScaleType::F16 => half.to_le_bytes().to_vec(),
        ScaleType::F32 => single.to_vec(),
    }
}

fn affine(bits: u32, group: u32, scales: ScaleType) -> BlockType {
    BlockType::Affine(Affine::new(bits, group, scales).expect("a format of MLX"))
}

/// The affine types of [`BlockType::ALL`], with what they are.
fn affines() -> impl Iterator<Item = (BlockType, Affine)> {
    BlockType::ALL.into_iter().filter_map(|ty| match ty {
        BlockType::Affine(affine) => Some((ty, affine)),
        _ => None,
    })
}

fn decode(ty: BlockType, block: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::from_bits(0x7fc0_1234); ty.block_len()];
    decode_row(ty, block, &mut values);
    values
}

fn check(ty: BlockType, block: &[u8], expected: impl Fn(usize) -> f32) {
    for (i, value) in decode(ty, block).into_iter().enumerate() {
        let expected = expected(i);
        assert_eq!(value.to_bits(), expected.to_bits(), "{ty} value {i}: {value:e} {expected:e}");
    }
}

#[test]
fn zero_scales_give_zeros() {
    for ty in quantised().filter(|ty| *ty != BlockType::Mxfp4) {
        for fill in [0x00, 0x5a, 0x80, 0xff] {
            assert!(decode(ty, &block(ty, fill, 0)).iter().all(|y| *y == 0.0), "{ty} {fill:#x}");
        }
    }
}

#[test]
fn a_nan_or_infinite_scale_is_never_a_number() {
    for ty in quantised().filter(|ty| *ty != BlockType::Mxfp4) {
        for bits in [0x7c00, 0xfc00, 0x7c01, 0x7e00, 0xffff] {
            for fill in [0x00, 0x5a, 0xff] {
                let block = block(ty, fill, bits);
                let finite = decode(ty, &block).iter().filter(|y| y.is_finite()).count();
                assert_eq!(finite, 0, "{ty} {bits:#x} {fill:#x}");
                let x = vec![1.0; ty.block_len()];
                assert!(!dot_f32(ty, &block, &x).is_finite(), "{ty} {bits:#x} {fill:#x}");
                let mut x8 = Q8Row::new();
                x8.quantize(&x, ty.activation_block());
                assert!(!dot_q8(ty, &block, x8.view()).is_finite(), "{ty} {bits:#x} {fill:#x}");
            }
        }
    }
}

#[test]
fn nan_and_infinity_in_activations_reach_every_product() {
    for ty in quantised() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, ty.block_len(), 2 * ty.block_len() - 1] {
                let mut x = vec![1.0; 3 * ty.block_len()];
                x[at] = bad;
                let row = block(ty, 0x15, 0x3c00).repeat(3);
                let mut x8 = Q8Row::new();
                x8.quantize(&x, ty.activation_block());
                assert!(dot_q8(ty, &row, x8.view()).is_nan(), "{ty} {bad} at {at}");
                assert!(!dot_f32(ty, &row, &x).is_finite(), "{ty} {bad} at {at}");
            }
        }
    }
}

#[test]
fn zero_activations_give_zero() {
    for ty in quantised() {
        let row = block(ty, 0xd7, 0x3c00).repeat(2);
        let mut x8 = Q8Row::new();
        x8.quantize(&vec![0.0; 2 * ty.block_len()], ty.activation_block());
        assert_eq!(dot_q8(ty, &row, x8.view()).to_bits(), 0, "{ty}");
    }
}

#[test]
fn the_sign_of_zero_follows_the_scale() {
    // Code 8 stands for 0, and the scale is -1 or 1.
    check(BlockType::Q4_0, &block(BlockType::Q4_0, 0x88, 0xbc00), |_| -0.0);
    check(BlockType::Q4_0, &block(BlockType::Q4_0, 0x88, 0x3c00), |_| 0.0);
    check(BlockType::Q8_0, &block(BlockType::Q8_0, 0, 0x8000), |_| -0.0);
    // The second zero of MXFP4 is not negative.
    check(BlockType::Mxfp4, &block(BlockType::Mxfp4, 0x88, 0), |_| 0.0);
}

#[test]
fn subnormal_and_largest_halves_are_exact_scales() {
    let unit = 2.0_f32.powi(-24);
    check(BlockType::Q8_0, &block(BlockType::Q8_0, 127, 1), |_| 127.0 * unit);
    check(BlockType::Q8_0, &block(BlockType::Q8_0, 0x80, 0x8001), |_| 128.0 * unit);
    check(BlockType::Q8_0, &block(BlockType::Q8_0, 0x80, 0x03ff), |_| -128.0 * 1023.0 * unit);
    check(BlockType::Q8_0, &block(BlockType::Q8_0, 0x80, 0x7bff), |_| -128.0 * 65_504.0);
}

#[test]
fn codes_and_sub_scales_of_the_largest_size() {
    // Sub-scale -128, code 0 - 32.
    let mut q6 = block(BlockType::Q6K, 0, 0x3c00);
    q6[192..208].fill(0x80);
    check(BlockType::Q6K, &q6, |_| 4096.0);
    // All bits set: sub-scale and minimum 63, code 15 or 31.
    check(BlockType::Q4K, &block(BlockType::Q4K, 0xff, 0x3c00), |_| 63.0 * 14.0);
    check(BlockType::Q5K, &block(BlockType::Q5K, 0xff, 0x3c00), |_| 63.0 * 30.0);
    check(BlockType::Q2K, &block(BlockType::Q2K, 0xff, 0x3c00), |_| 15.0 * 2.0);
    check(BlockType::Q3K, &block(BlockType::Q3K, 0, 0x3c00), |_| 128.0);
    check(BlockType::Q3K, &block(BlockType::Q3K, 0xff, 0x3c00), |_| 31.0 * 3.0);
    check(BlockType::Q4_1, &block(BlockType::Q4_1, 0xff, 0x3c00), |_| 16.0);
    check(BlockType::Q5_1, &block(BlockType::Q5_1, 0xff, 0x3c00), |_| 32.0);
    check(BlockType::Q5_0, &block(BlockType::Q5_0, 0, 0x3c00), |_| -16.0);
    check(BlockType::Iq4Nl, &block(BlockType::Iq4Nl, 0, 0x3c00), |_| -127.0);
    check(BlockType::Iq4Xs, &block(BlockType::Iq4Xs, 0, 0x3c00), |_| 32.0 * 127.0);
}

#[test]
fn products_of_the_largest_integers_do_not_overflow() {
    // 256 · 4096 · 127 needs 27 bits: exact as i32, and as f32 because the low bits are zero.
    let mut q6 = block(BlockType::Q6K, 0, 0x3c00);
    q6[192..208].fill(0x80);
    let mut x8 = Q8Row::new();
    x8.quantize(&[-127.0; 512], 256);
    let product = dot_q8(BlockType::Q6K, &q6.repeat(2), x8.view());
    assert_eq!(product.to_bits(), (-2.0_f32 * 256.0 * 4096.0 * 127.0).to_bits());
}

#[test]
fn mxfp4_scales_are_powers_of_two_from_subnormal_to_overflow() {
    let ty = BlockType::Mxfp4;
    let of = |e: u8, codes: u8| {
        let mut block = block(ty, codes, 0);
        block[0] = e;
        block
    };
    // Low nibble 1 (value 1), high nibble 15 (value -12).
    for (e, unit) in [
        (0, f32::from_bits(1 << 21)),
        (1, f32::from_bits(1 << 22)),
        (2, f32::MIN_POSITIVE),
        (127, 0.5),
        (128, 1.0),
        (251, 2.0_f32.powi(123)),
    ] {
        check(ty, &of(e, 0xf1), |i| if i < 16 { unit } else { -12.0 * unit });
    }
    check(ty, &of(255, 0xf1), |i| if i < 16 { 2.0_f32.powi(127) } else { f32::NEG_INFINITY });
    // E2M1 doubled, in the order of its codes.
    let levels =
        [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];
    for code in 0..16_u8 {
        check(ty, &of(128, code * 0x11), |_| levels[usize::from(code)]);
    }
}

#[test]
fn low_nibbles_are_the_first_half_of_a_block() {
    for (ty, low, high) in [
        (BlockType::Q4_0, 1.0 - 8.0, 2.0 - 8.0),
        (BlockType::Q4_1, 1.0 + 1.0, 2.0 + 1.0),
        (BlockType::Iq4Nl, -104.0, -83.0),
    ] {
        check(ty, &block(ty, 0x21, 0x3c00), |i| if i < 16 { low } else { high });
    }
}

#[test]
fn affine_codes_are_one_bit_stream_with_the_lowest_bits_first() {
    for (ty, affine) in affines() {
        let (bits, head) = (affine.bits(), 2 * affine.scales().bytes());
        // One bit of the stream at a time: scale 1, bias 0.
        for bit in 0..affine.group() * bits {
            let mut block = block(ty, 0, 0);
            let one = scale_bytes(affine.scales(), 0x3c00);
            block[..one.len()].copy_from_slice(&one);
            block[head + bit / 8] = 1 << (bit % 8);
            let value = (1 << (bit % bits)) as f32;
            check(ty, &block, |i| if i == bit / bits { value } else { 0.0 });
        }
    }
}

#[test]
fn affine_scales_may_be_negative_and_codes_reach_their_largest_value() {
    for (ty, affine) in affines() {
        let largest = ((1 << affine.bits()) - 1) as f32;
        check(ty, &block(ty, 0xff, 0x3c00), |_| largest + 1.0);
        // Scale and bias -2: the bias is the largest value.
        check(ty, &block(ty, 0xff, 0xc000), |_| -2.0 * largest - 2.0);
        check(ty, &block(ty, 0x00, 0xc000), |_| -2.0);
    }
}

#[test]
fn affine_values_are_rounded_after_the_product_and_after_the_sum() {
    // (1 + 2^-23) · 3 rounds to 3 + 2^-21, a tie to even; less 3 that is exact. Fused it would be 3 · 2^-23.
    let ty = affine(2, 32, ScaleType::F32);
    let mut block = block(ty, 0xff, 0);
    block[..4].copy_from_slice(&(1.0 + f32::EPSILON).to_le_bytes());
    block[4..8].copy_from_slice(&(-3.0_f32).to_le_bytes());
    check(ty, &block, |_| 4.0 * f32::EPSILON);
}

#[test]
fn affine_products_are_exact_in_codes_and_quants() {
    for (ty, affine) in affines() {
        let largest = ((1 << affine.bits()) - 1) as f32;
        let n_in = 2 * affine.group();
        let mut x8 = Q8Row::new();
        x8.quantize(&vec![-127.0; n_in], affine.group());
        // Scale and bias 1.
        let row = block(ty, 0xff, 0x3c00).repeat(2);
        let expected = -127.0 * (largest + 1.0) * n_in as f32;
        assert_eq!(dot_q8(ty, &row, x8.view()).to_bits(), expected.to_bits(), "{ty}");
    }
}

#[test]
fn fp8_has_no_infinity_but_nan() {
    for scales in ScaleType::ALL {
        let ty = BlockType::Fp8(scales);
        for code in [0x7f, 0xff] {
            let block = [scale_bytes(scales, 0x3c00), vec![code; 128]].concat();
            assert!(decode(ty, &block).iter().all(|y| y.is_nan()), "{ty}");
            assert!(dot_f32(ty, &block, &[0.0; 128]).is_nan(), "{ty}");
        }
        let block = [scale_bytes(scales, 0xbc00), vec![0x7e; 128]].concat();
        check(ty, &block, |_| -448.0);
        assert_eq!(dot_f32(ty, &block, &[1.0; 128]).to_bits(), (-448.0_f32 * 128.0).to_bits());
        let block = [scale_bytes(scales, 0x7e00), vec![0x38; 128]].concat();
        assert!(decode(ty, &block).iter().all(|y| y.is_nan()), "{ty}: the scale is not a number");
    }
}

#[test]
fn an_empty_row_is_zero() {
    for ty in BlockType::ALL {
        decode_row(ty, &[], &mut []);
        assert_eq!(dot_f32(ty, &[], &[]).to_bits(), 0, "{ty}");
    }
}

#[test]
#[should_panic(expected = "the bytes of a Q4_K row of 512 values")]
fn a_row_that_is_too_short_is_refused() {
    decode_row(BlockType::Q4K, &[0; 144], &mut [0.0; 512]);
}

#[test]
#[should_panic(expected = "activations in blocks of the Q4_K weight")]
fn activations_of_another_block_are_refused() {
    let mut x8 = Q8Row::new();
    x8.quantize(&[1.0; 256], 32);
    dot_q8(BlockType::Q4K, &[0; 144], x8.view());
}

#[test]
#[should_panic(expected = "a scale per block")]
fn activations_without_their_scales_are_refused() {
    let mut x8 = Q8Row::new();
    x8.quantize(&[1.0; 64], 32);
    let view = quant::Q8View { scales: &x8.scales()[..1], ..x8.view() };
    dot_q8(BlockType::Q8_0, &[0; 68], view);
}

#[test]
#[should_panic(expected = "F16 weights are multiplied in float")]
fn float_weights_have_no_8_bit_product() {
    let view = quant::Q8View { block: 1, scales: &[], quants: &[], sums: &[] };
    dot_q8(BlockType::F16, &[], view);
}

#[test]
#[should_panic(expected = "FP8-F32 weights are multiplied in float")]
fn fp8_weights_have_no_8_bit_product() {
    let view = quant::Q8View { block: 128, scales: &[], quants: &[], sums: &[] };
    dot_q8(BlockType::Fp8(ScaleType::F32), &[], view);
}
