//! [`Poller`]: the data path. One CQ, its QPs, and preallocated WR lists.
//!
//! - **Batches.** WRs are posted as linked lists of at most [`BATCH`] WRs: one provider call, and
//!   so one doorbell, for each list. Nothing allocates after [`attach`](crate::Poller::attach);
//!   nothing logs or locks.
//! - **Queue sizes.** A queue holds the requested number of WRs, even if the provider rounded the
//!   size up. The CQ has room for exactly that, so it cannot overrun. A caller that posts more gets
//!   ENOMEM. See [`CqRoom`] for when that room is free again.
//! - **Empty messages.** An empty message completes with [`WcStatus::LocalLength`] and kills its
//!   QP, as hardware does with a bad WR. The devices differ here, and some lose an empty message.
//! - **Dead QPs.** The poller knows that a QP is dead after the first failed completion, or after
//!   [`fail`](crate::DataPath::fail). WRs that are posted later do not reach the device. The poller
//!   itself returns a flush for each, once the CQ is empty. Hardware would do the same, but the
//!   software devices do not flush late WRs: rxe looks at its receive queue, and siw at both
//!   queues, only when the state changes.
//! - **Late WRs.** That leaves WRs posted after the QP died and before its first flush was polled.
//!   The QP is moved to the error state once more when it is found dead, and rxe then looks again.
//!   siw does not: a late WR may never complete there. So a caller must not wait for the flush of a
//!   dead QP. Detach and destroy end all WRs of the QP. A flush does not prove that the device has
//!   stopped.

use std::fmt;
use std::io;
use std::mem::{self, size_of};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rblk_protocol::width::{narrow, wide, wide64};

use super::completion_queue::cq_events::CqEvents;
use super::completion_queue::cq_room::CqRoom;
use super::completion_queue::late_flushes::LateFlushes;
use super::completion_queue::work_completion::completion;
use super::completion_queue::{CompletionQueue, PollerHandle, broken};
use super::ffi;
use super::protection_domain::ProtectionDomain;
use super::provider_calls::ProviderCalls;
use super::queue_pair::inline_source::InlineSources;
use super::queue_pair::qp_table::QpTable;
use super::queue_pair::wr_lists::{BATCH, WrLists};
use super::queue_pair::{Connection, retire};
use crate::caps::DeviceCaps;
use crate::completion_vector::CompletionVector;
use crate::connect::{AcceptParams, ConnectionHello};
use crate::data_path::DataPath;
use crate::error::{FabricError, PostError, Result};
use crate::work::poller_counters::PollerCounters;
use crate::work::{Completion, QpIndex, Recvs, SendWr, WcStatus};

/// A data thread's CQ and QPs.
pub(crate) struct Poller {
    // Before `queue`: the QPs are destroyed first.
    qps: QpTable,
    room: CqRoom,
    late: LateFlushes,
    lists: Box<WrLists>,
    // The buffer of `ibv_poll_cq`.
    polled: Box<[ffi::ibv_wc; BATCH]>,
    inline: InlineSources,
    calls: ProviderCalls,
    events: CqEvents,
    counters: PollerCounters,
    queue: Arc<CompletionQueue>,
}

// SAFETY: the raw pointers inside are to the poller's own lists and to verbs objects, which may be
// used from any thread, one at a time here.
unsafe impl Send for Poller {}

impl fmt::Debug for Poller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller")
            .field("queue", &self.queue)
            .field("qps", &self.qps)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl Poller {
    /// A CQ with room for `cq_entries` in `pd`, as a poller and as the handle for control.
    ///
    /// # Errors
    /// [`FabricError::Limit`] or a failed call.
    pub(crate) fn create(
        pd: &ProtectionDomain,
        cq_entries: u32,
        vector: CompletionVector,
    ) -> Result<(Self, PollerHandle)> {
        let queue = CompletionQueue::create(pd, cq_entries, vector)?;
        let poller = Self {
            qps: QpTable::default(),
            room: CqRoom::new(queue.entries().into()),
            late: LateFlushes::new(wide(queue.entries())),
            lists: WrLists::new(),
            // SAFETY: integers and plain unions: all-zero is a value of each.
            polled: Box::new(unsafe { mem::zeroed() }),
            inline: InlineSources::new(),
            calls: ProviderCalls::of(queue.device())?,
            events: CqEvents::default(),
            counters: PollerCounters::default(),
            queue: Arc::clone(&queue),
        };
        Ok((poller, PollerHandle::new(queue)))
    }

    fn limit(&self, what: &'static str, limit: u64, asked: u64) -> FabricError {
        FabricError::Limit { device: self.queue.device().name().to_owned(), what, limit, asked }
    }

    /// The answer to send WRs that the device did not get: `wrs` from `done` on.
    fn refuse_sends(
        &mut self,
        qp: QpIndex,
        wrs: &[SendWr],
        done: usize,
        full: bool,
    ) -> std::result::Result<(), PostError> {
        let Some(first) = wrs.get(done) else { return Ok(()) };
        if full {
            return Err(PostError::full(done));
        }
        match self.qps.get_mut(qp) {
            // An empty message fails as a bad WR fails in hardware, and kills the QP.
            Some(attached) if first.sges.total_bytes() == 0 => {
                attached.note_death();
                attached
                    .flush_sends(&wrs[done..], &mut self.late, &mut self.counters)
                    .map_err(|e| PostError { posted: done + e.posted, ..e })
            }
            _ => Err(PostError::invalid(done)),
        }
    }

    /// Moves completions from the CQ to `out`, until the CQ is empty or `out` is full. Returns how
    /// many.
    #[inline]
    fn drain_cq(&mut self, out: &mut [Completion]) -> Result<usize> {
        let mut filled = 0;
        let released = self.queue.released();
        while filled < out.len() {
            if self.queue.is_broken() {
                return if filled > 0 { Ok(filled) } else { Err(broken()) };
            }
            let room = (out.len() - filled).min(BATCH);
            // SAFETY: the array has BATCH entries, `room` is at most that, and the CQ lives.
            let found = unsafe {
                (self.calls.poll_cq)(self.queue.raw(), narrow(room), self.polled.as_mut_ptr())
            };
            let Ok(found) = usize::try_from(found) else {
                self.queue.mark_broken();
                continue;
            };
            for wc in &self.polled[..found.min(room)] {
                let (completion, generation) = completion(wc);
                if self.qps.book(&completion, generation) {
                    out[filled] = completion;
                    filled += 1;
                }
            }
            if found < room {
                // Empty: nothing of a QP that was destroyed before is left in it.
                self.room.found_empty(released);
                break;
            }
        }
        Ok(filled)
    }

    /// As [`attach`](crate::Poller::attach).
    pub(crate) fn attach_qp(&mut self, mut connection: Connection) -> Result<QpIndex> {
        if !Arc::ptr_eq(connection.queue(), &self.queue) {
            return Err(FabricError::Mixed(
                "a queue pair was attached to a poller it was not made for",
            ));
        }
        let Some(index) = self.qps.free_index() else {
            let most = u64::from(u16::MAX) + 1;
            retire(connection, ());
            return Err(self.limit("queue pairs of a poller", most, most + 1));
        };
        if let Err(asked) = self.room.take(connection.room()) {
            retire(connection, ());
            let entries = self.room.entries();
            return Err(self.limit("entries of this completion queue", entries, asked));
        }
        self.qps.attach(index, connection);
        Ok(index)
    }

    /// As [`detach`](crate::Poller::detach).
    pub(crate) fn detach_qp(&mut self, qp: QpIndex) -> Option<Connection> {
        self.qps.detach(qp)
    }
}

impl DataPath for Poller {
    fn caps(&self) -> &DeviceCaps {
        self.queue.device().caps()
    }

    fn accept(&mut self, qp: QpIndex, params: &AcceptParams) -> Result<()> {
        let (most, asked) = (ConnectionHello::REPLY_MAX, params.hello.0.len());
        if asked > most {
            return Err(self.limit(
                "bytes of hello in a connection reply",
                wide64(most),
                wide64(asked),
            ));
        }
        let Some(attached) = self.qps.get_mut(qp) else {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(FabricError::Call { call: "rdma_accept", source });
        };
        attached.connection_mut().accept(&params.hello.0, params.reads_out, params.reads_in)
    }

    fn post_recvs(&mut self, qp: QpIndex, recvs: Recvs<'_>) -> std::result::Result<(), PostError> {
        if recvs.rows.is_empty() {
            return Ok(());
        }
        let Some(attached) = self.qps.get_mut(qp) else { return Err(PostError::invalid(0)) };
        self.counters.recv_doorbells += 1;
        if attached.is_dead() {
            for (posted, wr) in recvs.iter().enumerate() {
                self.late
                    .push(attached.wr_ids(), wr.id, WcStatus::Flushed)
                    .map_err(|source| PostError { posted, source })?;
                self.counters.recvs += 1;
            }
            return Ok(());
        }
        let room = recvs.rows.len().min(attached.recvs().room());
        let mut done = 0;
        for list in recvs.first(room).rows.chunks(BATCH) {
            let head = self.lists.recvs(Recvs { rows: list, ..recvs }, attached.wr_ids());
            let mut bad = std::ptr::null_mut();
            // SAFETY: the QP lives with its connection, the list and its SGEs in `lists` until the
            // call returns; providers copy them. The device checks the memory itself, by key.
            let rc = unsafe { (self.calls.post_recv)(attached.qp(), head, &raw mut bad) };
            let taken = taken(rc, head, bad, list.len());
            self.counters.recvs += wide64(taken);
            attached.recvs().post(taken);
            done += taken;
            if rc != 0 {
                return Err(PostError { posted: done, source: errno(rc) });
            }
        }
        if room < recvs.rows.len() { Err(PostError::full(done)) } else { Ok(()) }
    }

    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError> {
        if wrs.is_empty() {
            return Ok(());
        }
        let Some(attached) = self.qps.get_mut(qp) else { return Err(PostError::invalid(0)) };
        self.counters.send_doorbells += 1;
        if attached.is_dead() {
            return attached.flush_sends(wrs, &mut self.late, &mut self.counters);
        }
        let shape = attached.shape();
        let room = attached.sends().room();
        // Up to the first one that the QP does not take.
        let good = wrs.iter().position(|wr| !shape.takes(wr)).unwrap_or(wrs.len());
        let mut done = 0;
        for list in wrs[..good.min(room)].chunks(BATCH) {
            let (inline, pd) = (&mut self.inline, attached.pd());
            let head = self.lists.sends(list, attached.wr_ids(), |wr| {
                shape.may_inline(wr) && wr.sges.as_slice().iter().all(|sge| inline.hold(pd, sge))
            });
            let mut bad = std::ptr::null_mut();
            // SAFETY: the QP lives with its connection, the list and its SGEs in `lists` until the
            // call returns; providers copy them. The device checks memory, by key. The provider
            // itself reads the memory of inline WRs: that memory is checked and held.
            let rc = unsafe { (self.calls.post_send)(attached.qp(), head, &raw mut bad) };
            self.inline.release();
            let taken = taken(rc, head, bad, list.len());
            list[..taken].iter().for_each(|wr| self.counters.count_send(wr));
            attached.sends().post(&list[..taken]);
            done += taken;
            if rc != 0 {
                if bad.is_null() {
                    // The doorbell failed after the WRs were written: only a flush returns them.
                    attached.fail();
                }
                return Err(PostError { posted: done, source: errno(rc) });
            }
        }
        self.refuse_sends(qp, wrs, done, room <= done)
    }

    fn poll(&mut self, out: &mut [Completion]) -> Result<usize> {
        let mut filled = self.drain_cq(out)?;
        while filled < out.len() {
            let Some((completion, generation)) = self.late.pop() else { break };
            if self.qps.book(&completion, generation) {
                out[filled] = completion;
                filled += 1;
            }
        }
        self.counters.completions += wide64(filled);
        Ok(filled)
    }

    fn arm(&mut self) -> Result<()> {
        let asked = self.events.arm(&self.queue, &self.calls)?;
        self.counters.arms += u64::from(asked);
        Ok(())
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.queue.event_fd()), None]
    }

    fn clear_event(&mut self) {
        let taken = self.events.take(&self.queue);
        self.counters.events += u64::from(taken);
    }

    fn fail(&mut self, qp: QpIndex) {
        if let Some(attached) = self.qps.get_mut(qp) {
            attached.fail();
        }
    }

    fn counters(&self) -> PollerCounters {
        self.counters
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        // Destroying the CQ waits for this.
        self.events.acknowledge(&self.queue);
    }
}

/// Post calls return an errno; some providers a negative one.
fn errno(rc: i32) -> io::Error {
    io::Error::from_raw_os_error(rc.saturating_abs())
}

/// How many WRs of a list were taken: all before `bad`; all of them when the provider names none.
fn taken<T>(rc: i32, head: *mut T, bad: *mut T, count: usize) -> usize {
    if rc == 0 || bad.is_null() {
        return count;
    }
    ((bad as usize).wrapping_sub(head as usize) / size_of::<T>()).min(count)
}
