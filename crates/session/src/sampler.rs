//! Logits to a token.
//!
//! The chain, in order: penalties on recent tokens, temperature, top-k, top-p, min-p, one draw. Probabilities of top-p
//! are those after temperature and top-k; min-p compares with the likeliest token. At temperature 0 the likeliest token
//! after the penalties is taken. Ties go to the lower id everywhere.
//!
//! The same logits, settings and seed give the same token on every platform and in every version: sums run in a fixed
//! order, in f64, with exponentials of `libm`, and random numbers come from a generator that is written down here.

use std::collections::VecDeque;

use checkpoint::Metadata;

/// How many tokens back the penalties look: at the end of the prompt and what was generated.
const PENALTY_WINDOW: usize = 64;

/// How tokens are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerConfig {
    /// Divides logits; 0 = always the likeliest token.
    pub temperature: f32,
    /// Keep this many; 0 = all.
    pub top_k: usize,
    /// Keep the fewest likeliest tokens whose probabilities reach this; 1 = all.
    pub top_p: f32,
    /// Keep tokens at least this times as likely as the likeliest; 0 = all.
    pub min_p: f32,
    /// Divides positive logits of recent tokens and multiplies negative ones; 1 = off.
    pub repeat_penalty: f32,
    /// Subtracted from the logits of recent tokens.
    pub presence_penalty: f32,
    /// Subtracted once for each recent occurrence.
    pub frequency_penalty: f32,
    /// Of the random numbers.
    pub seed: u64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// A logit is NaN or infinite; or every logit is minus infinity, which alone means "never".
    #[error("the logit of token {token} is {value}; a damaged weight is the usual cause")]
    NotFinite {
        /// The first such token.
        token: usize,
        /// Its logit.
        value: f32,
    },
    /// There are no logits.
    #[error("there are no logits to choose a token from")]
    Empty,
    /// A setting that makes no sense.
    #[error("--{flag} {found}: needed {needed}")]
    Setting {
        /// The setting, as the command line spells it.
        flag: &'static str,
        /// What was given.
        found: f32,
        /// What makes sense.
        needed: &'static str,
    },
}

impl SamplerConfig {
    /// The model file's own settings (`general.sampling.*`) over the defaults. They are as good as the file: see
    /// [`Self::check`].
    pub fn from_metadata(metadata: &Metadata) -> Self {
        let number = |name: &str| metadata.f64(&format!("general.sampling.{name}"));
        let default = Self::default();
        let real = |name, default| number(name).map_or(default, |value| value as f32);
        Self {
            temperature: real("temp", default.temperature),
            // 0 and negative numbers turn it off; the cast saturates.
            top_k: number("top_k").map_or(default.top_k, |k| k as usize),
            top_p: real("top_p", default.top_p),
            min_p: real("min_p", default.min_p),
            repeat_penalty: real("penalty_repeat", default.repeat_penalty),
            presence_penalty: real("penalty_present", default.presence_penalty),
            frequency_penalty: real("penalty_freq", default.frequency_penalty),
            seed: default.seed,
        }
    }

    /// Refuses settings that make no sense.
    ///
    /// # Errors
    /// [`SamplerError::Setting`].
    pub fn check(&self) -> Result<(), SamplerError> {
        let penalties = -100.0..=100.0;
        let settings: [(&'static str, f32, bool, &'static str); 6] = [
            (
                "temperature",
                self.temperature,
                self.temperature >= 0.0,
                "a finite number, 0 or more",
            ),
            ("top-p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "more than 0, at most 1"),
            ("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 to 1"),
            (
                "repeat-penalty",
                self.repeat_penalty,
                self.repeat_penalty > 0.0,
                "a finite number, more than 0",
            ),
            (
                "presence-penalty",
                self.presence_penalty,
                penalties.contains(&self.presence_penalty),
                "-100 to 100",
            ),
            (
                "frequency-penalty",
                self.frequency_penalty,
                penalties.contains(&self.frequency_penalty),
                "-100 to 100",
            ),
        ];
        match settings.into_iter().find(|(_, found, is_fine, _)| !is_fine || !found.is_finite()) {
            Some((flag, found, _, needed)) => Err(SamplerError::Setting { flag, found, needed }),
            None => Ok(()),
        }
    }

    #[expect(clippy::float_cmp, reason = "1 is the setting that means off")]
    fn has_penalties(&self) -> bool {
        self.repeat_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// `SplitMix64` (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
#[derive(Debug, Clone)]
struct SplitMix64(u64);

impl SplitMix64 {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`: the upper 53 bits.
    const fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A token that may be chosen.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
}

impl Candidate {
    /// Likelier first, then lower ids.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that sorting calls")]
    fn order(a: &Self, b: &Self) -> std::cmp::Ordering {
        b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
    }
}

/// Chooses tokens and remembers what occurred. Allocates nothing after the first token.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: SamplerConfig,
    random: SplitMix64,
    recent: VecDeque<u32>,
    /// Scratch: recent tokens in order of id, to count them.
    sorted: Vec<u32>,
    /// Scratch: logits that penalties changed, in order of id.
    penalized: Vec<Candidate>,
    /// Scratch.
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler whose settings make sense.
    ///
    /// # Errors
    /// [`SamplerError::Setting`].
    pub fn new(config: SamplerConfig) -> Result<Self, SamplerError> {
        config.check()?;
        Ok(Self {
            random: SplitMix64(config.seed),
            recent: VecDeque::with_capacity(PENALTY_WINDOW),
            sorted: Vec::with_capacity(PENALTY_WINDOW),
            penalized: Vec::with_capacity(PENALTY_WINDOW),
            candidates: Vec::new(),
            config,
        })
    }

    /// Forgets what occurred and takes the end of a prompt instead. Random numbers go on.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.recent.clear();
        self.recent.extend(&prompt[prompt.len().saturating_sub(PENALTY_WINDOW)..]);
    }

    /// A token was added to the text.
    pub fn accept(&mut self, token: u32) {
        if self.recent.len() == PENALTY_WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(token);
    }

    /// The next token. Minus infinity means "never this token".
    ///
    /// - `logits`: `[vocab]`
    ///
    /// # Errors
    /// [`SamplerError::NotFinite`], [`SamplerError::Empty`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        if logits.is_empty() {
            return Err(SamplerError::Empty);
        }
        if let Some(token) = logits.iter().position(|logit| is_broken(*logit)) {
            return Err(SamplerError::NotFinite { token, value: logits[token] });
        }
        self.penalize(logits)?;
        let best = self.best(logits)?;
        if self.config.temperature == 0.0 {
            return Ok(best.id);
        }
        self.collect(logits);
        Ok(self.draw(best.logit))
    }

    /// The logits that penalties change.
    fn penalize(&mut self, logits: &[f32]) -> Result<(), SamplerError> {
        self.penalized.clear();
        if !self.config.has_penalties() {
            return Ok(());
        }
        let SamplerConfig { repeat_penalty, presence_penalty, frequency_penalty, .. } = self.config;
        self.sorted.clear();
        self.sorted.extend(&self.recent);
        self.sorted.sort_unstable();
        for run in self.sorted.chunk_by(|a, b| a == b) {
            let id = run[0];
            let Some(&logit) = logits.get(id as usize) else { continue };
            let repeated =
                if logit > 0.0 { logit / repeat_penalty } else { logit * repeat_penalty };
            let value = repeated - (presence_penalty + frequency_penalty * run.len() as f32);
            // An extreme penalty can overflow.
            if is_broken(value) {
                return Err(SamplerError::NotFinite { token: id as usize, value });
            }
            self.penalized.push(Candidate { id, logit: value });
        }
        Ok(())
    }

    /// The likeliest token after the penalties.
    fn best(&self, logits: &[f32]) -> Result<Candidate, SamplerError> {
        let mut best = Candidate { id: 0, logit: f32::NEG_INFINITY };
        each(logits, &self.penalized, |candidate| {
            if candidate.logit > best.logit {
                best = candidate;
            }
        });
        if best.logit == f32::NEG_INFINITY {
            return Err(SamplerError::NotFinite { token: 0, value: best.logit });
        }
        Ok(best)
    }

    /// The candidates: with top-k these many, likeliest first; without it all, in order of id.
    fn collect(&mut self, logits: &[f32]) {
        let Self { candidates, penalized, config, .. } = self;
        candidates.clear();
        let keep = if config.top_k == 0 { logits.len() } else { config.top_k.min(logits.len()) };
        // Twice as many are gathered before the less likely half is dropped: linear time in little memory.
        let most = keep.saturating_mul(2).min(logits.len());
        candidates.reserve(most);
        let mut least = f32::NEG_INFINITY;
        each(logits, penalized, |candidate| {
            // Ids ascend: of equals the ones that are there already are the lower.
            if candidate.logit <= least {
                return;
            }
            if candidates.len() == most {
                candidates.select_nth_unstable_by(keep - 1, Candidate::order);
                candidates.truncate(keep);
                least = candidates[keep - 1].logit;
                if candidate.logit <= least {
                    return;
                }
            }
            candidates.push(candidate);
        });
        if config.top_k == 0 {
            return;
        }
        if keep < candidates.len() {
            candidates.select_nth_unstable_by(keep - 1, Candidate::order);
            candidates.truncate(keep);
        }
        candidates.sort_unstable_by(Candidate::order);
    }

    /// One of the candidates by chance, after top-p and min-p.
    fn draw(&mut self, max: f32) -> u32 {
        let temperature = f64::from(self.config.temperature);
        // Relative to the likeliest, which has weight 1 and so is always kept.
        let weight = |candidate: &Candidate| {
            libm::exp((f64::from(candidate.logit) - f64::from(max)) / temperature)
        };
        let min_weight = f64::from(self.config.min_p);
        let top_p = f64::from(self.config.top_p);
        let (kept, mass) = if top_p < 1.0 {
            let total: f64 = self.candidates.iter().map(weight).sum();
            keep_likeliest(&mut self.candidates, total * top_p, min_weight, weight)
        } else {
            self.candidates.retain(|candidate| weight(candidate) >= min_weight);
            (self.candidates.len(), self.candidates.iter().map(weight).sum())
        };
        let mut left = self.random.unit() * mass;
        let mut last = None;
        for candidate in &self.candidates[..kept] {
            let w = weight(candidate);
            left -= w;
            if left < 0.0 {
                return candidate.id;
            }
            // Rounding may leave a crumb: it belongs to the last that has a chance.
            if w > 0.0 {
                last = Some(candidate.id);
            }
        }
        last.expect("the likeliest is kept and has weight 1")
    }
}

/// Minus infinity has a meaning; NaN and infinity have none.
const fn is_broken(logit: f32) -> bool {
    logit.is_nan() || logit == f32::INFINITY
}

/// Every token that has a chance, with its logit after the penalties, in order of id.
fn each(logits: &[f32], penalized: &[Candidate], mut sink: impl FnMut(Candidate)) {
    let mut penalized = penalized.iter().peekable();
    for (id, &logit) in logits.iter().enumerate() {
        let id = id as u32;
        let logit =
            penalized.next_if(|changed| changed.id == id).map_or(logit, |changed| changed.logit);
        if logit > f32::NEG_INFINITY {
            sink(Candidate { id, logit });
        }
    }
}

/// Brings the fewest likeliest candidates whose weights reach `mass` to the front, in order; none lighter than
/// `min_weight`. How many they are, and their weight.
///
/// Sorts no more than it must: of a large vocabulary usually a few dozen count.
fn keep_likeliest(
    candidates: &mut [Candidate],
    mass: f64,
    min_weight: f64,
    weight: impl Fn(&Candidate) -> f64,
) -> (usize, f64) {
    let (mut kept, mut sum, mut sorted) = (0, 0.0, 0);
    let mut block = 64;
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        if block < rest.len() {
            rest.select_nth_unstable_by(block, Candidate::order);
        }
        let front = block.min(rest.len());
        rest[..front].sort_unstable_by(Candidate::order);
        for candidate in &rest[..front] {
            let w = weight(candidate);
            // The likeliest is kept also if it alone is more than enough.
            if kept > 0 && (sum >= mass || w < min_weight) {
                return (kept, sum);
            }
            kept += 1;
            sum += w;
        }
        sorted += front;
        block *= 4;
    }
    (kept, sum)
}

#[cfg(test)]
mod tests;
