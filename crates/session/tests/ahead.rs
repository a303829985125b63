//! Reads ahead of need: of the hot set in idle time, and of guesses while tokens are decoded. Bytes come at other times
//! then, and that is all.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;
use std::time::Duration;

use compute::backend::{Activations, KvType};
use expert_store::{Fault, FaultKind, FaultPlan};
use model::{AheadCounters, Lookahead};
use session::{BackendKind, Engine, EngineOptions, GenerateError, OpenModel, Prompt, Sequence};
use units::ExpertKey;

use support::{demo, npy, options, subjects, words};

const KINDS: [Lookahead; 2] = [Lookahead::Tap, Lookahead::LastToken];

/// Tokens that are decoded: enough for a trial of guesses and some more.
const DECODED: usize = 40;

fn usual() -> EngineOptions {
    let options = EngineOptions { activations: Activations::Q8, kv: KvType::F16, ..options() };
    EngineOptions { context: Some(512), slots: Some(20), ..options }
}

/// Logits of a prompt's last token and after every decoded one.
fn decode(engine: &mut Engine, tokens: &[u32]) -> Result<Vec<f32>, GenerateError> {
    let mut sequence = Sequence::open(&mut engine.network)?;
    let (prompt, forced) = tokens.split_at(tokens.len() - DECODED);
    let mut all = Vec::new();
    sequence.prefill(&mut engine.network, &Prompt::new(prompt, 64), &mut |_, row| {
        all.extend_from_slice(row);
    })?;
    for token in forced {
        sequence.step(&mut engine.network, *token, &mut |row| all.extend_from_slice(row))?;
    }
    Ok(all)
}

fn load(path: &Path, options: EngineOptions) -> Engine {
    support::engine(path, options)
}

fn with(path: &Path, tokens: &[u32], options: EngineOptions) -> (Vec<f32>, Engine) {
    let mut engine = load(path, options);
    let logits = decode(&mut engine, tokens).unwrap();
    (logits, engine)
}

/// As many tokens as the tests take.
fn cut(tokens: &[u32]) -> &[u32] {
    &tokens[..tokens.len().min(64 + DECODED)]
}

#[test]
fn output_never_depends_on_lookahead() {
    for (path, tokens) in subjects() {
        let tokens = cut(&tokens);
        let (expected, engine) = with(&path, tokens, usual());
        let config = engine.network.config();
        let slots = [config.top_k + 1, 3 * config.top_k, config.n_layers * config.n_experts];
        drop(engine);
        for lookahead in KINDS {
            for backend in [BackendKind::Cpu, BackendKind::Deferred] {
                for slots in slots {
                    let options =
                        EngineOptions { lookahead, backend, slots: Some(slots), ..usual() };
                    let (got, engine) = with(&path, tokens, options);
                    let case = format!("{} {lookahead:?} {backend:?} {slots}", path.display());
                    assert!(got == expected, "{case}");
                    let counters = engine.network.lookahead_counters();
                    assert!(counters.tokens > 0 && counters.chosen > 0, "{case}: {counters:?}");
                }
            }
        }
    }
}

#[test]
fn guesses_are_counted_once_each() {
    let tokens = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    for lookahead in KINDS {
        // So many that experts come and go, and that more than one guess a layer fits beside what is used.
        let options = EngineOptions { lookahead, slots: Some(120), ..usual() };
        let (_, engine) = with(&demo(), cut(&tokens), options);
        let (guesses, config) = (engine.network.lookahead_counters(), engine.network.config());
        let guessed = u64::from((config.n_layers - 1) * config.top_k);
        assert_eq!(guesses.chosen, guesses.tokens * guessed, "{lookahead:?}");
        assert!(guesses.named <= guesses.chosen && guesses.absent_chosen <= guesses.absent);
        assert!(guesses.named > guesses.chosen / 8, "better than chance: {guesses:?}");
        if lookahead == Lookahead::LastToken {
            assert_eq!(guesses.named, guesses.repeated, "that is what it guesses");
        }
        let counters = engine.network.experts().counters();
        let AheadCounters { issued, used, late, cancelled, failed, .. } = counters.lookahead;
        assert!(used > 0 && late <= used, "{lookahead:?}: {:?}", counters.lookahead);
        assert!(used + cancelled + failed <= issued);
        assert_eq!(counters.pool.adopted, used);
        assert_eq!(counters.pool.speculative, issued);
        assert_eq!(counters.hot_set, AheadCounters::default());
    }
}

#[test]
fn a_guess_that_cannot_be_read_is_no_error() {
    let (path, tokens) = (demo(), words(&npy("ids_prose.npy"), u32::from_le_bytes));
    let (expected, _) = with(&path, &tokens, usual());
    for (lookahead, kind) in
        [(Lookahead::Tap, FaultKind::Error(5)), (Lookahead::LastToken, FaultKind::Short(0))]
    {
        let with_faults = |faults| {
            let faults = Some(faults);
            EngineOptions { lookahead, faults, slots: Some(120), ..usual() }
        };
        // The first tokens that are decoded are a trial's, with guesses.
        let prompt = FaultPlan::default();
        let mut engine = load(&path, with_faults(prompt.clone()));
        let mut sequence = Sequence::open(&mut engine.network).unwrap();
        let text = Prompt::new(&tokens[..tokens.len() - DECODED], 64);
        sequence.prefill(&mut engine.network, &text, &mut |_, _| {}).unwrap();
        let first = prompt.reads();
        let (mut harmless, mut errors) = (0, 0);
        for read in (first + 60..first + 360).step_by(40) {
            let faults = FaultPlan::nth(read, kind);
            let mut engine = load(&path, with_faults(faults.clone()));
            match decode(&mut engine, &tokens) {
                Ok(got) => {
                    assert!(got == expected, "{kind:?} at read {read}");
                    harmless += faults.fired();
                }
                Err(error) => {
                    assert_eq!(faults.fired(), 1, "{error}");
                    errors += 1;
                }
            }
            // Guesses come and go with time: the read may be of the next run.
            if faults.fired() == 1 {
                assert!(decode(&mut engine, &tokens).unwrap() == expected, "no slot was lost");
            }
        }
        // The token before is seldom right about what is not there, and soon nothing of it is read.
        let guesses = harmless > 0 || lookahead == Lookahead::LastToken;
        assert!(guesses, "{lookahead:?}: some of the reads were guesses");
        assert!(errors > 0, "{lookahead:?}: others were not");
    }
}

#[test]
fn guesses_that_come_late_change_nothing() {
    let (path, tokens) = subjects().swap_remove(2);
    let tokens = cut(&tokens);
    let (expected, _) = with(&path, tokens, usual());
    let held = (0..4000).step_by(5).map(|read| Fault { read, kind: FaultKind::Hold(2) });
    for (at, plan) in [
        FaultPlan::every(FaultKind::Delay(Duration::from_micros(300))),
        FaultPlan::new(held.collect()),
    ]
    .into_iter()
    .enumerate()
    {
        for lookahead in KINDS {
            let faults = Some(plan.clone());
            let options = EngineOptions { lookahead, faults, slots: Some(120), ..usual() };
            let (got, _) = with(&path, tokens, options);
            assert!(got == expected, "{lookahead:?}, plan {at}");
        }
        assert!(plan.fired() > 0);
    }
}

#[test]
fn what_is_planned_for_lookahead_is_no_less_than_what_is_taken() {
    for (path, _) in subjects() {
        let of = |lookahead| {
            let options = EngineOptions { lookahead, ..usual() };
            let mut engine = load(&path, options);
            (engine.network.allocated_bytes(), engine.plan)
        };
        let ((without, plain), (with, plan)) = (of(Lookahead::Off), of(Lookahead::Tap));
        let term = plan.details.iter().find(|term| term.name == "lookahead").unwrap();
        assert!(with > without && with - without <= term.bytes.0, "{}", path.display());
        assert!(plain.details.iter().all(|term| term.name != "lookahead"));
    }
}

/// Experts that a run uses, the hottest first.
fn hottest(path: &Path, tokens: &[u32]) -> Vec<ExpertKey> {
    let (_, engine) = with(path, tokens, EngineOptions { hot_set: true, ..usual() });
    let mut set = engine.empty_hot_set();
    engine.add_uses(&mut set);
    set.order()
}

#[test]
fn output_never_depends_on_the_hot_set_and_less_is_read_for_need() {
    for (path, tokens) in subjects() {
        let tokens = cut(&tokens);
        let order = hottest(&path, tokens);
        for backend in [BackendKind::Cpu, BackendKind::Deferred] {
            let options = EngineOptions { hot_set: true, slots: Some(60), backend, ..usual() };
            let (expected, cold) = with(&path, tokens, options.clone());
            let mut warm = load(&path, options);
            warm.network.preload(&order);
            warm.network.await_preload();
            let got = decode(&mut warm, tokens).unwrap();
            assert!(got == expected, "{} {backend:?}", path.display());
            let [cold, warm] = [&cold, &warm].map(|e| e.network.experts().counters());
            let AheadCounters { issued, used, late, cancelled, .. } = warm.hot_set;
            assert!(issued > 0 && used > 0, "{:?}", warm.hot_set);
            assert_eq!((late, cancelled), (0, 0), "all of them were there");
            assert!(warm.pool.misses < cold.pool.misses, "{:?} {:?}", warm.pool, cold.pool);
        }
    }
}

#[test]
fn uses_are_those_of_every_row() {
    let (path, tokens) = subjects().swap_remove(2);
    let tokens = cut(&tokens);
    let (_, engine) = with(&path, tokens, EngineOptions { hot_set: true, ..usual() });
    let config = engine.network.config();
    let uses = engine.network.experts().uses().unwrap();
    for layer in uses.chunks_exact(config.n_experts as usize) {
        let rows: u32 = layer.iter().sum();
        assert_eq!(rows as usize, tokens.len() * config.top_k as usize);
    }
    let (_, engine) = with(&path, tokens, usual());
    assert!(engine.network.experts().uses().is_none());
}

#[test]
fn a_prompt_goes_before_the_hot_set() {
    let (path, tokens) = subjects().swap_remove(2);
    let tokens = cut(&tokens);
    let (expected, _) = with(&path, tokens, usual());
    let order = hottest(&path, tokens);
    let counting = FaultPlan::default();
    let options =
        |faults| EngineOptions { hot_set: true, slots: Some(60), faults: Some(faults), ..usual() };
    drop(load(&path, options(counting.clone())));
    // Every read of the hot set waits for others or for 200 ms; the readers take few at a time.
    let slow = counting.reads()..counting.reads() + 60;
    let faults = slow.map(|read| Fault { read, kind: FaultKind::Hold(1000) }).collect();
    let mut engine = load(&path, options(FaultPlan::new(faults)));
    engine.network.preload(&order);
    assert!(decode(&mut engine, tokens).unwrap() == expected);
    let AheadCounters { issued, cancelled, .. } = engine.network.experts().counters().hot_set;
    assert!(cancelled > 0, "{cancelled} of {issued} were given up");
    // They can be asked for again, and a failed one is forgotten.
    let faults = (0..30).map(|read| Fault { read, kind: FaultKind::Error(5) });
    let faults = faults.map(|f| Fault { read: f.read + counting.reads(), ..f }).collect();
    let mut engine = load(&path, options(FaultPlan::new(faults)));
    engine.network.preload(&order);
    engine.network.await_preload();
    let AheadCounters { failed, .. } = engine.network.experts().counters().hot_set;
    assert!(failed > 0);
    assert!(decode(&mut engine, tokens).unwrap() == expected);
}

#[test]
fn nothing_is_read_ahead_into_the_smallest_pool() {
    let (path, tokens) = subjects().swap_remove(2);
    let order = hottest(&path, cut(&tokens));
    let top_k = OpenModel::open(&path).unwrap().model.config.top_k;
    let mut engine =
        load(&path, EngineOptions { hot_set: true, slots: Some(top_k + 1), ..usual() });
    engine.network.preload(&order);
    engine.network.await_preload();
    let issued = engine.network.experts().counters().hot_set.issued;
    assert!(issued <= u64::from((top_k + 1).saturating_sub(4)), "{issued}");
}

/// Logits of every position of a prompt that is read in long passes.
fn read(engine: &mut Engine, tokens: &[u32]) -> Result<Vec<f32>, GenerateError> {
    let mut sequence = Sequence::open(&mut engine.network)?;
    let mut all = Vec::new();
    let prompt = Prompt { every_row: true, ..Prompt::new(tokens, 128) };
    sequence.prefill(&mut engine.network, &prompt, &mut |_, row| all.extend_from_slice(row))?;
    Ok(all)
}

/// Slots for all experts but those of a layer or two, so that long passes sweep and experts come and go.
fn swept(engine: &Engine) -> u32 {
    let config = engine.network.config();
    (config.n_layers * config.n_experts).saturating_sub(config.n_experts + 1).max(config.top_k + 1)
}

#[test]
fn output_never_depends_on_sweeps() {
    let mut swept_models = 0;
    for (path, tokens) in subjects() {
        let once = EngineOptions { sweep: false, ..usual() };
        let (expected, few) = {
            let mut engine = load(&path, once.clone());
            (read(&mut engine, &tokens).unwrap(), swept(&engine))
        };
        let mut issued = 0;
        for backend in [BackendKind::Cpu, BackendKind::Deferred] {
            for slots in [20, few] {
                let options = EngineOptions { backend, slots: Some(slots), ..usual() };
                let mut engine = load(&path, options);
                for _ in 0..2 {
                    let got = read(&mut engine, &tokens).unwrap();
                    assert!(got == expected, "{} {backend:?} {slots}", path.display());
                }
                issued += engine.network.experts().counters().sweep.issued;
            }
        }
        swept_models += u32::from(issued > 0);
    }
    assert!(swept_models > 0, "some pools have room for whole layers");
}

#[test]
fn a_sweep_reads_what_the_next_layer_takes() {
    let tokens = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    let few = swept(&load(&demo(), usual()));
    let of = |sweep| {
        let mut engine = load(&demo(), EngineOptions { sweep, slots: Some(few), ..usual() });
        read(&mut engine, &tokens[..tokens.len().min(400)]).unwrap();
        engine.network.experts().counters()
    };
    let (with, without) = (of(true), of(false));
    assert_eq!(without.sweep, AheadCounters::default());
    let AheadCounters { issued, used, cancelled, failed, .. } = with.sweep;
    assert!(used * 10 > issued * 5, "{:?}", with.sweep);
    assert!(used + cancelled + failed <= issued);
    assert_eq!(with.pool.adopted, used);
    assert_eq!(with.pool.lookups, without.pool.lookups);
}

#[test]
fn a_swept_read_that_fails_is_no_error() {
    let tokens = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    let tokens = &tokens[..tokens.len().min(256)];
    let expected = read(&mut load(&demo(), EngineOptions { sweep: false, ..usual() }), tokens);
    let expected = expected.unwrap();
    let few = swept(&load(&demo(), usual()));
    let with_faults = |faults| EngineOptions { faults: Some(faults), slots: Some(few), ..usual() };
    let all = FaultPlan::default();
    assert!(read(&mut load(&demo(), with_faults(all.clone())), tokens).unwrap() == expected);
    let (mut harmless, mut errors) = (0, 0);
    for nth in (0..all.reads()).step_by(97) {
        let faults = FaultPlan::nth(nth, FaultKind::Error(5));
        // Before the first layer, resident weights are read; they have to be there.
        let opened = OpenModel::open(&demo()).unwrap();
        let Ok(mut engine) = Engine::load(opened, with_faults(faults.clone()), &mut |_| {}) else {
            continue;
        };
        match read(&mut engine, tokens) {
            Ok(got) => {
                assert!(got == expected, "read {nth}");
                harmless += faults.fired();
            }
            Err(_) => errors += 1,
        }
        assert!(read(&mut engine, tokens).unwrap() == expected, "no slot was lost");
    }
    assert!(harmless > 0, "some of the reads were swept");
    assert!(errors > 0, "others were not");
}
