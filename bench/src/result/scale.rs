//! [`Scale`]: how cost grows with the work, as plots that can be drawn again.
//!
//! A point is a median with its spread, in the units of its axes.

use serde::{Deserialize, Serialize};

/// How cost grows with the work.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Scale {
    /// One for each thing that grows.
    pub plots: Vec<ScalePlot>,
    /// Daemons that have nothing to do.
    pub idle: Option<Idle>,
}

/// One thing that grows, and what grows with it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ScalePlot {
    /// Its name in files: `iops-by-queues`.
    pub key: String,
    /// Its name for people.
    pub title: String,
    /// What grows, and its unit.
    pub x: Axis,
    /// What grows with it, and its unit.
    pub y: Axis,
    /// One for each system or variant.
    pub lines: Vec<ScaleLine>,
    /// What a reader should know: what was held fixed, what the machine limits.
    pub note: String,
    /// Why there is nothing in it.
    pub error: Option<String>,
}

/// An axis.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Axis {
    /// What is on it.
    pub label: String,
    /// Its unit.
    pub unit: Unit,
    /// Whether equal steps are equal factors.
    pub log: bool,
}

/// What a number is, and so how it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// A count, or a plain number.
    #[default]
    Count,
    /// I/Os per second.
    Iops,
    /// Bytes.
    Bytes,
    /// Bytes per second.
    BytesPerSecond,
    /// Nanoseconds.
    Nanoseconds,
    /// A part of a hundred.
    Percent,
}

/// One line of a [`ScalePlot`].
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ScaleLine {
    /// Its name.
    pub label: String,
    /// Its points, by ascending `x`.
    pub points: Vec<Point>,
    /// Exponent of growth: 1 where twice the work costs twice as much. `None`: not meant to be
    /// fitted.
    pub slope: Option<f64>,
    /// Whether it is worse than it has to be.
    pub flagged: bool,
}

/// A measured point with its spread.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Point {
    /// What was set.
    pub x: f64,
    /// The median of what was measured.
    pub y: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
}

/// Daemons that have nothing to do.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Idle {
    /// Volumes mounted.
    pub volumes: u32,
    /// How long they were watched.
    pub seconds: f64,
    /// Percent of one processor that all initiator daemons together used.
    pub initiator_percent: f64,
    /// Percent of one processor that the target used.
    pub target_percent: f64,
    /// Where, in a line.
    pub place: String,
}
