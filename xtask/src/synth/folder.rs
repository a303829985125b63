//! A folder with a checkpoint: weight files, their index, and what a program needs beside them.

use std::io::{BufWriter, IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

use super::qwen38::{Geometry, tensors};
use super::qwen38_text::{TOKENS, config, generation_config};
use super::safetensors::{Tensor, index, shards, write_filled, write_sparse};
use super::tokenizer::{Vocabulary, tokenizer_config, tokenizer_json};

/// Own text in the manner of the published template: effort, thinking, XML tool calls.
const TEMPLATE: &str = include_str!("chat_template.jinja");

/// Writes a checkpoint whose data is holes, but for the constants of the n-gram hash.
///
/// # Errors
/// The folder exists, or a file cannot be written.
pub fn sparse_folder(folder: &Path, geometry: &Geometry) -> Result<()> {
    let tensors = tensors(geometry);
    let shards = shards(&tensors, geometry.files, &geometry.torn());
    make(folder)?;
    for shard in &shards {
        write_sparse(folder, shard)?;
    }
    beside(folder, geometry, &index(&shards))
}

/// Writes a checkpoint with random weights, the same for the same seed.
///
/// # Errors
/// The folder exists, or a file cannot be written.
pub fn real_folder(folder: &Path, geometry: &Geometry, seed: u64) -> Result<()> {
    let tensors = tensors(geometry);
    let shards = shards(&tensors, geometry.files, &geometry.torn());
    make(folder)?;
    let bar = progress_bar(tensors.iter().map(Tensor::bytes).sum());
    for shard in &shards {
        write_filled(folder, shard, seed, &mut |bytes| bar.inc(bytes))?;
    }
    bar.finish_and_clear();
    beside(folder, geometry, &index(&shards))
}

fn make(folder: &Path) -> Result<()> {
    if let Some(parent) = folder.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("cannot make the folder {}", parent.display()))?;
    }
    std::fs::create_dir(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))
}

/// Writes everything but the weights; the configuration last, so that half a folder is no model.
fn beside(folder: &Path, geometry: &Geometry, index: &Value) -> Result<()> {
    write_json(folder, "model.safetensors.index.json", index)?;
    write_json(folder, "tokenizer.json", &tokenizer_json(&Vocabulary::of(TOKENS)))?;
    write_json(folder, "tokenizer_config.json", &tokenizer_config(TOKENS))?;
    write_json(folder, "generation_config.json", &generation_config())?;
    let template = folder.join("chat_template.jinja");
    std::fs::write(&template, TEMPLATE)
        .with_context(|| format!("cannot write {}", template.display()))?;
    write_json(folder, "config.json", &config(geometry))
}

fn write_json(folder: &Path, name: &str, value: &Value) -> Result<()> {
    let path = folder.join(name);
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(std::fs::File::create_new(&path)?);
        serde_json::to_writer_pretty(&mut file, value)?;
        file.write_all(b"\n")?;
        file.flush()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// A bar over bytes, on a terminal only.
fn progress_bar(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    bar.set_draw_target(if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    });
    let style = ProgressStyle::with_template(
        "writing {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
    );
    bar.set_style(style.expect("the template is well formed"));
    bar
}
