//! Configurations and layouts of the families: what is accepted, what is refused, and with which word.

use checkpoint::{
    DeltaNetBa, DeltaNetInput, GateActivation, HeadOrder, HyperShape, InputTensors, LayerKind,
    MixerTensors,
};
use quant::BlockType;

use crate::support::{EXPERTS, Gguf, HIDDEN, VOCAB, Value, WIDTH, block, streams, tiny};

const FAMILIES: [&str; 4] = ["qwen3moe", "qwen3next", "qwen35moe", "qwen4exp"];

#[test]
fn every_family_is_read_as_its_keys_say() {
    for family in FAMILIES {
        let config = tiny(family).model().unwrap().config;
        let hybrid = family != "qwen3moe";
        assert_eq!(config.family.to_string(), family);
        assert_eq!((config.n_layers, config.n_draft_layers, config.hidden), (2, 0, 64));
        assert_eq!((config.heads, config.kv_heads, config.head_dim), (4, 2, 16));
        assert_eq!(config.rotary_dim, if hybrid { 8 } else { 16 });
        assert_eq!((config.vocab, config.context_length), (VOCAB as u32, 128));
        assert_eq!(
            (config.n_experts, config.top_k, config.expert_width),
            (EXPERTS as u32, 2, WIDTH as u32)
        );
        assert_eq!(config.shared_width, hybrid.then_some(96));
        assert_eq!((config.gated_attention, config.norm_topk), (hybrid, true));
        assert_eq!(config.rope_theta.to_bits(), 1e6_f64.to_bits());
        let first = if hybrid { LayerKind::DeltaNet } else { LayerKind::Attention };
        assert_eq!(config.layers, [first, LayerKind::Attention]);
        let order = config.delta_net.map(|shape| shape.head_order);
        let expected = match family {
            "qwen3moe" => None,
            "qwen3next" => Some(HeadOrder::Grouped),
            _ => Some(HeadOrder::Tiled),
        };
        assert_eq!(order, expected, "{family}");
        let flash = family == "qwen4exp";
        let gate = if flash { GateActivation::Sigmoid } else { GateActivation::Silu };
        assert!(config.delta_net.is_none_or(|shape| shape.gate == gate), "{family}");
        assert_eq!(config.hyper, flash.then_some(HyperShape { streams: 4, rank: 16 }));
        assert_eq!((config.indexer.is_some(), config.ngram.is_some()), (flash, flash));
    }
}

#[test]
fn streams_indexer_and_ngram_table_are_read_as_their_keys_say() {
    let model = tiny("qwen4exp").model().unwrap();
    assert_eq!(model.warnings, [""; 0]);
    let indexer = model.config.indexer.unwrap();
    assert_eq!((indexer.heads, indexer.dim, indexer.ratio, indexer.blocks()), (2, 8, 4, 2));
    let shape = model.config.ngram.unwrap();
    assert_eq!((shape.layer, shape.ngram_size, shape.heads_per_ngram), (0, 3, 1));
    assert_eq!((shape.eos, shape.conv_kernel, shape.width(), shape.table_rows()), (1, 4, 64, 24));
    let table = model.ngram_table.unwrap();
    assert_eq!((table.rows(), table.row_width(), table.row_bytes()), (32, 32, 18));
    let piece = table.pieces(5, 2).0[0];
    assert_eq!((piece.offset, piece.bytes), (table.tensor.offset + 5 * 18, 36));
    let layers = model.tensors.layers;
    assert!(layers[0].ngram.is_some() && layers[1].ngram.is_none());
    assert!(matches!(&layers[0].mixer_input, InputTensors::Streams(s) if s.inject.is_some()));
    assert!(matches!(model.tensors.head_input, InputTensors::Streams(s) if s.inject.is_none()));
    assert!(matches!(&layers[1].mixer, MixerTensors::Attention(a) if a.indexer.is_some()));
}

#[test]
fn keys_of_streams_indexer_and_ngram_table_are_checked() {
    let (numbers, u32s) = (Value::U64s, Value::U32s);
    let cases: [(&str, Value, &str); 27] = [
        ("hyper_connection.count", Value::U32(0), "config"),
        ("hyper_connection.count", Value::U32(17), "config"),
        ("hyper_connection.count", Value::U32(2), "shape"),
        ("hyper_connection.low_rank", Value::U32(8), "shape"),
        ("attention.indexer.head_count", Value::U32(3), "shape"),
        ("attention.indexer.key_length", Value::U32(4), "config"),
        ("attention.indexer.top_k", Value::U32(3), "config"),
        ("attention.compress_ratios", u32s(vec![4]), "config"),
        ("attention.compress_ratios", u32s(vec![7, 2]), "accept"),
        ("attention.compress_ratios", u32s(vec![0, 2000]), "config"),
        ("attention.compress_ratios", Value::I32s(vec![0, -4]), "config"),
        ("attention.compress_ratios", Value::U32(4), "config"),
        ("ple.layers", u32s(vec![2]), "config"),
        ("ple.layers", u32s(vec![0, 1]), "unsupported"),
        ("ple.layers", u32s(vec![1]), "missing"),
        ("ple.layers", u32s(vec![]), "unsupported"),
        ("ple.ngram_size", Value::U32(1), "config"),
        ("ple.ngram_size", Value::U32(4), "config"),
        ("ple.heads_per_ngram", Value::U32(2), "config"),
        ("ple.eos_token_id", Value::U32(VOCAB as u32), "config"),
        ("ple.layer_multipliers", numbers(vec![1, 3, 4]), "config"),
        ("ple.layer_multipliers", numbers(vec![1, 3, (1 << 62) + 1]), "config"),
        ("ple.layer_multipliers", numbers(vec![1, 3, 5]), "accept"),
        ("ple.head_vocab_sizes", numbers(vec![11, 15]), "config"),
        ("ple.head_vocab_sizes", numbers(vec![11, 17]), "accept"),
        // More rows than the table has.
        ("ple.head_vocab_sizes", numbers(vec![11, 23]), "shape"),
        ("ple.head_offsets", numbers(vec![0, 12]), "config"),
    ];
    for (key, value, expected) in cases {
        let mut file = tiny("qwen4exp");
        file.set(&format!("qwen4exp.{key}"), value.clone());
        assert_eq!(file.class(), expected, "{key} {value:?}");
    }
}

#[test]
fn ngram_constants_of_another_derivation_and_ratios_of_zero_are_warned_about() {
    let mut file = tiny("qwen4exp");
    file.set("qwen4exp.ple.layer_multipliers", Value::U64s(vec![1, 3, 5]));
    file.set("qwen4exp.ple.head_vocab_sizes", Value::U64s(vec![11, 17]));
    file.set("qwen4exp.attention.compress_ratios", Value::I32s(vec![0, 0]));
    let model = file.model().unwrap();
    let (indexer, shape) = (model.config.indexer.unwrap(), model.config.ngram.unwrap());
    assert_eq!((indexer.ratio, shape.multipliers, shape.head_sizes[1]), (4, vec![1, 3, 5], 17));
    let words = ["compress_ratios` is 0 for 1", "usual derivation", "17 is not the next prime"];
    assert_eq!(model.warnings.len(), 3, "{:?}", model.warnings);
    for (warning, word) in model.warnings.iter().zip(words) {
        assert!(warning.contains(word), "{warning}");
    }
}

#[test]
fn a_draft_block_is_set_aside_and_one_that_is_not_understood_is_warned_about() {
    let mut file = tiny("qwen4exp");
    file.set("qwen4exp.block_count", Value::U32(3));
    file.set("qwen4exp.nextn_predict_layers", Value::U32(1));
    file.set("qwen4exp.attention.compress_ratios", Value::I32s(vec![0, 4, 0]));
    block(&mut file, "qwen4exp", 2, true);
    streams(&mut file, "blk.2.nextn.hc_head", false);
    file.tensor("blk.2.nextn.enorm.weight", &[HIDDEN], BlockType::F32);
    file.tensor("blk.2.nextn.hnorm.weight", &[4 * HIDDEN], BlockType::F32);
    file.tensor("blk.2.nextn.eh_proj.weight", &[2 * HIDDEN, HIDDEN], BlockType::Q8_0);
    let model = file.model().unwrap();
    assert_eq!((model.config.n_layers, model.warnings.as_slice()), (2, &[][..]));
    let draft = model.draft.unwrap();
    assert!(matches!(draft.layer.mixer, MixerTensors::Attention(a) if a.indexer.is_some()));
    assert_eq!(draft.experts.gate.name, "blk.2.ffn_gate_exps.weight");
    // An embedding of its own would have to be used.
    file.tensor("blk.2.nextn.embed_tokens.weight", &[HIDDEN, 32], BlockType::F32);
    let model = file.model().unwrap();
    assert!(model.draft.is_none() && model.warnings[0].contains("embed_tokens"));
    file.remove_tensor("blk.2.nextn.embed_tokens.weight");
    file.remove_tensor("blk.2.nextn.hc_head_up.weight");
    let model = file.model().unwrap();
    assert!(model.draft.is_none() && model.warnings.len() == 1);
    let warning = &model.warnings[0];
    assert!(warning.contains("nextn.hc_head_up") && !warning.contains('\n'), "{warning}");
}

#[test]
fn every_number_of_experts_may_be_chosen_from_one_to_all() {
    for top_k in 0..=EXPERTS as u32 + 1 {
        let mut file = tiny("qwen3moe");
        file.set("qwen3moe.expert_used_count", Value::U32(top_k));
        let good = (1..=EXPERTS as u32).contains(&top_k);
        assert_eq!(file.class(), if good { "accept" } else { "config" }, "{top_k}");
    }
}

#[test]
fn missing_and_impossible_keys_are_config_errors() {
    for family in FAMILIES {
        for key in [
            "block_count",
            "context_length",
            "embedding_length",
            "attention.head_count",
            "expert_count",
            "expert_used_count",
            "attention.layer_norm_rms_epsilon",
            "rope.freq_base",
        ] {
            let mut file = tiny(family);
            file.remove(&format!("{family}.{key}"));
            assert_eq!(file.class(), "config", "{family} without {key}");
            file.set(&format!("{family}.{key}"), Value::Str("7".to_owned()));
            assert_eq!(file.class(), "config", "{family} with text in {key}");
            file.set(&format!("{family}.{key}"), Value::F32(f32::NAN));
            assert_eq!(file.class(), "config", "{family} with NaN in {key}");
            file.set(&format!("{family}.{key}"), Value::I32(-1));
            assert_eq!(file.class(), "config", "{family} with -1 in {key}");
        }
    }
}

#[test]
fn hybrids_say_how_they_rotate_and_recur() {
    for key in [
        "rope.dimension_count",
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.time_step_rank",
        "ssm.inner_size",
    ] {
        let mut file = tiny("qwen3next");
        file.remove(&format!("qwen3next.{key}"));
        assert_eq!(file.class(), "config", "without {key}");
    }
}

#[test]
fn keys_that_contradict_each_other_or_a_limit_are_config_errors() {
    for (what, key, value) in [
        ("rotation wider than a head", "rope.dimension_count", Value::U32(18)),
        ("odd rotation", "rope.dimension_count", Value::U32(7)),
        ("value heads not a multiple", "ssm.group_count", Value::U32(3)),
        ("inner size not a multiple", "ssm.inner_size", Value::U32(95)),
        ("value width unlike key width", "attention.value_length", Value::U32(8)),
        ("all blocks are drafts", "nextn_predict_layers", Value::U32(2)),
        ("rope base 1", "rope.freq_base", Value::F32(1.0)),
        ("more layers than the limit", "block_count", Value::U32(1025)),
        ("more experts than the limit", "expert_count", Value::U32(4097)),
    ] {
        let mut file = tiny("qwen3next");
        file.set(&format!("qwen3next.{key}"), value);
        assert_eq!(file.class(), "config", "{what}");
    }
}

#[test]
fn per_layer_arrays_count_when_they_agree() {
    let key = "qwen3next.attention.head_count_kv";
    for (values, expected) in [
        (vec![0, 2], "accept"),
        (vec![2, 2], "accept"),
        (vec![1, 2], "config"),
        (vec![0, 0], "config"),
    ] {
        let mut file = tiny("qwen3next");
        file.set(key, Value::U32s(values.clone()));
        assert_eq!(file.class(), expected, "{values:?}");
        file.set(key, Value::I32s(values.iter().map(|v| *v as i32).collect()));
        assert_eq!(file.class(), expected, "{values:?}");
    }
}

#[test]
fn recurrent_layers_override_the_interval() {
    let flags = |flags: &[bool]| {
        let mut file = tiny("qwen3next");
        file.set("qwen3next.full_attention_interval", Value::U32(1));
        file.set("qwen3next.attention.recurrent_layers", Value::Bools(flags.to_vec()));
        file
    };
    assert_eq!(flags(&[true, false]).class(), "accept");
    // The tensors are those of DeltaNet, then attention.
    assert_eq!(flags(&[false, true]).class(), "missing");
    assert_eq!(flags(&[true]).class(), "config");
    assert_eq!(flags(&[true, false, true]).class(), "config");
    let mut file = flags(&[]);
    file.remove("qwen3next.attention.recurrent_layers");
    assert_eq!(file.class(), "missing");
    // Without either key every fourth layer is attention: here the second is not.
    file.remove("qwen3next.full_attention_interval");
    assert_eq!(file.class(), "missing");
}

#[test]
fn draft_blocks_are_known_and_left_out() {
    for (family, nextn, expected) in [
        ("qwen3next", Some(1), "accept"),
        ("qwen35moe", Some(1), "accept"),
        // A third block that the metadata takes for trunk, or does not know of, has tensors that nobody would use.
        ("qwen3next", None, "unsupported"),
    ] {
        let mut file = tiny(family);
        file.set(&format!("{family}.block_count"), Value::U32(3));
        file.set(&format!("{family}.full_attention_interval"), Value::U32(2));
        file.set(
            &format!("{family}.attention.recurrent_layers"),
            Value::Bools(vec![true, false, false]),
        );
        block(&mut file, family, 2, true);
        for name in ["enorm", "hnorm", "shared_head_norm"] {
            file.tensor(&format!("blk.2.nextn.{name}.weight"), &[HIDDEN], BlockType::F32);
        }
        file.tensor("blk.2.nextn.eh_proj.weight", &[2 * HIDDEN, HIDDEN], BlockType::Q8_0);
        if let Some(nextn) = nextn {
            file.set(&format!("{family}.nextn_predict_layers"), Value::U32(nextn));
        }
        assert_eq!(file.class(), expected, "{family}, {nextn:?}");
        if nextn.is_some() {
            let model = file.model().unwrap();
            assert_eq!((model.config.n_layers, model.config.n_draft_layers), (2, 1));
            assert_eq!((model.records.n_layers(), model.config.layers.len()), (2, 2));
            assert!(model.draft.is_some() && model.warnings.is_empty(), "{:?}", model.warnings);
        }
    }
}

#[test]
fn tensors_that_nobody_uses_are_refused() {
    for (what, name, ne) in [
        ("a bias", "blk.0.attn_q.bias", vec![64]),
        ("rope factors", "rope_freqs.weight", vec![8]),
        ("a shared expert", "blk.1.ffn_up_shexp.weight", vec![HIDDEN, 96]),
        ("a block that is not there", "blk.2.attn_norm.weight", vec![HIDDEN]),
        ("no block at all", "blk.x.attn_norm.weight", vec![HIDDEN]),
    ] {
        let mut file = tiny("qwen3moe");
        file.tensor(name, &ne, BlockType::F32);
        assert_eq!(file.class(), "unsupported", "{what}");
    }
    // Fewer blocks by the metadata than there are.
    let mut file = tiny("qwen3moe");
    file.set("qwen3moe.block_count", Value::U32(1));
    assert_eq!(file.class(), "unsupported");
    let mut file = tiny("qwen3moe");
    file.tensor("blk.0.attn_q.bias", &[64], BlockType::F32);
    file.tensor("blk.1.attn_q.bias", &[64], BlockType::F32);
    let text = file.model().unwrap_err().to_string();
    assert!(text.contains("`blk.0.attn_q.bias` and 1 more:"), "{text}");
}

#[test]
fn every_tensor_is_needed_and_its_shape_checked() {
    for family in FAMILIES {
        for index in 0..tiny(family).tensors.len() {
            let name = tiny(family).tensors[index].name.clone();
            let mut file = tiny(family);
            file.remove_tensor(&name);
            // The head may be the embedding; widths inside experts can be read off `down` only if it is there.
            let expected = if name == "output.weight" { "accept" } else { "missing" };
            assert_eq!(file.class(), expected, "{family} without {name}");
            if let Err(error) = file.model() {
                let text = error.to_string();
                let twin = name == "blk.0.ssm_beta.weight" && text.contains("ssm_ba");
                assert!(text.contains(&name) || twin, "{text}");
            }
            let mut file = tiny(family);
            file.find(&name).ne.last_mut().map(|n| *n *= 2).unwrap();
            // A longer vocabulary contradicts the tokens before it contradicts the head.
            let expected = match name.as_str() {
                "token_embd.weight" => "config",
                // Tables are padded.
                "per_layer_token_embd.weight" => "accept",
                _ => "shape",
            };
            assert_eq!(file.class(), expected, "{family} with a longer {name}");
            if expected == "shape" {
                let text = file.model().unwrap_err().to_string();
                assert!(
                    text.contains(&name)
                        && text.contains("found shape [")
                        && text.contains("needed ["),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn leading_ones_in_a_shape_do_not_matter() {
    let mut file = tiny("qwen3next");
    file.find("blk.0.ffn_gate_inp_shexp.weight").ne = vec![HIDDEN, 1];
    file.find("blk.0.ssm_conv1d.weight").ne = vec![4, 160, 1];
    assert_eq!(file.class(), "accept");
    file.find("blk.0.ffn_gate_inp_shexp.weight").ne = vec![1, HIDDEN];
    assert_eq!(file.class(), "shape");
}

#[test]
fn a_file_without_a_head_ties_it_to_the_embedding() {
    let mut file = tiny("qwen3moe");
    file.remove_tensor("output.weight");
    let tensors = file.model().unwrap().tensors;
    assert_eq!(tensors.output, tensors.embed);
}

#[test]
fn widths_may_be_left_to_the_tensors() {
    let mut file = tiny("qwen35moe");
    file.remove("qwen35moe.expert_feed_forward_length");
    file.remove("qwen35moe.expert_shared_feed_forward_length");
    let config = file.model().unwrap().config;
    assert_eq!((config.expert_width, config.shared_width), (WIDTH as u32, Some(96)));
    // A hybrid without any shared expert is no hybrid.
    for layer in 0..2 {
        for part in ["ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"] {
            file.remove_tensor(&format!("blk.{layer}.{part}.weight"));
        }
    }
    assert_eq!(file.class(), "config");
}

#[test]
fn legacy_and_split_projections_of_qwen3next_are_told_apart() {
    let mixer = |file: &Gguf| match file.model().unwrap().tensors.layers[0].mixer.clone() {
        MixerTensors::DeltaNet(tensors) => tensors,
        MixerTensors::Attention(_) => panic!("the first layer is DeltaNet"),
    };
    let new = mixer(&tiny("qwen3next"));
    assert!(
        matches!(new.input, DeltaNetInput::Split { .. })
            && matches!(new.ba, DeltaNetBa::Grouped { .. })
    );
    let legacy = |file: &mut Gguf| {
        file.remove_tensor("blk.0.attn_qkv.weight").remove_tensor("blk.0.attn_gate.weight");
        file.tensor("blk.0.ssm_in.weight", &[HIDDEN, 256], BlockType::Q8_0);
    };
    let mut file = tiny("qwen3next");
    legacy(&mut file);
    assert!(matches!(mixer(&file).input, DeltaNetInput::Legacy { .. }));
    let mut file = tiny("qwen3next");
    file.remove_tensor("blk.0.ssm_ba.weight");
    file.tensor("blk.0.ssm_beta.weight", &[HIDDEN, 4], BlockType::Q8_0);
    file.tensor("blk.0.ssm_alpha.weight", &[HIDDEN, 4], BlockType::Q8_0);
    assert!(matches!(mixer(&file).ba, DeltaNetBa::Split { .. }));
    // Both layouts at once contradict each other; and rows grouped by head do not go with tiled heads.
    let mut file = tiny("qwen3next");
    file.tensor("blk.0.ssm_in.weight", &[HIDDEN, 256], BlockType::Q8_0);
    assert_eq!(file.class(), "unsupported");
    let mut file = tiny("qwen35moe");
    legacy(&mut file);
    assert_eq!(file.class(), "missing");
}

#[test]
fn yarn_is_read_and_other_scalings_are_refused() {
    let key = |name: &str| format!("qwen3moe.rope.scaling.{name}");
    let scaled = |kind: &str| {
        let mut file = tiny("qwen3moe");
        file.set(&key("type"), Value::Str(kind.to_owned()));
        file.set(&key("factor"), Value::F32(4.0));
        file.set(&key("original_context_length"), Value::U32(32));
        file
    };
    let yarn = |file: &Gguf| file.model().unwrap().config.rope_scaling;
    let plain = yarn(&scaled("yarn")).unwrap();
    assert_eq!((plain.factor, plain.original_context), (4.0, 32.0));
    assert_eq!((plain.beta_fast, plain.beta_slow, plain.attention_factor), (32.0, 1.0, None));
    let mut file = scaled("yarn");
    file.set(&key("yarn_beta_fast"), Value::F32(16.0)).set(&key("yarn_beta_slow"), Value::F32(2.0));
    file.set(&key("attn_factor"), Value::F32(0.5));
    let full = yarn(&file).unwrap();
    assert_eq!((full.beta_fast, full.beta_slow), (16.0, 2.0));
    // Half of 0.1 ln 4 + 1.
    assert!((full.attention_factor.unwrap() - 0.569_314_718_055_994_5).abs() < 1e-15);
    assert_eq!(scaled("none").model().unwrap().config.rope_scaling, None);
    for (kind, expected) in
        [("linear", "unsupported"), ("longrope", "unsupported"), ("", "unsupported")]
    {
        assert_eq!(scaled(kind).class(), expected, "{kind}");
    }
    let mut file = scaled("linear");
    file.set(&key("factor"), Value::F32(1.0));
    assert_eq!(yarn(&file), None);
    let cases: [(&str, Value, &str); 6] = [
        ("type", Value::U32(2), "config"),
        ("factor", Value::F32(0.5), "config"),
        ("factor", Value::F32(f32::INFINITY), "config"),
        ("original_context_length", Value::U32(0), "config"),
        ("yarn_log_multiplier", Value::F32(0.1), "unsupported"),
        ("yarn_ext_factor", Value::F32(1.0), "accept"),
    ];
    for (name, value, expected) in cases {
        let mut file = scaled("yarn");
        file.set(&key(name), value.clone());
        assert_eq!(file.class(), expected, "{name} {value:?}");
    }
    for name in ["factor", "original_context_length"] {
        let mut file = scaled("yarn");
        file.remove(&key(name));
        assert_eq!(file.class(), "config", "without {name}");
    }
}

#[test]
fn keys_of_another_computation_are_refused_unless_harmless() {
    let cases: [(&str, Value, &str); 9] = [
        ("expert_gating_func", Value::U32(1), "accept"),
        ("expert_gating_func", Value::U32(2), "unsupported"),
        ("expert_weights_scale", Value::F32(1.0), "accept"),
        ("expert_weights_scale", Value::F32(2.5), "unsupported"),
        ("leading_dense_block_count", Value::U32(1), "unsupported"),
        ("attention.sliding_window", Value::U32(4096), "unsupported"),
        ("use_parallel_residual", Value::Bool(false), "accept"),
        ("use_parallel_residual", Value::Bool(true), "unsupported"),
        ("final_logit_softcapping", Value::Str("x".to_owned()), "unsupported"),
    ];
    for (key, value, expected) in cases {
        let mut file = tiny("qwen3moe");
        file.set(&format!("qwen3moe.{key}"), value.clone());
        assert_eq!(file.class(), expected, "{key} {value:?}");
    }
}

#[test]
fn a_vocabulary_that_contradicts_the_embedding_is_refused() {
    let ids = |id| Value::U32(id);
    let cases: [(&str, Value, &str); 11] = [
        ("tokens", Value::Strings(vec![String::new(); VOCAB as usize - 1]), "config"),
        ("tokens", Value::Strings(vec![String::new(); VOCAB as usize + 1]), "config"),
        ("tokens", Value::I32s(vec![0; VOCAB as usize]), "config"),
        ("token_type", Value::I32s(vec![1; 3]), "config"),
        ("scores", Value::F32s(vec![0.0; VOCAB as usize]), "accept"),
        ("scores", Value::F32s(vec![0.0; 1]), "config"),
        ("merges", Value::Str("a b".to_owned()), "config"),
        ("bos_token_id", ids(VOCAB as u32 - 1), "accept"),
        ("bos_token_id", ids(VOCAB as u32), "config"),
        ("padding_token_id", Value::I32(-1), "config"),
        ("eot_token_id", Value::Str("x".to_owned()), "config"),
    ];
    for (key, value, expected) in cases {
        let mut file = tiny("qwen3moe");
        file.set(&format!("tokenizer.ggml.{key}"), value.clone());
        assert_eq!(file.class(), expected, "{key} {value:?}");
    }
    // A file without a vocabulary runs on ids.
    let mut file = tiny("qwen3moe");
    file.keys.retain(|(key, _)| !key.starts_with("tokenizer."));
    assert_eq!(file.class(), "accept");
}

#[test]
fn merges_of_other_than_two_parts_are_counted() {
    let mut file = tiny("qwen3moe");
    let merges = ["a b", "ab", "a b c", " b", "a ", "", "Ġ t"].map(str::to_owned).to_vec();
    file.set("tokenizer.ggml.merges", Value::Strings(merges));
    let warnings = file.open().unwrap().warnings;
    assert!(warnings.len() == 1 && warnings[0].starts_with("5 of 7"), "{warnings:?}");
}
