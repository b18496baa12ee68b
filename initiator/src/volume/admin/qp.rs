//! [`AdminQp`]: the QP of an admin connection with its memory: capsules go out, responses come in.
//!
//! ```text
//! slots:   | a capsule for each of four tags | receive slots |
//! replies: | the target's payload for a command | and for a DROP |
//! ```
//!
//! Both are lent to the device until the QP is destroyed, which may be later than the end of this
//! value: dropping it hands them to [`Connection::retire`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{
    Access, Completion, Connection, MemoryRegion, PageKind, Poller, ProtectionDomain, QpIndex,
    QpLimits, Readiness, RecvWr, Region, SendCredits, SendOp, SendWr, SgeList, WcOpcode, WcStatus,
    WrId,
};
use rblk_protocol::limits::{ADMIN_DEPTH, COMMAND_BYTES, RESPONSE_BYTES};
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{CommandCapsule, KeyedDescriptor, QueueDepth, ResponseCapsule, Tag};

use super::alarm::Alarm;
use super::{DROP_TAG, REPLY_BYTES};
use crate::volume::error::SessionError;

const CAPSULE_STRIDE: usize = 512;
const TAGS: usize = 4;
/// Room for the sealed status of a DROP.
const DROP_REPLY_BYTES: usize = 512;
const RECV_SLOTS: u16 = ADMIN_DEPTH + 3;
const RECV_AT: usize = CAPSULE_STRIDE * TAGS;
/// The id of every send WR; receive WRs have the number of their slot.
const SEND: WrId = WrId(1 << 16);
/// Longest sleep: some devices lose events, and a poll now and then costs nothing here.
const NAP: Duration = Duration::from_millis(100);

/// A connected admin QP.
#[derive(Debug)]
pub(super) struct AdminQp {
    // A duplicate of the poller's descriptor.
    readiness: Readiness,
    poller: Box<dyn Poller>,
    qp: QpIndex,
    credits: SendCredits,
    slots: Arc<MemoryRegion>,
    replies: Arc<MemoryRegion>,
    depth: QueueDepth,
}

/// Sizes of the QP.
pub(super) fn limits() -> QpLimits {
    QpLimits {
        send_wrs: 33,
        recv_wrs: u32::from(RECV_SLOTS),
        send_sges: 1,
        recv_sges: 1,
        inline_bytes: 0,
        reads_out: 0,
        reads_in: 0,
    }
}

/// The part of the replies for a tag: its begin and length.
fn reply_place(tag: Tag) -> (usize, usize) {
    if tag == DROP_TAG { (REPLY_BYTES, DROP_REPLY_BYTES) } else { (0, REPLY_BYTES) }
}

fn system(source: std::io::Error) -> SessionError {
    SessionError::System { what: "the admin connection", source }
}

impl AdminQp {
    /// Takes a connected QP, and posts every receive.
    ///
    /// # Errors
    /// Memory cannot be registered, or posting fails.
    pub(super) fn new(
        pd: &ProtectionDomain,
        mut poller: Box<dyn Poller>,
        connection: Connection,
        depth: QueueDepth,
    ) -> Result<Self, SessionError> {
        let region = |bytes| {
            Region::allocate(bytes, PageKind::Normal)
                .map_err(|e| SessionError::Memory(e.to_string()))
        };
        let slots = pd.register(
            &region(RECV_AT + usize::from(RECV_SLOTS) * RESPONSE_BYTES)?,
            Access::LOCAL_WRITE,
        )?;
        let remote = Access { remote_write: true, ..Access::LOCAL_WRITE };
        let replies = pd.register(&region(REPLY_BYTES + DROP_REPLY_BYTES)?, remote)?;
        let qp = poller.attach(connection)?;
        let readiness = Readiness::new(poller.event_fds()).map_err(|source| {
            SessionError::System { what: "watching the admin connection", source }
        })?;
        let mut qp = Self {
            readiness,
            poller,
            qp,
            credits: SendCredits::new(32, 8),
            slots: Arc::new(slots),
            replies: Arc::new(replies),
            depth,
        };
        for slot in 0..RECV_SLOTS {
            qp.post_recv(slot)?;
        }
        Ok(qp)
    }

    fn post_recv(&mut self, slot: u16) -> Result<(), SessionError> {
        let at = RECV_AT + usize::from(slot) * RESPONSE_BYTES;
        let sge = self.slots.sge(at, narrow(RESPONSE_BYTES));
        let Some(sge) = sge else { return Err(SessionError::Protocol("receive slot")) };
        let wr = RecvWr::one(WrId(u64::from(slot)), sge);
        self.poller.post_recv(self.qp, &[wr]).map_err(|e| SessionError::Lost(e.to_string()))
    }

    /// Sends a command with its in-capsule data, from the slot of its tag.
    ///
    /// # Errors
    /// The command is too long, too many are under way, or the connection died.
    pub(super) fn send(
        &mut self,
        command: &mut CommandCapsule,
        body: &[u8],
    ) -> Result<(), SessionError> {
        let bytes = COMMAND_BYTES + body.len();
        if bytes > CAPSULE_STRIDE || self.credits.available() == 0 {
            return Err(SessionError::Protocol("admin command too long or too many"));
        }
        command.in_capsule_bytes = narrow(body.len());
        let at = CAPSULE_STRIDE * command.tag.index();
        self.slots.region().write(at, &command.to_wire());
        self.slots.region().write(at + COMMAND_BYTES, body);
        let Some(sge) = self.slots.sge(at, narrow(bytes)) else {
            return Err(SessionError::Protocol("capsule slot"));
        };
        let signaled = self.credits.wants_signal();
        self.credits.take(signaled);
        let (op, sges) = (SendOp::Send, SgeList::one(sge));
        let wr = SendWr { id: SEND, op, sges, signaled, inline: false };
        self.poller.post_send(self.qp, &[wr]).map_err(|e| SessionError::Lost(e.to_string()))
    }

    /// Clears the memory for the reply to a tag, and names it to the target.
    pub(super) fn reply_buffer(&mut self, tag: Tag) -> KeyedDescriptor {
        let (at, bytes) = reply_place(tag);
        self.replies.region().zero(at, bytes);
        let remote = self.replies.remote(at);
        KeyedDescriptor { address: remote.addr, length: narrow(bytes), rkey: remote.rkey.0 }
    }

    /// The target's payload for the answered command of a tag.
    pub(super) fn reply(&self, tag: Tag) -> Vec<u8> {
        let (at, bytes) = reply_place(tag);
        let mut payload = vec![0; bytes];
        self.replies.region().read(at, &mut payload);
        payload
    }

    /// The next response, if one has arrived.
    ///
    /// # Errors
    /// The connection died, or the target sent an invalid message.
    pub(super) fn poll(&mut self) -> Result<Option<ResponseCapsule>, SessionError> {
        loop {
            let mut one = [Completion::default(); 1];
            if self.poller.poll(&mut one)? == 0 {
                return Ok(None);
            }
            let [completion] = one;
            if completion.status != WcStatus::Success {
                return Err(SessionError::Lost(format!("{:?}", completion.status)));
            }
            if completion.id == SEND {
                self.credits.completed();
                continue;
            }
            let slot = u16::try_from(completion.id.0).ok().filter(|slot| *slot < RECV_SLOTS);
            let (WcOpcode::Recv, Some(slot)) = (completion.opcode, slot) else {
                return Err(SessionError::Protocol("not a response"));
            };
            let mut bytes = [0; RESPONSE_BYTES];
            self.slots.region().read(RECV_AT + usize::from(slot) * RESPONSE_BYTES, &mut bytes);
            let response =
                ResponseCapsule::from_wire(&bytes, wide(completion.byte_len), self.depth)
                    .map_err(|_| SessionError::Protocol("a response that cannot be parsed"))?;
            self.post_recv(slot)?;
            return Ok(Some(response));
        }
    }

    /// Asks for an event at the next completion. A completion between the last poll and this call
    /// raises none: poll once more afterwards.
    ///
    /// # Errors
    /// The device refuses.
    pub(super) fn arm(&mut self) -> Result<(), SessionError> {
        Ok(self.poller.arm()?)
    }

    /// Sleeps until a completion may have arrived, or until the deadline.
    ///
    /// # Errors
    /// The system's.
    pub(super) async fn sleep_until(&mut self, deadline: Instant) -> Result<(), SessionError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if let Ok(ready) = tokio::time::timeout(left.min(NAP), self.readiness.readable()).await {
            ready.map_err(system)?;
        }
        self.poller.clear_event();
        Ok(())
    }

    /// Sleeps until a completion may have arrived, or the alarm rings at `due`.
    ///
    /// # Errors
    /// The system's.
    pub(super) async fn sleep_with(
        &mut self,
        alarm: &mut Alarm,
        due: Instant,
        now: Instant,
    ) -> Result<(), SessionError> {
        let woken = tokio::select! {
            biased;
            ready = self.readiness.readable() => ready,
            rang = alarm.until(due, now) => rang,
        };
        woken.map_err(system)?;
        // Also after the alarm: the device may have lost the event.
        self.poller.clear_event();
        Ok(())
    }
}

impl Drop for AdminQp {
    fn drop(&mut self) {
        self.poller.fail(self.qp);
        if let Some(connection) = self.poller.detach(self.qp) {
            // The target may be silent. Only the memory lent to the QP waits for its end.
            connection.retire((Arc::clone(&self.slots), Arc::clone(&self.replies)));
        }
    }
}

const _: () = assert!(super::LAST_TAG.0 as usize == TAGS - 1, "a capsule slot for each tag");
