//! Who the ends of a session are, and how each proves it. Pure: bytes in, bytes out; no I/O, no
//! clock. The only thing it asks of the system is random bytes.
//!
//! An end *is* its key: [`SecretKey`] stays in a file of its host, [`PublicKey`] goes into the
//! configuration of the other end.

mod base32;
mod key;
mod noise;

pub use key::{KEY_BYTES, KeyError, PublicKey, SecretKey};
