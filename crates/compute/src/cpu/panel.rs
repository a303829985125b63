//! A few weight rows times many activation rows: the inner part of every matrix product.
//!
//! Activation rows go in tiles of four, which share the unpacking of a weight row, while the panel's weights stay in
//! the nearest cache; many of them share it once, see [`packed`]. A product's bits do not depend on the tile that it is
//! in, so one row and a thousand give the same.

use quant::BlockType;

use super::dot::{decode_row, rows_decoded, rows_float, rows_q8};
use super::interleaved;
use super::isa::Isa;
use super::packed::{self, Packed};
use super::q8_rows::{Q8Rows, grow};
use crate::interleave::ROWS;
use crate::kernels::Matrix;

/// Weight bytes of a panel when several activation rows meet it: half of a small first-level cache.
const TILED_BYTES: usize = 16 << 10;
/// Weight bytes of a panel when one does: enough to make claiming it cheap.
const SINGLE_BYTES: usize = 32 << 10;
/// Activation rows of a panel, so that a task stays short.
pub(super) const PANEL_COLUMNS: usize = 256;

/// Weight rows of a panel of the matrix that meets `n_columns` activation rows.
pub(super) fn panel_rows(w: &Matrix<'_>, n_columns: usize) -> usize {
    if packed::is_for(w.block_type, w.interleaved, n_columns) {
        return packed::ROWS;
    }
    let bytes = if n_columns == 1 { SINGLE_BYTES } else { TILED_BYTES };
    let rows = bytes / w.row_bytes();
    if w.interleaved {
        return (rows - rows % ROWS).max(ROWS);
    }
    // Whole cache lines of results, where that is possible.
    if rows >= 16 {
        rows - rows % 16
    } else if rows > 0 {
        rows
    } else {
        1
    }
}

/// Consecutive rows of a weight matrix, `[n_out, n_in]`.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    pub(super) isa: Isa,
    pub(super) block_type: BlockType,
    pub(super) n_in: usize,
    pub(super) bytes: &'a [u8],
    pub(super) interleaved: bool,
}

/// Work space of one thread.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Decoded weight rows.
    pub(super) decoded: Vec<f32>,
    packed: Packed,
}

impl Scratch {
    /// For a copy of rows that are about to be interleaved.
    pub(super) const fn bytes_of_rows(&mut self) -> &mut Vec<u8> {
        self.packed.codes_mut()
    }

    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> u64 {
        4 * self.decoded.capacity() as u64 + self.packed.bytes()
    }
}

/// Activation rows, ready for products.
#[derive(Clone, Copy)]
pub(super) enum Inputs<'a> {
    /// For integer products.
    Q8(&'a Q8Rows),
    /// `[rows, n_in]`, for float products.
    F32(&'a [f32]),
}

/// One product of a panel: an activation row, and where its `n_out` results go.
pub(super) struct Column<'a> {
    pub(super) row: usize,
    pub(super) out: &'a mut [f32],
}

impl<'a> Panel<'a> {
    /// Rows `first..first + n` of a matrix.
    pub(super) fn of(isa: Isa, w: &Matrix<'a>, first: usize, n: usize) -> Self {
        let Matrix { block_type, n_in, bytes, interleaved, .. } = *w;
        let row = w.row_bytes();
        Self { isa, block_type, n_in, bytes: &bytes[first * row..(first + n) * row], interleaved }
    }

    /// Multiplies with columns `0..n`.
    pub(super) fn multiply<'o>(
        &self,
        inputs: Inputs<'_>,
        n: usize,
        column: impl Fn(usize) -> Column<'o>,
        scratch: &mut Scratch,
    ) {
        if let Inputs::Q8(x) = inputs
            && packed::is_for(self.block_type, self.interleaved, n)
            && self.n_rows() == packed::ROWS
        {
            let Self { isa, block_type, n_in, bytes, interleaved } = *self;
            let rows = packed::Rows { isa, block_type, n_in, bytes, interleaved };
            let x = |c: usize| x.row(column(c).row);
            rows.multiply(&mut scratch.packed, n, x, |c, y| column(c).out.copy_from_slice(y));
            return;
        }
        let decoded = &mut scratch.decoded;
        let mut weights: &[f32] = &[];
        if matches!(inputs, Inputs::F32(_)) && !self.block_type.is_float() {
            weights = self.decode(decoded);
        }
        let mut c = 0;
        while c < n {
            c += match n - c {
                1 => self.tile(inputs, weights, [column(c)]),
                2 => self.tile(inputs, weights, [c, c + 1].map(&column)),
                3 => self.tile(inputs, weights, [c, c + 1, c + 2].map(&column)),
                _ => self.tile(inputs, weights, [c, c + 1, c + 2, c + 3].map(&column)),
            };
        }
    }

    /// One to four columns; returns how many.
    fn tile<const N: usize>(
        &self,
        inputs: Inputs<'_>,
        decoded: &[f32],
        columns: [Column<'_>; N],
    ) -> usize {
        let rows = columns.each_ref().map(|column| column.row);
        let out = columns.map(|column| column.out);
        match inputs {
            Inputs::Q8(x) => {
                let xs = rows.map(|r| x.row(r));
                if self.interleaved {
                    interleaved::rows_q8(self.isa, self.block_type, self.bytes, xs, out);
                } else {
                    rows_q8(self.isa, self.block_type, self.bytes, xs, out);
                }
            }
            Inputs::F32(x) => {
                let xs = rows.map(|r| &x[r * self.n_in..(r + 1) * self.n_in]);
                if self.block_type.is_float() {
                    rows_float(self.isa, self.block_type, self.bytes, xs, out);
                } else {
                    rows_decoded(self.isa, decoded, xs, out);
                }
            }
        }
        N
    }

    fn n_rows(&self) -> usize {
        let row_bytes = self.block_type.row_bytes(self.n_in);
        self.bytes.len() / row_bytes.expect("rows are made of whole blocks")
    }

    fn decode<'d>(&self, decoded: &'d mut Vec<f32>) -> &'d [f32] {
        let n_out = self.n_rows();
        let row_bytes = self.bytes.len() / n_out.max(1);
        grow(decoded, n_out * self.n_in);
        let rows = self.bytes.chunks_exact(row_bytes);
        for (row, out) in rows.zip(decoded.chunks_exact_mut(self.n_in)) {
            decode_row(self.isa, self.block_type, row, out);
        }
        &decoded[..n_out * self.n_in]
    }
}
