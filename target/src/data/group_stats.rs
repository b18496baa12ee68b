//! [`Publish`]: sets the counters of a poll group that its shard and its fabric keep.

use rblk_fabric::PollerCounters;
use rblk_operate::target::group_counts::Stats;
use rblk_protocol::width::wide64;

use crate::cache::slots::Slots;
use crate::cache::{CacheCounters, SLOT_BYTES};

/// Sets the counters that the shard and the fabric keep.
pub(crate) trait Publish {
    /// Publishes the shard's own counters.
    fn set_cache(&self, counters: &CacheCounters, slots: &Slots, dirty_max_bytes: usize);

    /// Publishes the fabric's own counters.
    fn set_fabric(&self, counters: &PollerCounters);
}

impl Publish for Stats {
    fn set_cache(&self, counters: &CacheCounters, slots: &Slots, dirty_max_bytes: usize) {
        self.memory_waits.set(counters.memory_waits);
        self.range_waits.set(counters.range_waits);
        self.cache_hits.set(counters.hits);
        self.cache_misses.set(counters.misses);
        self.cache_prefetched.set(counters.prefetched);
        self.cache_evictions.set(slots.evictions());
        self.cache_moved.set(slots.moved());
        self.fill_bytes.set(counters.fill_bytes);
        self.write_backs.set(counters.write_backs);
        self.write_back_bytes.set(counters.write_back_bytes);
        self.dirty_limited.set(counters.dirty_limited);
        self.store_errors.set(counters.store_errors);
        self.merged_bytes.set(counters.copied_bytes);
        self.arena_free_bytes.set(wide64(slots.free() * SLOT_BYTES));
        self.cached_bytes.set(wide64(slots.cached() * SLOT_BYTES));
        self.dirty_bytes.set(wide64(slots.dirty() * SLOT_BYTES));
        self.dirty_max_bytes.set(wide64(dirty_max_bytes));
        self.lent_slots.set(wide64(slots.lent()));
        self.landing_slots.set(wide64(slots.set_apart()));
    }

    fn set_fabric(&self, counters: &PollerCounters) {
        self.sends.set(counters.sends);
        self.rdma_writes.set(counters.writes);
        self.rdma_writes_with_imm.set(counters.writes_with_imm);
        self.rdma_reads.set(counters.reads);
        self.signaled.set(counters.signaled);
        self.send_doorbells.set(counters.send_doorbells);
        self.recv_doorbells.set(counters.recv_doorbells);
        self.recvs.set(counters.recvs);
        self.completions.set(counters.completions);
        self.arms.set(counters.arms);
        self.events.set(counters.events);
        self.link_calls.set(counters.link_calls);
        self.bad_records.set(counters.bad_records);
    }
}
