//! [`DeviceCaps`]: the abilities of a device, and [`Transport`], the carrier of its messages.

use std::fmt;

/// The carrier of the messages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Transport {
    /// InfiniBand.
    InfiniBand,
    /// RoCE, v1 or v2.
    Roce,
    /// iWARP: no immediates, and the sink of a READ needs remote write access.
    Iwarp,
    /// The software provider over TCP.
    SoftTcp,
    /// The software provider over an in-memory link.
    SoftMemory,
    /// A transport that verbs knows and rblk does not.
    Unknown,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Roce => "RoCE",
            Self::Iwarp => "iWARP",
            Self::SoftTcp => "soft/TCP",
            Self::SoftMemory => "soft/memory",
            Self::Unknown => "unknown",
        })
    }
}

/// The abilities that a device claims. An optional verb is a claim, which is tested on each new
/// connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceCaps {
    /// Device name, such as `mlx5_0`, `rxe0`, or `soft`.
    pub name: String,
    /// The carrier of its messages.
    pub transport: Transport,
    /// Most WRs on one send or receive queue.
    pub max_wrs: u32,
    /// Most SGEs per WR, at most [`crate::MAX_SGE`].
    pub max_sges: u32,
    /// Most entries of one CQ.
    pub max_cq_entries: u32,
    /// READs a QP can have outstanding as requester.
    pub max_reads_out: u8,
    /// READs a QP can serve at once as responder.
    pub max_reads_in: u8,
    /// Largest MR in bytes.
    pub max_region_bytes: u64,
    /// Bytes of payload that can be sent inside a WR (inline). 0 if it cannot.
    pub inline_bytes: u32,
    /// The device claims that it can WRITE_WITH_IMM.
    pub write_with_imm: bool,
    /// The sink of an RDMA READ must be registered with `remote_write` (iWARP).
    pub read_sink_needs_remote_write: bool,
    /// A kernel driver plays the device (rxe, siw). Each QP is served by threads of its own.
    pub kernel_software: bool,
    /// The device may touch the memory of the WRs of a QP until the QP is destroyed, also when the
    /// QP is in the error state. True for all devices except the software provider: there the
    /// thread that ends a QP also serves it.
    pub touches_until_destroyed: bool,
}
