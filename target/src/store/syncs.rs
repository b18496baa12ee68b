//! [`Syncs`]: one `fdatasync` of a backing at a time, shared by the flushes that wait for it.
//!
//! The kernel reports a failed write of the page cache to ONE caller of `fdatasync` on the open
//! file, and then counts the data as written. Of two overlapping calls, either may get the report.
//! So a backing has at most one call in the kernel. A running call does not cover a flush that
//! comes later: that flush waits for the next call, together with all flushes that come before the
//! next call starts.
//!
//! Syncs are numbered. A flush gets the result of the first sync that started after the flush came.
//! The first failed sync is a loss: it and every later sync fail, as long as the backing is open,
//! since lost data never comes back.
//!
//! With [`Losses::HeldUntilNoted`] a failed flush is answered after [`Syncs::loss_noted`]. The
//! owner of the store first writes to disk that data may be lost. Without that record, a target
//! that crashes right after the answer would start again, and initiators would believe that the
//! lost writes are durable.
//!
//! The [`Door`] of a store wakes it when it waits for a sync. The rules:
//!
//! - The list has the door of every store with a waiting flush.
//! - A door leaves the list when it is rung.
//! - A store with a rung door looks at all its flushes again.
//! - The end of a sync rings every store that waits for this sync.
//! - The store that ended the sync runs the next sync itself, if one of its own flushes waits for
//!   it. Otherwise every store that waits for the next sync is rung, and the first one that looks
//!   runs it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

// Time that a blocked caller sleeps before it looks without a ring.
#[cfg(test)]
const LOOK_MS: u16 = 1000;

/// When to answer a failed flush.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Losses {
    /// At once.
    #[default]
    ToldAtOnce,
    /// After [`Backing::loss_noted`](super::Backing::loss_noted).
    HeldUntilNoted,
}

/// The number of a sync. Syncs of a backing run one after the other, in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) struct SyncNumber(u64);

/// The next step of a flush that waits for a sync.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SyncLook {
    /// The caller runs the sync, and calls [`Syncs::end`] with the result.
    Run,
    /// The caller waits until its door rings.
    Wait,
    /// The sync ended with this result.
    Over(Result<(), Errno>),
}

/// Wakes the thread of one store.
#[derive(Clone, Debug)]
pub(super) struct Door(Arc<EventFd>);

impl Door {
    /// A door that was not rung yet.
    pub(super) fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self(Arc::new(EventFd::from_value_and_flags(0, flags)?)))
    }

    /// Readable after a ring, until [`Self::answer`].
    pub(super) fn fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }

    /// Waits for a ring, or for a second.
    #[cfg(test)]
    pub(super) fn wait(&self) {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        // An error or a timeout is a reason to look, too.
        let _ = poll(&mut fds, PollTimeout::from(LOOK_MS));
        self.answer();
    }

    /// Clears the ring. After this call the store looks at all its waiting flushes.
    pub(super) fn answer(&self) {
        // EAGAIN: the door was not rung.
        let _ = self.0.read();
    }

    /// Wakes the store.
    pub(super) fn ring(&self) {
        // EAGAIN: the door was rung very often without an answer, so it is readable.
        let _ = self.0.write(1);
    }
}

impl PartialEq for Door {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The syncs of one backing.
#[derive(Debug)]
pub(super) struct Syncs(Mutex<Order<Door>>);

impl Syncs {
    /// The syncs of a backing without a flush yet.
    pub(super) fn new(losses: Losses) -> Self {
        Self(Mutex::new(Order::new(losses)))
    }

    // A panic elsewhere leaves this state consistent.
    fn order(&self) -> MutexGuard<'_, Order<Door>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A flush came: returns the sync that covers it. [`Self::look`] returns the flush's next step.
    pub(super) fn join(&self) -> SyncNumber {
        self.order().join()
    }

    /// The next step of a flush that waits for `number`.
    pub(super) fn look(&self, number: SyncNumber, door: &Door) -> SyncLook {
        self.order().look(number, door)
    }

    /// The sync that [`SyncLook::Run`] gave to the owner of `door` ended. Returns whether this
    /// result is the loss: true once in the life of a backing. The owner looks at all its flushes
    /// next.
    pub(super) fn end(&self, result: Result<(), Errno>, door: &Door) -> bool {
        let SyncEnd { rings, is_loss } = self.order().end(result, door);
        rings.iter().for_each(Door::ring);
        is_loss
    }

    /// The owner of `door` has no waiting flush any more.
    pub(super) fn leave(&self, door: &Door) {
        let rings = self.order().leave(door);
        rings.iter().for_each(Door::ring);
    }

    /// The loss is recorded: flushes held for it are answered.
    pub(super) fn loss_noted(&self) {
        let rings = self.order().loss_noted();
        rings.iter().for_each(Door::ring);
    }

    /// Whether a sync has failed.
    #[cfg(test)]
    pub(super) fn is_lost(&self) -> bool {
        self.order().loss.is_some()
    }
}

// The first failed sync.
#[derive(Clone, Copy, Debug)]
struct SyncLoss {
    at: SyncNumber,
    errno: Errno,
    noted: bool,
}

// The consequences of a sync's end.
struct SyncEnd<D> {
    rings: Vec<D>,
    is_loss: bool,
}

// The state machine of [`Syncs`], for doors of any kind. Pure.
#[derive(Debug)]
struct Order<D> {
    // Syncs started and ended; they differ by one while a sync runs.
    begun: u64,
    ended: u64,
    loss: Option<SyncLoss>,
    losses: Losses,
    waiting: Vec<(SyncNumber, D)>,
}

impl<D: Clone + PartialEq> Order<D> {
    fn new(losses: Losses) -> Self {
        Self { begun: 0, ended: 0, loss: None, losses, waiting: Vec::new() }
    }

    fn join(&self) -> SyncNumber {
        SyncNumber(self.begun + 1)
    }

    fn look(&mut self, number: SyncNumber, door: &D) -> SyncLook {
        if number.0 <= self.ended {
            match self.loss {
                Some(loss) if number >= loss.at && !loss.noted => {}
                Some(loss) if number == loss.at => return SyncLook::Over(Err(loss.errno)),
                Some(loss) if number > loss.at => return SyncLook::Over(Err(Errno::EIO)),
                _ => return SyncLook::Over(Ok(())),
            }
        } else if number.0 == self.begun + 1 && self.begun == self.ended {
            self.begun += 1;
            return SyncLook::Run;
        }
        if !self.waiting.iter().any(|(at, other)| *at == number && other == door) {
            self.waiting.push((number, door.clone()));
        }
        SyncLook::Wait
    }

    fn end(&mut self, result: Result<(), Errno>, door: &D) -> SyncEnd<D> {
        self.ended = self.begun;
        let mut is_loss = false;
        if let (Err(errno), None) = (result, self.loss) {
            is_loss = true;
            let noted = self.losses == Losses::ToldAtOnce;
            self.loss = Some(SyncLoss { at: SyncNumber(self.ended), errno, noted });
        }
        let next = SyncNumber(self.ended + 1);
        // The store that ended this sync looks at its own flushes, and so starts the next sync.
        let goes_on = self.waiting.iter().any(|(number, other)| *number == next && other == door);
        self.waiting.retain(|(_, other)| other != door);
        let held = self.loss.filter(|loss| !loss.noted);
        let rings = self.take_doors(|number| {
            if number == next { !goes_on } else { held.is_none_or(|loss| number < loss.at) }
        });
        SyncEnd { rings, is_loss }
    }

    fn leave(&mut self, door: &D) -> Vec<D> {
        self.waiting.retain(|(_, other)| other != door);
        let next = SyncNumber(self.ended + 1);
        // This door may have been rung to run the next sync.
        if self.begun == self.ended { self.take_doors(|number| number == next) } else { Vec::new() }
    }

    fn loss_noted(&mut self) -> Vec<D> {
        if let Some(loss) = &mut self.loss {
            loss.noted = true;
        }
        let ended = self.ended;
        self.take_doors(|number| number.0 <= ended)
    }

    // Takes the doors that wait for the selected numbers off the list, each once.
    fn take_doors(&mut self, rings: impl Fn(SyncNumber) -> bool) -> Vec<D> {
        let mut doors: Vec<D> = Vec::new();
        self.waiting.retain(|(number, door)| {
            let goes = rings(*number);
            if goes && !doors.contains(door) {
                doors.push(door.clone());
            }
            !goes
        });
        doors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FINE: SyncLook = SyncLook::Over(Ok(()));

    fn failed(errno: Errno) -> SyncLook {
        SyncLook::Over(Err(errno))
    }

    #[test]
    fn a_flush_that_comes_while_a_sync_runs_waits_for_the_next() {
        let mut order = Order::new(Losses::ToldAtOnce);
        let first = order.join();
        assert_eq!(order.look(first, &'a'), SyncLook::Run);
        // Both flushes came too late for the first sync, and share the second.
        let (second, third) = (order.join(), order.join());
        assert!(first < second && second == third);
        assert_eq!(
            (order.look(second, &'a'), order.look(third, &'b')),
            (SyncLook::Wait, SyncLook::Wait)
        );
        let ended = order.end(Ok(()), &'a');
        assert!(ended.rings.is_empty(), "the one that ended it runs the next one itself");
        assert_eq!((order.look(first, &'a'), order.look(second, &'a')), (FINE, SyncLook::Run));
        assert_eq!(order.look(third, &'b'), SyncLook::Wait);
        assert_eq!(order.end(Ok(()), &'a').rings, ['b']);
        assert_eq!((order.look(second, &'a'), order.look(third, &'b')), (FINE, FINE));
    }

    #[test]
    fn a_loss_fails_all_waiting_and_all_later_flushes() {
        let mut order = Order::new(Losses::ToldAtOnce);
        let early = order.join();
        assert_eq!(order.look(early, &'a'), SyncLook::Run);
        order.end(Ok(()), &'a');
        let (first, beside) = (order.join(), order.join());
        assert_eq!(
            (order.look(first, &'a'), order.look(beside, &'b')),
            (SyncLook::Run, SyncLook::Wait)
        );
        let late = order.join();
        assert_eq!(order.look(late, &'b'), SyncLook::Wait);
        assert!(order.end(Err(Errno::ENOSPC), &'a').is_loss);
        assert_eq!(order.look(early, &'c'), FINE, "what was durable stays so");
        assert_eq!(order.look(first, &'a'), failed(Errno::ENOSPC));
        assert_eq!(order.look(beside, &'b'), failed(Errno::ENOSPC));
        assert_eq!(order.look(late, &'b'), SyncLook::Run);
        assert!(!order.end(Ok(()), &'b').is_loss, "it is told once");
        assert_eq!(order.look(late, &'b'), failed(Errno::EIO), "the kernel said that all is well");
    }

    #[test]
    fn a_loss_is_held_until_it_is_noted() {
        let mut order = Order::new(Losses::HeldUntilNoted);
        let first = order.join();
        assert_eq!(
            (order.look(first, &'a'), order.look(first, &'b')),
            (SyncLook::Run, SyncLook::Wait)
        );
        let ended = order.end(Err(Errno::EIO), &'a');
        assert!(ended.is_loss && ended.rings.is_empty());
        assert_eq!(
            (order.look(first, &'a'), order.look(first, &'b')),
            (SyncLook::Wait, SyncLook::Wait)
        );
        // Later syncs run, and their flushes wait as well.
        let later = order.join();
        assert_eq!(order.look(later, &'a'), SyncLook::Run);
        assert!(order.end(Ok(()), &'a').rings.is_empty());
        assert_eq!(order.look(later, &'a'), SyncLook::Wait);
        let mut rung = order.loss_noted();
        rung.sort_unstable();
        assert_eq!(rung, ['a', 'b']);
        for (number, door) in [(first, 'a'), (first, 'b'), (later, 'a')] {
            assert_eq!(order.look(number, &door), failed(Errno::EIO));
        }
    }

    #[test]
    fn a_store_that_leaves_passes_the_next_sync_on() {
        let mut order = Order::new(Losses::ToldAtOnce);
        let first = order.join();
        assert_eq!(order.look(first, &'a'), SyncLook::Run);
        let second = order.join();
        assert_eq!(
            (order.look(second, &'b'), order.look(second, &'c')),
            (SyncLook::Wait, SyncLook::Wait)
        );
        assert!(order.leave(&'b').is_empty(), "one runs");
        assert_eq!(order.end(Ok(()), &'a').rings, ['c']);
        // No store has looked yet.
        assert_eq!(order.look(second, &'d'), SyncLook::Run);
    }

    // One flush: its store, its number, its answer, and the number of earlier flushes.
    struct FlushCase {
        door: usize,
        number: SyncNumber,
        told: Option<Result<(), Errno>>,
        runs: bool,
        came: usize,
    }

    // Several stores that, like the real ones, look only when they are rung, when a flush comes, or
    // when they end a sync.
    struct World {
        order: Order<usize>,
        flushes: Vec<FlushCase>,
        rung: [bool; 3],
        // For each ended sync, whether it failed; and the number of flushes that had come when the
        // running sync started.
        syncs: Vec<bool>,
        began: usize,
    }

    impl World {
        fn look(&mut self, door: usize) {
            for at in 0..self.flushes.len() {
                let flush = &self.flushes[at];
                if flush.door != door || flush.told.is_some() || flush.runs {
                    continue;
                }
                match self.order.look(flush.number, &door) {
                    SyncLook::Run => {
                        assert!(!self.flushes.iter().any(|f| f.runs), "two at a time");
                        self.flushes[at].runs = true;
                        self.began = self.flushes.len();
                    }
                    SyncLook::Wait => {}
                    SyncLook::Over(result) => self.told(at, result),
                }
            }
        }

        fn told(&mut self, at: usize, result: Result<(), Errno>) {
            let flush = &mut self.flushes[at];
            let number = usize::try_from(flush.number.0).unwrap();
            let lost = self.syncs[..number].iter().any(|failed| *failed);
            assert_eq!(result.is_err(), lost, "the flush that came as number {}", flush.came);
            flush.told = Some(result);
        }

        fn end(&mut self, fails: bool) {
            let Some(at) = self.flushes.iter().position(|flush| flush.runs) else { return };
            let (door, came) = (self.flushes[at].door, self.flushes[at].came);
            assert!(came < self.began, "it began before its flush came");
            self.flushes[at].runs = false;
            self.syncs.push(fails);
            let result = if fails { Err(Errno::EIO) } else { Ok(()) };
            for door in self.order.end(result, &door).rings {
                self.rung[door] = true;
            }
            self.look(door);
        }
    }

    proptest! {
        /// For every order of events: one sync runs at a time; no sync answers a flush that came
        /// after the sync began; a failure reaches every later flush; every flush is answered.
        #[test]
        fn every_flush_gets_the_right_result(
            held in any::<bool>(),
            steps in prop::collection::vec((0usize..3, 0u8..8), 1..200),
        ) {
            let losses = if held { Losses::HeldUntilNoted } else { Losses::ToldAtOnce };
            let mut world = World {
                order: Order::new(losses),
                flushes: Vec::new(),
                rung: [false; 3],
                syncs: Vec::new(),
                began: 0,
            };
            let settle = |world: &mut World, door: usize| {
                if std::mem::take(&mut world.rung[door]) {
                    world.look(door);
                }
            };
            for (door, what) in steps {
                match what {
                    0..3 => {
                        let (number, came) = (world.order.join(), world.flushes.len());
                        world.flushes.push(FlushCase { door, number, told: None, runs: false, came });
                        world.look(door);
                    }
                    3 => world.end(true),
                    4 | 5 => world.end(false),
                    6 => for door in world.order.loss_noted() { world.rung[door] = true },
                    _ => settle(&mut world, door),
                }
            }
            for _ in 0..2 * world.flushes.len() + 2 {
                world.end(false);
                for door in world.order.loss_noted() { world.rung[door] = true }
                (0..3).for_each(|door| settle(&mut world, door));
            }
            prop_assert!(world.flushes.iter().all(|flush| flush.told.is_some()));
        }
    }
}
