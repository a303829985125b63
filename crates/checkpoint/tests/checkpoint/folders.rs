//! Model folders: malformed ones with the class of error that each must give, their well-formed twins, and what the
//! experts of whole models consist of.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use checkpoint::{
    Checkpoint, CheckpointError, DraftProjection, Family, FilePlace, HeadOrder, MemorySource,
    MetaArray, MetaValue, Piece, ValueMap, bind, open, parse_safetensors,
};
use serde_json::Value;
use units::ExpertKey;

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
    let explains =
        text.contains("found") && (text.contains("needed") || text.contains("supported"));
    assert!(explains || text.contains("a model is a regular file"), "says what and why: {text}");
    assert!(text.contains("\n\nhint: "), "has a hint: {text}");
}

fn check(prefix: &str, number: usize, load: impl Fn(&Path) -> Result<(), CheckpointError>) {
    let manifest = manifest("bad/manifest.json");
    let (mut checked, mut wrong) = (0, Vec::new());
    for case in manifest["cases"].as_array().unwrap() {
        let name = case["path"].as_str().unwrap();
        // What a template says is up to whoever renders it.
        if !name.starts_with(prefix) || name.contains("template_") {
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
    check("folders/", 34, outcome);
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

/// A model whose draft head lies in a file that its index does not name.
const DRAFTING: &str = "models/qwen4_exp-a/mlx-4bit-g64";
const DRAFT: &str = "mtp.safetensors";

#[test]
fn a_draft_head_in_a_file_of_its_own_is_the_block_behind_the_trunk() {
    let folder = copy(DRAFTING);
    for name in ["", INDEX, "model-00002-of-00003.safetensors"] {
        let checkpoint = open(&folder.path().join(name)).unwrap();
        assert!(checkpoint.warnings.is_empty(), "{:?}", checkpoint.warnings);
        assert_eq!(checkpoint.files.len(), 4, "{name}");
        let model = bind(&checkpoint).unwrap();
        assert!(model.warnings.is_empty(), "{:?}", model.warnings);
        assert_eq!((model.config.n_layers, model.config.n_draft_layers), (4, 1));
        let draft = model.draft.as_ref().unwrap();
        assert!(matches!(draft.project, DraftProjection::Apart { .. }));
        assert_eq!(draft.hidden_norm.shape, [256]);
        assert_eq!(draft.hidden_norm.spelling(), "mtp.pre_fc_norm_hidden.weight");
        draft.each(&mut |_, tensor| assert_eq!(tensor.file.get(), 3, "{}", tensor.name));
        // The trunk has no more records than before; with the draft they are those of one more layer.
        assert_eq!(model.records.n_layers(), 4);
        let all = model.records_with_draft();
        assert_eq!(all.n_layers(), 5);
        let record = all.record(ExpertKey::new(4, 1));
        assert!(record.pieces.iter().all(|piece| piece.file.get() == 3));
    }
}

#[test]
fn a_draft_head_that_is_not_understood_leaves_the_trunk_whole() {
    type Change = fn(Vec<u8>) -> Vec<u8>;
    /// Another word of the same length in the header.
    fn renamed(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
        assert_eq!(from.len(), to.len());
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let text = std::str::from_utf8(&bytes[8..8 + header]).unwrap();
        assert!(text.contains(from), "{from}");
        [&bytes[..8], text.replace(from, to).as_bytes(), &bytes[8 + header..]].concat()
    }
    let changes: [(&str, Change); 7] = [
        ("found", |bytes| bytes[..bytes.len() - 1].to_vec()),
        ("found", |_| b"no header".to_vec()),
        ("`mtp.fc_hiddex.", |b| renamed(&b, "mtp.fc_hidden", "mtp.fc_hiddex")),
        ("`mtp.layers.1.", |b| renamed(&b, "mtp.layers.0", "mtp.layers.1")),
        ("pre_fc_norm_hiddex", |b| renamed(&b, "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_hiddex")),
        ("`mxp.", |b| renamed(&b, "mtp.", "mxp.")),
        ("q_proj", |b| renamed(&b, "[256,8]", "[8,256]")),
    ];
    let whole = open(&fixture(DRAFTING)).unwrap();
    for (words, change) in changes {
        let folder = copy(DRAFTING);
        let path = folder.path().join(DRAFT);
        std::fs::write(&path, change(std::fs::read(&path).unwrap())).unwrap();
        let checkpoint = open(folder.path()).unwrap();
        let model = bind(&checkpoint).unwrap();
        assert!(model.draft.is_none(), "{words}");
        let warnings: Vec<&String> = checkpoint.warnings.iter().chain(&model.warnings).collect();
        let [warning] = warnings[..] else { panic!("{words}: {warnings:?}") };
        assert!(warning.starts_with("the draft block is left out: "), "{warning}");
        assert!(warning.contains(words) && !warning.contains('\n'), "{words}: {warning}");
        assert_eq!(model.records.payload_bytes(), bind(&whole).unwrap().records.payload_bytes());
    }
    let folder = copy(DRAFTING);
    std::fs::remove_file(folder.path().join(DRAFT)).unwrap();
    let checkpoint = open(folder.path()).unwrap();
    assert!(checkpoint.files.len() == 3 && checkpoint.warnings.is_empty());
    let model = bind(&checkpoint).unwrap();
    assert!(model.draft.is_none() && model.config.n_draft_layers == 0);
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
    let index: Value = serde_json::from_slice(&std::fs::read(folder.join(INDEX)).unwrap()).unwrap();
    let mut files: std::collections::BTreeSet<&str> =
        index["weight_map"].as_object().unwrap().values().map(|f| f.as_str().unwrap()).collect();
    if folder.join(DRAFT).exists() {
        files.insert(DRAFT);
    }
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

/// Bytes `bytes` of a file from `offset`.
fn bytes_at(file: &Path, offset: u64, bytes: u64) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut out = vec![0; bytes as usize];
    std::fs::File::open(file).unwrap().read_exact_at(&mut out, offset).unwrap();
    out
}

/// What a loader puts where for a list of pieces, byte by byte.
fn assemble(checkpoint: &Checkpoint, pieces: impl Iterator<Item = Piece>, bytes: u64) -> Vec<u8> {
    let mut memory = vec![0xaa; bytes as usize];
    let read = |place: FilePlace, bytes: u64| {
        bytes_at(&checkpoint.files[place.file.get()].path, place.offset, bytes)
    };
    for piece in pieces {
        let values = read(FilePlace { file: piece.file, offset: piece.offset }, piece.bytes);
        let place = piece.place as usize;
        let Some(blocks) = piece.blocks else {
            memory[place..place + values.len()].copy_from_slice(&values);
            continue;
        };
        assert!(blocks.tiles.is_none(), "no FP8 in these folders");
        let scale = blocks.scale as usize;
        let biases = blocks.biases.expect("affine codes have biases");
        for (i, codes) in values.chunks_exact(blocks.codes as usize).enumerate() {
            let at = place + i * (codes.len() + 2 * scale);
            let skip = (i * scale) as u64;
            for (n, plane) in [blocks.scales, biases].into_iter().enumerate() {
                let from = FilePlace { offset: plane.offset + skip, ..plane };
                memory[at + n * scale..][..scale].copy_from_slice(&read(from, scale as u64));
            }
            memory[at + 2 * scale..][..codes.len()].copy_from_slice(codes);
        }
    }
    memory
}

/// Folders of the manifest that are here.
fn folders() -> Vec<PathBuf> {
    let manifest = manifest("manifest.json");
    let models = manifest["models"].as_array().unwrap().iter();
    models
        .flat_map(|model| model["entries"].as_array().unwrap())
        .filter(|entry| entry["format"] != "gguf")
        .map(|entry| fixture(entry["path"].as_str().unwrap()))
        .filter(|path| path.exists())
        .collect()
}

/// A module's rows as they must lie in memory, from what an independent reader sees.
///
/// - `rows`: which rows, over all leading dimensions
fn expected_rows(
    all: &BTreeMap<String, Seen>,
    weight: &str,
    rows: std::ops::Range<u64>,
) -> Vec<u8> {
    let row = |seen: &Seen| seen.bytes / seen.shape[..seen.shape.len() - 1].iter().product::<u64>();
    let read = |seen: &Seen| {
        let bytes = row(seen);
        bytes_at(&seen.file, seen.offset + rows.start * bytes, (rows.end - rows.start) * bytes)
    };
    let values = &all[weight];
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    let Some(scales) = all.get(&format!("{module}.scales")) else { return read(values) };
    assert_eq!((values.dtype.as_str(), scales.dtype.as_str()), ("U32", "BF16"));
    let biases = &all[&format!("{module}.biases")];
    let groups = (rows.end - rows.start) * scales.shape.last().unwrap();
    let (codes, scales, biases) = (read(values), read(scales), read(biases));
    let group = codes.len() / groups as usize;
    (0..groups as usize)
        .flat_map(|i| {
            [
                &scales[2 * i..2 * i + 2],
                &biases[2 * i..2 * i + 2],
                &codes[i * group..(i + 1) * group],
            ]
        })
        .flatten()
        .copied()
        .collect()
}

#[test]
fn every_tensor_is_the_bytes_that_its_file_has_under_its_name() {
    let folders = folders();
    assert!(!folders.is_empty());
    for folder in folders {
        let (checkpoint, all) = (open(&folder).unwrap(), seen(&folder));
        assert!(checkpoint.warnings.is_empty(), "{:?}", checkpoint.warnings);
        let mut used = BTreeMap::new();
        for tensor in checkpoint.directory.iter() {
            let spelled = tensor.spelling();
            let rows = tensor.bytes / tensor.row_bytes();
            let got = assemble(&checkpoint, tensor.pieces(0..rows), tensor.bytes);
            let mut expected = Vec::new();
            // Experts in tensors of their own follow each other, and so do shards of a table.
            let list = ["experts.", "shard_"].into_iter().find_map(|list| {
                let (front, back) = spelled.split_once(&format!("{list}0."))?;
                let name = |i: u64| format!("{front}{list}{i}.{back}");
                Some(
                    (0..=u64::from(u16::MAX))
                        .map(name)
                        .take_while(|name| all.contains_key(name))
                        .collect::<Vec<_>>(),
                )
            });
            for name in list.unwrap_or_else(|| vec![spelled.to_owned()]) {
                let shape = &all[&name].shape;
                let all_rows: u64 = shape[..shape.len() - 1].iter().product();
                // Two tensors elsewhere: first the queries, then the key.
                let half = match tensor.name.split_once("indexer.") {
                    Some((_, "q_proj.weight")) => 0..rows,
                    Some((_, "k_proj.weight")) => all_rows - rows..all_rows,
                    _ => 0..all_rows,
                };
                let twice = half.end - half.start < all_rows;
                expected.extend(expected_rows(&all, &name, half));
                let before = used.insert(name, tensor.name.clone());
                assert!(before.is_none() || twice, "{before:?} and {}", tensor.name);
            }
            assert!(got == expected, "{}: {spelled}", folder.display());
        }
        for (key, value) in checkpoint.metadata.iter() {
            let name = checkpoint.metadata.spelling(key);
            if let Some(Seen { file, offset, bytes, .. }) = all.get(name) {
                let numbers = bytes_at(file, *offset, *bytes);
                let numbers = numbers.as_chunks::<8>().0.iter().map(|n| i64::from_le_bytes(*n));
                let expected = MetaValue::Array(MetaArray::I64s(numbers.collect()));
                assert_eq!(*value, expected, "{key}");
                used.insert(name.to_owned(), key.to_owned());
            }
        }
        // Nothing is left but planes of modules.
        for name in all.keys() {
            let plane = name.strip_suffix(".scales").or_else(|| name.strip_suffix(".biases"));
            let name = plane.map_or_else(|| name.clone(), |module| format!("{module}.weight"));
            assert!(used.contains_key(&name), "{name}");
        }
    }
}

#[test]
fn the_record_of_an_expert_is_its_own_rows_of_three_matrices() {
    for folder in folders() {
        let (checkpoint, all) = (open(&folder).unwrap(), seen(&folder));
        let model = bind(&checkpoint).unwrap();
        let (width, hidden) =
            (u64::from(model.config.expert_width), u64::from(model.config.hidden));
        for layer in 0..model.config.n_layers {
            let front = |end: &str| {
                let known = ["model.", "model.language_model.", "language_model.model."];
                let names = known.map(|prefix| format!("{prefix}layers.{layer}.mlp.{end}"));
                names.into_iter().find(|name| all.contains_key(name))
            };
            for expert in 0..model.config.n_experts {
                let record = model.records.record(ExpertKey::new(layer, expert));
                let slot = assemble(&checkpoint, record.pieces.iter().copied(), record.slot_bytes);
                let matrices = record.matrices();
                let e = u64::from(expert);
                for (matrix, name, n_out, half) in [
                    (matrices.gate, "gate", width, Some(0)),
                    (matrices.up, "up", width, Some(width)),
                    (matrices.down, "down", hidden, None),
                ] {
                    let own = front(&format!("experts.{expert}.{name}_proj.weight"));
                    let stacked = front(&format!("switch_mlp.{name}_proj.weight"));
                    let (tensor, first) = match (own, stacked, half) {
                        (Some(own), ..) => (own, 0),
                        (_, Some(stacked), _) => (stacked, e * n_out),
                        (.., Some(half)) => {
                            (front("experts.gate_up_proj").unwrap(), e * 2 * width + half)
                        }
                        _ => (front("experts.down_proj").unwrap(), e * n_out),
                    };
                    let expected = expected_rows(&all, &tensor, first..first + n_out);
                    let got = &slot[matrix.place as usize..][..matrix.bytes()];
                    assert_eq!(u64::from(matrix.n_out), n_out);
                    assert!(got == expected, "{}: {layer} {expert} {name}", folder.display());
                }
            }
        }
    }
}

#[test]
fn what_values_mean_follows_the_layout() {
    for folder in folders() {
        let checkpoint = open(&folder).unwrap();
        let model = bind(&checkpoint).unwrap();
        let centred = folder.ends_with("hf") && model.config.family != Family::Qwen3Moe;
        for tensor in checkpoint.directory.iter() {
            let norm = tensor.name.contains("norm") && !tensor.name.contains("ssm_norm");
            let expected = match () {
                () if tensor.name.ends_with("ssm_a") => ValueMap::NegExp,
                () if norm && centred => ValueMap::PlusOne,
                () => ValueMap::Plain,
            };
            assert_eq!(tensor.map(), expected, "{}: {}", folder.display(), tensor.name);
        }
        if let Some(shape) = model.config.delta_net {
            assert_eq!(shape.head_order, HeadOrder::Grouped);
        }
    }
}

/// Renames tensors of a safetensors file.
fn rename(path: &Path, change: impl Fn(&str) -> String) {
    let bytes = std::fs::read(path).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let header: serde_json::Map<String, Value> =
        header.into_iter().map(|(name, entry)| (change(&name), entry)).collect();
    let header = Value::Object(header).to_string();
    let mut changed = (header.len() as u64).to_le_bytes().to_vec();
    changed.extend(header.as_bytes());
    changed.extend(&bytes[8 + n..]);
    std::fs::write(path, changed).unwrap();
}

#[test]
fn a_converter_that_lists_shards_keeps_norms_as_they_are() {
    let name = DRAFTING;
    let folder = copy(name);
    std::fs::remove_file(folder.path().join(INDEX)).unwrap();
    for part in 1..=3 {
        let file = folder.path().join(format!("model-0000{part}-of-00003.safetensors"));
        rename(&file, |name| name.replace("ngram_embedding.shard_", "ngram_embedding.shards."));
    }
    let config = folder.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace(".shard_", ".shards.");
    std::fs::write(&config, text).unwrap();
    let (listed, usual) = (open(folder.path()).unwrap(), open(&fixture(name)).unwrap());
    bind(&listed).unwrap();
    // A draft head in a file of its own does not tell whether it was kept so too.
    assert_eq!(listed.warnings.len(), 1);
    assert!(
        listed.warnings[0].contains("in another layout than the model"),
        "{:?}",
        listed.warnings
    );
    let trunk = usual.directory.iter().filter(|tensor| !tensor.name.starts_with("blk.4."));
    let trunk: Vec<_> = trunk.collect();
    assert_eq!(listed.directory.len(), trunk.len());
    for (tensor, other) in listed.directory.iter().zip(trunk) {
        let norm = tensor.name.contains("norm") && !tensor.name.contains("ssm_norm");
        assert_eq!((&tensor.name, tensor.bytes), (&other.name, other.bytes));
        assert_eq!(tensor.map() == ValueMap::PlusOne, norm, "{}", tensor.name);
        assert!(other.map() != ValueMap::PlusOne, "{}", tensor.name);
    }
    // One shard less is noticed, wherever it was.
    for number in [0, 3, 7] {
        let folder = copy(name);
        std::fs::remove_file(folder.path().join(INDEX)).unwrap();
        for part in 1..=3 {
            let file = folder.path().join(format!("model-0000{part}-of-00003.safetensors"));
            rename(&file, |name| name.replace(&format!("shard_{number}."), "shard_99."));
        }
        assert_eq!(class(folder.path()), "missing", "{number}");
    }
}
