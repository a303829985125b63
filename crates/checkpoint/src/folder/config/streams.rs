//! Keys of the family with residual streams: the streams, the indexer of attention, the n-gram table.

use super::{Reader, Spellings};
use crate::error::CheckpointError;
use crate::json::Json;
use crate::limits;
use crate::metadata::{MetaArray, MetaValue};

const COPIED: [Spellings; 8] = [
    ("attention.indexer.head_count", &["indexer_n_heads"]),
    ("attention.indexer.key_length", &["indexer_head_dim"]),
    ("attention.indexer.top_k", &["indexer_budget"]),
    ("hyper_connection.count", &["hc_count"]),
    ("hyper_connection.low_rank", &["hc_lowrank"]),
    ("ple.conv_kernel", &["ple_conv_kernel_size"]),
    ("ple.heads_per_ngram", &["heads_per_ngram"]),
    ("ple.ngram_size", &["ngram_size"]),
];

pub(super) fn read(reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
    for (key, spellings) in COPIED {
        reader.copy(key, spellings)?;
    }
    ratios(reader)?;
    table_layers(reader)?;
    row_width(reader)?;
    end_of_text(reader)
}

/// Positions of an indexer's block. Other containers say it for every layer.
fn ratios(reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
    let (key, spelling) = ("attention.compress_ratios", "indexer_compress_ratio");
    reader.spell(key, spelling);
    let Some(value) = reader.get(spelling) else { return Ok(()) };
    let Some(ratio) = value.u64().filter(|ratio| *ratio > 0) else {
        return Err(reader.error(spelling, value.shown(), "a number of positions"));
    };
    let layers = reader.get("num_hidden_layers").and_then(Json::u64);
    // Without a number of layers, or with too many, the file is refused for that.
    let Some(layers) = layers.filter(|layers| *layers <= limits::LAYERS) else { return Ok(()) };
    let ratios = MetaArray::U64s(vec![ratio; layers as usize]);
    reader.set_own(key, MetaValue::Array(ratios));
    Ok(())
}

/// Layers that begin with rows of the table, counted from 1 here.
fn table_layers(reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
    let (key, spelling) = ("ple.layers", "ple_layer_ids");
    reader.spell(key, spelling);
    let Some(value) = reader.get(spelling) else { return Ok(()) };
    let needed = "a list of layers, counted from 1";
    let Some(list) = value.list() else {
        return Err(reader.error(spelling, value.shown(), needed));
    };
    let layers = list.iter().map(|layer| {
        let number = layer.u64().and_then(|layer| layer.checked_sub(1));
        number.ok_or_else(|| reader.error(spelling, layer.shown(), needed))
    });
    let layers = layers.collect::<Result<_, _>>()?;
    reader.set_own(key, MetaValue::Array(MetaArray::U64s(layers)));
    Ok(())
}

/// Values of a row of the table, of which all heads together have the width that this file gives.
fn row_width(reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
    let (key, spelling) = ("embedding_length_per_layer_input", "ple_embed_dim");
    reader.spell(key, spelling);
    let Some(value) = reader.get(spelling) else { return Ok(()) };
    let number = |key: &str| reader.get(key).and_then(Json::u64);
    let heads = number("ngram_size")
        .and_then(|size| size.checked_sub(1)?.checked_mul(number("heads_per_ngram")?));
    // Without these the file is refused for them.
    let Some(heads) = heads.filter(|heads| *heads > 0) else { return Ok(()) };
    match value.u64() {
        Some(width) if width.is_multiple_of(heads) => {
            reader.set_own(key, MetaValue::U64(width / heads));
            Ok(())
        }
        _ => {
            let needed = format!("a multiple of the {heads} rows of a token");
            Err(reader.error(spelling, value.shown(), needed))
        }
    }
}

/// The token that no n-gram reaches across: the text part's end, the first of several, and not that of chat turns.
fn end_of_text(reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
    let (key, spelling) = ("ple.eos_token_id", "eos_token_id");
    reader.spell(key, spelling);
    let value = match reader.get(spelling) {
        Some(Json::List(ids)) => ids.first(),
        value => value,
    };
    let Some(value) = value else { return Ok(()) };
    let value = reader.scalar(spelling, value)?;
    reader.set_own(key, value);
    Ok(())
}
