//! The primitives of snow, in wrappers that clear their keys and refuse the points that make a
//! shared secret zero.

use snow::Error;
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use zeroize::{Zeroize, Zeroizing};

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

/// The primitives of a handshake.
pub(super) struct Primitives;

impl CryptoResolver for Primitives {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        DefaultResolver.resolve_rng()
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        Some(Box::new(ClearedDh(DefaultResolver.resolve_dh(choice)?)))
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        Some(Box::new(ClearedCipher(DefaultResolver.resolve_cipher(choice)?)))
    }
}

/// A new secret key.
///
/// # Errors
/// The system gives no random bytes.
pub(super) fn random_secret() -> Result<Zeroizing<[u8; KEY_BYTES]>, Error> {
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    Primitives.resolve_rng().ok_or(Error::Rng)?.try_fill_bytes(bytes.as_mut())?;
    Ok(bytes)
}

/// The public key of a secret key (RFC 7748, section 6.1).
pub(super) fn public_of(secret: &[u8; KEY_BYTES]) -> [u8; KEY_BYTES] {
    let mut public = [0; KEY_BYTES];
    // `resolve_dh` of a curve that was compiled in is never `None`.
    if let Some(mut dh) = Primitives.resolve_dh(&DHChoice::Curve25519) {
        dh.set(secret);
        public.copy_from_slice(dh.pubkey());
    }
    public
}

/// The u-coordinates of small order on Curve25519 and its twist, without the top bit: 0, 1, the two
/// of order 8, and p - 1, p and p + 1, where p is 2^255 - 19. RFC 7748, section 6.1, tells of the
/// zero secret that they give; sections 5 and 7 of the numbers that have two forms.
const SMALL_ORDER: [[u8; KEY_BYTES]; 7] = [
    [
        0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        0x00, 0x00,
    ],
    [
        0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        0x00, 0x00,
    ],
    [
        0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4,
        0x6a, 0xda, 0x09, 0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49,
        0xb8, 0x00,
    ],
    [
        0x5f, 0x9c, 0x95, 0xbc, 0xa3, 0x50, 0x8c, 0x24, 0xb1, 0xd0, 0xb1, 0x55, 0x9c, 0x83, 0xef,
        0x5b, 0x04, 0x44, 0x5c, 0xc4, 0x58, 0x1c, 0x8e, 0x86, 0xd8, 0x22, 0x4e, 0xdd, 0xd0, 0x9f,
        0x11, 0x57,
    ],
    [
        0xec, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        0xff, 0x7f,
    ],
    [
        0xed, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        0xff, 0x7f,
    ],
    [
        0xee, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        0xff, 0x7f,
    ],
];

/// Whether every secret that is shared with this public key is the same: the key is one of the few
/// points of a small order, and proves nothing.
///
/// A comparison, not an exchange: a program that reads the notes of a hundred mounts reads the
/// key of the target in each, and an exchange would take longer than all else that it reads.
pub(super) fn is_weak(public: &[u8; KEY_BYTES]) -> bool {
    let mut masked = *public;
    // X25519 does not look at it (RFC 7748, section 5).
    masked[KEY_BYTES - 1] &= 0x7f;
    SMALL_ORDER.contains(&masked)
}

/// A Diffie-Hellman that clears its secret key on drop.
struct ClearedDh(Box<dyn Dh>);

impl Drop for ClearedDh {
    fn drop(&mut self) {
        // snow's type does not clear its memory. It writes over the old key here.
        self.0.set(&[0; KEY_BYTES]);
    }
}

impl Dh for ClearedDh {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn pub_len(&self) -> usize {
        self.0.pub_len()
    }

    fn priv_len(&self) -> usize {
        self.0.priv_len()
    }

    fn set(&mut self, secret: &[u8]) {
        self.0.set(secret);
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), Error> {
        self.0.generate(rng)
    }

    fn pubkey(&self) -> &[u8] {
        self.0.pubkey()
    }

    fn privkey(&self) -> &[u8] {
        self.0.privkey()
    }

    /// Refuses a shared secret of zeros, as RFC 7748, section 6.1 advises.
    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), Error> {
        self.0.dh(public, out)?;
        let shared = out.get(..KEY_BYTES).ok_or(Error::Dh)?;
        if shared.iter().fold(0, |all, byte| all | byte) == 0 {
            out.zeroize();
            return Err(Error::Dh);
        }
        Ok(())
    }
}

/// A cipher that clears its key on drop.
struct ClearedCipher(Box<dyn Cipher>);

impl Drop for ClearedCipher {
    fn drop(&mut self) {
        self.0.set(&[0; KEY_BYTES]);
    }
}

impl Cipher for ClearedCipher {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn set(&mut self, key: &[u8; KEY_BYTES]) {
        self.0.set(key);
    }

    fn encrypt(&self, nonce: u64, bound: &[u8], plain: &[u8], out: &mut [u8]) -> usize {
        self.0.encrypt(nonce, bound, plain, out)
    }

    fn decrypt(
        &self,
        nonce: u64,
        bound: &[u8],
        sealed: &[u8],
        out: &mut [u8],
    ) -> Result<usize, Error> {
        self.0.decrypt(nonce, bound, sealed, out)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// RFC 7748, section 6.1.
    #[test]
    fn public_keys_are_those_of_the_rfc() {
        let alice = [
            0x77, 0x07, 0x6d, 0x0a, 0x73, 0x18, 0xa5, 0x7d, 0x3c, 0x16, 0xc1, 0x72, 0x51, 0xb2,
            0x66, 0x45, 0xdf, 0x4c, 0x2f, 0x87, 0xeb, 0xc0, 0x99, 0x2a, 0xb1, 0x77, 0xfb, 0xa5,
            0x1d, 0xb9, 0x2c, 0x2a,
        ];
        let public = [
            0x85, 0x20, 0xf0, 0x09, 0x89, 0x30, 0xa7, 0x54, 0x74, 0x8b, 0x7d, 0xdc, 0xb4, 0x3e,
            0xf7, 0x5a, 0x0d, 0xbf, 0x3a, 0x0d, 0x26, 0x38, 0x1a, 0xf4, 0xeb, 0xa4, 0xa9, 0x8e,
            0xaa, 0x9b, 0x4e, 0x6a,
        ];
        assert_eq!(public_of(&alice), public);
        assert!(!is_weak(&public));
    }

    /// Whether an exchange with this public key gives the zero secret, which [`ClearedDh`] refuses.
    fn gives_zero(public: &[u8; KEY_BYTES]) -> bool {
        let mut dh = Primitives.resolve_dh(&DHChoice::Curve25519).unwrap();
        dh.set(&[1; KEY_BYTES]);
        dh.dh(public, &mut [0; KEY_BYTES]).is_err()
    }

    #[test]
    fn points_of_small_order_are_weak() {
        for point in SMALL_ORDER {
            let mut with_top_bit = point;
            with_top_bit[KEY_BYTES - 1] |= 0x80;
            for public in [point, with_top_bit] {
                assert!(is_weak(&public) && gives_zero(&public), "{public:02x?}");
            }
        }
    }

    proptest! {
        /// Keys beside the points of small order, and anywhere else.
        #[test]
        fn what_is_weak_is_what_gives_a_zero_secret(
            near in 0..SMALL_ORDER.len(),
            changed in 0..2 * KEY_BYTES,
            byte: u8,
            random: [u8; KEY_BYTES],
        ) {
            let mut beside = SMALL_ORDER[near];
            if let Some(place) = beside.get_mut(changed) {
                *place = byte;
            }
            for public in [beside, random] {
                prop_assert_eq!(is_weak(&public), gives_zero(&public));
            }
        }
    }
}
