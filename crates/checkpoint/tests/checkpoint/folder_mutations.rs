//! What hostile changes to the files of a folder do: an error or a model, never a panic.

use std::path::Path;

use checkpoint::{Audit, MemorySource, ValueMap, bind, parse_folder, parse_safetensors};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use units::ExpertKey;

/// A folder in memory: its configuration, and the header of its one file, which has room behind it.
#[derive(Debug, Clone)]
struct Folder {
    config: Value,
    header: Map<String, Value>,
    data: u64,
}

impl Folder {
    fn new(config: Value) -> Self {
        Self { config, header: Map::new(), data: 0 }
    }

    fn tensor(&mut self, name: &str, dtype: &str, shape: &[u64]) {
        let bytes: u64 = match dtype {
            "F8_E4M3" => 1,
            "BF16" => 2,
            _ => 4,
        };
        let end = self.data + bytes * shape.iter().product::<u64>();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [self.data, end]});
        self.header.insert(name.to_owned(), entry);
        self.data = end;
    }

    /// A matrix as the kind of folder stores it.
    fn matrix(&mut self, kind: Kind, name: &str, shape: &[u64]) {
        let (lead, last) = shape.split_at(shape.len() - 1);
        match kind {
            Kind::Original => self.tensor(&format!("{name}.weight"), "BF16", shape),
            Kind::Mlx => {
                let planes = [("weight", "U32", last[0] / 8), ("scales", "BF16", last[0] / 32)];
                for (plane, dtype, n) in
                    planes.into_iter().chain([("biases", "BF16", last[0] / 32)])
                {
                    self.tensor(&format!("{name}.{plane}"), dtype, &[lead, &[n]].concat());
                }
            }
            Kind::Fp8 => {
                self.tensor(&format!("{name}.weight"), "F8_E4M3", shape);
                let tiles = [lead[lead.len() - 1].div_ceil(128), last[0] / 128];
                let tiles = [&lead[..lead.len() - 1], &tiles].concat();
                self.tensor(&format!("{name}.weight_scale_inv"), "F32", &tiles);
            }
        }
    }

    fn file(&self) -> Vec<u8> {
        let mut bytes = self.header_bytes();
        bytes.resize(bytes.len() + self.data as usize, 0);
        bytes
    }

    fn header_bytes(&self) -> Vec<u8> {
        let header = Value::Object(self.header.clone()).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Original,
    Mlx,
    Fp8,
}

const HIDDEN: u64 = 128;
const EXPERTS: u64 = 3;

/// A complete hybrid model of two layers, a recurrent one and attention.
fn tiny(kind: Kind) -> Folder {
    let mut config = json!({
        "model_type": "qwen3_next", "num_hidden_layers": 2, "hidden_size": HIDDEN,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "tie_word_embeddings": true,
    });
    match kind {
        Kind::Original => {}
        Kind::Mlx => config["quantization"] = json!({"bits": 4, "group_size": 32}),
        Kind::Fp8 => {
            config["quantization_config"] =
                json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
        }
    }
    let mut folder = Folder::new(config);
    folder.matrix(kind, "model.embed_tokens", &[40, HIDDEN]);
    folder.tensor("model.norm.weight", "BF16", &[HIDDEN]);
    for layer in 0..2 {
        let front = format!("model.layers.{layer}");
        folder.tensor(&format!("{front}.input_layernorm.weight"), "BF16", &[HIDDEN]);
        folder.tensor(&format!("{front}.post_attention_layernorm.weight"), "BF16", &[HIDDEN]);
        if layer == 1 {
            for (name, shape) in
                [("q", [256, 128]), ("k", [64, 128]), ("v", [64, 128]), ("o", [128, 128])]
            {
                folder.matrix(kind, &format!("{front}.self_attn.{name}_proj"), &shape);
            }
            for name in ["q", "k"] {
                folder.tensor(&format!("{front}.self_attn.{name}_norm.weight"), "BF16", &[32]);
            }
        } else {
            let front = format!("{front}.linear_attn");
            folder.matrix(kind, &format!("{front}.in_proj_qkvz"), &[320, HIDDEN]);
            folder.matrix(kind, &format!("{front}.in_proj_ba"), &[8, HIDDEN]);
            folder.matrix(kind, &format!("{front}.out_proj"), &[HIDDEN, 128]);
            let conv: [u64; 3] = if kind == Kind::Mlx { [192, 4, 1] } else { [192, 1, 4] };
            folder.tensor(&format!("{front}.conv1d.weight"), "BF16", &conv);
            folder.tensor(&format!("{front}.A_log"), "F32", &[4]);
            folder.tensor(&format!("{front}.dt_bias"), "BF16", &[4]);
            folder.tensor(&format!("{front}.norm.weight"), "F32", &[32]);
        }
        experts(&mut folder, kind, &format!("{front}.mlp"), layer == 1);
    }
    folder
}

fn experts(folder: &mut Folder, kind: Kind, front: &str, fused: bool) {
    folder.tensor(&format!("{front}.gate.weight"), "BF16", &[EXPERTS, HIDDEN]);
    folder.tensor(&format!("{front}.shared_expert_gate.weight"), "BF16", &[1, HIDDEN]);
    let parts = ["gate_proj", "up_proj", "down_proj"];
    for part in parts {
        folder.matrix(kind, &format!("{front}.shared_expert.{part}"), &[128, 128]);
        if kind == Kind::Mlx {
            folder.matrix(kind, &format!("{front}.switch_mlp.{part}"), &[EXPERTS, 128, 128]);
        } else if !fused {
            for expert in 0..EXPERTS {
                folder.matrix(kind, &format!("{front}.experts.{expert}.{part}"), &[128, 128]);
            }
        }
    }
    if kind != Kind::Mlx && fused {
        folder.matrix(kind, &format!("{front}.experts.gate_up_proj"), &[EXPERTS, 256, 128]);
        folder.matrix(kind, &format!("{front}.experts.down_proj"), &[EXPERTS, 128, 128]);
    }
}

/// Reads a folder and everything that can be asked of its model; whether it is one.
fn use_all(config: &[u8], file: &[u8]) -> bool {
    let (config, source) = (MemorySource(config), MemorySource(file));
    // Headers are walked alone too: the model's names must not be what keeps a file from harm.
    let _ = parse_safetensors(Path::new("m.safetensors"), &source);
    let files: [(&Path, &dyn checkpoint::Source); 1] = [(Path::new("m.safetensors"), &source)];
    let Ok(checkpoint) = parse_folder((Path::new("config.json"), &config), &files, None) else {
        return false;
    };
    let inside = |offset: u64, bytes: u64| {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= file.len() as u64));
    };
    for tensor in checkpoint.directory.iter() {
        let rows = tensor.bytes / tensor.row_bytes();
        let mut memory = 0;
        for piece in tensor.pieces(0..rows) {
            inside(piece.offset, piece.bytes);
            memory += piece.memory_bytes();
            let Some(blocks) = piece.blocks else { continue };
            // Without tiles every block has a scale of its own.
            if blocks.tiles.is_none() {
                let scales = piece.bytes / u64::from(blocks.codes) * u64::from(blocks.scale);
                inside(blocks.scales.offset, scales);
                blocks.biases.into_iter().for_each(|biases| inside(biases.offset, scales));
            }
        }
        assert_eq!(memory, tensor.bytes, "{}", tensor.name);
    }
    let Ok(model) = bind(&checkpoint) else { return false };
    for layer in 0..model.config.n_layers {
        for expert in 0..model.config.n_experts {
            let record = model.records.record(ExpertKey::new(layer, expert));
            let matrices = record.matrices();
            for matrix in [matrices.gate, matrices.up, matrices.down] {
                assert!(matrix.place + matrix.bytes() as u64 <= record.slot_bytes);
            }
            record.pieces.iter().for_each(|piece| inside(piece.offset, piece.bytes));
        }
    }
    Audit::of(&checkpoint, &model);
    true
}

fn kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(vec![Kind::Original, Kind::Mlx, Kind::Fp8])
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u64>().prop_map(Value::from),
        (0..300_u64).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        "[a-z_]{0,12}".prop_map(Value::from),
        prop::collection::vec(0..5_u64, 0..4).prop_map(Value::from),
        Just(Value::Null),
        Just(json!({})),
        Just(json!({"rope_type": "yarn", "factor": 1e300, "attention_factor": -1})),
        Just(json!({"bits": 8, "group_size": 128, "model.layers.0.mlp.gate": false})),
        Just(json!(["linear_attention", "full_attention"])),
    ]
}

#[test]
fn the_tiny_folders_are_models() {
    for kind in [Kind::Original, Kind::Mlx, Kind::Fp8] {
        let folder = tiny(kind);
        let (config, file) = (folder.config.to_string(), folder.file());
        let files: [(&Path, &dyn checkpoint::Source); 1] =
            [(Path::new("m.safetensors"), &MemorySource(&file))];
        let config = MemorySource(config.as_bytes());
        let checkpoint = parse_folder((Path::new("config.json"), &config), &files, None);
        let checkpoint = checkpoint.unwrap();
        bind(&checkpoint).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
        // The shape of the convolution tells what norms mean, and nothing else about the folder does.
        let norm = if kind == Kind::Mlx { ValueMap::Plain } else { ValueMap::PlusOne };
        for (name, map) in [
            ("output_norm.weight", norm),
            ("blk.0.attn_norm.weight", norm),
            ("blk.1.attn_q_norm.weight", norm),
            ("blk.0.ssm_norm.weight", ValueMap::Plain),
            ("blk.0.ssm_a", ValueMap::NegExp),
            ("blk.0.ssm_conv1d.weight", ValueMap::Plain),
        ] {
            assert_eq!(checkpoint.directory.get(name).unwrap().map(), map, "{kind:?} {name}");
        }
        assert!(use_all(folder.config.to_string().as_bytes(), &file));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn changed_bytes_never_panic(
        kind in kind(),
        changes in prop::collection::vec((0.0..1.0_f64, any::<u8>()), 1..6),
        in_config in any::<bool>(),
        cut in 0.0..1.0_f64,
    ) {
        let folder = tiny(kind);
        let (mut config, mut file) = (folder.config.to_string().into_bytes(), folder.file());
        let header = folder.header_bytes().len();
        for (at, value) in changes {
            if in_config {
                let len = config.len();
                config[(at * len as f64) as usize] = value;
            } else {
                file[(at * header as f64) as usize] = value;
            }
        }
        if cut < 0.2 {
            file.truncate((cut * 5.0 * file.len() as f64) as usize);
        }
        use_all(&config, &file);
    }

    #[test]
    fn changed_digits_never_panic(
        kind in kind(),
        changes in prop::collection::vec((0.0..1.0_f64, b'0'..=b'9'), 1..6),
        in_config in any::<bool>(),
    ) {
        let folder = tiny(kind);
        let (mut config, mut file) = (folder.config.to_string().into_bytes(), folder.file());
        let header = folder.header_bytes().len();
        for (at, value) in changes {
            let bytes = if in_config { &mut config[..] } else { &mut file[8..header] };
            let digits: Vec<_> = (0..bytes.len()).filter(|i| bytes[*i].is_ascii_digit()).collect();
            bytes[digits[(at * digits.len() as f64) as usize]] = value;
        }
        use_all(&config, &file);
    }

    #[test]
    fn changed_keys_never_panic(
        kind in kind(),
        changes in prop::collection::vec((0.0..1.0_f64, value()), 1..4),
        nested in any::<bool>(),
    ) {
        let mut folder = tiny(kind);
        let keys: Vec<String> = folder.config.as_object().unwrap().keys().cloned().collect();
        let more = ["rope_parameters", "rope_scaling", "layer_types", "quantization", "eos_token_id",
            "norm_topk_prob", "quantization_config", "text_config", "hidden_act"];
        let keys: Vec<&str> = keys.iter().map(String::as_str).chain(more).collect();
        for (at, value) in changes {
            folder.config[keys[(at * keys.len() as f64) as usize]] = value;
        }
        if nested {
            folder.config = json!({"model_type": "qwen3_next", "text_config": folder.config});
        }
        use_all(folder.config.to_string().as_bytes(), &folder.file());
    }

    #[test]
    fn changed_tensors_never_panic(
        kind in kind(),
        changes in prop::collection::vec(
            (0.0..1.0_f64, prop::collection::vec(prop::sample::select(vec![1_u64, 2, 4, 32, 128, 192, 256]), 0..4),
             prop::sample::select(vec!["F32", "BF16", "U32", "F8_E4M3", "I64", "U8"]), any::<bool>()),
            1..3,
        ),
    ) {
        let mut folder = tiny(kind);
        let names: Vec<String> = folder.header.keys().cloned().collect();
        for (at, shape, dtype, keep) in changes {
            let name = &names[(at * names.len() as f64) as usize];
            let old = folder.header.remove(name);
            let Some(old) = old else { continue };
            let shape = if keep {
                old["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
            } else {
                shape
            };
            folder.header.insert(name.clone(), json!({"dtype": dtype, "shape": shape}));
        }
        // Laid out anew, so that only what the tensors are is wrong.
        let entries = std::mem::take(&mut folder.header);
        folder.data = 0;
        for (name, entry) in entries {
            let shape: Vec<u64> = entry["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
            let size = match entry["dtype"].as_str().unwrap() {
                "F8_E4M3" | "U8" => 1,
                "BF16" => 2,
                "I64" => 8,
                _ => 4,
            };
            let end = folder.data + size * shape.iter().product::<u64>();
            folder.header.insert(name, json!({
                "dtype": entry["dtype"], "shape": shape, "data_offsets": [folder.data, end]
            }));
            folder.data = end;
        }
        use_all(folder.config.to_string().as_bytes(), &folder.file());
    }
}
