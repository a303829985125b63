//! Which experts a model used in earlier runs, and how much: what a start reads first while nothing else is to be read.
//!
//! The file is small and of no great worth: whatever is wrong with it, it is ignored, and the next run writes a new one.
//! All numbers are little-endian:
//!
//! ```text
//! 8 bytes   "SAKIAHOT"
//! u32       version, 1
//! u64       identity of the model's files
//! u32 u32   layers, experts of a layer
//! f32 ...   heat of every expert, layer after layer
//! u64       XXH3 of everything before it
//! ```

use std::time::UNIX_EPOCH;

use checkpoint::Checkpoint;
use checkpoint::pack::Checksum;
use units::ExpertKey;

use crate::engine::{Engine, OpenModel};

const MAGIC: &[u8; 8] = b"SAKIAHOT";
const VERSION: u32 = 1;
/// Everything before the heats.
const HEADER_BYTES: usize = 8 + 4 + 8 + 4 + 4;
const CHECKSUM_BYTES: usize = 8;

/// Tokens after which what was before counts half.
const HALF_LIFE_TOKENS: f64 = 4096.0;

/// Why a file of uses is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HotSetError {
    /// It begins with something else.
    #[error("it is no hot set of this program")]
    Magic,
    /// A later program wrote it.
    #[error("it has version {found}, and this program reads version {VERSION}")]
    Version {
        /// What it says.
        found: u32,
    },
    /// It is of other files, or these have changed since.
    #[error("it was written for other files than these, or they have changed since")]
    Foreign,
    /// It is too short or too long.
    #[error("it has {found} bytes, and a hot set of this model has {needed}")]
    Length {
        /// What was found.
        found: usize,
        /// What was needed.
        needed: usize,
    },
    /// Bytes of it are not those that were written.
    #[error("its checksum does not fit its content")]
    Checksum,
    /// A number in it is none.
    #[error("expert {at} of it has the heat {value}")]
    Heat {
        /// Place among all experts.
        at: usize,
        /// What was found, as text.
        value: String,
    },
}

/// Heat of a model's experts: uses, of which older ones count less.
#[derive(Debug, Clone, PartialEq)]
pub struct HotSet {
    n_layers: u32,
    n_experts: u32,
    /// `[n_layers * n_experts]`, finite and not negative.
    heat: Vec<f32>,
}

/// What tells a model's files from others: their names, sizes and times of change, and the shape of the model.
pub fn identity(opened: &OpenModel) -> u64 {
    files_identity(&opened.checkpoint)
}

pub(crate) fn files_identity(checkpoint: &Checkpoint) -> u64 {
    let mut sum = Checksum::new();
    for file in &checkpoint.files {
        let name = file.path.file_name().unwrap_or_default();
        sum.update(name.as_encoded_bytes());
        let metadata = std::fs::metadata(&file.path).ok();
        let changed = metadata.as_ref().and_then(|m| m.modified().ok());
        let changed = changed.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        sum.update(&metadata.map_or(0, |m| m.len()).to_le_bytes());
        sum.update(&changed.map_or(0, |since| since.as_nanos()).to_le_bytes());
    }
    sum.value()
}

impl HotSet {
    /// Nothing was used yet.
    pub fn empty(n_layers: u32, n_experts: u32) -> Self {
        Self { n_layers, n_experts, heat: vec![0.0; n_layers as usize * n_experts as usize] }
    }

    /// Reads what [`Self::encode`] wrote, for a model of this identity and shape.
    ///
    /// # Errors
    /// [`HotSetError`].
    pub fn decode(
        bytes: &[u8],
        identity: u64,
        n_layers: u32,
        n_experts: u32,
    ) -> Result<Self, HotSetError> {
        let word = |at: usize| bytes.get(at..at + 4).map(|w| u32::from_le_bytes(array(w)));
        let long = |at: usize| bytes.get(at..at + 8).map(|w| u64::from_le_bytes(array(w)));
        if bytes.get(..8) != Some(MAGIC) {
            return Err(HotSetError::Magic);
        }
        match word(8) {
            Some(VERSION) | None => {}
            Some(found) => return Err(HotSetError::Version { found }),
        }
        let needed = file_bytes(n_layers, n_experts);
        let length = HotSetError::Length { found: bytes.len(), needed };
        if bytes.len() < HEADER_BYTES {
            return Err(length);
        }
        if (long(12), word(20), word(24)) != (Some(identity), Some(n_layers), Some(n_experts)) {
            return Err(HotSetError::Foreign);
        }
        if bytes.len() != needed {
            return Err(length);
        }
        let (content, sum) = bytes.split_at(needed - CHECKSUM_BYTES);
        if u64::from_le_bytes(array(sum)) != Checksum::of(content) {
            return Err(HotSetError::Checksum);
        }
        let heat = content[HEADER_BYTES..].as_chunks::<4>().0;
        let heat: Vec<f32> = heat.iter().map(|value| f32::from_le_bytes(*value)).collect();
        if let Some((at, value)) =
            heat.iter().enumerate().find(|(_, v)| !v.is_finite() || **v < 0.0)
        {
            return Err(HotSetError::Heat { at, value: value.to_string() });
        }
        Ok(Self { n_layers, n_experts, heat })
    }

    /// As bytes of a file.
    pub fn encode(&self, identity: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(file_bytes(self.n_layers, self.n_experts));
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&identity.to_le_bytes());
        bytes.extend_from_slice(&self.n_layers.to_le_bytes());
        bytes.extend_from_slice(&self.n_experts.to_le_bytes());
        bytes.extend(self.heat.iter().flat_map(|heat| heat.to_le_bytes()));
        bytes.extend_from_slice(&Checksum::of(&bytes).to_le_bytes());
        bytes
    }

    /// Adds the uses of a run, `[n_layers * n_experts]`, in which `tokens` chose experts. What was before counts the
    /// less, the longer the run was.
    ///
    /// # Panics
    /// If the uses are another model's.
    pub fn add(&mut self, uses: &[u32], tokens: u64) {
        assert_eq!(uses.len(), self.heat.len(), "uses of this model");
        let kept = (-(tokens as f64) / HALF_LIFE_TOKENS).exp2() as f32;
        for (heat, uses) in self.heat.iter_mut().zip(uses) {
            *heat = *heat * kept + *uses as f32;
        }
    }

    /// Experts that were used, the hottest first.
    pub fn order(&self) -> Vec<ExpertKey> {
        let mut keys: Vec<u32> = (0..self.heat.len() as u32).collect();
        keys.retain(|key| self.heat[*key as usize] > 0.0);
        let heat = |key: &u32| self.heat[*key as usize];
        keys.sort_unstable_by(|a, b| heat(b).total_cmp(&heat(a)).then(a.cmp(b)));
        keys.iter().map(|key| ExpertKey::new(key / self.n_experts, key % self.n_experts)).collect()
    }
}

impl Engine {
    /// Nothing was used yet, of this model. A draft head's experts are not kept: it is not always loaded.
    pub fn empty_hot_set(&self) -> HotSet {
        let config = self.network.config();
        HotSet::empty(config.n_layers, config.n_experts)
    }

    /// Adds what was used since the engine was loaded, if that is counted.
    pub fn add_uses(&self, to: &mut HotSet) {
        let Some(uses) = self.network.experts().uses() else { return };
        let config = self.network.config();
        let uses = &uses[..to.heat.len()];
        let chosen: u64 = uses.iter().map(|n| u64::from(*n)).sum();
        to.add(uses, chosen / (u64::from(config.n_layers) * u64::from(config.top_k)).max(1));
    }
}

/// Bytes of the file of such a model.
pub fn file_bytes(n_layers: u32, n_experts: u32) -> usize {
    HEADER_BYTES + 4 * n_layers as usize * n_experts as usize + CHECKSUM_BYTES
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the caller cut as many")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: u64 = 0x1234_5678_9ABC_DEF0;

    fn hot_set() -> HotSet {
        let mut set = HotSet::empty(2, 3);
        set.add(&[0, 7, 1, 9, 0, 7], 10);
        set
    }

    fn decode(bytes: &[u8]) -> Result<HotSet, HotSetError> {
        HotSet::decode(bytes, ID, 2, 3)
    }

    /// The file with a checksum that fits.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.truncate(bytes.len() - CHECKSUM_BYTES);
        bytes.extend_from_slice(&Checksum::of(&bytes).to_le_bytes());
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = hot_set().encode(ID);
        assert_eq!(bytes.len(), file_bytes(2, 3));
        assert_eq!(decode(&bytes), Ok(hot_set()));
    }

    #[test]
    fn the_hottest_come_first_and_the_unused_not_at_all() {
        let keys = [(1, 0), (0, 1), (1, 2), (0, 2)].map(|(l, e)| ExpertKey::new(l, e));
        assert_eq!(hot_set().order(), keys);
        assert_eq!(HotSet::empty(2, 3).order(), []);
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let bytes = hot_set().encode(ID);
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        assert!(matches!(
            decode(&[&bytes[..], &[0]].concat()),
            Err(HotSetError::Length { found, needed }) if found == needed + 1
        ));
    }

    #[test]
    fn a_changed_byte_anywhere_is_refused() {
        let bytes = hot_set().encode(ID);
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bytes = bytes.clone();
                bytes[at] ^= 1 << bit;
                assert!(decode(&bytes).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn other_versions_files_and_shapes_are_refused_by_name() {
        let mut later = hot_set().encode(ID);
        later[8] = 2;
        assert_eq!(decode(&sealed(later)), Err(HotSetError::Version { found: 2 }));
        assert_eq!(decode(&hot_set().encode(ID + 1)), Err(HotSetError::Foreign));
        assert_eq!(decode(&HotSet::empty(3, 2).encode(ID)), Err(HotSetError::Foreign));
        assert_eq!(decode(b"GGUF\x03\0\0\0 and so on"), Err(HotSetError::Magic));
    }

    #[test]
    fn a_heat_that_is_no_number_or_negative_is_refused() {
        for value in [f32::NAN, f32::INFINITY, -1.0] {
            let mut bytes = hot_set().encode(ID);
            bytes[HEADER_BYTES + 4..HEADER_BYTES + 8].copy_from_slice(&value.to_le_bytes());
            assert!(matches!(decode(&sealed(bytes)), Err(HotSetError::Heat { at: 1, .. })));
        }
    }

    #[test]
    fn what_was_before_counts_half_after_the_half_life() {
        let mut set = HotSet::empty(1, 2);
        set.add(&[8, 0], 100);
        set.add(&[0, 3], 4096);
        assert_eq!(set.heat, [4.0, 3.0]);
    }
}
