//! [`CpuProfile`]: the processors' time while a system ran a cell.

use serde::{Deserialize, Serialize};

/// Samples of all processors under one load, folded by thread and function. Shares are parts of the
/// time of all processors, from 0 to 1; small shares are left out.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct CpuProfile {
    pub(crate) system: String,
    pub(crate) cell: String,
    pub(crate) threads: Vec<ThreadShare>,
}

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ThreadShare {
    /// Their name without numbers; [`ThreadShare::IDLE`] for idle processors.
    pub(crate) name: String,
    pub(crate) share: f64,
    pub(crate) functions: Vec<FunctionShare>,
}

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FunctionShare {
    pub(crate) name: String,
    pub(crate) kernel: bool,
    pub(crate) share: f64,
}

impl ThreadShare {
    /// The name of no thread at all.
    pub(crate) const IDLE: &'static str = "idle";
}
