//! [`AdminEnd`]: the initiator's end of an admin connection, as capsules over a real QP.
//!
//! It sends the same capsules as [`rblk_initiator::volume::admin::AdminChannel`], without its clock
//! and its runtime: one command at a time, a parked ASYNC_EVENT, and KEEP_ALIVEs by the same
//! [`Pulse`].

use std::time::Instant;

use rblk_fabric::soft::network::FaultyWire;
use rblk_fabric::{
    Access, Completion, MemoryRegion, PageKind, RecvWr, Region, SendOp, SendWr, SgeList, WcStatus,
    WrId,
};
use rblk_initiator::engine::pulse::Pulse;
use rblk_protocol::limits::{self, ADMIN_DEPTH, COMMAND_BYTES, RESPONSE_BYTES};
use rblk_protocol::{
    AsyncEvent, CommandCapsule, ConnectionKind, Epoch, Features, HelloRequest, KeyedDescriptor,
    Opcode, QueueDepth, ResponseCapsule, Sequence, SessionId, Status, Tag, Version,
};
use rblk_rig::inprocess::{QueueOptions, RawEnd};

const STRIDE: usize = 512;
const RECVS: u16 = ADMIN_DEPTH + 3;
const REPLY_BYTES: usize = 4096;
const CALL: Tag = Tag(0);
const EVENT: Tag = Tag(1);
const BEAT: Tag = Tag(2);

/// The options of an admin connection.
#[must_use]
pub fn options() -> QueueOptions {
    QueueOptions {
        depth: ADMIN_DEPTH,
        io_max_bytes: limits::IO_MIN_BYTES,
        in_capsule_bytes: limits::IN_CAPSULE_DEFAULT_BYTES,
        features: Features::default(),
        reads_out: 0,
        lanes: 1,
    }
}

/// The hello of a connection with these options.
///
/// # Panics
/// The depth is no depth.
#[must_use]
pub fn hello(
    kind: ConnectionKind,
    options: &QueueOptions,
    session: SessionId,
    epoch: Epoch,
) -> HelloRequest {
    HelloRequest {
        kind,
        newest: Version::NEWEST,
        oldest: Version::OLDEST,
        depth: QueueDepth::new(options.depth).expect("a depth"),
        features: options.features,
        in_capsule_bytes: options.in_capsule_bytes,
        io_max_bytes: options.io_max_bytes,
        epoch,
        reads_in: 16,
        session,
    }
}

/// A message of the target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Heard {
    /// The answer to the command.
    Answer {
        /// Outcome.
        status: Status,
        /// Value of the response.
        value: u32,
        /// The bytes in the reply area.
        payload: Vec<u8>,
    },
    /// The target drains.
    Draining,
}

/// The connection is dead, or the target is silent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lost;

/// The initiator's end.
#[derive(Debug)]
pub struct AdminEnd {
    end: RawEnd,
    slots: MemoryRegion,
    replies: MemoryRegion,
    epoch: Epoch,
    depth: QueueDepth,
    sequence: Sequence,
    call: Option<Sequence>,
    parked: Option<Sequence>,
    beat: Option<(Sequence, Instant)>,
    last_beat: Instant,
}

impl AdminEnd {
    /// Takes a connected QP.
    ///
    /// # Panics
    /// Memory is short.
    #[must_use]
    pub fn new(end: RawEnd, epoch: Epoch, now: Instant) -> Self {
        let region = |bytes| Region::allocate(bytes, PageKind::Normal).expect("memory");
        let bytes = 3 * STRIDE + usize::from(RECVS) * RESPONSE_BYTES;
        let slots = end.pd.register(&region(bytes), Access::LOCAL_WRITE).expect("a registration");
        let remote = Access { remote_write: true, ..Access::LOCAL_WRITE };
        let replies = end.pd.register(&region(REPLY_BYTES), remote).expect("a registration");
        let mut admin = Self {
            end,
            slots,
            replies,
            epoch,
            depth: QueueDepth::new(ADMIN_DEPTH).expect("a depth"),
            sequence: Sequence(0),
            call: None,
            parked: None,
            beat: None,
            last_beat: now,
        };
        for slot in 0..RECVS {
            admin.post_recv(slot);
        }
        admin
    }

    /// The link.
    #[must_use]
    pub fn wire(&self) -> &FaultyWire {
        &self.end.wire
    }

    fn post_recv(&mut self, slot: u16) {
        let at = 3 * STRIDE + usize::from(slot) * RESPONSE_BYTES;
        let len = u32::try_from(RESPONSE_BYTES).unwrap_or(0);
        let sge = self.slots.sge(at, len).expect("inside");
        // On a dead QP it flushes.
        let _ = self.end.poller.post_recv(self.end.qp, &[RecvWr::one(WrId(slot.into()), sge)]);
    }

    fn send(&mut self, opcode: Opcode, tag: Tag, body: &[u8]) -> Sequence {
        self.sequence = self.sequence.next();
        let mut command = CommandCapsule::new(opcode, tag, self.epoch, self.sequence);
        command.in_capsule_bytes = u32::try_from(body.len()).expect("a short body");
        if matches!(opcode, Opcode::Login | Opcode::OpenVolume) {
            self.replies.region().zero(0, REPLY_BYTES);
            let remote = self.replies.remote(0);
            let length = u32::try_from(REPLY_BYTES).unwrap_or(0);
            let (address, rkey) = (remote.addr, remote.rkey.0);
            command.buffer = Some(KeyedDescriptor { address, length, rkey });
        }
        let at = tag.index() * STRIDE;
        self.slots.region().write(at, &command.to_wire());
        self.slots.region().write(at + COMMAND_BYTES, body);
        let len = u32::try_from(COMMAND_BYTES + body.len()).expect("a short command");
        let sges = SgeList::one(self.slots.sge(at, len).expect("inside"));
        let wr =
            SendWr { id: WrId(1 << 16), op: SendOp::Send, sges, signaled: true, inline: false };
        // A dead QP is seen by its completions.
        let _ = self.end.poller.post_send(self.end.qp, &[wr]);
        self.sequence
    }

    /// Sends a command. [`Self::turn`] returns its answer later.
    pub fn call(&mut self, opcode: Opcode, body: &[u8]) {
        self.call = Some(self.send(opcode, CALL, body));
    }

    /// Takes the messages that arrived, and keeps the connection alive. With `parks` it waits for
    /// the target's events.
    ///
    /// # Errors
    /// [`Lost`].
    ///
    /// # Panics
    /// The target broke the protocol.
    pub fn turn(&mut self, now: Instant, pulse: Pulse, parks: bool) -> Result<Option<Heard>, Lost> {
        loop {
            let mut one = [Completion::default()];
            if self.end.poller.poll(&mut one).map_err(|_| Lost)? == 0 {
                break;
            }
            let [completion] = one;
            if completion.status != WcStatus::Success {
                return Err(Lost);
            }
            if completion.id.0 >> 16 != 0 {
                continue;
            }
            let slot = u16::try_from(completion.id.0).expect("a slot");
            let mut bytes = [0; RESPONSE_BYTES];
            let at = 3 * STRIDE + usize::from(slot) * RESPONSE_BYTES;
            self.slots.region().read(at, &mut bytes);
            self.post_recv(slot);
            let response =
                ResponseCapsule::from_wire(&bytes, completion.byte_len as usize, self.depth)
                    .expect("a response");
            if response.tag == BEAT && self.beat.is_some_and(|(s, _)| response.answers(s)) {
                self.beat = None;
                self.last_beat = now;
            } else if response.tag == EVENT && self.parked.is_some_and(|s| response.answers(s)) {
                self.parked = None;
                let event = AsyncEvent::from_wire(response.value);
                if response.status == Status::Ok && event == Some(AsyncEvent::Draining) {
                    return Ok(Some(Heard::Draining));
                }
            } else {
                let ours = response.tag == CALL && self.call.is_some_and(|s| response.answers(s));
                assert!(ours, "an unexpected answer: {response:?}");
                self.call = None;
                let mut payload = vec![0; REPLY_BYTES];
                self.replies.region().read(0, &mut payload);
                let ResponseCapsule { status, value, .. } = response;
                return Ok(Some(Heard::Answer { status, value, payload }));
            }
        }
        if parks && self.parked.is_none() {
            self.parked = Some(self.send(Opcode::AsyncEvent, EVENT, &[]));
        }
        match self.beat {
            Some((_, since)) if now >= since + pulse.timeout => return Err(Lost),
            None if now >= self.last_beat + pulse.period => {
                let sequence = self.send(Opcode::KeepAlive, BEAT, &[]);
                self.beat = Some((sequence, now));
            }
            _ => {}
        }
        Ok(None)
    }
}
