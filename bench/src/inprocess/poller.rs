//! The fabric of a [`Rig`](super::Rig): pollers whose QPs are connected when they are made, and may be made to jam.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use rblk_fabric::soft::PollerHandle as SoftHandle;
use rblk_fabric::{
    AcceptParams, Completion, Connection, DeviceCaps, FabricError, Poller, PollerCounters,
    PollerHandle, PostError, QpIndex, RecvWr, SendWr,
};

/// QPs of the in-memory network are connected when they are made, so there is nothing left to accept.
#[derive(Debug)]
pub(super) struct PairedPoller {
    pub(super) inner: Box<dyn Poller>,
    // QPs that fail while this is set do not flush.
    pub(super) jams: Arc<AtomicBool>,
    pub(super) jammed: Vec<QpIndex>,
}

impl Poller for PairedPoller {
    fn caps(&self) -> &DeviceCaps {
        self.inner.caps()
    }

    fn attach(&mut self, connection: Connection) -> rblk_fabric::Result<QpIndex> {
        self.inner.attach(connection)
    }

    fn accept(&mut self, _qp: QpIndex, _params: &AcceptParams) -> rblk_fabric::Result<()> {
        Ok(())
    }

    fn post_recv(&mut self, qp: QpIndex, wrs: &[RecvWr]) -> std::result::Result<(), PostError> {
        self.inner.post_recv(qp, wrs)
    }

    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError> {
        self.inner.post_send(qp, wrs)
    }

    fn poll(&mut self, out: &mut [Completion]) -> rblk_fabric::Result<usize> {
        let count = self.inner.poll(out)?;
        if self.jammed.is_empty() {
            return Ok(count);
        }
        let mut kept = 0;
        for at in 0..count {
            if !self.jammed.contains(&out[at].qp) {
                out[kept] = out[at];
                kept += 1;
            }
        }
        Ok(kept)
    }

    fn arm(&mut self) -> rblk_fabric::Result<()> {
        self.inner.arm()
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.inner.event_fds()
    }

    fn clear_event(&mut self) {
        self.inner.clear_event();
    }

    fn fail(&mut self, qp: QpIndex) {
        if self.jams.load(Ordering::Relaxed) {
            self.jammed.push(qp);
        }
        self.inner.fail(qp);
    }

    fn detach(&mut self, qp: QpIndex) -> Option<Connection> {
        self.jammed.retain(|jammed| *jammed != qp);
        self.inner.detach(qp)
    }

    fn counters(&self) -> PollerCounters {
        self.inner.counters()
    }
}

/// The software provider's handle behind a poller's.
///
/// # Errors
/// It is a poller of another provider.
pub fn soft_handle(handle: &PollerHandle) -> Result<&SoftHandle> {
    #[allow(irrefutable_let_patterns, reason = "verbs may be built in or not")]
    if let PollerHandle::Soft(handle) = handle {
        return Ok(handle);
    }
    Err(FabricError::Mixed("a poller of another provider on the in-memory network").into())
}
