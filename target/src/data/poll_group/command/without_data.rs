//! FLUSH, DISCARD and WRITE_ZEROES: in stores they concern every shard of a volume.
//!
//! A FLUSH of a write-back volume first makes every shard hand its dirty blocks to the store, then
//! syncs the store. A discard or zeroing of more than one stripe locks the range at every shard,
//! one after the other in their order, so that two such commands never wait for each other. Then it
//! changes the store. It is answered after every shard has ended its lock: until then a shard might
//! still answer reads with data that the change made old.

use std::ops::Range;
use std::sync::Arc;

use rblk_fabric::Region;
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{Mutation, Opcode, Tag};

use super::respond::finish;
use crate::cache::ShardRequest;
use crate::cache::shard_messages::Changed;
use crate::data::connection::Connection;
use crate::data::parts::PartIndex;
use crate::data::poll_group::group_state::GroupState;
use crate::data::request::{Action, CommandOutcome, RequestEvent, Span};
use crate::store::{OpKind, Store};

/// Makes every shard hand its dirty blocks to the store; then the store is synced ([`sync`]).
pub(in crate::data::poll_group) fn flush<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) {
    connection.release_data(tag);
    let request = connection.request_mut(tag);
    let volume = request.span().volume;
    let _ = request.step(RequestEvent::FlushBegan);
    let shards = if Mutation::FlushScopeShard.is_on() {
        group.index..group.index + 1
    } else {
        0..group.groups()
    };
    let from = group.token(connection, tag, PartIndex::FIRST);
    for shard in shards {
        group.ask(connection, tag, shard, ShardRequest::Flush { from, volume });
    }
}

/// Makes the store's data durable, where no shard has dirty blocks.
pub(in crate::data::poll_group) fn sync_now<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) {
    connection.release_data(tag);
    let _ = connection.request_mut(tag).step(RequestEvent::SyncBegan);
    sync(connection, group, tag);
}

/// Makes the store's data durable.
pub(in crate::data::poll_group) fn sync<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) {
    let from = group.token(connection, tag, PartIndex::FIRST);
    let volume = connection.request(tag).span().volume;
    group.ask(connection, tag, group.index, ShardRequest::Sync { from, volume });
}

/// Starts a discard or zeroing, by the `shard` that has the whole range, or by all shards together.
pub(in crate::data::poll_group) fn start<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    kind: OpKind,
    shard: Option<usize>,
) {
    connection.release_data(tag);
    let request = connection.request_mut(tag);
    let Some(shard) = shard else {
        let _ = request.step(RequestEvent::LocksBegan);
        return lock_range(connection, group, tag, 0);
    };
    let volume = request.span().volume;
    let _ = request.step(RequestEvent::ChangeBegan);
    let from = group.token(connection, tag, PartIndex::FIRST);
    group.ask(connection, tag, shard, ShardRequest::Change { from, volume, kind, locked: false });
}

/// Locks the range at the next shard, or changes the store when every shard locked it.
pub(in crate::data::poll_group) fn lock_range<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    shard: u16,
) {
    let request = connection.request_mut(tag);
    let Span { volume, offset, len } = request.span();
    if wide(shard) < group.groups() {
        let part = PartIndex(narrow(shard));
        let from = group.token(connection, tag, part);
        let lock = ShardRequest::LockRange { from, volume, offset, len };
        return group.ask(connection, tag, wide(shard), lock);
    }
    let _ = request.step(RequestEvent::AllLocked);
    let kind = match request.command() {
        Some(command) if command.opcode != Opcode::Discard => {
            OpKind::WriteZeroes { offset, len, may_unmap: command.flags.may_unmap }
        }
        _ => OpKind::Discard { offset, len },
    };
    let from = group.token(connection, tag, PartIndex::FIRST);
    let change = ShardRequest::Change { from, volume, kind, locked: true };
    group.ask(connection, tag, group.index, change);
}

/// Ends the locks of a command.
pub(in crate::data::poll_group) fn unlock_range<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    outcome: Changed,
) {
    let from = group.token(connection, tag, PartIndex::FIRST);
    let locks = connection.request_mut(tag).take_locks();
    for locked in &locks {
        let unlock = ShardRequest::UnlockRange { from, job: locked.job, outcome };
        group.ask(connection, tag, wide(locked.shard), unlock);
    }
    connection.request_mut(tag).reuse_locks(locks);
}

/// Zeroes a range of a memory volume, now or step by step.
pub(in crate::data::poll_group) fn zero<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
    region: Arc<Region>,
    range: Range<usize>,
) {
    if group.later.zeroing.zero_now(&region, &range) {
        return finish(connection, group, tag, CommandOutcome::OK);
    }
    let _ = connection.request_mut(tag).step(RequestEvent::ZeroingBegan);
    connection.release_data(tag);
    group.later.zeroing.push((connection.id(), tag), region, range);
    group.rare = true;
}

/// A range of a memory volume was zeroed.
pub(in crate::data::poll_group) fn zeroed<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    tag: Tag,
) {
    if let Action::Finish(status) = connection.request_mut(tag).step(RequestEvent::Zeroed) {
        finish(connection, group, tag, CommandOutcome::of(status));
    }
}
