//! Copies of the model's files on several disks, and which of them a read goes to.
//!
//! A read goes to the copy that should have it first: bytes that the disk has to deliver before, and its own, over the
//! rate that the disk has shown. A disk whose read fails drops out if another one has the file, and the read is
//! repeated there. So output never depends on how many copies there are, and a run ends only with its last copy.

use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use units::FileIndex;

use crate::error::{ReadError, StoreError};
use crate::file::{DirectMode, OpenFile};
use crate::reader::faulty::FaultPlan;
use crate::sync::Mutex;

/// Bytes and time that a disk is taken to have shown before its first read: all begin alike, and soon differ.
const PRIOR: (f64, f64) = (1e6, 1e-3);

/// Seconds of work after which what a disk has shown counts half.
const WINDOW: f64 = 0.25;

/// A disk that got nothing for so long gets the next read, to see whether it is still as slow as it was.
const FORGOTTEN: Duration = Duration::from_secs(2);

/// Whom to tell what a person should know, a line at a time.
pub type Notice = fn(&str);

/// Copies of some or all files of a store, on another disk.
#[derive(Debug, Clone, Default)]
pub struct Mirror {
    /// Where the copy of each file is, in the order of [`FileIndex`]; nothing where there is none.
    pub files: Vec<Option<PathBuf>>,
    /// Reads that fail on purpose: for tests.
    pub faults: Option<FaultPlan>,
}

/// Which disk; the first has the files that the store was opened with.
type DiskIndex = usize;

/// All copies of all files.
pub(crate) struct Disks {
    /// `[disks][files]`. The first disk has all of them.
    files: Vec<Vec<Option<OpenFile>>>,
    loads: Mutex<Loads>,
    notice: Option<Notice>,
    since: Instant,
}

impl Disks {
    pub(crate) fn open(
        files: &[PathBuf],
        mirrors: &[Mirror],
        mode: DirectMode,
        notice: Option<Notice>,
    ) -> Result<Self, StoreError> {
        let own = files.iter().map(|path| OpenFile::open(path, mode).map(Some));
        let mut all: Vec<Vec<Option<OpenFile>>> = vec![own.collect::<Result<_, _>>()?];
        for mirror in mirrors {
            assert_eq!(mirror.files.len(), files.len(), "a mirror says of every file where it is");
            let open =
                |path: &Option<PathBuf>| path.as_ref().map(|p| OpenFile::open(p, mode)).transpose();
            let copies: Vec<Option<OpenFile>> =
                mirror.files.iter().map(open).collect::<Result<_, _>>()?;
            for (copy, own) in copies.iter().zip(&all[0]) {
                let (Some(copy), Some(own)) = (copy, own) else { continue };
                copy.check_size(own.bytes_at_open())?;
            }
            all.push(copies);
        }
        let loads = Mutex::new(Loads::new(all.len()));
        Ok(Self { files: all, loads, notice, since: Instant::now() })
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.files.len()
    }

    /// The files that the store was opened with.
    pub(crate) fn own(&self) -> impl ExactSizeIterator<Item = &OpenFile> {
        self.files[0].iter().map(|file| file.as_ref().expect("the first disk has every file"))
    }

    /// A file that the store was opened with.
    pub(crate) fn file(&self, file: FileIndex) -> &OpenFile {
        self.files[0][file.get()].as_ref().expect("the first disk has every file")
    }

    /// Every file on every disk.
    pub(crate) fn all(&self) -> impl Iterator<Item = &OpenFile> {
        self.files.iter().flatten().flatten()
    }

    /// Disks that still take part.
    pub(crate) fn live(&self) -> usize {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner).live()
    }

    /// Does `read` with one copy of the file after the other, best first, until it succeeds.
    ///
    /// # Errors
    /// The first error, if no copy could be read.
    pub(crate) fn read(
        &self,
        file: FileIndex,
        bytes: u64,
        mut read: impl FnMut(DiskIndex, &OpenFile) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        if self.len() == 1 {
            return read(0, self.file(file));
        }
        let mut copies = Copies(0);
        for (disk, files) in self.files.iter().enumerate() {
            if files[file.get()].is_some() {
                copies = copies.with(disk);
            }
        }
        let mut first = None;
        while !copies.is_empty() {
            let disk = self.change(|loads, now| loads.begin(copies, bytes, now));
            let copy = self.files[disk][file.get()].as_ref().expect("only copies are chosen");
            let result = read(disk, copy);
            copies = copies.without(disk);
            let failed = result.is_err();
            let dropped = self.change(|loads, now| loads.end(disk, bytes, failed, copies, now));
            let Err(error) = result else { return Ok(()) };
            if dropped && let Some(notice) = self.notice {
                notice(&format!("warning: {error}; reads go to the other copies from now on"));
            }
            first.get_or_insert(error);
        }
        Err(first.expect("the first disk has every file"))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Loads, Duration) -> T) -> T {
        let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut loads, self.since.elapsed())
    }
}

/// A set of disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Copies(u64);

impl Copies {
    const fn with(self, disk: DiskIndex) -> Self {
        Self(self.0 | 1 << disk)
    }

    const fn without(self, disk: DiskIndex) -> Self {
        Self(self.0 & !(1 << disk))
    }

    const fn has(self, disk: DiskIndex) -> bool {
        self.0 & 1 << disk != 0
    }

    const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// What every disk has to do, and how fast it has been. No clock: the time is given.
#[derive(Debug)]
struct Loads(Vec<Load>);

#[derive(Debug, Clone)]
struct Load {
    /// Bytes that it has to deliver.
    queued: u64,
    /// Bytes that it delivered, and the seconds in which it had something to do; fading.
    shown: (f64, f64),
    /// Up to when its time is counted; of an idle one, since when it is idle.
    counted: Duration,
    failed: bool,
}

impl Load {
    fn finish(&self, bytes: u64) -> f64 {
        (self.queued + bytes) as f64 * self.shown.1 / self.shown.0
    }

    fn forgotten(&self, now: Duration) -> bool {
        self.queued == 0 && now.saturating_sub(self.counted) >= FORGOTTEN
    }
}

impl Loads {
    fn new(disks: usize) -> Self {
        let fresh = Load { queued: 0, shown: PRIOR, counted: Duration::ZERO, failed: false };
        Self(vec![fresh; disks])
    }

    fn live(&self) -> usize {
        self.0.iter().filter(|load| !load.failed).count()
    }

    /// Chooses one of `copies`, which are not none: a forgotten one, else the one that should be done first. One that
    /// failed is chosen only when no other is left.
    fn begin(&mut self, copies: Copies, bytes: u64, now: Duration) -> DiskIndex {
        let key = |load: &Load| (load.failed, !load.forgotten(now), load.finish(bytes));
        let among = self.0.iter().enumerate().filter(|(disk, _)| copies.has(*disk));
        let best = among.min_by(|(_, a), (_, b)| {
            let (a, b) = (key(a), key(b));
            (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2))
        });
        let disk = best.expect("a file has a copy").0;
        let load = &mut self.0[disk];
        load.count(now);
        load.queued += bytes;
        disk
    }

    /// A read has ended, and a failed one may go on with `others`. Says whether the disk drops out by that: it does if
    /// one of the others is left to take its place.
    fn end(
        &mut self,
        disk: DiskIndex,
        bytes: u64,
        failed: bool,
        others: Copies,
        now: Duration,
    ) -> bool {
        let load = &mut self.0[disk];
        load.count(now);
        load.queued -= bytes;
        if !failed {
            load.shown.0 += bytes as f64;
            return false;
        }
        let replaced = self.0.iter().enumerate().any(|(i, l)| others.has(i) && !l.failed);
        replaced && !std::mem::replace(&mut self.0[disk].failed, true)
    }
}

impl Load {
    /// Counts the time since it was counted last, if there was something to do.
    fn count(&mut self, now: Duration) {
        if self.queued > 0 {
            self.shown.1 += now.saturating_sub(self.counted).as_secs_f64();
        }
        if self.shown.1 > WINDOW {
            self.shown = (self.shown.0 / 2.0, self.shown.1 / 2.0);
        }
        self.counted = now;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use shuttle::sync::Arc;
    use shuttle::thread;

    use super::*;

    static NOTICES: AtomicUsize = AtomicUsize::new(0);

    #[test]
    fn under_every_schedule_a_failing_disk_drops_out_once_and_every_read_ends_well() {
        let folder = tempfile::tempdir().unwrap();
        let [own, copy] = ["own", "copy"].map(|name| folder.path().join(name));
        for path in [&own, &copy] {
            std::fs::write(path, [0; 100]).unwrap();
        }
        let mirror = Mirror { files: vec![Some(copy)], faults: None };
        let run = move || {
            let notice: Notice = |_| _ = NOTICES.fetch_add(1, Ordering::Relaxed);
            let before = NOTICES.load(Ordering::Relaxed);
            let (own, mirrors) = (std::slice::from_ref(&own), std::slice::from_ref(&mirror));
            let disks = Disks::open(own, mirrors, DirectMode::Off, Some(notice)).unwrap();
            let disks = Arc::new(disks);
            let readers = [(); 3].map(|()| {
                let disks = Arc::clone(&disks);
                thread::spawn(move || {
                    disks.read(FileIndex(0), 10, |disk, _| {
                        thread::yield_now();
                        if disk == 0 { Err(ReadError::Stopped) } else { Ok(()) }
                    })
                })
            });
            for reader in readers {
                reader.join().unwrap().unwrap();
            }
            assert_eq!(disks.live(), 1);
            assert_eq!(NOTICES.load(Ordering::Relaxed), before + 1);
            let queued = disks.change(|loads, _| loads.0.iter().map(|l| l.queued).sum::<u64>());
            assert_eq!(queued, 0);
        };
        shuttle::check_random(run, 1000);
    }

    const ALL: Copies = Copies(0b111);
    const MB: u64 = 1_000_000;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Loads of disks that have delivered 100 MB each, in so many milliseconds.
    fn loads(ms: &[u64]) -> Loads {
        let mut loads = Loads::new(ms.len());
        for (disk, ms) in ms.iter().enumerate() {
            let only = Copies(0).with(disk);
            for i in 0..10 {
                assert_eq!(loads.begin(only, 10 * MB, at(ms / 10 * i)), disk);
                assert!(!loads.end(disk, 10 * MB, false, Copies(0), at(ms / 10 * (i + 1))));
            }
        }
        loads
    }

    #[test]
    fn equal_disks_take_turns_and_faster_ones_get_more() {
        let mut equal = loads(&[100, 100, 100]);
        let chosen: Vec<_> = (0..6).map(|_| equal.begin(ALL, MB, at(100))).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
        // 1 and 3 ms a MB: three reads of the one take as long as the first of the other.
        let mut mixed = loads(&[100, 300]);
        let chosen: Vec<_> = (0..8).map(|_| mixed.begin(ALL, MB, at(300))).collect();
        assert_eq!(chosen.iter().filter(|disk| **disk == 0).count(), 6, "{chosen:?}");
    }

    #[test]
    fn a_disk_that_becomes_slow_gets_less_and_is_tried_again_later() {
        let mut loads = loads(&[100, 100]);
        let (only, both) = (Copies(0b10), Copies(0b11));
        for i in 0..5 {
            loads.begin(only, MB, at(1000 + 200 * i));
            loads.end(1, MB, false, Copies(0), at(1200 + 200 * i));
        }
        for _ in 0..20 {
            assert_eq!(loads.begin(both, MB, at(2000)), 0);
        }
        assert_eq!(loads.begin(both, MB, at(2000) + FORGOTTEN), 1, "idle for long");
        assert_eq!(loads.begin(both, MB, at(2000) + FORGOTTEN), 0, "one read is enough");
    }

    #[test]
    fn a_read_goes_only_where_a_copy_is() {
        let mut loads = loads(&[100, 900, 100]);
        for _ in 0..9 {
            assert_eq!(loads.begin(Copies(0b010), MB, at(900)), 1);
        }
    }

    #[test]
    fn a_failed_disk_is_left_out_while_there_is_another() {
        let mut loads = loads(&[100, 900, 900]);
        assert_eq!(loads.begin(ALL, MB, at(900)), 0);
        assert!(loads.end(0, MB, true, ALL.without(0), at(901)), "it drops out");
        assert_eq!(loads.live(), 2);
        for _ in 0..9 {
            assert_ne!(loads.begin(ALL, MB, at(901) + FORGOTTEN), 0);
        }
        assert_eq!(loads.begin(Copies(0b001), MB, at(902)), 0, "nobody else has that file");
        assert!(!loads.end(0, MB, true, ALL.without(0), at(903)), "it drops out once");
    }

    #[test]
    fn the_last_copy_does_not_drop_out() {
        let mut loads = loads(&[100, 100]);
        loads.begin(Copies(0b11), MB, at(100));
        assert!(loads.end(0, MB, true, Copies(0b10), at(101)));
        loads.begin(Copies(0b10), MB, at(101));
        assert!(!loads.end(1, MB, true, Copies(0), at(102)));
        assert_eq!(loads.live(), 1);
        assert_eq!(loads.begin(Copies(0b11), MB, at(103)), 1);
    }

    #[test]
    fn queues_are_empty_again_when_all_reads_have_ended() {
        let mut loads = Loads::new(3);
        let begun: Vec<_> = (0..50).map(|i| (loads.begin(ALL, i * MB, at(i)), i * MB)).collect();
        for (disk, bytes) in begun {
            loads.end(disk, bytes, bytes % 3 == 0, ALL.without(disk), at(60));
        }
        assert!(loads.0.iter().all(|load| load.queued == 0 && load.shown.0.is_finite()));
        assert_eq!(loads.live(), 1, "the last one stays");
    }
}
