//! [`Succession`]: what a queue does only when its dead paths are destroyed: use the next path, or
//! fail requests that wait.
//!
//! Both give buffers away that the device of a dead path may still write to. So both wait for every
//! [`Grave`], however long the kernel takes to destroy the QPs: nothing else shows that the device
//! has let go.

use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::grave::{Grave, Graves};
use crate::path::{DeadPath, Path};

/// How often it is told that something waits.
const WARNING: Duration = Duration::from_secs(5);

/// What a queue does next, and which of its paths are not destroyed yet.
#[derive(Debug)]
pub struct Succession {
    queue: u16,
    graves: Graves,
    next: Option<Box<Path>>,
    // An errno for every request, or `None` to let them wait again.
    failing: Option<Option<i32>>,
    warn_at: Option<Instant>,
}

impl Succession {
    /// Of a queue that had no path yet; the number is for logs.
    #[must_use]
    pub fn new(queue: u16) -> Self {
        Self { queue, graves: Graves::default(), next: None, failing: None, warn_at: None }
    }

    /// The path to use next. Returns one that it takes the place of, and that was never used.
    pub fn follow_with(&mut self, path: Box<Path>) -> Option<Box<Path>> {
        self.next.replace(path)
    }

    /// Takes the path back that was to be next.
    pub fn take_next(&mut self) -> Option<Box<Path>> {
        self.next.take()
    }

    /// Every request is to fail with that errno, or to wait again.
    pub fn fail(&mut self, errno: Option<i32>) {
        self.failing = Some(errno);
    }

    /// Whether there is something to do: the engine's paths that ended have to get their graves
    /// before [`Self::go_on`].
    #[must_use]
    pub fn waits(&self) -> bool {
        self.next.is_some() || self.failing.is_some()
    }

    /// A grave for a path that ended, if it needs one.
    #[must_use]
    pub fn dig(&self, dead: &DeadPath) -> Option<Grave> {
        self.graves.dig(dead)
    }

    /// Does what waits, if every path that got a grave is destroyed. Returns whether the engine has
    /// a new path.
    pub fn go_on(&mut self, engine: &mut Engine, now: Instant) -> bool {
        if !self.waits() {
            return false;
        }
        if !self.graves.are_closed() {
            let warn_at = *self.warn_at.get_or_insert(now + WARNING);
            if now >= warn_at {
                self.warn_at = Some(now + WARNING);
                tracing::warn!(
                    queue = self.queue,
                    "the kernel has not destroyed the QP of the last path; requests wait for that"
                );
            }
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
}
