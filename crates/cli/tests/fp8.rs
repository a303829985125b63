//! A folder as FP8 checkpoints of the family with an n-gram table are: every expert in tensors of its own with a grid of
//! scales, and a table of E4M3 rows of 160 values with one scale.
//!
//! Its logits are those of the same folder with the table's values multiplied out, bit for bit.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Map, Value, json};

const FRONT: &str = "model.language_model";
const ROWS: &str = "layers.1.ple.ple_embedding.ngram_embedding";

const HIDDEN: u64 = 128;
const STREAMS: u64 = 4 * HIDDEN;
const EXPERTS: u64 = 3;
const VOCAB: u64 = 192;
/// Values of a row of the table, no multiple of the 128 that share a scale elsewhere.
const ROW: u64 = 160;
/// Rows of the two heads: primes. The table has 8 shards.
const HEADS: [u64; 2] = [101, 103];
const SHARD_ROWS: u64 = 26;

/// How the table is stored.
#[derive(Clone, Copy)]
enum Table<'a> {
    /// E4M3 beside a scale of this type, with this shape and these bytes; shards under this name.
    Scaled(&'a str, &'a [u64], &'a [u8], &'a str),
    /// Values of this type, multiplied out by this scale.
    Multiplied(&'a str, f32),
}

/// A safetensors file under construction, and numbers that look random: splitmix64.
struct Folder {
    header: Map<String, Value>,
    data: Vec<u8>,
    state: u64,
}

impl Folder {
    fn random(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn raw(&mut self, name: &str, dtype: &str, shape: &[u64], bytes: &[u8]) {
        let start = self.data.len();
        self.data.extend(bytes);
        let entry = json!({
            "dtype": dtype, "shape": shape, "data_offsets": [start, self.data.len()]
        });
        let name =
            if name == "lm_head.weight" { name.to_owned() } else { format!("{FRONT}.{name}") };
        assert!(self.header.insert(name.clone(), entry).is_none(), "{name} twice");
    }

    /// BF16 values up to `most` in magnitude.
    fn floats(&mut self, name: &str, shape: &[u64], most: f32) {
        let n = shape.iter().product::<u64>();
        let bytes: Vec<u8> = (0..n)
            .flat_map(|_| {
                let unit = (self.random() >> 40) as f32 / 8_388_608.0 - 1.0;
                bf16(unit * most)
            })
            .collect();
        self.raw(name, "BF16", shape, &bytes);
    }

    /// Codes of E4M3 of every kind but NaN.
    fn codes(&mut self, n: u64) -> Vec<u8> {
        let code = |random: u64| if random & 0x7f == 0x7f { 0x7e } else { random as u8 };
        (0..n).map(|_| code(self.random())).collect()
    }

    /// A matrix of E4M3 with a scale for its one square of 128 by 128.
    fn expert(&mut self, name: &str) {
        let codes = self.codes(HIDDEN * HIDDEN);
        self.raw(&format!("{name}.weight"), "F8_E4M3", &[HIDDEN, HIDDEN], &codes);
        let scale = 0.0005 + (self.random() & 255) as f32 * 1e-6;
        self.raw(&format!("{name}.weight_scale_inv"), "F32", &[1, 1], &scale.to_le_bytes());
    }

    fn numbers(&mut self, name: &str, numbers: &[i64]) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.raw(name, "I64", &[numbers.len() as u64], &bytes);
    }

    fn streams(&mut self, front: &str, injects: bool) {
        self.floats(&format!("{front}.hc_norm.weight"), &[STREAMS], 0.1);
        self.floats(&format!("{front}.input_mix_weight_down.weight"), &[32, STREAMS], 0.1);
        self.floats(&format!("{front}.input_mix_weight_up.weight"), &[STREAMS, 32], 0.1);
        if injects {
            self.floats(&format!("{front}.block_inject_weight.weight"), &[4, STREAMS], 0.1);
        }
    }

    fn layer(&mut self, layer: u64, table: Table<'_>) {
        let front = format!("layers.{layer}");
        self.streams(&format!("{front}.attn_hyper_connection"), true);
        self.streams(&format!("{front}.mlp_hyper_connection"), true);
        if layer == 1 {
            for (name, shape) in
                [("q", [256, 128]), ("k", [64, 128]), ("v", [64, 128]), ("o", [128, 128])]
            {
                self.floats(&format!("{front}.self_attn.{name}_proj.weight"), &shape, 0.2);
            }
            for name in ["q_norm", "k_norm"] {
                self.floats(&format!("{front}.self_attn.{name}.weight"), &[32], 0.1);
            }
            let front = format!("{front}.self_attn.indexer");
            self.floats(&format!("{front}.index_qk_proj.weight"), &[48, HIDDEN], 0.2);
            for name in ["q_layernorm", "k_layernorm"] {
                self.floats(&format!("{front}.{name}.weight"), &[16], 0.1);
            }
            self.ngrams(table);
        } else {
            let front = format!("{front}.linear_attn");
            for (name, rows) in [("qkv", 192), ("z", 128), ("b", 4), ("a", 4)] {
                self.floats(&format!("{front}.in_proj_{name}.weight"), &[rows, HIDDEN], 0.2);
            }
            self.floats(&format!("{front}.out_proj.weight"), &[HIDDEN, 128], 0.2);
            self.floats(&format!("{front}.conv1d.weight"), &[192, 1, 4], 0.5);
            self.floats(&format!("{front}.A_log"), &[4], 1.0);
            self.floats(&format!("{front}.dt_bias"), &[4], 1.0);
            self.floats(&format!("{front}.norm.weight"), &[32], 1.0);
        }
        let front = format!("{front}.mlp");
        self.floats(&format!("{front}.gate.weight"), &[EXPERTS, HIDDEN], 0.2);
        self.floats(&format!("{front}.shared_expert_gate.weight"), &[1, HIDDEN], 0.2);
        for part in ["gate_proj", "up_proj", "down_proj"] {
            self.expert(&format!("{front}.shared_expert.{part}"));
            for expert in 0..EXPERTS {
                self.expert(&format!("{front}.experts.{expert}.{part}"));
            }
        }
    }

    fn ngrams(&mut self, table: Table<'_>) {
        let front = "layers.1.ple";
        self.floats(&format!("{front}.key_proj.weight"), &[STREAMS, 2 * ROW], 0.2);
        self.floats(&format!("{front}.value_proj.weight"), &[HIDDEN, 2 * ROW], 0.2);
        for norm in ["key", "query", "conv"] {
            self.floats(&format!("{front}.norm_{norm}.weight"), &[STREAMS], 0.1);
        }
        self.floats(&format!("{front}.conv1d.weight"), &[STREAMS, 1, 4], 0.5);
        let embedding = format!("{front}.ple_embedding");
        let [first, second] = HEADS.map(u64::cast_signed);
        self.numbers(&format!("{embedding}.layer_multipliers"), &[12_345_679, 7_654_321, 33_333]);
        self.numbers(&format!("{embedding}.ngram_heads_vocab_sizes"), &[first, second]);
        self.numbers(&format!("{embedding}.ngram_heads_offsets"), &[0, first]);
        let shape = [SHARD_ROWS, ROW];
        for shard in 0..8 {
            let codes = self.codes(SHARD_ROWS * ROW);
            let name = |naming: &str| format!("{ROWS}.{naming}{shard}.weight");
            match table {
                Table::Scaled(.., naming) => self.raw(&name(naming), "F8_E4M3", &shape, &codes),
                Table::Multiplied(dtype, scale) => {
                    // The exact product in double precision, then rounded once.
                    let values = codes.iter().map(|code| {
                        let exact = f64::from(quant::f8_to_f32(*code)) * f64::from(scale);
                        exact as f32
                    });
                    let bytes: Vec<u8> = match dtype {
                        "F32" => values.flat_map(f32::to_le_bytes).collect(),
                        _ => values.flat_map(exactly_bf16).collect(),
                    };
                    self.raw(&name("shard_"), dtype, &shape, &bytes);
                }
            }
        }
        if let Table::Scaled(dtype, shape, bytes, _) = table {
            self.raw(&format!("{ROWS}.weight_scale"), dtype, shape, bytes);
        }
    }
}

fn bf16(value: f32) -> [u8; 2] {
    *value.to_le_bytes().last_chunk().unwrap()
}

fn exactly_bf16(value: f32) -> [u8; 2] {
    assert_eq!(value.to_bits() & 0xffff, 0, "{value} has no more bits than BF16");
    bf16(value)
}

/// A folder whose tensors are the same whatever the table is.
fn write(path: &Path, table: Table<'_>) {
    std::fs::create_dir_all(path).unwrap();
    let mut folder = Folder { header: Map::new(), data: Vec::new(), state: 1 };
    folder.floats("embed_tokens.weight", &[VOCAB, HIDDEN], 1.0);
    folder.floats("lm_head.weight", &[VOCAB, HIDDEN], 0.5);
    folder.streams("hyper_connection_mixer", false);
    for layer in 0..2 {
        folder.layer(layer, table);
    }
    let header = Value::Object(folder.header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(folder.data);
    std::fs::write(path.join("model.safetensors"), file).unwrap();
    let config = json!({
        "model_type": "qwen4_exp",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "text_config": {
            "model_type": "qwen4_exp_text", "hidden_size": HIDDEN, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "moe_intermediate_size": HIDDEN, "shared_expert_intermediate_size": HIDDEN,
            "num_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": VOCAB,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
            "hidden_act": "silu", "eos_token_id": 1, "output_gate_type": "sigmoid",
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25
            },
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "hc_count": 4, "hc_lowrank": 32, "ple_layer_ids": [2], "ple_embed_dim": 2 * ROW,
            "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 1,
            "split_ngram_parts": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4,
        },
    });
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
}

fn sakia(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.args(args).env_remove("SAKIA_MODEL").output().unwrap()
}

fn run(args: &[&str]) -> String {
    let output = sakia(args);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Enough tokens for selected attention, and for n-grams that come again.
const IDS: &str =
    "5 9 13 2 7 7 3 11 30 31 32 8 1 5 9 13 2 7 20 21 22 23 40 41 42 150 151 5 9 13 2 7";

fn logits(model: &Path, activations: &str) -> Vec<u8> {
    let out = tempfile::NamedTempFile::new().unwrap();
    let args = ["logits", "-m", path(model), "--out", path(out.path()), "--ids", IDS];
    let more = ["--memory", "1GiB", "--threads", "2", "--activations", activations];
    run(&[&args[..], &more].concat());
    let bytes = std::fs::read(out.path()).unwrap();
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let values = bytes[header..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    assert!(values.clone().all(f32::is_finite), "{}", model.display());
    assert!(values.clone().any(|value| value.abs() > 1e-3), "they say something");
    bytes
}

fn packed(model: &Path) -> PathBuf {
    let out = model.with_extension("sakia");
    run(&["pack", "-m", path(model), "--out", path(&out)]);
    out
}

#[test]
fn a_table_with_one_scale_gives_the_bits_of_its_products() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // Rounded products, which single precision holds; and exact ones, which BF16 holds too.
    let rounded = 0.003_71_f32;
    let exact = 1.0 / 256.0;
    let (wide, narrow) = (rounded.to_le_bytes(), bf16(exact));
    for (name, table, products) in [
        ("f32", Table::Scaled("F32", &[], &wide, "shard_"), Table::Multiplied("F32", rounded)),
        ("bf16", Table::Scaled("BF16", &[1], &narrow, "shards."), Table::Multiplied("BF16", exact)),
    ] {
        let (scaled, other) = (at(name), at(&format!("{name}-products")));
        write(&scaled, table);
        write(&other, products);
        let pack = packed(&scaled);
        for activations in ["f32", "q8"] {
            let expected = logits(&other, activations);
            assert!(logits(&scaled, activations) == expected, "{name} {activations}: folder");
            assert!(logits(&pack, activations) == expected, "{name} {activations}: pack");
        }
        assert!(run(&["verify", "-m", path(&scaled), "--deep"]).contains("whole checkpoint"));
        assert!(run(&["verify", "-m", path(&pack), "--deep"]).contains("whole pack"));
        let again = at("again.sakia");
        run(&["pack", "-m", path(&pack), "--out", path(&again)]);
        let bytes = |file: &Path| std::fs::read(file).unwrap();
        assert!(bytes(&pack) == bytes(&again), "a pack of a pack is the pack");
        std::fs::remove_file(&again).unwrap();
    }
    assert!(logits(&at("f32"), "q8") != logits(&at("bf16"), "q8"), "the scale matters");
}

#[test]
fn a_table_with_one_scale_is_inspected_and_planned() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    write(&model, Table::Scaled("F32", &[], &0.002_f32.to_le_bytes(), "shard_"));
    let json = |args: &[&str], model: &Path| -> Value {
        serde_json::from_str(&run(&[args, &["-m", path(model), "--json"]].concat())).unwrap()
    };
    let pack = packed(&model);
    let (ours, of_pack) = (json(&["inspect"], &model), json(&["inspect"], &pack));
    for key in ["architecture", "tensors", "bytes", "expert_types"] {
        assert_eq!(ours[key], of_pack[key], "{key}");
    }
    assert_eq!(ours["bytes"]["n-gram table (by row)"], 8 * SHARD_ROWS * ROW);
    assert_eq!(ours["expert_types"]["FP8-F32"], 2 * 3 * EXPERTS);
    let plan = |model: &Path| json(&["plan", "--memory", "1GiB"], model);
    let named = |plan: &Value| -> Vec<Value> {
        let terms = plan["details"].as_array().unwrap().iter();
        terms.filter(|term| term["name"] == "n-gram block").cloned().collect()
    };
    let (ours, of_pack) = (named(&plan(&model)), named(&plan(&pack)));
    assert_eq!(ours, of_pack);
    assert_eq!(ours.len(), 1);
}

#[test]
fn a_scale_that_no_writer_can_mean_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, -0.25] {
        write(&model, Table::Scaled("F32", &[1], &scale.to_le_bytes(), "shard_"));
        let out = folder.path().join("out.npy");
        let output = sakia(&["logits", "-m", path(&model), "--out", path(&out), "--ids", IDS]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        let words = [format!("{ROWS}.weight_scale` is {scale}"), "greater than 0".to_owned()];
        assert!(words.iter().all(|words| said.contains(words)), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}
