//! A writer of tiny GGUF files, and complete tiny models of every family to change.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, CheckpointError, MemorySource, Model, bind, parse};
use quant::BlockType;

/// A file under `testdata/fixtures`, or under `$SAKIA_FIXTURES`, a larger set.
pub(crate) fn fixture(name: &str) -> PathBuf {
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures");
    std::env::var_os("SAKIA_FIXTURES").map_or_else(|| PathBuf::from(here), PathBuf::from).join(name)
}

/// A JSON file under `testdata/fixtures`.
pub(crate) fn manifest(name: &str) -> serde_json::Value {
    serde_json::from_reader(std::fs::File::open(fixture(name)).unwrap()).unwrap()
}

/// A metadata value as it is written.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    U32(u32),
    I32(i32),
    U64(u64),
    F32(f32),
    Bool(bool),
    Str(String),
    Strings(Vec<String>),
    U8s(Vec<u8>),
    U32s(Vec<u32>),
    I32s(Vec<i32>),
    U64s(Vec<u64>),
    F32s(Vec<f32>),
    Bools(Vec<bool>),
    /// Type and bytes, whatever they are.
    Raw(u32, Vec<u8>),
}

impl Value {
    fn write(&self, out: &mut Vec<u8>) {
        let array = |out: &mut Vec<u8>, kind: u32, len: usize| {
            out.extend(9_u32.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((len as u64).to_le_bytes());
        };
        let plain = |out: &mut Vec<u8>, kind: u32, bytes: &[u8]| {
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        };
        match self {
            Self::U32(v) => plain(out, 4, &v.to_le_bytes()),
            Self::I32(v) => plain(out, 5, &v.to_le_bytes()),
            Self::U64(v) => plain(out, 10, &v.to_le_bytes()),
            Self::F32(v) => plain(out, 6, &v.to_le_bytes()),
            Self::Bool(v) => plain(out, 7, &[u8::from(*v)]),
            Self::Str(v) => {
                out.extend(8_u32.to_le_bytes());
                string(out, v.as_bytes());
            }
            Self::Strings(v) => {
                array(out, 8, v.len());
                for text in v {
                    string(out, text.as_bytes());
                }
            }
            Self::U8s(v) => {
                array(out, 0, v.len());
                out.extend(v);
            }
            Self::U32s(v) => {
                array(out, 4, v.len());
                out.extend(v.iter().flat_map(|v| v.to_le_bytes()));
            }
            Self::I32s(v) => {
                array(out, 5, v.len());
                out.extend(v.iter().flat_map(|v| v.to_le_bytes()));
            }
            Self::U64s(v) => {
                array(out, 10, v.len());
                out.extend(v.iter().flat_map(|v| v.to_le_bytes()));
            }
            Self::F32s(v) => {
                array(out, 6, v.len());
                out.extend(v.iter().flat_map(|v| v.to_le_bytes()));
            }
            Self::Bools(v) => {
                array(out, 7, v.len());
                out.extend(v.iter().map(|v| u8::from(*v)));
            }
            Self::Raw(kind, bytes) => plain(out, *kind, bytes),
        }
    }
}

fn string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

/// A tensor as it is written; `ne` lists the contiguous dimension first.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) ne: Vec<u64>,
    pub(crate) block_type: BlockType,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        let row = self.block_type.row_bytes(self.ne[0] as usize).unwrap() as u64;
        row * self.ne[1..].iter().product::<u64>()
    }
}

/// A file to be written, with zeros for weights.
#[derive(Debug, Clone)]
pub(crate) struct Gguf {
    pub(crate) keys: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) alignment: u64,
}

impl Gguf {
    pub(crate) const fn new() -> Self {
        Self { keys: Vec::new(), tensors: Vec::new(), alignment: 32 }
    }

    /// Sets a key, in place if it is there.
    pub(crate) fn set(&mut self, key: &str, value: Value) -> &mut Self {
        match self.keys.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
        self
    }

    pub(crate) fn remove(&mut self, key: &str) -> &mut Self {
        let before = self.keys.len();
        self.keys.retain(|(name, _)| name != key);
        assert_eq!(self.keys.len() + 1, before, "no key {key}");
        self
    }

    pub(crate) fn tensor(&mut self, name: &str, ne: &[u64], block_type: BlockType) -> &mut Self {
        self.tensors.push(Tensor { name: name.to_owned(), ne: ne.to_vec(), block_type });
        self
    }

    pub(crate) fn find(&mut self, name: &str) -> &mut Tensor {
        let found = self.tensors.iter_mut().find(|tensor| tensor.name == name);
        found.unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub(crate) fn remove_tensor(&mut self, name: &str) -> &mut Self {
        let before = self.tensors.len();
        self.tensors.retain(|tensor| tensor.name != name);
        assert_eq!(self.tensors.len() + 1, before, "no tensor {name}");
        self
    }

    /// Everything before the padding.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            string(&mut out, key.as_bytes());
            value.write(&mut out);
        }
        let mut offset = 0_u64;
        for tensor in &self.tensors {
            string(&mut out, tensor.name.as_bytes());
            out.extend((tensor.ne.len() as u32).to_le_bytes());
            out.extend(tensor.ne.iter().flat_map(|n| n.to_le_bytes()));
            out.extend(tensor.block_type.ggml_id().expect("a type of GGML").to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset = (offset + tensor.bytes()).next_multiple_of(self.alignment);
        }
        out
    }

    /// The whole file.
    pub(crate) fn write(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        for tensor in &self.tensors {
            let end = out.len() + tensor.bytes() as usize;
            out.resize(end.next_multiple_of(self.alignment as usize), 0);
        }
        out
    }

    pub(crate) fn open(&self) -> Result<Checkpoint, CheckpointError> {
        parse(Path::new("tiny.gguf"), &MemorySource(&self.write()))
    }

    pub(crate) fn model(&self) -> Result<Model, CheckpointError> {
        bind(&self.open()?)
    }

    /// The word for the error that it gives, `accept` if none; the message must name the file.
    pub(crate) fn class(&self) -> String {
        match self.model() {
            Ok(_) => "accept".to_owned(),
            Err(error) => {
                assert!(error.to_string().contains("tiny.gguf"), "{error}");
                error.class().to_string()
            }
        }
    }
}

pub(crate) const HIDDEN: u64 = 64;
pub(crate) const EXPERTS: u64 = 6;
pub(crate) const WIDTH: u64 = 32;
pub(crate) const VOCAB: u64 = 40;

/// A complete model with two layers (DeltaNet, then attention, in the hybrid families) and a vocabulary.
pub(crate) fn tiny(family: &str) -> Gguf {
    let mut file = Gguf::new();
    file.set("general.architecture", Value::Str(family.to_owned()));
    file.set("general.name", Value::Str("tiny".to_owned()));
    let numbers = [
        ("block_count", 2),
        ("context_length", 128),
        ("embedding_length", HIDDEN as u32),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", WIDTH as u32),
    ];
    let hybrid_numbers = [
        ("expert_shared_feed_forward_length", 96),
        ("rope.dimension_count", 8),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 16),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 96),
        ("full_attention_interval", 2),
    ];
    let hybrid = family != "qwen3moe";
    for (key, value) in numbers.into_iter().chain(hybrid_numbers.into_iter().filter(|_| hybrid)) {
        file.set(&format!("{family}.{key}"), Value::U32(value));
    }
    file.set(&format!("{family}.attention.layer_norm_rms_epsilon"), Value::F32(1e-6));
    file.set(&format!("{family}.rope.freq_base"), Value::F32(1e6));
    vocabulary(&mut file);
    file.tensor("token_embd.weight", &[HIDDEN, VOCAB], BlockType::Q8_0);
    if family == "qwen4exp" {
        flash(&mut file);
    } else {
        file.tensor("output_norm.weight", &[HIDDEN], BlockType::F32);
    }
    file.tensor("output.weight", &[HIDDEN, VOCAB], BlockType::Q8_0);
    for layer in 0..2 {
        block(&mut file, family, layer, !hybrid || layer == 1);
    }
    file
}

/// What only the family with several residual streams has: 4 streams, an indexer, an n-gram table before layer 0.
fn flash(file: &mut Gguf) {
    for (key, value) in [
        ("hyper_connection.count", 4),
        ("hyper_connection.low_rank", 16),
        ("attention.indexer.head_count", 2),
        ("attention.indexer.key_length", 8),
        ("attention.indexer.top_k", 8),
        ("ple.ngram_size", 3),
        ("ple.heads_per_ngram", 1),
        ("ple.conv_kernel", 4),
        ("ple.eos_token_id", 1),
        ("embedding_length_per_layer_input", 32),
    ] {
        file.set(&format!("qwen4exp.{key}"), Value::U32(value));
    }
    file.set("qwen4exp.attention.compress_ratios", Value::I32s(vec![0, 4]));
    file.set("qwen4exp.ple.layers", Value::I32s(vec![0]));
    // By the derivation from seed 1234, for 40 tokens.
    let multipliers =
        vec![198_850_662_792_166_893, 78_689_173_079_975_285, 228_252_339_180_906_247];
    file.set("qwen4exp.ple.layer_multipliers", Value::U64s(multipliers));
    file.set("qwen4exp.ple.head_vocab_sizes", Value::U64s(vec![11, 13]));
    file.set("qwen4exp.ple.head_offsets", Value::U64s(vec![0, 11]));
    file.tensor("per_layer_token_embd.weight", &[32, 32], BlockType::Q4_0);
    streams(file, "output_hc", false);
}

/// The tensors that mix residual streams.
pub(crate) fn streams(file: &mut Gguf, name: &str, injects: bool) {
    let all = 4 * HIDDEN;
    file.tensor(&format!("{name}_norm.weight"), &[all], BlockType::F32);
    file.tensor(&format!("{name}_down.weight"), &[all, 16], BlockType::Q8_0);
    file.tensor(&format!("{name}_up.weight"), &[16, all], BlockType::F32);
    if injects {
        file.tensor(&format!("{name}_inject.weight"), &[all, 4], BlockType::F32);
    }
}

fn vocabulary(file: &mut Gguf) {
    let tokens = (0..VOCAB).map(|id| format!("t{id}")).collect();
    file.set("tokenizer.ggml.model", Value::Str("gpt2".to_owned()));
    file.set("tokenizer.ggml.tokens", Value::Strings(tokens));
    file.set("tokenizer.ggml.token_type", Value::I32s(vec![1; VOCAB as usize]));
    file.set("tokenizer.ggml.merges", Value::Strings(vec!["t 1".to_owned(), "t 2".to_owned()]));
    file.set("tokenizer.ggml.eos_token_id", Value::U32(VOCAB as u32 - 1));
}

/// The tensors of one block, by the tables of the families' GGUF layouts.
pub(crate) fn block(file: &mut Gguf, family: &str, layer: u64, attention: bool) {
    let (f32, q8) = (BlockType::F32, BlockType::Q8_0);
    let (hybrid, flash) = (family != "qwen3moe", family == "qwen4exp");
    if flash {
        streams(file, &format!("blk.{layer}.hc_attn"), true);
        streams(file, &format!("blk.{layer}.hc_ffn"), true);
    }
    let mut add = |name: &str, ne: &[u64], block_type| {
        file.tensor(&format!("blk.{layer}.{name}"), ne, block_type);
    };
    if !flash {
        add("attn_norm.weight", &[HIDDEN], f32);
        add(if hybrid { "post_attention_norm.weight" } else { "ffn_norm.weight" }, &[HIDDEN], f32);
    }
    if flash && layer == 0 {
        add("ple_key.weight", &[64, 4 * HIDDEN], q8);
        add("ple_value.weight", &[64, HIDDEN], q8);
        for norm in ["key", "query", "conv"] {
            add(&format!("ple_norm_{norm}.weight"), &[4 * HIDDEN], f32);
        }
        add("ple_conv1d.weight", &[4, 4 * HIDDEN], f32);
    }
    if flash && attention {
        add("indexer.q_proj.weight", &[HIDDEN, 16], q8);
        add("indexer.k_proj.weight", &[HIDDEN, 8], q8);
        add("indexer.q_norm.weight", &[8], f32);
        add("indexer.k_norm.weight", &[8], f32);
    }
    if attention {
        add("attn_q.weight", &[HIDDEN, if hybrid { 128 } else { 64 }], q8);
        add("attn_k.weight", &[HIDDEN, 32], q8);
        add("attn_v.weight", &[HIDDEN, 32], q8);
        add("attn_output.weight", &[64, HIDDEN], q8);
        add("attn_q_norm.weight", &[16], f32);
        add("attn_k_norm.weight", &[16], f32);
    } else {
        // 2 key heads and 4 value heads of 16 and 24: 32 + 32 + 96 channels.
        add("attn_qkv.weight", &[HIDDEN, 160], q8);
        add("attn_gate.weight", &[HIDDEN, 96], q8);
        if family == "qwen3next" {
            add("ssm_ba.weight", &[HIDDEN, 8], q8);
        } else {
            add("ssm_beta.weight", &[HIDDEN, 4], q8);
            add("ssm_alpha.weight", &[HIDDEN, 4], q8);
        }
        add("ssm_conv1d.weight", &[4, 160], f32);
        add("ssm_dt.bias", &[4], f32);
        add("ssm_a", &[4], f32);
        add("ssm_norm.weight", &[24], f32);
        add("ssm_out.weight", &[96, HIDDEN], q8);
    }
    add("ffn_gate_inp.weight", &[HIDDEN, EXPERTS], f32);
    add("ffn_gate_exps.weight", &[HIDDEN, WIDTH, EXPERTS], BlockType::Q4_0);
    add("ffn_up_exps.weight", &[HIDDEN, WIDTH, EXPERTS], BlockType::Q5_1);
    add("ffn_down_exps.weight", &[WIDTH, HIDDEN, EXPERTS], q8);
    if hybrid {
        add("ffn_gate_inp_shexp.weight", &[HIDDEN], f32);
        add("ffn_gate_shexp.weight", &[HIDDEN, 96], q8);
        add("ffn_up_shexp.weight", &[HIDDEN, 96], q8);
        add("ffn_down_shexp.weight", &[96, HIDDEN], q8);
    }
}
