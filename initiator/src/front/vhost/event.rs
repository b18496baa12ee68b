//! [`Event`] and [`Kick`]: eventfds that a front end shares.
//!
//! No thread waits in one. Whoever shares the open file can take `O_NONBLOCK` away and fill the
//! counter at any time, so neither is relied on. `pwritev2` with `RWF_NOWAIT` is no help: eventfds
//! refuse it (`EOPNOTSUPP`, Linux 6.18). But what the kernel itself adds to an eventfd never waits.
//! An io_uring adds 1 to the eventfd that is registered with it for each completion, also for that
//! of a request that does nothing. That is one system call, as a write would be.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Requests of an io_uring that does one thing at a time.
const ENTRIES: u32 = 2;
/// What the kernel calls the file of an eventfd.
const EVENTFD: &str = "anon_inode:[eventfd]";

/// An eventfd by which the other side is told.
#[derive(Debug)]
pub(super) struct Event(By);

#[derive(Debug)]
enum By {
    Kernel(Box<KernelEvent>),
    /// Where there is no io_uring: the sandboxes of some containers refuse it. A front end that
    /// fills the counter between a look and a write holds the thread of its ring up.
    Write(File),
}

struct KernelEvent {
    ring: IoUring,
    // The eventfd is the front end's as long as somebody has it open.
    _file: File,
}

impl std::fmt::Debug for KernelEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelEvent").finish_non_exhaustive()
    }
}

impl Event {
    /// Takes an eventfd over.
    ///
    /// # Errors
    /// It is none, or the system's.
    pub(super) fn new(file: File) -> io::Result<Self> {
        must_be_eventfd(&file)?;
        let ring = match IoUring::new(ENTRIES) {
            Ok(ring) => ring,
            Err(error) if is_refused(&error) => return Ok(Self(By::Write(file))),
            Err(error) => return Err(error),
        };
        ring.submitter().register_eventfd(file.as_raw_fd())?;
        Ok(Self(By::Kernel(Box::new(KernelEvent { ring, _file: file }))))
    }

    /// Adds 1. Returns whether that was done: otherwise it is to be tried again.
    pub(super) fn tell(&mut self) -> bool {
        match &mut self.0 {
            By::Kernel(event) => event.tell(),
            By::Write(file) => {
                let mut polled = [PollFd::new(file.as_fd(), PollFlags::POLLOUT)];
                if poll(&mut polled, PollTimeout::ZERO) == Ok(1) {
                    let _ = file.write(&1u64.to_ne_bytes());
                }
                // One that is full was told before.
                true
            }
        }
    }
}

impl KernelEvent {
    fn tell(&mut self) -> bool {
        self.ring.completion().for_each(drop);
        let nothing = opcode::Nop::new().build();
        // SAFETY: the request has no memory.
        let _ = unsafe { self.ring.submission().push(&nothing) };
        // One that is in the ring from an earlier try is submitted now.
        self.ring.submit().is_ok_and(|submitted| submitted > 0)
    }
}

/// An eventfd by which the other side tells. Wake by its edges: they come with every write, also if
/// somebody else reads it.
#[derive(Debug)]
pub(super) struct Kick(File);

impl Kick {
    /// Takes an eventfd over.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn new(file: File) -> io::Result<Self> {
        must_be_eventfd(&file)?;
        Ok(Self(file))
    }

    /// Resets it, as far as that takes no wait: the counter is nothing that a kick depends on.
    pub(super) fn clear(&self) {
        let mut count = [0; 8];
        let into = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: count.len() };
        // SAFETY: the kernel writes at most the 8 bytes of `count`, which outlives the call. Linux
        // before 5.19 refuses the flag.
        let _ = unsafe { libc::preadv2(self.0.as_raw_fd(), &into, 1, -1, libc::RWF_NOWAIT) };
    }
}

impl AsFd for Kick {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn is_refused(error: &io::Error) -> bool {
    let refusals = [Errno::EPERM, Errno::ENOSYS, Errno::EACCES];
    error.raw_os_error().is_some_and(|error| refusals.contains(&Errno::from_raw(error)))
}

/// Anything else, such as a pipe or a file of FUSE, can have a reader or writer wait, or who closes
/// it: only what this has found good is for [`Event`] and [`Kick`].
///
/// # Errors
/// It is something else.
pub(super) fn must_be_eventfd(file: &File) -> io::Result<()> {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if kind.as_os_str() == EVENTFD {
        return Ok(());
    }
    Err(io::Error::other(format!("an event that is no eventfd, but {}", kind.display())))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    use nix::sys::eventfd::{EfdFlags, EventFd};

    use super::*;

    /// Both ways to tell, by eventfds without `O_NONBLOCK`.
    fn events() -> Vec<(Event, EventFd)> {
        let event = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap();
        let copy = |event: &EventFd| File::from(event.as_fd().try_clone_to_owned().unwrap());
        let (one, two) = (event(), event());
        let by_kernel = Event::new(copy(&one)).unwrap();
        assert!(matches!(by_kernel.0, By::Kernel(_)), "this host has no io_uring");
        vec![(by_kernel, one), (Event(By::Write(copy(&two))), two)]
    }

    #[test]
    fn each_telling_adds_1() {
        for (mut event, eventfd) in events() {
            for _ in 0..300 {
                assert!(event.tell());
            }
            assert_eq!(eventfd.read(), Ok(300));
            assert!(event.tell());
            assert_eq!(eventfd.read(), Ok(1));
        }
    }

    #[test]
    fn a_full_counter_keeps_nobody() {
        for (mut event, eventfd) in events() {
            eventfd.write(u64::MAX - 1).unwrap();
            let begun = Instant::now();
            for _ in 0..1000 {
                event.tell();
            }
            assert!(begun.elapsed() < Duration::from_secs(5));
        }
    }

    #[test]
    fn an_empty_kick_keeps_nobody() {
        let eventfd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap();
        let kick = Kick::new(File::from(eventfd.as_fd().try_clone_to_owned().unwrap())).unwrap();
        kick.clear();
        eventfd.write(3).unwrap();
        kick.clear();
        let readable = poll(&mut [PollFd::new(kick.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO);
        assert_eq!(readable, Ok(0));
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let (read, write) = nix::unistd::pipe().unwrap();
        let zero = File::open("/dev/zero").unwrap();
        for file in [OwnedFd::from(zero), read, write].map(File::from) {
            let error = Kick::new(file.try_clone().unwrap()).unwrap_err();
            assert!(error.to_string().contains("is no eventfd, but "), "{error}");
            assert!(Event::new(file).is_err());
        }
    }
}
