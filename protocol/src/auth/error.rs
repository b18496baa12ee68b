//! [`AuthError`]: why the proof of a peer failed.

/// Why the proof of a peer failed, with all details for this end. The peer gets less: a status, or
/// nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// A message of another length.
    #[error("a message of {got} bytes where {expected} are due")]
    Length {
        /// Its bytes.
        got: usize,
        /// The expected bytes.
        expected: usize,
    },
    /// A message out of its order.
    #[error("a message of the handshake out of its order")]
    Order,
    /// The peer has not the key that it must have, or the two ends saw different hellos.
    #[error("the handshake failed: the peer has another key, or a hello was changed on its way")]
    Handshake,
    /// A sealed body was changed, belongs to another command, or comes a second time.
    #[error("a sealed message was changed on its way, or comes a second time")]
    Seal,
    /// The proof of an I/O connection is missing or wrong.
    #[error("the proof of an I/O connection is missing or wrong")]
    Proof,
    /// A sealed message holds bytes that no version of the protocol knows.
    #[error("a sealed message breaks the protocol: {0}")]
    Field(&'static str),
    /// No random bytes.
    #[error("the system gives no random bytes")]
    Random,
}

impl From<snow::Error> for AuthError {
    fn from(error: snow::Error) -> Self {
        match error {
            snow::Error::Rng => Self::Random,
            snow::Error::State(_) => Self::Order,
            _ => Self::Handshake,
        }
    }
}
