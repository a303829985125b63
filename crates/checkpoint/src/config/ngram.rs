//! The n-gram table: which of its rows belong to a token.
//!
//! Rows follow from token ids alone: the last tokens are hashed by a few functions ("heads"), each into a table of
//! its own prime size, and all tables lie behind each other. The constants can be derived, and files carry them too:
//! those of the file are used, and held against the derivation.

use super::keys::Keys;
use crate::error::CheckpointError;
use crate::limits;
use crate::metadata::{MetaArray, MetaValue};

/// What multipliers are derived from when nothing else was chosen.
const USUAL_SEED: u64 = 1234;
/// Largest number that is the same with and without a sign.
const MOST: u64 = i64::MAX as u64;
/// Of splitmix64: 2^64 over the golden ratio.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The n-gram table and the block that adds its rows to the residual streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramShape {
    /// The trunk layer that begins with it.
    pub layer: u32,
    /// Tokens of the longest n-gram, at least 2; also the distance between taps of the convolution.
    pub ngram_size: u32,
    /// Hash functions for each length of n-gram, from 2 tokens on.
    pub heads_per_ngram: u32,
    /// Values of a row.
    pub row_width: u32,
    /// Taps of the convolution.
    pub conv_kernel: u32,
    /// The token that texts are separated by: no n-gram reaches across it. Not the one that ends a chat turn.
    pub eos: u32,
    /// Odd factors, one for each token of an n-gram, newest first.
    pub multipliers: Vec<u64>,
    /// Rows of each head's table.
    pub head_sizes: Vec<u64>,
    /// First row of each head's table.
    pub head_offsets: Vec<u64>,
}

impl NgramShape {
    /// Rows of a token, one for each head.
    pub const fn heads(&self) -> usize {
        self.head_sizes.len()
    }

    /// Values of all rows of a token.
    pub const fn width(&self) -> usize {
        self.heads() * self.row_width as usize
    }

    /// Rows that the table needs at least.
    pub fn table_rows(&self) -> u64 {
        let ends =
            self.head_offsets.iter().zip(&self.head_sizes).map(|(offset, size)| offset + size);
        ends.max().unwrap_or(0)
    }

    /// The table rows of the last of `tokens`, which are those of its sequence from the beginning, or at least the
    /// last [`Self::ngram_size`].
    ///
    /// # Panics
    /// If there is no token, or `out` is not one number for each head.
    pub fn rows(&self, tokens: &[u32], out: &mut [u64]) {
        assert_eq!(out.len(), self.heads(), "one row for each head");
        let (last, before) = tokens.split_last().expect("a row belongs to a token");
        let mut before = before.iter().rev();
        let mut hash = u64::from(*last).wrapping_mul(self.multipliers[0]);
        let mut ended = false;
        let heads = out.chunks_exact_mut(self.heads_per_ngram as usize).enumerate();
        for (n, out) in heads {
            // Nothing before an end of text belongs to this one, nor does anything before the beginning.
            let token = before.next().copied().filter(|_| !ended).unwrap_or(self.eos);
            ended |= token == self.eos;
            hash ^= u64::from(token).wrapping_mul(self.multipliers[n + 1]);
            for (i, row) in out.iter_mut().enumerate() {
                let head = n * self.heads_per_ngram as usize + i;
                *row = hash % self.head_sizes[head] + self.head_offsets[head];
            }
        }
    }
}

/// The shape; none if the file names no layer for it.
pub(super) fn read(
    keys: &Keys<'_>,
    n_layers: u64,
    vocab: u32,
    warnings: &mut Vec<String>,
) -> Result<Option<NgramShape>, CheckpointError> {
    let Some(layer) = layer(keys, n_layers)? else { return Ok(None) };
    let ngram_size = keys.required("ple.ngram_size", 2, limits::NGRAM_SIZE)?;
    let heads_per_ngram = keys.required("ple.heads_per_ngram", 1, limits::NGRAM_HEADS)?;
    let heads = ((ngram_size - 1) * heads_per_ngram) as usize;
    let row_width = keys.required("embedding_length_per_layer_input", 1, limits::WIDTH)?;
    if heads as u64 * row_width > limits::WIDTH {
        let needed = format!("at most {} values in the {heads} rows of a token", limits::WIDTH);
        return Err(keys.error("embedding_length_per_layer_input", row_width.to_string(), needed));
    }
    let eos = keys.required("ple.eos_token_id", 0, u64::from(vocab.saturating_sub(1)))?;
    let shape = NgramShape {
        layer,
        ngram_size: ngram_size as u32,
        heads_per_ngram: heads_per_ngram as u32,
        row_width: row_width as u32,
        conv_kernel: keys.required("ple.conv_kernel", 1, limits::CONV_KERNEL)? as u32,
        eos: eos as u32,
        multipliers: numbers(keys, "ple.layer_multipliers", ngram_size as usize)?,
        head_sizes: numbers(keys, "ple.head_vocab_sizes", heads)?,
        head_offsets: numbers(keys, "ple.head_offsets", heads)?,
    };
    check(keys, &shape, vocab)?;
    warn(keys, &shape, vocab, warnings);
    Ok(Some(shape))
}

/// The layer that begins with the table's rows, counted from 0.
fn layer(keys: &Keys<'_>, n_layers: u64) -> Result<Option<u32>, CheckpointError> {
    let key = "ple.layers";
    let needed = || format!("an array of one layer below {n_layers}");
    let layers = match keys.get(key) {
        None => return Ok(None),
        Some(MetaValue::Array(MetaArray::U64s(layers))) => layers.clone(),
        Some(MetaValue::Array(MetaArray::I64s(layers))) => {
            layers.iter().map(|layer| u64::try_from(*layer).unwrap_or(u64::MAX)).collect()
        }
        Some(other) => return Err(keys.error(key, other.kind().to_owned(), needed())),
    };
    match *layers.as_slice() {
        [] => Ok(None),
        [layer] if layer < n_layers => Ok(Some(layer as u32)),
        [layer] => Err(keys.error(key, layer.to_string(), needed())),
        _ => Err(CheckpointError::Unsupported {
            file: keys.checkpoint.metadata_file().to_owned(),
            what: format!("metadata `{}`", keys.checkpoint.metadata.spelling(&keys.name(key))),
            found: format!("{} layers", layers.len()),
            supported: "one".to_owned(),
        }),
    }
}

fn numbers(keys: &Keys<'_>, key: &str, len: usize) -> Result<Vec<u64>, CheckpointError> {
    let needed = || format!("an array of {len} numbers below 2^63");
    let numbers: Vec<u64> = match keys.get(key) {
        Some(MetaValue::Array(MetaArray::U64s(numbers))) => numbers.clone(),
        Some(MetaValue::Array(MetaArray::I64s(numbers))) => {
            numbers.iter().map(|number| u64::try_from(*number).unwrap_or(u64::MAX)).collect()
        }
        Some(other) => return Err(keys.error(key, other.kind().to_owned(), needed())),
        None => return Err(keys.error(key, "nothing".to_owned(), needed())),
    };
    if numbers.len() != len {
        return Err(keys.error(key, format!("an array of {} values", numbers.len()), needed()));
    }
    match numbers.iter().find(|number| **number > MOST) {
        Some(number) => Err(keys.error(key, (*number).cast_signed().to_string(), needed())),
        None => Ok(numbers),
    }
}

/// Refuses constants of another kind than the derivation gives, which then mean something else.
fn check(keys: &Keys<'_>, shape: &NgramShape, vocab: u32) -> Result<(), CheckpointError> {
    // Odd, so that nothing of a token is lost, and products below 2^63, so that signs do not matter.
    let most = MOST / u64::from(vocab.max(1));
    let fits = |multiplier: &&u64| !multiplier.is_multiple_of(2) && **multiplier <= most;
    if let Some(found) = shape.multipliers.iter().find(|multiplier| !fits(multiplier)) {
        let needed = format!("odd numbers up to {most}");
        return Err(keys.error("ple.layer_multipliers", found.to_string(), needed));
    }
    let mut end = 0_u64;
    for (size, offset) in shape.head_sizes.iter().zip(&shape.head_offsets) {
        if *offset != end {
            let needed = format!("{end}, where the table of the head before ends");
            return Err(keys.error("ple.head_offsets", offset.to_string(), needed));
        }
        end = match end.checked_add(*size) {
            Some(end) if *size > 0 && end <= MOST => end,
            _ => {
                let needed = "rows of one head's table, a prime".to_owned();
                return Err(keys.error("ple.head_vocab_sizes", size.to_string(), needed));
            }
        };
    }
    if let Some(found) = shape.head_sizes.iter().find(|size| !is_prime(**size)) {
        let needed = "prime numbers".to_owned();
        return Err(keys.error("ple.head_vocab_sizes", found.to_string(), needed));
    }
    Ok(())
}

/// Notes constants of the right kind that the derivation does not give: another seed, or another choice of primes.
fn warn(keys: &Keys<'_>, shape: &NgramShape, vocab: u32, warnings: &mut Vec<String>) {
    let derived = multipliers(USUAL_SEED, vocab, shape.multipliers.len());
    if shape.multipliers != derived {
        warnings.push(format!(
            "metadata `{}` is {:?}, and {derived:?} by the usual derivation; the file's numbers are used",
            keys.name("ple.layer_multipliers"),
            shape.multipliers
        ));
    }
    let follows = |pair: &[u64; 2]| next_prime(pair[0]) == pair[1];
    if let Some([first, second]) = shape.head_sizes.array_windows().find(|pair| !follows(pair)) {
        warnings.push(format!(
            "metadata `{}`: {second} is not the next prime after {first}; the file's numbers are used",
            keys.name("ple.head_vocab_sizes")
        ));
    }
}

/// The factors of the first n-gram layer.
fn multipliers(seed: u64, vocab: u32, n: usize) -> Vec<u64> {
    let half = (MOST / u64::from(vocab.max(1)) / 2).max(1);
    let multiplier =
        |i: u64| 2 * (splitmix64(seed.wrapping_add(GOLDEN.wrapping_mul(i))) % half) + 1;
    (1..=n as u64).map(multiplier).collect()
}

/// Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", in Vigna's form.
const fn splitmix64(state: u64) -> u64 {
    let z = state.wrapping_add(GOLDEN);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The first prime after a number from 1 to [`MOST`].
fn next_prime(after: u64) -> u64 {
    let found = (after + 1..=2 * after).find(|n| is_prime(*n));
    found.expect("there is a prime between any number and its double")
}

/// Miller-Rabin with the twelve bases that decide for every number below 2^64.
fn is_prime(n: u64) -> bool {
    const BASES: [u64; 12] = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37];
    if n < 2 {
        return false;
    }
    if let Some(factor) = BASES.into_iter().find(|base| n.is_multiple_of(*base)) {
        return n == factor;
    }
    let times = |a: u64, b: u64| (u128::from(a) * u128::from(b) % u128::from(n)) as u64;
    let twos = (n - 1).trailing_zeros();
    BASES.into_iter().all(|base| {
        let (mut power, mut square, mut exponent) = (1, base % n, (n - 1) >> twos);
        while exponent > 0 {
            if exponent & 1 == 1 {
                power = times(power, square);
            }
            square = times(square, square);
            exponent >>= 1;
        }
        let mut strong = power == 1 || power == n - 1;
        for _ in 1..twos {
            power = times(power, power);
            strong |= power == n - 1;
        }
        strong
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: u32 = 248_044;

    /// The published model's table: the first 16 primes after 19,999,999, multipliers for 248,320 tokens.
    fn published() -> NgramShape {
        let sizes: Vec<u64> =
            std::iter::successors(Some(20_000_003), |prime| Some(next_prime(*prime)))
                .take(16)
                .collect();
        let ends = sizes.iter().scan(0, |end, size| {
            let start = *end;
            *end += size;
            Some(start)
        });
        NgramShape {
            layer: 1,
            ngram_size: 3,
            heads_per_ngram: 8,
            row_width: 160,
            conv_kernel: 4,
            eos: EOS,
            multipliers: multipliers(USUAL_SEED, 248_320, 3),
            head_offsets: ends.collect(),
            head_sizes: sizes,
        }
    }

    #[test]
    fn the_published_constants_are_derived() {
        let shape = published();
        assert_eq!(shape.multipliers, [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071]);
        assert_eq!(
            shape.head_sizes,
            [
                20_000_003, 20_000_023, 20_000_033, 20_000_047, 20_000_059, 20_000_063, 20_000_069,
                20_000_077, 20_000_081, 20_000_093, 20_000_107, 20_000_147, 20_000_153, 20_000_159,
                20_000_161, 20_000_171
            ]
        );
        assert_eq!(shape.head_offsets[15], 300_001_275);
        assert_eq!(shape.table_rows(), 320_001_446);
        assert_eq!((shape.heads(), shape.width()), (16, 2560));
    }

    /// Rows of the published model for seven tokens from an empty history, the last two after an end of text.
    const GOLDEN_ROWS: [(u32, [u64; 16]); 5] = [
        (
            9419,
            [
                6_783_314,
                25_893_696,
                59_239_020,
                66_167_313,
                81_761_837,
                114_435_313,
                124_203_423,
                151_975_917,
                166_590_818,
                187_833_462,
                212_087_477,
                223_519_364,
                246_888_052,
                271_470_774,
                293_268_240,
                304_278_145,
            ],
        ),
        (
            11,
            [
                2_719_687,
                25_344_284,
                46_798_474,
                76_993_254,
                83_021_999,
                111_728_594,
                124_816_772,
                142_320_644,
                167_808_581,
                183_572_719,
                210_276_485,
                230_623_202,
                241_922_991,
                273_548_433,
                284_162_581,
                317_775_660,
            ],
        ),
        (
            1814,
            [
                9_385_754,
                32_482_397,
                54_062_840,
                76_311_413,
                98_272_164,
                118_932_639,
                139_929_746,
                141_271_114,
                167_282_821,
                194_187_290,
                209_012_959,
                226_273_870,
                249_941_911,
                273_630_502,
                281_531_265,
                301_069_159,
            ],
        ),
        (
            0,
            [
                1_013_992,
                23_201_827,
                44_323_126,
                69_923_598,
                83_323_875,
                107_796_533,
                124_510_935,
                153_473_718,
                162_911_550,
                184_350_643,
                212_729_531,
                231_151_909,
                251_940_610,
                272_735_893,
                299_669_277,
                314_346_201,
            ],
        ),
        (
            EOS,
            [
                16_421_076,
                34_964_127,
                58_645_314,
                64_737_717,
                85_974_391,
                107_327_379,
                120_238_726,
                145_766_809,
                174_874_024,
                192_768_989,
                202_334_998,
                235_730_629,
                245_800_577,
                276_929_966,
                287_541_827,
                302_366_280,
            ],
        ),
    ];

    #[test]
    fn rows_are_those_of_the_published_model_and_no_ngram_crosses_an_end_of_text() {
        let shape = published();
        let text = [9419, 11, 1814, 0, EOS, 9419, 11];
        let expected = GOLDEN_ROWS.iter().chain(&GOLDEN_ROWS[..2]);
        for (position, (token, rows)) in expected.enumerate() {
            assert_eq!(text[position], *token);
            let mut found = [0; 16];
            shape.rows(&text[..=position], &mut found);
            assert_eq!(found, *rows, "position {position}");
            // Older tokens than an n-gram has do not matter.
            shape.rows(&text[(position + 1).saturating_sub(3)..=position], &mut found);
            assert_eq!(found, *rows, "position {position}");
        }
    }

    #[test]
    fn primes_are_told_from_composites() {
        let sieve =
            |n: u64| n >= 2 && (2..n).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d));
        assert!((0..5000).all(|n| is_prime(n) == sieve(n)));
        // The largest prime below 2^64, its square's neighbour, and a strong pseudoprime to bases 2 to 31.
        assert!(is_prime(18_446_744_073_709_551_557));
        assert!(!is_prime(18_446_744_073_709_551_555));
        assert!(!is_prime(3_825_123_056_546_413_051));
    }
}
