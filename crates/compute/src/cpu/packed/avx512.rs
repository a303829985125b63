//! Packed rows with AVX-512 VNNI: 64 products of bytes an instruction.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]
#![allow(clippy::wildcard_imports, reason = "a page of intrinsics says nothing")]
#![allow(clippy::needless_range_loop, reason = "columns index several arrays at once")]

use std::arch::x86_64::*;

use quant::{GROUP, Q8View, unpack_rows};

use super::{Packed, Product, ROWS, Shape};

/// Activation rows of a tile: with three vectors of sums each, they and a weight fit into the registers.
const TILE: usize = 8;

/// See [`Product::multiply`].
pub(super) fn multiply<'x>(
    product: &Product<'_>,
    packed: &mut Packed,
    n: usize,
    x: impl Fn(usize) -> Q8View<'x>,
    mut store: impl FnMut(usize, &[f32; ROWS]),
) {
    // SAFETY: `Isa::Avx512` is made only after these instructions were detected on this CPU.
    unsafe { pack(product, packed) };
    let mut c = 0;
    while c < n {
        let step = match n - c {
            1 => 1,
            2 | 3 => 2,
            4..TILE => 4,
            _ => TILE,
        };
        // SAFETY: as above.
        unsafe {
            match step {
                1 => columns::<1>(packed, c, &x, &mut store),
                2 => columns::<2>(packed, c, &x, &mut store),
                4 => columns::<4>(packed, c, &x, &mut store),
                _ => columns::<TILE>(packed, c, &x, &mut store),
            }
        }
        c += step;
    }
}

/// Takes the rows apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn pack(product: &Product<'_>, packed: &mut Packed) {
    let Packed { shape, codes, scales, sums, heads } = packed;
    let Shape { block, run, minima, zero, .. } = *shape;
    let runs = if run < block { block / run } else { 0 };
    let pairs = block / (2 * GROUP);
    let mut staged = [[0_i8; 256]; ROWS];
    unpack_rows(product.block_type, product.rows, ROWS, product.n_in, |b, r, unpacked| {
        heads[b].scale[r] = unpacked.scale;
        heads[b].min_scale[r] = unpacked.min_scale;
        let groups = unpacked.scales.chunks_exact(run / GROUP);
        for (scales, group) in
            scales[b * runs * ROWS..].chunks_exact_mut(ROWS).zip(groups).take(runs)
        {
            scales[r] = i32::from(group[0]);
        }
        let factors = if minima { unpacked.mins } else { unpacked.scales };
        let sums = sums[b * pairs * 2 * ROWS..].chunks_exact_mut(2 * ROWS);
        for (sums, pair) in sums.zip(factors.as_chunks::<2>().0).take(pairs) {
            for i in 0..2 {
                sums[2 * r + i] = i16::from(pair[i]) * if minima { 1 } else { i16::from(zero) };
            }
        }
        staged[r][..block].copy_from_slice(&unpacked.codes[..block]);
        if r == ROWS - 1 {
            let codes = &mut codes[b * block * ROWS..(b + 1) * block * ROWS];
            for (k, codes) in codes.as_chunks_mut::<{ 16 * 4 * ROWS }>().0.iter_mut().enumerate() {
                transpose::<16>(&staged, 64 * k, zero, codes.as_mut_slice());
            }
            if !block.is_multiple_of(64) {
                transpose::<8>(&staged, 0, zero, codes);
            }
        }
    });
}

/// `WORDS` times four codes of each row, from value `first` on: `[ROWS, WORDS, 4]` to `[WORDS, ROWS, 4]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn transpose<const WORDS: usize>(
    staged: &[[i8; 256]; ROWS],
    first: usize,
    zero: u8,
    codes: &mut [u8],
) {
    let row = |r: usize| {
        let bytes = &staged[r][first..first + 4 * WORDS];
        if WORDS == 16 {
            // SAFETY: 64 bytes.
            unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
        } else {
            // SAFETY: 32 bytes.
            _mm512_castsi256_si512(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) })
        }
    };
    let mut a = [_mm512_setzero_si512(); ROWS];
    for r in 0..ROWS {
        a[r] = row(r);
    }
    let mut b = a;
    for i in 0..8 {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    // Each 128-bit lane of `c[4·j + i]` has word `4·lane + i` of rows `4·j ..`.
    let mut c = b;
    for j in 0..4 {
        c[4 * j] = _mm512_unpacklo_epi64(b[4 * j], b[4 * j + 2]);
        c[4 * j + 1] = _mm512_unpackhi_epi64(b[4 * j], b[4 * j + 2]);
        c[4 * j + 2] = _mm512_unpacklo_epi64(b[4 * j + 1], b[4 * j + 3]);
        c[4 * j + 3] = _mm512_unpackhi_epi64(b[4 * j + 1], b[4 * j + 3]);
    }
    let zero = _mm512_set1_epi8(zero.cast_signed());
    for i in 0..4 {
        // Lanes 0 and 1, and 2 and 3, of the four vectors of word `i`.
        let low = _mm512_shuffle_i32x4::<0b0100_0100>(c[i], c[4 + i]);
        let high = _mm512_shuffle_i32x4::<0b1110_1110>(c[i], c[4 + i]);
        let low_2 = _mm512_shuffle_i32x4::<0b0100_0100>(c[8 + i], c[12 + i]);
        let high_2 = _mm512_shuffle_i32x4::<0b1110_1110>(c[8 + i], c[12 + i]);
        let words = [
            _mm512_shuffle_i32x4::<0b1000_1000>(low, low_2),
            _mm512_shuffle_i32x4::<0b1101_1101>(low, low_2),
            _mm512_shuffle_i32x4::<0b1000_1000>(high, high_2),
            _mm512_shuffle_i32x4::<0b1101_1101>(high, high_2),
        ];
        for lane in 0..WORDS / 4 {
            let at = (4 * lane + i) * 4 * ROWS;
            let out = &mut codes[at..at + 4 * ROWS];
            // SAFETY: 64 bytes.
            unsafe {
                _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_add_epi8(words[lane], zero));
            }
        }
    }
}

/// Columns `c .. c + N`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn columns<'x, const N: usize>(
    packed: &Packed,
    c: usize,
    x: &impl Fn(usize) -> Q8View<'x>,
    store: &mut impl FnMut(usize, &[f32; ROWS]),
) {
    let mut xs = [x(c); N];
    for i in 1..N {
        xs[i] = x(c + i);
    }
    let Shape { block, run, minima, n_blocks, .. } = packed.shape;
    for x in &xs {
        assert!(
            x.block == block && x.quants.len() == block * n_blocks,
            "activations of the weight"
        );
        assert!(x.scales.len() == n_blocks && x.sums.len() == block * n_blocks / GROUP);
    }
    let sums = match (run, run < block, minima) {
        (16, _, true) => tile::<N, 16, true, true>(packed, &xs),
        (16, _, false) => tile::<N, 16, true, false>(packed, &xs),
        (_, true, true) => tile::<N, 32, true, true>(packed, &xs),
        (_, true, false) => tile::<N, 32, true, false>(packed, &xs),
        (_, false, true) => tile::<N, 32, false, true>(packed, &xs),
        (_, false, false) => tile::<N, 32, false, false>(packed, &xs),
    };
    for i in 0..N {
        let mut y = [0.0; ROWS];
        // SAFETY: 64 bytes.
        unsafe { _mm512_storeu_ps(y.as_mut_ptr(), sums[i]) };
        store(c + i, &y);
    }
}

/// Sixteen rows times `N` columns. `RUN` values share a sub-scale if there are any (`SCALED`).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn tile<const N: usize, const RUN: usize, const SCALED: bool, const MINIMA: bool>(
    packed: &Packed,
    xs: &[Q8View<'_>; N],
) -> [__m512; N] {
    let Packed { shape, codes, scales, sums, heads } = packed;
    let block = shape.block;
    let (words, pairs) = (block / 4, block / 32);
    let mut codes = codes.as_chunks::<{ 4 * ROWS }>().0;
    let mut scales = scales.as_chunks::<ROWS>().0;
    let mut sums = sums.as_chunks::<{ 2 * ROWS }>().0;
    let mut quants = xs.map(|x| x.quants.as_chunks::<4>().0);
    let mut group_sums = xs.map(|x| x.sums.as_chunks::<2>().0);
    let mut acc = [_mm512_setzero_ps(); N];
    for (b, head) in heads.iter().enumerate() {
        let mut isum = [_mm512_setzero_si512(); N];
        for _ in 0..block / RUN {
            let (run, rest) = codes.split_at(RUN / 4);
            codes = rest;
            let mut sub = if SCALED { [_mm512_setzero_si512(); N] } else { isum };
            for k in 0..RUN / 4 {
                let w = load_bytes(&run[k]);
                for c in 0..N {
                    let q =
                        _mm512_set1_epi32(i32::from_le_bytes(quants[c][k].map(i8::cast_unsigned)));
                    sub[c] = _mm512_dpbusd_epi32(sub[c], w, q);
                }
            }
            for c in 0..N {
                quants[c] = &quants[c][RUN / 4..];
            }
            if SCALED {
                let (scale, rest) = scales.split_first().expect("a sub-scale for each run");
                scales = rest;
                let scale = load_i32(scale);
                for c in 0..N {
                    isum[c] = _mm512_add_epi32(isum[c], _mm512_mullo_epi32(sub[c], scale));
                }
            } else {
                isum = sub;
            }
        }
        let mut msum = [_mm512_setzero_si512(); N];
        let (pair, rest) = sums.split_at(pairs);
        sums = rest;
        for k in 0..pairs {
            let factors = load_i16(&pair[k]);
            for c in 0..N {
                let [low, high] = group_sums[c][k];
                let both = i32::from(low) & 0xffff | i32::from(high) << 16;
                msum[c] = _mm512_dpwssd_epi32(msum[c], factors, _mm512_set1_epi32(both));
            }
        }
        let scale = load_f32(&head.scale);
        let min_scale = load_f32(&head.min_scale);
        for c in 0..N {
            group_sums[c] = &group_sums[c][pairs..];
            let dx = _mm512_set1_ps(xs[c].scales[b]);
            let isum = if MINIMA { isum[c] } else { _mm512_sub_epi32(isum[c], msum[c]) };
            acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(scale, dx), _mm512_cvtepi32_ps(isum), acc[c]);
            if MINIMA {
                let msum = _mm512_cvtepi32_ps(msum[c]);
                acc[c] = _mm512_fmadd_ps(_mm512_mul_ps(min_scale, dx), msum, acc[c]);
            }
        }
    }
    debug_assert!(codes.is_empty() && words > 0);
    acc
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn load_bytes(values: &[u8; 64]) -> __m512i {
    // SAFETY: 64 bytes; the load may be unaligned.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn load_i32(values: &[i32; 16]) -> __m512i {
    // SAFETY: 64 bytes; the load may be unaligned.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn load_i16(values: &[i16; 32]) -> __m512i {
    // SAFETY: 64 bytes; the load may be unaligned.
    unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn load_f32(values: &[f32; 16]) -> __m512 {
    // SAFETY: 64 bytes; the load may be unaligned.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}
