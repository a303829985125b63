//! Geometry of the n-gram table: derived from one number, as the model's code does it.

use super::rng::{GOLDEN, splitmix64};

/// Seed of the hash; the published configuration leaves it out.
const SEED: u64 = 1234;
/// Rows are padded to a multiple of this, and split into as many shards.
pub(super) const SHARDS: u64 = 128;

/// Where the rows of each head lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NgramTable {
    /// `ngram_vocab_size_base`: no head has fewer rows.
    pub(super) base: u64,
    /// Rows of each head: the first primes from the base on.
    pub(super) sizes: Vec<u64>,
    /// First row of each head.
    pub(super) offsets: Vec<u64>,
    /// Rows of all heads, padded.
    pub(super) rows: u64,
}

impl NgramTable {
    pub(super) fn new(base: u64, heads: u32) -> Self {
        let sizes: Vec<u64> = (base..).filter(|n| is_prime(*n)).take(heads as usize).collect();
        let mut total = 0;
        let offsets = sizes.iter().map(|size| {
            let offset = total;
            total += size;
            offset
        });
        let offsets = offsets.collect();
        Self { base, sizes, offsets, rows: total.next_multiple_of(SHARDS) }
    }

    /// Rows of one shard.
    pub(super) const fn shard_rows(&self) -> u64 {
        self.rows / SHARDS
    }
}

/// The odd factors that tokens 0, 1 and 2 back are multiplied by, for the first layer that has a table.
///
/// They are below `2^63 / vocab`, so that no product overflows.
pub(super) fn multipliers(vocab: u64) -> [u64; 3] {
    let half = (i64::MAX as u64 / vocab) / 2;
    [1, 2, 3].map(|i: u64| 2 * (splitmix64(SEED.wrapping_add(GOLDEN.wrapping_mul(i))) % half) + 1)
}

fn is_prime(n: u64) -> bool {
    n > 1 && (2..=n.isqrt()).all(|d| !n.is_multiple_of(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_table_has_the_published_rows() {
        let table = NgramTable::new(20_000_000, 16);
        let ends = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171];
        assert_eq!(table.sizes, ends.map(|end| 20_000_000 + end));
        assert_eq!(table.offsets[..3], [0, 20_000_003, 40_000_026]);
        assert_eq!(table.offsets[15], 300_001_275);
        assert_eq!((table.rows, table.shard_rows()), (320_001_536, 2_500_012));
    }

    #[test]
    fn the_published_multipliers_follow_from_the_vocabulary() {
        let published = [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071];
        assert_eq!(multipliers(248_320), published);
    }

    #[test]
    fn a_small_table_follows_the_same_rule() {
        let table = NgramTable::new(128, 16);
        assert_eq!(table.sizes[..4], [131, 137, 139, 149]);
        let last = table.offsets[15] + table.sizes[15];
        assert!(table.rows >= last && table.rows < last + SHARDS);
        assert!(table.rows.is_multiple_of(SHARDS));
    }
}
