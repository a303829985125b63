//! Corrections of lookahead: fitted to what routers chose, used beside the tap, and without any effect on what is
//! computed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use compute::backend::{Activations, KvType, Role, Row};
use expert_store::SimulatedDisk;
use model::{Correction, LayerCorrection, LogitRows, Lookahead, LookaheadCounters, RouteLog};
use session::{BackendKind, Engine, EngineOptions, FitPlan, OpenModel, Prompt, Sequence, fit};

use support::{demo, npy, options, subjects, words};

/// Tokens that are decoded.
const DECODED: usize = 24;

fn usual() -> EngineOptions {
    let options = EngineOptions { activations: Activations::Q8, kv: KvType::F16, ..options() };
    EngineOptions { context: Some(512), slots: Some(60), ..options }
}

/// Logits of a prompt's last token and after every decoded one.
fn decode(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let mut sequence = Sequence::open(&mut engine.network).unwrap();
    let (prompt, forced) = tokens.split_at(tokens.len() - DECODED);
    let mut all = Vec::new();
    let sink = &mut |_, row: &[f32]| all.extend_from_slice(row);
    sequence.prefill(&mut engine.network, &Prompt::new(prompt, 64), sink).unwrap();
    for token in forced {
        let sink = &mut |row: &[f32]| all.extend_from_slice(row);
        sequence.step(&mut engine.network, *token, sink).unwrap();
    }
    all
}

fn run(path: &Path, tokens: &[u32], options: EngineOptions) -> (Vec<f32>, LookaheadCounters) {
    let mut engine = support::engine(path, options);
    let logits = decode(&mut engine, tokens);
    (logits, engine.network.lookahead_counters())
}

/// A correction of some rank for every layer but some, with matrices of small numbers and this bias.
fn correction(path: &Path, rank: usize, bias: impl Fn(usize) -> f32) -> Arc<Correction> {
    let config = OpenModel::open(path).unwrap().model.config;
    let (hidden, n_experts) = (config.hidden as usize, config.n_experts as usize);
    let [down, up] = LayerCorrection::matrix_bytes(rank, hidden, n_experts);
    // Halves between 2^-7 and 2^-3, of both signs.
    let halves = |len: usize, salt: usize| -> Vec<u8> {
        let halves = (0..len / 2).map(|i| {
            let mixed = (i + salt).wrapping_mul(2_654_435_761) >> 7;
            (0x2000 + (mixed & 0x0fff) as u16) | ((mixed >> 20) as u16 & 1) << 15
        });
        halves.flat_map(u16::to_le_bytes).collect()
    };
    let layer = |layer: usize| {
        (layer > 0 && layer % 3 != 2).then(|| LayerCorrection {
            rank: rank * (1 + layer % 2),
            down: halves(down * (1 + layer % 2), layer),
            up: halves(up * (1 + layer % 2), 7 * layer),
            bias: (0..n_experts).map(&bias).collect(),
        })
    };
    Arc::new(Correction { layers: (0..config.n_layers as usize).map(layer).collect() })
}

#[test]
fn output_never_depends_on_a_correction() {
    for (path, tokens) in subjects() {
        let tokens = &tokens[..tokens.len().min(64 + DECODED)];
        for backend in [BackendKind::Cpu, BackendKind::Reference, BackendKind::Deferred] {
            let slow = path == demo() && backend == BackendKind::Reference;
            let tokens = if slow { &tokens[tokens.len() - DECODED - 4..] } else { tokens };
            let with = |lookahead, correction| {
                run(&path, tokens, EngineOptions { backend, lookahead, correction, ..usual() })
            };
            let (expected, _) = with(Lookahead::Off, None);
            let (plain, tap) = with(Lookahead::Tap, None);
            let wild = correction(&path, 4, |_| 0.0);
            let (corrected, other) = with(Lookahead::Tap, Some(wild));
            let case = format!("{} {backend:?}", path.display());
            assert!(plain == expected && corrected == expected, "{case}");
            // Of a few experts two guesses may name as many by chance.
            let same = path == demo() && tap.named == other.named;
            assert!(!same, "{case}: another guess, {tap:?} {other:?}");
            assert!(tap.chosen > 0 && other.chosen > 0, "{case}");
        }
    }
}

#[test]
fn a_bias_decides_which_experts_are_guessed() {
    let tokens = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    let mut correction = correction(&demo(), 1, |expert| if expert < 6 { 1e6 } else { 0.0 });
    let layers = &mut Arc::make_mut(&mut correction).layers;
    let any = layers[1].clone();
    layers[1..].fill(any);
    let correction = Some(correction);
    let options = EngineOptions { lookahead: Lookahead::Tap, correction, ..usual() };
    let mut engine = support::engine(&demo(), options);
    assert!(engine.network.corrects_lookahead());
    engine.network.routes = Some(RouteLog::new(8, 6));
    decode(&mut engine, &tokens);
    let log = engine.network.routes.take().unwrap();
    let counters = engine.network.lookahead_counters();
    // The first tokens that are decoded are a trial's, with guesses; then come as many and more without.
    let guessed = counters.tokens as usize;
    assert!((1..=DECODED / 2).contains(&guessed), "{guessed}");
    let [n, n_layers, top_k] = log.shape();
    let hits = |token: usize, layer: usize| {
        let chosen = &log.experts()[(token * n_layers + layer) * top_k..][..top_k];
        chosen.iter().filter(|expert| **expert < 6).count() as u64
    };
    let tokens = n - DECODED..n - DECODED + guessed;
    let named: u64 = tokens
        .flat_map(|token| (1..8).map(move |layer| (token, layer)))
        .map(|(token, layer)| hits(token, layer))
        .sum();
    assert_eq!(counters.named, named);
    assert!(named > 0);
}

#[test]
fn what_is_planned_for_a_correction_is_no_less_than_what_is_taken() {
    for (path, _) in subjects() {
        let of = |correction: Option<Arc<Correction>>| {
            let options = EngineOptions { lookahead: Lookahead::Tap, correction, ..usual() };
            let mut engine = support::engine(&path, options);
            let term = engine.plan.details.iter().find(|term| term.name == "lookahead");
            let planned = term.unwrap().bytes.0;
            (engine.network.allocated_bytes(), planned)
        };
        let (plain, less) = of(None);
        let (taken, planned) = of(Some(correction(&path, 16, |_| 0.5)));
        assert!(taken > plain && taken - plain <= planned - less, "{}", path.display());
    }
}

#[test]
fn what_is_recorded_is_what_routers_chose_from() {
    for (path, tokens) in subjects() {
        let options = EngineOptions { fit_bytes: Some(units::Bytes::mib(1)), ..usual() };
        let mut engine = support::engine(&path, options);
        let config = engine.network.config().clone();
        let (n_layers, top_k) = (config.n_layers as usize, config.top_k as usize);
        engine.network.routes = Some(RouteLog::new(n_layers, top_k));
        let sequence = engine.network.open_sequence().unwrap();
        let row = |(position, token): (usize, &u32)| Row {
            sequence,
            position: position as u32,
            role: Role::Prompt,
            token: *token,
        };
        let rows: Vec<Row> = tokens[..64].iter().enumerate().map(row).collect();
        let mut seen = Vec::new();
        let sink = &mut |tapped: model::Tapped<'_>| {
            let rows = tapped.actual.chunks_exact(config.n_experts as usize);
            let largest = rows.map(|logits| support::argmax(logits).0 as i32).collect::<Vec<_>>();
            assert_eq!(tapped.x.len(), 64 * config.hidden as usize);
            assert_ne!(tapped.guessed, tapped.actual);
            seen.push((tapped.layer.get(), largest));
        };
        engine.network.forward_tapped(&rows, 0..config.n_layers, sink).unwrap();
        let log = engine.network.routes.take().unwrap();
        assert_eq!(
            seen.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(),
            (1..n_layers).collect::<Vec<_>>()
        );
        for (layer, largest) in seen {
            let first = |row: usize| log.experts()[(row * n_layers + layer) * top_k];
            let chosen: Vec<i32> = (0..64).map(first).collect();
            assert_eq!(chosen, largest, "{} layer {layer}", path.display());
        }
        // A pass that does not record computes the same.
        let mut plain = Vec::new();
        engine.network.reset(sequence);
        let sink = &mut |_, logits: &[f32]| plain.extend_from_slice(logits);
        engine.network.forward(&rows, LogitRows::Last, sink).unwrap();
        assert!(plain.iter().all(|logit| logit.is_finite()));
    }
}

#[test]
fn a_correction_that_was_fitted_names_more_and_in_groups_of_layers_the_same() {
    let text = words(&npy("ids_prose.npy"), u32::from_le_bytes).repeat(4);
    let fit_under = |budget: units::Bytes| {
        let config = OpenModel::open(&demo()).unwrap().model.config;
        let plan =
            FitPlan::new(&config, vec![text.clone()], vec![text[..80].to_vec()], budget).unwrap();
        let options = EngineOptions {
            fit_bytes: Some(plan.bytes()),
            context: Some(plan.context(&config)),
            ..usual()
        };
        let mut engine = support::engine(&demo(), options);
        let mut run = 0;
        let fitted = fit::fit(&mut engine, &plan, &mut |tokens| run += tokens).unwrap();
        assert_eq!(run, plan.work());
        (fitted, plan.runs())
    };
    let ((correction, report), runs) = fit_under(units::Bytes::gib(1));
    let ((in_groups, of_groups), more_runs) = fit_under(units::Bytes::mib(32));
    assert!(runs == 1 && more_runs > 1, "{more_runs}");
    assert!(correction == in_groups && report.layers == of_groups.layers);
    assert!(report.tap.recall > 0.5 && report.last_token > 0.1, "{report:?}");
    // It is judged by text that it was fitted to: the question is whether the sums and the solution are right.
    assert!(report.fitted.recall > report.tap.recall + 0.05, "{report:?}");
    assert!(report.fitted.recall_of_twice > report.fitted.recall);

    let tokens = &text[..86];
    let with = |correction| {
        let options = EngineOptions { lookahead: Lookahead::Tap, correction, ..usual() };
        run(&demo(), tokens, options)
    };
    let (expected, tap) = with(None);
    let (got, fitted) = with(Some(Arc::new(correction)));
    assert!(got == expected);
    let share = |c: LookaheadCounters| c.named as f64 / c.chosen as f64;
    assert!(share(fitted) > share(tap) + 0.05, "{tap:?} {fitted:?}");
}

#[test]
fn output_never_depends_on_a_simulated_disk_and_every_read_takes_its_time() {
    let tokens = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    let (expected, _) = run(&demo(), &tokens, usual());
    let latency = Duration::from_micros(200);
    let simulate = Some(SimulatedDisk { latency, bytes_per_second: None });
    let mut engine = support::engine(&demo(), EngineOptions { simulate, ..usual() });
    assert!(decode(&mut engine, &tokens) == expected);
    let counters = engine.network.experts().store().counters();
    let reads = counters.demand.reads + counters.promoted.reads + counters.speculative.reads;
    assert!(reads > 0 && counters.busy_us >= reads * 200, "{counters:?}");
}
