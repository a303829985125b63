//! How much memory a model needs, term by term, and the one place where bytes are written into a backend.
#![allow(
    unsafe_code,
    reason = "weights and slots are raw memory owned by the backend; slices are made here"
)]

use std::ptr::NonNull;

use checkpoint::{InputTensors, LayerTensors, MixerTensors, Model, ModelConfig, TensorInfo};
use compute::backend::{Backend, KvType, Row, WeightId};
use expert_store::{Destination, NgramStore, SlotMemory};
use units::{LayerIndex, SlotIndex};

use crate::attention;
use crate::delta_net;
use crate::lookahead::correction::Correction;
use crate::network::{Geometry, draft, verify};
use crate::ngram;

/// A named amount of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedBytes {
    /// What it is for.
    pub name: &'static str,
    /// How much.
    pub bytes: u64,
}

/// `len` bytes at `place` of a weight's memory.
pub(crate) fn weight_bytes(
    backend: &mut dyn Backend,
    weight: WeightId,
    place: usize,
    len: usize,
) -> &mut [u8] {
    let (base, capacity) = backend.weight_memory(weight);
    assert!(
        place.checked_add(len).is_some_and(|end| end <= capacity),
        "rows outside of their weight"
    );
    // SAFETY:
    // - in bounds: asserted above, `weight_memory` gives `capacity` initialised (zeroed) bytes
    // - exclusive: the slice borrows the backend mutably, and no pass runs while weights are loaded
    unsafe { std::slice::from_raw_parts_mut(base.as_ptr().add(place), len) }
}

/// Writes bytes at `place` of a weight's memory.
pub(crate) fn fill_weight(backend: &mut dyn Backend, weight: WeightId, place: usize, bytes: &[u8]) {
    weight_bytes(backend, weight, place, bytes.len()).copy_from_slice(bytes);
}

/// A slot as the target of a read.
///
/// The caller holds the pool's `Load` for that slot, which exists once per `Free -> Reading`, and keeps it until the
/// store has reported the read's end.
pub(crate) fn slot_destination((base, len): (NonNull<u8>, usize)) -> Destination {
    // SAFETY:
    // - valid: the backend owns `len` bytes at `base` for as long as it lives, and `Network` drops the store (which
    //   joins its readers) before the backend
    // - exclusive: a slot that is `Reading` is published nowhere, so no kernel looks at it, and the pool hands it to
    //   one transaction only
    unsafe { Destination::new(base, len) }
}

/// Where the first `n` slots are, for the store of the same network.
pub(crate) fn slots(backend: &dyn Backend, n: usize) -> Vec<SlotMemory> {
    let slots = (0..n as u32).map(|slot| {
        let (base, len) = backend.slot_memory(SlotIndex(slot));
        // SAFETY: the backend allocates slots once and keeps them while it lives, and `Network` drops the store before the
        // backend.
        unsafe { SlotMemory::new(base, len) }
    });
    slots.collect()
}

/// What stays in memory whatever happens, by part.
pub fn resident_terms(model: &Model) -> Vec<NamedBytes> {
    let mut parts = Parts::default();
    parts.input(&model.tensors.head_input);
    model.tensors.layers.iter().for_each(|layer| parts.layer(layer));
    let embed = matrix_bytes(&model.tensors.embed);
    let tied = model.tensors.output.name == model.tensors.embed.name;
    let output = if tied { 0 } else { matrix_bytes(&model.tensors.output) };
    [
        ("token embedding", embed),
        ("output head", output),
        ("attention", parts.attention),
        ("DeltaNet", parts.delta_net),
        ("shared experts", parts.shared),
        ("routers", parts.router),
        ("norms", parts.norms),
        ("stream mixing", parts.streams),
        ("n-gram block", parts.ngram),
    ]
    .into_iter()
    .filter(|(_, bytes)| *bytes > 0)
    .map(|(name, bytes)| NamedBytes { name, bytes })
    .collect()
}

/// Weights that one generated token needs: all that stays in memory but the token embedding, of which it takes a row
/// unless that is the output head too; and the experts that it chooses.
pub fn token_bytes(model: &Model) -> u64 {
    let tied = model.tensors.output.name == model.tensors.embed.name;
    let embed = if tied { 0 } else { matrix_bytes(&model.tensors.embed) };
    let resident: u64 = resident_terms(model).iter().map(|term| term.bytes).sum();
    let layers = (0..model.config.n_layers).map(LayerIndex);
    let experts: u64 = layers.map(|layer| model.records.layer(layer).record_bytes()).sum();
    resident - embed + experts * u64::from(model.config.top_k)
}

/// What stays in memory of a draft block, where that is loaded; nothing if the model has none.
pub fn draft_weights(model: &Model) -> Option<NamedBytes> {
    let draft = model.draft.as_ref()?;
    let mut parts = Parts::default();
    parts.input(&draft.head_input);
    parts.layer(&draft.layer);
    parts.norms += vector_bytes(&draft.embed_norm) + vector_bytes(&draft.hidden_norm);
    let Parts { attention, delta_net, shared, router, norms, streams, ngram } = parts;
    let layer = attention + delta_net + shared + router + norms + streams + ngram;
    let project: u64 = draft.project.tensors().map(matrix_bytes).sum();
    Some(NamedBytes { name: "draft head", bytes: layer + project })
}

/// Resident bytes of layers, as they lie in memory.
#[derive(Default)]
struct Parts {
    attention: u64,
    delta_net: u64,
    shared: u64,
    router: u64,
    norms: u64,
    streams: u64,
    ngram: u64,
}

impl Parts {
    fn input(&mut self, input: &InputTensors) {
        match input {
            InputTensors::Norm(norm) => self.norms += vector_bytes(norm),
            InputTensors::Streams(t) => {
                self.streams += vector_bytes(&t.norm)
                    + matrix_bytes(&t.down)
                    + matrix_bytes(&t.up)
                    + t.inject.as_ref().map_or(0, matrix_bytes);
            }
        }
    }

    fn layer(&mut self, layer: &LayerTensors) {
        self.input(&layer.mixer_input);
        self.input(&layer.experts_input);
        self.router += matrix_bytes(&layer.router);
        if let Some(t) = &layer.ngram {
            self.ngram += matrix_bytes(&t.key) + matrix_bytes(&t.value);
            let vectors = [&t.key_norm, &t.query_norm, &t.conv_norm, &t.conv];
            self.ngram += vectors.map(vector_bytes).iter().sum::<u64>();
            self.ngram += t.scale.as_ref().map_or(0, |scale| scale.bytes);
        }
        if let Some(s) = &layer.shared {
            self.shared += vector_bytes(&s.gate_inp)
                + matrix_bytes(&s.gate)
                + matrix_bytes(&s.up)
                + matrix_bytes(&s.down);
        }
        match &layer.mixer {
            MixerTensors::Attention(t) => {
                self.attention +=
                    [&t.q, &t.k, &t.v, &t.output].map(matrix_bytes).iter().sum::<u64>();
                self.norms += vector_bytes(&t.q_norm) + vector_bytes(&t.k_norm);
                if let Some(t) = &t.indexer {
                    self.attention += matrix_bytes(&t.q) + matrix_bytes(&t.k);
                    self.norms += vector_bytes(&t.q_norm) + vector_bytes(&t.k_norm);
                }
            }
            MixerTensors::DeltaNet(t) => {
                self.delta_net += matrix_bytes(&t.output);
                self.delta_net +=
                    [&t.conv, &t.dt_bias, &t.a, &t.norm].map(vector_bytes).iter().sum::<u64>();
                self.delta_net += crate::load::delta_net_matrices(t)
                    .map(|(bytes, _)| page_rounded(bytes))
                    .sum::<u64>();
            }
        }
    }
}

/// A weight occupies whole pages.
fn page_rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(4096)
}

fn matrix_bytes(tensor: &TensorInfo) -> u64 {
    page_rounded(tensor.bytes)
}

/// Vectors are kept as f32.
fn vector_bytes(tensor: &TensorInfo) -> u64 {
    page_rounded(4 * tensor.shape.iter().product::<u64>())
}

/// Rows of scores over all blocks of the context that backends hold at once: of a batch of queries, and one a thread.
const SCORE_ROWS: u64 = 32;

/// KV cache of one position over all attention layers, with what an indexer and an n-gram table remember of it.
pub fn kv_bytes_per_token(config: &ModelConfig, kv: KvType) -> u64 {
    let geometry = Geometry::of(config);
    let layers = geometry.kv_layers as u64;
    let scores =
        geometry.attention.index.map_or(0, |index| (4 * SCORE_ROWS).div_ceil(index.ratio as u64));
    let token = if geometry.ngram.is_some() { 4 } else { 0 };
    layers * layer_bytes_per_token(&geometry, kv) + scores + token
}

/// The same of a draft block alone, where that is loaded.
pub fn draft_kv_bytes_per_token(config: &ModelConfig, kv: KvType) -> u64 {
    layer_bytes_per_token(&Geometry::of(config), kv)
}

/// Keys, values and index keys of one position and layer.
fn layer_bytes_per_token(geometry: &Geometry, kv: KvType) -> u64 {
    let width = match kv {
        KvType::F16 => 2,
        KvType::F32 => 4,
    };
    let index = geometry.attention.index.map_or(0, |index| {
        // A key of its own, and its share of the block's.
        let [_, key] = index.widths();
        key + key.div_ceil(index.ratio)
    });
    let heads = 2 * geometry.attention.key.count * geometry.attention.key.dim;
    (heads + index) as u64 * width
}

/// Recurrent state of one sequence: delta-rule matrices and convolution inputs, f32.
pub fn recurrent_bytes(config: &ModelConfig) -> u64 {
    Geometry::of(config).sequence(0).state_bytes() as u64
}

/// Hidden states that wait for a draft block, here and on their way back to the backend.
pub fn late_draft(config: &ModelConfig) -> NamedBytes {
    let width = Geometry::of(config).residual_width();
    let row = 2 * 4 * width + size_of::<Row>();
    NamedBytes { name: "draft rows that wait", bytes: (draft::LATE_ROWS * row) as u64 }
}

/// Activation memory that a draft block adds to a pass of `rows` rows.
pub fn draft_scratch(config: &ModelConfig, rows: u32) -> NamedBytes {
    let geometry = Geometry::of(config);
    let [residual, hidden, pair] = draft::widths(&geometry);
    let mut widths = residual + hidden + pair;
    if geometry.kv_layers == 0 {
        // The trunk has no such rows to share.
        widths += geometry.attention.widths().iter().sum::<usize>();
    }
    // The pair in blocks of 8 bit, as other activations.
    let values = 4 * widths + pair + pair.div_ceil(4);
    // Of rows: what they are. Hidden states of a snapshot and on its way back.
    let places = 2 * size_of::<(u32, u32)>();
    let bytes = u64::from(rows) * (values + places) as u64 + 8 * residual as u64;
    NamedBytes { name: "draft rows", bytes }
}

/// Memory that it takes to take rows back, of passes of up to `rows` rows; nothing where there is no recurrent state.
pub fn verify_terms(config: &ModelConfig, rows: u32) -> Vec<NamedBytes> {
    let buffer = |width: usize| page_rounded(4 * u64::from(rows) * width as u64);
    let inputs = verify::widths(&Geometry::of(config)).into_iter().map(buffer).sum();
    [("state before guesses", recurrent_bytes(config)), ("rows under verification", inputs)]
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(name, bytes)| NamedBytes { name, bytes })
        .collect()
}

/// Memory of guesses of the next layer's experts, of what corrects them, and of their reads in flight.
pub fn lookahead_bytes(config: &ModelConfig, correction: Option<&Correction>) -> NamedBytes {
    let (geometry, n_layers) = (Geometry::of(config), u64::from(config.n_layers));
    let bytes = crate::lookahead::bytes(&geometry, n_layers, correction);
    NamedBytes { name: "lookahead", bytes }
}

/// Memory in which passes of `rows` rows record what taps see.
pub fn tap_bytes(config: &ModelConfig, rows: u32) -> NamedBytes {
    let bytes = crate::lookahead::record::bytes(&Geometry::of(config), u64::from(rows));
    NamedBytes { name: "recorded taps", bytes }
}

/// Activation memory of a pass of `rows` rows that may ask for `logit_rows` rows of logits.
pub fn scratch_terms(model: &Model, rows: u32, logit_rows: u32) -> Vec<NamedBytes> {
    let config = &model.config;
    let geometry = Geometry::of(config);
    let rows = u64::from(rows);
    let per_row = |widths: &[usize]| 4 * rows * widths.iter().sum::<usize>() as u64;
    let residual = geometry.residual_width();
    let bytes = per_row(&[residual, geometry.hidden, geometry.hidden]);
    let mut terms = vec![NamedBytes { name: "residual stream", bytes }];
    if let Some(shape) = &geometry.streams {
        let bytes = per_row(&shape.widths(geometry.hidden));
        terms.push(NamedBytes { name: "stream mixing", bytes });
    }
    if let (Some(shape), Some(table)) = (&geometry.ngram, &model.ngram_table) {
        let reads = NgramStore::pass_bytes(table.row_bytes(), rows, shape.heads as u64);
        // Decoded rows of a block, here and on their way to the backend.
        let blocks = 2 * 4 * (ngram::BLOCK * shape.width) as u64;
        let bytes = per_row(&shape.widths()) + reads + 8 * rows * shape.heads as u64 + blocks;
        terms.push(NamedBytes { name: "n-gram rows", bytes });
    }
    if geometry.kv_layers > 0 {
        let index = geometry.attention.index.map_or([0; 3], |index| {
            let [queries, key] = index.widths();
            [queries, key, index.blocks + 1]
        });
        let bytes = per_row(&geometry.attention.widths()) + per_row(&index);
        terms.push(NamedBytes { name: "attention rows", bytes });
    }
    if let Some(shape) = &geometry.recurrent {
        terms.push(NamedBytes { name: "DeltaNet rows", bytes: per_row(&delta_net::widths(shape)) });
    }
    let router = geometry.router;
    let shared = geometry.shared_width.map_or(0, |width| 2 * width + geometry.hidden + 1);
    terms.push(NamedBytes {
        name: "router and shared expert",
        bytes: per_row(&[router.n_experts, shared]),
    });
    let pairs = rows * router.top_k as u64;
    let outputs = 4 * pairs * router.hidden as u64;
    terms.push(NamedBytes { name: "expert outputs", bytes: outputs });
    let inner = 4 * pairs * 2 * router.expert_width as u64;
    terms.push(NamedBytes { name: "expert insides", bytes: inner });
    let widest = widest_input(config, &geometry) as u64;
    let inner = pairs * router.expert_width as u64;
    // Gate and up matrices may need blocks of different sizes. In blocks of 32, the smallest, a value takes a byte and
    // an eighth each for its share of a scale and of a group sum.
    let values = rows * (widest + 2 * router.hidden as u64) + inner;
    terms.push(NamedBytes { name: "8-bit activations", bytes: values + values.div_ceil(4) });
    let logits = 4 * u64::from(logit_rows) * u64::from(config.vocab);
    terms.push(NamedBytes { name: "logits", bytes: logits });
    terms
}

/// Memory in which one kernel thread lays out weights.
pub fn thread_bytes(config: &ModelConfig) -> u64 {
    let geometry = Geometry::of(config);
    let widest = widest_input(config, &geometry).max(geometry.router.expert_width);
    compute::panel_bytes(widest)
}

/// Values of the longest row that a weight outside of experts is multiplied with.
fn widest_input(config: &ModelConfig, geometry: &Geometry) -> usize {
    let mixed = geometry.recurrent.as_ref().map_or(0, |shape| delta_net::widths(shape)[4]);
    let attended = attention::Shape::of(config).widths()[3];
    let inputs = [geometry.hidden, attended, mixed, geometry.residual_width()];
    inputs.into_iter().fold(geometry.shared_width.unwrap_or(0), usize::max)
}
