//! [`AckTimeout`]: how long a device waits for an acknowledgement before it sends again.

use std::time::Duration;

/// Send retries before a path counts as dead. One less than the maximum of 7: Soft-RoCE retries
/// without end for 7, and its WRs then wait for a dead peer until something else ends the
/// connection.
pub(crate) const RETRIES: u8 = 6;

/// A device may wait up to this many times as long (InfiniBand specification, volume 1, 9.7.6.1.3).
const STRETCH: u128 = 4;

/// At least 67 ms where it follows from `detect`: with less, a busy peer looks dead.
const LEAST: u8 = 14;

/// As a QP has it: 4.096 us times 2 to the power of the value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AckTimeout(u8);

impl AckTimeout {
    /// The longest with which a device that waits four times as long still makes all its tries
    /// within `detect`, but at least 67 ms and at most 8.6 s. Where `detect` is short, heart-beats
    /// find a dead path first.
    #[must_use]
    pub fn within(detect: Duration) -> Self {
        let tries = u128::from(RETRIES) + 1;
        Self::longest(LEAST..=21, detect.as_nanos() / (tries * STRETCH))
    }

    /// The longest that is not longer than `time`: at least 0.5 ms, at most 17 s.
    #[must_use]
    pub fn of(time: Duration) -> Self {
        Self::longest(7..=22, time.as_nanos())
    }

    fn longest(exponents: std::ops::RangeInclusive<u8>, nanos: u128) -> Self {
        let least = *exponents.start();
        Self(exponents.rev().find(|exponent| (4096u128 << exponent) <= nanos).unwrap_or(least))
    }

    /// The exponent.
    #[must_use]
    pub fn exponent(self) -> u8 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tries_end_within_detect() {
        let within = |detect| AckTimeout::within(detect).exponent();
        assert_eq!(within(Duration::from_secs(5)), 15);
        assert_eq!(within(Duration::ZERO), 14);
        assert_eq!(within(Duration::from_secs(3600)), 21);
        for seconds in 2..60 {
            let detect = Duration::from_secs(seconds);
            let tries = u64::from(RETRIES) + 1;
            let slowest = Duration::from_nanos(4 * tries * (4096 << within(detect)));
            assert!(slowest <= detect, "{detect:?}: a device may take {slowest:?}");
            let next = Duration::from_nanos(4 * tries * (4096 << (within(detect) + 1)));
            assert!(next > detect, "{detect:?}: it could be longer");
        }
    }

    #[test]
    fn a_time_is_rounded_down() {
        let of = |ms| AckTimeout::of(Duration::from_millis(ms)).exponent();
        assert_eq!((of(0), of(1), of(67), of(68), of(134), of(135)), (7, 7, 13, 14, 14, 15));
        assert_eq!(of(30_000), 22);
    }
}
