//! Model folders: malformed ones with the class of error that each must give, their well-formed twins, and what the
//! experts of whole models consist of.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use checkpoint::{
    CheckpointError, MemorySource, bind, open, parse_folder, parse_safetensors,
};
use serde_json::Value;

use crate::support::{fixture, manifest};

fn outcome(path: &Path) -> Result<(), CheckpointError> {
    bind(&open(path)?).map(|_| ())
}

fn class(path: &Path) -> String {
    outcome(path).err().map_or_else(|| "accept".to_owned(), |error| error.class().to_string())
}

/// A message names a file of the case, what was found and what was needed, and what may help.
fn assert_explains(error: &CheckpointError, path: &Path) {
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()), "names the file: {text}");
    let explains = text.contains("found") && (text.contains("needed") || text.contains("supported"));
    assert!(explains || text.contains("a model is a regular file"), "says what and why: {text}");
    assert!(text.contains("\n\nhint: "), "has a hint: {text}");
}

fn check(prefix: &str, number: usize, load: impl Fn(&Path) -> Result<(), CheckpointError>) {
    let manifest = manifest("bad/manifest.json");
    let (mut checked, mut wrong) = (0, Vec::new());
    for case in manifest["cases"].as_array().unwrap() {
        let name = case["path"].as_str().unwrap();
        // Texts are read by whoever uses them.
        if !name.starts_with(prefix) || name.contains("template_") || name.contains("tokenizer_") {
            continue;
        }
        checked += 1;
        let path = fixture("bad").join(name);
        assert!(path.exists(), "{}", path.display());
        let expected = case["expect"].as_str().unwrap();
        match load(&path) {
            Ok(()) if matches!(expected, "accept" | "numeric") => {}
            Err(error) if expected.split('|').any(|class| class == error.class().to_string()) => {
                assert_explains(&error, &path);
            }
            other => wrong.push(format!("{name}: {other:?}, expected {expected}")),
        }
    }
    assert_eq!(checked, number);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_malformed_file_gives_its_class_and_every_twin_is_read() {
    check("safetensors/", 22, |path| {
        let bytes = std::fs::read(path).unwrap();
        let outcome = parse_safetensors(path, &MemorySource(&bytes)).map(|_| ());
        // Opened as a model it has the same fault; a whole file lacks the description beside it.
        let class = class(path);
        match &outcome {
            Ok(()) => assert_eq!(class, "missing", "{}", path.display()),
            Err(error) => assert_eq!(class, error.class().to_string(), "{}", path.display()),
        }
        outcome
    });
}

#[test]
fn every_malformed_folder_gives_its_class_and_every_twin_loads() {
    check("folders/", 33, outcome);
}

#[test]
fn messages_name_keys_and_tensors_as_the_files_do() {
    for (case, words) in [
        ("config_no_experts", "config.json: metadata `num_experts`: found nothing"),
        ("config_string_number", "`hidden_size`: found a string"),
        ("config_topk", "`num_experts_per_tok`"),
        ("expert_missing", "`model.layers.0.mlp.experts.1."),
        ("expert_shape", "`model.layers.0.mlp.experts.1.up_proj.weight`"),
        ("mlx_scales_missing", "_proj.scales`: found nothing"),
        ("mlx_biases_missing", "_proj.biases`: found nothing"),
        ("truncated_shard", "model-00002-of-00002.safetensors: tensor `"),
        ("shard_missing", "model-00002-of-00002.safetensors: no such file"),
        ("index_wrong_file", "model-00001-of-00002.safetensors: tensor `"),
        ("weights_are_directory", "model-00001-of-00002.safetensors is a directory"),
    ] {
        let error = outcome(&fixture("bad/folders").join(case)).unwrap_err().to_string();
        assert!(error.contains(words), "{case}: {error}");
    }
}

/// A copy of a folder of fixtures, to be changed.
fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const INDEX: &str = "model.safetensors.index.json";

#[test]
fn shards_may_be_links_as_in_a_download_cache() {
    for (target, expected) in [("blob", "accept"), ("nothing", "missing"), (SHARDS[0], "io")] {
        let folder = copy("bad/folders/ok_sharded");
        let shard = folder.path().join(SHARDS[0]);
        std::fs::rename(&shard, folder.path().join("blob")).unwrap();
        symlink(target, &shard).unwrap();
        assert_eq!(class(folder.path()), expected, "{target}");
    }
}

#[test]
fn any_file_of_a_folder_opens_the_whole() {
    let folder = copy("bad/folders/ok_sharded");
    for name in ["", "config.json", INDEX, SHARDS[0], SHARDS[1]] {
        let checkpoint = open(&folder.path().join(name)).unwrap();
        assert_eq!(checkpoint.files.len(), 2, "{name}");
        assert_eq!(checkpoint.metadata_file(), folder.path().join("config.json"), "{name}");
        assert!(checkpoint.warnings.is_empty(), "{name}: {:?}", checkpoint.warnings);
        bind(&checkpoint).unwrap();
    }
    // Without an index the numbers of the files say what belongs together.
    std::fs::remove_file(folder.path().join(INDEX)).unwrap();
    assert_eq!(class(folder.path()), "accept");
    assert_eq!(class(&folder.path().join(SHARDS[0])), "missing", "a half is not a model");
    assert_eq!(class(&folder.path().join(INDEX)), "missing");
    std::fs::copy(
        folder.path().join(SHARDS[0]),
        folder.path().join("model-00001-of-00003.safetensors"),
    )
    .unwrap();
    assert_eq!(class(folder.path()), "missing", "files of two counts");
    std::fs::remove_file(folder.path().join("model-00001-of-00003.safetensors")).unwrap();
    std::fs::remove_file(folder.path().join(SHARDS[1])).unwrap();
    let error = outcome(folder.path()).unwrap_err();
    assert_eq!(error.class().to_string(), "missing");
    assert!(error.to_string().contains(SHARDS[1]), "{error}");
}

#[test]
fn an_index_that_is_out_of_date_is_noticed() {
    type Change = fn(&mut serde_json::Map<String, Value>);
    let changes: [(&str, &str, Change); 5] = [
        ("accept", "are in other files", |map| {
            let name = "model.embed_tokens.weight";
            let other = SHARDS.iter().find(|shard| map[name] != **shard).unwrap();
            map[name] = (*other).into();
        }),
        ("accept", "are not in it", |map| {
            map.remove("model.norm.weight").unwrap();
        }),
        ("missing", "", |map| {
            map.insert("model.layers.0.mlp.experts.9.up_proj.weight".into(), SHARDS[0].into());
        }),
        ("missing", "", |map| {
            map.insert("model.renamed.weight".into(), SHARDS[0].into());
        }),
        ("accept", "", |map| {
            map.insert("mtp.fc.weight".into(), SHARDS[0].into());
        }),
    ];
    for (expected, warning, change) in changes {
        let folder = copy("bad/folders/ok_sharded");
        let path = folder.path().join(INDEX);
        let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(index["weight_map"].as_object_mut().unwrap());
        std::fs::write(&path, index.to_string()).unwrap();
        assert_eq!(class(folder.path()), expected, "{warning}");
        if expected == "accept" {
            let warnings = open(folder.path()).unwrap().warnings.join("\n");
            assert!(warnings.contains(warning), "{warnings}");
            assert_eq!(warnings.is_empty(), warning.is_empty(), "{warnings}");
        }
    }
}

#[test]
fn a_folder_that_is_called_like_a_file_is_not_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::create_dir(&path).unwrap();
    assert_eq!(class(&path), "io");
    assert_eq!(class(folder.path()), "missing");
    std::fs::write(folder.path().join("config.json"), "{").unwrap();
    assert_eq!(class(folder.path()), "config");
}

/// A tensor of a folder as an independent reader sees it: file, type, shape, first byte, bytes.
struct Seen {
    file: PathBuf,
    dtype: String,
    shape: Vec<u64>,
    offset: u64,
    bytes: u64,
}

/// All tensors of all files that an index names.
fn seen(folder: &Path) -> BTreeMap<String, Seen> {
    let index: Value =
        serde_json::from_slice(&std::fs::read(folder.join(INDEX)).unwrap()).unwrap();
    let files: std::collections::BTreeSet<&str> =
        index["weight_map"].as_object().unwrap().values().map(|f| f.as_str().unwrap()).collect();
    let mut all = BTreeMap::new();
    for file in files {
        let path = folder.join(file);
        let bytes = std::fs::read(&path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let header: Value = serde_json::from_slice(&bytes[8..8 + n as usize]).unwrap();
        for (name, entry) in header.as_object().unwrap() {
            if name == "__metadata__" {
                continue;
            }
            let number = |value: &Value| value.as_u64().unwrap();
            let [begin, end] = [0, 1].map(|i| number(&entry["data_offsets"][i]));
            let shape = entry["shape"].as_array().unwrap().iter().map(number).collect();
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            let tensor = Seen {
                file: path.clone(),
                dtype,
                shape,
                offset: 8 + n + begin,
                bytes: end - begin,
            };
            assert!(all.insert(name.clone(), tensor).is_none());
        }
    }
    all
}
