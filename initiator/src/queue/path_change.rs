//! [`PathChange`]: the changes that wait in a queue until its dead paths are destroyed: the next
//! path, or the failure of waiting requests.
//!
//! Both give buffers away that the device of a dead path may still write to. So both wait until
//! every dead path is destroyed, no matter how long the kernel takes to destroy the QPs: only their
//! destruction proves that the device has finished.
//!
//! A path that joins others waits for the dead path of its own way alone, and the engine hears of
//! the destruction of each ([`Limbo`](crate::engine::ways::limbo::Limbo)).

use std::time::{Duration, Instant};

use rblk_protocol::Mutation;

use super::undestroyed::{Undestroyed, UndestroyedPath};
use crate::engine::Engine;
use crate::engine::path::{DeadPath, Path};
use crate::engine::ways::way_set::WaySet;
use crate::engine::ways::{PLACES, WayIndex};

/// The interval of log lines about a waiting change.
const WARNING: Duration = Duration::from_secs(5);

/// The next change of a queue, and its undestroyed paths.
#[derive(Debug)]
pub struct PathChange {
    queue: u16,
    // Of each way.
    undestroyed: [Undestroyed; PLACES],
    next: Option<Box<Path>>,
    // The next path of each way that joins others.
    joins: [Option<Box<Path>>; PLACES],
    // An errno for every request, or `None` to let requests wait again.
    failing: Option<Option<i32>>,
    warn_at: Option<Instant>,
    // Some change waits, or the engine may wait for a destruction.
    pending: bool,
}

impl PathChange {
    /// For a queue without a path; the number is for logs.
    #[must_use]
    pub fn new(queue: u16) -> Self {
        Self {
            queue,
            undestroyed: Default::default(),
            next: None,
            joins: Default::default(),
            failing: None,
            warn_at: None,
            pending: false,
        }
    }

    /// Sets the next path, in the place of all others. Returns the unused path that it replaces.
    pub fn set_next(&mut self, path: Box<Path>) -> Option<Box<Path>> {
        self.pending = true;
        self.next.replace(path)
    }

    /// Sets the next path of a way, beside the others. Returns the unused path that it replaces.
    pub fn set_join(&mut self, path: Box<Path>) -> Option<Box<Path>> {
        self.pending = true;
        self.joins[path.way.get()].replace(path)
    }

    /// Takes the next path back.
    pub(crate) fn take_next(&mut self) -> Option<Box<Path>> {
        self.next.take()
    }

    /// Takes the next path of a way back.
    pub fn take_join(&mut self, way: WayIndex) -> Option<Box<Path>> {
        self.joins[way.get()].take()
    }

    /// Makes every request fail with that errno, or wait again.
    pub fn set_failing(&mut self, errno: Option<i32>) {
        self.pending = true;
        self.failing = Some(errno);
    }

    /// Whether a change may be pending. Ended paths of the engine must be [counted](Self::count)
    /// before [`Self::apply`].
    #[must_use]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending
    }

    /// Counts a path that ended, if its device may still touch the buffers.
    #[must_use]
    pub fn count(&mut self, dead: &DeadPath) -> Option<UndestroyedPath> {
        self.pending = true;
        self.undestroyed[dead.way.get()].count(dead)
    }

    /// Whether every counted path is destroyed.
    #[must_use]
    pub fn has_let_go(&self) -> bool {
        self.undestroyed.iter().all(Undestroyed::is_empty)
    }

    /// Makes the pending changes whose counted paths are destroyed. Returns the ways for which the
    /// engine has a new path.
    pub fn apply(&mut self, engine: &mut Engine, now: Instant) -> WaySet {
        if !self.pending {
            return WaySet::NONE;
        }
        for way in engine.undestroyed_ways().iter() {
            if self.undestroyed[way.get()].is_empty() {
                engine.way_destroyed(way);
            }
        }
        let mut new = WaySet::NONE;
        if self.next.is_some() || self.failing.is_some() {
            if self.has_let_go() || Mutation::DestroyInitiator.is_on() {
                self.warn_at = None;
                if let Some(errno) = self.failing.take() {
                    engine.set_failed(errno);
                }
                if let Some(path) = self.next.take() {
                    new.insert(path.way);
                    engine.connect(*path, now);
                }
            } else {
                self.warn(now);
            }
        }
        // The next path would end the others: they joined it.
        let is_next = self.next.is_some();
        for join in &mut self.joins {
            if let Some(path) = join.take_if(|path| !is_next && engine.may_join(path.way)) {
                new.insert(path.way);
                engine.join(*path, now);
            }
        }
        let waits = self.next.is_some() || self.failing.is_some();
        let joins = self.joins.iter().any(Option::is_some);
        self.pending = waits || joins || !engine.undestroyed_ways().is_empty();
        new
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
