//! [`Rates`]: how much a volume, a session or a mount did per second, and [`RateWindow`]: when that
//! is measured. Pure: time is an argument.
//!
//! Rates are measured on demand. From the first query until a minute after the last one, the owner
//! of a window samples the counters about once a second. The rates cover the time between the last
//! two samples.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::LatencyCounts;

/// The time between two samples.
const RATE_INTERVAL: Duration = Duration::from_secs(1);
/// For how long after a question it goes on.
const WANTED_FOR: Duration = Duration::from_secs(60);

/// The counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Reads, and their times.
    pub reads: LatencyCounts,
    /// Writes, and their times.
    pub writes: LatencyCounts,
    /// Times that reads and writes waited for the store.
    pub store: LatencyCounts,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

impl Work {
    /// Takes the work of another in.
    pub fn add(&mut self, other: &Self) {
        self.reads.add(&other.reads);
        self.writes.add(&other.writes);
        self.store.add(&other.store);
        self.read_bytes = self.read_bytes.wrapping_add(other.read_bytes);
        self.written_bytes = self.written_bytes.wrapping_add(other.written_bytes);
    }
}

/// Work per second, and its latencies, in the last interval that was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    /// How long the interval was, in milliseconds.
    pub interval_ms: u64,
    /// Reads per second.
    pub reads: u64,
    /// Writes per second.
    pub writes: u64,
    /// Bytes read per second.
    pub read_bytes: u64,
    /// Bytes written per second.
    pub written_bytes: u64,
    /// Median of the reads in microseconds; absent without reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_p50_us: Option<u64>,
    /// 99th percentile of the reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_p99_us: Option<u64>,
    /// Median of the writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_p50_us: Option<u64>,
    /// 99th percentile of the writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_p99_us: Option<u64>,
    /// 99th percentile of the times that reads and writes waited for the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_p99_us: Option<u64>,
}

impl Rates {
    /// The rates between two moments that lie so far apart.
    #[must_use]
    pub fn between(earlier: &Work, later: &Work, apart: Duration) -> Self {
        let (reads, writes) =
            (later.reads.since(&earlier.reads), later.writes.since(&earlier.writes));
        let read_bytes = later.read_bytes.saturating_sub(earlier.read_bytes);
        let written_bytes = later.written_bytes.saturating_sub(earlier.written_bytes);
        Self {
            read_p50_us: reads.p50_us(),
            read_p99_us: reads.p99_us(),
            write_p50_us: writes.p50_us(),
            write_p99_us: writes.p99_us(),
            store_p99_us: later.store.since(&earlier.store).p99_us(),
            ..Self::of_counts([reads.count(), writes.count()], [read_bytes, written_bytes], apart)
        }
    }

    /// The rates of reads and writes, and of their bytes, in such a time. Latencies are unknown.
    #[must_use]
    pub fn of_counts(requests: [u64; 2], bytes: [u64; 2], apart: Duration) -> Self {
        let interval_ms = u64::try_from(apart.as_millis()).unwrap_or(u64::MAX).max(1);
        let per_second = |count: u64| {
            let rounded = u128::from(count) * 1000 + u128::from(interval_ms / 2);
            u64::try_from(rounded / u128::from(interval_ms)).unwrap_or(u64::MAX)
        };
        let ([reads, writes], [read_bytes, written_bytes]) =
            (requests.map(per_second), bytes.map(per_second));
        Self { interval_ms, reads, writes, read_bytes, written_bytes, ..Self::default() }
    }
}

/// The last two samples. `T` holds the counters of a sample.
#[derive(Debug)]
pub struct RateWindow<T> {
    asked: Option<Instant>,
    earlier: Option<(Instant, T)>,
    later: Option<(Instant, T)>,
}

impl<T> Default for RateWindow<T> {
    fn default() -> Self {
        Self { asked: None, earlier: None, later: None }
    }
}

impl<T> RateWindow<T> {
    /// Records a query. Returns whether the caller should take a sample now, by [`Self::take`]: no
    /// query came for a while.
    pub fn ask(&mut self, now: Instant) -> bool {
        let was_wanted = self.is_wanted(now);
        self.asked = Some(now);
        if !was_wanted {
            (self.earlier, self.later) = (None, None);
        }
        !was_wanted
    }

    // Whether a query came a short while ago.
    fn is_wanted(&self, now: Instant) -> bool {
        self.asked.is_some_and(|at| now.saturating_duration_since(at) < WANTED_FOR)
    }

    /// The time of the next sample; none without recent queries.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let (asked, (taken, _)) = (self.asked?, self.later.as_ref()?);
        let due = *taken + RATE_INTERVAL;
        (due < asked + WANTED_FOR).then_some(due)
    }

    /// Adds a sample: the counters now.
    pub fn take(&mut self, now: Instant, counted: T) {
        self.earlier = self.later.take();
        self.later = Some((now, counted));
    }

    /// The two samples and the time between them. None before the second sample.
    #[must_use]
    pub fn moments(&self) -> Option<(&T, &T, Duration)> {
        let ((from, earlier), (to, later)) = (self.earlier.as_ref()?, self.later.as_ref()?);
        Some((earlier, later, to.saturating_duration_since(*from)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_last_interval_and_only_while_somebody_asks() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut window = RateWindow::default();
        assert_eq!(window.due(), None);
        assert!(window.ask(at(0)), "the first moment is now");
        window.take(at(0), 10);
        assert_eq!(window.due(), Some(at(1000)));
        assert!(window.moments().is_none());
        window.take(at(1000), 30);
        assert!(!window.ask(at(1500)), "it goes on");
        assert_eq!(window.moments(), Some((&10, &30, Duration::from_secs(1))));
        window.take(at(2500), 40);
        assert_eq!(window.moments(), Some((&30, &40, Duration::from_millis(1500))));
        window.take(at(60_499), 40);
        assert_eq!(window.due(), Some(at(61_499)));
        window.take(at(61_499), 40);
        assert_eq!(window.due(), None, "nobody has asked for a minute");
        assert!(window.ask(at(62_000)));
        assert!(window.moments().is_none(), "nothing is told of long ago");
    }

    #[test]
    fn rates_are_per_second() {
        let mut work = Work::default();
        work.reads.record(100);
        work.read_bytes = 4096;
        let earlier = work.clone();
        for us in 0..300 {
            work.reads.record(us);
        }
        work.writes.record(1000);
        work.written_bytes = 1 << 20;
        work.read_bytes += 300 * 4096;
        let rates = Rates::between(&earlier, &work, Duration::from_millis(1500));
        assert_eq!((rates.reads, rates.writes), (200, 1));
        assert_eq!((rates.read_bytes, rates.written_bytes), (819_200, 699_051));
        assert_eq!((rates.read_p50_us, rates.write_p99_us), (Some(144), Some(960)));
        assert_eq!((rates.interval_ms, rates.store_p99_us), (1500, None));
        assert_eq!(Rates::between(&work, &work, Duration::ZERO).reads, 0, "no panic");
    }
}
