//! `sakia inspect`: what a model file holds.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::ExitCode;

use anyhow::Result;
use checkpoint::{LayerKind, LayerRecords, Model};
use session::OpenModel;
use units::{Bytes, ExpertKey, LayerIndex};

use crate::args::InspectArgs;
use crate::{open, report};

pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode> {
    let opened = open::open(&open::choose(&args.model)?)?;
    if args.json {
        report::data(&format!("{:#}\n", as_json(&opened)));
    } else {
        report::text(&as_text(&opened));
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes by part; routed experts last.
fn parts(opened: &OpenModel) -> Vec<(String, u64)> {
    let resident = model::resident_terms(&opened.model)
        .into_iter()
        .map(|term| (term.name.to_owned(), term.bytes));
    let routed = ("routed experts".to_owned(), opened.model.records.payload_bytes());
    let mut parts: Vec<_> = resident.chain([routed]).collect();
    if let Some(table) = &opened.model.ngram_table {
        parts.push(("n-gram table (by row)".to_owned(), table.tensor.bytes));
    }
    let draft: u64 = draft_bytes(opened);
    if draft > 0 {
        parts.push(("draft layers (not loaded)".to_owned(), draft));
    }
    parts
}

fn draft_bytes(opened: &OpenModel) -> u64 {
    let config = &opened.model.config;
    let block = |name: &str| name.strip_prefix("blk.")?.split('.').next()?.parse::<u32>().ok();
    let tensors = opened.checkpoint.directory.iter();
    tensors
        .filter(|t| block(&t.name).is_some_and(|block| block >= config.n_layers))
        .map(|t| t.bytes)
        .sum()
}

fn types(layer: &LayerRecords) -> String {
    match &layer.up {
        Some(up) => {
            format!("{}/{}/{}", layer.gate.block_type, up.block_type, layer.down.block_type)
        }
        None => format!("{} (gate and up)/{}", layer.gate.block_type, layer.down.block_type),
    }
}

/// Bytes of the experts that one token uses.
fn bytes_a_token(model: &Model) -> u64 {
    let layers = (0..model.config.n_layers)
        .map(|layer| model.records.layer(LayerIndex(layer)).record_bytes());
    layers.sum::<u64>() * u64::from(model.config.top_k)
}

/// How many expert matrices have each type.
fn audit(model: &Model) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for layer in (0..model.config.n_layers).map(|layer| model.records.layer(LayerIndex(layer))) {
        let tensors = [Some(&layer.gate), layer.up.as_ref(), Some(&layer.down)];
        for tensor in tensors.into_iter().flatten() {
            *counts.entry(tensor.block_type.name()).or_insert(0) += model.config.n_experts as usize;
        }
    }
    counts
}

const fn mixer(kind: LayerKind) -> &'static str {
    match kind {
        LayerKind::Attention => "attention",
        LayerKind::DeltaNet => "delta net",
    }
}

fn as_json(opened: &OpenModel) -> serde_json::Value {
    let OpenModel { checkpoint, model, .. } = opened;
    let config = &model.config;
    let layers: Vec<_> = (0..config.n_layers)
        .map(|layer| {
            let records = model.records.layer(LayerIndex(layer));
            let record = model.records.record(ExpertKey::new(layer, 0));
            serde_json::json!({
                "layer": layer,
                "mixer": mixer(config.layers[layer as usize]),
                "expert_types": types(records),
                "record_bytes": record.bytes,
                "pieces": record.pieces.len(),
            })
        })
        .collect();
    serde_json::json!({
        "architecture": config.family.name(),
        "name": config.name,
        "files": checkpoint.files.iter().map(|f| serde_json::json!({ "path": report::lossy(&f.path), "bytes": f.bytes })).collect::<Vec<_>>(),
        "tensors": checkpoint.directory.len(),
        "layers": config.n_layers,
        "draft_layers": config.n_draft_layers,
        "hidden": config.hidden,
        "vocabulary": config.vocab,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "experts": config.n_experts,
        "top_k": config.top_k,
        "expert_width": config.expert_width,
        "context_length": config.context_length,
        "bytes": parts(opened).into_iter().collect::<BTreeMap<_, _>>(),
        "expert_bytes_per_token": bytes_a_token(model),
        "expert_types": audit(model),
        "expert_layers": layers,
        "warnings": checkpoint.warnings.iter().chain(&model.warnings).collect::<Vec<_>>(),
    })
}

fn as_text(opened: &OpenModel) -> String {
    let OpenModel { checkpoint, model, path, .. } = opened;
    let config = &model.config;
    let size = Bytes(checkpoint.files.iter().map(|f| f.bytes).sum());
    let mut text = String::new();
    let mut line = |content: String| {
        let _ = writeln!(text, "{content}");
    };
    line(format!(
        "{}: {}, {size} in {}",
        path.display(),
        config.family,
        report::count(checkpoint.files.len(), "file")
    ));
    if let Some(name) = &config.name {
        line(format!("  name      {name}"));
    }
    line(format!(
        "  layers    {} ({} attention), hidden {}, vocabulary {}",
        config.n_layers,
        config.layers.iter().filter(|kind| **kind == LayerKind::Attention).count(),
        config.hidden,
        config.vocab
    ));
    line(format!(
        "  heads     {} query, {} key-value, of {}",
        config.heads, config.kv_heads, config.head_dim
    ));
    line(format!(
        "  experts   {} a layer, {} a token, width {}",
        config.n_experts, config.top_k, config.expert_width
    ));
    line(format!("  context   {} tokens\n", config.context_length));
    for (name, bytes) in parts(opened) {
        line(format!("  {name:<26} {:>10}", Bytes(bytes)));
    }
    line(format!("\n  expert bytes a token       {:>10}", Bytes(bytes_a_token(model))));
    let audit: Vec<String> = audit(model).iter().map(|(name, n)| format!("{n} {name}")).collect();
    line(format!("  expert matrices            {}\n", audit.join(", ")));
    // Layers that look alike are one line.
    let shape = |layer: u32| {
        (
            types(model.records.layer(LayerIndex(layer))),
            model.records.record(ExpertKey::new(layer, 0)).bytes,
        )
    };
    let mut start = 0;
    for layer in 1..=config.n_layers {
        if layer == config.n_layers || shape(layer) != shape(start) {
            let (types, bytes) = shape(start);
            let range = if layer - start == 1 {
                format!("{start}")
            } else {
                format!("{start}-{}", layer - 1)
            };
            line(format!("  layer {range:<8} expert {:>10}  gate/up/down {types}", Bytes(bytes)));
            start = layer;
        }
    }
    text
}
