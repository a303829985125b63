//! From a path and a budget to a model that runs.
//!
//! The order is what makes the budget honest: headers and tokenizer first, then the process is measured, then the
//! plan is made, and only then are slots and buffers reserved.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use checkpoint::{Checkpoint, CheckpointError, Model, ModelConfig, Records};
use compute::Options;
use compute::backend::{Activations, Backend, KvType, SlotClass};
use expert_store::{
    DirectMode, FaultPlan, Mirror, NgramOptions, NgramStore, Notice, ReaderKind, SimulatedDisk,
    Store, StoreError, StoreOptions,
};
use memory_plan::{Budget, Plan, PlanError, PlanInput, Term};
use model::{
    Correction, ExpertStream, ForwardError, LoadError, Lookahead, Network, NetworkOptions,
};
use slot_pool::{PolicyKind, PoolError, SlotPool};
use units::Bytes;

use crate::mirrors::{self, MirrorError, MirrorOptions};
use crate::reads::Reads;
use crate::scheduler::{MOST_SEQUENCES, Serving};
use crate::sequence::{GRID, Sequence};
use crate::slots;
use crate::speculate::{MOST_GUESSES, Speculation, SpeculationOptions};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Pass lengths that the planner may choose from, longest first.
const PASS_ROWS: [u32; 6] = [1024, 512, 256, 192, 128, 64];

/// Context reserved when nothing is asked for.
pub const DEFAULT_CONTEXT: u32 = 8192;

/// Rows of an n-gram table that are kept after they were read: some MiB. Common word pairs come back soon or never.
const NGRAM_ROWS: u32 = 1 << 15;

/// The name of a draft head's share of the KV cache among the details of a plan.
const DRAFT_CACHE: &str = "draft KV cache";

/// Which implementation computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendKind {
    /// SIMD and threads.
    #[default]
    Cpu,
    /// The scalar definitions.
    Reference,
    /// `Cpu` run late on another thread: for tests.
    Deferred,
}

/// How to open a model.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// The budget.
    pub budget: Budget,
    /// Positions to reserve; the smaller of [`DEFAULT_CONTEXT`] and the model's when absent.
    pub context: Option<u32>,
    /// Kernel threads.
    pub threads: usize,
    /// Which implementation computes.
    pub backend: BackendKind,
    /// How activations meet quantised weights.
    pub activations: Activations,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Which expert leaves when one must.
    pub policy: PolicyKind,
    /// Rows of a prefill pass instead of the planner's choice.
    pub pass_rows: Option<u32>,
    /// Slots instead of as many as fit.
    pub slots: Option<u32>,
    /// Rows of the n-gram table to keep, of a model that has one.
    pub ngram_rows: u32,
    /// Whether the files are read past the page cache.
    pub direct: DirectMode,
    /// How many reads at a time, and how long ones; the default when absent.
    pub reads: Option<Reads>,
    /// Which calls of the system read.
    pub reader: ReaderKind,
    /// Folders with copies of the model's files, on other disks.
    pub mirrors: Vec<MirrorOptions>,
    /// Whom to tell when a disk drops out.
    pub notice: Option<Notice>,
    /// Another disk, whose times reads take.
    pub simulate: Option<SimulatedDisk>,
    /// Reads that fail on purpose: for tests.
    pub faults: Option<FaultPlan>,
    /// Most rows of logits at once: 1 to generate.
    pub logit_rows: u32,
    /// Whether the draft head is loaded too.
    pub draft: bool,
    /// Who guesses tokens ahead.
    pub speculation: SpeculationOptions,
    /// Whether uses of experts are counted, and hot ones may be read in idle time.
    pub hot_set: bool,
    /// How the next layer's experts are guessed while a token is decoded.
    pub lookahead: Lookahead,
    /// What is added to the tap's logits, of this model; taken when it is loaded.
    pub correction: Option<Arc<Correction>>,
    /// What fitting such a correction takes, see [`crate::fit`]: then passes may record what taps see.
    pub fit_bytes: Option<Bytes>,
    /// Whether long passes read a layer's experts while the layer before it computes.
    pub sweep: bool,
    /// What is reserved for several jobs at a time; see [`crate::scheduler`].
    pub serving: Serving,
}

impl EngineOptions {
    /// The defaults under a budget.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            context: None,
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            backend: BackendKind::default(),
            activations: Activations::default(),
            kv: KvType::default(),
            policy: PolicyKind::default(),
            pass_rows: None,
            slots: None,
            ngram_rows: NGRAM_ROWS,
            direct: DirectMode::Auto,
            reads: None,
            reader: ReaderKind::default(),
            mirrors: Vec::new(),
            notice: None,
            simulate: None,
            faults: None,
            logit_rows: 1,
            draft: false,
            speculation: SpeculationOptions::default(),
            hot_set: false,
            lookahead: Lookahead::Off,
            correction: None,
            fit_bytes: None,
            sweep: true,
            serving: Serving::default(),
        }
    }

    /// Whether the draft head is loaded, for whatever reason.
    const fn loads_draft(&self) -> bool {
        self.draft || self.speculation.draft
    }

    /// Guesses need the logits of every row of their pass, and so do sequences that generate side by side.
    fn all_logit_rows(&self) -> u32 {
        self.logit_rows.max(self.speculation.rows()).max(self.serving.sequences)
    }

    /// Jobs that wait or run, and what is known of prefixes apart from their bytes.
    fn serving(&self, context: u32) -> Option<Term> {
        let bytes = self.serving.overhead(context);
        (self.serving != Serving::default()).then(|| Term::new("requests", Bytes(bytes)))
    }

    /// What it takes to verify guesses.
    fn verify_terms(&self, config: &ModelConfig, context: u32) -> Vec<model::NamedBytes> {
        if !self.speculation.is_on() {
            return Vec::new();
        }
        let mut terms = model::verify_terms(config, self.speculation.rows());
        terms.extend(self.speculation.draft.then(|| model::late_draft(config)));
        let bytes = self.speculation.bytes(context);
        terms.push(model::NamedBytes { name: "text for guesses", bytes });
        terms
    }
}

impl EngineOptions {
    /// Reader threads for all disks together.
    fn read_threads(&self) -> usize {
        let threads = self.reads.unwrap_or_default().model.threads;
        expert_store::all_threads(threads, self.mirrors.len())
    }

    /// Memory of the system for slots that are kept ready for reads. How many there will be is not known yet: no more than
    /// the whole budget.
    fn pinning(&self) -> Option<Term> {
        let bytes = Store::pinning_bytes(self.reader, self.budget.bytes.0, self.read_threads());
        (bytes > 0).then(|| Term::new("prepared slots (io_uring)", Bytes(bytes)))
    }
}

/// Why a model could not be made ready.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The files are not a model that this program runs.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The vocabulary in the file contradicts itself.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The budget is too small.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The files cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A folder has no copies of the files.
    #[error(transparent)]
    Mirror(#[from] MirrorError),
    /// Slots and layers do not fit together.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The resident weights cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A draft head is wanted and the model has none.
    #[error(
        "{} has no draft head: no block for multi-token prediction was found, or none that is understood\n\n\
         hint: leave the drafts out, or use files that were converted with that block (`mtp.*` or `nextn` tensors)",
        model.display()
    )]
    NoDraft {
        /// As given by the user.
        model: PathBuf,
    },
    /// An option that this model cannot have.
    #[error("{0}")]
    Option(String),
}

/// A checkpoint whose headers were read and checked: enough to plan and to inspect.
pub struct OpenModel {
    /// As given by the user.
    pub path: PathBuf,
    /// Files, metadata (without the vocabulary), tensors.
    pub checkpoint: Checkpoint,
    /// Configuration, tensors by role, expert records.
    pub model: Model,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
}

impl OpenModel {
    /// Reads and checks headers; builds the tokenizer.
    ///
    /// # Errors
    /// [`EngineError::Checkpoint`], [`EngineError::Tokenizer`].
    pub fn open(path: &Path) -> Result<Self, EngineError> {
        let mut checkpoint = checkpoint::open(path)?;
        let model = checkpoint::bind(&checkpoint)?;
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
        checkpoint.metadata.drop_vocabulary();
        memory_plan::release_free_memory();
        Ok(Self { path: path.to_owned(), checkpoint, model, tokenizer })
    }

    /// The files that it is read from; see [`Checkpoint::inputs`].
    pub fn files(&self) -> Vec<PathBuf> {
        self.checkpoint.inputs()
    }

    /// Positions that these options reserve.
    pub fn context(&self, options: &EngineOptions) -> u64 {
        let default = || self.model.config.context_length.min(DEFAULT_CONTEXT);
        u64::from(options.context.unwrap_or_else(default))
    }

    /// The ledger for a budget; measures the process as it is now.
    ///
    /// # Errors
    /// [`EngineError::Plan`], or an option that makes no sense for this model.
    pub fn plan(&self, options: &EngineOptions) -> Result<Plan, EngineError> {
        self.check(options)?;
        let config = &self.model.config;
        let context = self.context(options) as u32;
        let to_term = |t: model::NamedBytes| Term::new(t.name, Bytes(t.bytes));
        let passes: Vec<u32> =
            options.pass_rows.map_or_else(|| PASS_ROWS.to_vec(), |rows| vec![rows]);
        let rows_of_context = context.next_multiple_of(GRID as u32);
        let passes: Vec<u32> = passes.into_iter().map(|rows| rows.min(rows_of_context)).collect();
        let draft_kv = model::draft_kv_bytes_per_token(config, options.kv);
        let draft_kv = if options.loads_draft() { draft_kv } else { 0 };
        let input = PlanInput {
            model: self
                .path
                .file_name()
                .map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
            budget: options.budget.clone(),
            process_base: process_base(options, model::thread_bytes(config)),
            resident: model::resident_terms(&self.model)
                .into_iter()
                .chain(self.draft_weights(options))
                .map(to_term)
                .chain(self.ngram_cache(options))
                .chain(self.staging(options))
                .chain(self.hot_set(options))
                .chain(self.lookahead(options))
                .chain(self.sweep(options))
                .chain(options.fit_bytes.map(|bytes| Term::new("fitting of lookahead", bytes)))
                .chain(options.pinning())
                .chain(options.serving(context))
                .collect(),
            kv_bytes_per_token: Bytes(model::kv_bytes_per_token(config, options.kv) + draft_kv),
            state: Bytes(options.serving.states() * model::recurrent_bytes(config)),
            context,
            sequences: options.serving.sequences,
            prefix: options.serving.prefix,
            context_is_default: options.context.is_none(),
            scratch: &|rows| {
                let draft = options.loads_draft().then(|| model::draft_scratch(config, rows));
                model::scratch_terms(&self.model, rows, options.all_logit_rows())
                    .into_iter()
                    .chain(draft)
                    .chain(options.fit_bytes.map(|_| model::tap_bytes(config, rows)))
                    .chain(options.verify_terms(config, context))
                    .map(to_term)
                    .collect()
            },
            passes: &passes,
            records: {
                let records = self.records(options);
                slots::record_classes(&slots::needed(&records), records.n_experts())
            },
            top_k: config.top_k,
            slots: options.slots,
        };
        let mut plan = memory_plan::plan(&input)?;
        if options.loads_draft() {
            // Its share of a term that is one number for all layers.
            let positions = u64::from(context) * u64::from(options.serving.sequences);
            let bytes = Bytes(draft_kv.saturating_mul(positions));
            plan.details.push(Term::new(DRAFT_CACHE, bytes));
        }
        Ok(plan)
    }

    /// Whether options make sense for this model.
    fn check(&self, options: &EngineOptions) -> Result<(), EngineError> {
        if let Some(rows) = options.pass_rows
            && (rows == 0 || !(rows as usize).is_multiple_of(GRID))
        {
            return Err(EngineError::Option(format!(
                "--pass {rows}: a pass is a multiple of {GRID} tokens"
            )));
        }
        if options.context == Some(0) {
            return Err(EngineError::Option(
                "--context 0: at least one token is needed".to_owned(),
            ));
        }
        if options.loads_draft() && self.model.draft.is_none() {
            return Err(EngineError::NoDraft { model: self.path.clone() });
        }
        let SpeculationOptions { most, .. } = options.speculation;
        if options.speculation.is_on() && !(1..=MOST_GUESSES).contains(&most) {
            return Err(EngineError::Option(format!(
                "--draft-tokens {most}: 1 to {MOST_GUESSES} tokens can be guessed ahead"
            )));
        }
        let Serving { sequences, .. } = options.serving;
        if !(1..=MOST_SEQUENCES).contains(&sequences) {
            return Err(EngineError::Option(format!(
                "{sequences} requests side by side: 1 to {MOST_SEQUENCES} are possible"
            )));
        }
        if sequences > 1 && options.speculation.is_on() {
            return Err(EngineError::Option(
                "guesses ahead are for one request at a time; leave them out, or run no others beside it".to_owned(),
            ));
        }
        Ok(())
    }

    /// Routed experts that are run: those of a loaded draft head too.
    fn records(&self, options: &EngineOptions) -> Cow<'_, Records> {
        if options.loads_draft() {
            Cow::Owned(self.model.records_with_draft())
        } else {
            Cow::Borrowed(&self.model.records)
        }
    }

    /// Resident weights of a draft head that is loaded.
    fn draft_weights(&self, options: &EngineOptions) -> Option<model::NamedBytes> {
        model::draft_weights(&self.model).filter(|_| options.loads_draft())
    }

    /// Bytes that loading reads, for whoever shows how far it is.
    pub fn load_bytes(&self, options: &EngineOptions) -> u64 {
        let terms = model::resident_terms(&self.model);
        terms.into_iter().chain(self.draft_weights(options)).map(|term| term.bytes).sum()
    }

    /// Memory of the n-gram rows that are kept.
    fn ngram_cache(&self, options: &EngineOptions) -> Option<Term> {
        let table = self.model.ngram_table.as_ref()?;
        let bytes = NgramStore::cache_bytes(table, options.ngram_rows as usize);
        Some(Term::new("n-gram row cache", Bytes(bytes)))
    }

    /// Memory in which the readers put experts together. Where experts land in place, the buffers are gone once the
    /// resident weights are read.
    fn staging(&self, options: &EngineOptions) -> Option<Term> {
        let bytes = Bytes(Store::staging_bytes(options.read_threads()));
        self.records(options).are_put_together().then(|| Term::new("staging of experts", bytes))
    }
}

/// What reading ahead takes.
impl OpenModel {
    /// Memory of guesses and of their reads.
    fn lookahead(&self, options: &EngineOptions) -> Option<Term> {
        let correction = options.correction.as_deref();
        let model::NamedBytes { name, bytes } =
            model::lookahead_bytes(&self.model.config, correction);
        (options.lookahead != Lookahead::Off).then(|| Term::new(name, Bytes(bytes)))
    }

    /// Memory of a layer's reads before its turn.
    fn sweep(&self, options: &EngineOptions) -> Option<Term> {
        let bytes = model::sweep_bytes(self.model.records.n_experts());
        options.sweep.then(|| Term::new("reads of the next layer", Bytes(bytes)))
    }

    /// Memory of uses, of their file, and of reads in idle time.
    fn hot_set(&self, options: &EngineOptions) -> Option<Term> {
        let records = self.records(options);
        let (n_layers, n_experts) = (records.n_layers() as u32, records.n_experts());
        let file = crate::hot_set::file_bytes(n_layers, n_experts) as u64;
        let reads = model::hot_set_bytes(u64::from(n_layers) * u64::from(n_experts));
        // As heat and as bytes.
        options.hot_set.then(|| Term::new("hot set", Bytes(2 * file + reads)))
    }
}

/// A model that runs under its plan.
pub struct Engine {
    /// What was promised.
    pub plan: Plan,
    /// What was asked for.
    pub options: EngineOptions,
    /// The network.
    pub network: Network,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Headers.
    pub checkpoint: Checkpoint,
    /// As given by the user.
    pub path: PathBuf,
    /// Weights that a generated token needs.
    pub(crate) token_bytes: u64,
    /// Bytes that the process had written before; a program that started this one may have written many.
    pub(crate) written_before: u64,
}

impl Engine {
    /// Plans, reserves and loads. `progress` gets resident bytes as they arrive.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn load(
        opened: OpenModel,
        mut options: EngineOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, EngineError> {
        let mirrors = mirrors::find(&opened.checkpoint, &options.mirrors)?;
        let plan = opened.plan(&options)?;
        let records = opened.records(&options).into_owned();
        let OpenModel { path, checkpoint, model, tokenizer } = opened;
        let tokenizer = Arc::new(tokenizer);
        let files: Vec<PathBuf> = checkpoint.files.iter().map(|f| f.path.clone()).collect();
        let reads = options.reads.unwrap_or_default().model;
        let store_options = StoreOptions {
            threads: reads.threads,
            part_bytes: reads.part_bytes,
            direct: options.direct,
            reader: options.reader,
            mirrors: mirrors.clone(),
            notice: options.notice,
            simulate: options.simulate,
            faults: options.faults.clone(),
        };
        let store = Store::open(&files, store_options)?;
        // Sequences that generate side by side share passes.
        let usual = model.config.top_k.saturating_mul(options.serving.sequences);
        let experts = (records.n_experts(), usual.min(records.n_experts()));
        let spec = slots::pool_spec(&slots::needed(&records), experts, &plan.classes);
        let pool = SlotPool::new(spec, options.policy)?;
        let mut stream = ExpertStream::new(pool, store, records);
        if options.hot_set {
            stream.count_uses();
        }
        let ngrams = ngram_store(&model, &files, &plan, (&options, mirrors))?;
        let network_options = NetworkOptions {
            max_rows: plan.pass_rows as usize,
            context_tokens: plan.context as usize,
            logit_rows: options.all_logit_rows() as usize,
            slots: plan
                .classes
                .iter()
                .map(|class| SlotClass {
                    slots: class.slots as usize,
                    stride: class.slot_bytes as usize,
                })
                .collect(),
            draft: options.loads_draft(),
            verify_rows: options.speculation.rows() as usize,
            lookahead: options.lookahead,
            correction: options.correction.take(),
            record_taps: options.fit_bytes.is_some(),
            sweep: options.sweep,
        };
        let backend = backend(&options);
        let network = Network::load(&model, backend, stream, ngrams, network_options, progress)?;
        let written_before = crate::receipt::written_bytes();
        let token_bytes = model::token_bytes(&model);
        Ok(Self {
            plan,
            options,
            network,
            tokenizer,
            checkpoint,
            path,
            token_bytes,
            written_before,
        })
    }
}

impl Engine {
    /// Memory of the draft head, apart from slots for its experts; nothing if it is not loaded.
    pub fn draft_bytes(&self) -> Option<Bytes> {
        let details = self.plan.details.iter().filter(|term| term.name.starts_with("draft "));
        let sum = details.map(|term| term.bytes.0).sum();
        self.options.loads_draft().then_some(Bytes(sum))
    }

    /// An empty sequence, with guesses ahead if the options say so.
    ///
    /// # Errors
    /// Out of memory.
    pub fn open_sequence(&mut self) -> Result<Sequence, ForwardError> {
        let sequence = Sequence::open(&mut self.network)?;
        let options = self.options.speculation;
        Ok(if options.is_on() {
            sequence.with_speculation(Speculation::new(options, self.plan.context as usize))
        } else {
            sequence
        })
    }
}

fn backend(options: &EngineOptions) -> Box<dyn Backend> {
    let kernels =
        Options { threads: options.threads, activations: options.activations, kv: options.kv };
    match options.backend {
        BackendKind::Cpu => compute::cpu(kernels),
        BackendKind::Reference => compute::reference(kernels),
        BackendKind::Deferred => compute::deferred(compute::cpu(kernels), 1),
    }
}

/// What a kernel thread touches of its stack and of its allocator's arena.
const THREAD_BYTES: u64 = 64 << 10;

/// The process as it is now and the threads that it is about to start, in whole MiB: two commands that do the same do
/// not measure the same to the page.
fn process_base(options: &EngineOptions, thread_bytes: u64) -> Bytes {
    let threads = (THREAD_BYTES + thread_bytes) * options.threads as u64;
    Bytes((memory_plan::current_rss().0 + threads).next_multiple_of(1 << 20))
}

fn ngram_store(
    model: &Model,
    files: &[PathBuf],
    plan: &Plan,
    (options, mirrors): (&EngineOptions, Vec<Mirror>),
) -> Result<Option<NgramStore>, StoreError> {
    let (Some(table), Some(shape)) = (&model.ngram_table, &model.config.ngram) else {
        return Ok(None);
    };
    let options = NgramOptions {
        max_tokens: plan.pass_rows as usize,
        heads: shape.heads(),
        cache_rows: options.ngram_rows as usize,
        direct: options.direct,
        mirrors,
        notice: options.notice,
        simulate: options.simulate,
        faults: options.faults.clone(),
    };
    NgramStore::open(files, table.clone(), options).map(Some)
}
