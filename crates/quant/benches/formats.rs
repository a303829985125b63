//! Decoding and products of one row per format, as compiled for the oldest CPU and inside an AVX2 function.
//!
//! Throughput is in bytes of weights.
#![allow(unsafe_code, reason = "a function for AVX2 is called after AVX2 was detected")]

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use quant::{BlockType, Q8Row};

const N_IN: usize = 2048;

fn main() {
    divan::main();
}

/// A row whose scales are finite: every byte below 0x40.
fn row(ty: BlockType) -> Vec<u8> {
    let bytes = ty.row_bytes(N_IN).unwrap_or_default();
    let mut state = 1_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 26) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

fn activations() -> Vec<f32> {
    (0..N_IN).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect()
}

#[divan::bench(args = BlockType::ALL)]
fn decode_row(bencher: Bencher<'_, '_>, ty: BlockType) {
    let (row, mut out) = (row(ty), vec![0.0; N_IN]);
    bencher
        .counter(BytesCount::new(row.len()))
        .bench_local(|| quant::decode_row(ty, black_box(&row), black_box(&mut out)));
}

#[divan::bench(args = quantised())]
fn dot_q8(bencher: Bencher<'_, '_>, ty: BlockType) {
    let (row, mut x) = (row(ty), Q8Row::new());
    x.quantize(&activations(), ty.activation_block());
    bencher
        .counter(BytesCount::new(row.len()))
        .bench_local(|| quant::dot_q8(ty, black_box(&row), black_box(x.view())));
}

#[divan::bench(args = BlockType::ALL)]
fn dot_f32(bencher: Bencher<'_, '_>, ty: BlockType) {
    let (row, x) = (row(ty), activations());
    bencher
        .counter(BytesCount::new(row.len()))
        .bench_local(|| quant::dot_f32(ty, black_box(&row), black_box(&x)));
}

fn quantised() -> impl Iterator<Item = BlockType> {
    BlockType::ALL.into_iter().filter(|ty| !ty.is_float())
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use divan::counter::BytesCount;
    use divan::{Bencher, black_box};
    use quant::{BlockType, Q8Row};

    use super::{N_IN, activations, quantised, row};

    #[target_feature(enable = "avx2,fma")]
    fn decode(ty: BlockType, row: &[u8], out: &mut [f32]) {
        quant::decode_row(ty, row, out);
    }

    #[target_feature(enable = "avx2,fma")]
    fn dot(ty: BlockType, row: &[u8], x: quant::Q8View<'_>) -> f32 {
        quant::dot_q8(ty, row, x)
    }

    #[target_feature(enable = "avx2,fma")]
    fn dot_float(ty: BlockType, row: &[u8], x: &[f32]) -> f32 {
        quant::dot_f32(ty, row, x)
    }

    fn detected() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    #[divan::bench(args = BlockType::ALL)]
    fn decode_row(bencher: Bencher<'_, '_>, ty: BlockType) {
        let (row, mut out) = (row(ty), vec![0.0; N_IN]);
        if detected() {
            // SAFETY: AVX2 and FMA were detected on this CPU.
            bencher
                .counter(BytesCount::new(row.len()))
                .bench_local(|| unsafe { decode(ty, black_box(&row), black_box(&mut out)) });
        }
    }

    #[divan::bench(args = quantised())]
    fn dot_q8(bencher: Bencher<'_, '_>, ty: BlockType) {
        let (row, mut x) = (row(ty), Q8Row::new());
        x.quantize(&activations(), ty.activation_block());
        if detected() {
            // SAFETY: AVX2 and FMA were detected on this CPU.
            bencher
                .counter(BytesCount::new(row.len()))
                .bench_local(|| unsafe { dot(ty, black_box(&row), black_box(x.view())) });
        }
    }

    #[divan::bench(args = BlockType::ALL)]
    fn dot_f32(bencher: Bencher<'_, '_>, ty: BlockType) {
        let (row, x) = (row(ty), activations());
        if detected() {
            // SAFETY: AVX2 and FMA were detected on this CPU.
            bencher
                .counter(BytesCount::new(row.len()))
                .bench_local(|| unsafe { dot_float(ty, black_box(&row), black_box(&x)) });
        }
    }
}
