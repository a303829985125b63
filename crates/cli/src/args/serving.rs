//! Flags of the server, of agents, and of the store.

use std::path::PathBuf;

use clap::Args;
use units::Bytes;

use super::{MemoryArgs, ModelArgs, SamplingArgs, SpeedArgs};

#[derive(Clone, Args)]
#[command(
    after_help = "Examples:\n  sakia serve -m org/name --memory 12GiB\n  sakia serve -m big.gguf --host 0.0.0.0 --api-key secret"
)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// What requests call the model [default: its file's name, or org/name]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Serve this model alone, not those of the store
    #[arg(long)]
    pub(crate) only: bool,
    /// Address to listen on; others than this machine's own need a key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Network")]
    pub(crate) host: std::net::IpAddr,
    /// Port to listen on; 0 = any that is free
    #[arg(long, value_name = "PORT", default_value_t = 8484, help_heading = "Network")]
    pub(crate) port: u16,
    #[arg(
        long,
        value_name = "KEY",
        help_heading = "Network",
        help = "Key that clients have to send [default: $SAKIA_API_KEY, else none]"
    )]
    pub(crate) api_key: Option<String>,
    /// Listen where others can reach it without a key
    #[arg(long, help_heading = "Network")]
    pub(crate) allow_anyone: bool,
    // Markdown in a doc comment would be printed as it is.
    #[arg(
        long,
        value_name = "ORIGIN",
        help_heading = "Network",
        help = "Origin whose pages may ask, like http://localhost:3000, or * for all; may be given several times"
    )]
    pub(crate) cors_origin: Vec<String>,
    /// Largest body of a request
    #[arg(long, value_name = "SIZE", default_value = "8MiB", help_heading = "Network")]
    pub(crate) max_body: Bytes,
    /// Connections at once
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Network", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) max_connections: u16,
    /// Requests that run side by side, each with the whole context
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = "Requests", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) sequences: u16,
    /// Requests that may wait besides; more are told to come back
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Requests")]
    pub(crate) queue: u16,
    /// Longest time without any progress of a request that runs, like 10m; -1 = for ever
    #[arg(
        long,
        value_name = "TIME",
        default_value = "10m",
        help_heading = "Requests",
        allow_hyphen_values = true
    )]
    pub(crate) patience: String,
    /// How long running answers may go on when the server ends
    #[arg(
        long,
        value_name = "TIME",
        default_value = "5s",
        help_heading = "Requests",
        allow_hyphen_values = true
    )]
    pub(crate) grace: String,
    /// Write a line for every request; never what it says
    #[arg(long, help_heading = "Requests")]
    pub(crate) log_requests: bool,
    /// Memory for bodies and grammars of all requests [default: 1/32 of --memory, 6 to 64 MiB]
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub(crate) request_memory: Option<Bytes>,
    /// Memory for beginnings of prompts that come again
    #[arg(long, value_name = "SIZE", default_value = "0", help_heading = "Memory")]
    pub(crate) prefix_memory: Bytes,
    /// Folder for beginnings of prompts that outlast the server
    #[arg(long, value_name = "DIR", help_heading = "Memory", requires = "prefix_memory")]
    pub(crate) prefix_disk: Option<PathBuf>,
    /// Most bytes in that folder
    #[arg(long, value_name = "SIZE", default_value = "4GiB", help_heading = "Memory")]
    pub(crate) prefix_disk_quota: Bytes,
    /// How long a model stays loaded that nobody uses, like 30m; -1 = for ever
    #[arg(
        long,
        value_name = "TIME",
        default_value = "-1",
        help_heading = "Memory",
        allow_hyphen_values = true
    )]
    pub(crate) keep_alive: String,
    /// End when nobody has asked for anything for so long
    #[arg(long, value_name = "TIME", help_heading = "Memory")]
    pub(crate) idle_exit: Option<String>,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) speed: SpeedArgs,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  sakia launch                       # lists the agents that are known\n  sakia launch claude --dry-run\n  sakia launch codex -- exec \"explain this repository\""
)]
pub(crate) struct LaunchArgs {
    /// Which agent; without it they are listed
    pub(crate) agent: Option<String>,
    /// Arguments for the agent
    #[arg(last = true)]
    pub(crate) rest: Vec<String>,
    /// Where the server listens
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8484")]
    pub(crate) server: std::net::SocketAddr,
    #[arg(long, value_name = "KEY", help = "Key of the server [default: $SAKIA_API_KEY]")]
    pub(crate) api_key: Option<String>,
    /// Model by its name [default: the server's first]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Print the environment and the command, and start nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Args)]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
#[command(after_help = "Example: sakia rm org/name:Q4_K_M")]
pub(crate) struct RemoveArgs {
    #[arg(
        help = "Model as listed, org/name or org/name:Q4_K_M; without a quantisation all of the repository"
    )]
    pub(crate) model: String,
    /// Do not ask
    #[arg(long)]
    pub(crate) yes: bool,
}
