//! [`Connection`]: a reliable-connected QP with its CM id.

pub(super) mod inline_source;
pub(super) mod qp_table;
pub(super) mod work_queue;
pub(super) mod wr_lists;

use std::io;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cm::cm_id::{CmId, ConnectParams};
use super::completion_queue::cq_room::Reservation;
use super::completion_queue::{CompletionQueue, PollerHandle};
use super::device_caps::INLINE_LADDER;
use super::ffi;
use super::protection_domain::ProtectionDomain;
use super::threads::{Call, Threads};
use crate::connect::{ConnectionHello, QpLimits};
use crate::error::{FabricError, Result};

/// Destroying a connection normally takes less. More is logged.
const SLOW: Duration = Duration::from_secs(1);

/// A QP that moves between control and a data thread. Dropping it destroys the QP and its CM id. A
/// peer that was never accepted is rejected first. The drop may block for a short time.
#[derive(Debug)]
pub struct Connection {
    id: CmId,
    limits: QpLimits,
    max_inline: u32,
    read_sges: u32,
    // `None` once the peer was accepted, and on the side that connects.
    unanswered: Option<Unanswered>,
    // After `id`: the QP is destroyed before its room in the CQ is free, and before the CQ and the
    // PD.
    room: Reservation,
    pd: ProtectionDomain,
}

/// A peer that waits for the answer.
#[derive(Debug)]
struct Unanswered {
    // READs that the peer serves.
    peer_serves: u8,
    // The reply to a peer that is not accepted.
    refusal: ConnectionHello,
}

impl Connection {
    /// Makes the QP of `id` in `pd`, completing on the poller's CQ. The CQ is of the same device;
    /// its PD may be another one.
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
            unanswered: None,
            room: Reservation::new(
                poller.queue(),
                u64::from(limits.send_wrs) + u64::from(limits.recv_wrs),
            ),
            pd: pd.clone(),
        })
    }

    /// Turns it into the connection of a peer that waits for [`Self::accept`].
    pub(super) fn unanswered(mut self, peer_serves: u8, refusal: ConnectionHello) -> Self {
        self.unanswered = Some(Unanswered { peer_serves, refusal });
        self
    }

    pub(super) fn id(&self) -> &CmId {
        &self.id
    }

    pub(super) fn queue(&self) -> &Arc<CompletionQueue> {
        self.room.queue()
    }

    /// The PD of the QP.
    pub(super) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The room of the QP in its CQ.
    pub(super) fn room(&mut self) -> &mut Reservation {
        &mut self.room
    }

    pub(super) fn limits(&self) -> QpLimits {
        self.limits
    }

    /// Bytes of inline payload that the provider granted.
    pub(super) fn max_inline(&self) -> u32 {
        self.max_inline
    }

    /// SGEs that an RDMA READ may have.
    pub(super) fn read_sges(&self) -> u32 {
        self.read_sges
    }

    /// The QP, valid while `self` lives.
    pub(super) fn qp(&self) -> *mut ffi::ibv_qp {
        self.id.qp()
    }

    /// Starts to connect. May block.
    pub(super) fn connect(&mut self, params: &ConnectParams<'_>) -> Result<()> {
        self.id.connect(params)
    }

    /// Has the peer accepted, soon and by another thread. The RECVs of the QP must be posted
    /// already: if it fails, they are flushed.
    pub(super) fn accept(&mut self, hello: &[u8], reads_out: u8, reads_in: u8) -> Result<()> {
        let Some(Unanswered { peer_serves, refusal }) = self.unanswered.take() else {
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
        let asked = self.id.accept(&param, &refusal.0);
        if asked.is_err() {
            self.fail();
        }
        asked
    }

    /// Has the QP moved to the error state, soon and by another thread.
    pub(super) fn error(&self) {
        self.id.error();
    }

    /// Has the QP moved to the error state, and the peer told: soon, and by another thread.
    pub(super) fn fail(&self) {
        self.id.end();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(unanswered) = &self.unanswered {
            self.id.reject(&unanswered.refusal.0);
        }
    }
}

/// Destroys a connection, and then drops `rest`, on another thread, so that the caller does not
/// wait.
pub(crate) fn retire<T: Send + 'static>(connection: Connection, rest: T) {
    static THREADS: Threads<Call> = Threads::new("verbs-retire", 1024);
    let dropped = (connection, rest);
    THREADS.begin();
    THREADS.serve(Box::new(move || {
        let begun = Instant::now();
        drop(dropped);
        let took = begun.elapsed();
        if took > SLOW {
            tracing::warn!(?took, "the kernel took long to destroy a connection");
        }
    }));
}

/// Checks the limits and makes the QP; returns the inline bytes granted.
fn create_qp(
    id: &mut CmId,
    pd: &ProtectionDomain,
    queue: &Arc<CompletionQueue>,
    limits: QpLimits,
) -> Result<u32> {
    let device = pd.device();
    if id.verbs() != device.context() || queue.device().context() != device.context() {
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
    within("scatter entries of a receive request", limits.recv_sges, caps.max_sges)?;
    let wanted = limits.inline_bytes.min(caps.inline_bytes);
    // A QP of this size may have less room for inline data than the small QP of the probe. Then try
    // smaller sizes.
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
            max_recv_sge: limits.recv_sges,
            max_inline_data: inline,
        };
        match id.create_qp(pd.raw(), &mut attr) {
            // Some providers grant more than was asked for. It may be used.
            Ok(()) => return Ok(attr.cap.max_inline_data),
            Err(error) => last = error,
        }
    }
    Err(FabricError::Call { call: "ibv_create_qp", source: last })
}
