//! [`Hellos`]: the hellos of one connection as they were sent. Every proof covers them, so a byte
//! that changes on the way, such as a bit of the features, makes the proofs fail.

use sha2::{Digest, Sha256};

use super::AuthError;
use crate::hello::{HelloAccept, HelloRequest};
use crate::limits::{ACCEPT_BYTES, HELLO_BYTES};

/// The carrier of a connection. Both ends know it without a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Carrier {
    /// Verbs over InfiniBand or RoCE.
    Verbs = 1,
    /// Verbs over iWARP.
    Iwarp = 2,
    /// The software provider over TCP.
    Tcp = 3,
    /// The software provider in memory.
    Memory = 4,
}

/// The request and the accept of one connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hellos {
    request: [u8; HELLO_BYTES],
    accept: [u8; ACCEPT_BYTES],
}

impl Hellos {
    /// From the private data of both directions, padded or not.
    ///
    /// # Errors
    /// [`AuthError::Length`]: one is too short.
    pub fn from_private_data(request: &[u8], accept: &[u8]) -> Result<Self, AuthError> {
        Ok(Self { request: first(request)?, accept: first(accept)? })
    }

    /// Of hellos that this end has made itself, or has parsed.
    #[must_use]
    pub fn new(request: &HelloRequest, accept: &HelloAccept) -> Self {
        Self { request: request.to_wire(), accept: accept.to_wire() }
    }

    /// The bytes on which both ends of an admin connection must agree.
    pub(super) fn prologue(&self, carrier: Carrier) -> Vec<u8> {
        const LABEL: &[u8] = b"rblk admin v3";
        [LABEL, &self.request, &self.accept, &[carrier as u8]].concat()
    }

    /// The bytes of both, the request first.
    pub(super) fn parts(&self) -> [&[u8]; 2] {
        [&self.request, &self.accept]
    }

    pub(super) fn digest(&self) -> [u8; 32] {
        Sha256::new().chain_update(self.request).chain_update(self.accept).finalize().into()
    }
}

fn first<const N: usize>(bytes: &[u8]) -> Result<[u8; N], AuthError> {
    bytes.first_chunk::<N>().copied().ok_or(AuthError::Length { got: bytes.len(), expected: N })
}
