//! The GGUF container, version 3: a header, and holes for the data.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// Alignment of tensors where a file names no other.
const DEFAULT_ALIGNMENT: u64 = 32;

/// Types of weights that the files here use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgmlType {
    /// IEEE single.
    F32,
    /// 2.6 bits.
    Q2K,
    /// 3.4 bits.
    Q3K,
    /// 4.5 bits.
    Q4K,
    /// 5.5 bits.
    Q5K,
    /// 2.3 bits, by codebook.
    Iq2Xs,
    /// 1.75 bits, by codebook.
    Iq1M,
}

impl GgmlType {
    /// Number in files, values of a block, bytes of a block.
    const fn layout(self) -> (u32, u64, u64) {
        match self {
            Self::F32 => (0, 1, 4),
            Self::Q2K => (10, 256, 84),
            Self::Q3K => (11, 256, 110),
            Self::Q4K => (12, 256, 144),
            Self::Q5K => (13, 256, 176),
            Self::Iq2Xs => (17, 256, 74),
            Self::Iq1M => (29, 256, 56),
        }
    }
}

/// A metadata value.
pub(super) enum Value {
    U32(u32),
    F32(f32),
    String(String),
    Strings(Vec<String>),
    I32s(Vec<i32>),
}

impl Value {
    fn write(&self, out: &mut Vec<u8>) {
        let kind = |kind: u32| kind.to_le_bytes();
        match self {
            Self::U32(value) => {
                out.extend(kind(4));
                out.extend(value.to_le_bytes());
            }
            Self::F32(value) => {
                out.extend(kind(6));
                out.extend(value.to_le_bytes());
            }
            Self::String(value) => {
                out.extend(kind(8));
                write_string(out, value);
            }
            Self::Strings(values) => {
                out.extend(kind(9));
                out.extend(kind(8));
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| write_string(out, value));
            }
            Self::I32s(values) => {
                out.extend(kind(9));
                out.extend(kind(5));
                out.extend((values.len() as u64).to_le_bytes());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
    }
}

fn write_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A tensor of a file.
pub(super) struct GgufTensor {
    pub(super) name: String,
    /// Contiguous dimension first.
    pub(super) ne: Vec<u64>,
    pub(super) ty: GgmlType,
}

impl GgufTensor {
    /// Bytes of its data.
    pub(super) fn bytes(&self) -> u64 {
        let (_, values, bytes) = self.ty.layout();
        self.ne.iter().product::<u64>() / values * bytes
    }
}

/// What a file says.
pub struct GgufLayout {
    pub(super) keys: Vec<(String, Value)>,
    pub(super) tensors: Vec<GgufTensor>,
    /// Of every tensor in the file.
    pub(super) alignment: u64,
}

impl GgufLayout {
    /// Everything before the data, and the length of the data.
    fn header(&self) -> (Vec<u8>, u64) {
        let mut keys: Vec<&(String, Value)> = self.keys.iter().collect();
        let alignment = ("general.alignment".to_owned(), Value::U32(self.alignment as u32));
        if self.alignment != DEFAULT_ALIGNMENT {
            keys.push(&alignment);
        }
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((keys.len() as u64).to_le_bytes());
        for (key, value) in keys {
            write_string(&mut out, key);
            value.write(&mut out);
        }
        let mut offset = 0_u64;
        for tensor in &self.tensors {
            write_string(&mut out, &tensor.name);
            out.extend((tensor.ne.len() as u32).to_le_bytes());
            out.extend(tensor.ne.iter().flat_map(|n| n.to_le_bytes()));
            out.extend(tensor.ty.layout().0.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + tensor.bytes()).next_multiple_of(self.alignment);
        }
        out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        (out, offset)
    }
}

/// Writes the header; all data is a hole.
///
/// # Errors
/// The file exists, or cannot be written.
pub fn write_sparse(path: &Path, layout: &GgufLayout) -> Result<()> {
    let write = || -> std::io::Result<()> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let (header, data) = layout.header();
        let mut file = File::create_new(path)?;
        file.write_all(&header)?;
        file.set_len(header.len() as u64 + data)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
