//! The hello in CM private data: request, accept and reject.
//!
//! CMs pad private data, so the length inside the hello counts. Bytes behind it are ignored.
//! Private data that does not start with the magic is not from rblk.

use std::fmt;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::features::Features;
use crate::identifiers::{Epoch, InstanceId, Nonce, SessionId};
use crate::limits::{self, ACCEPT_BYTES, HELLO_BYTES, REJECT_TEXT_BYTES};
use crate::tag::QueueDepth;
use crate::version::Version;
use crate::width::{const_u32, narrow};

const MAGIC: [u8; 4] = *b"rblk";

/// The purpose of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ConnectionKind {
    /// Opens or resumes a session.
    Admin,
    /// Joins a session as its I/O queue of that index.
    Io {
        /// Below [`limits::QUEUES_MAX`].
        queue: u16,
    },
}

/// For logs.
impl fmt::Display for ConnectionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionKind::Admin => f.write_str("admin"),
            ConnectionKind::Io { queue } => write!(f, "queue-{queue}"),
        }
    }
}

/// The hello in the connect request of the initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HelloRequest {
    /// The purpose of the connection.
    pub kind: ConnectionKind,
    /// Newest version that the initiator speaks.
    pub newest: Version,
    /// Oldest version that the initiator speaks.
    pub oldest: Version,
    /// Commands that the initiator wants to have outstanding.
    pub depth: QueueDepth,
    /// Abilities offered.
    pub features: Features,
    /// In-capsule data the initiator would send.
    pub in_capsule_bytes: u32,
    /// Most data per command the initiator would ask for.
    pub io_max_bytes: u32,
    /// Epoch of the connection; 0 on a first admin connection.
    pub epoch: Epoch,
    /// READs of the target that the initiator serves at once on this connection; 0 where it does
    /// not say. Some drivers report a limit of the target's own device as that of the peer.
    pub reads_in: u8,
    /// The session to join or resume; none on a first admin connection.
    pub session: SessionId,
}

/// The answer of the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HelloAccept {
    /// The version of this connection.
    pub version: Version,
    /// Commands that may be outstanding: the credits.
    pub depth: QueueDepth,
    /// Abilities that both ends have.
    pub features: Features,
    /// In-capsule data that a receive buffer of the target holds.
    pub in_capsule_bytes: u32,
    /// Most data per command.
    pub io_max_bytes: u32,
    /// The target's run.
    pub instance: InstanceId,
    /// The target's random value for this connection.
    pub nonce: Nonce,
}

impl HelloAccept {
    /// Most in-capsule data of one message, in bytes: the size of a receive buffer behind the
    /// capsules. If several commands may have data, there is room for the data of all of them, up
    /// to [`limits::IN_CAPSULE_MAX_BYTES`]. If the ends prove their keys, there is room for the
    /// proof that comes with the self-test, also where no block command may have data.
    #[must_use]
    pub fn message_data_bytes(&self) -> u32 {
        let proof = if self.features.has(Features::AUTH) {
            const_u32(limits::QUEUE_PROOF_BYTES)
        } else {
            0
        };
        self.block_data_bytes().max(proof)
    }

    fn block_data_bytes(&self) -> u32 {
        let one = self.in_capsule_bytes;
        if !self.features.has(Features::DATA_LISTS) {
            return one;
        }
        let all = one.saturating_mul(narrow(limits::LIST_DATA_MAX));
        all.min(limits::IN_CAPSULE_MAX_BYTES).max(one)
    }
}

/// Why a target refuses a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum RejectReason {
    /// No version in common.
    Version = 1,
    /// The hello breaks a rule.
    Malformed = 2,
    /// The session or epoch named is unknown.
    NoSuchSession = 3,
    /// The epoch is older than the session's.
    StaleEpoch = 4,
    /// A limit is reached: sessions, queues or memory.
    LimitReached = 5,
    /// The target is draining. Connect again later.
    ShuttingDown = 6,
    /// The host is not allowed.
    NotAllowed = 7,
    /// The queue of that index exists already in this epoch.
    DuplicateQueue = 8,
    /// The connection would not be encrypted, and the target takes no other over TCP.
    NotEncrypted = 9,
    /// Too many connections wait for their LOGIN. Connect again in some milliseconds.
    Crowded = 10,
}

impl RejectReason {
    const ALL: [Self; 10] = [
        Self::Version,
        Self::Malformed,
        Self::NoSuchSession,
        Self::StaleEpoch,
        Self::LimitReached,
        Self::ShuttingDown,
        Self::NotAllowed,
        Self::DuplicateQueue,
        Self::NotEncrypted,
        Self::Crowded,
    ];
}

/// A refusal, with a text for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HelloReject {
    /// Why. `None` for a number of a later version.
    pub reason: Option<RejectReason>,
    /// Newest version the target speaks.
    pub newest: Version,
    /// Oldest version the target speaks.
    pub oldest: Version,
    /// The text. Cut to [`REJECT_TEXT_BYTES`].
    pub text: String,
}

/// Why private data is not a hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HelloError {
    /// No magic: the peer is not rblk.
    #[error("the peer does not speak rblk")]
    NotRblk,
    /// Too short for its kind.
    #[error("the hello has {0} bytes")]
    Length(usize),
    /// A field breaks a rule.
    #[error("{0}")]
    Field(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireRequest {
    magic: [u8; 4],
    length: u8,
    kind: u8,
    newest: U16,
    oldest: U16,
    queue: U16,
    depth: U16,
    reads_in: u8,
    reserved: u8,
    features: U32,
    in_capsule_bytes: U32,
    io_max_bytes: U32,
    epoch: U32,
    session: [u8; 16],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireAccept {
    magic: [u8; 4],
    length: u8,
    reserved: u8,
    version: U16,
    depth: U16,
    reserved2: U16,
    features: U32,
    in_capsule_bytes: U32,
    io_max_bytes: U32,
    reserved3: [u8; 8],
    instance: [u8; 16],
    nonce: [u8; 16],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireReject {
    magic: [u8; 4],
    length: u8,
    text_length: u8,
    reason: U16,
    newest: U16,
    oldest: U16,
    reserved: U32,
    text: [u8; REJECT_TEXT_BYTES],
}

const REJECT_BYTES: usize = 16 + REJECT_TEXT_BYTES;
// All fit a byte: asserted below.
const HELLO_LENGTH: u8 = HELLO_BYTES.to_le_bytes()[0];
const ACCEPT_LENGTH: u8 = ACCEPT_BYTES.to_le_bytes()[0];
const REJECT_LENGTH: u8 = REJECT_BYTES.to_le_bytes()[0];

const _: () = {
    assert!(size_of::<WireRequest>() == HELLO_BYTES);
    assert!(size_of::<WireAccept>() == ACCEPT_BYTES);
    assert!(size_of::<WireReject>() == REJECT_BYTES);
    assert!(
        REJECT_BYTES < 256 && HELLO_BYTES < 256 && ACCEPT_BYTES < 256,
        "the length is one byte"
    );
};

/// The fixed part of padded private data, after magic and length were checked.
fn fixed<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], HelloError> {
    if bytes.len() < 5 || bytes[..4] != MAGIC {
        return Err(HelloError::NotRblk);
    }
    // A later version may be longer. It must not be shorter, neither by its length field nor by its
    // bytes.
    if usize::from(bytes[4]) < N {
        return Err(HelloError::Length(usize::from(bytes[4])));
    }
    bytes.first_chunk::<N>().ok_or(HelloError::Length(bytes.len()))
}

impl HelloRequest {
    const ADMIN: u8 = 0;
    const IO: u8 = 1;

    /// The 48 bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; HELLO_BYTES] {
        let (kind, queue) = match self.kind {
            ConnectionKind::Admin => (Self::ADMIN, 0),
            ConnectionKind::Io { queue } => (Self::IO, queue),
        };
        let wire = WireRequest {
            magic: MAGIC,
            length: HELLO_LENGTH,
            kind,
            newest: self.newest.0.into(),
            oldest: self.oldest.0.into(),
            queue: queue.into(),
            depth: self.depth.get().into(),
            reads_in: self.reads_in,
            reserved: 0,
            features: self.features.0.into(),
            in_capsule_bytes: self.in_capsule_bytes.into(),
            io_max_bytes: self.io_max_bytes.into(),
            epoch: self.epoch.0.into(),
            session: self.session.0,
        };
        zerocopy::transmute!(wire)
    }

    /// Parses private data, padded or not.
    ///
    /// # Errors
    /// [`HelloError`]: the first rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, HelloError> {
        let wire = WireRequest::ref_from_bytes(fixed::<HELLO_BYTES>(bytes)?)
            .map_err(|_| HelloError::Length(bytes.len()))?;
        let kind = match wire.kind {
            Self::ADMIN if wire.queue.get() == 0 => ConnectionKind::Admin,
            Self::IO if wire.queue.get() < limits::QUEUES_MAX => {
                ConnectionKind::Io { queue: wire.queue.get() }
            }
            Self::ADMIN | Self::IO => return Err(HelloError::Field("queue index out of bounds")),
            _ => return Err(HelloError::Field("unknown kind of connection")),
        };
        let (newest, oldest) = (Version(wire.newest.get()), Version(wire.oldest.get()));
        if oldest > newest || oldest.0 == 0 {
            return Err(HelloError::Field("version range is empty"));
        }
        let session = SessionId(wire.session);
        if matches!(kind, ConnectionKind::Io { .. }) && session.is_none() {
            return Err(HelloError::Field("an I/O connection names no session"));
        }
        Ok(Self {
            kind,
            newest,
            oldest,
            depth: QueueDepth::new(wire.depth.get())
                .ok_or(HelloError::Field("queue depth out of bounds"))?,
            features: Features(wire.features.get()),
            in_capsule_bytes: wire.in_capsule_bytes.get(),
            io_max_bytes: wire.io_max_bytes.get(),
            epoch: Epoch(wire.epoch.get()),
            reads_in: wire.reads_in,
            session,
        })
    }

    /// READs that the target may have outstanding, where its connection manager says that the peer
    /// serves so many. Of both the smaller one counts.
    #[must_use]
    pub fn reads_out(&self, of_cm: u8) -> u8 {
        match self.reads_in {
            0 => of_cm,
            said => said.min(of_cm),
        }
    }
}

impl HelloAccept {
    /// The 64 bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; ACCEPT_BYTES] {
        let wire = WireAccept {
            magic: MAGIC,
            length: ACCEPT_LENGTH,
            reserved: 0,
            version: self.version.0.into(),
            depth: self.depth.get().into(),
            reserved2: 0.into(),
            features: self.features.0.into(),
            in_capsule_bytes: self.in_capsule_bytes.into(),
            io_max_bytes: self.io_max_bytes.into(),
            reserved3: [0; 8],
            instance: self.instance.0,
            nonce: self.nonce.0,
        };
        zerocopy::transmute!(wire)
    }

    /// Parses private data, and compares it with the request: a target may grant less, never more.
    ///
    /// # Errors
    /// [`HelloError`]: the first rule that is broken.
    pub fn from_wire(bytes: &[u8], asked: &HelloRequest) -> Result<Self, HelloError> {
        let wire = WireAccept::ref_from_bytes(fixed::<ACCEPT_BYTES>(bytes)?)
            .map_err(|_| HelloError::Length(bytes.len()))?;
        let accept = Self {
            version: Version(wire.version.get()),
            depth: QueueDepth::new(wire.depth.get())
                .ok_or(HelloError::Field("queue depth out of bounds"))?,
            features: Features(wire.features.get()),
            in_capsule_bytes: wire.in_capsule_bytes.get(),
            io_max_bytes: wire.io_max_bytes.get(),
            instance: InstanceId(wire.instance),
            nonce: Nonce(wire.nonce),
        };
        let fine = (asked.oldest..=asked.newest).contains(&accept.version)
            && accept.depth <= asked.depth
            && asked.features.has(accept.features)
            && accept.features == accept.features.possible()
            && accept.in_capsule_bytes <= asked.in_capsule_bytes
            && (limits::IO_MIN_BYTES..=asked.io_max_bytes).contains(&accept.io_max_bytes);
        if !fine {
            return Err(HelloError::Field("the target granted more than was asked"));
        }
        Ok(accept)
    }
}

impl HelloReject {
    /// The bytes of a refusal.
    #[must_use]
    pub fn to_wire(&self) -> Vec<u8> {
        let mut cut = self.text.len().min(REJECT_TEXT_BYTES);
        while !self.text.is_char_boundary(cut) {
            cut -= 1;
        }
        let mut text = [0; REJECT_TEXT_BYTES];
        text[..cut].copy_from_slice(&self.text.as_bytes()[..cut]);
        let wire = WireReject {
            magic: MAGIC,
            length: REJECT_LENGTH,
            text_length: narrow(cut),
            reason: self.reason.map_or(0, |r| r as u16).into(),
            newest: self.newest.0.into(),
            oldest: self.oldest.0.into(),
            reserved: 0.into(),
            text,
        };
        wire.as_bytes().to_vec()
    }

    /// Parses private data, padded or not.
    ///
    /// # Errors
    /// [`HelloError`]: the first rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, HelloError> {
        let wire = WireReject::ref_from_bytes(fixed::<REJECT_BYTES>(bytes)?)
            .map_err(|_| HelloError::Length(bytes.len()))?;
        let text = wire
            .text
            .get(..usize::from(wire.text_length))
            .ok_or(HelloError::Field("text too long"))?;
        Ok(Self {
            reason: RejectReason::ALL.into_iter().find(|r| *r as u16 == wire.reason.get()),
            newest: Version(wire.newest.get()),
            oldest: Version(wire.oldest.get()),
            // The text is shown in a terminal and in logs.
            text: String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect(),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A request as an initiator sends it.
    pub(crate) fn asked() -> HelloRequest {
        HelloRequest {
            kind: ConnectionKind::Io { queue: 3 },
            newest: Version(3),
            oldest: Version(3),
            depth: QueueDepth::new(128).unwrap(),
            features: Features(3),
            in_capsule_bytes: 4096,
            io_max_bytes: 1 << 20,
            epoch: Epoch(7),
            reads_in: 0,
            session: SessionId([0xaa; 16]),
        }
    }

    #[test]
    fn golden_request() {
        let mut golden =
            vec![b'r', b'b', b'l', b'k', 48, 1, 3, 0, 3, 0, 3, 0, 128, 0, 0, 0, 3, 0, 0, 0];
        golden.extend([0, 16, 0, 0, 0, 0, 16, 0, 7, 0, 0, 0]);
        golden.extend([0xaa; 16]);
        assert_eq!(asked().to_wire().as_slice(), golden);
        golden.extend([0; 8]); // as a CM pads it
        assert_eq!(HelloRequest::from_wire(&golden), Ok(asked()));
        let with_reads = HelloRequest { reads_in: 16, ..asked() };
        golden[14] = 16;
        assert_eq!(with_reads.to_wire(), golden[..HELLO_BYTES]);
        assert_eq!(HelloRequest::from_wire(&golden), Ok(with_reads));
    }

    #[test]
    fn of_two_numbers_of_reads_the_smaller_counts() {
        for (reads_in, of_cm, granted) in
            [(16, 128, 16), (16, 4, 4), (1, 1, 1), (16, 0, 0), (255, 255, 255)]
        {
            assert_eq!(HelloRequest { reads_in, ..asked() }.reads_out(of_cm), granted);
        }
        let older = HelloRequest { reads_in: 0, ..asked() };
        assert_eq!(older.reads_out(16), 16, "an initiator that does not say");
    }

    #[test]
    fn refuses_bad_hellos() {
        assert_eq!(HelloRequest::from_wire(b""), Err(HelloError::NotRblk));
        assert_eq!(HelloRequest::from_wire(b"GET / HTTP/1.1\r\n"), Err(HelloError::NotRblk));
        assert_eq!(HelloRequest::from_wire(b"rblk\x30"), Err(HelloError::Length(5)));
        let good = asked().to_wire();
        for (at, byte, error) in [
            (4, 47, HelloError::Length(47)),
            (5, 2, HelloError::Field("unknown kind of connection")),
            (10, 64, HelloError::Field("queue index out of bounds")),
            (5, 0, HelloError::Field("queue index out of bounds")),
            (8, 4, HelloError::Field("version range is empty")),
            (13, 0xff, HelloError::Field("queue depth out of bounds")),
        ] {
            let mut bytes = good;
            bytes[at] = byte;
            assert_eq!(HelloRequest::from_wire(&bytes), Err(error), "byte {at}");
        }
        let mut anonymous = good;
        anonymous[32..].fill(0);
        assert!(HelloRequest::from_wire(&anonymous).is_err());
    }

    #[test]
    fn rejection_round_trips_and_is_cut() {
        let reject = HelloReject {
            reason: Some(RejectReason::ShuttingDown),
            newest: Version(2),
            oldest: Version(2),
            text: "draining \u{1b}[31m".to_owned() + &"ü".repeat(100),
        };
        let mut wire = reject.to_wire();
        wire.resize(limits::CM_REJECT_BYTES, 0);
        let seen = HelloReject::from_wire(&wire).unwrap();
        assert_eq!(seen.reason, Some(RejectReason::ShuttingDown));
        assert!(seen.text.starts_with("draining [31mü") && seen.text.len() < 97);
        wire[5] = 200;
        assert!(HelloReject::from_wire(&wire).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            let mut framed = MAGIC.to_vec();
            framed.push(64);
            framed.extend(&bytes);
            for candidate in [&bytes, &framed] {
                let _ = HelloRequest::from_wire(candidate);
                let _ = HelloAccept::from_wire(candidate, &asked());
                let _ = HelloReject::from_wire(candidate);
            }
        }
    }
}
