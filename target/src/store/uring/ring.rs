//! [`Ring`]: one io_uring, which queues entries, enters the kernel at most once per turn, and takes
//! completions.
//!
//! Invariants:
//!
//! - With `DEFER_TASKRUN` no entry completes unless this thread enters the kernel, and
//!   `TASKRUN_FLAG` shows that it must. One without the other would poll forever.
//! - The ring is made disabled and is enabled by the first [`Ring::enter`]: the thread of that call
//!   becomes its only issuer, whichever thread made the ring.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, squeue};
use nix::errno::Errno;
use rblk_protocol::width::narrow;

// The kernel's time is signed. No sleep is this long.
const LONGEST_SLEEP: Duration = Duration::from_secs(1 << 30);

// The top byte of an entry's user data is its kind.

/// An op of the store. The other bytes name its place.
pub(super) const USER_OP: u64 = 0;
/// A watched descriptor.
pub(super) const USER_WATCH: u64 = 1;
/// No code waits for its completion.
pub(super) const USER_NOTHING: u64 = 2;

/// An io_uring.
pub(super) struct Ring {
    ring: IoUring,
    enabled: bool,
    has_no_iowait: bool,
    enters: u64,
    sleeps: u64,
}

impl Ring {
    pub(super) fn new(ring: IoUring) -> Self {
        let has_no_iowait = ring.params().is_feature_no_iowait();
        Self { ring, enabled: false, has_no_iowait, enters: 0, sleeps: 0 }
    }

    /// The ring, to register memory and to read its parameters.
    pub(super) fn get(&self) -> &IoUring {
        &self.ring
    }

    /// Calls of `io_uring_enter`, and the number of calls that were allowed to sleep.
    pub(super) fn enters(&self) -> (u64, u64) {
        (self.enters, self.sleeps)
    }

    /// Puts a file into the table by which entries name files, or clears the place with -1.
    pub(super) fn set_file(&self, index: u16, fd: RawFd) -> io::Result<()> {
        self.ring.submitter().register_files_update(index.into(), &[fd]).map(drop)
    }

    /// Removes all files from the table at once. The kernel dismantles a ring in the background;
    /// without this call the files would stay open until then, and a claimed device claimed.
    pub(super) fn forget_files(&self) {
        // After an error the files stay until the end of the ring.
        let _ = self.ring.submitter().unregister_files();
    }

    /// Hands queued entries to the kernel, and sleeps at most `wait`. `ready`: work is already
    /// there, so no sleep. `busy`: operations are in the kernel.
    ///
    /// # Errors
    /// The ring is unusable, for example from a thread other than that of the first call
    /// (`EEXIST`).
    pub(super) fn enter(
        &mut self,
        wait: Option<Duration>,
        ready: bool,
        busy: bool,
    ) -> io::Result<()> {
        if !self.enabled {
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        let (submitter, queue, completions) = self.ring.split();
        let queued = narrow(queue.len());
        let due = queue.taskrun() || queue.cq_overflow();
        let ready = ready || !completions.is_empty();
        drop((queue, completions));
        let sleep = wait.filter(|time| !ready && !time.is_zero());
        if queued == 0 && !due && sleep.is_none() {
            return Ok(());
        }
        self.enters += 1;
        let mut flags = EnterFlags::GETEVENTS;
        let result = if let Some(time) = sleep {
            self.sleeps += 1;
            flags |= EnterFlags::EXT_ARG;
            if self.has_no_iowait && !busy {
                // A wait for a peer is not a wait for a disk.
                flags |= EnterFlags::NO_IOWAIT;
            }
            let time = Timespec::from(time.min(LONGEST_SLEEP));
            let args = SubmitArgs::new().timespec(&time);
            // SAFETY: the queued entries obey `push`; `args` is the extended argument EXT_ARG
            // announces and outlives the call, as does the time it points to.
            unsafe { submitter.enter(queued, 1, flags.bits(), Some(&args)) }
        } else {
            // SAFETY: the queued entries obey `push`; without EXT_ARG a null argument means no
            // signal mask.
            unsafe { submitter.enter::<libc::sigset_t>(queued, 0, flags.bits(), None) }
        };
        match result.map_err(|error| error.raw_os_error()) {
            // The time is over, a signal arrived, or the kernel first wants completions collected
            // or memory freed: entries that it did not take are still queued.
            Ok(_)
            | Err(Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN | libc::ENOMEM)) => {
                Ok(())
            }
            Err(code) => Err(code.map_or(Errno::EIO, Errno::from_raw).into()),
        }
    }

    /// The next completion.
    #[inline]
    pub(super) fn next_completion(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    /// Queues an entry. False when the queue stays full even after a submit.
    ///
    /// # Safety
    /// The memory that the entry names must stay valid until the entry's completion.
    pub(super) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: passed on from the caller.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return true;
        }
        // Only watches that are set and removed many times within one turn come here.
        self.enters += 1;
        // SAFETY: passed on from the caller.
        self.ring.submit().is_ok() && unsafe { self.ring.submission().push(entry) }.is_ok()
    }
}
