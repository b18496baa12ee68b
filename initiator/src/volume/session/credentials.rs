//! [`Credentials`]: the key with which an initiator proves its identity, the keys that a target
//! must prove, and the encryption of streams. The stream keys come from these proofs.

use rblk_config::Encrypt;
use rblk_protocol::auth::{PublicKey, SecretKey};

/// Limit of the keys of a target: one, or two while it changes its key.
const TARGET_KEYS_MAX: usize = 2;

/// The key of this host, and the keys that the target may prove. An initiator with credentials uses
/// no target that proves none of them.
#[derive(Clone, Debug)]
pub struct Credentials {
    key: SecretKey,
    target_keys: Vec<PublicKey>,
    encrypt: Encrypt,
}

/// No key of a target, or too many.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0} keys of the target; name one, or two while the target changes its key")]
pub struct TargetKeysError(usize);

impl Credentials {
    /// Makes credentials. The keys are tried in that order.
    ///
    /// # Errors
    /// No key of the target, or more than two.
    pub fn new(key: SecretKey, target_keys: Vec<PublicKey>) -> Result<Self, TargetKeysError> {
        let keys = target_keys.len();
        if !(1..=TARGET_KEYS_MAX).contains(&keys) {
            return Err(TargetKeysError(keys));
        }
        Ok(Self { key, target_keys, encrypt: Encrypt::Auto })
    }

    /// Replaces the encryption of I/O connections over TCP. The default is [`Encrypt::Auto`].
    #[must_use]
    pub fn encrypting(self, encrypt: Encrypt) -> Self {
        Self { encrypt, ..self }
    }

    /// Whether I/O connections over TCP are encrypted.
    pub(super) fn encrypt(&self) -> Encrypt {
        self.encrypt
    }

    /// The key of this host.
    pub(super) fn key(&self) -> &SecretKey {
        &self.key
    }

    /// The keys that the target may prove, at least one.
    pub(super) fn target_keys(&self) -> &[PublicKey] {
        &self.target_keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_has_one_key_or_two() {
        let key = SecretKey::generate().unwrap();
        let target = SecretKey::generate().unwrap().public();
        for (keys, fine) in [(0, false), (1, true), (2, true), (3, false)] {
            let made = Credentials::new(key.clone(), vec![target; keys]);
            assert_eq!(made.is_ok(), fine, "{keys}");
        }
    }
}
