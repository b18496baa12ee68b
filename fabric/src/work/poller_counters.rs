//! [`PollerCounters`]: the counters of one poller.

use crate::work::{SendOp, SendWr};

/// The work of one poller since it was made. Messages are posted WRs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PollerCounters {
    /// post_send calls with at least one WR.
    pub send_doorbells: u64,
    /// post_recv calls with at least one WR.
    pub recv_doorbells: u64,
    /// SENDs posted.
    pub sends: u64,
    /// RDMA WRITEs posted, without immediate.
    pub writes: u64,
    /// WRITE_WITH_IMMs posted.
    pub writes_with_imm: u64,
    /// RDMA READs posted.
    pub reads: u64,
    /// Send WRs that asked for a completion.
    pub signaled: u64,
    /// RECVs posted.
    pub recvs: u64,
    /// Completions polled.
    pub completions: u64,
    /// Times the CQ was armed. A CQ that is armed already is not armed again.
    pub arms: u64,
    /// Events taken.
    pub events: u64,
    /// Calls into links and epoll (software provider). Over TCP each is a system call.
    pub link_calls: u64,
    /// Encrypted connections that ended because a record did not prove itself, or was none.
    pub bad_records: u64,
}

impl PollerCounters {
    /// Counts one send WR that was posted.
    #[inline]
    pub(crate) fn count_send(&mut self, wr: &SendWr) {
        match wr.op {
            SendOp::Send => self.sends += 1,
            SendOp::Write(_) => self.writes += 1,
            SendOp::WriteWithImm(..) => self.writes_with_imm += 1,
            SendOp::Read(_) => self.reads += 1,
        }
        self.signaled += u64::from(wr.signaled);
    }

    /// Adds the counters of another poller, field by field.
    pub fn add(&mut self, other: &Self) {
        self.send_doorbells += other.send_doorbells;
        self.recv_doorbells += other.recv_doorbells;
        self.sends += other.sends;
        self.writes += other.writes;
        self.writes_with_imm += other.writes_with_imm;
        self.reads += other.reads;
        self.signaled += other.signaled;
        self.recvs += other.recvs;
        self.completions += other.completions;
        self.arms += other.arms;
        self.events += other.events;
        self.link_calls += other.link_calls;
        self.bad_records += other.bad_records;
    }
}
