//! [`FileWork`]: work of this process with files and devices, on threads that may block. A disk or
//! file system that does not answer keeps such a thread for as long as it likes, even from ending
//! with its process.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long work with files may take. Changes come one at a time, and wait for that.
const FILES_TIME: Duration = Duration::from_secs(60);
/// Work that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(10);

/// The work under way in this process, by number. Its threads belong to the process, not to a
/// target: several targets of one process (tests) share the list.
static UNDER_WAY: Mutex<Vec<(u64, Instant, String)>> = Mutex::new(Vec::new());

fn under_way() -> MutexGuard<'static, Vec<(u64, Instant, String)>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work under way, until it is dropped. The thread that works has it.
#[derive(Debug)]
pub(in crate::control) struct FileWork(u64);

impl FileWork {
    /// Work begins. `place` names the file, device or volume.
    pub(in crate::control) fn begin(place: String) -> Self {
        let mut under_way = under_way();
        let number = under_way.last().map_or(0, |(last, ..)| last + 1);
        under_way.push((number, Instant::now(), place));
        Self(number)
    }
}

impl Drop for FileWork {
    fn drop(&mut self) {
        under_way().retain(|(number, ..)| *number != self.0);
    }
}

/// The place of work that hangs, and the time since it began; `None`: no work hangs.
pub(in crate::control) fn hanging(now: Instant) -> Option<(String, Duration)> {
    let since = |began: &Instant| now.saturating_duration_since(*began);
    let under_way = under_way();
    let (_, began, place) = under_way.iter().find(|(_, began, _)| since(began) >= PATIENCE)?;
    Some((place.clone(), since(began)))
}

/// Works with files, on a thread that may block: this one serves all clients. Nobody waits longer
/// than [`FILES_TIME`] for the result. `place` names the file, device or volume, and `late` says
/// what was not done then.
///
/// # Errors
/// Those of the work, or it took too long.
pub(in crate::control) async fn with_files<T: Send + 'static>(
    place: String,
    late: impl FnOnce() -> String,
    work: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let begun = FileWork::begin(place);
    let work = move || {
        let done = work();
        drop(begun);
        done
    };
    match tokio::time::timeout(FILES_TIME, tokio::task::spawn_blocking(work)).await {
        Ok(done) => done.map_err(|error| error.to_string())?,
        Err(_) => Err(format!(
            "{} within {} s: its disk or file system does not answer",
            late(),
            FILES_TIME.as_secs()
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn work_hangs_until_its_thread_goes_on() {
        let place = "/a/disk/that/hangs";
        let hangs = |now| hanging(now).is_some_and(|(found, _)| found == place);
        let (go_on, wait) = mpsc::channel::<()>();
        let late = || "it was not opened".to_owned();
        let work = move || wait.recv().map_err(|error| error.to_string());
        let asked = with_files(place.to_owned(), late, work);
        assert!(tokio::time::timeout(Duration::from_millis(10), asked).await.is_err());
        // Nobody waits for it any more, and it still hangs.
        let later = Instant::now() + PATIENCE;
        assert!(hangs(later));
        assert!(!hangs(Instant::now()), "not yet");
        go_on.send(()).unwrap();
        while hangs(later) {
            std::thread::yield_now();
        }
    }
}
