//! [`DeviceFacts`] and [`QpFacts`]: facts that a provider reports about a device and a QP, for
//! troubleshooting. Nothing on the data path depends on them.

/// The limits that a verbs device reports, not lowered to those that rblk uses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceFacts {
    /// Firmware, in the words of the driver. Empty where it has none.
    pub firmware: String,
    /// Number of the vendor.
    pub vendor: u32,
    /// Number that the vendor gave the part.
    pub part: u32,
    /// Most QPs.
    pub max_qps: u32,
    /// Most WRs of one queue.
    pub max_wrs: u32,
    /// Most SGEs of a WR.
    pub max_sges: u32,
    /// Most SGEs of a READ. 0 where the driver leaves it open.
    pub max_read_sges: u32,
    /// Most CQs.
    pub max_cqs: u32,
    /// Most entries of a CQ.
    pub max_cq_entries: u32,
    /// Most MRs.
    pub max_mrs: u32,
    /// Largest MR in bytes.
    pub max_mr_bytes: u64,
    /// Most PDs.
    pub max_pds: u32,
    /// READs that a QP can have outstanding.
    pub max_reads_out: u32,
    /// READs that a QP can serve at once.
    pub max_reads_in: u32,
    /// Interrupt vectors for CQs.
    pub vectors: u32,
    /// The port that was asked about.
    pub port: u8,
    /// Whether the port can carry data.
    pub is_active: bool,
    /// Bytes of payload in one packet. 0 where the transport has none (iWARP).
    pub mtu: u32,
    /// The most that the port can have.
    pub max_mtu: u32,
}

/// The facts that a provider reports about one QP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QpFacts {
    /// WRs that the send queue holds. Some providers round up.
    pub send_wrs: u32,
    /// WRs that the receive queue holds.
    pub recv_wrs: u32,
    /// SGEs of a send WR.
    pub send_sges: u32,
    /// Bytes of payload that a WR may carry.
    pub inline_bytes: u32,
    /// Bytes of payload in one packet of this path. 0 where the transport has none.
    pub mtu: u32,
    /// READs that it may have outstanding.
    pub reads_out: u8,
    /// READs that it serves at once.
    pub reads_in: u8,
    /// Time until a packet is sent again: 4.096 us times 2 to this power. 0 where there is none.
    pub ack_timeout: u8,
    /// How often a packet is sent again.
    pub retries: u8,
}
