//! [`SessionSecret`]: the shared secret of the two ends of a session, for one epoch. The keys of
//! its I/O connections are derived from it.

use std::fmt;

use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::{AuthError, noise};
use crate::admin_bodies::LoginReply;

/// Bytes of a session secret.
pub const SECRET_BYTES: usize = 32;

/// The secret of a session in one epoch. A target makes a new one for each LOGIN, and hands it out
/// in the sealed reply only. Its memory is cleared when it is dropped.
#[derive(Clone)]
pub struct SessionSecret(Zeroizing<[u8; SECRET_BYTES]>);

impl SessionSecret {
    /// A new one.
    ///
    /// # Errors
    /// [`AuthError::Random`].
    pub fn random() -> Result<Self, AuthError> {
        Ok(Self(noise::random_secret()?))
    }

    /// From its bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; SECRET_BYTES]) -> Self {
        Self(Zeroizing::new(*bytes))
    }

    /// The payload of the answer to an authenticated LOGIN, to be sealed: the reply, and this
    /// secret behind it.
    #[must_use]
    pub fn login_payload(
        &self,
        reply: &LoginReply,
    ) -> Zeroizing<[u8; LoginReply::BYTES + SECRET_BYTES]> {
        let mut payload = Zeroizing::new([0; LoginReply::BYTES + SECRET_BYTES]);
        payload[..LoginReply::BYTES].copy_from_slice(&reply.to_wire());
        payload[LoginReply::BYTES..].copy_from_slice(self.0.as_slice());
        payload
    }

    /// The reply and the secret of a payload of [`Self::login_payload`].
    ///
    /// # Errors
    /// [`AuthError::Length`] and [`AuthError::Field`]: the rule that is broken.
    pub fn from_login_payload(payload: &[u8]) -> Result<(LoginReply, Self), AuthError> {
        let length =
            AuthError::Length { got: payload.len(), expected: LoginReply::BYTES + SECRET_BYTES };
        let (reply, secret) = payload.split_at_checked(LoginReply::BYTES).ok_or(length)?;
        let secret: &[u8; SECRET_BYTES] = secret.try_into().map_err(|_| length)?;
        let reply = LoginReply::from_wire(reply).map_err(AuthError::Field)?;
        Ok((reply, Self::from_bytes(secret)))
    }

    /// Key bytes for one use: HKDF-SHA256 (RFC 5869) without salt.
    pub(super) fn derive<const N: usize>(&self, info: &[&[u8]]) -> Zeroizing<[u8; N]> {
        // The only error of HKDF is a key of more than 255 digests.
        const { assert!(N <= 255 * 32) };
        let mut key = Zeroizing::new([0; N]);
        let derived = Hkdf::<Sha256>::new(None, self.0.as_slice())
            .expand_multi_info(info, key.as_mut_slice());
        debug_assert!(derived.is_ok(), "{N} bytes are not too many");
        key
    }
}

impl fmt::Debug for SessionSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionSecret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identifiers::{Epoch, InstanceId, Name, SessionId};

    #[test]
    fn a_login_payload_is_the_reply_and_the_secret() {
        let reply = LoginReply {
            session: SessionId([1; 16]),
            epoch: Epoch(1),
            instance: InstanceId([2; 16]),
            queues_max: 64,
            target_name: Name::new("store1").unwrap(),
        };
        let payload = SessionSecret::from_bytes(&[5; 32]).login_payload(&reply);
        assert_eq!(payload[..LoginReply::BYTES], reply.to_wire());
        assert_eq!(payload[LoginReply::BYTES..], [5; 32]);
        let (read, secret) = SessionSecret::from_login_payload(&payload[..]).unwrap();
        assert_eq!((read, *secret.0), (reply, [5; 32]));
        for cut in [0, LoginReply::BYTES, payload.len() - 1] {
            assert!(SessionSecret::from_login_payload(&payload[..cut]).is_err());
        }
        assert_eq!(format!("{secret:?}"), "SessionSecret");
        assert_ne!(*SessionSecret::random().unwrap().0, *SessionSecret::random().unwrap().0);
    }
}
