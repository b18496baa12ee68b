//! The process, the CPUs and the devices of this host.

pub(crate) mod cpu_list;
pub(crate) mod interface;
pub mod precautions;
pub(crate) mod rdma_device;
pub mod sysfs;
pub(crate) mod watchdog;
