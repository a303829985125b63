//! Finds the tensors of a family by their names and checks every shape.

use std::collections::BTreeSet;

use quant::BlockType;

use crate::Checkpoint;
use crate::config::{Family, HyperShape, IndexerShape, LayerKind, ModelConfig, NgramShape};
use crate::directory::TensorInfo;
use crate::error::{CheckpointError, printable};
use crate::records::{LayerRecords, NgramTable, Records};
use crate::tensors::{
    AttentionTensors, DeltaNetBa, DeltaNetInput, DeltaNetTensors, DraftProjection, DraftTensors,
    IndexerTensors, InputTensors, LayerTensors, MixerTensors, ModelTensors, NgramTensors,
    SharedTensors, StreamTensors,
};

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
        let head_input = match self.config.hyper {
            None => InputTensors::Norm(self.tensor("output_norm.weight", &[hidden])?),
            Some(shape) => {
                self.streams(&|part| format!("output_hc_{part}.weight"), shape, false)?
            }
        };
        let layer = |(layer, kind): (u32, &LayerKind)| self.layer(layer, *kind);
        let layers = (0..).zip(&self.config.layers).map(layer).collect::<Result<_, _>>()?;
        Ok(ModelTensors { embed, head_input, output, layers })
    }

    /// Block `layer` of the file.
    fn layer(&self, layer: u32, kind: LayerKind) -> Result<LayerTensors, CheckpointError> {
        let config = self.config;
        let hidden = u64::from(config.hidden);
        let name = |part: &str| format!("blk.{layer}.{part}");
        let input = |norm: &str, streams: &str| match config.hyper {
            None => Ok(InputTensors::Norm(self.tensor(&name(norm), &[hidden])?)),
            Some(shape) => {
                self.streams(&|part| name(&format!("{streams}_{part}.weight")), shape, true)
            }
        };
        let post_norm = match config.family {
            Family::Qwen3Moe => "ffn_norm.weight",
            Family::Qwen3Next | Family::Qwen35Moe | Family::Qwen4Exp => {
                "post_attention_norm.weight"
            }
        };
        let ngram = match &config.ngram {
            Some(shape) if shape.layer == layer => Some(self.ngram(&name, shape)?),
            _ => None,
        };
        let mixer = match kind {
            LayerKind::Attention => MixerTensors::Attention(self.attention(&name)?),
            LayerKind::DeltaNet => MixerTensors::DeltaNet(self.delta_net(&name)?),
        };
        let shared = match config.shared_width {
            Some(width) => Some(self.shared(&name, u64::from(width))?),
            None => None,
        };
        Ok(LayerTensors {
            ngram,
            mixer_input: input("attn_norm.weight", "hc_attn")?,
            experts_input: input(post_norm, "hc_ffn")?,
            mixer,
            router: self
                .tensor(&name("ffn_gate_inp.weight"), &[u64::from(config.n_experts), hidden])?,
            shared,
        })
    }

    /// The four (before the head: three) tensors that mix residual streams.
    fn streams(
        &self,
        name: &dyn Fn(&str) -> String,
        shape: HyperShape,
        injects: bool,
    ) -> Result<InputTensors, CheckpointError> {
        let [streams, rank] = [shape.streams, shape.rank].map(u64::from);
        let all = streams * u64::from(self.config.hidden);
        let inject =
            if injects { Some(self.tensor(&name("inject"), &[streams, all])?) } else { None };
        Ok(InputTensors::Streams(StreamTensors {
            norm: self.tensor(&name("norm"), &[all])?,
            down: self.tensor(&name("down"), &[rank, all])?,
            up: self.tensor(&name("up"), &[all, rank])?,
            inject,
        }))
    }

    fn ngram(
        &self,
        name: &dyn Fn(&str) -> String,
        shape: &NgramShape,
    ) -> Result<NgramTensors, CheckpointError> {
        let hidden = u64::from(self.config.hidden);
        let all = hidden * self.config.hyper.map_or(1, |shape| u64::from(shape.streams));
        let width = shape.width() as u64;
        Ok(NgramTensors {
            key: self.tensor(&name("ple_key.weight"), &[all, width])?,
            value: self.tensor(&name("ple_value.weight"), &[hidden, width])?,
            key_norm: self.tensor(&name("ple_norm_key.weight"), &[all])?,
            query_norm: self.tensor(&name("ple_norm_query.weight"), &[all])?,
            conv_norm: self.tensor(&name("ple_norm_conv.weight"), &[all])?,
            conv: self.tensor(&name("ple_conv1d.weight"), &[all, u64::from(shape.conv_kernel)])?,
            scale: self.ngram_scale()?,
        })
    }

    /// The scale of the n-gram table: there if and only if its values are E4M3.
    fn ngram_scale(&self) -> Result<Option<TensorInfo>, CheckpointError> {
        let [table, scale] =
            [NgramTable::NAME, NgramTable::SCALE].map(|name| self.checkpoint.directory.get(name));
        // A table that is not there is missed where it is looked for.
        let Some(table) = table else { return Ok(None) };
        match (table.block_type, scale) {
            (BlockType::E4m3, Some(_)) => self.tensor(NgramTable::SCALE, &[1]).map(Some),
            (_, None) if table.block_type != BlockType::E4m3 => Ok(None),
            (_, None) => Err(CheckpointError::MissingTensor {
                file: self.checkpoint.files[table.file.get()].path.clone(),
                tensor: self.spelled(NgramTable::SCALE),
                needed: format!("`{}` holds E4M3 values", printable(table.spelling())),
            }),
            (found, Some(scale)) => Err(CheckpointError::Unsupported {
                file: self.checkpoint.files[scale.file.get()].path.clone(),
                what: format!("tensor `{}`", printable(scale.spelling())),
                found: format!(
                    "a scale beside values of {found}, `{}`",
                    printable(table.spelling())
                ),
                supported: "a scale of E4M3 values".to_owned(),
            }),
        }
    }

    /// The table that n-gram rows are read from, `[rows, values]`; never resident.
    pub(crate) fn ngram_table(&self) -> Result<Option<NgramTable>, CheckpointError> {
        let Some(shape) = &self.config.ngram else { return Ok(None) };
        let name = NgramTable::NAME;
        let listed = self.checkpoint.directory.get(name).map(|tensor| tensor.shape.as_slice());
        let rows = match listed {
            // More rows than are used: the file's table is padded.
            Some([rows, _]) => shape.table_rows().max(*rows),
            _ => shape.table_rows(),
        };
        let tensor = self.tensor(name, &[rows, u64::from(shape.row_width)])?;
        Ok(Some(NgramTable { tensor }))
    }

    /// The first draft block with everything that makes it one.
    pub(crate) fn draft(&self) -> Result<Option<DraftTensors>, CheckpointError> {
        if self.config.n_draft_layers == 0 {
            return Ok(None);
        }
        let block = self.config.n_layers;
        let hidden = u64::from(self.config.hidden);
        let name = |part: &str| format!("blk.{block}.nextn.{part}");
        let (head_input, all) = match self.config.hyper {
            None => {
                let norm = self.tensor(&name("shared_head_norm.weight"), &[hidden])?;
                (InputTensors::Norm(norm), hidden)
            }
            Some(shape) => {
                let part = |part: &str| name(&format!("hc_head_{part}.weight"));
                (self.streams(&part, shape, false)?, u64::from(shape.streams) * hidden)
            }
        };
        let apart = name("embed_proj.weight");
        let project = if self.checkpoint.directory.get(&apart).is_some() {
            DraftProjection::Apart {
                embed: self.tensor(&apart, &[hidden, hidden])?,
                hidden: self.tensor(&name("hidden_proj.weight"), &[hidden, hidden])?,
            }
        } else {
            DraftProjection::Joined(self.tensor(&name("eh_proj.weight"), &[hidden, 2 * hidden])?)
        };
        let draft = DraftTensors {
            embed_norm: self.tensor(&name("enorm.weight"), &[hidden])?,
            hidden_norm: self.tensor(&name("hnorm.weight"), &[all])?,
            project,
            head_input,
            layer: self.layer(block, LayerKind::Attention)?,
            experts: LayerRecords::of(self, block)?,
        };
        self.all_of_draft_used(block, &draft)?;
        Ok(Some(draft))
    }

    /// Refuses a draft block with tensors that nothing uses, such as an embedding of its own.
    fn all_of_draft_used(&self, block: u32, draft: &DraftTensors) -> Result<(), CheckpointError> {
        let mut used: BTreeSet<&str> = BTreeSet::new();
        draft.each(&mut |_, tensor| {
            used.insert(&tensor.name);
        });
        used.extend(draft.experts.tensors().map(|tensor| tensor.name.as_str()));
        let front = format!("blk.{block}.");
        let of_block =
            self.checkpoint.directory.iter().filter(|tensor| tensor.name.starts_with(&front));
        self.none_left(of_block.filter(|tensor| !used.contains(tensor.name.as_str())))
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
            indexer: match config.indexer {
                Some(shape) => Some(self.indexer(name, shape)?),
                None => None,
            },
        })
    }

    fn indexer(
        &self,
        name: &dyn Fn(&str) -> String,
        shape: IndexerShape,
    ) -> Result<IndexerTensors, CheckpointError> {
        let hidden = u64::from(self.config.hidden);
        let [heads, dim] = [shape.heads, shape.dim].map(u64::from);
        Ok(IndexerTensors {
            q: self.tensor(&name("indexer.q_proj.weight"), &[heads * dim, hidden])?,
            k: self.tensor(&name("indexer.k_proj.weight"), &[dim, hidden])?,
            q_norm: self.tensor(&name("indexer.q_norm.weight"), &[dim])?,
            k_norm: self.tensor(&name("indexer.k_norm.weight"), &[dim])?,
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
        table: Option<&NgramTable>,
    ) -> Result<(), CheckpointError> {
        let mut used: BTreeSet<&str> = BTreeSet::new();
        tensors.each(&mut |_, tensor| {
            used.insert(&tensor.name);
        });
        used.extend(records.tensors().map(|tensor| tensor.name.as_str()));
        used.extend(table.map(|table| table.tensor.name.as_str()));
        self.none_left(
            self.checkpoint.directory.iter().filter(|tensor| {
                !used.contains(tensor.name.as_str()) && !self.config.is_draft(tensor)
            }),
        )
    }

    fn none_left<'t>(
        &self,
        mut unknown: impl Iterator<Item = &'t TensorInfo>,
    ) -> Result<(), CheckpointError> {
        let Some(first) = unknown.next() else { return Ok(()) };
        Err(CheckpointError::UnknownTensor {
            file: self.checkpoint.files[first.file.get()].path.clone(),
            tensor: printable(first.spelling()),
            others: unknown.count(),
            family: self.config.family,
            blocks: self.config.n_layers + self.config.n_draft_layers,
        })
    }

    /// How a tensor that is not there would be called in files like these.
    fn spelled(&self, name: &str) -> String {
        let in_folder = self.checkpoint.metadata.file().is_some();
        let spelled = in_folder.then(|| crate::folder::spelled(name)).flatten();
        spelled.unwrap_or_else(|| name.to_owned())
    }

    /// The tensor of this name, with leading dimensions of 1 left out on both sides.
    pub(crate) fn tensor(&self, name: &str, needed: &[u64]) -> Result<TensorInfo, CheckpointError> {
        let Some(tensor) = self.checkpoint.directory.get(name) else {
            return Err(CheckpointError::MissingTensor {
                file: self.checkpoint.files[0].path.clone(),
                tensor: self.spelled(name),
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
                tensor: printable(tensor.spelling()),
                found: tensor.shape.clone(),
                needed: format!("{needed:?} by the metadata"),
            });
        }
        if tensor.block_type == BlockType::E4m3 && name != NgramTable::NAME {
            return Err(CheckpointError::Unsupported {
                file: self.checkpoint.files[tensor.file.get()].path.clone(),
                what: format!("tensor `{}`", printable(tensor.spelling())),
                found: "E4M3 values without scales".to_owned(),
                supported: "those in the n-gram table only".to_owned(),
            });
        }
        Ok(TensorInfo { shape: needed.to_vec(), ..tensor.clone() })
    }
}
