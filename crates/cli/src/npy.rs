//! `NumPy`'s `.npy`, version 1.0: enough to write row-major arrays.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// A file that appears under its name only when it is complete.
pub(crate) struct NpyWriter {
    file: BufWriter<File>,
    partial: PathBuf,
    target: PathBuf,
}

impl NpyWriter {
    /// `descr`: `NumPy`'s name of a little-endian type, `<f4` or `<i4`.
    pub(crate) fn create(target: &Path, descr: &str, shape: &[usize]) -> io::Result<Self> {
        let mut partial = target.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let mut file = BufWriter::new(File::create(&partial)?);
        file.write_all(&header(descr, shape))?;
        Ok(Self { file, partial, target: target.to_owned() })
    }

    pub(crate) fn f32s(&mut self, values: &[f32]) -> io::Result<()> {
        values.iter().try_for_each(|v| self.file.write_all(&v.to_le_bytes()))
    }

    pub(crate) fn i32s(&mut self, values: &[i32]) -> io::Result<()> {
        values.iter().try_for_each(|v| self.file.write_all(&v.to_le_bytes()))
    }

    /// Gives the file its name.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.file.flush()?;
        std::fs::rename(&self.partial, &self.target)
    }
}

impl Drop for NpyWriter {
    fn drop(&mut self) {
        // After `finish` the partial file is gone and this does nothing.
        let _ = std::fs::remove_file(&self.partial);
    }
}

fn header(descr: &str, shape: &[usize]) -> Vec<u8> {
    let dims: Vec<String> = shape.iter().map(|n| format!("{n},")).collect();
    let mut text =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", dims.join(" "));
    // Magic, version and length take 10 bytes; the whole header is a multiple of 64 and ends in a newline.
    let padded = (10 + text.len() + 1).next_multiple_of(64) - 10;
    text.extend(std::iter::repeat_n(' ', padded - 1 - text.len()));
    text.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.into_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_padded_to_64_bytes_and_names_type_and_shape() {
        let bytes = header("<f4", &[3, 192]);
        assert_eq!(bytes.len() % 64, 0);
        assert_eq!(bytes.last(), Some(&b'\n'));
        assert_eq!(usize::from(u16::from_le_bytes([bytes[8], bytes[9]])), bytes.len() - 10);
        let text = std::str::from_utf8(&bytes[10..]).unwrap();
        assert!(text.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 192,), }"));
    }

    #[test]
    fn an_unfinished_file_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("x.npy");
        drop(NpyWriter::create(&target, "<f4", &[1]).unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let mut writer = NpyWriter::create(&target, "<f4", &[1]).unwrap();
        writer.f32s(&[1.5]).unwrap();
        writer.finish().unwrap();
        assert!(std::fs::read(&target).unwrap().ends_with(&1.5_f32.to_le_bytes()));
    }
}
