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
//! | work completion (WC) | [`Completion`] | [`Poller::poll`] | |
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

mod ack_timeout;
mod address;
mod caps;
pub mod clock;
mod connect;
mod connection;
mod counter;
mod credit;
pub mod data_thread;
mod device;
mod error;
pub mod exposition;
mod facts;
mod latency;
mod lent;
mod listener;
pub mod log_limit;
pub mod log_linear;
mod look_up;
pub mod mailbox;
mod moment;
mod poller;
mod poller_counters;
pub mod rates;
mod readiness;
mod region;
mod route;
pub mod soft;
mod source;
pub mod spin;
mod stream_keys;
#[cfg(feature = "verbs")]
mod verbs;
mod wake_cost;
mod work;

/// A variable of the environment that a program with RDMA should have when it starts, with its
/// value. With it, librdmacm and libibverbs free what was made on a device that is gone. Without
/// it, each object of a device that was removed or reset stays in memory. libibverbs reads it once,
/// so it cannot be set later.
pub const ENVIRONMENT: (&str, &str) = ("RDMAV_ALLOW_DISASSOC_DESTROY", "1");

pub use ack_timeout::AckTimeout;
pub use address::{Address, AddressError, Scheme};
pub use caps::{DeviceCaps, Transport};
pub use connect::{
    ACCEPTED_DETECT_MAX, AcceptParams, ConnectOptions, ConnectionHello, ListenOptions, QpLimits,
};
pub use connection::{Connection, Established};
pub use counter::Counter;
pub use credit::SendCredits;
pub use device::{CompletionVector, Device, MemoryRegion, PollerHandle, ProtectionDomain};
pub use error::{FabricError, FirewallPort, PostError, Result};
pub use facts::{DeviceFacts, QpFacts};
pub use latency::{BinnedUs, Latency, LatencyCounts};
pub use lent::close_lent_on_exec;
pub use listener::{Incoming, Listener};
pub use moment::{Micros, Moment, MomentClock};
pub use poller::Poller;
pub use poller_counters::PollerCounters;
pub use readiness::Readiness;
pub use region::{PageKind, Region, RegionError};
pub use route::Route;
pub use source::Source;
pub use stream_keys::{CipherKey, StreamKeys};
pub use work::{
    Access, Completion, Lkey, MAX_SGE, MemoryOrder, Owner, QpIndex, RecvWr, Recvs, RemoteBuffer,
    Rkey, SendOp, SendWr, Sge, SgeList, WcOpcode, WcStatus, WrId,
};
