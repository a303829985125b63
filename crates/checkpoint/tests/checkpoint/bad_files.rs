//! Malformed GGUF files and odd paths, each with the class of error it must give; and their well-formed twins.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use checkpoint::{CheckpointError, Source, bind, open, parse};

use crate::support::{Gguf, Value, fixture, manifest, tiny};

fn outcome(path: &Path) -> Result<(), CheckpointError> {
    bind(&open(path)?).map(|_| ())
}

fn class(path: &Path) -> String {
    outcome(path).err().map_or_else(|| "accept".to_owned(), |error| error.class().to_string())
}

/// What a message of a class must say beside the file.
fn assert_explains(error: &CheckpointError, path: &Path) {
    let text = error.to_string();
    let stem = path.file_stem().unwrap().to_str().unwrap();
    let folder = path.parent().unwrap().to_str().unwrap();
    assert!(text.contains(stem) || text.contains(folder), "names the file: {text}");
    assert!(
        text.contains("found") && text.contains("needed")
            || text.contains("supported")
            || text.contains("no such file"),
        "says what was found and needed: {text}"
    );
    assert!(text.contains("\n\nhint: "), "has a hint: {text}");
}

#[test]
fn every_malformed_file_gives_its_class_and_every_twin_loads() {
    let manifest = manifest("bad/manifest.json");
    let (mut checked, mut wrong) = (0, Vec::new());
    for case in manifest["cases"].as_array().unwrap() {
        let path = case["path"].as_str().unwrap();
        if !path.starts_with("gguf/") {
            continue;
        }
        checked += 1;
        let path = fixture("bad").join(path);
        assert!(path.exists(), "{}", path.display());
        let expected = case["expect"].as_str().unwrap();
        // Notes of the manifest that widen: numeric damage shows when the model runs, bad merges are skipped.
        let accepted =
            matches!(expected, "accept" | "numeric") || path.ends_with("merges_bad.gguf");
        match outcome(&path) {
            Ok(()) if accepted => {}
            Err(error) if expected.split('|').any(|class| class == error.class().to_string()) => {
                assert_explains(&error, &path);
            }
            other => wrong.push(format!("{}: {other:?}, expected {expected}", path.display())),
        }
    }
    assert_eq!(checked, 64);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn harmless_oddities_are_warned_about() {
    for (name, text) in [("ok_trailing", "100 bytes after"), ("merges_bad", "merges")] {
        let warnings = open(&fixture(&format!("bad/gguf/{name}.gguf"))).unwrap().warnings;
        assert!(warnings.len() == 1 && warnings[0].contains(text), "{name}: {warnings:?}");
    }
    assert!(open(&fixture("bad/gguf/ok_base.gguf")).unwrap().warnings.is_empty());
}

#[test]
fn what_is_not_a_readable_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("model.gguf")).unwrap();
    assert_eq!(class(&at("model.gguf")), "io");
    let pipe = at("pipe.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert_eq!(class(&pipe), "io");
    assert_eq!(class(Path::new("/dev/null")), "io");
    assert_eq!(class(&at("absent.gguf")), "missing");
    assert_eq!(class(&at("pipe.gguf/below.gguf")), "io");
    symlink(at("absent.gguf"), at("dangling.gguf")).unwrap();
    assert_eq!(class(&at("dangling.gguf")), "missing");
    symlink(at("loop.gguf"), at("loop.gguf")).unwrap();
    assert_eq!(class(&at("loop.gguf")), "io");
    symlink(fixture("bad/gguf/ok_base.gguf"), at("linked.gguf")).unwrap();
    assert_eq!(class(&at("linked.gguf")), "accept");
}

#[test]
fn a_file_without_read_permission_is_an_io_error() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("secret.gguf");
    std::fs::copy(fixture("bad/gguf/ok_base.gguf"), &path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::File::open(&path).is_ok() {
        eprintln!("SKIPPED: this user may read everything (root)");
        return;
    }
    assert_eq!(class(&path), "io");
}

/// A split model under `folder`, one part for each of `files`.
fn write_parts(folder: &Path, files: &[&Gguf]) -> Vec<PathBuf> {
    let name = |part| folder.join(format!("m-{part:05}-of-{:05}.gguf", files.len()));
    files
        .iter()
        .enumerate()
        .map(|(index, file)| {
            std::fs::write(name(index + 1), file.write()).unwrap();
            name(index + 1)
        })
        .collect()
}

/// A model in three parts, the first with metadata only.
fn three_parts() -> [Gguf; 3] {
    let mut first = tiny("qwen35moe");
    let mut parts = [first.clone(), Gguf::new(), Gguf::new()];
    let tensors = std::mem::take(&mut first.tensors);
    let (front, back) = tensors.split_at(tensors.len() / 2);
    parts[0].tensors.clear();
    parts[1].tensors.extend(front.iter().cloned());
    parts[2].tensors.extend(back.iter().cloned());
    for (index, part) in parts.iter_mut().enumerate() {
        part.set("split.no", Value::U32(index as u32)).set("split.count", Value::U32(3));
    }
    parts[0].set("split.tensors.count", Value::I32(tensors.len() as i32));
    parts
}

#[test]
fn any_part_of_a_split_model_opens_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let files = three_parts();
    let paths = write_parts(folder.path(), &files.each_ref());
    let whole = tiny("qwen35moe").open().unwrap();
    for path in &paths {
        let checkpoint = open(path).unwrap();
        assert_eq!(
            checkpoint.files.iter().map(|file| &file.path).collect::<Vec<_>>(),
            paths.iter().collect::<Vec<_>>()
        );
        let names = |checkpoint: &checkpoint::Checkpoint| -> Vec<(String, u64)> {
            checkpoint.directory.iter().map(|t| (t.name.clone(), t.bytes)).collect()
        };
        assert_eq!(names(&checkpoint), names(&whole));
        assert!(checkpoint.directory.iter().all(|tensor| tensor.file.get() > 0));
        bind(&checkpoint).unwrap();
    }
    // As in a download cache: the parts are links to files of other names.
    let cache = tempfile::tempdir().unwrap();
    for path in &paths {
        symlink(path, cache.path().join(path.file_name().unwrap())).unwrap();
    }
    assert_eq!(class(&cache.path().join("m-00002-of-00003.gguf")), "accept");
}

/// The class expected, what is changed, and how.
type Change = (&'static str, &'static str, fn(&mut [Gguf; 3]));

#[test]
fn parts_that_do_not_make_a_whole_are_refused() {
    let changes: [Change; 7] = [
        ("format", "a part in another's place", |parts| parts.swap(1, 2)),
        ("format", "no number", |parts| {
            parts[2].remove("split.no");
        }),
        ("format", "another count", |parts| {
            parts[1].set("split.count", Value::U32(4));
        }),
        ("format", "a count that is text", |parts| {
            parts[1].set("split.count", Value::Str("3".to_owned()));
        }),
        ("format", "a tensor short", |parts| {
            parts[2].remove_tensor("output.weight");
        }),
        ("format", "a tensor twice", |parts| {
            let tensor = parts[1].tensors[0].clone();
            *parts[2].tensors.last_mut().unwrap() = tensor;
        }),
        ("accept", "no total", |parts| {
            parts[0].remove("split.tensors.count");
        }),
    ];
    for (expected, what, change) in changes {
        let folder = tempfile::tempdir().unwrap();
        let mut files = three_parts();
        // `output.weight` is in the second half only if the tensors were cut there; move it to be sure.
        if let Some(at) = files[1].tensors.iter().position(|t| t.name == "output.weight") {
            let tensor = files[1].tensors.remove(at);
            files[2].tensors.push(tensor);
        }
        change(&mut files);
        let paths = write_parts(folder.path(), &files.each_ref());
        assert_eq!(class(&paths[1]), expected, "{what}");
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let files = three_parts();
    let paths = write_parts(folder.path(), &files.each_ref());
    std::fs::remove_file(&paths[1]).unwrap();
    for named in &paths {
        let error = outcome(named).unwrap_err();
        assert_eq!(error.class().to_string(), "missing");
        assert!(error.to_string().contains("m-00002-of-00003.gguf"), "{error}");
        assert!(error.to_string().contains("part 2 of 3"), "{error}");
    }
    // A part under another name cannot tell where the others are.
    let renamed = folder.path().join("renamed.gguf");
    std::fs::rename(&paths[0], &renamed).unwrap();
    assert_eq!(class(&renamed), "missing");
    std::fs::create_dir(&paths[0]).unwrap();
    std::fs::create_dir(&paths[1]).unwrap();
    assert_eq!(class(&paths[2]), "io");
}

#[test]
fn numbers_in_a_name_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (name, expected) in [
        ("m-00000-of-00000.gguf", "format"),
        ("m-00003-of-00002.gguf", "format"),
        ("m-00000-of-00002.gguf", "format"),
        ("m-00001-of-99999.gguf", "limit"),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, tiny("qwen3moe").write()).unwrap();
        assert_eq!(class(&path), expected, "{name}");
    }
    // One part of one need not say so.
    let path = folder.path().join("m-00001-of-00001.gguf");
    std::fs::write(&path, tiny("qwen3moe").write()).unwrap();
    assert_eq!(class(&path), "accept");
}

#[test]
fn a_sparse_tebibyte_behind_a_valid_header_is_refused() {
    let mut file = Gguf::new();
    file.set("general.architecture", Value::Str("qwen3moe".to_owned()));
    file.tensor("token_embd.weight", &[1 << 20, (1 << 18) - 1], quant::BlockType::F32);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse.gguf");
    std::fs::write(&path, file.header()).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(class(&path), "limit");
}

/// A file that is shorter than it was when it was opened.
struct Shrunk {
    bytes: Vec<u8>,
    claimed: u64,
}

impl Source for Shrunk {
    fn len(&self) -> u64 {
        self.claimed
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset as usize + out.len();
        let from = self.bytes.get(offset as usize..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(from);
        Ok(())
    }
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_io_error() {
    let whole = tiny("qwen3next").write();
    for kept in [0, 3, 100, 1000] {
        let source = Shrunk { bytes: whole[..kept].to_vec(), claimed: whole.len() as u64 };
        let error = parse(Path::new("shrunk.gguf"), &source).unwrap_err();
        assert_eq!(error.class().to_string(), "io", "{kept}: {error}");
    }
}
