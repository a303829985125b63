//! How close decoding came to what this machine allows, measured in the same process right after the run.
//!
//! Two things bound a token: the disk, which has to deliver what was missing, and computing with everything in memory,
//! which ends at the rate at which memory can be read. Were one hidden behind the other perfectly, a token would take as
//! long as the longer one: that is the ceiling.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use compute::backend::{Role, Row};
use compute::{Bandwidth, read_bandwidth};
use expert_store::{StoreOptions, sustained_rate};
use model::{ForwardError, LogitRows, Network};
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::mirrors;
use crate::receipt::PhaseReceipt;
use crate::sequence::{Mark, Phase, Sequence};

/// How long the disk is measured.
const DISK_TIME: Duration = Duration::from_secs(1);

/// Longest time of repeating a token, but it is repeated at least [`FEWEST_REPEATS`] times.
const REPEAT_TIME: Duration = Duration::from_millis(1500);
const FEWEST_REPEATS: usize = 6;
const MOST_REPEATS: usize = 40;

/// Repeats with everything in memory that a rate is taken from.
const ENOUGH_RESIDENT: usize = 3;

/// Most bytes that are read to measure memory, and how often.
const MOST_MEMORY_BYTES: u64 = 1 << 30;
const MEMORY_ROUNDS: usize = 5;

/// Which wall is nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wall {
    /// What is missing has to be read.
    Disk,
    /// Everything there, it still has to be computed.
    Compute,
}

/// How close decoding came to what its machine allows. What could not be measured is absent, and said in the notes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    /// Tokens per second of the run.
    pub tokens_per_second: f64,
    /// Expert bytes that the run read for a token.
    pub read_bytes_per_token: f64,
    /// Bytes of experts a second that the disk delivered when it always had requests, read as the run did.
    pub disk_bytes_per_second: Option<f64>,
    /// Bytes of experts a second that it delivered in the run while any expert was on its way.
    pub achieved_bytes_per_second: Option<f64>,
    /// What a token would take if only the disk counted, at the larger of these two rates: a disk that gave more in the run
    /// than afterwards can give it.
    pub disk_tokens_per_second: Option<f64>,
    /// Bytes of weights that a token multiplies: those that stay in memory and those of its experts.
    pub weight_bytes_per_token: u64,
    /// Bytes a second that all threads together read from memory.
    pub memory_bytes_per_second: f64,
    /// The buffer that was read for it.
    pub memory_buffer_bytes: u64,
    /// Share of that in the run: weights only, not caches nor activations.
    pub memory_share: f64,
    /// The same last token again and again, all of whose experts were in memory.
    pub resident_tokens_per_second: Option<f64>,
    /// The smaller of the rates with everything in memory and of the disk alone.
    pub ceiling_tokens_per_second: Option<f64>,
    /// Which of them it is.
    pub wall: Option<Wall>,
    /// Share of the ceiling that was reached.
    pub share: Option<f64>,
    /// Highest resident set of the process, these measurements included.
    pub peak_rss_bytes: u64,
    /// Why something is missing.
    pub notes: Vec<String>,
}

/// Rates that bound decoding, where they are known.
#[derive(Debug, Clone, Copy)]
struct Walls {
    disk: Option<f64>,
    resident: Option<f64>,
}

impl Walls {
    /// The nearer one. With one of them unknown, nothing can be said.
    fn nearest(self, reads: bool) -> Option<(f64, Wall)> {
        let resident = self.resident?;
        if !reads {
            return Some((resident, Wall::Compute));
        }
        let disk = self.disk?;
        Some(if disk < resident { (disk, Wall::Disk) } else { (resident, Wall::Compute) })
    }
}

impl Engine {
    /// Measures what bounds decoding, for a run that has just ended with `sequence`. The model is given up on the way, so
    /// that what is measured has its memory.
    pub fn roofline(mut self, mut sequence: Sequence, decode: &PhaseReceipt) -> Roofline {
        let mut notes = Vec::new();
        let resident = self.resident_rate(&mut sequence, &mut notes);
        let threads = self.options.threads;
        let buffer = (self.plan.budget.bytes.0 / 2).min(MOST_MEMORY_BYTES);
        let weights = self.token_bytes;
        let disk = self.disk_rate(&mut notes);
        memory_plan::release_free_memory();
        let Bandwidth { bytes_per_second: memory, buffer_bytes, .. } =
            read_bandwidth(threads, buffer, MEMORY_ROUNDS);
        let read = decode.read_bytes_per_token;
        let achieved = decode.read_bytes as f64 / (decode.reading_us as f64 / 1e6);
        let achieved = (decode.reading_us > 0).then_some(achieved);
        let best = disk.map(|disk| achieved.map_or(disk, |achieved| achieved.max(disk)));
        let walls = Walls { disk: best.filter(|_| read > 0.0).map(|rate| rate / read), resident };
        let nearest = walls.nearest(read > 0.0);
        let rate = decode.tokens_per_second;
        Roofline {
            tokens_per_second: rate,
            read_bytes_per_token: read,
            disk_bytes_per_second: disk,
            achieved_bytes_per_second: achieved,
            disk_tokens_per_second: walls.disk,
            weight_bytes_per_token: weights,
            memory_bytes_per_second: memory,
            memory_buffer_bytes: buffer_bytes,
            memory_share: weights as f64 * rate / memory,
            resident_tokens_per_second: resident,
            ceiling_tokens_per_second: nearest.map(|(ceiling, _)| ceiling),
            wall: nearest.map(|(_, wall)| wall),
            share: nearest.map(|(ceiling, _)| rate / ceiling),
            peak_rss_bytes: memory_plan::peak_rss().0,
            notes,
        }
    }

    /// Tokens a second when all that they need is in memory.
    fn resident_rate(&mut self, sequence: &mut Sequence, notes: &mut Vec<String>) -> Option<f64> {
        if self.options.speculation.is_on() {
            notes.push("passes with guesses hold several tokens, so no rate with everything in memory was measured".to_owned());
            return None;
        }
        match sequence.run_last_again(&mut self.network) {
            Ok(repeats) => {
                let rate = median_resident(&repeats);
                if rate.is_none() {
                    notes.push(format!(
                        "the pool of {} slots does not keep what one token needs, so no rate with everything in memory was measured",
                        self.plan.slots()
                    ));
                }
                rate
            }
            Err(error) => {
                notes.push(format!("the last token could not be repeated: {error}"));
                None
            }
        }
    }

    /// What the disk gives to reads like those of the run, once the model is gone.
    fn disk_rate(self, notes: &mut Vec<String>) -> Option<f64> {
        let found = mirrors::find(&self.checkpoint, &self.options.mirrors);
        let mirrors = found.map_err(|error| notes.push(error.to_string())).ok()?;
        let files: Vec<PathBuf> =
            self.checkpoint.files.iter().map(|file| file.path.clone()).collect();
        let reads = self.options.reads.unwrap_or_default().model;
        let options = StoreOptions {
            threads: reads.threads,
            part_bytes: reads.part_bytes,
            direct: self.options.direct,
            reader: self.options.reader,
            mirrors,
            notice: self.options.notice,
            simulate: self.options.simulate,
            faults: self.options.faults.clone(),
        };
        let records = self.network.experts().records().clone();
        drop(self);
        match sustained_rate(&files, &records, &options, DISK_TIME) {
            Ok(rate) => Some(rate),
            Err(error) => {
                notes.push(format!("the disk could not be measured: {error}"));
                None
            }
        }
    }
}

impl Sequence {
    /// Runs the last token again and again at its place, each time from the same state: after the first time, the pool has
    /// what it needs, if it can hold as much. The sequence is of no use afterwards.
    fn run_last_again(&mut self, network: &mut Network) -> Result<Vec<Phase>, ForwardError> {
        let Some(&token) = self.tokens().last() else { return Ok(Vec::new()) };
        let position = self.tokens().len() as u32 - 1;
        let row = Row { sequence: self.id(), position, role: Role::Generated, token };
        let state = self.abandon(network)?;
        let mut repeats = Vec::with_capacity(MOST_REPEATS);
        let since = Instant::now();
        while repeats.len() < MOST_REPEATS
            && (repeats.len() < FEWEST_REPEATS || since.elapsed() < REPEAT_TIME)
        {
            network.rollback(row.sequence, state);
            let mark = Mark::now(network);
            network.forward(&[row], LogitRows::Last, &mut |_, _| {})?;
            repeats.push(mark.phase(network, 1));
        }
        network.drop_snapshot(state);
        Ok(repeats)
    }
}

/// Tokens a second of those that needed no read, if there are enough.
fn median_resident(repeats: &[Phase]) -> Option<f64> {
    let resident = |phase: &&Phase| {
        let pool = phase.experts.pool;
        pool.misses == 0 && pool.adopted == 0
    };
    let mut times: Vec<Duration> =
        repeats.iter().filter(resident).map(|phase| phase.elapsed).collect();
    times.sort_unstable();
    let median = times.get(times.len() / 2).filter(|_| times.len() >= ENOUGH_RESIDENT)?;
    Some(1.0 / median.as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearer_wall_is_the_ceiling_and_an_unknown_one_leaves_none() {
        let nearest = |disk, resident, reads| Walls { disk, resident }.nearest(reads);
        assert_eq!(nearest(Some(4.0), Some(9.0), true), Some((4.0, Wall::Disk)));
        assert_eq!(nearest(Some(9.0), Some(4.0), true), Some((4.0, Wall::Compute)));
        assert_eq!(nearest(None, Some(4.0), false), Some((4.0, Wall::Compute)));
        assert_eq!(nearest(None, Some(4.0), true), None);
        assert_eq!(nearest(Some(4.0), None, true), None);
    }

    #[test]
    fn only_tokens_that_read_nothing_count() {
        let phase = |ms, misses| {
            let mut phase = Phase { elapsed: Duration::from_millis(ms), ..Phase::default() };
            phase.experts.pool.misses = misses;
            phase
        };
        let some = [phase(900, 5), phase(10, 0), phase(20, 0), phase(1, 1), phase(30, 0)];
        assert_eq!(median_resident(&some), Some(50.0));
        assert_eq!(median_resident(&some[..3]), None, "two are too few");
    }
}
