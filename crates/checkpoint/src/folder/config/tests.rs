use super::*;
use crate::source::MemorySource;

fn read_text(text: &str) -> Result<Config, CheckpointError> {
    read(Path::new("config.json"), &MemorySource(text.as_bytes()), &mut Budget::new())
}

/// A flat configuration of a family with more keys, the last of which win.
fn with(model_type: &str, more: &str) -> Result<Config, CheckpointError> {
    let comma = if more.is_empty() { "" } else { "," };
    read_text(&format!(
        r#"{{"model_type": "{model_type}", "hidden_size": 64, "num_attention_heads": 4{comma} {more}}}"#
    ))
}

fn class(outcome: Result<Config, CheckpointError>) -> String {
    outcome.err().map_or_else(
        || "accept".to_owned(),
        |error| {
            assert!(error.to_string().contains("config.json"), "{error}");
            error.class().to_string()
        },
    )
}

fn number(config: &Config, key: &str) -> Option<f64> {
    config.metadata.f64(&format!("{}.{key}", config.family))
}

#[test]
fn a_key_keeps_its_value_and_its_name() {
    let config = with("qwen3_moe", r#""num_local_experts": 8, "rope_theta": 1e6"#).unwrap();
    assert_eq!(number(&config, "expert_count"), Some(8.0));
    assert_eq!(config.metadata.spelling("qwen3moe.expert_count"), "num_local_experts");
    assert_eq!(config.metadata.spelling("qwen3moe.expert_used_count"), "num_experts_per_tok");
    assert_eq!(number(&config, "expert_used_count"), None);
    let nested = r#"{"model_type": "qwen3_5_moe", "text_config":
        {"model_type": "qwen3_5_moe_text", "num_experts": 5, "hidden_size": null}}"#;
    let nested = read_text(nested).unwrap();
    assert_eq!(nested.metadata.spelling("qwen35moe.expert_count"), "text_config.num_experts");
    assert_eq!(number(&nested, "embedding_length"), None, "null is nothing");
}

#[test]
fn a_missing_norm_topk_prob_means_what_the_class_means() {
    for (model_type, more, expected) in [
        ("qwen3_moe", "", false),
        ("qwen3_moe", r#""norm_topk_prob": true"#, true),
        ("qwen3_next", "", true),
        ("qwen3_next", r#""norm_topk_prob": false"#, false),
        ("qwen3_5_moe_text", "", true),
    ] {
        let config = with(model_type, more).unwrap();
        let key = format!("{}.expert_weights_norm", config.family);
        assert_eq!(config.metadata.bool(&key), Some(expected), "{model_type} {more}");
    }
    assert_eq!(class(with("qwen3_moe", r#""norm_topk_prob": 1"#)), "config");
}

#[test]
fn rotary_keys_are_found_in_all_three_places() {
    for more in [
        r#""head_dim": 32, "rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": null"#,
        r#""head_dim": 32, "rope_parameters":
            {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}"#,
        r#""head_dim": 32, "rope_theta": 10000000, "rope_parameters": {"rope_theta": 1e7},
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}"#,
    ] {
        let config = with("qwen3_next", more).unwrap();
        assert_eq!(number(&config, "rope.freq_base"), Some(1e7), "{more}");
        assert_eq!(number(&config, "rope.dimension_count"), Some(8.0), "{more}");
        assert_eq!(config.metadata.str("qwen3next.rope.scaling.type"), None);
    }
    // A head of 16 by the other sizes, rotated as a whole or in part by the family.
    let dims = |family| number(&with(family, "").unwrap(), "rope.dimension_count");
    assert_eq!((dims("qwen3_moe"), dims("qwen3_next")), (Some(16.0), Some(4.0)));
    for (more, expected) in [
        (r#""rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e7}"#, "config"),
        (r#""rope_parameters": []"#, "config"),
        (r#""partial_rotary_factor": 0.3"#, "config"),
        (r#""partial_rotary_factor": -1"#, "config"),
        (r#""partial_rotary_factor": "all""#, "config"),
        (r#""rope_parameters": {"full_attention": {"rope_theta": 1e7}}"#, "unsupported"),
    ] {
        assert_eq!(class(with("qwen3_moe", more)), expected, "{more}");
    }
}

#[test]
fn yarn_is_carried_over_and_its_attention_factor_is_relative() {
    let yarn = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        "beta_fast": 16, "attention_factor": 2.0}"#;
    for holder in ["rope_scaling", "rope_parameters"] {
        let config = with("qwen3_moe", &format!(r#""{holder}": {yarn}"#)).unwrap();
        assert_eq!(config.metadata.str("qwen3moe.rope.scaling.type"), Some("yarn"));
        assert_eq!(number(&config, "rope.scaling.factor"), Some(4.0));
        assert_eq!(number(&config, "rope.scaling.original_context_length"), Some(32768.0));
        assert_eq!(number(&config, "rope.scaling.yarn_beta_fast"), Some(16.0));
        let usual = 0.1 * 4_f64.ln() + 1.0;
        let multiplier = number(&config, "rope.scaling.yarn_attn_factor").unwrap();
        assert!((multiplier * usual - 2.0).abs() < 1e-12);
        let spelling = config.metadata.spelling("qwen3moe.rope.scaling.factor");
        assert_eq!(spelling, format!("{holder}.factor"));
    }
    for (more, expected) in [
        (r#""rope_scaling": {"type": "yarn", "factor": 4, "mscale": 0.7}"#, "unsupported"),
        (r#""rope_scaling": {"type": "yarn", "factor": 4, "truncate": false}"#, "unsupported"),
        (r#""rope_scaling": {"type": "yarn", "rope_type": "default"}"#, "config"),
    ] {
        assert_eq!(class(with("qwen3_moe", more)), expected, "{more}");
    }
}

#[test]
fn layer_types_are_known_words() {
    let flags = |family: &str, list: &str| {
        let config = with(family, &format!(r#""layer_types": {list}"#))?;
        let key = format!("{}.attention.recurrent_layers", config.family);
        Ok::<_, CheckpointError>(config.metadata.array(&key).cloned())
    };
    assert_eq!(
        flags("qwen3_next", r#"["linear_attention", "full_attention"]"#).unwrap(),
        Some(MetaArray::Bools(vec![true, false]))
    );
    assert_eq!(flags("qwen3_moe", r#"["full_attention"]"#).unwrap(), None);
    for (family, list, expected) in [
        ("qwen3_moe", r#"["linear_attention"]"#, "unsupported"),
        ("qwen3_next", r#"["sliding_attention"]"#, "unsupported"),
        ("qwen3_next", "[1]", "unsupported"),
        ("qwen3_next", r#""full_attention""#, "config"),
    ] {
        assert_eq!(flags(family, list).unwrap_err().class().to_string(), expected, "{list}");
    }
}

#[test]
fn what_would_change_the_computation_is_refused() {
    for (more, expected) in [
        (r#""hidden_act": "silu", "mlp_only_layers": [], "decoder_sparse_step": 1"#, "accept"),
        (r#""use_sliding_window": false, "sliding_window": 4096"#, "accept"),
        (r#""router_aux_loss_coef": 0.001, "anything": {"a": 1}"#, "accept"),
        (r#""hidden_act": "gelu""#, "unsupported"),
        (r#""attention_bias": true"#, "unsupported"),
        (r#""mlp_only_layers": [0]"#, "unsupported"),
        (r#""decoder_sparse_step": 2"#, "unsupported"),
        (r#""use_sliding_window": true"#, "unsupported"),
        (r#""attn_output_gate": true"#, "unsupported"),
        (r#""routed_scaling_factor": 2.5"#, "unsupported"),
        (r#""num_experts": 8, "num_local_experts": 16"#, "config"),
        (r#""num_experts": [8]"#, "config"),
        (r#""tie_word_embeddings": "no""#, "config"),
    ] {
        assert_eq!(class(with("qwen3_moe", more)), expected, "{more}");
    }
    assert_eq!(class(with("qwen3_next", r#""attn_output_gate": true"#)), "accept");
    assert_eq!(class(with("qwen3_next", r#""output_gate_type": "sigmoid""#)), "unsupported");
}

#[test]
fn types_of_the_whole_and_of_its_text_agree() {
    for (text, expected) in [
        (r#"{"model_type": "qwen3_5_moe", "text_config": {}}"#, "accept"),
        (r#"{"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_next"}}"#, "config"),
        (r#"{"model_type": "qwen3_5_moe", "text_config": {"model_type": "x"}}"#, "unsupported"),
        (r#"{"model_type": "qwen3_5_moe", "text_config": 1}"#, "config"),
        (r#"{"model_type": "llama"}"#, "unsupported"),
        (r#"{"model_type": 7}"#, "config"),
        (r#"{"text_config": {"model_type": "qwen3_moe"}}"#, "config"),
        ("{}", "config"),
        ("[]", "config"),
        ("", "config"),
        (r#"{"model_type": "qwen3_moe", "model_type": "qwen3_next"}"#, "config"),
    ] {
        assert_eq!(class(read_text(text)), expected, "{text}");
    }
}

#[test]
fn a_head_is_tied_where_the_whole_or_the_text_says_so_and_they_agree() {
    let tied = |text: &str| read_text(text).map(|config| config.tied);
    let nested = |outer: &str, inner: &str| {
        tied(&format!(
            r#"{{"model_type": "qwen3_5_moe"{outer}, "text_config": {{"head_dim": 8{inner}}}}}"#
        ))
    };
    let key = |flag| format!(r#", "tie_word_embeddings": {flag}"#);
    assert!(!nested("", "").unwrap());
    assert!(nested(&key(true), "").unwrap());
    assert!(nested("", &key(true)).unwrap());
    assert!(!nested(&key(false), &key(false)).unwrap());
    assert_eq!(nested(&key(true), &key(false)).unwrap_err().class().to_string(), "config");
}

#[test]
fn widths_of_value_heads_are_multiplied_and_never_wrapped() {
    let inner = |heads: &str, dim: &str| {
        let more = format!(r#""linear_num_value_heads": {heads}, "linear_value_head_dim": {dim}"#);
        with("qwen3_next", &more).map(|config| number(&config, "ssm.inner_size"))
    };
    assert_eq!(inner("4", "24").unwrap(), Some(96.0));
    assert_eq!(inner("4", "18446744073709551615").unwrap(), Some(u64::MAX as f64));
    assert_eq!(inner("4", "-1").unwrap(), Some(-1.0));
    assert_eq!(inner("4", "[]").unwrap_err().class().to_string(), "config");
}

#[test]
fn two_ends_of_a_text_are_kept() {
    let id = |more: &str, name: &str| {
        with("qwen3_moe", more).unwrap().metadata.u64(&format!("tokenizer.ggml.{name}_token_id"))
    };
    let list = r#""bos_token_id": 5, "eos_token_id": [7, 8, 9]"#;
    assert_eq!(["bos", "eos", "eot"].map(|name| id(list, name)), [Some(5), Some(7), Some(8)]);
    assert_eq!(["bos", "eos"].map(|name| id(r#""eos_token_id": 3"#, name)), [None, Some(3)]);
}

/// A configuration of the family with residual streams.
fn streams(more: &str) -> Result<Config, CheckpointError> {
    with("qwen4_exp_text", &format!(r#""output_gate_type": "sigmoid", {more}"#))
}

#[test]
fn keys_of_residual_streams_are_those_of_other_containers() {
    let config = streams(
        r#""hc_count": 4, "hc_lowrank": 320, "indexer_n_heads": 4, "indexer_kv_heads": 1,
            "indexer_compress_ratio": 4, "num_hidden_layers": 2, "ngram_size": 3,
            "heads_per_ngram": 8, "ple_embed_dim": 2560, "ple_layer_ids": [2],
            "eos_token_id": [7, 8],
            "layer_types": ["indexed_attention", "qwen_sparse_attention", "linear_attention"]"#,
    )
    .unwrap();
    assert_eq!(number(&config, "hyper_connection.count"), Some(4.0));
    assert_eq!(number(&config, "embedding_length_per_layer_input"), Some(160.0));
    assert_eq!(number(&config, "ple.eos_token_id"), Some(7.0));
    let array = |key: &str| config.metadata.array(&format!("qwen4exp.{key}")).cloned();
    assert_eq!(array("attention.compress_ratios"), Some(MetaArray::U64s(vec![4, 4])));
    assert_eq!(array("ple.layers"), Some(MetaArray::U64s(vec![1])), "counted from 0 elsewhere");
    let flags = MetaArray::Bools(vec![false, false, true]);
    assert_eq!(array("attention.recurrent_layers"), Some(flags));
    assert_eq!(config.metadata.bool("qwen4exp.expert_weights_norm"), Some(true));
    for (more, expected) in [
        (r#""ple_layer_ids": [0]"#, "config"),
        (r#""ple_layer_ids": 2"#, "config"),
        (r#""ple_embed_dim": 5, "ngram_size": 3, "heads_per_ngram": 1"#, "config"),
        (r#""indexer_compress_ratio": 0"#, "config"),
        (r#""indexer_kv_heads": 2"#, "unsupported"),
        (r#""num_hidden_layers": 18446744073709551615, "indexer_compress_ratio": 4"#, "accept"),
    ] {
        assert_eq!(class(streams(more)), expected, "{more}");
    }
    // Without the key it would be another activation, which nobody trained.
    assert_eq!(class(with("qwen4_exp", "")), "unsupported");
}
