//! Recorded routing: which experts every token of a run chose, in a file.
//!
//! All numbers are little-endian:
//!
//! ```text
//! 8 bytes       "SAKIATRC"
//! u32           version, 1
//! u32 u32 u32   layers, experts of a layer, experts of a token and layer
//! u32           passes
//! u64 u64 ...   bytes of an expert and of the slot that it needs, layer after layer
//! u32 ...       tokens of every pass; the highest bit is set where one generated token is run
//! u8 or u16 ... chosen experts, [tokens, layers, experts of a token], in rank order; u16 above 256 experts
//! u64           XXH3 of everything before it
//! ```

use checkpoint::pack::Checksum;
use model::{LoggedPass, RouteLog};
use units::{ExpertKey, LayerIndex};

use crate::engine::Engine;
use crate::slots;

const MAGIC: &[u8; 8] = b"SAKIATRC";
const VERSION: u32 = 1;
/// Everything before the lists.
const HEADER_BYTES: usize = 8 + 5 * 4;
const CHECKSUM_BYTES: usize = 8;

/// Most layers and most experts of one, far beyond any model.
const MOST: u32 = 1 << 16;
/// Most experts of all layers: a replay holds some bytes for each, whether they are used or not.
const MOST_EXPERTS: u32 = 1 << 20;
/// Set in the length of a pass that runs a generated token.
const DECODES: u32 = 1 << 31;
/// Most bytes of a file: a million tokens of a large model.
pub const MAX_TRACE_BYTES: u64 = 1 << 30;

/// Why bytes are not a trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// They begin with something else.
    #[error("it is no trace: it does not begin with \"SAKIATRC\"")]
    Magic,
    /// A later program wrote them.
    #[error("it is a trace of version {found}, and this program reads version {VERSION}")]
    Version {
        /// What it says.
        found: u32,
    },
    /// A number that no model has.
    #[error("it names {found} {what}; 1 to {most} make sense")]
    Shape {
        /// Of what.
        what: &'static str,
        /// What was found.
        found: u32,
        /// The most.
        most: u32,
    },
    /// Too few or too many.
    #[error("it has {found} bytes, and what it says it holds takes {needed}")]
    Length {
        /// What was found.
        found: u64,
        /// What was needed.
        needed: u64,
    },
    /// A generated token is a pass of its own.
    #[error(
        "pass {pass} has {rows} tokens; a pass has at least one, and exactly one where it is generated"
    )]
    Pass {
        /// Which.
        pass: usize,
        /// Its tokens.
        rows: u32,
    },
    /// Bytes of it are not those that were written.
    #[error("its checksum does not fit its content")]
    Checksum,
    /// An expert that the model does not have.
    #[error("choice {at} is expert {found} of {experts}")]
    Expert {
        /// Place among all choices.
        at: usize,
        /// What was found.
        found: u16,
        /// What there is.
        experts: u32,
    },
}

/// Routing of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    n_layers: u32,
    n_experts: u32,
    top_k: u32,
    /// `[n_layers]`: bytes of an expert, and of the slot that it needs.
    records: Vec<[u64; 2]>,
    passes: Vec<LoggedPass>,
    /// `[n_tokens, n_layers, top_k]`.
    experts: Vec<u16>,
}

impl Trace {
    /// What an engine's log holds.
    ///
    /// # Panics
    /// If the engine keeps none.
    pub fn of(engine: &Engine) -> Self {
        let log: &RouteLog = engine.network.routes.as_ref().expect("the engine keeps a log");
        let (config, records) = (engine.network.config(), engine.network.experts().records());
        let needed = slots::needed(records);
        let layer = |layer: u32| {
            let bytes = records.record(ExpertKey::new(layer, 0)).bytes;
            [bytes, needed[layer as usize]]
        };
        Self {
            n_layers: config.n_layers,
            n_experts: config.n_experts,
            top_k: config.top_k,
            records: (0..config.n_layers).map(layer).collect(),
            passes: log.passes().to_vec(),
            experts: log.experts().iter().map(|expert| *expert as u16).collect(),
        }
    }

    /// One of which everything is given; experts of all layers are alike.
    pub(crate) fn made(
        [n_layers, n_experts, top_k]: [u32; 3],
        record_bytes: u64,
        passes: Vec<LoggedPass>,
        experts: Vec<u16>,
    ) -> Self {
        let records = vec![[record_bytes, record_bytes.next_multiple_of(4096)]; n_layers as usize];
        Self { n_layers, n_experts, top_k, records, passes, experts }
    }

    /// How often each expert was chosen, `[n_layers, n_experts]`.
    pub fn uses(&self) -> Vec<u32> {
        let [n_layers, n_experts, top_k] = self.shape().map(|n| n as usize);
        let mut uses = vec![0_u32; n_layers * n_experts];
        for (at, expert) in self.experts.iter().enumerate() {
            let layer = at / top_k % n_layers;
            uses[layer * n_experts + usize::from(*expert)] += 1;
        }
        uses
    }

    /// As bytes of a file.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let header = [VERSION, self.n_layers, self.n_experts, self.top_k, self.passes.len() as u32];
        bytes.extend(header.iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend(self.records.iter().flatten().flat_map(|bytes| bytes.to_le_bytes()));
        let pass = |pass: &LoggedPass| pass.rows | if pass.decodes { DECODES } else { 0 };
        bytes.extend(self.passes.iter().flat_map(|p| pass(p).to_le_bytes()));
        if is_wide(self.n_experts) {
            bytes.extend(self.experts.iter().flat_map(|expert| expert.to_le_bytes()));
        } else {
            bytes.extend(self.experts.iter().map(|expert| *expert as u8));
        }
        bytes.extend_from_slice(&Checksum::of(&bytes).to_le_bytes());
        bytes
    }

    /// Reads what [`Self::encode`] wrote. Nothing is allocated that the bytes do not fill.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, TraceError> {
        if bytes.get(..8) != Some(MAGIC) {
            return Err(TraceError::Magic);
        }
        let too_short = |needed| TraceError::Length { found: bytes.len() as u64, needed };
        let Some((header, rest)) = bytes[8..].split_at_checked(HEADER_BYTES - 8) else {
            return Err(too_short((HEADER_BYTES + CHECKSUM_BYTES) as u64));
        };
        let words = header.as_chunks::<4>().0;
        let [version, n_layers, n_experts, top_k, n_passes] =
            [0, 1, 2, 3, 4].map(|at| u32::from_le_bytes(words[at]));
        if version != VERSION {
            return Err(TraceError::Version { found: version });
        }
        for (what, found, most) in [
            ("layers", n_layers, MOST),
            ("experts of a layer", n_experts, MOST),
            ("experts of a token", top_k, n_experts),
            ("experts", n_layers.saturating_mul(n_experts), MOST_EXPERTS),
        ] {
            if found == 0 || found > most {
                return Err(TraceError::Shape { what, found, most });
            }
        }
        let lists = 16 * u64::from(n_layers) + 4 * u64::from(n_passes);
        let before = HEADER_BYTES as u64 + lists + CHECKSUM_BYTES as u64;
        if (bytes.len() as u64) < before {
            return Err(too_short(before));
        }
        let (records, rest) = rest.split_at(16 * n_layers as usize);
        let (passes, rest) = rest.split_at(4 * n_passes as usize);
        let passes = decode_passes(passes)?;
        let tokens: u64 = passes.iter().map(|pass| u64::from(pass.rows)).sum();
        let width = if is_wide(n_experts) { 2 } else { 1 };
        let choices = u128::from(tokens) * u128::from(n_layers) * u128::from(top_k) * width;
        let needed = u64::try_from(u128::from(before) + choices).unwrap_or(u64::MAX);
        if bytes.len() as u64 != needed {
            return Err(too_short(needed));
        }
        let (choices, sum) = rest.split_at(rest.len() - CHECKSUM_BYTES);
        let content = &bytes[..bytes.len() - CHECKSUM_BYTES];
        if sum != Checksum::of(content).to_le_bytes() {
            return Err(TraceError::Checksum);
        }
        let long = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes);
        let records = records.as_chunks::<8>().0.as_chunks::<2>().0;
        let records = records.iter().map(|[bytes, slot]| [long(bytes), long(slot)]).collect();
        let experts = decode_choices(choices, n_experts)?;
        Ok(Self { n_layers, n_experts, top_k, records, passes, experts })
    }

    /// Layers, experts of a layer, experts of a token and layer.
    pub const fn shape(&self) -> [u32; 3] {
        [self.n_layers, self.n_experts, self.top_k]
    }

    /// Tokens of prompts, and generated ones.
    pub fn tokens(&self) -> [u64; 2] {
        let of = |decodes| {
            let passes = self.passes.iter().filter(move |pass| pass.decodes == decodes);
            passes.map(|pass| u64::from(pass.rows)).sum()
        };
        [of(false), of(true)]
    }

    /// Bytes of an expert of a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn record_bytes(&self, layer: LayerIndex) -> u64 {
        self.records[layer.get()][0]
    }

    /// By layer, what a slot for its experts needs.
    pub(crate) fn slots_needed(&self) -> Vec<u64> {
        self.records.iter().map(|[_, slot]| *slot).collect()
    }

    /// Every pass with what its tokens chose, `[rows, n_layers, top_k]`.
    pub fn passes(&self) -> impl Iterator<Item = (LoggedPass, &[u16])> {
        let row = self.n_layers as usize * self.top_k as usize;
        let mut rest = &self.experts[..];
        self.passes.iter().map(move |pass| {
            let (choices, behind) = rest.split_at(pass.rows as usize * row);
            rest = behind;
            (*pass, choices)
        })
    }
}

/// Whether an expert's number takes two bytes.
const fn is_wide(n_experts: u32) -> bool {
    n_experts > 256
}

fn decode_passes(bytes: &[u8]) -> Result<Vec<LoggedPass>, TraceError> {
    let pass = |(at, word): (usize, &[u8; 4])| {
        let word = u32::from_le_bytes(*word);
        let pass = LoggedPass { rows: word & !DECODES, decodes: word & DECODES != 0 };
        if pass.rows == 0 || pass.decodes && pass.rows != 1 {
            return Err(TraceError::Pass { pass: at, rows: pass.rows });
        }
        Ok(pass)
    };
    bytes.as_chunks::<4>().0.iter().enumerate().map(pass).collect()
}

fn decode_choices(bytes: &[u8], n_experts: u32) -> Result<Vec<u16>, TraceError> {
    let experts: Vec<u16> = if is_wide(n_experts) {
        bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect()
    } else {
        bytes.iter().map(|byte| u16::from(*byte)).collect()
    };
    match experts.iter().enumerate().find(|(_, expert)| u32::from(**expert) >= n_experts) {
        Some((at, found)) => Err(TraceError::Expert { at, found: *found, experts: n_experts }),
        None => Ok(experts),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A prompt of several passes and decoded tokens whose choices follow no simple rule.
    pub(crate) fn made(n_layers: u32, n_experts: u32, top_k: u32, decoded: usize) -> Trace {
        let mut passes = vec![LoggedPass { rows: 5, decodes: false }; 2];
        passes.extend(vec![LoggedPass { rows: 1, decodes: true }; decoded]);
        let tokens: u32 = passes.iter().map(|pass| pass.rows).sum();
        let mut state = 1_u64;
        let mut experts = Vec::new();
        for _ in 0..tokens * n_layers {
            let mut row: Vec<u16> = Vec::new();
            while row.len() < top_k as usize {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Squared, so that some are chosen more often than others.
                let chance = ((state >> 33) as f64 / (1_u64 << 31) as f64).powi(2);
                let expert = (chance * f64::from(n_experts)) as u16;
                if !row.contains(&expert) {
                    row.push(expert);
                }
            }
            experts.extend(row);
        }
        let records = (0..n_layers).map(|layer| [1000 + u64::from(layer), 4096]).collect();
        Trace { n_layers, n_experts, top_k, records, passes, experts }
    }

    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.truncate(bytes.len() - CHECKSUM_BYTES);
        bytes.extend_from_slice(&Checksum::of(&bytes).to_le_bytes());
        bytes
    }

    #[test]
    fn what_is_written_is_read_with_narrow_and_wide_numbers() {
        for experts in [8, 256, 257, 512] {
            let trace = made(3, experts, 4, 6);
            let bytes = trace.encode();
            let width = if experts > 256 { 2 } else { 1 };
            assert_eq!(bytes.len(), 28 + 3 * 16 + 8 * 4 + 16 * 3 * 4 * width + 8);
            assert_eq!(Trace::decode(&bytes), Ok(trace));
        }
    }

    #[test]
    fn a_file_cut_or_changed_anywhere_is_refused() {
        let bytes = made(2, 8, 2, 3).encode();
        for len in 0..bytes.len() {
            assert!(Trace::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x41;
            assert!(Trace::decode(&bytes).is_err(), "byte {at}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let with = |at: usize, word: u32| {
            let mut bytes = made(2, 8, 2, 3).encode();
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            Trace::decode(&sealed(bytes)).unwrap_err()
        };
        assert_eq!(with(8, 2), TraceError::Version { found: 2 });
        let shape = |what, found, most| TraceError::Shape { what, found, most };
        assert_eq!(with(12, 0), shape("layers", 0, MOST));
        assert_eq!(with(16, MOST + 1), shape("experts of a layer", MOST + 1, MOST));
        assert_eq!(with(20, 9), shape("experts of a token", 9, 8));
        let mut wide = made(17, 8, 2, 0).encode();
        wide[16..20].copy_from_slice(&MOST.to_le_bytes());
        let error = Trace::decode(&sealed(wide)).unwrap_err();
        assert_eq!(error, shape("experts", 17 * MOST, MOST_EXPERTS));
        assert!(matches!(with(24, u32::MAX), TraceError::Length { .. }));
        let first_pass = 28 + 2 * 16;
        assert_eq!(with(first_pass, 0), TraceError::Pass { pass: 0, rows: 0 });
        assert_eq!(with(first_pass, DECODES | 5), TraceError::Pass { pass: 0, rows: 5 });
        assert!(matches!(with(first_pass, DECODES - 1), TraceError::Length { .. }));
        let first_choice = first_pass + 5 * 4;
        let error = TraceError::Expert { at: 0, found: 200, experts: 8 };
        assert_eq!(with(first_choice, 200), error);
        assert_eq!(Trace::decode(b"SAKIA"), Err(TraceError::Magic));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_trace_or_an_error(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            small in any::<bool>(),
        ) {
            // Mostly with a header that is nearly right.
            for (at, byte) in MAGIC.iter().enumerate() {
                if let Some(place) = bytes.get_mut(at) {
                    *place = *byte;
                }
            }
            if small && bytes.len() > 28 {
                for word in 0..5 {
                    let at = 8 + 4 * word;
                    bytes[at] = if word == 0 { 1 } else { bytes[at] % 4 };
                    bytes[at + 1..at + 4].fill(0);
                }
            }
            let _ = Trace::decode(&bytes);
            if bytes.len() > 8 {
                let _ = Trace::decode(&sealed(bytes));
            }
        }
    }
}
