//! A checkpoint into a pack: streams, survives being killed, and gives the same bytes however often that happens.
//!
//! Everything is written to `NAME.partial`, its header last, and renamed when it is whole and on the disk. After each
//! unit its checksum goes to a journal. A later run reads the units that the journal knows again, keeps those that
//! match up to the first that does not, and goes on from there.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use checkpoint::pack::{self, Checksum, HEADER_BYTES, Layout, Unit};
use checkpoint::{Checkpoint, CheckpointError, Model, Source, Vocabulary};
use expert_store::{Store, StoreOptions};

use crate::Watch;
use crate::error::PrepareError;
use crate::journal::Journal;
use crate::stream::{CHUNK_BYTES, Job, stream};
use crate::target::Target;

/// Bytes of the index that are written at once.
const INDEX_BUFFER: usize = 256 << 10;

/// A pack to be made.
#[derive(Debug)]
pub struct Packing {
    checkpoint: Checkpoint,
    layout: Layout,
    target: Target,
    force: bool,
}

/// A pack that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Tensors, records and runs of rows in it.
    pub units: u64,
    /// Of those, taken over from a run that was interrupted.
    pub resumed_units: u64,
    /// Experts of all blocks.
    pub records: u64,
    /// Bytes of weights that this run wrote.
    pub written_bytes: u64,
}

impl Packing {
    /// Decides what goes where, and whether it may: nothing is written yet.
    ///
    /// # Errors
    /// A target that exists (unless `force`), is read from, or is no file; too little room on its disk.
    ///
    /// # Panics
    /// If the model is of another checkpoint, or the checkpoint's vocabulary was dropped.
    pub fn new(
        checkpoint: Checkpoint,
        model: &Model,
        out: &Path,
        force: bool,
    ) -> Result<Self, PrepareError> {
        let target = Target::new(out, &checkpoint, force)?;
        let layout = Layout::of(&checkpoint, model);
        target.check_space(layout.file_bytes())?;
        Ok(Self { checkpoint, layout, target, force })
    }

    /// Bytes of weights to be read, or found written: what a [`Watch`] counts to.
    pub fn bytes(&self) -> u64 {
        self.layout.units().map(|unit| unit.bytes).sum()
    }

    /// Where everything will be.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes the pack.
    ///
    /// # Errors
    /// Bytes that cannot be read or written; [`PrepareError::Busy`]; [`PrepareError::Stopped`] once `watch` says so.
    /// What is written by then is used by the next run.
    ///
    /// # Panics
    /// If jobs and units disagree, which both follow from the layout.
    pub fn run(self, watch: &dyn Watch) -> Result<Packed, PrepareError> {
        let Self { checkpoint, layout, target, force } = self;
        let index_sum = index_sum(&layout, &checkpoint);
        let fingerprint = fingerprint(&checkpoint, index_sum)?;
        let most = layout.unit_count();
        let mut journal = Journal::open(&target.journal, &target.path, fingerprint, most)?;
        let partial = Partial::open(&target.partial, &layout)?;
        let (kept, kept_bytes) = partial.whole_units(&journal.sums, watch)?;
        journal.keep(kept)?;
        partial.begin(kept, &checkpoint, index_sum)?;
        let store = open_store(&checkpoint)?;
        let mut filling = Filling {
            partial: &partial,
            journal,
            units: layout.units().skip(kept).peekable(),
            position: 0,
            sum: Checksum::new(),
            done: kept_bytes,
        };
        let jobs = || jobs(&layout, &checkpoint, kept);
        stream(&store, &jobs, &|_, outcome| outcome.map(|_| ()), &mut |job, outcome, bytes| {
            if watch.stopped() {
                return Err(PrepareError::Stopped);
            }
            outcome.map_err(|source| {
                let unit = filling.units.peek().map(|unit| layout.name(unit));
                PrepareError::Read { name: unit.unwrap_or_default(), source }
            })?;
            filling.write(job.piece.place, bytes)?;
            watch.at(filling.done);
            Ok(())
        })?;
        let Filling { journal, done, mut units, .. } = filling;
        assert_eq!(units.next(), None, "jobs are the bytes of all units");
        partial.seal(&journal.sums, index_sum)?;
        if !force && target.path.exists() {
            return Err(PrepareError::Exists { path: target.path });
        }
        let rename = std::fs::rename(&target.partial, &target.path);
        rename.map_err(PrepareError::io("rename to", &target.path))?;
        // A folder that cannot be synced was renamed in all the same.
        let _ = File::open(target.folder()).and_then(|folder| folder.sync_all());
        journal.remove();
        Ok(Packed {
            path: target.path,
            file_bytes: layout.file_bytes(),
            units: most,
            resumed_units: kept as u64,
            records: layout.tables().iter().map(|table| u64::from(table.experts)).sum(),
            written_bytes: done - kept_bytes,
        })
    }
}

/// What is read for the units from `first` on, in the order of the pack; each piece's place is its offset there.
fn jobs<'a>(
    layout: &'a Layout,
    checkpoint: &'a Checkpoint,
    first: usize,
) -> impl Iterator<Item = Job> + 'a {
    let numbered = layout.units().enumerate().skip(first);
    numbered.flat_map(move |(of, unit)| {
        layout.parts(&unit).into_iter().flat_map(move |(place, tensor, rows)| {
            let name = &layout.tensor(tensor).name;
            let tensor = checkpoint.directory.get(name).expect("the pack has the same tensors");
            tensor.pieces(rows).flat_map(move |piece| {
                let at = unit.offset + place;
                piece.split(CHUNK_BYTES).map(move |mut piece| {
                    piece.place += at;
                    Job { of, piece }
                })
            })
        })
    })
}

fn open_store(checkpoint: &Checkpoint) -> Result<Store, PrepareError> {
    let paths: Vec<PathBuf> = checkpoint.files.iter().map(|file| file.path.clone()).collect();
    let store = Store::open(&paths, StoreOptions::default())?;
    for (status, file) in store.files().iter().zip(&checkpoint.files) {
        if status.bytes != file.bytes {
            return Err(PrepareError::Checkpoint(CheckpointError::Format {
                file: file.path.clone(),
                what: "the file's size".to_owned(),
                found: format!("{} bytes", status.bytes),
                needed: format!("{}, as when its header was read", file.bytes),
            }));
        }
    }
    Ok(store)
}

/// Writes to a checksum.
struct Summing<W>(Checksum, W);

impl<W: Write> Write for Summing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.1.write(bytes)?;
        self.0.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.1.flush()
    }
}

fn index_sum(layout: &Layout, checkpoint: &Checkpoint) -> u64 {
    let mut sum = Summing(Checksum::new(), io::sink());
    layout.write_index(&checkpoint.metadata, &mut sum).expect("nothing can fail in memory");
    sum.0.value()
}

/// What tells an unfinished pack of this source from any other: the index, and which files it came from.
fn fingerprint(checkpoint: &Checkpoint, index_sum: u64) -> Result<u64, PrepareError> {
    let mut sum = Checksum::new();
    sum.update(&index_sum.to_le_bytes());
    for file in &checkpoint.files {
        let fail = PrepareError::io("look at", &file.path);
        let path = std::fs::canonicalize(&file.path).map_err(&fail)?;
        let there = std::fs::metadata(&path).map_err(&fail)?;
        sum.update(path.as_os_str().as_bytes());
        for number in [there.size().cast_signed(), there.mtime(), there.mtime_nsec()] {
            sum.update(&number.to_le_bytes());
        }
    }
    Ok(sum.value())
}

/// The unfinished file.
struct Partial<'a> {
    file: File,
    path: &'a Path,
    layout: &'a Layout,
}

impl<'a> Partial<'a> {
    fn open(path: &'a Path, layout: &'a Layout) -> Result<Self, PrepareError> {
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        Ok(Self { file: open.map_err(PrepareError::io("create", path))?, path, layout })
    }

    /// How many units from the first on are there with these checksums, and their bytes. What lies between them has to be
    /// zero, as in a pack that was written at once.
    fn whole_units(&self, sums: &[u64], watch: &dyn Watch) -> Result<(usize, u64), PrepareError> {
        let size = self.file.metadata().map_err(PrepareError::io("look at", self.path))?.len();
        let (mut end, mut done) = (self.layout.data_start(), 0);
        let mut reader = Reader { file: &self.file, buffer: vec![0; CHUNK_BYTES as usize] };
        for (index, (unit, sum)) in self.layout.units().zip(sums).enumerate() {
            if watch.stopped() {
                return Err(PrepareError::Stopped);
            }
            let inside = unit.offset + unit.bytes <= size;
            let whole = inside && {
                let fail = PrepareError::io("read", self.path);
                reader.is_zero(end, unit.offset).map_err(&fail)?
                    && reader.sum(unit.offset, unit.bytes).map_err(&fail)? == *sum
            };
            if !whole {
                return Ok((index, done));
            }
            end = unit.offset + unit.bytes;
            done += unit.bytes;
            watch.at(done);
        }
        Ok((sums.len(), done))
    }

    /// Makes everything but the first `kept` units zero, writes the index, and checks that a reader would take it.
    fn begin(
        &self,
        kept: usize,
        checkpoint: &Checkpoint,
        index_sum: u64,
    ) -> Result<(), PrepareError> {
        let fail = PrepareError::io("write", self.path);
        let last = kept.checked_sub(1).and_then(|last| self.layout.units().nth(last));
        let end = last.map_or(0, |unit: Unit| unit.offset + unit.bytes);
        let size =
            self.file.set_len(end).and_then(|()| self.file.set_len(self.layout.file_bytes()));
        size.map_err(&fail)?;
        // Without a header nobody takes it for a pack.
        let out = At { file: &self.file, offset: 0 };
        let mut out = BufWriter::with_capacity(INDEX_BUFFER, out);
        let mut write = || {
            out.write_all(&[0; HEADER_BYTES as usize])?;
            self.layout.write_index(&checkpoint.metadata, &mut out)?;
            out.flush()?;
            let at = out.get_ref().offset;
            self.zeros(at, self.layout.data_start())
        };
        write().map_err(&fail)?;
        let file_bytes = self.layout.file_bytes();
        let headed =
            Headed { header: self.layout.header(index_sum, 0), file: &self.file, file_bytes };
        let (read, layout) = pack::parse(self.path, &headed, Vocabulary::Skip)?;
        checkpoint::bind(&read)?;
        assert_eq!(&layout, self.layout, "a pack is read as it was written");
        Ok(())
    }

    fn zeros(&self, start: u64, end: u64) -> io::Result<()> {
        let zeros = vec![0; INDEX_BUFFER];
        let mut at = start;
        while at < end {
            let n = (end - at).min(zeros.len() as u64);
            self.file.write_all_at(&zeros[..n as usize], at)?;
            at += n;
        }
        Ok(())
    }

    /// Writes checksums and header, and waits for the disk.
    fn seal(&self, sums: &[u64], index_sum: u64) -> Result<(), PrepareError> {
        let mut out = BufWriter::with_capacity(
            INDEX_BUFFER,
            Summing(Checksum::new(), At { file: &self.file, offset: self.layout.sums_start() }),
        );
        let mut write = || {
            sums.iter().try_for_each(|sum| out.write_all(&sum.to_le_bytes()))?;
            out.flush()?;
            // The header makes it a pack, so everything else is on the disk before.
            self.file.sync_all()?;
            let header = self.layout.header(index_sum, out.get_ref().0.value());
            self.file.write_all_at(&header, 0)?;
            self.file.sync_all()
        };
        write().map_err(PrepareError::io("write", self.path))
    }
}

/// Writes to a file from an offset on.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Write for At<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write_at(bytes, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The unfinished file with the header that it will have.
struct Headed<'a> {
    header: [u8; HEADER_BYTES as usize],
    file: &'a File,
    file_bytes: u64,
}

impl Source for Headed<'_> {
    fn len(&self) -> u64 {
        self.file_bytes
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)?;
        let covered = self.header.get(usize::try_from(offset).unwrap_or(usize::MAX)..);
        for (byte, header) in out.iter_mut().zip(covered.unwrap_or_default()) {
            *byte = *header;
        }
        Ok(())
    }
}

/// Reads stretches of a file through one buffer.
pub(crate) struct Reader<'a> {
    pub(crate) file: &'a File,
    pub(crate) buffer: Vec<u8>,
}

impl Reader<'_> {
    fn each(
        &mut self,
        start: u64,
        end: u64,
        visit: &mut dyn FnMut(&[u8]) -> bool,
    ) -> io::Result<bool> {
        let mut at = start;
        while at < end {
            let n = (end - at).min(self.buffer.len() as u64);
            let bytes = &mut self.buffer[..n as usize];
            self.file.read_exact_at(bytes, at)?;
            if !visit(bytes) {
                return Ok(false);
            }
            at += n;
        }
        Ok(true)
    }

    /// Whether there are only zeros.
    pub(crate) fn is_zero(&mut self, start: u64, end: u64) -> io::Result<bool> {
        self.each(start, end, &mut |bytes| bytes.iter().all(|byte| *byte == 0))
    }

    /// The checksum of so many bytes.
    pub(crate) fn sum(&mut self, start: u64, bytes: u64) -> io::Result<u64> {
        let mut sum = Checksum::new();
        self.each(start, start + bytes, &mut |bytes| {
            sum.update(bytes);
            true
        })?;
        Ok(sum.value())
    }
}

/// Units as their bytes come.
struct Filling<'a, U: Iterator<Item = Unit>> {
    partial: &'a Partial<'a>,
    journal: Journal,
    units: std::iter::Peekable<U>,
    /// Bytes of the first unit that are written.
    position: u64,
    sum: Checksum,
    /// Bytes of all units that are written.
    done: u64,
}

impl<U: Iterator<Item = Unit>> Filling<'_, U> {
    /// Takes the bytes that follow, which go to `offset`: to the end of what is there, or a little behind it.
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), PrepareError> {
        const ZEROS: [u8; pack::TENSOR_ALIGN as usize] = [0; pack::TENSOR_ALIGN as usize];
        let unit = *self.units.peek().expect("jobs are the bytes of all units");
        // Between matrices of a record; the file has zeros there.
        let gap = offset - (unit.offset + self.position);
        self.sum.update(&ZEROS[..gap as usize]);
        self.sum.update(bytes);
        let written = self.partial.file.write_all_at(bytes, offset);
        written.map_err(PrepareError::io("write", self.partial.path))?;
        let more = gap + bytes.len() as u64;
        self.position += more;
        self.done += more;
        if self.position == unit.bytes {
            self.journal.add(self.sum.value())?;
            (self.position, self.sum) = (0, Checksum::new());
            self.units.next();
        }
        Ok(())
    }
}
