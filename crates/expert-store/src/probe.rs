//! How a disk wants to be read: how many reads at once, and how long ones.
//!
//! What is timed is what a layer does: a handful of the model's own records, all in flight at once, until the last one
//! is there. Candidates take turns, so that a disk that others use too treats them alike, and the default wins unless
//! another one is clearly faster.
#![allow(unsafe_code, reason = "memory of the probe is lent to reader threads")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use checkpoint::Records;
use units::ExpertKey;

use crate::destination::{ALIGN, Destination};
use crate::error::{ReadError, StoreError};
use crate::request::{Priority, ReadRequest, Ticket};
use crate::store::{DEFAULT_THREADS, Store, StoreOptions};

/// Numbers of threads that are tried.
const THREADS: [usize; 4] = [2, DEFAULT_THREADS, 8, 16];

/// Lengths of parts that are tried, if pieces are longer.
const PARTS: [u64; 3] = [u64::MAX, 1 << 20, 256 << 10];

/// Turns that every candidate gets.
const ROUNDS: usize = 3;

/// Time of a turn, or that of one layer if that takes longer.
const TURN: Duration = Duration::from_millis(50);

/// Time after which no turn begins.
const LIMIT: Duration = Duration::from_millis(1500);

/// How much faster another candidate has to be than the default: less is noise.
const CLEARLY: f64 = 1.05;

/// Most records in flight.
const MOST_IN_FLIGHT: usize = 8;

/// How to read a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReadModel {
    /// Reader threads; see [`StoreOptions::threads`].
    pub threads: usize,
    /// Where long pieces are cut; see [`StoreOptions::part_bytes`].
    pub part_bytes: u64,
}

impl Default for ReadModel {
    fn default() -> Self {
        Self { threads: DEFAULT_THREADS, part_bytes: u64::MAX }
    }
}

/// What a probe found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probed {
    /// The best way to read.
    pub model: ReadModel,
    /// Bytes of records that it delivered in a second.
    pub bytes_per_second: u64,
}

/// Why a disk could not be probed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The files cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A record cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// Times reads of records for one to two seconds; longer only if a handful of records takes that long.
///
/// - `options`: how to read, apart from what is to be found out
/// - `in_flight`: experts of a token
///
/// # Errors
/// [`ProbeError`]; a disk that cannot be read is no disk to measure.
pub fn probe(
    files: &[PathBuf],
    records: &Records,
    options: &StoreOptions,
    in_flight: usize,
) -> Result<Probed, ProbeError> {
    let since = Instant::now();
    let mut bench = Bench::new(files, records, options, in_flight);
    let threads = THREADS.map(|threads| ReadModel { threads, ..ReadModel::default() });
    let best = bench.best(&threads, ReadModel::default(), since)?;
    let parts = PARTS.map(|part_bytes| ReadModel { part_bytes, ..best.model });
    if bench.longest_piece() <= PARTS[1] {
        return Ok(best);
    }
    let last = bench.best(&parts, best.model, since)?;
    Ok(newer(best, last))
}

/// Bytes of records a second that the disk delivers when it never has to wait for a request: the model's own records at
/// random, read with `options`, and always a few more of them asked for than there are reader threads.
///
/// # Errors
/// [`ProbeError`].
pub fn sustained_rate(
    files: &[PathBuf],
    records: &Records,
    options: &StoreOptions,
    time: Duration,
) -> Result<f64, ProbeError> {
    let in_flight = options.all_threads() + MOST_IN_FLIGHT;
    // Dropped after the store, whatever happens.
    let mut bench = Bench::with_slots(files, records, options, in_flight);
    let store = Store::open(files, options.clone())?;
    Ok(bench.sustained(&store, time)?)
}

/// What was found last, unless no time was left to find anything.
const fn newer(before: Probed, last: Probed) -> Probed {
    if last.bytes_per_second > 0 { last } else { before }
}

/// Records of a model, memory for a few of them, and a way to time them.
struct Bench<'a> {
    files: &'a [PathBuf],
    records: &'a Records,
    options: &'a StoreOptions,
    memory: Vec<u8>,
    slot_bytes: usize,
    /// State of the generator that picks experts.
    random: u64,
}

impl<'a> Bench<'a> {
    fn new(
        files: &'a [PathBuf],
        records: &'a Records,
        options: &'a StoreOptions,
        in_flight: usize,
    ) -> Self {
        Self::with_slots(files, records, options, in_flight.clamp(1, MOST_IN_FLIGHT))
    }

    fn with_slots(
        files: &'a [PathBuf],
        records: &'a Records,
        options: &'a StoreOptions,
        n_slots: usize,
    ) -> Self {
        let layers = 0..records.n_layers() as u32;
        let keys = layers
            .flat_map(|layer| (0..records.n_experts()).map(move |e| ExpertKey::new(layer, e)));
        let slot_bytes = keys.map(|key| records.slot_bytes(key)).max().unwrap_or(0) as usize;
        let memory = vec![0; slot_bytes * n_slots + ALIGN];
        Self { files, records, options, memory, slot_bytes, random: 1 }
    }

    fn longest_piece(&self) -> u64 {
        let record = self.records.record(ExpertKey::new(0, 0));
        let plain = record.pieces.iter().filter(|piece| piece.blocks.is_none());
        plain.map(|piece| piece.bytes).max().unwrap_or(0)
    }

    /// The fastest of these by the medians of their turns; `usual` if none is clearly faster.
    fn best(
        &mut self,
        candidates: &[ReadModel],
        usual: ReadModel,
        since: Instant,
    ) -> Result<Probed, ProbeError> {
        let mut stores = Vec::with_capacity(candidates.len());
        for &ReadModel { threads, part_bytes } in candidates {
            let options = StoreOptions { threads, part_bytes, ..self.options.clone() };
            stores.push(Store::open(self.files, options)?);
        }
        let mut rates = vec![Vec::with_capacity(ROUNDS); candidates.len()];
        'turns: for _ in 0..ROUNDS {
            for (store, rates) in stores.iter().zip(&mut rates) {
                if since.elapsed() >= LIMIT {
                    break 'turns;
                }
                rates.push(self.turn(store)?);
            }
        }
        Ok(choose(candidates, usual, &rates))
    }

    /// Bytes a second of some layers.
    fn turn(&mut self, store: &Store) -> Result<f64, ReadError> {
        let (since, mut bytes) = (Instant::now(), 0);
        loop {
            bytes += self.layer(store)?;
            if since.elapsed() >= TURN {
                return Ok(bytes as f64 / since.elapsed().as_secs_f64());
            }
        }
    }

    /// Reads some experts of a layer; all have ended when it returns.
    fn layer(&mut self, store: &Store) -> Result<u64, ReadError> {
        let layer = self.below(self.records.n_layers() as u64) as u32;
        let shift = self.memory.as_ptr().align_offset(ALIGN);
        let n_slots = (self.memory.len() - ALIGN) / self.slot_bytes.max(1);
        let keys: Vec<ExpertKey> = (0..n_slots)
            .map(|_| ExpertKey::new(layer, self.below(self.records.n_experts().into()) as u32))
            .collect();
        let slots = self.memory[shift..].chunks_exact_mut(self.slot_bytes);
        for (key, slot) in keys.into_iter().zip(slots) {
            // SAFETY: nobody touches the memory before the loop below has seen the end of every read, and it outlives
            // the store, which only panics could drop before that.
            let destination = unsafe { Destination::lend(slot) };
            let pieces = self.records.record(key).pieces;
            store.submit(ReadRequest { key, pieces, destination }, Priority::Demand);
        }
        let mut total = Ok(0);
        while store.outstanding() > 0 {
            let result = store.wait_any().result;
            total = total.and_then(|sum| Ok(sum + result?));
        }
        total
    }

    /// Bytes a second while every slot has a read in flight; all have ended when it returns.
    fn sustained(&mut self, store: &Store, time: Duration) -> Result<f64, ReadError> {
        let shift = self.memory.as_ptr().align_offset(ALIGN);
        let (records, random) = (self.records, &mut self.random);
        let slots = self.memory[shift..].chunks_exact_mut(self.slot_bytes.max(1));
        let mut slots: Vec<&mut [u8]> = slots.collect();
        let mut submit = |slot: &mut [u8]| {
            let layer = below(random, records.n_layers() as u64) as u32;
            let key = ExpertKey::new(layer, below(random, records.n_experts().into()) as u32);
            // SAFETY: a slot is lent again, or the memory is touched or freed, only after the loop below has taken the
            // completion of its read; it outlives the store, which only panics could drop before that.
            let destination = unsafe { Destination::lend(slot) };
            let pieces = records.record(key).pieces;
            store.submit(ReadRequest { key, pieces, destination }, Priority::Demand)
        };
        let since = Instant::now();
        let mut flights: Vec<(Ticket, usize)> = Vec::with_capacity(slots.len());
        for (place, slot) in slots.iter_mut().enumerate() {
            flights.push((submit(slot), place));
        }
        let (mut bytes, mut rate, mut failed) = (0, None, None);
        while store.outstanding() > 0 {
            let completion = store.wait_any();
            let flight = flights.iter().position(|(ticket, _)| *ticket == completion.ticket);
            let (_, place) = flights.swap_remove(flight.expect("only these are in flight"));
            match completion.result {
                Ok(arrived) => bytes += arrived,
                Err(error) => failed = failed.or(Some(error)),
            }
            let elapsed = since.elapsed();
            if elapsed < time && failed.is_none() {
                flights.push((submit(slots[place]), place));
            } else {
                // From here on fewer and fewer are in flight.
                rate.get_or_insert(bytes as f64 / elapsed.as_secs_f64().max(1e-9));
            }
        }
        failed.map_or(Ok(rate.unwrap_or(0.0)), Err)
    }

    fn below(&mut self, n: u64) -> u64 {
        below(&mut self.random, n)
    }
}

fn below(random: &mut u64, n: u64) -> u64 {
    *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    (*random >> 33) % n
}

/// The candidate with the best median rate; `usual` unless another is clearly better. One without a rate loses.
fn choose(candidates: &[ReadModel], usual: ReadModel, rates: &[Vec<f64>]) -> Probed {
    let medians = rates.iter().map(|rates| {
        let mut sorted = rates.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    });
    let timed: Vec<(ReadModel, f64)> = candidates.iter().copied().zip(medians).collect();
    let of_usual = timed.iter().find(|(model, _)| *model == usual).map_or(0.0, |(_, rate)| *rate);
    let found = |(model, rate): (ReadModel, f64)| Probed { model, bytes_per_second: rate as u64 };
    let best = timed.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    match best {
        Some(best) if best.1 > of_usual * CLEARLY => found(best),
        _ => found((usual, of_usual)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(threads: usize) -> ReadModel {
        ReadModel { threads, ..ReadModel::default() }
    }

    fn chosen(rates: &[&[f64]]) -> (usize, u64) {
        let candidates = [2, 4, 8].map(of);
        let rates: Vec<Vec<f64>> = rates.iter().map(|rates| rates.to_vec()).collect();
        let Probed { model, bytes_per_second } = choose(&candidates, of(4), &rates);
        (model.threads, bytes_per_second)
    }

    #[test]
    fn the_usual_way_stays_unless_another_is_clearly_faster() {
        assert_eq!(chosen(&[&[90.0], &[100.0], &[104.0]]), (4, 100));
        assert_eq!(chosen(&[&[90.0], &[100.0], &[106.0]]), (8, 106));
        assert_eq!(chosen(&[&[120.0], &[100.0], &[110.0]]), (2, 120));
    }

    #[test]
    fn one_lucky_turn_decides_nothing() {
        assert_eq!(chosen(&[&[900.0, 90.0, 90.0], &[100.0, 99.0, 101.0], &[9.0]]), (4, 100));
    }

    #[test]
    fn what_was_not_timed_is_not_chosen() {
        assert_eq!(chosen(&[&[90.0], &[100.0], &[]]), (4, 100));
        assert_eq!(chosen(&[&[], &[], &[]]), (4, 0));
        assert_eq!(chosen(&[&[90.0], &[], &[]]), (2, 90));
    }

    #[test]
    fn a_step_without_time_takes_nothing_back() {
        let found = |threads, bytes_per_second| Probed { model: of(threads), bytes_per_second };
        assert_eq!(newer(found(8, 100), found(8, 0)), found(8, 100));
        assert_eq!(newer(found(8, 100), found(4, 110)), found(4, 110));
    }
}
