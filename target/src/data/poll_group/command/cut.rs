//! [`Cut`]: the rule that cuts the ranges of a volume into parts for its shards. Pure.

use crate::cache::{STRIPE_BYTES, shard_of};
use crate::data::request::Span;
use crate::volume::ids::VolumeIndex;
use crate::volume::{CacheMode, Volume};

/// The rule that cuts the ranges of a volume into parts for its shards.
#[derive(Clone, Copy, Debug)]
pub(in crate::data::poll_group) struct Cut {
    /// The volume.
    pub(in crate::data::poll_group) volume: VolumeIndex,
    // The asked shard has the whole range.
    is_whole: bool,
    /// This group's own shard.
    pub(in crate::data::poll_group) own: usize,
    /// Number of shards.
    pub(in crate::data::poll_group) groups: usize,
}

impl Cut {
    #[inline]
    pub(in crate::data::poll_group) fn of(volume: &Volume, own: usize, groups: usize) -> Self {
        let is_whole = groups == 1 || volume.cache == CacheMode::None;
        Self { volume: volume.index, is_whole, own, groups }
    }

    /// A rule that gives every range to this group's own shard.
    pub(in crate::data::poll_group) fn own(volume: VolumeIndex, own: usize, groups: usize) -> Self {
        Self { volume, is_whole: true, own, groups }
    }

    /// The end of a range's first part, and its shard.
    #[inline]
    pub(in crate::data::poll_group) fn first(&self, from: u64, end: u64) -> (u64, usize) {
        if self.is_whole {
            return (end, self.own);
        }
        let stripe = (from / STRIPE_BYTES + 1) * STRIPE_BYTES;
        (end.min(stripe), shard_of(self.volume, from, self.groups))
    }

    /// Whether this group's own shard has all of a range.
    #[inline]
    pub(in crate::data::poll_group) fn is_own(&self, span: Span) -> bool {
        let end = span.offset + span.len;
        self.first(span.offset, end) == (end, self.own)
    }
}
