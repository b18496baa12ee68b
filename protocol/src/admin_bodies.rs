//! Bodies of admin commands: the in-capsule data, and the reply that the target writes.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::identifiers::{
    Epoch, Generation, HostId, InstanceId, Name, SessionId, VolumeHandle, WriteVerifier,
};
use crate::lba::{BlockCount, BlockSize};
use crate::limits::NAME_BYTES;

/// A body that breaks a rule: which one.
type BodyError = &'static str;

/// In-capsule data of LOGIN. The hello of the connection has named session and epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginRequest {
    /// The host of the initiator.
    pub host: HostId,
    /// The name of the host, for people.
    pub host_name: Name,
    /// How long the target keeps the session when it hears nothing of it.
    pub keep_alive_ms: u32,
    /// `None`: the LOGIN ends all older epochs of the session.
    pub join: Option<Join>,
}

/// A LOGIN that lets the other epochs of its session live. Only where [`crate::Features::WAYS`] was
/// agreed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Join {
    /// An epoch since the last LOGIN that joined nothing. So a process of the host that was
    /// superseded meanwhile is refused.
    pub beside: Epoch,
    /// The last epoch of the same way, which ends. The LOGIN is answered when its connections are
    /// gone.
    pub ends: Option<Epoch>,
}

impl Join {
    /// From the wire, where 0 is none.
    fn from_wire(beside: u32, ends: u32) -> Result<Option<Self>, BodyError> {
        match (beside, ends) {
            (0, 0) => Ok(None),
            (0, _) => Err("a LOGIN that ends one epoch and joins none"),
            (beside, ends) if beside == ends => Err("a LOGIN that ends the epoch that it joins"),
            (beside, ends) => {
                let ends = (ends != 0).then_some(Epoch(ends));
                Ok(Some(Self { beside: Epoch(beside), ends }))
            }
        }
    }
}

/// Answer to LOGIN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginReply {
    /// The session, new or resumed.
    pub session: SessionId,
    /// The epoch that I/O connections must name.
    pub epoch: Epoch,
    /// The run of the target.
    pub instance: InstanceId,
    /// I/O queues that the target allows.
    pub queues_max: u16,
    /// The name of the target, for people.
    pub target_name: Name,
}

/// How a volume is opened.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum AccessMode {
    /// The only writer.
    Exclusive = 0,
    /// Reads only. There may be any number of readers.
    ReadOnly = 1,
    /// One of several writers. They must coordinate their writes themselves.
    Shared = 2,
}

/// In-capsule data of OPEN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenRequest {
    /// The volume.
    pub name: Name,
    /// How it is opened.
    pub mode: AccessMode,
    /// Fence a present holder. Ignored if a generation is named: that initiator holds the volume or
    /// has lost it.
    pub take_over: bool,
    /// The generation that the last OPEN of this volume returned, if the initiator held it before;
    /// else [`Generation::FRESH`]. Ignored for read-only.
    pub generation: Generation,
}

/// The properties and abilities of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct VolumeFlags(pub u32);

impl VolumeFlags {
    /// The target refuses writes.
    pub const READ_ONLY: Self = Self(1);
    /// Acknowledged writes may be lost until a FLUSH.
    pub const VOLATILE_CACHE: Self = Self(2);
    /// DISCARD has an effect.
    pub const DISCARD: Self = Self(4);
    /// WRITE_ZEROES is supported.
    pub const WRITE_ZEROES: Self = Self(8);
    /// Content is lost when the target ends (memory, null).
    pub const EPHEMERAL: Self = Self(16);
    /// An initiator holds it.
    pub const IN_USE: Self = Self(32);

    /// Whether it has all of `other`.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The flags, with `other` if `yes`.
    #[must_use]
    pub fn with(self, other: Self, yes: bool) -> Self {
        if yes { Self(self.0 | other.0) } else { self }
    }
}

/// Answer to OPEN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenReply {
    /// The number of the volume in commands.
    pub handle: VolumeHandle,
    /// Abilities.
    pub flags: VolumeFlags,
    /// Block size.
    pub block_size: BlockSize,
    /// Capacity.
    pub blocks: BlockCount,
    /// Discards that are smaller than this or not aligned to it have no effect. In bytes; 0 if
    /// unknown.
    pub discard_granularity_bytes: u32,
    /// Stable identity of the volume.
    pub uuid: [u8; 16],
    /// Changes when acknowledged writes that no FLUSH covered may have been lost.
    pub verifier: WriteVerifier,
    /// The present generation of the volume. A writer names it when it opens the volume again.
    pub generation: Generation,
}

/// Head of a LIST reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeListHeader {
    /// Entries that follow.
    pub entries: u32,
    /// Volumes the target has in all.
    pub total: u32,
}

/// One volume of a LIST reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeEntry {
    /// Name.
    pub name: Name,
    /// Abilities.
    pub flags: VolumeFlags,
    /// Block size.
    pub block_size: BlockSize,
    /// Capacity.
    pub blocks: BlockCount,
    /// Stable identity of the volume.
    pub uuid: [u8; 16],
}

/// The event in the answer to ASYNC_EVENT. The number is the value of the response.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum AsyncEvent {
    /// The target drains: it will stop soon.
    Draining = 1,
    /// A volume that the session has open was resized, became read-only or writable, or was
    /// removed. LIST with its handle says how it is now.
    VolumesChanged = 2,
    /// Another initiator took over the volume of the session.
    Fenced = 3,
    /// Another program takes the place of the target: it is away for a moment, and knows everything
    /// when it is back. An initiator that parks the next ASYNC_EVENT instead of leaving does not
    /// know this event, and is told [`Self::Draining`].
    Upgrading = 4,
}

impl AsyncEvent {
    /// From the wire. `None` for an event of a later version, which may be ignored.
    #[must_use]
    pub fn from_wire(number: u32) -> Option<Self> {
        [Self::Draining, Self::VolumesChanged, Self::Fenced, Self::Upgrading]
            .into_iter()
            .find(|e| *e as u32 == number)
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireLogin {
    host: [u8; 16],
    host_name: [u8; NAME_BYTES],
    keep_alive_ms: U32,
    beside: U32,
    ends: U32,
    reserved: [u8; 4],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireLoginReply {
    session: [u8; 16],
    instance: [u8; 16],
    epoch: U32,
    queues_max: U16,
    reserved: [u8; 10],
    target_name: [u8; NAME_BYTES],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireOpen {
    name: [u8; NAME_BYTES],
    mode: u8,
    take_over: u8,
    reserved: [u8; 6],
    generation: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireOpenReply {
    handle: U32,
    flags: U32,
    blocks: U64,
    discard_granularity: U32,
    block_shift: u8,
    reserved: [u8; 3],
    generation: U64,
    uuid: [u8; 16],
    verifier: [u8; 16],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireListHeader {
    entries: U32,
    total: U32,
    reserved: [u8; 8],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireEntry {
    name: [u8; NAME_BYTES],
    blocks: U64,
    flags: U32,
    block_shift: u8,
    reserved: [u8; 3],
    uuid: [u8; 16],
}

const _: () = {
    assert!(size_of::<WireLogin>() == LoginRequest::BYTES);
    assert!(size_of::<WireLoginReply>() == LoginReply::BYTES);
    assert!(size_of::<WireOpen>() == OpenRequest::BYTES);
    assert!(size_of::<WireOpenReply>() == OpenReply::BYTES);
    assert!(size_of::<WireListHeader>() == VolumeListHeader::BYTES);
    assert!(size_of::<WireEntry>() == VolumeEntry::BYTES);
};

const LENGTH: BodyError = "body of a wrong length";
const NAME: BodyError = "bad name";
const RESERVED: BodyError = "reserved bytes are not zero";

fn zero(bytes: &[u8]) -> Result<(), BodyError> {
    if bytes.iter().all(|b| *b == 0) { Ok(()) } else { Err(RESERVED) }
}

impl LoginRequest {
    /// Length on the wire.
    pub const BYTES: usize = 96;

    /// The bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; Self::BYTES] {
        let wire = WireLogin {
            host: self.host.0,
            host_name: self.host_name.to_wire(),
            keep_alive_ms: self.keep_alive_ms.into(),
            beside: self.join.map_or(0, |join| join.beside.0).into(),
            ends: self.join.and_then(|join| join.ends).map_or(0, |ends| ends.0).into(),
            reserved: [0; 4],
        };
        zerocopy::transmute!(wire)
    }

    /// Parses.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, &'static str> {
        let wire = WireLogin::ref_from_bytes(bytes).map_err(|_| LENGTH)?;
        zero(&wire.reserved)?;
        Ok(Self {
            host: HostId(wire.host),
            host_name: Name::from_wire(&wire.host_name).map_err(|_| NAME)?,
            keep_alive_ms: wire.keep_alive_ms.get(),
            join: Join::from_wire(wire.beside.get(), wire.ends.get())?,
        })
    }
}

impl LoginReply {
    /// Length on the wire.
    pub const BYTES: usize = 112;

    /// The bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; Self::BYTES] {
        let wire = WireLoginReply {
            session: self.session.0,
            instance: self.instance.0,
            epoch: self.epoch.0.into(),
            queues_max: self.queues_max.into(),
            reserved: [0; 10],
            target_name: self.target_name.to_wire(),
        };
        zerocopy::transmute!(wire)
    }

    /// Parses.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, &'static str> {
        let wire = WireLoginReply::ref_from_bytes(bytes).map_err(|_| LENGTH)?;
        zero(&wire.reserved)?;
        let session = SessionId(wire.session);
        if session.is_none() || wire.queues_max.get() == 0 {
            return Err("a session without id or queues");
        }
        Ok(Self {
            session,
            epoch: Epoch(wire.epoch.get()),
            instance: InstanceId(wire.instance),
            queues_max: wire.queues_max.get(),
            target_name: Name::from_wire(&wire.target_name).map_err(|_| NAME)?,
        })
    }
}

impl OpenRequest {
    /// Length on the wire.
    pub const BYTES: usize = 80;

    /// The bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; Self::BYTES] {
        let wire = WireOpen {
            name: self.name.to_wire(),
            mode: self.mode as u8,
            take_over: u8::from(self.take_over),
            reserved: [0; 6],
            generation: self.generation.0.into(),
        };
        zerocopy::transmute!(wire)
    }

    /// Parses.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, &'static str> {
        let wire = WireOpen::ref_from_bytes(bytes).map_err(|_| LENGTH)?;
        zero(&wire.reserved)?;
        let mode = match wire.mode {
            0 => AccessMode::Exclusive,
            1 => AccessMode::ReadOnly,
            2 => AccessMode::Shared,
            _ => return Err("unknown access mode"),
        };
        let take_over = match wire.take_over {
            0 => false,
            1 => true,
            _ => return Err("take-over is neither 0 nor 1"),
        };
        Ok(Self {
            name: Name::from_wire(&wire.name).map_err(|_| NAME)?,
            mode,
            take_over,
            generation: Generation(wire.generation.get()),
        })
    }
}

impl OpenReply {
    /// Length on the wire.
    pub const BYTES: usize = 64;

    /// The bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; Self::BYTES] {
        let wire = WireOpenReply {
            handle: self.handle.0.into(),
            flags: self.flags.0.into(),
            blocks: self.blocks.0.into(),
            discard_granularity: self.discard_granularity_bytes.into(),
            block_shift: self.block_size.shift(),
            reserved: [0; 3],
            generation: self.generation.0.into(),
            uuid: self.uuid,
            verifier: self.verifier.0,
        };
        zerocopy::transmute!(wire)
    }

    /// Parses, and checks that the capacity is not empty, that its bytes fit, and that there is a
    /// verifier. Without a verifier the initiator could not detect a loss.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, &'static str> {
        let wire = WireOpenReply::ref_from_bytes(bytes).map_err(|_| LENGTH)?;
        zero(&wire.reserved)?;
        let (block_size, blocks) = capacity(wire.block_shift, wire.blocks.get())?;
        let verifier = WriteVerifier(wire.verifier);
        if verifier.is_none() {
            return Err("no write verifier");
        }
        Ok(Self {
            handle: VolumeHandle(wire.handle.get()),
            flags: VolumeFlags(wire.flags.get()),
            block_size,
            blocks,
            discard_granularity_bytes: wire.discard_granularity.get(),
            uuid: wire.uuid,
            verifier,
            generation: Generation(wire.generation.get()),
        })
    }
}

fn capacity(shift: u8, blocks: u64) -> Result<(BlockSize, BlockCount), &'static str> {
    let size = BlockSize::from_shift(shift).ok_or("bad block size")?;
    let blocks = BlockCount(blocks);
    match blocks.bytes(size) {
        Some(bytes) if bytes > 0 => Ok((size, blocks)),
        _ => Err("bad capacity"),
    }
}

impl VolumeListHeader {
    /// Length on the wire.
    pub const BYTES: usize = 16;

    /// The bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; Self::BYTES] {
        let wire = WireListHeader {
            entries: self.entries.into(),
            total: self.total.into(),
            reserved: [0; 8],
        };
        zerocopy::transmute!(wire)
    }

    /// Parses.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, &'static str> {
        let wire = WireListHeader::ref_from_bytes(bytes).map_err(|_| LENGTH)?;
        zero(&wire.reserved)?;
        Ok(Self { entries: wire.entries.get(), total: wire.total.get() })
    }
}

impl VolumeEntry {
    /// Length on the wire.
    pub const BYTES: usize = 96;

    /// The bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; Self::BYTES] {
        let wire = WireEntry {
            name: self.name.to_wire(),
            blocks: self.blocks.0.into(),
            flags: self.flags.0.into(),
            block_shift: self.block_size.shift(),
            reserved: [0; 3],
            uuid: self.uuid,
        };
        zerocopy::transmute!(wire)
    }

    /// Parses.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, &'static str> {
        let wire = WireEntry::ref_from_bytes(bytes).map_err(|_| LENGTH)?;
        zero(&wire.reserved)?;
        let (block_size, blocks) = capacity(wire.block_shift, wire.blocks.get())?;
        Ok(Self {
            name: Name::from_wire(&wire.name).map_err(|_| NAME)?,
            flags: VolumeFlags(wire.flags.get()),
            block_size,
            blocks,
            uuid: wire.uuid,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name() -> Name {
        Name::new("vol0").unwrap()
    }

    #[test]
    fn bodies_round_trip() {
        for join in [
            None,
            Some(Join { beside: Epoch(1), ends: None }),
            Some(Join { beside: Epoch(7), ends: Some(Epoch(3)) }),
        ] {
            let (host, host_name) = (HostId([1; 16]), name());
            let login = LoginRequest { host, host_name, keep_alive_ms: 5000, join };
            assert_eq!(LoginRequest::from_wire(&login.to_wire()), Ok(login));
        }
        let reply = LoginReply {
            session: SessionId([2; 16]),
            epoch: Epoch(1),
            instance: InstanceId([3; 16]),
            queues_max: 8,
            target_name: name(),
        };
        assert_eq!(LoginReply::from_wire(&reply.to_wire()), Ok(reply));
        for mode in [AccessMode::Exclusive, AccessMode::ReadOnly, AccessMode::Shared] {
            let take_over = mode == AccessMode::Shared;
            let open =
                OpenRequest { name: name(), mode, take_over, generation: Generation(u64::MAX - 1) };
            assert_eq!(OpenRequest::from_wire(&open.to_wire()), Ok(open));
        }
        let opened = OpenReply {
            handle: VolumeHandle(1),
            flags: VolumeFlags::DISCARD.with(VolumeFlags::READ_ONLY, true),
            block_size: BlockSize::new(512).unwrap(),
            blocks: BlockCount(2048),
            discard_granularity_bytes: 4096,
            uuid: [4; 16],
            verifier: WriteVerifier([6; 16]),
            generation: Generation(1 << 40),
        };
        assert_eq!(OpenReply::from_wire(&opened.to_wire()), Ok(opened));
        let entry = VolumeEntry {
            name: name(),
            flags: VolumeFlags::default(),
            block_size: BlockSize::new(4096).unwrap(),
            blocks: BlockCount(1),
            uuid: [5; 16],
        };
        assert_eq!(VolumeEntry::from_wire(&entry.to_wire()), Ok(entry));
        let header = VolumeListHeader { entries: 1, total: 2 };
        assert_eq!(VolumeListHeader::from_wire(&header.to_wire()), Ok(header));
        assert_eq!(AsyncEvent::from_wire(1), Some(AsyncEvent::Draining));
        assert_eq!(AsyncEvent::from_wire(2), Some(AsyncEvent::VolumesChanged));
        assert_eq!(AsyncEvent::from_wire(3), Some(AsyncEvent::Fenced));
        assert_eq!(AsyncEvent::from_wire(4), Some(AsyncEvent::Upgrading));
        assert_eq!(AsyncEvent::from_wire(5), None, "of a later version: it may be ignored");
        assert_eq!(AsyncEvent::from_wire(0), None);
    }

    #[test]
    fn login_request_golden_bytes() {
        let login = LoginRequest {
            host: HostId([1; 16]),
            host_name: name(),
            keep_alive_ms: 0x0102,
            join: Some(Join { beside: Epoch(0x0304), ends: Some(Epoch(0x0203)) }),
        };
        let mut golden = vec![1; 16];
        golden.extend(b"vol0");
        golden.extend([0; 60]);
        golden.extend([2, 1, 0, 0, 4, 3, 0, 0, 3, 2, 0, 0, 0, 0, 0, 0]);
        assert_eq!(login.to_wire().as_slice(), golden);
        assert_eq!(LoginRequest::from_wire(&golden), Ok(login));
        // A LOGIN that joins nothing has the bytes of one of an end without ways.
        golden[84..92].fill(0);
        let alone = LoginRequest { join: None, ..login };
        assert_eq!(LoginRequest::from_wire(&golden), Ok(alone));
        golden[88] = 3;
        assert!(LoginRequest::from_wire(&golden).is_err(), "it ends one and joins none");
        golden[84] = 3;
        assert!(LoginRequest::from_wire(&golden).is_err(), "it ends the one that it joins");
        golden[84..].fill(0);
        golden[92] = 1;
        assert_eq!(LoginRequest::from_wire(&golden), Err(RESERVED));
    }

    #[test]
    fn open_request_golden_bytes() {
        let open = OpenRequest {
            name: name(),
            mode: AccessMode::Shared,
            take_over: true,
            generation: Generation(0x0102_0304_0506_0708),
        };
        let mut golden = b"vol0".to_vec();
        golden.extend([0; 60]);
        golden.extend([2, 1, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(open.to_wire().as_slice(), golden);
        assert_eq!(OpenRequest::from_wire(&golden), Ok(open));
        golden[71] = 1;
        assert_eq!(OpenRequest::from_wire(&golden), Err(RESERVED));
    }

    #[test]
    fn open_reply_golden_bytes() {
        let opened = OpenReply {
            handle: VolumeHandle(7),
            flags: VolumeFlags::DISCARD,
            block_size: BlockSize::new(512).unwrap(),
            blocks: BlockCount(0x0102_0304),
            discard_granularity_bytes: 0x1000,
            uuid: [9; 16],
            verifier: WriteVerifier([8; 16]),
            generation: Generation(0x0b0a),
        };
        let mut golden = vec![7, 0, 0, 0, 4, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0x10, 0, 0, 9];
        golden.extend([0, 0, 0, 0x0a, 0x0b, 0, 0, 0, 0, 0, 0]);
        golden.extend([9; 16]);
        golden.extend([8; 16]);
        assert_eq!(opened.to_wire().as_slice(), golden);
        assert_eq!(OpenReply::from_wire(&golden), Ok(opened));
        golden[48..].fill(0);
        assert_eq!(OpenReply::from_wire(&golden), Err("no write verifier"));
    }

    #[test]
    fn capacity_is_checked() {
        assert!(capacity(9, 0).is_err());
        assert!(capacity(8, 1).is_err());
        assert!(capacity(12, u64::MAX).is_err());
        assert!(capacity(12, 1 << 51).is_err());
        assert!(capacity(12, 1 << 50).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            let _ = LoginRequest::from_wire(&bytes);
            let _ = LoginReply::from_wire(&bytes);
            let _ = OpenRequest::from_wire(&bytes);
            let _ = OpenReply::from_wire(&bytes);
            let _ = VolumeEntry::from_wire(&bytes);
            let _ = VolumeListHeader::from_wire(&bytes);
        }
    }
}
