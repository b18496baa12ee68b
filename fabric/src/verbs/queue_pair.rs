//! [`Connection`]: a reliable-connected QP with its CM id.

use std::io;
use std::mem;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::cm_id::{CmId, ConnectParams};
use super::completion_queue::{CompletionQueue, PollerHandle, Reservation};
use super::device::INLINE_LADDER;
use super::ffi;
use super::protection_domain::ProtectionDomain;
use crate::device::{ConnectionHello, QpLimits};
use crate::error::{FabricError, Result};

/// Destroying a connection takes less, as a rule.
const SLOW: Duration = Duration::from_secs(1);

/// A QP on its way between control and a data thread. Dropping it destroys the QP and its CM id,
/// rejecting the peer first when it was never accepted; that may block shortly.
#[derive(Debug)]
pub struct Connection {
    id: CmId,
    limits: QpLimits,
    max_inline: u32,
    read_sges: u32,
    incoming: Option<Incoming>,
    // After `id`: the QP goes before its room in the CQ is free, and before the CQ, which keeps the
    // PD.
    room: Reservation,
}

/// What remains to be done for a peer that waits.
#[derive(Debug)]
struct Incoming {
    // READs the peer serves.
    peer_serves: u8,
    // What it is told when it is not accepted.
    refusal: ConnectionHello,
}

impl Connection {
    /// Makes the QP of `id` in `pd`, completing on the poller's CQ.
    pub(super) fn create(
        mut id: CmId,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
    ) -> std::result::Result<Self, (CmId, FabricError)> {
        let max_inline = match create_qp(&mut id, pd, poller.queue(), limits) {
            Ok(max_inline) => max_inline,
            Err(error) => return Err((id, error)),
        };
        Ok(Self {
            id,
            limits,
            max_inline,
            read_sges: pd.device().max_read_sges(),
            incoming: None,
            room: Reservation::new(
                poller.queue(),
                u64::from(limits.send_wrs) + u64::from(limits.recv_wrs),
            ),
        })
    }

    /// Makes it one that waits for [`Self::accept`].
    pub(super) fn incoming(mut self, peer_serves: u8, refusal: ConnectionHello) -> Self {
        self.incoming = Some(Incoming { peer_serves, refusal });
        self
    }

    pub(super) fn id(&self) -> &CmId {
        &self.id
    }

    pub(super) fn queue(&self) -> &Arc<CompletionQueue> {
        self.room.queue()
    }

    /// Its room in the CQ.
    pub(super) fn room(&mut self) -> &mut Reservation {
        &mut self.room
    }

    pub(super) fn limits(&self) -> QpLimits {
        self.limits
    }

    /// Inline bytes the provider granted.
    pub(super) fn max_inline(&self) -> u32 {
        self.max_inline
    }

    /// Entries an RDMA READ may have.
    pub(super) fn read_sges(&self) -> u32 {
        self.read_sges
    }

    /// The QP, valid while `self` lives.
    pub(super) fn qp(&self) -> *mut ffi::ibv_qp {
        self.id.qp()
    }

    /// Starts connecting; may block.
    pub(super) fn connect(&mut self, params: &ConnectParams<'_>) -> Result<()> {
        self.id.connect(params)
    }

    /// Accepts the peer. Its RECVs must have been posted.
    pub(super) fn accept(&mut self, hello: &[u8], reads_out: u8, reads_in: u8) -> Result<()> {
        let Some(&Incoming { peer_serves, .. }) = self.incoming.as_ref() else {
            return Err(FabricError::Call {
                call: "rdma_accept",
                source: io::Error::from_raw_os_error(libc::EINVAL),
            });
        };
        let caps = self.room.queue().device().caps();
        let param = ConnectParams {
            hello,
            reads_out: reads_out.min(peer_serves).min(caps.max_reads_out),
            reads_in: reads_in.min(caps.max_reads_in),
        };
        self.incoming = None;
        let accepted = self.id.accept(&param);
        if accepted.is_err() {
            self.fail();
        }
        accepted
    }

    /// Moves the QP to the error state and tells the peer.
    pub(super) fn fail(&self) {
        // SAFETY: the QP lives as long as `self`.
        unsafe { move_to_error(self.qp()) };
        self.id.disconnect();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(incoming) = &self.incoming {
            self.id.reject(&incoming.refusal.0);
        }
    }
}

/// Destroys a connection, and then drops `rest`, on a thread that nothing waits for.
pub(crate) fn retire<T: Send + 'static>(connection: Connection, rest: T) {
    let leaving = (connection, rest);
    // Without a thread the closure, and so the connection, is dropped here.
    let _ = thread::Builder::new().name("verbs-retire".into()).spawn(move || {
        let begun = Instant::now();
        drop(leaving);
        let took = begun.elapsed();
        if took > SLOW {
            tracing::warn!(?took, "the kernel took its time to destroy a connection");
        }
    });
}

/// Moves a QP to the error state, from whatever state. A QP that refuses is one that is already
/// dead, or whose device is; so the result says nothing.
///
/// # Safety
/// `qp` is a QP that is not freed during the call.
pub(super) unsafe fn move_to_error(qp: *mut ffi::ibv_qp) {
    // SAFETY: an all-zero ibv_qp_attr is a value of plain integers.
    let mut attr: ffi::ibv_qp_attr = unsafe { mem::zeroed() };
    attr.qp_state = ffi::ibv_qp_state::IBV_QPS_ERR;
    let mask = i32::try_from(ffi::ibv_qp_attr_mask::IBV_QP_STATE.0).unwrap_or(1);
    // SAFETY: the caller's promise.
    let _ = unsafe { ffi::ibv_modify_qp(qp, &raw mut attr, mask) };
}

/// Whether the QP is in the error state.
///
/// # Safety
/// `qp` is a QP that is not freed during the call.
pub(super) unsafe fn is_in_error(qp: *mut ffi::ibv_qp) -> bool {
    // SAFETY: all-zero values of plain integers and null pointers.
    let (mut attr, mut init): (ffi::ibv_qp_attr, ffi::ibv_qp_init_attr) =
        unsafe { (mem::zeroed(), mem::zeroed()) };
    let mask = i32::try_from(ffi::ibv_qp_attr_mask::IBV_QP_STATE.0).unwrap_or(1);
    // SAFETY: the caller's promise; both structs live during the call.
    let rc = unsafe { ffi::ibv_query_qp(qp, &raw mut attr, mask, &raw mut init) };
    rc == 0 && attr.qp_state == ffi::ibv_qp_state::IBV_QPS_ERR
}

/// Checks the limits and makes the QP; returns the inline bytes granted.
fn create_qp(
    id: &mut CmId,
    pd: &ProtectionDomain,
    queue: &Arc<CompletionQueue>,
    limits: QpLimits,
) -> Result<u32> {
    let device = pd.device();
    if id.verbs() != device.context() || !queue.pd().same_as(pd) {
        return Err(FabricError::Mixed("queue pair, protection domain and completion queue"));
    }
    let caps = device.caps();
    let within = |what, asked: u32, limit: u32| {
        if asked == 0 || asked > limit {
            let (limit, asked) = (limit.into(), asked.into());
            return Err(FabricError::Limit { device: caps.name.clone(), what, limit, asked });
        }
        Ok(())
    };
    within("work requests of a send queue", limits.send_wrs, caps.max_wrs)?;
    within("work requests of a receive queue", limits.recv_wrs, caps.max_wrs)?;
    within("gather entries of a work request", limits.send_sges, caps.max_sges)?;
    let wanted = limits.inline_bytes.min(caps.inline_bytes);
    // A QP of this size may have less room inline than the probe's small one: go down the ladder
    // then.
    let lower = INLINE_LADDER.into_iter().filter(|step| *step < wanted);
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for inline in std::iter::once(wanted).chain(lower) {
        // SAFETY: an all-zero ibv_qp_init_attr is a value: null pointers and integers.
        let mut attr: ffi::ibv_qp_init_attr = unsafe { mem::zeroed() };
        (attr.send_cq, attr.recv_cq) = (queue.raw(), queue.raw());
        attr.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
        attr.cap = ffi::ibv_qp_cap {
            max_send_wr: limits.send_wrs,
            max_recv_wr: limits.recv_wrs,
            max_send_sge: limits.send_sges,
            max_recv_sge: 1,
            max_inline_data: inline,
        };
        match id.create_qp(pd.raw(), &mut attr) {
            // More than asked is granted at times; it may be used.
            Ok(()) => return Ok(attr.cap.max_inline_data),
            Err(error) => last = error,
        }
    }
    Err(FabricError::Call { call: "rdma_create_qp", source: last })
}
