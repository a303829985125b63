//! Products of weight rows with one and with four activation rows, weights in cache: GB/s of weight bytes.

use compute::cpu::dot::{rows_float, rows_q8};
use compute::cpu::isa::Isa;
use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use quant::{BlockType, Q8Row};

/// Weight rows: together below 1 MiB for the largest row.
const N_OUT: usize = 64;
/// Row lengths of models that people run: an expert's inside, and two widths.
const LENGTHS: [usize; 3] = [768, 2_048, 2_560];

fn main() {
    divan::main();
}

fn bytes(n: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Clears a bit of the exponent, wherever scales are: no infinities.
        (state >> 40) as u8 & 0xbf
    };
    (0..n).map(|_| next()).collect()
}

fn activations(n_in: usize) -> Vec<f32> {
    (0..n_in).map(|i| ((i * 7_919) % 1_001) as f32 - 500.0).collect()
}

fn product<const N: usize>(bencher: Bencher<'_, '_>, isa: Isa, ty: BlockType, n_in: usize) {
    let rows = bytes(N_OUT * ty.row_bytes(n_in).expect("whole blocks"));
    let x = activations(n_in);
    let mut out = [(); N].map(|()| vec![0.0; N_OUT]);
    let bencher = bencher.counter(BytesCount::new(rows.len()));
    if ty.is_float() {
        bencher.bench_local(|| {
            let out = out.each_mut().map(Vec::as_mut_slice);
            rows_float(isa, ty, black_box(&rows), [&x; N], out);
        });
    } else {
        let mut q8 = Q8Row::new();
        q8.quantize(&x, ty.activation_block());
        bencher.bench_local(|| {
            let out = out.each_mut().map(Vec::as_mut_slice);
            rows_q8(isa, ty, black_box(&rows), [q8.view(); N], out);
        });
    }
}

fn types() -> Vec<BlockType> {
    BlockType::ALL.to_vec()
}

#[divan::bench(args = types(), consts = LENGTHS)]
fn one_row<const N_IN: usize>(bencher: Bencher<'_, '_>, ty: BlockType) {
    product::<1>(bencher, Isa::best(), ty, N_IN);
}

#[divan::bench(args = types(), consts = LENGTHS)]
fn four_rows<const N_IN: usize>(bencher: Bencher<'_, '_>, ty: BlockType) {
    product::<4>(bencher, Isa::best(), ty, N_IN);
}

#[divan::bench(args = types())]
fn one_row_scalar(bencher: Bencher<'_, '_>, ty: BlockType) {
    product::<1>(bencher, Isa::Scalar, ty, 2_048);
}
