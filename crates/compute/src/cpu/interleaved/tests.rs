use quant::{BlockType, Q8Row};

use super::{is_for, rows_q8};
use crate::cpu::isa::Isa;
use crate::cpu::test_data::{Random, weights};
use crate::interleave::{ROWS, interleave};

#[test]
fn interleaved_rows_have_the_bits_of_rows_one_by_one() {
    let isa = Isa::best();
    let (mut random, mut scratch) = (Random(7), Vec::new());
    for ty in BlockType::ALL.into_iter().filter(|ty| is_for(isa, *ty, ROWS)) {
        for n_in in [256, 768, 2_048] {
            let row_bytes = ty.row_bytes(n_in).unwrap();
            let plain = weights(&mut random, ty, 3 * ROWS, n_in);
            let mut mixed = plain.clone();
            for group in mixed.chunks_exact_mut(ROWS * row_bytes) {
                interleave(ty, group, &mut scratch);
            }
            let mut row = || {
                let mut row = Q8Row::new();
                row.quantize(&random.floats(n_in), ty.activation_block());
                row
            };
            let xs = [(); 4].map(|()| row());
            let mut out = [(); 4].map(|()| vec![0.0_f32; 3 * ROWS]);
            let views = [0, 1, 2, 3].map(|c| xs[c].view());
            rows_q8(isa, ty, &mixed, views, out.each_mut().map(Vec::as_mut_slice));
            for (c, out) in out.iter().enumerate() {
                let mut alone = vec![0.0_f32; 3 * ROWS];
                rows_q8(isa, ty, &mixed, [views[c]], [&mut alone]);
                for (o, row) in plain.chunks_exact(row_bytes).enumerate() {
                    let expected = quant::dot_q8(ty, row, views[c]).to_bits();
                    assert_eq!(
                        out[o].to_bits(),
                        expected,
                        "{ty}, {n_in} values, column {c}, row {o}"
                    );
                    assert_eq!(alone[o].to_bits(), expected, "{ty}, alone");
                }
            }
        }
    }
}
