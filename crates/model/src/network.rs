//! A loaded model: weights, buffers, sequences, experts; rows in, logits out.

pub(crate) mod draft;
mod prefix;
mod taps;
pub(crate) mod verify;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Instant;

use checkpoint::{GateActivation, LayerKind, Model, ModelConfig};
use compute::backend::{
    Backend, BufferId, ComputeError, Gate, MatrixShape, Op, RecurrentShape, Role, RopeId, RopeSpec,
    RouterShape, Row, SequenceId, SequenceShape, SlotClass, Yarn,
};
use expert_store::{NgramCounters, NgramStore, ReadError};
use slot_pool::PoolError;
use units::{ExpertKey, LayerIndex};

use crate::attention;
use crate::delta_net;
use crate::experts::ExpertStream;
use crate::layer::{Buffers, Pass};
use crate::load::{InputWeights, LoadError, Loader, Weights};
use crate::lookahead::correction::Correction;
use crate::lookahead::record::{Recorder, Recording, TapSink};
use crate::lookahead::{Guesser, Lookahead, LookaheadCounters};
use crate::moe;
use crate::ngram::{self, Ngrams};
use crate::routes::RouteLog;
use crate::streams;
use draft::Draft;
use verify::Verify;

/// Rows of logits computed at once: a head of 150,000 words takes 0.6 MB a row.
const LOGIT_BLOCK: usize = 16;

/// Why a pass stopped. The sequence must be reset before it is used again.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// The arithmetic met NaN, or memory ran out.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// An expert could not be read.
    #[error("{key}: {source}")]
    Read {
        /// The expert.
        key: ExpertKey,
        /// What happened.
        source: ReadError,
    },
    /// Rows of the n-gram table could not be read.
    #[error("rows of the n-gram table: {source}")]
    Ngram {
        /// What happened.
        source: ReadError,
    },
    /// The pool cannot serve the layer.
    #[error(transparent)]
    Pool(PoolError),
    /// A token id that the model does not have.
    #[error("token id {token} is outside of the model's vocabulary of {vocab}")]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Rows of the embedding.
        vocab: u32,
    },
    /// The sequence is longer than what was reserved.
    #[error(
        "position {position} does not fit into the context of {context} tokens; reserve more with `--context`"
    )]
    ContextFull {
        /// The first position that does not fit.
        position: u32,
        /// What was reserved.
        context: usize,
    },
    /// The caller stopped it between two layers.
    #[error("the pass was stopped before layer {layer}")]
    Stopped {
        /// The first layer that did not run.
        layer: LayerIndex,
    },
    /// Logits hold NaN or infinity.
    #[error(
        "the logits at position {position} hold {value} for token {token}; a damaged weight is the usual cause"
    )]
    LogitsNotFinite {
        /// Of the row.
        position: u32,
        /// The first such token.
        token: usize,
        /// What was found.
        value: f32,
    },
}

/// Sizes that the forward pass needs, derived from the checkpoint's configuration.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) hidden: usize,
    pub(crate) rms_eps: f32,
    pub(crate) norm_topk: bool,
    pub(crate) shared_width: Option<usize>,
    pub(crate) attention: attention::Shape,
    pub(crate) kv_layers: usize,
    pub(crate) recurrent: Option<RecurrentShape>,
    /// Of the delta rule's output.
    pub(crate) gate: Gate,
    /// None: one.
    pub(crate) streams: Option<streams::Shape>,
    pub(crate) ngram: Option<ngram::Shape>,
    pub(crate) router: RouterShape,
}

impl Geometry {
    pub(crate) fn of(config: &ModelConfig) -> Self {
        let count = |kind| config.layers.iter().filter(|k| **k == kind).count();
        let recurrent = config.delta_net.filter(|_| count(LayerKind::DeltaNet) > 0).map(|shape| {
            RecurrentShape {
                layers: count(LayerKind::DeltaNet),
                key_heads: shape.key_heads as usize,
                value_heads: shape.value_heads as usize,
                key_dim: shape.key_dim as usize,
                value_dim: shape.value_dim as usize,
                conv_kernel: shape.conv_kernel as usize,
                order: match shape.head_order {
                    checkpoint::HeadOrder::Grouped => compute::backend::HeadOrder::Grouped,
                    checkpoint::HeadOrder::Tiled => compute::backend::HeadOrder::Tiled,
                },
            }
        });
        let streams = config.hyper.map(|shape| streams::Shape {
            count: shape.streams as usize,
            rank: shape.rank as usize,
        });
        let hidden = config.hidden as usize;
        let channels = hidden * streams.map_or(1, |shape| shape.count);
        Self {
            hidden,
            rms_eps: config.rms_eps,
            norm_topk: config.norm_topk,
            shared_width: config.shared_width.map(|width| width as usize),
            attention: attention::Shape::of(config),
            kv_layers: count(LayerKind::Attention),
            recurrent,
            gate: match config.delta_net.map(|shape| shape.gate) {
                Some(GateActivation::Sigmoid) => Gate::Sigmoid,
                Some(GateActivation::Silu) | None => Gate::Silu,
            },
            streams,
            ngram: config.ngram.as_ref().map(|shape| ngram::Shape::of(shape, channels)),
            router: RouterShape {
                n_experts: config.n_experts as usize,
                top_k: config.top_k as usize,
                hidden,
                expert_width: config.expert_width as usize,
            },
        }
    }

    /// The same with the caches of a draft block, which is one more layer of attention.
    pub(crate) const fn with_draft(self) -> Self {
        Self { kv_layers: self.kv_layers + 1, ..self }
    }

    /// What a sequence remembers.
    pub(crate) fn sequence(&self, context_tokens: usize) -> SequenceShape {
        SequenceShape {
            context_tokens,
            kv_layers: self.kv_layers,
            kv_heads: self.attention.key.count,
            head_dim: self.attention.key.dim,
            recurrent: self.recurrent,
            extra_conv: self.ngram.map(|shape| shape.conv),
            index: self.attention.index.map(|index| index.cache(self.kv_layers)),
        }
    }

    /// Values of a row of the residual.
    pub(crate) const fn residual_width(&self) -> usize {
        match self.streams {
            Some(shape) => self.hidden * shape.count,
            None => self.hidden,
        }
    }
}

/// What a network reserves.
#[derive(Debug, Clone)]
pub struct NetworkOptions {
    /// Most rows of a pass.
    pub max_rows: usize,
    /// Positions of a sequence.
    pub context_tokens: usize,
    /// Most rows of logits that are computed at once: 1 to generate, more to score a text.
    pub logit_rows: usize,
    /// Slots, class after class, as the pool has them.
    pub slots: Vec<SlotClass>,
    /// Whether the draft head is loaded too. Then slots and records are also for its experts, which are those of one
    /// more layer.
    pub draft: bool,
    /// Most rows of a pass that may be taken back; 0 if none ever is.
    pub verify_rows: usize,
    /// How the next layer's experts are guessed while a token is decoded.
    pub lookahead: Lookahead,
    /// What is added to the tap's logits, of this shape of model; taken when it is loaded.
    pub correction: Option<Arc<Correction>>,
    /// Whether passes may record what taps see.
    pub record_taps: bool,
    /// Whether long passes read a layer's experts while the layer before it computes.
    pub sweep: bool,
}

/// Which rows of a pass give logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows<'a> {
    /// None: more of the prompt follows.
    None,
    /// The last.
    Last,
    /// Every row.
    All,
    /// These, ascending.
    These(&'a [usize]),
}

/// Asked before every layer whether the pass goes on.
pub type GoOn<'a> = &'a mut dyn FnMut(LayerIndex) -> ControlFlow<()>;

/// How a pass is run.
struct How<'a> {
    /// Rows may be taken back.
    verifying: bool,
    go_on: GoOn<'a>,
    /// Layers of which somebody wants to see what is tapped.
    taps: Option<(Range<u32>, TapSink<'a>)>,
}

/// A model that runs.
pub struct Network {
    // Dropped in this order: the store inside `experts` joins its readers before the backend frees the slots.
    experts: ExpertStream,
    ngrams: Option<Ngrams>,
    draft: Option<Draft>,
    verify: Option<Verify>,
    guesser: Guesser,
    recorder: Option<Recorder>,
    backend: Box<dyn Backend>,
    config: ModelConfig,
    geometry: Geometry,
    weights: Weights,
    buffers: Buffers,
    rope: RopeId,
    logits: BufferId,
    options: NetworkOptions,
    host_logits: Vec<f32>,
    /// Set to record every router's choices.
    pub routes: Option<RouteLog>,
}

impl Network {
    /// Loads the resident weights and reserves buffers and slots.
    ///
    /// `ngrams` is there if the model has an n-gram table. `progress` is called with the bytes of every tensor that has
    /// arrived.
    ///
    /// # Errors
    /// A tensor cannot be read or holds NaN, or memory runs out.
    ///
    /// # Panics
    /// If the model has an n-gram table and its store is missing, or a draft head is wanted and it has none.
    pub fn load(
        model: &Model,
        mut backend: Box<dyn Backend>,
        experts: ExpertStream,
        ngrams: Option<NgramStore>,
        mut options: NetworkOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, LoadError> {
        let trunk = Geometry::of(&model.config);
        let geometry = if options.draft { trunk.with_draft() } else { trunk };
        let ngrams = model.config.ngram.clone().map(|shape| {
            let store = ngrams.expect("the model has an n-gram table");
            Ngrams::new(store, shape, options.max_rows)
        });
        let (store, rms_eps) = (experts.store(), geometry.rms_eps);
        let mut loader = Loader { backend: &mut *backend, store, rms_eps, progress };
        let weights = loader.load(model)?;
        let buffers = alloc_buffers(loader.backend, options.max_rows, &geometry)?;
        let draft = if options.draft {
            let tensors = model.draft.as_ref().expect("the model has a draft head");
            Some(Draft::load(&mut loader, tensors, &buffers, &geometry, options.max_rows)?)
        } else {
            None
        };
        let verify = match options.verify_rows {
            0 => None,
            rows => Some(Verify::alloc(&mut *backend, &geometry, rows)?),
        };
        let n_layers = model.config.layers.len();
        let correction = options.correction.take();
        let lookahead = (options.lookahead, correction.as_deref());
        let guesser = Guesser::new(&mut *backend, &geometry, n_layers, lookahead)?;
        let recorder = if options.record_taps {
            Some(Recorder::alloc(&mut *backend, options.max_rows, &geometry)?)
        } else {
            None
        };
        let rope = backend.alloc_rope(rope_spec(&model.config));
        let vocab = model.config.vocab as usize;
        let logits = backend.alloc_buffer(options.logit_rows.min(LOGIT_BLOCK), vocab)?;
        backend.alloc_slots(&options.slots)?;
        let n_slots = options.slots.iter().map(|class| class.slots).sum();
        experts.store().prepare_slots(crate::memory::slots(&*backend, n_slots));
        Ok(Self {
            experts,
            ngrams,
            draft,
            verify,
            guesser,
            recorder,
            backend,
            config: model.config.clone(),
            geometry,
            weights,
            buffers,
            rope,
            logits,
            options,
            host_logits: vec![0.0; vocab],
            routes: None,
        })
    }

    /// What the model is.
    pub const fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What was reserved.
    pub const fn options(&self) -> &NetworkOptions {
        &self.options
    }

    /// What moved so far.
    pub const fn experts(&self) -> &ExpertStream {
        &self.experts
    }

    /// Guesses of the next layer's experts so far.
    pub const fn lookahead_counters(&self) -> LookaheadCounters {
        self.guesser.counters()
    }

    /// Whether guesses of the tap are corrected by what was fitted.
    pub const fn corrects_lookahead(&self) -> bool {
        self.guesser.is_corrected()
    }

    /// Rows of the n-gram table so far; nothing if the model has none.
    pub fn ngram_counters(&self) -> NgramCounters {
        self.ngrams.as_ref().map(Ngrams::counters).unwrap_or_default()
    }

    /// The backend's name.
    pub fn backend_name(&self) -> &'static str {
        self.backend.name()
    }

    /// Bytes that the backend holds apart from slots.
    pub fn allocated_bytes(&mut self) -> u64 {
        self.backend.allocated_bytes()
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// [`ComputeError::OutOfMemory`].
    pub fn open_sequence(&mut self) -> Result<SequenceId, ComputeError> {
        let geometry = &self.geometry;
        let context_tokens = self.options.context_tokens;
        let sequence = self.backend.open_sequence(geometry.sequence(context_tokens))?;
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.open_sequence(sequence, context_tokens);
        }
        if let Some(draft) = &mut self.draft {
            draft.open_sequence(sequence);
        }
        if let Some(verify) = &mut self.verify {
            verify.open_sequence(&mut *self.backend, &self.geometry, sequence)?;
        }
        Ok(sequence)
    }

    /// Empties a sequence.
    pub fn reset(&mut self, sequence: SequenceId) {
        self.backend.reset(sequence);
        if let Some(draft) = &mut self.draft {
            draft.reset(sequence);
        }
    }

    /// Runs one pass over `rows` and hands the logits of the wanted rows to `sink` as `(row, [vocab])`.
    ///
    /// Rows may be of several sequences; those of one stand together, and prompt rows of it start on the 64-token grid.
    ///
    /// # Errors
    /// See [`ForwardError`]; afterwards the sequences of the pass must be reset.
    pub fn forward(
        &mut self,
        rows: &[Row],
        want: LogitRows,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        self.forward_while(rows, want, &mut |_| ControlFlow::Continue(()), sink)
    }

    /// The same, as long as `go_on` says so before every layer.
    ///
    /// # Errors
    /// See [`ForwardError`], of which [`ForwardError::Stopped`] is one more; afterwards the sequences of the pass must be
    /// reset, or put back to a snapshot.
    pub fn forward_while(
        &mut self,
        rows: &[Row],
        want: LogitRows,
        go_on: GoOn<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        self.check(rows)?;
        self.run(rows, want, How { verifying: false, go_on, taps: None }, sink)
    }

    fn run(
        &mut self,
        rows: &[Row],
        want: LogitRows,
        how: How<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        let began = Instant::now();
        let decodes = matches!(rows, [Row { role: Role::Generated, .. }]);
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.request(rows);
        }
        if let Some(draft) = &mut self.draft {
            draft.begin_trunk();
        }
        self.experts.end_idle(&mut *self.backend);
        self.guesser.begin_pass(decodes);
        self.backend.begin_pass(rows);
        if let Some(log) = &mut self.routes {
            log.begin_pass(rows.len());
        }
        self.layers(rows.len(), how)?;
        if let Some(log) = &mut self.routes {
            log.end_pass(rows.len(), decodes);
        }
        if let Some(draft) = &mut self.draft {
            draft.end_trunk(rows);
        }
        let (buffers, input) = (self.buffers, self.weights.head_input);
        self.heads(rows, want, (&buffers, &input), sink)?;
        self.guesser.end_pass(decodes, began.elapsed().as_micros() as u64);
        Ok(())
    }

    /// The wanted rows of logits of a residual, and the end of the pass.
    fn heads(
        &mut self,
        rows: &[Row],
        want: LogitRows,
        from: (&Buffers, &InputWeights),
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        let most = LOGIT_BLOCK.min(self.options.logit_rows);
        let mut block = |wanted: Range<usize>| {
            for start in wanted.clone().step_by(most) {
                self.head(rows, start..wanted.end.min(start + most), from, sink)?;
            }
            Ok::<(), ForwardError>(())
        };
        match want {
            LogitRows::None => {}
            LogitRows::Last => block(rows.len() - 1..rows.len())?,
            LogitRows::All => block(0..rows.len())?,
            LogitRows::These(these) => {
                for run in these.chunk_by(|a, b| a + 1 == *b) {
                    block(run[0]..run[0] + run.len())?;
                }
            }
        }
        self.backend.submit();
        Ok(())
    }

    fn layers(
        &mut self,
        n_rows: usize,
        How { verifying, go_on, taps }: How<'_>,
    ) -> Result<(), ForwardError> {
        let recording = self.recorder.as_mut().zip(taps);
        let mut pass = Pass {
            backend: &mut *self.backend,
            experts: &mut self.experts,
            ngrams: self.ngrams.as_mut(),
            geometry: &self.geometry,
            buffers: &self.buffers,
            rope: self.rope,
            n_rows,
            routes: self.routes.as_mut(),
            verify: self.verify.as_ref().filter(|_| verifying).map(Verify::inputs),
            n_layers: self.config.n_layers,
            sweep: self.options.sweep,
            guesser: Some(&mut self.guesser),
            recording: recording.map(|(recorder, (layers, sink))| Recording {
                recorder,
                layers,
                sink,
            }),
        };
        let (table, h, x) = (self.weights.embed, self.buffers.h, self.buffers.x);
        let out = if self.geometry.streams.is_some() { x } else { h };
        pass.backend.record(Op::Embed { table, out });
        if out != h {
            pass.backend.record(Op::Repeat { x, out: h });
        }
        let (mut kv, mut recurrent) = (0, 0);
        for (layer, (kind, weights)) in
            self.config.layers.iter().zip(&self.weights.layers).enumerate()
        {
            if go_on(LayerIndex(layer as u32)).is_break() {
                return Err(ForwardError::Stopped { layer: LayerIndex(layer as u32) });
            }
            let counter = match kind {
                LayerKind::Attention => &mut kv,
                LayerKind::DeltaNet => &mut recurrent,
            };
            let next = self.weights.layers.get(layer + 1);
            pass.layer(LayerIndex(layer as u32), *counter, weights, next)?;
            *counter += 1;
        }
        Ok(())
    }

    fn head(
        &mut self,
        rows: &[Row],
        block: Range<usize>,
        (buffers, input): (&Buffers, &InputWeights),
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        let (backend, geometry) = (&mut *self.backend, &self.geometry);
        streams::record_input(backend, geometry, buffers, input, block.clone());
        let (weight, x, out) = (self.weights.output, buffers.x, self.logits);
        self.backend.record(Op::MatMul { weight, x, out, rows: 0..block.len() });
        for (row, source) in block.enumerate() {
            self.backend.read_back(self.logits, row, &mut self.host_logits);
            if let Some((token, &value)) =
                self.host_logits.iter().enumerate().find(|(_, v)| !v.is_finite())
            {
                return Err(ForwardError::LogitsNotFinite {
                    position: rows[source].position,
                    token,
                    value,
                });
            }
            sink(source, &self.host_logits);
        }
        Ok(())
    }

    fn check(&self, rows: &[Row]) -> Result<(), ForwardError> {
        assert!(
            !rows.is_empty() && rows.len() <= self.options.max_rows,
            "a pass has 1 to max_rows rows"
        );
        for row in rows {
            if row.token >= self.config.vocab {
                return Err(ForwardError::TokenOutOfRange {
                    token: row.token,
                    vocab: self.config.vocab,
                });
            }
            if row.position as usize >= self.options.context_tokens {
                let context = self.options.context_tokens;
                return Err(ForwardError::ContextFull { position: row.position, context });
            }
        }
        Ok(())
    }
}

fn alloc_buffers(
    backend: &mut dyn Backend,
    rows: usize,
    geometry: &Geometry,
) -> Result<Buffers, ComputeError> {
    let (hidden, residual) = (geometry.hidden, geometry.residual_width());
    let streams = match geometry.streams {
        Some(shape) => Some(streams::Buffers::alloc(backend, rows, shape, hidden)?),
        None => None,
    };
    let ngram = match &geometry.ngram {
        Some(shape) => Some(ngram::Buffers::alloc(backend, rows, shape)?),
        None => None,
    };
    let attention = match geometry.kv_layers {
        0 => None,
        _ => Some(attention::Buffers::alloc(backend, rows, geometry)?),
    };
    let delta_net = match &geometry.recurrent {
        Some(shape) => Some(delta_net::Buffers::alloc(backend, rows, shape)?),
        None => None,
    };
    Ok(Buffers {
        h: backend.alloc_buffer(rows, residual)?,
        x: backend.alloc_buffer(rows, hidden)?,
        y: backend.alloc_buffer(rows, hidden)?,
        streams,
        ngram,
        attention,
        delta_net,
        moe: moe::Buffers::alloc(backend, rows, geometry)?,
        router: backend.alloc_router(rows, geometry.router)?,
    })
}

fn rope_spec(config: &ModelConfig) -> RopeSpec {
    RopeSpec {
        rotary_dim: config.rotary_dim as usize,
        theta: config.rope_theta,
        yarn: config.rope_scaling.map(|yarn| Yarn {
            factor: yarn.factor,
            original_context: yarn.original_context,
            beta_fast: yarn.beta_fast,
            beta_slow: yarn.beta_slow,
            attention_factor: yarn.attention_factor,
        }),
    }
}

/// Experts outside of passes.
impl Network {
    /// Reads experts ahead in idle time, in this order, into slots that are free. It returns at once: the next pass
    /// gives up what has not begun by then.
    pub fn preload(&mut self, order: &[ExpertKey]) {
        self.experts.preload(&mut *self.backend, order);
    }

    /// Blocks until no read ahead is in flight.
    pub fn await_preload(&mut self) {
        while self.experts.await_ahead(&mut *self.backend) {}
    }

    /// The bytes of an expert's slot, after it was brought there the usual way, for parity checks.
    ///
    /// # Errors
    /// The read failed, or the pool is too small.
    pub fn read_expert(&mut self, key: ExpertKey) -> Result<Vec<u8>, ForwardError> {
        self.experts.bring(&mut *self.backend, key)
    }

    /// `weight · x` by the backend's own kernel, for a matrix of these bytes.
    ///
    /// # Errors
    /// Out of memory.
    ///
    /// # Panics
    /// If the bytes are not the matrix's, or `x` is not one row.
    pub fn multiply(
        &mut self,
        shape: MatrixShape,
        bytes: &[u8],
        x: &[f32],
    ) -> Result<Vec<f32>, ForwardError> {
        let backend = &mut *self.backend;
        let weight = backend.alloc_weight(shape)?;
        crate::memory::fill_weight(backend, weight, 0, bytes);
        // The activations enter as a table that token 0 embeds from.
        let table = MatrixShape { n_out: 1, n_in: x.len(), block_type: quant::BlockType::F32 };
        let table = backend.alloc_weight(table)?;
        let values: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
        crate::memory::fill_weight(backend, table, 0, &values);
        let (input, output) =
            (backend.alloc_buffer(1, x.len())?, backend.alloc_buffer(1, shape.n_out)?);
        backend.begin_pass(&[Row {
            sequence: SequenceId(0),
            position: 0,
            role: Role::Generated,
            token: 0,
        }]);
        backend.record(Op::Embed { table, out: input });
        backend.record(Op::MatMul { weight, x: input, out: output, rows: 0..1 });
        let mut out = vec![0.0; shape.n_out];
        backend.read_back(output, 0, &mut out);
        Ok(out)
    }
}
