//! The process and the CPUs of this host.

pub(crate) mod cpu_list;
pub mod precautions;
