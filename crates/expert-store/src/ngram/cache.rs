//! Rows that were read before, up to a fixed number.
//!
//! Sets of a few ways, the oldest of a set leaves first. What is found saves a read and nothing else.

/// Rows that compete for a place.
const WAYS: usize = 8;

/// A place without a row; no table has so many.
const NOTHING: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct RowCache {
    row_bytes: usize,
    ways: usize,
    /// `[sets, ways]`.
    keys: Vec<u64>,
    /// When each was last used.
    used: Vec<u64>,
    bytes: Vec<u8>,
    clock: u64,
}

impl RowCache {
    /// Room for at least `rows` rows, or none at all.
    pub(super) fn new(rows: usize, row_bytes: usize) -> Self {
        let (ways, places) = Self::layout(rows);
        Self {
            row_bytes,
            ways,
            keys: vec![NOTHING; places],
            used: vec![0; places],
            bytes: vec![0; places * row_bytes],
            clock: 0,
        }
    }

    /// Ways of a set, and places of all.
    fn layout(rows: usize) -> (usize, usize) {
        let ways = rows.min(WAYS);
        (ways, if ways == 0 { 0 } else { rows.next_multiple_of(ways) })
    }

    /// What a cache of so many rows takes.
    pub(super) fn memory_bytes(rows: usize, row_bytes: usize) -> u64 {
        (Self::layout(rows).1 * (row_bytes + 2 * size_of::<u64>())) as u64
    }

    /// The row, if it is here.
    pub(super) fn get(&mut self, row: u64) -> Option<&[u8]> {
        let first = self.first_place(row)?;
        let place = (first..first + self.ways).find(|place| self.keys[*place] == row)?;
        self.clock += 1;
        self.used[place] = self.clock;
        Some(&self.bytes[place * self.row_bytes..(place + 1) * self.row_bytes])
    }

    /// Keeps a row that is not here.
    pub(super) fn insert(&mut self, row: u64, bytes: &[u8]) {
        let Some(first) = self.first_place(row) else { return };
        let places = first..first + self.ways;
        let place = places.min_by_key(|place| self.used[*place]).expect("a set has places");
        self.clock += 1;
        (self.keys[place], self.used[place]) = (row, self.clock);
        self.bytes[place * self.row_bytes..(place + 1) * self.row_bytes].copy_from_slice(bytes);
    }

    /// Where the row's set begins.
    fn first_place(&self, row: u64) -> Option<usize> {
        let sets = self.keys.len().checked_div(self.ways)?;
        // The high half of a product by 2^64 over the golden ratio is spread evenly.
        let spread = row.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        Some(((spread * sets as u64) >> 32) as usize * self.ways)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_found_until_newer_ones_take_its_place() {
        let mut cache = RowCache::new(3, 2);
        assert_eq!(cache.get(5), None);
        for row in 1..4 {
            cache.insert(row, &[row as u8; 2]);
        }
        assert_eq!(cache.get(1), Some([1; 2].as_slice()));
        cache.insert(9, &[9; 2]);
        assert_eq!([1, 2, 3, 9].map(|row| cache.get(row).is_some()), [true, false, true, true]);
        assert_eq!(cache.get(9), Some([9; 2].as_slice()));
    }

    #[test]
    fn a_cache_without_places_keeps_nothing() {
        let mut cache = RowCache::new(0, 100);
        cache.insert(1, &[7; 100]);
        assert_eq!((cache.get(1), RowCache::memory_bytes(0, 100)), (None, 0));
    }

    #[test]
    fn rows_are_spread_over_all_sets() {
        let cache = RowCache::new(1000, 1);
        let mut places: Vec<_> = (0..4000).filter_map(|row| cache.first_place(row)).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!((places.len(), places.last()), (125, Some(&992)));
        assert_eq!(RowCache::memory_bytes(1000, 1), 17_000);
    }
}
