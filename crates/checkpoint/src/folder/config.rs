//! `config.json` as metadata: its keys under the names that all containers share.
//!
//! A value is carried over as it stands, with the name that it had, so that its range is checked in one place for all
//! containers and a message still names the key that a person can find. What has no counterpart, because the other
//! containers imply it, is decided here: defaults of the architecture's class, which keys must have one value.

mod harmless;
mod rope;
mod streams;

use std::path::Path;

use super::quantization::Quantization;
use crate::config::Family;
use crate::error::{CheckpointError, printable};
use crate::json::{self, Json};
use crate::limits::Budget;
use crate::metadata::{MetaArray, MetaValue, Metadata};
use crate::safetensors::charge;
use crate::source::Source;

/// What `config.json` says.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) family: Family,
    pub(super) metadata: Metadata,
    pub(super) quantization: Quantization,
    /// Whether the embedding is the head.
    pub(super) tied: bool,
}

/// What the keys cost that a configuration can set.
const KEYS_OVERHEAD: u64 = 64 << 10;

/// Key, its spellings. Of several spellings a file has one, or they agree.
type Spellings = (&'static str, &'static [&'static str]);

const COPIED: [Spellings; 10] = [
    ("block_count", &["num_hidden_layers"]),
    ("context_length", &["max_position_embeddings"]),
    ("embedding_length", &["hidden_size"]),
    ("attention.head_count", &["num_attention_heads"]),
    ("attention.head_count_kv", &["num_key_value_heads"]),
    ("attention.key_length", &["head_dim"]),
    ("attention.layer_norm_rms_epsilon", &["rms_norm_eps"]),
    ("expert_count", &["num_experts", "num_local_experts"]),
    ("expert_used_count", &["num_experts_per_tok"]),
    ("expert_feed_forward_length", &["moe_intermediate_size"]),
];

const COPIED_HYBRID: [Spellings; 6] = [
    ("expert_shared_feed_forward_length", &["shared_expert_intermediate_size"]),
    ("full_attention_interval", &["full_attention_interval"]),
    ("ssm.conv_kernel", &["linear_conv_kernel_dim"]),
    ("ssm.group_count", &["linear_num_key_heads"]),
    ("ssm.state_size", &["linear_key_head_dim"]),
    ("ssm.time_step_rank", &["linear_num_value_heads"]),
];

/// Reads the configuration of a model folder.
///
/// # Errors
/// Class `config` or `unsupported`; `limit` or `io`.
pub(super) fn read(
    path: &Path,
    source: &dyn Source,
    budget: &mut Budget,
) -> Result<Config, CheckpointError> {
    let mark = budget.mark();
    let json = json::read(source, budget).map_err(|error| {
        error.of_file(path, |found| config_error(path, "the file", found, "a JSON object"))
    })?;
    let config = convert(path, &json)?;
    drop(json);
    budget.restore(mark);
    // The values kept are no longer than the file; what their keys cost beside that is bounded.
    charge(path, budget, source.len() + KEYS_OVERHEAD + config.quantization.memory())?;
    Ok(config)
}

fn convert(path: &Path, json: &Json) -> Result<Config, CheckpointError> {
    if json.object().is_none() {
        return Err(config_error(path, "the file", json.shown(), "a JSON object"));
    }
    let text = match json.get("text_config") {
        None => json,
        Some(text) if text.object().is_some() => text,
        Some(other) => return Err(config_error(path, "text_config", other.shown(), "an object")),
    };
    let nested = !std::ptr::eq(text, json);
    let family = family(path, json, nested.then_some(text))?;
    let mut reader =
        Reader { path, top: json, text, nested, family, metadata: Metadata::default() };
    reader.metadata.set_file(path.to_owned());
    reader.set("general.architecture", MetaValue::String(family.name().to_owned()));
    harmless::check(&reader)?;
    for (key, spellings) in COPIED {
        reader.copy(key, spellings)?;
    }
    if family.is_hybrid() {
        for (key, spellings) in COPIED_HYBRID {
            reader.copy(key, spellings)?;
        }
        reader.inner_size()?;
        // Checkpoints of this layout keep the order of the original weights; other containers may say otherwise.
        reader.set_own("ssm.head_order", MetaValue::String("grouped".to_owned()));
    }
    if family == Family::Qwen4Exp {
        streams::read(&mut reader)?;
    }
    reader.norm_topk()?;
    reader.layer_types()?;
    rope::read(&mut reader)?;
    reader.special_tokens()?;
    let tied = reader.tied()?;
    let quantization = Quantization::read(path, json)?;
    Ok(Config { family, metadata: reader.metadata, quantization, tied })
}

/// The family by `model_type`, which the text part repeats with an ending of its own.
fn family(path: &Path, top: &Json, text: Option<&Json>) -> Result<Family, CheckpointError> {
    let of = |json: &Json, key: &str| match json.get("model_type") {
        None => Err(config_error(path, key, "nothing".to_owned(), "the type of the model")),
        Some(Json::Text(name)) => known(name).ok_or_else(|| CheckpointError::Unsupported {
            file: path.to_owned(),
            what: format!("`{key}`"),
            found: format!("`{}`", printable(name)),
            supported: MODEL_TYPES.map(|(name, _)| name).join(", "),
        }),
        Some(other) => Err(config_error(path, key, other.shown(), "the type of the model")),
    };
    let family = of(top, "model_type")?;
    let Some(text) = text else { return Ok(family) };
    if text.get("model_type").is_none() || of(text, "text_config.model_type")? == family {
        return Ok(family);
    }
    let found = text.get("model_type").map_or_else(String::new, Json::shown);
    Err(config_error(path, "text_config.model_type", found, "the family of `model_type`"))
}

const MODEL_TYPES: [(&str, Family); 6] = [
    ("qwen3_moe", Family::Qwen3Moe),
    ("qwen3_next", Family::Qwen3Next),
    ("qwen3_5_moe", Family::Qwen35Moe),
    ("qwen3_5_moe_text", Family::Qwen35Moe),
    ("qwen4_exp", Family::Qwen4Exp),
    ("qwen4_exp_text", Family::Qwen4Exp),
];

fn known(name: &str) -> Option<Family> {
    MODEL_TYPES.into_iter().find(|(known, _)| *known == name).map(|(_, family)| family)
}

pub(super) fn config_error(
    path: &Path,
    key: &str,
    found: String,
    needed: impl Into<String>,
) -> CheckpointError {
    CheckpointError::Config {
        file: path.to_owned(),
        key: key.to_owned(),
        found,
        needed: needed.into(),
    }
}

/// The configuration on its way into metadata.
struct Reader<'a> {
    path: &'a Path,
    /// The whole file.
    top: &'a Json,
    /// Its text part; the whole file again where it has no other.
    text: &'a Json,
    nested: bool,
    family: Family,
    metadata: Metadata,
}

impl<'a> Reader<'a> {
    /// A key of the text part.
    fn get(&self, key: &str) -> Option<&'a Json> {
        self.text.get(key)
    }

    /// How a key of the text part is written from the top of the file.
    fn spelled(&self, key: &str) -> String {
        if self.nested { format!("text_config.{key}") } else { key.to_owned() }
    }

    fn error(&self, key: &str, found: String, needed: impl Into<String>) -> CheckpointError {
        config_error(self.path, &self.spelled(key), found, needed)
    }

    fn unsupported(&self, key: &str, found: String, supported: &str) -> CheckpointError {
        CheckpointError::Unsupported {
            file: self.path.to_owned(),
            what: format!("`{}`", self.spelled(key)),
            found,
            supported: supported.to_owned(),
        }
    }

    fn set(&mut self, key: &str, value: MetaValue) {
        self.metadata.insert(key.to_owned(), value);
    }

    /// Sets a key of the architecture.
    fn set_own(&mut self, key: &str, value: MetaValue) {
        self.set(&format!("{}.{key}", self.family), value);
    }

    /// Notes how a key of the architecture is written here, whether the file has it or not.
    fn spell(&mut self, key: &str, spelling: &str) {
        self.metadata.spell(format!("{}.{key}", self.family), self.spelled(spelling));
    }

    /// Carries a value over.
    fn copy(&mut self, key: &str, spellings: &[&str]) -> Result<(), CheckpointError> {
        let present = spellings.iter().filter_map(|name| Some((*name, self.get(name)?)));
        let Some((spelling, value)) = self.agreed(present)? else {
            self.spell(key, spellings[0]);
            return Ok(());
        };
        self.spell(key, spelling);
        let value = self.scalar(spelling, value)?;
        self.set_own(key, value);
        Ok(())
    }

    /// One value of those that a file gives for the same thing.
    fn agreed<'n>(
        &self,
        mut present: impl Iterator<Item = (&'n str, &'a Json)>,
    ) -> Result<Option<(&'n str, &'a Json)>, CheckpointError> {
        let Some((name, value)) = present.next() else { return Ok(None) };
        for (other, again) in present {
            let same = value == again || value.f64().is_some_and(|n| Some(n) == again.f64());
            if !same {
                let needed = format!("{}, as `{}` says", value.shown(), self.spelled(name));
                return Err(self.error(other, again.shown(), needed));
            }
        }
        Ok(Some((name, value)))
    }

    fn scalar(&self, key: &str, value: &Json) -> Result<MetaValue, CheckpointError> {
        Ok(match value {
            Json::Bool(value) => MetaValue::Bool(*value),
            Json::U64(value) => MetaValue::U64(*value),
            Json::I64(value) => MetaValue::I64(*value),
            Json::F64(value) => MetaValue::F64(*value),
            Json::Text(value) => MetaValue::String(value.clone()),
            Json::Null | Json::List(_) | Json::Object(_) => {
                return Err(self.error(key, value.shown(), "one value"));
            }
        })
    }

    /// A boolean, if the file has it.
    fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.bool() {
            Some(flag) => Ok(Some(flag)),
            None => Err(self.error(key, value.shown(), "true or false")),
        }
    }

    /// Width of all value heads, which other containers give instead of that of one.
    fn inner_size(&mut self) -> Result<(), CheckpointError> {
        let (key, spelling) = ("ssm.inner_size", "linear_value_head_dim");
        self.spell(key, spelling);
        let Some(dim) = self.get(spelling) else { return Ok(()) };
        let heads = self.get("linear_num_value_heads").and_then(Json::u64);
        let value = match (dim.u64(), heads) {
            (Some(dim), Some(heads)) => MetaValue::U64(dim.saturating_mul(heads)),
            _ => self.scalar(spelling, dim)?,
        };
        self.set_own(key, value);
        Ok(())
    }

    /// Whether weights of chosen experts are rescaled. A missing key means what it means to the architecture's class.
    fn norm_topk(&mut self) -> Result<(), CheckpointError> {
        let spelling = "norm_topk_prob";
        let rescaled = self.flag(spelling)?.unwrap_or(self.family != Family::Qwen3Moe);
        self.spell("expert_weights_norm", spelling);
        self.set_own("expert_weights_norm", MetaValue::Bool(rescaled));
        Ok(())
    }

    /// Which layers are recurrent. Attention has had several names.
    fn layer_types(&mut self) -> Result<(), CheckpointError> {
        let spelling = "layer_types";
        let Some(value) = self.get(spelling) else { return Ok(()) };
        let Some(list) = value.list() else {
            return Err(self.error(spelling, value.shown(), "a list of layer types"));
        };
        let hybrid = self.family.is_hybrid();
        let selects = self.family == Family::Qwen4Exp;
        let recurrent = list.iter().map(|layer| match layer.text() {
            Some("full_attention") => Ok(false),
            Some("indexed_attention" | "qwen_sparse_attention") if selects => Ok(false),
            Some("linear_attention") if hybrid => Ok(true),
            _ => {
                let supported =
                    if hybrid { "full_attention, linear_attention" } else { "full_attention" };
                Err(self.unsupported(spelling, layer.shown(), supported))
            }
        });
        let recurrent = recurrent.collect::<Result<Vec<_>, _>>()?;
        if hybrid {
            self.spell("attention.recurrent_layers", spelling);
            let array = MetaValue::Array(MetaArray::Bools(recurrent));
            self.set_own("attention.recurrent_layers", array);
        }
        Ok(())
    }

    /// Tokens that begin and end texts, where the texts of the folder do not say otherwise.
    fn special_tokens(&mut self) -> Result<(), CheckpointError> {
        for name in ["bos_token_id", "eos_token_id"] {
            let found = match self.get(name) {
                Some(value) => Some((self.spelled(name), value)),
                None => self.top.get(name).map(|value| (name.to_owned(), value)),
            };
            let Some((spelling, value)) = found else { continue };
            let ids = match value {
                Json::List(ids) => ids.as_slice(),
                id => std::slice::from_ref(id),
            };
            // More than two ends are rare, and the vocabulary's own control tokens end texts too.
            for (id, key) in ids.iter().zip([name, "eot_token_id"]) {
                let key = format!("tokenizer.ggml.{key}");
                self.metadata.spell(key.clone(), spelling.clone());
                let id = self.scalar(name, id)?;
                self.set(&key, id);
            }
        }
        Ok(())
    }

    /// Whether the embedding is the head. Wrappers say so beside the text part, and may repeat it there.
    fn tied(&self) -> Result<bool, CheckpointError> {
        let key = "tie_word_embeddings";
        let inner = self.flag(key)?;
        let outer = match self.top.get(key) {
            None => None,
            Some(Json::Bool(flag)) => Some(*flag),
            Some(other) => {
                return Err(config_error(self.path, key, other.shown(), "true or false"));
            }
        };
        match (outer, inner) {
            (Some(outer), Some(inner)) if outer != inner => {
                let needed = format!("{outer}, as `{key}` of the whole says");
                Err(self.error(key, inner.to_string(), needed))
            }
            // The classes of all families here keep a head of its own unless told otherwise.
            (outer, inner) => Ok(outer.or(inner).unwrap_or(false)),
        }
    }
}

#[cfg(test)]
mod tests;
