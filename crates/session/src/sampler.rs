//! Logits to a token.
//!
//! The chain, in order: penalties on tokens that occurred, temperature, top-k, top-p, min-p, then one draw. At
//! temperature 0 the likeliest token is taken after the penalties; ties go to the lower id.

use checkpoint::Metadata;

/// Tokens back that penalties look at.
const PENALTY_WINDOW: usize = 64;

/// How tokens are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerConfig {
    /// 0 = greedy.
    pub temperature: f32,
    /// Keep this many; 0 = all.
    pub top_k: usize,
    /// Keep the likeliest that sum to this; 1 = all.
    pub top_p: f32,
    /// Keep those at least this times as likely as the likeliest; 0 = all.
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
    /// A logit is NaN or infinite.
    #[error("the logit of token {token} is {value}; a damaged weight is the usual cause")]
    NotFinite {
        /// The token.
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
        /// The setting.
        flag: &'static str,
        /// What was given.
        found: f32,
        /// What makes sense.
        needed: &'static str,
    },
}

impl SamplerConfig {
    /// The model file's own settings (`general.sampling.*`) over the defaults.
    pub fn from_metadata(metadata: &Metadata) -> Self {
        let number = |name: &str| {
            metadata.f64(&format!("general.sampling.{name}")).map(|value| value as f32)
        };
        let default = Self::default();
        Self {
            temperature: number("temp").unwrap_or(default.temperature),
            top_k: metadata.u64("general.sampling.top_k").map_or(default.top_k, |k| k as usize),
            top_p: number("top_p").unwrap_or(default.top_p),
            min_p: number("min_p").unwrap_or(default.min_p),
            repeat_penalty: number("penalty_repeat").unwrap_or(default.repeat_penalty),
            ..default
        }
    }

    /// Refuses settings that make no sense.
    ///
    /// # Errors
    /// [`SamplerError::Setting`].
    pub fn check(&self) -> Result<(), SamplerError> {
        let settings: [(&'static str, f32, bool, &'static str); 6] = [
            ("temperature", self.temperature, self.temperature >= 0.0, "0 or more"),
            ("top-p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "more than 0, at most 1"),
            ("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 to 1"),
            ("repeat-penalty", self.repeat_penalty, self.repeat_penalty > 0.0, "more than 0"),
            (
                "presence-penalty",
                self.presence_penalty,
                self.presence_penalty.abs() <= 100.0,
                "-100 to 100",
            ),
            (
                "frequency-penalty",
                self.frequency_penalty,
                self.frequency_penalty.abs() <= 100.0,
                "-100 to 100",
            ),
        ];
        match settings.into_iter().find(|(_, found, fine, _)| !fine || !found.is_finite()) {
            Some((flag, found, _, needed)) => Err(SamplerError::Setting { flag, found, needed }),
            None => Ok(()),
        }
    }
}

/// `SplitMix64` (Steele, Lea and Flood 2014): small, and the same for ever.
#[derive(Debug, Clone)]
struct SplitMix64(u64);

impl SplitMix64 {
    /// Uniform in `[0, 1)`, 53 bits.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / 18_446_744_073_709_551_616.0
    }
}

/// Chooses tokens and remembers what occurred.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: SamplerConfig,
    random: SplitMix64,
    recent: std::collections::VecDeque<u32>,
    candidates: Vec<(u32, f32)>,
    /// Scratch: recent tokens in order, for counting.
    sorted: Vec<u32>,
}

impl Sampler {
    /// A sampler whose settings make sense.
    ///
    /// # Errors
    /// [`SamplerError::Setting`].
    pub fn new(config: SamplerConfig) -> Result<Self, SamplerError> {
        config.check()?;
        let random = SplitMix64(config.seed);
        let (recent, candidates, sorted) = Default::default();
        Ok(Self { config, random, recent, candidates, sorted })
    }

    /// Forgets what occurred and takes the end of a prompt instead.
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

    /// The next token.
    ///
    /// # Errors
    /// [`SamplerError::NotFinite`], [`SamplerError::Empty`].
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        if let Some((token, &value)) =
            logits.iter().enumerate().find(|(_, logit)| !logit.is_finite())
        {
            return Err(SamplerError::NotFinite { token, value });
        }
        self.candidates.clear();
        self.candidates.extend(logits.iter().enumerate().map(|(id, logit)| (id as u32, *logit)));
        self.penalize();
        if self.config.temperature <= 0.0 {
            let best = self.candidates.iter().copied().reduce(|a, b| if b.1 > a.1 { b } else { a });
            return best.map(|(id, _)| id).ok_or(SamplerError::Empty);
        }
        self.keep_likeliest();
        self.draw()
    }

    fn penalize(&mut self) {
        let SamplerConfig { repeat_penalty, presence_penalty, frequency_penalty, .. } = self.config;
        if repeat_penalty == 1.0 && presence_penalty == 0.0 && frequency_penalty == 0.0 {
            return;
        }
        self.sorted.clear();
        self.sorted.extend(&self.recent);
        self.sorted.sort_unstable();
        for run in self.sorted.chunk_by(|a, b| a == b) {
            let Some((_, logit)) = self.candidates.get_mut(run[0] as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repeat_penalty } else { *logit * repeat_penalty };
            *logit -= presence_penalty + frequency_penalty * run.len() as f32;
        }
    }

    /// Sorts the likeliest to the front, as many as top-k keeps.
    fn keep_likeliest(&mut self) {
        let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let keep = match self.config.top_k {
            0 => self.candidates.len(),
            k => k.min(self.candidates.len()),
        };
        if keep < self.candidates.len() {
            self.candidates.select_nth_unstable_by(keep, order);
            self.candidates.truncate(keep);
        }
        self.candidates.sort_unstable_by(order);
    }

    /// Probabilities of the sorted candidates, cut by top-p and min-p; one of them by chance.
    fn draw(&mut self) -> Result<u32, SamplerError> {
        let Some(&(_, max)) = self.candidates.first() else { return Err(SamplerError::Empty) };
        let temperature = f64::from(self.config.temperature);
        let weight = |logit: f32| libm::exp((f64::from(logit) - f64::from(max)) / temperature);
        let total: f64 = self.candidates.iter().map(|(_, logit)| weight(*logit)).sum();
        let (mut kept, mut mass) = (0, 0.0);
        for (_, logit) in &self.candidates {
            let w = weight(*logit);
            // The likeliest has weight 1 and is always kept.
            if w < f64::from(self.config.min_p)
                || (kept > 0 && mass >= f64::from(self.config.top_p) * total)
            {
                break;
            }
            mass += w;
            kept += 1;
        }
        let mut left = self.random.unit() * mass;
        for (id, logit) in &self.candidates[..kept] {
            left -= weight(*logit);
            if left < 0.0 {
                return Ok(*id);
            }
        }
        // Rounding may leave a crumb: it belongs to the last.
        Ok(self.candidates[kept - 1].0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain() -> SamplerConfig {
        SamplerConfig {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            seed: 7,
            ..SamplerConfig::default()
        }
    }

    fn draws(config: SamplerConfig, logits: &[f32], n: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(config).unwrap();
        let mut counts = vec![0; logits.len()];
        for _ in 0..n {
            counts[sampler.sample(logits).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0, 1.0, 2.0, -1.0, 0.5];
        for temperature in [0.5_f32, 1.0, 2.0] {
            let n = 40_000;
            let counts = draws(SamplerConfig { temperature, ..plain() }, &logits, n);
            let total: f64 =
                logits.iter().map(|l| (f64::from(*l) / f64::from(temperature)).exp()).sum();
            let chi: f64 = logits
                .iter()
                .zip(&counts)
                .map(|(l, count)| {
                    let expected =
                        (f64::from(*l) / f64::from(temperature)).exp() / total * n as f64;
                    (*count as f64 - expected).powi(2) / expected
                })
                .sum();
            // 4 degrees of freedom: above 18.5 once in a thousand; the seed is fixed.
            assert!(chi < 18.5, "temperature {temperature}: {chi}");
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits = [5.0, 4.9, 1.0, 0.0];
        let kept = |config| draws(config, &logits, 4000).iter().map(|n| *n > 0).collect::<Vec<_>>();
        assert_eq!(kept(SamplerConfig { top_k: 2, ..plain() }), [true, true, false, false]);
        assert_eq!(kept(SamplerConfig { top_p: 1e-6, ..plain() }), [true, false, false, false]);
        assert_eq!(kept(SamplerConfig { top_p: 0.6, ..plain() }), [true, true, false, false]);
        assert_eq!(kept(SamplerConfig { min_p: 0.5, ..plain() }), [true, true, false, false]);
        assert_eq!(kept(SamplerConfig { min_p: 1.0, ..plain() }), [true, false, false, false]);
    }

    #[test]
    fn greedy_takes_the_lower_id_of_equals() {
        let mut sampler = Sampler::new(SamplerConfig { temperature: 0.0, ..plain() }).unwrap();
        assert_eq!(sampler.sample(&[1.0, 3.0, 3.0]), Ok(1));
    }

    #[test]
    fn penalties_push_recent_tokens_down() {
        let greedy = SamplerConfig { temperature: 0.0, ..plain() };
        let next = |config: SamplerConfig, recent: &[u32]| {
            let mut sampler = Sampler::new(config).unwrap();
            sampler.begin(recent);
            sampler.sample(&[2.0, 1.5, -0.5]).unwrap()
        };
        assert_eq!(next(SamplerConfig { repeat_penalty: 1.5, ..greedy.clone() }, &[0]), 1);
        assert_eq!(next(SamplerConfig { presence_penalty: 0.6, ..greedy.clone() }, &[0]), 1);
        assert_eq!(next(SamplerConfig { frequency_penalty: 0.3, ..greedy.clone() }, &[0]), 0);
        assert_eq!(next(SamplerConfig { frequency_penalty: 0.3, ..greedy }, &[0, 0]), 1);
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error() {
        let mut sampler = Sampler::new(plain()).unwrap();
        assert_eq!(sampler.sample(&[]), Err(SamplerError::Empty));
        assert!(matches!(
            sampler.sample(&[0.0, f32::NAN]),
            Err(SamplerError::NotFinite { token: 1, .. })
        ));
        assert!(sampler.sample(&[f32::INFINITY]).is_err());
    }

    #[test]
    fn senseless_settings_are_named() {
        for (config, flag) in [
            (SamplerConfig { temperature: -1.0, ..plain() }, "temperature"),
            (SamplerConfig { temperature: f32::NAN, ..plain() }, "temperature"),
            (SamplerConfig { top_p: 0.0, ..plain() }, "top-p"),
            (SamplerConfig { min_p: 2.0, ..plain() }, "min-p"),
            (SamplerConfig { repeat_penalty: 0.0, ..plain() }, "repeat-penalty"),
        ] {
            assert!(Sampler::new(config).unwrap_err().to_string().contains(flag), "{flag}");
        }
    }

    proptest! {
        #[test]
        fn the_same_seed_gives_the_same_tokens(logits in prop::collection::vec(-20.0_f32..20.0, 1..50), seed in any::<u64>()) {
            let config = SamplerConfig { seed, top_k: 5, ..plain() };
            let mut a = Sampler::new(config.clone()).unwrap();
            let mut b = Sampler::new(config).unwrap();
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|i, j| logits[*j].total_cmp(&logits[*i]));
            for _ in 0..20 {
                let token = a.sample(&logits).unwrap();
                prop_assert_eq!(token, b.sample(&logits).unwrap());
                prop_assert!(order.iter().take(5).any(|i| *i == token as usize || logits[*i] == logits[token as usize]));
            }
        }
    }
}
