//! [`QueueKey`] and [`QueueProof`]: how the ends of an I/O connection prove that they belong to the
//! session. The proofs travel in the self-test, so they cost no round trip.
//!
//! ```text
//! SELF_TEST, in capsule: | nonce of the initiator, 16 | HMAC(K, "initiator", hellos, nonce), 32 |
//! written back:          | pattern of the self-test, 32 | HMAC(K, "target", hellos, nonce), 32 |
//! K = HKDF-SHA256(session secret, "rblk queue" | epoch, u32 LE | queue, u16 LE)
//! ```
//!
//! The nonce of the target is in its accept, which is one of the hellos. So no proof fits another
//! connection, queue, epoch or session, and none can be sent back to its sender.

use std::fmt;
use std::hint::black_box;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use zeroize::Zeroizing;

use super::{AuthError, Hellos, SessionSecret};
use crate::identifiers::{Epoch, Nonce, Sequence};
use crate::limits::QUEUE_PROOF_BYTES;
use crate::selftest::{SELF_TEST_BYTES, self_test_pattern};

const MAC_BYTES: usize = 32;
const NONCE_BYTES: usize = 16;

/// Bytes of a [`QueueProof`].
pub const PROOF_BYTES: usize = QUEUE_PROOF_BYTES;

const _: () = assert!(PROOF_BYTES == NONCE_BYTES + MAC_BYTES, "a nonce and a MAC");

const _: () = assert!(MAC_BYTES < SELF_TEST_BYTES, "there is room for a pattern");

/// The key of one I/O connection. Its memory is cleared when it is dropped.
#[derive(Clone)]
pub struct QueueKey(Zeroizing<[u8; 32]>);

/// The proof that an initiator sends with the self-test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueProof([u8; PROOF_BYTES]);

/// The answer of the target to a [`QueueProof`].
#[derive(Clone, Copy, Debug)]
pub struct TargetProof([u8; MAC_BYTES]);

impl QueueKey {
    /// The key of a queue of a session in that epoch.
    #[must_use]
    pub fn new(secret: &SessionSecret, epoch: Epoch, queue: u16) -> Self {
        Self(secret.derive(&[b"rblk queue", &epoch.0.to_le_bytes(), &queue.to_le_bytes()]))
    }

    /// For the initiator: its proof, and the proof that it must get. The nonce is random and new.
    #[must_use]
    pub fn prove(&self, hellos: &Hellos, nonce: Nonce) -> (QueueProof, TargetProof) {
        let mut proof = [0; PROOF_BYTES];
        proof[..NONCE_BYTES].copy_from_slice(&nonce.0);
        proof[NONCE_BYTES..].copy_from_slice(&self.mac(b"initiator", hellos, &nonce.0));
        (QueueProof(proof), TargetProof(self.mac(b"target", hellos, &nonce.0)))
    }

    /// For the target: checks the in-capsule data of a self-test. Returns the answer.
    ///
    /// # Errors
    /// [`AuthError::Proof`]: the connection must end.
    pub fn check(&self, hellos: &Hellos, body: &[u8]) -> Result<TargetProof, AuthError> {
        let proof: &[u8; PROOF_BYTES] = body.try_into().map_err(|_| AuthError::Proof)?;
        let (nonce, mac) = proof.split_at(NONCE_BYTES);
        if !same(&self.mac(b"initiator", hellos, nonce), mac) {
            return Err(AuthError::Proof);
        }
        Ok(TargetProof(self.mac(b"target", hellos, nonce)))
    }

    fn mac(&self, role: &[u8], hellos: &Hellos, nonce: &[u8]) -> [u8; MAC_BYTES] {
        // HMAC takes keys of every length.
        let Ok(mac) = Hmac::<Sha256>::new_from_slice(self.0.as_slice()) else {
            unreachable!("a key of 32 bytes")
        };
        let [request, accept] = hellos.parts();
        let parts = [role, request, accept, nonce];
        parts.into_iter().fold(mac, Mac::chain_update).finalize().into_bytes().into()
    }
}

impl fmt::Debug for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("QueueKey")
    }
}

impl QueueProof {
    /// The in-capsule data of the self-test.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; PROOF_BYTES] {
        &self.0
    }
}

impl TargetProof {
    /// The offset of the proof in the bytes written back.
    pub const AT: usize = SELF_TEST_BYTES - MAC_BYTES;

    /// The bytes that the target writes back: the begin of the [pattern](self_test_pattern), and
    /// the proof.
    #[must_use]
    pub fn answer(&self, sequence: Sequence) -> [u8; SELF_TEST_BYTES] {
        let mut answer = self_test_pattern(sequence);
        answer[Self::AT..].copy_from_slice(&self.0);
        answer
    }

    /// Whether `written` is the expected answer. Takes constant time.
    #[must_use]
    pub fn is_answer(&self, sequence: Sequence, written: &[u8; SELF_TEST_BYTES]) -> bool {
        same(&self.answer(sequence), written)
    }
}

/// Whether the bytes are the same, in a time that depends on their number only.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differs = a.iter().zip(b).fold(0, |differs, (a, b)| black_box(differs | (a ^ b)));
    a.len() == b.len() && black_box(differs) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::Features;
    use crate::hello::tests::asked;
    use crate::hello::{HelloAccept, HelloRequest};
    use crate::identifiers::InstanceId;
    use crate::negotiate::{Offer, negotiate};
    use crate::tag::QueueDepth;

    const NONCE: Nonce = Nonce([0xdd; 16]);

    fn secret() -> SessionSecret {
        SessionSecret::from_bytes(&[5; 32])
    }

    fn key() -> QueueKey {
        QueueKey::new(&secret(), Epoch(7), 3)
    }

    fn accept() -> HelloAccept {
        let offer = Offer {
            depth: QueueDepth::new(64).unwrap(),
            features: Features::AUTH,
            in_capsule_bytes: 8192,
            io_max_bytes: 1 << 18,
            instance: InstanceId([0xbb; 16]),
            nonce: Nonce([0xcc; 16]),
        };
        negotiate(&HelloRequest { features: Features::AUTH, ..asked() }, &offer).unwrap()
    }

    fn hellos() -> Hellos {
        Hellos::new(&HelloRequest { features: Features::AUTH, ..asked() }, &accept())
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn both_ends_prove() {
        let (proof, expected) = key().prove(&hellos(), NONCE);
        let answer = key().check(&hellos(), proof.as_bytes()).unwrap().answer(Sequence(1));
        assert!(expected.is_answer(Sequence(1), &answer));
        assert!(!expected.is_answer(Sequence(2), &answer), "the pattern is of another sequence");
        assert_eq!(answer[..32], self_test_pattern(Sequence(1))[..32]);
        for bit in 0..SELF_TEST_BYTES * 8 {
            let mut answer = answer;
            answer[bit / 8] ^= 1 << (bit % 8);
            assert!(!expected.is_answer(Sequence(1), &answer), "bit {bit}");
        }
    }

    #[test]
    fn a_flipped_bit_of_a_proof_is_found() {
        let (proof, _) = key().prove(&hellos(), NONCE);
        for bit in 0..PROOF_BYTES * 8 {
            let mut proof = *proof.as_bytes();
            proof[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(key().check(&hellos(), &proof).err(), Some(AuthError::Proof), "bit {bit}");
        }
        for body in [&[][..], &proof.as_bytes()[1..], &[0; PROOF_BYTES + 1]] {
            assert_eq!(key().check(&hellos(), body).err(), Some(AuthError::Proof));
        }
    }

    #[test]
    fn a_queue_proof_of_another_queue_epoch_or_session_fails() {
        let (proof, _) = key().prove(&hellos(), NONCE);
        for other in [
            QueueKey::new(&secret(), Epoch(7), 4),
            QueueKey::new(&secret(), Epoch(8), 3),
            QueueKey::new(&SessionSecret::from_bytes(&[6; 32]), Epoch(7), 3),
        ] {
            assert!(other.check(&hellos(), proof.as_bytes()).is_err());
        }
        let asked = HelloRequest { features: Features::AUTH, ..asked() };
        for other in [
            HelloAccept { nonce: Nonce([0xce; 16]), ..accept() },
            HelloAccept { features: Features(0), ..accept() },
        ] {
            let hellos = Hellos::new(&asked, &other);
            assert!(key().check(&hellos, proof.as_bytes()).is_err(), "another connection");
        }
    }

    #[test]
    fn a_stripped_encryption_bit_fails_the_proof() {
        let both = Features::AUTH.or(Features::ENCRYPT);
        let asked = |features| HelloRequest { features, ..asked() };
        let accept = |features| HelloAccept { features, ..accept() };
        let honest = Hellos::new(&asked(both), &accept(both));
        let (proof, expected) = key().prove(&honest, NONCE);
        assert!(key().check(&honest, proof.as_bytes()).is_ok());
        // Taken out of the request, of the accept, or of both, on the way to one end.
        for (request, accepted) in
            [(Features::AUTH, both), (both, Features::AUTH), (Features::AUTH, Features::AUTH)]
        {
            let other = Hellos::new(&asked(request), &accept(accepted));
            assert_eq!(key().check(&other, proof.as_bytes()).err(), Some(AuthError::Proof));
            let (_, theirs) = key().prove(&other, NONCE);
            assert!(!expected.is_answer(Sequence(1), &theirs.answer(Sequence(1))));
        }
    }

    #[test]
    fn a_proof_is_not_sent_back() {
        let (proof, expected) = key().prove(&hellos(), NONCE);
        let mut reflected = self_test_pattern(Sequence(1));
        reflected[32..].copy_from_slice(&proof.as_bytes()[NONCE_BYTES..]);
        assert!(!expected.is_answer(Sequence(1), &reflected));
    }

    /// Made by another program (Python, hmac and hashlib).
    #[test]
    fn golden_proofs() {
        let (proof, expected) = key().prove(&hellos(), NONCE);
        assert_eq!(hex(&key().0[..]), GOLDEN_KEY);
        assert_eq!(hex(proof.as_bytes()), GOLDEN_PROOF);
        assert_eq!(hex(&expected.0), GOLDEN_TARGET);
    }

    const GOLDEN_KEY: &str = "4793ce4d9e9593e2fbc473b00e340449a3d4efd3bb61faf536d5c6a9a28a1f9b";
    const GOLDEN_PROOF: &str = "ddddddddddddddddddddddddddddddddb413b6e499b243815f0e35e04c6dcf1428d67b02f1b6099496244f05c3f3ecc3";
    const GOLDEN_TARGET: &str = "b8368c103033fa1a9140e3feb7aeaf2ad4cc2068cac3fa36f45a70a0ad3d201c";
}
