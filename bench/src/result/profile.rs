//! [`CpuProfile`]: where the processors' time went while a system ran a cell.

use serde::{Deserialize, Serialize};

/// Samples of all processors under one load, folded by thread and function. Shares are parts of the
/// time of all processors, from 0 to 1; what is small is left out.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CpuProfile {
    /// Key of the system.
    pub system: String,
    /// Key of the cell.
    pub cell: String,
    /// Threads of one name together, the busiest first.
    pub threads: Vec<ThreadShare>,
}

/// The threads of one name.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ThreadShare {
    /// Their name without numbers; [`ThreadShare::IDLE`] for processors that had nothing to do.
    pub name: String,
    /// Their share.
    pub share: f64,
    /// What they were in, the most first.
    pub functions: Vec<FunctionShare>,
}

/// A function in the threads of one name.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FunctionShare {
    /// Its name, or an address where there is none.
    pub name: String,
    /// Whether it is one of the kernel.
    pub kernel: bool,
    /// Its share, without what it calls.
    pub share: f64,
}

impl ThreadShare {
    /// The name of no thread at all.
    pub const IDLE: &'static str = "idle";
}
