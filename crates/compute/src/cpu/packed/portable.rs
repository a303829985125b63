//! Packed rows in plain code, for a processor without kernels of its own: a lane is an element of an array, which
//! compilers turn into whatever vectors the target's baseline has.

use quant::{GROUP, Q8View, Unpacked};

use super::{Layout, Packed, ROWS, Rows, TILE};

/// See [`Rows::multiply`].
pub(super) fn multiply<'x>(
    rows: &Rows<'_>,
    layout: Layout,
    packed: &mut Packed,
    n: usize,
    x: impl Fn(usize) -> Q8View<'x>,
    store: impl FnMut(usize, &[f32; ROWS]),
) {
    rows.unpack(|b, rows| packed.block(layout, b).fill(layout, rows, transpose));
    let packed = &*packed;
    let block = rows.block_type.block_len();
    let tile = |xs: [_; TILE]| xs.map(|x| column(packed, layout, block, x));
    rows.tiles(n, x, tile, store);
}

/// 32 codes of each row from value `first` on, raised by `zero`: `[ROWS, 8, 4]` to `[8, ROWS, 4]`.
fn transpose(rows: &[Unpacked; ROWS], first: usize, zero: u8, codes: &mut [u8; 32 * ROWS]) {
    for (r, row) in rows.iter().enumerate() {
        let row = row.codes[first..first + 32].as_chunks::<4>().0;
        let words = codes.as_chunks_mut::<4>().0.chunks_exact_mut(ROWS);
        for (words, row) in words.zip(row) {
            words[r] = row.map(|code| code.wrapping_add_unsigned(zero).cast_unsigned());
        }
    }
}

/// All rows times one column.
fn column(packed: &Packed, layout: Layout, block: usize, x: Q8View<'_>) -> [f32; ROWS] {
    let Layout { run, minima, .. } = layout;
    let planes = layout.planes();
    let words = packed.codes.as_chunks::<{ 4 * ROWS }>().0.chunks_exact(run / 4);
    let scales = packed.scales.as_chunks::<{ 2 * ROWS }>().0;
    let mut runs = words.zip(scales);
    let mut sums = packed.sums.as_chunks::<{ 2 * ROWS }>().0.iter();
    let mut acc = [0.0f32; ROWS];
    for (b, head) in packed.heads.iter().enumerate() {
        let quants = x.quants[b * block..(b + 1) * block].chunks_exact(run);
        let mut isum = [0i32; ROWS];
        for quants in quants {
            for (words, scale) in runs.by_ref().take(planes) {
                let sum = products(words, quants);
                for r in 0..ROWS {
                    isum[r] += sum[r] * i32::from(scale[2 * r]);
                }
            }
        }
        let mut msum = [0i32; ROWS];
        let group_sums = &x.sums[b * block / GROUP..(b + 1) * block / GROUP];
        for (pair, factors) in group_sums.as_chunks::<2>().0.iter().zip(&mut sums) {
            let [first, second] = pair.map(i32::from);
            for r in 0..ROWS {
                msum[r] += first * i32::from(factors[2 * r]);
                msum[r] += second * i32::from(factors[2 * r + 1]);
            }
        }
        let dx = x.scales[b];
        for r in 0..ROWS {
            let isum = if minima { isum[r] } else { isum[r] - msum[r] };
            acc[r] = (head.scale[r] * dx).mul_add(isum as f32, acc[r]);
            if minima {
                acc[r] = (head.min_scale[r] * dx).mul_add(msum[r] as f32, acc[r]);
            }
        }
    }
    acc
}

/// Sums of codes times quants of one run, for each row.
#[inline]
fn products(words: &[[u8; 4 * ROWS]], quants: &[i8]) -> [i32; ROWS] {
    let mut sum = [0i32; ROWS];
    for (codes, quants) in words.iter().zip(quants.as_chunks::<4>().0) {
        for (sum, codes) in sum.iter_mut().zip(codes.as_chunks::<4>().0) {
            for (code, quant) in codes.iter().zip(quants) {
                *sum += i32::from(*code) * i32::from(*quant);
            }
        }
    }
    sum
}
