//! The draft head: its logits and states against other software's, what must not change a bit, chains of guesses and
//! how they are taken back.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::{Path, PathBuf};

use compute::backend::{Activations, KvType, Role, Row, SequenceId};
use expert_store::{FaultKind, FaultPlan};
use model::{DraftFrom, LogitRows};
use session::{BackendKind, Engine, EngineError, EngineOptions, LogitsRun, OpenModel, Sequence};

use support::{Expected, argmax, demo, engine, npy, options, words};

/// A model of the manifest that is here.
struct Subject {
    path: PathBuf,
    expected: Expected,
    tolerance: f32,
    /// Whether its files hold the draft head.
    has_draft: bool,
}

fn subjects() -> Vec<Subject> {
    let entries = support::present().into_iter();
    entries
        .map(|(path, entry)| Subject {
            path,
            expected: Expected::read(&support::expected(&entry)),
            tolerance: support::tolerance(&entry),
            has_draft: entry["has_mtp"].as_bool().unwrap(),
        })
        .collect()
}

fn drafting() -> Vec<Subject> {
    subjects().into_iter().filter(|subject| subject.has_draft).collect()
}

fn with_draft(options: EngineOptions) -> EngineOptions {
    EngineOptions { draft: true, ..options }
}

fn rows(sequence: SequenceId, first: usize, role: Role, tokens: &[u32]) -> Vec<Row> {
    let row = |(i, &token)| Row { sequence, position: (first + i) as u32, role, token };
    tokens.iter().enumerate().map(row).collect()
}

/// What a draft gives, row after row.
#[derive(Debug, Default, PartialEq)]
struct Drafted {
    logits: Vec<f32>,
    /// What the head takes.
    hidden: Vec<f32>,
    /// The residual, all streams.
    residual: Vec<f32>,
}

impl Drafted {
    fn add(&mut self, engine: &mut Engine, rows: &[Row], from: DraftFrom) {
        let sink = &mut |_, logits: &[f32]| self.logits.extend_from_slice(logits);
        engine.network.draft(rows, from, LogitRows::All, sink).unwrap();
        for row in 0..rows.len() {
            self.residual.extend(engine.network.draft_residual(row));
            self.hidden.extend(engine.network.draft_head_input(row));
        }
    }
}

/// Reads `tokens` from `start` on, in passes, and drafts wherever the next token is known.
fn read(engine: &mut Engine, sequence: SequenceId, tokens: &[u32], start: usize) -> Drafted {
    let mut drafted = Drafted::default();
    let pass = engine.plan.pass_rows as usize;
    for start in (start..tokens.len()).step_by(pass) {
        let end = tokens.len().min(start + pass);
        let trunk = rows(sequence, start, Role::Prompt, &tokens[start..end]);
        engine.network.forward(&trunk, LogitRows::None, &mut |_, _| {}).unwrap();
        let next = &tokens[start + 1..tokens.len().min(end + 1)];
        if !next.is_empty() {
            let next = rows(sequence, start, Role::Prompt, next);
            drafted.add(engine, &next, DraftFrom::Trunk);
        }
    }
    drafted
}

fn drafts(path: &Path, tokens: &[u32], options: EngineOptions) -> Drafted {
    let mut engine = engine(path, with_draft(options));
    let sequence = engine.network.open_sequence().unwrap();
    read(&mut engine, sequence, tokens, 0)
}

fn assert_near(got: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= tolerance, "{what}: {worst}, tolerance {tolerance}");
}

#[test]
fn drafts_agree_with_other_software_in_every_layout() {
    let complete = std::env::var_os("SAKIA_FIXTURES").is_some();
    // Of qwen3_next a folder; of qwen3_5_moe a folder and a GGUF file; of qwen4_exp both, and one of MLX.
    assert_eq!(drafting().len(), if complete { 6 } else { 2 });
    for Subject { path, expected, tolerance, .. } in drafting() {
        let name = path.display();
        let got = drafts(&path, &expected.ids("input_ids"), options());
        assert_near(&got.logits, &expected.floats("mtp_logits"), tolerance, &format!("{name}"));
        let hidden = expected.floats("mtp_hidden");
        assert_near(&got.hidden, &hidden, tolerance, &format!("{name}: hidden"));
        if expected.has("mtp_streams") {
            let streams = expected.floats("mtp_streams");
            assert_near(&got.residual, &streams, tolerance, &format!("{name}: streams"));
        }
    }
}

#[test]
fn drafts_of_generated_rows_agree_too() {
    for Subject { path, expected, tolerance, .. } in drafting() {
        let tokens = expected.ids("input_ids");
        let mut engine = engine(&path, with_draft(options()));
        let sequence = engine.network.open_sequence().unwrap();
        let prompt = tokens.len() / 2;
        let mut got = read(&mut engine, sequence, &tokens[..prompt], 0);
        // The row that waited for the first generated token, then one token after the other.
        for position in prompt - 1..tokens.len() - 1 {
            let next = &tokens[position + 1..position + 2];
            let draft = rows(sequence, position, Role::Generated, next);
            got.add(&mut engine, &draft, DraftFrom::Trunk);
            let trunk = rows(sequence, position + 1, Role::Generated, next);
            engine.network.forward(&trunk, LogitRows::None, &mut |_, _| {}).unwrap();
        }
        let name = path.display().to_string();
        assert_near(&got.logits, &expected.floats("mtp_logits"), tolerance, &name);
    }
}

#[test]
fn a_draft_head_is_found_where_there_is_one_and_missed_in_words() {
    for Subject { path, has_draft, .. } in subjects() {
        let opened = OpenModel::open(&path).unwrap();
        assert!(opened.model.warnings.is_empty(), "{:?}", opened.model.warnings);
        assert_eq!(opened.model.draft.is_some(), has_draft, "{}", path.display());
        if !has_draft {
            let error = opened.plan(&with_draft(options())).unwrap_err();
            assert!(matches!(error, EngineError::NoDraft { .. }));
            assert!(error.to_string().contains("has no draft head"), "{error}");
        }
    }
}

#[test]
fn all_backends_draft_the_same_bits() {
    for Subject { path, expected, .. } in drafting() {
        let tokens = expected.ids("input_ids");
        for (activations, kv) in [(Activations::F32, KvType::F32), (Activations::Q8, KvType::F16)] {
            let with = |backend| {
                drafts(&path, &tokens, EngineOptions { backend, activations, kv, ..options() })
            };
            let reference = with(BackendKind::Reference);
            for backend in [BackendKind::Cpu, BackendKind::Deferred] {
                let name = path.display();
                assert!(with(backend) == reference, "{name} {backend:?} {activations:?}");
            }
        }
    }
}

/// Texts long enough for several passes.
fn texts() -> Vec<(PathBuf, Vec<u32>)> {
    let ids = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    let fixtures = drafting().into_iter();
    let fixtures = fixtures.map(|s| (s.path, s.expected.ids("input_ids").repeat(3)));
    fixtures.chain([(demo(), ids.repeat(2))]).collect()
}

/// What a knob is called, and a turn of it.
type Change<'a> = (&'a str, &'a dyn Fn(&mut EngineOptions));

#[test]
fn drafts_never_depend_on_pass_length_slots_or_threads() {
    for (path, tokens) in texts() {
        let usual = EngineOptions { activations: Activations::Q8, kv: KvType::F16, ..options() };
        let usual = drafts(&path, &tokens, usual);
        let changes: [Change<'_>; 6] = [
            ("passes of 64", &|o| o.pass_rows = Some(64)),
            ("passes of 192", &|o| o.pass_rows = Some(192)),
            ("the fewest slots", &|o| o.slots = Some(8)),
            ("20 slots", &|o| o.slots = Some(20)),
            ("one thread", &|o| o.threads = 1),
            ("four threads", &|o| o.threads = 4),
        ];
        for (what, change) in changes {
            let mut options =
                EngineOptions { activations: Activations::Q8, kv: KvType::F16, ..options() };
            change(&mut options);
            assert!(drafts(&path, &tokens, options) == usual, "{what} change {}", path.display());
        }
    }
}

#[test]
fn a_loaded_draft_changes_nothing_of_the_trunk_and_has_its_place_in_the_ledger() {
    for (path, tokens) in texts() {
        let run = |options: EngineOptions| {
            let mut engine = engine(&path, options);
            let mut sequence = Sequence::open(&mut engine.network).unwrap();
            let (mut trunk, mut guesses) = (Vec::<f32>::new(), Vec::<f32>::new());
            let run = LogitsRun { tokens: &tokens, pass_rows: 64, progress: &|_, _| true };
            let (network, sink) = (&mut engine.network, &mut |row: &[f32]| trunk.extend(row));
            if network.has_draft() {
                let drafts = &mut |row: &[f32]| guesses.extend(row);
                run.run_with_draft(network, &mut sequence, sink, drafts).unwrap();
            } else {
                run.run(network, &mut sequence, sink).unwrap();
            }
            let reserved: u64 = engine.plan.terms.iter().map(|term| term.bytes.0).sum();
            let slots = engine.plan.terms.last().unwrap().bytes.0;
            assert!(engine.network.allocated_bytes() <= reserved - slots, "{}", path.display());
            (trunk, guesses, engine)
        };
        let (alone, none, without) = run(options());
        let (beside, guesses, with) = run(with_draft(options()));
        assert!(alone == beside && none.is_empty(), "{}", path.display());
        assert_eq!(guesses.len(), alone.len() / tokens.len() * (tokens.len() - 1));
        assert!(guesses == drafts(&path, &tokens, options()).logits, "{}", path.display());
        let named = |engine: &Engine| -> Vec<String> {
            let names = engine.plan.details.iter().map(|term| term.name.clone());
            names.filter(|name| name.starts_with("draft")).collect()
        };
        assert_eq!(named(&without), Vec::<String>::new());
        assert_eq!(named(&with), ["draft head", "draft rows", "draft KV cache"]);
        let config = with.network.config();
        let experts = u64::from(config.n_experts);
        assert_eq!(with.plan.experts(), without.plan.experts() + experts);
        assert_eq!(without.plan.experts(), experts * u64::from(config.n_layers));
        assert!(without.draft_bytes().is_none() && with.draft_bytes().unwrap().0 > 0);
        let fixed = |engine: &Engine, name: &str| {
            engine.plan.terms.iter().find(|term| term.name == name).unwrap().bytes.0
        };
        for term in ["resident weights", "KV cache"] {
            assert!(fixed(&with, term) > fixed(&without, term), "{term}");
        }
    }
}

#[test]
fn guesses_ahead_leave_no_trace() {
    for (path, tokens) in texts() {
        let (plain, _) = generate(&path, &tokens[..80], &[]);
        let (chained, chains) = generate(&path, &tokens[..80], &[63, 64, 70]);
        assert!(chained == plain, "{}", path.display());
        for chain in chains {
            assert!(chain.windows(2).all(|pair| pair[0] != pair[1]), "{}", path.display());
        }
    }
}

/// Drafts of a prompt of 64 tokens and of tokens that follow one by one; at each position of `chains`, three guesses
/// more from the draft's own states, which are taken back. The logits of every chain too, row by row.
fn generate(path: &Path, tokens: &[u32], chains: &[usize]) -> (Drafted, Vec<Vec<Vec<f32>>>) {
    let mut engine = engine(path, with_draft(options()));
    let sequence = engine.network.open_sequence().unwrap();
    let mut drafted = read(&mut engine, sequence, &tokens[..64], 0);
    let mut ahead = Vec::new();
    for position in 63..tokens.len() - 1 {
        let next = &tokens[position + 1..position + 2];
        let draft = rows(sequence, position, Role::Generated, next);
        if chains.contains(&position) {
            ahead.push(chain(&mut engine, &draft));
            assert_eq!(engine.network.draft_len(sequence), position + 4);
            engine.network.cut_draft(sequence, position);
            assert_eq!(engine.network.draft_len(sequence), position);
        }
        drafted.add(&mut engine, &draft, DraftFrom::Trunk);
        let trunk = rows(sequence, position + 1, Role::Generated, next);
        engine.network.forward(&trunk, LogitRows::None, &mut |_, _| {}).unwrap();
    }
    (drafted, ahead)
}

/// Logits of a row, and of three more that each take the likeliest token and the draft's own state.
fn chain(engine: &mut Engine, first: &[Row]) -> Vec<Vec<f32>> {
    let mut steps = Drafted::default();
    steps.add(engine, first, DraftFrom::Trunk);
    let vocab = vocab(engine);
    for ahead in 1..4 {
        let guess = argmax(&steps.logits[steps.logits.len() - vocab..]).0 as u32;
        let Row { sequence, position, role, .. } = first[0];
        let row = Row { sequence, position: position + ahead, role, token: guess };
        steps.add(engine, &[row], DraftFrom::Draft);
    }
    steps.logits.chunks_exact(vocab).map(<[f32]>::to_vec).collect()
}

fn vocab(engine: &Engine) -> usize {
    engine.network.config().vocab as usize
}

#[test]
fn a_snapshot_brings_the_last_hidden_state_back() {
    for (path, tokens) in texts() {
        let (first, second) = (&tokens[..128], [&tokens[..64], &tokens[70..130]].concat());
        let fresh = drafts(&path, &second, EngineOptions { pass_rows: Some(64), ..options() });
        for backend in [BackendKind::Cpu, BackendKind::Deferred] {
            let options = EngineOptions { pass_rows: Some(64), backend, ..options() };
            let mut engine = engine(&path, with_draft(options));
            let sequence = engine.network.open_sequence().unwrap();
            read(&mut engine, sequence, &first[..64], 0);
            let snapshot = engine.network.snapshot(sequence).unwrap();
            // The first text goes on, and the draft with it.
            let next = rows(sequence, 63, Role::Prompt, &first[64..65]);
            Drafted::default().add(&mut engine, &next, DraftFrom::Trunk);
            read(&mut engine, sequence, first, 64);
            // Then the other one from the same start. Position 63 sees another next token.
            engine.network.rollback(sequence, snapshot);
            let next = rows(sequence, 63, Role::Prompt, &second[64..65]);
            let mut got = Drafted::default();
            got.add(&mut engine, &next, DraftFrom::Trunk);
            let rest = read(&mut engine, sequence, &second, 64);
            got.logits.extend(rest.logits);
            engine.network.drop_snapshot(snapshot);
            let expected = &fresh.logits[63 * vocab(&engine)..];
            assert!(got.logits == expected, "{} {backend:?}", path.display());
        }
    }
}

#[test]
fn a_failed_read_of_a_draft_is_an_error_or_harmless_at_every_read() {
    for Subject { path, expected, .. } in drafting() {
        let tokens = expected.ids("input_ids");
        let usual = drafts(&path, &tokens, options()).logits;
        for kind in [FaultKind::Error(5), FaultKind::Short(0), FaultKind::Hold(3)] {
            for_every_read(&path, &tokens, &usual, kind);
        }
    }
}

fn for_every_read(path: &Path, tokens: &[u32], usual: &[f32], kind: FaultKind) {
    let (mut read, mut errors) = (0, 0);
    loop {
        let faults = FaultPlan::nth(read, kind);
        let options = EngineOptions { slots: Some(5), faults: Some(faults.clone()), ..options() };
        let opened = OpenModel::open(path).unwrap();
        if let Ok(mut engine) = Engine::load(opened, with_draft(options), &mut |_| {}) {
            let mut sequence = Sequence::open(&mut engine.network).unwrap();
            let run = LogitsRun { tokens, pass_rows: 64, progress: &|_, _| true };
            for _ in 0..2 {
                // The attempt after the fault meets none: it shows that no slot was lost.
                let (before, mut all) = (faults.fired(), Vec::new());
                let drafts = &mut |row: &[f32]| all.extend_from_slice(row);
                let network = &mut engine.network;
                match run.run_with_draft(network, &mut sequence, &mut |_| {}, drafts) {
                    Ok(_) => assert!(all == usual, "{kind:?} at read {read}"),
                    Err(error) => {
                        errors += 1;
                        assert!(faults.fired() > before, "{kind:?} at read {read}: {error}");
                    }
                }
            }
        } else {
            errors += 1;
        }
        if faults.fired() == 0 {
            break;
        }
        // Every early read, then some: all layers are met, of the trunk and of the draft.
        read += if read < 10 { 1 } else { 83 };
    }
    assert!(read > 40, "{kind:?} was tried on {read} reads only");
    let harmless = matches!(kind, FaultKind::Hold(_));
    assert_eq!(errors == 0, harmless, "{kind:?}: {errors} errors");
}

#[test]
fn the_demo_models_draft_guesses_what_the_trunk_will_say() {
    let (mut same, mut all) = (0, 0);
    for text in ["chat", "prose", "code"] {
        let tokens = words(&npy(&format!("ids_{text}.npy")), u32::from_le_bytes);
        let mut engine = engine(&demo(), with_draft(options()));
        let mut sequence = Sequence::open(&mut engine.network).unwrap();
        let (mut trunk, mut guesses) = (Vec::new(), Vec::new());
        let run = LogitsRun { tokens: &tokens, pass_rows: 64, progress: &|_, _| true };
        run.run_with_draft(
            &mut engine.network,
            &mut sequence,
            &mut |row| trunk.push(argmax(row).0),
            &mut |row| guesses.push(argmax(row).0),
        )
        .unwrap();
        // The draft's row at t and the trunk's at t + 1 are for the same token.
        let pairs = guesses.iter().zip(&trunk[1..]);
        let agree = pairs.filter(|(guess, choice)| guess == choice).count();
        (same, all) = (same + agree, all + guesses.len());
    }
    // The model card measured 0.56 on text of its kind. A head whose inputs are wrong agrees hardly ever.
    assert!(2 * same > all - all / 5, "{same} of {all}");
}
