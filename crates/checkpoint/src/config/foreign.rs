//! Keys that other architectures use, and that would change the computation if they meant anything here.
//!
//! Unknown keys are ignored: most describe the model to people. These describe it to programs, and a value other
//! than the harmless one is a model that this program would run wrongly.

use super::keys::Keys;
use crate::error::CheckpointError;

/// Key, values that change nothing.
const HARMLESS: [(&str, &[f64]); 19] = [
    ("attention.max_alibi_bias", &[0.0]),
    ("attention.clamp_kqv", &[0.0]),
    ("attention.scale", &[0.0]),
    ("attention.sliding_window", &[0.0]),
    ("attn_logit_softcapping", &[0.0]),
    ("embedding_scale", &[0.0, 1.0]),
    ("expert_gating_func", &[0.0, 1.0]),
    ("expert_group_count", &[0.0, 1.0]),
    ("expert_weights_scale", &[0.0, 1.0]),
    ("final_logit_softcapping", &[0.0]),
    ("interleave_moe_layer_step", &[0.0, 1.0]),
    ("leading_dense_block_count", &[0.0]),
    ("logit_scale", &[0.0, 1.0]),
    ("moe_every_n_layers", &[0.0, 1.0]),
    ("residual_scale", &[0.0, 1.0]),
    ("rope.scale_linear", &[0.0, 1.0]),
    // -1 leaves it to the program, which takes 1 for YaRN.
    ("rope.scaling.yarn_ext_factor", &[-1.0, 1.0]),
    ("rope.scaling.yarn_log_multiplier", &[0.0]),
    ("use_parallel_residual", &[0.0]),
];

pub(super) fn check(keys: &Keys<'_>) -> Result<(), CheckpointError> {
    for (key, harmless) in HARMLESS {
        let Some(value) = keys.get(key) else { continue };
        let name = keys.name(key);
        let metadata = &keys.checkpoint.metadata;
        let number = metadata
            .f64(&name)
            .or_else(|| metadata.bool(&name).map(|flag| f64::from(u8::from(flag))));
        if number.is_some_and(|number| harmless.contains(&number)) {
            continue;
        }
        return Err(CheckpointError::Unsupported {
            file: keys.checkpoint.files[0].path.clone(),
            what: format!("metadata `{name}`"),
            found: number.map_or_else(|| value.kind().to_owned(), |number| number.to_string()),
            supported: harmless.iter().map(f64::to_string).collect::<Vec<_>>().join(", "),
        });
    }
    Ok(())
}
