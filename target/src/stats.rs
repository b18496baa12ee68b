//! Counters of one poll group: written by its thread alone, read by anyone.

use rblk_fabric::{Counter, PollerCounters};
use serde::{Deserialize, Serialize};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one poll group, on cache lines of their own.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct Stats {
            $($(#[$doc])* pub $name: Counter,)*
        }

        /// The counters at one moment; also their sum over poll groups.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct StatsSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// Reads all of them.
            #[must_use]
            pub fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot { $($name: self.$name.get(),)* }
            }
        }

        impl StatsSnapshot {
            /// Adds another poll group's.
            pub fn add(&mut self, other: &Self) {
                $(self.$name = self.$name.wrapping_add(other.$name);)*
            }
        }
    };
}

counters! {
    /// READ commands answered.
    reads,
    /// WRITE commands answered.
    writes,
    /// FLUSH commands answered.
    flushes,
    /// DISCARD commands answered.
    discards,
    /// WRITE_ZEROES commands answered.
    write_zeroes,
    /// Admin commands answered.
    admin_commands,
    /// Bytes sent for READs.
    read_bytes,
    /// Bytes taken by WRITEs.
    written_bytes,
    /// Writes whose data came inside the capsule: no key of the initiator was used.
    in_capsule_writes,
    /// Bytes the target's CPU copied between buffers.
    copied_bytes,
    /// Commands answered with an error.
    failed_commands,
    /// Connections ended because the peer broke a rule.
    protocol_errors,
    /// Connections that ended by a transport error or a lost peer.
    lost_connections,
    /// Commands that had to wait for arena memory.
    extent_waits,
    /// Commands that had to wait for a READ credit.
    read_credit_waits,
    /// Commands that had to wait for a send-queue slot.
    send_credit_waits,
    /// Turns of the data thread.
    turns,
    /// Times the data thread slept.
    sleeps,
    /// io_uring_enter calls.
    ring_enters,
    /// SENDs posted (responses).
    sends,
    /// RDMA WRITEs posted, without immediate.
    rdma_writes,
    /// RDMA WRITE_WITH_IMMs posted: data and response in one message.
    rdma_writes_with_imm,
    /// RDMA READs posted.
    rdma_reads,
    /// Send WRs that asked for a completion.
    signaled,
    /// Doorbells: posts of a list of send WRs.
    send_doorbells,
    /// Posts of a list of RECVs.
    recv_doorbells,
    /// RECVs posted.
    recvs,
    /// Completions reaped.
    completions,
}

impl Stats {
    /// Publishes the fabric's own counters.
    pub fn set_fabric(&self, counters: &PollerCounters) {
        self.sends.set(counters.sends);
        self.rdma_writes.set(counters.writes);
        self.rdma_writes_with_imm.set(counters.writes_with_imm);
        self.rdma_reads.set(counters.reads);
        self.signaled.set(counters.signaled);
        self.send_doorbells.set(counters.send_doorbells);
        self.recv_doorbells.set(counters.recv_doorbells);
        self.recvs.set(counters.recvs);
        self.completions.set(counters.completions);
    }
}
