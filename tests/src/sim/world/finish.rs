//! The end of a run: every fault heals, every request ends, and the remaining state is checked.
//!
//! In the end one mount has the volume and reads values that the oracle allows. A flush leaves
//! nothing volatile in a store that never failed. Without mounts, no connection, no slot and no op
//! of the store is left.

use std::ops::Range;

use rblk_initiator::engine::io::IoOp;
use rblk_initiator::volume::course;
use rblk_target::store::Store;

use super::mount::Mount;
use super::{PATIENCE, Report, World};
use crate::sim::process::Process;
use crate::storm::VOLUME;

impl World {
    /// Heals everything, waits for outstanding requests, and checks the remaining state.
    ///
    /// # Panics
    /// The state is wrong, or a request does not end.
    #[must_use]
    pub fn finish(mut self) -> Report {
        self.calm = true;
        self.log.add("calm", [0; 3]);
        // A host that still wants the volume may have to wait for a lease.
        self.settle();
        let Some(at) = self.holder() else { panic!("no host has the volume") };
        self.read_all(at);
        for _ in 0..4 {
            let errors = self.report.errors;
            self.io(at, IoOp::Flush, 0..0);
            if self.report.errors == errors || self.store_failed {
                break;
            }
        }
        let at = self.mount_again(at);
        if !self.store_failed {
            let store = self.site.rig.store_mut();
            let (now, durable) = (store.bytes(VOLUME), store.durable(VOLUME));
            assert!(now == durable, "a FLUSH left something volatile in the store");
            let begin = self.oracle.begin_read_by(self.mounts[at].number);
            if let Err(wrong) = self.oracle.end_read(begin, 0, &now) {
                panic!("the store after a FLUSH: {wrong}");
            }
        }
        self.check_guards();
        let report = self.report();
        self.end_mounts();
        let breaches = self.site.breaches();
        assert!(breaches.is_empty(), "{breaches:?}");
        report
    }

    /// After a loss that every flush reports: ends the mount, and checks that flushes of the next
    /// one work. Returns the index of the mount that has the volume.
    fn mount_again(&mut self, at: usize) -> usize {
        // After a failed flush the target fails every later flush.
        if !self.mounts[at].lost || self.store_failed {
            return at;
        }
        self.unmount(at, false);
        self.settle();
        let Some(at) = self.holder() else { panic!("no host has the volume") };
        let errors = self.report.errors;
        self.io(at, IoOp::Flush, 0..0);
        assert_eq!(self.report.errors, errors, "a flush failed after the disk was mounted again");
        self.report.remounts += 1;
        at
    }

    fn is_settled(&self) -> bool {
        let settled = |mount: &Mount| {
            let state = mount.process.as_ref().and_then(|p| p.course()).map(|c| c.state());
            let right = match state {
                Some(course::CourseState::Connected) => !mount.fenced,
                // The new holder may have gone before it had the volume.
                Some(course::CourseState::Fenced) => mount.threatened,
                _ => false,
            };
            let is_whole = mount.process.as_ref().is_none_or(Process::is_whole);
            right && (is_whole || mount.fenced) && mount.kernel.requests().is_empty()
        };
        let nobody_comes = self.wishes.iter().all(Option::is_none);
        self.mounts.iter().all(settled) && self.holder().is_some() && nobody_comes
    }

    fn settle(&mut self) {
        let until = self.step_number() + PATIENCE;
        while !self.is_settled() {
            self.step();
            let stuck = self.step_number() >= until;
            assert!(!stuck, "it does not end: {:#?}", self.describe());
        }
    }

    pub(super) fn describe(&self) -> Vec<String> {
        let describe = |mount: &Mount| {
            let course = mount.process.as_ref().and_then(|p| p.course());
            format!(
                "{:?} served {} fenced {} requests {:?} course {course:?}",
                mount.number,
                mount.served,
                mount.fenced,
                mount.kernel.requests()
            )
        };
        self.mounts.iter().map(describe).collect()
    }

    fn io(&mut self, at: usize, op: IoOp, range: Range<usize>) {
        self.begin(at, op, range, false);
        self.settle();
    }

    fn read_all(&mut self, at: usize) {
        let longest = self.plan.io_max_bytes as usize;
        for start in (0..self.oracle.len()).step_by(longest) {
            self.begin(at, IoOp::Read, start..(start + longest).min(self.oracle.len()), false);
        }
        self.settle();
    }

    fn end_mounts(&mut self) {
        self.ending = true;
        while !self.mounts.is_empty() {
            self.unmount(0, false);
        }
        self.wishes.fill(None);
        if let Some(mut neighbour) = self.neighbour.take() {
            neighbour.leave(&mut self.site);
        }
        let until = self.step_number() + PATIENCE;
        while self.site.sessions() > 0 {
            self.step();
            assert!(self.step_number() < until, "connections are left without a peer");
        }
        // A poll group returns memory of another one by messages.
        let held = |world: &mut Self| -> Vec<String> {
            let groups = world.site.rig.groups_mut();
            groups
                .flat_map(|g| {
                    g.shard().slots().held().map(|h| format!("{h:?}")).collect::<Vec<_>>()
                })
                .collect()
        };
        while !held(self).is_empty() {
            self.step();
            assert!(self.step_number() < until, "slots are held: {:?}", held(self));
        }
        assert_eq!(self.site.rig.store_mut().in_flight(), 0, "the store has something to do");
    }
}
