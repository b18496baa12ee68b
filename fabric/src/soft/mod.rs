//! The software provider: RC queue pairs in user space, over TCP between hosts and over a seeded
//! in-memory link in tests.
//!
//! There is no "NIC thread": the engine of a queue pair runs inside its owner's [`Poller`]. Posting
//! tries to put the frames on the link right away, one call per batch, headers and short payloads
//! from a fixed buffer and long ones straight from the MR; polling drives the receiving side: long
//! payloads straight into the MR, short ones many to a call and copied.
//!
//! | file | what is in it |
//! |---|---|
//! | `device` | [`Device`] and its claims |
//! | `domain` | [`ProtectionDomain`], [`MemoryRegion`], the key tables |
//! | `frame` | the header of every frame |
//! | `handshake` | request and reply, before the frames |
//! | `link` | byte streams: the `Link` trait and TCP |
//! | [`memory`] | the in-memory network: delay, fragmentation, cuts |
//! | `late` | for tests: QPs that, as on cards, are over only when they are destroyed |
//! | `queue_pair` | queues, states, the flush |
//! | `transmit`, `receive` | the two directions of a queue pair |
//! | `poller` | [`Poller`]: readiness and turns |
//! | `completions` | the completion queue |
//! | `route`, `listener` | how connections come to be |
//!
//! # Rules kept
//!
//! Everything is checked as a card would check it: lkey, bounds and rights at the requester and at
//! the RECV ([`LocalProtection`](crate::WcStatus::LocalProtection)), rkey, bounds and rights at the
//! responder, which answers with a NAK and dies too; a missing RECV is an RNR NAK (`rnr_retry` is
//! 0); READs beyond the negotiated depth are refused; slots of unsignaled WRs come back with the
//! next signaled completion that is *reaped*; completions of the send queue come in posting order.
//!
//! # Acknowledgements
//!
//! Every header carries the count of requests its sender has executed. A frame of its own is sent
//! only when a signaled WR asked and nothing else left meanwhile: at the second empty poll, or at
//! [`arm`](crate::Poller::arm). Unsignaled WRs cause none.
//!
//! # Dead regions
//!
//! Keys are looked up again before every single copy and every call that reads or writes an MR,
//! under a read lock held for just that turn. [`MemoryRegion`]'s drop takes the write lock: when it
//! returns, no byte can land any more, not even of a message that was half there.

mod completions;
mod device;
mod domain;
mod frame;
mod handshake;
mod late;
mod link;
mod listener;
pub mod memory;
mod poller;
mod queue_pair;
mod receive;
mod route;
mod transmit;

pub use device::Device;
pub use domain::{MemoryRegion, ProtectionDomain};
pub use listener::{Incoming, Listener};
pub use poller::{Poller, PollerHandle};
pub use queue_pair::Connection;
pub use route::Route;
