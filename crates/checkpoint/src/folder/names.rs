//! Names of tensors in model folders, and what they are called in all containers.
//!
//! One model has several spellings: the prefix tells what wrote the file (a language model alone, one beside a vision
//! tower, a conversion to MLX), experts are one tensor each, fused by layer, or stacked, and a quantised module is two
//! or three tensors. All of them end here.

use crate::config::Family;
use crate::limits;
use crate::records::NgramTable;

/// What stands before the names of a language model, longest first.
const PREFIXES: [&str; 5] =
    ["language_model.model.", "model.language_model.", "language_model.", "model.", ""];

/// What stands before the names of a draft head.
const DRAFT_PREFIXES: [&str; 3] = ["mtp.", "model.mtp.", "language_model.mtp."];

/// Parts of a model that a text engine leaves alone: images.
const ASIDE: [&str; 6] = [
    "model.visual.",
    "visual.",
    "vision_tower.",
    "model.vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
];

/// Which of a module's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Plane {
    /// Values or codes.
    Weight,
    /// MLX scales.
    Scales,
    /// MLX biases.
    Biases,
    /// Scales of FP8 blocks.
    ScaleInv,
}

impl Plane {
    pub(super) const COUNT: usize = 4;

    /// What a module's name is followed by.
    pub(super) const fn ending(self) -> &'static str {
        match self {
            Self::Weight => ".weight",
            Self::Scales => ".scales",
            Self::Biases => ".biases",
            Self::ScaleInv => ".weight_scale_inv",
        }
    }
}

/// What a module's values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Used as they are.
    Plain,
    /// A norm that some layouts store as its deviation from one.
    CentredNorm,
    /// The logarithm of a decay.
    LogDecay,
    /// A short convolution, with a dimension of 1 that tells the layout.
    Conv,
    /// Queries and the key of an indexer, one matrix above the other.
    IndexerQk,
    /// One number, with a dimension or without.
    Scalar,
}

/// A matrix of the routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Matrix {
    Gate,
    Up,
    GateUp,
    Down,
}

impl Matrix {
    /// Its name in a folder and in all containers.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Gate => ("gate_proj", "gate"),
            Self::Up => ("up_proj", "up"),
            Self::GateUp => ("gate_up_proj", "gate_up"),
            Self::Down => ("down_proj", "down"),
        }
    }

    pub(super) const fn spelled(self) -> &'static str {
        self.names().0
    }

    fn of(spelled: &str) -> Option<Self> {
        [Self::Gate, Self::Up, Self::GateUp, Self::Down]
            .into_iter()
            .find(|matrix| matrix.spelled() == spelled)
    }

    /// The stacked tensor of a layer.
    pub(super) fn stacked(self, layer: u32) -> String {
        format!("blk.{layer}.ffn_{}_exps.weight", self.names().1)
    }
}

/// What a tensor's name means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Meaning {
    /// A tensor of the module with this name in all containers.
    Module { name: String, role: Role, plane: Plane },
    /// A tensor of one expert.
    Expert { prefix: Prefix, layer: u32, matrix: Matrix, expert: u32, plane: Plane },
    /// Some rows of the n-gram table, in order of their number. `listed` is how one converter writes it.
    Shard { number: u32, listed: bool, plane: Plane },
    /// Integers that are a value of this key in other containers.
    Numbers { key: &'static str },
    /// Not for a text engine.
    Aside,
    /// Of the draft head, see [`draft_meaning`].
    Draft,
    /// Not known.
    Unknown,
}

/// Modules outside of layers.
const TOP: [(&str, &str, Role); 6] = [
    ("embed_tokens.weight", "token_embd.weight", Role::Plain),
    ("hyper_connection_mixer.hc_norm.weight", "output_hc_norm.weight", Role::CentredNorm),
    ("hyper_connection_mixer.input_mix_weight_down.weight", "output_hc_down.weight", Role::Plain),
    ("hyper_connection_mixer.input_mix_weight_up.weight", "output_hc_up.weight", Role::Plain),
    ("lm_head.weight", "output.weight", Role::Plain),
    ("norm.weight", "output_norm.weight", Role::CentredNorm),
];

/// Modules of a layer: behind `layers.N.`, and behind `blk.N.`. What is not a matrix in a module of its own is called
/// `.weight` only where the file calls it so.
const LAYER: [(&str, &str, Role); 41] = [
    ("input_layernorm.weight", "attn_norm.weight", Role::CentredNorm),
    ("post_attention_layernorm.weight", "post_attention_norm.weight", Role::CentredNorm),
    ("self_attn.q_proj.weight", "attn_q.weight", Role::Plain),
    ("self_attn.k_proj.weight", "attn_k.weight", Role::Plain),
    ("self_attn.v_proj.weight", "attn_v.weight", Role::Plain),
    ("self_attn.o_proj.weight", "attn_output.weight", Role::Plain),
    ("self_attn.q_norm.weight", "attn_q_norm.weight", Role::CentredNorm),
    ("self_attn.k_norm.weight", "attn_k_norm.weight", Role::CentredNorm),
    ("linear_attn.in_proj_qkvz.weight", "ssm_in.weight", Role::Plain),
    ("linear_attn.in_proj_ba.weight", "ssm_ba.weight", Role::Plain),
    ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", Role::Plain),
    ("linear_attn.in_proj_z.weight", "attn_gate.weight", Role::Plain),
    ("linear_attn.in_proj_b.weight", "ssm_beta.weight", Role::Plain),
    ("linear_attn.in_proj_a.weight", "ssm_alpha.weight", Role::Plain),
    ("linear_attn.conv1d.weight", "ssm_conv1d.weight", Role::Conv),
    ("linear_attn.A_log", "ssm_a", Role::LogDecay),
    ("linear_attn.dt_bias", "ssm_dt.bias", Role::Plain),
    ("linear_attn.norm.weight", "ssm_norm.weight", Role::Plain),
    ("linear_attn.out_proj.weight", "ssm_out.weight", Role::Plain),
    ("mlp.gate.weight", "ffn_gate_inp.weight", Role::Plain),
    ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", Role::Plain),
    ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight", Role::Plain),
    ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight", Role::Plain),
    ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight", Role::Plain),
    ("attn_hyper_connection.hc_norm.weight", "hc_attn_norm.weight", Role::CentredNorm),
    ("attn_hyper_connection.input_mix_weight_down.weight", "hc_attn_down.weight", Role::Plain),
    ("attn_hyper_connection.input_mix_weight_up.weight", "hc_attn_up.weight", Role::Plain),
    ("attn_hyper_connection.block_inject_weight.weight", "hc_attn_inject.weight", Role::Plain),
    ("mlp_hyper_connection.hc_norm.weight", "hc_ffn_norm.weight", Role::CentredNorm),
    ("mlp_hyper_connection.input_mix_weight_down.weight", "hc_ffn_down.weight", Role::Plain),
    ("mlp_hyper_connection.input_mix_weight_up.weight", "hc_ffn_up.weight", Role::Plain),
    ("mlp_hyper_connection.block_inject_weight.weight", "hc_ffn_inject.weight", Role::Plain),
    ("self_attn.indexer.index_qk_proj.weight", "indexer.q_proj.weight", Role::IndexerQk),
    ("self_attn.indexer.q_layernorm.weight", "indexer.q_norm.weight", Role::CentredNorm),
    ("self_attn.indexer.k_layernorm.weight", "indexer.k_norm.weight", Role::CentredNorm),
    ("ple.key_proj.weight", "ple_key.weight", Role::Plain),
    ("ple.value_proj.weight", "ple_value.weight", Role::Plain),
    ("ple.norm_key.weight", "ple_norm_key.weight", Role::CentredNorm),
    ("ple.norm_query.weight", "ple_norm_query.weight", Role::CentredNorm),
    ("ple.norm_conv.weight", "ple_norm_conv.weight", Role::CentredNorm),
    ("ple.conv1d.weight", "ple_conv1d.weight", Role::Conv),
];

/// Modules of a draft head outside of its layer: behind `mtp.`, and behind `blk.N.nextn.`.
const DRAFT: [(&str, &str, Role); 9] = [
    ("fc.weight", "eh_proj.weight", Role::Plain),
    ("fc_embedding.weight", "embed_proj.weight", Role::Plain),
    ("fc_hidden.weight", "hidden_proj.weight", Role::Plain),
    ("pre_fc_norm_embedding.weight", "enorm.weight", Role::CentredNorm),
    ("pre_fc_norm_hidden.weight", "hnorm.weight", Role::CentredNorm),
    ("norm.weight", "shared_head_norm.weight", Role::CentredNorm),
    ("hyper_connection_mixer.hc_norm.weight", "hc_head_norm.weight", Role::CentredNorm),
    ("hyper_connection_mixer.input_mix_weight_down.weight", "hc_head_down.weight", Role::Plain),
    ("hyper_connection_mixer.input_mix_weight_up.weight", "hc_head_up.weight", Role::Plain),
];

/// Integers beside the n-gram table: behind `layers.N.`, and the key of the architecture.
const NUMBERS: [(&str, &str); 3] = [
    ("ple.ple_embedding.layer_multipliers", "ple.layer_multipliers"),
    ("ple.ple_embedding.ngram_heads_vocab_sizes", "ple.head_vocab_sizes"),
    ("ple.ple_embedding.ngram_heads_offsets", "ple.head_offsets"),
];

/// Behind `layers.N.`, what stands before the shards of the n-gram table and before its scale.
const ROWS: &str = "ple.ple_embedding.ngram_embedding.";
/// Behind that, the one scale of all shards whose values are FP8.
const ROWS_SCALE: &str = "weight_scale";

/// What stands before a language model's names, or a draft head's: one of those that are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefix {
    Trunk(u8),
    Draft(u8),
}

impl Prefix {
    /// How layer `layer` of all containers is called, with the point behind it.
    pub(super) fn layer(self, layer: u32) -> String {
        match self {
            Self::Trunk(index) => format!("{}layers.{layer}.", PREFIXES[usize::from(index)]),
            // The one that there is.
            Self::Draft(index) => format!("{}layers.0.", DRAFT_PREFIXES[usize::from(index)]),
        }
    }
}

/// A name in two: what stands before a language model's, and the rest.
pub(super) fn core(name: &str) -> (Prefix, &str) {
    let split =
        |(index, prefix): (u8, &str)| Some((Prefix::Trunk(index), name.strip_prefix(prefix)?));
    (0..).zip(PREFIXES).find_map(split).expect("the last prefix is empty")
}

/// What a tensor's name means in a family.
pub(super) fn meaning(family: Family, name: &str) -> Meaning {
    if ASIDE.iter().any(|prefix| name.starts_with(prefix)) {
        return Meaning::Aside;
    }
    if draft_core(name).is_some() {
        // A family that never had one may call anything so.
        return if family.is_hybrid() { Meaning::Draft } else { Meaning::Aside };
    }
    let (prefix, core) = core(name);
    known(family, prefix, core).unwrap_or(Meaning::Unknown)
}

/// A draft head's name in two: what stands before it, and the rest.
fn draft_core(name: &str) -> Option<(Prefix, &str)> {
    let split =
        |(index, prefix): (u8, &str)| Some((Prefix::Draft(index), name.strip_prefix(prefix)?));
    (0..).zip(DRAFT_PREFIXES).find_map(split)
}

/// What a tensor's name means in a draft head that becomes block `block`.
pub(super) fn draft_meaning(family: Family, block: u32, name: &str) -> Meaning {
    draft_core(name)
        .and_then(|(prefix, core)| {
            let (whole, plane) = module(core);
            if let Some((_, name, role)) = DRAFT.iter().find(|(spelled, ..)| *spelled == whole) {
                let name = format!("blk.{block}.nextn.{name}");
                return Some(Meaning::Module { name, role: *role, plane });
            }
            let (layer, rest) = numbered(&whole, "layers.", limits::LAYERS)?;
            (layer == 0).then(|| of_layer(family, (prefix, block), rest, plane))?
        })
        .unwrap_or(Meaning::Unknown)
}

fn known(family: Family, prefix: Prefix, core: &str) -> Option<Meaning> {
    let (whole, plane) = module(core);
    if let Some((_, name, role)) = TOP.iter().find(|(spelled, ..)| *spelled == whole) {
        let name = (*name).to_owned();
        return Some(Meaning::Module { name, role: of(family, *role), plane });
    }
    let (layer, rest) = numbered(&whole, "layers.", limits::LAYERS)?;
    if family == Family::Qwen4Exp {
        if let Some((_, key)) = NUMBERS.iter().find(|(spelled, _)| *spelled == rest) {
            return Some(Meaning::Numbers { key });
        }
        if let Some(rows) = rest.strip_prefix(ROWS) {
            if rows == ROWS_SCALE && plane == Plane::Weight {
                let name = NgramTable::SCALE.to_owned();
                return Some(Meaning::Module { name, role: Role::Scalar, plane });
            }
            let listed = rows.starts_with("shards.");
            let prefix = if listed { "shards." } else { "shard_" };
            let (number, rest) = numbered(rows, prefix, limits::SHARDS)?;
            return (rest == "weight").then_some(Meaning::Shard { number, listed, plane });
        }
    }
    of_layer(family, (prefix, layer), rest, plane)
}

/// What `rest` means behind the name of a layer.
fn of_layer(
    family: Family,
    (prefix, layer): (Prefix, u32),
    rest: &str,
    plane: Plane,
) -> Option<Meaning> {
    if let Some((_, name, role)) = LAYER.iter().find(|(spelled, ..)| *spelled == rest) {
        let name = match (family, *name) {
            (Family::Qwen3Moe, "post_attention_norm.weight") => "ffn_norm.weight",
            (_, name) => name,
        };
        let name = format!("blk.{layer}.{name}");
        return Some(Meaning::Module { name, role: of(family, *role), plane });
    }
    let experts = rest.strip_prefix("mlp.")?;
    if let Some((expert, rest)) = numbered(experts, "experts.", limits::EXPERTS) {
        let matrix = Matrix::of(rest.strip_suffix(".weight")?)?;
        return Some(Meaning::Expert { prefix, layer, matrix, expert, plane });
    }
    // Fused ones are parameters and not modules, so most files call them without the ending.
    let stacked =
        experts.strip_prefix("experts.").or_else(|| experts.strip_prefix("switch_mlp."))?;
    let matrix = Matrix::of(stacked.strip_suffix(".weight").unwrap_or(stacked))?;
    Some(Meaning::Module { name: matrix.stacked(layer), role: Role::Plain, plane })
}

/// Norms are plain in the one family that never centred them.
const fn of(family: Family, role: Role) -> Role {
    match (family, role) {
        (Family::Qwen3Moe, Role::CentredNorm) => Role::Plain,
        (_, role) => role,
    }
}

/// The name of a module's values, and which of its tensors this is.
fn module(name: &str) -> (String, Plane) {
    let weight = |module: &str| format!("{module}.weight");
    if let Some(module) = name.strip_suffix(".scales") {
        return (weight(module), Plane::Scales);
    }
    if let Some(module) = name.strip_suffix(".biases") {
        return (weight(module), Plane::Biases);
    }
    match name.strip_suffix("_scale_inv") {
        Some(values) => (values.to_owned(), Plane::ScaleInv),
        None => (name.to_owned(), Plane::Weight),
    }
}

/// A number behind a prefix, and what follows the point behind it.
fn numbered<'a>(name: &'a str, prefix: &str, limit: u64) -> Option<(u32, &'a str)> {
    let (digits, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let canonical = digits == "0" || !digits.starts_with('0');
    let number =
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse::<u32>().ok())??;
    (canonical && u64::from(number) < limit).then_some((number, rest))
}

/// What the scale of the n-gram table is called, by the name of a shard.
pub(super) fn scale_beside(shard: &str) -> String {
    let shards = shard.rfind(ROWS).map_or("", |at| &shard[..at + ROWS.len()]);
    format!("{shards}{ROWS_SCALE}")
}

/// How a tensor that all containers have is called in folders, without its prefix: for messages.
pub(crate) fn spelled(name: &str) -> Option<String> {
    if let Some((spelled, ..)) = TOP.iter().find(|(_, known, _)| *known == name) {
        return Some((*spelled).to_owned());
    }
    if name == NgramTable::NAME {
        return Some(format!("{ROWS}shard_*"));
    }
    if name == NgramTable::SCALE {
        return Some(format!("{ROWS}{ROWS_SCALE}"));
    }
    let (layer, rest) = numbered(name, "blk.", limits::LAYERS)?;
    if let Some(rest) = rest.strip_prefix("nextn.") {
        let (spelled, ..) = DRAFT.iter().find(|(_, known, _)| *known == rest)?;
        return Some(format!("{}{spelled}", DRAFT_PREFIXES[0]));
    }
    let rest = if rest == "ffn_norm.weight" { "post_attention_norm.weight" } else { rest };
    if let Some((spelled, ..)) = LAYER.iter().find(|(_, known, _)| *known == rest) {
        return Some(format!("layers.{layer}.{spelled}"));
    }
    let matrix = rest.strip_prefix("ffn_")?.strip_suffix("_exps.weight")?;
    Some(format!("layers.{layer}.mlp.experts.*.{matrix}_proj"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(family: Family, spelled: &str) -> String {
        match meaning(family, spelled) {
            Meaning::Module { name, role, plane } => format!("{name} {role:?} {plane:?}"),
            Meaning::Expert { layer, matrix, expert, plane, .. } => {
                format!("{} {expert} {plane:?}", matrix.stacked(layer))
            }
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn every_prefix_leads_to_the_same_name() {
        for prefix in PREFIXES {
            let spelled = format!("{prefix}layers.7.self_attn.q_norm.weight");
            let got = name(Family::Qwen35Moe, &spelled);
            assert_eq!(got, "blk.7.attn_q_norm.weight CentredNorm Weight", "{spelled}");
        }
        for spelled in ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"] {
            assert_eq!(name(Family::Qwen3Moe, spelled), "output.weight Plain Weight");
        }
    }

    #[test]
    fn families_call_the_second_norm_differently() {
        let spelled = "model.layers.0.post_attention_layernorm.weight";
        assert_eq!(name(Family::Qwen3Moe, spelled), "blk.0.ffn_norm.weight Plain Weight");
        let next = name(Family::Qwen3Next, spelled);
        assert_eq!(next, "blk.0.post_attention_norm.weight CentredNorm Weight");
        // The one norm that is never centred.
        let inner = name(Family::Qwen3Next, "model.layers.0.linear_attn.norm.weight");
        assert_eq!(inner, "blk.0.ssm_norm.weight Plain Weight");
    }

    #[test]
    fn experts_are_found_alone_fused_and_stacked() {
        for (spelled, expected) in [
            ("mlp.experts.12.up_proj.weight", "blk.3.ffn_up_exps.weight 12 Weight"),
            ("mlp.experts.12.up_proj.weight_scale_inv", "blk.3.ffn_up_exps.weight 12 ScaleInv"),
            ("mlp.experts.gate_up_proj", "blk.3.ffn_gate_up_exps.weight Plain Weight"),
            ("mlp.experts.gate_up_proj_scale_inv", "blk.3.ffn_gate_up_exps.weight Plain ScaleInv"),
            ("mlp.experts.down_proj.weight", "blk.3.ffn_down_exps.weight Plain Weight"),
            ("mlp.switch_mlp.down_proj.scales", "blk.3.ffn_down_exps.weight Plain Scales"),
            ("mlp.switch_mlp.gate_proj.biases", "blk.3.ffn_gate_exps.weight Plain Biases"),
        ] {
            let spelled = format!("model.layers.3.{spelled}");
            assert_eq!(name(Family::Qwen3Next, &spelled), expected, "{spelled}");
        }
    }

    #[test]
    fn the_n_gram_table_is_shards_and_numbers() {
        let at = |rest: &str| {
            let spelled = format!("language_model.model.layers.1.ple.ple_embedding.{rest}");
            name(Family::Qwen4Exp, &spelled)
        };
        for (rest, expected) in [
            (
                "ngram_embedding.shard_12.weight",
                "Shard { number: 12, listed: false, plane: Weight }",
            ),
            ("ngram_embedding.shards.3.scales", "Shard { number: 3, listed: true, plane: Scales }"),
            ("ngram_embedding.shard_1x.weight", "Unknown"),
            ("ngram_embedding.weight_scale", "per_layer_token_embd.scale Scalar Weight"),
            ("ngram_embedding.weight_scale_scale_inv", "Unknown"),
            ("ngram_embedding.weight_scale_inv", "Unknown"),
            ("ngram_embedding.scales", "Unknown"),
            ("ngram_embedding.shard_1.weight_scale", "Unknown"),
            ("ngram_embedding.shards.weight_scale", "Unknown"),
            ("layer_multipliers", "Numbers { key: \"ple.layer_multipliers\" }"),
        ] {
            assert_eq!(at(rest), expected, "{rest}");
        }
        let other = "model.layers.1.ple.ple_embedding.layer_multipliers";
        assert_eq!(name(Family::Qwen35Moe, other), "Unknown");
    }

    #[test]
    fn a_draft_head_is_the_block_behind_the_trunk() {
        let at = |family, spelled: &str| match draft_meaning(family, 7, spelled) {
            Meaning::Module { name, role, plane } => format!("{name} {role:?} {plane:?}"),
            Meaning::Expert { prefix, layer, matrix, expert, plane } => {
                format!("{}{} {expert} {plane:?}", prefix.layer(layer), matrix.stacked(layer))
            }
            other => format!("{other:?}"),
        };
        for (spelled, expected) in [
            ("mtp.fc.weight", "blk.7.nextn.eh_proj.weight Plain Weight"),
            ("mtp.fc_hidden.scales", "blk.7.nextn.hidden_proj.weight Plain Scales"),
            ("model.mtp.norm.weight", "blk.7.nextn.shared_head_norm.weight CentredNorm Weight"),
            (
                "mtp.layers.0.post_attention_layernorm.weight",
                "blk.7.post_attention_norm.weight CentredNorm Weight",
            ),
            ("mtp.layers.0.mlp.switch_mlp.up_proj.biases", "blk.7.ffn_up_exps.weight Plain Biases"),
            (
                "mtp.layers.0.mlp.experts.3.up_proj.weight",
                "mtp.layers.0.blk.7.ffn_up_exps.weight 3 Weight",
            ),
            ("mtp.layers.1.input_layernorm.weight", "Unknown"),
            ("mtp.embed_tokens.weight", "Unknown"),
            ("model.layers.0.input_layernorm.weight", "Unknown"),
        ] {
            assert_eq!(at(Family::Qwen4Exp, spelled), expected, "{spelled}");
        }
        assert_eq!(name(Family::Qwen3Next, "language_model.mtp.fc.weight"), "Draft");
        assert_eq!(name(Family::Qwen3Moe, "mtp.fc.weight"), "Aside");
    }

    #[test]
    fn images_are_set_aside_and_the_rest_is_unknown() {
        for spelled in ["model.visual.patch_embed.proj.weight", "vision_tower.x"] {
            assert_eq!(name(Family::Qwen35Moe, spelled), "Aside");
        }
        for spelled in [
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.00.input_layernorm.weight",
            "model.layers.+1.input_layernorm.weight",
            "model.layers.99999.input_layernorm.weight",
            "model.layers.0.mlp.experts.5000.up_proj.weight",
            "model.layers.0.mlp.experts.1.up_proj",
            "model.layers.0.linear_attn.A_log.weight",
            "layers.",
            "",
        ] {
            assert_eq!(name(Family::Qwen35Moe, spelled), "Unknown", "{spelled}");
        }
    }

    #[test]
    fn a_message_can_name_what_is_missing() {
        for (known, expected) in [
            ("output_norm.weight", Some("norm.weight")),
            ("blk.2.ssm_a", Some("layers.2.linear_attn.A_log")),
            ("blk.2.ffn_norm.weight", Some("layers.2.post_attention_layernorm.weight")),
            ("blk.2.ffn_up_exps.weight", Some("layers.2.mlp.experts.*.up_proj")),
            ("blk.2.nextn.enorm.weight", Some("mtp.pre_fc_norm_embedding.weight")),
            ("blk.2.other", None),
        ] {
            assert_eq!(spelled(known).as_deref(), expected);
        }
    }
}
