//! Output, logs, metrics and the host checks that the programs of one host share.
//!
//! | room | holds |
//! | --- | --- |
//! | `terminal` | the answers of commands: [`Output`], [`table`], [`figures`], [`screen`] |
//! | `log` | the log of a daemon: [`Log`], and its records for the [`journal`] |
//! | `metrics` | the Prometheus text format: [`exposition`] |
//! | `socket` | Unix sockets that only their owner may use: [`private_socket`] |
//! | `host` | this host: [`precautions`], [`CpuList`], [`sysfs`], [`Watchdog`], [`ublk_faults`] |
//! | [`config_flags`] | the flags that set keys of a configuration |
//! | [`target`] | a target and its commands: flags, orders, status, events, counters, one socket |
//! | [`mount`] | a mount and its commands: the same, and the lock and the log of a mount |
//! | [`doctor`] | host facts, and the findings of both doctors |
#![forbid(unsafe_code)]

pub mod doctor;

pub mod config_flags;
mod host;
mod log;
mod metrics;
pub mod mount;
mod socket;
pub mod target;
mod terminal;

pub use host::cpu_list::{CpuList, NoCpuList};
pub use host::rdma_device::near_cpus;
pub use host::watchdog::Watchdog;
pub use host::{pid_namespace, precautions, sysfs, ublk_faults};
pub use log::journal;
pub use log::{Log, LogWriter};
pub use metrics::exposition;
pub use socket::private_socket;
pub use terminal::exit_of::exit_of;
pub use terminal::output::{CannotPrint, Output, wants_colour};
pub use terminal::said_once::said_once;
pub use terminal::{figures, screen, table};
