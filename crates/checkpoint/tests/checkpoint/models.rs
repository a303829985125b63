//! Models that other software wrote, in every family and layout: roles, records, audit.

use std::path::PathBuf;

use checkpoint::{
    Audit, Checkpoint, DIRECT_ALIGN, Family, HyperShape, LayerKind, Model, ModelConfig, Piece,
    SlotMatrix, bind, open,
};
use quant::BlockType;
use units::ExpertKey;

use crate::support::{fixture, manifest};

fn checkpoint(name: &str) -> Checkpoint {
    open(&fixture("models").join(name)).unwrap()
}

fn model(name: &str) -> Model {
    bind(&checkpoint(name)).unwrap()
}

fn demo() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf"))
}

const MODELS: [&str; 12] = [
    "qwen3_moe-a/f32.gguf",
    "qwen3_moe-a/b32.gguf",
    "qwen3_moe-k/kq.gguf",
    "qwen3_next-a/f32-00001-of-00003.gguf",
    "qwen3_next-a/b32-legacy-ssm_in.gguf",
    "qwen3_next-k/kq.gguf",
    "qwen3_5_moe-a/f32.gguf",
    "qwen3_5_moe-a/b32-fused-gate_up.gguf",
    "qwen3_5_moe-k/kq-split-00002-of-00003.gguf",
    "qwen4_exp-a/split-b32-00002-of-00003.gguf",
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
    let demo = bind(&open(&demo()).unwrap()).unwrap();
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
    let matrices = record.matrices();
    let places = [matrices.gate.place, matrices.up.place, matrices.down.place];
    let places = if layer.up.is_some() { &places[..] } else { &[places[0], places[2]] };
    for (tensor, place) in tensors.into_iter().zip(places) {
        let stride = tensor.bytes / u64::from(model.config.n_experts);
        let offset = tensor.offset + stride * u64::from(key.expert.0);
        let holds = |p: &&Piece| p.place <= *place && place + stride <= p.place + p.bytes;
        let piece = record.pieces.iter().find(holds).unwrap_or_else(|| panic!("{name} {key}"));
        assert_eq!(piece.offset + (place - piece.place), offset, "{name} {key}");
    }
    let mut free = 0;
    for piece in record.pieces.iter() {
        assert_eq!(piece.place % DIRECT_ALIGN, piece.offset % DIRECT_ALIGN, "{name} {key}");
        let widened = piece.place / DIRECT_ALIGN * DIRECT_ALIGN;
        assert!(widened >= free, "{name} {key}: widened reads overlap");
        free = (piece.place + piece.bytes).next_multiple_of(DIRECT_ALIGN);
    }
    assert_eq!(record.slot_bytes, free);
    let payload: usize =
        [matrices.gate, matrices.up, matrices.down].iter().map(SlotMatrix::bytes).sum();
    assert_eq!(payload as u64, record.bytes, "{name} {key}");
}

#[test]
fn configurations_and_expert_types_are_those_that_the_files_were_written_with() {
    let manifest = manifest("manifest.json");
    let mut checked = 0;
    for listed in manifest["models"].as_array().unwrap() {
        let family = match listed["arch"].as_str().unwrap() {
            "qwen3_moe" => Family::Qwen3Moe,
            "qwen3_next" => Family::Qwen3Next,
            "qwen3_5_moe" => Family::Qwen35Moe,
            "qwen4_exp" => Family::Qwen4Exp,
            other => panic!("family {other}"),
        };
        for entry in listed["entries"].as_array().unwrap() {
            if entry["format"] != "gguf" {
                continue;
            }
            // Of a split file, the last part opens the whole.
            let path = entry["path"].as_array().unwrap().last().unwrap().as_str().unwrap();
            if !fixture(path).exists() {
                continue;
            }
            let model = bind(&open(&fixture(path)).unwrap()).unwrap();
            assert_eq!(model.config.family, family, "{path}");
            assert_dims(&model, &listed["dims"], path);
            assert_expert_types(&model, &entry["types"], path);
            checked += 1;
        }
    }
    // Two are in the larger set only.
    assert_eq!(checked, if std::env::var_os("SAKIA_FIXTURES").is_some() { 12 } else { 10 });
}

fn assert_dims(model: &Model, dims: &serde_json::Value, path: &str) {
    let number = |key: &str| dims[key].as_u64().unwrap_or_else(|| panic!("{key}")) as u32;
    let config = &model.config;
    for (found, key) in [
        (config.vocab, "V"),
        (config.hidden, "H"),
        (config.n_layers, "L"),
        (config.heads, "heads"),
        (config.kv_heads, "kv"),
        (config.head_dim, "hd"),
        (config.expert_width, "I"),
        (config.n_experts, "E"),
        (config.top_k, "k"),
        (config.context_length, "max_pos"),
    ] {
        assert_eq!(found, number(key), "{path}: {key}");
    }
    assert_eq!(config.rope_theta.to_bits(), dims["theta"].as_f64().unwrap().to_bits(), "{path}");
    assert_eq!(config.rms_eps.to_bits(), (dims["eps"].as_f64().unwrap() as f32).to_bits());
    if let Some(hyper) = config.hyper {
        assert_flash_dims(config, hyper, dims, path);
    }
    let Some(shape) = config.delta_net else {
        assert_eq!((config.rotary_dim, config.shared_width), (number("hd"), None), "{path}");
        return;
    };
    let rotating = dims["rot"].as_f64().unwrap() * f64::from(config.head_dim);
    assert_eq!(f64::from(config.rotary_dim).to_bits(), rotating.to_bits(), "{path}");
    assert_eq!(config.shared_width, Some(number("SI")), "{path}");
    let heads = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim);
    assert_eq!(heads, (number("nk"), number("nv"), number("dk"), number("dv")), "{path}");
    assert_eq!(shape.conv_kernel, number("conv"), "{path}");
    for (layer, kind) in (1..).zip(&config.layers) {
        let attention = u32::is_multiple_of(layer, number("interval"));
        assert_eq!(*kind == LayerKind::Attention, attention, "{path}: layer {layer}");
    }
}

fn assert_flash_dims(
    config: &ModelConfig,
    hyper: HyperShape,
    dims: &serde_json::Value,
    path: &str,
) {
    let number = |key: &str| dims[key].as_u64().unwrap_or_else(|| panic!("{key}")) as u32;
    let (indexer, ngram) = (config.indexer.unwrap(), config.ngram.as_ref().unwrap());
    for (found, key) in [
        (hyper.streams, "hc"),
        (hyper.rank, "lowrank"),
        (indexer.heads, "inh"),
        (indexer.dim, "ihd"),
        (indexer.budget_tokens, "ibudget"),
        (indexer.ratio, "iratio"),
        // Counted from 1 there.
        (ngram.layer + 1, "ple_layer"),
        (ngram.width() as u32, "ple_dim"),
        (ngram.conv_kernel, "ple_k"),
        (ngram.ngram_size, "ngram"),
        (ngram.heads_per_ngram, "hpn"),
        (ngram.head_sizes[0] as u32, "nvbase"),
        (ngram.eos, "eos"),
    ] {
        assert_eq!(found, number(key), "{path}: {key}");
    }
}

fn assert_expert_types(model: &Model, types: &serde_json::Value, path: &str) {
    let listed = |part: &str| types[format!("blk.*.ffn_{part}_exps")].as_array().cloned();
    let expected = |part: &str, layer: usize| {
        let types = listed(part).or_else(|| listed("gate_up")).unwrap();
        types[layer].as_str().unwrap().to_owned()
    };
    for layer in 0..model.config.n_layers {
        let matrices = model.records.record(ExpertKey::new(layer, 0)).matrices();
        for (part, matrix) in
            [("gate", matrices.gate), ("up", matrices.up), ("down", matrices.down)]
        {
            let expected = expected(part, layer as usize);
            assert_eq!(matrix.block_type.name(), expected, "{path}: layer {layer}, {part}");
        }
    }
}

#[test]
fn the_parts_of_an_audit_add_up_to_the_file() {
    let paths = MODELS.map(|name| fixture("models").join(name)).into_iter().chain([demo()]);
    for path in paths {
        let checkpoint = open(&path).unwrap();
        let model = bind(&checkpoint).unwrap();
        let audit = Audit::of(&checkpoint, &model);
        let all: u64 = checkpoint.directory.iter().map(|tensor| tensor.bytes).sum();
        let parts = audit.parts();
        assert_eq!(
            parts.iter().map(|(_, part)| part.bytes).sum::<u64>(),
            all,
            "{}",
            path.display()
        );
        let tensors: u64 = parts.iter().map(|(_, part)| part.tensors).sum();
        assert_eq!(tensors, checkpoint.directory.len() as u64, "{}", path.display());
        assert_eq!(audit.by_type.iter().map(|(_, part)| part.bytes).sum::<u64>(), all);
        assert_eq!(audit.routed.bytes, model.records.payload_bytes(), "{}", path.display());
        assert_eq!(audit.layers.len(), model.config.n_layers as usize);
        for layer in &audit.layers {
            let most = layer.record_bytes + 3 * 2 * DIRECT_ALIGN;
            assert!((layer.record_bytes..=most).contains(&layer.slot_bytes), "{layer:?}");
        }
    }
}

#[test]
fn an_audit_shows_types_that_differ_between_layers() {
    let checkpoint = checkpoint("qwen3_next-k/kq.gguf");
    let audit = Audit::of(&checkpoint, &bind(&checkpoint).unwrap());
    let mut types: Vec<BlockType> = audit.layers.iter().map(|layer| layer.gate).collect();
    types.dedup();
    assert!(types.len() > 1, "{types:?}");
    let demo = open(&demo()).unwrap();
    let audit = Audit::of(&demo, &bind(&demo).unwrap());
    assert_eq!(audit.layers[3].kind, LayerKind::Attention);
    assert!(audit.layers.iter().all(|layer| layer.gate == BlockType::Q4K));
    // A gated-attention block: 2 norms, 6 of attention, router, 3 stacks, 4 shared; and 4 that make it a draft.
    assert_eq!(audit.draft.tensors, 20);
}
