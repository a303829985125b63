//! Files with known bytes and slots to read them into.
#![allow(unsafe_code, reason = "slots are raw memory, as a backend would own it")]

use std::alloc::{Layout, alloc, dealloc};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use checkpoint::{Piece, Pieces};
use expert_store::{
    Destination, DirectMode, ReadRequest, ReaderKind, ResidentRead, SlotMemory, Store, StoreOptions,
};
use tempfile::TempDir;
use units::{ExpertKey, FileIndex};

pub(crate) const PAGE: u64 = 4096;

/// What memory holds before anything was read.
pub(crate) const BLANK: u8 = 0xA5;

pub(crate) const MODES: [DirectMode; 2] = [DirectMode::Auto, DirectMode::Off];

/// `SplitMix64`: small, seeded, without a short period.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Files in a folder that goes away with it.
pub(crate) struct TestFiles {
    pub(crate) folder: TempDir,
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) contents: Vec<Vec<u8>>,
}

impl TestFiles {
    pub(crate) fn new(sizes: &[usize]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Self { folder, paths: Vec::new(), contents: Vec::new() };
        for (index, &size) in sizes.iter().enumerate() {
            let mut random = Random(index as u64);
            let words = (0..size.div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
            let content: Vec<u8> = words.take(size).collect();
            let path = files.folder.path().join(format!("part-{index}"));
            write(&path, &content);
            files.paths.push(path);
            files.contents.push(content);
        }
        files
    }

    pub(crate) fn store(&self, options: StoreOptions) -> Store {
        Store::open(&self.paths, options).unwrap()
    }

    pub(crate) fn payload(&self, piece: &Piece) -> &[u8] {
        let start = piece.offset as usize;
        &self.contents[piece.file.get()][start..start + piece.bytes as usize]
    }
}

/// Writes through to the disk: direct reads would force it anyway, and cached pages could be dirty.
pub(crate) fn write(path: &Path, content: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(content).unwrap();
    file.sync_all().unwrap();
}

pub(crate) fn options(direct: DirectMode, threads: usize) -> StoreOptions {
    StoreOptions { threads, direct, ..StoreOptions::default() }
}

/// Ways of reading that this system has.
pub(crate) fn readers() -> Vec<ReaderKind> {
    let own = std::env::current_exe().unwrap();
    let here = |reader: &ReaderKind| {
        let opened = Store::open(
            std::slice::from_ref(&own),
            StoreOptions { reader: *reader, ..StoreOptions::default() },
        );
        match opened {
            Ok(_) => true,
            Err(error) => {
                eprintln!("SKIPPED: {error}");
                false
            }
        }
    };
    [ReaderKind::Pread, ReaderKind::IoUring].into_iter().filter(here).collect()
}

/// Page-aligned memory that starts blank.
pub(crate) struct Slot {
    base: NonNull<u8>,
    layout: Layout,
    shift: usize,
}

impl Slot {
    pub(crate) fn new(len: usize) -> Self {
        Self::shifted(len, 0)
    }

    /// `len` bytes that begin `shift` bytes after a page boundary.
    pub(crate) fn shifted(len: usize, shift: usize) -> Self {
        let layout = Layout::from_size_align(len + shift, PAGE as usize).unwrap();
        assert!(layout.size() > 0);
        // SAFETY: the size is not zero, and the fill stays inside of it.
        let base = unsafe {
            let base = NonNull::new(alloc(layout)).unwrap();
            base.write_bytes(BLANK, layout.size());
            base
        };
        Self { base, layout, shift }
    }

    fn len(&self) -> usize {
        self.layout.size() - self.shift
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: the shift is at most the size.
        unsafe { self.base.add(self.shift) }
    }

    /// The caller keeps the slot alive and away from `bytes` and `fill` until the read has ended.
    pub(crate) fn destination(&self) -> Destination {
        // SAFETY: the tests do what the line above says.
        unsafe { Destination::new(self.start(), self.len()) }
    }

    /// The caller drops the store first.
    pub(crate) fn memory(&self) -> SlotMemory {
        // SAFETY: the tests do what the line above says.
        unsafe { SlotMemory::new(self.start(), self.len()) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: initialised by `shifted`; no read is under way, see `destination`.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len()) }
    }

    pub(crate) fn fill(&mut self, byte: u8) {
        // SAFETY: in bounds; no read is under way, see `destination`.
        unsafe { self.start().write_bytes(byte, self.len()) };
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// Pieces laid out like an expert record: each at its place on the disk modulo 4096, slack around it.
pub(crate) fn record(parts: &[(u32, u64, u64)]) -> (Pieces, usize) {
    let mut end = 0u64;
    let mut pieces = Pieces::default();
    for &(file, offset, bytes) in parts {
        let place = end + offset % PAGE;
        end = (place + bytes).next_multiple_of(PAGE);
        pieces.push(Piece { file: FileIndex(file), offset, bytes, place, blocks: None });
    }
    (pieces, end as usize)
}

/// One record, its slot and its request.
pub(crate) struct Load {
    pub(crate) key: ExpertKey,
    pub(crate) pieces: Pieces,
    pub(crate) slot: Slot,
}

impl Load {
    pub(crate) fn new(expert: u32, parts: &[(u32, u64, u64)]) -> Self {
        let (pieces, len) = record(parts);
        Self { key: ExpertKey::new(0, expert), pieces, slot: Slot::new(len.max(1)) }
    }

    pub(crate) fn request(&self) -> ReadRequest {
        ReadRequest { key: self.key, pieces: self.pieces, destination: self.slot.destination() }
    }

    pub(crate) fn payload_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    /// Every payload byte is that of the file.
    pub(crate) fn is_exact(&self, files: &TestFiles) -> bool {
        self.pieces.iter().all(|piece| {
            let start = piece.place as usize;
            self.slot.bytes()[start..start + piece.bytes as usize] == *files.payload(piece)
        })
    }
}

/// Records of one to nine pieces anywhere in the files, also at their very ends.
pub(crate) fn random_loads(files: &TestFiles, count: u32, seed: u64) -> Vec<Load> {
    let mut random = Random(seed);
    let loads = (0..count).map(|expert| {
        let parts: Vec<(u32, u64, u64)> = (0..=random.below(9))
            .map(|_| {
                let file = random.below(files.contents.len() as u64);
                let size = files.contents[file as usize].len() as u64;
                let bytes = 1 + random.below(size.min(60_000));
                let last = size - bytes;
                let offset = if random.below(4) == 0 { last } else { random.below(last + 1) };
                (file as u32, offset, bytes)
            })
            .collect();
        Load::new(expert, &parts)
    });
    loads.collect()
}

/// A resident read into the whole of a slot.
pub(crate) fn resident(offset: u64, slot: &Slot) -> ResidentRead {
    ResidentRead { file: FileIndex(0), offset, destination: slot.destination() }
}

/// A FIFO that nobody writes to: opening it for reading would block.
pub(crate) fn make_fifo(path: &Path) {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: a C string and a number.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

/// How many pages of a file the system keeps in memory.
#[cfg(target_os = "linux")]
pub(crate) fn cached_pages(path: &Path) -> usize {
    use std::os::fd::AsRawFd;

    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    let mut pages = vec![0u8; len.div_ceil(PAGE as usize)];
    // SAFETY: a new read-only mapping of an open file; its pages are not looked at, only counted, and `pages` has a
    // byte for each.
    unsafe {
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        let map = libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0);
        assert!(map != libc::MAP_FAILED);
        assert_eq!(libc::mincore(map, len, pages.as_mut_ptr()), 0);
        assert_eq!(libc::munmap(map, len), 0);
    }
    pages.iter().filter(|&&page| page & 1 == 1).count()
}

/// Takes a clean file out of the page cache.
#[cfg(target_os = "linux")]
pub(crate) fn forget(path: &Path) {
    use std::os::fd::AsRawFd;

    let file = File::open(path).unwrap();
    // SAFETY: an open file and numbers.
    let refused = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(refused, 0);
}
