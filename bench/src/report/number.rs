//! Numbers as people read them: three digits and a unit.

use crate::result::Unit;

/// A value with its unit: `12.9k`, `128 KiB`, `102 MiB/s`, `387 µs`, `0.31 %`.
#[must_use]
pub fn with_unit(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Count => plain(value),
        Unit::Iops => thousands(value),
        Unit::Bytes => bytes(value),
        Unit::BytesPerSecond => format!("{}/s", bytes(value)),
        Unit::Nanoseconds => duration(value),
        Unit::Percent => format!("{} %", plain(value)),
    }
}

/// What a unit is called where its values stand alone.
#[must_use]
pub fn name(unit: Unit) -> &'static str {
    match unit {
        Unit::Count | Unit::Bytes | Unit::Nanoseconds => "",
        Unit::Iops => "IOPS",
        Unit::BytesPerSecond => "per second",
        Unit::Percent => "%",
    }
}

/// Three digits that count: `0.0313`, `1.57`, `387`, `12926`.
#[must_use]
pub fn plain(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let digits = match value.abs() {
        a if a >= 100.0 => 0,
        a if a >= 10.0 => 1,
        a if a >= 1.0 => 2,
        a if a >= 0.1 => 3,
        _ => 4,
    };
    trimmed(format!("{value:.digits$}"))
}

/// A ratio: `1.57×`.
#[must_use]
pub fn ratio(value: f64) -> String {
    if value.is_finite() { format!("{value:.2}×") } else { "-".to_owned() }
}

/// `624`, `4.85k`, `12.9k`, `1.2M`.
#[must_use]
pub fn thousands(value: f64) -> String {
    match value.abs() {
        a if !a.is_finite() => "-".to_owned(),
        a if a >= 999_500.0 => format!("{}M", three(value / 1e6)),
        a if a >= 9_995.0 => format!("{}k", three(value / 1e3)),
        _ => plain(value),
    }
}

/// `64 B`, `4 KiB`, `1.5 GiB`.
#[must_use]
pub fn bytes(value: f64) -> String {
    let mut scaled = value;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if scaled.abs() < 1000.0 {
            return format!("{} {unit}", three(scaled));
        }
        scaled /= 1024.0;
    }
    format!("{} TiB", three(scaled))
}

/// Nanoseconds as `850 ns`, `49 µs`, `1.56 ms`, `3.2 s`.
#[must_use]
pub fn duration(nanoseconds: f64) -> String {
    let mut scaled = nanoseconds;
    for unit in ["ns", "µs", "ms"] {
        if scaled.abs() < 999.5 {
            return format!("{} {unit}", three(scaled));
        }
        scaled /= 1000.0;
    }
    format!("{} s", three(scaled))
}

fn three(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    let digits = match value.abs() {
        a if a >= 99.95 => 0,
        a if a >= 9.995 => 1,
        _ => 2,
    };
    trimmed(format!("{value:.digits$}"))
}

fn trimmed(text: String) -> String {
    if text.contains('.') {
        let short = text.trim_end_matches('0').trim_end_matches('.');
        return if short == "-0" { "0".to_owned() } else { short.to_owned() };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, unit, text) in [
            (0.0, Unit::Count, "0"),
            (0.0626, Unit::Count, "0.0626"),
            (2.0, Unit::Count, "2"),
            (1234.6, Unit::Count, "1235"),
            (f64::NAN, Unit::Count, "-"),
            (624.2, Unit::Iops, "624"),
            (4851.0, Unit::Iops, "4851"),
            (12926.0, Unit::Iops, "12.9k"),
            (999_999.0, Unit::Iops, "1M"),
            (64.0, Unit::Bytes, "64 B"),
            (131_072.0, Unit::Bytes, "128 KiB"),
            (1_572_864.0, Unit::Bytes, "1.5 MiB"),
            (106_954_752.0, Unit::BytesPerSecond, "102 MiB/s"),
            (850.0, Unit::Nanoseconds, "850 ns"),
            (49_000.0, Unit::Nanoseconds, "49 µs"),
            (999_700.0, Unit::Nanoseconds, "1 ms"),
            (1_561_000.0, Unit::Nanoseconds, "1.56 ms"),
            (3.2e9, Unit::Nanoseconds, "3.2 s"),
            (0.31, Unit::Percent, "0.31 %"),
        ] {
            assert_eq!(with_unit(value, unit), text);
        }
        assert_eq!(ratio(1.567), "1.57×");
        assert_eq!(ratio(f64::INFINITY), "-");
    }
}
