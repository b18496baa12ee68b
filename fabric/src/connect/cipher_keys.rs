//! [`CipherKeys`]: the keys of an encrypted connection.
//!
//! The fabric makes no keys and proves none: both ends get them from outside. The bytes of a key
//! are in one place on the heap, are never printed, and are wiped when the key is dropped. A move
//! of a key copies a pointer only, so it leaves no bytes behind.

use std::fmt;

use zeroize::Zeroizing;

/// The key of one direction: ChaCha20-Poly1305 (RFC 8439) as TLS 1.3 records use it (RFC 8446,
/// section 5.3).
///
/// A key encrypts one direction of one connection. A key that is used for a second connection, or
/// for both directions, lets an eavesdropper read the data.
pub struct CipherKey(Box<Zeroizing<Material>>);

type Material = [u8; CipherKey::KEY + CipherKey::IV];

impl CipherKey {
    /// Bytes of the key.
    pub const KEY: usize = 32;
    /// Bytes of the IV.
    pub const IV: usize = 12;

    /// A copy of the key and of the IV. The caller wipes its own.
    #[must_use]
    pub fn new(key: &[u8; Self::KEY], iv: &[u8; Self::IV]) -> Self {
        let mut material = Box::new(Zeroizing::new([0; Self::KEY + Self::IV]));
        material[..Self::KEY].copy_from_slice(key);
        material[Self::KEY..].copy_from_slice(iv);
        Self(material)
    }

    /// The key.
    pub(crate) fn key(&self) -> &[u8] {
        &self.0[..Self::KEY]
    }

    /// The IV.
    pub(crate) fn iv(&self) -> &[u8] {
        &self.0[Self::KEY..]
    }
}

impl fmt::Debug for CipherKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CipherKey(..)")
    }
}

/// The keys of one end of a connection. The sending key of one end is the receiving key of the
/// other.
#[derive(Debug)]
pub struct CipherKeys {
    /// Encrypts the bytes that this end sends.
    pub send: CipherKey,
    /// Decrypts the bytes that this end receives.
    pub receive: CipherKey,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_its_parts_and_is_not_printed() {
        let key = CipherKey::new(&[0xab; 32], &[0xcd; 12]);
        assert_eq!((key.key(), key.iv()), (&[0xab; 32][..], &[0xcd; 12][..]));
        let keys = CipherKeys { send: key, receive: CipherKey::new(&[0; 32], &[0; 12]) };
        let text = format!("{keys:?}");
        assert_eq!(text, "CipherKeys { send: CipherKey(..), receive: CipherKey(..) }");
    }
}
