//! What one I/O costs: messages, completions, doorbells, copied bytes, allocations and instructions
//! at each end.
//!
//! | module | what it counts |
//! |---|---|
//! | [`rig`] | both ends' own counters, over a closed loop of I/Os through the real engines |
//! | [`instructions`] | instructions of each end's engine in the same loop, by callgrind |
//! | [`crc`] | instructions of one CRC, by single steps |
//! | [`time`] | time of each end's engine in the same loop |
//! | [`live`] | counters of running daemons while a device is under load |
//!
//! Nothing of [`rig`] and [`instructions`] is timed: the numbers are exact and the same in every
//! run.

pub mod args;
mod callgrind;
pub mod crc;
pub mod instructions;
pub mod live;
pub mod rig;
mod steps;
mod table;
pub mod time;

use clap::ValueEnum;
use rblk_initiator::engine::io::IoOp;
use rblk_rig::inprocess::VolumeKind;
use rblk_target::volume::CacheMode;
use serde::{Deserialize, Serialize};

pub use args::CostArgs;
pub use crc::CrcCost;
pub use instructions::InstructionCost;
pub use live::LiveCost;
pub use rig::{Cost, EndCost, Plan};
pub use table::table;
pub use time::TimeCost;

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
    /// As the initiator's engine calls it.
    #[must_use]
    pub fn io(self) -> IoOp {
        match self {
            Self::Read => IoOp::Read,
            Self::Write => IoOp::Write,
        }
    }

    /// Its word on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
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
    /// Its word on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Null => "null",
            Self::Store => "store",
            Self::Cached => "cached",
            Self::WriteBack => "write-back",
        }
    }

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
        write!(f, "{} of {bytes} bytes at depth {depth}, {}", op.word(), volume.word())
    }
}

/// Everything that was measured, for programs.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// What carried the messages of the rows below.
    pub transport: String,
    /// Depth of the queue.
    pub queue_depth: u16,
    /// Whether READs were answered by WRITE_WITH_IMM.
    pub immediates: bool,
    /// Most write data inside a command.
    pub in_capsule_bytes: u32,
    /// By the ends' own counters.
    pub costs: Vec<Cost>,
    /// By callgrind.
    pub instructions: Vec<InstructionCost>,
    /// Of CRCs alone.
    pub crcs: Vec<CrcCost>,
    /// By the clock.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub times: Vec<TimeCost>,
    /// Of running daemons.
    pub live: Vec<LiveCost>,
}

impl Report {
    /// Takes in what another way of measuring says; what it does not say is kept.
    pub fn add(&mut self, other: Self) {
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
        if !other.live.is_empty() {
            self.live = other.live;
        }
    }
}
