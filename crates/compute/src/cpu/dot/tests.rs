use quant::{BlockType, Q8Row, ScaleType};

use super::*;
use crate::cpu::test_data::{Random, set_scales_to_one, tame};

fn lengths(ty: BlockType) -> Vec<usize> {
    match ty.block_len() {
        1 => (1..=70).collect(),
        block => (1..=9).map(|n| n * block).collect(),
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn compare(out: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    for (out, expected) in out.iter().zip(expected) {
        assert!(expected.iter().all(|y| y.is_finite()), "a test of numbers, {what}");
        assert_eq!(bits(out), bits(expected), "{what}");
    }
}

/// Compares every path with the definition, for one and for four activation rows.
fn check_q8(ty: BlockType, rows: &[u8], xs: &[Q8Row; 4], n_out: usize) {
    let bytes = rows.len() / n_out;
    let views = xs.each_ref().map(Q8Row::view);
    let expected = views.map(|x| -> Vec<f32> {
        rows.chunks_exact(bytes).map(|row| quant::dot_q8(ty, row, x)).collect()
    });
    for isa in Isa::available() {
        let mut out = [(); 4].map(|()| vec![f32::NAN; n_out]);
        rows_q8(isa, ty, rows, views, out.each_mut().map(Vec::as_mut_slice));
        let what = format!("{ty}, {bytes} bytes a row, {}", isa.name());
        compare(&out, &expected, &format!("four rows, {what}"));
        let [a, b, c, d] = out.each_mut().map(|out| {
            out.fill(f32::NAN);
            out.as_mut_slice()
        });
        rows_q8(isa, ty, rows, [views[0]], [a]);
        rows_q8(isa, ty, rows, [views[1], views[2]], [b, c]);
        rows_q8(isa, ty, rows, [views[3]], [d]);
        compare(&out, &expected, &format!("one and two rows, {what}"));
        let [a, b, c, d] = out.each_mut().map(Vec::as_mut_slice);
        rows_q8(isa, ty, rows, [views[3]], [a]);
        rows_q8(isa, ty, rows, [views[1], views[2], views[3]], [b, c, d]);
        compare(&out[1..], &expected[1..], &format!("three rows, {what}"));
    }
}

fn check_f32(ty: BlockType, rows: &[u8], xs: &[Vec<f32>; 4], n_out: usize) {
    let bytes = rows.len() / n_out;
    let n_in = xs[0].len();
    let views = xs.each_ref().map(Vec::as_slice);
    let expected = views.map(|x| -> Vec<f32> {
        rows.chunks_exact(bytes).map(|row| quant::dot_f32(ty, row, x)).collect()
    });
    for isa in Isa::available() {
        let mut decoded = vec![f32::NAN; n_out * n_in];
        for (row, out) in rows.chunks_exact(bytes).zip(decoded.chunks_exact_mut(n_in)) {
            decode_row(isa, ty, row, out);
        }
        let what = format!("{ty}, {n_in} values, {}", isa.name());
        let mut out = [(); 4].map(|()| vec![f32::NAN; n_out]);
        rows_decoded(isa, &decoded, views, out.each_mut().map(Vec::as_mut_slice));
        compare(&out, &expected, &format!("four rows, decoded, {what}"));
        for (x, out) in views.into_iter().zip(&mut out) {
            out.fill(f32::NAN);
            rows_decoded(isa, &decoded, [x], [out]);
        }
        compare(&out, &expected, &format!("one row, decoded, {what}"));
        if !ty.is_float() {
            continue;
        }
        rows_float(isa, ty, rows, views, out.each_mut().map(Vec::as_mut_slice));
        compare(&out, &expected, &format!("four rows, {what}"));
        for (x, out) in views.into_iter().zip(&mut out) {
            out.fill(f32::NAN);
            rows_float(isa, ty, rows, [x], [out]);
        }
        compare(&out, &expected, &format!("one row, {what}"));
    }
}

fn quantized(ty: BlockType, x: &[f32]) -> Q8Row {
    let mut row = Q8Row::new();
    row.quantize(x, ty.activation_block());
    row
}

#[test]
fn every_isa_matches_scalar_at_every_row_length() {
    let mut random = Random(1);
    for ty in BlockType::ALL {
        for n_in in lengths(ty) {
            // Some kernels take four weight rows at a time.
            let n_out = 3 + n_in / ty.block_len() % 7;
            let mut rows = random.bytes(n_out * ty.row_bytes(n_in).unwrap());
            tame(ty, &mut rows);
            let xs = [(); 4].map(|()| random.floats(n_in));
            check_f32(ty, &rows, &xs, n_out);
            if !ty.is_float() {
                check_q8(ty, &rows, &xs.map(|x| quantized(ty, &x)), n_out);
            }
        }
    }
}

#[test]
fn codes_and_quants_of_the_largest_size_do_not_saturate() {
    for ty in BlockType::ALL.into_iter().filter(|ty| !ty.is_float()) {
        let n_in = 5 * ty.block_len();
        // Bytes 0x80 are the most negative signed codes and sub-scales.
        for byte in [0x00, 0x7f, 0x80, 0xff] {
            let mut rows = vec![byte; ty.row_bytes(n_in).unwrap()];
            for block in rows.chunks_exact_mut(ty.block_bytes()) {
                set_scales_to_one(ty, block);
            }
            tame(ty, &mut rows);
            let alternating = (0..n_in).map(|i| if i % 2 == 0 { 3.0 } else { -3.0 });
            let xs = [
                vec![3.0; n_in],
                vec![-3.0; n_in],
                alternating.collect(),
                (0..n_in).map(|i| if i % 5 < 2 { 3.0 } else { 0.0 }).collect(),
            ];
            check_f32(ty, &rows, &xs, 1);
            let xs = xs.map(|x| quantized(ty, &x));
            check_q8(ty, &rows, &xs, 1);
            check_q8(ty, &rows.repeat(5), &xs, 5);
        }
    }
}

#[test]
fn every_isa_knows_every_e4m3_code() {
    for scales in ScaleType::ALL {
        let ty = BlockType::Fp8(scales);
        for code in 0..=u8::MAX {
            let at = usize::from(code) % 128;
            let mut row = vec![0; ty.block_bytes()];
            set_scales_to_one(ty, &mut row);
            row[scales.bytes() + at] = code;
            let mut x = [0.0; 128];
            x[at] = -2.0;
            let expected = -2.0 * quant::f8_to_f32(code) + 0.0;
            for isa in Isa::available() {
                let mut out = [0.5];
                rows_float(isa, ty, &row, [&x], [&mut out]);
                let what = format!("{ty} code {code:#04x}, {}", isa.name());
                assert_eq!(expected.is_nan(), code & 0x7f == 0x7f, "{what}");
                assert_eq!(out[0].is_nan(), expected.is_nan(), "{what}");
                assert!(expected.is_nan() || out[0].to_bits() == expected.to_bits(), "{what}");
            }
        }
    }
}

#[test]
fn every_isa_quantises_as_the_definition_does() {
    let mut random = Random(2);
    for block in [32, 64, 128, 256] {
        for blocks in 1..=5 {
            for case in 0..7 {
                let mut x = random.floats(block * blocks);
                match case {
                    1 => x[block - 1] = f32::NAN,
                    2 => x[block / 2] = f32::NEG_INFINITY,
                    3 => x[..block].fill(-0.0),
                    // Halves of the step: ties.
                    4 => x.iter_mut().for_each(|v| *v = (*v * 2.0).round() * 0.5),
                    // Subnormal scales: quotients above 127.
                    5 => x.iter_mut().enumerate().for_each(|(i, v)| {
                        *v = f32::from_bits(i as u32 % 190).copysign(*v);
                    }),
                    6 => x.iter_mut().for_each(|v| *v *= 1e36),
                    _ => {}
                }
                let mut expected = Q8Row::new();
                expected.quantize(&x, block);
                for isa in Isa::available() {
                    let (mut scales, mut quants, mut sums) =
                        (vec![9.0; blocks], vec![9; x.len()], vec![9; x.len() / 16]);
                    quantize(isa, &x, block, &mut scales, &mut quants, &mut sums);
                    let view = expected.view();
                    let what = format!("case {case}, block {block}, {}", isa.name());
                    assert_eq!(bits(&scales), bits(view.scales), "{what}");
                    assert_eq!(quants, view.quants, "{what}");
                    assert_eq!(sums, view.sums, "{what}");
                }
            }
        }
    }
}
