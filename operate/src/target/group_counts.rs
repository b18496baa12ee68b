//! Counters of one poll group. Only its thread writes them; every thread may read them.

use rblk_protocol::limits::READ_TRAILER_BYTES;
use rblk_protocol::width::wide64;
use rblk_protocol::{CommandCapsule, Opcode, Status};
use serde::{Deserialize, Serialize};

use super::volume_counts::hit_ratio;

rblk_runtime::counters! {
    /// Counters of one poll group, on cache lines of their own.
    #[derive(Debug, Default)]
    #[repr(align(128))]
    pub struct Stats;

    /// The counters at one moment; also their sum over poll groups.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct StatsSnapshot;

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
    /// Writes with their data inside the capsule: no key of the initiator was used.
    in_capsule_writes,
    /// Bytes that the target's CPU copied between buffers: in-capsule writes to their final place,
    /// and all data of other commands on iWARP. On other devices, reads count only for memory
    /// volumes with digests.
    copied_bytes,
    /// Bytes copied for writes of parts of a cached block.
    merged_bytes,
    /// Commands answered with an error.
    failed_commands,
    /// Failed commands of an older epoch, or after another initiator took the volume over.
    fenced_commands,
    /// Connections ended because the peer broke a rule.
    protocol_errors,
    /// I/O connections that failed to prove their session.
    failed_proofs,
    /// Commands and data with digest mismatches: they changed on their way.
    digest_mismatches,
    /// Connections with a failed path, or with an initiator that went silent or left commands
    /// unanswered. An initiator that leaves when every command is answered, as after `umount` and
    /// `discover`, does not count.
    lost_connections,
    /// RDMA WRITEs and READs that did not reach the initiator's memory: its device refused the
    /// key, or the peer no longer answered. Each ended its connection.
    stale_rdma_blocked,
    /// Requests that had to wait for memory of the arena.
    memory_waits,
    /// Requests that had to wait for others on the same blocks.
    range_waits,
    /// Blocks of 4 KiB that reads found in the cache.
    cache_hits,
    /// Blocks that reads did not find.
    cache_misses,
    /// Blocks read ahead of sequential readers.
    cache_prefetched,
    /// Blocks that left the cache to make room.
    cache_evictions,
    /// Blocks copied to other memory of the cache, so that large requests find memory in one run.
    cache_moved,
    /// Bytes read from the stores of cached volumes.
    fill_bytes,
    /// Write-backs: store operations of one or more neighbouring dirty blocks.
    write_backs,
    /// Bytes written by write-backs.
    write_back_bytes,
    /// Writes of write-back volumes that found no room for dirty blocks and went to the store.
    dirty_limited,
    /// Store operations that failed.
    store_errors,
    /// Current bytes of the arena that hold nothing.
    arena_free_bytes,
    /// Current bytes in the cache.
    cached_bytes,
    /// Current bytes that are acknowledged but not in the store yet.
    dirty_bytes,
    /// The limit of `dirty_bytes`.
    dirty_max_bytes,
    /// Current slots lent for sending.
    lent_slots,
    /// Current slots set apart for landing data.
    landing_slots,
    /// Messages to other poll groups.
    peer_messages,
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
    /// Times that the data thread yielded its CPU while it looked for work.
    yields,
    /// Times that a CQ was armed for an event. An armed CQ is not armed again.
    arms,
    /// CQ events taken.
    events,
    /// Calls of the software provider into its links and epoll; over TCP each is a system call.
    link_calls,
    /// Encrypted connections that ended because a record was changed on the way, or was no record.
    bad_records,
    /// SENDs with several responses.
    lists,
    /// Responses in these SENDs.
    listed,
}

impl StatsSnapshot {
    /// Share of the blocks asked for by reads that the cache had; `None` before the first such
    /// read.
    #[must_use]
    pub fn hit_ratio(&self) -> Option<f64> {
        hit_ratio(self.cache_hits, self.cache_misses)
    }

    /// Mean size of a write-back in bytes; `None` before the first.
    #[must_use]
    pub fn bytes_per_write_back(&self) -> Option<u64> {
        self.write_back_bytes.checked_div(self.write_backs)
    }
}

impl Stats {
    /// Bytes of the volume that a READ or WRITE moves.
    #[inline(always)]
    pub fn data_bytes(command: &CommandCapsule) -> u64 {
        let bytes = u64::from(command.buffer.map_or(command.in_capsule_bytes, |b| b.length));
        let has_trailer = command.flags.digest && command.opcode == Opcode::Read;
        bytes.saturating_sub(if has_trailer { wide64(READ_TRAILER_BYTES) } else { 0 })
    }

    /// Counts a command of this many [bytes](Self::data_bytes) that was answered with this status.
    #[inline]
    pub fn count(&self, command: &CommandCapsule, bytes: u64, status: Status) {
        match command.opcode {
            Opcode::Read => {
                self.reads.add(1);
                self.read_bytes.add(bytes);
            }
            Opcode::Write => {
                self.count_write(bytes, command.in_capsule_bytes > 0);
            }
            Opcode::Flush => self.flushes.add(1),
            Opcode::Discard => self.discards.add(1),
            Opcode::WriteZeroes => self.write_zeroes.add(1),
            _ => self.admin_commands.add(1),
        }
        if status != Status::Ok {
            self.failed_commands.add(1);
            self.fenced_commands.add(u64::from(status == Status::Fenced));
        }
    }

    /// Counts a successful WRITE of this many bytes.
    #[inline(always)]
    pub fn count_write(&self, bytes: u64, in_capsule: bool) {
        self.writes.add(1);
        self.written_bytes.add(bytes);
        self.in_capsule_writes.add(u64::from(in_capsule));
    }

    /// Counts a successful READ of this many bytes.
    #[inline(always)]
    pub fn count_read(&self, bytes: u64) {
        self.reads.add(1);
        self.read_bytes.add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_of_nothing_are_none() {
        let nothing = StatsSnapshot::default();
        assert_eq!(nothing.hit_ratio(), None);
        assert_eq!(nothing.bytes_per_write_back(), None);
        let some = StatsSnapshot {
            cache_hits: 3,
            cache_misses: 1,
            write_backs: 3,
            write_back_bytes: 40960,
            ..nothing
        };
        assert_eq!(some.hit_ratio(), Some(0.75));
        assert_eq!(some.bytes_per_write_back(), Some(13653));
    }
}
