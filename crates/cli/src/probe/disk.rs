//! Reads of many lengths, many at once.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use expert_store::{DirectMode, DiskFile, MeasureError, Measured, ReaderKind, Spot};
use serde_json::{Value, json};
use units::{Bytes, ExpertKey};

use crate::args::ProbeArgs;
use crate::{open, report};

/// Lengths that are read unless others are named.
const SIZES: [Bytes; 7] = [
    Bytes::kib(4),
    Bytes::kib(16),
    Bytes::kib(64),
    Bytes::kib(256),
    Bytes::mib(1),
    Bytes::mib(4),
    Bytes::mib(8),
];

/// Most measurements of one command.
const MOST_SPOTS: usize = 4096;

/// What is read.
struct Target {
    file: PathBuf,
    /// The longest run of bytes that an expert of the model is read in.
    piece: Option<Bytes>,
}

/// What was found of a disk.
pub(super) struct Disk {
    name: String,
    bytes: u64,
    direct: bool,
    piece: Option<Bytes>,
    /// Ways of reading that are not possible here, and why.
    refused: Vec<(ReaderKind, String)>,
    depths: Vec<u16>,
    /// By reader and length, at every depth.
    rows: Vec<Row>,
}

struct Row {
    reader: ReaderKind,
    size: Bytes,
    found: Vec<Measured>,
}

pub(super) fn measure(args: &ProbeArgs) -> Result<Disk> {
    let Target { file: path, piece } = target(args)?;
    let file = DiskFile::open(&path, DirectMode::Auto)?;
    let sizes = sizes(args, piece, file.bytes());
    let (readers, refused) = readers(args);
    let n_spots = readers.len() * sizes.len() * args.depths.len();
    if n_spots > MOST_SPOTS {
        bail!("{n_spots} lengths and depths: at most {MOST_SPOTS} can be measured in one go");
    }
    let time = Duration::from_secs(args.seconds.into()) / n_spots.max(1) as u32;
    let bar = report::count_bar(n_spots as u64, "measurements");
    let mut rows = Vec::new();
    for reader in readers {
        for &size in &sizes {
            let spot = |depth: &u16| {
                let spot = Spot { reader, read_bytes: size.0, lanes: usize::from(*depth), time };
                let found = file.measure(&spot);
                bar.inc(1);
                found
            };
            let found: Result<Vec<Measured>, MeasureError> = args.depths.iter().map(spot).collect();
            rows.push(Row { reader, size, found: found? });
        }
    }
    bar.finish_and_clear();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let depths = args.depths.clone();
    Ok(Disk { name, bytes: file.bytes(), direct: file.direct(), piece, refused, depths, rows })
}

/// The file that was named, the largest of a folder, or the model's.
fn target(args: &ProbeArgs) -> Result<Target> {
    let Some(path) = &args.path else {
        let checkpoint = checkpoint::open(&open::choose(&args.model)?.path)?;
        let model = checkpoint::bind(&checkpoint)?;
        let record = model.records.record(ExpertKey::default());
        let piece =
            record.pieces.iter().max_by_key(|piece| piece.bytes).context("an expert has bytes")?;
        let file = checkpoint.files[piece.file.get()].path.clone();
        return Ok(Target { file, piece: Some(Bytes(piece.bytes)) });
    };
    let file = if path.is_dir() { largest(path)? } else { path.clone() };
    Ok(Target { file, piece: None })
}

fn largest(folder: &Path) -> Result<PathBuf> {
    let name = folder.display();
    let entries = std::fs::read_dir(folder).with_context(|| format!("listing {name}"))?;
    let files = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let metadata = std::fs::metadata(&path).ok()?;
        metadata.is_file().then_some((metadata.len(), path))
    });
    let largest = files.max().with_context(|| {
        format!(
            "{name} holds no file to read; name a large file on that disk, or a folder with one"
        )
    })?;
    Ok(largest.1)
}

/// Lengths to read; of the usual ones, those that the file has room for.
fn sizes(args: &ProbeArgs, piece: Option<Bytes>, file_bytes: u64) -> Vec<Bytes> {
    if !args.sizes.is_empty() {
        return args.sizes.clone();
    }
    let mut sizes: Vec<Bytes> = SIZES.into_iter().chain(piece).collect();
    sizes.retain(|size| size.0 <= file_bytes.min(expert_store::MAX_READ_BYTES));
    sizes.sort_unstable();
    sizes.dedup();
    // A file shorter than all of them is refused with its name.
    if sizes.is_empty() { vec![SIZES[0]] } else { sizes }
}

type Refused = Vec<(ReaderKind, String)>;

fn readers(args: &ProbeArgs) -> (Vec<ReaderKind>, Refused) {
    if let Some(reader) = args.reader {
        return (vec![reader.into()], Vec::new());
    }
    let mut refused = Vec::new();
    let allowed = [ReaderKind::Pread, ReaderKind::IoUring].into_iter().filter(|reader| {
        let check = reader.check();
        refused.extend(check.as_ref().err().map(|error| (*reader, error.to_string())));
        check.is_ok()
    });
    let allowed = allowed.collect();
    (allowed, refused)
}

impl Disk {
    pub(super) fn as_json(&self) -> Value {
        let spots = self.rows.iter().flat_map(|row| {
            row.found.iter().zip(&self.depths).map(|(found, depth)| {
                let Measured { bytes_per_second, reads, p50, p99 } = *found;
                json!({
                    "reader": row.reader.name(), "read_bytes": row.size.0, "at_once": depth,
                    "bytes_per_second": bytes_per_second, "reads": reads,
                    "p50_us": p50.as_secs_f64() * 1e6, "p99_us": p99.as_secs_f64() * 1e6,
                })
            })
        });
        let refused =
            self.refused.iter().map(|(reader, why)| json!({ "reader": reader.name(), "why": why }));
        json!({
            "file": self.name, "file_bytes": self.bytes, "direct": self.direct,
            "expert_piece_bytes": self.piece.map(|piece| piece.0),
            "refused": refused.collect::<Vec<_>>(), "spots": spots.collect::<Vec<_>>(),
        })
    }

    pub(super) fn as_text(&self) -> String {
        let how = if self.direct {
            "past the page cache"
        } else {
            "through the page cache, which this file system insists on"
        };
        let mut text = format!("disk: {} ({}), {how}\n", self.name, Bytes(self.bytes));
        if let Some(piece) = self.piece {
            let _ = writeln!(text, "experts of the model are read in pieces of up to {piece}");
        }
        for (reader, why) in &self.refused {
            let _ = writeln!(text, "{} is not possible here: {why}", reader.name());
        }
        let mut last = None;
        for Row { reader, size, found } in &self.rows {
            if last != Some(*reader) {
                last = Some(*reader);
                let _ = write!(
                    text,
                    "\n{}: MB/s (a read's time in us: median / 99 %), reads at once:\n{:>10}",
                    reader.name(),
                    ""
                );
                for depth in &self.depths {
                    let _ = write!(text, " {depth:>21}");
                }
                text.push('\n');
            }
            let _ = write!(text, "{size:>10}");
            for Measured { bytes_per_second, p50, p99, .. } in found {
                let times = format!("({} / {})", p50.as_micros(), p99.as_micros());
                let _ = write!(text, " {:>6.0} {times:>14}", bytes_per_second / 1e6);
            }
            text.push('\n');
        }
        text
    }
}
