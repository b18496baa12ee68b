//! Zeroing ranges of memory volumes: at once, or in steps of a turn, so that others are served
//! meanwhile.

use std::ops::Range;
use std::sync::Arc;

use rblk_fabric::Region;
use rblk_protocol::Tag;

use super::respond::finish;
use super::turn::Turn;
use crate::connection::Connection;
use crate::identity::ConnectionId;
use crate::request::{Event, Outcome};
use crate::store::Store;

/// Bytes of a memory volume that are zeroed in one turn.
const STEP_BYTES: usize = 4 << 20;

/// A range of a memory volume that is being zeroed for a command.
pub(super) struct Zeroing {
    connection: ConnectionId,
    tag: Tag,
    region: Arc<Region>,
    // What is left.
    range: Range<usize>,
}

/// Zeroes a range for a command, now or step by step.
pub(super) fn start<S: Store>(
    connection: &mut Connection,
    turn: &mut Turn<S>,
    tag: Tag,
    region: Arc<Region>,
    range: Range<usize>,
) {
    if range.len() <= STEP_BYTES && turn.zeroing.is_empty() {
        region.zero(range.start, range.len());
        return finish(connection, turn, tag, Outcome::OK);
    }
    let _ = connection.request_mut(tag).step(Event::ZeroingBegan);
    connection.release_data(tag);
    turn.zeroing.push_back(Zeroing { connection: connection.id(), tag, region, range });
}

/// One step of the zeroing that has waited longest. Returns whose zeroing is done, if it is.
#[cold]
pub(super) fn step<S: Store>(turn: &mut Turn<S>) -> Option<(ConnectionId, Tag)> {
    let zeroing = turn.zeroing.front_mut()?;
    let bytes = zeroing.range.len().min(STEP_BYTES);
    zeroing.region.zero(zeroing.range.start, bytes);
    zeroing.range.start += bytes;
    if !zeroing.range.is_empty() {
        return None;
    }
    turn.zeroing.pop_front().map(|Zeroing { connection, tag, .. }| (connection, tag))
}
