//! A volume for a program, without a block device: the implementation of the crate `rblk-client`,
//! which has the documentation for its users.
//!
//! ```text
//! program's thread      Queue -> Polled -> EngineDriver -> Engine -> path
//!                         |                  ^ mail, v news (the data thread is the program's own)
//! rblk-control (tokio)  Volume -> Upkeep -> volume::Volume -> TargetLink -> Course
//! ```
//!
//! From [`EngineDriver`](crate::queue::EngineDriver) and `Mount` on, the parts are those of a disk.

mod buffer;
#[doc(hidden)]
pub mod detached;
mod io_request;
mod open_error;
mod pending_requests;
mod polled;
mod queue;
mod upkeep;
mod volume;

pub use rblk_protocol::auth::{KeyError, PublicKey, SecretKey};

pub use buffer::Buffer;
pub use io_request::{Completion, IoError, Reason, Refused, Request};
pub use open_error::OpenError;
pub use queue::{Counts, Queue};
pub use upkeep::VolumeWish;
pub use volume::{NotClosed, State, Volume, open};
