//! [`Poller`]: the data path. One CQ, its QPs, and preallocated WR lists.
//!
//! Rules kept here:
//!
//! - A batch is posted as linked lists of at most [`BATCH`] WRs, one provider call and so one
//!   doorbell each. Nothing allocates after [`attach`](crate::Poller::attach); nothing logs or
//!   locks.
//! - Queues hold what was asked for and not what the provider rounded it up to, so that the CQ,
//!   sized by what was asked for, cannot overrun: a caller who miscounts gets ENOMEM. A QP has its
//!   room in the CQ from [`attach`](crate::Poller::attach) until it is destroyed and the CQ was
//!   found empty after that, not until [`detach`](crate::Poller::detach): its flushes may come as
//!   long as it lives.
//! - An empty message completes with [`WcStatus::LocalLength`] and kills its QP, as a bad WR does
//!   in hardware; the devices themselves differ, and some lose it.
//! - **Arming.** An armed CQ stays armed until it gives its one event, so
//!   [`arm`](crate::Poller::arm) asks the device only when the last event was taken since. An event
//!   that nobody took keeps the descriptor readable: the sleep that would miss it ends at once.
//! - Each index has a generation that changes at detach: completions of an earlier QP are dropped.
//!   (Most providers remove them from the CQ when the QP is destroyed; Soft-RoCE does not.)
//! - **Dead QPs.** A QP is known dead here after its first failed completion or
//!   [`fail`](crate::Poller::fail). Posting to it then goes no further than a list of ours, from
//!   which [`poll`](crate::Poller::poll) returns a flush once the CQ is empty. Hardware would do
//!   the same, but the software devices do not flush what is posted late: rxe looks at its receive
//!   queue, and siw at both queues, only when the state changes.
//! - That leaves WRs posted after the QP died and before its first flush was polled. To catch them
//!   the QP is moved to the error state once more when it is found dead, which makes rxe look
//!   again. siw does not: there a late WR may never complete. So nobody may wait for the flush of a
//!   dead QP: detaching and destroying it end all of it, and a flush says nothing of what the
//!   device still does.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem::{self, size_of};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

use super::completion_queue::CompletionQueue;
use super::ffi;
use super::inline_source::InlineSources;
use super::queue_pair::{self, Connection};
use super::work_completion::{completion, pack_wr_id};
use super::work_queue::{RecvQueue, SendQueue};
use crate::device::{AcceptParams, ConnectionHello, DeviceCaps, PollerCounters};
use crate::error::{FabricError, PostError, Result};
use crate::work::{Completion, MAX_SGE, QpIndex, RecvWr, SendOp, SendWr, WcOpcode, WcStatus, WrId};

/// WRs of one list, and completions of one `ibv_poll_cq`.
const BATCH: usize = 64;

type PostSend = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_send_wr,
    *mut *mut ffi::ibv_send_wr,
) -> i32;
type PostRecv = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_recv_wr,
    *mut *mut ffi::ibv_recv_wr,
) -> i32;
type PollCq = unsafe extern "C" fn(*mut ffi::ibv_cq, i32, *mut ffi::ibv_wc) -> i32;
type ReqNotify = unsafe extern "C" fn(*mut ffi::ibv_cq, i32) -> i32;

/// A data thread's CQ and QPs.
pub struct Poller {
    // Before `queue`: QPs go first.
    slots: Vec<Slot>,
    // CQ entries that QPs may fill which are not destroyed, or were after the CQ was found empty
    // last.
    reserved: u64,
    // What the CQ says it released, as far as it is taken off `reserved`.
    returned: u64,
    // Flushes of WRs that were posted to dead QPs, with their generation. Never grows.
    late: VecDeque<(Completion, u8)>,
    lists: Box<Lists>,
    inline: InlineSources,
    post_send: PostSend,
    post_recv: PostRecv,
    poll_cq: PollCq,
    req_notify: ReqNotify,
    unacknowledged: u32,
    // Asked for an event, and none was taken since.
    armed: bool,
    counters: PollerCounters,
    queue: Arc<CompletionQueue>,
}

/// Scratch for provider calls, written before each use. The lists point into themselves, so the box
/// is never moved out of.
struct Lists {
    sends: [ffi::ibv_send_wr; BATCH],
    recvs: [ffi::ibv_recv_wr; BATCH],
    sges: [[ffi::ibv_sge; MAX_SGE]; BATCH],
    completions: [ffi::ibv_wc; BATCH],
}

#[derive(Debug, Default)]
struct Slot {
    generation: u8,
    attached: Option<Attached>,
}

#[derive(Debug)]
struct Attached {
    connection: Connection,
    dead: bool,
    failed: bool,
    sends: SendQueue,
    recvs: RecvQueue,
}

// SAFETY: the raw pointers inside are to the poller's own lists and to verbs objects, which may be
// used from any thread, one at a time here.
unsafe impl Send for Poller {}

impl fmt::Debug for Poller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller")
            .field("queue", &self.queue)
            .field("slots", &self.slots)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl Poller {
    pub(super) fn new(queue: Arc<CompletionQueue>) -> Result<Self> {
        let missing = |call| FabricError::Call { call, source: io::ErrorKind::Unsupported.into() };
        // SAFETY: the context is open while the CQ lives.
        let ops = unsafe { &(*queue.device().context()).ops };
        let late = usize::try_from(queue.entries()).unwrap_or(usize::MAX);
        Ok(Self {
            slots: Vec::new(),
            reserved: 0,
            returned: 0,
            late: VecDeque::with_capacity(late),
            // SAFETY: integers, null pointers and plain unions: all-zero is a value of each.
            lists: Box::new(unsafe { mem::zeroed::<Lists>() }),
            inline: InlineSources::new(),
            post_send: ops.post_send.ok_or_else(|| missing("ibv_post_send"))?,
            post_recv: ops.post_recv.ok_or_else(|| missing("ibv_post_recv"))?,
            poll_cq: ops.poll_cq.ok_or_else(|| missing("ibv_poll_cq"))?,
            req_notify: ops.req_notify_cq.ok_or_else(|| missing("ibv_req_notify_cq"))?,
            unacknowledged: 0,
            armed: false,
            counters: PollerCounters::default(),
            queue,
        })
    }

    fn broken() -> FabricError {
        FabricError::Call {
            call: "completion queue (overrun, or the device is gone)",
            source: io::Error::from_raw_os_error(libc::EIO),
        }
    }

    /// Takes a WR that no device will complete: we do.
    fn complete_late(
        &mut self,
        qp: QpIndex,
        generation: u8,
        id: WrId,
        status: WcStatus,
    ) -> io::Result<()> {
        if self.late.len() == self.late.capacity() {
            return Err(full());
        }
        let id = WrId(id.0 & WrId::MASK);
        let completion = Completion { qp, id, status, ..Completion::default() };
        self.late.push_back((completion, generation));
        Ok(())
    }

    /// Posts to a QP that is dead.
    fn send_dead(
        &mut self,
        qp: QpIndex,
        generation: u8,
        shape: &Shape,
        wrs: &[SendWr],
    ) -> std::result::Result<(), PostError> {
        for (posted, wr) in wrs.iter().enumerate() {
            let status = match wr.sges.total_bytes() {
                0 => WcStatus::LocalLength,
                _ if shape.takes(wr) => WcStatus::Flushed,
                _ => return Err(PostError { posted, source: invalid() }),
            };
            self.complete_late(qp, generation, wr.id, status)
                .map_err(|source| PostError { posted, source })?;
            self.count_sends(&wrs[posted..=posted]);
        }
        Ok(())
    }

    fn note_death(&mut self, qp: QpIndex) {
        let slot = self.slots.get_mut(usize::from(qp.0));
        if let Some(attached) = slot.and_then(|slot| slot.attached.as_mut())
            && !attached.dead
        {
            attached.dead = true;
            // SAFETY: the QP lives as long as its connection.
            unsafe { queue_pair::move_to_error(attached.connection.qp()) };
        }
    }

    /// Whether the completion is of the QP that has the index now; notes deaths and frees queue
    /// entries.
    fn admit(&mut self, completion: &Completion, generation: u8) -> bool {
        let Some(slot) = self.slots.get_mut(usize::from(completion.qp.0)) else { return false };
        if slot.generation != generation {
            return false;
        }
        let Some(attached) = slot.attached.as_mut() else { return false };
        match (completion.status, completion.opcode) {
            // The opcode is undefined, and the queues no longer matter.
            (status, _) if status != WcStatus::Success => self.note_death(completion.qp),
            (_, WcOpcode::Recv | WcOpcode::RecvWithImm) => attached.recvs.complete(),
            _ => attached.sends.complete(),
        }
        true
    }

    fn acknowledge(&mut self) {
        if self.unacknowledged > 0 {
            // SAFETY: so many events of this CQ were taken and not acknowledged.
            unsafe { ffi::ibv_ack_cq_events(self.queue.raw(), self.unacknowledged) };
            self.unacknowledged = 0;
        }
    }

    fn count_sends(&mut self, wrs: &[SendWr]) {
        for wr in wrs {
            match wr.op {
                SendOp::Send => self.counters.sends += 1,
                SendOp::Write(_) => self.counters.writes += 1,
                SendOp::WriteWithImm(..) => self.counters.writes_with_imm += 1,
                SendOp::Read(_) => self.counters.reads += 1,
            }
            self.counters.signaled += u64::from(wr.signaled);
        }
    }
}

impl crate::Poller for Poller {
    fn caps(&self) -> &DeviceCaps {
        self.queue.device().caps()
    }

    fn attach(&mut self, connection: crate::Connection) -> Result<QpIndex> {
        let crate::Connection::Verbs(mut connection) = connection else {
            return Err(FabricError::Mixed("a connection of another provider was attached"));
        };
        if !Arc::ptr_eq(connection.queue(), &self.queue) {
            return Err(FabricError::Mixed(
                "a queue pair was attached to a poller it was not made for",
            ));
        }
        let limit = |what, limit: u64, asked: u64| FabricError::Limit {
            device: self.caps().name.clone(),
            what,
            limit,
            asked,
        };
        let reserved = self.reserved + connection.room().wanted();
        if reserved > self.queue.entries().into() {
            return Err(limit(
                "entries of this completion queue",
                self.queue.entries().into(),
                reserved,
            ));
        }
        let free = self.slots.iter().position(|slot| slot.attached.is_none());
        let place = free.unwrap_or(self.slots.len());
        let Ok(index) = u16::try_from(place) else {
            let most = u64::from(u16::MAX) + 1;
            return Err(limit("queue pairs of a poller", most, most + 1));
        };
        if place == self.slots.len() {
            self.slots.push(Slot::default());
        }
        connection.room().take();
        let limits = connection.limits();
        self.slots[place].attached = Some(Attached {
            connection,
            dead: false,
            failed: false,
            sends: SendQueue::new(limits.send_wrs),
            recvs: RecvQueue::new(limits.recv_wrs),
        });
        self.reserved = reserved;
        Ok(QpIndex(index))
    }

    fn accept(&mut self, qp: QpIndex, params: &AcceptParams) -> Result<()> {
        if params.hello.0.len() > ConnectionHello::REPLY_MAX {
            return Err(FabricError::Limit {
                device: self.caps().name.clone(),
                what: "bytes of hello in a connection reply",
                limit: ConnectionHello::REPLY_MAX as u64,
                asked: params.hello.0.len() as u64,
            });
        }
        let slot = self.slots.get_mut(usize::from(qp.0)).and_then(|slot| slot.attached.as_mut());
        let Some(attached) = slot else {
            return Err(FabricError::Call { call: "rdma_accept", source: invalid() });
        };
        attached.connection.accept(&params.hello.0, params.reads_out, params.reads_in)
    }

    fn post_recv(&mut self, qp: QpIndex, wrs: &[RecvWr]) -> std::result::Result<(), PostError> {
        if wrs.is_empty() {
            return Ok(());
        }
        let place = usize::from(qp.0);
        let Some(Slot { generation, attached: Some(attached) }) = self.slots.get(place) else {
            return Err(PostError { posted: 0, source: invalid() });
        };
        let (generation, dead, raw) = (*generation, attached.dead, attached.connection.qp());
        self.counters.recv_doorbells += 1;
        if dead {
            for (posted, wr) in wrs.iter().enumerate() {
                self.complete_late(qp, generation, wr.id, WcStatus::Flushed)
                    .map_err(|source| PostError { posted, source })?;
                self.counters.recvs += 1;
            }
            return Ok(());
        }
        let room = wrs.len().min(attached.recvs.room());
        let mut done = 0;
        for chunk in wrs[..room].chunks(BATCH) {
            let head = self.lists.recvs.as_mut_ptr();
            for (i, wr) in chunk.iter().enumerate() {
                let last = i + 1 == chunk.len();
                let sge = &mut self.lists.sges[i];
                sge[0] = raw_sge(&wr.sge);
                // SAFETY: `head` and the index are inside the array, which the box keeps in place.
                unsafe {
                    *head.add(i) = ffi::ibv_recv_wr {
                        wr_id: pack_wr_id(qp, generation, wr.id),
                        next: if last { ptr::null_mut() } else { head.add(i + 1) },
                        sg_list: sge.as_mut_ptr(),
                        // A RECV for WRITE_WITH_IMM alone needs no memory.
                        num_sge: i32::from(wr.sge.len > 0),
                    };
                }
            }
            let mut bad = ptr::null_mut();
            // SAFETY: the QP lives with its connection, the list and its SGEs in `lists` until the
            // call returns; providers copy them. The memory itself is checked by the device, by
            // key.
            let rc = unsafe { (self.post_recv)(raw, head, &raw mut bad) };
            let taken = taken(rc, head, bad, chunk.len());
            self.counters.recvs += taken as u64;
            if let Some(attached) = self.slots[place].attached.as_mut() {
                attached.recvs.post(taken);
            }
            done += taken;
            if rc != 0 {
                return Err(PostError { posted: done, source: errno(rc) });
            }
        }
        if room < wrs.len() { Err(PostError { posted: done, source: full() }) } else { Ok(()) }
    }

    fn post_send(&mut self, qp: QpIndex, wrs: &[SendWr]) -> std::result::Result<(), PostError> {
        if wrs.is_empty() {
            return Ok(());
        }
        let place = usize::from(qp.0);
        let Some(Slot { generation, attached: Some(attached) }) = self.slots.get(place) else {
            return Err(PostError { posted: 0, source: invalid() });
        };
        let (generation, dead, raw) = (*generation, attached.dead, attached.connection.qp());
        let shape = Shape {
            sges: attached.connection.limits().send_sges as usize,
            read_sges: attached.connection.read_sges() as usize,
            inline: attached.connection.max_inline().into(),
        };
        let room = attached.sends.room();
        self.counters.send_doorbells += 1;
        if dead {
            return self.send_dead(qp, generation, &shape, wrs);
        }
        // Up to the first one that cannot be taken.
        let good = wrs.iter().position(|wr| !shape.takes(wr)).unwrap_or(wrs.len());
        let mut done = 0;
        for list in wrs[..good.min(room)].chunks(BATCH) {
            let head = self.lists.sends.as_mut_ptr();
            for (i, wr) in list.iter().enumerate() {
                // SAFETY: the index is inside the array, which the box keeps in place, or one past
                // it.
                let next = unsafe { head.add(i + 1) };
                let next = if i + 1 == list.len() { ptr::null_mut() } else { next };
                let sges = &mut self.lists.sges[i];
                // SAFETY: the index is inside the array.
                let target = unsafe { &mut *head.add(i) };
                write_wr(wr, pack_wr_id(qp, generation, wr.id), next, sges, target);
                if shape.may_inline(wr)
                    && wr.sges.as_slice().iter().all(|s| self.inline.hold(self.queue.pd(), s))
                {
                    target.send_flags |= ffi::ibv_send_flags::IBV_SEND_INLINE.0;
                }
            }
            let mut bad = ptr::null_mut();
            // SAFETY: the QP lives with its connection, the list and its SGEs in `lists` until the
            // call returns; providers copy them. Memory is checked by the device, by key; of inline
            // WRs, which the provider reads itself, the memory is checked and held.
            let rc = unsafe { (self.post_send)(raw, head, &raw mut bad) };
            self.inline.release();
            let taken = taken(rc, head, bad, list.len());
            self.count_sends(&list[..taken]);
            if let Some(attached) = self.slots[place].attached.as_mut() {
                attached.sends.post(&list[..taken]);
            }
            done += taken;
            if rc != 0 {
                if bad.is_null() {
                    // The doorbell failed after the WRs were written: only a flush gets them back.
                    self.fail(qp);
                }
                return Err(PostError { posted: done, source: errno(rc) });
            }
        }
        let rest = &wrs[done..];
        match rest.first() {
            None => Ok(()),
            Some(_) if room <= done => Err(PostError { posted: done, source: full() }),
            Some(first) if first.sges.total_bytes() == 0 => {
                // An empty message: fails as hardware fails a WR, and takes the QP with it.
                self.note_death(qp);
                self.send_dead(qp, generation, &shape, rest)
                    .map_err(|e| PostError { posted: done + e.posted, ..e })
            }
            Some(_) => Err(PostError { posted: done, source: invalid() }),
        }
    }

    fn poll(&mut self, out: &mut [Completion]) -> Result<usize> {
        let mut filled = 0;
        let released = self.queue.released();
        while filled < out.len() {
            if self.queue.is_broken() {
                return if filled > 0 { Ok(filled) } else { Err(Self::broken()) };
            }
            let room = (out.len() - filled).min(BATCH);
            // SAFETY: the array has BATCH entries, `room` is at most that, and the CQ lives.
            let found = unsafe {
                (self.poll_cq)(
                    self.queue.raw(),
                    i32::try_from(room).unwrap_or(0),
                    self.lists.completions.as_mut_ptr(),
                )
            };
            let Ok(found) = usize::try_from(found) else {
                self.queue.mark_broken();
                continue;
            };
            for i in 0..found.min(room) {
                let (completion, generation) = completion(&self.lists.completions[i]);
                if self.admit(&completion, generation) {
                    out[filled] = completion;
                    filled += 1;
                }
            }
            if found < room {
                // Empty: nothing of what was destroyed before is left in it.
                self.reserved -= released - self.returned;
                self.returned = released;
                break;
            }
        }
        while filled < out.len() {
            let Some((completion, generation)) = self.late.pop_front() else { break };
            if self.admit(&completion, generation) {
                out[filled] = completion;
                filled += 1;
            }
        }
        self.counters.completions += filled as u64;
        Ok(filled)
    }

    fn arm(&mut self) -> Result<()> {
        if !self.armed {
            // SAFETY: the CQ lives.
            let rc = unsafe { (self.req_notify)(self.queue.raw(), 0) };
            if rc != 0 {
                return Err(Self::broken());
            }
            self.armed = true;
            self.counters.arms += 1;
        }
        if self.queue.is_broken() { Err(Self::broken()) } else { Ok(()) }
    }

    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [Some(self.queue.event_fd()), None]
    }

    fn clear_event(&mut self) {
        // An armed CQ gives one event, and the channel has no other CQ: a second read would only
        // say so. Whatever the first says, the next sleep arms anew.
        self.armed = false;
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: channel and its only CQ live; the descriptor is nonblocking.
        let rc =
            unsafe { ffi::ibv_get_cq_event(self.queue.channel(), &raw mut cq, &raw mut context) };
        // EAGAIN is no event; anything else shows at the next poll.
        if rc == 0 {
            self.unacknowledged += 1;
            self.counters.events += 1;
        }
        // An acknowledgement takes a mutex of libibverbs, so they are saved up.
        if self.unacknowledged >= 64 {
            self.acknowledge();
        }
    }

    fn fail(&mut self, qp: QpIndex) {
        let slot = self.slots.get_mut(usize::from(qp.0));
        if let Some(attached) = slot.and_then(|slot| slot.attached.as_mut())
            && !attached.failed
        {
            (attached.failed, attached.dead) = (true, true);
            attached.connection.fail();
        }
    }

    fn detach(&mut self, qp: QpIndex) -> Option<crate::Connection> {
        let slot = self.slots.get_mut(usize::from(qp.0))?;
        let attached = slot.attached.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        Some(crate::Connection::Verbs(attached.connection))
    }

    fn counters(&self) -> PollerCounters {
        self.counters
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        // Destroying the CQ waits for this.
        self.acknowledge();
    }
}

/// The queue is full.
fn full() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOMEM)
}

fn invalid() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
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

fn raw_sge(sge: &crate::work::Sge) -> ffi::ibv_sge {
    ffi::ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey.0 }
}

/// What a QP takes.
struct Shape {
    sges: usize,
    read_sges: usize,
    inline: u64,
}

impl Shape {
    fn takes(&self, wr: &SendWr) -> bool {
        let most = if matches!(wr.op, SendOp::Read(_)) { self.read_sges } else { self.sges };
        // Empty entries are left out below: some devices take a length of 0 for 2^31.
        let used = wr.sges.as_slice().iter().filter(|sge| sge.len > 0).count();
        (1..=most).contains(&used)
    }

    fn may_inline(&self, wr: &SendWr) -> bool {
        wr.inline && !matches!(wr.op, SendOp::Read(_)) && wr.sges.total_bytes() <= self.inline
    }
}

/// Writes one WR of a list.
fn write_wr(
    wr: &SendWr,
    wr_id: u64,
    next: *mut ffi::ibv_send_wr,
    sges: &mut [ffi::ibv_sge; MAX_SGE],
    target: &mut ffi::ibv_send_wr,
) {
    let mut used = 0;
    for sge in wr.sges.as_slice().iter().filter(|sge| sge.len > 0) {
        sges[used] = raw_sge(sge);
        used += 1;
    }
    // SAFETY: integers, null pointers and plain unions: all-zero is a value.
    *target = unsafe { mem::zeroed() };
    (target.wr_id, target.next) = (wr_id, next);
    target.sg_list = sges.as_mut_ptr();
    target.num_sge = i32::try_from(used).unwrap_or(0);
    if wr.signaled {
        target.send_flags |= ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    let remote = match wr.op {
        SendOp::Send => {
            target.opcode = ffi::ibv_wr_opcode::IBV_WR_SEND;
            None
        }
        SendOp::Write(remote) => {
            target.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            Some(remote)
        }
        SendOp::WriteWithImm(remote, imm) => {
            target.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            target.__bindgen_anon_1.imm_data = imm.to_be();
            Some(remote)
        }
        SendOp::Read(remote) => {
            target.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_READ;
            Some(remote)
        }
    };
    if let Some(remote) = remote {
        target.wr.rdma.remote_addr = remote.addr;
        target.wr.rdma.rkey = remote.rkey.0;
    }
}
