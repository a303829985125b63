//! Resident tensors: from the file into memory that the backend owns, once.
//!
//! Row order is settled here, so that the forward pass knows one layout only: a legacy `ssm_in` becomes `qkv` and
//! `gate`, a per-head `ssm_ba` or a pair `ssm_beta`, `ssm_alpha` becomes `[b | a]`.

use std::ops::Range;

use checkpoint::{
    AttentionTensors, DeltaNetBa, DeltaNetInput, DeltaNetShape, DeltaNetTensors, DraftTensors,
    InputTensors, LayerTensors, MixerTensors, Model, StreamTensors, TensorInfo, ValueMap,
};
use compute::backend::{Backend, ComputeError, DeltaParams, MatrixShape, WeightId};
use expert_store::{ReadError, Store};
use quant::BlockType;

/// Why the resident weights could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file could not be read.
    #[error("reading tensor `{tensor}`: {source}")]
    Read {
        /// The tensor.
        tensor: String,
        /// What happened.
        source: ReadError,
    },
    /// A vector that is multiplied everywhere holds NaN or infinity.
    #[error(
        "tensor `{tensor}` holds {value} at index {index}; the file is damaged, fetch it again"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// Where.
        index: usize,
        /// What was found.
        value: f32,
    },
    /// The number that all values of the n-gram table are multiplied by is none that a writer can have meant.
    #[error(
        "tensor `{tensor}` is {value}; the scale of the n-gram table must be finite and greater than 0: the file is \
         damaged, fetch it again"
    )]
    Scale {
        /// The tensor.
        tensor: String,
        /// What was found.
        value: f32,
    },
    /// The backend has no memory left.
    #[error(transparent)]
    Compute(#[from] ComputeError),
}

/// Everything that stays in memory, by layer.
pub(crate) struct Weights {
    pub(crate) embed: WeightId,
    pub(crate) head_input: InputWeights,
    pub(crate) output: WeightId,
    pub(crate) layers: Vec<LayerWeights>,
}

pub(crate) struct LayerWeights {
    pub(crate) ngram: Option<NgramWeights>,
    pub(crate) mixer_input: InputWeights,
    pub(crate) experts_input: InputWeights,
    pub(crate) mixer: MixerWeights,
    pub(crate) router: WeightId,
    pub(crate) shared: Option<SharedWeights>,
}

/// A draft block.
pub(crate) struct DraftWeights {
    pub(crate) embed_norm: WeightId,
    pub(crate) hidden_norm: WeightId,
    pub(crate) project: DraftProjection,
    pub(crate) head_input: InputWeights,
    pub(crate) layer: LayerWeights,
}

/// Of embedding and hidden state: one matrix for both side by side, or one for each.
pub(crate) enum DraftProjection {
    Joined(WeightId),
    Apart { embed: WeightId, hidden: WeightId },
}

/// How a block takes its input from the residual, and gives its output back.
#[derive(Clone, Copy)]
pub(crate) enum InputWeights {
    Norm(WeightId),
    Streams(StreamWeights),
}

#[derive(Clone, Copy)]
pub(crate) struct StreamWeights {
    pub(crate) norm: WeightId,
    pub(crate) down: WeightId,
    pub(crate) up: WeightId,
    /// None before the head.
    pub(crate) inject: Option<WeightId>,
}

pub(crate) struct NgramWeights {
    pub(crate) key: WeightId,
    pub(crate) value: WeightId,
    pub(crate) key_norm: WeightId,
    pub(crate) query_norm: WeightId,
    pub(crate) conv_norm: WeightId,
    pub(crate) conv: WeightId,
    /// What decoded rows of the table are multiplied by, if anything.
    pub(crate) scale: Option<f32>,
}

pub(crate) enum MixerWeights {
    Attention(AttentionWeights),
    DeltaNet(DeltaNetWeights),
}

pub(crate) struct AttentionWeights {
    pub(crate) q: WeightId,
    pub(crate) k: WeightId,
    pub(crate) v: WeightId,
    pub(crate) output: WeightId,
    pub(crate) q_norm: WeightId,
    pub(crate) k_norm: WeightId,
    pub(crate) indexer: Option<IndexerWeights>,
}

pub(crate) struct IndexerWeights {
    pub(crate) q: WeightId,
    pub(crate) k: WeightId,
    pub(crate) q_norm: WeightId,
    pub(crate) k_norm: WeightId,
}

pub(crate) struct DeltaNetWeights {
    pub(crate) qkv: WeightId,
    pub(crate) gate: WeightId,
    pub(crate) ba: WeightId,
    pub(crate) conv: WeightId,
    pub(crate) params: DeltaParams,
    pub(crate) output: WeightId,
}

pub(crate) struct SharedWeights {
    pub(crate) gate_inp: WeightId,
    pub(crate) gate: WeightId,
    pub(crate) up: WeightId,
    pub(crate) down: WeightId,
}

/// Reads tensors into a backend and says how far it is.
pub(crate) struct Loader<'a> {
    pub(crate) backend: &'a mut dyn Backend,
    pub(crate) store: &'a Store,
    pub(crate) rms_eps: f32,
    /// Called with the bytes of every tensor that has arrived.
    pub(crate) progress: &'a mut dyn FnMut(u64),
}

impl Loader<'_> {
    pub(crate) fn load(&mut self, model: &Model) -> Result<Weights, LoadError> {
        let tensors = &model.tensors;
        let embed = self.matrix(&tensors.embed)?;
        let tied = tensors.output.name == tensors.embed.name;
        let output = if tied { embed } else { self.matrix(&tensors.output)? };
        let head_input = self.input(&tensors.head_input)?;
        let delta_net = model.config.delta_net;
        let layers = tensors.layers.iter().map(|layer| self.layer(layer, delta_net));
        let layers = layers.collect::<Result<_, LoadError>>()?;
        Ok(Weights { embed, head_input, output, layers })
    }

    /// What the block has of its own; embedding and head are the trunk's.
    pub(crate) fn draft(&mut self, tensors: &DraftTensors) -> Result<DraftWeights, LoadError> {
        let project = match &tensors.project {
            checkpoint::DraftProjection::Joined(joined) => {
                DraftProjection::Joined(self.matrix(joined)?)
            }
            checkpoint::DraftProjection::Apart { embed, hidden } => {
                DraftProjection::Apart { embed: self.matrix(embed)?, hidden: self.matrix(hidden)? }
            }
        };
        Ok(DraftWeights {
            embed_norm: self.vector(&tensors.embed_norm)?,
            hidden_norm: self.vector(&tensors.hidden_norm)?,
            project,
            head_input: self.input(&tensors.head_input)?,
            layer: self.layer(&tensors.layer, None)?,
        })
    }

    fn layer(
        &mut self,
        layer: &LayerTensors,
        delta_net: Option<DeltaNetShape>,
    ) -> Result<LayerWeights, LoadError> {
        let ngram = match &layer.ngram {
            Some(t) => Some(NgramWeights {
                key: self.matrix(&t.key)?,
                value: self.matrix(&t.value)?,
                key_norm: self.vector(&t.key_norm)?,
                query_norm: self.vector(&t.query_norm)?,
                conv_norm: self.vector(&t.conv_norm)?,
                conv: self.vector(&t.conv)?,
                scale: match &t.scale {
                    Some(scale) => Some(self.scale(scale)?),
                    None => None,
                },
            }),
            None => None,
        };
        let shared = match &layer.shared {
            Some(shared) => Some(SharedWeights {
                gate_inp: self.vector(&shared.gate_inp)?,
                gate: self.matrix(&shared.gate)?,
                up: self.matrix(&shared.up)?,
                down: self.matrix(&shared.down)?,
            }),
            None => None,
        };
        Ok(LayerWeights {
            ngram,
            mixer_input: self.input(&layer.mixer_input)?,
            experts_input: self.input(&layer.experts_input)?,
            mixer: self.mixer(&layer.mixer, delta_net)?,
            router: self.matrix(&layer.router)?,
            shared,
        })
    }

    fn input(&mut self, input: &InputTensors) -> Result<InputWeights, LoadError> {
        match input {
            InputTensors::Norm(norm) => self.vector(norm).map(InputWeights::Norm),
            InputTensors::Streams(StreamTensors { norm, down, up, inject }) => {
                Ok(InputWeights::Streams(StreamWeights {
                    norm: self.vector(norm)?,
                    down: self.matrix(down)?,
                    up: self.matrix(up)?,
                    inject: match inject {
                        Some(inject) => Some(self.matrix(inject)?),
                        None => None,
                    },
                }))
            }
        }
    }

    fn mixer(
        &mut self,
        mixer: &MixerTensors,
        shape: Option<DeltaNetShape>,
    ) -> Result<MixerWeights, LoadError> {
        match mixer {
            MixerTensors::Attention(t) => self.attention(t).map(MixerWeights::Attention),
            MixerTensors::DeltaNet(t) => {
                let shape =
                    shape.expect("a checkpoint with DeltaNet layers was bound with their shape");
                self.delta_net(t, &RowOrder::of(&shape)).map(MixerWeights::DeltaNet)
            }
        }
    }

    fn attention(&mut self, t: &AttentionTensors) -> Result<AttentionWeights, LoadError> {
        let indexer = match &t.indexer {
            Some(t) => Some(IndexerWeights {
                q: self.matrix(&t.q)?,
                k: self.matrix(&t.k)?,
                q_norm: self.vector(&t.q_norm)?,
                k_norm: self.vector(&t.k_norm)?,
            }),
            None => None,
        };
        Ok(AttentionWeights {
            q: self.matrix(&t.q)?,
            k: self.matrix(&t.k)?,
            v: self.matrix(&t.v)?,
            output: self.matrix(&t.output)?,
            q_norm: self.vector(&t.q_norm)?,
            k_norm: self.vector(&t.k_norm)?,
            indexer,
        })
    }

    fn delta_net(
        &mut self,
        t: &DeltaNetTensors,
        order: &RowOrder,
    ) -> Result<DeltaNetWeights, LoadError> {
        let (qkv, gate) = match &t.input {
            DeltaNetInput::Split { qkv, gate } => (self.matrix(qkv)?, self.matrix(gate)?),
            DeltaNetInput::Legacy { ssm_in } => {
                (self.rows(ssm_in, &order.legacy_qkv())?, self.rows(ssm_in, &order.legacy_gate())?)
            }
        };
        let ba = match &t.ba {
            DeltaNetBa::Grouped { ba } => self.rows(ba, &order.grouped_ba())?,
            DeltaNetBa::Split { beta, alpha } => self.stacked(beta, alpha)?,
        };
        Ok(DeltaNetWeights {
            qkv,
            gate,
            ba,
            conv: self.vector(&t.conv)?,
            params: DeltaParams {
                a: self.vector(&t.a)?,
                dt_bias: self.vector(&t.dt_bias)?,
                norm: self.vector(&t.norm)?,
                eps: self.rms_eps,
            },
            output: self.matrix(&t.output)?,
        })
    }

    /// A whole matrix, rows as in the file.
    fn matrix(&mut self, tensor: &TensorInfo) -> Result<WeightId, LoadError> {
        let (n_out, _) = matrix_shape(tensor);
        self.rows(tensor, std::slice::from_ref(&(0..n_out)))
    }

    /// A matrix made of runs of the tensor's rows.
    fn rows(&mut self, tensor: &TensorInfo, runs: &[Range<usize>]) -> Result<WeightId, LoadError> {
        let (_, n_in) = matrix_shape(tensor);
        let n_out = runs.iter().map(ExactSizeIterator::len).sum();
        let shape = MatrixShape { n_out, n_in, block_type: tensor.block_type };
        let weight = self.backend.alloc_weight(shape)?;
        let mut place = 0;
        for run in runs {
            place += self.read_rows(tensor, run.clone(), weight, place)?;
        }
        (self.progress)(place as u64);
        Ok(weight)
    }

    /// `first` over `second` as one matrix; decoded to f32 when their formats differ.
    fn stacked(&mut self, first: &TensorInfo, second: &TensorInfo) -> Result<WeightId, LoadError> {
        let ((rows_a, n_in), (rows_b, _)) = (matrix_shape(first), matrix_shape(second));
        let n_out = rows_a + rows_b;
        if first.block_type == second.block_type {
            let shape = MatrixShape { n_out, n_in, block_type: first.block_type };
            let weight = self.backend.alloc_weight(shape)?;
            let place = self.read_rows(first, 0..rows_a, weight, 0)?;
            let end = place + self.read_rows(second, 0..rows_b, weight, place)?;
            (self.progress)(end as u64);
            return Ok(weight);
        }
        let mut values = self.decoded(first)?;
        values.extend(self.decoded(second)?);
        self.float_weight(&values, MatrixShape { n_out, n_in, block_type: BlockType::F32 })
    }

    /// A vector (or the small convolution kernel), as f32 whatever the file holds.
    fn vector(&mut self, tensor: &TensorInfo) -> Result<WeightId, LoadError> {
        let values = self.decoded(tensor)?;
        if let Some((index, &value)) = values.iter().enumerate().find(|(_, v)| !v.is_finite()) {
            return Err(LoadError::NotFinite {
                tensor: tensor.spelling().to_owned(),
                index,
                value,
            });
        }
        let shape = MatrixShape { n_out: 1, n_in: values.len(), block_type: BlockType::F32 };
        self.float_weight(&values, shape)
    }

    /// The scale of the n-gram table.
    fn scale(&mut self, tensor: &TensorInfo) -> Result<f32, LoadError> {
        let values = self.decoded(tensor)?;
        let [value] = *values.as_slice() else {
            panic!("bind() accepts `{}` only as one number", tensor.name)
        };
        if value.is_finite() && value > 0.0 {
            return Ok(value);
        }
        Err(LoadError::Scale { tensor: tensor.spelling().to_owned(), value })
    }

    fn float_weight(&mut self, values: &[f32], shape: MatrixShape) -> Result<WeightId, LoadError> {
        let weight = self.backend.alloc_weight(shape)?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        crate::memory::fill_weight(self.backend, weight, 0, &bytes);
        Ok(weight)
    }

    fn decoded(&mut self, tensor: &TensorInfo) -> Result<Vec<f32>, LoadError> {
        let mut bytes = vec![0; tensor.bytes as usize];
        let rows = tensor.bytes / tensor.row_bytes();
        for piece in tensor.pieces(0..rows) {
            let out = &mut bytes[piece.place as usize..][..piece.memory_bytes() as usize];
            self.store.read_piece(piece, out).map_err(|source| read_error(tensor, source))?;
        }
        (self.progress)(tensor.bytes);
        let mut values = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
        quant::decode_row(tensor.block_type, &bytes, &mut values);
        match tensor.map() {
            ValueMap::Plain => {}
            ValueMap::PlusOne => values.iter_mut().for_each(|x| *x += 1.0),
            // In double precision: once, when a model is loaded.
            ValueMap::NegExp => {
                values.iter_mut().for_each(|x| *x = -libm::exp(f64::from(*x)) as f32);
            }
        }
        Ok(values)
    }

    /// Reads rows `run` of the tensor to byte `place` of the weight; how many bytes that were.
    fn read_rows(
        &mut self,
        tensor: &TensorInfo,
        run: Range<usize>,
        weight: WeightId,
        place: usize,
    ) -> Result<usize, LoadError> {
        let mut bytes = 0;
        for piece in tensor.pieces(run.start as u64..run.end as u64) {
            let len = piece.memory_bytes() as usize;
            let start = place + piece.place as usize;
            let destination = crate::memory::weight_bytes(self.backend, weight, start, len);
            self.store
                .read_piece(piece, destination)
                .map_err(|source| read_error(tensor, source))?;
            bytes += len;
        }
        Ok(bytes)
    }
}

fn read_error(tensor: &TensorInfo, source: ReadError) -> LoadError {
    LoadError::Read { tensor: tensor.spelling().to_owned(), source }
}

/// `(rows, values in a row)`; a vector is one row.
fn matrix_shape(tensor: &TensorInfo) -> (usize, usize) {
    match *tensor.shape.as_slice() {
        [n_in] => (1, n_in as usize),
        [n_out, n_in] => (n_out as usize, n_in as usize),
        _ => panic!("bind() accepts `{}` only as a vector or a matrix", tensor.name),
    }
}

/// Bytes and format of the DeltaNet projections as they lie in memory, after [`Loader`] has ordered them.
pub(crate) fn delta_net_matrices(t: &DeltaNetTensors) -> impl Iterator<Item = (u64, BlockType)> {
    let input = match &t.input {
        DeltaNetInput::Split { qkv, gate } => [Some(qkv), Some(gate)],
        DeltaNetInput::Legacy { ssm_in } => [Some(ssm_in), None],
    };
    let ba = match &t.ba {
        DeltaNetBa::Grouped { ba } => (ba.bytes, ba.block_type),
        DeltaNetBa::Split { beta, alpha } if beta.block_type == alpha.block_type => {
            (beta.bytes + alpha.bytes, beta.block_type)
        }
        DeltaNetBa::Split { beta, alpha } => {
            let values = |t: &TensorInfo| t.shape.iter().product::<u64>();
            (4 * (values(beta) + values(alpha)), BlockType::F32)
        }
    };
    // A legacy projection becomes two weights: one page more at most.
    let legacy_page =
        matches!(t.input, DeltaNetInput::Legacy { .. }).then_some((4096, BlockType::F32));
    input.into_iter().flatten().map(|t| (t.bytes, t.block_type)).chain([ba]).chain(legacy_page)
}

/// Where rows that are grouped by key head go.
struct RowOrder {
    key_heads: usize,
    key_dim: usize,
    /// Value rows of one key head, `r·dv`.
    values: usize,
    /// Value heads of one key head, `r`.
    ratio: usize,
}

impl RowOrder {
    fn of(shape: &DeltaNetShape) -> Self {
        let ratio = (shape.value_heads / shape.key_heads) as usize;
        Self {
            key_heads: shape.key_heads as usize,
            key_dim: shape.key_dim as usize,
            values: ratio * shape.value_dim as usize,
            ratio,
        }
    }

    /// Runs of `len` rows at `start` inside every group of `group` rows.
    fn runs(&self, group: usize, start: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
        (0..self.key_heads).map(move |g| g * group + start..g * group + start + len)
    }

    /// `[q | k | v]` out of groups `q, k, v, z`.
    fn legacy_qkv(&self) -> Vec<Range<usize>> {
        let group = 2 * self.key_dim + 2 * self.values;
        self.runs(group, 0, self.key_dim)
            .chain(self.runs(group, self.key_dim, self.key_dim))
            .chain(self.runs(group, 2 * self.key_dim, self.values))
            .collect()
    }

    /// `z` out of groups `q, k, v, z`.
    fn legacy_gate(&self) -> Vec<Range<usize>> {
        let group = 2 * self.key_dim + 2 * self.values;
        self.runs(group, 2 * self.key_dim + self.values, self.values).collect()
    }

    /// `[b | a]` out of groups `b, a`.
    fn grouped_ba(&self) -> Vec<Range<usize>> {
        let group = 2 * self.ratio;
        self.runs(group, 0, self.ratio).chain(self.runs(group, self.ratio, self.ratio)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> RowOrder {
        RowOrder { key_heads: 2, key_dim: 3, values: 4, ratio: 2 }
    }

    #[test]
    fn legacy_rows_are_ungrouped_into_qkv_and_gate() {
        assert_eq!(order().legacy_qkv(), [0..3, 14..17, 3..6, 17..20, 6..10, 20..24]);
        assert_eq!(order().legacy_gate(), [10..14, 24..28]);
    }

    #[test]
    fn beta_and_alpha_rows_are_ungrouped() {
        assert_eq!(order().grouped_ba(), [0..2, 4..6, 2..4, 6..8]);
    }
}
