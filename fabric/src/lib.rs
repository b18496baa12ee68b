//! How bytes move: RDMA in Rust words. The only crate that knows verbs.
//!
//! # Vocabulary
//!
//! | verbs word | here | made by | lives on |
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
//! - Control calls (resolve, connect, listen, accept, register) may block or await; they run on
//!   control threads. A [`Poller`] belongs to one data thread, takes no lock another thread holds
//!   for long and allocates nothing after [`Poller::attach`].
//! - Every posted WR is completed once: signaled ones and failed ones by a [`Completion`],
//!   unsignaled successes silently. When a QP dies, for whatever reason, all its outstanding WRs
//!   complete with an error ([`WcStatus::Flushed`] for all but the first). That is the *only* way a
//!   data thread learns of a death, so a user keeps at least one RECV posted at all times.
//! - Memory safety does not depend on the order of drops: an MR is deregistered before its memory
//!   goes, and memory that a peer or a device may write is reached only by copies ([`Region`]),
//!   never by references.
//! - Unknown statuses and opcodes are values, never panics.

mod address;
mod caps;
mod connect;
mod connection;
mod counter;
mod credit;
mod device;
mod error;
mod listener;
mod look_up;
pub mod mailbox;
pub mod patience;
mod poller;
mod poller_counters;
mod readiness;
mod region;
mod route;
pub mod soft;
#[cfg(feature = "verbs")]
pub mod verbs;
mod work;

pub use address::{Address, AddressError, Scheme};
pub use caps::{DeviceCaps, Transport};
pub use connect::{AcceptParams, ConnectOptions, ConnectionHello, QpLimits};
pub use connection::{Connection, Established};
pub use counter::Counter;
pub use credit::SendCredits;
pub use device::{Device, MemoryRegion, PollerHandle, ProtectionDomain};
pub use error::{FabricError, PostError, Result};
pub use listener::{Incoming, Listener};
pub use poller::Poller;
pub use poller_counters::PollerCounters;
pub use readiness::Readiness;
pub use region::{PageKind, Region, RegionError};
pub use route::Route;
pub use work::{
    Access, Completion, Lkey, MAX_SGE, QpIndex, RecvWr, RemoteBuffer, Rkey, SendOp, SendWr, Sge,
    SgeList, WcOpcode, WcStatus, WrId,
};
