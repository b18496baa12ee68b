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
    reads: Counter Number => "rblk_target_commands_total" { op = "read" }
        "Commands answered, by kind.",
    /// WRITE commands answered.
    writes: Counter Number => "rblk_target_commands_total" { op = "write" },
    /// FLUSH commands answered.
    flushes: Counter Number => "rblk_target_commands_total" { op = "flush" },
    /// DISCARD commands answered.
    discards: Counter Number => "rblk_target_commands_total" { op = "discard" },
    /// WRITE_ZEROES commands answered.
    write_zeroes: Counter Number => "rblk_target_commands_total" { op = "write_zeroes" },
    /// Admin commands answered.
    admin_commands: Counter Number => "rblk_target_commands_total" { op = "admin" },
    /// Bytes sent for READs.
    read_bytes: Counter Bytes => "rblk_target_read_bytes_total",
    /// Bytes taken by WRITEs.
    written_bytes: Counter Bytes => "rblk_target_written_bytes_total",
    /// Writes with their data inside the command (in-capsule data).
    ///
    /// No key of the initiator was used.
    in_capsule_writes: Counter Number => "rblk_target_in_capsule_writes_total",
    /// Bytes that the CPU copied between buffers.
    ///
    /// In-capsule writes to their final place, and all data of other commands on iWARP. On other
    /// devices, reads count only for memory volumes with digests.
    copied_bytes: Counter Bytes => "rblk_target_copied_bytes_total",
    /// Bytes copied for writes of parts of a cached block.
    merged_bytes: Counter Bytes => "rblk_target_merged_bytes_total",
    /// Commands answered with an error.
    failed_commands: Counter Number => "rblk_target_failed_commands_total",
    /// Commands refused as their host lost the volume, or came by an older epoch.
    ///
    /// They count as failed, too.
    fenced_commands: Counter Number => "rblk_target_fenced_commands_total",
    /// Connections ended because the peer broke a rule.
    protocol_errors: Counter Number => "rblk_target_protocol_errors_total",
    /// I/O connections that did not prove that they are of their session.
    failed_proofs: Counter Number => "rblk_target_failed_proofs_total",
    /// Commands and data that were changed on the way.
    ///
    /// Their digests did not match.
    digest_mismatches: Counter Number => "rblk_target_digest_mismatches_total",
    /// Connections that ended because the path failed or the initiator was silent.
    ///
    /// Initiators that left commands unanswered count. An initiator that leaves when every command
    /// is answered, as after `umount` and `discover`, does not count.
    lost_connections: Counter Number => "rblk_target_lost_connections_total",
    /// RDMA operations that the initiator's device refused.
    ///
    /// RDMA WRITEs and READs that did not reach the initiator's memory: its device refused the key,
    /// or the peer no longer answered. Each ended its connection.
    stale_rdma_blocked: Counter Number => "rblk_target_stale_rdma_blocked_total",
    /// Times that a request waited for memory of the arena.
    memory_waits: Counter Number => "rblk_target_memory_waits_total",
    /// Times that a request waited for others on the same blocks.
    range_waits: Counter Number => "rblk_target_range_waits_total",
    /// Blocks of 4 KiB that reads found in the cache.
    cache_hits: Counter Number => "rblk_target_cache_hits_total",
    /// Blocks of 4 KiB that reads did not find.
    cache_misses: Counter Number => "rblk_target_cache_misses_total",
    /// Blocks of 4 KiB read ahead of sequential readers.
    cache_prefetched: Counter Number => "rblk_target_cache_prefetched_blocks_total",
    /// Blocks of 4 KiB that left the cache to make room.
    cache_evictions: Counter Number => "rblk_target_cache_evictions_total",
    /// Blocks of 4 KiB copied to other memory of the cache.
    ///
    /// So large requests find memory in one run.
    cache_moved: Counter Number => "rblk_target_cache_moved_blocks_total",
    /// Bytes read from the stores of cached volumes.
    fill_bytes: Counter Bytes => "rblk_target_cache_fill_bytes_total",
    /// Store operations that wrote dirty blocks.
    ///
    /// Each is one operation for one or more neighbouring dirty blocks.
    write_backs: Counter Number => "rblk_target_write_backs_total",
    /// Bytes written by write-backs.
    write_back_bytes: Counter Bytes => "rblk_target_write_back_bytes_total",
    /// Writes that found no room for dirty blocks and went to the store.
    ///
    /// Only volumes with write-back have them.
    dirty_limited: Counter Number => "rblk_target_dirty_limited_writes_total",
    /// Operations that a store failed.
    store_errors: Counter Number => "rblk_target_store_errors_total",
    /// Bytes of the arena that hold nothing.
    arena_free_bytes: Gauge Bytes => "rblk_target_arena_free_bytes",
    /// Bytes in the cache.
    cached_bytes: Gauge Bytes => "rblk_target_cached_bytes",
    /// Acknowledged bytes that are in memory only.
    dirty_bytes: Gauge Bytes => "rblk_target_dirty_bytes",
    /// The limit of the dirty bytes.
    dirty_max_bytes: Gauge Bytes => "rblk_target_dirty_limit_bytes",
    /// Slots of the cache that are lent for sending.
    lent_slots: Gauge Number => "rblk_target_lent_slots",
    /// Slots of the cache that are set apart for the data of small writes.
    landing_slots: Gauge Number => "rblk_target_landing_slots",
    /// Messages to other poll groups.
    peer_messages: Counter Number => "rblk_target_peer_messages_total",
    /// Times that a command waited for a READ credit.
    read_credit_waits: Counter Number => "rblk_target_read_credit_waits_total",
    /// Times that a command waited for a place in the send queue.
    ///
    /// On iWARP also for room for a copy of the data.
    send_credit_waits: Counter Number => "rblk_target_send_credit_waits_total",
    /// Turns of the data thread.
    turns: Counter Number => "rblk_target_turns_total",
    /// Times the data thread slept.
    sleeps: Counter Number => "rblk_target_sleeps_total",
    /// Calls of io_uring_enter.
    ring_enters: Counter Number => "rblk_target_ring_enters_total",
    /// SENDs posted.
    sends: Counter Number => "rblk_target_sends_total",
    /// RDMA WRITEs posted, without immediate.
    rdma_writes: Counter Number => "rblk_target_rdma_writes_total",
    /// RDMA WRITE_WITH_IMMs posted: data and answer in one message.
    rdma_writes_with_imm: Counter Number => "rblk_target_rdma_writes_with_imm_total",
    /// RDMA READs posted.
    rdma_reads: Counter Number => "rblk_target_rdma_reads_total",
    /// Send WRs that asked for a completion.
    signaled: Counter Number => "rblk_target_signaled_total",
    /// Posts of a list of send WRs.
    send_doorbells: Counter Number => "rblk_target_send_doorbells_total",
    /// Posts of a list of RECVs.
    recv_doorbells: Counter Number => "rblk_target_recv_doorbells_total",
    /// RECVs posted.
    recvs: Counter Number => "rblk_target_recvs_total",
    /// Completions reaped.
    completions: Counter Number => "rblk_target_completions_total",
    /// Times the data thread yielded its CPU while it looked for work.
    yields: Counter Number => "rblk_target_yields_total",
    /// Times a CQ was asked for an event.
    ///
    /// An armed CQ is not armed again.
    arms: Counter Number => "rblk_target_cq_arms_total",
    /// Events of the CQs that were taken.
    events: Counter Number => "rblk_target_cq_events_total",
    /// Calls of the software provider into its links.
    ///
    /// And into epoll. Over TCP each is a system call.
    link_calls: Counter Number => "rblk_target_link_calls_total",
    /// Encrypted connections that ended because a record was changed on the way.
    ///
    /// Or because the bytes were no record.
    bad_records: Counter Number => "rblk_target_bad_records_total",
    /// SENDs that carried several answers.
    lists: Counter Number => "rblk_target_answer_lists_total",
    /// Answers in them.
    listed: Counter Number => "rblk_target_listed_answers_total",
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
