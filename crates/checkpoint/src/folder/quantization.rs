//! What `config.json` says about quantised weights. That a module is quantised is told by its tensors; this only says
//! how, and the shapes are held against it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use quant::Affine;

use super::config::config_error;
use super::names;
use crate::error::{CheckpointError, printable};
use crate::json::Json;

/// Sides of a block of FP8 values that share a scale.
pub(super) const FP8_BLOCK: u64 = 128;

/// What an override costs: its share of a tree node, half empty at worst.
const OVERRIDE_OVERHEAD: u64 = 256;

/// Bits and group size of MLX codes that there are kernels for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Codes {
    pub(super) bits: u32,
    pub(super) group: u32,
}

/// How quantised modules are stored.
#[derive(Debug)]
pub(super) struct Quantization {
    path: PathBuf,
    default: Option<Declared>,
    /// By module, without the prefix: files write these with other prefixes than the tensors have.
    overrides: BTreeMap<String, Override>,
    /// Whether FP8 blocks are declared.
    fp8: bool,
}

/// A declaration as it stands in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Declared {
    bits: u64,
    group: u64,
    mode: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Override {
    /// Not quantised.
    Float,
    As(Declared),
}

impl Quantization {
    /// # Errors
    /// Class `config` or `unsupported`.
    pub(super) fn read(path: &Path, config: &Json) -> Result<Self, CheckpointError> {
        let mut this =
            Self { path: path.to_owned(), default: None, overrides: BTreeMap::new(), fp8: false };
        let (own, general) = ("quantization", "quantization_config");
        let method = config.get(general).and_then(|general| general.get("quant_method"));
        if let Some(method) = method {
            this.method(config.get(general), method)?;
        }
        let repeated = config.get(general).filter(|_| method.is_none());
        match (config.get(own), repeated) {
            (None, None) => {}
            (Some(first), Some(again)) if first != again => {
                let needed = format!("the same as in `{own}`");
                return Err(config_error(path, general, "something else".to_owned(), needed));
            }
            (Some(block), _) => this.mlx(own, block)?,
            (None, Some(block)) => this.mlx(general, block)?,
        }
        Ok(this)
    }

    /// What it keeps.
    pub(super) fn memory(&self) -> u64 {
        let bytes = |(module, declared): (&String, &Override)| {
            let mode = match declared {
                Override::As(Declared { mode: Some(mode), .. }) => mode.len(),
                _ => 0,
            };
            OVERRIDE_OVERHEAD + (module.len() + mode) as u64
        };
        self.overrides.iter().map(bytes).sum()
    }

    /// A block that names a method: of those, blocks of FP8 are known.
    fn method(&mut self, block: Option<&Json>, method: &Json) -> Result<(), CheckpointError> {
        let key = "quantization_config";
        let unsupported = |name: &str, found: String, supported: &str| {
            Err(CheckpointError::Unsupported {
                file: self.path.clone(),
                what: format!("`{key}.{name}`"),
                found,
                supported: supported.to_owned(),
            })
        };
        if method.text() != Some("fp8") {
            return unsupported("quant_method", method.shown(), "fp8, or MLX's affine codes");
        }
        let get = |name: &str| block.and_then(|block| block.get(name));
        let sides = get("weight_block_size").and_then(Json::list).unwrap_or_default();
        if sides.iter().map(Json::u64).ne([Some(FP8_BLOCK); 2]) {
            let found = get("weight_block_size").map_or("nothing", |_| "another size").to_owned();
            return unsupported("weight_block_size", found, "[128, 128]");
        }
        match get("fmt") {
            Some(other) if other.text() != Some("e4m3") => {
                return unsupported("fmt", other.shown(), "e4m3");
            }
            _ => {}
        }
        self.fp8 = true;
        Ok(())
    }

    /// A block with defaults and overrides by module.
    fn mlx(&mut self, key: &str, block: &Json) -> Result<(), CheckpointError> {
        let Some(pairs) = block.object() else {
            return Err(config_error(&self.path, key, block.shown(), "an object"));
        };
        let default = self.declared(key, block, None)?;
        self.codes(key, &default)?;
        for (module, value) in pairs {
            let path = format!("{key}.{}", printable(module));
            let declared = match value {
                Json::Bool(false) => Override::Float,
                Json::Bool(true) => Override::As(default.clone()),
                Json::Object(_) => Override::As(self.declared(&path, value, Some(&default))?),
                // Size, bits, mode, and notes of converters.
                _ => continue,
            };
            let name = names::core(module).1.to_owned();
            if self.overrides.get(&name).is_some_and(|other| *other != declared) {
                let needed = "one declaration for a module, whatever its prefix";
                return Err(config_error(&self.path, &path, "another one".to_owned(), needed));
            }
            self.overrides.insert(name, declared);
        }
        self.default = Some(default);
        Ok(())
    }

    fn declared(
        &self,
        key: &str,
        block: &Json,
        default: Option<&Declared>,
    ) -> Result<Declared, CheckpointError> {
        let number = |name: &str, inherited: Option<u64>| {
            let value = block.get(name);
            match (value.and_then(Json::u64), value, inherited) {
                (Some(number), ..) => Ok(number),
                (None, None, Some(inherited)) => Ok(inherited),
                (None, value, _) => {
                    let found = value.map_or_else(|| "nothing".to_owned(), Json::shown);
                    Err(config_error(&self.path, &format!("{key}.{name}"), found, "a number"))
                }
            }
        };
        let mode = match block.get("mode") {
            None => default.and_then(|default| default.mode.clone()),
            Some(Json::Text(mode)) => Some(mode.clone()),
            Some(other) => {
                let key = format!("{key}.mode");
                return Err(config_error(&self.path, &key, other.shown(), "the name of a mode"));
            }
        };
        Ok(Declared {
            bits: number("bits", default.map(|default| default.bits))?,
            group: number("group_size", default.map(|default| default.group))?,
            mode,
        })
    }

    /// A declaration as one that there are kernels for.
    fn codes(&self, key: &str, declared: &Declared) -> Result<Codes, CheckpointError> {
        let unsupported = |name: &str, found: String, supported: String| {
            Err(CheckpointError::Unsupported {
                file: self.path.clone(),
                what: format!("`{key}.{name}`"),
                found,
                supported,
            })
        };
        let list =
            |numbers: &[u32]| numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let known = |numbers: &[u32], n: u64| numbers.iter().copied().find(|k| u64::from(*k) == n);
        let Declared { bits, group, mode } = declared;
        if let Some(mode) = mode.as_ref().filter(|mode| *mode != "affine") {
            return unsupported("mode", format!("`{}`", printable(mode)), "affine".to_owned());
        }
        let Some(bits) = known(&Affine::BITS, *bits) else {
            return unsupported("bits", bits.to_string(), list(&Affine::BITS));
        };
        let Some(group) = known(&Affine::GROUPS, *group) else {
            return unsupported("group_size", group.to_string(), list(&Affine::GROUPS));
        };
        Ok(Codes { bits, group })
    }

    /// How a module that has scales and biases is stored. `module` is its name in the file.
    ///
    /// # Errors
    /// Class `config` if nothing says how, `unsupported` if there are no kernels for it.
    pub(super) fn of(&self, module: &str) -> Result<Codes, CheckpointError> {
        let key = || format!("quantization.{}", printable(module));
        match (self.overrides.get(names::core(module).1), &self.default) {
            (Some(Override::As(declared)), _) => self.codes(&key(), declared),
            (Some(Override::Float), _) => {
                let needed = "bits and group_size: the module has scales in the file";
                Err(config_error(&self.path, &key(), "false".to_owned(), needed))
            }
            (None, Some(declared)) => self.codes("quantization", declared),
            (None, None) => {
                let needed = format!("bits and group_size: `{}` has scales", printable(module));
                Err(config_error(&self.path, "quantization", "nothing".to_owned(), needed))
            }
        }
    }

    /// Refuses FP8 weights that no declaration explains: their scales may belong to blocks of any size.
    ///
    /// # Errors
    /// Class `config`.
    pub(super) fn fp8(&self, module: &str) -> Result<(), CheckpointError> {
        if self.fp8 {
            return Ok(());
        }
        let needed = format!("`fp8` and its weight_block_size: `{}` is FP8", printable(module));
        let key = "quantization_config.quant_method";
        Err(config_error(&self.path, key, "nothing".to_owned(), needed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json;
    use crate::limits::Budget;
    use crate::source::MemorySource;

    fn read(text: &str) -> Result<Quantization, CheckpointError> {
        let json = json::read(&MemorySource(text.as_bytes()), &mut Budget::new()).unwrap();
        Quantization::read(Path::new("config.json"), &json)
    }

    fn class(outcome: Result<impl Sized, CheckpointError>) -> String {
        outcome.err().map_or_else(|| "accept".to_owned(), |error| error.class().to_string())
    }

    #[test]
    fn overrides_are_found_whatever_their_prefix() {
        let config = read(
            r#"{"quantization": {"group_size": 64, "bits": 4,
                "model.layers.1.mlp.gate": {"group_size": 32, "bits": 8},
                "language_model.model.layers.2.mlp.gate": {"bits": 6},
                "lm_head": false}}"#,
        )
        .unwrap();
        for (module, bits, group) in [
            ("language_model.model.layers.1.mlp.gate", 8, 32),
            ("model.layers.1.mlp.gate", 8, 32),
            ("model.language_model.layers.2.mlp.gate", 6, 64),
            ("model.layers.3.mlp.gate", 4, 64),
        ] {
            assert_eq!(config.of(module).unwrap(), Codes { bits, group }, "{module}");
        }
        assert_eq!(class(config.of("language_model.lm_head")), "config");
    }

    #[test]
    fn what_cannot_be_decoded_is_said_so() {
        for (block, expected) in [
            (r#"{"group_size": 64, "bits": 4, "mode": "affine"}"#, "accept"),
            (r#"{"group_size": 64, "bits": 7}"#, "unsupported"),
            (r#"{"group_size": 16, "bits": 4}"#, "unsupported"),
            (r#"{"group_size": 32, "bits": 4, "mode": "mxfp4"}"#, "unsupported"),
            (r#"{"group_size": 32, "bits": 4, "mode": 1}"#, "config"),
            (r#"{"group_size": 32}"#, "config"),
            (r#"{"group_size": -32, "bits": 4}"#, "config"),
            ("[]", "config"),
        ] {
            for key in ["quantization", "quantization_config"] {
                assert_eq!(class(read(&format!(r#"{{"{key}": {block}}}"#))), expected, "{block}");
            }
        }
        let two = r#"{"quantization": {"group_size": 64, "bits": 4},
            "quantization_config": {"group_size": 64, "bits": 8}}"#;
        assert_eq!(class(read(two)), "config");
        let twice = r#"{"quantization": {"group_size": 64, "bits": 4,
            "model.a": {"bits": 8}, "language_model.model.a": {"bits": 6}}}"#;
        assert_eq!(class(read(twice)), "config");
        assert_eq!(class(read("{}").unwrap().of("model.a")), "config");
        // A mode that is not known is no trouble where nothing has it.
        let unused = r#"{"quantization": {"group_size": 64, "bits": 4, "a": {"mode": "nvfp4"}}}"#;
        let unused = read(unused).unwrap();
        assert_eq!(
            (class(unused.of("b")), class(unused.of("a"))),
            ("accept".into(), "unsupported".into())
        );
    }

    #[test]
    fn of_other_methods_fp8_in_square_blocks_is_known() {
        for (block, expected) in [
            (
                r#"{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}"#,
                "accept",
            ),
            (
                r#"{"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}"#,
                "unsupported",
            ),
            (r#"{"quant_method": "fp8", "weight_block_size": [64, 128]}"#, "unsupported"),
            (r#"{"quant_method": "fp8"}"#, "unsupported"),
            (r#"{"quant_method": "gptq", "bits": 4, "group_size": 128}"#, "unsupported"),
        ] {
            let read = read(&format!(r#"{{"quantization_config": {block}}}"#));
            let outcome = read.and_then(|config| config.fp8("model.a"));
            assert_eq!(class(outcome), expected, "{block}");
        }
        assert_eq!(class(read("{}").unwrap().fp8("model.a")), "config");
    }
}
