//! Rotary embedding: how many values rotate, how fast, and what extends the context.

use super::Yarn;
use super::keys::Keys;
use crate::error::{CheckpointError, printable};
use crate::limits;
use crate::metadata::MetaValue;

/// Values of a head that rotate.
///
/// Families that rotate a part of a head say so; in the others a missing key means the whole head.
pub(super) fn rotary_dim(keys: &Keys<'_>, head_dim: u64) -> Result<u64, CheckpointError> {
    let key = "rope.dimension_count";
    let dim = if keys.family.is_hybrid() {
        keys.required(key, 2, head_dim)?
    } else {
        keys.optional(key, 2, head_dim)?.unwrap_or(head_dim)
    };
    if !dim.is_multiple_of(2) {
        let needed = format!("an even number up to the {head_dim} values of a head");
        return Err(keys.error(key, dim.to_string(), needed));
    }
    Ok(dim)
}

/// Base of the frequencies. The formulas divide by its logarithm, so 1 will not do.
pub(super) fn theta(keys: &Keys<'_>) -> Result<f64, CheckpointError> {
    keys.float("rope.freq_base", 2.0, limits::ROPE_THETA)
}

pub(super) fn scaling(keys: &Keys<'_>) -> Result<Option<Yarn>, CheckpointError> {
    let key = "rope.scaling.type";
    let kind = match keys.get(key) {
        None => "none",
        Some(MetaValue::String(kind)) => kind,
        Some(other) => {
            let needed = "the name of a scaling".to_owned();
            return Err(keys.error(key, other.kind().to_owned(), needed));
        }
    };
    match kind {
        "none" => Ok(None),
        "yarn" => yarn(keys).map(Some),
        // Interpolation by 1 is none.
        "linear" if factor(keys)? <= 1.0 => Ok(None),
        other => Err(CheckpointError::Unsupported {
            file: keys.checkpoint.metadata_file().to_owned(),
            what: format!("metadata `{}`", keys.checkpoint.metadata.spelling(&keys.name(key))),
            found: format!("`{}`", printable(other)),
            supported: "none, yarn".to_owned(),
        }),
    }
}

fn factor(keys: &Keys<'_>) -> Result<f64, CheckpointError> {
    keys.float("rope.scaling.factor", 1.0, limits::ROPE_FACTOR)
}

fn yarn(keys: &Keys<'_>) -> Result<Yarn, CheckpointError> {
    let turns =
        |key, default| keys.optional_float(key, 1e-3, 1e6).map(|turns| turns.unwrap_or(default));
    let factor = factor(keys)?;
    let context = keys.required("rope.scaling.original_context_length", 1, limits::CONTEXT)? as f64;
    // GGUF's factor is on top of the usual one, where `attention_factor` takes the place of it.
    let usual = 0.1 * libm::log(factor) + 1.0;
    let multiplier = match keys.optional_float("rope.scaling.yarn_attn_factor", 1e-3, 1e3)? {
        Some(multiplier) => Some(multiplier),
        None => keys.optional_float("rope.scaling.attn_factor", 1e-3, 1e3)?,
    };
    Ok(Yarn {
        factor,
        original_context: context,
        beta_fast: turns("rope.scaling.yarn_beta_fast", 32.0)?,
        beta_slow: turns("rope.scaling.yarn_beta_slow", 1.0)?,
        attention_factor: multiplier.map(|by| by * usual),
    })
}
