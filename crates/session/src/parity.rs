//! One expert's rows, twice: brought through the pool and multiplied by the backend; and read again from the file and
//! multiplied by the scalar definition. The bits must agree.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use checkpoint::{ExpertRecord, FilePlace, Piece, Records};
use compute::backend::{Activations, MatrixShape};
use model::ForwardError;
use quant::{BlockType, Q8Row, SlotMatrix};
use units::ExpertKey;

use crate::engine::Engine;

/// One matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertKind {
    /// `[expert_width, hidden]`.
    Gate,
    /// `[expert_width, hidden]`.
    Up,
    /// `[hidden, expert_width]`.
    Down,
}

/// What to compare.
#[derive(Debug, Clone)]
pub struct Parity {
    /// The expert.
    pub key: ExpertKey,
    /// Which of its matrices.
    pub kind: ExpertKind,
    /// Rows of it; all when absent.
    pub rows: Option<Range<u32>>,
}

/// Why nothing could be compared.
#[derive(Debug, thiserror::Error)]
pub enum ParityError {
    /// The rows do not exist.
    #[error("rows {}..{} are asked for; the matrix has {n_out}", found.start, found.end)]
    Rows {
        /// What was asked for.
        found: Range<u32>,
        /// Rows of the matrix.
        n_out: u32,
    },
    /// The expert could not be brought into the pool.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The file could not be read again.
    #[error("reading the expert again: {0}")]
    Read(#[from] io::Error),
}

/// What came out.
#[derive(Debug, Clone, PartialEq)]
pub struct ParityResult {
    key: ExpertKey,
    block_type: BlockType,
    rows: Range<u32>,
    backend: &'static str,
    /// Row, backend's value, scalar value.
    first_difference: Option<(u32, f32, f32)>,
    differing: usize,
    /// Whether the slot holds the file's bytes.
    bytes_equal: bool,
}

impl ParityResult {
    /// Whether bytes and products agree bit for bit.
    pub const fn equal(&self) -> bool {
        self.bytes_equal && self.differing == 0
    }
}

impl fmt::Display for ParityResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.rows;
        write!(
            f,
            "{}: rows {start}..{end} of {} on {}: ",
            self.key, self.block_type, self.backend
        )?;
        match self.first_difference {
            None if self.bytes_equal => write!(f, "bytes and products equal"),
            None => write!(f, "MISMATCH: the slot's bytes are not the file's"),
            Some((row, got, expected)) => {
                write!(
                    f,
                    "MISMATCH in {} rows; first at row {row}: {got:e}, expected {expected:e}",
                    self.differing
                )
            }
        }
    }
}

impl Parity {
    /// Compares.
    ///
    /// # Errors
    /// See [`ParityError`].
    pub fn run(&self, engine: &mut Engine, records: &Records) -> Result<ParityResult, ParityError> {
        let record = records.record(self.key);
        let matrices = record.matrices();
        let matrix = match self.kind {
            ExpertKind::Gate => matrices.gate,
            ExpertKind::Up => matrices.up,
            ExpertKind::Down => matrices.down,
        };
        let rows = self.rows.clone().unwrap_or(0..matrix.n_out);
        if rows.is_empty() || rows.end > matrix.n_out {
            return Err(ParityError::Rows { found: rows, n_out: matrix.n_out });
        }
        let x = activations(matrix.n_in as usize);
        let place = matrix.place as usize + rows.start as usize * matrix.row_bytes();
        let len = rows.len() * matrix.row_bytes();
        let slot = engine.network.read_expert(self.key)?;
        let brought = &slot[place..place + len];
        let shape = MatrixShape {
            n_out: rows.len(),
            n_in: matrix.n_in as usize,
            block_type: matrix.block_type,
        };
        let got = engine.network.multiply(shape, brought, &x)?;
        let read_again = read_rows(engine, &record, place as u64, len)?;
        let expected = scalar(&matrix, &read_again, &x, engine.options.activations);
        let pairs = got.iter().zip(&expected).enumerate();
        let mut differing =
            pairs.filter(|(_, (got, expected))| got.to_bits() != expected.to_bits());
        let first = differing.next();
        Ok(ParityResult {
            key: self.key,
            block_type: matrix.block_type,
            backend: engine.network.backend_name(),
            first_difference: first
                .map(|(row, (got, expected))| (rows.start + row as u32, *got, *expected)),
            differing: usize::from(first.is_some()) + differing.count(),
            bytes_equal: brought == read_again,
            rows,
        })
    }
}

/// Activations without a short period, of the usual size.
fn activations(n: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The bytes that belong at `place` of the slot, from the file, read without the store.
fn read_rows(
    engine: &Engine,
    record: &ExpertRecord,
    place: u64,
    len: usize,
) -> io::Result<Vec<u8>> {
    let inside =
        |piece: &&Piece| (piece.place..piece.place + piece.memory_bytes()).contains(&place);
    let piece = record.pieces.iter().find(inside).expect("every row lies in a piece");
    let read = |at: FilePlace, bytes: usize| {
        let file = File::open(&engine.checkpoint.files[at.file.get()].path)?;
        let mut out = vec![0; bytes];
        file.read_exact_at(&mut out, at.offset)?;
        io::Result::Ok(out)
    };
    let codes = FilePlace { file: piece.file, offset: piece.offset };
    let Some(blocks) = &piece.blocks else {
        return read(codes.plus(place - piece.place), len);
    };
    // Rows are whole blocks: the scale of each, its bias, its codes.
    let first = (place - piece.place) / blocks.stride();
    let mut out = Vec::with_capacity(len);
    for i in first..first + len as u64 / blocks.stride() {
        let scale = blocks.tiles.map_or(i, |tiles| {
            let (row, rows) = (u64::from(tiles.blocks), u64::from(tiles.rows));
            (u64::from(tiles.before) + i / row) / rows * row + i % row
        });
        let bytes = u64::from(blocks.scale);
        for at in [Some(blocks.scales), blocks.biases].into_iter().flatten() {
            out.extend(read(at.plus(scale * bytes), blocks.scale as usize)?);
        }
        out.extend(read(codes.plus(i * u64::from(blocks.codes)), blocks.codes as usize)?);
    }
    Ok(out)
}

fn scalar(matrix: &SlotMatrix, bytes: &[u8], x: &[f32], activations: Activations) -> Vec<f32> {
    let rows = bytes.chunks_exact(matrix.row_bytes());
    if matrix.block_type.is_float() || activations == Activations::F32 {
        return rows.map(|row| quant::dot_f32(matrix.block_type, row, x)).collect();
    }
    let mut q8 = Q8Row::new();
    q8.quantize(x, matrix.block_type.activation_block());
    rows.map(|row| quant::dot_q8(matrix.block_type, row, q8.view())).collect()
}
