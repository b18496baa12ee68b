//! [`NotifyFd`] and [`Kick`]: eventfds that a front end shares.
//!
//! No thread waits in an eventfd. Each holder of the open file can clear `O_NONBLOCK` and fill the
//! counter at any time, so neither is relied on. `pwritev2` with `RWF_NOWAIT` is no help: eventfds
//! refuse it (`EOPNOTSUPP`, Linux 6.18). But an addition by the kernel itself never waits. An
//! io_uring adds 1 to its registered eventfd for each completion, also for that of a no-op request.
//! That is one system call, as a write would be.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The queue of an io_uring with one request at a time.
const ENTRIES: u32 = 2;
/// The kernel's name for the file of an eventfd.
const EVENTFD: &str = "anon_inode:[eventfd]";

/// An eventfd that notifies the other side.
#[derive(Debug)]
pub(super) struct NotifyFd(By);

#[derive(Debug)]
enum By {
    Kernel(Box<KernelEvent>),
    /// Without io_uring: the sandboxes of some containers refuse it. A front end that fills the
    /// counter between a check and a write stops the thread of its ring.
    Write(File),
}

struct KernelEvent {
    ring: IoUring,
    // The kernel keeps the front end's eventfd as long as a file of it is open.
    _file: File,
}

impl std::fmt::Debug for KernelEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelEvent").finish_non_exhaustive()
    }
}

impl NotifyFd {
    /// Takes an eventfd over.
    ///
    /// # Errors
    /// The file is no eventfd, or the system's error.
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

    /// Adds 1. Returns whether that was done: otherwise try again.
    pub(super) fn tell(&mut self) -> bool {
        match &mut self.0 {
            By::Kernel(event) => event.tell(),
            By::Write(file) => {
                let mut polled = [PollFd::new(file.as_fd(), PollFlags::POLLOUT)];
                if poll(&mut polled, PollTimeout::ZERO) == Ok(1) {
                    let _ = file.write(&1u64.to_ne_bytes());
                }
                // A full counter has notified the other side already.
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
        // A request left in the ring by an earlier try is submitted now.
        self.ring.submit().is_ok_and(|submitted| submitted > 0)
    }
}

/// An eventfd on which the other side notifies this one. Poll it edge-triggered: every write is an
/// edge, even if another process reads the eventfd.
#[derive(Debug)]
pub(super) struct Kick(File);

impl Kick {
    /// Takes an eventfd over.
    ///
    /// # Errors
    /// The file is no eventfd.
    pub(super) fn new(file: File) -> io::Result<Self> {
        must_be_eventfd(&file)?;
        Ok(Self(file))
    }

    /// Resets the counter if that takes no wait: a kick does not depend on the counter.
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

/// Refuses other files. The readers, writers or closers of a pipe or of a file of FUSE may block:
/// only files checked here are for [`NotifyFd`] and [`Kick`].
///
/// # Errors
/// The file is no eventfd.
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

    /// Both kinds of events, with eventfds without `O_NONBLOCK`.
    fn events() -> Vec<(NotifyFd, EventFd)> {
        let event = || EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap();
        let copy = |event: &EventFd| File::from(event.as_fd().try_clone_to_owned().unwrap());
        let (one, two) = (event(), event());
        let by_kernel = NotifyFd::new(copy(&one)).unwrap();
        assert!(matches!(by_kernel.0, By::Kernel(_)), "this host has no io_uring");
        vec![(by_kernel, one), (NotifyFd(By::Write(copy(&two))), two)]
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
    fn a_full_counter_blocks_no_thread() {
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
    fn an_empty_kick_blocks_no_thread() {
        let eventfd = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap();
        let kick = Kick::new(File::from(eventfd.as_fd().try_clone_to_owned().unwrap())).unwrap();
        kick.clear();
        eventfd.write(3).unwrap();
        kick.clear();
        let readable = poll(&mut [PollFd::new(kick.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO);
        assert_eq!(readable, Ok(0));
    }

    #[test]
    fn files_other_than_eventfds_are_refused() {
        let (read, write) = nix::unistd::pipe().unwrap();
        let zero = File::open("/dev/zero").unwrap();
        for file in [OwnedFd::from(zero), read, write].map(File::from) {
            let error = Kick::new(file.try_clone().unwrap()).unwrap_err();
            assert!(error.to_string().contains("is no eventfd, but "), "{error}");
            assert!(NotifyFd::new(file).is_err());
        }
    }
}
