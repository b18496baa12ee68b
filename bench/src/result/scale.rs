//! [`Scale`]: many hosts or mounts of one target, as plots that can be drawn again.

use serde::{Deserialize, Serialize};

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Scale {
    pub(crate) plots: Vec<ScalePlot>,
    pub(crate) idle: Option<Idle>,
}

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ScalePlot {
    /// Unique in a run: `time-by-mounts-at-once`.
    pub(crate) key: String,
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<ScaleLine>,
    pub(crate) note: String,
    pub(crate) error: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) unit: Unit,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Unit {
    #[default]
    Count,
    Iops,
    Bytes,
    BytesPerSecond,
    Nanoseconds,
    Percent,
}

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ScaleLine {
    pub(crate) label: String,
    pub(crate) points: Vec<Point>,
}

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Idle {
    pub(crate) volumes: u32,
    pub(crate) seconds: f64,
    /// All initiator daemons together.
    pub(crate) initiator: IdleEnd,
    pub(crate) target: IdleEnd,
    pub(crate) place: String,
}

/// The processor time of an end without I/O, and of as many processes that only sleep, measured at
/// the same time. An emulator makes both dear, and leaves their ratio.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct IdleEnd {
    /// Percent of one processor.
    pub(crate) percent: f64,
    /// Times a second that a thread woke.
    pub(crate) wakes: f64,
    /// Percent of one processor that as many processes take, which wake as often and do nothing.
    pub(crate) sleepers_percent: f64,
}
