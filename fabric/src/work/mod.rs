//! Work requests and completions: plain values, the same for every provider.
//!
//! An [`Sge`] names memory by address and lkey. Safe code can forge one, and that is sound: the
//! provider (device or software) checks key and bounds. A wrong one fails the WR with
//! [`WcStatus::LocalProtection`].

pub(crate) mod credit;
pub(crate) mod poller_counters;

use std::fmt;

use rblk_protocol::width::wide;

/// Most SGEs of one WR. Every provider supports at least this many.
pub const MAX_SGE: usize = 4;

/// A local key: names one of our own MRs in an [`Sge`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Lkey(pub u32);

/// A remote key, by which a peer reaches an MR. It never equals an [`Lkey`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Rkey(pub u32);

impl fmt::Debug for Rkey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rkey({:#010x})", self.0)
    }
}

/// The allowed uses of an MR. Local read is always allowed (ibv_reg_mr(3)).
#[expect(clippy::struct_excessive_bools, reason = "flags of their own, as in ibv_reg_mr(3)")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access {
    /// The device may write it locally: RECV buffers, RDMA READ sinks.
    pub local_write: bool,
    /// A peer that has the rkey may RDMA WRITE to it. Requires `local_write`.
    pub remote_write: bool,
    /// A peer that has the rkey may RDMA READ it.
    pub remote_read: bool,
    /// Others look at the memory while a READ lands in it. Each byte of the sink then has its value
    /// from before the READ or its value from the peer, at any time and also if the READ fails.
    /// Without this flag, the bytes of a sink are undefined until the READ completes.
    pub live: bool,
}

impl Access {
    /// Gather source only.
    pub const LOCAL_READ: Self =
        Self { local_write: false, remote_write: false, remote_read: false, live: false };
    /// RECV buffers and READ sinks (except on iWARP).
    pub const LOCAL_WRITE: Self = Self { local_write: true, ..Self::LOCAL_READ };
    /// As [`Self::LOCAL_WRITE`], for memory that others look at while a READ lands in it.
    pub const LIVE_WRITE: Self = Self { live: true, ..Self::LOCAL_WRITE };
    /// A buffer that the peer may read and write.
    pub const REMOTE: Self = Self { remote_write: true, remote_read: true, ..Self::LOCAL_WRITE };
}

/// The order in which a device may write received data to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MemoryOrder {
    /// In any order, as far as PCIe allows; a completion comes after all data that it reports. For
    /// code that looks at memory only after a completion, as all of rblk does.
    #[default]
    Relaxed,
    /// In the order of arrival.
    Strict,
}

/// The number that the caller gives a WR, returned in its [`Completion`]. Only the low 40 bits are
/// the caller's. The provider uses the others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct WrId(pub u64);

impl WrId {
    /// Bits of a `WrId` a caller may use.
    pub(crate) const BITS: u32 = 40;
    /// Mask of the caller's bits.
    pub const MASK: u64 = (1 << Self::BITS) - 1;
}

/// A QP of one [`crate::Poller`]. Reused after [`crate::Poller::detach`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QpIndex(pub u16);

/// The owner of a QP. QPs of one owner share one part of a poller's turns
/// ([`Poller::set_owner`](crate::DataPath::set_owner)). The number is the caller's.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Owner(pub u64);

/// One contiguous piece of local memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sge {
    /// Virtual address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Key of the MR that holds it.
    pub lkey: Lkey,
}

/// Up to [`MAX_SGE`] entries, in place, so that a WR is one value without allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SgeList {
    entries: [Sge; MAX_SGE],
    count: u8,
}

impl SgeList {
    /// A list of one.
    #[must_use]
    #[inline]
    pub fn one(sge: Sge) -> Self {
        let none = Sge::default();
        Self { entries: [sge, none, none, none], count: 1 }
    }

    /// A list of two.
    #[must_use]
    pub fn two(first: Sge, second: Sge) -> Self {
        let mut list = Self::one(first);
        list.entries[1] = second;
        list.count = 2;
        list
    }

    /// Adds an entry. False if there are [`MAX_SGE`] already.
    #[must_use]
    #[inline]
    pub fn push(&mut self, sge: Sge) -> bool {
        let Some(place) = self.entries.get_mut(usize::from(self.count)) else { return false };
        *place = sge;
        self.count += 1;
        true
    }

    /// Adds an entry before the last one. False if there are [`MAX_SGE`] already, or none.
    #[must_use]
    #[inline]
    pub fn push_before_last(&mut self, sge: Sge) -> bool {
        let count = usize::from(self.count);
        if count == 0 || count == MAX_SGE {
            return false;
        }
        self.entries[count] = self.entries[count - 1];
        self.entries[count - 1] = sge;
        self.count += 1;
        true
    }

    /// Makes the last entry longer by the bytes before it in memory.
    #[inline]
    pub fn grow_last_down(&mut self, bytes: u32) {
        if let Some(last) = self.entries[..usize::from(self.count)].last_mut() {
            last.addr -= u64::from(bytes);
            last.len += bytes;
        }
    }

    /// The entry at that place: one without bytes, if the list is shorter. `None`: no list is as
    /// long.
    #[inline]
    pub fn entry(&self, at: usize) -> Option<&Sge> {
        self.entries.get(at)
    }

    /// As [`Self::entry`], mutable.
    #[inline]
    pub fn entry_mut(&mut self, at: usize) -> Option<&mut Sge> {
        self.entries.get_mut(at)
    }

    /// Adds an entry behind the first one, before the others. False if there are [`MAX_SGE`]
    /// already, or none.
    #[must_use]
    #[inline]
    pub fn push_second(&mut self, sge: Sge) -> bool {
        let [_, second, third, fourth] = &mut self.entries;
        if self.count == 0 || usize::from(self.count) == MAX_SGE {
            return false;
        }
        (*second, *third, *fourth) = (sge, *second, *third);
        self.count += 1;
        true
    }

    /// Makes the first entry longer by the bytes that follow it in memory.
    #[inline]
    pub fn grow_first(&mut self, bytes: u32) {
        if let Some(first) = self.entries[..usize::from(self.count)].first_mut() {
            first.len += bytes;
        }
    }

    /// The entries in order.
    #[must_use]
    #[inline]
    pub fn as_slice(&self) -> &[Sge] {
        &self.entries[..usize::from(self.count)]
    }

    /// Whether it is one entry of at most `bytes`.
    #[must_use]
    #[inline]
    pub fn is_one_within(&self, bytes: u32) -> bool {
        self.count == 1 && self.entries[0].len <= bytes
    }

    /// Sum of the lengths in bytes.
    #[must_use]
    #[inline]
    pub fn total_bytes(&self) -> u64 {
        self.as_slice().iter().map(|s| u64::from(s.len)).sum()
    }
}

/// Memory of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteBuffer {
    /// Address in the peer's MR.
    pub addr: u64,
    /// The peer's key.
    pub rkey: Rkey,
}

/// The operation of a send-queue WR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendOp {
    /// Two-sided message into the peer's next RECV.
    Send,
    /// One-sided write; the peer's CPU sees nothing.
    Write(RemoteBuffer),
    /// One-sided write that also consumes a RECV of the peer and delivers 32 bits (host order
    /// here).
    WriteWithImm(RemoteBuffer, u32),
    /// One-sided read into the SGEs. The caller keeps the number in flight within the read depth.
    Read(RemoteBuffer),
}

/// One WR for the send queue. A WR without bytes fails with [`WcStatus::LocalLength`], because some
/// devices drop empty messages.
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    /// Returned in the completion.
    pub id: WrId,
    /// The operation.
    pub op: SendOp,
    /// Local memory: source, or sink of a READ.
    pub sges: SgeList,
    /// Ask for a completion on success too.
    pub signaled: bool,
    /// Let the provider copy the payload when the WR is posted (verbs inline). Only for payloads of
    /// up to [`crate::DeviceCaps::inline_bytes`], and never for READ. A hint: ignored if not
    /// possible.
    pub inline: bool,
}

/// One WR for the receive queue.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    /// Returned in the completion.
    pub id: WrId,
    /// Where the message is written to: the entries one after the other. One entry of no bytes, if
    /// only a WRITE_WITH_IMM takes it.
    pub sges: SgeList,
}

impl RecvWr {
    /// A RECV with one place for the message.
    #[must_use]
    #[inline]
    pub fn one(id: WrId, sge: Sge) -> Self {
        Self { id, sges: SgeList::one(sge) }
    }
}

/// RECVs to be posted: rows of a table that their owner made once. A QP has few RECVs, and posts
/// the same ones again and again.
#[derive(Clone, Copy, Debug)]
pub struct Recvs<'a> {
    /// All RECVs.
    pub table: &'a [RecvWr],
    /// Those to post, in order, by their index. Each is in the table.
    pub rows: &'a [u16],
}

impl<'a> Recvs<'a> {
    /// All RECVs of a short list. `None` if it has more than 256.
    pub(crate) fn all(table: &'a [RecvWr]) -> Option<Self> {
        const ROWS: [u16; 256] = {
            let mut rows = [0; 256];
            let mut row = 0u16;
            while row < 256 {
                rows[row as usize] = row;
                row += 1;
            }
            rows
        };
        Some(Self { table, rows: const { &ROWS }.get(..table.len())? })
    }

    /// The RECVs to post.
    pub(crate) fn iter(self) -> impl ExactSizeIterator<Item = &'a RecvWr> {
        self.rows.iter().map(move |row| &self.table[wide(*row)])
    }

    /// The first `count` of them.
    #[must_use]
    pub(crate) fn first(self, count: usize) -> Self {
        Self { rows: &self.rows[..count], ..self }
    }
}

/// Outcome of a WR (`enum ibv_wc_status`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WcStatus {
    /// Done.
    Success,
    /// The QP is dead. The WR may or may not have had its effect at the peer.
    Flushed,
    /// A message longer than its RECV, or a bad length.
    LocalLength,
    /// Bad lkey, bounds or access of our own SGE.
    LocalProtection,
    /// The peer refused the rkey, bounds or access.
    RemoteAccess,
    /// The request was invalid for the peer (READ depth exceeded, RECV too short).
    RemoteInvalidRequest,
    /// The peer failed on its side.
    RemoteOperation,
    /// The peer did not acknowledge in time.
    RetryExceeded,
    /// The peer had no RECV posted.
    RnrRetryExceeded,
    /// Any other status, with the provider's number.
    Other(u32),
}

/// For logs.
impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WcStatus::Success => "success",
            WcStatus::Flushed => "the QP is dead",
            WcStatus::LocalLength => "a message does not fit its buffer",
            WcStatus::LocalProtection => "an own buffer may not be used so",
            WcStatus::RemoteAccess => "the peer refuses the access to its memory",
            WcStatus::RemoteInvalidRequest => "the peer refuses the request",
            WcStatus::RemoteOperation => "the peer failed",
            WcStatus::RetryExceeded => "the peer does not acknowledge",
            WcStatus::RnrRetryExceeded => "the peer has no RECV posted",
            WcStatus::Other(status) => return write!(f, "WC status {status}"),
        })
    }
}

/// Kind of WR that completed. Undefined in verbs if the status is an error: then use the `WrId`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WcOpcode {
    /// SEND done.
    Send,
    /// RDMA WRITE (with or without immediate) done.
    Write,
    /// RDMA READ done, data placed.
    Read,
    /// A SEND of the peer arrived.
    Recv,
    /// A WRITE_WITH_IMM of the peer arrived.
    RecvWithImm,
    /// Any other opcode, with the provider's number.
    Other(u32),
}

/// A work completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The QP it belongs to.
    pub qp: QpIndex,
    /// The id of the WR, masked to the caller's bits.
    pub id: WrId,
    /// Outcome.
    pub status: WcStatus,
    /// The operation that completed. Undefined unless `status` is success.
    pub opcode: WcOpcode,
    /// Bytes received (RECV), written by the peer (WRITE_WITH_IMM) or transferred (READ); 0
    /// otherwise.
    pub byte_len: u32,
    /// Immediate data in host order, for [`WcOpcode::RecvWithImm`].
    pub imm: u32,
}

impl Default for Completion {
    fn default() -> Self {
        Self {
            qp: QpIndex(0),
            id: WrId(0),
            status: WcStatus::Success,
            opcode: WcOpcode::Other(0),
            byte_len: 0,
            imm: 0,
        }
    }
}
