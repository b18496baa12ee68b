//! [`RamStore`]: volumes in memory behind the target's [`Store`] seam, slow and failing on demand.
//!
//! The store has no clock: time is the number of [`Store::reap`] calls, which a poll group makes
//! once per turn. Ops take effect at their end, in an order that the seed decides.

use std::sync::Arc;

use nix::errno::Errno;
use rblk_fabric::Region;
use rblk_target::store::{MAX_SEGMENTS, Op, OpDone, OpKind, Segment, Store};
use rblk_target::volume::ids::VolumeIndex;

use crate::seed::Random;

/// How a [`RamStore`] behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreConditions {
    /// Reaps from submission to completion, at least.
    pub delay_min: u64,
    /// Reaps from submission to completion, at most.
    pub delay_max: u64,
    /// How many of a thousand ops fail.
    pub errors_per_mille: u32,
    /// The error of these ops.
    pub errno: Errno,
    /// Most ops in flight; more are refused.
    pub capacity: usize,
    /// No op completes while this is set.
    pub stalled: bool,
    /// Reads end this many bytes early, against the contract of [`Store`].
    pub short_by: u32,
}

impl Default for StoreConditions {
    fn default() -> Self {
        Self {
            delay_min: 0,
            delay_max: 0,
            errors_per_mille: 0,
            errno: Errno::EIO,
            capacity: 4096,
            stalled: false,
            short_by: 0,
        }
    }
}

/// Which kind of op, for planned errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// [`OpKind::Read`].
    Read,
    /// [`OpKind::Write`].
    Write,
    /// [`OpKind::Flush`].
    Flush,
    /// [`OpKind::Discard`].
    Discard,
    /// [`OpKind::WriteZeroes`].
    WriteZeroes,
}

impl Kind {
    fn of(kind: &OpKind) -> Self {
        match kind {
            OpKind::Read { .. } => Self::Read,
            OpKind::Write { .. } => Self::Write,
            OpKind::Flush => Self::Flush,
            OpKind::Discard { .. } => Self::Discard,
            OpKind::WriteZeroes { .. } => Self::WriteZeroes,
        }
    }
}

#[derive(Debug)]
struct Pending {
    op: Op,
    memory: Vec<Segment>,
    due: u64,
    fails: Option<Errno>,
}

/// A store in memory.
#[derive(Debug)]
pub struct RamStore {
    region: Arc<Region>,
    volumes: Vec<Option<Vec<u8>>>,
    random: Random,
    conditions: StoreConditions,
    pending: Vec<Pending>,
    // Volumes whose ops do not end before they are let go, and those that were let go.
    lost: Vec<VolumeIndex>,
    let_go: Vec<VolumeIndex>,
    // Segment lists of completed ops, for reuse.
    spare: Vec<Vec<Segment>>,
    planned: Vec<(Kind, u64, Errno)>,
    now: u64,
    log: Vec<Op>,
    keeps_log: bool,
    counts: StoreCounts,
}

/// Reads and writes that a [`RamStore`] accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreCounts {
    /// Operations.
    pub ops: u64,
    /// Runs of memory in these operations.
    pub pieces: u64,
}

impl RamStore {
    /// A store with its extents in `region`.
    #[must_use]
    pub fn new(region: &Arc<Region>, seed: u64) -> Self {
        Self {
            region: Arc::clone(region),
            volumes: Vec::new(),
            random: Random::new(seed),
            conditions: StoreConditions::default(),
            pending: Vec::new(),
            lost: Vec::new(),
            let_go: Vec::new(),
            spare: Vec::new(),
            planned: Vec::new(),
            now: 0,
            log: Vec::new(),
            keeps_log: false,
            counts: StoreCounts::default(),
        }
    }

    /// The reads and writes so far.
    #[must_use]
    pub fn counts(&self) -> StoreCounts {
        self.counts
    }

    /// Gives a volume its bytes.
    pub fn set_volume(&mut self, index: VolumeIndex, bytes: Vec<u8>) {
        let at = usize::from(index.0);
        if self.volumes.len() <= at {
            self.volumes.resize(at + 1, None);
        }
        self.volumes[at] = Some(bytes);
    }

    /// The bytes of a volume; none when there is no such volume.
    #[must_use]
    pub fn bytes(&self, index: VolumeIndex) -> &[u8] {
        self.volumes.get(usize::from(index.0)).and_then(Option::as_deref).unwrap_or(&[])
    }

    /// Sets the conditions.
    pub fn set_conditions(&mut self, conditions: StoreConditions) {
        self.conditions = conditions;
    }

    /// The conditions.
    #[must_use]
    pub fn conditions(&self) -> StoreConditions {
        self.conditions
    }

    /// The store of a volume is lost: see [`Store::let_go`].
    pub fn lose(&mut self, volume: VolumeIndex) {
        self.lost.push(volume);
    }

    /// Makes the next op of that kind at `offset` fail with that errno, once.
    pub fn fail_next(&mut self, kind: Kind, offset: u64, errno: Errno) {
        self.planned.push((kind, offset, errno));
    }

    /// Starts to keep every op for [`Self::take_log`].
    pub fn keep_log(&mut self) {
        self.keeps_log = true;
    }

    /// The ops accepted since the last call.
    pub fn take_log(&mut self) -> Vec<Op> {
        std::mem::take(&mut self.log)
    }

    fn planned_error(&mut self, kind: &OpKind) -> Option<Errno> {
        let at = self
            .planned
            .iter()
            .position(|(k, offset, _)| *k == Kind::of(kind) && *offset == kind.range().0)?;
        Some(self.planned.remove(at).2)
    }

    // Every error in the segments is `EINVAL`, as the seam says.
    fn fits(&self, kind: &OpKind, memory: &[Segment]) -> bool {
        let len = match *kind {
            OpKind::Read { len, .. } | OpKind::Write { len, .. } => u64::from(len),
            OpKind::Flush | OpKind::Discard { .. } | OpKind::WriteZeroes { .. } => 0,
        };
        let inside = |segment: &Segment| {
            let end = segment.offset.checked_add(segment.len as usize);
            end.is_some_and(|end| end <= self.region.len())
        };
        memory.len() <= MAX_SEGMENTS
            && memory.iter().all(inside)
            && memory.iter().map(|segment| u64::from(segment.len)).sum::<u64>() == len
    }

    fn carry_out(&mut self, op: &Op, memory: &[Segment]) -> Result<u32, Errno> {
        if !self.fits(&op.kind, memory) {
            return Err(Errno::EINVAL);
        }
        let volume = self
            .volumes
            .get_mut(usize::from(op.volume.0))
            .and_then(Option::as_mut)
            .ok_or(Errno::ENXIO)?;
        let (offset, len) = op.kind.range();
        let end = offset.checked_add(len).filter(|end| *end <= volume.len() as u64);
        let (Ok(begin), Some(Ok(end))) = (usize::try_from(offset), end.map(usize::try_from)) else {
            return Err(Errno::EINVAL);
        };
        let mut range = &mut volume[begin..end];
        match op.kind {
            OpKind::Read { len, .. } => {
                for segment in memory {
                    let (part, rest) = range.split_at_mut(segment.len as usize);
                    self.region.write(segment.offset, part);
                    range = rest;
                }
                Ok(len.saturating_sub(self.conditions.short_by))
            }
            OpKind::Write { len, .. } => {
                for segment in memory {
                    let (part, rest) = range.split_at_mut(segment.len as usize);
                    self.region.read(segment.offset, part);
                    range = rest;
                }
                Ok(len)
            }
            OpKind::Flush => Ok(0),
            OpKind::Discard { .. } | OpKind::WriteZeroes { .. } => {
                range.fill(0);
                Ok(0)
            }
        }
    }
}

impl Store for RamStore {
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op> {
        if self.pending.len() >= self.conditions.capacity {
            return Err(op);
        }
        if self.keeps_log {
            self.log.push(op);
        }
        self.counts.ops += u64::from(!memory.is_empty());
        self.counts.pieces += memory.len() as u64;
        let delay = self.random.within(self.conditions.delay_min, self.conditions.delay_max);
        let unlucky = self.random.chance(self.conditions.errors_per_mille);
        let fails = self.planned_error(&op.kind).or(unlucky.then_some(self.conditions.errno));
        let mut list = self.spare.pop().unwrap_or_default();
        list.extend_from_slice(memory);
        self.pending.push(Pending { op, memory: list, due: self.now + delay, fails });
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<OpDone>) {
        self.now += 1;
        if self.conditions.stalled {
            return;
        }
        let mut at = 0;
        while let Some(pending) = self.pending.get(at) {
            let is_let_go = self.let_go.contains(&pending.op.volume);
            let is_held = self.lost.contains(&pending.op.volume) && !is_let_go;
            if pending.due >= self.now || is_held {
                at += 1;
                continue;
            }
            let mut pending = self.pending.remove(at);
            let result = match pending.fails {
                _ if is_let_go => Err(Errno::ESHUTDOWN),
                Some(errno) => {
                    // After an error the contents of the range are unknown: half of the time, the
                    // new ones.
                    if pending.op.kind.changes() && self.random.chance(500) {
                        let _ = self.carry_out(&pending.op, &pending.memory);
                    }
                    Err(errno)
                }
                None => self.carry_out(&pending.op, &pending.memory),
            };
            out.push(OpDone { token: pending.op.token, result });
            pending.memory.clear();
            self.spare.push(pending.memory);
        }
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn let_go(&mut self, volume: VolumeIndex) {
        self.let_go.push(volume);
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::PageKind;
    use rblk_target::store::OpToken;

    use super::*;

    #[test]
    fn segments_in_order_and_lists_that_do_not_fit() {
        let region = Region::allocate(64 << 10, PageKind::Normal).unwrap();
        let mut store = RamStore::new(&region, 1);
        store.set_volume(VolumeIndex(0), vec![0; 4096]);
        let mut run = |kind, memory: &[(usize, u32)]| {
            let memory: Vec<_> =
                memory.iter().map(|&(offset, len)| Segment { offset, len }).collect();
            let op = Op { token: OpToken(7), volume: VolumeIndex(0), kind };
            store.submit(op, &memory).unwrap();
            let mut done = Vec::new();
            store.reap(&mut done);
            assert_eq!(done.len(), 1);
            done[0].result
        };
        let data: Vec<_> = (0..=255).cycle().take(1024).collect();
        region.write(8192, &data[..300]);
        region.write(100, &data[300..]);
        let write = OpKind::Write { offset: 1024, len: 1024, fua: false };
        assert_eq!(run(write, &[(8192, 300), (100, 724)]), Ok(1024));
        let read = OpKind::Read { offset: 1024, len: 1024 };
        assert_eq!(run(read, &[(20000, 1000), (16384, 24)]), Ok(1024));
        let mut got = vec![0; 1024];
        region.read(20000, &mut got[..1000]);
        region.read(16384, &mut got[1000..]);
        assert_eq!(got, data);
        for memory in [&[][..], &[(0, 1023)], &[(0, 1024), (0, 1)], &[(0, 1023), (65536, 1)]] {
            assert_eq!(run(read, memory), Err(Errno::EINVAL), "{memory:?}");
            assert_eq!(run(write, memory), Err(Errno::EINVAL), "{memory:?}");
        }
        assert_eq!(run(OpKind::Flush, &[(0, 1)]), Err(Errno::EINVAL));
        let single: Vec<_> = (0..=MAX_SEGMENTS).map(|i| (i * 2, 1)).collect();
        assert_eq!(run(read, &single[..MAX_SEGMENTS]), Ok(1024));
        assert_eq!(run(OpKind::Read { offset: 0, len: 1025 }, &single), Err(Errno::EINVAL));
    }
}
