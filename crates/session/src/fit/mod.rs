//! Fits corrections of lookahead: what the next layer's router will say, beyond what it says of the state at hand.
//!
//! A text is read as a prompt. At every tap, what it saw and what the router then made of it are added to sums, see
//! `normal.rs`; a part of the text is kept apart to choose how strong and how fine a correction is, and another to say
//! how good it is. The sums of a layer take some tens of MB, so layers are fitted in groups that fit in a share of the
//! budget, and the text is read once for each group.

mod layer;
mod normal;
mod quality;

use std::ops::Range;

use checkpoint::ModelConfig;
use compute::backend::{Role, Row};
use model::{Correction, ForwardError};
use serde::Serialize;
use units::Bytes;

use crate::engine::Engine;
use layer::{LayerFit, Shape};
pub use quality::Quality;

/// Positions that are read from nothing: longer texts are cut.
const WINDOW: usize = 2048;
/// Most tokens that choose a correction, and as many that judge it.
const MOST_HELD: usize = 1024;
/// One token in so many of a text chooses, and one judges.
const HELD_SHARE: usize = 10;
/// Share of the budget that sums may take: a part in so many.
const BUDGET_SHARE: u64 = 4;
/// Fewest tokens to fit to.
const LEAST_TOKENS: usize = 64;

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The map is fitted to it.
    Fit,
    /// It decides between maps.
    Choose,
    /// It shows how good the one that was chosen is.
    Judge,
}

/// Why nothing can be fitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// The texts are too short.
    #[error(
        "the text has {found} tokens to fit to, and at least {LEAST_TOKENS} are needed; thousands are better"
    )]
    TooShort {
        /// Tokens.
        found: usize,
    },
    /// There is nothing to judge by.
    #[error("the held-out text has {found} tokens, and at least 2 are needed")]
    NothingHeld {
        /// Tokens.
        found: usize,
    },
    /// One layer: nothing is guessed.
    #[error("the model has one layer: there is no next one to guess")]
    OneLayer,
}

/// A text and what its tokens are for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Text {
    tokens: Vec<u32>,
    /// Where those end that are fitted to, and those that choose; the others judge.
    ends: [usize; 2],
}

impl Text {
    fn part(&self, at: usize) -> Part {
        let [fit, choose] = self.ends;
        match at {
            _ if at < fit => Part::Fit,
            _ if at < choose => Part::Choose,
            _ => Part::Judge,
        }
    }
}

/// What will be read, and in what memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FitPlan {
    texts: Vec<Text>,
    shape: Shape,
    n_layers: u32,
    /// Layers whose sums are held at a time.
    layers_at_once: u32,
    /// Tokens of each [`Part`].
    tokens: [usize; 3],
}

impl FitPlan {
    /// Tokens of `texts` to fit to, of which the last are kept apart; those of `held_out` judge, where there are any.
    ///
    /// # Errors
    /// [`FitError`].
    pub fn new(
        config: &ModelConfig,
        texts: Vec<Vec<u32>>,
        held_out: Vec<Vec<u32>>,
        budget: Bytes,
    ) -> Result<Self, FitError> {
        if config.n_layers < 2 {
            return Err(FitError::OneLayer);
        }
        let total: usize = texts.iter().map(Vec::len).sum();
        let held = |len: usize| (len / HELD_SHARE).min(MOST_HELD * len / total.max(1));
        let own = held_out.is_empty();
        let text = |tokens: Vec<u32>| {
            let (len, held) = (tokens.len(), held(tokens.len()));
            let judged = if own { held } else { 0 };
            Text { tokens, ends: [len - held - judged, len - judged] }
        };
        let mut texts: Vec<Text> = texts.into_iter().map(text).collect();
        let mut room = MOST_HELD;
        for mut tokens in held_out {
            tokens.truncate(room);
            room -= tokens.len();
            texts.push(Text { tokens, ends: [0, 0] });
        }
        texts.retain(|text| !text.tokens.is_empty());
        let count = |of: fn(&Text) -> usize| texts.iter().map(of).sum::<usize>();
        let tokens = [
            count(|text| text.ends[0]),
            count(|text| text.ends[1] - text.ends[0]),
            count(|text| text.tokens.len() - text.ends[1]),
        ];
        if tokens[0] < LEAST_TOKENS {
            return Err(FitError::TooShort { found: tokens[0] });
        }
        if tokens[2] < 2 {
            return Err(FitError::NothingHeld { found: tokens[2] });
        }
        let shape = Shape::of(config);
        let mut plan = Self { texts, shape, n_layers: config.n_layers, layers_at_once: 1, tokens };
        let share = budget.0 / BUDGET_SHARE;
        let most = share.saturating_sub(plan.work_bytes()) / plan.layer_bytes();
        plan.layers_at_once = most.clamp(1, u64::from(config.n_layers - 1)) as u32;
        Ok(plan)
    }

    fn layer_bytes(&self) -> u64 {
        self.shape.layer_bytes(self.tokens[1] + self.tokens[2])
    }

    /// Memory apart from the sums: of one layer that is solved, and of what comes of all.
    fn work_bytes(&self) -> u64 {
        let held = self.tokens[1].max(self.tokens[2]);
        self.shape.work_bytes(held) + u64::from(self.n_layers) * self.shape.result_bytes()
    }

    /// Memory that fitting takes besides what the model takes.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.work_bytes() + u64::from(self.layers_at_once) * self.layer_bytes())
    }

    /// Positions that it needs.
    pub fn context(&self, config: &ModelConfig) -> u32 {
        let longest = self.texts.iter().map(|text| text.tokens.len()).max().unwrap_or(0);
        (longest.min(WINDOW) as u32).min(config.context_length)
    }

    /// Layers whose sums are held at a time.
    pub const fn layers_at_once(&self) -> u32 {
        self.layers_at_once
    }

    /// How often the text is read.
    pub const fn runs(&self) -> u32 {
        (self.n_layers - 1).div_ceil(self.layers_at_once)
    }

    /// Tokens that are fitted to, that choose, that judge.
    pub const fn tokens(&self) -> [usize; 3] {
        self.tokens
    }

    /// Tokens that are run in all.
    pub fn work(&self) -> u64 {
        u64::from(self.runs()) * self.tokens.iter().sum::<usize>() as u64
    }
}

/// A layer's correction and what it is good for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LayerReport {
    /// The layer whose experts are guessed.
    pub layer: u32,
    /// Rank of its correction; 0 if none has helped.
    pub rank: usize,
    /// The penalty that it was fitted with, as a part of the mean square of what it sees; 0 if none has helped.
    pub ridge: f64,
    /// The tap alone.
    pub tap: Quality,
    /// The tap with its correction.
    pub fitted: Quality,
    /// Recall of naming what the token before chose.
    pub last_token: f64,
}

/// What was fitted, and how good it is on text that was kept apart.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FitReport {
    /// Tokens that were fitted to.
    pub fit_tokens: usize,
    /// Tokens that chose among corrections.
    pub choose_tokens: usize,
    /// Tokens behind the shares below.
    pub held_out_tokens: usize,
    /// How often the text was read.
    pub runs: u32,
    /// Bytes of the corrections in memory and in their file, about.
    pub correction_bytes: u64,
    /// All layers together: the tap alone.
    pub tap: Quality,
    /// All layers together: with corrections.
    pub fitted: Quality,
    /// All layers together: recall of the token before.
    pub last_token: f64,
    /// Layer by layer, from the second on.
    pub layers: Vec<LayerReport>,
}

/// Fits what [`FitPlan`] says, with an engine that was loaded for it; see [`EngineOptions::fit_bytes`]. `progress` gets
/// tokens as they are run.
///
/// [`EngineOptions::fit_bytes`]: crate::EngineOptions::fit_bytes
///
/// # Errors
/// See [`ForwardError`].
///
/// # Panics
/// If the engine was loaded for something else.
pub fn fit(
    engine: &mut Engine,
    plan: &FitPlan,
    progress: &mut dyn FnMut(u64),
) -> Result<(Correction, FitReport), ForwardError> {
    let sequence = engine.network.open_sequence()?;
    let mut corrections = vec![None];
    let (mut reports, mut totals) = (Vec::new(), layer::Totals::default());
    let [_, choose, judge] = plan.tokens;
    let mut first = 1;
    while first < plan.n_layers {
        let layers = first..plan.n_layers.min(first + plan.layers_at_once);
        let mut fits: Vec<LayerFit> =
            layers.clone().map(|layer| LayerFit::new(layer, plan.shape, [choose, judge])).collect();
        for text in &plan.texts {
            let mut run =
                Run { engine: &mut *engine, sequence, layers: layers.clone(), fits: &mut fits };
            run.text(text, progress)?;
        }
        for fit in fits {
            let (correction, report) = fit.solve(&mut totals);
            corrections.push(correction);
            reports.push(report);
        }
        first = layers.end;
    }
    let correction = Correction { layers: corrections };
    let [fit_tokens, choose_tokens, held_out_tokens] = plan.tokens;
    let bytes = correction.layers.iter().flatten();
    let report = FitReport {
        fit_tokens,
        choose_tokens,
        held_out_tokens,
        runs: plan.runs(),
        correction_bytes: bytes
            .map(|layer| (layer.down.len() + layer.up.len() + 4 * layer.bias.len()) as u64)
            .sum(),
        tap: totals.tap.quality(),
        fitted: totals.fitted.quality(),
        last_token: totals.last_token(),
        layers: reports,
    };
    Ok((correction, report))
}

/// One reading of a text for some layers.
struct Run<'a> {
    engine: &'a mut Engine,
    sequence: compute::backend::SequenceId,
    layers: Range<u32>,
    fits: &'a mut [LayerFit],
}

impl Run<'_> {
    fn text(&mut self, text: &Text, progress: &mut dyn FnMut(u64)) -> Result<(), ForwardError> {
        let window = self.engine.plan.context as usize;
        let pass = self.engine.plan.pass_rows as usize;
        for start in (0..text.tokens.len()).step_by(window) {
            self.engine.network.reset(self.sequence);
            let end = text.tokens.len().min(start + window);
            for first in (start..end).step_by(pass) {
                let rows = first..end.min(first + pass);
                self.pass(text, rows.clone(), first - start)?;
                progress(rows.len() as u64);
            }
        }
        Ok(())
    }

    /// Tokens of a text as rows from a position on.
    fn pass(
        &mut self,
        text: &Text,
        tokens: Range<usize>,
        position: usize,
    ) -> Result<(), ForwardError> {
        let row = |(at, token): (usize, &u32)| Row {
            sequence: self.sequence,
            position: (position + at) as u32,
            role: Role::Prompt,
            token: *token,
        };
        let rows: Vec<Row> = text.tokens[tokens.clone()].iter().enumerate().map(row).collect();
        let parts: Vec<Part> = tokens.map(|at| text.part(at)).collect();
        let (first, fits) = (self.layers.start, &mut *self.fits);
        self.engine.network.forward_tapped(&rows, self.layers.clone(), &mut |tapped| {
            fits[(tapped.layer.0 - first) as usize].add(&tapped, &parts);
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config() -> ModelConfig {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf");
        crate::OpenModel::open(Path::new(demo)).unwrap().model.config
    }

    fn plan(texts: &[usize], held_out: &[usize], budget: Bytes) -> Result<FitPlan, FitError> {
        let of = |lens: &[usize]| lens.iter().map(|len| vec![1; *len]).collect();
        FitPlan::new(&config(), of(texts), of(held_out), budget)
    }

    #[test]
    fn a_tenth_of_every_text_chooses_and_a_tenth_judges() {
        let plan = plan(&[1000, 500], &[], Bytes::gib(1)).unwrap();
        assert_eq!(plan.tokens(), [1200, 150, 150]);
        let parts: Vec<Part> = (0..500).map(|at| plan.texts[1].part(at)).collect();
        assert!(parts[..400].iter().all(|part| *part == Part::Fit));
        assert!(parts[400..450].iter().all(|part| *part == Part::Choose));
        assert!(parts[450..].iter().all(|part| *part == Part::Judge));
    }

    #[test]
    fn text_that_was_kept_apart_judges_and_long_ones_are_cut() {
        let plan = plan(&[40_000], &[700, 700], Bytes::gib(1)).unwrap();
        assert_eq!(plan.tokens(), [40_000 - MOST_HELD, MOST_HELD, MOST_HELD]);
        assert_eq!(plan.context(&config()) as usize, WINDOW);
    }

    #[test]
    fn layers_are_fitted_in_groups_that_fit_in_a_share_of_the_budget() {
        let roomy = plan(&[5000], &[], Bytes::gib(4)).unwrap();
        assert_eq!((roomy.layers_at_once(), roomy.runs()), (7, 1));
        let tight = plan(&[5000], &[], Bytes::mib(64)).unwrap();
        assert!(tight.layers_at_once() < 7 && tight.runs() > 1, "{tight:?}");
        assert!(tight.bytes().0 <= Bytes::mib(16).0 || tight.layers_at_once() == 1);
        assert_eq!(tight.work(), 5000 * u64::from(tight.runs()));
    }

    #[test]
    fn texts_that_are_too_short_are_refused() {
        assert_eq!(plan(&[70], &[], Bytes::gib(1)).unwrap_err(), FitError::TooShort { found: 56 });
        let none = plan(&[100], &[1], Bytes::gib(1)).unwrap_err();
        assert_eq!(none, FitError::NothingHeld { found: 1 });
    }
}
