//! [`LatencyLog`]: how long each request of a run of fio took, and when it ended.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::fio::Fio;

/// The requests of one run, by the order of their ends.
#[derive(Clone, Debug, Default)]
pub struct LatencyLog(Vec<(SystemTime, Duration)>);

impl LatencyLog {
    /// Has a run write its log to files with that path as the beginning of their names.
    #[must_use]
    pub fn ask(fio: Fio, path: &Path) -> Fio {
        let fio = fio.with("write_lat_log", path.display()).with("per_job_logs", 0);
        fio.with("log_unix_epoch", 1)
    }

    /// Reads the log of a run that has ended. The files are removed.
    ///
    /// # Panics
    /// The run wrote none.
    #[must_use]
    pub fn take(path: &Path) -> Self {
        let of = |kind: &str| PathBuf::from(format!("{}_{kind}.log", path.display()));
        let text = std::fs::read_to_string(of("clat")).expect("the log of fio");
        for kind in ["clat", "slat", "lat"] {
            let _ = std::fs::remove_file(of(kind));
        }
        Self::parse(&text)
    }

    /// Milliseconds since 1970, nanoseconds, and more, in each line.
    fn parse(text: &str) -> Self {
        let mut all: Vec<_> = text.lines().filter_map(request).collect();
        all.sort_unstable();
        Self(all)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The longest request that ended in a time.
    #[must_use]
    pub fn longest_between(&self, from: SystemTime, to: SystemTime) -> Duration {
        let ended = self.0.iter().filter(|(at, _)| (from..to).contains(at));
        ended.map(|(_, took)| *took).max().unwrap_or_default()
    }

    /// The time within which 99 of 100 ended, without so many that took longest.
    #[must_use]
    pub fn p99_without(&self, slowest: usize) -> Duration {
        let mut times: Vec<_> = self.0.iter().map(|(_, took)| *took).collect();
        times.sort_unstable();
        times.truncate(times.len().saturating_sub(slowest));
        let at = (times.len() * 99 / 100).min(times.len().saturating_sub(1));
        times.get(at).copied().unwrap_or_default()
    }
}

fn request(line: &str) -> Option<(SystemTime, Duration)> {
    let mut numbers = line.split(',').map(|word| word.trim().parse::<u64>());
    let (at, took) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some((SystemTime::UNIX_EPOCH + Duration::from_millis(at), Duration::from_nanos(took)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_of_fio() {
        let text = "1700000002000, 300, 1, 4096, 0\n1700000001000, 100, 0, 4096, 0\n";
        let log = LatencyLog::parse(&(text.to_owned() + "1700000003000, 200, 0, 4096, 0\n"));
        let at = |second: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + second);
        assert_eq!((log.len(), log.is_empty()), (3, false));
        assert_eq!(log.longest_between(at(1), at(3)), Duration::from_nanos(300));
        assert_eq!(log.longest_between(at(3), at(4)), Duration::from_nanos(200));
        assert_eq!(log.longest_between(at(4), at(5)), Duration::ZERO);
        assert_eq!(log.p99_without(0), Duration::from_nanos(300));
        assert_eq!(log.p99_without(1), Duration::from_nanos(200));
        assert_eq!(log.p99_without(9), Duration::ZERO);
    }
}
