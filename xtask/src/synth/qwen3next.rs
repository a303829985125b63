//! Qwen3-Next 80B in the mix of 2-bit and 1.75-bit experts that a published file has.
//!
//! Types of the routed experts, the embedding, the head and the routers are those of the file. Those of the other
//! matrices are not on record; the ones here come to the same 1.06 GiB of resident weights.

use super::gguf::GgmlType::{self, F32, Iq1M, Iq2Xs, Q2K, Q3K, Q4K, Q5K};
use super::gguf::{GgufLayout, GgufTensor, Value};
use super::tokenizer::{QWEN2_ADDED, Vocabulary, is_control};

const LAYERS: u32 = 48;
const HIDDEN: u64 = 2048;
const VOCAB: u64 = 151_936;
/// Tokens that are not added ones.
const TOKENS: usize = 151_643;
const EXPERTS: u64 = 512;
/// Inside a routed expert, and inside the shared one.
const WIDTH: u64 = 512;
/// Every fourth layer is attention.
const INTERVAL: u32 = 4;

/// The type of all three matrices of a layer's routed experts.
pub const fn types_of_layer(layer: u32) -> GgmlType {
    match layer {
        0..=5 | 43..=47 => Iq2Xs,
        _ => Iq1M,
    }
}

/// The file, with tensors at multiples of `alignment`.
pub fn iq2_layout(alignment: u64) -> GgufLayout {
    GgufLayout { keys: keys(), tensors: tensors(), alignment }
}

fn keys() -> Vec<(String, Value)> {
    let text = |text: &str| Value::String(text.to_owned());
    let mut keys = vec![
        ("general.architecture".to_owned(), text("qwen3next")),
        ("general.name".to_owned(), text("Qwen3-Next 80B, synthetic")),
    ];
    for (key, number) in [
        ("block_count", LAYERS),
        ("context_length", 262_144),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", 5120),
        ("attention.head_count", 16),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 256),
        ("attention.value_length", 256),
        ("rope.dimension_count", 64),
        ("expert_count", EXPERTS as u32),
        ("expert_used_count", 10),
        ("expert_feed_forward_length", WIDTH as u32),
        ("expert_shared_feed_forward_length", WIDTH as u32),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 128),
        ("ssm.group_count", 16),
        ("ssm.time_step_rank", 32),
        ("ssm.inner_size", 4096),
        ("full_attention_interval", INTERVAL),
    ] {
        keys.push((format!("qwen3next.{key}"), Value::U32(number)));
    }
    for (key, number) in [("attention.layer_norm_rms_epsilon", 1e-6), ("rope.freq_base", 1e7)] {
        keys.push((format!("qwen3next.{key}"), Value::F32(number)));
    }
    keys.extend(vocabulary());
    keys
}

/// Types of tokens in GGUF.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

fn vocabulary() -> Vec<(String, Value)> {
    let vocabulary = Vocabulary::of(TOKENS);
    let mut tokens: Vec<String> = (0..TOKENS).map(|id| vocabulary.spelling(id)).collect();
    let mut types = vec![NORMAL; TOKENS];
    for token in QWEN2_ADDED {
        tokens.push(token.to_owned());
        types.push(if is_control(token) { CONTROL } else { USER_DEFINED });
    }
    tokens.extend((tokens.len()..VOCAB as usize).map(|id| format!("[PAD{id}]")));
    types.resize(VOCAB as usize, UNUSED);
    let merges = (0..vocabulary.merges.len()).map(|rank| vocabulary.merge(rank).join(" "));
    let id = |token| TOKENS + QWEN2_ADDED.iter().position(|t| *t == token).expect("it is added");
    let keys = [
        ("model", Value::String("gpt2".to_owned())),
        ("pre", Value::String("qwen2".to_owned())),
        ("tokens", Value::Strings(tokens)),
        ("token_type", Value::I32s(types)),
        ("merges", Value::Strings(merges.collect())),
        ("eos_token_id", Value::U32(id("<|im_end|>") as u32)),
        ("padding_token_id", Value::U32(id("<|endoftext|>") as u32)),
    ];
    keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect()
}

fn tensors() -> Vec<GgufTensor> {
    let mut tensors = Vec::new();
    let mut add = |name: String, ne: &[u64], ty| {
        tensors.push(GgufTensor { name, ne: ne.to_vec(), ty });
    };
    add("token_embd.weight".to_owned(), &[HIDDEN, VOCAB], Q2K);
    add("output_norm.weight".to_owned(), &[HIDDEN], F32);
    add("output.weight".to_owned(), &[HIDDEN, VOCAB], Q5K);
    for layer in 0..LAYERS {
        block(&mut |name, ne, ty| add(format!("blk.{layer}.{name}"), ne, ty), layer);
    }
    tensors
}

fn block(add: &mut dyn FnMut(&str, &[u64], GgmlType), layer: u32) {
    let (heads, kv_heads, head_dim) = (16, 2, 256);
    let (keys, values, value_heads, taps) = (2048, 4096, 32, 4);
    let channels = 2 * keys + values;
    add("attn_norm.weight", &[HIDDEN], F32);
    add("post_attention_norm.weight", &[HIDDEN], F32);
    if (layer + 1).is_multiple_of(INTERVAL) {
        add("attn_q.weight", &[HIDDEN, 2 * heads * head_dim], Q2K);
        add("attn_k.weight", &[HIDDEN, kv_heads * head_dim], Q2K);
        add("attn_v.weight", &[HIDDEN, kv_heads * head_dim], Q4K);
        add("attn_output.weight", &[heads * head_dim, HIDDEN], Q3K);
        add("attn_q_norm.weight", &[head_dim], F32);
        add("attn_k_norm.weight", &[head_dim], F32);
    } else {
        add("attn_qkv.weight", &[HIDDEN, channels], Q2K);
        add("attn_gate.weight", &[HIDDEN, values], Q2K);
        add("ssm_ba.weight", &[HIDDEN, 2 * value_heads], F32);
        add("ssm_conv1d.weight", &[taps, channels], F32);
        add("ssm_dt.bias", &[value_heads], F32);
        add("ssm_a", &[value_heads], F32);
        add("ssm_norm.weight", &[values / value_heads], F32);
        add("ssm_out.weight", &[values, HIDDEN], Q3K);
    }
    let ty = types_of_layer(layer);
    add("ffn_gate_inp.weight", &[HIDDEN, EXPERTS], F32);
    add("ffn_gate_exps.weight", &[HIDDEN, WIDTH, EXPERTS], ty);
    add("ffn_up_exps.weight", &[HIDDEN, WIDTH, EXPERTS], ty);
    add("ffn_down_exps.weight", &[WIDTH, HIDDEN, EXPERTS], ty);
    add("ffn_gate_inp_shexp.weight", &[HIDDEN], F32);
    add("ffn_gate_shexp.weight", &[HIDDEN, WIDTH], Q2K);
    add("ffn_up_shexp.weight", &[HIDDEN, WIDTH], Q2K);
    add("ffn_down_shexp.weight", &[WIDTH, HIDDEN], Q2K);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_published_counts_and_bytes() {
        let tensors = tensors();
        assert_eq!(tensors.len(), 843);
        let routed = |ty| {
            let routed = tensors.iter().filter(move |t| t.name.ends_with("_exps.weight"));
            routed.filter(move |t| t.ty == ty)
        };
        assert_eq!((routed(Iq2Xs).count(), routed(Iq1M).count()), (33, 111));
        let payload: u64 = [Iq2Xs, Iq1M].into_iter().flat_map(routed).map(GgufTensor::bytes).sum();
        assert_eq!(payload, 18_157_142_016);
        let all: u64 = tensors.iter().map(GgufTensor::bytes).sum();
        let resident = (all - payload) as f64 / f64::from(1 << 30);
        assert_eq!(format!("{resident:.2}"), "1.06");
        let routers = tensors.iter().filter(|t| t.name.ends_with("ffn_gate_inp.weight"));
        assert_eq!(routers.map(GgufTensor::bytes).sum::<u64>(), 192 << 20);
    }
}
