//! How much memory a model needs, term by term, and the one place where bytes are written into a backend.
#![allow(
    unsafe_code,
    reason = "weights and slots are raw memory owned by the backend; slices are made here"
)]

use std::ptr::NonNull;

use checkpoint::{MixerTensors, Model, ModelConfig, TensorInfo};
use compute::backend::{Backend, KvType, WeightId};
use expert_store::Destination;

use crate::attention;
use crate::delta_net;
use crate::network::Geometry;

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

/// The bytes of a slot whose expert is pinned by the caller.
pub(crate) fn copy_of_slot((base, len): (NonNull<u8>, usize)) -> Vec<u8> {
    // SAFETY: the backend owns `len` initialised bytes at `base`; the caller's pin keeps readers out of the slot.
    unsafe { std::slice::from_raw_parts(base.as_ptr().cast_const(), len) }.to_vec()
}

/// What stays in memory whatever happens, by part.
pub fn resident_terms(model: &Model) -> Vec<NamedBytes> {
    let (mut attention, mut delta_net, mut shared, mut router) = (0, 0, 0, 0);
    let mut norms = vector_bytes(&model.tensors.output_norm);
    for layer in &model.tensors.layers {
        norms += vector_bytes(&layer.pre_norm) + vector_bytes(&layer.post_norm);
        router += matrix_bytes(&layer.router);
        if let Some(s) = &layer.shared {
            shared += vector_bytes(&s.gate_inp)
                + matrix_bytes(&s.gate)
                + matrix_bytes(&s.up)
                + matrix_bytes(&s.down);
        }
        match &layer.mixer {
            MixerTensors::Attention(t) => {
                attention += [&t.q, &t.k, &t.v, &t.output].map(matrix_bytes).iter().sum::<u64>();
                norms += vector_bytes(&t.q_norm) + vector_bytes(&t.k_norm);
            }
            MixerTensors::DeltaNet(t) => {
                delta_net += matrix_bytes(&t.output);
                delta_net +=
                    [&t.conv, &t.dt_bias, &t.a, &t.norm].map(vector_bytes).iter().sum::<u64>();
                delta_net += crate::load::delta_net_matrices(t)
                    .map(|(bytes, _)| page_rounded(bytes))
                    .sum::<u64>();
            }
        }
    }
    let embed = matrix_bytes(&model.tensors.embed);
    let tied = model.tensors.output.name == model.tensors.embed.name;
    let output = if tied { 0 } else { matrix_bytes(&model.tensors.output) };
    [
        ("token embedding", embed),
        ("output head", output),
        ("attention", attention),
        ("DeltaNet", delta_net),
        ("shared experts", shared),
        ("routers", router),
        ("norms", norms),
    ]
    .into_iter()
    .filter(|(_, bytes)| *bytes > 0)
    .map(|(name, bytes)| NamedBytes { name, bytes })
    .collect()
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

/// KV cache of one position over all attention layers.
pub fn kv_bytes_per_token(config: &ModelConfig, kv: KvType) -> u64 {
    let width = match kv {
        KvType::F16 => 2,
        KvType::F32 => 4,
    };
    let geometry = Geometry::of(config);
    geometry.kv_layers as u64 * 2 * u64::from(config.kv_heads) * u64::from(config.head_dim) * width
}

/// Recurrent state of one sequence: delta-rule matrices and convolution inputs, f32.
pub fn recurrent_bytes(config: &ModelConfig) -> u64 {
    Geometry::of(config).recurrent.map_or(0, |shape| {
        let state = shape.value_heads * shape.key_dim * shape.value_dim;
        let conv = (shape.conv_kernel - 1) * shape.conv_channels();
        4 * (shape.layers * (state + conv)) as u64
    })
}

/// Activation memory of a pass of `rows` rows that may ask for `logit_rows` rows of logits.
pub fn scratch_terms(config: &ModelConfig, rows: u32, logit_rows: u32) -> Vec<NamedBytes> {
    let geometry = Geometry::of(config);
    let rows = u64::from(rows);
    let per_row = |widths: &[usize]| 4 * rows * widths.iter().sum::<usize>() as u64;
    let mut terms =
        vec![NamedBytes { name: "residual stream", bytes: per_row(&[geometry.hidden; 3]) }];
    if geometry.kv_layers > 0 {
        let bytes = per_row(&geometry.attention.widths());
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
    let mixed = geometry.recurrent.as_ref().map_or(0, |shape| delta_net::widths(shape)[4]);
    let inputs = [geometry.hidden, attention::Shape::of(config).widths()[3], mixed];
    let widest = inputs.into_iter().fold(geometry.shared_width.unwrap_or(0), usize::max) as u64;
    let inner = pairs * router.expert_width as u64;
    // Gate and up matrices may need blocks of different sizes. In blocks of 32, the smallest, a value takes a byte and
    // an eighth each for its share of a scale and of a group sum.
    let values = rows * (widest + 2 * router.hidden as u64) + inner;
    terms.push(NamedBytes { name: "8-bit activations", bytes: values + values.div_ceil(4) });
    let logits = 4 * u64::from(logit_rows) * u64::from(config.vocab);
    terms.push(NamedBytes { name: "logits", bytes: logits });
    terms
}
