//! [`Writer`]: writes files, which a check later reads back.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rblk_tests::lab::pattern;

/// Files to keep; the oldest is removed when there are more.
const KEPT: u64 = 40;

/// Writes and syncs file after file until it is stopped. An error ends it, and is reported at the
/// end.
pub(super) struct Writer {
    dir: PathBuf,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

fn name(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("file{number}"))
}

/// From a few bytes to half a MiB.
fn content(number: u64) -> Vec<u8> {
    pattern(number, usize::try_from(number * 77_773 % (512 << 10)).unwrap_or(0) + 1)
}

impl Writer {
    pub(super) fn start(dir: &Path) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count, at) = (Arc::clone(&stop), Arc::clone(&done), dir.to_owned());
        let thread = std::thread::spawn(move || {
            for number in 0.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let mut file = File::create(name(&at, number))?;
                file.write_all(&content(number))?;
                file.sync_all()?;
                if number >= KEPT {
                    std::fs::remove_file(name(&at, number - KEPT))?;
                }
                count.store(number + 1, Ordering::Relaxed);
                // A light load is enough.
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        });
        Self { dir: dir.to_owned(), stop, done, thread: Some(thread) }
    }

    /// How many files were written.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Ends it; returns the numbers of the files that must be there.
    pub(super) fn stop(mut self) -> std::ops::Range<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("it runs");
        let result = thread.join().expect("the writer");
        result.unwrap_or_else(|e| panic!("writing below {}: {e}", self.dir.display()));
        let done = self.done();
        done.saturating_sub(KEPT)..done
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Does not wait: the thread may wait for a device without a server.
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Reads the files back.
pub(super) fn check(dir: &Path, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let found = std::fs::read(name(dir, number));
        let found = found.unwrap_or_else(|e| panic!("file {number}: {e}"));
        assert!(found == content(number), "file {number} is not what was written");
    }
}
