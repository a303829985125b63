//! Another disk, simulated on top of the one that is there: what reads would take if it were slower.
//!
//! A read is done as ever, and comes back when the other disk would have delivered it. It cannot come back sooner than
//! this machine's disk allows, so what is simulated has to be slower than what is there.

use std::io;
use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::Reader;
use crate::file::OpenFile;

/// A disk with a latency, which reads that are at it at once have at once, and a rate, which they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedDisk {
    /// What every call of the reader takes before its bytes come.
    pub latency: Duration,
    /// How many bytes come a second, one read's after the other's; no bound if absent.
    pub bytes_per_second: Option<NonZero<u64>>,
}

/// What the readers of one disk share: when it has delivered all that was asked for.
#[derive(Debug, Default)]
pub(crate) struct Line(Mutex<Option<Instant>>);

pub(crate) struct SimulatedReader {
    pub(crate) inner: Box<dyn Reader>,
    pub(crate) disk: SimulatedDisk,
    pub(crate) line: Arc<Line>,
}

impl SimulatedDisk {
    /// When a read that began then has delivered its bytes.
    fn arrival(&self, line: &Line, began: Instant, bytes: usize) -> Instant {
        let ready = began + self.latency;
        let Some(rate) = self.bytes_per_second else { return ready };
        let mut busy_until = line.0.lock().unwrap_or_else(PoisonError::into_inner);
        let from = busy_until.map_or(ready, |until| until.max(ready));
        let until = from + Duration::from_secs_f64(bytes as f64 / rate.get() as f64);
        *busy_until = Some(until);
        until
    }
}

impl Reader for SimulatedReader {
    fn read_at(&self, file: &OpenFile, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        let began = Instant::now();
        let result = self.inner.read_at(file, offset, out);
        let bytes = result.as_ref().map_or(0, |n| *n);
        let arrival = self.disk.arrival(&self.line, began, bytes);
        thread::sleep(arrival.saturating_duration_since(Instant::now()));
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_share_the_rate_and_not_the_latency() {
        let latency = Duration::from_millis(2);
        let disk = SimulatedDisk { latency, bytes_per_second: NonZero::new(1_000_000) };
        let (line, start) = (Line::default(), Instant::now());
        let after = |began: Duration, bytes| disk.arrival(&line, start + began, bytes) - start;
        let ms = Duration::from_millis;
        assert_eq!(after(ms(0), 1000), ms(3));
        assert_eq!(after(ms(0), 1000), ms(4), "behind the other, whose latency it shared");
        assert_eq!(after(ms(1), 2000), ms(6));
        assert_eq!(after(ms(20), 1000), ms(23), "nothing is left of before");
        let free = SimulatedDisk { latency, bytes_per_second: None };
        assert_eq!(free.arrival(&line, start, 1 << 30) - start, latency);
    }
}
