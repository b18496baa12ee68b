//! Watched descriptors: they end the sleep of a turn when they become readable.
//!
//! Invariant: a watch has at most one poll in the kernel, and completions of an earlier one under
//! the same token are told apart by its generation.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use io_uring::types::Fd;
use io_uring::{cqueue, opcode};
use nix::errno::Errno;

use super::{USER_NOBODY, USER_WATCH, UringStore};

/// Descriptors a store can watch; tokens are below this.
pub const MAX_WATCHES: u8 = 63;

/// Watches the store's own door, by which other stores of a backing wake it.
pub(super) const DOOR: WatchToken = WatchToken(MAX_WATCHES);

// All of them.
pub(super) const WATCHES: u8 = MAX_WATCHES + 1;

/// Names a watched descriptor; below [`MAX_WATCHES`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WatchToken(pub u8);

/// A set of watched descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WatchSet(u64);

impl WatchSet {
    /// Whether it is in the set.
    #[must_use]
    pub fn contains(&self, token: WatchToken) -> bool {
        token.0 < MAX_WATCHES && self.0 >> token.0 & 1 == 1
    }

    /// Whether nothing is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.0 = 0;
    }

    fn insert(&mut self, token: u8) {
        self.0 |= 1 << token;
    }

    // Whether the store's own door was in it; now it is not.
    pub(super) fn take_door(&mut self) -> bool {
        let bit = 1 << DOOR.0;
        let was = self.0 & bit != 0;
        self.0 &= !bit;
        was
    }
}

#[derive(Debug, Default)]
pub(super) struct Watch {
    // Our own duplicate: arming again must find the same file whatever the owner did with the
    // number.
    fd: Option<OwnedFd>,
    armed: bool,
    // Only while a turn sleeps.
    asleep: bool,
    // Tells late completions of an earlier watch under the same token.
    generation: u32,
}

impl UringStore {
    /// Wakes [`Self::turn`] when `fd` becomes readable, until [`Self::unwatch`]. Level at first
    /// (something already there wakes at once), edges from then on: whoever is woken must read
    /// until nothing is left before the next sleep. The descriptor is duplicated.
    ///
    /// # Errors
    /// The token is too large or in use, or the descriptor cannot be duplicated.
    pub fn watch(&mut self, fd: RawFd, token: WatchToken) -> io::Result<()> {
        checked(token)?;
        self.add_watch(fd, token)?;
        self.arm(token.0);
        Ok(())
    }

    /// As [`Self::watch`], for a descriptor that matters to a sleeper only: every sleep of
    /// [`Self::turn`] ends when it is readable or becomes so, and what happens to it otherwise
    /// costs nothing and is not told, but for one that woke a sleep which was over already.
    ///
    /// # Errors
    /// As [`Self::watch`].
    pub fn watch_asleep(&mut self, fd: RawFd, token: WatchToken) -> io::Result<()> {
        checked(token)?;
        self.add_watch(fd, token)?;
        self.watches[usize::from(token.0)].asleep = true;
        self.asleep |= 1 << token.0;
        Ok(())
    }

    pub(super) fn add_watch(&mut self, fd: RawFd, token: WatchToken) -> io::Result<()> {
        let watch =
            self.watches.get_mut(usize::from(token.0)).ok_or(io::ErrorKind::InvalidInput)?;
        if watch.fd.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // SAFETY: duplicating a number that is not an open descriptor fails with EBADF.
        let copy = Errno::result(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) })?;
        // SAFETY: the call has just made this descriptor and nothing else knows it.
        watch.fd = Some(unsafe { OwnedFd::from_raw_fd(copy) });
        watch.armed = false;
        watch.asleep = false;
        watch.generation = watch.generation.wrapping_add(1);
        Ok(())
    }

    /// Ends a watch; does nothing when there is none. A turn may still report it once.
    pub fn unwatch(&mut self, token: WatchToken) {
        let Some(watch) = self.watches.get_mut(usize::from(token.0)) else { return };
        self.asleep &= !(1 << token.0);
        if watch.fd.take().is_some() && watch.armed {
            watch.armed = false;
            let armed = watch_user_data(token.0, watch.generation);
            let remove = opcode::PollRemove::new(armed).build().user_data(USER_NOBODY << 56);
            // SAFETY: the entry names no memory.
            unsafe { self.push(&remove) };
        }
    }

    /// What the kernel said about a watch: woken, and armed again where that ended the poll.
    pub(super) fn woke(&mut self, entry: &cqueue::Entry, woken: &mut WatchSet) {
        let user_data = entry.user_data();
        let [token, ..] = user_data.to_le_bytes();
        let Some(watch) = self.watches.get_mut(usize::from(token)) else { return };
        if watch.fd.is_none() || watch_user_data(token, watch.generation) != user_data {
            return;
        }
        woken.insert(token);
        if entry.result() < 0 {
            // Arming again would fail again; the owner is told and will find out by reading.
            self.counters.watch_errors += 1;
            watch.armed = false;
            self.asleep &= !(1 << token);
        } else if !cqueue::more(entry.flags()) {
            watch.armed = false;
            if !watch.asleep {
                self.arm(token);
            }
        }
    }

    /// Arms what is watched asleep; whether all is, so that a sleep misses nothing.
    pub(super) fn arm_for_sleep(&mut self) -> bool {
        let mut tokens = self.asleep;
        while tokens != 0 {
            let token = u8::try_from(tokens.trailing_zeros()).unwrap_or(MAX_WATCHES);
            tokens &= tokens - 1;
            self.arm(token);
            if !self.watches[usize::from(token)].armed {
                return false;
            }
        }
        true
    }

    /// Arms those that found no room in the queue.
    pub(super) fn arm_the_rest(&mut self) {
        if self.unarmed {
            self.unarmed = false;
            (0..WATCHES).for_each(|token| self.arm(token));
        }
    }

    pub(super) fn arm(&mut self, token: u8) {
        let watch = &mut self.watches[usize::from(token)];
        let Some(fd) = watch.fd.as_ref().filter(|_| !watch.armed) else { return };
        let events = u32::try_from(libc::POLLIN).unwrap_or(1);
        let poll = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events)
            .multi(!watch.asleep)
            .build()
            .user_data(watch_user_data(token, watch.generation));
        watch.armed = true;
        // SAFETY: the entry names no memory.
        if !unsafe { self.push(&poll) } {
            self.watches[usize::from(token)].armed = false;
            self.unarmed = true;
        }
    }
}

// Whether it is a token of the owner.
fn checked(token: WatchToken) -> io::Result<()> {
    if token.0 < MAX_WATCHES { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn watch_user_data(token: u8, generation: u32) -> u64 {
    USER_WATCH << 56 | u64::from(generation) << 8 | u64::from(token)
}
