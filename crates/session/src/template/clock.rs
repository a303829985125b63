//! `strftime_now`: a moment as text, in UTC and English.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

const SECONDS_OF_DAY: i64 = 86_400;

/// A moment by the calendar.
struct Moment {
    year: i64,
    /// From 0.
    month: usize,
    /// Of the month, from 1.
    day: i64,
    /// Of the year, from 1.
    year_day: i64,
    /// From Sunday = 0.
    week_day: usize,
    /// Since midnight.
    second: i64,
}

impl Moment {
    fn of(time: SystemTime) -> Self {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            // No clock is set to before 1970 on purpose.
            Err(_) => 0,
        };
        let days = seconds / SECONDS_OF_DAY;
        // 1970-01-01 was a Thursday.
        let week_day = ((days + 4) % 7) as usize;
        let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
        while left >= year_days(year) {
            left -= year_days(year);
            year += 1;
        }
        let year_day = left + 1;
        let mut month = 0;
        while left >= month_days(year, month) {
            left -= month_days(year, month);
            month += 1;
        }
        Self { year, month, day: left + 1, year_day, week_day, second: seconds % SECONDS_OF_DAY }
    }
}

const fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

const fn year_days(year: i64) -> i64 {
    if is_leap(year) { 366 } else { 365 }
}

const fn month_days(year: i64, month: usize) -> i64 {
    match month {
        1 if is_leap(year) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// A moment by a format of C's `strftime`; the directives that are the same everywhere.
///
/// # Errors
/// A directive that is not known.
pub(super) fn format(time: SystemTime, format: &str) -> Result<String, Error> {
    let moment = Moment::of(time);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let is_padded = directive != Some('-');
        if !is_padded {
            directive = chars.next();
        }
        if write_directive(&moment, directive, is_padded, &mut out).is_none() {
            let message = format!("strftime_now: unknown directive in `{format}`");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    }
    Ok(out)
}

fn write_directive(
    moment: &Moment,
    directive: Option<char>,
    is_padded: bool,
    out: &mut String,
) -> Option<()> {
    let Moment { year, month, day, year_day, week_day, second } = *moment;
    let hour = second / 3600;
    let (number, width) = match directive? {
        'Y' => (year, 1),
        'm' => (month as i64 + 1, 2),
        'd' => (day, 2),
        'H' => (hour, 2),
        'I' => ((hour + 11) % 12 + 1, 2),
        'M' => (second / 60 % 60, 2),
        'S' => (second % 60, 2),
        'j' => (year_day, 3),
        'y' => (year % 100, 2),
        'w' => (week_day as i64, 1),
        other => {
            out.push_str(match other {
                'B' => MONTHS[month],
                'b' | 'h' => &MONTHS[month][..3],
                'A' => DAYS[week_day],
                'a' => &DAYS[week_day][..3],
                'p' => ["AM", "PM"][usize::from(hour >= 12)],
                'Z' => "UTC",
                'z' => "+0000",
                '%' => "%",
                'F' => return write_all(moment, "Y-m-d", out),
                'T' => return write_all(moment, "H:M:S", out),
                _ => return None,
            });
            return Some(());
        }
    };
    write!(out, "{number:0width$}", width = if is_padded { width } else { 1 }).ok()
}

/// Directives by their letters, with what stands between.
fn write_all(moment: &Moment, directives: &str, out: &mut String) -> Option<()> {
    for c in directives.chars() {
        if c.is_ascii_alphabetic() {
            write_directive(moment, Some(c), true, out)?;
        } else {
            out.push(c);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, text: &str) -> String {
        format(UNIX_EPOCH + Duration::from_secs(seconds), text).unwrap()
    }

    #[test]
    fn moments_are_written_as_date_writes_them() {
        // Each from `date -u -d @N '+...'`.
        let all = "%Y-%m-%d %H:%M:%S %A %a %B %b %j %y %I %p %-d %-m %w %%";
        let expected = [
            (0, "1970-01-01 00:00:00 Thursday Thu January Jan 001 70 12 AM 1 1 4 %"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday Tue February Feb 060 00 12 AM 29 2 2 %"),
            (1_735_689_599, "2024-12-31 23:59:59 Tuesday Tue December Dec 366 24 11 PM 31 12 2 %"),
            (4_107_542_400, "2100-03-01 00:00:00 Monday Mon March Mar 060 00 12 AM 1 3 1 %"),
        ];
        for (seconds, text) in expected {
            assert_eq!(at(seconds, all), text);
        }
        assert_eq!(at(1_735_689_599, "%F %T %z %Z"), "2024-12-31 23:59:59 +0000 UTC");
    }

    #[test]
    fn unknown_directives_are_refused() {
        for text in ["%Q", "%", "%-", "%-Q"] {
            assert!(format(UNIX_EPOCH, text).is_err(), "{text}");
        }
        assert!(format(UNIX_EPOCH + Duration::from_secs(u64::MAX / 4), "%Y").is_ok());
    }
}
