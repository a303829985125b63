//! `pread`: works everywhere, and a handful of threads saturates most disks.

use std::io;
use std::sync::Arc;

use units::FileIndex;

use super::Reader;
use crate::file::OpenFile;

pub(crate) struct PreadReader {
    pub(crate) files: Arc<[OpenFile]>,
}

impl Reader for PreadReader {
    fn read_at(&self, file: FileIndex, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        self.files[file.get()].read_at(offset, out)
    }
}
