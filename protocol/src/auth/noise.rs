//! What snow is given to work with: its own primitives, in wrappers that clear the keys they held
//! and refuse the points that make a shared secret zero.

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

/// Whether every secret that is shared with this public key is the same: the key is one of the few
/// points of a small order, and proves nothing.
pub(super) fn is_weak(public: &[u8; KEY_BYTES]) -> bool {
    let mut shared = [0; KEY_BYTES];
    Primitives.resolve_dh(&DHChoice::Curve25519).is_none_or(|mut dh| {
        dh.set(&[1; KEY_BYTES]);
        dh.dh(public, &mut shared).is_err()
    })
}

/// A Diffie-Hellman whose secret key is cleared when it is dropped.
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

/// A cipher whose key is cleared when it is dropped.
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

    #[test]
    fn points_of_small_order_are_weak() {
        let one = std::array::from_fn(|i| u8::from(i == 0));
        assert!(is_weak(&[0; KEY_BYTES]) && is_weak(&one));
    }
}
