//! Runs of bytes in files, and where they go in memory.

use units::FileIndex;

/// What direct reads align to: offsets, lengths and memory.
pub const DIRECT_ALIGN: u64 = 4096;

/// Most pieces of a record: three matrices, each of which may lie apart once.
const MAX_PIECES: usize = 9;

/// A place in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FilePlace {
    /// Which file.
    pub file: FileIndex,
    /// Byte offset in the file.
    pub offset: u64,
}

impl FilePlace {
    /// The place `bytes` behind this one.
    #[must_use]
    pub const fn plus(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

/// Rows whose scales lie elsewhere in the files: memory holds, block after block, scale, bias (if there is one), codes.
///
/// So a row is one run of bytes in memory however the file keeps it, and kernels know one layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Bytes of the codes of a block.
    pub codes: u32,
    /// Bytes of a scale, and of a bias.
    pub scale: u32,
    /// The scale of the first block.
    pub scales: FilePlace,
    /// The bias of the first block.
    pub biases: Option<FilePlace>,
    /// Scales that several rows share; without it every block has its own.
    pub tiles: Option<Tiles>,
}

/// Scales in a grid `[rows / tile rows, blocks of a row]`, as FP8 checkpoints keep them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Blocks of a row.
    pub blocks: u32,
    /// Consecutive rows that share a row of scales.
    pub rows: u32,
    /// How many of them lie before the first row of the piece.
    pub before: u32,
}

impl Blocks {
    /// Bytes of a block in memory.
    pub const fn stride(&self) -> u64 {
        let scales = if self.biases.is_some() { 2 } else { 1 };
        self.codes as u64 + self.scale as u64 * scales
    }

    /// These blocks without the first `blocks`, which are whole rows where scales are shared.
    const fn skip(mut self, blocks: u64) -> Self {
        let scales = match &mut self.tiles {
            None => blocks,
            Some(Tiles { blocks: row, rows, before }) => {
                let rows_before = *before as u64 + blocks / *row as u64;
                *before = (rows_before % *rows as u64) as u32;
                rows_before / *rows as u64 * *row as u64
            }
        };
        let bytes = scales * self.scale as u64;
        self.scales.offset += bytes;
        if let Some(biases) = &mut self.biases {
            biases.offset += bytes;
        }
        self
    }
}

/// A contiguous run of bytes of a record.
///
/// Without [`Blocks`], `place` and `offset` agree modulo [`DIRECT_ALIGN`] in expert records, and the spans that such
/// pieces take when widened to it on both sides do not overlap in the slot: so a direct read may land in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Piece {
    /// Which file.
    pub file: FileIndex,
    /// Byte offset in the file.
    pub offset: u64,
    /// How many bytes lie there.
    pub bytes: u64,
    /// Byte offset in memory.
    pub place: u64,
    /// Nothing: memory holds the bytes as they lie. Otherwise they are codes, and scales are put between them.
    pub blocks: Option<Blocks>,
}

impl Piece {
    /// Bytes that it takes in memory.
    pub fn memory_bytes(&self) -> u64 {
        match &self.blocks {
            None => self.bytes,
            Some(blocks) => self.bytes / u64::from(blocks.codes) * blocks.stride(),
        }
    }

    /// Cuts it into pieces of at most `most` bytes in memory each, or a little more where a row of blocks is longer.
    pub fn split(self, most: u64) -> impl Iterator<Item = Self> {
        // Bytes that stay together, in the file and in memory.
        let (unit, unit_memory) = match &self.blocks {
            None => (1, 1),
            Some(blocks) => {
                let row = u64::from(blocks.tiles.map_or(1, |tiles| tiles.blocks));
                (row * u64::from(blocks.codes), row * blocks.stride())
            }
        };
        let units = (most / unit_memory).max(1);
        let step = units.saturating_mul(unit);
        (0..self.bytes).step_by(usize::try_from(step).unwrap_or(usize::MAX)).map(move |start| {
            let blocks = self.blocks.map(|blocks| blocks.skip(start / u64::from(blocks.codes)));
            Self {
                offset: self.offset + start,
                bytes: step.min(self.bytes - start),
                place: self.place + start / unit * unit_memory,
                blocks,
                ..self
            }
        })
    }
}

/// Up to nine pieces, without an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pieces {
    pieces: [Piece; MAX_PIECES],
    len: usize,
}

impl Pieces {
    /// As a slice.
    pub fn as_slice(&self) -> &[Piece] {
        &self.pieces[..self.len]
    }

    /// Adds a piece.
    ///
    /// # Panics
    /// If there are nine already.
    pub fn push(&mut self, piece: Piece) {
        self.pieces[self.len] = piece;
        self.len += 1;
    }
}

impl std::ops::Deref for Pieces {
    type Target = [Piece];

    fn deref(&self) -> &[Piece] {
        self.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: u64) -> FilePlace {
        FilePlace { file: FileIndex(0), offset }
    }

    #[test]
    fn a_piece_is_cut_at_whole_blocks() {
        let blocks =
            Blocks { codes: 32, scale: 2, scales: at(1000), biases: Some(at(2000)), tiles: None };
        let piece =
            Piece { offset: 64, bytes: 5 * 32, place: 8, blocks: Some(blocks), ..Piece::default() };
        assert_eq!(piece.memory_bytes(), 5 * 36);
        let parts: Vec<_> = piece.split(80).collect();
        let places = |part: &Piece| {
            let blocks = part.blocks.unwrap();
            let biases = blocks.biases.unwrap().offset;
            (part.offset, part.bytes, part.place, blocks.scales.offset, biases)
        };
        assert_eq!(
            parts.iter().map(places).collect::<Vec<_>>(),
            [(64, 64, 8, 1000, 2000), (128, 64, 80, 1004, 2004), (192, 32, 152, 1008, 2008)]
        );
    }

    #[test]
    fn shared_scales_are_followed_row_by_row() {
        let tiles = Some(Tiles { blocks: 3, rows: 2, before: 1 });
        let blocks = Blocks { codes: 4, scale: 4, scales: at(100), biases: None, tiles };
        let piece = Piece { bytes: 4 * 3 * 4, blocks: Some(blocks), ..Piece::default() };
        let parts: Vec<_> = piece.split(24).collect();
        let shared = |part: &Piece| {
            let blocks = part.blocks.unwrap();
            (part.place, blocks.scales.offset, blocks.tiles.unwrap().before)
        };
        assert_eq!(
            parts.iter().map(shared).collect::<Vec<_>>(),
            [(0, 100, 1), (24, 112, 0), (48, 112, 1), (72, 124, 0)]
        );
    }

    #[test]
    fn plain_bytes_are_cut_anywhere() {
        let piece = Piece { offset: 10, bytes: 7, place: 1, ..Piece::default() };
        let parts: Vec<_> = piece.split(3).map(|p| (p.offset, p.bytes, p.place)).collect();
        assert_eq!(parts, [(10, 3, 1), (13, 3, 4), (16, 1, 7)]);
    }
}
