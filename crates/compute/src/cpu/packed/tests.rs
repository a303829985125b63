use quant::{BlockType, Q8Row};

use super::*;
use crate::cpu::test_data::{Random, set_scales_to_one, tame};

fn types() -> impl Iterator<Item = BlockType> {
    BlockType::ALL.into_iter().filter(|ty| !ty.is_float())
}

/// Instruction sets of this CPU that multiply packed rows.
fn sets() -> impl Iterator<Item = Isa> {
    Isa::available().filter(|isa| is_for(*isa, BlockType::Q8_0, COLUMNS))
}

/// Compares with the definition, for every number of columns up to that of `xs`.
fn check(ty: BlockType, rows: &[u8], xs: &[Q8Row]) {
    let n_in = xs[0].quants().len();
    let row_bytes = rows.len() / ROWS;
    let mut packed = Packed::default();
    for isa in sets() {
        let product = Product { isa, block_type: ty, n_in, rows };
        for n in 0..=xs.len() {
            let mut seen = vec![false; n];
            product.multiply(
                &mut packed,
                n,
                |c| xs[c].view(),
                |c, y| {
                    let dot = |row| quant::dot_q8(ty, row, xs[c].view());
                    for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
                        let what = format!("{ty}, {n_in} values, row {r}, column {c} of {n}");
                        assert!(dot(row).is_finite(), "a test of numbers, {what}");
                        assert_eq!(y[r].to_bits(), dot(row).to_bits(), "{what}");
                    }
                    assert!(!std::mem::replace(&mut seen[c], true), "column {c} comes once");
                },
            );
            assert!(seen.into_iter().all(|seen| seen), "all {n} columns come");
        }
    }
}

fn quantized(ty: BlockType, x: &[f32]) -> Q8Row {
    let mut row = Q8Row::new();
    row.quantize(x, ty.activation_block());
    row
}

#[test]
fn every_type_gives_the_bits_of_the_definition() {
    let mut random = Random(3);
    for ty in types() {
        for blocks in [1, 2, 3, 8] {
            let n_in = blocks * ty.block_len();
            let mut rows = random.bytes(ROWS * ty.row_bytes(n_in).unwrap());
            tame(ty, &mut rows);
            let xs: Vec<Q8Row> = (0..13).map(|_| quantized(ty, &random.floats(n_in))).collect();
            check(ty, &rows, &xs);
        }
    }
}

#[test]
fn codes_and_quants_of_the_largest_size_do_not_overflow() {
    for ty in types() {
        let n_in = 3 * ty.block_len();
        for byte in [0x00, 0x7f, 0x80, 0xff] {
            let mut rows = vec![byte; ROWS * ty.row_bytes(n_in).unwrap()];
            for block in rows.chunks_exact_mut(ty.block_bytes()) {
                set_scales_to_one(ty, block);
            }
            tame(ty, &mut rows);
            // The last are subnormal: quants saturate at -128.
            let xs = [3.0, -3.0, -1.0e-44].map(|x| quantized(ty, &vec![x; n_in]));
            check(ty, &rows, &xs);
        }
    }
}

#[test]
fn values_of_a_run_share_a_sub_scale() {
    let mut random = Random(4);
    for ty in types() {
        let mut rows = random.bytes(64 * ty.block_bytes());
        tame(ty, &mut rows);
        let groups = run(ty) / quant::GROUP;
        quant::unpack_rows(ty, &rows, 64, ty.block_len(), |_, _, unpacked| {
            let scales = &unpacked.scales[..ty.block_len() / quant::GROUP];
            let shared = |run: &[i8]| run.iter().all(|scale| *scale == run[0]);
            assert!(scales.chunks_exact(groups).all(shared), "{ty}: {scales:?}");
            let one = run(ty) < ty.block_len() || scales.iter().all(|scale| *scale == 1);
            assert!(one, "{ty}: {scales:?}");
            if Codes::of(ty).minima {
                let offset = Codes::of(ty).offset;
                let codes = unpacked.codes[..ty.block_len()].iter();
                assert!(
                    codes.map(|c| i16::from(*c) + offset).all(|c| (0..256).contains(&c)),
                    "{ty}"
                );
            }
        });
    }
}
