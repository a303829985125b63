//! Keys that change the computation if they have any other value than those that the families are known with.
//!
//! Unknown keys are ignored: most describe training. These are known, and a model that sets them differently would be
//! run wrongly.

use super::Reader;
use crate::config::Family;
use crate::error::CheckpointError;
use crate::json::Json;

/// A value that changes nothing.
#[derive(Clone, Copy)]
enum Harmless {
    Is(bool),
    Number(f64),
    Text(&'static str),
    /// A list of nothing.
    Empty,
}

use Harmless::{Empty, Is, Number, Text};

impl Harmless {
    fn is(self, value: &Json) -> bool {
        match self {
            Is(flag) => value.bool() == Some(flag),
            Number(number) => value.f64() == Some(number),
            Text(text) => value.text() == Some(text),
            Empty => value.list().is_some_and(<[Json]>::is_empty),
        }
    }

    fn shown(self) -> String {
        match self {
            Is(flag) => flag.to_string(),
            Number(number) => number.to_string(),
            Text(text) => text.to_owned(),
            Empty => "an empty list".to_owned(),
        }
    }
}

const ALL: [(&str, &[Harmless]); 22] = [
    ("attention_bias", &[Is(false)]),
    ("attn_logit_softcapping", &[Number(0.0)]),
    ("decoder_sparse_step", &[Number(1.0)]),
    ("embedding_multiplier", &[Number(1.0)]),
    ("final_logit_softcapping", &[Number(0.0)]),
    ("first_k_dense_replace", &[Number(0.0)]),
    ("hidden_act", &[Text("silu"), Text("swish")]),
    ("indexer_kv_heads", &[Number(1.0)]),
    ("logit_scale", &[Number(1.0)]),
    ("logits_scaling", &[Number(1.0)]),
    ("mlp_bias", &[Is(false)]),
    ("mlp_only_layers", &[Empty]),
    ("moe_layer_freq", &[Number(1.0)]),
    ("moe_router_enable_expert_bias", &[Is(false)]),
    ("n_group", &[Number(0.0), Number(1.0)]),
    ("n_shared_experts", &[Number(0.0), Number(1.0)]),
    ("residual_multiplier", &[Number(1.0)]),
    ("routed_scaling_factor", &[Number(1.0)]),
    ("scoring_func", &[Text("softmax")]),
    ("topk_group", &[Number(0.0), Number(1.0)]),
    ("use_qk_norm", &[Is(true)]),
    ("use_sliding_window", &[Is(false)]),
];

pub(super) fn check(reader: &Reader<'_>) -> Result<(), CheckpointError> {
    let gated = reader.family.is_hybrid();
    let output_gate: &[Harmless] = match reader.family {
        Family::Qwen3Moe => &[],
        Family::Qwen3Next | Family::Qwen35Moe => &[Text("silu"), Text("swish")],
        Family::Qwen4Exp => &[Text("sigmoid")],
    };
    let own = [("attn_output_gate", &[Is(gated)][..]), ("output_gate_type", output_gate)];
    if reader.family == Family::Qwen4Exp && reader.get("output_gate_type").is_none() {
        // Then it is the activation of the experts, which no model of the family was trained with.
        return Err(reader.unsupported("output_gate_type", "nothing".to_owned(), "sigmoid"));
    }
    for (key, harmless) in ALL.into_iter().chain(own) {
        let Some(value) = reader.get(key) else { continue };
        if !harmless.iter().any(|harmless| harmless.is(value)) {
            let supported = match harmless {
                [] => "no such key".to_owned(),
                values => values.iter().map(|value| value.shown()).collect::<Vec<_>>().join(", "),
            };
            return Err(reader.unsupported(key, value.shown(), &supported));
        }
    }
    Ok(())
}
