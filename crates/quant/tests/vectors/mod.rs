//! Blocks and matrices decoded by other software (`testdata/fixtures/blocks`).

use std::path::Path;

use quant::BlockType;

/// One format's part of the vectors.
pub(crate) struct Part {
    pub(crate) block_type: BlockType,
    /// `[rows, row_bytes]`; random blocks come one to a row.
    pub(crate) raw: Vec<u8>,
    pub(crate) row_bytes: usize,
    /// What they decode to, `[rows, n_in]`.
    pub(crate) values: Vec<f32>,
}

/// A matrix and products with it.
pub(crate) struct Matrix {
    pub(crate) weights: Part,
    pub(crate) n_in: usize,
    /// `[n, n_in]`.
    pub(crate) x: Vec<f32>,
    /// `[n, rows]`.
    pub(crate) y: Vec<f32>,
}

impl Matrix {
    /// `(row bytes, row values)`.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&[u8], &[f32])> {
        let Part { raw, row_bytes, values, .. } = &self.weights;
        raw.chunks_exact(*row_bytes).zip(values.chunks_exact(self.n_in))
    }
}

/// A safetensors file.
pub(crate) struct Vectors {
    header: serde_json::Value,
    data: Vec<u8>,
}

impl Vectors {
    pub(crate) fn load() -> Self {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures/blocks/ggml.safetensors");
        let bytes = std::fs::read(Path::new(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        let (length, rest) = bytes.split_first_chunk().expect("a header length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header = serde_json::from_slice(header).expect("a JSON header");
        Self { header, data: data.to_vec() }
    }

    fn bytes(&self, name: &str) -> Option<(&[u8], usize)> {
        let entry = self.header.get(name)?;
        let number = |v: &serde_json::Value| v.as_u64().expect("a number") as usize;
        let [start, end] = [0, 1].map(|i| number(&entry["data_offsets"][i]));
        Some((&self.data[start..end], number(&entry["shape"][1])))
    }

    fn floats(&self, name: &str) -> Option<(Vec<f32>, usize)> {
        let (bytes, width) = self.bytes(name)?;
        Some((bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(), width))
    }

    fn part(&self, ty: BlockType, part: &str) -> Option<Part> {
        let (raw, row_bytes) = self.bytes(&format!("{ty}.{part}.raw"))?;
        let (values, _) = self.floats(&format!("{ty}.{part}.f32"))?;
        Some(Part { block_type: ty, raw: raw.to_vec(), row_bytes, values })
    }

    /// Random blocks of every type but F32, which has no vectors.
    pub(crate) fn random(&self) -> Vec<Part> {
        let types = BlockType::ALL.into_iter().filter(|ty| *ty != BlockType::F32);
        types.map(|ty| self.part(ty, "random").unwrap_or_else(|| panic!("no {ty}"))).collect()
    }

    /// A matrix of every type that is quantised.
    pub(crate) fn matrices(&self) -> Vec<Matrix> {
        let types = BlockType::ALL.into_iter().filter(|ty| !ty.is_float());
        let matrix = |ty: BlockType| {
            let weights = self.part(ty, "matrix")?;
            let (x, n_in) = self.floats(&format!("{ty}.matrix.x"))?;
            let (y, _) = self.floats(&format!("{ty}.matrix.y"))?;
            Some(Matrix { weights, n_in, x, y })
        };
        types.map(|ty| matrix(ty).unwrap_or_else(|| panic!("no {ty}"))).collect()
    }
}
