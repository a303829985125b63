//! What a disk gives at one length of reads and one number of reads at once.
//!
//! Every lane is a thread that reads pages at random places of one file in the way of the store's readers, one read after
//! the other, until the time is over. Nothing is written, and what is read is thrown away.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::destination::ALIGN;
use crate::error::StoreError;
use crate::file::{DirectMode, OpenFile};
use crate::reader::{Reader, ReaderKind};
use crate::slots::Slots;
use crate::staging::Staging;

/// Most reads at once that are measured.
pub const MAX_LANES: usize = 64;

/// Longest reads that are measured.
pub const MAX_READ_BYTES: u64 = 64 << 20;

/// Reads after which a lane ends, whatever time is left.
const MOST_READS: usize = 1 << 18;

const STACK_BYTES: usize = 64 << 10;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spot {
    /// Which calls of the system read.
    pub reader: ReaderKind,
    /// Bytes of a read; rounded up to whole pages.
    pub read_bytes: u64,
    /// Reads at once, each by a thread of its own; 1 to [`MAX_LANES`].
    pub lanes: usize,
    /// How long; every lane reads at least once.
    pub time: Duration,
}

/// What was found there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Bytes that arrived in a second, of all lanes together.
    pub bytes_per_second: f64,
    /// Reads that ended.
    pub reads: u64,
    /// Half of the reads took no longer.
    pub p50: Duration,
    /// 99 of 100 reads took no longer.
    pub p99: Duration,
}

/// Why nothing was found.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The file cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The system does not read in the way that was asked for.
    #[error("{} is not possible here: {source}", kind.name())]
    Reader {
        /// What was asked for.
        kind: ReaderKind,
        /// What the system says.
        source: io::Error,
    },
    /// There is nothing to read at random.
    #[error(
        "{} has {found} bytes, too few for reads of {needed}; name a larger file", path.display()
    )]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        found: u64,
        /// Bytes of a read, in whole pages.
        needed: u64,
    },
    /// The system gives no thread.
    #[error("cannot start a thread that reads: {0}")]
    Thread(io::Error),
    /// A length or a number of lanes that makes no sense.
    #[error("{what} of {found} cannot be measured; 1 to {most} can")]
    Range {
        /// `reads` or `lanes`.
        what: &'static str,
        /// What was asked for.
        found: u64,
        /// The most.
        most: u64,
    },
    /// A read failed.
    #[error("cannot read {bytes} bytes at offset {offset} of {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where the read began.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// What the system says.
        source: io::Error,
    },
}

impl ReaderKind {
    /// Whether the system reads in this way.
    ///
    /// # Errors
    /// What it says against it.
    pub fn check(self) -> io::Result<()> {
        self.reader(&Arc::default()).map(drop)
    }
}

/// A file whose disk is measured.
#[derive(Debug)]
pub struct DiskFile(OpenFile);

impl DiskFile {
    /// Opens a regular file as the store does.
    ///
    /// # Errors
    /// [`StoreError::NotAFile`], [`StoreError::Open`].
    pub fn open(path: &Path, direct: DirectMode) -> Result<Self, StoreError> {
        OpenFile::open(path, direct).map(Self)
    }

    /// Whether it is read past the page cache.
    pub const fn direct(&self) -> bool {
        self.0.direct()
    }

    /// Its size.
    pub const fn bytes(&self) -> u64 {
        self.0.bytes_at_open()
    }

    /// Reads for a while.
    ///
    /// # Errors
    /// See [`MeasureError`].
    ///
    /// # Panics
    /// If a lane panics, which is a bug of this crate.
    pub fn measure(&self, spot: &Spot) -> Result<Measured, MeasureError> {
        let range = |what, found, most| MeasureError::Range { what, found, most };
        if !(1..=MAX_READ_BYTES).contains(&spot.read_bytes) {
            return Err(range("reads", spot.read_bytes, MAX_READ_BYTES));
        }
        if !(1..=MAX_LANES).contains(&spot.lanes) {
            return Err(range("lanes", spot.lanes as u64, MAX_LANES as u64));
        }
        let read_bytes = spot.read_bytes.next_multiple_of(ALIGN as u64);
        let places = (self.bytes() / ALIGN as u64 + 1).saturating_sub(read_bytes / ALIGN as u64);
        if places == 0 {
            let (path, found) = (self.0.path.clone(), self.bytes());
            return Err(MeasureError::TooSmall { path, found, needed: read_bytes });
        }
        let slots: Arc<Slots> = Arc::default();
        let mut readers = Vec::with_capacity(spot.lanes);
        for _ in 0..spot.lanes {
            let kind = spot.reader;
            let reader = kind.reader(&slots);
            readers.push(reader.map_err(|source| MeasureError::Reader { kind, source })?);
        }
        let lane = |reader: Box<dyn Reader>, seed| {
            let mut buffer = Staging::with_bytes(read_bytes as usize);
            // So that its pages are there.
            buffer.bytes().fill(1);
            Lane { file: &self.0, reader, places, time: spot.time }.run(buffer.bytes(), seed)
        };
        let lane = &lane;
        let lanes: Vec<Result<Vec<Duration>, MeasureError>> = thread::scope(|scope| {
            let spawn = |(reader, seed)| {
                let thread = thread::Builder::new().stack_size(STACK_BYTES);
                thread.spawn_scoped(scope, move || lane(reader, seed)).map_err(MeasureError::Thread)
            };
            let threads: Vec<_> = readers.into_iter().zip(1_u64..).map(spawn).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().expect("a lane does not panic")
            };
            threads.into_iter().map(|thread| thread.and_then(join)).collect()
        });
        let lanes = lanes.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(summary(lanes, read_bytes))
    }
}

/// One read after the other.
struct Lane<'a> {
    file: &'a OpenFile,
    reader: Box<dyn Reader>,
    /// Pages that a read can begin at.
    places: u64,
    time: Duration,
}

impl Lane<'_> {
    /// How long each read took.
    fn run(&self, buffer: &mut [u8], seed: u64) -> Result<Vec<Duration>, MeasureError> {
        let mut random = seed;
        let mut took = Vec::new();
        let start = Instant::now();
        while took.is_empty() || (start.elapsed() < self.time && took.len() < MOST_READS) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed | 1);
            let offset = (random >> 33) % self.places * ALIGN as u64;
            let began = Instant::now();
            self.read(offset, buffer)?;
            took.push(began.elapsed());
        }
        Ok(took)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), MeasureError> {
        let bytes = buffer.len() as u64;
        let mut done = 0;
        while done < buffer.len() {
            match self.reader.read_at(self.file, offset + done as u64, &mut buffer[done..]) {
                // The last page of a file may be a part of one.
                Ok(n) if n == 0 || !n.is_multiple_of(ALIGN) => break,
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    let path = self.file.path.clone();
                    return Err(MeasureError::Read { path, offset, bytes, source });
                }
            }
        }
        if !self.file.direct() {
            self.file.drop_pages(offset, bytes);
        }
        Ok(())
    }
}

/// What lanes that ran side by side found.
fn summary(lanes: Vec<Vec<Duration>>, read_bytes: u64) -> Measured {
    let length = |lane: &Vec<Duration>| lane.iter().sum::<Duration>();
    // A lane that has ended leaves the disk to the others, so rates of lanes are added, not bytes.
    let rate = |lane: &Vec<Duration>| {
        (lane.len() as u64 * read_bytes) as f64 / length(lane).as_secs_f64().max(1e-9)
    };
    let bytes_per_second = lanes.iter().map(rate).sum();
    let mut all: Vec<Duration> = lanes.into_iter().flatten().collect();
    all.sort_unstable();
    let at = |share: f64| all[((all.len() as f64 * share).ceil() as usize).clamp(1, all.len()) - 1];
    Measured { bytes_per_second, reads: all.len() as u64, p50: at(0.5), p99: at(0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_lanes_are_added_and_times_are_ranked() {
        let ms = Duration::from_millis;
        let slow = vec![ms(10); 2];
        let fast: Vec<Duration> = (0..98).map(|_| ms(1)).collect();
        let Measured { bytes_per_second, reads, p50, p99 } = summary(vec![slow, fast], 1000);
        assert_eq!((reads, p50, p99), (100, ms(1), ms(10)));
        assert!((bytes_per_second - (100_000.0 + 1_000_000.0)).abs() < 1.0, "{bytes_per_second}");
    }
}
