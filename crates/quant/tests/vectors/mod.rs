//! Blocks and matrices decoded by other software (`testdata/fixtures/blocks`, or `$SAKIA_FIXTURES/blocks`, a larger
//! set).

use std::path::PathBuf;

use quant::{Affine, BlockType, ScaleType};

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
    /// Types of GGML.
    pub(crate) fn ggml() -> Self {
        Self::load("ggml.safetensors")
    }

    /// MLX's affine types.
    pub(crate) fn mlx() -> Self {
        Self::load("mlx_affine.safetensors")
    }

    /// All codes of E4M3, and their values.
    pub(crate) fn e4m3() -> (Vec<u8>, Vec<f32>) {
        let vectors = Self::load("optional_modes.safetensors");
        (vectors.bytes("f8_e4m3.raw").to_vec(), vectors.floats("f8_e4m3.f32"))
    }

    fn load(name: &str) -> Self {
        let here = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures");
        let folder =
            std::env::var_os("SAKIA_FIXTURES").map_or_else(|| PathBuf::from(here), PathBuf::from);
        let path = folder.join("blocks").join(name);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (length, rest) = bytes.split_first_chunk().expect("a header length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header = serde_json::from_slice(header).expect("a JSON header");
        Self { header, data: data.to_vec() }
    }

    fn number(value: &serde_json::Value) -> usize {
        value.as_u64().expect("a number") as usize
    }

    fn bytes(&self, name: &str) -> &[u8] {
        let entry = self.header.get(name).unwrap_or_else(|| panic!("no {name}"));
        let [start, end] = [0, 1].map(|i| Self::number(&entry["data_offsets"][i]));
        &self.data[start..end]
    }

    /// Elements of a row of a matrix.
    fn width(&self, name: &str) -> usize {
        Self::number(&self.header[name]["shape"][1])
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn part(&self, ty: BlockType, part: &str) -> Part {
        let [raw, values] = ["raw", "f32"].map(|what| format!("{ty}.{part}.{what}"));
        Part {
            block_type: ty,
            raw: self.bytes(&raw).to_vec(),
            row_bytes: self.width(&raw),
            values: self.floats(&values),
        }
    }

    /// Random blocks of every type of GGML but F32, which has no vectors.
    pub(crate) fn random(&self) -> Vec<Part> {
        let types = BlockType::GGML.into_iter().filter(|ty| *ty != BlockType::F32);
        types.map(|ty| self.part(ty, "random")).collect()
    }

    /// A matrix of every type of GGML that is quantised.
    pub(crate) fn ggml_matrices(&self) -> Vec<Matrix> {
        let matrix = |ty: BlockType| {
            let x = format!("{ty}.matrix.x");
            Matrix {
                weights: self.part(ty, "matrix"),
                n_in: self.width(&x),
                x: self.floats(&x),
                y: self.floats(&format!("{ty}.matrix.y")),
            }
        };
        BlockType::GGML.into_iter().filter(|ty| !ty.is_float()).map(matrix).collect()
    }

    /// A matrix for every width of codes and size of groups. Scales are BF16.
    pub(crate) fn mlx_matrices(&self) -> Vec<Matrix> {
        let mut matrices = Vec::new();
        for bits in Affine::BITS {
            for group in Affine::GROUPS {
                let affine = Affine::new(bits, group, ScaleType::Bf16).expect("a format of MLX");
                let name = |what: &str| format!("b{bits}.g{group}.{what}");
                let n_in = self.width(&name("x"));
                let weights = Part {
                    block_type: BlockType::Affine(affine),
                    raw: self.interleaved(affine, [name("scales"), name("biases"), name("weight")]),
                    row_bytes: n_in / group as usize * (4 + affine.code_bytes()),
                    values: self.floats(&name("f32")),
                };
                let [x, y] = ["x", "y"].map(|what| self.floats(&name(what)));
                matrices.push(Matrix { weights, n_in, x, y });
            }
        }
        matrices
    }

    /// Blocks from the three tensors of a file.
    fn interleaved(&self, affine: Affine, [scales, biases, codes]: [String; 3]) -> Vec<u8> {
        let parts = self.bytes(&scales).chunks(2).zip(self.bytes(&biases).chunks(2));
        let blocks = parts.zip(self.bytes(&codes).chunks(affine.code_bytes()));
        blocks.flat_map(|((scale, bias), codes)| [scale, bias, codes].concat()).collect()
    }
}

/// Matrices of every quantised type.
pub(crate) fn matrices() -> Vec<Matrix> {
    let mut matrices = Vectors::ggml().ggml_matrices();
    matrices.extend(Vectors::mlx().mlx_matrices());
    matrices
}
