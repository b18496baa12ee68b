//! [`StallMeter`]: the longest time in which a block device completed no request.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::blocks::Sysfs;

/// The interval between two looks.
const STEP: Duration = Duration::from_millis(20);

/// Watches a device until it is dropped. It counts completed requests of the device, across changes
/// of the server. An idle device has gaps, too.
#[derive(Debug)]
pub struct StallMeter {
    stop: Arc<AtomicBool>,
    gaps: Arc<Mutex<Gaps>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Gaps {
    ended: Option<u64>,
    changed: Instant,
    longest: Duration,
}

impl Gaps {
    fn look(&mut self, ended: Option<u64>, now: Instant) {
        self.longest = self.longest.max(now - self.changed);
        if ended != self.ended {
            (self.ended, self.changed) = (ended, now);
        }
    }
}

/// Reads and writes that the device has completed. The file stays open: opening it costs more than
/// reading it.
fn ended(stat: &File) -> Option<u64> {
    let mut text = [0; 512];
    let len = stat.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..len]).ok()?;
    // Documentation/block/stat.rst: the requests of a kind, and three figures more of each.
    Some(text.split_whitespace().step_by(4).take(2).filter_map(|n| n.parse::<u64>().ok()).sum())
}

impl StallMeter {
    /// Starts to look.
    ///
    /// # Panics
    /// There is no such device.
    #[must_use]
    pub fn start(device: &Path) -> Self {
        let stat = Sysfs::of(device).path("stat");
        let stat = File::open(&stat).unwrap_or_else(|e| panic!("{}: {e}", stat.display()));
        let stop = Arc::new(AtomicBool::new(false));
        let now = Instant::now();
        let gaps = Gaps { ended: ended(&stat), changed: now, longest: Duration::ZERO };
        let gaps = Arc::new(Mutex::new(gaps));
        let (stopped, seen) = (Arc::clone(&stop), Arc::clone(&gaps));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let count = ended(&stat);
                seen.lock().unwrap_or_else(PoisonError::into_inner).look(count, Instant::now());
                std::thread::sleep(STEP);
            }
        });
        Self { stop, gaps, thread: Some(thread) }
    }

    /// The longest time without a completed request, since the start or since the last call. A gap
    /// in progress counts up to now; the rest of it counts in the next call.
    #[must_use]
    pub fn longest(&self) -> Duration {
        let mut gaps = self.gaps.lock().unwrap_or_else(PoisonError::into_inner);
        let (ended, now) = (gaps.ended, Instant::now());
        gaps.look(ended, now);
        gaps.changed = now;
        std::mem::take(&mut gaps.longest)
    }

    /// An upper bound of the time since a request completed.
    #[must_use]
    pub fn silent_for(&self) -> Duration {
        self.gaps.lock().unwrap_or_else(PoisonError::into_inner).changed.elapsed()
    }
}

impl Drop for StallMeter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_that_goes_on_counts() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut gaps = Gaps { ended: Some(1), changed: begin, longest: Duration::ZERO };
        gaps.look(Some(2), at(30));
        gaps.look(Some(3), at(50));
        assert_eq!(gaps.longest, Duration::from_millis(30));
        gaps.look(Some(3), at(100));
        assert_eq!(gaps.longest, Duration::from_millis(50));
        gaps.look(Some(4), at(110));
        assert_eq!(gaps.longest, Duration::from_millis(60));
    }
}
