//! The process, the CPUs and the devices of this host.

pub(crate) mod cpu_list;
pub(crate) mod interface;
pub(crate) mod kernel_release;
pub mod pid_namespace;
pub mod precautions;
pub(crate) mod rdma_device;
pub mod sysfs;
pub mod ublk_faults;
pub(crate) mod watchdog;
