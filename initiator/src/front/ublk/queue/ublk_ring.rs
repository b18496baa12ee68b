//! [`UblkRing`]: the io_uring of a queue: its setup, its entries, and the system call of a turn.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use io_uring::{IoUring, cqueue, squeue, types};
use rblk_operate::doctor::KernelVersion;

use super::{MAX_WATCHES, TurnSleep};
use crate::front::ublk::error::{Result, UblkError};

/// The first release that wakes a thread for an event behind the minimal time of a wait
/// (`min_wait_usec`; liburing issues 1477 and 1504). Earlier kernels have the feature, and may
/// sleep on for the whole time-out.
const MIN_WAIT_WAKES: KernelVersion = KernelVersion(6, 19);

/// The context in which the kernel runs this ring's completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RingMode {
    /// In this thread's turns only (DEFER_TASKRUN): the normal way, from 6.1 on.
    Deferred,
    /// In any of this thread's system calls (COOP_TASKRUN): if the other mode is refused.
    Cooperative,
}

/// The ring, with counters of its work.
pub(super) struct UblkRing {
    uring: IoUring,
    mode: RingMode,
    // A sleep may wait for several events.
    can_gather: bool,
    counts: RingCounts,
}

/// Counts of a ring. The fields are those of [`super::UblkQueueStats`].
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct RingCounts {
    pub(super) enters: u64,
    pub(super) sleeps: u64,
    pub(super) retries: u64,
    pub(super) commands: u64,
}

impl UblkRing {
    /// A ring for a queue of `depth` tags, with `file` as file 0 of its table.
    ///
    /// Completions run only in this thread's turns where the kernel can do that. The kernel sets a
    /// flag in shared memory when there are some: without that flag, a turn that does not wait
    /// would never see one.
    pub(super) fn new(depth: u16, file: RawFd) -> Result<Self> {
        let (uring, mode) = build(depth)?;
        uring
            .submitter()
            .register_files(&[file])
            .map_err(|e| UblkError::system("registering the ublk char node with io_uring", e))?;
        let wakes = KernelVersion::running().is_some_and(|kernel| kernel >= MIN_WAIT_WAKES);
        let can_gather = wakes && uring.params().is_feature_min_timeout();
        Ok(Self { uring, mode, can_gather, counts: RingCounts::default() })
    }

    pub(super) fn mode(&self) -> RingMode {
        self.mode
    }

    pub(super) fn counts(&self) -> RingCounts {
        self.counts
    }

    /// Queues an entry for the next [`Self::enter`].
    ///
    /// # Safety
    /// The files and memory that the entry names outlive the ring.
    #[inline]
    pub(super) unsafe fn push(&mut self, entry: &squeue::Entry) {
        self.counts.commands += 1;
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.uring.submission().push(entry) };
        // There is room by construction. Between two submissions a tag queues one command (only its
        // holder queues, and queuing makes the kernel the holder); a watch queues one poll and one
        // removal (arming needs it free or just ended, removing makes it wait for the end); and the
        // queue has room for all. An enter that takes less than all has queued nothing new.
        debug_assert!(pushed.is_ok(), "submission queue full");
    }

    /// Whether the kernel has every pushed entry.
    pub(super) fn is_submitted(&mut self) -> bool {
        self.uring.submission().is_empty()
    }

    /// Whether [`Self::enter`] without a wait would enter the kernel: entries are queued, or the
    /// kernel reports completions to hand over, perhaps a stale report. Reads shared memory only.
    #[inline]
    pub(super) fn needs_enter(&mut self) -> bool {
        let queue = self.uring.submission();
        !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    /// Whether a completion has arrived. Reads shared memory only.
    #[inline]
    pub(super) fn has_completion(&mut self) -> bool {
        !self.uring.completion().is_empty()
    }

    /// The next completion that has arrived.
    #[inline]
    pub(super) fn next_completion(&mut self) -> Option<cqueue::Entry> {
        self.uring.completion().next()
    }

    /// Whether [`Self::enter`] with this wait may sleep now: not if a completion has arrived
    /// already. Pending work of the kernel (TASKRUN) is no reason to stay awake. The kernel does
    /// that work before it sleeps, and the flag may be stale until the next event: the kernel sets
    /// it after the work that it announces.
    #[inline]
    pub(super) fn may_sleep(&mut self, wait: TurnSleep) -> bool {
        let longest = match wait {
            TurnSleep::No => Duration::ZERO,
            TurnSleep::For(longest) | TurnSleep::Gather { longest, .. } => longest,
        };
        !longest.is_zero() && !self.has_completion()
    }

    /// The system call of a turn, if one is needed. It sleeps only if [`Self::may_sleep`] allows
    /// it.
    #[inline]
    pub(super) fn enter(&mut self, wait: TurnSleep) -> io::Result<()> {
        let entered = match wait {
            TurnSleep::For(longest) if self.may_sleep(wait) => {
                self.sleep(1, Duration::ZERO, longest)
            }
            TurnSleep::Gather { events, within, longest } if self.may_sleep(wait) => {
                let events = if self.can_gather { events.max(1) } else { 1 };
                self.sleep(events, within, longest)
            }
            _ if self.needs_enter() => self.uring.submitter().submit(),
            _ => return Ok(()),
        };
        self.counts.enters += 1;
        match entered {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // The end of the time and a signal are ordinary ends of a sleep.
                Some(libc::ETIME | libc::EINTR) => Ok(()),
                // No memory for a request, or completions to reap first. Entries that were not
                // taken stay queued.
                Some(libc::EAGAIN | libc::EBUSY) => {
                    self.counts.retries += 1;
                    Ok(())
                }
                _ => Err(error),
            },
        }
    }

    fn sleep(&mut self, events: usize, within: Duration, longest: Duration) -> io::Result<usize> {
        let timespec = types::Timespec::from(longest);
        let mut args = types::SubmitArgs::new().timespec(&timespec);
        if events > 1 {
            args = args.min_wait_usec(u32::try_from(within.as_micros()).unwrap_or(u32::MAX));
        }
        self.counts.sleeps += 1;
        self.uring.submitter().submit_with_args(events, &args)
    }
}

fn build(depth: u16) -> Result<(IoUring, RingMode)> {
    let watches = 2 * u32::from(MAX_WATCHES);
    let entries = u32::from(depth) + watches;
    // Every command completes once, a watch any number of times: room for several rounds of
    // watches, and the kernel keeps the surplus (NODROP).
    let completions = (2 * entries).next_power_of_two().max(256);
    let refused = |source: io::Error| match source.raw_os_error() {
        Some(libc::EPERM | libc::ENOSYS) => UblkError::NoIoUring { source },
        _ => UblkError::system("making an io_uring for a ublk queue", source),
    };
    let deferred = IoUring::builder()
        .setup_cqsize(completions)
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries);
    let (uring, mode) = match deferred {
        Ok(uring) => (uring, RingMode::Deferred),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let uring = IoUring::builder()
                .setup_cqsize(completions)
                .setup_submit_all()
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .build(entries)
                .map_err(refused)?;
            (uring, RingMode::Cooperative)
        }
        Err(e) => return Err(refused(e)),
    };
    if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
        let source = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        return Err(UblkError::system("io_uring without EXT_ARG and NODROP", source));
    }
    Ok((uring, mode))
}
