//! The shared part of `rblk-target doctor` and `rblk-initiator doctor`: the [`Report`] and the
//! facts of a host that both ends need.
//!
//! Each part has facts, which are read once, and a judgement of them, which is pure: facts in,
//! [`Finding`]s out. Facts are read below a directory, `/` on a real host, so that a test can lay
//! out a host that it does not have. A fact that cannot be read is absent, and never a fault by
//! itself.
//!
//! One fault is one finding: the consequences of a named fault are skipped.

mod directory_access;
mod host_facts;
mod peer_route;
mod rdma;
mod report;
mod rights;
mod systemd;
mod tcp_listener;

pub use crate::host::interface::{Interface, Subnet, interfaces};
pub use crate::host::kernel_release::KernelVersion;
pub use crate::host::rdma_device::{Gid, PortState, RdmaDevice, RdmaPort, rdma_devices};
pub use directory_access::Directory;
pub use host_facts::{HostFacts, judge_tls};
pub use peer_route::{PeerRoute, judge_listen, judge_route};
pub use rdma::{Needs, far_cpus, judge_rdma};
pub use report::{Finding, Report, Verdict};
pub use rights::{can_lock_memory, hard_memlock};
pub use systemd::{SystemdFacts, Unit};
pub use tcp_listener::tcp_listener;
