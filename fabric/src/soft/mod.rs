//! The software provider: RC queue pairs in user space. Between hosts it runs over TCP, in tests
//! over an in-memory network with a seed.
//!
//! There is no thread that plays the card. The engine of a queue pair runs inside the [`Poller`] of
//! its owner. A post tries at once to put the frames on the link, one call per batch: headers and
//! short payloads from a fixed buffer, long payloads straight from the MR. A poll runs the
//! receiving side: long payloads go straight into the MR; many short payloads come in one call and
//! are copied.
//!
//! | file | what is in it |
//! |---|---|
//! | `frame` | the header of every frame |
//! | `keys` | the key tables |
//! | `device`, `domain` | [`Device`] and its claims; [`ProtectionDomain`], [`MemoryRegion`] |
//! | [`tls`] | encryption of TCP connections by the kernel |
//! | `link`, `metered_link` | byte streams: the `Link` trait and TCP; the calls into a link |
//! | `late` | for tests: RDMA that lands until a QP is destroyed, as on cards |
//! | `completions` | the completion queue |
//! | `send_queue`, `recv_queue`, `reads`, `acks` | the queues of a QP, and what it counts |
//! | `pieces`, `gathered`, `outbound` | frames on their way out |
//! | `inbound` | the frame on its way in |
//! | `queue_pair` | the states of a QP; sending and receiving |
//! | `qp_set`, `schedule`, `shares` | which QPs a turn asks, and how much each owner gets of it |
//! | `visit`, `wake`, `poller` | [`Poller`]: the turns, and what wakes the thread |
//! | `handshake` | request and reply, before the frames |
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
//! empty poll, or at [`arm`](crate::Poller::arm). Unsignaled WRs cause none.
//!
//! # Dead regions
//!
//! Keys are looked up again before every copy and before every call that reads or writes an MR,
//! under a read lock that is held for that turn only. The drop of a [`MemoryRegion`] takes the
//! write lock. When the drop returns, no byte can land any more, not even of a message that had
//! begun to arrive.

mod acks;
mod completions;
mod device;
mod domain;
mod frame;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gathered;
mod handshake;
mod inbound;
mod incoming;
mod keys;
mod late;
mod link;
mod listener;
mod metered_link;
pub mod network;
mod outbound;
mod pending;
mod pieces;
mod poller;
mod qp_set;
mod queue_pair;
mod reads;
mod recv_queue;
mod route;
mod schedule;
mod send_queue;
mod shares;
pub mod tls;
mod visit;
mod wake;

pub use device::Device;
pub use domain::{MemoryRegion, PollerHandle, ProtectionDomain};
pub use incoming::Incoming;
pub use listener::Listener;
pub use poller::Poller;
pub use queue_pair::Connection;
pub use route::Route;
