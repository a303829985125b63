//! The command line.

mod disk;
mod lookahead;
mod measuring;
mod serving;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use compute::backend::{Activations, KvType};
use expert_store::{DirectMode, ReaderKind};
use model::Lookahead;
use session::{BackendKind, SpeculationOptions};
use slot_pool::PolicyKind;
use units::Bytes;

use crate::simulate::SimulateArgs;
pub(crate) use lookahead::FitArgs;
pub(crate) use measuring::{BenchArgs, DoctorArgs, PoolOrDisk, ProbeArgs, Roofline, TraceArgs};
pub(crate) use serving::{LaunchArgs, ListArgs, RemoveArgs, ServeArgs};

/// Runs Mixture-of-Experts language models that are larger than memory.
#[derive(Parser)]
#[command(name = "sakia", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Answer a prompt, or chat
    Run(RunArgs),
    /// Serve models over HTTP, to clients of three kinds
    Serve(Box<ServeArgs>),
    /// Start a coding agent that is installed here, wired to the local server
    Launch(LaunchArgs),
    /// List the models of the local store
    List(ListArgs),
    /// Remove a model from the local store
    Rm(RemoveArgs),
    /// Show where every byte of the budget goes, before anything is loaded
    Plan(PlanArgs),
    /// Download a model into the local store
    Pull(PullArgs),
    /// Rewrite a model so that every expert is one read
    Pack(PackArgs),
    /// Check that a model is whole
    Verify(VerifyArgs),
    /// Show what a model file holds
    Inspect(InspectArgs),
    /// Turn text into token ids, or ids into text
    Tokenize(TokenizeArgs),
    /// Write the logits of every position of a given text
    Logits(LogitsArgs),
    /// Check one expert: read through the pool, multiplied by the backend, against the scalar definition
    Parity(ParityArgs),
    /// Check every kernel of this machine against its scalar definition
    Selftest(SelftestArgs),
    /// Measure prefill and decode on given token ids, and what bounds them
    Bench(Box<BenchArgs>),
    /// Measure the disk at many lengths and depths of reads, and how fast the slot pool decides
    Probe(ProbeArgs),
    /// Say what this machine has, what would be slow on it and why
    Doctor(DoctorArgs),
    /// Record which experts every token chooses
    Trace(TraceArgs),
    /// Fit what --lookahead fitted adds to its guesses, to texts
    FitLookahead(FitArgs),
    /// Run such a record, or a made one, through pools of other sizes and policies
    Simulate(SimulateArgs),
}

impl Command {
    /// Whether a program reads the output, also that of an error.
    pub(crate) const fn json_errors(&self) -> bool {
        match self {
            Self::Plan(args) => args.json,
            Self::Inspect(args) => args.json,
            Self::Tokenize(args) => args.json,
            Self::Pull(args) => args.json,
            Self::List(args) => args.json,
            Self::Pack(args) => args.json,
            Self::Verify(args) => args.json,
            Self::Trace(args) => args.json,
            Self::FitLookahead(args) => args.json,
            Self::Simulate(args) => args.json,
            Self::Bench(args) => args.json,
            Self::Probe(args) => args.json,
            Self::Doctor(args) => args.json,
            _ => false,
        }
    }
}

/// Which model.
#[derive(Clone, Args)]
pub(crate) struct ModelArgs {
    // Markdown in a doc comment would be printed as it is.
    #[arg(
        short,
        long,
        value_name = "MODEL",
        help = "Model file, folder or pack, any part of a split one, or org/name of a pulled one [default: $SAKIA_MODEL, else the demo model]"
    )]
    pub(crate) model: Option<PathBuf>,
}

/// The budget and what it is spent on.
#[derive(Clone, Args)]
#[command(next_help_heading = "Memory")]
pub(crate) struct MemoryArgs {
    /// Most memory the process may use, like 8GiB [default: 70 % of what the machine or cgroup allows]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) memory: Option<Bytes>,
    /// Positions to reserve in the KV cache [default: the smaller of 8192 and the model's]
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true)]
    pub(crate) context: Option<u32>,
    /// Element type of the KV cache
    #[arg(long, value_enum, default_value_t = Kv::F16, value_name = "TYPE")]
    pub(crate) kv: Kv,
    /// Expert slots instead of as many as fit
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) slots: Option<u32>,
}

/// How it is computed. None of these changes the output, except `--activations`.
#[derive(Clone, Args)]
#[command(next_help_heading = "Speed")]
pub(crate) struct SpeedArgs {
    /// Kernel threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), allow_negative_numbers = true)]
    pub(crate) threads: Option<u16>,
    /// Rows of a prefill pass, a multiple of 64 [default: the planner's choice]
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true)]
    pub(crate) pass: Option<u32>,
    /// Which expert leaves the pool
    #[arg(long, value_enum, default_value_t = Policy::Segmented, value_name = "POLICY")]
    pub(crate) policy: Policy,
    // Markdown in a doc comment would be printed as it is.
    #[arg(
        long,
        value_enum,
        default_value_t = LookaheadKind::Off,
        value_name = "HOW",
        help = "Read experts ahead that the next layer may need: guessed by its router, by that and what fit-lookahead has fitted, or those of the token before"
    )]
    pub(crate) lookahead: LookaheadKind,
    /// Take what was fitted from this file
    #[arg(long, value_name = "FILE")]
    pub(crate) lookahead_file: Option<PathBuf>,
    /// In long passes, wait for each layer's router before reading its experts
    #[arg(long)]
    pub(crate) no_sweep: bool,
    /// Bypass the page cache when reading experts
    #[arg(long, value_enum, default_value_t = Direct::Auto, value_name = "MODE")]
    pub(crate) direct: Direct,
    /// Reads at the disk at once [default: measured when a large model is first run from a disk]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=expert_store::MAX_THREADS as i64), allow_negative_numbers = true)]
    pub(crate) read_threads: Option<u16>,
    // Markdown in a doc comment would be printed as it is.
    #[arg(
        long,
        value_enum,
        default_value_t = Reader::Pread,
        value_name = "READER",
        help = "Which calls of the system read experts; io_uring on Linux only, where it is allowed"
    )]
    pub(crate) reader: Reader,
    /// Folder with copies of some or all files of the model, on another disk; may be given several times
    #[arg(long, value_name = "DIR")]
    pub(crate) mirror: Vec<PathBuf>,
    /// Which implementation computes
    #[arg(long, value_enum, default_value_t = BackendName::Cpu, value_name = "BACKEND")]
    pub(crate) backend: BackendName,
    /// How activations meet quantised weights: 8 bit, or float for parity
    #[arg(long, value_enum, default_value_t = ActivationType::Q8, value_name = "TYPE")]
    pub(crate) activations: ActivationType,
}

/// Tokens that are guessed before they are chosen. None of these changes the output.
#[derive(Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculationArgs {
    /// Who guesses tokens ahead: the text where it repeats, the model's draft head (MTP), or whoever there is
    #[arg(long, value_enum, default_value_t = Speculate::Off, value_name = "WHO")]
    pub(crate) speculate: Speculate,
    /// Most tokens guessed ahead, 1 to 15; fewer where they do not pay
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4,
        requires = "speculate",
        allow_negative_numbers = true
    )]
    pub(crate) draft_tokens: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Speculate {
    Off,
    Lookup,
    Draft,
    Auto,
}

impl SpeculationArgs {
    /// For a model with or without a draft head.
    pub(crate) const fn options(&self, has_draft: bool) -> SpeculationOptions {
        let (lookup, draft) = match self.speculate {
            Speculate::Off => (false, false),
            Speculate::Lookup => (true, false),
            Speculate::Draft => (false, true),
            Speculate::Auto => (true, has_draft),
        };
        SpeculationOptions { lookup, draft, most: self.draft_tokens }
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Kv {
    F16,
    F32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Policy {
    Clock,
    Lru,
    Segmented,
    Frequency,
    S3Fifo,
    Arc,
    PerLayer,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LookaheadKind {
    Off,
    Tap,
    Fitted,
    LastToken,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Direct {
    Auto,
    Off,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Reader {
    Pread,
    #[value(name = "io_uring")]
    IoUring,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum BackendName {
    Cpu,
    Reference,
    Deferred,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum ActivationType {
    Q8,
    F32,
}

impl From<Kv> for KvType {
    fn from(kv: Kv) -> Self {
        match kv {
            Kv::F16 => Self::F16,
            Kv::F32 => Self::F32,
        }
    }
}

impl From<Policy> for PolicyKind {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Clock => Self::Clock,
            Policy::Lru => Self::Lru,
            Policy::Segmented => Self::Segmented,
            Policy::Frequency => Self::Frequency,
            Policy::S3Fifo => Self::S3Fifo,
            Policy::Arc => Self::Arc,
            Policy::PerLayer => Self::PerLayer,
        }
    }
}

impl From<LookaheadKind> for Lookahead {
    fn from(kind: LookaheadKind) -> Self {
        match kind {
            LookaheadKind::Off => Self::Off,
            // With a correction, if there is one: see `lookahead::attach`.
            LookaheadKind::Tap | LookaheadKind::Fitted => Self::Tap,
            LookaheadKind::LastToken => Self::LastToken,
        }
    }
}

impl From<Direct> for DirectMode {
    fn from(direct: Direct) -> Self {
        match direct {
            Direct::Auto => Self::Auto,
            Direct::Off => Self::Off,
        }
    }
}

impl From<Reader> for ReaderKind {
    fn from(reader: Reader) -> Self {
        match reader {
            Reader::Pread => Self::Pread,
            Reader::IoUring => Self::IoUring,
        }
    }
}

impl From<BackendName> for BackendKind {
    fn from(backend: BackendName) -> Self {
        match backend {
            BackendName::Cpu => Self::Cpu,
            BackendName::Reference => Self::Reference,
            BackendName::Deferred => Self::Deferred,
        }
    }
}

impl From<ActivationType> for Activations {
    fn from(activations: ActivationType) -> Self {
        match activations {
            ActivationType::Q8 => Self::Q8,
            ActivationType::F32 => Self::F32,
        }
    }
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  sakia run \"What is a compiler?\"\n  sakia run -m big.gguf --memory 8GiB --receipt run.json \"Hello\""
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(crate) struct RunArgs {
    /// What to ask; read from stdin when `-`; without it and on a terminal: chat
    pub(crate) prompt: Option<String>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Let the model think before it answers, where its template can
    #[arg(long, conflicts_with = "raw")]
    pub(crate) think: bool,
    /// Continue the prompt as it is, without the chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Most tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub(crate) max_tokens: u32,
    /// End the answer before this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) stop: Vec<String>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) speed: SpeedArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    /// Do not read often used experts in idle time, nor keep count of them
    #[arg(long, help_heading = "Speed")]
    pub(crate) no_hot_set: bool,
    /// Write what was measured, as JSON
    #[arg(long, value_name = "FILE", help_heading = "Record")]
    pub(crate) receipt: Option<PathBuf>,
    /// Do not print the line of counters after an answer
    #[arg(long, help_heading = "Record")]
    pub(crate) quiet: bool,
}

/// How the next token is chosen; the model file's own values where it has them.
#[derive(Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// 0 = always the likeliest token
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Only the K likeliest tokens; 0 = all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub(crate) top_k: Option<u32>,
    /// Only the likeliest tokens that sum to P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Only tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Divide the logits of recent tokens by this
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) repeat_penalty: Option<f32>,
    /// Subtract from the logits of tokens that occurred
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract for each time a token occurred
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Seed of the random numbers [default: from the clock]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
}

#[derive(Args)]
#[command(after_help = "Example: sakia plan -m big.gguf --memory 12GiB")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Rows of a prefill pass, a multiple of 64 [default: the planner's choice]
    #[arg(long, value_name = "TOKENS", help_heading = "Speed", allow_negative_numbers = true)]
    pub(crate) pass: Option<u32>,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    /// With the draft head (MTP) loaded, which only some commands do
    #[arg(long)]
    pub(crate) draft: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  sakia pull --dry-run Qwen/Qwen3-30B-A3B\n  sakia pull unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M\n  sakia run -m unsloth/Qwen3-30B-A3B-GGUF \"Hello\""
)]
pub(crate) struct PullArgs {
    /// Repository, org/name; of several quantisations one after a colon: `org/name:Q4_K_M`
    pub(crate) model: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "REV", default_value = "main")]
    pub(crate) revision: String,
    #[arg(
        long,
        value_name = "GLOB",
        help = "Files to fetch instead of the usual ones, like \"*Q4_K_M*\"; may be given several times"
    )]
    pub(crate) include: Vec<String>,
    #[arg(
        long,
        value_name = "URL",
        help_heading = "Network",
        help = "Base address of the host [default: $HF_ENDPOINT, else https://huggingface.co]"
    )]
    pub(crate) host: Option<String>,
    /// Connections at a time
    #[arg(long, value_name = "N", default_value_t = 4, help_heading = "Network", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) connections: u8,
    /// Show files, sizes and the total, and fetch nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  sakia pack -m big.gguf --out big.sakia\n  sakia run -m big.sakia \"Hello\""
)]
pub(crate) struct PackArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Where the pack goes; an interrupted one of this name is continued
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Replace a file of this name
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Example: sakia verify -m big.sakia --deep")]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Read everything: checksums of a pack, every value of anything else
    #[arg(long)]
    pub(crate) deep: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Print JSON; a broken file gives `error.class`
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Example: sakia tokenize -m model.gguf \"Hello, world\"")]
pub(crate) struct TokenizeArgs {
    /// The text; read from stdin when `-`
    #[arg(required_unless_present = "decode")]
    pub(crate) text: Option<String>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    // Markdown in a doc comment would be printed as it is.
    #[arg(long, help = "Take special tokens like <|im_start|> as plain text")]
    pub(crate) no_special: bool,
    /// Turn ids into text instead; separated by space or comma
    #[arg(long, value_name = "IDS", value_parser = parse_ids, conflicts_with_all = ["text", "no_special"])]
    pub(crate) decode: Option<Ids>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(
    group = clap::ArgGroup::new("input").required(true),
    after_help = "Example: sakia logits --ids-file ids.txt --out logits.npy --draft draft.npy"
)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Token ids, separated by space or comma
    #[arg(long, value_name = "IDS", value_parser = parse_ids, group = "input")]
    pub(crate) ids: Option<Ids>,
    /// File of token ids, separated by space, comma or line
    #[arg(long, value_name = "FILE", group = "input")]
    pub(crate) ids_file: Option<PathBuf>,
    // Markdown in a doc comment would be printed as it is.
    #[arg(
        long,
        value_name = "FILE",
        help = "Where the logits go: .npy, float32 [n_tokens, n_vocab]"
    )]
    pub(crate) out: PathBuf,
    // Markdown in a doc comment would be printed as it is.
    #[arg(
        long,
        value_name = "FILE",
        help = "Where the router's choices go: .npy, int32 [n_tokens, n_layers, top_k]"
    )]
    pub(crate) routes: Option<PathBuf>,
    // Markdown in a doc comment would be printed as it is.
    #[arg(
        long,
        value_name = "FILE",
        help = "Load the draft head (MTP) too and write its logits: .npy, float32 [n_tokens-1, n_vocab]; row t has seen token t+1 and guesses token t+2"
    )]
    pub(crate) draft: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) speed: SpeedArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExpertMatrix {
    Gate,
    Up,
    Down,
}

#[derive(Args)]
#[command(
    after_help = "Example: sakia parity -m model.gguf --layer 0 --expert 3 --kind gate --rows 0..16"
)]
pub(crate) struct ParityArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Layer, from 0
    #[arg(long)]
    pub(crate) layer: u32,
    /// Expert, from 0
    #[arg(long)]
    pub(crate) expert: u32,
    /// Which of its matrices
    #[arg(long, value_enum)]
    pub(crate) kind: ExpertMatrix,
    /// Rows `a..b` of the matrix [default: all]
    #[arg(long, value_parser = parse_rows)]
    pub(crate) rows: Option<std::ops::Range<u32>>,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) speed: SpeedArgs,
}

#[derive(Args)]
pub(crate) struct SelftestArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Token ids of one argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ids(pub(crate) Vec<u32>);

fn parse_ids(text: &str) -> Result<Ids, String> {
    crate::open::ids(text).map(Ids).map_err(|word| format!("`{word}` is not a token id"))
}

fn parse_rows(text: &str) -> Result<std::ops::Range<u32>, String> {
    let parse = |part: &str| part.trim().parse::<u32>().map_err(|error| error.to_string());
    let (start, end) = text.split_once("..").ok_or("write rows as a..b, for example 0..16")?;
    let (start, end) = (parse(start)?, parse(end)?);
    if start < end { Ok(start..end) } else { Err(format!("{start}..{end} holds no row")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn ids_are_separated_by_space_or_comma() {
        assert_eq!(parse_ids(" 1, 2 3\n4"), Ok(Ids(vec![1, 2, 3, 4])));
        assert_eq!(parse_ids("1 x"), Err("`x` is not a token id".to_owned()));
        assert_eq!(parse_ids(&"9".repeat(100)).unwrap_err().len(), 63);
    }

    #[test]
    fn row_ranges_are_half_open_and_not_empty() {
        assert_eq!(parse_rows("0..16"), Ok(0..16));
        assert!(
            parse_rows("5..5").is_err() && parse_rows("5").is_err() && parse_rows("a..b").is_err()
        );
    }
}
