//! [`Limbo`]: when a request that was under way on a dead way may be sent again.
//!
//! Two things end the power of an old copy:
//!
//! - the path is *destroyed* here: the device has finished with the buffers of its QPs;
//! - the epoch of the path is *dropped* there: the target has answered a DROP of it, or a LOGIN
//!   that ended it. No command of it is in a limit, a shard or the store, and no RDMA of it can
//!   follow.
//!
//! A request that was not under way on the path waits for nothing. So invariants 24 and 26 of
//! docs/internals/ways.md are the two functions [`Limbo::may_send`] and [`Limbo::may_give_back`].
//!
//! A place takes its next path only when its limbo is over ([`Limbo::is_over`]). So a request
//! remembers one place at most, and a place has one limbo, however often its way comes and goes.

use rblk_protocol::Mutation;

use super::WayIndex;
use super::way_set::WaySet;
use crate::engine::io::IoOp;

/// What was under way when a path died: the last copy of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OldCopy {
    /// The place of the path.
    pub way: WayIndex,
    /// The operation that was sent. A FLUSH ahead of a write is a FLUSH.
    pub op: IoOp,
}

/// The places whose path died, with what is still to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limbo {
    undestroyed: WaySet,
    undropped: WaySet,
}

impl Limbo {
    /// The path of a place died. `is_touched`: its device may touch the buffers until its QPs are
    /// destroyed.
    pub fn died(&mut self, way: WayIndex, is_touched: bool) {
        debug_assert!(self.is_over(way), "{way:?} had a path in limbo");
        if is_touched {
            self.undestroyed.insert(way);
        }
        self.undropped.insert(way);
    }

    /// The path of a place is destroyed.
    pub fn destroyed(&mut self, way: WayIndex) {
        self.undestroyed.remove(way);
    }

    /// The epoch of a place's path is dropped.
    pub fn dropped(&mut self, way: WayIndex) {
        self.undropped.remove(way);
    }

    /// A LOGIN that ended every epoch before it is answered.
    pub fn all_dropped(&mut self) {
        self.undropped = WaySet::NONE;
    }

    /// The places with a path that is not destroyed.
    #[must_use]
    pub fn undestroyed(&self) -> WaySet {
        self.undestroyed
    }

    /// Whether a place may take its next path.
    #[must_use]
    #[inline]
    pub fn is_over(&self, way: WayIndex) -> bool {
        !self.undestroyed.has(way) && !self.undropped.has(way)
    }

    /// Whether no place is in limbo.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.undestroyed.is_empty() && self.undropped.is_empty()
    }

    /// Whether a request may be sent again by another way.
    #[must_use]
    #[inline]
    pub fn may_send(&self, old: OldCopy) -> bool {
        let changes = matches!(old.op, IoOp::Write | IoOp::Discard | IoOp::WriteZeroes);
        let waits_for_drop = changes && self.undropped.has(old.way);
        self.may_give_back(old) && (!waits_for_drop || Mutation::WaySkipsDrop.is_on())
    }

    /// Whether the buffer of a request belongs to this end alone, so that the request may fail.
    #[must_use]
    #[inline]
    pub fn may_give_back(&self, old: OldCopy) -> bool {
        let has_buffer = matches!(old.op, IoOp::Read | IoOp::Write);
        let is_touched = has_buffer && self.undestroyed.has(old.way);
        !is_touched || Mutation::WayReadEarly.is_on()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const OPS: [IoOp; 5] = [IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes];

    fn way(place: usize) -> WayIndex {
        WayIndex::new(place).unwrap()
    }

    /// The table of docs/internals/ways.md, line by line.
    #[test]
    fn the_table() {
        let sendable = |destroyed: bool, dropped: bool| {
            let mut limbo = Limbo::default();
            limbo.died(way(3), true);
            if destroyed {
                limbo.destroyed(way(3));
            }
            if dropped {
                limbo.dropped(way(3));
            }
            assert_eq!(limbo.is_over(way(3)), destroyed && dropped);
            assert!(
                limbo.is_over(way(2)) && limbo.may_send(OldCopy { way: way(2), op: IoOp::Write })
            );
            OPS.map(|op| limbo.may_send(OldCopy { way: way(3), op }))
        };
        //                                   read   write  flush discard zeroes
        assert_eq!(sendable(false, false), [false, false, true, false, false]);
        assert_eq!(sendable(true, false), [true, false, true, false, false]);
        assert_eq!(sendable(false, true), [false, false, true, true, true]);
        assert_eq!(sendable(true, true), [true; 5]);
    }

    #[test]
    fn a_device_that_touches_nothing_more_delays_no_read() {
        let mut limbo = Limbo::default();
        limbo.died(way(0), false);
        assert!(limbo.may_send(OldCopy { way: way(0), op: IoOp::Read }));
        assert!(limbo.may_give_back(OldCopy { way: way(0), op: IoOp::Write }));
        assert!(!limbo.may_send(OldCopy { way: way(0), op: IoOp::Write }) && !limbo.is_empty());
        limbo.all_dropped();
        assert!(limbo.is_empty());
    }

    /// A step of some way.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Dies(usize, bool),
        Destroyed(usize),
        Dropped(usize),
        AllDropped,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0usize..8, any::<bool>()).prop_map(|(way, touched)| Step::Dies(way, touched)),
            4 => (0usize..8).prop_map(Step::Destroyed),
            4 => (0usize..8).prop_map(Step::Dropped),
            1 => Just(Step::AllDropped),
        ];
        proptest::collection::vec(step, 0..64)
    }

    proptest! {
        /// The model: of each dead path two facts, and of each old copy the question in words.
        #[test]
        fn a_request_waits_for_what_its_old_copy_may_still_do(steps in steps()) {
            let mut limbo = Limbo::default();
            // By way: whether the device, and whether the target, may still act.
            let mut dead: BTreeMap<usize, (bool, bool)> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Dies(at, touched) if limbo.is_over(way(at)) => {
                        limbo.died(way(at), touched);
                        dead.insert(at, (touched, true));
                    }
                    Step::Dies(..) => {}
                    Step::Destroyed(at) => {
                        limbo.destroyed(way(at));
                        dead.entry(at).and_modify(|facts| facts.0 = false);
                    }
                    Step::Dropped(at) => {
                        limbo.dropped(way(at));
                        dead.entry(at).and_modify(|facts| facts.1 = false);
                    }
                    Step::AllDropped => {
                        limbo.all_dropped();
                        dead.values_mut().for_each(|facts| facts.1 = false);
                    }
                }
                dead.retain(|_, facts| facts.0 || facts.1);
                prop_assert_eq!(limbo.is_empty(), dead.is_empty());
                for at in 0..8 {
                    let (device, target) = dead.get(&at).copied().unwrap_or_default();
                    prop_assert_eq!(limbo.is_over(way(at)), !device && !target);
                    for op in OPS {
                        let old = OldCopy { way: way(at), op };
                        let has_buffer = op == IoOp::Read || op == IoOp::Write;
                        let reads_only = op == IoOp::Read || op == IoOp::Flush;
                        let harms_memory = has_buffer && device;
                        let harms_volume = !reads_only && target;
                        prop_assert_eq!(limbo.may_send(old), !harms_memory && !harms_volume);
                        prop_assert_eq!(limbo.may_give_back(old), !harms_memory);
                    }
                }
            }
        }
    }
}
