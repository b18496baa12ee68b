#![forbid(unsafe_code)]
//! The wire protocol: the bytes, and the rules about them. No I/O, no async, no unsafe.
//!
//! # A conversation
//!
//! ```text
//! initiator                                              target
//!    | -- CM connect: HelloRequest (48 B private data) ---> |   negotiate()
//!    | <-- CM accept: HelloAccept (64 B) / HelloReject ---- |
//!    | == SEND  CommandCapsule (64 B) [+ in-capsule data] = |
//!    | <= RDMA READ of write data above the threshold ===== |
//!    | <= RDMA WRITE of read data ========================= |
//!    | <= SEND ResponseCapsule (16 B), or WRITE_WITH_IMM == |
//! ```
//!
//! One *admin* connection opens a session (AUTHENTICATE, LOGIN, LIST, OPEN, CLOSE, KEEP_ALIVE,
//! ASYNC_EVENT); any number of *I/O* connections join it (READ, WRITE, FLUSH, DISCARD,
//! WRITE_ZEROES), each with its own tags. Only the target moves data. The initiator exposes one
//! buffer per command; the target exposes nothing.
//!
//! # A command capsule
//!
//! ```text
//!  0        1        2                 4                                   8
//! | opcode | flags  | tag             | volume handle                      |
//! | lba                                                                    |  8
//! | count (blocks)                                                         | 16
//! | epoch                             | sequence                           | 24
//! | digest (CRC-32C of the capsule)   | in-capsule data bytes              | 32
//! | digest of the data, first stripe  | second stripe                      | 40
//! | descriptor: address                                                    | 48
//! | descriptor: length                | descriptor: rkey                   | 56
//! | in-capsule data, if any ...                                            | 64
//! ```
//!
//! # Lists
//!
//! If [`Features::CAPSULE_LISTS`] was agreed, one message may hold up to [`limits::LIST_MAX`]
//! capsules, one behind the other: commands, of which only the last may have in-capsule data, or
//! responses. A list means the same as its capsules sent one by one in the same order. An immediate
//! always answers one READ.
//!
//! If [`Features::DATA_LISTS`] was agreed too, up to [`limits::LIST_DATA_MAX`] of the commands may
//! have data. The data is behind all capsules: the data of the first such command at the end of the
//! message, and the data of each later one before it. So a reader that goes from capsule to capsule
//! knows where the data of each is. A message in which one command has data is the same as without
//! this feature.
//!
//! ```text
//! | WRITE a | READ | WRITE b | WRITE c | data of c | data of b | data of a |
//! ```
//!
//! If [`Features::DATA_FIRST`] was agreed, a message with commands is the other way round: first
//! the data of the first command that has any, then that of each later one, then the capsules, that
//! of the first command last. A reader begins at the end. This holds for every message with
//! commands of an I/O connection, also for one command with or without data.
//!
//! ```text
//! | data of a | data of b | data of c | WRITE c | WRITE b | READ | WRITE a |
//! ```
//!
//! # Digests
//!
//! If [`Features::DIGEST`] was agreed, capsules and data have CRCs: see [`digest`].
//!
//! # Rules
//!
//! - All integers are little-endian; reserved bytes are zero and checked; nothing has zero length.
//! - The tag is the credit and the index of the buffer. A tag is free again when its response has
//!   arrived. There are no credit messages.
//! - No field is used before it is parsed into a checked type. Parsing never panics and never
//!   allocates.

mod admin_bodies;
pub mod auth;
mod capsule;
mod command_list;
mod descriptor;
pub mod digest;
mod drop_request;
mod features;
mod hello;
mod identifiers;
mod immediate;
mod lba;
pub mod limits;
mod mutation;
mod negotiate;
mod opcode;
mod response_list;
mod selftest;
mod status_code;
mod tag;
mod version;
pub mod width;

pub use admin_bodies::{
    AccessMode, AsyncEvent, Join, LoginReply, LoginRequest, OpenReply, OpenRequest, VolumeEntry,
    VolumeFlags, VolumeListHeader,
};
pub use capsule::{CapsuleError, CommandCapsule, CommandFlags, ResponseCapsule};
pub use command_list::CommandList;
pub use descriptor::KeyedDescriptor;
pub use digest::{DataDigests, ReadTrailer};
pub use drop_request::DropRequest;
pub use features::Features;
pub use hello::{ConnectionKind, HelloAccept, HelloError, HelloReject, HelloRequest, RejectReason};
pub use identifiers::{
    Epoch, Generation, HostId, InstanceId, Name, NameError, Nonce, Sequence, SessionId,
    VolumeHandle, WriteVerifier,
};
pub use immediate::Immediate;
pub use lba::{BlockCount, BlockRange, BlockSize, Lba};
pub use mutation::Mutation;
pub use negotiate::{Offer, negotiate};
pub use opcode::Opcode;
pub use response_list::ResponseList;
pub use selftest::{SELF_TEST_BYTES, self_test_pattern};
pub use status_code::Status;
pub use tag::{QueueDepth, Tag};
pub use version::{VERSIONS, Version};
