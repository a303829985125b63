//! Every format against values and products that other software computed.

mod outlined;
mod vectors;

use outlined::{decode_row, dot_f32, dot_q8};
use quant::{BlockType, Q8Row, ScaleType};
use vectors::{Matrix, Part, Vectors};

/// Largest relative error of one rounding.
const U: f64 = f32::EPSILON as f64 / 2.0;

/// Relative error of `n` roundings in a row, `n·u / (1 - n·u)`.
fn gamma(n: usize) -> f64 {
    let nu = n as f64 * U;
    nu / (1.0 - nu)
}

fn check_values(part: &Part) {
    let ty = part.block_type;
    assert_eq!(part.row_bytes % ty.block_bytes(), 0, "{ty}");
    let mut values = vec![f32::NAN; part.values.len()];
    decode_row(ty, &part.raw, &mut values);
    for (i, (value, expected)) in values.iter().zip(&part.values).enumerate() {
        assert_eq!(value.to_bits(), expected.to_bits(), "{ty} value {i}: {value:e} {expected:e}");
    }
}

#[test]
fn every_format_decodes_to_the_reference_values_bit_for_bit() {
    let vectors = Vectors::ggml();
    let parts = vectors.random();
    assert_eq!(parts.len(), 22);
    for part in &parts {
        assert!(part.values.len() >= 1000, "{}", part.block_type);
        check_values(part);
    }
    for matrix in vectors::matrices() {
        check_values(&matrix.weights);
    }
}

#[test]
fn fp8_blocks_are_e4m3_times_their_scale() {
    let (codes, values) = Vectors::e4m3();
    assert_eq!((codes.len(), values.len()), (256, 256));
    // Two blocks of 128. Each scale is a number of its type.
    for (scales, [first, second]) in [
        (ScaleType::F32, [1.0, 0.007_812_6_f32]),
        (ScaleType::Bf16, [-3.984_375, 2.0_f32.powi(-133)]),
        (ScaleType::F16, [1.0 / 1024.0, 2047.0 / 1024.0]),
    ] {
        let bytes = |scale: f32| match scales {
            ScaleType::F32 => scale.to_le_bytes().to_vec(),
            ScaleType::Bf16 => scale.to_le_bytes()[2..].to_vec(),
            ScaleType::F16 => quant::f32_to_f16(scale).to_le_bytes().to_vec(),
        };
        let row = [&bytes(first)[..], &codes[..128], &bytes(second)[..], &codes[128..]].concat();
        let mut out = [0.0; 256];
        decode_row(BlockType::Fp8(scales), &row, &mut out);
        for (i, (y, value)) in out.iter().zip(&values).enumerate() {
            let expected = if i < 128 { first * value } else { second * value };
            let nan = i % 128 == 127;
            assert_eq!((value.is_nan(), y.is_nan()), (nan, nan), "{scales:?} code {i}");
            assert!(nan || y.to_bits() == expected.to_bits(), "{scales:?} code {i}: {y:e}");
        }
    }
}

#[test]
fn bare_e4m3_decodes_to_the_reference_values_and_is_multiplied_in_float() {
    let (codes, values) = Vectors::e4m3();
    let mut out = [0.0; 256];
    decode_row(BlockType::E4m3, &codes, &mut out);
    for (i, (y, value)) in out.iter().zip(&values).enumerate() {
        let nan = i % 128 == 127;
        assert_eq!((value.is_nan(), y.is_nan()), (nan, nan), "code {i}");
        assert!(nan || y.to_bits() == value.to_bits(), "code {i}: {y:e} {value:e}");
        // A row is any number of values.
        let (mut one, code) = ([f32::NAN], codes[i]);
        decode_row(BlockType::E4m3, &[code], &mut one);
        assert_eq!(one[0].to_bits(), y.to_bits(), "code {i}");
        if !nan {
            assert_eq!(
                dot_f32(BlockType::E4m3, &[code], &[-2.0]).to_bits(),
                (-2.0 * y + 0.0).to_bits()
            );
        }
    }
}

#[test]
fn singles_decode_to_themselves() {
    let values =
        [0.0, -0.0, 1.5, f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, f32::NEG_INFINITY];
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut out = [f32::NAN; 7];
    decode_row(BlockType::F32, &bytes, &mut out);
    assert_eq!(out.map(f32::to_bits), values.map(f32::to_bits));
}

/// `(Σ w·x, Σ |w·x|)`.
fn exact(weights: &[f32], x: impl Fn(usize) -> f64) -> (f64, f64) {
    let products = weights.iter().enumerate().map(|(i, w)| f64::from(*w) * x(i));
    products.fold((0.0, 0.0), |(sum, magnitude), p| (sum + p, magnitude + p.abs()))
}

#[test]
fn products_with_float_activations_are_within_rounding_of_the_exact_sum() {
    for matrix in vectors::matrices() {
        let ty = matrix.weights.block_type;
        let expected = matrix.y.chunks_exact(matrix.rows().count());
        for (x, expected) in matrix.x.chunks_exact(matrix.n_in).zip(expected) {
            for ((row, weights), reference) in matrix.rows().zip(expected) {
                let (sum, magnitude) = exact(weights, |i| f64::from(x[i]));
                let got = f64::from(dot_f32(ty, row, x));
                // A lane takes n / 16 fused steps, the tree four additions.
                let tolerance = gamma(matrix.n_in / 16 + 4) * magnitude;
                assert!((got - sum).abs() <= tolerance, "{ty}: {got} {sum} {tolerance:e}");
                // The reference's own bound, for an order of summation that we do not know.
                let difference = (got - f64::from(*reference)).abs();
                assert!(difference <= 1e-5 * magnitude, "{ty}: {got} {reference}");
            }
        }
    }
}

/// Where a block that has minima keeps its scales: of the codes, of the minima.
fn scales_with_minima(ty: BlockType) -> Option<(usize, usize)> {
    match ty {
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => Some((0, 2)),
        BlockType::Q2K => Some((80, 82)),
        BlockType::Affine(affine) => Some((0, affine.scales().bytes())),
        _ => None,
    }
}

/// The row with the 16-bit scale at byte `at` of every block set to zero.
fn without(ty: BlockType, row: &[u8], at: usize, n_in: usize) -> Vec<f32> {
    let mut row = row.to_vec();
    for block in row.chunks_exact_mut(ty.block_bytes()) {
        block[at..at + 2].fill(0);
    }
    let mut values = vec![f32::NAN; n_in];
    decode_row(ty, &row, &mut values);
    values
}

fn check_q8(matrix: &Matrix, x: &Q8Row) {
    let ty = matrix.weights.block_type;
    let stands_for = |i: usize| f64::from(x.scales()[i / x.block()]) * f64::from(x.quants()[i]);
    for (row, weights) in matrix.rows() {
        let (sum, plain) = exact(weights, stands_for);
        let blocks = matrix.n_in / ty.block_len();
        let (steps, magnitude) = match scales_with_minima(ty) {
            None => (blocks, plain),
            // Codes and minima cancel in the weights, but are rounded apart.
            Some((d, m)) => {
                let codes = exact(&without(ty, row, m, matrix.n_in), stands_for).1;
                let minima = exact(&without(ty, row, d, matrix.n_in), stands_for).1;
                (2 * blocks, codes + minima)
            }
        };
        // Of each term: the product of scales, the conversion, and every later fused step round. The weights that
        // the sum is taken from were rounded once.
        let tolerance = gamma(steps + 2) * magnitude + U * plain;
        let got = f64::from(dot_q8(ty, row, x.view()));
        assert!((got - sum).abs() <= tolerance, "{ty}: {got} {sum} {tolerance:e}");
    }
}

#[test]
fn products_with_8_bit_activations_are_within_rounding_of_what_they_stand_for() {
    let mut x8 = Q8Row::new();
    for matrix in vectors::matrices() {
        for x in matrix.x.chunks_exact(matrix.n_in) {
            x8.quantize(x, matrix.weights.block_type.activation_block());
            check_q8(&matrix, &x8);
        }
    }
}

#[test]
fn a_single_activation_picks_its_weight() {
    let mut x8 = Q8Row::new();
    for matrix in vectors::matrices() {
        let (ty, n_in) = (matrix.weights.block_type, matrix.n_in);
        let (row, weights) = matrix.rows().next().expect("a row");
        let parts = scales_with_minima(ty)
            .map(|(d, m)| (without(ty, row, m, n_in), without(ty, row, d, n_in)));
        for (i, weight) in weights.iter().enumerate() {
            let mut x = vec![0.0; n_in];
            x[i] = -127.0;
            // Exact in f64: the result is the only rounding. Other terms are zeros, so no result is -0.
            let expected = f64::from(*weight) * -127.0;
            let rounded = (expected as f32 + 0.0).to_bits();
            assert_eq!(dot_f32(ty, row, &x).to_bits(), rounded, "{ty} value {i}");
            x8.quantize(&x, ty.activation_block());
            let got = dot_q8(ty, row, x8.view());
            let Some((codes, minima)) = &parts else {
                assert_eq!(got.to_bits(), rounded, "{ty} value {i}");
                continue;
            };
            // Two terms count, each of one product of scales, one conversion and at most two fused steps.
            let magnitude = 127.0 * (f64::from(codes[i]).abs() + f64::from(minima[i]).abs());
            let tolerance = gamma(4) * magnitude + U * expected.abs();
            assert!((f64::from(got) - expected).abs() <= tolerance, "{ty} value {i}: {got}");
        }
    }
}
