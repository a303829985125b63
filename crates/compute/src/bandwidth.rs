//! How fast this machine's memory can be read: what no arithmetic on weights can exceed.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::cpu::pool::Pool;

/// Numbers of a task: 256 KiB, far more than handing it out costs.
const TASK: usize = 32 << 10;

/// Sums that run side by side, so that none waits for another.
const LANES: usize = 16;

/// How fast memory was read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth {
    /// Bytes a second in the fastest round.
    pub bytes_per_second: f64,
    /// What was read in each round. Where it fits into the processor's cache, the cache is what was measured.
    pub buffer_bytes: u64,
    /// Threads that read.
    pub threads: usize,
}

/// Reads a buffer of its own so many times, with all threads of a pool. The fastest round counts: what others do on this
/// machine can only take away.
///
/// - `buffer_bytes`: at least one task's worth is used
pub fn read_bandwidth(threads: usize, buffer_bytes: u64, rounds: usize) -> Bandwidth {
    let pool = Pool::new(NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN));
    let n_tasks = (buffer_bytes as usize / size_of::<u64>() / TASK).max(1);
    // Not zeros, whose pages could all be one.
    let buffer = vec![1_u64; n_tasks * TASK];
    let sum = AtomicU64::new(0);
    let mut best = 0.0_f64;
    for _ in 0..rounds.max(1) {
        let since = Instant::now();
        pool.run(n_tasks, |task| {
            sum.fetch_add(sum_of(&buffer[task * TASK..][..TASK]), Ordering::Relaxed);
        });
        let seconds = since.elapsed().as_secs_f64().max(1e-9);
        best = best.max(size_of_val(&buffer[..]) as f64 / seconds);
    }
    black_box(sum.into_inner());
    Bandwidth {
        bytes_per_second: best,
        buffer_bytes: size_of_val(&buffer[..]) as u64,
        threads: pool.threads(),
    }
}

fn sum_of(numbers: &[u64]) -> u64 {
    let mut sums = [0_u64; LANES];
    for numbers in numbers.as_chunks::<LANES>().0 {
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum = sum.wrapping_add(*number);
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_read_once() {
        let numbers: Vec<u64> = (0..TASK as u64).collect();
        assert_eq!(sum_of(&numbers), (TASK * (TASK - 1) / 2) as u64);
    }

    #[test]
    fn a_buffer_is_whole_tasks_and_has_a_rate() {
        for (asked, is) in [(0, 256 << 10), (1 << 20, 1 << 20), ((1 << 20) + 5, 1 << 20)] {
            let Bandwidth { bytes_per_second, buffer_bytes, threads } = read_bandwidth(2, asked, 2);
            assert_eq!(buffer_bytes, is);
            assert!(bytes_per_second > 0.0 && (1..=2).contains(&threads));
        }
    }
}
