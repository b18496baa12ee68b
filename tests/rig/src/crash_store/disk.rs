//! [`Disk`]: the shared state of the stores of one disk: its volumes, the ops in flight, its
//! conditions.
//!
//! An op takes effect once; a failed op may take effect or not. Effects and ends have places in
//! orders of their own, which decide the ops that a flush covers. The disk notes every breach of
//! the contract of [`Store`](rblk_target::store::Store).

use nix::errno::Errno;
use rblk_fabric::Region;
use rblk_target::store::{MAX_SEGMENTS, Op, OpDone, OpKind, Segment};
use rblk_target::volume::ids::VolumeIndex;

use crate::ram_store::StoreConditions;
use crate::seed::Random;

use super::volume::{Change, VolumeBytes, put};
use super::{Fault, SECTOR};

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) op: Op,
    // The number of its store.
    pub(super) store: usize,
    pub(super) memory: Vec<Segment>,
    // The data of a write, or the bytes that a read found.
    pub(super) data: Vec<u8>,
    pub(super) effect_at: u64,
    pub(super) due: u64,
    // Place in the order of effects, once it took effect.
    pub(super) effect: Option<u64>,
    // Held: the op makes no progress.
    pub(super) held: bool,
    pub(super) result: Result<u32, Errno>,
    // A flush covers the ops with an earlier end than this.
    pub(super) covers: u64,
}

/// The shared state of the stores of one disk.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) volumes: Vec<Option<VolumeBytes>>,
    pub(super) random: Random,
    pub(super) conditions: StoreConditions,
    pub(super) faults: Vec<Fault>,
    pub(super) pending: Vec<Pending>,
    pub(super) breaches: Vec<String>,
    pub(super) exclusive: bool,
    pub(super) stores: usize,
    pub(super) effects: u64,
    pub(super) ends: u64,
    pub(super) ops: u64,
}

impl Disk {
    pub(super) fn volume(&self, index: VolumeIndex) -> Option<&VolumeBytes> {
        self.volumes.get(usize::from(index.0)).and_then(Option::as_ref)
    }

    /// Changes in flight that took no effect yet.
    pub(super) fn not_yet(&self, index: VolumeIndex) -> impl Iterator<Item = Change> + '_ {
        let waits = |p: &&Pending| p.effect.is_none() && p.result.is_ok();
        self.pending
            .iter()
            .filter(move |p| p.op.volume == index && p.op.kind.changes())
            .filter(waits)
            .map(|p| change(p, u64::MAX))
    }

    pub(super) fn verdict(
        &mut self,
        op: &Op,
        memory: &[Segment],
        region: &Region,
    ) -> Result<u32, Errno> {
        let (offset, len) = op.kind.range();
        let moved = match op.kind {
            OpKind::Read { len, .. } | OpKind::Write { len, .. } => len,
            OpKind::Flush | OpKind::Discard { .. } | OpKind::WriteZeroes { .. } => 0,
        };
        let Some(volume) = self.volume(op.volume) else { return Err(Errno::ENXIO) };
        let capacity = volume.now.len() as u64;
        let inside = |segment: &Segment| {
            let end = segment.offset.checked_add(segment.len as usize);
            end.is_some_and(|end| end <= region.len())
        };
        let fits = memory.len() <= MAX_SEGMENTS
            && memory.iter().all(inside)
            && memory.iter().map(|s| u64::from(s.len)).sum::<u64>() == u64::from(moved);
        let in_volume = offset.checked_add(len).is_some_and(|end| end <= capacity);
        let aligned = [offset, len].iter().all(|at| at % SECTOR as u64 == 0);
        if !fits || !in_volume || !aligned {
            self.breaches.push(format!("{op:?} does not fit, or its segments do not"));
            return Err(Errno::EINVAL);
        }
        if let Some(fault) = self.faults.iter().find(|fault| fault.hits(op)) {
            return Err(fault.errno);
        }
        if self.random.chance(self.conditions.errors_per_mille) {
            return Err(self.conditions.errno);
        }
        Ok(match op.kind {
            OpKind::Read { .. } => moved.saturating_sub(self.conditions.short_by),
            _ => moved,
        })
    }

    pub(super) fn take_effect(&mut self, at: usize) {
        let pending = &mut self.pending[at];
        self.effects += 1;
        pending.effect = Some(self.effects);
        let index = usize::from(pending.op.volume.0);
        let Some(volume) = self.volumes.get_mut(index).and_then(Option::as_mut) else { return };
        if pending.op.kind.changes() {
            let change = change(pending, self.effects);
            put(&mut volume.now, &change, change.offset..change.offset + change.len);
            volume.volatile.push(change);
        } else if let OpKind::Read { offset, len } = pending.op.kind {
            let begin = place(offset);
            pending.data.clear();
            pending.data.extend_from_slice(&volume.now[begin..begin + len as usize]);
        }
    }

    pub(super) fn end(&mut self, at: usize, region: &Region) -> OpDone {
        let pending = &self.pending[at];
        // After an error the contents of the range are unknown: half of the time, the new ones.
        let effect = match pending.result {
            Ok(_) => true,
            Err(Errno::EINVAL | Errno::ENXIO) => false,
            Err(_) => pending.op.kind.changes() && self.random.chance(500),
        };
        if effect && self.pending[at].effect.is_none() {
            self.take_effect(at);
        }
        let pending = self.pending.remove(at);
        self.ends += 1;
        match pending.op.kind {
            OpKind::Read { .. } if pending.result.is_ok() => {
                scatter(region, &pending.memory, &pending.data);
            }
            OpKind::Write { .. }
                if pending.result != Err(Errno::EINVAL)
                    && pending.data != gather(region, &pending.memory) =>
            {
                let op = pending.op;
                self.breaches.push(format!("the memory of {op:?} was changed while it was lent"));
            }
            _ => {}
        }
        let index = usize::from(pending.op.volume.0);
        if let Some(volume) = self.volumes.get_mut(index).and_then(Option::as_mut) {
            let mine = |change: &Change| Some(change.effect) == pending.effect;
            if let Some(change) = volume.volatile.iter_mut().find(|change| mine(change)) {
                change.done = Some(self.ends);
            }
            match pending.op.kind {
                OpKind::Write { fua: true, .. } if pending.result.is_ok() => {
                    volume.make_durable(mine);
                }
                OpKind::Flush if pending.result.is_ok() => {
                    volume.make_durable(|change| change.done.is_some_and(|d| d <= pending.covers));
                }
                _ => {}
            }
        }
        OpDone { token: pending.op.token, result: pending.result }
    }
}

pub(super) fn overlap(first: &Op, second: &Op) -> bool {
    let (a, a_len) = first.kind.range();
    let (b, b_len) = second.kind.range();
    first.volume == second.volume && a < b.saturating_add(b_len) && b < a.saturating_add(a_len)
}

// Ranges were checked against a volume in memory.
fn place(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

fn change(pending: &Pending, effect: u64) -> Change {
    let (offset, len) = pending.op.kind.range();
    let data = matches!(pending.op.kind, OpKind::Write { .. }).then(|| pending.data.clone());
    Change { effect, done: None, offset: place(offset), len: place(len), data }
}

pub(super) fn gather(region: &Region, memory: &[Segment]) -> Vec<u8> {
    let mut data = vec![0; memory.iter().map(|s| s.len as usize).sum()];
    let mut rest = &mut data[..];
    for segment in memory {
        let (part, after) = rest.split_at_mut(segment.len as usize);
        region.read(segment.offset, part);
        rest = after;
    }
    data
}

pub(super) fn scatter(region: &Region, memory: &[Segment], mut data: &[u8]) {
    for segment in memory {
        let (part, rest) = data.split_at(segment.len as usize);
        region.write(segment.offset, part);
        data = rest;
    }
}
