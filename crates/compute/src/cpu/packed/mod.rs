//! Many weight rows times many activation rows: weights are taken apart once and laid out for 16 rows at a time.
//!
//! A lane of a vector is a weight row. So each sum of the definition ([`quant::dot_q8`]) stays in its lane from the
//! first block to the last: integers inside a block in any order, as they are exact, then one fused multiply-add for
//! the scale and one for the minima. No sum crosses lanes, and the bits are those of one row alone.
//!
//! Taking rows apart is the definition's own code, compiled for the instruction set, so every quantised format comes
//! this way.

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod tests;

use quant::{BlockType, Codes, Q8View};

use super::isa::Isa;

/// Weight rows of a group: 32-bit lanes of the widest vector.
pub(super) const ROWS: usize = 16;

/// Activation rows that pay for taking weights apart.
const COLUMNS: usize = 8;

/// Whether `n_columns` activation rows are best multiplied by packed rows of this type.
pub(super) const fn is_for(isa: Isa, ty: BlockType, n_columns: usize) -> bool {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => n_columns >= COLUMNS && !ty.is_float(),
        _ => false,
    }
}

/// [`ROWS`] weight rows, laid out so that lane `r` of every vector belongs to row `r`.
#[derive(Debug, Default)]
pub(super) struct Packed {
    shape: Shape,
    /// Codes plus [`Shape::zero`], `[blocks, block / 4, ROWS, 4]`.
    codes: Vec<u8>,
    /// Sub-scales of runs of 16 values, or of 32 where all types of run agree, `[blocks, runs, ROWS]`.
    scales: Vec<i32>,
    /// Factors of pairs of group sums, `[blocks, block / 32, ROWS, 2]`: minima, or what [`Shape::zero`] added.
    sums: Vec<i16>,
    /// `[blocks]`.
    heads: Vec<Head>,
}

/// Scales of a block of each row.
#[derive(Debug, Clone, Copy, Default)]
struct Head {
    scale: [f32; ROWS],
    min_scale: [f32; ROWS],
}

/// How a type is laid out.
#[derive(Debug, Clone, Copy, Default)]
struct Shape {
    block: usize,
    /// Values that share a sub-scale; `block` if there are none.
    run: usize,
    /// Whether the type has minima.
    minima: bool,
    /// What makes codes unsigned.
    zero: u8,
    n_blocks: usize,
}

impl Shape {
    fn of(ty: BlockType, n_in: usize) -> Self {
        let Codes { offset, minima } = Codes::of(ty);
        let block = ty.block_len();
        let zero = if minima { offset as u8 } else { 128 };
        Self { block, run: run(ty), minima, zero, n_blocks: n_in / block }
    }
}

/// Values that share a sub-scale.
fn run(ty: BlockType) -> usize {
    match ty {
        BlockType::Q2K
        | BlockType::Q3K
        | BlockType::Q6K
        | BlockType::Iq1M
        | BlockType::Iq2Xs
        | BlockType::Iq2S => 16,
        BlockType::Q4K
        | BlockType::Q5K
        | BlockType::Iq1S
        | BlockType::Iq2Xxs
        | BlockType::Iq3Xxs
        | BlockType::Iq3S
        | BlockType::Iq4Xs => 32,
        _ => ty.block_len(),
    }
}

impl Packed {
    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> u64 {
        let heads = self.heads.capacity() * size_of::<Head>();
        let rest = self.codes.capacity() + 4 * self.scales.capacity() + 2 * self.sums.capacity();
        (heads + rest) as u64
    }

    /// Makes room for a type.
    fn prepare(&mut self, shape: Shape) {
        let Shape { block, run, n_blocks, .. } = shape;
        let n = n_blocks * block;
        let runs = if run < block { n / run } else { 0 };
        self.shape = shape;
        exact(&mut self.codes, n * ROWS);
        exact(&mut self.scales, runs * ROWS);
        exact(&mut self.sums, n / 16 * ROWS);
        exact(&mut self.heads, n_blocks);
    }
}

/// Makes `buffer` as long as that. What it holds is about to be overwritten.
fn exact<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    buffer.reserve_exact(len.saturating_sub(buffer.len()));
    buffer.resize(len, T::default());
}

/// `out[c][o] = row o · xs[c]` for [`ROWS`] rows of `n_in` values.
pub(super) struct Product<'a> {
    pub(super) isa: Isa,
    pub(super) block_type: BlockType,
    pub(super) n_in: usize,
    /// `[ROWS, n_in]`.
    pub(super) rows: &'a [u8],
}

impl Product<'_> {
    /// Multiplies with columns `0..n`: `x(c)` is an activation row, `store(c, y)` takes its products.
    ///
    /// # Panics
    /// If [`is_for`] does not hold, or lengths or blocks do not belong together.
    pub(super) fn multiply<'x>(
        &self,
        packed: &mut Packed,
        n: usize,
        x: impl Fn(usize) -> Q8View<'x>,
        store: impl FnMut(usize, &[f32; ROWS]),
    ) {
        packed.prepare(Shape::of(self.block_type, self.n_in));
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => avx512::multiply(self, packed, n, x, store),
            _ => panic!("{} has no products of packed rows", self.isa.name()),
        }
    }
}
