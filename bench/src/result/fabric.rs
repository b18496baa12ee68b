//! [`Fabric`]: what the transports cost by themselves, and perftest on the same devices.
//!
//! A device or a program that could not be measured says why (`error`).

use serde::{Deserialize, Serialize};

use super::Latency;

/// One run of a perftest program.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Perf {
    /// `ib_send_lat`, `ib_write_bw`, ...
    pub tool: String,
    /// Bytes per message.
    pub bytes: u64,
    /// The round it belongs to, from 1.
    pub round: u32,
    /// Whether it waited for events instead of polling.
    pub events: bool,
    /// Mean latency as the program says it: half a round trip, or a whole one for reads.
    pub mean_us: Option<f64>,
    /// Mean bandwidth.
    pub mib_per_s: Option<f64>,
    /// QPs at once; 0 is one, of a run from before that was noted.
    pub qps: u32,
    /// Why there is no number.
    pub error: Option<String>,
}

/// What the transports cost by themselves.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fabric {
    /// One for each address that was asked for.
    pub devices: Vec<FabricDevice>,
}

/// One provider on one device.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FabricDevice {
    /// The address, as `rdma://10.9.0.1`.
    pub address: String,
    /// The device's name for people.
    pub title: String,
    /// Why it was not measured.
    pub error: Option<String>,
    /// What registering memory costs.
    pub registration: Vec<Registration>,
    /// Ping-pong.
    pub pingpong: Vec<PingPong>,
    /// Bandwidth.
    pub bandwidth: Vec<Bandwidth>,
    /// perftest on the same device.
    pub perftest: Vec<Perf>,
}

/// Pages under memory that is registered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pages {
    /// 4 KiB.
    #[default]
    Normal,
    /// 2 MiB where the kernel pleases.
    Transparent,
    /// 2 MiB, reserved.
    Huge,
}

/// Registering memory of one size.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Registration {
    /// Bytes of the region.
    pub bytes: u64,
    /// Pages under it.
    pub pages: Pages,
    /// Median time to register memory that is there, in nanoseconds.
    pub register_ns: f64,
    /// The same of memory that was never touched: its pages are found and zeroed meanwhile.
    pub fresh_ns: f64,
    /// Median time to deregister, in nanoseconds.
    pub deregister_ns: f64,
}

/// How an end waits for what comes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wait {
    /// It looks again and again.
    #[default]
    Polling,
    /// It sleeps until an event.
    Events,
}

/// Ping-pong of one kind, size and way to wait.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PingPong {
    /// `UDP`, `TCP`, `SEND`, `WRITE`, `READ` or `COMMAND`: a SEND of 64 bytes that a WRITE_WITH_IMM
    /// answers.
    pub what: String,
    /// Bytes per message.
    pub bytes: u64,
    /// How both ends wait.
    pub wait: Wait,
    /// Half of a round trip; a whole one for `READ`, as perftest has it, and for `COMMAND`.
    pub latency: Latency,
    /// Why there is no number.
    pub error: Option<String>,
}

/// Bandwidth of one kind and size.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Bandwidth {
    /// `SEND`, `WRITE` or `READ`.
    pub what: String,
    /// Bytes per message.
    pub bytes: u64,
    /// Messages outstanding.
    pub depth: u32,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Messages per second.
    pub messages_per_s: f64,
}
