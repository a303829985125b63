//! Packed rows with AVX2.
//!
//! `maddubs` multiplies four codes of each row with four quants that all lanes share, and adds pairs in 16 bits. As
//! codes are small, several such sums fit 16 bits together; one `madd` with the sub-scales then widens them.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]
#![allow(clippy::wildcard_imports, reason = "a page of intrinsics says nothing")]
#![allow(clippy::needless_range_loop, reason = "columns index several arrays at once")]

use std::arch::x86_64::*;

use quant::{GROUP, Q8View, unpack_rows};

use super::{Layout, Packed, ROWS, Rows};

/// Activation rows of a tile: with two vectors of sums each, they and a weight fit into the registers.
const TILE: usize = 4;

/// See [`Rows::multiply`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn multiply<'x>(
    rows: &Rows<'_>,
    layout: Layout,
    packed: &mut Packed,
    n: usize,
    x: impl Fn(usize) -> Q8View<'x>,
    mut store: impl FnMut(usize, &[f32; ROWS]),
) {
    pack(rows, layout, packed);
    let block = rows.block_type.block_len();
    let check = |c: usize| {
        let x = x(c);
        assert!(x.block == block && x.quants.len() == rows.n_in, "activations of the weight");
        assert!(x.scales.len() * block == rows.n_in && x.sums.len() * GROUP == rows.n_in);
        x
    };
    let mut c = 0;
    while c < n {
        // The last tile takes its last column as often as it has room.
        let xs = [0, 1, 2, 3].map(|i| check((c + i).min(n - 1)));
        let products = match (layout.run, layout.steps(), layout.minima) {
            (32, 8, true) => tile::<32, 8, true>(packed, block, xs),
            (32, 8, false) => tile::<32, 8, false>(packed, block, xs),
            (32, 4, true) => tile::<32, 4, true>(packed, block, xs),
            (32, 4, false) => tile::<32, 4, false>(packed, block, xs),
            (32, 2, true) => tile::<32, 2, true>(packed, block, xs),
            (32, _, false) => tile::<32, 1, false>(packed, block, xs),
            (16, 4, true) => tile::<16, 4, true>(packed, block, xs),
            (16, 4, false) => tile::<16, 4, false>(packed, block, xs),
            (16, 2, false) => tile::<16, 2, false>(packed, block, xs),
            (16, 1, false) => tile::<16, 1, false>(packed, block, xs),
            _ => unreachable!("{layout:?} is no type's layout"),
        };
        for (i, y) in products.into_iter().enumerate().take(n - c) {
            store(c + i, &to_array(y));
        }
        c += TILE;
    }
}

/// Takes the rows apart.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn pack(rows: &Rows<'_>, layout: Layout, packed: &mut Packed) {
    let Layout { run, zero, minima, .. } = layout;
    let Rows { block_type, n_in, bytes, .. } = *rows;
    let block = block_type.block_len();
    let (runs, pairs) = (block / run, block / (2 * GROUP));
    let Packed { codes, scales, sums, heads } = packed;
    let mut staged = [[0_i8; 256]; ROWS];
    unpack_rows(block_type, bytes, ROWS, n_in, |b, r, unpacked| {
        heads[b].scale[r] = unpacked.scale;
        heads[b].min_scale[r] = unpacked.min_scale;
        let scales = scales[b * runs * 2 * ROWS..].as_chunks_mut::<{ 2 * ROWS }>().0;
        let groups = unpacked.scales.chunks_exact(run / GROUP).take(runs);
        for (scales, group) in scales.iter_mut().zip(groups) {
            scales[2 * r..2 * r + 2].fill(i16::from(group[0]));
        }
        let sums = sums[b * pairs * 2 * ROWS..].as_chunks_mut::<{ 2 * ROWS }>().0;
        let factors = if minima { &unpacked.mins } else { &unpacked.scales };
        let by = if minima { 1 } else { i16::from(zero) };
        for (sums, pair) in sums.iter_mut().zip(factors.as_chunks::<2>().0).take(pairs) {
            sums[2 * r] = i16::from(pair[0]) * by;
            sums[2 * r + 1] = i16::from(pair[1]) * by;
        }
        staged[r][..block].copy_from_slice(&unpacked.codes[..block]);
        if r == ROWS - 1 {
            let codes = &mut codes[b * block * ROWS..(b + 1) * block * ROWS];
            for (k, codes) in codes.as_chunks_mut().0.iter_mut().enumerate() {
                transpose(&staged, 32 * k, zero, codes);
            }
        }
    });
}

/// 32 codes of each row from value `first` on, raised by `zero`: `[ROWS, 8, 4]` to `[8, ROWS, 4]`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn transpose(staged: &[[i8; 256]; ROWS], first: usize, zero: i8, codes: &mut [u8; 32 * ROWS]) {
    let mut a = [_mm256_setzero_si256(); ROWS];
    for (a, row) in a.iter_mut().zip(staged) {
        let row: &[i8; 32] = row[first..].first_chunk().expect("32 codes");
        // SAFETY: 32 bytes; the load may be unaligned.
        let row = unsafe { _mm256_loadu_si256(row.as_ptr().cast()) };
        *a = _mm256_add_epi8(row, _mm256_set1_epi8(zero));
    }
    let mut b = a;
    for i in 0..4 {
        b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    // Each half of `c[4·j + i]` has word `4·half + i` of rows `4·j ..`.
    let mut c = b;
    for j in 0..2 {
        c[4 * j] = _mm256_unpacklo_epi64(b[4 * j], b[4 * j + 2]);
        c[4 * j + 1] = _mm256_unpackhi_epi64(b[4 * j], b[4 * j + 2]);
        c[4 * j + 2] = _mm256_unpacklo_epi64(b[4 * j + 1], b[4 * j + 3]);
        c[4 * j + 3] = _mm256_unpackhi_epi64(b[4 * j + 1], b[4 * j + 3]);
    }
    let words = codes.as_chunks_mut::<{ 4 * ROWS }>().0;
    for i in 0..4 {
        let low = _mm256_permute2x128_si256::<0x20>(c[i], c[4 + i]);
        let high = _mm256_permute2x128_si256::<0x31>(c[i], c[4 + i]);
        // SAFETY: 32 bytes each; the stores may be unaligned.
        unsafe {
            _mm256_storeu_si256(words[i].as_mut_ptr().cast(), low);
            _mm256_storeu_si256(words[4 + i].as_mut_ptr().cast(), high);
        }
    }
}

/// All rows times a tile of columns. `RUN` values share a sub-scale, `STEPS` steps of four fit 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tile<const RUN: usize, const STEPS: usize, const MINIMA: bool>(
    packed: &Packed,
    block: usize,
    xs: [Q8View<'_>; TILE],
) -> [__m256; TILE] {
    let codes = packed.codes.as_chunks::<{ 4 * ROWS }>().0.chunks_exact(block / 4);
    let scales = packed.scales.as_chunks::<{ 2 * ROWS }>().0.chunks_exact(block / RUN);
    let sums = packed.sums.as_chunks::<{ 2 * ROWS }>().0.chunks_exact(block / 32);
    let mut acc = [_mm256_setzero_ps(); TILE];
    let blocks = packed.heads.iter().zip(codes).zip(scales.zip(sums));
    for (b, ((head, codes), (scales, sums))) in blocks.enumerate() {
        let quants = xs.map(|x| x.quants[b * block..][..block].as_chunks::<4>().0);
        let mut isum = [_mm256_setzero_si256(); TILE];
        let runs = codes.chunks_exact(RUN / 4).zip(scales).enumerate();
        for (run, (codes, scale)) in runs {
            let scale = load_i16(scale);
            let start = run * (RUN / 4);
            for (i, codes) in codes.as_chunks::<STEPS>().0.iter().enumerate() {
                let quants = quants.map(|q| &q[start + i * STEPS..][..STEPS]);
                let mut sum = [_mm256_setzero_si256(); TILE];
                for (k, w) in codes.iter().enumerate() {
                    let w = load_codes(w);
                    for c in 0..TILE {
                        let q = i32::from_le_bytes(quants[c][k].map(i8::cast_unsigned));
                        let products = _mm256_maddubs_epi16(w, _mm256_set1_epi32(q));
                        sum[c] = if k == 0 { products } else { _mm256_add_epi16(sum[c], products) };
                    }
                }
                for c in 0..TILE {
                    isum[c] = _mm256_add_epi32(isum[c], _mm256_madd_epi16(sum[c], scale));
                }
            }
        }
        let pairs = block / 32;
        let group_sums = xs.map(|x| &x.sums.as_chunks::<2>().0[b * pairs..][..pairs]);
        let mut msum = [_mm256_setzero_si256(); TILE];
        for (k, factors) in sums.iter().enumerate() {
            let factors = load_i16(factors);
            for c in 0..TILE {
                let [low, high] = group_sums[c][k];
                let both = i32::from(low) & 0xffff | i32::from(high) << 16;
                let products = _mm256_madd_epi16(factors, _mm256_set1_epi32(both));
                msum[c] = _mm256_add_epi32(msum[c], products);
            }
        }
        let (scale, min_scale) = (load_f32(&head.scale), load_f32(&head.min_scale));
        for c in 0..TILE {
            let dx = _mm256_set1_ps(xs[c].scales[b]);
            let isum = if MINIMA { isum[c] } else { _mm256_sub_epi32(isum[c], msum[c]) };
            acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(scale, dx), _mm256_cvtepi32_ps(isum), acc[c]);
            if MINIMA {
                let msum = _mm256_cvtepi32_ps(msum[c]);
                acc[c] = _mm256_fmadd_ps(_mm256_mul_ps(min_scale, dx), msum, acc[c]);
            }
        }
    }
    acc
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_codes(values: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes; the load may be unaligned.
    unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_i16(values: &[i16; 16]) -> __m256i {
    // SAFETY: 32 bytes; the load may be unaligned.
    unsafe { _mm256_loadu_si256(values.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_f32(values: &[f32; 8]) -> __m256 {
    // SAFETY: 32 bytes; the load may be unaligned.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn to_array(v: __m256) -> [f32; 8] {
    let mut values = [0.0; 8];
    // SAFETY: 32 bytes; the store may be unaligned.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), v) };
    values
}
