//! Arguments of `sakia fit-lookahead`.

use std::path::PathBuf;

use clap::Args;
use units::Bytes;

use super::ModelArgs;

#[derive(Args)]
#[command(
    group = clap::ArgGroup::new("input").required(true),
    after_help = "Example:\n  sakia fit-lookahead -m big.gguf --memory 8GiB --text-file book.txt\n  sakia run -m big.gguf --memory 8GiB --lookahead fitted"
)]
pub(crate) struct FitArgs {
    /// File of text, the more like what the model will be asked the better; may be given several times
    #[arg(long, value_name = "FILE", group = "input")]
    pub(crate) text_file: Vec<PathBuf>,
    /// File of token ids instead, separated by space, comma or line; may be given several times
    #[arg(long, value_name = "FILE", group = "input")]
    pub(crate) ids_file: Vec<PathBuf>,
    /// File of the same kind to judge by [default: the last tenth of every other]
    #[arg(long, value_name = "FILE")]
    pub(crate) held_out: Vec<PathBuf>,
    /// Most tokens to fit to, of all files together, and to judge by
    #[arg(short = 'n', long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub(crate) tokens: u32,
    // Markdown in a doc comment would be printed as it is.
    #[arg(
        short,
        long,
        value_name = "FILE",
        help = "Where the corrections go [default: where --lookahead fitted finds them]"
    )]
    pub(crate) out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Most memory the process may use, like 8GiB [default: 70 % of what the machine or cgroup allows]
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub(crate) memory: Option<Bytes>,
}
