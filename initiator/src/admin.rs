//! [`AdminChannel`]: the admin connection of a session, driven by control.
//!
//! One command at a time, plus a parked ASYNC_EVENT and a KEEP_ALIVE. Every wait has a deadline;
//! after an error the channel is dead and the session must be connected anew.
//!
//! The target may take its time for a command, a LOGIN that waits for the end of an older epoch
//! above all. With a [`Pulse`] that is no reason to be late with a loss: its data thread answers
//! KEEP_ALIVEs meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{
    Access, Completion, Connection, MemoryRegion, PageKind, Poller, ProtectionDomain, QpIndex,
    QpLimits, Readiness, RecvWr, Region, SendCredits, SendOp, SendWr, SgeList, WcOpcode, WcStatus,
    WrId,
};
use rblk_protocol::limits::{ADMIN_DEPTH, COMMAND_BYTES, RESPONSE_BYTES};
use rblk_protocol::{
    AsyncEvent, CommandCapsule, Epoch, HelloAccept, KeyedDescriptor, Lba, Opcode, QueueDepth,
    ResponseCapsule, Sequence, Status, Tag, VolumeHandle,
};

use crate::alarm::Alarm;
use crate::error::SessionError;
use crate::lull::Lull;

const CAPSULE_STRIDE: usize = 512;
const RECV_SLOTS: u16 = ADMIN_DEPTH + 3;
/// Largest reply of one command.
pub const REPLY_BYTES: usize = 4096;
#[allow(clippy::cast_possible_truncation)] // a constant of 16
const RESPONSE_LEN: u32 = RESPONSE_BYTES as u32;
#[allow(clippy::cast_possible_truncation)] // a constant of 4096
const REPLY_LEN: u32 = REPLY_BYTES as u32;
const RECV_AT: usize = CAPSULE_STRIDE * 3;
const CALL_TAG: Tag = Tag(0);
const EVENT_TAG: Tag = Tag(1);
const BEAT_TAG: Tag = Tag(2);

/// How often a session proves that its target lives, and how long the target may take to answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pulse {
    /// Between an answer and the next question.
    pub period: Duration,
    /// The same for a disk that nobody uses: see [`Lull`].
    pub idle_period: Duration,
    /// Between a question and its answer.
    pub timeout: Duration,
}

impl Pulse {
    /// One that sees a loss within `detect`: an eighth is left for a thread that is woken late. Of
    /// a disk that nobody uses, within three times that; a target waits for four times that.
    #[must_use]
    pub fn of(detect: Duration) -> Self {
        Self { period: detect / 4, idle_period: detect * 2, timeout: detect * 5 / 8 }
    }
}

/// An admin connection.
#[derive(Debug)]
pub struct AdminChannel {
    // A duplicate of the poller's descriptor.
    readiness: Readiness,
    // Of the next beat, or of the answer to the last.
    alarm: Alarm,
    poller: Box<dyn Poller>,
    qp: QpIndex,
    credits: SendCredits,
    // Lent to the device until the QP is destroyed, which may be later than this value's end.
    slots: Arc<MemoryRegion>,
    replies: Arc<MemoryRegion>,
    epoch: Epoch,
    depth: QueueDepth,
    sequence: Sequence,
    parked: Option<Sequence>,
    // A KEEP_ALIVE under way, and since when.
    beat: Option<(Sequence, Instant)>,
    last_beat: Instant,
    lull: Lull,
    pulse: Option<Pulse>,
    event: Option<Option<AsyncEvent>>,
    // The target drains: it answers every ASYNC_EVENT at once, and has nothing more to say.
    drains: bool,
}

/// An answer to an admin command.
#[derive(Debug)]
pub struct Reply {
    /// Outcome.
    pub status: Status,
    /// Value of the response.
    pub value: u32,
    /// What the target wrote, as far as the caller's length.
    pub payload: Vec<u8>,
}

impl AdminChannel {
    /// Sizes of the QP.
    #[must_use]
    pub fn qp_limits() -> QpLimits {
        QpLimits {
            send_wrs: 33,
            recv_wrs: u32::from(RECV_SLOTS),
            send_sges: 1,
            inline_bytes: 0,
            reads_out: 0,
            reads_in: 0,
        }
    }

    /// Takes a connected QP.
    ///
    /// # Errors
    /// Memory cannot be registered, or posting fails.
    pub fn new(
        pd: &ProtectionDomain,
        mut poller: Box<dyn Poller>,
        connection: Connection,
        accept: &HelloAccept,
        epoch: Epoch,
    ) -> Result<Self, SessionError> {
        let region = |bytes| {
            Region::allocate(bytes, PageKind::Normal)
                .map_err(|e| SessionError::Memory(e.to_string()))
        };
        let slots = pd.register(
            &region(RECV_AT + usize::from(RECV_SLOTS) * RESPONSE_BYTES)?,
            Access::LOCAL_WRITE,
        )?;
        let remote = Access { local_write: true, remote_write: true, remote_read: false };
        let replies = pd.register(&region(REPLY_BYTES)?, remote)?;
        let qp = poller.attach(connection)?;
        let readiness = Readiness::new(poller.event_fds()).map_err(|source| {
            SessionError::System { what: "watching the admin connection", source }
        })?;
        let alarm = Alarm::new()
            .map_err(|source| SessionError::System { what: "a timer of the session", source })?;
        let mut channel = Self {
            readiness,
            alarm,
            poller,
            qp,
            credits: SendCredits::new(32, 8),
            slots: Arc::new(slots),
            replies: Arc::new(replies),
            epoch,
            depth: accept.depth,
            sequence: Sequence(0),
            parked: None,
            beat: None,
            last_beat: Instant::now(),
            lull: Lull::new(Instant::now()),
            pulse: None,
            event: None,
            drains: false,
        };
        for slot in 0..RECV_SLOTS {
            channel.post_recv(slot)?;
        }
        Ok(channel)
    }

    /// From now on a command that lasts does not hide a loss: [`Self::call`] keeps this pulse while
    /// it waits.
    pub fn set_pulse(&mut self, pulse: Pulse) {
        self.pulse = Some(pulse);
    }

    fn post_recv(&mut self, slot: u16) -> Result<(), SessionError> {
        let sge = self.slots.sge(RECV_AT + usize::from(slot) * RESPONSE_BYTES, RESPONSE_LEN);
        let Some(sge) = sge else { return Err(SessionError::Protocol("receive slot")) };
        let wr = RecvWr { id: WrId(u64::from(slot)), sge };
        self.poller.post_recv(self.qp, &[wr]).map_err(|e| SessionError::Lost(e.to_string()))
    }

    fn post_command(
        &mut self,
        command: &mut CommandCapsule,
        body: &[u8],
        at: usize,
    ) -> Result<(), SessionError> {
        command.in_capsule_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let bytes = COMMAND_BYTES + body.len();
        if bytes > CAPSULE_STRIDE || self.credits.available() == 0 {
            return Err(SessionError::Protocol("admin command too long or too many"));
        }
        self.slots.region().write(at, &command.to_wire());
        self.slots.region().write(at + COMMAND_BYTES, body);
        let sge = self.slots.sge(at, u32::try_from(bytes).unwrap_or(u32::MAX));
        let Some(sge) = sge else { return Err(SessionError::Protocol("capsule slot")) };
        let signaled = self.credits.wants_signal();
        self.credits.take(signaled);
        let wr = SendWr {
            id: WrId(1 << 16),
            op: SendOp::Send,
            sges: SgeList::one(sge),
            signaled,
            inline: false,
        };
        self.poller.post_send(self.qp, &[wr]).map_err(|e| SessionError::Lost(e.to_string()))
    }

    /// Sends a command and waits for its answer, with KEEP_ALIVEs meanwhile if a
    /// [pulse](Self::set_pulse) is set.
    ///
    /// # Errors
    /// The connection died, the target did not answer in time (the command, or a KEEP_ALIVE), or
    /// broke a rule. A status other than OK is no error here.
    pub async fn call(
        &mut self,
        opcode: Opcode,
        volume: VolumeHandle,
        index: u64,
        body: &[u8],
        timeout: Duration,
    ) -> Result<Reply, SessionError> {
        self.sequence = self.sequence.next();
        let sequence = self.sequence;
        let mut command = CommandCapsule::new(opcode, CALL_TAG, self.epoch, sequence);
        command.volume = volume;
        command.lba = Lba(index);
        let wants_reply =
            matches!(opcode, Opcode::Login | Opcode::ListVolumes | Opcode::OpenVolume);
        if wants_reply {
            self.replies.region().zero(0, REPLY_BYTES);
            let remote = self.replies.remote(0);
            command.buffer = Some(KeyedDescriptor {
                address: remote.addr,
                length: REPLY_LEN,
                rkey: remote.rkey.0,
            });
        }
        self.post_command(&mut command, body, 0)?;
        let begun = Instant::now();
        let deadline = begun + timeout;
        // Only a command that lasts needs a pulse. Nobody looked after it since the last one.
        self.last_beat = self.last_beat.max(begun);
        let mut armed = false;
        loop {
            let now = Instant::now();
            if let Some(response) = self.next_response(now)? {
                if response.tag != CALL_TAG || !response.answers(sequence) {
                    return Err(SessionError::Protocol("an answer to a command that was not sent"));
                }
                let mut payload = Vec::new();
                if wants_reply {
                    payload.resize(REPLY_BYTES, 0);
                    self.replies.region().read(0, &mut payload);
                }
                return Ok(Reply { status: response.status, value: response.value, payload });
            }
            let due = match self.pulse {
                Some(pulse) => match self.keep_beat(pulse, pulse.period, now)? {
                    Some(due) => due.min(deadline),
                    None => {
                        armed = false;
                        continue;
                    }
                },
                None => deadline,
            };
            // A completion between the last look and arming raises no event: look once more after
            // it.
            if armed {
                if Instant::now() >= deadline {
                    return Err(SessionError::TimedOut { what: opcode });
                }
                self.sleep(due).await?;
            } else {
                self.poller.arm()?;
            }
            armed = !armed;
        }
    }

    /// Keeps the session alive and waits for the next event of the target, for ever: a KEEP_ALIVE
    /// every `pulse.period`, which must be answered within `pulse.timeout`. Cancel safe: what is
    /// under way is kept.
    ///
    /// # Errors
    /// The connection died, the target's data thread does not answer, or it broke a rule.
    pub async fn event(&mut self, pulse: Pulse) -> Result<Option<AsyncEvent>, SessionError> {
        self.event_while(pulse, |_, _| pulse.period).await
    }

    /// As [`Self::event`], and rarer where nobody uses the disk: `ios` tells its I/Os until now.
    ///
    /// # Errors
    /// As of [`Self::event`].
    pub async fn event_of_disk(
        &mut self,
        pulse: Pulse,
        ios: impl Fn() -> u64,
    ) -> Result<Option<AsyncEvent>, SessionError> {
        self.event_while(pulse, |lull, now| lull.period(pulse, ios(), now)).await
    }

    async fn event_while(
        &mut self,
        pulse: Pulse,
        period: impl Fn(&mut Lull, Instant) -> Duration,
    ) -> Result<Option<AsyncEvent>, SessionError> {
        let mut armed = false;
        // The clock is read once each time it wakes: what is done between two sleeps takes no time
        // that matters.
        let mut now = Instant::now();
        loop {
            if self.next_response(now)?.is_some() {
                return Err(SessionError::Protocol("an answer nobody waits for"));
            }
            if let Some(event) = self.event.take() {
                return Ok(event);
            }
            if self.parked.is_none() && !self.drains {
                self.sequence = self.sequence.next();
                let mut command =
                    CommandCapsule::new(Opcode::AsyncEvent, EVENT_TAG, self.epoch, self.sequence);
                self.parked = Some(self.sequence);
                self.post_command(&mut command, &[], CAPSULE_STRIDE)?;
            }
            let period = period(&mut self.lull, now);
            let Some(due) = self.keep_beat(pulse, period, now)? else {
                armed = false;
                continue;
            };
            // A completion between the last look and arming raises no event: look once more after
            // it.
            if armed {
                let woken = tokio::select! {
                    biased;
                    ready = self.readiness.readable() => ready,
                    rang = self.alarm.until(due, now) => rang,
                };
                woken.map_err(|source| SessionError::System {
                    what: "the admin connection",
                    source,
                })?;
                // After the alarm, too: the device may have lost the event.
                self.poller.clear_event();
                now = Instant::now();
            } else {
                self.poller.arm()?;
            }
            armed = !armed;
        }
    }

    /// Sends a KEEP_ALIVE if one is due. Returns when to look again; `None` when one was sent.
    /// Called when everything that came was taken.
    fn keep_beat(
        &mut self,
        pulse: Pulse,
        period: Duration,
        now: Instant,
    ) -> Result<Option<Instant>, SessionError> {
        let due = match self.beat {
            Some((_, since)) => since + pulse.timeout,
            None => self.last_beat + period,
        };
        if now < due {
            return Ok(Some(due));
        }
        if self.beat.is_some() {
            return Err(SessionError::TimedOut { what: Opcode::KeepAlive });
        }
        self.sequence = self.sequence.next();
        let mut command =
            CommandCapsule::new(Opcode::KeepAlive, BEAT_TAG, self.epoch, self.sequence);
        self.beat = Some((self.sequence, now));
        self.post_command(&mut command, &[], 2 * CAPSULE_STRIDE)?;
        Ok(None)
    }

    /// Until something may have come, at the latest until then.
    async fn sleep(&mut self, until: Instant) -> Result<(), SessionError> {
        let left = until.saturating_duration_since(Instant::now());
        // Some devices lose events; a look now and then costs nothing here.
        let nap = Duration::from_millis(100);
        if let Ok(ready) = tokio::time::timeout(left.min(nap), self.readiness.readable()).await {
            ready
                .map_err(|source| SessionError::System { what: "the admin connection", source })?;
        }
        self.poller.clear_event();
        Ok(())
    }

    /// The next response, if one is there. Answers to ASYNC_EVENT are put aside.
    fn next_response(&mut self, now: Instant) -> Result<Option<ResponseCapsule>, SessionError> {
        loop {
            let mut one = [Completion::default(); 1];
            if self.poller.poll(&mut one)? == 0 {
                return Ok(None);
            }
            let [completion] = one;
            if completion.status != WcStatus::Success {
                return Err(SessionError::Lost(format!("{:?}", completion.status)));
            }
            if completion.id.0 >> 16 != 0 {
                self.credits.completed();
                continue;
            }
            let slot = (completion.id.0 & 0xffff) as u16;
            if completion.opcode != WcOpcode::Recv || slot >= RECV_SLOTS {
                return Err(SessionError::Protocol("not a response"));
            }
            let mut bytes = [0; RESPONSE_BYTES];
            self.slots.region().read(RECV_AT + usize::from(slot) * RESPONSE_BYTES, &mut bytes);
            let response =
                ResponseCapsule::from_wire(&bytes, completion.byte_len as usize, self.depth)
                    .map_err(|_| SessionError::Protocol("a response that cannot be parsed"))?;
            self.post_recv(slot)?;
            if response.tag == EVENT_TAG && self.parked.is_some_and(|s| response.answers(s)) {
                self.parked = None;
                if response.status == Status::Ok {
                    let event = AsyncEvent::from_wire(response.value);
                    self.drains |= event == Some(AsyncEvent::Draining);
                    self.event = Some(event);
                }
                continue;
            }
            if response.tag == BEAT_TAG && self.beat.is_some_and(|(s, _)| response.answers(s)) {
                self.beat = None;
                self.last_beat = now;
                continue;
            }
            return Ok(Some(response));
        }
    }

    /// Ends the connection, as dropping it does.
    pub fn close(self) {}
}

impl Drop for AdminChannel {
    fn drop(&mut self) {
        self.poller.fail(self.qp);
        if let Some(connection) = self.poller.detach(self.qp) {
            // Its target may be silent; nothing here waits for the end of the QP but the memory
            // that it was lent.
            connection.retire((Arc::clone(&self.slots), Arc::clone(&self.replies)));
        }
    }
}
