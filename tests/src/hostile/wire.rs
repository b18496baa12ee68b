//! The bytes of the protocol, written from `docs/internals/wire.md` and from nothing else. This
//! file uses no type of the crate `protocol`. A difference between the document and the product
//! shows here.

/// Bytes of a command capsule.
pub const COMMAND: usize = 64;
/// Bytes of a response capsule.
pub const RESPONSE: usize = 16;
/// The version that the document describes.
pub const VERSION: u16 = 3;

/// Opcodes.
pub mod op {
    #![allow(missing_docs, reason = "the names of the document")]
    pub const READ: u8 = 0x01;
    pub const WRITE: u8 = 0x02;
    pub const FLUSH: u8 = 0x03;
    pub const DISCARD: u8 = 0x04;
    pub const WRITE_ZEROES: u8 = 0x05;
    pub const SELF_TEST: u8 = 0x10;
    pub const LOGIN: u8 = 0x20;
    pub const LIST: u8 = 0x21;
    pub const OPEN: u8 = 0x22;
    pub const CLOSE: u8 = 0x23;
    pub const KEEP_ALIVE: u8 = 0x24;
    pub const ASYNC_EVENT: u8 = 0x25;
    pub const LOGOUT: u8 = 0x26;
    pub const AUTHENTICATE: u8 = 0x27;
    /// Every opcode of the document.
    pub const ALL: [u8; 14] = [
        READ,
        WRITE,
        FLUSH,
        DISCARD,
        WRITE_ZEROES,
        SELF_TEST,
        LOGIN,
        LIST,
        OPEN,
        CLOSE,
        KEEP_ALIVE,
        ASYNC_EVENT,
        LOGOUT,
        AUTHENTICATE,
    ];
}

/// Feature bits.
pub mod feature {
    #![allow(missing_docs, reason = "the names of the document")]
    pub const WRITE_WITH_IMM: u32 = 1;
    pub const DIGEST: u32 = 2;
    pub const CAPSULE_LISTS: u32 = 4;
    pub const DATA_LISTS: u32 = 8;
    pub const AUTH: u32 = 16;
    pub const ENCRYPT: u32 = 32;
}

/// Statuses that the cases name.
pub mod status {
    #![allow(missing_docs, reason = "the names of the document")]
    pub const OK: u16 = 0;
    pub const NO_SUCH_VOLUME: u16 = 6;
    pub const LIMIT_REACHED: u16 = 16;
    pub const NOT_READY: u16 = 19;
    pub const NOT_ALLOWED: u16 = 21;
}

/// HelloRequest.
#[derive(Clone, Copy, Debug)]
pub struct Hello {
    /// 0 admin, 1 I/O.
    pub kind: u8,
    /// Newest version spoken.
    pub newest: u16,
    /// Oldest version spoken.
    pub oldest: u16,
    /// Queue number of an I/O connection.
    pub queue: u16,
    /// Queue depth wanted.
    pub depth: u16,
    /// Feature bits.
    pub features: u32,
    /// In-capsule bytes that the initiator would send.
    pub in_capsule: u32,
    /// Most bytes of one command.
    pub io_max: u32,
    /// Epoch.
    pub epoch: u32,
    /// Session.
    pub session: [u8; 16],
}

impl Hello {
    /// A first admin connection.
    #[must_use]
    pub fn admin(features: u32) -> Self {
        Self {
            kind: 0,
            newest: VERSION,
            oldest: VERSION,
            queue: 0,
            depth: 16,
            features,
            in_capsule: 4096,
            io_max: 4096,
            epoch: 0,
            session: [0; 16],
        }
    }

    /// An I/O connection of a session, with a proof.
    #[must_use]
    pub fn io(session: [u8; 16], epoch: u32, queue: u16, features: u32) -> Self {
        let admin = Self::admin(features);
        let features = features | feature::AUTH;
        Self { kind: 1, queue, depth: 8, features, io_max: 65536, epoch, session, ..admin }
    }

    /// The 48 bytes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"rblk".to_vec();
        out.extend([48, self.kind]);
        for field in [self.newest, self.oldest, self.queue, self.depth, 0] {
            out.extend(field.to_le_bytes());
        }
        for field in [self.features, self.in_capsule, self.io_max, self.epoch] {
            out.extend(field.to_le_bytes());
        }
        out.extend(self.session);
        out
    }
}

/// A little-endian number at a place of a message.
///
/// # Panics
/// The message is shorter.
#[must_use]
pub fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// HelloAccept, as far as a peer needs it.
#[derive(Clone, Debug)]
pub struct Accept {
    /// The bytes as they came, without padding.
    pub bytes: Vec<u8>,
    /// Queue depth granted.
    pub depth: u16,
    /// Features of both ends.
    pub features: u32,
}

impl Accept {
    /// Parses private data.
    ///
    /// # Panics
    /// The bytes are no accept of the document.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        assert!(bytes.len() >= 64 && bytes[..5] == *b"rblk\x40", "no accept: {bytes:?}");
        assert_eq!(number(bytes, 6, 2), u64::from(VERSION), "the version");
        Self {
            bytes: bytes[..64].to_vec(),
            depth: bytes[8] as u16 | u16::from(bytes[9]) << 8,
            features: u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]),
        }
    }
}

/// A command capsule.
#[derive(Clone, Copy, Debug, Default)]
pub struct Command {
    /// Opcode.
    pub opcode: u8,
    /// Flags: 1 FUA, 2 may unmap, 4 digest.
    pub flags: u8,
    /// Tag.
    pub tag: u16,
    /// Volume handle.
    pub volume: u32,
    /// First block; the first index of LIST.
    pub lba: u64,
    /// Blocks.
    pub count: u64,
    /// Epoch.
    pub epoch: u32,
    /// Sequence.
    pub sequence: u32,
    /// CRC-32C of the data.
    pub digest: u32,
    /// Bytes of in-capsule data.
    pub in_capsule: u32,
    /// Address of the buffer.
    pub address: u64,
    /// Length of the buffer.
    pub length: u32,
    /// Key of the buffer.
    pub rkey: u32,
}

impl Command {
    /// The 64 bytes.
    #[must_use]
    pub fn bytes(&self) -> [u8; COMMAND] {
        let mut out = vec![self.opcode, self.flags];
        out.extend(self.tag.to_le_bytes());
        out.extend(self.volume.to_le_bytes());
        out.extend(self.lba.to_le_bytes());
        out.extend(self.count.to_le_bytes());
        for field in [self.epoch, self.sequence, self.digest, self.in_capsule] {
            out.extend(field.to_le_bytes());
        }
        out.extend([0; 8]);
        out.extend(self.address.to_le_bytes());
        out.extend(self.length.to_le_bytes());
        out.extend(self.rkey.to_le_bytes());
        out.try_into().unwrap_or_else(|out: Vec<u8>| panic!("{} bytes", out.len()))
    }
}

/// A response capsule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Response {
    /// The command.
    pub tag: u16,
    /// The outcome.
    pub status: u16,
    /// Bytes of an admin reply, or an event.
    pub value: u32,
}

impl Response {
    /// Parses.
    ///
    /// # Panics
    /// The response is shorter than the document says.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let value = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        Self { tag: short(0), status: short(2), value }
    }
}

/// A name, padded with zeros.
#[must_use]
pub fn name(text: &str) -> Vec<u8> {
    let mut out = text.as_bytes().to_vec();
    out.resize(64, 0);
    out
}

/// Body of LOGIN.
#[must_use]
pub fn login(host: &str, keep_alive_ms: u32) -> Vec<u8> {
    let mut out = vec![7; 16];
    out.extend(name(host));
    out.extend(keep_alive_ms.to_le_bytes());
    out.extend([0; 12]);
    out
}

/// Body of OPEN: a new opener.
#[must_use]
pub fn open(volume: &str, mode: u8, take_over: u8) -> Vec<u8> {
    let mut out = name(volume);
    out.extend([mode, take_over, 0, 0, 0, 0, 0, 0]);
    out.extend([0; 8]);
    out
}
