//! [`DataPath`]: the part of a provider that a data thread uses in every turn.
//!
//! A call covers a batch, so a turn pays the indirect call of the trait once, not once per I/O.

use std::fmt;
use std::os::fd::BorrowedFd;

use crate::caps::DeviceCaps;
use crate::connect::AcceptParams;
use crate::error::{PostError, Result};
use crate::work::poller_counters::PollerCounters;
use crate::work::{Completion, Owner, QpIndex, RecvWr, Recvs, SendWr};

/// One data thread's CQ and the QPs on it.
///
/// Not `Sync`: one thread at a time uses it, in turns: poll until empty, act, post one batch per
/// QP. To sleep, [`arm`](Self::arm), poll once more, and only if that was empty wait until one of
/// [`event_fds`](Self::event_fds) is readable; then [`clear_event`](Self::clear_event).
pub trait DataPath: Send + fmt::Debug {
    /// The abilities of the device.
    fn caps(&self) -> &DeviceCaps;

    /// Completes an incoming connection ([`crate::Incoming::prepare`]). Post its RECVs first. A
    /// device may do it later than this call returns. If it cannot, the QP dies, and its WRs are
    /// flushed.
    ///
    /// # Errors
    /// The hello is too long, or no peer waits. The software provider: an error of its connection.
    /// The QP is then dead, and its WRs are flushed.
    fn accept(&mut self, qp: QpIndex, params: &AcceptParams) -> Result<()>;

    /// Sets the owner of a QP. A software poller moves the bytes of all QPs itself, and shares its
    /// turns fairly between owners, not between QPs. Until this is called all QPs have one owner.
    /// Devices share their link by themselves, and ignore it.
    fn set_owner(&mut self, _qp: QpIndex, _owner: Owner) {}

    /// Posts RECVs, in order.
    ///
    /// # Errors
    /// [`PostError`]; an unknown `qp` gives EINVAL.
    ///
    /// # Panics
    /// A row is outside of the table.
    fn post_recvs(&mut self, qp: QpIndex, recvs: Recvs<'_>) -> std::result::Result<(), PostError>;

    /// Posts RECVs that are in no table.
    ///
    /// # Errors
    /// [`PostError`]; an unknown `qp` gives EINVAL.
    fn post_recv(&mut self, qp: QpIndex, wrs: &[RecvWr]) -> std::result::Result<(), PostError> {
        let mut posted = 0;
        for list in wrs.chunks(64) {
            let Some(recvs) = Recvs::all(list) else { return Err(PostError::invalid(posted)) };
            self.post_recvs(qp, recvs).map_err(|error| PostError {
                posted: posted + error.posted,
                source: error.source,
            })?;
            posted += list.len();
        }
        Ok(())
    }

    /// Posts a list with one doorbell, in order. An empty list does nothing.
    ///
    /// # Errors
    /// [`PostError`]; an unknown `qp` gives EINVAL.
    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError>;

    /// Writes completions to `out`, and returns how many. 0 means that there are none now.
    ///
    /// # Errors
    /// The CQ itself is broken (it overran, or the device is gone). Nothing on it will complete any
    /// more.
    fn poll(&mut self, out: &mut [Completion]) -> Result<usize>;

    /// Asks for an event at the next completion. Call it before every sleep. A CQ that is still
    /// armed is not asked again, so the call costs nothing then.
    ///
    /// # Errors
    /// The CQ itself is broken.
    fn arm(&mut self) -> Result<()>;

    /// Sends the acknowledgements that this end still owes its peers. In the software provider they
    /// otherwise leave with the next data, or after some empty polls. Call it when nothing is under
    /// way and the next poll may be long in coming. Devices owe nothing.
    fn send_owed_acks(&mut self) {}

    /// Whether the next poll has something to move that the last one left for the sake of other
    /// owners. It counts as work: a thread that slept now would be woken at once.
    fn has_more(&self) -> bool {
        false
    }

    /// Descriptors to sleep on. When an armed CQ has something, one of them is readable until
    /// [`Self::clear_event`]. The descriptors may change with [`attach`](crate::Poller::attach) and
    /// [`detach`](crate::Poller::detach): ask again after those.
    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2];

    /// Takes the event. The CQ is not armed afterwards. Call it after each wake by a descriptor,
    /// and after a sleep that timed out: if the device lost the event, the next [`Self::arm`] asks
    /// again.
    fn clear_event(&mut self);

    /// Moves the QP to the error state, soon: the caller does not wait for the device. Everything
    /// outstanding completes sooner or later, and nothing that is posted later reaches the device.
    /// RDMA that is under way may continue until the QP is
    /// destroyed. Only then is its memory free ([`DeviceCaps::touches_until_destroyed`]).
    /// Idempotent; no effect on an index that is not in use.
    fn fail(&mut self, qp: QpIndex);

    /// Doorbells, WRs and completions so far.
    fn counters(&self) -> PollerCounters;
}
