//! [`StreamKeys`]: the keys of an I/O connection over TCP with kernel encryption (kTLS), one for
//! each direction.
//!
//! The records are those of TLS 1.3 with ChaCha20-Poly1305 (RFC 8446, section 5; RFC 8439), which
//! begin at record number 0. There is no TLS handshake: both ends know the keys.

use std::fmt;

use zeroize::Zeroizing;

use super::{Hellos, SessionSecret};
use crate::identifiers::{Epoch, Nonce};

const KEY_BYTES: usize = 32;
const IV_BYTES: usize = 12;
const ONE_BYTES: usize = KEY_BYTES + IV_BYTES;

/// The key of one direction. Its memory is cleared when it is dropped.
#[derive(Clone)]
pub struct StreamKey(Zeroizing<[u8; ONE_BYTES]>);

/// The keys of both directions of one connection.
#[derive(Clone, Debug)]
pub struct StreamKeys {
    /// Encrypts the stream from the initiator.
    pub to_target: StreamKey,
    /// Encrypts the stream from the target.
    pub to_initiator: StreamKey,
}

impl StreamKeys {
    /// The keys of a queue of a session in that epoch. `nonce` is that of the accept.
    #[must_use]
    pub fn new(
        secret: &SessionSecret,
        epoch: Epoch,
        queue: u16,
        nonce: Nonce,
        hellos: &Hellos,
    ) -> Self {
        let (epoch, queue) = (epoch.0.to_le_bytes(), queue.to_le_bytes());
        let info: [&[u8]; 5] = [b"rblk tls", &epoch, &queue, &nonce.0, &hellos.digest()];
        let both = secret.derive::<{ 2 * ONE_BYTES }>(&info);
        let half = |at: usize| {
            let mut key = Zeroizing::new([0; ONE_BYTES]);
            key.copy_from_slice(&both[at..at + ONE_BYTES]);
            StreamKey(key)
        };
        Self { to_target: half(0), to_initiator: half(ONE_BYTES) }
    }
}

impl StreamKey {
    /// The key of ChaCha20-Poly1305.
    #[must_use]
    pub fn key(&self) -> &[u8; KEY_BYTES] {
        self.0.first_chunk().unwrap_or_else(|| unreachable!("the first of 44 bytes"))
    }

    /// The IV, which is combined with the record number (RFC 8446, section 5.3).
    #[must_use]
    pub fn iv(&self) -> &[u8; IV_BYTES] {
        self.0.last_chunk().unwrap_or_else(|| unreachable!("the last of 44 bytes"))
    }
}

impl fmt::Debug for StreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StreamKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{ACCEPT_BYTES, HELLO_BYTES};

    fn keys(epoch: u32, queue: u16, nonce: u8, hello: u8) -> StreamKeys {
        let secret = SessionSecret::from_bytes(&[5; 32]);
        let (request, accept) = ([hello; HELLO_BYTES], [2; ACCEPT_BYTES]);
        let hellos = Hellos::from_private_data(&request, &accept).unwrap();
        StreamKeys::new(&secret, Epoch(epoch), queue, Nonce([nonce; 16]), &hellos)
    }

    fn hex(key: &StreamKey) -> String {
        key.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Made by another program (Python, hmac and hashlib).
    #[test]
    fn golden_keys() {
        let keys = keys(7, 3, 9, 1);
        assert_eq!(hex(&keys.to_target), GOLDEN_TO_TARGET);
        assert_eq!(hex(&keys.to_initiator), GOLDEN_TO_INITIATOR);
        assert_eq!(keys.to_target.key()[..], keys.to_target.0[..32]);
        assert_eq!(keys.to_target.iv()[..], keys.to_target.0[32..]);
    }

    #[test]
    fn no_two_connections_share_a_key() {
        let all = [
            keys(7, 3, 9, 1),
            keys(8, 3, 9, 1),
            keys(7, 4, 9, 1),
            keys(7, 3, 8, 1),
            keys(7, 3, 9, 0),
        ];
        let keys: std::collections::HashSet<String> =
            all.iter().flat_map(|keys| [hex(&keys.to_target), hex(&keys.to_initiator)]).collect();
        assert_eq!(keys.len(), 2 * all.len());
    }

    const GOLDEN_TO_TARGET: &str =
        "98abfc5a9d9650f1eef862daa4e22cbaa7d8560e0dba619944acc3ae5097b88354cba98c57f11946cf979646";
    const GOLDEN_TO_INITIATOR: &str =
        "bea7d0811ee8c732c0219bacc83f51912690c055d276657c740563cfedd9e9bfe60590bfbb2a9a64e8ec7ccc";
}
