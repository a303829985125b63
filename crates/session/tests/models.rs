//! Whole models: logits against other software's, backends against each other, and one test per knob that must not
//! change a bit.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;

use compute::backend::{Activations, KvType};
use expert_store::{
    DirectMode, Fault, FaultKind, FaultPlan, ReadModel, ReaderKind, Store, StoreOptions,
};
use session::{
    BackendKind, Engine, EngineError, EngineOptions, Forced, LogitsRun, MirrorOptions, OpenModel,
    Reads, Sequence,
};
use slot_pool::PolicyKind;

use support::{
    Expected, FLASH, argmax, data, demo, engine, entries, folders, npy, options, subjects, words,
};

fn logits(path: &Path, tokens: &[u32], options: EngineOptions) -> Vec<f32> {
    let mut engine = engine(path, options);
    let mut sequence = Sequence::open(&mut engine.network).unwrap();
    let mut all = Vec::new();
    let run =
        LogitsRun { tokens, pass_rows: engine.plan.pass_rows as usize, progress: &|_, _| true };
    run.run(&mut engine.network, &mut sequence, &mut |logits| all.extend_from_slice(logits))
        .unwrap();
    all
}

#[test]
fn logits_agree_with_other_software_for_every_family_and_layout() {
    let (files, folders) = (entries(), folders());
    let complete = std::env::var_os("SAKIA_FIXTURES").is_some();
    assert_eq!((files.len(), folders.len()), if complete { (12, 10) } else { (10, 2) });
    for (path, expected, tolerance) in files.into_iter().chain(folders) {
        let expected = Expected::read(&expected);
        let (ids, reference) = (expected.ids("input_ids"), expected.floats("logits"));
        let got = logits(&path, &ids, options());
        assert_eq!(got.len(), reference.len());
        let worst = got.iter().zip(&reference).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= tolerance, "{}: {worst}, tolerance {tolerance}", path.display());
    }
}

#[test]
fn greedy_continuations_agree_where_the_margin_allows() {
    for (path, expected, tolerance) in entries().into_iter().chain(folders()) {
        let expected = Expected::read(&expected);
        let (ids, greedy, margins) = (
            expected.ids("input_ids"),
            expected.ids("greedy_ids"),
            expected.floats("greedy_margin"),
        );
        let mut engine = engine(&path, options());
        let mut sequence = Sequence::open(&mut engine.network).unwrap();
        let pass_rows = engine.plan.pass_rows as usize;
        let run = Forced { prompt: &ids, forced: &greedy[..greedy.len() - 1], pass_rows };
        let outcome = run.run(&mut engine.network, &mut sequence).unwrap();
        let certain = margins.iter().take_while(|margin| **margin > 4.0 * tolerance).count();
        assert!(certain > 0, "{}", path.display());
        assert_eq!(outcome.likeliest[..certain], greedy[..certain], "{}", path.display());
    }
}

#[test]
fn all_backends_give_the_same_bits() {
    for (path, expected, _) in entries().into_iter().chain(folders()) {
        let ids = Expected::read(&expected).ids("input_ids");
        for (activations, kv) in [(Activations::F32, KvType::F32), (Activations::Q8, KvType::F16)] {
            let with = |backend| {
                logits(&path, &ids, EngineOptions { backend, activations, kv, ..options() })
            };
            let reference = with(BackendKind::Reference);
            for backend in [BackendKind::Cpu, BackendKind::Deferred] {
                assert!(
                    with(backend) == reference,
                    "{} {backend:?} {activations:?}",
                    path.display()
                );
            }
        }
    }
}

#[test]
fn the_demo_model_agrees_with_its_reference() {
    for (text, step) in [("chat", 1), ("prose", 2), ("code", 1)] {
        let ids = words(&npy(&format!("ids_{text}.npy")), u32::from_le_bytes);
        let reference = words(&npy(&format!("logits_{text}.npy")), f32::from_le_bytes);
        let got = logits(&demo(), &ids, EngineOptions { kv: KvType::F16, ..options() });
        let vocab = got.len() / ids.len();
        for (row, expected) in reference.chunks_exact(vocab).enumerate() {
            let got = &got[row * step * vocab..][..vocab];
            let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= 1e-2, "{text} position {}: {worst}", row * step);
            let (best, margin) = argmax(expected);
            assert!(margin <= 0.1 || argmax(got).0 == best, "{text} position {}", row * step);
        }
    }
}

/// Logits of a prompt and the likeliest tokens of a forced continuation, with everything as users have it.
fn run(path: &Path, tokens: &[u32], change: impl Fn(&mut EngineOptions)) -> (Vec<f32>, Vec<u32>) {
    let mut options = EngineOptions { activations: Activations::Q8, kv: KvType::F16, ..options() };
    options.context = Some(512);
    change(&mut options);
    let all = logits(path, tokens, options.clone());
    let mut engine = engine(path, options);
    let mut sequence = Sequence::open(&mut engine.network).unwrap();
    let (prompt, forced) = tokens.split_at(tokens.len() / 2);
    let run = Forced { prompt, forced, pass_rows: engine.plan.pass_rows as usize };
    (all, run.run(&mut engine.network, &mut sequence).unwrap().likeliest)
}

fn unchanged_by(knob: &str, changes: &[&dyn Fn(&mut EngineOptions)]) {
    for (path, tokens) in subjects() {
        let usual = run(&path, &tokens, |_| {});
        for (i, change) in changes.iter().enumerate() {
            assert!(run(&path, &tokens, change) == usual, "{knob} {i} changes {}", path.display());
        }
    }
}

#[test]
fn output_never_depends_on_the_number_of_slots() {
    for (path, tokens) in subjects() {
        let config = OpenModel::open(&path).unwrap().model.config;
        let all = config.n_layers * config.n_experts;
        let usual = run(&path, &tokens, |_| {});
        for slots in [config.top_k + 1, all / 4, all / 2, all] {
            let slots = slots.max(config.top_k + 1);
            let got = run(&path, &tokens, |options| options.slots = Some(slots));
            assert!(got == usual, "{slots} of {all} slots change {}", path.display());
        }
    }
}

#[test]
fn output_never_depends_on_the_policy() {
    unchanged_by(
        "policy",
        &[&|o| (o.policy, o.slots) = (PolicyKind::Lru, Some(20)), &|o| o.slots = Some(20)],
    );
}

#[test]
fn output_never_depends_on_threads() {
    unchanged_by("threads", &[&|o| o.threads = 1, &|o| o.threads = 4]);
}

#[test]
fn output_never_depends_on_the_pass_length() {
    unchanged_by(
        "pass",
        &[&|o| o.pass_rows = Some(64), &|o| o.pass_rows = Some(192), &|o| o.pass_rows = Some(1024)],
    );
}

#[test]
fn output_never_depends_on_how_files_are_read() {
    unchanged_by("reads", &[&|o| o.direct = DirectMode::Off]);
}

#[test]
fn output_never_depends_on_the_reader() {
    let own = std::env::current_exe().unwrap();
    let how = StoreOptions { reader: ReaderKind::IoUring, ..StoreOptions::default() };
    if let Err(error) = Store::open(&[own], how) {
        eprintln!("SKIPPED: {error}");
        return;
    }
    unchanged_by(
        "reader",
        &[&|o| (o.reader, o.slots) = (ReaderKind::IoUring, Some(20)), &|o| {
            (o.reader, o.slots, o.direct) = (ReaderKind::IoUring, Some(20), DirectMode::Off);
        }],
    );
}

#[test]
fn output_never_depends_on_reader_threads_and_parts() {
    let reads = |threads, part_bytes| {
        let model = ReadModel { threads, part_bytes };
        Some(Reads { model, probed_bytes_per_second: None })
    };
    unchanged_by(
        "read model",
        &[&|o| (o.reads, o.slots) = (reads(1, u64::MAX), Some(20)), &|o| {
            (o.reads, o.slots) = (reads(9, 4096), Some(20));
        }],
    );
}

/// A folder with copies of a model's files, of all or of the last one only.
fn mirror(path: &Path, all: bool) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let files = OpenModel::open(path).unwrap().checkpoint.files;
    let from = if all { 0 } else { files.len() - 1 };
    for file in &files[from..] {
        let copy = folder.path().join(file.path.file_name().unwrap());
        std::fs::copy(&file.path, copy).unwrap();
    }
    folder
}

/// Fails every read from `first` on.
fn failing_from(first: u64, kind: FaultKind) -> FaultPlan {
    FaultPlan::new((first..first + 5000).map(|read| Fault { read, kind }).collect())
}

#[test]
fn output_never_depends_on_mirrors_nor_on_disks_that_fail() {
    let slow = FaultKind::Delay(std::time::Duration::from_micros(300));
    for (path, tokens) in subjects() {
        let few = |o: &mut EngineOptions| o.slots = Some(20);
        let usual = run(&path, &tokens, few);
        let (whole, part) = (mirror(&path, true), mirror(&path, false));
        let of = |folder: &tempfile::TempDir, faults| MirrorOptions {
            folder: folder.path().to_owned(),
            faults,
        };
        let eio = |read| Some(failing_from(read, FaultKind::Error(5)));
        for (i, (own, mirrors)) in [
            (None, vec![of(&whole, None)]),
            (Some(failing_from(0, slow)), vec![of(&whole, None), of(&part, None)]),
            (eio(0), vec![of(&whole, None)]),
            (eio(30), vec![of(&whole, Some(failing_from(0, slow)))]),
            (None, vec![of(&whole, eio(25)), of(&part, eio(0))]),
        ]
        .into_iter()
        .enumerate()
        {
            let got = run(&path, &tokens, |o| {
                few(o);
                (o.faults, o.mirrors) = (own.clone(), mirrors.clone());
            });
            assert!(got == usual, "mirrors {i} change {}", path.display());
        }
    }
}

#[test]
fn a_run_ends_with_the_last_copy_only() {
    let (path, tokens) = subjects().swap_remove(0);
    let whole = mirror(&path, true);
    // The first disk fails at once, so the mirror gets every read. Gives its reads until all is loaded, and the error.
    let attempt = |faults: &FaultPlan| {
        let own = Some(failing_from(0, FaultKind::Error(5)));
        let folder = whole.path().to_owned();
        let mirrors = vec![MirrorOptions { folder, faults: Some(faults.clone()) }];
        let options = EngineOptions { slots: Some(20), faults: own, mirrors, ..options() };
        let mut engine = engine(&path, options);
        let loaded = faults.reads();
        let mut sequence = Sequence::open(&mut engine.network).unwrap();
        let run = LogitsRun { tokens: &tokens, pass_rows: 64, progress: &|_, _| true };
        let outcome = run.run(&mut engine.network, &mut sequence, &mut |_| {});
        (loaded, outcome.err().map(|error| error.to_string()))
    };
    let counting = FaultPlan::default();
    let (loaded, error) = attempt(&counting);
    assert_eq!(error, None, "one copy is enough");
    let halfway = u64::midpoint(loaded, counting.reads());
    assert!(loaded < halfway, "the run reads experts");
    let (_, error) = attempt(&failing_from(halfway, FaultKind::Error(5)));
    let error = error.expect("no copy is left");
    assert!(error.contains("kq.gguf"), "{error}");
}

#[test]
fn a_folder_that_is_no_mirror_is_refused_before_anything_is_loaded() {
    let (path, _) = subjects().swap_remove(0);
    let folder = mirror(&path, true);
    let copy = folder.path().join(path.file_name().unwrap());
    let mut bytes = std::fs::read(&copy).unwrap();
    let middle = bytes.len() - 1;
    bytes[middle] ^= 1;
    std::fs::write(&copy, bytes).unwrap();
    let mirrors = vec![MirrorOptions { folder: folder.path().to_owned(), faults: None }];
    let options = EngineOptions { mirrors, ..options() };
    let outcome = Engine::load(OpenModel::open(&path).unwrap(), options, &mut |_| {});
    let Err(EngineError::Mirror(error)) = outcome else { panic!("it was taken") };
    assert!(error.to_string().contains("is not a copy"), "{error}");
}

#[test]
fn output_never_depends_on_the_ngram_rows_that_are_kept() {
    unchanged_by("n-gram rows", &[&|o| o.ngram_rows = 0, &|o| o.ngram_rows = 3]);
}

#[test]
fn a_failed_read_is_an_error_or_harmless_at_every_read() {
    let kinds = [
        FaultKind::Short(7),
        FaultKind::Error(5),
        FaultKind::Delay(std::time::Duration::from_millis(1)),
        FaultKind::Hold(3),
    ];
    for kind in kinds {
        for_every_read("qwen3_moe-a/f32.gguf", kind);
    }
}

#[test]
fn a_failed_read_of_a_model_with_an_ngram_table_is_an_error_or_harmless_at_every_read() {
    for kind in [FaultKind::Short(0), FaultKind::Error(5), FaultKind::Hold(3)] {
        for_every_read(FLASH, kind);
    }
}

fn for_every_read(name: &str, kind: FaultKind) {
    let (path, expected, _) = entries().into_iter().find(|e| e.0.ends_with(name)).unwrap();
    let tokens = Expected::read(&expected).ids("input_ids");
    let usual = logits(&path, &tokens, EngineOptions { slots: Some(5), ..options() });
    let mut read = 0;
    loop {
        let faults = FaultPlan::nth(read, kind);
        let options = EngineOptions { slots: Some(5), faults: Some(faults.clone()), ..options() };
        let outcome = Engine::load(OpenModel::open(&path).unwrap(), options, &mut |_| {});
        if let Ok(mut engine) = outcome {
            let mut sequence = Sequence::open(&mut engine.network).unwrap();
            let run = LogitsRun { tokens: &tokens, pass_rows: 64, progress: &|_, _| true };
            for _ in 0..3 {
                // An attempt after the fault meets none: it shows that no slot was lost.
                let before = faults.fired();
                let mut all = Vec::new();
                let outcome = run.run(&mut engine.network, &mut sequence, &mut |logits| {
                    all.extend_from_slice(logits);
                });
                match outcome {
                    Ok(_) => assert!(all == usual, "{kind:?} at read {read} gives wrong logits"),
                    Err(error) => {
                        assert!(faults.fired() > before, "{kind:?} at read {read}: {error}");
                    }
                }
            }
        }
        if faults.fired() == 0 {
            break;
        }
        // Every early read, then some: all layers and waves are met.
        read += if read < 40 { 1 } else { 19 };
    }
    assert!(read > 40, "{kind:?} was tried on {read} reads only");
}

#[test]
fn a_damaged_router_or_head_is_an_error_and_not_a_token() {
    for (file, words) in [("router_nan.gguf", "router"), ("output_inf.gguf", "logits")] {
        let mut engine = engine(&data("fixtures/bad/gguf").join(file), options());
        let mut sequence = Sequence::open(&mut engine.network).unwrap();
        let run = LogitsRun { tokens: &[1, 2, 3], pass_rows: 64, progress: &|_, _| true };
        let error = run.run(&mut engine.network, &mut sequence, &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains(words), "{file}: {error}");
    }
}

#[test]
fn a_reused_turn_has_the_bits_of_a_cold_one() {
    for (path, tokens) in subjects() {
        let tokens = tokens.repeat(2);
        let mut warm = engine(&path, options());
        let mut sequence = Sequence::open(&mut warm.network).unwrap();
        last_logits(&mut warm, &mut sequence, &tokens[..150]);
        sequence.step(&mut warm.network, tokens[150], &mut |_| {}).unwrap();
        let (reused, read) = last_logits(&mut warm, &mut sequence, &tokens[..200]);
        let mut cold = engine(&path, options());
        let mut sequence = Sequence::open(&mut cold.network).unwrap();
        let (fresh, all) = last_logits(&mut cold, &mut sequence, &tokens[..200]);
        assert!(reused == fresh, "{}", path.display());
        assert_eq!(
            (read, all),
            (200 - 128, 200),
            "the second turn starts at the last pass of the first"
        );
    }
}

/// Logits after a prompt read in passes of 64 tokens, and how many of its tokens were read.
fn last_logits(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> (Vec<f32>, u64) {
    let mut logits = Vec::new();
    let prompt = session::Prompt::new(tokens, 64);
    let phase = sequence
        .prefill(&mut engine.network, &prompt, &mut |_, row| logits = row.to_vec())
        .unwrap();
    (logits, phase.tokens)
}

#[test]
fn rows_of_the_ngram_table_are_counted() {
    let (path, tokens) = subjects().swap_remove(1);
    let mut engine = engine(&path, options());
    let mut sequence = Sequence::open(&mut engine.network).unwrap();
    let run = Forced { prompt: &tokens[..100], forced: &tokens[100..110], pass_rows: 64 };
    let outcome = run.run(&mut engine.network, &mut sequence).unwrap();
    // Two rows a token; the first forced token counts with neither phase.
    let (prefill, decode) = (outcome.prefill.ngrams, outcome.decode.ngrams);
    assert_eq!((prefill.rows, decode.rows), (200, 18));
    assert!(prefill.hits > 0 && prefill.payload_bytes > 0 && prefill.reads > 0, "{prefill:?}");
    let receipt = serde_json::to_value(session::receipt::of_forced(&engine, &outcome)).unwrap();
    assert_eq!(receipt["prefill"]["ngram"]["rows"], 200);
    // Every row that is no hit was read.
    let model = OpenModel::open(&path).unwrap().model;
    let row_bytes = model.ngram_table.unwrap().row_bytes() as u64;
    assert_eq!(prefill.payload_bytes, (prefill.rows - prefill.hits) * row_bytes);
    assert_eq!(decode.payload_bytes, (decode.rows - decode.hits) * row_bytes);
}
