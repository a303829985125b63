//! What a model is made of: bytes by part, expert types and sizes by layer. For people who choose a budget.

use std::collections::BTreeMap;

use quant::BlockType;
use units::{ExpertKey, LayerIndex};

use crate::config::LayerKind;
use crate::tensors::Role;
use crate::{Checkpoint, Model};

/// Tensors and bytes of a part of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartBytes {
    /// How many tensors.
    pub tensors: u64,
    /// Their bytes in the files.
    pub bytes: u64,
}

impl PartBytes {
    const fn add(&mut self, bytes: u64) {
        self.tensors += 1;
        self.bytes += bytes;
    }
}

/// The experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerAudit {
    /// What mixes positions.
    pub kind: LayerKind,
    /// Storage of the gate matrices.
    pub gate: BlockType,
    /// Storage of the up matrices.
    pub up: BlockType,
    /// Storage of the down matrices.
    pub down: BlockType,
    /// Payload of one expert.
    pub record_bytes: u64,
    /// The largest slot that an expert of this layer needs.
    pub slot_bytes: u64,
}

/// What a model is made of. The parts add up to all tensors of the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    /// Experts that slots hold, the trunk's.
    pub routed: PartBytes,
    /// Attention, head norms included.
    pub attention: PartBytes,
    /// Gated delta rule.
    pub delta_net: PartBytes,
    /// Shared experts.
    pub shared: PartBytes,
    /// Routers.
    pub router: PartBytes,
    /// Token embedding; also the head where the file has no other.
    pub embedding: PartBytes,
    /// Projection to the vocabulary.
    pub head: PartBytes,
    /// Norms before mixers, experts and head.
    pub norms: PartBytes,
    /// Mixing of residual streams.
    pub streams: PartBytes,
    /// What makes an addition to the residual of n-gram rows.
    pub ngram: PartBytes,
    /// The n-gram table, whose rows are read as tokens ask for them.
    pub ngram_table: PartBytes,
    /// Draft blocks, experts included; not loaded.
    pub draft: PartBytes,
    /// Whether the embedding is also the head.
    pub tied: bool,
    /// Bytes by storage type, of all tensors.
    pub by_type: Vec<(BlockType, PartBytes)>,
    /// Trunk layers.
    pub layers: Vec<LayerAudit>,
}

impl Audit {
    /// Adds up a model that was bound from this checkpoint.
    pub fn of(checkpoint: &Checkpoint, model: &Model) -> Self {
        let mut audit = Self {
            routed: PartBytes::default(),
            attention: PartBytes::default(),
            delta_net: PartBytes::default(),
            shared: PartBytes::default(),
            router: PartBytes::default(),
            embedding: PartBytes::default(),
            head: PartBytes::default(),
            norms: PartBytes::default(),
            streams: PartBytes::default(),
            ngram: PartBytes::default(),
            ngram_table: PartBytes::default(),
            draft: PartBytes::default(),
            tied: model.tensors.output.name == model.tensors.embed.name,
            by_type: Vec::new(),
            layers: layers(model),
        };
        model.tensors.each(&mut |role, tensor| audit.part(role).add(tensor.bytes));
        model.records.tensors().for_each(|tensor| audit.routed.add(tensor.bytes));
        if let Some(table) = &model.ngram_table {
            audit.ngram_table.add(table.tensor.bytes);
        }
        let mut by_type: BTreeMap<BlockType, PartBytes> = BTreeMap::new();
        for tensor in checkpoint.directory.iter() {
            by_type.entry(tensor.block_type).or_default().add(tensor.bytes);
            if model.config.is_draft(tensor) {
                audit.draft.add(tensor.bytes);
            }
        }
        audit.by_type = by_type.into_iter().collect();
        audit
    }

    const fn part(&mut self, role: Role) -> &mut PartBytes {
        match role {
            Role::Embedding => &mut self.embedding,
            Role::Head => &mut self.head,
            Role::Norm => &mut self.norms,
            Role::Streams => &mut self.streams,
            Role::Ngram => &mut self.ngram,
            Role::Attention => &mut self.attention,
            Role::DeltaNet => &mut self.delta_net,
            Role::Router => &mut self.router,
            Role::Shared => &mut self.shared,
        }
    }

    /// Every part with its name, in the order of a table.
    pub const fn parts(&self) -> [(&'static str, PartBytes); 12] {
        [
            ("routed experts", self.routed),
            ("attention", self.attention),
            ("delta net", self.delta_net),
            ("shared experts", self.shared),
            ("routers", self.router),
            ("embedding", self.embedding),
            ("head", self.head),
            ("norms", self.norms),
            ("residual streams", self.streams),
            ("n-gram block", self.ngram),
            ("n-gram table, read by row", self.ngram_table),
            ("draft, not loaded", self.draft),
        ]
    }

    /// Bytes that stay in memory whatever the budget: all but routed experts, n-gram table and draft.
    pub fn resident_bytes(&self) -> u64 {
        let all: u64 = self.parts().iter().map(|(_, part)| part.bytes).sum();
        all - self.routed.bytes - self.ngram_table.bytes - self.draft.bytes
    }
}

fn layers(model: &Model) -> Vec<LayerAudit> {
    let kinds = model.config.layers.iter().enumerate();
    let layer = |(index, kind): (usize, &LayerKind)| {
        let layer = index as u32;
        let slots = (0..model.config.n_experts)
            .map(|expert| model.records.slot_bytes(ExpertKey::new(layer, expert)));
        let records = model.records.layer(LayerIndex(layer));
        LayerAudit {
            kind: *kind,
            gate: records.gate.block_type,
            up: records.up.as_ref().unwrap_or(&records.gate).block_type,
            down: records.down.block_type,
            record_bytes: records.record_bytes(),
            slot_bytes: slots.max().unwrap_or(0),
        }
    };
    kinds.map(layer).collect()
}
