//! Packs of whole models of every container and family: the bytes that a backend gets are those of the source, whatever
//! interrupts the writing; and what is damaged is found.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use checkpoint::{Checkpoint, Model, TensorInfo, bind, open};
use expert_store::{Store, StoreOptions};
use prepare::{Packed, Packing, PrepareError, Verdict, Watch, verify, verify_deep};
use units::ExpertKey;

/// A file of the fixtures, or of the larger set that `SAKIA_FIXTURES` names.
fn fixture(name: &str) -> PathBuf {
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures");
    std::env::var_os("SAKIA_FIXTURES").map_or_else(|| PathBuf::from(here), PathBuf::from).join(name)
}

/// Every model of the manifest that is here, and whole folders made for other tests.
fn models() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for family in std::fs::read_dir(fixture("models")).unwrap() {
        for model in std::fs::read_dir(family.unwrap().path()).unwrap() {
            let path = model.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            let part = name.contains("-of-") && !name.contains("-00001-of-");
            if (path.extension().is_some_and(|ending| ending == "gguf") && !part)
                || path.join("config.json").exists()
            {
                found.push(path);
            }
        }
    }
    found.extend(["ok", "ok_mlx", "ok_sharded"].map(|name| fixture("bad/folders").join(name)));
    found.sort();
    assert!(found.len() >= 12, "the fixtures are there: {found:?}");
    found
}

/// Stops when so many bytes are done.
struct Until(u64, AtomicU64);

impl Until {
    const fn end() -> Self {
        Self(u64::MAX, AtomicU64::new(0))
    }

    const fn bytes(most: u64) -> Self {
        Self(most, AtomicU64::new(0))
    }
}

impl Watch for Until {
    fn at(&self, bytes: u64) {
        self.1.store(bytes, Ordering::Relaxed);
    }

    fn stopped(&self) -> bool {
        self.1.load(Ordering::Relaxed) >= self.0
    }
}

fn packing(model: &Path, out: &Path, force: bool) -> Result<Packing, PrepareError> {
    let checkpoint = open(model).unwrap();
    let bound = bind(&checkpoint).unwrap();
    Packing::new(checkpoint, &bound, out, force)
}

fn pack(model: &Path, out: &Path) -> Packed {
    packing(model, out, false).unwrap().run(&Until::end()).unwrap()
}

fn deep(path: &Path) -> Verdict {
    let checkpoint = open(path).unwrap();
    bind(&checkpoint).unwrap();
    verify_deep(&checkpoint, &Until::end()).unwrap()
}

struct Opened {
    checkpoint: Checkpoint,
    model: Model,
    store: Store,
}

impl Opened {
    fn new(path: &Path) -> Self {
        let checkpoint = open(path).unwrap();
        let model = bind(&checkpoint).unwrap();
        let files: Vec<PathBuf> = checkpoint.files.iter().map(|file| file.path.clone()).collect();
        let store = Store::open(&files, StoreOptions::default()).unwrap();
        Self { checkpoint, model, store }
    }

    /// A tensor as a backend gets it.
    fn bytes(&self, tensor: &TensorInfo) -> Vec<u8> {
        let mut bytes = vec![0; tensor.bytes as usize];
        for piece in tensor.pieces(0..tensor.bytes / tensor.row_bytes()) {
            let out = &mut bytes[piece.place as usize..][..piece.memory_bytes() as usize];
            self.store.read_piece(piece, out).unwrap();
        }
        bytes
    }

    /// The matrices of an expert as they lie in a slot.
    fn matrices(&self, key: ExpertKey) -> [Vec<u8>; 3] {
        let record = self.model.records.record(key);
        let mut slot = vec![0; record.slot_bytes as usize];
        for piece in record.pieces.iter() {
            let out = &mut slot[piece.place as usize..][..piece.memory_bytes() as usize];
            self.store.read_piece(*piece, out).unwrap();
        }
        let matrices = record.matrices();
        [matrices.gate, matrices.up, matrices.down]
            .map(|matrix| slot[matrix.place as usize..][..matrix.bytes()].to_vec())
    }
}

#[test]
fn a_backend_gets_the_bytes_of_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("x.sakia");
    for path in models() {
        let packed = pack(&path, &out);
        assert_eq!(packed.file_bytes, std::fs::metadata(&out).unwrap().len());
        assert_eq!(packed.resumed_units, 0);
        let (ours, theirs) = (Opened::new(&out), Opened::new(&path));
        assert_eq!(ours.model.config, theirs.model.config, "{}", path.display());
        assert_eq!(ours.checkpoint.directory.len(), theirs.checkpoint.directory.len());
        let pairs = ours.checkpoint.directory.iter().zip(theirs.checkpoint.directory.iter());
        for (a, b) in pairs {
            assert_eq!((&a.name, a.map()), (&b.name, b.map()));
            assert!(ours.bytes(a) == theirs.bytes(b), "{}: {}", path.display(), a.name);
        }
        for layer in 0..ours.model.config.n_layers {
            for expert in 0..ours.model.config.n_experts {
                let key = ExpertKey::new(layer, expert);
                assert_eq!(ours.model.records.record(key).pieces.len(), 1);
                assert!(ours.matrices(key) == theirs.matrices(key), "{}: {key}", path.display());
            }
        }
        let (verdict, source) = (deep(&out), deep(&path));
        assert_eq!((verdict.n_faults, verdict.is_pack), (0, true), "{verdict:?}");
        assert_eq!(verdict.checksums, packed.units);
        assert_eq!((source.n_faults, source.is_pack), (0, false), "{source:?}");
        std::fs::remove_file(&out).unwrap();
    }
}

#[test]
fn a_run_that_ends_anywhere_is_continued_to_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    // Of many small parts, so that there is a chance to stop everywhere.
    let model = fixture("models/qwen3_next-k/kq.gguf");
    let (once, out) = (folder.path().join("once.sakia"), folder.path().join("out.sakia"));
    pack(&model, &once);
    let total = packing(&model, &out, false).unwrap().bytes();
    let mut resumed = Vec::new();
    for step in 0..40 {
        let packing = packing(&model, &out, false).unwrap();
        match packing.run(&Until::bytes(1 + step * total / 44)) {
            Err(PrepareError::Stopped) => assert!(!out.exists(), "no pack before it is whole"),
            other => panic!("it was to stop: {other:?}"),
        }
        if step % 8 == 7 {
            let packed = pack(&model, &out);
            resumed.push(packed.resumed_units);
            assert!(std::fs::read(&out).unwrap() == std::fs::read(&once).unwrap(), "step {step}");
            std::fs::remove_file(&out).unwrap();
        }
    }
    assert!(resumed.is_sorted() && resumed[0] > 0, "later stops leave more: {resumed:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn what_is_left_is_trusted_only_where_it_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("models/qwen3_moe-a/b32.gguf");
    let (once, out) = (folder.path().join("once.sakia"), folder.path().join("out.sakia"));
    let [partial, journal] =
        ["partial", "partial.journal"].map(|end| folder.path().join(format!("out.sakia.{end}")));
    pack(&model, &once);
    let whole = std::fs::read(&once).unwrap();
    let first = packing(&model, &out, false).unwrap();
    let units: Vec<_> = first.layout().units().collect();
    let most = first.bytes() * 3 / 4;
    assert!(matches!(first.run(&Until::bytes(most)), Err(PrepareError::Stopped)));
    let left = [&partial, &journal].map(|file| std::fs::read(file).unwrap());
    let recorded = (left[1].len() - 16) / 8;
    assert!(recorded > 10 && recorded < units.len());
    let padding = units.windows(2).position(|pair| pair[0].offset + pair[0].bytes < pair[1].offset);
    let padding = padding.unwrap();
    // A byte that changed, and the units that are kept for it.
    for (at, kept) in [
        (None, recorded),
        (Some(units[0].offset), 0),
        (Some(units[9].offset + units[9].bytes - 1), 9),
        (Some(units[padding].offset + units[padding].bytes), padding + 1),
        // Behind everything that is recorded, and in front of it.
        (Some(units[recorded].offset), recorded),
        (Some(whole.len() as u64 - 1), recorded),
        (Some(0), recorded),
        (Some(100), recorded),
    ] {
        let mut bytes = left[0].clone();
        if let Some(at) = at {
            bytes[at as usize] ^= 0x55;
        }
        std::fs::write(&partial, bytes).unwrap();
        std::fs::write(&journal, &left[1]).unwrap();
        let packed = pack(&model, &out);
        assert_eq!(packed.resumed_units, kept as u64, "{at:?}");
        assert!(std::fs::read(&out).unwrap() == whole, "{at:?}");
        std::fs::remove_file(&out).unwrap();
    }
    // A file that ends early, a journal of other files, and none of it.
    std::fs::write(&partial, &left[0][..=(units[5].offset as usize)]).unwrap();
    std::fs::write(&journal, &left[1]).unwrap();
    assert_eq!(pack(&model, &out).resumed_units, 5);
    std::fs::remove_file(&out).unwrap();
    let mut other = left[1].clone();
    other[9] ^= 1;
    std::fs::write(&partial, &left[0]).unwrap();
    std::fs::write(&journal, other).unwrap();
    assert_eq!(pack(&model, &out).resumed_units, 0);
    assert!(std::fs::read(&out).unwrap() == whole);
}

#[test]
fn nothing_is_replaced_unasked_and_a_source_never() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(fixture("models/qwen3_moe-a/b32.gguf"), &model).unwrap();
    let out = folder.path().join("out.sakia");
    std::fs::write(&out, "precious").unwrap();
    let refused = |out: &Path, force| packing(&model, out, force).unwrap_err();
    assert!(matches!(refused(&out, false), PrepareError::Exists { .. }));
    assert!(matches!(refused(&model, true), PrepareError::IsSource { .. }));
    assert!(matches!(refused(folder.path(), true), PrepareError::NotAFile { .. }));
    assert!(matches!(refused(Path::new("/dev/null"), true), PrepareError::NotAFile { .. }));
    assert!(matches!(refused(Path::new("/"), true), PrepareError::NotAFile { .. }));
    let link = folder.path().join("link.sakia");
    std::os::unix::fs::symlink(&model, &link).unwrap();
    assert!(matches!(refused(&link, true), PrepareError::IsSource { .. }));
    let other = folder.path().join("other.sakia");
    std::fs::write(folder.path().join("other.sakia.partial"), "precious").unwrap();
    assert!(matches!(refused(&other, false), PrepareError::InTheWay { .. }));
    let third = folder.path().join("third.sakia");
    let journal = folder.path().join("third.sakia.partial.journal");
    std::fs::write(&journal, "precious").unwrap();
    assert!(matches!(refused(&third, false), PrepareError::InTheWay { .. }));
    assert_eq!(std::fs::read_to_string(&journal).unwrap(), "precious");
    // One that was torn at its beginning is ours.
    std::fs::write(&journal, "SAK").unwrap();
    packing(&model, &third, false).unwrap().run(&Until::end()).unwrap();
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious");
    for out in [&out, &other] {
        packing(&model, out, true).unwrap().run(&Until::end()).unwrap();
    }
    let again = folder.path().join("again.sakia");
    pack(&out, &again);
    let bytes = [&out, &other, &again].map(|file| std::fs::read(file).unwrap());
    assert!(bytes[0] == bytes[1] && bytes[1] == bytes[2], "a pack of a pack is the pack");
    assert!(
        std::fs::read(&model).unwrap()
            == std::fs::read(fixture("models/qwen3_moe-a/b32.gguf")).unwrap()
    );
}

#[test]
fn deep_checks_name_every_damaged_part() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("x.sakia");
    let model = fixture("models/qwen4_exp-a/split-b32-00001-of-00003.gguf");
    let units: Vec<_> = packing(&model, &out, false).unwrap().layout().units().collect();
    pack(&model, &out);
    let whole = std::fs::read(&out).unwrap();
    let change = |places: &[u64]| {
        let mut bytes = whole.clone();
        places.iter().for_each(|at| bytes[*at as usize] ^= 1);
        std::fs::write(&out, bytes).unwrap();
        deep(&out)
    };
    for unit in units.iter().step_by(7).chain(units.last()) {
        for at in [unit.offset, unit.offset + unit.bytes - 1] {
            let verdict = change(&[at]);
            let [fault] = verdict.faults.as_slice() else { panic!("{verdict:?}") };
            assert_eq!((fault.offset, &fault.file), (Some(unit.offset), &out), "{fault:?}");
        }
    }
    let all: Vec<u64> = units.iter().map(|unit| unit.offset).collect();
    let verdict = change(&all);
    assert_eq!((verdict.n_faults, verdict.faults.len()), (units.len() as u64, 10));
    let verdict = change(&[whole.len() as u64 - 1]);
    assert!(verdict.faults[0].what.starts_with("the padding"), "{verdict:?}");
    // Behind the checksums, in front of the weights.
    let data = units.iter().map(|unit| unit.offset).min().unwrap();
    assert_eq!(whole[data as usize - 1], 0, "padding is there");
    let verdict = change(&[data - 1]);
    assert!(verdict.faults[0].what.starts_with("the padding"), "{verdict:?}");
    std::fs::write(&out, &whole).unwrap();
    let checkpoint = open(&out).unwrap();
    std::fs::write(&out, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(verify(&checkpoint).faults[0].what, "the file's size");
    let nan = deep(&fixture("bad/folders/router_nan"));
    assert!(nan.n_faults > 0 && nan.faults[0].problem.starts_with("NaN at row"), "{nan:?}");
    assert!(nan.faults[0].what.contains("mlp.gate.weight"), "{nan:?}");
}
