//! A disk as an argument.

use std::num::NonZero;
use std::time::Duration;

use expert_store::SimulatedDisk;

/// Longest latency, in milliseconds.
const MOST_LATENCY_MS: f64 = 10_000.0;

/// `latency=0.3ms,rate=5GB/s`, or one of the two.
pub(super) fn simulated(text: &str) -> Result<SimulatedDisk, String> {
    let mut disk = SimulatedDisk { latency: Duration::ZERO, bytes_per_second: None };
    for part in text.split(',') {
        match part.trim().split_once('=') {
            Some(("latency", value)) => disk.latency = latency(value)?,
            Some(("rate", value)) => disk.bytes_per_second = Some(rate(value)?),
            _ => {
                return Err(format!(
                    "`{part}`: needed latency=TIME, rate=BYTES a second or both, as in latency=0.3ms,rate=5GB/s"
                ));
            }
        }
    }
    Ok(disk)
}

fn latency(text: &str) -> Result<Duration, String> {
    let units = [("us", 1e-3), ("ms", 1.0), ("s", 1e3)];
    let ms = number(text, &units).filter(|ms| (0.0..=MOST_LATENCY_MS).contains(ms));
    let ms = ms.ok_or_else(|| format!("latency={text}: needed a time up to 10s, like 0.3ms"))?;
    Ok(Duration::from_secs_f64(ms / 1e3))
}

fn rate(text: &str) -> Result<NonZero<u64>, String> {
    let units = [("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9)];
    let bytes = number(text, &units).filter(|bytes| (1.0..=1e15).contains(bytes));
    let bytes = bytes.and_then(|bytes| NonZero::new(bytes as u64));
    bytes.ok_or_else(|| format!("rate={text}: needed a rate in kB/s, MB/s or GB/s, like 5GB/s"))
}

/// A number and one of these units.
fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let of = |(unit, factor): &(&str, f64)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        Some(number * factor)
    };
    units.iter().find_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_a_latency_or_a_rate_or_both() {
        let both = simulated("latency=0.3ms, rate=5GB/s").unwrap();
        assert_eq!(both.latency, Duration::from_micros(300));
        assert_eq!(both.bytes_per_second, NonZero::new(5_000_000_000));
        let late = simulated("latency=250us").unwrap();
        assert_eq!((late.latency, late.bytes_per_second), (Duration::from_micros(250), None));
        assert_eq!(simulated("rate=80MB/s").unwrap().latency, Duration::ZERO);
    }

    #[test]
    fn what_is_no_disk_is_refused_by_name() {
        for (text, word) in [
            ("", "latency=TIME"),
            ("speed=1", "speed=1"),
            ("latency=3", "latency=3"),
            ("latency=-1ms", "latency=-1ms"),
            ("latency=NaNms", "latency=NaNms"),
            ("latency=1e9s", "latency=1e9s"),
            ("rate=0GB/s", "rate=0GB/s"),
            ("rate=infGB/s", "rate=infGB/s"),
            ("rate=5GB", "rate=5GB"),
        ] {
            let said = simulated(text).unwrap_err();
            assert!(said.contains(word), "{said}");
        }
    }
}
