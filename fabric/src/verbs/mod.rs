//! The `verbs` provider: InfiniBand, RoCE and iWARP through libibverbs and librdmacm.
//!
//! No other module of rblk calls verbs. So only the `unsafe` here relies on their contracts.
//!
//! # Contracts
//!
//! - **Contexts** belong to librdmacm: one `ibv_context` per device and process, which all CM ids
//!   share. A [`Device`] pins its context with an id of its own. So the context stays open while
//!   anything made on it lives, also when the device is unplugged, and no longer.
//! - **Drop order**: `Arc`s point from an object to the object it was made on, and fields are in
//!   order: QP and CM id, then CQ, completion channel, MR, PD, context. A destroy call that fails
//!   is logged, and the object is leaked together with everything it may still reach. Nothing
//!   panics.
//! - **CM events** of an event channel are fetched, handled and acknowledged under the lock of
//!   that channel (`event_channel`). Everything that makes a CM id or its QP, or takes it away,
//!   holds the same lock. So an event is never followed to an id or a QP that is gone.
//! - **Verbs that may take long** (accept, error state, disconnect) are made by threads of their
//!   own (`slow_verbs`), in the order of a connection's life: no data thread and no task waits for
//!   a device's firmware.
//! - **A dead QP** is reported to a data thread by completions only. Every end of a connection
//!   moves its QP to the error state, and that flushes the QP.
//! - **fork**: verbs objects do not survive it. The process must not fork and continue in the
//!   child. A `fork` with `exec` is fine: all descriptors are close-on-exec, and regions are
//!   `MADV_DONTFORK`.
//!
//! # Files, lowest first
//!
//! | file | holds |
//! |---|---|
//! | `ffi` | librdmacm and the names of `ibverbs-sys` |
//! | `nonblocking`, `qp_state`, `device_caps`, `threads` | single calls; threads for slow verbs |
//! | `cm/` | rdma_cm ids, the lock under which events are handled, the slow verbs of an id |
//! | `device/` | context, the thread that reads device events, the flags that it sets |
//! | `protection_domain`, `memory_region` | PD, MR |
//! | `completion_queue/` | CQ, how much of it a QP may fill, WCs, completion events |
//! | `queue_pair/` | QP, WRs as a provider takes them, the QPs of a poller |
//! | `incoming`, `event_task`, `listener`, `route` | how connections are made |
//! | `diagnose` | facts that device and QP report, for diagnosis |
//! | `provider_calls`, [`Poller`] | the data path |

mod cm;
mod completion_queue;
mod device;
mod device_caps;
mod diagnose;
mod event_task;
mod ffi;
mod incoming;
mod listener;
mod memory_region;
mod nonblocking;
mod poller;
mod protection_domain;
mod provider_calls;
mod qp_state;
mod queue_pair;
mod route;
mod threads;

pub(crate) use completion_queue::PollerHandle;
pub(crate) use device::Device;
pub(crate) use diagnose::{entries_of_cq, facts_of_device, facts_of_qp};
pub(crate) use incoming::Incoming;
pub(crate) use listener::Listener;
pub(crate) use memory_region::MemoryRegion;
pub(crate) use poller::Poller;
pub(crate) use protection_domain::ProtectionDomain;
pub(crate) use queue_pair::Connection;
pub(crate) use queue_pair::retire;
pub(crate) use route::Route;
