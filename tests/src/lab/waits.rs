//! [`CpuWaits`]: how long the threads of a process were ready to run and had no CPU.
//!
//! On a busy machine a program is late through no fault of its own. The scheduler counts that time
//! for each thread. The scheduler does not see the time in which the whole machine did not run; the
//! [`Witness`](super::Witness) does.

use std::collections::BTreeMap;
use std::time::Duration;

/// A process, observed since some moment.
#[derive(Debug)]
pub struct CpuWaits {
    pid: u32,
    before: BTreeMap<u32, Duration>,
}

impl CpuWaits {
    /// Whether the kernel counts waits (`CONFIG_SCHED_INFO`). The kernel of user-mode Linux does
    /// not.
    #[must_use]
    pub fn are_counted() -> bool {
        std::fs::read_to_string("/proc/self/schedstat").is_ok()
    }

    /// Begins to count.
    ///
    /// # Panics
    /// The process is gone, or its kernel does not count.
    #[must_use]
    pub fn start(pid: u32) -> Self {
        Self { pid, before: waits(pid) }
    }

    /// The waits of all threads together. Threads that wait for one another may count the same time
    /// twice.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    #[must_use]
    pub fn so_far(&self) -> Duration {
        let since = |(thread, now): (u32, Duration)| {
            now.saturating_sub(self.before.get(&thread).copied().unwrap_or_default())
        };
        waits(self.pid).into_iter().map(since).sum()
    }
}

fn waits(pid: u32) -> BTreeMap<u32, Duration> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap_or_else(|e| panic!("process {pid}: {e}"));
    let wait = |thread: std::fs::DirEntry| {
        let id = thread.file_name().to_str()?.parse().ok()?;
        // A thread may end meanwhile.
        Some((id, parse(&std::fs::read_to_string(thread.path().join("schedstat")).ok()?)?))
    };
    let waits: BTreeMap<_, _> = threads.flatten().filter_map(wait).collect();
    assert!(!waits.is_empty(), "no thread of process {pid} has a schedstat: CONFIG_SCHED_INFO");
    waits
}

/// Documentation/scheduler/sched-stats.rst: time on a CPU, time on a run queue, and how often.
fn parse(text: &str) -> Option<Duration> {
    text.split_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_number_is_the_wait() {
        assert_eq!(parse("1000 2000000 3\n"), Some(Duration::from_millis(2)));
        assert_eq!(parse(""), None);
    }

    #[test]
    fn only_waits_after_the_start_count() {
        let pid = std::process::id();
        let mut later = CpuWaits::start(pid);
        let all = CpuWaits { pid, before: BTreeMap::new() };
        assert!(later.so_far() <= all.so_far());
        // A thread that waited longer than now is another one of the same number.
        later.before.values_mut().for_each(|wait| *wait += Duration::from_secs(3600));
        assert!(later.so_far() < Duration::from_secs(3600));
    }
}
