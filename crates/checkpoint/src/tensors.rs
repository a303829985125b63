//! Which tensor plays which role, with every shape checked.

use std::collections::BTreeSet;

use crate::Checkpoint;
use crate::config::{Family, LayerKind, ModelConfig};
use crate::directory::TensorInfo;
use crate::error::{CheckpointError, printable};
use crate::records::Records;

/// Resident tensors by role.
#[derive(Debug, Clone)]
pub struct ModelTensors {
    /// `[vocab, hidden]`.
    pub embed: TensorInfo,
    /// `[hidden]`.
    pub output_norm: TensorInfo,
    /// `[vocab, hidden]`; the embedding itself when the file has no head.
    pub output: TensorInfo,
    /// Per trunk layer.
    pub layers: Vec<LayerTensors>,
}

/// Resident tensors of a layer.
#[derive(Debug, Clone)]
pub struct LayerTensors {
    /// Norm before the mixer, `[hidden]`.
    pub pre_norm: TensorInfo,
    /// Norm before the experts, `[hidden]`.
    pub post_norm: TensorInfo,
    /// Attention or DeltaNet.
    pub mixer: MixerTensors,
    /// `[n_experts, hidden]`.
    pub router: TensorInfo,
    /// The always-on expert.
    pub shared: Option<SharedTensors>,
}

/// What mixes positions.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "one for each layer, for as long as the model lives")]
pub enum MixerTensors {
    /// Attention over a KV cache.
    Attention(AttentionTensors),
    /// Gated delta rule.
    DeltaNet(DeltaNetTensors),
}

/// Projections and head norms of attention.
#[derive(Debug, Clone)]
pub struct AttentionTensors {
    /// `[heads·dim, hidden]`; twice as many rows, query and gate by head, when gated.
    pub q: TensorInfo,
    /// `[kv_heads·dim, hidden]`.
    pub k: TensorInfo,
    /// `[kv_heads·dim, hidden]`.
    pub v: TensorInfo,
    /// `[hidden, heads·dim]`.
    pub output: TensorInfo,
    /// `[dim]`.
    pub q_norm: TensorInfo,
    /// `[dim]`.
    pub k_norm: TensorInfo,
}

/// Projections and constants of a DeltaNet layer.
#[derive(Debug, Clone)]
pub struct DeltaNetTensors {
    /// Queries, keys, values and output gate.
    pub input: DeltaNetInput,
    /// Write strength and decay.
    pub ba: DeltaNetBa,
    /// `[channels, taps]`.
    pub conv: TensorInfo,
    /// `[value_heads]`.
    pub dt_bias: TensorInfo,
    /// `-exp(A_log)`, `[value_heads]`.
    pub a: TensorInfo,
    /// `[value_dim]`.
    pub norm: TensorInfo,
    /// `[hidden, value_heads·value_dim]`.
    pub output: TensorInfo,
}

/// The two layouts of the input projection.
#[derive(Debug, Clone)]
pub enum DeltaNetInput {
    /// Rows of all queries, all keys, all values; and the gate.
    Split {
        /// `[channels, hidden]`.
        qkv: TensorInfo,
        /// `[value_heads·value_dim, hidden]`.
        gate: TensorInfo,
    },
    /// One matrix, rows grouped by key head: query, key, values, gates.
    Legacy {
        /// `[channels + value_heads·value_dim, hidden]`.
        ssm_in: TensorInfo,
    },
}

/// The two layouts of write strength and decay.
#[derive(Debug, Clone)]
pub enum DeltaNetBa {
    /// One matrix, rows grouped by key head: betas, alphas.
    Grouped {
        /// `[2·value_heads, hidden]`.
        ba: TensorInfo,
    },
    /// Two matrices.
    Split {
        /// `[value_heads, hidden]`.
        beta: TensorInfo,
        /// `[value_heads, hidden]`.
        alpha: TensorInfo,
    },
}

/// The always-on expert.
#[derive(Debug, Clone)]
pub struct SharedTensors {
    /// `[hidden]`.
    pub gate_inp: TensorInfo,
    /// `[shared_width, hidden]`.
    pub gate: TensorInfo,
    /// `[shared_width, hidden]`.
    pub up: TensorInfo,
    /// `[hidden, shared_width]`.
    pub down: TensorInfo,
}

/// What a resident tensor is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Token embedding, also the head when there is no other.
    Embedding,
    /// Projection to the vocabulary.
    Head,
    /// Norms before mixers, experts and head.
    Norm,
    /// Attention, head norms included.
    Attention,
    /// Gated delta rule.
    DeltaNet,
    /// Router.
    Router,
    /// Shared expert.
    Shared,
}

impl ModelTensors {
    /// Calls `visit` with every resident tensor of the file, once each.
    pub fn each<'a>(&'a self, visit: &mut dyn FnMut(Role, &'a TensorInfo)) {
        visit(Role::Embedding, &self.embed);
        if self.output.name != self.embed.name {
            visit(Role::Head, &self.output);
        }
        visit(Role::Norm, &self.output_norm);
        for layer in &self.layers {
            layer.each(visit);
        }
    }
}

impl LayerTensors {
    fn each<'a>(&'a self, visit: &mut dyn FnMut(Role, &'a TensorInfo)) {
        visit(Role::Norm, &self.pre_norm);
        visit(Role::Norm, &self.post_norm);
        visit(Role::Router, &self.router);
        match &self.mixer {
            MixerTensors::Attention(AttentionTensors { q, k, v, output, q_norm, k_norm }) => {
                for tensor in [q, k, v, output, q_norm, k_norm] {
                    visit(Role::Attention, tensor);
                }
            }
            MixerTensors::DeltaNet(tensors) => {
                tensors.each(&mut |tensor| visit(Role::DeltaNet, tensor));
            }
        }
        if let Some(SharedTensors { gate_inp, gate, up, down }) = &self.shared {
            for tensor in [gate_inp, gate, up, down] {
                visit(Role::Shared, tensor);
            }
        }
    }
}

impl DeltaNetTensors {
    fn each<'a>(&'a self, visit: &mut dyn FnMut(&'a TensorInfo)) {
        let Self { input, ba, conv, dt_bias, a, norm, output } = self;
        match input {
            DeltaNetInput::Split { qkv, gate } => [qkv, gate].into_iter().for_each(&mut *visit),
            DeltaNetInput::Legacy { ssm_in } => visit(ssm_in),
        }
        match ba {
            DeltaNetBa::Grouped { ba } => visit(ba),
            DeltaNetBa::Split { beta, alpha } => [beta, alpha].into_iter().for_each(&mut *visit),
        }
        [conv, dt_bias, a, norm, output].into_iter().for_each(visit);
    }
}

/// Finds tensors and checks shapes.
pub(crate) struct Finder<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) config: &'a ModelConfig,
}

impl<'a> Finder<'a> {
    pub(crate) const fn new(checkpoint: &'a Checkpoint, config: &'a ModelConfig) -> Self {
        Self { checkpoint, config }
    }

    pub(crate) fn resident(&self) -> Result<ModelTensors, CheckpointError> {
        let (hidden, vocab) = (u64::from(self.config.hidden), u64::from(self.config.vocab));
        let embed = self.tensor("token_embd.weight", &[vocab, hidden])?;
        let output = match self.checkpoint.directory.get("output.weight") {
            Some(_) => self.tensor("output.weight", &[vocab, hidden])?,
            None => embed.clone(),
        };
        let output_norm = self.tensor("output_norm.weight", &[hidden])?;
        let layers =
            (0..self.config.n_layers).map(|layer| self.layer(layer)).collect::<Result<_, _>>()?;
        Ok(ModelTensors { embed, output_norm, output, layers })
    }

    fn layer(&self, layer: u32) -> Result<LayerTensors, CheckpointError> {
        let config = self.config;
        let hidden = u64::from(config.hidden);
        let name = |part: &str| format!("blk.{layer}.{part}");
        let post_norm = match config.family {
            Family::Qwen3Moe => "ffn_norm.weight",
            Family::Qwen3Next | Family::Qwen35Moe => "post_attention_norm.weight",
        };
        let mixer = match config.layers[layer as usize] {
            LayerKind::Attention => MixerTensors::Attention(self.attention(&name)?),
            LayerKind::DeltaNet => MixerTensors::DeltaNet(self.delta_net(&name)?),
        };
        let shared = match config.shared_width {
            Some(width) => Some(self.shared(&name, u64::from(width))?),
            None => None,
        };
        Ok(LayerTensors {
            pre_norm: self.tensor(&name("attn_norm.weight"), &[hidden])?,
            post_norm: self.tensor(&name(post_norm), &[hidden])?,
            mixer,
            router: self
                .tensor(&name("ffn_gate_inp.weight"), &[u64::from(config.n_experts), hidden])?,
            shared,
        })
    }

    fn attention(
        &self,
        name: &dyn Fn(&str) -> String,
    ) -> Result<AttentionTensors, CheckpointError> {
        let config = self.config;
        let (hidden, dim) = (u64::from(config.hidden), u64::from(config.head_dim));
        let heads = u64::from(config.heads) * dim;
        let queries = if config.gated_attention { 2 * heads } else { heads };
        let kv = u64::from(config.kv_heads) * dim;
        Ok(AttentionTensors {
            q: self.tensor(&name("attn_q.weight"), &[queries, hidden])?,
            k: self.tensor(&name("attn_k.weight"), &[kv, hidden])?,
            v: self.tensor(&name("attn_v.weight"), &[kv, hidden])?,
            output: self.tensor(&name("attn_output.weight"), &[hidden, heads])?,
            q_norm: self.tensor(&name("attn_q_norm.weight"), &[dim])?,
            k_norm: self.tensor(&name("attn_k_norm.weight"), &[dim])?,
        })
    }

    fn delta_net(&self, name: &dyn Fn(&str) -> String) -> Result<DeltaNetTensors, CheckpointError> {
        let shape = self.config.delta_net.expect("families with DeltaNet layers have their shape");
        let hidden = u64::from(self.config.hidden);
        let value_heads = u64::from(shape.value_heads);
        let values = value_heads * u64::from(shape.value_dim);
        let channels = 2 * u64::from(shape.key_heads) * u64::from(shape.key_dim) + values;
        let has = |part: &str| self.checkpoint.directory.get(&name(part)).is_some();
        // Layouts whose rows are grouped by key head go with head order `Grouped`; Qwen3.5 files never had them.
        let grouped = self.config.family == Family::Qwen3Next;
        let input = if grouped && has("ssm_in.weight") {
            DeltaNetInput::Legacy {
                ssm_in: self.tensor(&name("ssm_in.weight"), &[channels + values, hidden])?,
            }
        } else {
            DeltaNetInput::Split {
                qkv: self.tensor(&name("attn_qkv.weight"), &[channels, hidden])?,
                gate: self.tensor(&name("attn_gate.weight"), &[values, hidden])?,
            }
        };
        let ba = if grouped && !has("ssm_beta.weight") {
            DeltaNetBa::Grouped {
                ba: self.tensor(&name("ssm_ba.weight"), &[2 * value_heads, hidden])?,
            }
        } else {
            DeltaNetBa::Split {
                beta: self.tensor(&name("ssm_beta.weight"), &[value_heads, hidden])?,
                alpha: self.tensor(&name("ssm_alpha.weight"), &[value_heads, hidden])?,
            }
        };
        Ok(DeltaNetTensors {
            input,
            ba,
            conv: self
                .tensor(&name("ssm_conv1d.weight"), &[channels, u64::from(shape.conv_kernel)])?,
            dt_bias: self.tensor(&name("ssm_dt.bias"), &[value_heads])?,
            a: self.tensor(&name("ssm_a"), &[value_heads])?,
            norm: self.tensor(&name("ssm_norm.weight"), &[u64::from(shape.value_dim)])?,
            output: self.tensor(&name("ssm_out.weight"), &[hidden, values])?,
        })
    }

    fn shared(
        &self,
        name: &dyn Fn(&str) -> String,
        width: u64,
    ) -> Result<SharedTensors, CheckpointError> {
        let hidden = u64::from(self.config.hidden);
        Ok(SharedTensors {
            gate_inp: self.tensor(&name("ffn_gate_inp_shexp.weight"), &[hidden])?,
            gate: self.tensor(&name("ffn_gate_shexp.weight"), &[width, hidden])?,
            up: self.tensor(&name("ffn_up_shexp.weight"), &[width, hidden])?,
            down: self.tensor(&name("ffn_down_shexp.weight"), &[hidden, width])?,
        })
    }

    /// Refuses tensors that nothing uses: leaving out a bias, a scale or a layer would change the output silently.
    /// Draft blocks are known and left out.
    pub(crate) fn all_used(
        &self,
        tensors: &ModelTensors,
        records: &Records,
    ) -> Result<(), CheckpointError> {
        let mut used: BTreeSet<&str> = BTreeSet::new();
        tensors.each(&mut |_, tensor| {
            used.insert(&tensor.name);
        });
        used.extend(records.tensors().map(|tensor| tensor.name.as_str()));
        let mut unknown =
            self.checkpoint.directory.iter().filter(|tensor| {
                !used.contains(tensor.name.as_str()) && !self.config.is_draft(tensor)
            });
        let Some(first) = unknown.next() else { return Ok(()) };
        Err(CheckpointError::UnknownTensor {
            file: self.checkpoint.files[first.file.get()].path.clone(),
            tensor: printable(&first.name),
            others: unknown.count(),
            family: self.config.family,
            blocks: self.config.n_layers + self.config.n_draft_layers,
        })
    }

    /// The tensor of this name, with leading dimensions of 1 left out on both sides.
    pub(crate) fn tensor(&self, name: &str, needed: &[u64]) -> Result<TensorInfo, CheckpointError> {
        let Some(tensor) = self.checkpoint.directory.get(name) else {
            return Err(CheckpointError::MissingTensor {
                file: self.checkpoint.files[0].path.clone(),
                tensor: name.to_owned(),
                needed: format!(
                    "a {} model of {} layers has it",
                    self.config.family, self.config.n_layers
                ),
            });
        };
        let strip = |shape: &[u64]| -> Vec<u64> {
            let ones = shape.iter().take(shape.len() - 1).take_while(|n| **n == 1).count();
            shape[ones..].to_vec()
        };
        if strip(&tensor.shape) != strip(needed) {
            return Err(CheckpointError::Shape {
                file: self.checkpoint.files[tensor.file.get()].path.clone(),
                tensor: name.to_owned(),
                found: tensor.shape.clone(),
                needed: format!("{needed:?} by the metadata"),
            });
        }
        Ok(TensorInfo { shape: needed.to_vec(), ..tensor.clone() })
    }
}
