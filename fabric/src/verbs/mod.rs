//! The `verbs` provider: InfiniBand, RoCE and iWARP through libibverbs and librdmacm.
//!
//! The only module of rblk that calls verbs, and so the only one whose `unsafe` rests on their
//! contracts.
//!
//! # Contracts
//!
//! - **Contexts** are librdmacm's: one `ibv_context` per device and process, shared by all CM ids.
//!   A [`Device`] pins its context with `rdma_get_devices`, so it stays open while anything made on
//!   it lives, even when the device is unplugged meanwhile.
//! - **Drop order** is kept by `Arc`s that point from the made to its maker, and by field order: QP
//!   and CM id, then CQ, completion channel, MR, PD, context. A destroy call that fails is logged
//!   and the object is leaked together with what it may still reach; nothing panics.
//! - **CM events** of an event channel are fetched, handled and acknowledged in one go under that
//!   channel's lock (`event_channel`), and everything that makes or frees a CM id or its QP takes
//!   the same lock. An event therefore never names an id or a QP that is gone, and
//!   `rdma_destroy_id` never waits for an acknowledgement.
//! - **Deaths** reach a data thread by completions only: whatever ends a connection moves its QP to
//!   the error state, which flushes it.
//! - **fork**: verbs objects do not survive it. The process must not fork and go on in the child (a
//!   `fork` + `exec` is fine: all descriptors are close-on-exec and regions are `MADV_DONTFORK`).

mod async_events;
mod cm_id;
mod completion_queue;
mod device;
mod event_channel;
mod ffi;
mod inline_source;
mod listener;
mod memory_region;
mod poller;
mod protection_domain;
mod queue_pair;
mod route;
mod work_completion;
mod work_queue;

pub use completion_queue::PollerHandle;
pub use device::Device;
pub use listener::{Incoming, Listener};
pub use memory_region::MemoryRegion;
pub use poller::Poller;
pub use protection_domain::ProtectionDomain;
pub use queue_pair::Connection;
pub(crate) use queue_pair::retire;
pub use route::Route;
