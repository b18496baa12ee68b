//! Barriers: READs that complete only when the memory of sent answers is free.

use rblk_protocol::Mutation;
use rblk_protocol::width::wide;

use crate::data::connection::{Connection, SCRATCH_BYTES};
use crate::data::poll_group::group_state::GroupState;
use crate::store::Store;

/// Bytes of a barrier. Not fewer: soft-iWARP answers a READ of up to 32 bytes from a shortcut
/// that may access a user's memory from a kernel thread, and then the connection or the kernel
/// dies.
const BARRIER_BYTES: u32 = SCRATCH_BYTES;

/// Posts a READ of the peer's scratch, unless another completion on its way will release the pinned
/// memory: the READ completes behind all earlier WRs, and proves that they are done.
pub(in crate::data::poll_group) fn ask(connection: &mut Connection) {
    if let Some(scratch) = connection.wants_barrier() {
        connection.queue_barrier(scratch, BARRIER_BYTES);
    }
}

/// Posts a barrier if only barriers bound the pinned memory, and much is pinned.
#[inline]
pub(in crate::data::poll_group) fn ask_if_much(connection: &mut Connection) {
    if connection.has_much_pinned() {
        ask(connection);
    }
}

/// A signaled WR completed: frees the send credits before it. Memory pinned before it goes back to
/// its shard, if the completion shows that the peer has the bytes.
#[inline]
pub(in crate::data::poll_group) fn completed<S: Store>(
    connection: &mut Connection,
    group: &mut GroupState<S>,
    is_read: bool,
) {
    let freed = connection.send_completed(is_read);
    // Credits may have returned that a barrier needs, for sends after the last barrier.
    ask_if_much(connection);
    let Some(freed) = freed else { return };
    let position = if Mutation::BufferReuseTarget.is_on() { u64::MAX } else { freed };
    while let Some((shard, memory)) = connection.unpin(position) {
        group.release(wide(shard), memory);
    }
}

/// The barrier completed.
pub(in crate::data::poll_group) fn done(connection: &mut Connection) {
    connection.barrier_done();
    connection.read_completed();
}
