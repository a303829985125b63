//! One layer: what is gathered of it, which map is chosen, and how good that is.

use checkpoint::ModelConfig;
use model::{LayerCorrection, Tapped};
use nalgebra::DMatrix;

use super::normal::{self, Map, Normal};
use super::quality::{Tally, share, top};
use super::{LayerReport, Part};

/// Ranks that are tried.
const RANKS: [usize; 4] = [8, 16, 32, 64];
const MOST_RANK: usize = RANKS[RANKS.len() - 1];
/// Penalties that are tried, as parts of the mean square of what the tap saw.
const RIDGES: [f64; 4] = [0.01, 0.1, 1.0, 10.0];
/// A larger rank has to name so many more of the chosen.
const WORTH: f64 = 0.002;
/// Tokens that are added to sums at once.
const ADDED: usize = 256;

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    hidden: usize,
    n_experts: usize,
    top_k: usize,
}

impl Shape {
    pub(super) const fn of(config: &ModelConfig) -> Self {
        Self {
            hidden: config.hidden as usize,
            n_experts: config.n_experts as usize,
            top_k: config.top_k as usize,
        }
    }

    const fn both(self) -> [usize; 2] {
        [self.hidden, self.n_experts]
    }

    /// Highest rank that makes sense.
    fn rank(self) -> usize {
        MOST_RANK.min(self.n_experts).min(self.hidden)
    }

    /// Memory of the sums of one layer and of what is kept of so many tokens.
    pub(super) const fn layer_bytes(self, held: usize) -> u64 {
        let token = 4 * (self.hidden + 2 * self.n_experts) + 1;
        normal::bytes(self.both()) + (held * token) as u64
    }

    /// Memory of one layer that is added to, solved and judged.
    pub(super) fn work_bytes(self, held: usize) -> u64 {
        let rank = self.rank();
        let judged = held * (self.hidden + rank + 2 * self.n_experts);
        let maps = (RIDGES.len() + 2) * rank * (self.hidden + self.n_experts);
        normal::work_bytes(self.both(), ADDED, rank) + 8 * (judged + maps) as u64
    }

    /// Memory of one layer's correction, here and in its file.
    pub(super) fn result_bytes(self) -> u64 {
        let [down, up] = LayerCorrection::matrix_bytes(self.rank(), self.hidden, self.n_experts);
        2 * (down + up + 4 * self.n_experts) as u64
    }
}

/// Tokens that are kept.
struct Held {
    /// `[tokens, hidden]`.
    x: Vec<f32>,
    /// `[tokens, n_experts]` both.
    guessed: Vec<f32>,
    actual: Vec<f32>,
    /// Whether the token before it in the text is the one before it here.
    follows: Vec<bool>,
}

/// All layers together.
#[derive(Default)]
pub(super) struct Totals {
    pub(super) tap: Tally,
    pub(super) fitted: Tally,
    repeated: [u64; 2],
}

impl Totals {
    pub(super) fn last_token(&self) -> f64 {
        share(self.repeated[0], self.repeated[1])
    }
}

/// What is gathered of a layer.
pub(super) struct LayerFit {
    layer: u32,
    shape: Shape,
    normal: Normal,
    choose: Held,
    judge: Held,
}

impl LayerFit {
    /// For so many tokens that choose, and that judge.
    pub(super) fn new(layer: u32, shape: Shape, [choose, judge]: [usize; 2]) -> Self {
        let normal = Normal::new(shape.both());
        let [choose, judge] = [choose, judge].map(|tokens| Held::with_room(tokens, shape));
        Self { layer, shape, normal, choose, judge }
    }

    /// Takes what was tapped of a pass, whose rows are for these parts.
    pub(super) fn add(&mut self, tapped: &Tapped<'_>, parts: &[Part]) {
        let Shape { hidden, n_experts, .. } = self.shape;
        let fitted: Vec<usize> = (0..parts.len()).filter(|row| parts[*row] == Part::Fit).collect();
        for rows in fitted.chunks(ADDED) {
            let mut samples = DMatrix::zeros(hidden + n_experts, rows.len());
            for (row, mut sample) in rows.iter().zip(samples.column_iter_mut()) {
                let sample = sample.as_mut_slice();
                fill(sample, tapped, *row, self.shape);
            }
            self.normal.add(&samples);
        }
        for (row, part) in parts.iter().enumerate() {
            let held = match part {
                Part::Fit => continue,
                Part::Choose => &mut self.choose,
                Part::Judge => &mut self.judge,
            };
            held.x.extend_from_slice(&tapped.x[row * hidden..][..hidden]);
            held.guessed.extend_from_slice(&tapped.guessed[row * n_experts..][..n_experts]);
            held.actual.extend_from_slice(&tapped.actual[row * n_experts..][..n_experts]);
            held.follows.push(row > 0 && parts[row - 1] == *part);
        }
    }

    /// Fits, chooses, judges.
    pub(super) fn solve(self, totals: &mut Totals) -> (Option<LayerCorrection>, LayerReport) {
        let chosen = self.choose();
        // As it will be used: with halves.
        let correction = chosen.as_ref().and_then(|(map, rank, _)| halved(map, *rank));
        let (rank, ridge) = match (&correction, chosen) {
            (Some(correction), Some((_, _, ridge))) => (correction.rank, ridge),
            _ => (0, 0.0),
        };
        let tap = self.judge.tally(&self.judge.guessed, self.shape);
        let fitted = correction.as_ref().map_or(tap, |correction| {
            let logits = self.judge.corrected(&whole(correction, self.shape), self.shape);
            self.judge.tally(&logits, self.shape)
        });
        let repeated = self.judge.repeated(self.shape);
        totals.tap = totals.tap.plus(tap);
        totals.fitted = totals.fitted.plus(fitted);
        totals.repeated = [0, 1].map(|i| totals.repeated[i] + repeated[i]);
        let report = LayerReport {
            layer: self.layer,
            rank,
            ridge,
            tap: tap.quality(),
            fitted: fitted.quality(),
            last_token: share(repeated[0], repeated[1]),
        };
        (correction, report)
    }

    /// The map, the rank of it that is used, and its penalty; none if all do worse than nothing on text that was not
    /// fitted to.
    fn choose(&self) -> Option<(Map, usize, f64)> {
        let recall = |logits: &[f32]| self.choose.tally(logits, self.shape).quality().recall;
        let solve = |ridge| Some((ridge, self.normal.solve(ridge, self.shape.rank())?));
        let mut maps: Vec<(f64, Map)> = RIDGES.into_iter().filter_map(solve).collect();
        let mut tried = Vec::new();
        for (at, (_, map)) in maps.iter().enumerate() {
            for rank in RANKS.into_iter().filter(|rank| *rank <= map.rank()) {
                let logits = self.choose.corrected(&parts(map, rank), self.shape);
                tried.push((at, rank, recall(&logits)));
            }
        }
        let most = tried.iter().map(|(_, _, recall)| *recall).fold(0.0, f64::max);
        if most < recall(&self.choose.guessed) + WORTH {
            return None;
        }
        tried.retain(|(_, _, recall)| *recall >= most - WORTH);
        let better = |a: &&Tried, b: &&Tried| a.1.cmp(&b.1).then(b.2.total_cmp(&a.2));
        let (at, rank, _) = *tried.iter().min_by(better)?;
        let (ridge, map) = maps.swap_remove(at);
        Some((map, rank, ridge))
    }
}

/// Which map, how much of it, and its recall.
type Tried = (usize, usize, f64);

/// A sample: what the tap saw and what its logits missed. A number that is added to all logits changes no choice, so it
/// is not fitted.
fn fill(sample: &mut [f64], tapped: &Tapped<'_>, row: usize, shape: Shape) {
    let Shape { hidden, n_experts, .. } = shape;
    let (x, missed) = sample.split_at_mut(hidden);
    for (to, from) in x.iter_mut().zip(&tapped.x[row * hidden..]) {
        *to = f64::from(*from);
    }
    let logits = row * n_experts..(row + 1) * n_experts;
    let pairs = tapped.actual[logits.clone()].iter().zip(&tapped.guessed[logits]);
    let mut sum = 0.0;
    for (to, (actual, guessed)) in missed.iter_mut().zip(pairs) {
        *to = f64::from(*actual) - f64::from(*guessed);
        sum += *to;
    }
    let mean = sum / n_experts as f64;
    missed.iter_mut().for_each(|value| *value -= mean);
}

/// `[hidden, rank]`, `[n_experts, rank]`, `[n_experts]`.
type Matrices = (DMatrix<f64>, DMatrix<f64>, Vec<f64>);

/// The first `rank` directions of a map.
fn parts(map: &Map, rank: usize) -> Matrices {
    let [down, up] = [&map.down, &map.up].map(|matrix| matrix.columns(0, rank).into_owned());
    (down, up, map.bias(rank).as_slice().to_vec())
}

impl Held {
    fn with_room(tokens: usize, shape: Shape) -> Self {
        Self {
            x: Vec::with_capacity(tokens * shape.hidden),
            guessed: Vec::with_capacity(tokens * shape.n_experts),
            actual: Vec::with_capacity(tokens * shape.n_experts),
            follows: Vec::with_capacity(tokens),
        }
    }

    fn tally(&self, logits: &[f32], shape: Shape) -> Tally {
        let (mut chosen, mut order) = (Vec::new(), Vec::new());
        let (actual, logits) =
            (self.actual.chunks_exact(shape.n_experts), logits.chunks_exact(shape.n_experts));
        let mut tally = Tally::default();
        for (actual, logits) in actual.zip(logits) {
            top(actual, shape.top_k, &mut chosen);
            tally.add(&chosen, logits, &mut order);
        }
        tally
    }

    /// The tap's logits with a correction added.
    fn corrected(&self, (down, up, bias): &Matrices, shape: Shape) -> Vec<f32> {
        let n = self.follows.len();
        let mut logits = self.guessed.clone();
        let x = DMatrix::from_iterator(shape.hidden, n, self.x.iter().map(|v| f64::from(*v)));
        let added = up * (down.transpose() * x);
        for (logits, added) in logits.chunks_exact_mut(shape.n_experts).zip(added.column_iter()) {
            for ((logit, added), bias) in logits.iter_mut().zip(added.iter()).zip(bias) {
                *logit += (added + bias) as f32;
            }
        }
        logits
    }

    /// Experts that the token before chose too, of those that were chosen.
    fn repeated(&self, shape: Shape) -> [u64; 2] {
        let (mut before, mut chosen) = (Vec::new(), Vec::new());
        let mut counts = [0, 0];
        for (actual, follows) in self.actual.chunks_exact(shape.n_experts).zip(&self.follows) {
            top(actual, shape.top_k, &mut chosen);
            if *follows {
                let again = chosen.iter().filter(|expert| before.contains(*expert)).count();
                counts = [counts[0] + again as u64, counts[1] + chosen.len() as u64];
            }
            std::mem::swap(&mut before, &mut chosen);
        }
        counts
    }
}

/// The first `rank` directions of a map as a correction; none if a number of it is too large for a half.
fn halved(map: &Map, rank: usize) -> Option<LayerCorrection> {
    let half = |value: f64| quant::f32_to_f16(value as f32).to_le_bytes();
    // By columns of a matrix whose rows these are.
    let down = map.down.columns(0, rank).iter().copied().flat_map(half).collect();
    let up = map.up.columns(0, rank).transpose();
    let up = up.iter().copied().flat_map(half).collect();
    let bias = map.bias(rank).iter().map(|value| *value as f32).collect();
    let correction = LayerCorrection { rank, down, up, bias };
    let halves = [&correction.down, &correction.up];
    let finite = halves.into_iter().flat_map(|halves| values(halves)).all(f64::is_finite)
        && correction.bias.iter().all(|value| value.is_finite());
    finite.then_some(correction)
}

/// A correction as its matrices.
fn whole(correction: &LayerCorrection, shape: Shape) -> Matrices {
    let LayerCorrection { rank, down, up, bias } = correction;
    (
        DMatrix::from_iterator(shape.hidden, *rank, values(down)),
        DMatrix::from_iterator(*rank, shape.n_experts, values(up)).transpose(),
        bias.iter().map(|value| f64::from(*value)).collect(),
    )
}

fn values(halves: &[u8]) -> impl Iterator<Item = f64> {
    let halves = halves.as_chunks::<2>().0.iter();
    halves.map(|half| f64::from(quant::f16_to_f32(u16::from_le_bytes(*half))))
}
