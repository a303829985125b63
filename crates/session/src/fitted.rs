//! Corrections of lookahead that were fitted to a model, as a file.
//!
//! Without it guesses are those of the tap alone, so whatever is wrong with the file, nothing else is. All numbers are
//! little-endian:
//!
//! ```text
//! 8 bytes       "SAKIAFIT"
//! u32           version, 1
//! u64           identity of the model's files, see `hot_set::identity`
//! u32 u32 u32   layers, values of a hidden state, experts of a layer
//! by layer:
//!   u32         rank; 0 for a layer without a correction, of which nothing follows
//!   f16 ...     [rank, hidden]
//!   f16 ...     [experts, rank]
//!   f32 ...     [experts]
//! u64           XXH3 of everything before it
//! ```

use checkpoint::ModelConfig;
use checkpoint::pack::Checksum;
use model::{Correction, LayerCorrection};

const MAGIC: &[u8; 8] = b"SAKIAFIT";
const VERSION: u32 = 1;
/// Everything before the layers.
const HEADER_BYTES: usize = 8 + 4 + 8 + 3 * 4;
const CHECKSUM_BYTES: usize = 8;

/// Highest rank of a correction.
pub const MOST_RANK: usize = 256;

/// Why a file of corrections is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FittedError {
    /// It begins with something else.
    #[error("it is no fitted lookahead of this program")]
    Magic,
    /// A later program wrote it.
    #[error("it has version {found}, and this program reads version {VERSION}")]
    Version {
        /// What it says.
        found: u32,
    },
    /// It is of other files, or these have changed since.
    #[error("it was fitted to other files than these, or they have changed since")]
    Foreign,
    /// It is too short or too long for what it says.
    #[error("it has {found} bytes, and what it says of itself needs {needed}")]
    Length {
        /// What was found.
        found: usize,
        /// What was needed.
        needed: usize,
    },
    /// Bytes of it are not those that were written.
    #[error("its checksum does not fit its content")]
    Checksum,
    /// No correction has such a rank.
    #[error("layer {layer} of it has the rank {found}; the highest is {MOST_RANK}")]
    Rank {
        /// The layer.
        layer: usize,
        /// What it says.
        found: u32,
    },
    /// A number in it is none.
    #[error("layer {layer} of it holds a number that is not finite")]
    NotFinite {
        /// The layer.
        layer: usize,
    },
}

/// Most bytes of the file of such a model.
pub fn most_file_bytes(config: &ModelConfig) -> u64 {
    let [layers, hidden, experts] = shape(config).map(u64::from);
    let layer = 4 + 2 * MOST_RANK as u64 * (hidden + experts) + 4 * experts;
    (HEADER_BYTES + CHECKSUM_BYTES) as u64 + layers * layer
}

fn shape(config: &ModelConfig) -> [u32; 3] {
    [config.n_layers, config.hidden, config.n_experts]
}

/// As bytes of a file, for a model of this identity.
///
/// # Panics
/// If it is not of this shape of model.
pub fn encode(correction: &Correction, identity: u64, config: &ModelConfig) -> Vec<u8> {
    assert_eq!(correction.layers.len(), config.n_layers as usize, "a correction of this model");
    let mut bytes = Vec::new();
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&identity.to_le_bytes());
    bytes.extend(shape(config).into_iter().flat_map(u32::to_le_bytes));
    for layer in &correction.layers {
        let Some(LayerCorrection { rank, down, up, bias }) = layer else {
            bytes.extend_from_slice(&0_u32.to_le_bytes());
            continue;
        };
        bytes.extend_from_slice(&(*rank as u32).to_le_bytes());
        bytes.extend_from_slice(down);
        bytes.extend_from_slice(up);
        bytes.extend(bias.iter().flat_map(|value| value.to_le_bytes()));
    }
    bytes.extend_from_slice(&Checksum::of(&bytes).to_le_bytes());
    bytes
}

/// Reads what [`encode`] wrote, for a model of this identity and shape.
///
/// # Errors
/// [`FittedError`].
pub fn decode(
    bytes: &[u8],
    identity: u64,
    config: &ModelConfig,
) -> Result<Correction, FittedError> {
    if bytes.get(..8) != Some(MAGIC) {
        return Err(FittedError::Magic);
    }
    let word = |at: usize| bytes.get(at..at + 4).map(|w| u32::from_le_bytes(array(w)));
    match word(8) {
        Some(VERSION) | None => {}
        Some(found) => return Err(FittedError::Version { found }),
    }
    let least = HEADER_BYTES + CHECKSUM_BYTES;
    if bytes.len() < least {
        return Err(FittedError::Length { found: bytes.len(), needed: least });
    }
    let found_shape = [20, 24, 28].map(word);
    let found = (u64::from_le_bytes(array(&bytes[12..20])), found_shape);
    if found != (identity, shape(config).map(Some)) {
        return Err(FittedError::Foreign);
    }
    let (content, sum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
    if u64::from_le_bytes(array(sum)) != Checksum::of(content) {
        return Err(FittedError::Checksum);
    }
    let mut rest = Rest { bytes: content, at: HEADER_BYTES };
    let layers = (0..config.n_layers as usize).map(|layer| rest.layer(layer, config));
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    if rest.at != content.len() {
        let needed = rest.at + CHECKSUM_BYTES;
        return Err(FittedError::Length { found: bytes.len(), needed });
    }
    Ok(Correction { layers })
}

/// What is still to be read of a file without its checksum.
struct Rest<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Rest<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], FittedError> {
        let end = self.at + len;
        let taken = self.bytes.get(self.at..end);
        self.at = end;
        let (found, needed) = (self.bytes.len() + CHECKSUM_BYTES, end + CHECKSUM_BYTES);
        taken.ok_or(FittedError::Length { found, needed })
    }

    fn layer(
        &mut self,
        layer: usize,
        config: &ModelConfig,
    ) -> Result<Option<LayerCorrection>, FittedError> {
        let found = u32::from_le_bytes(array(self.take(4)?));
        let rank = found as usize;
        match rank {
            0 => return Ok(None),
            1..=MOST_RANK => {}
            _ => return Err(FittedError::Rank { layer, found }),
        }
        let (hidden, n_experts) = (config.hidden as usize, config.n_experts as usize);
        let [down, up] = LayerCorrection::matrix_bytes(rank, hidden, n_experts);
        let (down, up) = (self.take(down)?.to_vec(), self.take(up)?.to_vec());
        let bias = self.take(4 * n_experts)?.as_chunks::<4>().0;
        let bias: Vec<f32> = bias.iter().map(|value| f32::from_le_bytes(*value)).collect();
        let finite = |halves: &[u8]| {
            let halves = halves.as_chunks::<2>().0.iter();
            halves.fold(true, |finite, half| {
                finite & quant::f16_to_f32(u16::from_le_bytes(*half)).is_finite()
            })
        };
        if !finite(&down) || !finite(&up) || bias.iter().any(|value| !value.is_finite()) {
            return Err(FittedError::NotFinite { layer });
        }
        Ok(Some(LayerCorrection { rank, down, up, bias }))
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the caller cut as many")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const ID: u64 = 0x1234_5678_9ABC_DEF0;

    fn config() -> ModelConfig {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/sakia-demo-Q4_K_M.gguf");
        let config = crate::OpenModel::open(Path::new(demo)).unwrap().model.config;
        ModelConfig { n_layers: 3, hidden: 5, n_experts: 4, ..config }
    }

    fn correction() -> Correction {
        let layer = |rank: usize| {
            let [down, up] = LayerCorrection::matrix_bytes(rank, 5, 4);
            let halves = |n: usize, first: u8| (0..n).map(|i| first + i as u8 % 50).collect();
            let bias = vec![0.5, -1.0, 2.0, 0.0];
            LayerCorrection { rank, down: halves(down, 3), up: halves(up, 9), bias }
        };
        Correction { layers: vec![None, Some(layer(2)), Some(layer(1))] }
    }

    fn whole() -> Vec<u8> {
        encode(&correction(), ID, &config())
    }

    fn read(bytes: &[u8]) -> Result<Correction, FittedError> {
        decode(bytes, ID, &config())
    }

    /// The file with a checksum that fits.
    fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.truncate(bytes.len() - CHECKSUM_BYTES);
        bytes.extend_from_slice(&Checksum::of(&bytes).to_le_bytes());
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(read(&whole()), Ok(correction()));
        assert!(whole().len() as u64 <= most_file_bytes(&config()));
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let bytes = whole();
        for len in 0..bytes.len() {
            assert!(read(&bytes[..len]).is_err(), "{len} bytes");
            let long = len >= HEADER_BYTES + CHECKSUM_BYTES;
            assert!(!long || read(&sealed(bytes[..len].to_vec())).is_err(), "{len}, sealed");
        }
        assert!(read(&sealed([&bytes[..], &[0]].concat())).is_err());
    }

    #[test]
    fn a_changed_byte_anywhere_is_refused() {
        let bytes = whole();
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x10;
            assert!(read(&bytes).is_err(), "byte {at}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let with = |at: usize, bytes: &[u8]| {
            let mut file = whole();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            read(&sealed(file))
        };
        assert_eq!(with(8, &2_u32.to_le_bytes()), Err(FittedError::Version { found: 2 }));
        assert_eq!(with(12, &[0]), Err(FittedError::Foreign));
        assert_eq!(with(24, &[9]), Err(FittedError::Foreign));
        let first = HEADER_BYTES + 4;
        let most = MOST_RANK as u32 + 1;
        let rank = with(first, &most.to_le_bytes());
        assert_eq!(rank, Err(FittedError::Rank { layer: 1, found: most }));
        let infinite = 0x7c00_u16.to_le_bytes();
        assert_eq!(with(first + 4, &infinite), Err(FittedError::NotFinite { layer: 1 }));
        assert_eq!(read(b"GGUF\x03\0\0\0 and so on"), Err(FittedError::Magic));
    }
}
