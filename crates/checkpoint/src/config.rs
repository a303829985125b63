//! Sizes and constants of a model, from its metadata.

mod foreign;
mod hyper;
mod keys;
mod ngram;
mod rope;

use std::fmt;

pub use self::hyper::{HyperShape, IndexerShape};
use self::keys::Keys;
pub use self::ngram::NgramShape;
use crate::Checkpoint;
use crate::directory::TensorInfo;
use crate::error::{CheckpointError, printable};
use crate::limits;
use crate::metadata::{MetaArray, MetaValue};

/// A model architecture, by its name in GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Qwen3-MoE: plain attention and experts in every layer.
    Qwen3Moe,
    /// Qwen3-Next: gated DeltaNet and gated attention, a shared expert.
    Qwen3Next,
    /// Qwen3.5-MoE: the same with other layouts.
    Qwen35Moe,
    /// Qwen3.8-Flash-Next: several residual streams, selected attention, an n-gram table.
    Qwen4Exp,
}

impl Family {
    const ALL: [Self; 4] = [Self::Qwen3Moe, Self::Qwen3Next, Self::Qwen35Moe, Self::Qwen4Exp];

    /// The value of `general.architecture`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qwen3Moe => "qwen3moe",
            Self::Qwen3Next => "qwen3next",
            Self::Qwen35Moe => "qwen35moe",
            Self::Qwen4Exp => "qwen4exp",
        }
    }

    pub(crate) const fn is_hybrid(self) -> bool {
        !matches!(self, Self::Qwen3Moe)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What mixes positions in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Attention over a KV cache.
    Attention,
    /// Gated delta rule over a recurrent state.
    DeltaNet,
}

/// Which key head a value head of the delta rule reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadOrder {
    /// `value head / (value heads / key heads)`.
    Grouped,
    /// `value head % key heads`.
    Tiled,
}

/// What a gate goes through before it multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateActivation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `sigmoid(x)`.
    Sigmoid,
}

/// Sizes of the gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetShape {
    /// Key (and query) heads.
    pub key_heads: u32,
    /// Value heads, a multiple of the key heads.
    pub value_heads: u32,
    /// Width of a key head.
    pub key_dim: u32,
    /// Width of a value head.
    pub value_dim: u32,
    /// Taps of the short convolution.
    pub conv_kernel: u32,
    /// Which key head belongs to which value head.
    pub head_order: HeadOrder,
    /// What the output gate goes through.
    pub gate: GateActivation,
}

/// YaRN context extension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Extended over original context.
    pub factor: f64,
    /// Context of the original training.
    pub original_context: f64,
    /// Rotations above which a frequency is left alone.
    pub beta_fast: f64,
    /// Rotations below which a frequency is interpolated.
    pub beta_slow: f64,
    /// What cos and sin are multiplied by, instead of `0.1 ln(factor) + 1`.
    pub attention_factor: Option<f64>,
}

/// Sizes and constants of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub family: Family,
    /// The model's own name, safe to print.
    pub name: Option<String>,
    /// Trunk layers: blocks of the file without draft layers.
    pub n_layers: u32,
    /// Draft (multi-token prediction) layers after the trunk; not run.
    pub n_draft_layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Rows of the embedding and of the head.
    pub vocab: u32,
    /// Query heads.
    pub heads: u32,
    /// Key-value heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Values of a head that rotate.
    pub rotary_dim: u32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Context extension.
    pub rope_scaling: Option<Yarn>,
    /// Epsilon of all RMS norms.
    pub rms_eps: f32,
    /// Routed experts of a layer.
    pub n_experts: u32,
    /// Experts chosen for a token.
    pub top_k: u32,
    /// Whether the chosen weights are rescaled to sum to 1.
    pub norm_topk: bool,
    /// Width inside a routed expert.
    pub expert_width: u32,
    /// Width inside the shared expert.
    pub shared_width: Option<u32>,
    /// Whether attention's output is gated by its query projection.
    pub gated_attention: bool,
    /// What mixes positions, per trunk layer.
    pub layers: Vec<LayerKind>,
    /// Sizes of the delta rule, if the family has it.
    pub delta_net: Option<DeltaNetShape>,
    /// Residual streams, if there are several.
    pub hyper: Option<HyperShape>,
    /// What chooses the tokens that attention sees, if it does not see all.
    pub indexer: Option<IndexerShape>,
    /// The n-gram table, if the family has one.
    pub ngram: Option<NgramShape>,
    /// Positions that the model was made for.
    pub context_length: u32,
}

impl ModelConfig {
    /// Whether a tensor belongs to a draft block: one of those after the trunk.
    pub(crate) fn is_draft(&self, tensor: &TensorInfo) -> bool {
        let block = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
        let drafts = self.n_layers..self.n_layers + self.n_draft_layers;
        block.and_then(|block| block.parse().ok()).is_some_and(|block| drafts.contains(&block))
    }
}

/// Reads and checks what the metadata says about the model; `warnings` gets what is odd but harmless.
///
/// # Errors
/// Class `config` or `unsupported`; `missing` or `shape` where a size is read off a tensor.
pub(crate) fn read(
    checkpoint: &Checkpoint,
    warnings: &mut Vec<String>,
) -> Result<ModelConfig, CheckpointError> {
    let family = family(checkpoint)?;
    let keys = Keys { checkpoint, family };
    foreign::check(&keys)?;
    let hybrid = family.is_hybrid();
    let blocks = keys.required("block_count", 1, limits::LAYERS)?;
    let drafts = keys.optional("nextn_predict_layers", 0, limits::LAYERS)?.unwrap_or(0);
    if drafts >= blocks {
        let needed = format!("fewer than the {blocks} blocks");
        return Err(keys.error("nextn_predict_layers", drafts.to_string(), needed));
    }
    let n_layers = blocks - drafts;
    let hidden = keys.required("embedding_length", 1, limits::WIDTH)?;
    let AttentionShape { heads, kv_heads, head_dim } = attention(&keys, hidden)?;
    let n_experts = keys.required("expert_count", 1, limits::EXPERTS)?;
    let top_k = keys.required("expert_used_count", 1, n_experts)?;
    let shared_width = if hybrid {
        Some(width(&keys, "expert_shared_feed_forward_length", "ffn_down_shexp")?)
    } else {
        None
    };
    let layers = layer_kinds(&keys, n_layers as usize, blocks as usize)?;
    let vocab = vocab(&keys)?;
    let rotary_dim = rope::rotary_dim(&keys, head_dim)?;
    let flash = family == Family::Qwen4Exp;
    Ok(ModelConfig {
        family,
        name: checkpoint.metadata.str("general.name").map(printable),
        n_layers: n_layers as u32,
        n_draft_layers: drafts as u32,
        hidden: hidden as u32,
        vocab,
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        head_dim: head_dim as u32,
        rotary_dim: rotary_dim as u32,
        rope_theta: rope::theta(&keys)?,
        rope_scaling: rope::scaling(&keys)?,
        rms_eps: keys.float("attention.layer_norm_rms_epsilon", 0.0, 1.0)? as f32,
        n_experts: n_experts as u32,
        top_k: top_k as u32,
        // Implied by the architectures in GGUF files, which have no key for it.
        norm_topk: keys.flag("expert_weights_norm")?.unwrap_or(true),
        expert_width: width(&keys, "expert_feed_forward_length", "ffn_down_exps")?,
        shared_width,
        gated_attention: hybrid,
        hyper: if flash { Some(hyper::streams(&keys, hidden)?) } else { None },
        indexer: if flash {
            hyper::indexer(&keys, &layers, blocks as usize, rotary_dim, warnings)?
        } else {
            None
        },
        ngram: if flash { ngram::read(&keys, n_layers, vocab, warnings)? } else { None },
        layers,
        delta_net: if hybrid { Some(delta_net(&keys)?) } else { None },
        context_length: keys.required("context_length", 1, limits::CONTEXT)? as u32,
    })
}

/// Experts of a layer, their width, and the width of the residual stream: what a matrix of an expert is held against.
///
/// # Errors
/// Class `config` or `unsupported`.
pub(crate) fn expert_sizes(checkpoint: &Checkpoint) -> Result<[u64; 3], CheckpointError> {
    let keys = Keys { checkpoint, family: family(checkpoint)? };
    Ok([
        keys.required("expert_count", 1, limits::EXPERTS)?,
        keys.required("expert_feed_forward_length", 1, limits::WIDTH)?,
        keys.required("embedding_length", 1, limits::WIDTH)?,
    ])
}

fn family(checkpoint: &Checkpoint) -> Result<Family, CheckpointError> {
    let file = checkpoint.files[0].path.clone();
    let Some(name) = checkpoint.metadata.str("general.architecture") else {
        let value = checkpoint.metadata.get("general.architecture");
        return Err(CheckpointError::Config {
            file,
            key: "general.architecture".to_owned(),
            found: value.map_or("nothing", MetaValue::kind).to_owned(),
            needed: "the name of an architecture".to_owned(),
        });
    };
    Family::ALL.into_iter().find(|family| family.name() == name).ok_or_else(|| {
        CheckpointError::Unsupported {
            file,
            what: "the architecture".to_owned(),
            found: format!("`{}`", printable(name)),
            supported: Family::ALL.map(Family::name).join(", "),
        }
    })
}

struct AttentionShape {
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
}

fn attention(keys: &Keys<'_>, hidden: u64) -> Result<AttentionShape, CheckpointError> {
    let heads = keys.required("attention.head_count", 1, limits::HEADS)?;
    let kv_heads = keys.optional("attention.head_count_kv", 1, limits::HEADS)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let needed = format!("a divisor of the {heads} query heads");
        return Err(keys.error("attention.head_count_kv", kv_heads.to_string(), needed));
    }
    let head_dim = match keys.optional("attention.key_length", 1, limits::WIDTH)? {
        Some(dim) => dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let needed = format!("the width of a head: {hidden} values do not split over {heads}");
            return Err(keys.error("attention.key_length", "nothing".to_owned(), needed));
        }
    };
    let value_dim = keys.optional("attention.value_length", 1, limits::WIDTH)?.unwrap_or(head_dim);
    if value_dim != head_dim {
        let needed = format!("the key length {head_dim}");
        return Err(keys.error("attention.value_length", value_dim.to_string(), needed));
    }
    Ok(AttentionShape { heads, kv_heads, head_dim })
}

/// The vocabulary is as long as the embedding; its width is checked with the other tensors.
fn vocab(keys: &Keys<'_>) -> Result<u32, CheckpointError> {
    let name = "token_embd.weight";
    let checkpoint = keys.checkpoint;
    let Some(tensor) = checkpoint.directory.get(name) else {
        return Err(CheckpointError::MissingTensor {
            file: checkpoint.files[0].path.clone(),
            tensor: name.to_owned(),
            needed: "every model embeds its tokens".to_owned(),
        });
    };
    let file = &checkpoint.files[tensor.file.get()].path;
    match tensor.shape.as_slice() {
        [vocab, _] if *vocab > limits::VOCABULARY => Err(CheckpointError::Limit {
            file: file.clone(),
            what: format!("rows of tensor `{name}`"),
            found: *vocab,
            limit: limits::VOCABULARY,
        }),
        [vocab, _] => Ok(*vocab as u32),
        _ => Err(CheckpointError::Shape {
            file: file.clone(),
            tensor: name.to_owned(),
            found: tensor.shape.clone(),
            needed: "[vocabulary, embedding_length]".to_owned(),
        }),
    }
}

/// A width inside experts: a key in most files, left to the tensors by some. `down` is a tensor whose rows have it.
fn width(keys: &Keys<'_>, key: &str, down: &str) -> Result<u32, CheckpointError> {
    if let Some(width) = keys.optional(key, 1, limits::WIDTH)? {
        return Ok(width as u32);
    }
    let tensor = keys.checkpoint.directory.get(&format!("blk.0.{down}.weight"));
    match tensor.and_then(|tensor| tensor.shape.last()) {
        Some(width) if *width <= limits::WIDTH => Ok(*width as u32),
        _ => {
            let needed = format!("a number from 1 to {}", limits::WIDTH);
            Err(keys.error(key, "nothing".to_owned(), needed))
        }
    }
}

fn layer_kinds(
    keys: &Keys<'_>,
    n_layers: usize,
    blocks: usize,
) -> Result<Vec<LayerKind>, CheckpointError> {
    if !keys.family.is_hybrid() {
        return Ok(vec![LayerKind::Attention; n_layers]);
    }
    let kind = |recurrent| if recurrent { LayerKind::DeltaNet } else { LayerKind::Attention };
    let key = "attention.recurrent_layers";
    let needed = || format!("{blocks} booleans, one for each block");
    match keys.get(key) {
        None => {
            let interval =
                keys.optional("full_attention_interval", 1, limits::LAYERS)?.unwrap_or(4) as usize;
            Ok((1..=n_layers).map(|layer| kind(!layer.is_multiple_of(interval))).collect())
        }
        Some(MetaValue::Array(MetaArray::Bools(flags)))
            if [blocks, n_layers].contains(&flags.len()) =>
        {
            Ok(flags[..n_layers].iter().copied().map(kind).collect())
        }
        Some(MetaValue::Array(array)) => {
            Err(keys.error(key, format!("an array of {} values", array.len()), needed()))
        }
        Some(other) => Err(keys.error(key, other.kind().to_owned(), needed())),
    }
}

fn delta_net(keys: &Keys<'_>) -> Result<DeltaNetShape, CheckpointError> {
    let key_heads = keys.required("ssm.group_count", 1, limits::HEADS)?;
    let value_heads = keys.required("ssm.time_step_rank", 1, limits::HEADS)?;
    if !value_heads.is_multiple_of(key_heads) {
        let needed = format!("a multiple of the {key_heads} key heads");
        return Err(keys.error("ssm.time_step_rank", value_heads.to_string(), needed));
    }
    let key_dim = keys.required("ssm.state_size", 1, limits::WIDTH)?;
    let inner = keys.required("ssm.inner_size", 1, limits::WIDTH)?;
    if !inner.is_multiple_of(value_heads) {
        let needed = format!("a multiple of the {value_heads} value heads");
        return Err(keys.error("ssm.inner_size", inner.to_string(), needed));
    }
    Ok(DeltaNetShape {
        key_heads: key_heads as u32,
        value_heads: value_heads as u32,
        key_dim: key_dim as u32,
        value_dim: (inner / value_heads) as u32,
        conv_kernel: keys.required("ssm.conv_kernel", 1, limits::CONV_KERNEL)? as u32,
        head_order: head_order(keys)?,
        gate: match keys.family {
            Family::Qwen4Exp => GateActivation::Sigmoid,
            Family::Qwen3Moe | Family::Qwen3Next | Family::Qwen35Moe => GateActivation::Silu,
        },
    })
}

/// Which order value heads are in: the original weights' where the metadata says so, GGUF's otherwise.
fn head_order(keys: &Keys<'_>) -> Result<HeadOrder, CheckpointError> {
    let key = "ssm.head_order";
    match keys.get(key) {
        Some(MetaValue::String(order)) if order == "grouped" => Ok(HeadOrder::Grouped),
        Some(MetaValue::String(order)) if order == "tiled" => Ok(HeadOrder::Tiled),
        Some(other) => {
            Err(keys.error(key, other.kind().to_owned(), "`grouped` or `tiled`".to_owned()))
        }
        None => Ok(match keys.family {
            Family::Qwen35Moe | Family::Qwen4Exp => HeadOrder::Tiled,
            Family::Qwen3Moe | Family::Qwen3Next => HeadOrder::Grouped,
        }),
    }
}
