//! Well-formed models of every family and layout, and what hostile changes do to them.

use std::path::{Path, PathBuf};

use checkpoint::{DIRECT_ALIGN, Family, LayerKind, MemorySource, Model, bind, open, parse};
use proptest::prelude::*;
use units::ExpertKey;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures/models")).join(name)
}

fn model(name: &str) -> Model {
    bind(&open(&fixture(name)).unwrap()).unwrap()
}

const MODELS: [&str; 11] = [
    "qwen3_moe-a/f32.gguf",
    "qwen3_moe-a/b32.gguf",
    "qwen3_moe-k/kq.gguf",
    "qwen3_next-a/f32-00001-of-00003.gguf",
    "qwen3_next-a/b32-legacy-ssm_in.gguf",
    "qwen3_next-k/kq.gguf",
    "qwen3_5_moe-a/f32.gguf",
    "qwen3_5_moe-a/b32-fused-gate_up.gguf",
    "qwen3_5_moe-k/kq-split-00002-of-00003.gguf",
    "tok-tiny/qwen2.gguf",
    "tok-tiny/qwen35.gguf",
];

#[test]
fn every_family_and_layout_binds() {
    for name in MODELS {
        let model = model(name);
        assert_eq!(model.tensors.layers.len(), model.config.n_layers as usize, "{name}");
    }
    let next = model("qwen3_next-a/f32-00001-of-00003.gguf").config;
    assert_eq!(
        (next.family, next.heads, next.kv_heads, next.head_dim),
        (Family::Qwen3Next, 4, 2, 32)
    );
    assert_eq!(
        (next.n_experts, next.top_k, next.expert_width, next.shared_width),
        (5, 3, 64, Some(64))
    );
    assert_eq!(next.layers.iter().filter(|kind| **kind == LayerKind::Attention).count(), 1);
    assert_eq!(next.layers[3], LayerKind::Attention);
    assert_eq!(next.rotary_dim, 8);
}

#[test]
fn draft_layers_are_not_part_of_the_trunk() {
    let demo =
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf"));
    let demo = bind(&open(&demo).unwrap()).unwrap();
    assert_eq!((demo.config.n_layers, demo.config.n_draft_layers), (8, 1));
    assert_eq!(demo.records.n_layers(), 8);
    // The model card: 45.7 MB of routed experts in the trunk.
    assert_eq!(demo.records.payload_bytes() / 100_000, 457);
    assert_eq!(model("qwen3_5_moe-a/f32.gguf").config.n_draft_layers, 1);
}

#[test]
fn pieces_cover_exactly_the_experts_bytes_and_can_be_read_directly() {
    for name in MODELS {
        let model = model(name);
        for layer in 0..model.config.n_layers {
            for expert in 0..model.config.n_experts {
                check_record(&model, ExpertKey::new(layer, expert), name);
            }
        }
    }
}

fn check_record(model: &Model, key: ExpertKey, name: &str) {
    let record = model.records.record(key);
    let layer = model.records.layer(key.layer);
    let tensors: Vec<_> =
        [Some(&layer.gate), layer.up.as_ref(), Some(&layer.down)].into_iter().flatten().collect();
    assert_eq!(record.pieces.len(), tensors.len(), "{name} {key}");
    let mut free = 0;
    for (piece, tensor) in record.pieces.iter().zip(tensors) {
        let stride = tensor.bytes / u64::from(model.config.n_experts);
        assert_eq!(piece.offset, tensor.offset + stride * u64::from(key.expert.0), "{name} {key}");
        assert_eq!(piece.bytes, stride, "{name} {key}");
        assert_eq!(piece.place % DIRECT_ALIGN, piece.offset % DIRECT_ALIGN, "{name} {key}");
        let widened = piece.place / DIRECT_ALIGN * DIRECT_ALIGN;
        assert!(widened >= free, "{name} {key}: widened reads overlap");
        free = (piece.place + piece.bytes).next_multiple_of(DIRECT_ALIGN);
    }
    assert_eq!(record.slot_bytes, free);
    let matrices = record.matrices();
    let payload: usize =
        [matrices.gate, matrices.up, matrices.down].iter().map(|m| m.bytes()).sum();
    assert_eq!(payload as u64, record.bytes, "{name} {key}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn changed_bytes_never_panic(changes in prop::collection::vec((0.0..1.0_f64, any::<u8>()), 1..6), cut in 0.0..1.0_f64) {
        let mut bytes = std::fs::read(fixture("../bad/gguf/ok_base.gguf")).unwrap();
        let header = 3000.min(bytes.len());
        for (at, value) in changes {
            bytes[(at * header as f64) as usize] = value;
        }
        if cut < 0.2 {
            bytes.truncate((cut * 5.0 * bytes.len() as f64) as usize);
        }
        if let Ok(checkpoint) = parse(Path::new("changed.gguf"), &MemorySource(&bytes)) {
            let _ = bind(&checkpoint);
        }
    }
}
