//! What happened, one definition each.

/// Totals since a pool was made.
///
/// The unit is one *distinct* expert of a layer in one pass, whatever number of rows chose it and whatever number of
/// waves the pass took. Each is counted once as looked up, when the first wave starts, and once as what it turned out
/// to be, when the wave that serves it starts: a hit, an adopted forecast or a miss. So after the last wave
/// `lookups == hits + adopted + misses`. A transaction aborted before its start counts nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PoolCounters {
    /// Distinct experts per layer and pass.
    pub lookups: u64,
    /// Of those, found ready, and not for the first time after a forecast's read.
    pub hits: u64,
    /// Of those, read on demand.
    pub misses: u64,
    /// Of those, served by a forecast's read, still in flight or complete: the bytes had to be read all the same.
    pub adopted: u64,
    /// Experts that left for another.
    pub evictions: u64,
    /// Slots reserved by forecasts.
    pub speculative: u64,
    /// Of those, given up or evicted before any use.
    pub wasted: u64,
}

impl PoolCounters {
    /// What happened since `earlier`, which was read from the same pool.
    #[must_use]
    pub const fn minus(&self, earlier: &Self) -> Self {
        Self {
            lookups: self.lookups - earlier.lookups,
            hits: self.hits - earlier.hits,
            misses: self.misses - earlier.misses,
            adopted: self.adopted - earlier.adopted,
            evictions: self.evictions - earlier.evictions,
            speculative: self.speculative - earlier.speculative,
            wasted: self.wasted - earlier.wasted,
        }
    }

    /// Both together.
    #[must_use]
    pub const fn plus(&self, other: &Self) -> Self {
        Self {
            lookups: self.lookups + other.lookups,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            adopted: self.adopted + other.adopted,
            evictions: self.evictions + other.evictions,
            speculative: self.speculative + other.speculative,
            wasted: self.wasted + other.wasted,
        }
    }
}
