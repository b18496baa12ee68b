//! [`Paths`]: the paths of a queue as its thread has them: the watches of the present path, the
//! next path, and the reports to control about dead ones.

use std::io;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use tokio::sync::mpsc;

use super::DescriptorToken;
use super::FromQueue;
use super::descriptor_watch::DescriptorWatch;
use super::path_change::PathChange;
use crate::engine::path::{DeadPath, Path};
use crate::engine::{Engine, PathEnd};

/// The token of the mailbox. Each path has two tokens of its own, from [`FIRST_PATH`] on.
pub(crate) const MAIL: DescriptorToken = DescriptorToken(0);
const FIRST_PATH: u32 = 2;
/// The time before the next try to watch a path.
const WATCH_AGAIN: Duration = Duration::from_millis(100);

/// The paths of one queue.
pub(super) struct Paths {
    queue: u16,
    change: PathChange,
    // The token of the present path's first descriptor; the second has the next number.
    token: u32,
    // The time of the next try to watch the present path, if there were no descriptors for it.
    watch_at: Option<Instant>,
    outbox: mpsc::UnboundedSender<FromQueue>,
}

impl Paths {
    pub(super) fn new(queue: u16, outbox: mpsc::UnboundedSender<FromQueue>) -> Self {
        Self { queue, change: PathChange::new(queue), token: FIRST_PATH, watch_at: None, outbox }
    }

    /// The path to use as soon as the earlier paths are destroyed.
    pub(super) fn set_next(&mut self, path: Box<Path>) {
        let unused = self.change.set_next(path);
        self.give_back(unused);
    }

    /// Drops the next path.
    pub(super) fn drop_next(&mut self) {
        let unused = self.change.take_next();
        self.give_back(unused);
    }

    /// Makes requests fail with that errno, or wait again, once dead paths are destroyed.
    pub(super) fn set_failing(&mut self, errno: Option<i32>) {
        self.change.set_failing(errno);
    }

    /// Whether a change waits for dead paths to be destroyed.
    pub(super) fn is_changing(&self) -> bool {
        self.change.is_pending()
    }

    /// Whether a watch is one of the present path's.
    pub(super) fn is_of_path(&self, token: DescriptorToken) -> bool {
        token.0 & !1 == self.token
    }

    /// Makes the pending change, if it may be made now. Returns whether the engine has a new path.
    pub(super) fn change(
        &mut self,
        engine: &mut Engine,
        sleeper: &mut impl DescriptorWatch,
        now: Instant,
    ) -> io::Result<bool> {
        if !self.change.is_pending() {
            if self.watch_at.is_some_and(|at| now >= at) {
                self.watch(engine, sleeper, now)?;
            }
            return Ok(false);
        }
        // A path that ended just now counts, too. Its watches end before the next path takes the
        // tokens.
        self.send_off(engine, sleeper)?;
        if !self.change.apply(engine, now) {
            return Ok(false);
        }
        // A path with QPs that cannot be attached ends at once: it has no CQ to watch.
        if engine.poller_mut().is_some() {
            self.token += 2;
            self.watch(engine, sleeper, now)?;
        }
        Ok(true)
    }

    /// Whether every reported dead path is destroyed.
    pub(super) fn has_let_go(&self) -> bool {
        self.change.has_let_go()
    }

    /// Whether the present path is not watched, so that nothing wakes the queue for it.
    pub(super) fn is_unwatched(&self) -> bool {
        self.watch_at.is_some()
    }

    /// Adds the present path's descriptors to the sleeper. Without free descriptors the queue goes
    /// on, polls often, and tries again later.
    #[cold]
    fn watch(
        &mut self,
        engine: &mut Engine,
        sleeper: &mut impl DescriptorWatch,
        now: Instant,
    ) -> io::Result<()> {
        let was_unwatched = self.watch_at.take().is_some();
        let Some(poller) = engine.poller_mut() else { return Ok(()) };
        for (token, fd) in (self.token..).zip(poller.event_fds()) {
            let Some(fd) = fd else { continue };
            let Err(error) = sleeper.watch(fd, DescriptorToken(token)) else { continue };
            if !is_scarce(&error) {
                return Err(error);
            }
            for token in self.token..token {
                sleeper.unwatch(DescriptorToken(token));
            }
            self.watch_at = Some(now + WATCH_AGAIN);
            if !was_unwatched {
                tracing::warn!(
                    queue = self.queue,
                    %error,
                    "no descriptor for the events of a connection: it is looked at every millisecond meanwhile. Raise \
                     the limit (`ulimit -n`, LimitNOFILE=)"
                );
            }
            return Ok(());
        }
        if was_unwatched {
            tracing::info!(queue = self.queue, "the events of the connection wake its queue again");
        }
        Ok(())
    }

    /// Removes the descriptors of ended paths from the sleeper, and sends the paths to control.
    /// Returns whether there was one.
    pub(super) fn send_off(
        &mut self,
        engine: &mut Engine,
        sleeper: &mut impl DescriptorWatch,
    ) -> io::Result<bool> {
        let mut any = false;
        while let Some((end, dead)) = engine.take_ended() {
            any = true;
            self.watch_at = None;
            for token in self.token..=self.token + 1 {
                sleeper.unwatch(DescriptorToken(token));
            }
            sleeper.submit_removals()?;
            self.tell_end(end, dead);
        }
        Ok(any)
    }

    /// The queue ends: sends every path to control. The sleeper is destroyed at once, so no
    /// descriptor is removed from it.
    pub(super) fn end(&mut self, engine: &mut Engine) {
        engine.disconnect();
        self.drop_next();
        while let Some((end, dead)) = engine.take_ended() {
            self.tell_end(end, dead);
        }
    }

    /// Whether control is gone.
    pub(super) fn is_alone(&self) -> bool {
        self.outbox.is_closed()
    }

    /// Sends control another message.
    pub(super) fn tell(&self, message: FromQueue) {
        // The receiver lives until the process ends.
        let _ = self.outbox.send(message);
    }

    /// Sends control the remains of a path.
    fn tell_end(&self, end: PathEnd, dead: DeadPath) {
        let undestroyed = self.change.count(&dead);
        let (queue, dead) = (self.queue, Box::new(dead));
        self.tell(FromQueue::PathEnded { queue, end, dead, undestroyed });
    }

    /// Returns a path that was never used to control.
    fn give_back(&self, path: Option<Box<Path>>) {
        let Some(path) = path else { return };
        self.tell_end(PathEnd::Dropped, path.into_dead());
    }
}

/// Whether the system may have the resource later.
fn is_scarce(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::ENOSPC))
}

#[cfg(test)]
mod tests;
