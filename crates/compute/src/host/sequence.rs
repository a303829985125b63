//! What a sequence remembers: keys, values, keys of the index, recurrent state.

use std::ops::Range;

use quant::f32_to_f16;

use crate::backend::{ComputeError, IndexShape, KvType, SequenceShape};
use crate::host::memory::{Floats, Region};
use crate::kernels::KvRows;

const fn element_bytes(kind: KvType) -> usize {
    match kind {
        KvType::F16 => 2,
        KvType::F32 => 4,
    }
}

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
        let bytes = width.saturating_mul(context).saturating_mul(element_bytes(kind));
        Ok(Self { region: Region::new(what, bytes)?, kind, width, context })
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

    /// Where rows lie, in bytes.
    fn place(&self, rows: &Range<usize>) -> Range<usize> {
        let row = self.width * element_bytes(self.kind);
        assert!(rows.end <= self.context, "positions {rows:?} are inside the context");
        rows.start * row..rows.end * row
    }

    fn bytes(&self, rows: &Range<usize>) -> &[u8] {
        let place = self.place(rows);
        &self.region.bytes(place.end)[place.start..]
    }

    fn bytes_mut(&mut self, rows: &Range<usize>) -> &mut [u8] {
        let place = self.place(rows);
        &mut self.region.bytes_mut(place.end)[place.start..]
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

    /// All values, little-endian: matrices, then inputs of convolutions.
    ///
    /// # Panics
    /// If `out` is shorter or longer.
    pub(crate) fn export(&self, out: &mut [u8]) {
        let values = [&self.state, &self.conv, &self.extra_conv].into_iter().flat_map(|v| v.iter());
        let (words, rest) = out.as_chunks_mut::<4>();
        let n = self.state.len() + self.conv.len() + self.extra_conv.len();
        assert!(words.len() == n && rest.is_empty(), "bytes of a recurrent state");
        for (word, value) in words.iter_mut().zip(values) {
            *word = value.to_le_bytes();
        }
    }

    /// Takes what [`Self::export`] gave.
    ///
    /// # Panics
    /// If it is of another shape.
    pub(crate) fn import(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<4>();
        let n = self.state.len() + self.conv.len() + self.extra_conv.len();
        assert!(words.len() == n && rest.is_empty(), "bytes of a recurrent state");
        let values = [&mut self.state, &mut self.conv, &mut self.extra_conv];
        for (value, word) in values.into_iter().flat_map(|v| v.iter_mut()).zip(words) {
            *value = f32::from_le_bytes(*word);
        }
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

    /// Every cache, with the rows of it that belong to positions.
    fn caches(
        &mut self,
        positions: &Range<usize>,
    ) -> impl Iterator<Item = (&mut Cache, Range<usize>)> {
        let blocks = self.shape.index.map_or(0..0, |index| index.blocks(positions));
        let by_position = self.keys.iter_mut().chain(&mut self.values).chain(&mut self.index_raw);
        let by_block = self.index_blocks.iter_mut().map(move |cache| (cache, blocks.clone()));
        let positions = positions.clone();
        by_position.map(move |cache| (cache, positions.clone())).chain(by_block)
    }

    /// What the caches hold of positions, cache after cache.
    ///
    /// # Panics
    /// If `out` is shorter or longer, or a position is outside of the context.
    pub(crate) fn export(&mut self, positions: &Range<usize>, mut out: &mut [u8]) {
        for (cache, rows) in self.caches(positions) {
            let bytes = cache.bytes(&rows);
            let (to, rest) = out.split_at_mut(bytes.len());
            to.copy_from_slice(bytes);
            out = rest;
        }
        assert!(out.is_empty(), "bytes of so many positions");
    }

    /// Takes what [`Self::export`] gave.
    ///
    /// # Panics
    /// If it is of another shape, or a position is outside of the context.
    pub(crate) fn import(&mut self, positions: &Range<usize>, mut bytes: &[u8]) {
        for (cache, rows) in self.caches(positions) {
            let to = cache.bytes_mut(&rows);
            let (from, rest) = bytes.split_at(to.len());
            to.copy_from_slice(from);
            bytes = rest;
        }
        assert!(bytes.is_empty(), "bytes of so many positions");
    }

    pub(crate) fn bytes(&self) -> u64 {
        let caches = [&self.keys, &self.values, &self.index_raw, &self.index_blocks];
        let caches = caches.into_iter().flatten().map(|cache| cache.region.len() as u64);
        caches.sum::<u64>() + self.recurrent.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{ConvShape, HeadOrder, RecurrentShape};

    /// Blocks of an index that end nowhere near the grid.
    fn shape() -> SequenceShape {
        SequenceShape {
            context_tokens: 200,
            kv_layers: 2,
            kv_heads: 2,
            head_dim: 3,
            recurrent: Some(RecurrentShape {
                layers: 2,
                key_heads: 1,
                value_heads: 2,
                key_dim: 4,
                value_dim: 3,
                conv_kernel: 4,
                order: HeadOrder::Grouped,
            }),
            extra_conv: Some(ConvShape { count: 1, channels: 5, taps: 3, dilation: 2 }),
            index: Some(IndexShape { layers: 2, dim: 4, ratio: 24 }),
        }
    }

    fn values(n: usize, from: usize) -> Vec<f32> {
        (0..n).map(|i| ((i + from) % 251) as f32 - 100.0).collect()
    }

    fn filled(kv: KvType) -> Sequence {
        let mut sequence = Sequence::new(shape(), kv).unwrap();
        for layer in 0..2 {
            sequence.append(layer, 0, &values(6 * 200, layer), &values(6 * 200, 7 + layer));
            sequence.append_index(layer, 0, &values(4 * 200, 11 + layer));
            sequence.append_blocks(layer, 0, &values(4 * 8, 13 + layer));
        }
        let Recurrent { state, conv, extra_conv, .. } = &mut sequence.recurrent;
        for (i, part) in [state, conv, extra_conv].into_iter().enumerate() {
            let n = part.len();
            part.copy_from_slice(&values(n, i));
        }
        sequence
    }

    #[test]
    fn rows_go_from_one_sequence_to_another_in_any_pieces() {
        for kv in [KvType::F16, KvType::F32] {
            let (mut from, mut to) = (filled(kv), Sequence::new(shape(), kv).unwrap());
            for positions in [0..64, 64..65, 65..192] {
                let mut bytes = vec![0; shape().rows_bytes(kv, &positions)];
                from.export(&positions, &mut bytes);
                to.import(&positions, &bytes);
            }
            let all = 0..192;
            for ((a, rows), (b, _)) in from.caches(&all).zip(to.caches(&all)) {
                assert_eq!(a.bytes(&rows), b.bytes(&rows));
            }
            let rest = 192..200;
            for (cache, rows) in to.caches(&rest) {
                assert!(cache.bytes(&rows).iter().all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn a_state_goes_from_one_sequence_to_another() {
        let from = filled(KvType::F16);
        let mut bytes = vec![0; shape().state_bytes()];
        from.recurrent.export(&mut bytes);
        let mut to = Sequence::new(shape(), KvType::F16).unwrap();
        to.recurrent.import(&bytes);
        assert_eq!(*to.recurrent.state, *from.recurrent.state);
        assert_eq!(*to.recurrent.conv, *from.recurrent.conv);
        assert_eq!(*to.recurrent.extra_conv, *from.recurrent.extra_conv);
        let mut empty = Sequence::new(
            SequenceShape { recurrent: None, extra_conv: None, ..shape() },
            KvType::F16,
        )
        .unwrap();
        empty.recurrent.import(&[]);
        empty.recurrent.export(&mut []);
    }
}
