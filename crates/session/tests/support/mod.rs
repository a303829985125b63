//! Test data, and models opened as tests want them.
#![allow(dead_code, reason = "every test file uses some of it")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use compute::backend::{Activations, KvType};
use memory_plan::Budget;
use serde_json::Value;
use session::{Engine, EngineOptions, OpenModel};
use units::Bytes;

/// A file of the test data; fixtures come from a larger set where `SAKIA_FIXTURES` names one.
pub(crate) fn data(name: &str) -> PathBuf {
    if let (Some(rest), Some(larger)) =
        (name.strip_prefix("fixtures"), std::env::var_os("SAKIA_FIXTURES"))
    {
        return PathBuf::from(larger).join(rest.trim_start_matches('/'));
    }
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata")).join(name)
}

pub(crate) fn demo() -> PathBuf {
    data("../models/sakia-demo-Q4_K_M.gguf")
}

/// GGUF entries of the manifest that are here, since some are in the larger set only: path, expected file, tolerance.
pub(crate) fn entries() -> Vec<(PathBuf, PathBuf, f32)> {
    of_format(&["gguf"])
}

/// The same of model folders, of Hugging Face and of MLX.
pub(crate) fn folders() -> Vec<(PathBuf, PathBuf, f32)> {
    of_format(&["hf", "mlx"])
}

pub(crate) fn of_format(formats: &[&str]) -> Vec<(PathBuf, PathBuf, f32)> {
    present()
        .into_iter()
        .filter(|(_, entry)| formats.iter().any(|format| entry["format"] == *format))
        .map(|(path, entry)| (path, expected(&entry), tolerance(&entry)))
        .collect()
}

/// The manifest's entries whose models are here: the first file or the folder, and what it says.
pub(crate) fn present() -> Vec<(PathBuf, Value)> {
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(data("fixtures/manifest.json")).unwrap()).unwrap();
    let models = manifest["models"].as_array().unwrap().iter();
    let entries = models.flat_map(|model| model["entries"].as_array().unwrap());
    // A list of parts, or the one name of a folder.
    let path = |entry: &Value| file(entry["path"].get(0).unwrap_or(&entry["path"]));
    let entries = entries.map(|entry| (path(entry), entry.clone()));
    entries.filter(|(path, _)| path.exists()).collect()
}

fn file(name: &Value) -> PathBuf {
    data("fixtures").join(name.as_str().unwrap())
}

/// The file with what other software makes of an entry's model.
pub(crate) fn expected(entry: &Value) -> PathBuf {
    file(&entry["expected"])
}

/// How far logits may be from those.
pub(crate) fn tolerance(entry: &Value) -> f32 {
    entry["logits_abs_tol"].as_f64().unwrap() as f32
}

/// f32 and i32 tensors of a safetensors file.
pub(crate) struct Expected(BTreeMap<String, Vec<u8>>);

impl Expected {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        let tensors =
            header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, entry)| {
                let [start, end] =
                    [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize + 8 + n);
                (name, bytes[start..end].to_vec())
            });
        Self(tensors.collect())
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        self.0[name].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        self.0[name].as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }
}

pub(crate) fn options() -> EngineOptions {
    let mut options = EngineOptions::new(Budget::detect(Some(Bytes::gib(1))).unwrap());
    (options.activations, options.kv, options.threads) = (Activations::F32, KvType::F32, 2);
    (options.context, options.logit_rows) = (Some(256), 16);
    options
}

pub(crate) fn engine(path: &Path, options: EngineOptions) -> Engine {
    Engine::load(OpenModel::open(path).unwrap(), options, &mut |_| {}).unwrap()
}

pub(crate) fn npy(name: &str) -> Vec<u8> {
    let bytes = std::fs::read(data("demo").join(name)).unwrap();
    let header = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    bytes[10 + header..].to_vec()
}

pub(crate) fn words<T>(bytes: &[u8], word: impl Fn([u8; 4]) -> T) -> Vec<T> {
    bytes.as_chunks::<4>().0.iter().map(|b| word(*b)).collect()
}

pub(crate) fn argmax(logits: &[f32]) -> (usize, f32) {
    let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
    let second =
        (0..logits.len()).filter(|i| *i != best).map(|i| logits[i]).fold(f32::MIN, f32::max);
    (best, logits[best] - second)
}

/// Texts long enough for several passes: two of fixtures, one of the demo model.
pub(crate) fn subjects() -> Vec<(PathBuf, Vec<u32>)> {
    let fixture = |name: &str| {
        let (path, expected, _) = entries().into_iter().find(|e| e.0.ends_with(name)).unwrap();
        (path, Expected::read(&expected).ids("input_ids").repeat(3))
    };
    let demo_ids = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    vec![fixture("qwen3_next-k/kq.gguf"), fixture(FLASH), (demo(), demo_ids.repeat(2))]
}

/// Several residual streams, selected attention, an n-gram table.
pub(crate) const FLASH: &str = "qwen4_exp-a/split-b32-00001-of-00003.gguf";
