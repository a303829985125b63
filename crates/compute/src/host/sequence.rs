//! What a sequence remembers: keys, values, keys of the index, recurrent state.

use quant::f32_to_f16;

use crate::backend::{ComputeError, IndexShape, KvType, SequenceShape};
use crate::host::memory::{Floats, Region};
use crate::kernels::KvRows;

/// Keys or values of one layer, `[positions, width]`; those of an index also by block.
#[derive(Debug)]
struct Cache {
    region: Region,
    kind: KvType,
    width: usize,
    context: usize,
}

impl Cache {
    fn new(
        what: &'static str,
        kind: KvType,
        width: usize,
        context: usize,
    ) -> Result<Self, ComputeError> {
        let element = match kind {
            KvType::F16 => 2,
            KvType::F32 => 4,
        };
        Ok(Self {
            region: Region::new(what, width.saturating_mul(context).saturating_mul(element))?,
            kind,
            width,
            context,
        })
    }

    fn append(&mut self, position: usize, rows: &[f32]) {
        let total = self.width * self.context;
        let range = position * self.width..position * self.width + rows.len();
        assert!(range.end <= total, "position {position} is inside the context");
        match self.kind {
            KvType::F32 => self.region.f32s_mut(total)[range].copy_from_slice(rows),
            KvType::F16 => {
                for (half, value) in self.region.u16s_mut(total)[range].iter_mut().zip(rows) {
                    *half = f32_to_f16(*value);
                }
            }
        }
    }

    fn rows(&self) -> KvRows<'_> {
        let total = self.width * self.context;
        match self.kind {
            KvType::F16 => KvRows::F16(self.region.u16s(total)),
            KvType::F32 => KvRows::F32(self.region.f32s(total)),
        }
    }
}

/// Recurrent state of all layers of a sequence.
#[derive(Debug, Default)]
pub(crate) struct Recurrent {
    /// `[layers, nv, dk, dv]`.
    state: Floats,
    /// `[layers, taps - 1, channels]`.
    conv: Floats,
    layers: usize,
    /// `[convolutions, (taps - 1)·dilation, channels]`.
    extra_conv: Floats,
    extra_convs: usize,
}

impl Recurrent {
    fn new(shape: &SequenceShape) -> Result<Self, ComputeError> {
        let mut new = Self::default();
        let zeros =
            |n: usize, len: usize| Floats::zeroed("a recurrent state", n.saturating_mul(len));
        if let Some(shape) = &shape.recurrent {
            let state = shape.value_heads * shape.key_dim * shape.value_dim;
            let conv = (shape.conv_kernel - 1) * shape.conv_channels();
            new.state = zeros(shape.layers, state)?;
            new.conv = zeros(shape.layers, conv)?;
            new.layers = shape.layers;
        }
        if let Some(shape) = &shape.extra_conv {
            new.extra_conv = zeros(shape.count, shape.state_len())?;
            new.extra_convs = shape.count;
        }
        Ok(new)
    }

    /// A copy in memory of its own.
    pub(crate) fn copy(&self) -> Result<Self, ComputeError> {
        let mut copy = Self {
            state: Floats::zeroed("a snapshot", self.state.len())?,
            conv: Floats::zeroed("a snapshot", self.conv.len())?,
            layers: self.layers,
            extra_conv: Floats::zeroed("a snapshot", self.extra_conv.len())?,
            extra_convs: self.extra_convs,
        };
        copy.copy_from(self);
        Ok(copy)
    }

    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.state.copy_from_slice(&other.state);
        self.conv.copy_from_slice(&other.conv);
        self.extra_conv.copy_from_slice(&other.extra_conv);
    }

    pub(crate) fn clear(&mut self) {
        self.state.fill(0.0);
        self.conv.fill(0.0);
        self.extra_conv.fill(0.0);
    }

    /// State of one layer, `[nv, dk, dv]`.
    pub(crate) fn state(&mut self, layer: usize) -> &mut [f32] {
        let len = self.state.len() / self.layers;
        &mut self.state[layer * len..(layer + 1) * len]
    }

    /// Convolution inputs of one layer, `[taps - 1, channels]`.
    pub(crate) fn conv(&mut self, layer: usize) -> &mut [f32] {
        let len = self.conv.len() / self.layers;
        &mut self.conv[layer * len..(layer + 1) * len]
    }

    /// Inputs of one of the other convolutions, `[(taps - 1)·dilation, channels]`.
    pub(crate) fn extra_conv(&mut self, index: usize) -> &mut [f32] {
        let len = self.extra_conv.len() / self.extra_convs;
        &mut self.extra_conv[index * len..(index + 1) * len]
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.state.bytes() + self.conv.bytes() + self.extra_conv.bytes()
    }
}

/// One sequence.
///
/// Caches are addressed by position, so a sequence is cut by going on from a smaller one. That is why raw index keys
/// are kept for all positions: a cut in the middle of a block needs those before it.
#[derive(Debug)]
pub(crate) struct Sequence {
    keys: Vec<Cache>,
    values: Vec<Cache>,
    /// Raw index keys by position.
    index_raw: Vec<Cache>,
    /// Index keys by block.
    index_blocks: Vec<Cache>,
    pub(crate) recurrent: Recurrent,
    pub(crate) shape: SequenceShape,
}

impl Sequence {
    pub(crate) fn new(shape: SequenceShape, kv: KvType) -> Result<Self, ComputeError> {
        let width = shape.kv_heads * shape.head_dim;
        let context = shape.context_tokens;
        let caches = |what, layers, width, places| -> Result<Vec<Cache>, ComputeError> {
            (0..layers).map(|_| Cache::new(what, kv, width, places)).collect()
        };
        let kv_cache = || caches("the KV cache", shape.kv_layers, width, context);
        let index = shape.index.unwrap_or(IndexShape { layers: 0, dim: 0, ratio: 1 });
        let index_cache = |places| caches("the index", index.layers, index.dim, places);
        Ok(Self {
            keys: kv_cache()?,
            values: kv_cache()?,
            index_raw: index_cache(context)?,
            index_blocks: index_cache(context / index.ratio)?,
            recurrent: Recurrent::new(&shape)?,
            shape,
        })
    }

    /// Writes keys and values of consecutive rows.
    pub(crate) fn append(&mut self, layer: usize, position: usize, keys: &[f32], values: &[f32]) {
        self.keys[layer].append(position, keys);
        self.values[layer].append(position, values);
    }

    pub(crate) fn keys(&self, layer: usize) -> KvRows<'_> {
        self.keys[layer].rows()
    }

    pub(crate) fn values(&self, layer: usize) -> KvRows<'_> {
        self.values[layer].rows()
    }

    /// # Panics
    /// If the sequence has no index.
    pub(crate) const fn index_shape(&self) -> IndexShape {
        self.shape.index.expect("the model has an index")
    }

    /// Writes raw index keys of consecutive rows.
    pub(crate) fn append_index(&mut self, layer: usize, position: usize, keys: &[f32]) {
        self.index_raw[layer].append(position, keys);
    }

    /// Writes the keys of consecutive blocks.
    pub(crate) fn append_blocks(&mut self, layer: usize, block: usize, keys: &[f32]) {
        self.index_blocks[layer].append(block, keys);
    }

    pub(crate) fn index_raw(&self, layer: usize) -> KvRows<'_> {
        self.index_raw[layer].rows()
    }

    pub(crate) fn index_blocks(&self, layer: usize) -> KvRows<'_> {
        self.index_blocks[layer].rows()
    }

    pub(crate) fn bytes(&self) -> u64 {
        let caches = [&self.keys, &self.values, &self.index_raw, &self.index_blocks];
        let caches = caches.into_iter().flatten().map(|cache| cache.region.len() as u64);
        caches.sum::<u64>() + self.recurrent.bytes()
    }
}
