//! Which tensor plays which role.

use crate::directory::TensorInfo;
use crate::records::LayerRecords;

/// Resident tensors by role.
#[derive(Debug, Clone)]
pub struct ModelTensors {
    /// `[vocab, hidden]`.
    pub embed: TensorInfo,
    /// What the head takes from the residual; it injects nothing.
    pub head_input: InputTensors,
    /// `[vocab, hidden]`; the embedding itself when the file has no head.
    pub output: TensorInfo,
    /// Per trunk layer.
    pub layers: Vec<LayerTensors>,
}

/// Resident tensors of a layer.
#[derive(Debug, Clone)]
pub struct LayerTensors {
    /// What is added to the residual before everything else: rows of the n-gram table.
    pub ngram: Option<NgramTensors>,
    /// What the mixer takes from the residual, and how its output returns.
    pub mixer_input: InputTensors,
    /// What the experts take from the residual, and how their output returns.
    pub experts_input: InputTensors,
    /// Attention or DeltaNet.
    pub mixer: MixerTensors,
    /// `[n_experts, hidden]`.
    pub router: TensorInfo,
    /// The always-on expert.
    pub shared: Option<SharedTensors>,
}

/// How a block takes its input from the residual, and gives its output back.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "two for each layer, for as long as the model lives")]
pub enum InputTensors {
    /// One stream: an RMS norm by `[hidden]`; the output is added.
    Norm(TensorInfo),
    /// Several streams: normed each, mixed into one; the output is injected into all.
    Streams(StreamTensors),
}

/// Mixes several residual streams into one input.
#[derive(Debug, Clone)]
pub struct StreamTensors {
    /// `[streams·hidden]`.
    pub norm: TensorInfo,
    /// `[rank, streams·hidden]`.
    pub down: TensorInfo,
    /// `[streams·hidden, rank]`.
    pub up: TensorInfo,
    /// How much of the output each stream gets, `[streams, streams·hidden]`; the head has no output.
    pub inject: Option<TensorInfo>,
}

/// What makes an addition to all residual streams of rows of the n-gram table.
#[derive(Debug, Clone)]
pub struct NgramTensors {
    /// `[streams·hidden, row values of a token]`.
    pub key: TensorInfo,
    /// `[hidden, row values of a token]`.
    pub value: TensorInfo,
    /// `[streams·hidden]`.
    pub key_norm: TensorInfo,
    /// `[streams·hidden]`.
    pub query_norm: TensorInfo,
    /// `[streams·hidden]`.
    pub conv_norm: TensorInfo,
    /// `[streams·hidden, taps]`.
    pub conv: TensorInfo,
    /// What all values of the table are multiplied by, `[1]`; there if they are E4M3.
    pub scale: Option<TensorInfo>,
}

/// What mixes positions.
#[derive(Debug, Clone)]
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
    /// What chooses the tokens to see, if not all are seen.
    pub indexer: Option<IndexerTensors>,
}

/// Projections and norms of an attention indexer.
#[derive(Debug, Clone)]
pub struct IndexerTensors {
    /// `[indexer heads·indexer dim, hidden]`.
    pub q: TensorInfo,
    /// `[indexer dim, hidden]`.
    pub k: TensorInfo,
    /// `[indexer dim]`.
    pub q_norm: TensorInfo,
    /// `[indexer dim]`.
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

/// The block after the trunk that guesses the token after the next. It shares embedding and head with the trunk.
#[derive(Debug, Clone)]
pub struct DraftTensors {
    /// Norm of the next token's embedding, `[hidden]`.
    pub embed_norm: TensorInfo,
    /// Norm of the trunk's residual, all streams as one: `[streams·hidden]`.
    pub hidden_norm: TensorInfo,
    /// What makes the block's input of the two.
    pub project: DraftProjection,
    /// What the head takes from the block's residual.
    pub head_input: InputTensors,
    /// The block itself, which is one of attention.
    pub layer: LayerTensors,
    /// Its routed experts.
    pub experts: LayerRecords,
}

/// What makes a draft block's input of the next token's embedding and of one stream of the trunk's residual.
#[derive(Debug, Clone)]
pub enum DraftProjection {
    /// `[hidden, 2·hidden]`, of the embedding and of the stream side by side.
    Joined(TensorInfo),
    /// A matrix `[hidden, hidden]` for each; the products are added.
    Apart {
        /// Of the embedding.
        embed: TensorInfo,
        /// Of a stream.
        hidden: TensorInfo,
    },
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
    /// Mixing of residual streams, with its norms.
    Streams,
    /// What makes an addition to the residual of n-gram rows. The table itself is no resident tensor.
    Ngram,
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
        self.head_input.each(visit);
        for layer in &self.layers {
            layer.each(visit);
        }
    }
}

impl DraftTensors {
    /// Calls `visit` with every resident tensor of the block, once each.
    pub fn each<'a>(&'a self, visit: &mut dyn FnMut(Role, &'a TensorInfo)) {
        visit(Role::Norm, &self.embed_norm);
        visit(Role::Norm, &self.hidden_norm);
        self.project.tensors().for_each(|tensor| visit(Role::Streams, tensor));
        self.head_input.each(visit);
        self.layer.each(visit);
    }
}

impl DraftProjection {
    /// One matrix or two.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        let (first, second) = match self {
            Self::Joined(joined) => (joined, None),
            Self::Apart { embed, hidden } => (embed, Some(hidden)),
        };
        std::iter::once(first).chain(second)
    }
}

impl InputTensors {
    /// Calls `visit` with every tensor, once each.
    pub fn each<'a>(&'a self, visit: &mut dyn FnMut(Role, &'a TensorInfo)) {
        match self {
            Self::Norm(norm) => visit(Role::Norm, norm),
            Self::Streams(StreamTensors { norm, down, up, inject }) => {
                for tensor in [norm, down, up].into_iter().chain(inject) {
                    visit(Role::Streams, tensor);
                }
            }
        }
    }
}

impl LayerTensors {
    /// Calls `visit` with every resident tensor of the layer, once each.
    pub fn each<'a>(&'a self, visit: &mut dyn FnMut(Role, &'a TensorInfo)) {
        if let Some(ngram) = &self.ngram {
            let NgramTensors { key, value, key_norm, query_norm, conv_norm, conv, scale } = ngram;
            let tensors = [key, value, key_norm, query_norm, conv_norm, conv];
            for tensor in tensors.into_iter().chain(scale) {
                visit(Role::Ngram, tensor);
            }
        }
        self.mixer_input.each(visit);
        self.experts_input.each(visit);
        visit(Role::Router, &self.router);
        match &self.mixer {
            MixerTensors::Attention(tensors) => {
                tensors.each(&mut |tensor| visit(Role::Attention, tensor));
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

impl AttentionTensors {
    fn each<'a>(&'a self, visit: &mut dyn FnMut(&'a TensorInfo)) {
        let Self { q, k, v, output, q_norm, k_norm, indexer } = self;
        [q, k, v, output, q_norm, k_norm].into_iter().for_each(&mut *visit);
        if let Some(IndexerTensors { q, k, q_norm, k_norm }) = indexer {
            [q, k, q_norm, k_norm].into_iter().for_each(visit);
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
