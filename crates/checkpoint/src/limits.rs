//! What a file may ask for: every limit in one place.
//!
//! A count from a file is held against the bytes that follow it *and* against a limit here. The limits are far above
//! any real model, so a refusal means damage or malice. Memory is kept by [`Budget`]: parsing any file, however
//! hostile, keeps at most [`HEADER_MEMORY`] bytes.

/// Bytes of a file's header: the largest known (250,000 tokens, as many merges) has 11 MiB.
pub(crate) const HEADER_BYTES: u64 = 256 << 20;
/// Bytes of a pack's checksums: a terabyte of experts and n-gram rows has 8 MiB.
pub(crate) const SUMS_BYTES: u64 = 64 << 20;
/// Bytes of a safetensors header: what the format's own library accepts.
pub(crate) const SAFETENSORS_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of an index of safetensors files: 200,000 tensors have 24 MiB.
pub(crate) const INDEX_BYTES: u64 = 64 << 20;
/// Bytes of a configuration: those that list every module have 300 KiB.
pub(crate) const CONFIG_BYTES: u64 = 4 << 20;
/// Memory for all metadata and tensor descriptions of all parts.
pub(crate) const HEADER_MEMORY: u64 = 48 << 20;
/// Key-value pairs of a file.
pub(crate) const KEYS: u64 = 1 << 16;
/// Bytes of a key: what the format allows.
pub(crate) const KEY_BYTES: u64 = (1 << 16) - 1;
/// Bytes of a string: some files carry a whole `tokenizer.json`, 11 MiB.
pub(crate) const STRING_BYTES: u64 = 1 << 25;
/// Elements of an array.
pub(crate) const ARRAY_LEN: u64 = 1 << 22;
/// Arrays inside arrays.
pub(crate) const ARRAY_DEPTH: u32 = 4;
/// Parts of a split model.
pub(crate) const PARTS: u64 = 1 << 10;
/// Tensors of a model; the largest known GGUF file has 2,000.
pub(crate) const TENSORS: u64 = 1 << 16;
/// Tensors of a model in safetensors files, where every expert may have tensors of its own.
pub(crate) const SAFETENSORS: u64 = 1 << 19;
/// Bytes of a tensor's name.
pub(crate) const NAME_BYTES: u64 = 1 << 10;
/// Dimensions of a tensor: what the format allows.
pub(crate) const DIMS: u32 = 4;
/// Dimensions of a tensor in a safetensors file; the weights of a convolution over images in time have five.
pub(crate) const SAFETENSORS_DIMS: usize = 8;
/// Bytes of one tensor.
pub(crate) const TENSOR_BYTES: u64 = 1 << 38;
/// Least alignment of the data section: what the format asks for.
pub(crate) const MIN_ALIGNMENT: u64 = 8;
/// Largest alignment of the data section.
pub(crate) const MAX_ALIGNMENT: u64 = 1 << 20;

/// Blocks of a model.
pub(crate) const LAYERS: u64 = 1 << 10;
/// Routed experts of a layer.
pub(crate) const EXPERTS: u64 = 1 << 12;
/// Width of anything.
pub(crate) const WIDTH: u64 = 1 << 20;
/// Heads of a layer.
pub(crate) const HEADS: u64 = 1 << 10;
/// Tokens of a vocabulary.
pub(crate) const VOCABULARY: u64 = 1 << 24;
/// Positions that a model may have been made for.
pub(crate) const CONTEXT: u64 = 1 << 26;
/// Taps of a short convolution.
pub(crate) const CONV_KERNEL: u64 = 64;
/// Residual streams of a position.
pub(crate) const STREAMS: u64 = 16;
/// Positions that one key of an attention indexer stands for.
pub(crate) const COMPRESS_RATIO: u64 = 1 << 10;
/// Tokens of the longest n-gram.
pub(crate) const NGRAM_SIZE: u64 = 8;
/// Hash functions of an n-gram.
pub(crate) const NGRAM_HEADS: u64 = 64;
/// Tensors that an n-gram table may be cut into; known ones are in 128.
pub(crate) const SHARDS: u64 = 1 << 12;
/// How far a context may be extended.
pub(crate) const ROPE_FACTOR: f64 = 1e6;
/// Base of the rotary frequencies.
pub(crate) const ROPE_THETA: f64 = 1e12;

/// Memory that headers may still take.
///
/// Charged before anything is allocated, with what the containers around it cost at their worst.
#[derive(Debug)]
pub(crate) struct Budget {
    left: u64,
}

impl Budget {
    pub(crate) const fn new() -> Self {
        Self { left: HEADER_MEMORY }
    }

    /// Takes `bytes`; `false` if they are not left.
    #[must_use]
    pub(crate) const fn take(&mut self, bytes: u64) -> bool {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                true
            }
            None => false,
        }
    }

    /// Gives back everything that was taken since `mark`.
    pub(crate) const fn restore(&mut self, mark: u64) {
        self.left = mark;
    }

    /// Gives back `bytes` that were taken.
    pub(crate) const fn give(&mut self, bytes: u64) {
        self.left += bytes;
    }

    pub(crate) const fn mark(&self) -> u64 {
        self.left
    }
}
