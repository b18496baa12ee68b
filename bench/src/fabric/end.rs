//! [`End`]: one end of a measurement: a poller with one QP, its memory, and a way to wait.
//!
//! Invariants: the memory is `[received | sent]`, each of [`Job::window`] bytes, with one small
//! message each behind them. Outstanding WRs never exceed [`SEND_WRS`] and the posted RECVs. Every
//! wait ends at the deadline.

use std::fmt;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rblk_fabric::{
    Access, Completion, DeviceCaps, FabricError, MemoryRegion, PageKind, Poller, PostError,
    ProtectionDomain, QpIndex, QpLimits, RecvWr, Region, RegionError, RemoteBuffer, SendOp, SendWr,
    SgeList, WcStatus, WrId,
};

use super::job::{DEPTH_MAX, Job, SMALL};
use crate::interrupt;
use crate::result::Wait;

/// Send work requests outstanding.
pub(super) const SEND_WRS: u32 = DEPTH_MAX as u32;
/// READs outstanding, where the device can.
const READS_MAX: u8 = 16;
/// Payload within a work request, where the device can.
const INLINE_MAX: u32 = 220;
/// Completions taken at once.
const BATCH: usize = 64;
/// How long one sleep is: between two, the deadline and interrupts are looked at.
const NAP: Duration = Duration::from_millis(100);

/// Why a measurement ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// The peer left, or the connection died.
    #[error("the connection ended: {0:?}")]
    Ended(WcStatus),
    /// The deadline passed.
    #[error("nothing came within the deadline")]
    Late,
    /// This process was asked to end.
    #[error("interrupted")]
    Interrupted,
    /// The peer answered, but not as a server of this program.
    #[error("what answers there is no `rblk-bench fabric --serve`")]
    NotOurs,
    /// A call of the provider failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The send queue does not take what it has room for.
    #[error(transparent)]
    Post(#[from] PostError),
    /// There is no memory.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// The system does not wait.
    #[error("poll: {0}")]
    Wait(#[from] Errno),
}

/// One end.
pub(super) struct End {
    poller: Box<dyn Poller>,
    qp: QpIndex,
    memory: MemoryRegion,
    job: Job,
    inline_bytes: u32,
    out: Box<[Completion; BATCH]>,
    sends: u32,
    looks: u32,
    /// READs that may be outstanding.
    pub(super) reads_out: u8,
    /// No wait goes on after this.
    pub(super) deadline: Instant,
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("End").field("job", &self.job).finish_non_exhaustive()
    }
}

/// Registers the memory of an end.
pub(super) fn memory(pd: &ProtectionDomain, job: &Job) -> Result<MemoryRegion, Broken> {
    let bytes = 2 * (job.window() as usize + SMALL as usize);
    let region = Region::allocate(bytes, PageKind::Normal)?;
    // The pages are there before anything is timed.
    region.zero(0, region.len());
    Ok(pd.register(&region, Access::REMOTE)?)
}

/// Sizes of the QP.
pub(super) fn limits(caps: &DeviceCaps, job: &Job) -> QpLimits {
    QpLimits {
        send_wrs: SEND_WRS.min(caps.max_wrs),
        recv_wrs: (u32::from(job.depth) + 16).min(caps.max_wrs),
        send_sges: 1,
        recv_sges: 1,
        inline_bytes: INLINE_MAX.min(caps.inline_bytes),
        reads_out: READS_MAX.min(caps.max_reads_out).max(1),
        reads_in: READS_MAX.min(caps.max_reads_in).max(1),
    }
}

/// CQ entries for those sizes.
pub(super) fn cq_entries(limits: &QpLimits) -> u32 {
    limits.send_wrs + limits.recv_wrs
}

impl End {
    /// One with a QP that its poller has.
    pub(super) fn new(
        poller: Box<dyn Poller>,
        qp: QpIndex,
        memory: MemoryRegion,
        job: Job,
        deadline: Instant,
    ) -> Self {
        let inline_bytes = INLINE_MAX.min(poller.caps().inline_bytes);
        let out = Box::new([Completion::default(); BATCH]);
        Self {
            poller,
            qp,
            memory,
            job,
            inline_bytes,
            out,
            sends: 0,
            looks: 0,
            reads_out: 0,
            deadline,
        }
    }

    /// What is measured.
    pub(super) fn job(&self) -> Job {
        self.job
    }

    /// How this end waits from now on.
    pub(super) fn set_wait(&mut self, wait: Wait) {
        self.job.wait = wait;
    }

    /// Completes an incoming connection.
    pub(super) fn accept(&mut self, params: &rblk_fabric::AcceptParams) -> Result<(), Broken> {
        Ok(self.poller.accept(self.qp, params)?)
    }

    /// Where a message that comes is.
    pub(super) fn incoming(&self, index: u64) -> usize {
        self.job.slot(index)
    }

    /// Where a message that goes is.
    pub(super) fn outgoing(&self, index: u64) -> usize {
        self.job.window() as usize + self.job.slot(index)
    }

    /// Where small messages that come are, behind the windows.
    pub(super) fn small_in(&self) -> usize {
        2 * self.job.window() as usize
    }

    /// Where a small message that goes is.
    pub(super) fn small_out(&self) -> usize {
        self.small_in() + SMALL as usize
    }

    /// The last byte of a message.
    pub(super) fn last_byte(&self, offset: usize) -> u8 {
        let mut byte = [0];
        self.memory.region().read(offset + self.job.bytes as usize - 1, &mut byte);
        byte[0]
    }

    /// Sets the last byte of a message.
    pub(super) fn set_last_byte(&self, offset: usize, byte: u8) {
        self.memory.region().write(offset + self.job.bytes as usize - 1, &[byte]);
    }

    /// Posts RECVs for messages of `len` bytes, each at its offset.
    pub(super) fn recv(
        &mut self,
        len: u32,
        offsets: impl IntoIterator<Item = usize>,
    ) -> Result<(), Broken> {
        let mut wrs = [RecvWr::one(WrId(0), rblk_fabric::Sge::default()); BATCH];
        let mut count = 0;
        for offset in offsets {
            let sge = self.memory.sge(offset, len).unwrap_or_default();
            wrs[count] = RecvWr::one(WrId(offset as u64), sge);
            count += 1;
            if count == BATCH {
                self.poller.post_recv(self.qp, &wrs)?;
                count = 0;
            }
        }
        Ok(self.poller.post_recv(self.qp, &wrs[..count])?)
    }

    /// A work request over `len` bytes at `offset`. Every `interval`-th one made is signaled.
    pub(super) fn wr(&mut self, op: SendOp, offset: usize, len: u32, interval: u32) -> SendWr {
        self.sends += 1;
        let signaled = self.sends >= interval;
        if signaled {
            self.sends = 0;
        }
        SendWr {
            id: WrId(u64::from(interval)),
            op,
            sges: SgeList::one(self.memory.sge(offset, len).unwrap_or_default()),
            signaled,
            inline: len <= self.inline_bytes && !matches!(op, SendOp::Read(_)),
        }
    }

    /// Posts work requests, one doorbell.
    pub(super) fn post(&mut self, wrs: &[SendWr]) -> Result<(), Broken> {
        Ok(self.poller.post_send(self.qp, wrs)?)
    }

    /// Takes what completed. If nothing did, waits in its way, at most for a while, and may come
    /// back with nothing.
    pub(super) fn turn(&mut self) -> Result<&[Completion], Broken> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(64) {
            self.check()?;
        }
        let mut count = self.poller.poll(&mut self.out[..])?;
        if count == 0 {
            match self.job.wait {
                Wait::Polling => {
                    // What works for the peer may need this processor: a kernel thread, or the peer
                    // itself.
                    std::thread::yield_now();
                }
                Wait::Events => {
                    self.check()?;
                    self.poller.arm()?;
                    count = self.poller.poll(&mut self.out[..])?;
                    if count == 0 {
                        self.nap()?;
                        count = self.poller.poll(&mut self.out[..])?;
                    }
                }
            }
        }
        let out = &self.out[..count];
        match out.iter().find(|c| c.status != WcStatus::Success) {
            Some(bad) => Err(Broken::Ended(bad.status)),
            None => Ok(out),
        }
    }

    /// Fails when it is too late.
    pub(super) fn check(&self) -> Result<(), Broken> {
        if interrupt::is_set() {
            return Err(Broken::Interrupted);
        }
        if Instant::now() >= self.deadline {
            return Err(Broken::Late);
        }
        Ok(())
    }

    fn nap(&mut self) -> Result<(), Broken> {
        let limit = PollTimeout::try_from(NAP).unwrap_or(PollTimeout::ZERO);
        let fds = self.poller.event_fds();
        let watched = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let woken = match fds {
            [Some(one), Some(two)] => poll(&mut [watched(one), watched(two)], limit),
            [Some(one), None] | [None, Some(one)] => poll(&mut [watched(one)], limit),
            [None, None] => Ok(0),
        };
        match woken {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        self.poller.clear_event();
        Ok(())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.poller.fail(self.qp);
        drop(self.poller.detach(self.qp));
    }
}

/// A place in the peer's memory.
pub(super) fn at(buffer: RemoteBuffer, offset: usize) -> RemoteBuffer {
    RemoteBuffer { addr: buffer.addr + offset as u64, ..buffer }
}
