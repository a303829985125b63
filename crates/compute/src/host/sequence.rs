//! What a sequence remembers: keys, values, recurrent state.

use quant::f32_to_f16;

use crate::backend::{ComputeError, KvType, RecurrentShape, SequenceShape};
use crate::host::memory::{Floats, Region};
use crate::kernels::KvRows;

/// Keys or values of one layer, `[context, width]`.
#[derive(Debug)]
struct Cache {
    region: Region,
    kind: KvType,
    width: usize,
    context: usize,
}

impl Cache {
    fn new(kind: KvType, width: usize, context: usize) -> Result<Self, ComputeError> {
        let element = match kind {
            KvType::F16 => 2,
            KvType::F32 => 4,
        };
        Ok(Self {
            region: Region::new(
                "the KV cache",
                width.saturating_mul(context).saturating_mul(element),
            )?,
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
}

impl Recurrent {
    fn new(shape: &RecurrentShape) -> Result<Self, ComputeError> {
        let state = shape.value_heads * shape.key_dim * shape.value_dim;
        let conv = (shape.conv_kernel - 1) * shape.conv_channels();
        Ok(Self {
            state: Floats::zeroed("a recurrent state", shape.layers.saturating_mul(state))?,
            conv: Floats::zeroed("a recurrent state", shape.layers.saturating_mul(conv))?,
            layers: shape.layers,
        })
    }

    /// A copy in memory of its own.
    pub(crate) fn copy(&self) -> Result<Self, ComputeError> {
        let mut copy = Self {
            state: Floats::zeroed("a snapshot", self.state.len())?,
            conv: Floats::zeroed("a snapshot", self.conv.len())?,
            layers: self.layers,
        };
        copy.copy_from(self);
        Ok(copy)
    }

    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.state.copy_from_slice(&other.state);
        self.conv.copy_from_slice(&other.conv);
    }

    pub(crate) fn clear(&mut self) {
        self.state.fill(0.0);
        self.conv.fill(0.0);
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

    pub(crate) fn bytes(&self) -> u64 {
        self.state.bytes() + self.conv.bytes()
    }
}

/// One sequence.
#[derive(Debug)]
pub(crate) struct Sequence {
    keys: Vec<Cache>,
    values: Vec<Cache>,
    pub(crate) recurrent: Recurrent,
    pub(crate) shape: SequenceShape,
}

impl Sequence {
    pub(crate) fn new(shape: SequenceShape, kv: KvType) -> Result<Self, ComputeError> {
        let width = shape.kv_heads * shape.head_dim;
        let caches = || -> Result<Vec<Cache>, ComputeError> {
            (0..shape.kv_layers).map(|_| Cache::new(kv, width, shape.context_tokens)).collect()
        };
        let recurrent = match &shape.recurrent {
            Some(shape) => Recurrent::new(shape)?,
            None => Recurrent::default(),
        };
        Ok(Self { keys: caches()?, values: caches()?, recurrent, shape })
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

    pub(crate) fn bytes(&self) -> u64 {
        let caches = self
            .keys
            .iter()
            .chain(&self.values)
            .map(|cache| cache.region.len() as u64)
            .sum::<u64>();
        caches + self.recurrent.bytes()
    }
}
