//! The harness of the lab suite: real programs, a real kernel, a real block device.
//!
//! [`run`] runs one test. It checks that the machine has the devices of the lab, and hands out a
//! [`Lab`] with its own directory. Afterwards, even after a panic, it takes everything down and
//! proves that nothing is left. Tests run one at a time, with any number of libtest's threads: they
//! share the kernel's devices and the target's port.
//!
//! Every wait has a deadline. A process that misses its deadline is killed with its children.

mod bench;
mod blocks;
mod cable;
mod call_probe;
mod cards;
pub mod ceph;
mod counts;
mod diary;
mod disk;
mod drbd;
mod far;
mod faulty;
mod file_system;
mod fio;
mod flip;
mod group_network;
mod kernel_feature;
mod kernel_log;
mod keys;
mod latency_log;
mod leftovers;
mod mounted;
mod place;
mod plug;
mod process;
mod run;
mod stall;
mod target;
mod usage;
mod wait;
mod waits;
mod witness;
mod write_log;

pub use bench::Bench;
pub use blocks::{Aligned, Node, Sysfs, file_syncs, pattern};
pub use cards::Cards;
pub use counts::{Counts, device_packets, fabric_packets};
pub use diary::{BLOCK, Diary, Lie, Stamp};
pub use disk::{LoopDisk, Mapped};
pub use drbd::DrbdPair;
pub use far::{CableFault, Cut, FarHost};
pub use faulty::{Fault, FaultyDisk};
pub use file_system::FileSystem;
pub use fio::{Fio, FioResult, RunningFio};
pub use flip::{DELIVERIES, FlipRates, Flips};
pub use group_network::{GroupCable, GroupNetwork};
pub use kernel_feature::KernelFeature;
pub use kernel_log::KernelLog;
pub use latency_log::LatencyLog;
pub use mounted::{MountFlags, Mounted};
pub use place::Lab;
pub use plug::Plug;
pub use process::{Finished, Frozen, Running, start};
pub use run::{run, run_last};
pub use stall::StallMeter;
pub use target::{Target, TargetFlags};
pub use usage::{Usage, cpu_time, rdma_resources};
pub use wait::{DEADLINE, begin, until, within};
pub use waits::CpuWaits;
pub use witness::{Moment, Witness};
pub use write_log::{Logged, WriteLog};
