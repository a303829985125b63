//! Guesses ahead: whatever is guessed, right or wrong, every token and every logit is that of plain decoding.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use compute::backend::{Activations, KvType, Role, Row, SequenceId};
use expert_store::{FaultKind, FaultPlan};
use model::{DraftFrom, ForwardError, LogitRows, Network};
use session::{
    BackendKind, Depth, Drafter, Engine, EngineError, EngineOptions, Finish, Forced, GenerateError,
    Limits, OpenModel, Prompt, Sampler, SamplerConfig, Sequence, Speculation, SpeculationCounters,
    SpeculationOptions, generate,
};

use support::{data, demo, npy, options, words};

/// Most guesses of a pass here.
const MOST: usize = 4;

/// One model of each family, and each draft head that is here.
fn fixtures() -> Vec<PathBuf> {
    let names = [
        "qwen3_moe-k/kq.gguf",
        "qwen3_next-k/kq.gguf",
        "qwen3_next-a/hf",
        "qwen3_5_moe-a/f32.gguf",
        "qwen4_exp-a/split-b32-00001-of-00003.gguf",
        "qwen4_exp-a/mlx-4bit-g64",
    ];
    let paths = names.map(|name| data("fixtures/models").join(name));
    let here: Vec<PathBuf> = paths.into_iter().filter(|path| path.exists()).collect();
    let complete = std::env::var_os("SAKIA_FIXTURES").is_some();
    assert_eq!(here.len(), if complete { 6 } else { 5 });
    here
}

/// The same and a model that has learned something.
fn subjects() -> Vec<PathBuf> {
    fixtures().into_iter().chain([demo()]).collect()
}

fn drafting() -> Vec<PathBuf> {
    let fixtures = fixtures().into_iter();
    fixtures.filter(|path| OpenModel::open(path).unwrap().model.draft.is_some()).collect()
}

/// As users have it, with everybody guessing who can.
fn engine_options(opened: &OpenModel) -> EngineOptions {
    let draft = opened.model.draft.is_some();
    EngineOptions {
        activations: Activations::Q8,
        kv: KvType::F16,
        logit_rows: 1,
        speculation: SpeculationOptions { lookup: true, draft, most: MOST as u32 },
        ..options()
    }
}

fn engine(path: &Path, backend: BackendKind, change: impl Fn(&mut EngineOptions)) -> Engine {
    let opened = OpenModel::open(path).unwrap();
    let mut options = EngineOptions { backend, ..engine_options(&opened) };
    change(&mut options);
    Engine::load(opened, options, &mut |_| {}).unwrap()
}

fn plain_engine(path: &Path) -> Engine {
    engine(path, BackendKind::Cpu, |options| options.speculation = SpeculationOptions::default())
}

/// Tokens for the trunk of any model, longer than a pass.
fn text(engine: &Engine, n: usize) -> Vec<u32> {
    let vocab = engine.network.config().vocab;
    let ids = words(&npy("ids_prose.npy"), u32::from_le_bytes);
    ids.iter().cycle().take(n).map(|id| id % vocab).collect()
}

fn rows(sequence: SequenceId, first: usize, role: Role, tokens: &[u32]) -> Vec<Row> {
    let row = |(i, &token)| Row { sequence, position: (first + i) as u32, role, token };
    tokens.iter().enumerate().map(row).collect()
}

/// How many guesses a pass has, and how many of them are right.
fn patterns(most: usize) -> Vec<[usize; 2]> {
    (0..=most).flat_map(|guesses| (0..=guesses).map(move |right| [guesses, right])).collect()
}

fn read_prompt(network: &mut Network, sequence: SequenceId, prompt: &[u32]) {
    for (pass, tokens) in prompt.chunks(64).enumerate() {
        let rows = rows(sequence, 64 * pass, Role::Prompt, tokens);
        network.forward(&rows, LogitRows::None, &mut |_, _| {}).unwrap();
        if network.has_draft() {
            let next = &prompt[64 * pass + 1..prompt.len().min(64 * pass + 65)];
            let mut rows = rows;
            rows.truncate(next.len());
            rows.iter_mut().zip(next).for_each(|(row, next)| row.token = *next);
            network.draft(&rows, DraftFrom::Trunk, LogitRows::None, &mut |_, _| {}).unwrap();
        }
    }
}

/// Logits of the trunk after each token of `text` from `prompt` on, and those of the draft head.
type Logits = [Vec<Vec<f32>>; 2];

/// Runs `text[prompt..]` as generated rows: in passes with guesses by the patterns in turn, or one by one without.
fn follow(engine: &mut Engine, text: &[u32], prompt: usize, patterns: &[[usize; 2]]) -> Logits {
    let network = &mut engine.network;
    let vocab = network.config().vocab;
    let sequence = network.open_sequence().unwrap();
    read_prompt(network, sequence, &text[..prompt]);
    if network.has_draft() {
        // The prompt's last row waited for the token that follows.
        let row = rows(sequence, prompt - 1, Role::Generated, &text[prompt..=prompt]);
        network.draft(&row, DraftFrom::Trunk, LogitRows::None, &mut |_, _| {}).unwrap();
    }
    let [mut trunk, mut draft] = [Vec::new(), Vec::new()];
    let (mut at, mut turn) = (prompt, 0);
    // A row needs the token that follows it for the draft.
    while at < text.len() - 1 {
        let [guesses, right] = patterns[turn % patterns.len()];
        turn += 1;
        let guesses = guesses.min(text.len() - 2 - at);
        let right = right.min(guesses);
        let mut tokens = text[at..=at + guesses].to_vec();
        for (i, wrong) in tokens.iter_mut().enumerate().skip(right + 1) {
            *wrong = (*wrong + 1 + (turn + i) as u32 % (vocab - 1)) % vocab;
        }
        let run = rows(sequence, at, Role::Generated, &tokens);
        if guesses == 0 {
            let sink = &mut |_, row: &[f32]| trunk.push(row.to_vec());
            network.forward(&run, LogitRows::All, sink).unwrap();
        } else {
            let mut all = Vec::new();
            network.verify(&run, &mut |_, row| all.push(row.to_vec())).unwrap();
            network.keep(right + 1);
            all.truncate(right + 1);
            trunk.extend(all);
        }
        if network.has_draft() {
            let next = &text[at + 1..at + right + 2];
            let rows = rows(sequence, at, Role::Generated, next);
            let sink = &mut |_, row: &[f32]| draft.push(row.to_vec());
            network.draft(&rows, DraftFrom::Trunk, LogitRows::All, sink).unwrap();
            // Guesses of its own, which leave no trace either.
            let at = (at + right + 1) as u32;
            let ahead = Row { position: at, token: turn as u32 % vocab, ..rows[right] };
            network.draft(&[ahead], DraftFrom::Draft, LogitRows::None, &mut |_, _| {}).unwrap();
        }
        at += right + 1;
    }
    [trunk, draft]
}

#[test]
fn after_every_pattern_of_guesses_the_logits_are_those_of_plain_decoding() {
    for path in subjects() {
        let mut plain = plain_engine(&path);
        let text = text(&plain, 150);
        // The draft's prompt was read by other engines only.
        let [trunk, _] = follow(&mut plain, &text, 70, &[[0, 0]]);
        let mut draft = None;
        for backend in [BackendKind::Cpu, BackendKind::Deferred] {
            let mut engine = engine(&path, backend, |_| {});
            let name = format!("{} {backend:?}", path.display());
            let alone = follow(&mut engine, &text, 70, &[[0, 0]]);
            assert!(alone[0] == trunk, "{name}");
            let guessed = follow(&mut engine, &text, 70, &patterns(MOST));
            assert!(guessed[0] == trunk, "{name}: the trunk");
            assert!(guessed[1] == alone[1], "{name}: the draft head");
            assert!(draft.get_or_insert_with(|| alone[1].clone()) == &alone[1], "{name}");
            if backend == BackendKind::Cpu {
                // Patterns alone: what one leaves behind, another might have wiped away.
                for pattern in [[1, 0], [2, 1], [4, 0], [4, 3], [4, 4]] {
                    let guessed = follow(&mut engine, &text[..100], 70, &[pattern]);
                    let rows = guessed[0].len();
                    assert!(guessed[0] == trunk[..rows] && rows == 29, "{name} {pattern:?}");
                }
            }
        }
    }
}

/// Knows what will be said, and guesses right and wrong by pattern.
#[derive(Debug)]
struct Oracle {
    truth: Vec<u32>,
    patterns: Vec<[usize; 2]>,
    turn: usize,
}

impl Oracle {
    fn new(truth: &[u32], patterns: Vec<[usize; 2]>) -> Self {
        Self { truth: truth.to_vec(), patterns, turn: 0 }
    }

    fn alone(self, most: usize) -> Speculation {
        Speculation::of(vec![Box::new(self)], most, Depth::Most, 256)
    }
}

impl Drafter for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn begin(&mut self, read: usize) {
        assert!(read <= self.truth.len());
    }

    fn propose(
        &mut self,
        network: &mut Network,
        sequence: &Sequence,
        text: &[u32],
        most: usize,
        guesses: &mut Vec<u32>,
    ) -> Result<(), ForwardError> {
        assert!(self.truth.starts_with(text), "only what was said is taken as said");
        assert_eq!(sequence.tokens(), &text[..text.len() - 1]);
        let vocab = network.config().vocab;
        let [wanted, right] = self.patterns[self.turn % self.patterns.len()];
        self.turn += 1;
        for place in 0..wanted.min(most) {
            let truth = self.truth.get(text.len() + place).copied();
            let wrong = u32::from(place >= right);
            guesses.push((truth.unwrap_or(0) + wrong) % vocab);
        }
        Ok(())
    }
}

/// What came of a prompt.
#[derive(Debug, PartialEq)]
struct Said {
    tokens: Vec<u32>,
    finish: Finish,
    /// Tokens that the sequence holds.
    held: Vec<u32>,
    decoded: u64,
    counted: u64,
    /// Logits after one more token, where there is room for one.
    after: Vec<f32>,
}

/// What ends an answer.
#[derive(Debug, Clone, Copy)]
struct Ends<'a> {
    most: usize,
    end: &'a [u32],
    /// The caller stops at so many.
    stop: usize,
}

const FREELY: Ends<'_> = Ends { most: 40, end: &[], stop: usize::MAX };

fn say(
    engine: &mut Engine,
    sequence: &mut Sequence,
    prompt: &[u32],
    config: &SamplerConfig,
    ends: Ends<'_>,
) -> (Said, SpeculationCounters) {
    try_say(engine, sequence, prompt, config, ends).unwrap()
}

fn try_say(
    engine: &mut Engine,
    sequence: &mut Sequence,
    prompt: &[u32],
    config: &SamplerConfig,
    ends: Ends<'_>,
) -> Result<(Said, SpeculationCounters), GenerateError> {
    let network = &mut engine.network;
    let mut sampler = Sampler::new(config.clone()).unwrap();
    let limits = Limits { max_tokens: ends.most, end_tokens: ends.end };
    let mut tokens = Vec::new();
    let mut on_token = |token| {
        tokens.push(token);
        if tokens.len() == ends.stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let prompt = Prompt::new(prompt, 64);
    let said = generate(network, sequence, &prompt, &mut sampler, &limits, &mut on_token)?;
    let held = sequence.tokens().to_vec();
    let mut after = Vec::new();
    if held.len() < network.options().context_tokens {
        sequence.step(network, 1, &mut |logits| after.extend_from_slice(logits))?;
    }
    let (finish, decoded, counted) = (said.finish, said.decode.tokens, said.tokens);
    Ok((Said { tokens, finish, held, decoded, counted, after }, said.speculation))
}

fn samplers() -> [SamplerConfig; 3] {
    let greedy = SamplerConfig { temperature: 0.0, ..SamplerConfig::default() };
    let drawn = SamplerConfig { temperature: 0.8, seed: 7, ..SamplerConfig::default() };
    let penalties = SamplerConfig {
        repeat_penalty: 1.2,
        frequency_penalty: 0.3,
        top_k: 0,
        min_p: 0.01,
        ..drawn.clone()
    };
    [greedy, drawn, penalties]
}

/// Without guesses, in a new sequence.
fn plain(engine: &mut Engine, prompt: &[u32], config: &SamplerConfig, ends: Ends<'_>) -> Said {
    let mut sequence = Sequence::open(&mut engine.network).unwrap();
    say(engine, &mut sequence, prompt, config, ends).0
}

/// The prompt and what was said.
fn truth(prompt: &[u32], said: &Said) -> Vec<u32> {
    [prompt, &said.tokens].concat()
}

#[test]
fn right_and_wrong_guesses_give_the_same_answer_under_every_sampler() {
    for path in fixtures() {
        let mut alone = plain_engine(&path);
        let prompt = text(&alone, 70);
        for backend in [BackendKind::Cpu, BackendKind::Deferred] {
            let mut engine = engine(&path, backend, |_| {});
            for config in samplers() {
                let expected = plain(&mut alone, &prompt, &config, FREELY);
                let truth = truth(&prompt, &expected);
                for depth in 1..=MOST {
                    let oracle = Oracle::new(&truth, patterns(depth));
                    let sequence = Sequence::open(&mut engine.network).unwrap();
                    let mut sequence = sequence.with_speculation(oracle.alone(depth));
                    let (said, counters) =
                        say(&mut engine, &mut sequence, &prompt, &config, FREELY);
                    assert!(said == expected, "{} {backend:?} {depth}", path.display());
                    assert!(counters.accepted > 0 && counters.drafted > counters.accepted);
                }
            }
        }
    }
}

#[test]
fn lookup_and_draft_head_give_the_same_answer_at_every_depth() {
    for path in fixtures() {
        let mut alone = plain_engine(&path);
        let prompt = text(&alone, 70);
        for (backend, depths) in [(BackendKind::Cpu, 1..=4), (BackendKind::Deferred, 3..=3)] {
            let mut engine = engine(&path, backend, |_| {});
            let SpeculationOptions { draft, .. } = engine.options.speculation;
            for config in samplers() {
                let expected = plain(&mut alone, &prompt, &config, FREELY);
                for (lookup, draft) in [(true, false), (false, draft), (true, draft)] {
                    for most in depths.clone() {
                        let options = SpeculationOptions { lookup, draft, most };
                        let guesses = Speculation::new(options, 256).with_depth(Depth::Most);
                        let sequence = Sequence::open(&mut engine.network).unwrap();
                        let mut sequence = sequence.with_speculation(guesses);
                        let (said, counters) =
                            say(&mut engine, &mut sequence, &prompt, &config, FREELY);
                        let name = path.display();
                        assert!(said == expected, "{name} {backend:?} {options:?}");
                        if draft {
                            assert!(counters.drafted >= u64::from(most), "{name} {counters:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn an_answer_ends_where_it_would_without_guesses() {
    let [greedy, ..] = samplers();
    for path in fixtures() {
        let mut alone = plain_engine(&path);
        let prompt = text(&alone, 70);
        let whole = plain(&mut alone, &prompt, &greedy, FREELY);
        let truth = truth(&prompt, &whole);
        let mut engine = engine(&path, BackendKind::Cpu, |_| {});
        for n in 1..8 {
            let end = [whole.tokens[n]];
            let by_length = Ends { most: n, ..FREELY };
            let by_end = Ends { end: &end, ..FREELY };
            let by_caller = Ends { stop: n, ..FREELY };
            for ends in [by_length, by_end, by_caller] {
                let expected = plain(&mut alone, &prompt, &greedy, ends);
                for right in [MOST, MOST - 1] {
                    let oracle = Oracle::new(&truth, vec![[MOST, right]]);
                    let sequence = Sequence::open(&mut engine.network).unwrap();
                    let mut sequence = sequence.with_speculation(oracle.alone(MOST));
                    let (said, _) = say(&mut engine, &mut sequence, &prompt, &greedy, ends);
                    assert!(said == expected, "{} {ends:?} {right}", path.display());
                }
            }
        }
    }
}

#[test]
fn guesses_end_with_the_context() {
    let [greedy, ..] = samplers();
    for path in fixtures() {
        let mut alone = plain_engine(&path);
        let prompt = text(&alone, 70);
        let whole = plain(&mut alone, &prompt, &greedy, FREELY);
        for context in [70, 71, 72, 74, 76, 79] {
            let shorten = |options: &mut EngineOptions| options.context = Some(context);
            let mut short = engine(&path, BackendKind::Cpu, |options| {
                shorten(options);
                options.speculation = SpeculationOptions::default();
            });
            let mut sequence = Sequence::open(&mut short.network).unwrap();
            let expected = say(&mut short, &mut sequence, &prompt, &greedy, FREELY).0;
            assert_eq!(expected.finish, Finish::Context);
            assert_eq!(expected.held.len(), context as usize);
            let mut engine = engine(&path, BackendKind::Cpu, shorten);
            let oracle = Oracle::new(&truth(&prompt, &whole), vec![[MOST, MOST]]).alone(MOST);
            let own = Speculation::new(engine.options.speculation, context as usize);
            for guesses in [oracle, own.with_depth(Depth::Most)] {
                let sequence = Sequence::open(&mut engine.network).unwrap();
                let mut sequence = sequence.with_speculation(guesses);
                let (said, _) = say(&mut engine, &mut sequence, &prompt, &greedy, FREELY);
                assert!(said == expected, "{} {context}", path.display());
            }
        }
    }
}

#[test]
fn later_turns_with_guesses_are_those_without() {
    let [greedy, ..] = samplers();
    for path in subjects() {
        let long = text(&plain_engine(&path), 200);
        let turns = |engine: &mut Engine, sequence: &mut Sequence| -> Vec<Said> {
            let other: Vec<u32> = [&long[..100], &long[20..80]].concat();
            let prompts = [&long[..90], &long[..150], &other, &long[..70]];
            prompts.map(|prompt| say(engine, sequence, prompt, &greedy, FREELY).0).into()
        };
        let mut alone = plain_engine(&path);
        let mut sequence = Sequence::open(&mut alone.network).unwrap();
        let expected = turns(&mut alone, &mut sequence);
        let mut engine = engine(&path, BackendKind::Cpu, |_| {});
        let guesses = Speculation::new(engine.options.speculation, 256).with_depth(Depth::Most);
        let sequence = Sequence::open(&mut engine.network).unwrap();
        let mut sequence = sequence.with_speculation(guesses);
        assert!(turns(&mut engine, &mut sequence) == expected, "{}", path.display());
    }
}

#[test]
fn forced_tokens_are_verified_too() {
    for path in subjects() {
        let run = |engine: &mut Engine| {
            let text = text(engine, 160);
            let mut sequence = engine.open_sequence().unwrap();
            let run = Forced { prompt: &text[..70], forced: &text[70..], pass_rows: 64 };
            run.run(&mut engine.network, &mut sequence).unwrap()
        };
        let alone = run(&mut plain_engine(&path));
        let guessed = run(&mut engine(&path, BackendKind::Cpu, |_| {}));
        assert!(guessed.likeliest == alone.likeliest, "{}", path.display());
        assert_eq!(alone.speculation, SpeculationCounters::default());
        let SpeculationCounters { accepted, verify_passes, plain_passes, .. } = guessed.speculation;
        assert_eq!(accepted + verify_passes + plain_passes, 90);
        assert_eq!((guessed.decode.tokens, guessed.token_us.len()), (89, 90));
    }
}

#[test]
fn rows_of_a_pass_share_what_is_read() {
    let path = demo();
    let mut engine = engine(&path, BackendKind::Cpu, |_| {});
    let text = text(&engine, 80);
    let lookups = |engine: &Engine| engine.network.experts().counters().pool.lookups;
    let before = lookups(&engine);
    follow(&mut engine, &text, 70, &[[0, 0]]);
    let alone = lookups(&engine) - before;
    follow(&mut engine, &text, 70, &[[MOST, MOST]]);
    let shared = lookups(&engine) - before - alone;
    assert!(shared < alone, "{shared} look-ups with guesses that come true, {alone} without");
}

#[test]
fn all_that_guesses_need_is_in_the_plan() {
    for path in subjects() {
        for change in [(true, false), (true, true)] {
            if change.1 && OpenModel::open(&path).unwrap().model.draft.is_none() {
                continue;
            }
            let options = SpeculationOptions { lookup: change.0, draft: change.1, most: 15 };
            let mut engine = engine(&path, BackendKind::Cpu, |engine| engine.speculation = options);
            let mut sequence = engine.open_sequence().unwrap();
            let prompt = text(&engine, 70);
            let [greedy, ..] = samplers();
            say(&mut engine, &mut sequence, &prompt, &greedy, FREELY);
            let reserved: u64 = engine.plan.terms.iter().map(|term| term.bytes.0).sum();
            let slots = engine.plan.terms.last().unwrap().bytes.0;
            let allocated = engine.network.allocated_bytes();
            assert!(allocated <= reserved - slots, "{} {allocated}", path.display());
            let named = |name: &str| {
                let mut terms = engine.plan.details.iter().filter(|term| term.name == name);
                terms.next().map_or(0, |term| term.bytes.0)
            };
            let config = engine.network.config();
            let recurrent = model::recurrent_bytes(config);
            assert_eq!(named("state before guesses"), recurrent);
            assert_eq!(named("rows under verification") > 0, recurrent > 0);
            assert_eq!(named("logits"), 16 * 4 * u64::from(config.vocab));
            assert!(named("text for guesses") > 0);
        }
    }
}

#[test]
fn senseless_numbers_of_guesses_are_refused() {
    let opened = OpenModel::open(&demo()).unwrap();
    for most in [0, 16, u32::MAX] {
        let speculation = SpeculationOptions { lookup: true, draft: false, most };
        let error = opened.plan(&EngineOptions { speculation, ..options() }).unwrap_err();
        assert!(matches!(error, EngineError::Option(_)) && error.to_string().contains("1 to 15"));
    }
}

#[test]
fn a_failed_read_under_verification_is_an_error_or_harmless() {
    let [greedy, ..] = samplers();
    for path in drafting() {
        let mut alone = plain_engine(&path);
        let prompt = text(&alone, 70);
        let ends = Ends { most: 12, ..FREELY };
        let expected = plain(&mut alone, &prompt, &greedy, ends);
        let (mut read, mut errors) = (0, 0);
        loop {
            let faults = FaultPlan::nth(read, FaultKind::Error(5));
            let opened = OpenModel::open(&path).unwrap();
            let options = EngineOptions {
                slots: Some(12),
                faults: Some(faults.clone()),
                ..engine_options(&opened)
            };
            if let Ok(mut engine) = Engine::load(opened, options, &mut |_| {}) {
                let guesses = Speculation::new(engine.options.speculation, 256);
                let sequence = Sequence::open(&mut engine.network).unwrap();
                let mut sequence = sequence.with_speculation(guesses.with_depth(Depth::Most));
                for _ in 0..2 {
                    // The attempt after the fault meets none: nothing was lost, nothing is left.
                    let before = faults.fired();
                    match try_say(&mut engine, &mut sequence, &prompt, &greedy, ends) {
                        Ok((said, _)) => assert!(said == expected, "{} {read}", path.display()),
                        Err(error) => {
                            errors += 1;
                            assert!(faults.fired() > before, "read {read}: {error}");
                        }
                    }
                }
            }
            if faults.fired() == 0 {
                break;
            }
            read += 97;
        }
        assert!(errors > 3, "{}: {errors} errors in {read} reads", path.display());
    }
}

#[test]
fn the_demo_models_draft_head_is_right_about_every_second_time() {
    let path = demo();
    let mut engine = engine(&path, BackendKind::Cpu, |_| {});
    let options = SpeculationOptions { lookup: false, draft: true, most: 1 };
    let guesses = Speculation::new(options, 256).with_depth(Depth::Most);
    let sequence = Sequence::open(&mut engine.network).unwrap();
    let mut sequence = sequence.with_speculation(guesses);
    let prompt = words(&npy("ids_chat.npy"), u32::from_le_bytes);
    let [greedy, ..] = samplers();
    let ends = Ends { most: 120, ..FREELY };
    let (_, counters) = say(&mut engine, &mut sequence, &prompt, &greedy, ends);
    // The model card measured 0.56 on text of all kinds, and this is the easiest. A head that reads the wrong rows is
    // right hardly ever.
    assert!(2 * counters.accepted > counters.drafted, "{counters:?}");
    assert!(counters.plain_passes <= 1 && counters.verify_passes > 40, "{counters:?}");
}
