//! Synthetic checkpoints with the exact shapes of published ones: to plan, inspect and measure without a download.
//!
//! A *sparse* checkpoint is headers and holes: every tensor is there, has its type, shape and place, and reads as
//! zeros, in a few MB of disk. A *real* one has random weights from a seed and runs; what it says makes no sense.
//! Each kind is a list of tensors (`qwen38`, `qwen3next`) for a container (`safetensors`, `gguf`).

mod arguments;
mod fill;
mod folder;
mod gguf;
mod ngram;
mod qwen38;
mod qwen38_text;
mod qwen3next;
mod rng;
mod safetensors;
mod tokenizer;

use std::path::Path;

use anyhow::{Result, bail};

use arguments::Arguments;
pub use folder::{real_folder, sparse_folder};
pub use gguf::write_sparse as write_sparse_gguf;
pub use qwen3next::{iq2_layout, types_of_layer};
pub use qwen38::{Geometry, Part, part_bytes, tensors};

/// What `cargo xtask synth --help` says.
const USAGE: &str = "\
Synthetic checkpoints with the exact shapes of published ones

Usage: cargo xtask synth KIND --out PATH [OPTIONS]

Kinds:
  qwen38-mlx-4bit   Qwen3.8-Flash-Next as converted for MLX, 4 bit: a folder of 11 safetensors files with 3,215
                    tensors and 103,769,745,912 bytes of data, all holes. For `inspect` and `plan`.
  qwen38-mlx-real   The same layers, only a few of them, with random weights that run: about 6.7 GB for 4 layers.
                    The fourth layer is attention with an indexer, the second has the n-gram table.
  qwen3next-iq2     Qwen3-Next 80B in IQ2_XS and IQ1_M: one GGUF file of 19.3 GB, all holes. For `inspect` and `plan`.

Options:
  --out PATH        Folder or file to make; must not exist
  --layers N        qwen38-mlx-real: trunk layers, 4 to 48 [default: 4]
  --ngram-rows N    qwen38-mlx-real: about how many rows the n-gram table has [default: 1048576]
  --seed N          qwen38-mlx-real: other weights for another number [default: 1]
  --alignment N     qwen3next-iq2: of tensors in the file, a power of two from 8 to 65536 [default: 32, as published]

Holes need a file system that has them (ext4, xfs, btrfs, APFS, tmpfs).

Example: cargo xtask synth qwen3next-iq2 --out target/next.gguf && cargo run -- plan -m target/next.gguf";

/// `synth KIND --out PATH [OPTIONS]`; a relative path starts at `folder`.
///
/// # Errors
/// An unknown kind or option, a value out of its range, a path that exists, a write that fails.
pub fn run(folder: &Path, args: &[String]) -> Result<()> {
    let Some((kind, rest)) = args.split_first().filter(|(kind, _)| !is_help(kind)) else {
        eprintln!("{USAGE}");
        return Ok(());
    };
    if rest.iter().any(|word| is_help(word)) {
        eprintln!("{USAGE}");
        return Ok(());
    }
    match kind.as_str() {
        "qwen38-mlx-4bit" => {
            let out = Arguments::parse(rest, &[])?.out(folder)?;
            sparse_folder(&out, &Geometry::published())
        }
        "qwen38-mlx-real" => {
            let args = Arguments::parse(rest, &["--layers", "--ngram-rows", "--seed"])?;
            let layers = args.number("--layers", 4, 4, 48)?;
            let rows = args.number("--ngram-rows", 1 << 20, 1 << 11, 320_001_536)?;
            let seed = args.number("--seed", 1, 0, u64::MAX)?;
            let geometry = Geometry::small(layers as u32, rows / u64::from(qwen38::NGRAM_HEADS));
            real_folder(&args.out(folder)?, &geometry, seed)
        }
        "qwen3next-iq2" => {
            let args = Arguments::parse(rest, &["--alignment"])?;
            let alignment = args.number("--alignment", 32, 8, 1 << 16)?;
            if !alignment.is_power_of_two() {
                bail!("`--alignment {alignment}`: a power of two is needed");
            }
            write_sparse_gguf(&args.out(folder)?, &iq2_layout(alignment))
        }
        other => bail!("no kind `{other}`\n\n{USAGE}"),
    }
}

fn is_help(word: &str) -> bool {
    matches!(word, "help" | "-h" | "--help")
}
