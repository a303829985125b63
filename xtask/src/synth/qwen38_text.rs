//! The JSON files beside the weights of Qwen3.8-Flash-Next, as far as a program reads them.

use serde_json::{Value, json};

use super::ngram::SHARDS;
use super::qwen38::{GROUP, Geometry, INTERVAL, NGRAM_GROUP, VOCAB, overrides};

/// Tokens of the vocabulary that are not added ones.
pub(super) const TOKENS: usize = 248_044;
/// Begins and ends a text; also what the n-gram hash takes for a token before the text.
const END_OF_TEXT: u64 = 248_044;
const END_OF_TURN: u64 = 248_046;

/// `config.json`. The seed of the n-gram hash and `norm_topk_prob` are left out, as in the published file.
pub(super) fn config(geometry: &Geometry) -> Value {
    let mut config = json!({
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "image_token_id": 248_056,
        "video_token_id": 248_057,
        "vision_start_token_id": 248_053,
        "vision_end_token_id": 248_054,
        "tie_word_embeddings": false,
        "text_config": text_config(geometry),
    });
    let quantization = quantization();
    let members = config.as_object_mut().expect("braces make an object");
    if geometry.vision {
        members.insert("vision_config".to_owned(), vision_config());
    }
    members.insert("quantization".to_owned(), quantization.clone());
    members.insert("quantization_config".to_owned(), quantization);
    // Names a program that would have to come with the weights; to be ignored.
    members.insert("model_file".to_owned(), "qwen4_exp.py".into());
    config
}

fn text_config(geometry: &Geometry) -> Value {
    let kinds = (1..=geometry.layers).map(|layer| {
        if layer.is_multiple_of(INTERVAL) { "full_attention" } else { "linear_attention" }
    });
    let mut config = json!({
        "model_type": "qwen4_exp_text",
        "attention_bias": false,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "full_attention_interval": INTERVAL,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "layer_types": kinds.collect::<Vec<_>>(),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "moe_intermediate_size": 640,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": false,
        "num_attention_heads": 24,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": geometry.layers,
        "num_key_value_heads": 2,
        "output_gate_type": "sigmoid",
        "rms_norm_eps": 1e-6,
        "shared_expert_intermediate_size": 640,
        "tie_word_embeddings": false,
        "vocab_size": VOCAB,
    });
    let own = [own_text_config(geometry), rope()];
    let members = config.as_object_mut().expect("braces make an object");
    members.extend(own.into_iter().flat_map(|own| match own {
        Value::Object(own) => own,
        _ => unreachable!("braces make an object"),
    }));
    config
}

/// What this family has and its elders have not.
fn own_text_config(geometry: &Geometry) -> Value {
    json!({
        "hc_count": 4,
        "hc_lowrank": 320,
        "heads_per_ngram": 8,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 128,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "make_ngram_vocab_size_divisible_by": SHARDS,
        "ngram_size": 3,
        "ngram_vocab_size_base": geometry.table.base,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 2560,
        // Counted from 1.
        "ple_layer_ids": [2],
        "split_ngram_parts": SHARDS,
    })
}

fn rope() -> Value {
    json!({
        "rope_parameters": {
            "mrope_interleaved": true,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000.0,
            "rope_type": "default",
        },
    })
}

fn vision_config() -> Value {
    json!({
        "model_type": "qwen4_exp",
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    })
}

fn quantization() -> Value {
    let mut all = json!({ "group_size": GROUP, "bits": 4, "mode": "affine" });
    let members = all.as_object_mut().expect("braces make an object");
    for path in overrides() {
        members.insert(path, json!({ "group_size": NGRAM_GROUP, "bits": 4 }));
    }
    all
}

/// `generation_config.json`.
pub(super) fn generation_config() -> Value {
    json!({
        "bos_token_id": END_OF_TEXT,
        "do_sample": true,
        "eos_token_id": [END_OF_TURN, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_describes_the_tensors() {
        let config = config(&Geometry::small(5, 1 << 10));
        let text = &config["text_config"];
        assert_eq!(text["layer_types"].as_array().map(Vec::len), Some(5));
        assert_eq!(text["layer_types"][3], "full_attention");
        assert_eq!(text["ngram_vocab_size_base"], 1024);
        assert!(text.get("seed").is_none() && text.get("norm_topk_prob").is_none());
        assert!(config.get("vision_config").is_none());
        let first = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_0";
        assert_eq!(config["quantization"][first]["group_size"], 32);
        assert_eq!(config["quantization"], config["quantization_config"]);
    }
}
