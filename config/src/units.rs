//! Sizes and durations, as people write them in files and on command lines.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A number of bytes: `"64MiB"`, `"4GiB"`, `"512B"` or plain bytes.
///
/// All units are binary: `B`, `KiB` to `EiB`, and their short forms `K` to `E`, in upper or lower
/// case. `MB` is refused, because some people mean 2^20 by it. Fractions are refused, because a
/// size that is slightly wrong can cause an outage later.
///
/// ```
/// use rblk_config::ByteSize;
///
/// assert_eq!("64MiB".parse(), Ok(ByteSize(64 << 20)));
/// assert_eq!(ByteSize(1 << 40).to_string(), "1TiB");
/// let error = "1.5GiB".parse::<ByteSize>().unwrap_err();
/// assert_eq!(error.to_string(), "a fraction; use a smaller unit");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ByteSize(pub u64);

/// Why a text is not a [`ByteSize`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ByteSizeError {
    /// No text.
    #[error("empty")]
    Empty,
    /// A sign.
    #[error("negative")]
    Negative,
    /// A decimal point or comma.
    #[error("a fraction; use a smaller unit")]
    Fraction,
    /// No digits at the start.
    #[error("not a number with a unit")]
    NotANumber,
    /// Powers of ten.
    #[error("unit {written:?} could mean 1000 or 1024; write {meant:?}")]
    Decimal {
        /// The unit as given.
        written: String,
        /// The binary unit of the same name.
        meant: String,
    },
    /// No such unit.
    #[error("unknown unit {0:?}; the units are B, KiB, MiB, GiB, TiB, PiB and EiB")]
    Unit(String),
    /// More than 64 bits.
    #[error("more than 16EiB")]
    TooLarge,
}

const PREFIXES: [(char, u32); 6] =
    [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, rest) = text.split_at(digits);
        if number.is_empty() {
            return Err(match rest.chars().next() {
                None => ByteSizeError::Empty,
                Some('-') => ByteSizeError::Negative,
                Some('.') => ByteSizeError::Fraction,
                Some(_) => ByteSizeError::NotANumber,
            });
        }
        if rest.starts_with(['.', ',']) {
            return Err(ByteSizeError::Fraction);
        }
        let number: u64 = number.parse().map_err(|_| ByteSizeError::TooLarge)?;
        let shift = unit_shift(rest.trim_start())?;
        number.checked_mul(1 << shift).map(Self).ok_or(ByteSizeError::TooLarge)
    }
}

/// log2 of a unit.
fn unit_shift(unit: &str) -> Result<u32, ByteSizeError> {
    let upper = unit.to_ascii_uppercase();
    if upper.is_empty() || upper == "B" {
        return Ok(0);
    }
    for (prefix, shift) in PREFIXES {
        match upper.strip_prefix(prefix) {
            Some("" | "IB") => return Ok(shift),
            Some("B") => {
                return Err(ByteSizeError::Decimal {
                    written: unit.to_owned(),
                    meant: format!("{prefix}iB"),
                });
            }
            _ => {}
        }
    }
    Err(ByteSizeError::Unit(unit.to_owned()))
}

/// Exact: in the largest unit that divides the number.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |&&(_, shift): &&(char, u32)| self.0 != 0 && self.0.trailing_zeros() >= shift;
        match PREFIXES.iter().rev().find(fits) {
            Some((prefix, shift)) => f.pad(&format!("{}{prefix}iB", self.0 >> shift)),
            None => f.pad(&format!("{}B", self.0)),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"64MiB\", or a number of bytes")
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom(ByteSizeError::Negative))
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

/// A length of time: `"500ms"`, `"2s"`, `"1min 30s"`. A unit is required.
///
/// ```
/// use rblk_config::Duration;
///
/// assert_eq!("2s".parse(), Ok(Duration::from_millis(2000)));
/// assert!("2".parse::<Duration>().is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Duration(pub std::time::Duration);

/// Why a text is not a [`Duration`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DurationError {
    /// No text.
    #[error("empty")]
    Empty,
    /// A sign.
    #[error("negative")]
    Negative,
    /// A bare number.
    #[error("a number without a unit; \"5s\" is five seconds, \"500ms\" is half of one")]
    NoUnit,
    /// No such unit.
    #[error("unknown unit {0:?}; the common ones are us, ms, s, min, h and days")]
    Unit(String),
    /// More than the type holds, or finer than a nanosecond.
    #[error("too large, or finer than a nanosecond")]
    OutOfRange,
    /// Not a number followed by a unit.
    #[error("not a number with a unit")]
    NotANumber,
}

impl Duration {
    /// Microseconds.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(std::time::Duration::from_micros(micros))
    }

    /// Milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(std::time::Duration::from_millis(millis))
    }

    /// Seconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(std::time::Duration::from_secs(secs))
    }

    /// As the type of the standard library.
    #[must_use]
    pub const fn get(self) -> std::time::Duration {
        self.0
    }
}

impl From<Duration> for std::time::Duration {
    fn from(duration: Duration) -> Self {
        duration.0
    }
}

impl FromStr for Duration {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Self, DurationError> {
        let text = text.trim();
        if text.starts_with('-') {
            return Err(DurationError::Negative);
        }
        // humantime accepts a 0 without a unit.
        if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
            return Err(DurationError::NoUnit);
        }
        humantime::parse_duration(text).map(Self).map_err(|error| match error {
            humantime::DurationError::Empty => DurationError::Empty,
            humantime::DurationError::UnknownUnit { unit, .. } if unit.is_empty() => {
                DurationError::NoUnit
            }
            humantime::DurationError::UnknownUnit { unit, .. } => DurationError::Unit(unit),
            humantime::DurationError::NumberOverflow => DurationError::OutOfRange,
            _ => DurationError::NotANumber,
        })
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&humantime::format_duration(self.0).to_string())
    }
}

impl Serialize for Duration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Duration;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration such as \"500ms\"")
            }

            fn visit_i64<E: de::Error>(self, _: i64) -> Result<Duration, E> {
                Err(E::custom(DurationError::NoUnit))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Duration, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512B", 512),
            ("64MiB", 64 << 20),
            ("4GiB", 4 << 30),
            ("4 GiB", 4 << 30),
            (" 4g ", 4 << 30),
            ("128k", 128 << 10),
            ("1TIB", 1 << 40),
            ("7EiB", 7 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn sizes_refused() {
        for (text, message) in [
            ("", "empty"),
            ("  ", "empty"),
            ("-1", "negative"),
            ("-4KiB", "negative"),
            ("1.5GiB", "a fraction; use a smaller unit"),
            (".5G", "a fraction; use a smaller unit"),
            ("1,5G", "a fraction; use a smaller unit"),
            ("MiB", "not a number with a unit"),
            ("+1", "not a number with a unit"),
            ("10MB", "unit \"MB\" could mean 1000 or 1024; write \"MiB\""),
            ("10kb", "unit \"kb\" could mean 1000 or 1024; write \"KiB\""),
            ("1e9", "unknown unit \"e9\"; the units are B, KiB, MiB, GiB, TiB, PiB and EiB"),
            ("0x10", "unknown unit \"x10\"; the units are B, KiB, MiB, GiB, TiB, PiB and EiB"),
            ("4µB", "unknown unit \"µB\"; the units are B, KiB, MiB, GiB, TiB, PiB and EiB"),
            ("16EiB", "more than 16EiB"),
            ("18446744073709551616", "more than 16EiB"),
            ("99999999999999999999999999999", "more than 16EiB"),
        ] {
            assert_eq!(text.parse::<ByteSize>().unwrap_err().to_string(), message, "{text:?}");
        }
    }

    #[test]
    fn durations_refused() {
        let no_unit = "a number without a unit; \"5s\" is five seconds, \"500ms\" is half of one";
        for (text, message) in [
            ("", "empty"),
            ("0", no_unit),
            ("5", no_unit),
            ("1s 5", no_unit),
            ("-1s", "negative"),
            (
                "5 parsecs",
                "unknown unit \"parsecs\"; the common ones are us, ms, s, min, h and days",
            ),
            ("soon", "not a number with a unit"),
            ("9999999999999999999999s", "too large, or finer than a nanosecond"),
            ("0.1ns", "too large, or finer than a nanosecond"),
        ] {
            assert_eq!(text.parse::<Duration>().unwrap_err().to_string(), message, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn size_displays_to_what_parses_back(odd: u64, shift in 0u32..64) {
            let size = ByteSize(odd << shift);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }

        #[test]
        fn size_matches_wide_arithmetic(number: u64, index in 0usize..6, long: bool, lower: bool) {
            let (prefix, shift) = PREFIXES[index];
            let mut text = format!("{number}{prefix}{}", if long { "iB" } else { "" });
            if lower {
                text = text.to_lowercase();
            }
            let wide = u128::from(number) << shift;
            let expected = u64::try_from(wide).map(ByteSize).map_err(|_| ByteSizeError::TooLarge);
            prop_assert_eq!(text.parse(), expected);
        }

        #[test]
        fn size_displays_with_a_unit_when_it_divides(size in 1u64..1 << 50) {
            prop_assert!(ByteSize(size * 1024).to_string().ends_with("iB"));
        }

        #[test]
        fn duration_displays_to_what_parses_back(secs in 0u64..1 << 40, nanos in 0u32..1_000_000_000) {
            let duration = Duration(std::time::Duration::new(secs, nanos));
            prop_assert_eq!(duration.to_string().parse(), Ok(duration));
        }

        #[test]
        fn any_text_parses_or_is_refused(text in "\\PC{0,24}") {
            if let Ok(size) = text.parse::<ByteSize>() {
                prop_assert!(text.contains(|c: char| c.is_ascii_digit()));
                prop_assert_eq!(size.to_string().parse(), Ok(size));
            }
            if let Ok(duration) = text.parse::<Duration>() {
                prop_assert_eq!(duration.to_string().parse(), Ok(duration));
            }
        }
    }
}
