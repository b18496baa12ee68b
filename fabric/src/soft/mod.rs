//! The software provider: RC queue pairs in user space. Between hosts it runs over TCP, in tests
//! over an in-memory network with a seed.
//!
//! There is no thread that plays the card. The engine of a queue pair runs inside the [`Poller`] of
//! its owner. A post tries at once to put the frames on the link, one call per batch: headers and
//! short payloads from a fixed buffer, long payloads straight from the MR. A poll runs the
//! receiving side: long payloads go straight into the MR; many short payloads come in one call and
//! are copied.
//!
//! | file | holds |
//! |---|---|
//! | `keys` | the key tables |
//! | `device`, `domain` | [`Device`] and its claims; [`ProtectionDomain`], [`MemoryRegion`] |
//! | `wire/frame`, `pieces`, `gathered`, `inbound` | frames: header, outgoing, incoming |
//! | `wire/tcp_link`, `metered_link` | the `PeerStream` trait and TCP; the calls into a link |
//! | `wire/call_bytes` | how many bytes a send call takes |
//! | [`tls`] | encryption of TCP connections by the kernel |
//! | `wire/late` | for tests: RDMA that lands until a QP is destroyed, as on cards |
//! | `wire/tcp_handshake`, `pending_handshakes` | request and reply, before the frames |
//! | `queue_pair/` | the states of a QP; sending and receiving; its queues; completions |
//! | `poller/` | [`Poller`]: which QPs a turn asks, the share of each owner, wake-ups |
//! | `incoming`, `listener`, `route` | how connections are made |
//! | [`network`] | the in-memory network: delay, fragmentation, cuts |
//!
//! # Rules kept
//!
//! Everything is checked as a card would check it. lkey, bounds and rights are checked at the
//! requester and at the RECV ([`LocalProtection`](crate::WcStatus::LocalProtection)). rkey, bounds
//! and rights are checked at the responder, which answers with a NAK and dies too. A missing RECV
//! is an RNR NAK (`rnr_retry` is 0). READs beyond the negotiated depth are refused. Entries of
//! unsignaled WRs are free again when the next signaled completion is *polled*. Completions of the
//! send queue come in the order of posting.
//!
//! # Acknowledgements
//!
//! Every header carries the number of requests that its sender has executed. A frame of its own is
//! sent only if a signaled WR asked for it and no other frame left in the meantime: at the second
//! empty poll, or at [`arm`](crate::DataPath::arm). Unsignaled WRs cause none.
//!
//! # Dead regions
//!
//! Keys are looked up again before every copy and before every call that reads or writes an MR,
//! under a read lock that is held for that turn only. The drop of a [`MemoryRegion`] takes the
//! write lock. When the drop returns, no byte can land any more, not even of a message that had
//! begun to arrive.

mod device;
mod domain;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod incoming;
mod keys;
mod listener;
pub mod network;
mod poller;
mod queue_pair;
mod route;
mod wire;

pub use device::Device;
pub use domain::{MemoryRegion, PollerHandle, ProtectionDomain};
pub use incoming::Incoming;
pub use listener::Listener;
pub use poller::Poller;
pub use queue_pair::Connection;
pub use route::Route;
pub use wire::tls;
