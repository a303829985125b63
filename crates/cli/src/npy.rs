//! `NumPy`'s `.npy`, version 1.0: enough to write row-major arrays.

use std::io::{self, Write};

use crate::output::OutputFile;

/// An array on its way into a file.
pub(crate) struct NpyWriter(OutputFile);

impl NpyWriter {
    /// `descr`: `NumPy`'s name of a little-endian type, `<f4` or `<i4`.
    pub(crate) fn begin(mut file: OutputFile, descr: &str, shape: &[usize]) -> io::Result<Self> {
        file.write_all(&header(descr, shape))?;
        Ok(Self(file))
    }

    pub(crate) fn f32s(&mut self, values: &[f32]) -> io::Result<()> {
        values.iter().try_for_each(|v| self.0.write_all(&v.to_le_bytes()))
    }

    pub(crate) fn i32s(&mut self, values: &[i32]) -> io::Result<()> {
        values.iter().try_for_each(|v| self.0.write_all(&v.to_le_bytes()))
    }

    /// Gives the file its name.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.0.finish()
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
    fn values_follow_the_header() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("x.npy");
        let file = OutputFile::create(&target).unwrap();
        let mut writer = NpyWriter::begin(file, "<f4", &[1]).unwrap();
        writer.f32s(&[1.5]).unwrap();
        writer.finish().unwrap();
        let bytes = std::fs::read(&target).unwrap();
        assert_eq!(bytes, [header("<f4", &[1]), 1.5_f32.to_le_bytes().to_vec()].concat());
    }
}
