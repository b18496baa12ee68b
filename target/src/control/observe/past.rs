//! [`Past`]: the work of the volumes of a target in each of the last seconds, for a page that opens
//! in the middle of an outage. Pure: the time is an argument.
//!
//! Bounded: [`MOMENTS_MAX`] moments, and the room of [`BUCKETS_MAX`] buckets of histograms in all
//! of them. With many busy volumes the past is shorter. A second without replies takes no memory.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use rblk_runtime::LatencyCounts;
use serde::Serialize;

/// Moments that are kept: a little more than two minutes of seconds.
pub const MOMENTS_MAX: usize = 130;
/// The most buckets that are kept, of 12 bytes each and about as much again as JSON. Each [`Deeds`]
/// takes the room of [`DEEDS`] buckets besides.
pub const BUCKETS_MAX: usize = 128 << 10;

/// The room of a volume's work in a moment without its histograms, in buckets.
const DEEDS: usize = 24;

/// A bucket of a histogram: its upper bound in microseconds, exclusive (none: it is open), and its
/// count.
type HistogramBucket = (Option<u32>, u32);

/// The work of a volume in a moment.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Deeds {
    /// The volume.
    pub name: String,
    /// READs answered.
    pub reads: u64,
    /// WRITEs answered.
    pub writes: u64,
    /// Bytes of the READs.
    pub read_bytes: u64,
    /// Bytes of the WRITEs.
    pub written_bytes: u64,
    /// Commands answered with an error.
    pub errors: u64,
    /// Times of the READs.
    pub read: Vec<HistogramBucket>,
    /// Times of the WRITEs.
    pub write: Vec<HistogramBucket>,
    /// Times of the FLUSHes.
    pub flush: Vec<HistogramBucket>,
}

impl Deeds {
    fn buckets(&self) -> usize {
        DEEDS + self.read.len() + self.write.len() + self.flush.len()
    }
}

/// The buckets of a histogram that are not empty.
#[must_use]
pub fn buckets(times: &LatencyCounts) -> Vec<HistogramBucket> {
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    times.buckets().map(|(upper, count)| (upper.map(narrow), narrow(count))).collect()
}

/// A moment: a second, or longer after a break in the counting.
#[derive(Debug, Serialize)]
pub struct PastSample {
    /// Its number, higher than those before, from 1 in each run of the target.
    pub number: u64,
    /// Its end, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Its length, in milliseconds.
    pub lasted_ms: u64,
    /// The volumes that sent replies.
    pub volumes: Vec<Deeds>,
    #[serde(skip)]
    json: OnceLock<String>,
}

impl PastSample {
    fn buckets(&self) -> usize {
        self.volumes.iter().map(Deeds::buckets).sum()
    }

    /// The moment as JSON, which is made for its first reader.
    #[must_use]
    pub fn json(&self) -> &str {
        self.json.get_or_init(|| serde_json::to_string(self).unwrap_or_default())
    }
}

/// The moments that are kept.
#[derive(Clone, Debug, Default)]
pub struct PastReport {
    /// The run of the target, in hexadecimal.
    pub instance: String,
    /// The highest number so far.
    pub last: u64,
    /// When the run began, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Now, in milliseconds since 1970.
    pub now_unix_ms: u64,
    /// The moments that are kept, oldest first.
    pub moments: Vec<Arc<PastSample>>,
}

impl PastReport {
    /// The report with the moments after a number, as JSON.
    #[must_use]
    pub fn after(&self, number: u64) -> String {
        let Self { last, started_unix_ms, now_unix_ms, .. } = self;
        let instance = serde_json::Value::from(self.instance.as_str());
        let first = self.moments.partition_point(|moment| moment.number <= number);
        let moments: Vec<&str> = self.moments[first..].iter().map(|moment| moment.json()).collect();
        let moments = moments.join(",");
        let head = format!("\"instance\":{instance},\"last\":{last}");
        let times = format!("\"started_unix_ms\":{started_unix_ms},\"now_unix_ms\":{now_unix_ms}");
        format!("{{{head},{times},\"moments\":[{moments}]}}")
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Past {
    last: u64,
    buckets: usize,
    kept: VecDeque<Arc<PastSample>>,
}

impl Past {
    /// Takes the work of the volumes until now, idle ones left out.
    pub fn note(&mut self, unix_ms: u64, lasted_ms: u64, volumes: Vec<Deeds>) {
        if volumes.is_empty() {
            return;
        }
        self.last += 1;
        let json = OnceLock::new();
        let moment = PastSample { number: self.last, unix_ms, lasted_ms, volumes, json };
        self.buckets += moment.buckets();
        self.kept.push_back(Arc::new(moment));
        while self.kept.len() > MOMENTS_MAX || self.buckets > BUCKETS_MAX {
            let Some(oldest) = self.kept.pop_front() else { break };
            self.buckets -= oldest.buckets();
        }
    }

    /// The number of the last moment, and the moments that are kept.
    #[must_use]
    pub fn kept(&self) -> (u64, Vec<Arc<PastSample>>) {
        (self.last, self.kept.iter().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deeds(name: &str, times: &[u64]) -> Deeds {
        let mut counts = LatencyCounts::default();
        times.iter().for_each(|us| counts.record(*us));
        Deeds { name: name.to_owned(), read: buckets(&counts), ..Deeds::default() }
    }

    #[test]
    fn two_minutes_are_kept_and_a_quiet_second_takes_nothing() {
        let mut past = Past::default();
        for second in 0..1000 {
            past.note(second * 1000, 1000, Vec::new());
        }
        assert_eq!(past.kept().0, 0);
        for second in 0..1000 {
            past.note(second * 1000, 1000, vec![deeds("v", &[7])]);
        }
        let (last, kept) = past.kept();
        assert_eq!((last, kept.len(), kept[0].number), (1000, MOMENTS_MAX, 1001 - 130));
        let report = PastReport { moments: kept, ..PastReport::default() };
        let count = |after| report.after(after).matches("lasted_ms").count();
        assert_eq!((count(0), count(999), count(1000), count(u64::MAX)), (MOMENTS_MAX, 1, 0, 0));
    }

    #[test]
    fn many_busy_volumes_make_the_past_shorter_and_never_larger() {
        let mut past = Past::default();
        let times: Vec<u64> = (0..24).map(|octave| 1 << octave).collect();
        for second in 0..200 {
            let volumes = (0..100).map(|n| deeds(&n.to_string(), &times)).collect();
            past.note(second, 1000, volumes);
            let of_all: usize = past.kept.iter().map(|moment| moment.buckets()).sum();
            assert!(of_all <= BUCKETS_MAX && of_all == past.buckets, "{of_all}");
        }
        let kept = past.kept().1.len();
        assert!((5..MOMENTS_MAX).contains(&kept), "{kept}");
    }

    #[test]
    fn the_report_is_json_and_its_open_bucket_has_no_end() {
        let mut past = Past::default();
        past.note(5000, 1000, vec![deeds("a\"b", &[0, 1 << 40])]);
        let (last, moments) = past.kept();
        let report =
            PastReport { instance: "i".to_owned(), last, moments, ..PastReport::default() };
        let json: serde_json::Value = serde_json::from_str(&report.after(0)).unwrap();
        assert_eq!(json["moments"][0]["volumes"][0]["name"], "a\"b");
        let read = &json["moments"][0]["volumes"][0]["read"];
        assert_eq!(*read, serde_json::json!([[1, 1], [null, 1]]));
        assert_eq!(json["moments"][0]["lasted_ms"], 1000);
    }
}
