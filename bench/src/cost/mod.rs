//! The cost of one I/O: messages, completions, doorbells, copied bytes, allocations and
//! instructions at each end.
//!
//! | module | counts |
//! |---|---|
//! | [`rig`] | both ends' own counters, over a closed loop of I/Os through the real engines |
//! | [`instructions`] | instructions of each end's engine in the same loop, by callgrind |
//! | [`crc`] | instructions of one CRC, by single steps |
//! | [`time`] | time of each end's engine in the same loop |
//! | [`aged`] | RDMA READs and WRITEs of large requests, in a cache that is full of small blocks |
//! | [`hit_ratio`] | the part of the blocks that reads find in a small cache |
//! | [`live`] | counters of running daemons while a device is under load |
//!
//! Nothing of [`rig`] and [`instructions`] is timed: the numbers are exact and the same in every
//! run.

pub mod aged;
pub mod args;
mod callgrind;
mod crc;
mod hit_ratio;
mod instructions;
mod live;
pub mod rig;
mod small_cache;
mod steps;
mod table;
mod time;

use clap::ValueEnum;
use rblk_initiator::engine::io::IoOp;
use rblk_rig::inprocess::VolumeKind;
use rblk_target::volume::CacheMode;
use serde::{Deserialize, Serialize};

pub use aged::AgedCost;
pub use args::CostArgs;
pub(crate) use crc::CrcCost;
pub(crate) use hit_ratio::HitRatio;
pub(crate) use instructions::InstructionCost;
pub(crate) use live::LiveCost;
pub use rig::{Cost, EndCost, Plan};
pub(crate) use table::table;
pub(crate) use time::TimeCost;

/// Which way the data goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// Volume to initiator.
    Read,
    /// Initiator to volume.
    Write,
}

impl Op {
    pub(crate) fn io(self) -> IoOp {
        match self {
            Self::Read => IoOp::Read,
            Self::Write => IoOp::Write,
        }
    }
}

/// Where the volume's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Volume {
    /// In registered memory of the target.
    Memory,
    /// Nowhere.
    Null,
    /// In a store behind the arena, as files are, without a cache.
    Store,
    /// In a store, written through; every read finds its blocks in the cache.
    Cached,
    /// In a store, with dirty blocks; every read finds its blocks in the cache.
    WriteBack,
}

impl Volume {
    fn kind(self) -> (VolumeKind, CacheMode) {
        match self {
            Self::Memory => (VolumeKind::Memory, CacheMode::None),
            Self::Null => (VolumeKind::Null, CacheMode::None),
            Self::Store => (VolumeKind::Store, CacheMode::None),
            Self::Cached => (VolumeKind::Store, CacheMode::WriteThrough),
            Self::WriteBack => (VolumeKind::Store, CacheMode::WriteBack),
        }
    }
}

/// The word of a value on the command line.
pub(crate) fn word(of: &impl ValueEnum) -> String {
    of.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// One row: which I/O, and how many of them at once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Case {
    /// Which way the data goes.
    pub op: Op,
    /// Bytes per I/O.
    pub bytes: u32,
    /// I/Os outstanding.
    pub depth: u16,
    /// Where the volume's bytes are.
    pub volume: Volume,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { op, bytes, depth, volume } = self;
        write!(f, "{} of {bytes} bytes at depth {depth}, {}", word(op), word(volume))
    }
}

/// Everything that was measured, for programs.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    pub(crate) transport: String,
    pub(crate) queue_depth: u16,
    pub(crate) immediates: bool,
    pub(crate) in_capsule_bytes: u32,
    /// By the ends' own counters.
    pub costs: Vec<Cost>,
    pub(crate) instructions: Vec<InstructionCost>,
    pub(crate) crcs: Vec<CrcCost>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) times: Vec<TimeCost>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) aged: Vec<AgedCost>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) hit_ratios: Vec<HitRatio>,
    pub(crate) live: Vec<LiveCost>,
}

impl Report {
    /// Takes in the parts of another report.
    pub(crate) fn add(&mut self, other: Self) {
        if !other.transport.is_empty() {
            self.transport = other.transport;
            self.queue_depth = other.queue_depth;
            self.immediates = other.immediates;
            self.in_capsule_bytes = other.in_capsule_bytes;
        }
        if !other.costs.is_empty() {
            self.costs = other.costs;
        }
        if !other.instructions.is_empty() {
            self.instructions = other.instructions;
        }
        if !other.crcs.is_empty() {
            self.crcs = other.crcs;
        }
        if !other.times.is_empty() {
            self.times = other.times;
        }
        if !other.aged.is_empty() {
            self.aged = other.aged;
        }
        if !other.hit_ratios.is_empty() {
            self.hit_ratios = other.hit_ratios;
        }
        if !other.live.is_empty() {
            self.live = other.live;
        }
    }
}
