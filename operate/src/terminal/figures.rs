//! Figures for people: sizes, rates, times and shares, rounded to about three digits, and of one
//! form in all programs. [`ByteSize`](rblk_config::ByteSize) is exact, and long for a number that
//! is not round.

use std::time::Duration;

use rblk_runtime::{CounterUnit, Described, LatencyCounts};

/// A number of thousandths of a unit, in that unit: with a decimal below 100, and rounded down.
fn rounded(thousandths: u128) -> String {
    let (whole, tenths) = (thousandths / 1000, thousandths / 100 % 10);
    if whole >= 100 || tenths == 0 { whole.to_string() } else { format!("{whole}.{tenths}") }
}

/// Bytes: `0B`, `1.4KiB`, `38MiB`.
#[must_use]
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = bytes.max(1).ilog2() / 10;
    let thousandths = (u128::from(bytes) * 1000) >> (10 * unit);
    let name = UNITS.get(unit as usize).copied().unwrap_or_default();
    format!("{}{name}", rounded(thousandths))
}

/// How many, or how many per second: `120`, `41.2k`, `1.5M`.
#[must_use]
pub fn count(number: u64) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let mut unit = 0;
    let mut scale: u128 = 1;
    while u128::from(number) >= scale * 1000 {
        (unit, scale) = (unit + 1, scale * 1000);
    }
    let name = UNITS.get(unit).copied().unwrap_or_default();
    format!("{}{name}", rounded(u128::from(number) * 1000 / scale))
}

/// Bytes per second, in MiB per second: `0`, `0.3`, `199`.
#[must_use]
pub fn mib_per_second(bytes: u64) -> String {
    rounded((u128::from(bytes) * 1000) >> 20)
}

/// A latency in microseconds: `84us`, `1.9ms`, `12s`. `-` for none.
#[must_use]
pub fn latency(us: Option<u64>) -> String {
    let Some(us) = us.map(u128::from) else { return "-".to_owned() };
    match us {
        0..1_000 => format!("{us}us"),
        1_000..1_000_000 => format!("{}ms", rounded(us)),
        _ => format!("{}s", rounded(us / 1000)),
    }
}

/// The mean of latencies; `-` for none.
#[must_use]
pub fn mean(times: &LatencyCounts) -> String {
    // Rounded down, as all figures are; a mean of microseconds fits.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    latency(times.mean_us().map(|us| us as u64))
}

/// A sentence with the figures of counters: `{name}` stands for the counter of that name. Numbers
/// are whole, and sizes and times are rounded.
#[must_use]
pub fn with_counters<T: Described>(sentence: &str, counts: &T) -> String {
    T::COUNTERS.iter().fold(sentence.to_owned(), |sentence, counter| {
        let value = (counter.value)(counts);
        let figure = match counter.unit {
            CounterUnit::Number => value.to_string(),
            CounterUnit::Bytes => size(value),
            CounterUnit::Micros => latency(Some(value)),
        };
        sentence.replace(&format!("{{{}}}", counter.name), &figure)
    })
}

/// A time: `0.4s`, `9s`, `2m 5s`, `1h 10m`, `3d 4h`.
#[must_use]
pub fn duration(time: Duration) -> String {
    let (seconds, two) = (time.as_secs(), |big: u64, small: u64, units: [char; 2]| {
        let [first, second] = units;
        if small == 0 { format!("{big}{first}") } else { format!("{big}{first} {small}{second}") }
    });
    match seconds {
        0..10 => format!("{}s", rounded(time.as_millis())),
        10..60 => format!("{seconds}s"),
        60..3600 => two(seconds / 60, seconds % 60, ['m', 's']),
        3600..86_400 => two(seconds / 3600, seconds % 3600 / 60, ['h', 'm']),
        _ => two(seconds / 86_400, seconds % 86_400 / 3600, ['d', 'h']),
    }
}

/// A share of 1: `94%`; `-` for none. A share below 1 is never shown as 100 %.
#[must_use]
pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.0}%", (share * 100.0).floor()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_rounded_down() {
        let cases = [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1KiB"),
            (1535, "1.4KiB"),
            (1536, "1.5KiB"),
            ((1 << 20) - 1, "1023KiB"),
            (64 << 20, "64MiB"),
            (u64::MAX, "15.9EiB"),
        ];
        for (bytes, shown) in cases {
            assert_eq!(size(bytes), shown, "{bytes}");
        }
        for (number, shown) in [
            (0, "0"),
            (999, "999"),
            (1000, "1k"),
            (41_234, "41.2k"),
            (412_345, "412k"),
            (1_500_000, "1.5M"),
            (u64::MAX, "18.4E"),
        ] {
            assert_eq!(count(number), shown, "{number}");
        }
        for (bytes, shown) in [(0, "0"), (300 << 10, "0.2"), (199 << 20, "199"), (5 << 19, "2.5")] {
            assert_eq!(mib_per_second(bytes), shown, "{bytes}");
        }
    }

    #[test]
    fn a_sentence_has_each_counter_in_its_unit() {
        rblk_runtime::counters! {
            /// Of a test.
            pub struct Copies;
            /// Copies.
            copies: Counter Number,
            /// Their bytes.
            bytes: Counter Bytes,
            /// Their time.
            time_us: Counter Micros,
        }
        let counts = Copies { copies: 12_345, bytes: 1536, time_us: 1900 };
        let text = with_counters("{copies} of {bytes} in {time_us}, not {other}", &counts);
        assert_eq!(text, "12345 of 1.5KiB in 1.9ms, not {other}");
    }

    #[test]
    fn times_are_short() {
        for (us, shown) in [
            (Some(0), "0us"),
            (Some(999), "999us"),
            (Some(1900), "1.9ms"),
            (Some(84_000), "84ms"),
            (Some(12_345_678), "12.3s"),
            (None, "-"),
        ] {
            assert_eq!(latency(us), shown, "{us:?}");
        }
        for (ms, shown) in [
            (420, "0.4s"),
            (9000, "9s"),
            (59_999, "59s"),
            (125_000, "2m 5s"),
            (3_600_000, "1h"),
            (4_200_000, "1h 10m"),
            (273_600_000, "3d 4h"),
        ] {
            assert_eq!(duration(Duration::from_millis(ms)), shown, "{ms}");
        }
        for (share, shown) in [(Some(0.9999), "99%"), (Some(1.0), "100%"), (None, "-")] {
            assert_eq!(percent(share), shown, "{share:?}");
        }
    }
}
