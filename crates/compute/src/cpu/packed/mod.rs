//! A few weight rows times many activation rows: weights are taken apart once and laid out so that a lane of a vector
//! is a weight row.
//!
//! Each sum of the definition ([`quant::dot_q8`]) then stays in its lane from the first block to the last: integers
//! inside a block in any order, as they are exact, then one fused multiply-add for the scale and one for the minima.
//! No sum crosses lanes, and the bits are those of one row alone.
//!
//! Taking rows apart is the definition's own code, compiled for the instruction set, so a format needs no code of its
//! own here, only a line in `Layout::of`. Codes of 8 bits are two of 4: `Σ c·q = Σ low·q + 16·Σ high·q`, exactly.
#![allow(unsafe_code, reason = "one call into a function for a detected instruction set")]
#![allow(
    clippy::inline_always,
    reason = "what instruction sets share must be compiled inside the functions for them"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod dotprod;
mod portable;
#[cfg(test)]
mod tests;

use quant::{BlockType, GROUP, Q8View, Unpacked, unpack_blocks, unpack_rows};

use super::isa::Isa;
use crate::interleave;

/// Weight rows of a group: 32-bit lanes of a vector.
pub(super) const ROWS: usize = 8;

/// Activation rows of a tile: with two vectors of sums each, they and a weight fit into the registers.
const TILE: usize = 4;

/// Activation rows that pay for taking weights apart.
const COLUMNS: usize = 16;

/// Largest sum of two products that 16 bits must hold: code times quant, which reaches -128.
#[cfg(any(test, target_arch = "x86_64"))]
const fn pair(most: i16) -> i16 {
    2 * 128 * most
}

/// The same where rows are interleaved, and need not be taken apart as much.
const COLUMNS_INTERLEAVED: usize = 64;

/// Whether `n_columns` activation rows are best multiplied by packed rows of this type.
pub(super) fn is_for(ty: BlockType, interleaved: bool, n_columns: usize) -> bool {
    let columns = if interleaved { COLUMNS_INTERLEAVED } else { COLUMNS };
    n_columns >= columns && Layout::of(ty).is_some()
}

/// How codes of a type are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    /// Values that share a sub-scale; 32 if there are none.
    run: usize,
    /// Added to codes, so that none is negative.
    zero: u8,
    /// Largest code after that, or largest half of one.
    most: i16,
    /// Whether groups have minima.
    minima: bool,
    /// Whether codes have more than 7 bits: the sum of two products would not fit 16 bits. Their halves are laid out.
    halves: bool,
}

impl Layout {
    /// That of a type, unless it is a float type.
    fn of(ty: BlockType) -> Option<Self> {
        let lowered = |run, zero, most| Self { run, zero, most, minima: false, halves: false };
        let signed = |run, zero| lowered(run, zero, 2 * i16::from(zero));
        let minima = |run, most| Self { run, zero: 0, most, minima: true, halves: false };
        let halves = |minima| Self { run: 32, zero: 128, most: 15, minima, halves: true };
        Some(match ty {
            BlockType::Q4_0 => lowered(32, 8, 15),
            BlockType::Q4_1 | BlockType::Q4K => minima(32, 15),
            BlockType::Q5_0 => lowered(32, 16, 31),
            BlockType::Q5_1 | BlockType::Q5K => minima(32, 31),
            BlockType::Q8_0 | BlockType::Iq4Nl | BlockType::Iq4Xs => halves(false),
            BlockType::Q2K => minima(16, 3),
            BlockType::Q3K => lowered(16, 4, 7),
            BlockType::Q6K => lowered(16, 32, 63),
            BlockType::Iq1S => signed(32, 9),
            BlockType::Iq1M => signed(16, 9),
            BlockType::Iq2Xxs => signed(32, 43),
            BlockType::Iq2Xs | BlockType::Iq2S => signed(16, 43),
            BlockType::Iq3Xxs => signed(32, 62),
            BlockType::Iq3S => signed(32, 15),
            BlockType::Mxfp4 => signed(32, 12),
            BlockType::Affine(affine) if affine.bits() == 8 => halves(true),
            BlockType::Affine(affine) => minima(32, (1 << affine.bits()) - 1),
            BlockType::F32
            | BlockType::F16
            | BlockType::Bf16
            | BlockType::Fp8(_)
            | BlockType::E4m3 => return None,
        })
    }

    /// Codes, or halves of codes, for each value.
    const fn planes(self) -> usize {
        if self.halves { 2 } else { 1 }
    }

    /// Steps of four codes whose sums 16 bits hold: one, or a number that divides a run.
    #[cfg(any(test, target_arch = "x86_64"))]
    const fn steps(self) -> usize {
        let fit = (i16::MAX / pair(self.most)) as usize;
        if fit >= 8 && self.run == 32 {
            8
        } else if fit >= 4 {
            4
        } else if fit >= 2 {
            2
        } else {
            1
        }
    }
}

/// [`ROWS`] weight rows, laid out so that lane `r` of every vector belongs to row `r`.
#[derive(Debug, Default)]
pub(super) struct Packed {
    /// Values of a block.
    block: usize,
    /// Codes plus [`Layout::zero`], `[n_in / run, planes, run / 4, ROWS, 4]`; low halves before high ones.
    codes: Vec<u8>,
    /// Sub-scales, each twice, `[n_in / run, planes, ROWS, 2]`; those of high halves times 16.
    scales: Vec<i16>,
    /// Factors of pairs of group sums, `[n_in / 32, ROWS, 2]`: minima, or what [`Layout::zero`] added.
    sums: Vec<i16>,
    /// `[blocks]`.
    heads: Vec<Head>,
}

/// Where a block of each row is laid out; fields are those of [`Packed`].
struct Place<'a> {
    head: &'a mut Head,
    /// `[block / 32, planes]`.
    codes: &'a mut [[u8; 32 * ROWS]],
    /// `[block / run, planes]`.
    scales: &'a mut [[i16; 2 * ROWS]],
    /// `[block / 32]`.
    sums: &'a mut [[i16; 2 * ROWS]],
}

impl Place<'_> {
    /// Lays out the block. `transpose(rows, first, zero, codes)` does so with 32 codes of each row from value `first`
    /// on, raised by `zero`: `[ROWS, 8, 4]` to `[8, ROWS, 4]`.
    #[inline(always)]
    fn fill(
        &mut self,
        layout: Layout,
        rows: &[Unpacked; ROWS],
        transpose: impl Fn(&[Unpacked; ROWS], usize, u8, &mut [u8; 32 * ROWS]),
    ) {
        for (r, row) in rows.iter().enumerate() {
            self.scale(layout, r, row);
        }
        self.codes(layout, |first, codes| transpose(rows, first, layout.zero, codes));
    }

    /// Lays out the scales of row `r`.
    #[inline(always)]
    fn scale(&mut self, layout: Layout, r: usize, row: &Unpacked) {
        let Layout { run, zero, minima, halves, .. } = layout;
        self.head.scale[r] = row.scale;
        self.head.min_scale[r] = row.min_scale;
        let runs = row.scales.chunks_exact(run / GROUP);
        for (scales, group) in self.scales.chunks_exact_mut(layout.planes()).zip(runs) {
            let scale = i16::from(group[0]);
            scales[0][2 * r..2 * r + 2].fill(scale);
            if halves {
                scales[1][2 * r..2 * r + 2].fill(16 * scale);
            }
        }
        let by = if minima { 1 } else { i16::from(zero) };
        let factors = if minima { &row.mins } else { &row.scales };
        for (sums, pair) in self.sums.iter_mut().zip(factors.as_chunks::<2>().0) {
            sums[2 * r] = i16::from(pair[0]) * by;
            sums[2 * r + 1] = i16::from(pair[1]) * by;
        }
    }

    /// Lays out the codes; `transpose(first, codes)` does so with 32 of each row from value `first` on.
    #[inline(always)]
    fn codes(&mut self, layout: Layout, transpose: impl Fn(usize, &mut [u8; 32 * ROWS])) {
        for (k, codes) in self.codes.chunks_exact_mut(layout.planes()).enumerate() {
            transpose(32 * k, &mut codes[0]);
            if layout.halves {
                let [low, high] = codes else { unreachable!("two planes") };
                split(low, high);
            }
        }
    }
}

/// Scales of a block of each row.
#[derive(Debug, Clone, Copy, Default)]
struct Head {
    scale: [f32; ROWS],
    min_scale: [f32; ROWS],
}

/// Bytes that rows of at most `n_in` values take, whatever their type.
pub(crate) const fn most_bytes(n_in: usize) -> u64 {
    // Codes have two halves only where runs have 32 values; blocks have at least 32.
    let values = 2 * n_in * ROWS;
    let scales = n_in / 16 * 2 * ROWS + n_in / 32 * 2 * ROWS;
    let heads = n_in / 32 * size_of::<Head>();
    (values + 2 * scales + heads) as u64
}

impl Packed {
    /// Bytes that it holds.
    pub(super) const fn bytes(&self) -> u64 {
        let heads = self.heads.capacity() * size_of::<Head>();
        let words = 2 * (self.scales.capacity() + self.sums.capacity());
        (heads + self.codes.capacity() + words) as u64
    }

    /// Memory for bytes, while nothing is laid out.
    pub(super) const fn codes_mut(&mut self) -> &mut Vec<u8> {
        &mut self.codes
    }

    /// Where block `b` of the rows is laid out.
    #[inline(always)]
    fn block(&mut self, layout: Layout, b: usize) -> Place<'_> {
        let Layout { run, .. } = layout;
        let planes = layout.planes();
        let Self { block, codes, scales, sums, heads } = self;
        let (runs, pairs) = (*block / run * planes, *block / (2 * GROUP));
        let words = *block / 32 * planes;
        Place {
            head: &mut heads[b],
            codes: &mut codes.as_chunks_mut().0[b * words..(b + 1) * words],
            scales: &mut scales.as_chunks_mut().0[b * runs..(b + 1) * runs],
            sums: &mut sums.as_chunks_mut().0[b * pairs..(b + 1) * pairs],
        }
    }

    fn resize(&mut self, n_in: usize, block: usize, layout: Layout) {
        self.block = block;
        resize(&mut self.codes, n_in * layout.planes() * ROWS);
        resize(&mut self.scales, n_in / layout.run * layout.planes() * 2 * ROWS);
        resize(&mut self.sums, n_in / 32 * 2 * ROWS);
        resize(&mut self.heads, n_in / block);
    }
}

/// Codes to their low and high halves.
#[inline(always)]
fn split(low: &mut [u8; 32 * ROWS], high: &mut [u8; 32 * ROWS]) {
    for (low, high) in low.iter_mut().zip(high) {
        (*low, *high) = (*low & 15, *low >> 4);
    }
}

/// What `buffer` holds is about to be overwritten.
fn resize<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    // No more than that: the plan counts these bytes.
    buffer.reserve_exact(len.saturating_sub(buffer.len()));
    buffer.resize(len, T::default());
}

/// [`ROWS`] weight rows of a type that [`is_for`] accepts.
pub(super) struct Rows<'a> {
    pub(super) isa: Isa,
    pub(super) block_type: BlockType,
    pub(super) n_in: usize,
    /// `[ROWS, n_in]`.
    pub(super) bytes: &'a [u8],
    /// Whether they are interleaved.
    pub(super) interleaved: bool,
}

impl Rows<'_> {
    /// Multiplies with activation rows `x(0..n)`; `store(c, y)` takes the [`ROWS`] products of the `c`-th.
    ///
    /// # Panics
    /// If the type is none for packed rows, or lengths or blocks do not belong together.
    pub(super) fn multiply<'x>(
        &self,
        packed: &mut Packed,
        n: usize,
        x: impl Fn(usize) -> Q8View<'x>,
        store: impl FnMut(usize, &[f32; ROWS]),
    ) {
        let layout = Layout::of(self.block_type).expect("a type with integer codes");
        packed.resize(self.n_in, self.block_type.block_len(), layout);
        match self.isa {
            // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => unsafe { avx2::multiply(self, layout, packed, n, x, store) },
            // SAFETY: `Isa::Dotprod` is made only after its instructions were detected on this CPU.
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod(_) => unsafe { dotprod::multiply(self, layout, packed, n, x, store) },
            Isa::Scalar => portable::multiply(self, layout, packed, n, x, store),
        }
    }

    /// Takes the rows apart; `each` gets every block of them. What it does is compiled for the instruction set only if
    /// the closure is made in a function for it: closures made elsewhere may become functions of their own.
    #[inline(always)]
    fn unpack(&self, mut each: impl FnMut(usize, &[Unpacked; ROWS])) {
        let mut unpacked: [Unpacked; ROWS] = Default::default();
        let (ty, block) = (self.block_type, self.block_type.block_bytes());
        if !self.interleaved {
            return unpack_rows(ty, self.bytes, self.n_in, &mut unpacked, each);
        }
        for (b, mixed) in self.bytes.chunks_exact(ROWS * block).enumerate() {
            let rows = interleave::separate(ty, mixed);
            let rows = rows.each_ref().map(|row| &row[..block]);
            unpack_blocks(ty, rows, &mut unpacked);
            each(b, &unpacked);
        }
    }

    /// Columns `0..n`, [`TILE`] at a time.
    #[inline(always)]
    fn tiles<'x>(
        &self,
        n: usize,
        x: impl Fn(usize) -> Q8View<'x>,
        tile: impl Fn([Q8View<'x>; TILE]) -> [[f32; ROWS]; TILE],
        mut store: impl FnMut(usize, &[f32; ROWS]),
    ) {
        let block = self.block_type.block_len();
        let check = |c: usize| {
            let x = x(c);
            assert!(x.block == block && x.quants.len() == self.n_in, "activations of the weight");
            assert!(x.scales.len() * block == self.n_in && x.sums.len() * GROUP == self.n_in);
            x
        };
        let mut c = 0;
        while c < n {
            // The last tile takes its last column as often as it has room.
            let column = |i: usize| check((c + i).min(n - 1));
            let products = tile([column(0), column(1), column(2), column(3)]);
            for (i, y) in products.iter().enumerate().take(n - c) {
                store(c + i, y);
            }
            c += TILE;
        }
    }
}
