//! Requests of the mounts: made by chance, given to the servers, and compared with the oracle when
//! they end.
//!
//! The oracle learns of every request before its server has it. The buffer of a read has foreign
//! bytes until then. The buffer of a write, and that of an idle tag, must not change.

use std::ops::Range;

use rblk_config::OnLoss;
use rblk_initiator::engine::io::{Io, IoOp};

use super::World;
use crate::oracle::Oracle;
use crate::sim::kernel::{Expect, Request};
use crate::sim::process::{EBADE, EIO};

/// Fills the buffers of reads before their answers.
const UNREAD: u8 = 0xee;

/// Requests of a fenced mount, which must fail.
const LATE_REQUESTS: u32 = 6;

impl World {
    /// Takes the outcomes and compares them with the oracle.
    pub(super) fn reap(&mut self) -> bool {
        let outcomes = self.site.rig.take_outcomes();
        let busy = !outcomes.is_empty();
        for outcome in outcomes {
            let failed = self.store_failed;
            let neighbour = self.neighbour.as_mut();
            if neighbour.is_some_and(|n| n.take(&outcome, failed, &self.site)) {
                continue;
            }
            let found = self.mounts.iter().enumerate().find_map(|(at, mount)| {
                let queues = mount.process.as_ref()?.queues();
                Some((at, queues.iter().position(|queue| *queue == outcome.queue)?))
            });
            let Some((at, queue)) = found else { panic!("no mount has {outcome:?}") };
            let mount = &mut self.mounts[at];
            let request = mount.kernel.end(queue, outcome.tag);
            let length = self.plan.io_max_bytes as usize;
            let bytes = self.site.rig.buffer(outcome.queue, outcome.tag, length);
            self.report.requests += 1;
            self.check(at, &request, outcome.result, &bytes);
            let _ = self.mounts[at].kernel.guard(queue, outcome.tag, Some(bytes));
        }
        busy
    }

    fn check(&mut self, at: usize, request: &Request, result: i32, bytes: &[u8]) {
        let lasts = self.plan.on_loss == OnLoss::UntilRemount;
        let mount = &mut self.mounts[at];
        let number = mount.number;
        let Request { op, range, fua, expect, given, .. } = request;
        let ok = result >= 0;
        if ok {
            let moves = matches!(op, IoOp::Read | IoOp::Write);
            let moved = if moves { range.len() } else { 0 };
            assert_eq!(usize::try_from(result), Ok(moved), "{request:?}");
            let hides = *op == IoOp::Flush && mount.lost;
            assert!(!hides, "{request:?} of {number:?} succeeded after a loss");
        } else {
            let allowed = match -result {
                EBADE => mount.threatened,
                EIO => {
                    self.store_failed
                        || self.plan.fail_after.is_some()
                        || *op == IoOp::Flush && mount.doubtful
                }
                _ => false,
            };
            self.report.lasting += u64::from(*op == IoOp::Flush && mount.lost);
            // Unless the target is gone for too long, a flush fails only by a loss, or causes one.
            let for_want = self.plan.fail_after.is_some();
            mount.lost |= lasts && *op == IoOp::Flush && -result == EIO && !for_want;
            self.report.errors += 1;
            self.log.add("failed", [number.0.into(), u64::from(result.unsigned_abs()), *op as u64]);
            assert!(allowed, "{request:?} of {number:?} failed: errno {}", -result);
        }
        let held = match *expect {
            Expect::Read(begin) if ok => {
                self.oracle.end_read(begin, range.start, &bytes[..range.len()])
            }
            Expect::Read(begin) => {
                self.oracle.drop_read(begin);
                Ok(())
            }
            Expect::Change(id) => {
                if *op == IoOp::Write {
                    let mut data = vec![0; range.len()];
                    Oracle::fill(id, range.start, &mut data);
                    assert!(data == bytes[..range.len()], "the data of {request:?} was changed");
                }
                self.oracle.end_change(id, ok, *fua)
            }
            Expect::Flush(begin) => self.oracle.end_flush_given(begin, given.unwrap_or(begin), ok),
        };
        if let Err(wrong) = held {
            panic!("{request:?} of {number:?}: {wrong}");
        }
    }

    pub(super) fn begin_requests(&mut self) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        let most = self.plan.mix.begins;
        let limit = 4 * self.plan.requests;
        let mut busy = false;
        for at in 0..self.mounts.len() {
            for _ in 0..self.random.within(0, most) {
                let mount = &mut self.mounts[at];
                let full = mount.kernel.requests().len() >= self.plan.outstanding;
                if !mount.served || full || self.begun >= limit {
                    continue;
                }
                if mount.fenced {
                    if mount.late == LATE_REQUESTS {
                        continue;
                    }
                    mount.late += 1;
                }
                self.begin_any(at);
                busy = true;
            }
        }
        if self.random.chance(20) {
            self.pause = self.random.within(0, self.plan.mix.pause);
        }
        busy
    }

    fn begin_any(&mut self, at: usize) {
        let kind = u32::try_from(self.random.below(1000)).unwrap_or(0);
        let (flush, erase) = (self.plan.mix.flush, self.plan.mix.erase);
        let op = if kind < flush {
            IoOp::Flush
        } else if kind < flush + erase {
            IoOp::Discard
        } else if kind < flush + 2 * erase {
            IoOp::WriteZeroes
        } else if self.random.chance(400) {
            IoOp::Read
        } else {
            IoOp::Write
        };
        let range = if op == IoOp::Flush { 0..0 } else { self.random_range() };
        let fua = op == IoOp::Write && self.random.chance(self.plan.mix.fua);
        self.begin(at, op, range, fua);
    }

    fn random_range(&mut self) -> Range<usize> {
        let block = self.oracle.block_bytes();
        let longest = self.plan.io_max_bytes as usize / block;
        let longest = [1, 2, longest][self.random.index(3)].min(longest);
        let blocks = 1 + self.random.index(longest);
        let all = self.oracle.len() / block;
        // Half of the requests fall into a few blocks.
        let room = if self.random.chance(500) { blocks + 3 } else { all };
        let blocks = blocks.min(all);
        let first = self.random.index(room.min(all) - blocks + 1);
        first * block..(first + blocks) * block
    }

    pub(super) fn begin(&mut self, at: usize, op: IoOp, range: Range<usize>, fua: bool) -> Expect {
        let mount = &mut self.mounts[at];
        let host = mount.number;
        let expect = match op {
            IoOp::Read => Expect::Read(self.oracle.begin_read_by(host)),
            IoOp::Write => Expect::Change(self.oracle.begin_change_by(host, &range, false)),
            IoOp::Discard | IoOp::WriteZeroes => {
                Expect::Change(self.oracle.begin_change_by(host, &range, true))
            }
            IoOp::Flush => Expect::Flush(self.oracle.begin_flush_by(host)),
        };
        self.begun += 1;
        mount.kernel.begin(Request { op, range, fua, expect, given: None, place: None });
        expect
    }

    /// Gives the driver's requests to the servers.
    pub(super) fn dispatch(&mut self) -> bool {
        let mut busy = false;
        for mount in &mut self.mounts {
            let Some(process) = mount.process.as_ref().filter(|p| !p.is_frozen()) else { continue };
            if !mount.served {
                continue;
            }
            while let Some(request) = mount.kernel.next(&mut self.random) {
                let Some((queue, tag)) = request.place else { continue };
                if let Expect::Flush(_) = request.expect {
                    request.given.get_or_insert_with(|| self.oracle.begin_flush_by(mount.number));
                }
                let request = request.clone();
                let id = process.queues()[queue];
                if let Some(guarded) = mount.kernel.guard(queue, tag, None) {
                    let is = self.site.rig.buffer(id, tag, guarded.len());
                    assert!(is == guarded, "an idle buffer of {:?} was written to", mount.number);
                }
                let len = request.range.len();
                match request.expect {
                    Expect::Read(_) => self.site.rig.fill_buffer(id, tag, &vec![UNREAD; len]),
                    Expect::Change(change) if request.op == IoOp::Write => {
                        let mut data = vec![0; len];
                        Oracle::fill(change, request.range.start, &mut data);
                        self.site.rig.fill_buffer(id, tag, &data);
                    }
                    _ => {}
                }
                let offset = request.range.start as u64;
                let io = self.site.rig.request(id, request.op, offset, len as u64);
                let io = Io { fua: request.fua, ..io };
                self.site.rig.submit(id, tag, io).expect("an idle tag");
                busy = true;
            }
        }
        busy
    }

    pub(super) fn check_guards(&mut self) {
        for mount in &self.mounts {
            let Some(process) = &mount.process else { continue };
            for (queue, tag, bytes) in mount.kernel.guards() {
                let is = self.site.rig.buffer(process.queues()[queue], tag, bytes.len());
                assert!(is == bytes, "an idle buffer of {:?} was written to", mount.number);
            }
        }
    }
}
