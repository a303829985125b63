//! The disks that models lie on, at the lengths of reads that those need.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use expert_store::{
    DEFAULT_THREADS, DirectMode, DiskFile, MeasureError, Measured, ReaderKind, Spot,
};
use serde::Serialize;

use super::findings::Finding;

/// How long each measurement takes.
const TIME: Duration = Duration::from_millis(400);

/// A file of a model.
pub(super) struct Place {
    pub(super) name: String,
    pub(super) file: PathBuf,
    /// The longest run of bytes that an expert is read in.
    pub(super) piece_bytes: u64,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Disk {
    /// The model whose file was read.
    pub(super) model: String,
    /// Whether reads go past the page cache.
    pub(super) direct: bool,
    /// The length of the reads.
    pub(super) read_bytes: u64,
    /// As many at once as a run has without any measurement.
    pub(super) at_once: usize,
    pub(super) bytes_per_second: f64,
    /// One read after the other.
    pub(super) alone_p50_us: f64,
    pub(super) alone_p99_us: f64,
    /// Room left on it.
    pub(super) free_bytes: Option<u64>,
}

/// Each disk once, by the first model on it.
pub(super) fn probe(places: &[Place], findings: &mut Vec<Finding>) -> Vec<Disk> {
    let mut seen = BTreeSet::new();
    let mut disks = Vec::new();
    for place in places {
        let device = std::fs::metadata(&place.file).map(|metadata| metadata.dev()).ok();
        if !seen.insert(device) {
            continue;
        }
        match measure(place) {
            Ok(disk) => disks.push(disk),
            Err(error) => {
                let what = format!("the disk of {}", place.name);
                findings.push(Finding::unknown(&what, &reason(&error)));
            }
        }
    }
    disks
}

/// What went wrong, without the path.
fn reason(error: &MeasureError) -> String {
    match error {
        MeasureError::Store(_) => "its file cannot be opened".to_owned(),
        MeasureError::Read { source, .. } => source.to_string(),
        MeasureError::TooSmall { .. } => "its file is shorter than a read".to_owned(),
        other => other.to_string(),
    }
}

fn measure(place: &Place) -> Result<Disk, MeasureError> {
    let file = DiskFile::open(&place.file, DirectMode::Auto)?;
    let read_bytes = place.piece_bytes.clamp(1, expert_store::MAX_READ_BYTES);
    let spot =
        |lanes| file.measure(&Spot { reader: ReaderKind::Pread, read_bytes, lanes, time: TIME });
    let (alone, together) = (spot(1)?, spot(DEFAULT_THREADS)?);
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let Measured { p50, p99, .. } = alone;
    Ok(Disk {
        model: place.name.clone(),
        direct: file.direct(),
        read_bytes,
        at_once: DEFAULT_THREADS,
        bytes_per_second: together.bytes_per_second,
        alone_p50_us: us(p50),
        alone_p99_us: us(p99),
        free_bytes: free_bytes(&place.file),
    })
}

fn free_bytes(path: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(path).ok()?;
    found.f_bavail.checked_mul(found.f_frsize)
}
