//! Flags of what measures, records and diagnoses.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use expert_store::SimulatedDisk;
use units::Bytes;

use super::{Kv, ModelArgs, Policy, Reader, SpeculationArgs, SpeedArgs, disk};
use crate::simulate::Made;

/// When `sakia bench` measures what bounds decoding.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Roofline {
    /// Unless one run's receipt goes to a pipe: whoever times the process then times the run.
    Auto,
    On,
    Off,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  sakia bench -m big.gguf --memory 8GiB --ids-file ids.txt -p 256 -n 64\n  sakia bench -m big.gguf --memory 5GiB,8GiB --ids-file ids.txt -p 256,2048 -n 64 --repeat 5 -o new.json\n  sakia bench --compare old.json new.json\n\nPrints a table on a terminal and JSON elsewhere. Every run starts with an empty pool, and the model's files (no others)\nout of the page cache. Several runs are processes of their own, one after the other in turn, so that memory is counted\nfor each and a drifting machine meets all alike."
)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// File of token ids, separated by space, comma or line
    #[arg(long, value_name = "FILE", required_unless_present = "compare")]
    pub(crate) ids_file: Option<PathBuf>,
    /// Ids read as the prompt; several numbers are measured in turn
    #[arg(
        short = 'p',
        long = "prompt-tokens",
        value_name = "P,...",
        value_delimiter = ',',
        required_unless_present = "compare"
    )]
    pub(crate) prompt_tokens: Vec<usize>,
    /// Ids forced after it, one by one
    #[arg(
        short = 'n',
        long = "decode-tokens",
        value_name = "N",
        required_unless_present = "compare"
    )]
    pub(crate) decode_tokens: Option<usize>,
    /// Runs of everything; five give a spread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000), help_heading = "Measuring")]
    pub(crate) repeat: u16,
    /// After each run the same again in the same process, with the pool as it was left
    #[arg(long, help_heading = "Measuring")]
    pub(crate) warm: bool,
    /// Leave the model's files in the page cache
    #[arg(long, help_heading = "Measuring")]
    pub(crate) keep_cache: bool,
    /// Measure afterwards what bounds decoding, which takes some seconds; auto: unless one run's receipt goes to a pipe
    #[arg(long, value_enum, default_value_t = Roofline::Auto, value_name = "WHEN", help_heading = "Measuring")]
    pub(crate) roofline: Roofline,
    /// Print the ratios of two receipts instead of measuring
    #[arg(
        long,
        value_names = ["A", "B"],
        num_args = 2,
        help_heading = "Measuring",
        conflicts_with_all = ["model", "ids_file", "prompt_tokens", "decode_tokens", "out", "only"]
    )]
    pub(crate) compare: Vec<PathBuf>,
    /// Write the receipt to a file, as JSON
    #[arg(short, long, value_name = "FILE", help_heading = "Record")]
    pub(crate) out: Option<PathBuf>,
    /// Print JSON, also on a terminal
    #[arg(long, help_heading = "Record")]
    pub(crate) json: bool,
    /// Let reads take what they would on a slower disk than this one, like latency=0.3ms,rate=5GB/s
    #[arg(long, value_name = "DISK", value_parser = disk::simulated, help_heading = "Measuring")]
    pub(crate) simulate_disk: Option<SimulatedDisk>,
    /// Most memory the process may use, like 8GiB; several are measured in turn [default: 70 % of what there is]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', help_heading = "Memory")]
    pub(crate) memory: Vec<Bytes>,
    /// Positions to reserve in the KV cache; several are measured in turn [default: as many as are used]
    #[arg(long, value_name = "TOKENS,...", value_delimiter = ',', help_heading = "Memory")]
    pub(crate) context: Vec<u32>,
    /// Element type of the KV cache
    #[arg(long, value_enum, default_value_t = Kv::F16, value_name = "TYPE", help_heading = "Memory")]
    pub(crate) kv: Kv,
    /// Expert slots instead of as many as fit
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Memory")]
    pub(crate) slots: Option<u32>,
    #[command(flatten)]
    pub(crate) speed: SpeedArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    /// For the processes of a series: which of its settings to run, once
    #[arg(long, hide = true)]
    pub(crate) only: Option<usize>,
}

#[derive(Args)]
#[command(
    group = clap::ArgGroup::new("input").required(true),
    after_help = "Example:\n  sakia trace -m big.gguf --memory 8GiB --ids-file ids.txt -p 256 -n 64 -o big.trace"
)]
pub(crate) struct TraceArgs {
    /// Text to continue with the likeliest tokens
    #[arg(group = "input")]
    pub(crate) prompt: Option<String>,
    /// File of token ids, separated by space, comma or line
    #[arg(long, value_name = "FILE", group = "input")]
    pub(crate) ids_file: Option<PathBuf>,
    /// Where the record goes
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Ids of the file that are read as the prompt [default: all but those of -n]
    #[arg(short = 'p', long = "prompt-tokens", value_name = "P", requires = "ids_file")]
    pub(crate) prompt_tokens: Option<usize>,
    /// Tokens that are decoded one by one: ids of the file, or the likeliest
    #[arg(short = 'n', long = "decode-tokens", value_name = "N", default_value_t = 64)]
    pub(crate) decode_tokens: usize,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Most memory the process may use, like 8GiB [default: 70 % of what the machine or cgroup allows]
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub(crate) memory: Option<Bytes>,
}

/// What `sakia probe` measures.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolOrDisk {
    Disk,
    Pool,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  sakia probe -m big.gguf\n  sakia probe /mnt/ssd/big.file --sizes 1MiB,3MiB --depths 4,8 --seconds 20\n  sakia probe --only pool --trace big.trace --slots 1200\n\nNothing is written: reads go to random pages of the file, past the page cache where the file system can do that."
)]
pub(crate) struct ProbeArgs {
    /// File to read, or a folder whose largest file is read [default: that of the model]
    #[arg(value_name = "PATH", conflicts_with = "model")]
    pub(crate) path: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// One of the two
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) only: Option<PoolOrDisk>,
    /// Lengths of reads [default: 4KiB to 8MiB, and the pieces of the model's experts]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', help_heading = "Disk")]
    pub(crate) sizes: Vec<Bytes>,
    /// Reads at once, each by a thread of its own
    #[arg(
        long,
        value_name = "N,...",
        value_delimiter = ',',
        default_values_t = [1, 2, 4, 8, 16],
        value_parser = clap::value_parser!(u16).range(1..=64),
        help_heading = "Disk"
    )]
    pub(crate) depths: Vec<u16>,
    /// Which calls of the system read [default: all that are allowed here]
    #[arg(long, value_enum, value_name = "READER", help_heading = "Disk")]
    pub(crate) reader: Option<Reader>,
    /// Time for all reads together; every length gets at least one at every depth
    #[arg(long, value_name = "S", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=3600), help_heading = "Disk")]
    pub(crate) seconds: u16,
    /// Record of `sakia trace` that the pool runs [default: made routing]
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic", help_heading = "Pool")]
    pub(crate) trace: Option<PathBuf>,
    /// Made routing that the pool runs, as `sakia simulate` takes it
    #[arg(
        long,
        value_name = "NAME[,KEY=VALUE...]",
        default_value = "flash-next,tokens=100",
        help_heading = "Pool"
    )]
    pub(crate) synthetic: Made,
    /// Slots of the pool [default: a quarter of all experts]
    #[arg(long, value_name = "N", help_heading = "Pool")]
    pub(crate) slots: Option<u32>,
    /// Who decides which expert leaves [default: all of them]
    #[arg(
        long,
        value_enum,
        value_name = "POLICY,...",
        value_delimiter = ',',
        help_heading = "Pool"
    )]
    pub(crate) policy: Vec<Policy>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  sakia doctor\n  sakia doctor -m big.gguf --memory 8GiB --json\n\nThe text names models but no folders, so that it can go into a bug report."
)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Budget to plan with, like 8GiB [default: 70 % of what the machine or cgroup allows]
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Bytes>,
    /// Measure neither disks nor memory, which takes some seconds
    #[arg(long)]
    pub(crate) no_probe: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
