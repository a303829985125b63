//! Sizes and constants of a model, from its metadata.

use std::fmt;

use crate::Checkpoint;
use crate::error::CheckpointError;
use crate::metadata::{MetaArray, MetaValue};

const MAX_LAYERS: u64 = 1024;
const MAX_EXPERTS: u64 = 4096;
const MAX_WIDTH: u64 = 1 << 20;
const MAX_HEADS: u64 = 1024;
const MAX_CONTEXT: u64 = 1 << 26;
const MAX_CONV_KERNEL: u64 = 64;

/// A model architecture, by its name in GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Qwen3-MoE: plain attention and experts in every layer.
    Qwen3Moe,
    /// Qwen3-Next: gated DeltaNet and gated attention, a shared expert.
    Qwen3Next,
    /// Qwen3.5-MoE: the same with other layouts.
    Qwen35Moe,
}

impl Family {
    const ALL: [Self; 3] = [Self::Qwen3Moe, Self::Qwen3Next, Self::Qwen35Moe];

    /// The value of `general.architecture`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qwen3Moe => "qwen3moe",
            Self::Qwen3Next => "qwen3next",
            Self::Qwen35Moe => "qwen35moe",
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
    /// Multiplier of cos and sin, if the file gives one.
    pub attention_factor: Option<f64>,
}

/// Sizes and constants of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub family: Family,
    /// The model's own name.
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
    /// Positions that the model was made for.
    pub context_length: u32,
}

pub(crate) fn read(checkpoint: &Checkpoint) -> Result<ModelConfig, CheckpointError> {
    let family = family(checkpoint)?;
    let keys = Keys { checkpoint, family };
    let blocks = keys.required("block_count", 1, MAX_LAYERS)?;
    let drafts = keys.optional("nextn_predict_layers", 0, MAX_LAYERS)?.unwrap_or(0);
    if drafts >= blocks {
        return Err(keys.error(
            "nextn_predict_layers",
            drafts.to_string(),
            format!("fewer than the {blocks} blocks"),
        ));
    }
    let n_layers = blocks - drafts;
    let hidden = keys.required("embedding_length", 1, MAX_WIDTH)?;
    let heads = keys.required("attention.head_count", 1, MAX_HEADS)?;
    let kv_heads = keys.optional("attention.head_count_kv", 1, MAX_HEADS)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(keys.error(
            "attention.head_count_kv",
            kv_heads.to_string(),
            format!("a divisor of {heads} heads"),
        ));
    }
    let head_dim = keys.optional("attention.key_length", 1, MAX_WIDTH)?.unwrap_or(hidden / heads);
    let value_dim = keys.optional("attention.value_length", 1, MAX_WIDTH)?.unwrap_or(head_dim);
    if value_dim != head_dim {
        return Err(keys.error(
            "attention.value_length",
            value_dim.to_string(),
            format!("the key length {head_dim}"),
        ));
    }
    let rotary_dim = keys.optional("rope.dimension_count", 2, MAX_WIDTH)?.unwrap_or(head_dim);
    if rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
        return Err(keys.error(
            "rope.dimension_count",
            rotary_dim.to_string(),
            format!("an even number up to {head_dim}"),
        ));
    }
    let n_experts = keys.required("expert_count", 1, MAX_EXPERTS)?;
    let top_k = keys.required("expert_used_count", 1, n_experts)?;
    let hybrid = family.is_hybrid();
    let shared_width = match hybrid {
        true => keys.optional("expert_shared_feed_forward_length", 1, MAX_WIDTH)?,
        false => None,
    };
    Ok(ModelConfig {
        family,
        name: checkpoint.metadata.str("general.name").map(str::to_owned),
        n_layers: n_layers as u32,
        n_draft_layers: drafts as u32,
        hidden: hidden as u32,
        vocab: vocab(&keys)?,
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        head_dim: head_dim as u32,
        rotary_dim: rotary_dim as u32,
        rope_theta: keys.float("rope.freq_base", 1e4)?,
        rope_scaling: yarn(&keys)?,
        rms_eps: keys.float("attention.layer_norm_rms_epsilon", 1e-6)? as f32,
        n_experts: n_experts as u32,
        top_k: top_k as u32,
        // Implied by all three architectures: their GGUF files have no key for it.
        norm_topk: true,
        expert_width: expert_width(&keys)?,
        shared_width: shared_width.map(|width| width as u32),
        gated_attention: hybrid,
        layers: layer_kinds(&keys, n_layers as usize)?,
        delta_net: if hybrid { Some(delta_net(&keys)?) } else { None },
        context_length: keys.optional("context_length", 1, MAX_CONTEXT)?.unwrap_or(4096) as u32,
    })
}

fn family(checkpoint: &Checkpoint) -> Result<Family, CheckpointError> {
    let file = checkpoint.files[0].path.clone();
    let Some(name) = checkpoint.metadata.str("general.architecture") else {
        return Err(CheckpointError::Config {
            file,
            key: "general.architecture".to_owned(),
            found: checkpoint
                .metadata
                .get("general.architecture")
                .map_or("nothing", MetaValue::kind)
                .to_owned(),
            needed: "the name of an architecture".to_owned(),
        });
    };
    Family::ALL.into_iter().find(|family| family.name() == name).ok_or_else(|| {
        CheckpointError::Unsupported {
            file,
            what: "architecture".to_owned(),
            found: name.to_owned(),
            supported: Family::ALL.map(Family::name).join(", "),
        }
    })
}

/// The vocabulary is as long as the embedding; its shape is checked with the tensors.
fn vocab(keys: &Keys<'_>) -> Result<u32, CheckpointError> {
    let name = "token_embd.weight";
    let tensor =
        keys.checkpoint.directory.get(name).ok_or_else(|| CheckpointError::MissingTensor {
            file: keys.checkpoint.files[0].path.clone(),
            tensor: name.to_owned(),
            needed: "every model embeds its tokens".to_owned(),
        })?;
    match tensor.shape.as_slice() {
        [vocab, _] if *vocab <= u64::from(u32::MAX >> 4) => Ok(*vocab as u32),
        _ => Err(CheckpointError::Shape {
            file: keys.checkpoint.files[tensor.file.get()].path.clone(),
            tensor: name.to_owned(),
            found: tensor.shape.clone(),
            needed: "[vocabulary, embedding_length]".to_owned(),
        }),
    }
}

/// The width is a key in most files; older ones leave it to the tensors.
fn expert_width(keys: &Keys<'_>) -> Result<u32, CheckpointError> {
    if let Some(width) = keys.optional("expert_feed_forward_length", 1, MAX_WIDTH)? {
        return Ok(width as u32);
    }
    let down = keys
        .checkpoint
        .directory
        .get("blk.0.ffn_down_exps.weight")
        .and_then(|t| t.shape.last().copied());
    match down {
        Some(width) if width <= MAX_WIDTH => Ok(width as u32),
        _ => Err(keys.error(
            "expert_feed_forward_length",
            "nothing".to_owned(),
            "the width of an expert".to_owned(),
        )),
    }
}

fn layer_kinds(keys: &Keys<'_>, n_layers: usize) -> Result<Vec<LayerKind>, CheckpointError> {
    if !keys.family.is_hybrid() {
        return Ok(vec![LayerKind::Attention; n_layers]);
    }
    let kind = |recurrent| if recurrent { LayerKind::DeltaNet } else { LayerKind::Attention };
    let key = "attention.recurrent_layers";
    match keys.get(key) {
        None => {
            let interval =
                keys.optional("full_attention_interval", 1, MAX_LAYERS)?.unwrap_or(4) as usize;
            Ok((0..n_layers).map(|layer| kind(!(layer + 1).is_multiple_of(interval))).collect())
        }
        Some(MetaValue::Array(MetaArray::Bools(flags))) if flags.len() >= n_layers => {
            Ok(flags[..n_layers].iter().copied().map(kind).collect())
        }
        Some(other) => Err(keys.error(
            key,
            other.kind().to_owned(),
            format!("an array of at least {n_layers} booleans"),
        )),
    }
}

fn delta_net(keys: &Keys<'_>) -> Result<DeltaNetShape, CheckpointError> {
    let key_heads = keys.required("ssm.group_count", 1, MAX_HEADS)?;
    let value_heads = keys.required("ssm.time_step_rank", 1, MAX_HEADS)?;
    if !value_heads.is_multiple_of(key_heads) {
        let needed = format!("a multiple of the {key_heads} key heads");
        return Err(keys.error("ssm.time_step_rank", value_heads.to_string(), needed));
    }
    let key_dim = keys.required("ssm.state_size", 1, MAX_WIDTH)?;
    let inner = keys.required("ssm.inner_size", 1, MAX_WIDTH)?;
    if !inner.is_multiple_of(value_heads) {
        let needed = format!("a multiple of the {value_heads} value heads");
        return Err(keys.error("ssm.inner_size", inner.to_string(), needed));
    }
    Ok(DeltaNetShape {
        key_heads: key_heads as u32,
        value_heads: value_heads as u32,
        key_dim: key_dim as u32,
        value_dim: (inner / value_heads) as u32,
        conv_kernel: keys.required("ssm.conv_kernel", 1, MAX_CONV_KERNEL)? as u32,
        head_order: match keys.family {
            Family::Qwen35Moe => HeadOrder::Tiled,
            _ => HeadOrder::Grouped,
        },
    })
}

fn yarn(keys: &Keys<'_>) -> Result<Option<Yarn>, CheckpointError> {
    let kind = keys.checkpoint.metadata.str(&keys.name("rope.scaling.type")).unwrap_or("none");
    match kind {
        "none" => Ok(None),
        "yarn" => Ok(Some(Yarn {
            factor: keys.float("rope.scaling.factor", 1.0)?,
            original_context: keys.float("rope.scaling.original_context_length", 0.0).and_then(
                |context| {
                    if context > 0.0 {
                        return Ok(context);
                    }
                    let needed = "the context of the original training".to_owned();
                    Err(keys.error(
                        "rope.scaling.original_context_length",
                        context.to_string(),
                        needed,
                    ))
                },
            )?,
            beta_fast: keys.float("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: keys.float("rope.scaling.yarn_beta_slow", 1.0)?,
            attention_factor: keys
                .get("rope.scaling.attn_factor")
                .map(|_| keys.float("rope.scaling.attn_factor", 1.0))
                .transpose()?,
        })),
        other => Err(CheckpointError::Unsupported {
            file: keys.checkpoint.files[0].path.clone(),
            what: "rope scaling".to_owned(),
            found: other.to_owned(),
            supported: "none, yarn".to_owned(),
        }),
    }
}

/// Keys of the architecture.
struct Keys<'a> {
    checkpoint: &'a Checkpoint,
    family: Family,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.family)
    }

    fn get(&self, key: &str) -> Option<&MetaValue> {
        self.checkpoint.metadata.get(&self.name(key))
    }

    fn error(&self, key: &str, found: String, needed: String) -> CheckpointError {
        CheckpointError::Config {
            file: self.checkpoint.files[0].path.clone(),
            key: self.name(key),
            found,
            needed,
        }
    }

    fn required(&self, key: &str, min: u64, max: u64) -> Result<u64, CheckpointError> {
        self.optional(key, min, max)?.ok_or_else(|| {
            self.error(key, "nothing".to_owned(), format!("a number from {min} to {max}"))
        })
    }

    /// A number in `min..=max`; an array counts if its values other than 0 agree.
    fn optional(&self, key: &str, min: u64, max: u64) -> Result<Option<u64>, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value {
            MetaValue::Array(MetaArray::U64s(values)) => one_value(values.iter().copied()),
            MetaValue::Array(MetaArray::I64s(values)) => {
                one_value(values.iter().map(|v| (*v).max(0).cast_unsigned()))
            }
            _ => self.checkpoint.metadata.u64(&self.name(key)),
        };
        match number {
            Some(n) if (min..=max).contains(&n) => Ok(Some(n)),
            Some(n) => Err(self.error(key, n.to_string(), format!("a number from {min} to {max}"))),
            None => Err(self.error(
                key,
                value.kind().to_owned(),
                format!("a number from {min} to {max}"),
            )),
        }
    }

    fn float(&self, key: &str, default: f64) -> Result<f64, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        match self.checkpoint.metadata.f64(&self.name(key)) {
            Some(number) if number.is_finite() && number >= 0.0 => Ok(number),
            Some(number) => {
                Err(self.error(key, number.to_string(), "a finite number, not negative".to_owned()))
            }
            None => Err(self.error(key, value.kind().to_owned(), "a number".to_owned())),
        }
    }
}

fn one_value(values: impl Iterator<Item = u64>) -> Option<u64> {
    let mut found = None;
    for value in values.filter(|value| *value != 0) {
        if found.is_some_and(|found| found != value) {
            return None;
        }
        found = Some(value);
    }
    found
}
