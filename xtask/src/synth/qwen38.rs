//! The tensors of Qwen3.8-Flash-Next as one published conversion for MLX has them: names, types, shapes, order.

use super::fill::Fill;
use super::ngram::{NgramTable, SHARDS, multipliers};
use super::safetensors::{DType, Tensor};

const HIDDEN: u64 = 2560;
pub(super) const VOCAB: u64 = 248_320;
const EXPERTS: u64 = 512;
/// Inside a routed expert, and inside the shared one.
const WIDTH: u64 = 640;
/// Parallel residual streams.
const STREAMS: u64 = 4;
const LOW_RANK: u64 = 320;
/// Heads of the n-gram table: eight for two tokens, eight for three.
pub(super) const NGRAM_HEADS: u32 = 16;
/// Values of a row of the table.
const NGRAM_DIM: u64 = 160;
/// The layer with the table, from 0.
const NGRAM_LAYER: u32 = 1;
/// Every fourth layer is attention.
pub(super) const INTERVAL: u32 = 4;
/// Values of a quantisation group, but for the table.
pub(super) const GROUP: u64 = 64;
pub(super) const NGRAM_GROUP: u64 = 32;
const VISION_WIDTH: u64 = 1152;

/// What may differ between checkpoints of this family: everything else is the published model's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    pub(super) layers: u32,
    pub(super) table: NgramTable,
    /// Whether the vision tower is there.
    pub(super) vision: bool,
    /// Files that the tensors are spread over.
    pub(super) files: usize,
}

impl Geometry {
    /// The published model.
    pub fn published() -> Self {
        let table = NgramTable::new(20_000_000, NGRAM_HEADS);
        Self { layers: 48, table, vision: true, files: 11 }
    }

    /// A few layers of the same shape, and no head of the n-gram table with fewer rows than `ngram_base`.
    pub fn small(layers: u32, ngram_base: u64) -> Self {
        let files = layers as usize / 2 + 1;
        Self { layers, table: NgramTable::new(ngram_base, NGRAM_HEADS), vision: false, files }
    }

    /// Modules whose scales and biases lie in another file than their weights, as in the published files.
    pub(super) fn torn(&self) -> Vec<String> {
        let layer = 8.min(self.layers - 1);
        let mut torn = vec![format!("{LAYERS}.{layer}.mlp.switch_mlp.down_proj")];
        torn.extend(
            [22, 23, 63].map(|shard| format!("{LAYERS}.{NGRAM_LAYER}.{}", shard_path(shard))),
        );
        torn
    }
}

/// Paths of the modules with other groups than the rest, spelled as in config.json: without the first part of the
/// name that the tensors have.
pub(super) fn overrides() -> impl Iterator<Item = String> {
    (0..SHARDS).map(|shard| format!("model.layers.{NGRAM_LAYER}.{}", shard_path(shard)))
}

const LAYERS: &str = "language_model.model.layers";

fn shard_path(shard: u64) -> String {
    format!("ple.ple_embedding.ngram_embedding.shard_{shard}")
}

/// What a tensor is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Routed experts.
    Experts,
    /// The n-gram table.
    Ngram,
    /// Vision tower.
    Vision,
    /// Everything else.
    Text,
}

impl Part {
    fn of(name: &str) -> Self {
        if name.starts_with("vision_tower.") {
            Self::Vision
        } else if name.contains(".switch_mlp.") {
            Self::Experts
        } else if name.contains(".ngram_embedding.") {
            Self::Ngram
        } else {
            Self::Text
        }
    }
}

/// Bytes of the tensors of a part.
pub fn part_bytes(tensors: &[Tensor], part: Part) -> u64 {
    tensors.iter().filter(|tensor| Part::of(&tensor.name) == part).map(Tensor::bytes).sum()
}

/// Every tensor, in the order of the files.
pub fn tensors(geometry: &Geometry) -> Vec<Tensor> {
    let mut list = List::default();
    // Looked up, not multiplied: a row is a token's vector.
    list.affine("language_model.model.embed_tokens", &[VOCAB, HIDDEN], GROUP, 0.5);
    for layer in 0..geometry.layers {
        list.prefix = format!("{LAYERS}.{layer}.");
        list.layer(geometry, layer);
    }
    list.prefix = String::new();
    list.hyper_connection("language_model.model.hyper_connection_mixer", false);
    list.matrix("language_model.lm_head", &[VOCAB, HIDDEN], 4.0);
    if geometry.vision {
        list.vision();
    }
    list.tensors
}

/// Tensors in the making.
#[derive(Default)]
struct List {
    tensors: Vec<Tensor>,
    /// In front of every name.
    prefix: String,
}

impl List {
    fn add(&mut self, name: &str, dtype: DType, shape: &[u64], fill: Fill) {
        let name = format!("{}{name}", self.prefix);
        self.tensors.push(Tensor { name, dtype, shape: shape.to_vec(), fill });
    }

    /// bf16 values.
    fn plain(&mut self, name: &str, shape: &[u64], mean: f32, deviation: f32) {
        self.add(name, DType::Bf16, shape, Fill::Normal { mean, deviation });
    }

    /// A bf16 norm, with its 1 already added.
    fn norm(&mut self, name: &str, len: u64) {
        self.plain(name, &[len], 1.0, 0.1);
    }

    /// A bf16 matrix of `n_out` rows that takes inputs near 1 to outputs near `gain`.
    fn float(&mut self, name: &str, n_out: u64, n_in: u64, gain: f32) {
        self.plain(name, &[n_out, n_in], 0.0, gain / (n_in as f32).sqrt());
    }

    /// A 4-bit matrix `[..., n_out, n_in]` that takes inputs near 1 to outputs near `gain`.
    fn matrix(&mut self, name: &str, shape: &[u64], gain: f32) {
        let n_in = shape[shape.len() - 1];
        self.affine(name, shape, GROUP, gain / (n_in as f32).sqrt());
    }

    fn affine(&mut self, name: &str, shape: &[u64], group: u64, deviation: f32) {
        let (n_in, rows) = shape.split_last().expect("a matrix has rows");
        let with = |last: u64| [rows, &[last]].concat();
        let scales = with(n_in / group);
        self.add(&format!("{name}.weight"), DType::U32, &with(n_in / 8), Fill::Codes);
        self.add(&format!("{name}.scales"), DType::Bf16, &scales, Fill::Scales(deviation));
        self.add(&format!("{name}.biases"), DType::Bf16, &scales, Fill::Biases(deviation));
    }

    fn layer(&mut self, geometry: &Geometry, layer: u32) {
        if layer == NGRAM_LAYER {
            self.ngram(&geometry.table);
        }
        self.hyper_connection("attn_hyper_connection", true);
        if (layer + 1).is_multiple_of(INTERVAL) {
            self.attention();
        } else {
            self.delta_net();
        }
        self.hyper_connection("mlp_hyper_connection", true);
        let router = Fill::Rows { len: HIDDEN, deviation: 4.0 / (HIDDEN as f32).sqrt() };
        self.add("mlp.gate.weight", DType::Bf16, &[EXPERTS, HIDDEN], router);
        for (name, n_out, n_in) in
            [("gate_proj", WIDTH, HIDDEN), ("up_proj", WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)]
        {
            self.matrix(&format!("mlp.switch_mlp.{name}"), &[EXPERTS, n_out, n_in], 2.0);
            self.matrix(&format!("mlp.shared_expert.{name}"), &[n_out, n_in], 2.0);
        }
        self.float("mlp.shared_expert_gate.weight", 1, HIDDEN, 2.0);
    }

    fn hyper_connection(&mut self, name: &str, injects: bool) {
        let wide = STREAMS * HIDDEN;
        self.norm(&format!("{name}.hc_norm.weight"), wide);
        // What comes out of the first is divided by the number of streams.
        self.matrix(&format!("{name}.input_mix_weight_down"), &[LOW_RANK, wide], 4.0);
        self.matrix(&format!("{name}.input_mix_weight_up"), &[wide, LOW_RANK], 1.5);
        if injects {
            self.float(&format!("{name}.block_inject_weight.weight"), STREAMS, wide, 4.0);
        }
    }

    fn delta_net(&mut self) {
        let (key_dim, heads, head_dim) = (16 * 128, 48, 128);
        let (channels, values) = (2 * key_dim + heads * head_dim, heads * head_dim);
        self.matrix("linear_attn.in_proj_qkv", &[channels, HIDDEN], 2.0);
        self.matrix("linear_attn.in_proj_z", &[values, HIDDEN], 2.0);
        self.float("linear_attn.in_proj_b.weight", heads, HIDDEN, 2.0);
        self.float("linear_attn.in_proj_a.weight", heads, HIDDEN, 1.0);
        self.plain("linear_attn.conv1d.weight", &[channels, 4, 1], 0.0, 0.5);
        // Logarithms of decay rates from 1 to 16, and of time steps from 0.001 to 0.1 (softplus is nearly exp there).
        let uniform = |from, to| Fill::Uniform { from, to };
        self.add("linear_attn.A_log", DType::Bf16, &[heads], uniform(0.0, 2.77));
        self.add("linear_attn.dt_bias", DType::Bf16, &[heads], uniform(-6.9, -2.3));
        self.norm("linear_attn.norm.weight", head_dim);
        self.matrix("linear_attn.out_proj", &[HIDDEN, values], 1.0);
    }

    fn attention(&mut self) {
        let (heads, kv_heads, head_dim) = (24, 2, 256);
        let (index_heads, index_dim) = (4, 128);
        self.matrix("self_attn.q_proj", &[2 * heads * head_dim, HIDDEN], 2.0);
        self.matrix("self_attn.k_proj", &[kv_heads * head_dim, HIDDEN], 2.0);
        self.matrix("self_attn.v_proj", &[kv_heads * head_dim, HIDDEN], 2.0);
        self.matrix("self_attn.o_proj", &[HIDDEN, heads * head_dim], 1.0);
        self.norm("self_attn.q_norm.weight", head_dim);
        self.norm("self_attn.k_norm.weight", head_dim);
        let rows = (index_heads + 1) * index_dim;
        self.float("self_attn.indexer.index_qk_proj.weight", rows, HIDDEN, 2.0);
        self.norm("self_attn.indexer.q_layernorm.weight", index_dim);
        self.norm("self_attn.indexer.k_layernorm.weight", index_dim);
    }

    fn ngram(&mut self, table: &NgramTable) {
        let wide = STREAMS * HIDDEN;
        for (name, values) in [
            ("layer_multipliers", multipliers(VOCAB).to_vec()),
            ("ngram_heads_vocab_sizes", table.sizes.clone()),
            ("ngram_heads_offsets", table.offsets.clone()),
        ] {
            let shape = [values.len() as u64];
            let name = format!("ple.ple_embedding.{name}");
            self.add(&name, DType::I64, &shape, Fill::Integers(values));
        }
        for shard in 0..SHARDS {
            let shape = [table.shard_rows(), NGRAM_DIM];
            self.affine(&shard_path(shard), &shape, NGRAM_GROUP, 1.0);
        }
        self.matrix("ple.key_proj", &[wide, HIDDEN], 1.0);
        self.matrix("ple.value_proj", &[HIDDEN, HIDDEN], 1.0);
        for name in ["norm_key", "norm_query", "norm_conv"] {
            self.norm(&format!("ple.{name}.weight"), wide);
        }
        self.plain("ple.conv1d.weight", &[wide, 4, 1], 0.0, 0.3);
    }

    fn vision(&mut self) {
        let (width, inner, patch) = (VISION_WIDTH, 4304, [2, 16, 16, 3]);
        "vision_tower.".clone_into(&mut self.prefix);
        let shape = [&[width], &patch[..]].concat();
        self.plain("patch_embed.proj.weight", &shape, 0.0, 0.03);
        self.plain("patch_embed.proj.bias", &[width], 0.0, 0.1);
        self.plain("pos_embed.weight", &[2304, width], 0.0, 0.1);
        for block in 0..27 {
            self.prefix = format!("vision_tower.blocks.{block}.");
            self.layer_norm("norm1");
            self.linear("attn.qkv", 3 * width, width);
            self.linear("attn.proj", width, width);
            self.layer_norm("norm2");
            self.linear("mlp.linear_fc1", inner, width);
            self.linear("mlp.linear_fc2", width, inner);
        }
        "vision_tower.merger.".clone_into(&mut self.prefix);
        self.layer_norm("norm");
        self.linear("linear_fc1", 4 * width, 4 * width);
        self.linear("linear_fc2", HIDDEN, 4 * width);
    }

    fn layer_norm(&mut self, name: &str) {
        self.norm(&format!("{name}.weight"), VISION_WIDTH);
        self.plain(&format!("{name}.bias"), &[VISION_WIDTH], 0.0, 0.1);
    }

    fn linear(&mut self, name: &str, n_out: u64, n_in: u64) {
        self.float(&format!("{name}.weight"), n_out, n_in, 1.0);
        self.plain(&format!("{name}.bias"), &[n_out], 0.0, 0.1);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_published_model_has_the_published_totals() {
        let tensors = tensors(&Geometry::published());
        assert_eq!(tensors.len(), 3215);
        assert_eq!(tensors.iter().map(Tensor::bytes).sum::<u64>(), 103_769_745_912);
        assert_eq!(part_bytes(&tensors, Part::Experts), 67_947_724_800);
        assert_eq!(part_bytes(&tensors, Part::Ngram), 32_000_153_600);
        assert_eq!(part_bytes(&tensors, Part::Text), 2_924_005_400);
        assert_eq!(part_bytes(&tensors, Part::Vision), 897_862_112);
        let vision = tensors.iter().filter(|tensor| Part::of(&tensor.name) == Part::Vision);
        assert_eq!(vision.count(), 333);
    }

    #[test]
    fn an_expert_has_nine_slices_of_the_published_sizes() {
        let tensors = tensors(&Geometry::published());
        let experts =
            tensors.iter().filter(|tensor| tensor.name.contains("layers.8.mlp.switch_mlp."));
        let slices: Vec<u64> = experts.map(|tensor| tensor.bytes() / EXPERTS).collect();
        assert_eq!(slices, [819_200, 51_200, 51_200].repeat(3));
        assert_eq!(slices.iter().sum::<u64>(), 2_764_800);
    }

    #[test]
    fn names_are_unique_and_few_layers_are_the_first_of_many() {
        let all = tensors(&Geometry::published());
        let names: BTreeSet<&str> = all.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        let few = tensors(&Geometry::small(4, 1 << 10));
        for tensor in few.iter().filter(|tensor| Part::of(&tensor.name) != Part::Ngram) {
            let same = all.iter().find(|other| other.name == tensor.name);
            assert_eq!(
                same.map(|other| (&other.shape, other.dtype)),
                Some((&tensor.shape, tensor.dtype))
            );
        }
        let per_layer = few.iter().filter(|tensor| tensor.name.contains("layers.3.")).count();
        assert!(few.iter().any(|tensor| {
            tensor.name.ends_with("layers.3.self_attn.indexer.index_qk_proj.weight")
        }));
        assert_eq!(per_layer, all.iter().filter(|t| t.name.contains("layers.47.")).count());
    }

    #[test]
    fn torn_modules_and_overrides_name_modules_that_are_there() {
        for geometry in [Geometry::published(), Geometry::small(4, 1 << 10)] {
            let names: BTreeSet<String> =
                tensors(&geometry).into_iter().map(|tensor| tensor.name).collect();
            for module in geometry.torn() {
                assert!(names.contains(&format!("{module}.scales")), "{module}");
            }
            for path in overrides() {
                assert!(names.contains(&format!("language_model.{path}.scales")), "{path}");
            }
        }
    }
}
