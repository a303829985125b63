//! Whether a checkpoint or a pack is whole.
//!
//! Opening and binding it has shown that headers, names, shapes and places fit. [`verify`] adds that no file changed its
//! size since; [`verify_deep`] reads everything: a pack against its checksums, and of any other container every value,
//! which has to be a number.

use std::path::{Path, PathBuf};

use checkpoint::pack::{self, Layout, Unit};
use checkpoint::{Checkpoint, Piece, TensorInfo, Vocabulary};
use expert_store::{ReadError, Store, StoreOptions};

use crate::Watch;
use crate::error::PrepareError;
use crate::pack::Reader;
use crate::stream::{CHUNK_BYTES, Job, stream};

/// Faults that are kept; the others are counted.
const MOST_FAULTS: usize = 10;

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The file.
    pub file: PathBuf,
    /// The tensor, the record, or the file itself.
    pub what: String,
    /// Where in the file, if it is at a place.
    pub offset: Option<u64>,
    /// What is wrong.
    pub problem: String,
}

/// What was looked at, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Verdict {
    /// Whether it is a pack.
    pub is_pack: bool,
    /// Bytes of weights that were read.
    pub read_bytes: u64,
    /// Checksums that were compared.
    pub checksums: u64,
    /// The first faults.
    pub faults: Vec<Fault>,
    /// How many there are.
    pub n_faults: u64,
}

impl Verdict {
    fn add(&mut self, fault: Fault) {
        self.n_faults += 1;
        if self.faults.len() < MOST_FAULTS {
            self.faults.push(fault);
        }
    }
}

/// Looks at the files of a checkpoint that was opened and bound: each still has the size that its header was read with.
pub fn verify(checkpoint: &Checkpoint) -> Verdict {
    let mut verdict = Verdict { is_pack: is_pack(checkpoint), ..Verdict::default() };
    for file in &checkpoint.files {
        let problem = match std::fs::metadata(&file.path) {
            Ok(there) if there.len() == file.bytes => continue,
            Ok(there) => {
                format!("{} bytes, and {} when its header was read", there.len(), file.bytes)
            }
            Err(error) => error.to_string(),
        };
        let (file, what) = (file.path.clone(), "the file's size".to_owned());
        verdict.add(Fault { file, what, offset: None, problem });
    }
    verdict
}

/// As [`verify`], and reads every byte of every tensor. `watch` counts to the bytes of all tensors, of a pack to those of
/// its units, which are a little more.
///
/// # Errors
/// Files that cannot be opened; a pack whose table of checksums is damaged; [`PrepareError::Stopped`]. What is wrong with
/// weights is in the verdict.
pub fn verify_deep(checkpoint: &Checkpoint, watch: &dyn Watch) -> Result<Verdict, PrepareError> {
    let mut verdict = verify(checkpoint);
    if verdict.n_faults > 0 {
        return Ok(verdict);
    }
    if verdict.is_pack {
        check_sums(&checkpoint.files[0].path, &mut verdict, watch)?;
    } else {
        check_values(checkpoint, &mut verdict, watch)?;
    }
    Ok(verdict)
}

fn is_pack(checkpoint: &Checkpoint) -> bool {
    matches!(checkpoint.files.as_slice(), [file] if pack::is_pack(&file.path))
}

/// Reads a pack from its first byte of weights to the last, padding included.
fn check_sums(path: &Path, verdict: &mut Verdict, watch: &dyn Watch) -> Result<(), PrepareError> {
    let source = pack::source(path)?;
    let (_, layout) = pack::parse(path, &source, Vocabulary::Skip)?;
    let sums = pack::read_sums(path, &source, &layout)?;
    let mut units: Vec<(Unit, u64)> = layout.units().zip(sums).collect();
    units.sort_unstable_by_key(|(unit, _)| unit.offset);
    let file = std::fs::File::open(path).map_err(PrepareError::io("open", path))?;
    let mut reader = Reader { file: &file, buffer: vec![0; CHUNK_BYTES as usize] };
    let index_end = layout.index_start() + layout.index_bytes();
    let sums_end = layout.sums_start() + layout.sums_bytes();
    for range in [(index_end, layout.sums_start()), (sums_end, layout.data_start())] {
        padding(path, &mut reader, range, verdict);
    }
    let mut end = layout.data_start();
    for (unit, needed) in units {
        if watch.stopped() {
            return Err(PrepareError::Stopped);
        }
        padding(path, &mut reader, (end, unit.offset), verdict);
        end = unit.offset + unit.bytes;
        let problem = match reader.sum(unit.offset, unit.bytes) {
            Ok(found) if found == needed => None,
            Ok(found) => Some(format!("checksum {found:#018x}, needed {needed:#018x}")),
            Err(error) => Some(error.to_string()),
        };
        verdict.checksums += 1;
        verdict.read_bytes += unit.bytes;
        watch.at(verdict.read_bytes);
        if let Some(problem) = problem {
            verdict.add(fault(path, &layout, &unit, problem));
        }
    }
    padding(path, &mut reader, (end, layout.file_bytes()), verdict);
    Ok(())
}

fn padding(path: &Path, reader: &mut Reader<'_>, (start, end): (u64, u64), verdict: &mut Verdict) {
    let problem = match reader.is_zero(start, end) {
        Ok(true) => return,
        Ok(false) => "bytes that are not zero".to_owned(),
        Err(error) => error.to_string(),
    };
    let (file, what) = (path.to_owned(), format!("the padding up to byte {end}"));
    verdict.add(Fault { file, what, offset: Some(start), problem });
}

fn fault(path: &Path, layout: &Layout, unit: &Unit, problem: String) -> Fault {
    Fault { file: path.to_owned(), what: layout.name(unit), offset: Some(unit.offset), problem }
}

/// What is wrong with the bytes of a job.
enum Wrong {
    /// They did not come.
    Read(ReadError),
    /// The first value that is no number, of so many in its chunk.
    Value { index: usize, value: f32, count: usize },
}

/// Reads every tensor and decodes every value.
fn check_values(
    checkpoint: &Checkpoint,
    verdict: &mut Verdict,
    watch: &dyn Watch,
) -> Result<(), PrepareError> {
    let paths: Vec<PathBuf> = checkpoint.files.iter().map(|file| file.path.clone()).collect();
    let store = Store::open(&paths, StoreOptions::default())?;
    let tensors: Vec<&TensorInfo> = checkpoint.directory.iter().collect();
    let jobs = || {
        tensors.iter().enumerate().flat_map(|(of, tensor)| {
            let rows = tensor.bytes / tensor.row_bytes().max(1);
            let most = whole_blocks(tensor);
            let pieces = tensor.pieces(0..rows);
            pieces.flat_map(move |piece| piece.split(most)).map(move |piece| Job { of, piece })
        })
    };
    let work = |job: &Job, outcome: Result<&[u8], ReadError>| match outcome {
        Err(error) => Some(Wrong::Read(error)),
        Ok(bytes) => not_finite(tensors[job.of], bytes),
    };
    // A tensor with many bad values, or a file that cannot be read, is one fault.
    let mut last = None;
    stream(&store, &jobs, &work, &mut |job, wrong, bytes| {
        if watch.stopped() {
            return Err(PrepareError::Stopped);
        }
        verdict.read_bytes += bytes.len() as u64;
        watch.at(verdict.read_bytes);
        if let Some(wrong) = wrong
            && last != Some(job.of)
        {
            last = Some(job.of);
            verdict.add(value_fault(checkpoint, tensors[job.of], (&job.piece, &wrong)));
        }
        Ok(())
    })
}

/// Bytes of a chunk that ends with a block.
fn whole_blocks(tensor: &TensorInfo) -> u64 {
    let block = tensor.block_type.block_bytes() as u64;
    CHUNK_BYTES / block * block
}

fn not_finite(tensor: &TensorInfo, bytes: &[u8]) -> Option<Wrong> {
    /// Values decoded at once, whole blocks of every type.
    const VALUES: usize = 4096;
    let (len, block) = (tensor.block_type.block_len(), tensor.block_type.block_bytes());
    let mut values = [0.0; VALUES];
    let mut before = 0;
    for bytes in bytes.chunks(VALUES / len * block) {
        let values = &mut values[..bytes.len() / block * len];
        quant::decode_row(tensor.block_type, bytes, values);
        let bad = values.iter().position(|value| !value.is_finite());
        if let Some(at) = bad {
            let rest = values[at..].iter().filter(|value| !value.is_finite()).count();
            return Some(Wrong::Value { index: before + at, value: values[at], count: rest });
        }
        before += values.len();
    }
    None
}

fn value_fault(
    checkpoint: &Checkpoint,
    tensor: &TensorInfo,
    (piece, wrong): (&Piece, &Wrong),
) -> Fault {
    let block = tensor.block_type.block_len() as u64;
    let in_file = match &piece.blocks {
        None => tensor.block_type.block_bytes() as u64,
        Some(blocks) => u64::from(blocks.codes),
    };
    let (offset, problem) = match wrong {
        Wrong::Read(error) => (piece.offset, error.to_string()),
        Wrong::Value { index, value, count } => {
            let number = piece.place / tensor.row_bytes().max(1) * tensor.row_len();
            let inside = piece.place % tensor.row_bytes().max(1);
            let inside = inside / tensor.block_type.block_bytes() as u64 * block;
            let number = number + inside + *index as u64;
            let (row, column) = (number / tensor.row_len(), number % tensor.row_len());
            let more = if *count > 1 { " and more behind it" } else { "" };
            let problem = format!("{value} at row {row}, value {column}{more}; needed a number");
            (piece.offset + *index as u64 / block * in_file, problem)
        }
    };
    Fault {
        file: checkpoint.files[piece.file.get()].path.clone(),
        what: format!("tensor `{}`", tensor.spelling()),
        offset: Some(offset),
        problem,
    }
}
