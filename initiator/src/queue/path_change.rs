//! [`PathChange`]: the changes that wait in a queue until its dead paths are destroyed: the next
//! path, or the failure of waiting requests.
//!
//! Both give buffers away that the device of a dead path may still write to. So both wait until
//! every dead path is destroyed, no matter how long the kernel takes to destroy the QPs: only their
//! destruction proves that the device has finished.

use std::time::{Duration, Instant};

use rblk_protocol::Mutation;

use super::undestroyed::{Undestroyed, UndestroyedPath};
use crate::engine::Engine;
use crate::engine::path::{DeadPath, Path};

/// The interval of log lines about a waiting change.
const WARNING: Duration = Duration::from_secs(5);

/// The next change of a queue, and its undestroyed paths.
#[derive(Debug)]
pub struct PathChange {
    queue: u16,
    undestroyed: Undestroyed,
    next: Option<Box<Path>>,
    // An errno for every request, or `None` to let requests wait again.
    failing: Option<Option<i32>>,
    warn_at: Option<Instant>,
}

impl PathChange {
    /// For a queue without a path; the number is for logs.
    #[must_use]
    pub fn new(queue: u16) -> Self {
        Self {
            queue,
            undestroyed: Undestroyed::default(),
            next: None,
            failing: None,
            warn_at: None,
        }
    }

    /// Sets the next path. Returns the unused path that it replaces.
    pub fn set_next(&mut self, path: Box<Path>) -> Option<Box<Path>> {
        self.next.replace(path)
    }

    /// Takes the next path back.
    pub(crate) fn take_next(&mut self) -> Option<Box<Path>> {
        self.next.take()
    }

    /// Makes every request fail with that errno, or wait again.
    pub fn set_failing(&mut self, errno: Option<i32>) {
        self.failing = Some(errno);
    }

    /// Whether a change is pending. Ended paths of the engine must be [counted](Self::count) before
    /// [`Self::apply`].
    #[must_use]
    pub(crate) fn is_pending(&self) -> bool {
        self.next.is_some() || self.failing.is_some()
    }

    /// Counts a path that ended, if its device may still touch the buffers.
    #[must_use]
    pub fn count(&self, dead: &DeadPath) -> Option<UndestroyedPath> {
        self.undestroyed.count(dead)
    }

    /// Whether every counted path is destroyed.
    #[must_use]
    pub fn has_let_go(&self) -> bool {
        self.undestroyed.is_empty()
    }

    /// Makes the pending change, if every counted path is destroyed. Returns whether the engine has
    /// a new path.
    pub fn apply(&mut self, engine: &mut Engine, now: Instant) -> bool {
        if !self.is_pending() {
            return false;
        }
        if !self.undestroyed.is_empty() && !Mutation::DestroyInitiator.is_on() {
            self.warn(now);
            return false;
        }
        self.warn_at = None;
        if let Some(errno) = self.failing.take() {
            engine.set_failed(errno);
        }
        let Some(path) = self.next.take() else { return false };
        engine.connect(*path, now);
        true
    }

    fn warn(&mut self, now: Instant) {
        let warn_at = *self.warn_at.get_or_insert(now + WARNING);
        if now >= warn_at {
            self.warn_at = Some(now + WARNING);
            tracing::warn!(
                queue = self.queue,
                "the kernel has not destroyed the QP of the last path; requests wait for that"
            );
        }
    }
}
