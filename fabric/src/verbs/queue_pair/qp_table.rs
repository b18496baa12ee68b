//! [`QpTable`]: the QPs of a poller, by index.
//!
//! Each index has a generation that changes at detach. So completions of an earlier QP on the same
//! index are recognised and dropped. Most providers remove them from the CQ when the QP is
//! destroyed; Soft-RoCE does not.

use rblk_protocol::width::wide;

use super::Connection;
use super::work_queue::{RecvEntries, SendEntries};
use crate::error::PostError;
use crate::verbs::completion_queue::late_flushes::LateFlushes;
use crate::verbs::completion_queue::work_completion::WrIdPrefix;
use crate::verbs::ffi;
use crate::verbs::protection_domain::ProtectionDomain;
use crate::work::poller_counters::PollerCounters;
use crate::work::{Completion, QpIndex, SendOp, SendWr, WcOpcode, WcStatus};

/// The QPs of a poller. An index is given out again after its QP was detached.
#[derive(Debug, Default)]
pub(in crate::verbs) struct QpTable {
    entries: Vec<QpSlot>,
}

#[derive(Debug, Default)]
struct QpSlot {
    generation: u8,
    attached: Option<AttachedQp>,
}

impl QpTable {
    /// The index that the next QP gets. `None` when all are in use.
    pub(in crate::verbs) fn free_index(&self) -> Option<QpIndex> {
        let free = self.entries.iter().position(|entry| entry.attached.is_none());
        u16::try_from(free.unwrap_or(self.entries.len())).ok().map(QpIndex)
    }

    /// Puts a QP on an index that [`Self::free_index`] named.
    pub(in crate::verbs) fn attach(&mut self, index: QpIndex, connection: Connection) {
        let at = usize::from(index.0);
        if at == self.entries.len() {
            self.entries.push(QpSlot::default());
        }
        let entry = &mut self.entries[at];
        debug_assert!(entry.attached.is_none(), "QP index {at} is in use");
        let wr_ids = WrIdPrefix::new(index, entry.generation);
        entry.attached = Some(AttachedQp::new(connection, wr_ids));
    }

    /// The QP of an index.
    #[inline]
    pub(in crate::verbs) fn get_mut(&mut self, qp: QpIndex) -> Option<&mut AttachedQp> {
        self.entries.get_mut(usize::from(qp.0))?.attached.as_mut()
    }

    /// Takes the QP of an index out. Its later completions are dropped.
    pub(in crate::verbs) fn detach(&mut self, qp: QpIndex) -> Option<Connection> {
        let entry = self.entries.get_mut(usize::from(qp.0))?;
        let attached = entry.attached.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        Some(attached.connection)
    }

    /// Books a completion: frees queue entries, or notes that the QP is dead. False when the QP of
    /// the completion is not attached any more.
    #[inline]
    pub(in crate::verbs) fn book(&mut self, completion: &Completion, generation: u8) -> bool {
        let at = usize::from(completion.qp.0);
        debug_assert!(at < self.entries.len(), "a completion of QP index {at}, never given out");
        match self.get_mut(completion.qp) {
            Some(attached) if attached.wr_ids.generation() == generation => {
                attached.book(completion);
                true
            }
            _ => false,
        }
    }
}

/// The state of an attached QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QpHealth {
    /// Nothing failed yet.
    Alive,
    /// A WR failed: the QP is in the error state.
    Dead,
    /// [`crate::DataPath::fail`] was called: the QP is in the error state, and the peer was told.
    Failed,
}

/// A QP on a poller.
#[derive(Debug)]
pub(in crate::verbs) struct AttachedQp {
    connection: Connection,
    wr_ids: WrIdPrefix,
    shape: SendShape,
    health: QpHealth,
    sends: SendEntries,
    recvs: RecvEntries,
}

impl AttachedQp {
    fn new(connection: Connection, wr_ids: WrIdPrefix) -> Self {
        let limits = connection.limits();
        Self {
            wr_ids,
            shape: SendShape::of(&connection),
            health: QpHealth::Alive,
            sends: SendEntries::new(limits.send_wrs),
            recvs: RecvEntries::new(limits.recv_wrs),
            connection,
        }
    }

    /// The PD of the QP.
    #[inline]
    pub(in crate::verbs) fn pd(&self) -> &ProtectionDomain {
        self.connection.pd()
    }

    pub(in crate::verbs) fn connection_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }

    /// The QP, valid while `self` lives.
    #[inline]
    pub(in crate::verbs) fn qp(&self) -> *mut ffi::ibv_qp {
        self.connection.qp()
    }

    /// How the `wr_id`s of the QP begin.
    #[inline]
    pub(in crate::verbs) fn wr_ids(&self) -> WrIdPrefix {
        self.wr_ids
    }

    /// The limits of a send WR.
    #[inline]
    pub(in crate::verbs) fn shape(&self) -> SendShape {
        self.shape
    }

    #[inline]
    pub(in crate::verbs) fn sends(&mut self) -> &mut SendEntries {
        &mut self.sends
    }

    #[inline]
    pub(in crate::verbs) fn recvs(&mut self) -> &mut RecvEntries {
        &mut self.recvs
    }

    /// Whether the QP is known to be in the error state.
    #[inline]
    pub(in crate::verbs) fn is_dead(&self) -> bool {
        self.health != QpHealth::Alive
    }

    #[inline]
    fn book(&mut self, completion: &Completion) {
        match (completion.status, completion.opcode) {
            // The opcode is undefined, and the queues no longer matter.
            (status, _) if status != WcStatus::Success => self.note_death(),
            (_, WcOpcode::Recv | WcOpcode::RecvWithImm) => self.recvs.complete(),
            _ => self.sends.complete(),
        }
    }

    /// A WR of the QP failed. Moving the QP to the error state once more makes rxe look again for
    /// WRs that were posted after the death and before its first flush.
    pub(in crate::verbs) fn note_death(&mut self) {
        if self.health == QpHealth::Alive {
            self.health = QpHealth::Dead;
            self.connection.error();
        }
    }

    /// Moves the QP to the error state and tells the peer, once.
    pub(in crate::verbs) fn fail(&mut self) {
        if self.health != QpHealth::Failed {
            self.health = QpHealth::Failed;
            self.connection.fail();
        }
    }

    /// Takes send WRs of a dead QP: each completes from `late`, as hardware would complete it.
    ///
    /// # Errors
    /// ENOMEM when `late` is full, EINVAL for a WR that the QP would not take.
    pub(in crate::verbs) fn flush_sends(
        &self,
        wrs: &[SendWr],
        late: &mut LateFlushes,
        counters: &mut PollerCounters,
    ) -> Result<(), PostError> {
        for (posted, wr) in wrs.iter().enumerate() {
            let status = match wr.sges.total_bytes() {
                0 => WcStatus::LocalLength,
                _ if self.shape.takes(wr) => WcStatus::Flushed,
                _ => return Err(PostError::invalid(posted)),
            };
            late.push(self.wr_ids, wr.id, status).map_err(|source| PostError { posted, source })?;
            counters.count_send(wr);
        }
        Ok(())
    }
}

/// The limits of a send WR of a QP.
#[derive(Clone, Copy, Debug)]
pub(in crate::verbs) struct SendShape {
    sges: usize,
    read_sges: usize,
    inline_bytes: u64,
}

impl SendShape {
    fn of(connection: &Connection) -> Self {
        Self {
            sges: wide(connection.limits().send_sges),
            read_sges: wide(connection.read_sges()),
            inline_bytes: connection.max_inline().into(),
        }
    }

    /// Whether the number of SGEs is right. SGEs of no bytes do not count: they are not posted.
    #[inline]
    pub(in crate::verbs) fn takes(&self, wr: &SendWr) -> bool {
        let most = if matches!(wr.op, SendOp::Read(_)) { self.read_sges } else { self.sges };
        let used = wr.sges.as_slice().iter().filter(|sge| sge.len > 0).count();
        (1..=most).contains(&used)
    }

    /// Whether the provider may copy the payload when the WR is posted.
    #[inline]
    pub(in crate::verbs) fn may_inline(&self, wr: &SendWr) -> bool {
        wr.inline && !matches!(wr.op, SendOp::Read(_)) && wr.sges.total_bytes() <= self.inline_bytes
    }
}
