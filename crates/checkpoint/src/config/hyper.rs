//! Several residual streams, and the indexer that chooses what attention sees.

use super::LayerKind;
use super::keys::Keys;
use crate::error::CheckpointError;
use crate::limits;
use crate::metadata::{MetaArray, MetaValue};

/// Positions of a block where a file says 0: what every model known so far was trained with.
const USUAL_RATIO: u64 = 4;

/// Residual streams (hyper-connections, Zhu et al. 2024, arXiv:2409.19606, in a low-rank form).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HyperShape {
    /// Streams, side by side in a row of the residual.
    pub streams: u32,
    /// Width between the two projections that make the mixing weights.
    pub rank: u32,
}

/// What chooses the tokens that attention sees.
///
/// Every `ratio` positions on the absolute grid are a block with one key. A query sees the tokens of its
/// [`Self::blocks`] best complete blocks, and those after the last complete one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexerShape {
    /// Query heads.
    pub heads: u32,
    /// Width of a query head and of the key.
    pub dim: u32,
    /// Most tokens of complete blocks that a query sees.
    pub budget_tokens: u32,
    /// Positions of a block.
    pub ratio: u32,
}

impl IndexerShape {
    /// Most complete blocks that a query sees.
    pub const fn blocks(&self) -> u32 {
        self.budget_tokens / self.ratio
    }
}

pub(super) fn streams(keys: &Keys<'_>, hidden: u64) -> Result<HyperShape, CheckpointError> {
    let key = "hyper_connection.count";
    let streams = keys.required(key, 1, limits::STREAMS)?;
    if streams * hidden > limits::WIDTH {
        let needed = format!("at most {} values in all streams", limits::WIDTH);
        return Err(keys.error(key, format!("{streams} streams of {hidden}"), needed));
    }
    let rank = keys.required("hyper_connection.low_rank", 1, limits::WIDTH)?;
    Ok(HyperShape { streams: streams as u32, rank: rank as u32 })
}

/// The indexer of all attention layers; none if the model has no such layer.
pub(super) fn indexer(
    keys: &Keys<'_>,
    layers: &[LayerKind],
    blocks: usize,
    rotary_dim: u64,
    warnings: &mut Vec<String>,
) -> Result<Option<IndexerShape>, CheckpointError> {
    if !layers.contains(&LayerKind::Attention) {
        return Ok(None);
    }
    let heads = keys.required("attention.indexer.head_count", 1, limits::HEADS)?;
    let dim = keys.required("attention.indexer.key_length", rotary_dim, limits::WIDTH)?;
    let ratio = ratio(keys, layers, blocks, warnings)?;
    let budget = keys.required("attention.indexer.top_k", ratio, limits::CONTEXT)?;
    Ok(Some(IndexerShape {
        heads: heads as u32,
        dim: dim as u32,
        budget_tokens: budget as u32,
        ratio: ratio as u32,
    }))
}

/// The ratio that all attention layers share.
///
/// Some converters write 0 for these layers too, because they know their kind under another name.
fn ratio(
    keys: &Keys<'_>,
    layers: &[LayerKind],
    blocks: usize,
    warnings: &mut Vec<String>,
) -> Result<u64, CheckpointError> {
    let key = "attention.compress_ratios";
    let needed = || format!("{blocks} numbers, one for each block");
    let listed = match keys.get(key) {
        None => return Err(keys.error(key, "nothing".to_owned(), needed())),
        Some(MetaValue::Array(MetaArray::U64s(listed))) => listed.clone(),
        Some(MetaValue::Array(MetaArray::I64s(listed))) => {
            listed.iter().map(|ratio| u64::try_from(*ratio).unwrap_or(u64::MAX)).collect()
        }
        Some(other) => return Err(keys.error(key, other.kind().to_owned(), needed())),
    };
    if ![blocks, layers.len()].contains(&listed.len()) {
        return Err(keys.error(key, format!("an array of {} values", listed.len()), needed()));
    }
    let of_attention =
        || layers.iter().zip(&listed).filter(|(kind, _)| **kind == LayerKind::Attention);
    let stated = of_attention().map(|(_, ratio)| *ratio).find(|ratio| *ratio != 0);
    let ratio = stated.unwrap_or(USUAL_RATIO);
    for (_, found) in of_attention().filter(|(_, found)| **found != 0) {
        if *found != ratio || *found > limits::COMPRESS_RATIO {
            let needed =
                format!("one number from 1 to {} for all attention layers", limits::COMPRESS_RATIO);
            return Err(keys.error(key, found.to_string(), needed));
        }
    }
    let unstated = of_attention().filter(|(_, ratio)| **ratio == 0).count();
    if unstated > 0 {
        warnings.push(format!(
            "metadata `{}` is 0 for {unstated} attention layers, a fault of some converters; {ratio} is used",
            keys.name(key)
        ));
    }
    Ok(ratio)
}
