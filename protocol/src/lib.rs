#![forbid(unsafe_code)]
//! What is said on the wire: bytes and the rules about them. No I/O, no async, no unsafe.
//!
//! # A conversation
//!
//! ```text
//! initiator                                              target
//!    | -- CM connect: HelloRequest (48 B private data) ---> |   negotiate()
//!    | <-- CM accept: HelloAccept (48 B) / HelloReject ---- |
//!    | == SEND  CommandCapsule (64 B) [+ in-capsule data] = |
//!    | <= RDMA READ of write data above the threshold ===== |
//!    | <= RDMA WRITE of read data ========================= |
//!    | <= SEND ResponseCapsule (16 B), or WRITE_WITH_IMM == |
//! ```
//!
//! One *admin* connection opens a session (LOGIN, LIST, OPEN, CLOSE, KEEP_ALIVE, ASYNC_EVENT); any
//! number of *I/O* connections join it (READ, WRITE, FLUSH, DISCARD, WRITE_ZEROES), each with its
//! own tags. The target alone moves data: the initiator exposes a buffer per command, the target
//! exposes nothing.
//!
//! # A command capsule
//!
//! ```text
//!  0        1        2                 4                                   8
//! | opcode | flags  | tag             | volume handle                      |
//! | lba                                                                    |  8
//! | count (blocks)                                                         | 16
//! | epoch                             | sequence                           | 24
//! | digest (CRC-32C of the data)      | in-capsule data bytes              | 32
//! | reserved, zero                                                         | 40
//! | descriptor: address                                                    | 48
//! | descriptor: length                | descriptor: rkey                   | 56
//! | in-capsule data, if any ...                                            | 64
//! ```
//!
//! # Lists
//!
//! Where [`Features::CAPSULE_LISTS`] was agreed, one message may hold up to [`limits::LIST_MAX`]
//! capsules, one behind the other: commands, of which only the last may have in-capsule data, or
//! responses. A list means what its capsules would mean, sent one by one in the same order. An
//! immediate always answers one READ.
//!
//! Where [`Features::DATA_LISTS`] was agreed too, up to [`limits::LIST_DATA_MAX`] of the commands
//! may have data. It is behind all capsules, that of the first at the end of the message and each
//! further one's before it, so a reader who goes from capsule to capsule knows where the data of
//! each is. A message with one data is as without.
//!
//! ```text
//! | WRITE a | READ | WRITE b | WRITE c | data of c | data of b | data of a |
//! ```
//!
//! # Rules
//!
//! - All integers are little-endian; reserved bytes are zero and checked; nothing has zero length.
//! - The tag is the slot, the credit and the buffer index: a tag is free again when its response
//!   arrived. There are no credit messages.
//! - No field is used before it was parsed into a checked type. Parsing never panics and never
//!   allocates.

mod admin;
mod block;
mod capsule;
mod descriptor;
mod hello;
mod identity;
mod immediate;
pub mod limits;
mod list;
mod mutation;
mod opcode;
mod selftest;
mod status;
mod tag;
mod version;
pub mod width;

pub use admin::{
    AccessMode, AsyncEvent, LoginReply, LoginRequest, OpenReply, OpenRequest, VolumeEntry,
    VolumeFlags, VolumeListHeader,
};
pub use block::{BlockCount, BlockRange, BlockSize, Lba};
pub use capsule::{CapsuleError, CommandCapsule, CommandFlags, ResponseCapsule};
pub use descriptor::KeyedDescriptor;
pub use hello::{
    ConnectionKind, Features, HelloAccept, HelloError, HelloReject, HelloRequest, Offer,
    RejectReason, negotiate,
};
pub use identity::{
    Epoch, Generation, HostId, InstanceId, Name, NameError, Sequence, SessionId, VolumeHandle,
    WriteVerifier,
};
pub use immediate::Immediate;
pub use list::{CommandList, ResponseList};
pub use mutation::Mutation;
pub use opcode::Opcode;
pub use selftest::{SELF_TEST_BYTES, self_test_pattern};
pub use status::Status;
pub use tag::{QueueDepth, Tag};
pub use version::{VERSIONS, Version};
