//! [`Rogue`]: a host that the target lets in, with a right to a volume of its own, and that then
//! breaks the rules. It uses the bytes of the document, not the product's client.

use std::time::{Duration, Instant};

use rblk_fabric::Address;
use rblk_protocol::width::{narrow, wide};
use snow::StatelessTransportState;

use super::end::{End, Heard, Knock, LENT};
use super::noise::{self, Keys, Queue, TAG, Transport};
use super::wire::{self, Accept, Command, Hello, Response, feature, op, status};

/// Bytes of LOGIN's reply before the secret of the session.
const LOGIN_REPLY: usize = 112;
/// Bytes of a block.
pub const BLOCK: u32 = 4096;
/// Bytes that a rogue lends for a reply.
const REPLY: u32 = 4096;
/// Most bytes of the payload of a reply to OPEN: a text of a refusal.
const ROOM: usize = 512;
/// How long LOGIN and OPEN are tried while leftovers of the rogue end.
const PATIENCE: Duration = Duration::from_secs(20);

/// The address of a target, and the keys of a rogue.
#[derive(Clone, Debug)]
pub struct Door {
    /// The address.
    pub address: Address,
    /// The transport of that address.
    pub transport: Transport,
    /// Keys.
    pub keys: Keys,
}

/// A rogue host's admin connection, logged in.
#[derive(Debug)]
pub struct Rogue {
    /// The connection.
    pub end: Box<End>,
    /// The session.
    pub session: [u8; 16],
    /// Its epoch.
    pub epoch: u32,
    /// Its secret.
    pub secret: [u8; 32],
    /// The keys of the seal.
    pub seal: StatelessTransportState,
    sequence: u32,
}

/// A proven I/O connection of a rogue.
#[derive(Debug)]
pub struct RogueQueue {
    /// The connection.
    pub end: Box<End>,
    /// Its epoch.
    pub epoch: u32,
    /// Its depth.
    pub depth: u16,
    sequence: u32,
}

/// The status of the answer; `None` when the connection ended instead.
///
/// # Panics
/// An admin response is malformed.
#[must_use]
pub fn status_of(heard: &Heard) -> Option<u16> {
    match heard {
        Heard::Response(Response { status, .. }) => Some(*status),
        Heard::Immediate(_) => Some(status::OK),
        Heard::End(_) => None,
    }
}

/// A command that names all memory that an end lends for replies.
#[must_use]
pub fn naming(end: &End, command: Command) -> Command {
    let remote = end.lent.remote(0);
    Command { address: remote.addr, length: REPLY, rkey: remote.rkey.0, ..command }
}

impl Door {
    /// An admin connection without a login.
    #[must_use]
    pub fn stranger(&self) -> Box<End> {
        End::connect(&self.address, &Hello::admin(feature::AUTH))
    }

    /// AUTHENTICATE of an end that has just been connected. Message 3 is ready to be written.
    ///
    /// # Panics
    /// The target does not take part.
    #[must_use]
    pub fn authenticate(&self, end: &mut End) -> snow::HandshakeState {
        let accept = Accept::parse(&end.accept);
        assert!(accept.features & feature::AUTH != 0, "the target wants no proof");
        let prologue = noise::prologue(&end.asked, &end.accept, self.transport);
        let (mut handshake, first) = noise::begin(&self.keys, &prologue);
        let command = Command {
            opcode: op::AUTHENTICATE,
            sequence: 1,
            epoch: end.epoch(),
            in_capsule: narrow(first.len()),
            ..Command::default()
        };
        end.send(&[naming(end, command).bytes().as_slice(), &first].concat());
        let heard = end.hear();
        let Heard::Response(Response { status: status::OK, value, .. }) = heard else {
            panic!("AUTHENTICATE: {heard:?}");
        };
        let second = end.lent_bytes(0, wide(value));
        noise::read(&mut handshake, &second).expect("a target with this key");
        handshake
    }

    /// A new session.
    ///
    /// # Panics
    /// The target does not let this host in.
    #[must_use]
    pub fn login(&self) -> Rogue {
        self.log_in_by(self.stranger()).unwrap_or_else(|heard| panic!("LOGIN: {heard:?}"))
    }

    /// A new session, if the target lets this host have another one.
    ///
    /// # Errors
    /// The message that came instead of the answer; `None` when the target refused to connect.
    ///
    /// # Panics
    /// The target does not take part in the handshake.
    pub fn try_login(&self) -> Result<Rogue, Option<Heard>> {
        match End::knock(&self.address, &Hello::admin(feature::AUTH).bytes()) {
            Knock::In(end) => self.log_in_by(end).map_err(Some),
            Knock::Refused(_) | Knock::Failed(_) => Err(None),
        }
    }

    fn log_in_by(&self, mut end: Box<End>) -> Result<Rogue, Heard> {
        let mut handshake = self.authenticate(&mut end);
        let last = noise::write(&mut handshake, &wire::login("rogue", 5000));
        let seal = handshake.into_stateless_transport_mode().expect("a finished handshake");
        let command = Command {
            opcode: op::LOGIN,
            sequence: 2,
            epoch: 1,
            in_capsule: narrow(last.len()),
            ..Command::default()
        };
        end.send(&[naming(&end, command).bytes().as_slice(), &last].concat());
        let heard = end.hear();
        if status_of(&heard) != Some(status::OK) {
            return Err(heard);
        }
        let sealed = end.lent_bytes(0, noise::sealed_len(LOGIN_REPLY + 32));
        let (_, _, reply) = noise::open(&seal, 2, &sealed).expect("a sealed reply to LOGIN");
        Ok(Rogue {
            session: *reply.first_chunk().expect("a session"),
            epoch: u32::from_le_bytes(*reply[32..].first_chunk().expect("an epoch")),
            secret: *reply[LOGIN_REPLY..].first_chunk().expect("a secret"),
            end,
            seal,
            sequence: 2,
        })
    }
}

impl Rogue {
    /// A command with the next sequence, which names the memory for replies.
    pub fn command(&mut self, opcode: u8) -> Command {
        self.sequence += 1;
        let (sequence, epoch) = (self.sequence, self.epoch);
        naming(&self.end, Command { opcode, sequence, epoch, ..Command::default() })
    }

    /// A command and its sealed body, as they go on the wire.
    #[must_use]
    pub fn sealed(&self, command: Command, body: &[u8]) -> Vec<u8> {
        let in_capsule = narrow(wire::COMMAND + body.len() + TAG);
        let capsule = Command { in_capsule, ..command }.bytes();
        let sealed = noise::seal(&self.seal, command.sequence, &capsule, body);
        [capsule.as_slice(), &sealed].concat()
    }

    /// Runs a sealed command: the status, the value and the payload of its sealed reply. `None`
    /// when the connection ended instead.
    ///
    /// # Panics
    /// The reply is not sealed as the document says.
    pub fn call(
        &mut self,
        command: Command,
        body: &[u8],
        room: usize,
    ) -> Option<(u16, u32, Vec<u8>)> {
        let message = self.sealed(command, body);
        self.end.send(&message);
        let heard = self.end.hear();
        let status = status_of(&heard)?;
        let Heard::Response(Response { value, .. }) = heard else { panic!("{heard:?}") };
        // The response says how long the sealed reply is.
        let len = wide(value).clamp(noise::sealed_len(0), noise::sealed_len(room));
        let sealed = self.end.lent_bytes(0, len);
        let opened = noise::open(&self.seal, command.sequence, &sealed);
        let (inner, value, payload) =
            opened.unwrap_or_else(|| panic!("no sealed reply: status {status}, value {value}"));
        assert_eq!(inner, status, "the sealed status is another one");
        Some((inner, value, payload))
    }

    /// Opens a volume: the status, and its handle. Tries until an older session of this host has
    /// ended.
    ///
    /// # Panics
    /// The connection ends.
    pub fn open(&mut self, volume: &str, mode: u8, take_over: u8) -> (u16, u32) {
        let until = Instant::now() + PATIENCE;
        loop {
            let command = self.command(op::OPEN);
            let body = wire::open(volume, mode, take_over);
            let (status, _, payload) = self.call(command, &body, ROOM).expect("an answer to OPEN");
            let handle = payload.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
            // 7: in use.
            if status != 7 || Instant::now() > until {
                return (status, handle);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// An I/O connection of this session that was not proven yet.
    ///
    /// # Panics
    /// The target does not accept it.
    #[must_use]
    pub fn unproven(&self, door: &Door, queue: u16, features: u32) -> Box<End> {
        End::connect(&door.address, &Hello::io(self.session, self.epoch, queue, features))
    }

    /// The SELF_TEST of an I/O connection, with this proof of `nonce`.
    #[must_use]
    pub fn self_test(&self, end: &End, nonce: &[u8; 16], proof: &[u8; 32]) -> Vec<u8> {
        let depth = Accept::parse(&end.accept).depth;
        let remote = end.lent.remote(LENT - 64);
        let command = Command {
            opcode: op::SELF_TEST,
            tag: depth,
            sequence: 1,
            epoch: self.epoch,
            in_capsule: 48,
            address: remote.addr,
            length: 64,
            rkey: remote.rkey.0,
            ..Command::default()
        };
        [command.bytes().as_slice(), nonce, proof].concat()
    }

    /// A proven I/O connection.
    ///
    /// # Panics
    /// The target does not take the proof, or does not prove itself.
    #[must_use]
    pub fn queue(&self, door: &Door, queue: u16, features: u32) -> RogueQueue {
        let mut end = self.unproven(door, queue, features);
        let nonce = [9; 16];
        let with = Queue {
            secret: &self.secret,
            epoch: self.epoch,
            queue,
            asked: &end.asked.clone(),
            accept: &end.accept.clone(),
        };
        let message = self.self_test(&end, &nonce, &with.proof("initiator", &nonce));
        end.send(&message);
        let heard = end.hear();
        assert_eq!(status_of(&heard), Some(status::OK), "SELF_TEST: {heard:?}");
        let answer = end.lent_bytes(LENT - 32, 32);
        assert_eq!(answer, with.proof("target", &nonce), "the target's proof");
        let depth = Accept::parse(&end.accept).depth;
        RogueQueue { end, epoch: self.epoch, depth, sequence: 1 }
    }
}

impl RogueQueue {
    /// A command for blocks of a volume, with its data at the beginning of the lent memory.
    pub fn command(&mut self, opcode: u8, volume: u32, lba: u64, blocks: u32) -> Command {
        self.sequence += 1;
        let remote = self.end.lent.remote(0);
        Command {
            opcode,
            volume,
            lba,
            count: blocks.into(),
            epoch: self.epoch,
            sequence: self.sequence,
            address: remote.addr,
            length: blocks * BLOCK,
            rkey: remote.rkey.0,
            ..Command::default()
        }
    }

    /// Sends a message and hears its answer: the status; `None` when the connection ended.
    pub fn ask(&mut self, message: &[u8]) -> Option<u16> {
        self.end.send(message);
        status_of(&self.end.hear())
    }
}
