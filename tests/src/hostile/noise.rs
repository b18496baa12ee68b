//! The handshake, the seal and the proofs, written from `docs/internals/wire.md` and from nothing
//! else. This file uses no type of `protocol::auth`.

use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use snow::{Builder, HandshakeState, StatelessTransportState};

const PATTERN: &str = "Noise_XK_25519_ChaChaPoly_SHA256";
/// Bytes that the seal adds.
pub const TAG: usize = 16;
/// Bytes of a sealed reply before the payload: status 2, reserved 2, value 4.
const REPLY_HEAD: usize = 8;

/// The byte of a transport in the prologue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Transport {
    /// InfiniBand and RoCE.
    Verbs = 1,
    /// iWARP.
    Iwarp = 2,
    /// The software provider over TCP.
    Tcp = 3,
}

/// The keys of a host: its own secret key, and the public key of the target.
#[derive(Clone, Debug)]
pub struct Keys {
    /// Secret.
    pub host: [u8; 32],
    /// Public.
    pub target: [u8; 32],
}

/// The 32 bytes of a key in its text form: a prefix, a colon, base32 of the key and 4 bytes more.
///
/// # Panics
/// The text has another form.
#[must_use]
pub fn key_of(text: &str) -> [u8; 32] {
    const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz234567";
    let (_, code) = text.trim().split_once(':').expect("a prefix and a colon");
    let mut bits: u32 = 0;
    let mut count = 0;
    let mut bytes = Vec::new();
    for letter in code.bytes() {
        let five = LETTERS.iter().position(|l| *l == letter).expect("base32");
        bits = bits << 5 | u32::try_from(five).expect("five bits");
        count += 5;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count).to_le_bytes()[0]);
            bits &= (1 << count) - 1;
        }
    }
    assert_eq!(bytes.len(), 36, "a key and its checksum");
    *bytes.first_chunk().expect("32 bytes")
}

/// The prologue of the handshake of an admin connection.
#[must_use]
pub fn prologue(asked: &[u8], accept: &[u8], transport: Transport) -> Vec<u8> {
    [b"rblk admin v3".as_slice(), &asked[..48], &accept[..64], &[transport as u8]].concat()
}

/// A handshake of the initiator, and its first message.
///
/// # Panics
/// The library refuses the pattern.
#[must_use]
pub fn begin(keys: &Keys, prologue: &[u8]) -> (HandshakeState, Vec<u8>) {
    let builder = Builder::new(PATTERN.parse().expect("a pattern"));
    let mut state = builder
        .prologue(prologue)
        .and_then(|b| b.local_private_key(&keys.host))
        .and_then(|b| b.remote_public_key(&keys.target))
        .and_then(Builder::build_initiator)
        .expect("a handshake");
    let first = write(&mut state, &[]);
    (state, first)
}

/// The next message of a handshake.
///
/// # Panics
/// The other side has to write next.
#[must_use]
pub fn write(state: &mut HandshakeState, payload: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 1024];
    let len = state.write_message(payload, &mut message).expect("this side's turn");
    message.truncate(len);
    message
}

/// Takes message 2.
///
/// # Errors
/// The sender does not own the target's key.
pub fn read(state: &mut HandshakeState, message: &[u8]) -> Result<(), snow::Error> {
    state.read_message(message, &mut [0; 1024]).map(drop)
}

/// The body of a sealed command.
///
/// # Panics
/// The body is too long.
#[must_use]
pub fn seal(keys: &StatelessTransportState, sequence: u32, capsule: &[u8], body: &[u8]) -> Vec<u8> {
    let plain = [capsule, body].concat();
    let mut sealed = vec![0; plain.len() + TAG];
    let len = keys.write_message(sequence.into(), &plain, &mut sealed).expect("a short body");
    assert_eq!(len, sealed.len());
    sealed
}

/// Status, value and payload of a sealed reply.
#[must_use]
pub fn open(
    keys: &StatelessTransportState,
    sequence: u32,
    sealed: &[u8],
) -> Option<(u16, u32, Vec<u8>)> {
    let mut plain = vec![0; sealed.len()];
    let len = keys.read_message(sequence.into(), sealed, &mut plain).ok()?;
    let payload = plain.get(REPLY_HEAD..len)?.to_vec();
    let value = u32::from_le_bytes([plain[4], plain[5], plain[6], plain[7]]);
    Some((u16::from_le_bytes([plain[0], plain[1]]), value, payload))
}

/// Bytes of the sealed form of a payload.
#[must_use]
pub fn sealed_len(payload: usize) -> usize {
    REPLY_HEAD + payload + TAG
}

/// The inputs of a queue's proof.
#[derive(Clone, Copy, Debug)]
pub struct Queue<'q> {
    /// The secret of the session.
    pub secret: &'q [u8; 32],
    /// Its epoch.
    pub epoch: u32,
    /// The number of the queue.
    pub queue: u16,
    /// The hello as it was sent.
    pub asked: &'q [u8],
    /// The accept as it came.
    pub accept: &'q [u8],
}

impl Queue<'_> {
    /// The proof of one side.
    ///
    /// # Panics
    /// The library refuses a length.
    #[must_use]
    pub fn proof(&self, side: &str, nonce: &[u8; 16]) -> [u8; 32] {
        let mut info = b"rblk queue".to_vec();
        info.extend(self.epoch.to_le_bytes());
        info.extend(self.queue.to_le_bytes());
        let mut key = [0; 32];
        Hkdf::<Sha256>::new(None, self.secret).expand(&info, &mut key).expect("32 bytes");
        let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("any length");
        for part in [side.as_bytes(), &self.asked[..48], &self.accept[..64], nonce] {
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }
}
