//! RDMA in Rust: QPs, CQs, MRs and connections. The only crate that knows verbs.
//!
//! # Names
//!
//! | verbs | here | made by | used on |
//! |---|---|---|---|
//! | device context | [`Device`] | [`Route`], [`Incoming`], [`Listener`] | any thread |
//! | protection domain (PD) | [`ProtectionDomain`] | [`Device::alloc_pd`] | any thread |
//! | memory region (MR) | [`MemoryRegion`] of a [`Region`] | [`ProtectionDomain::register`] | any |
//! | completion queue (CQ), its QPs | [`Poller`] | [`ProtectionDomain::poller`] | one data thread |
//! | queue pair (QP) | [`Connection`] | [`Route::connect`], [`Incoming::prepare`] | data thread |
//! | work request (WR) | [`SendWr`], [`RecvWr`] | plain values | |
//! | work completion (WC) | [`Completion`] | [`DataPath::poll`] | |
//!
//! # Rules
//!
//! - Control calls (resolve, connect, listen, accept, register) may block or await. They run on
//!   control threads. A [`Poller`] belongs to one data thread. It takes no lock that another thread
//!   holds for long, and allocates nothing after [`Poller::attach`].
//! - Every posted WR completes once. Signaled WRs and failed WRs complete with a [`Completion`];
//!   unsignaled WRs that succeed complete silently. When a QP dies, for any reason, all its
//!   outstanding WRs complete with an error ([`WcStatus::Flushed`] for all except the first). A
//!   data thread learns of a dead QP *only* in this way. So keep at least one RECV posted at all
//!   times.
//! - Memory safety does not depend on the order of drops. An MR is deregistered before its memory
//!   is freed. Memory that a peer or a device may write is accessed only by copies ([`Region`]),
//!   never by references.
//! - Unknown statuses and opcodes are values. They never panic.

mod address;
mod caps;
mod completion_vector;
mod connect;
mod data_path;
mod diagnosis;
mod error;
mod provider;
mod region;
pub mod soft;
#[cfg(feature = "verbs")]
mod verbs;
mod work;

pub use address::source::Source;
pub use address::{Address, AddressError, Scheme};
pub use caps::{DeviceCaps, Transport};
pub use completion_vector::CompletionVector;
pub use connect::ack_timeout::AckTimeout;
pub use connect::cipher_keys::{CipherKey, CipherKeys};
pub use connect::{
    ACCEPTED_DETECT_MAX, AcceptParams, ConnectOptions, ConnectionHello, ListenOptions, QpLimits,
};
pub use data_path::DataPath;
pub use diagnosis::{DeviceFacts, QpFacts};
pub use error::{FabricError, FirewallPort, PostError, Result};
pub use provider::connection::{Connection, Established};
pub use provider::device::{Device, MemoryRegion, PollerHandle, ProtectionDomain};
pub use provider::listener::{Incoming, Listener};
pub use provider::poller::Poller;
pub use provider::readiness::Readiness;
pub use provider::route::Route;
pub use region::{PageKind, Region, RegionError};
pub use work::credit::SendCredits;
pub use work::poller_counters::PollerCounters;
pub use work::{
    Access, Completion, Lkey, MAX_SGE, MemoryOrder, Owner, QpIndex, RecvWr, Recvs, RemoteBuffer,
    Rkey, SendOp, SendWr, Sge, SgeList, WcOpcode, WcStatus, WrId,
};
