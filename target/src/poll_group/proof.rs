//! Proofs: how memory that answers were sent from is seen to be free.

use rblk_protocol::Mutation;
use rblk_protocol::width::wide;

use super::turn::Turn;
use crate::connection::{Connection, SCRATCH_BYTES};
use crate::store::Store;

/// Bytes of a READ that only proves. Not fewer: soft-iWARP answers a READ of up to 32 bytes from a
/// shortcut that may look at a user's memory from a kernel thread, and then the connection or the
/// kernel dies.
const PROOF_BYTES: u32 = SCRATCH_BYTES;

/// Posts a READ of the peer's scratch, unless another completion on its way will release what is
/// pinned: the READ completes behind everything posted so far, and proves that all of it is done.
pub(super) fn ask<S: Store>(connection: &mut Connection, turn: &mut Turn<S>) {
    let Some(scratch) = connection.wants_proof() else { return };
    let entry = &mut turn.pollers[connection.poller()];
    let (sge, extent) = match (&mut entry.sink, &entry.memory.sink) {
        // There a READ may land in the sink only.
        (Some(sink), Some(region)) => {
            let Some(extent) = sink.allocate(wide(PROOF_BYTES)) else {
                return;
            };
            match region.sge(extent.offset(), PROOF_BYTES) {
                Some(sge) => (sge, Some(extent)),
                None => {
                    debug_assert!(false, "an extent outside its sink");
                    return sink.release(extent);
                }
            }
        }
        _ => (connection.scratch_sge(PROOF_BYTES), None),
    };
    connection.queue_proof(scratch, sge, extent);
}

/// Asks for a proof where only proofs bound what is pinned, and much is.
#[inline]
pub(super) fn ask_if_much<S: Store>(connection: &mut Connection, turn: &mut Turn<S>) {
    if connection.has_much_pinned() {
        ask(connection, turn);
    }
}

/// A signaled WR completed: send credits before it are free. Memory pinned before it goes back to
/// its shard, if the completion proves that the peer has the bytes.
#[inline]
pub(super) fn completed<S: Store>(connection: &mut Connection, turn: &mut Turn<S>, is_read: bool) {
    let Some(proven) = connection.send_completed(is_read) else { return };
    let position = if Mutation::BufferReuseTarget.is_on() { u64::MAX } else { proven };
    while let Some((shard, memory)) = connection.unpin(position) {
        turn.release(wide(shard), memory);
    }
}

/// The proof READ completed: its place in the sink is free.
pub(super) fn done<S: Store>(connection: &mut Connection, turn: &mut Turn<S>) {
    let extent = connection.proof_done();
    turn.release_sink(connection.poller(), extent);
    connection.read_completed();
}
