//! `pread`: works everywhere, and a handful of threads saturates most disks.

use std::io;

use super::Reader;
use crate::file::OpenFile;

pub(crate) struct PreadReader;

impl Reader for PreadReader {
    fn read_at(&self, file: &OpenFile, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        file.read_at(offset, out)
    }
}
