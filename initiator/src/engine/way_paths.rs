//! [`WayPaths`]: the paths of a queue that has several ways, and the requests that wait for dead
//! ones.
//!
//! The engine works on one path at a time, the *present* one, and the code of requests and answers
//! knows no other. A queue with several ways has the other paths parked here. In its turn it
//! presents those with work, to take their completions and to post their WRs, and before a request
//! is sent it presents the path of the [chosen](Choice) way. So a queue with one way has none of
//! this: it pays with one branch in a turn.

use std::mem;
use std::time::Instant;

use rblk_protocol::{Mutation, QueueDepth, Tag};

use super::active_path::{ActivePath, BeatDue};
use super::io::Io;
use super::path::Path;
use super::ways::choice::{Choice, ChoicePolicy};
use super::ways::limbo::{Limbo, OldCopy};
use super::ways::way_set::WaySet;
use super::ways::{PLACES, WayIndex};
use super::{Engine, PathEnd};

/// See the module.
pub(super) struct WayPaths {
    choice: Choice,
    limbo: Limbo,
    // By tag, what was under way on a dead path. Of use while the path is in limbo.
    old: Box<[Option<OldCopy>]>,
    // By tag, the place of the path that the last request was sent by.
    sent_by: Box<[WayIndex]>,
    // The places that have a path, that of the present path included.
    paths: WaySet,
    // The place of the present path. Its path is not parked.
    present: WayIndex,
    parked: [Option<ActivePath>; PLACES],
}

impl WayPaths {
    fn new(choice: Choice, depth: QueueDepth) -> Self {
        Self {
            choice,
            limbo: Limbo::default(),
            old: vec![None; usize::from(depth.get())].into_boxed_slice(),
            sent_by: vec![WayIndex::FIRST; usize::from(depth.get())].into_boxed_slice(),
            paths: WaySet::NONE,
            present: WayIndex::FIRST,
            parked: Default::default(),
        }
    }

    /// Whether requests are being sent by some way.
    pub(super) fn are_connected(&self) -> bool {
        !self.choice.used().is_empty()
    }

    /// The paths that are not present.
    pub(super) fn parked(&self) -> impl Iterator<Item = &ActivePath> {
        self.parked.iter().flatten()
    }

    /// The same, to call their CQs.
    pub(super) fn parked_mut(&mut self) -> impl Iterator<Item = &mut ActivePath> {
        self.parked.iter_mut().flatten()
    }

    /// Makes the path of that place the present one, and parks the present one.
    #[inline]
    fn present(&mut self, way: WayIndex, path: &mut Option<ActivePath>) {
        if way != self.present {
            mem::swap(path, &mut self.parked[self.present.get()]);
            mem::swap(path, &mut self.parked[way.get()]);
            self.present = way;
        }
    }

    /// The path of a place, where `path` is the present one.
    #[inline]
    fn path_of<'a>(
        &'a mut self,
        way: WayIndex,
        path: &'a mut Option<ActivePath>,
    ) -> Option<&'a mut ActivePath> {
        if way == self.present { path.as_mut() } else { self.parked[way.get()].as_mut() }
    }

    /// A place has a path, which is the present one.
    pub(super) fn has_path(&mut self, path: &ActivePath) {
        self.paths.insert(path.way());
        if path.is_ready() {
            self.choice.lives(path.way(), path.way_terms());
        }
    }

    /// The request of a tag was under way on a path that died.
    pub(super) fn keep_copy(&mut self, tag: Tag, old: OldCopy) {
        if let Some(kept) = self.old.get_mut(tag.index()) {
            *kept = Some(old);
        }
    }

    /// The path of a place died. `is_touched`: its device may touch the buffers until its QPs are
    /// destroyed.
    pub(super) fn died(&mut self, way: WayIndex, is_touched: bool) {
        self.paths.remove(way);
        self.choice.died(way);
        self.limbo.died(way, is_touched);
    }

    /// A request was sent by the present path: an answer by the path that the tag was last sent by
    /// is none.
    fn sent(&mut self, tag: Tag) {
        self.forget_copy(tag);
        let Some(last) = self.sent_by.get_mut(tag.index()) else { return };
        let last = mem::replace(last, self.present);
        if last != self.present
            && !Mutation::WayAnyAnswer.is_on()
            && let Some(path) = &mut self.parked[last.get()]
        {
            path.sent_by_other(tag);
        }
    }

    /// A request is over, or was sent again.
    pub(super) fn forget_copy(&mut self, tag: Tag) {
        if let Some(kept) = self.old.get_mut(tag.index()) {
            *kept = None;
        }
    }

    /// Whether a request may be sent: no old copy of it can do harm.
    #[inline]
    fn may_send(&self, tag: Tag) -> bool {
        self.limbo.is_empty()
            || !Mutation::WayStopsOthers.is_on()
                && self.old[tag.index()].is_none_or(|old| self.limbo.may_send(old))
    }

    /// The way of a request with so many bytes for the target to move.
    #[inline]
    fn choose(&mut self, bytes: u32, path: Option<&ActivePath>) -> Option<WayIndex> {
        let Self { choice, parked, present, .. } = self;
        choice.choose(bytes, |way| {
            let path = if way == *present { path } else { parked[way.get()].as_ref() };
            path.map(ActivePath::load).unwrap_or_default()
        })
    }
}

impl Engine {
    /// Lets the queue have several ways, by [`Self::join`]. `queue` is its number: the queues of a
    /// mount prefer different ways.
    /// Call it before the first path.
    pub fn allow_ways(&mut self, queue: u16, policy: ChoicePolicy) {
        debug_assert!(self.path.is_none(), "a path without a place");
        self.ways = Some(Box::new(WayPaths::new(Choice::new(queue, policy), self.depth)));
    }

    /// The ways that carry requests, or would if others were not preferred.
    #[must_use]
    pub fn live_ways(&self) -> WaySet {
        self.ways.as_ref().map_or(WaySet::NONE, |ways| ways.choice.live())
    }

    /// Takes one more path, beside those of other ways. Its place [may have one](Self::may_join).
    pub fn join(&mut self, path: Path, now: Instant) {
        let way = path.way;
        debug_assert!(self.may_join(way), "{way:?} is in use or in limbo");
        self.present(way);
        self.take_path(path, now);
    }

    /// Whether a place has no path, and its last one is destroyed here and dropped at the target.
    #[must_use]
    pub fn may_join(&self, way: WayIndex) -> bool {
        self.ways.as_ref().is_some_and(|ways| !ways.paths.has(way) && ways.limbo.is_over(way))
    }

    /// Ends the path of a way that control gave up. The other ways go on.
    pub fn end_way(&mut self, way: WayIndex) {
        if self.ways.as_ref().is_some_and(|ways| ways.paths.has(way)) {
            self.present(way);
            self.end_path(PathEnd::Dropped);
        }
    }

    /// The places with a dead path that is not destroyed. Call [`Self::way_destroyed`] when it is.
    #[must_use]
    pub fn undestroyed_ways(&self) -> WaySet {
        self.ways.as_ref().map_or(WaySet::NONE, |ways| ways.limbo.undestroyed())
    }

    /// The dead path of a place is destroyed.
    pub fn way_destroyed(&mut self, way: WayIndex) {
        self.end_limbo(|limbo| limbo.destroyed(way));
    }

    /// The target has ended the epoch of a place's dead path: nothing of it can follow.
    pub fn way_dropped(&mut self, way: WayIndex) {
        self.end_limbo(|limbo| limbo.dropped(way));
    }

    /// The way of the dead path that the waiting request of a tag was under way on, while the
    /// target or a device may still do that copy of it.
    #[must_use]
    pub fn old_way(&self, tag: Tag) -> Option<WayIndex> {
        let old = (*self.ways.as_ref()?.old.get(tag.index())?)?;
        Some(old.way)
    }

    /// Something that requests of dead paths wait for has come.
    #[cold]
    fn end_limbo(&mut self, end: impl FnOnce(&mut Limbo)) {
        let Some(ways) = &mut self.ways else { return };
        end(&mut ways.limbo);
        if ways.limbo.is_empty() {
            ways.old.fill(None);
        }
        self.waiting.backlog = true;
    }

    /// A path is taken whose LOGIN ended every epoch before it, and every dead path is destroyed.
    #[cold]
    pub(super) fn end_all_limbo(&mut self) {
        self.end_limbo(|limbo| *limbo = Limbo::default());
    }

    /// The ways with a path.
    pub(super) fn way_places(&self) -> WaySet {
        self.ways.as_ref().map_or(WaySet::NONE, |ways| ways.paths)
    }

    /// Makes the path of that place the present one.
    pub(super) fn present(&mut self, way: WayIndex) {
        if let Some(ways) = &mut self.ways {
            ways.present(way, &mut self.path);
        }
    }

    /// Sends the waiting request of a tag by the way of its choice, if that is possible now.
    /// Returns whether it was sent. A request that waits for a dead path is tried again when its
    /// [limbo](Self::way_dropped) ends.
    #[inline(never)]
    pub(super) fn send_by_choice(&mut self, tag: Tag, io: Io) -> bool {
        let Some(ways) = self.ways.as_deref_mut() else { return false };
        if !ways.may_send(tag) {
            return false;
        }
        let path = self.path.as_ref();
        let in_capsule = path.is_some_and(|path| path.terms().is_in_capsule(&io));
        let bytes = if in_capsule { 0 } else { io.data_bytes };
        let Some(way) = ways.choose(bytes, path) else { return false };
        ways.present(way, &mut self.path);
        if !self.send(tag, io) {
            return false;
        }
        self.stats.sent_by(way, &io);
        let Self { ways: Some(ways), path: Some(path), digests, .. } = self else { return true };
        ways.sent(tag);
        if !path.terms().with_digests() {
            // A way with digests may have had the request before.
            digests.cancelled(tag);
        }
        true
    }

    /// The path of that place.
    #[inline]
    pub(super) fn path_of(&mut self, way: WayIndex) -> Option<&mut ActivePath> {
        match &mut self.ways {
            Some(ways) => ways.path_of(way, &mut self.path),
            None => self.path.as_mut().filter(|path| path.way() == way),
        }
    }

    /// Arms the CQ of each path. Returns false when one is broken.
    pub(super) fn arm_ways(&mut self) -> bool {
        let mut are_fine = true;
        for way in self.way_places().iter() {
            let Some(path) = self.path_of(way) else { continue };
            if let Err(error) = path.poller_mut().arm() {
                self.present(way);
                self.cq_broke(&error);
                are_fine = false;
            }
        }
        are_fine
    }

    /// The [turn](Self::turn) of a queue with several ways.
    #[inline(never)]
    pub(super) fn turn_ways(&mut self, now: Instant, done: &mut impl FnMut(Tag, i32)) -> bool {
        let mut busy = false;
        for way in self.way_places().iter() {
            busy |= self.turn_way(way, now, done);
        }
        if self.waiting.backlog {
            busy |= self.work_backlog(done);
        }
        for way in self.way_places().iter() {
            if self.path_of(way).is_some_and(|path| path.has_wrs()) {
                self.present(way);
                self.post();
            }
        }
        busy
    }

    /// Reaps and answers on the path of a way, and checks that its target is not silent. A path
    /// without work is not presented.
    fn turn_way(&mut self, way: WayIndex, now: Instant, done: &mut impl FnMut(Tag, i32)) -> bool {
        let reaped = self.poll_way(way);
        let mut busy = reaped > 0;
        if busy {
            self.present(way);
            self.take_reaped(reaped, done);
        }
        if self.testing {
            self.present(way);
            self.check_self_test(now);
        }
        let (Some(pulse), Some(path)) = (self.pulse, self.path_of(way)) else { return busy };
        let due = path.keep_beat(pulse, now);
        if !matches!(due, BeatDue::Nothing { .. }) {
            self.present(way);
        }
        if self.on_beat(&due) {
            // Perhaps answers came and were not read for long.
            busy |= self.reap(done);
            self.keep_beat(now);
        }
        busy
    }

    /// Reaps completions of the path of a way. Returns their number.
    fn poll_way(&mut self, way: WayIndex) -> usize {
        let Self { ways: Some(ways), path, reaped, .. } = self else { return 0 };
        let Some(path) = ways.path_of(way, path) else { return 0 };
        match path.poller_mut().poll(reaped) {
            Ok(reaped) => reaped,
            Err(error) => {
                self.present(way);
                self.cq_broke(&error);
                0
            }
        }
    }
}
