use quant::{BlockType, Q8Row};

use super::*;
use crate::cpu::test_data::{Random, set_scales_to_one, tame};

/// Types that can be packed.
fn types() -> impl Iterator<Item = (BlockType, Layout)> {
    BlockType::ALL.into_iter().filter_map(|ty| Some((ty, Layout::of(ty)?)))
}

/// Compares with the definition, for every number of columns up to that of `xs`.
fn check(ty: BlockType, rows: &[u8], xs: &[Q8Row]) {
    let n_in = xs[0].quants().len();
    let row_bytes = rows.len() / ROWS;
    let mut packed = Packed::default();
    for isa in Isa::available() {
        let weights = Rows { isa, block_type: ty, n_in, bytes: rows, interleaved: false };
        for n in 0..=xs.len() {
            let mut seen = vec![false; n];
            weights.multiply(
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
    for (ty, _) in types() {
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
    for (ty, _) in types() {
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
fn layouts_hold_what_blocks_have() {
    let mut random = Random(4);
    let mut largest = std::collections::BTreeMap::new();
    for (ty, layout) in types() {
        let mut rows = random.bytes(512 * ty.block_bytes());
        tame(ty, &mut rows);
        let groups = layout.run / quant::GROUP;
        let mut unpacked = [quant::Unpacked::default()];
        quant::unpack_rows(ty, &rows, 512 * ty.block_len(), &mut unpacked, |_, [unpacked]| {
            let scales = &unpacked.scales[..ty.block_len() / quant::GROUP];
            let shared = |run: &[i8]| run.iter().all(|scale| *scale == run[0]);
            assert!(scales.chunks_exact(groups).all(shared), "{ty}: {scales:?}");
            for code in &unpacked.codes[..ty.block_len()] {
                let zero = i16::from(layout.zero);
                let code = i16::from(*code) + zero;
                assert!((0..256).contains(&code), "{ty}: {code}");
                let code = if layout.halves { (code & 15).max(code >> 4) } else { code };
                assert!(code <= layout.most, "{ty}: {code}");
                let most = largest.entry(ty).or_insert(code);
                *most = code.max(*most);
            }
        });
        assert!(layout.most < 128 && i32::from(pair(layout.most)) == 256 * i32::from(layout.most));
        assert!(layout.steps() as i32 * i32::from(pair(layout.most)) <= i32::from(i16::MAX));
        assert_eq!(largest[&ty], layout.most, "{ty}: no more room than its codes need");
    }
}

#[test]
fn no_type_takes_more_memory_than_planned() {
    for (ty, layout) in types() {
        for n_in in [256, 768, 2_560] {
            let mut packed = Packed::default();
            packed.resize(n_in, ty.block_len(), layout);
            assert!(packed.bytes() <= most_bytes(n_in), "{ty}, {n_in} values");
        }
    }
    let mut packed = Packed::default();
    packed.resize(2_560, 32, Layout::of(BlockType::Q8_0).unwrap());
    let halves = packed.bytes();
    assert!(halves <= most_bytes(2_560) && halves * 10 > most_bytes(2_560) * 9);
}
