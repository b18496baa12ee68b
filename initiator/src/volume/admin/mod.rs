//! [`AdminChannel`]: the admin connection of a session, driven by control.
//!
//! One command at a time, plus one ASYNC_EVENT that the target keeps until it has an event, one
//! KEEP_ALIVE, and one DROP. After an event about changed volumes, one command asks for the
//! volume's new state. Every wait has a deadline. After an error the channel is dead, and the
//! session must be connected anew.
//!
//! The target may take long for a command, above all for a LOGIN that waits for the end of an older
//! epoch. With a [`Pulse`] a loss is still noticed in time: the target's data thread answers
//! KEEP_ALIVEs meanwhile.

mod alarm;
mod drop_call;
mod host_seconds;
mod keep_alive;
mod qp;
mod question;

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use rblk_fabric::{Connection, Poller, ProtectionDomain, QpLimits};
use rblk_protocol::auth::{COMMAND_SEAL_BYTES, InitiatorSeal, SealedReply};
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{
    AsyncEvent, CommandCapsule, Epoch, HelloAccept, Lba, Opcode, ResponseCapsule, Sequence, Status,
    Tag, VolumeHandle,
};

use self::alarm::Alarm;
pub use self::drop_call::DropAnswer;
use self::drop_call::DropCall;
use super::error::SessionError;
use crate::engine::pulse::DiskUse;
pub use crate::engine::pulse::Pulse;
use host_seconds::HostSeconds;
use keep_alive::{KeepAlive, KeepAliveDue};
use qp::AdminQp;
use question::Question;
pub use question::TargetNews;

/// Largest reply of one command.
pub(crate) const REPLY_BYTES: usize = 4096;
const CALL_TAG: Tag = Tag(0);
const EVENT_TAG: Tag = Tag(1);
const KEEP_ALIVE_TAG: Tag = Tag(2);
const DROP_TAG: Tag = Tag(3);
const LAST_TAG: Tag = DROP_TAG;
/// Commands with a payload in the answer, sealed or not.
const REPLIES: [Opcode; 4] =
    [Opcode::Authenticate, Opcode::Login, Opcode::ListVolumes, Opcode::OpenVolume];

/// An admin connection.
#[derive(Debug)]
pub struct AdminChannel {
    qp: AdminQp,
    // Rings when the next KEEP_ALIVE, or the answer to the last one, is due.
    alarm: Alarm,
    epoch: Epoch,
    sequence: Sequence,
    events: AsyncEventState,
    question: Option<Question>,
    dropping: Option<DropCall>,
    keep_alive: KeepAlive,
    disk: DiskUse,
    // The pulse during a long command.
    pulse: Option<Pulse>,
    // Set by an authenticated LOGIN.
    seal: Option<InitiatorSeal>,
}

/// The ASYNC_EVENT that the target keeps, and the result of the last one.
#[derive(Debug, Default)]
struct AsyncEventState {
    parked: Option<Sequence>,
    arrived: Option<Option<AsyncEvent>>,
    // The target reported a changed volume, and the change was not asked for yet.
    volumes_changed: bool,
    // The target drains: it answers every ASYNC_EVENT at once, and sends no more events.
    drains: bool,
}

impl AsyncEventState {
    fn wants_to_park(&self) -> bool {
        self.parked.is_none() && !self.drains
    }

    /// Takes an answer, if it is the awaited one.
    fn answered(&mut self, response: &ResponseCapsule) -> bool {
        if !self.parked.is_some_and(|sequence| response.answers(sequence)) {
            return false;
        }
        self.parked = None;
        if response.status == Status::Ok {
            let event = AsyncEvent::from_wire(response.value);
            let goes = [AsyncEvent::Draining, AsyncEvent::Upgrading];
            self.drains |= event.is_some_and(|event| goes.contains(&event));
            self.volumes_changed |= event == Some(AsyncEvent::VolumesChanged);
            self.arrived = Some(event);
        }
        true
    }
}

/// An answer to an admin command.
#[derive(Debug)]
pub(crate) struct Reply {
    /// The outcome.
    pub status: Status,
    /// Value of the response.
    pub value: u32,
    /// The payload from the target, [`REPLY_BYTES`] long; empty for a command without a reply. Of a
    /// sealed reply: the opened content.
    pub payload: Vec<u8>,
}

impl Reply {
    /// The first bytes of the payload; none if there are fewer.
    pub(crate) fn begin(&self, bytes: usize) -> &[u8] {
        self.payload.get(..bytes).unwrap_or_default()
    }
}

impl AdminChannel {
    /// Sizes of the QP.
    #[must_use]
    pub fn qp_limits() -> QpLimits {
        qp::limits()
    }

    /// Takes a connected QP.
    ///
    /// # Errors
    /// Memory cannot be registered, or posting fails.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        poller: Box<dyn Poller>,
        connection: Connection,
        accept: &HelloAccept,
        epoch: Epoch,
    ) -> Result<Self, SessionError> {
        let qp = AdminQp::new(pd, poller, connection, accept.depth)?;
        let alarm = Alarm::new()
            .map_err(|source| SessionError::System { what: "a timer of the session", source })?;
        let (now, clock) = (Instant::now(), clock_gettime(ClockId::CLOCK_MONOTONIC));
        let clock = clock.map_or(Duration::ZERO, Duration::from);
        Ok(Self {
            qp,
            alarm,
            epoch,
            sequence: Sequence(0),
            events: AsyncEventState::default(),
            question: None,
            dropping: None,
            keep_alive: KeepAlive::new(HostSeconds::new(clock, now), now),
            disk: DiskUse::new(now),
            pulse: None,
            seal: None,
        })
    }

    /// Keeps this pulse during [`Self::call`], so that a long command does not hide a loss.
    pub(crate) fn set_pulse(&mut self, pulse: Pulse) {
        self.pulse = Some(pulse);
    }

    /// Makes a command with the next number.
    fn command(&mut self, opcode: Opcode, tag: Tag) -> CommandCapsule {
        self.sequence = self.sequence.next();
        CommandCapsule::new(opcode, tag, self.epoch, self.sequence)
    }

    /// The sequence of the next command.
    pub(crate) fn next_sequence(&self) -> Sequence {
        self.sequence.next()
    }

    /// Sends a command and waits for its answer, with KEEP_ALIVEs meanwhile if a
    /// [pulse](Self::set_pulse) is set. After [`Self::log_in`] both are sealed.
    ///
    /// # Errors
    /// The connection died, the target did not answer in time (the command, or a KEEP_ALIVE), or
    /// broke a rule; [`SessionError::Unproven`] if the answer is not sealed as it must be. A status
    /// other than OK is no error here.
    pub(crate) async fn call(
        &mut self,
        opcode: Opcode,
        volume: VolumeHandle,
        index: u64,
        body: &[u8],
        timeout: Duration,
    ) -> Result<Reply, SessionError> {
        self.hear_out(Instant::now() + timeout).await?;
        let mut command = self.command(opcode, CALL_TAG);
        command.volume = volume;
        command.lba = Lba(index);
        if self.seal.is_some() || REPLIES.contains(&opcode) {
            command.buffer = Some(self.qp.reply_buffer(CALL_TAG));
        }
        let Some(seal) = &mut self.seal else {
            return self.exchange(command, body, timeout).await;
        };
        command.in_capsule_bytes = narrow(body.len() + COMMAND_SEAL_BYTES);
        let sealed = seal.seal_command(command.sequence, &command.to_wire(), body)?;
        let reply = self.exchange(command, &sealed, timeout).await?;
        let SealedReply { status, value, mut payload } = self.open(&command, &reply)?;
        Ok(Reply { status, value, payload: std::mem::take(&mut *payload) })
    }

    /// LOGIN with the last message of the handshake. After this, `seal` is used, also for the
    /// answer. A bare status is an unsealed refusal: a man in the middle may have forged it.
    ///
    /// # Errors
    /// Those of [`Self::call`].
    pub(crate) async fn log_in(
        &mut self,
        message: &[u8],
        seal: InitiatorSeal,
        timeout: Duration,
    ) -> Result<Result<SealedReply, Status>, SessionError> {
        let mut command = self.command(Opcode::Login, CALL_TAG);
        command.buffer = Some(self.qp.reply_buffer(CALL_TAG));
        self.seal = Some(seal);
        let reply = self.exchange(command, message, timeout).await?;
        if reply.value == 0 && reply.status != Status::Ok {
            return Ok(Err(reply.status));
        }
        self.open(&command, &reply).map(Ok)
    }

    /// Opens the sealed answer to a command.
    fn open(&self, command: &CommandCapsule, reply: &Reply) -> Result<SealedReply, SessionError> {
        let unproven = SessionError::Unproven { what: command.opcode, status: reply.status };
        let Some(sealed) = reply.payload.get(..wide(reply.value)) else { return Err(unproven) };
        let Some(seal) = &self.seal else { return Err(unproven) };
        seal.open_reply(command.sequence, sealed).map_err(|_| unproven)
    }

    /// Sends a command and waits for its answer, both unchanged.
    async fn exchange(
        &mut self,
        mut command: CommandCapsule,
        body: &[u8],
        timeout: Duration,
    ) -> Result<Reply, SessionError> {
        let CommandCapsule { opcode, sequence, .. } = command;
        let wants_reply = command.buffer.is_some();
        self.qp.send(&mut command, body)?;
        let begun = Instant::now();
        let deadline = begun + timeout;
        // Only a long command needs a pulse, and the target was not watched before.
        self.keep_alive.begin(begun);
        let mut armed = false;
        loop {
            let now = Instant::now();
            if let Some(response) = self.next_response(now)? {
                if response.tag != CALL_TAG || !response.answers(sequence) {
                    return Err(SessionError::Protocol("an answer to a command that was not sent"));
                }
                let payload = if wants_reply { self.qp.reply(CALL_TAG) } else { Vec::new() };
                return Ok(Reply { status: response.status, value: response.value, payload });
            }
            let due = match self.pulse {
                Some(pulse) => match self.keep_alive(pulse, pulse.period, now)? {
                    Some(due) => due.min(deadline),
                    None => {
                        armed = false;
                        continue;
                    }
                },
                None => deadline,
            };
            // After arming, poll once more before the sleep.
            if armed {
                if Instant::now() >= deadline {
                    return Err(SessionError::TimedOut { what: opcode });
                }
                self.qp.sleep_until(due).await?;
            } else {
                self.qp.arm()?;
            }
            armed = !armed;
        }
    }

    /// Keeps the session alive and waits without a limit for the next event of the target. Sends a
    /// KEEP_ALIVE every `pulse.period`, which must be answered within `pulse.timeout`. Cancel safe:
    /// a KEEP_ALIVE or event under way is kept.
    ///
    /// # Errors
    /// The connection died, the target's data thread does not answer, or it broke a rule.
    pub async fn event(&mut self, pulse: Pulse) -> Result<Option<AsyncEvent>, SessionError> {
        loop {
            match self.event_while(pulse, None, |_, _| pulse.period).await? {
                TargetNews::Event(event) => return Ok(event),
                // The caller asks again when it needs the volume.
                TargetNews::Volume(_) | TargetNews::Gone => self.events.volumes_changed = true,
                // The mount ends: nothing waits for it any more.
                TargetNews::Dropped(..) => {}
            }
        }
    }

    /// As [`Self::event`], with rarer KEEP_ALIVEs while the disk is not in use: `ios` counts its
    /// I/Os so far. After an event about changed volumes, asks for the new state of `volume`.
    ///
    /// # Errors
    /// As of [`Self::event`]; and the target does not report the volume.
    pub(crate) async fn news_of_disk(
        &mut self,
        pulse: Pulse,
        volume: VolumeHandle,
        ios: impl Fn() -> u64,
    ) -> Result<TargetNews, SessionError> {
        self.event_while(pulse, Some(volume), |disk, now| disk.period(pulse, ios(), now)).await
    }

    async fn event_while(
        &mut self,
        pulse: Pulse,
        volume: Option<VolumeHandle>,
        period: impl Fn(&mut DiskUse, Instant) -> Duration,
    ) -> Result<TargetNews, SessionError> {
        let mut armed = false;
        // The clock is read once after each sleep: the work between two sleeps takes negligible
        // time.
        let mut now = Instant::now();
        loop {
            if let Some(response) = self.next_response(now)? {
                return self.heard(&response);
            }
            if let Some(event) = self.events.arrived.take() {
                return Ok(TargetNews::Event(event));
            }
            if let Some((epochs, answer)) = self.drop_answer()? {
                return Ok(TargetNews::Dropped(epochs, answer));
            }
            if let Some(volume) = volume {
                self.ask_if_news(volume, now)?;
            }
            if self.events.wants_to_park() {
                let mut command = self.command(Opcode::AsyncEvent, EVENT_TAG);
                self.events.parked = Some(self.sequence);
                self.qp.send(&mut command, &[])?;
            }
            let period = period(&mut self.disk, now);
            // Requests wait for the answer to a DROP.
            let period = if self.dropping.is_some() { pulse.period } else { period };
            let Some(due) = self.keep_alive(pulse, period, now)? else {
                armed = false;
                continue;
            };
            let late = [self.answer_due(now)?, self.drop_due(now)?];
            let due = late.into_iter().flatten().fold(due, Instant::min);
            // After arming, poll once more before the sleep.
            if armed {
                self.qp.sleep_with(&mut self.alarm, due, now).await?;
                now = Instant::now();
            } else {
                self.qp.arm()?;
            }
            armed = !armed;
        }
    }

    /// Sends a KEEP_ALIVE if one is due. Returns the time of the next call; `None` when one was
    /// sent. Call it after every arrived answer was taken.
    fn keep_alive(
        &mut self,
        pulse: Pulse,
        period: Duration,
        now: Instant,
    ) -> Result<Option<Instant>, SessionError> {
        match self.keep_alive.due(pulse, period, now) {
            KeepAliveDue::Later(at) => Ok(Some(at)),
            KeepAliveDue::Late => Err(SessionError::TimedOut { what: Opcode::KeepAlive }),
            KeepAliveDue::Send => {
                let mut command = self.command(Opcode::KeepAlive, KEEP_ALIVE_TAG);
                self.keep_alive.sent(self.sequence, now);
                self.qp.send(&mut command, &[])?;
                Ok(None)
            }
        }
    }

    /// The next response to a command of [`Self::call`], if one has arrived. Keeps the others.
    fn next_response(&mut self, now: Instant) -> Result<Option<ResponseCapsule>, SessionError> {
        while let Some(response) = self.qp.poll()? {
            let taken = match response.tag {
                EVENT_TAG => self.events.answered(&response),
                KEEP_ALIVE_TAG => self.keep_alive.answered(&response, now),
                DROP_TAG => self.dropping.as_mut().is_some_and(|call| call.answered(&response)),
                _ => false,
            };
            if !taken {
                return Ok(Some(response));
            }
        }
        Ok(None)
    }

    /// Ends the connection, as dropping it does.
    pub fn close(self) {}
}
