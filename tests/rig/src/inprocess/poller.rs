//! The fabric of a [`Rig`](super::Rig): pollers with QPs that are connected from the start, and
//! with CQs that may break.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Result;
use rblk_fabric::soft::{PollerHandle as SoftHandle, ProtectionDomain as SoftDomain};
use rblk_fabric::{
    AcceptParams, Completion, Connection, DataPath, DeviceCaps, FabricError, Owner, Poller,
    PollerCounters, PollerHandle, PostError, ProtectionDomain, QpIndex, Recvs, SendWr,
};

use super::timing::{below, is_timed};

/// A fault of a CQ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CqFault {
    /// Polling fails, as after an overrun.
    Poll,
    /// Arming fails.
    Arm,
}

/// Breaks a poller from outside.
#[derive(Clone, Default, Debug)]
pub struct CqBreaker(Arc<CqState>);

#[derive(Default, Debug)]
struct CqState {
    poll: AtomicBool,
    arm: AtomicBool,
    // Calls that failed since it broke.
    asked: AtomicU64,
}

impl CqBreaker {
    /// Breaks the CQ.
    pub fn break_it(&self, how: CqFault) {
        match how {
            CqFault::Poll => self.0.poll.store(true, Ordering::Relaxed),
            CqFault::Arm => self.0.arm.store(true, Ordering::Relaxed),
        }
    }

    /// Calls that failed since it broke.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.0.asked.load(Ordering::Relaxed)
    }

    fn check(&self, broken: &AtomicBool) -> rblk_fabric::Result<()> {
        if !broken.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.0.asked.fetch_add(1, Ordering::Relaxed);
        let source = std::io::ErrorKind::BrokenPipe.into();
        Err(FabricError::Call { call: "completion queue", source })
    }
}

/// QPs of the in-memory network are connected from the start, so `accept` does nothing.
#[derive(Debug)]
struct PairedPoller {
    inner: Box<dyn Poller>,
    breaker: CqBreaker,
}

impl Poller for PairedPoller {
    fn attach(&mut self, connection: Connection) -> rblk_fabric::Result<QpIndex> {
        self.inner.attach(connection)
    }

    fn detach(&mut self, qp: QpIndex) -> Option<Connection> {
        self.inner.detach(qp)
    }
}

impl DataPath for PairedPoller {
    fn caps(&self) -> &DeviceCaps {
        self.inner.caps()
    }

    fn accept(&mut self, _qp: QpIndex, _params: &AcceptParams) -> rblk_fabric::Result<()> {
        Ok(())
    }

    fn set_owner(&mut self, qp: QpIndex, owner: Owner) {
        self.inner.set_owner(qp, owner);
    }

    fn has_more(&self) -> bool {
        self.inner.has_more()
    }

    fn post_recvs(&mut self, qp: QpIndex, recvs: Recvs<'_>) -> std::result::Result<(), PostError> {
        below(|| self.inner.post_recvs(qp, recvs))
    }

    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError> {
        below(|| self.inner.post_send(qp, wrs))
    }

    fn poll(&mut self, out: &mut [Completion]) -> rblk_fabric::Result<usize> {
        self.breaker.check(&self.breaker.0.poll)?;
        below(|| self.inner.poll(out))
    }

    fn arm(&mut self) -> rblk_fabric::Result<()> {
        self.breaker.check(&self.breaker.0.arm)?;
        self.inner.arm()
    }

    fn send_owed_acks(&mut self) {
        self.inner.send_owed_acks();
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.inner.event_fds()
    }

    fn clear_event(&mut self) {
        self.inner.clear_event();
    }

    fn fail(&mut self, qp: QpIndex) {
        self.inner.fail(qp);
    }

    fn counters(&self) -> PollerCounters {
        self.inner.counters()
    }
}

/// A poller with its time measured, if this thread is timed now.
pub(super) fn timed(inner: Box<dyn Poller>) -> Box<dyn Poller> {
    if is_timed() { breakable(inner).0 } else { inner }
}

/// A poller that can be broken.
#[must_use]
pub fn breakable(inner: Box<dyn Poller>) -> (Box<dyn Poller>, CqBreaker) {
    let breaker = CqBreaker::default();
    (Box::new(PairedPoller { inner, breaker: breaker.clone() }), breaker)
}

/// The software provider's handle behind a poller's.
///
/// # Errors
/// The poller is another provider's.
pub fn soft_handle(handle: &PollerHandle) -> Result<&SoftHandle> {
    #[allow(irrefutable_let_patterns, reason = "verbs may be built in or not")]
    if let PollerHandle::Soft(handle) = handle {
        return Ok(handle);
    }
    Err(FabricError::Mixed("a poller of another provider on the in-memory network").into())
}

/// The software provider's domain behind a domain.
///
/// # Errors
/// The domain is another provider's.
pub fn soft_domain(pd: &ProtectionDomain) -> Result<&SoftDomain> {
    #[allow(irrefutable_let_patterns, reason = "verbs may be built in or not")]
    if let ProtectionDomain::Soft(pd) = pd {
        return Ok(pd);
    }
    Err(FabricError::Mixed("a domain of another provider on the in-memory network").into())
}
