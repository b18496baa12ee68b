//! Discards and zeroing, and their effect on cached blocks.

use super::SLOT_BYTES;
use super::core::ShardCore;
use super::job::JobKind;
use super::shard_messages::Changed;
use super::slots::{Install, SlotState};
use super::write_backs::WriteBacks;
use crate::cache::write_job::forget_clean;
use crate::store::Store;

/// The job may continue: submits its discard or zeroing to the store.
pub(super) fn submit<S: Store>(core: &mut ShardCore<S>, job: u32) {
    let JobKind::Change(kind) = core.jobs.peek(job).kind else {
        return debug_assert!(false, "a change has become {:?}", core.jobs.peek(job).kind);
    };
    core.submit(job, kind, 0, &[]);
}

/// The store ended the change of a range, with or without an error.
pub(super) fn finish<S: Store>(core: &mut ShardCore<S>, write_backs: &mut WriteBacks, job: u32) {
    let entry = core.jobs.peek(job);
    // Without a lock here, each shard that locked the range receives its own `UnlockRange` request.
    if entry.has_lock() {
        let outcome = if entry.error().is_some() { Changed::Unknown } else { Changed::Yes };
        changed(core, write_backs, job, outcome);
    }
    core.finish(job);
}

/// The store's bytes of a job's range changed, or may have changed: cached blocks of the range are
/// old.
pub(super) fn changed<S: Store>(
    core: &mut ShardCore<S>,
    write_backs: &mut WriteBacks,
    job: u32,
    outcome: Changed,
) {
    let span = core.jobs.peek(job).span;
    match outcome {
        Changed::No => return,
        Changed::Unknown => return forget_clean(core, &span),
        Changed::Yes => {}
    }
    write_backs.recall(core, span.volume, span.first(), span.last());
    let mut kept = [None; 2];
    for (at, block) in span.edges().as_slice().iter().copied().enumerate() {
        let cached = core.slots.find(span.volume, block);
        let dirty = cached.filter(|slot| core.slots.state(*slot) == SlotState::Dirty);
        if let Some(dirty) = dirty
            && let Some(slot) = core.jobs.get(job).edges.pop()
        {
            // Only the cache has the bytes around the range: makes a new block with the range
            // zeroed.
            let covered = span.covered(block);
            core.copy(dirty, slot, 0, SLOT_BYTES);
            let from = core.slots.offset(slot) + covered.from;
            core.slots.region().zero(from, covered.to - covered.from);
            core.slots.install(slot, span.volume, block, Install::Merged);
            kept[at] = Some(slot);
        }
    }
    core.slots.for_each_in(span.volume, span.first(), span.last(), |slots, slot| {
        if !kept.contains(&Some(slot)) {
            slots.forget(slot);
        }
    });
}
