//! [`Paths`]: the paths of a queue as its thread has them: the watches of the path of each way, the
//! next paths, and the reports to control about dead ones.

use std::io;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use tokio::sync::mpsc;

use super::DescriptorToken;
use super::FromQueue;
use super::descriptor_watch::DescriptorWatch;
use super::path_change::PathChange;
use crate::engine::path::{DeadPath, Path};
use crate::engine::ways::way_set::WaySet;
use crate::engine::ways::{PLACES, WayIndex};
use crate::engine::{Engine, PathEnd};

/// The token of the mailbox. Each path has two tokens of its own, above [`NO_PATH`].
pub(crate) const MAIL: DescriptorToken = DescriptorToken(0);
const NO_PATH: u32 = 2;
/// The time before the next try to watch a path.
const WATCH_AGAIN: Duration = Duration::from_millis(100);

/// The paths of one queue.
pub(super) struct Paths {
    queue: u16,
    change: PathChange,
    // For each way, the token of its path's first descriptor; the second has the next number.
    tokens: [u32; PLACES],
    last_token: u32,
    // The ways with a path that there were no descriptors to watch, and the time of the next try.
    unwatched: WaySet,
    watch_at: Option<Instant>,
    outbox: mpsc::UnboundedSender<FromQueue>,
}

impl Paths {
    pub(super) fn new(queue: u16, outbox: mpsc::UnboundedSender<FromQueue>) -> Self {
        Self {
            queue,
            change: PathChange::new(queue),
            tokens: [NO_PATH; PLACES],
            last_token: NO_PATH,
            unwatched: WaySet::NONE,
            watch_at: None,
            outbox,
        }
    }

    /// The path to use as soon as the earlier paths are destroyed.
    pub(super) fn set_next(&mut self, path: Box<Path>) {
        let unused = self.change.set_next(path);
        self.give_back(unused);
    }

    /// The path to use beside others, as soon as the earlier path of its way is destroyed.
    pub(super) fn set_join(&mut self, path: Box<Path>) {
        let unused = self.change.set_join(path);
        self.give_back(unused);
    }

    /// Drops the next path.
    pub(super) fn drop_next(&mut self) {
        let unused = self.change.take_next();
        self.give_back(unused);
    }

    /// Drops the next path of a way.
    pub(super) fn drop_join(&mut self, way: WayIndex) {
        let unused = self.change.take_join(way);
        self.give_back(unused);
    }

    /// Drops the next path of every way.
    pub(super) fn drop_joins(&mut self) {
        (0..PLACES).filter_map(WayIndex::new).for_each(|way| self.drop_join(way));
    }

    /// Makes requests fail with that errno, or wait again, once dead paths are destroyed.
    pub(super) fn set_failing(&mut self, errno: Option<i32>) {
        self.change.set_failing(errno);
    }

    /// Whether a change waits for dead paths to be destroyed.
    pub(super) fn is_changing(&self) -> bool {
        self.change.is_pending()
    }

    /// The way with a path that a watch is of.
    pub(super) fn way_of(&self, token: DescriptorToken) -> Option<WayIndex> {
        let way = self.tokens.iter().position(|first| token.0 & !1 == *first)?;
        WayIndex::new(way)
    }

    /// Makes the pending changes that may be made now. Returns the ways for which the engine has a
    /// new path.
    pub(super) fn change(
        &mut self,
        engine: &mut Engine,
        sleeper: &mut impl DescriptorWatch,
        now: Instant,
    ) -> io::Result<WaySet> {
        if !self.change.is_pending() {
            if self.watch_at.is_some_and(|at| now >= at) {
                self.watch_again(engine, sleeper, now)?;
            }
            return Ok(WaySet::NONE);
        }
        // A path that ended just now counts, too. Its watches end before the next path takes the
        // tokens.
        self.send_off(engine, sleeper)?;
        let new = self.change.apply(engine, now);
        for way in new.iter() {
            // A path with QPs that cannot be attached ends at once: it has no CQ to watch.
            if engine.poller_of(way).is_some() {
                self.last_token += 2;
                self.tokens[way.get()] = self.last_token;
                self.watch(way, engine, sleeper, now)?;
            }
        }
        Ok(new)
    }

    /// Whether every reported dead path is destroyed.
    pub(super) fn has_let_go(&self) -> bool {
        self.change.has_let_go()
    }

    /// Whether some path is not watched, so that nothing wakes the queue for it.
    pub(super) fn is_unwatched(&self) -> bool {
        self.watch_at.is_some()
    }

    /// Tries once more to watch the paths without watches.
    #[cold]
    fn watch_again(
        &mut self,
        engine: &mut Engine,
        sleeper: &mut impl DescriptorWatch,
        now: Instant,
    ) -> io::Result<()> {
        self.watch_at = None;
        self.unwatched.iter().try_for_each(|way| self.watch(way, engine, sleeper, now))
    }

    /// Adds the descriptors of a way's path to the sleeper. Without free descriptors the queue goes
    /// on, polls often, and tries again later.
    #[cold]
    fn watch(
        &mut self,
        way: WayIndex,
        engine: &mut Engine,
        sleeper: &mut impl DescriptorWatch,
        now: Instant,
    ) -> io::Result<()> {
        let was_unwatched = self.unwatched.has(way);
        self.unwatched.remove(way);
        let first = self.tokens[way.get()];
        let Some(poller) = engine.poller_of(way) else { return Ok(()) };
        for (token, fd) in (first..).zip(poller.event_fds()) {
            let Some(fd) = fd else { continue };
            let Err(error) = sleeper.watch(fd, DescriptorToken(token)) else { continue };
            if !is_scarce(&error) {
                return Err(error);
            }
            for token in first..token {
                sleeper.unwatch(DescriptorToken(token));
            }
            self.unwatched.insert(way);
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
            self.unwatched.remove(dead.way);
            if self.unwatched.is_empty() {
                self.watch_at = None;
            }
            let first = self.tokens[dead.way.get()];
            for token in first..=first + 1 {
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
        self.drop_joins();
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
    fn tell_end(&mut self, end: PathEnd, dead: DeadPath) {
        let undestroyed = self.change.count(&dead);
        let (queue, dead) = (self.queue, Box::new(dead));
        self.tell(FromQueue::PathEnded { queue, end, dead, undestroyed });
    }

    /// Returns a path that was never used to control.
    fn give_back(&mut self, path: Option<Box<Path>>) {
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
