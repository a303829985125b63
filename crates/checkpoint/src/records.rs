//! Expert records: which bytes one `(layer, expert)` needs, and where they go in a slot.

use quant::slot::{ExpertMatrices, SlotMatrix};
use units::{ExpertKey, LayerIndex};

use crate::directory::{Stacked, TensorInfo};
use crate::error::CheckpointError;
use crate::finder::Finder;
use crate::pieces::{DIRECT_ALIGN, Piece, Pieces};

/// What matrices align to that are put together in memory.
const CACHE_LINE: u64 = 64;

/// Everything about one expert's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertRecord {
    /// The expert.
    pub key: ExpertKey,
    /// Its bytes in the files and their places in a slot.
    pub pieces: Pieces,
    /// Payload: the sum of the pieces.
    pub bytes: u64,
    /// What a slot needs, a multiple of [`DIRECT_ALIGN`].
    pub slot_bytes: u64,
    matrices: ExpertMatrices,
}

impl ExpertRecord {
    /// The matrices as they lie in a slot.
    pub const fn matrices(&self) -> ExpertMatrices {
        self.matrices
    }
}

/// The stacked expert tensors of a layer, `[n_experts, rows, values]`.
#[derive(Debug, Clone)]
pub struct LayerRecords {
    /// Gate rows; with the up rows behind them when fused.
    pub gate: TensorInfo,
    /// Up rows, unless fused.
    pub up: Option<TensorInfo>,
    /// Down rows.
    pub down: TensorInfo,
}

impl LayerRecords {
    /// The stacked tensors of block `layer` of the file.
    pub(crate) fn of(finder: &Finder<'_>, layer: u32) -> Result<Self, CheckpointError> {
        let config = finder.config;
        let [experts, width, hidden] =
            [config.n_experts, config.expert_width, config.hidden].map(u64::from);
        let name = |part: &str| format!("blk.{layer}.ffn_{part}_exps.weight");
        let down = finder.tensor(&name("down"), &[experts, hidden, width])?;
        if finder.checkpoint.directory.get(&name("gate_up")).is_some() {
            let gate = finder.tensor(&name("gate_up"), &[experts, 2 * width, hidden])?;
            return Ok(Self { gate, up: None, down });
        }
        let gate = finder.tensor(&name("gate"), &[experts, width, hidden])?;
        let up = Some(finder.tensor(&name("up"), &[experts, width, hidden])?);
        Ok(Self { gate, up, down })
    }

    /// Gate (with up behind it when fused), up, down.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        std::iter::once(&self.gate).chain(self.up.as_ref()).chain(std::iter::once(&self.down))
    }

    /// How its records lie, if each is one run of bytes: in a pack.
    fn packed(&self) -> Option<Stacked> {
        let stacked = |tensor: &TensorInfo| tensor.foreign.as_ref().and_then(|f| f.stacked);
        let record = |s: Stacked| (s.record, s.record_bytes, s.stride);
        let first = stacked(&self.gate)?;
        let together = self.tensors().all(|tensor| {
            tensor.file == self.gate.file && stacked(tensor).map(record) == Some(record(first))
        });
        together.then_some(first)
    }

    /// Payload of one expert.
    pub fn record_bytes(&self) -> u64 {
        self.tensors().map(|t| t.bytes / t.shape[0]).sum()
    }
}

impl LayerRecords {
    /// The matrices of a slot whose tensors lie at `places`, in the order of [`Self::tensors`].
    fn matrices(&self, places: [u64; 3]) -> ExpertMatrices {
        let matrix = |tensor: &TensorInfo, place, n_out| SlotMatrix {
            place,
            block_type: tensor.block_type,
            n_in: tensor.shape[2] as u32,
            n_out,
        };
        let rows = |tensor: &TensorInfo| tensor.shape[1] as u32;
        if let Some(up) = &self.up {
            return ExpertMatrices {
                gate: matrix(&self.gate, places[0], rows(&self.gate)),
                up: matrix(up, places[1], rows(up)),
                down: matrix(&self.down, places[2], rows(&self.down)),
            };
        }
        let width = rows(&self.gate) / 2;
        let gate = matrix(&self.gate, places[0], width);
        let up = SlotMatrix { place: gate.place + gate.bytes() as u64, ..gate };
        ExpertMatrices { gate, up, down: matrix(&self.down, places[1], rows(&self.down)) }
    }

    /// A record that is one run of bytes, laid out as a slot is. Readers checked that matrices lie inside it.
    fn packed_record(&self, key: ExpertKey, packed: Stacked) -> ExpertRecord {
        let Stacked { record, record_bytes, stride, .. } = packed;
        let mut places = [0; 3];
        for (tensor, place) in self.tensors().zip(&mut places) {
            *place = tensor.offset - record;
        }
        let offset = record + u64::from(key.expert.0) * stride;
        // Records begin at pages, so nothing leads.
        let place = offset % DIRECT_ALIGN;
        let mut pieces = Pieces::default();
        pieces.push(Piece {
            file: self.gate.file,
            offset,
            bytes: record_bytes,
            place,
            blocks: None,
        });
        ExpertRecord {
            key,
            pieces,
            bytes: record_bytes,
            slot_bytes: (place + record_bytes).next_multiple_of(DIRECT_ALIGN),
            matrices: self.matrices(places.map(|inside| inside + place)),
        }
    }
}

/// The routed experts of the trunk; with those of a draft block behind them where that is loaded.
#[derive(Debug, Clone)]
pub struct Records {
    layers: Vec<LayerRecords>,
    n_experts: u32,
}

impl Records {
    pub(crate) fn of(finder: &Finder<'_>) -> Result<Self, CheckpointError> {
        let layers = (0..finder.config.n_layers)
            .map(|layer| LayerRecords::of(finder, layer))
            .collect::<Result<_, CheckpointError>>()?;
        Ok(Self { layers, n_experts: finder.config.n_experts })
    }

    /// These, and the experts of one more layer.
    pub(crate) fn with_layer(&self, layer: LayerRecords) -> Self {
        let mut all = self.clone();
        all.layers.push(layer);
        all
    }

    /// Experts of a layer.
    pub const fn n_experts(&self) -> u32 {
        self.n_experts
    }

    /// Layers.
    pub const fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// The stacked tensors of a layer.
    pub fn layer(&self, layer: LayerIndex) -> &LayerRecords {
        &self.layers[layer.get()]
    }

    /// The stacked tensors of all layers.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.layers.iter().flat_map(LayerRecords::tensors)
    }

    /// Payload of all experts.
    pub fn payload_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.record_bytes() * u64::from(self.n_experts)).sum()
    }

    /// Whether any expert is put together from runs of bytes that lie apart, which takes staging buffers for good.
    pub fn are_put_together(&self) -> bool {
        self.tensors().any(|tensor| {
            tensor
                .foreign
                .iter()
                .flat_map(|foreign| &foreign.parts)
                .any(|part| part.scales.is_some())
        })
    }

    /// What a slot for this expert needs.
    pub fn slot_bytes(&self, key: ExpertKey) -> u64 {
        self.record(key).slot_bytes
    }

    /// Where the bytes of an expert are and go.
    ///
    /// # Panics
    /// If the model has no such expert.
    pub fn record(&self, key: ExpertKey) -> ExpertRecord {
        assert!(
            key.expert.0 < self.n_experts,
            "{key}: the model has {} experts a layer",
            self.n_experts
        );
        let layer = &self.layers[key.layer.get()];
        if let Some(packed) = layer.packed() {
            return layer.packed_record(key, packed);
        }
        let mut own = [(0, Piece::default()); 3];
        let mut n = 0;
        for (matrix, tensor) in layer.tensors().enumerate() {
            let rows = tensor.shape[1];
            let first = rows * u64::from(key.expert.0);
            let mut lies = tensor.pieces(first..first + rows);
            let piece = lies.next().expect("an expert has rows");
            assert!(lies.next().is_none(), "an expert's rows lie in one part of their tensor");
            own[n] = (matrix, piece);
            n += 1;
        }
        let Laid { pieces, places, bytes, slot_bytes } = lay_out(&mut own[..n]);
        ExpertRecord { key, pieces, bytes, slot_bytes, matrices: layer.matrices(places) }
    }
}

/// Matrices of an expert in a slot.
struct Laid {
    pieces: Pieces,
    /// Where each matrix begins.
    places: [u64; 3],
    /// Bytes of the matrices.
    bytes: u64,
    slot_bytes: u64,
}

/// Gives every matrix its place: in the order of the files, neighbours as one piece.
///
/// Two matrices are neighbours when the page that the second begins in is the last one of the first, or follows it. Then
/// they lie in the slot as they lie in the file, gap and all: one read, that moves no byte more than two would, into a
/// slot that is no byte longer.
fn lay_out(matrices: &mut [(usize, Piece)]) -> Laid {
    matrices.sort_unstable_by_key(|(_, piece)| (piece.file, piece.offset));
    let (mut places, mut bytes, mut end) = ([0; 3], 0, 0_u64);
    let mut grown: Option<Piece> = None;
    let mut pieces = Pieces::default();
    for (matrix, piece) in matrices {
        bytes += piece.memory_bytes();
        if let Some(last) = &mut grown
            && touch(last, piece)
        {
            last.bytes = piece.offset + piece.bytes - last.offset;
            places[*matrix] = last.place + (piece.offset - last.offset);
            end = last.place + last.bytes;
            continue;
        }
        // A direct read lands at the same distance from a page as it has in the file; a piece that is put together
        // from several goes anywhere.
        let (align, lead) = match piece.blocks {
            None => (DIRECT_ALIGN, piece.offset % DIRECT_ALIGN),
            Some(_) => (CACHE_LINE, 0),
        };
        piece.place = end.next_multiple_of(align) + lead;
        places[*matrix] = piece.place;
        end = (piece.place + piece.memory_bytes()).next_multiple_of(align);
        grown.replace(*piece).into_iter().for_each(|whole| pieces.push(whole));
    }
    grown.into_iter().for_each(|whole| pieces.push(whole));
    Laid { pieces, places, bytes, slot_bytes: end.next_multiple_of(DIRECT_ALIGN) }
}

/// Whether a direct read of `first` ends in the page in which one of `second` begins, or right before it.
fn touch(first: &Piece, second: &Piece) -> bool {
    let end = first.offset + first.bytes;
    first.blocks.is_none()
        && second.blocks.is_none()
        && first.file == second.file
        && second.offset >= end
        && second.offset / DIRECT_ALIGN <= end.div_ceil(DIRECT_ALIGN)
}

/// The n-gram table: rows that are read one by one as tokens ask for them.
#[derive(Debug, Clone)]
pub struct NgramTable {
    /// `[rows, values]`.
    pub tensor: TensorInfo,
}

impl NgramTable {
    /// Its name in all containers.
    pub(crate) const NAME: &str = "per_layer_token_embd.weight";
    /// The name of the one number that all its values are multiplied by, if they are E4M3.
    pub(crate) const SCALE: &str = "per_layer_token_embd.scale";

    /// Bytes of a row as it lies in memory.
    pub fn row_bytes(&self) -> usize {
        self.tensor.row_bytes() as usize
    }

    /// Values of a row.
    pub fn row_width(&self) -> usize {
        self.tensor.shape[1] as usize
    }

    /// Rows.
    pub fn rows(&self) -> u64 {
        self.tensor.shape[0]
    }

    /// Where rows from row `first` are, and where they go in memory that holds just them: `n`, or as many of them as
    /// fit into a list of pieces; and how many that are, at least one. Shards may be as short as a row.
    ///
    /// # Panics
    /// If the table has no such rows.
    pub fn pieces(&self, first: u64, n: u64) -> (Pieces, u64) {
        let end = first.checked_add(n);
        assert!(end.is_some_and(|end| end <= self.rows()), "row {first} + {n} of {}", self.rows());
        let mut pieces = Pieces::default();
        let mut bytes = 0;
        for piece in self.tensor.pieces(first..first + n).take(Pieces::MOST) {
            bytes += piece.memory_bytes();
            pieces.push(piece);
        }
        (pieces, bytes / self.tensor.row_bytes())
    }
}

#[cfg(test)]
mod tests {
    use units::FileIndex;

    use super::*;

    /// Lays out matrices given as `(file, offset, bytes)`; the pieces as `(offset, bytes, place)`.
    fn laid(matrices: &[(u32, u64, u64)]) -> (Vec<(u64, u64, u64)>, Laid) {
        let mut own: Vec<_> = matrices
            .iter()
            .map(|&(file, offset, bytes)| Piece {
                file: FileIndex(file),
                offset,
                bytes,
                ..Piece::default()
            })
            .enumerate()
            .collect();
        let laid = lay_out(&mut own);
        (laid.pieces.iter().map(|p| (p.offset, p.bytes, p.place)).collect(), laid)
    }

    #[test]
    fn neighbours_are_one_piece_in_the_order_of_the_file() {
        // As Hugging Face writes an expert: down, gate, up, one behind the other.
        let (pieces, laid) = laid(&[(0, 20_100, 10_000), (0, 30_100, 10_000), (0, 10_100, 10_000)]);
        assert_eq!(pieces, [(10_100, 30_000, 1908)]);
        assert_eq!(laid.places, [11_908, 21_908, 1908]);
        assert_eq!((laid.bytes, laid.slot_bytes), (30_000, 32_768));
    }

    #[test]
    fn a_gap_is_read_along_if_it_holds_no_whole_page() {
        // The first ends at 5000, in the page that ends at 8192; the page behind it ends at 12,288.
        for (offset, together) in [(5000, true), (8191, true), (12_287, true), (12_288, false)] {
            let (pieces, laid) = laid(&[(0, 0, 5000), (0, offset, 100)]);
            assert_eq!(pieces.len(), if together { 1 } else { 2 }, "{offset}");
            assert_eq!(laid.bytes, 5100);
            let alone = 8192 + (offset % 4096 + 100).next_multiple_of(4096);
            assert!(laid.slot_bytes <= alone, "{offset}: {} of {alone}", laid.slot_bytes);
        }
    }

    #[test]
    fn only_bytes_of_one_file_that_lie_as_they_are_used_are_neighbours() {
        assert_eq!(laid(&[(0, 0, 4096), (1, 4096, 4096)]).0.len(), 2);
        let place = crate::pieces::FilePlace::default();
        let blocks = quantised(crate::pieces::Blocks {
            codes: 32,
            scale: 2,
            scales: place,
            biases: None,
            tiles: None,
        });
        assert_eq!(
            lay_out(&mut [(0, blocks), (1, Piece { offset: 64, ..blocks })]).pieces.len(),
            2
        );
    }

    fn quantised(blocks: crate::pieces::Blocks) -> Piece {
        Piece { bytes: 64, blocks: Some(blocks), ..Piece::default() }
    }
}
