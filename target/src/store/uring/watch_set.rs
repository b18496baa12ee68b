//! Watched descriptors: they end the sleep of a turn when they become readable.
//!
//! Invariant: a watch has at most one poll in the kernel. Its generation distinguishes completions
//! of an earlier watch under the same token.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use io_uring::types::Fd;
use io_uring::{cqueue, opcode};
use nix::errno::Errno;
use rblk_protocol::width::narrow;

use super::ring::{Ring, USER_NOTHING, USER_WATCH};

/// Descriptors a store can watch; tokens are below this.
pub const MAX_WATCHES: u8 = 63;

/// Watches the store's own door, by which other stores of a backing wake it.
pub(super) const DOOR: FdToken = FdToken(MAX_WATCHES);

// The owner's watches and the door.
const WATCHES: u8 = MAX_WATCHES + 1;

#[allow(clippy::cast_sign_loss)] // a flag of 16 bits
const READABLE: u32 = libc::POLLIN as u32;

/// Names a watched descriptor; below [`MAX_WATCHES`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FdToken(pub u8);

/// A set of watched descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WatchSet(u64);

impl WatchSet {
    /// Whether the token is in the set.
    #[must_use]
    pub(crate) fn contains(&self, token: FdToken) -> bool {
        token.0 < MAX_WATCHES && self.0 >> token.0 & 1 == 1
    }

    /// Whether the set is empty.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// Empties the set.
    pub(crate) fn clear(&mut self) {
        self.0 = 0;
    }

    fn insert(&mut self, token: u8) {
        self.0 |= 1 << token;
    }

    // Whether the store's own door was in the set. Removes it.
    pub(super) fn take_door(&mut self) -> bool {
        let bit = 1 << DOOR.0;
        let was = self.0 & bit != 0;
        self.0 &= !bit;
        was
    }
}

#[derive(Debug, Default)]
struct FdWatch {
    // Our own duplicate: a later arm must find this file even if the owner closed its descriptor.
    fd: Option<OwnedFd>,
    armed: bool,
    // Armed only while a turn sleeps.
    asleep: bool,
    // Distinguishes late completions of an earlier watch under the same token.
    generation: u32,
}

/// The watched descriptors of a store.
#[derive(Debug)]
pub(super) struct Watches {
    table: Box<[FdWatch]>,
    // Some watches must be armed again, when the queue has room.
    unarmed: bool,
    // Tokens of watches that are armed for each sleep.
    asleep: u64,
    errors: u64,
}

impl Watches {
    pub(super) fn new() -> Self {
        let table = (0..WATCHES).map(|_| FdWatch::default()).collect();
        Self { table, unarmed: false, asleep: 0, errors: 0 }
    }

    /// Watches that ended with an error.
    pub(super) fn errors(&self) -> u64 {
        self.errors
    }

    /// Watches a descriptor, which is duplicated. Does not arm it yet.
    pub(super) fn add(&mut self, fd: RawFd, token: FdToken) -> io::Result<()> {
        let watch = self.table.get_mut(usize::from(token.0)).ok_or(io::ErrorKind::InvalidInput)?;
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

    /// Like [`Self::add`], for a descriptor that is armed for each sleep.
    pub(super) fn add_asleep(&mut self, fd: RawFd, token: FdToken) -> io::Result<()> {
        self.add(fd, token)?;
        self.table[usize::from(token.0)].asleep = true;
        self.asleep |= 1 << token.0;
        Ok(())
    }

    /// Ends a watch, if it exists.
    pub(super) fn remove(&mut self, ring: &mut Ring, token: FdToken) {
        let Some(watch) = self.table.get_mut(usize::from(token.0)) else { return };
        self.asleep &= !(1 << token.0);
        if watch.fd.take().is_some() && watch.armed {
            watch.armed = false;
            let armed = watch_user_data(token.0, watch.generation);
            let remove = opcode::PollRemove::new(armed).build().user_data(USER_NOTHING << 56);
            // SAFETY: the entry names no memory.
            unsafe { ring.push(&remove) };
        }
    }

    /// Handles a completion of a watch: reports it as woken, and arms it again if the poll ended.
    pub(super) fn woke(&mut self, ring: &mut Ring, entry: &cqueue::Entry, woken: &mut WatchSet) {
        let user_data = entry.user_data();
        let [token, ..] = user_data.to_le_bytes();
        let Some(watch) = self.table.get_mut(usize::from(token)) else {
            return debug_assert!(false, "a completion of watch {token}, which there is not");
        };
        // A late completion of an earlier watch.
        if watch.fd.is_none() || watch_user_data(token, watch.generation) != user_data {
            return;
        }
        woken.insert(token);
        if entry.result() < 0 {
            // Another arm would fail again; the owner is woken and learns of the error by reading.
            self.errors += 1;
            watch.armed = false;
            self.asleep &= !(1 << token);
        } else if !cqueue::more(entry.flags()) {
            watch.armed = false;
            if !watch.asleep {
                self.arm(ring, token);
            }
        }
    }

    /// Arms the watches for a sleep. Returns whether all are armed, so that the sleep misses none.
    pub(super) fn arm_for_sleep(&mut self, ring: &mut Ring) -> bool {
        let mut tokens = self.asleep;
        while tokens != 0 {
            let token: u8 = narrow(tokens.trailing_zeros());
            tokens &= tokens - 1;
            self.arm(ring, token);
            if !self.table[usize::from(token)].armed {
                return false;
            }
        }
        true
    }

    /// Arms watches that found no room in the queue.
    pub(super) fn arm_the_rest(&mut self, ring: &mut Ring) {
        if self.unarmed {
            self.unarmed = false;
            (0..WATCHES).for_each(|token| self.arm(ring, token));
        }
    }

    /// Arms a watch, if it is not armed.
    pub(super) fn arm(&mut self, ring: &mut Ring, token: u8) {
        let watch = &mut self.table[usize::from(token)];
        let Some(fd) = watch.fd.as_ref().filter(|_| !watch.armed) else { return };
        let poll = opcode::PollAdd::new(Fd(fd.as_raw_fd()), READABLE)
            .multi(!watch.asleep)
            .build()
            .user_data(watch_user_data(token, watch.generation));
        // SAFETY: the entry names no memory.
        watch.armed = unsafe { ring.push(&poll) };
        self.unarmed |= !watch.armed;
    }
}

/// Whether this is a token of the owner.
pub(super) fn checked(token: FdToken) -> io::Result<()> {
    if token.0 < MAX_WATCHES { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn watch_user_data(token: u8, generation: u32) -> u64 {
    USER_WATCH << 56 | u64::from(generation) << 8 | u64::from(token)
}
