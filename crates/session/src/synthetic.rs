//! Made traces: routing with the skew, the reuse and the drift of published summaries, where no model is at hand.
//!
//! Experts of a layer have popularities by Zipf's law in an order of its own. A token keeps each expert of the token
//! before it with some chance, and draws the others by popularity, each once. The order drifts: experts swap places.

use model::LoggedPass;

use crate::trace::Trace;

/// How a made trace is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Synthetic {
    /// Layers with experts.
    pub layers: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of a token and layer.
    pub top_k: u32,
    /// Tokens of a prompt, in one pass; 0 for none.
    pub prompt: u32,
    /// Tokens that are decoded one by one.
    pub tokens: u32,
    /// The exponent of Zipf's law; 0 makes all equal.
    pub skew: f64,
    /// The chance that a token keeps an expert of the token before it.
    pub reuse: f64,
    /// Places that are swapped with every token, as a share of the experts.
    pub drift: f64,
    /// What the numbers are drawn from.
    pub seed: u64,
    /// Bytes of an expert.
    pub record_bytes: u64,
}

/// Why no such trace can be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{name} is {found}; {needed} makes sense")]
pub struct SyntheticError {
    /// Which number.
    pub name: &'static str,
    /// What it is.
    pub found: String,
    /// What it may be.
    pub needed: &'static str,
}

/// Most choices of a made trace.
const MOST_CHOICES: u64 = 1 << 26;

impl Synthetic {
    /// What [`Self::like`] knows.
    pub const NAMES: [&str; 3] = ["olmoe", "kimi-linear", "flash-next"];

    /// Routing like that of a model, fitted to what was published of it:
    /// - `olmoe` (64 experts, 8 a token): a token shares 43.5 % with the one before, 21 % of the experts get half
    /// - `kimi-linear` (256, 8): 33.6 %, and 8.7 % get half
    /// - `flash-next` (512, 10): 10 % of the experts get 71 %
    ///
    /// Experts are as large as at 4.5 bits a weight.
    pub fn like(name: &str) -> Option<Self> {
        let of = |layers, experts, top_k, skew, reuse, record_bytes| Self {
            layers,
            experts,
            top_k,
            prompt: 0,
            tokens: 300,
            skew,
            reuse,
            drift: 0.0,
            seed: 1,
            record_bytes,
        };
        match name {
            "olmoe" => Some(of(16, 64, 8, 0.8, 0.3, 3_538_944)),
            "kimi-linear" => Some(of(26, 256, 8, 0.93, 0.24, 3_981_312)),
            "flash-next" => Some(of(48, 512, 10, 1.17, 0.2, 2_764_800)),
            _ => None,
        }
    }

    /// Whether such a trace can be made.
    ///
    /// # Errors
    /// A number makes no sense.
    pub fn check(&self) -> Result<(), SyntheticError> {
        let error = |name, found: String, needed| Err(SyntheticError { name, found, needed });
        let Self { layers, experts, top_k, prompt, tokens, .. } = *self;
        if !(1..=1024).contains(&layers) {
            return error("layers", layers.to_string(), "1 to 1,024");
        }
        if !(2..=4096).contains(&experts) {
            return error("experts", experts.to_string(), "2 to 4,096");
        }
        if top_k == 0 || top_k >= experts {
            return error("top-k", top_k.to_string(), "at least 1, and less than experts");
        }
        let rows = u64::from(prompt) + u64::from(tokens);
        let choices = rows.saturating_mul(u64::from(layers) * u64::from(top_k));
        if rows == 0 || choices > MOST_CHOICES {
            return error("choices", choices.to_string(), "1 to 67,108,864 in all");
        }
        if !(0.0..=4.0).contains(&self.skew) {
            return error("skew", self.skew.to_string(), "0 to 4");
        }
        if !(0.0..=1.0).contains(&self.reuse) {
            return error("reuse", self.reuse.to_string(), "0 to 1");
        }
        if !(0.0..=1.0).contains(&self.drift) {
            return error("drift", self.drift.to_string(), "0 to 1");
        }
        if self.record_bytes == 0 || self.record_bytes > 1 << 40 {
            return error("record", self.record_bytes.to_string(), "1 byte to 1 TiB");
        }
        Ok(())
    }

    /// The trace.
    ///
    /// # Errors
    /// A number makes no sense.
    pub fn trace(&self) -> Result<Trace, SyntheticError> {
        self.check()?;
        let mut random = Random(self.seed);
        let mut layers: Vec<Layer> =
            (0..self.layers).map(|_| Layer::new(self, &mut random)).collect();
        let rows = self.prompt + self.tokens;
        let mut choices = Vec::with_capacity((rows * self.layers * self.top_k) as usize);
        for _ in 0..rows {
            for layer in &mut layers {
                layer.step(self, &mut random);
                choices.extend_from_slice(&layer.chosen);
            }
        }
        let prompt = (self.prompt > 0).then_some(LoggedPass { rows: self.prompt, decodes: false });
        let decoded = (0..self.tokens).map(|_| LoggedPass { rows: 1, decodes: true });
        let passes = prompt.into_iter().chain(decoded).collect();
        Ok(Trace::made([self.layers, self.experts, self.top_k], self.record_bytes, passes, choices))
    }
}

/// What a layer is like, and what it chose last.
struct Layer {
    /// `[experts]`.
    weights: Vec<f64>,
    chosen: Vec<u16>,
    /// A draw for each expert.
    draws: Vec<(f64, u16)>,
}

impl Layer {
    fn new(of: &Synthetic, random: &mut Random) -> Self {
        let mut weights: Vec<f64> =
            (1..=of.experts).map(|rank| f64::from(rank).powf(-of.skew)).collect();
        for i in (1..weights.len()).rev() {
            weights.swap(i, random.below(i + 1));
        }
        Self { weights, chosen: Vec::new(), draws: Vec::new() }
    }

    /// The next token's choices.
    fn step(&mut self, of: &Synthetic, random: &mut Random) {
        let Self { weights, chosen, draws } = self;
        let swaps = of.drift * weights.len() as f64;
        let swaps = swaps as usize + usize::from(random.unit() < swaps.fract());
        for _ in 0..swaps {
            let (a, b) = (random.below(weights.len()), random.below(weights.len()));
            weights.swap(a, b);
        }
        chosen.retain(|_| random.unit() < of.reuse);
        let wanted = of.top_k as usize - chosen.len();
        // Exponential times at rates by weight: the first to come are a draw without replacement (Efraimidis and
        // Spirakis 2006).
        draws.clear();
        for (expert, weight) in weights.iter().enumerate() {
            let time = -(1.0 - random.unit()).ln() / weight;
            if !chosen.contains(&(expert as u16)) {
                draws.push((time, expert as u16));
            }
        }
        draws.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        chosen.extend(draws[..wanted].iter().map(|(_, expert)| *expert));
    }
}

/// `SplitMix64` (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In `[0, 1)`.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usual() -> Synthetic {
        Synthetic {
            layers: 3,
            experts: 64,
            top_k: 8,
            prompt: 0,
            tokens: 300,
            skew: 0.0,
            reuse: 0.0,
            drift: 0.0,
            seed: 7,
            record_bytes: 1000,
        }
    }

    /// Share of a token's experts that the token before it had, and share of choices of the top tenth of experts.
    fn summary(of: &Synthetic) -> (f64, f64) {
        let trace = of.trace().unwrap();
        let (layers, top_k) = (of.layers as usize, of.top_k as usize);
        let rows: Vec<&[u16]> = trace.passes().map(|(_, choices)| choices).collect();
        let mut same = 0;
        for pair in rows.windows(2) {
            for (before, now) in pair[0].chunks_exact(top_k).zip(pair[1].chunks_exact(top_k)) {
                same += now.iter().filter(|expert| before.contains(expert)).count();
            }
        }
        let mut uses = trace.uses();
        uses.sort_unstable_by(|a, b| b.cmp(a));
        let top: u64 = uses[..uses.len() / 10].iter().map(|n| u64::from(*n)).sum();
        let all: u64 = uses.iter().map(|n| u64::from(*n)).sum();
        (same as f64 / ((rows.len() - 1) * layers * top_k) as f64, top as f64 / all as f64)
    }

    #[test]
    fn choices_are_distinct_and_the_same_for_the_same_seed() {
        let of = Synthetic { prompt: 20, skew: 1.0, reuse: 0.3, drift: 0.01, ..usual() };
        let trace = of.trace().unwrap();
        assert_eq!(trace, of.trace().unwrap());
        assert_ne!(trace, Synthetic { seed: 8, ..of }.trace().unwrap());
        assert_eq!(trace.tokens(), [20, 300]);
        for (_, choices) in trace.passes() {
            for row in choices.chunks_exact(8) {
                let distinct: std::collections::BTreeSet<_> = row.iter().collect();
                assert_eq!(distinct.len(), 8);
            }
        }
        assert_eq!(Trace::decode(&trace.encode()), Ok(trace));
    }

    #[test]
    fn equal_experts_are_chosen_equally_often_and_kept_ones_are_kept() {
        let (same, top) = summary(&usual());
        assert!((same - 0.125).abs() < 0.01 && top < 0.15, "{same} {top}");
        let (same, top) = summary(&Synthetic { reuse: 0.5, ..usual() });
        assert!((same - (0.5 + 0.5 * 4.0 / 60.0)).abs() < 0.02 && top < 0.2, "{same} {top}");
    }

    #[test]
    fn routing_like_a_models_has_its_published_summary() {
        let of = |name| Synthetic { layers: 6, ..Synthetic::like(name).unwrap() };
        let (same, _) = summary(&of("olmoe"));
        assert!((same - 0.435).abs() < 0.02, "{same}");
        assert!((half(&of("olmoe")) - 0.21).abs() < 0.02);
        let (same, _) = summary(&of("kimi-linear"));
        assert!((same - 0.336).abs() < 0.02, "{same}");
        assert!((half(&of("kimi-linear")) - 0.087).abs() < 0.01);
        let (_, top) = summary(&Synthetic { tokens: 220, ..of("flash-next") });
        assert!((top - 0.71).abs() < 0.02, "{top}");
        assert!(Synthetic::like("x").is_none());
        assert!(Synthetic::NAMES.iter().all(|name| Synthetic::like(name).is_some()));
    }

    /// The share of the experts that get half of the choices.
    fn half(of: &Synthetic) -> f64 {
        let mut uses = of.trace().unwrap().uses();
        uses.sort_unstable_by(|a, b| b.cmp(a));
        let all: u32 = uses.iter().sum();
        let mut sum = 0;
        let few = uses.iter().take_while(|uses| {
            sum += **uses;
            2 * sum <= all
        });
        few.count() as f64 / uses.len() as f64
    }

    #[test]
    fn skew_concentrates_and_drift_spreads() {
        let skewed = Synthetic { skew: 1.0, ..usual() };
        let (_, top) = summary(&skewed);
        let (_, drifted) = summary(&Synthetic { drift: 0.05, ..skewed });
        assert!(top > 0.35 && drifted < top - 0.1, "{top} {drifted}");
    }

    #[test]
    fn numbers_that_make_no_sense_are_named() {
        for (of, name) in [
            (Synthetic { layers: 0, ..usual() }, "layers"),
            (Synthetic { experts: 1, ..usual() }, "experts"),
            (Synthetic { top_k: 64, ..usual() }, "top-k"),
            (Synthetic { tokens: 0, ..usual() }, "choices"),
            (Synthetic { tokens: u32::MAX, ..usual() }, "choices"),
            (Synthetic { skew: f64::NAN, ..usual() }, "skew"),
            (Synthetic { reuse: 1.5, ..usual() }, "reuse"),
            (Synthetic { drift: -0.1, ..usual() }, "drift"),
            (Synthetic { record_bytes: 0, ..usual() }, "record"),
        ] {
            assert_eq!(of.trace().unwrap_err().name, name);
        }
    }
}
