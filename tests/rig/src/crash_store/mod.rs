//! [`CrashStore`]: volumes in memory that keep only a part of their bytes in a crash.
//!
//! The store uses all the freedom that the contract of [`Store`] leaves, and a seed decides:
//!
//! - An op takes effect at any moment between its submission and its end, not only at its end.
//! - Written data is volatile until the success of a `Flush` that was submitted after the write's
//!   end. A write with `fua` is durable at its end. [`CrashStore::crash`] keeps, drops or tears the
//!   rest, by sectors of [`SECTOR`] bytes and in any order.
//! - While a read is in flight its segments hold [`POISON`]. The segments of a write must be the
//!   same at its end: [`CrashStore::breaches`] names submitters that changed lent memory.
//!
//! Time is the number of [`Store::reap`] calls, as for [`crate::ram_store::RamStore`]. Several
//! stores may share the disk ([`CrashStore::another`]), one for each poll group.

mod disk;
#[cfg(test)]
mod tests;
mod volume;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use rblk_fabric::Region;
use rblk_target::store::{Op, OpDone, OpKind, Segment, Store};
use rblk_target::volume::ids::VolumeIndex;

use crate::ram_store::{Kind, StoreConditions};
use crate::seed::Random;

use self::disk::{Disk, Pending, gather, overlap, scatter};
use self::volume::VolumeBytes;

/// The bytes that a device writes atomically.
pub const SECTOR: usize = 512;

/// Fills the memory of a read in flight.
pub const POISON: u8 = 0xdb;

/// A part of a volume where ops of one kind fail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The kind of op.
    pub kind: Kind,
    /// The volume.
    pub volume: VolumeIndex,
    /// Bytes: an op that touches any of them fails. Ignored for `Flush`.
    pub range: Range<u64>,
    /// The error.
    pub errno: Errno,
}

impl Fault {
    fn hits(&self, op: &Op) -> bool {
        let kind = match op.kind {
            OpKind::Read { .. } => Kind::Read,
            OpKind::Write { .. } => Kind::Write,
            OpKind::Flush => Kind::Flush,
            OpKind::Discard { .. } => Kind::Discard,
            OpKind::WriteZeroes { .. } => Kind::WriteZeroes,
        };
        let (offset, len) = op.kind.range();
        let touches = kind == Kind::Flush
            || offset < self.range.end && self.range.start < offset.saturating_add(len);
        kind == self.kind && op.volume == self.volume && touches
    }
}

/// A store that loses a part of its contents in a crash. See the module.
#[derive(Debug)]
pub struct CrashStore {
    region: Arc<Region>,
    disk: Arc<Mutex<Disk>>,
    // Its number among the disk's stores.
    number: usize,
    now: u64,
}

impl CrashStore {
    /// A store with its segments in `region`. It obeys all [`StoreConditions`].
    #[must_use]
    pub fn new(region: &Arc<Region>, seed: u64) -> Self {
        let disk = Disk {
            volumes: Vec::new(),
            random: Random::new(seed),
            conditions: StoreConditions::default(),
            faults: Vec::new(),
            pending: Vec::new(),
            breaches: Vec::new(),
            exclusive: false,
            stores: 1,
            effects: 0,
            ends: 0,
            ops: 0,
        };
        let disk = Arc::new(Mutex::new(disk));
        Self { region: Arc::clone(region), disk, number: 0, now: 0 }
    }

    /// Another store of the same disk, with the same bytes and faults.
    #[must_use]
    pub fn another(&self) -> Self {
        let mut disk = self.disk();
        disk.stores += 1;
        let number = disk.stores - 1;
        Self { region: Arc::clone(&self.region), disk: Arc::clone(&self.disk), number, now: 0 }
    }

    /// Stores of one disk for the poll groups of a target, one per call. `make` makes the disk.
    ///
    /// # Panics
    /// The disk cannot be made.
    pub fn shared(make: impl FnOnce(&Arc<Region>) -> Self) -> impl FnMut(&Arc<Region>) -> Self {
        let (mut make, mut first) = (Some(make), None::<Self>);
        move |region| {
            let new = || make.take().expect("the first call alone asks for it")(region);
            first.get_or_insert_with(new).another()
        }
    }

    /// The first store of the disk's next user, with its segments in `region`. Ops in flight of
    /// earlier users must have been [settled](Self::settle).
    #[must_use]
    pub fn over(&self, region: &Arc<Region>) -> Self {
        Self { region: Arc::clone(region), ..self.another() }
    }

    /// The user of the disk has died, but not the machine. By chance, each op in flight takes
    /// effect as a whole or not at all. No request waits for it.
    pub fn settle(&mut self, seed: u64) {
        let mut random = Random::new(seed);
        let mut disk = self.disk();
        for at in 0..disk.pending.len() {
            let Pending { effect, result, .. } = &disk.pending[at];
            if effect.is_none() && result.is_ok() && random.chance(500) {
                disk.take_effect(at);
            }
        }
        disk.pending.clear();
        disk.ends += 1;
        let ends = disk.ends;
        for volume in disk.volumes.iter_mut().flatten() {
            for change in volume.volatile.iter_mut().filter(|change| change.done.is_none()) {
                change.done = Some(ends);
            }
        }
    }

    fn in_flight_on(&self, disk: &Disk) -> usize {
        disk.pending.iter().filter(|pending| pending.store == self.number).count()
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a volume its bytes, which are durable.
    pub fn set_volume(&mut self, index: VolumeIndex, bytes: Vec<u8>) {
        let mut disk = self.disk();
        let at = usize::from(index.0);
        if disk.volumes.len() <= at {
            disk.volumes.resize(at + 1, None);
        }
        disk.volumes[at] = Some(VolumeBytes {
            durable: bytes.clone(),
            durable_effects: vec![0; bytes.len().div_ceil(SECTOR)],
            now: bytes,
            volatile: Vec::new(),
        });
    }

    /// Sets the conditions.
    pub fn set_conditions(&mut self, conditions: StoreConditions) {
        self.disk().conditions = conditions;
    }

    /// The conditions.
    #[must_use]
    pub fn conditions(&self) -> StoreConditions {
        self.disk().conditions
    }

    /// Sets the bad ranges for later ops. The outcome of ops in flight stays as it was.
    pub fn set_faults(&mut self, faults: Vec<Fault>) {
        self.disk().faults = faults;
    }

    /// The present bytes of a volume; empty if the volume is missing.
    #[must_use]
    pub fn bytes(&self, index: VolumeIndex) -> Vec<u8> {
        self.disk().volume(index).map_or_else(Vec::new, |volume| volume.now.clone())
    }

    /// The bytes that survive any crash.
    #[must_use]
    pub fn durable(&self, index: VolumeIndex) -> Vec<u8> {
        self.disk().volume(index).map_or_else(Vec::new, |volume| volume.durable.clone())
    }

    /// Ops accepted so far.
    #[must_use]
    pub fn ops(&self) -> u64 {
        self.disk().ops
    }

    /// Ops in flight at any store of the disk.
    #[must_use]
    pub fn disk_in_flight(&self) -> usize {
        self.disk().pending.len()
    }

    /// Holds the ops in flight until [`Self::release`]; later ops overtake them.
    pub fn hold(&mut self) {
        self.disk().pending.iter_mut().for_each(|pending| pending.held = true);
    }

    /// Releases the held ops.
    pub fn release(&mut self) {
        self.disk().pending.iter_mut().for_each(|pending| pending.held = false);
    }

    /// Ops in flight at any store of the disk that change bytes.
    #[must_use]
    pub fn changes_in_flight(&self) -> usize {
        self.disk().pending.iter().filter(|pending| pending.op.kind.changes()).count()
    }

    /// Ops in flight at any store of the disk that are not held.
    #[must_use]
    pub fn disk_busy(&self) -> usize {
        self.disk().pending.iter().filter(|pending| !pending.held).count()
    }

    /// Makes it a breach if any two ops with overlapping ranges are in flight together.
    pub fn set_exclusive(&mut self) {
        self.disk().exclusive = true;
    }

    /// How submitters broke the contract, in words.
    #[must_use]
    pub fn breaches(&self) -> Vec<String> {
        self.disk().breaches.clone()
    }

    /// The volume's bytes if the machine lost its power now: everything durable, and a part of the
    /// rest by the seed.
    #[must_use]
    pub fn crash(&self, index: VolumeIndex, seed: u64) -> Vec<u8> {
        let disk = self.disk();
        let Some(volume) = disk.volume(index) else { return Vec::new() };
        let mut image = volume.durable.clone();
        let mut changes = volume.volatile.clone();
        changes.extend(disk.not_yet(index));
        volume.keep_some(&mut image, changes, &mut Random::new(seed));
        image
    }

    /// The volume's bytes if the user died now, but not the machine: all effects, and a part of the
    /// ops in flight by the seed.
    #[must_use]
    pub fn kill(&self, index: VolumeIndex, seed: u64) -> Vec<u8> {
        let disk = self.disk();
        let Some(volume) = disk.volume(index) else { return Vec::new() };
        let mut image = volume.now.clone();
        volume.keep_some(&mut image, disk.not_yet(index).collect(), &mut Random::new(seed));
        image
    }
}

impl Store for CrashStore {
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op> {
        let mut disk = self.disk();
        if self.in_flight_on(&disk) >= disk.conditions.capacity {
            return Err(op);
        }
        disk.ops += 1;
        let result = disk.verdict(&op, memory, &self.region);
        let StoreConditions { delay_min, delay_max, .. } = disk.conditions;
        let due = self.now + disk.random.within(delay_min, delay_max);
        let effect_at = disk.random.within(self.now, due);
        let mut data = Vec::new();
        if result != Err(Errno::EINVAL) {
            match op.kind {
                OpKind::Write { .. } => data = gather(&self.region, memory),
                OpKind::Read { len, .. } => {
                    data.resize(len as usize, POISON);
                    scatter(&self.region, memory, &data);
                }
                _ => {}
            }
        }
        if disk.exclusive
            && let Some(other) = disk.pending.iter().find(|p| overlap(&p.op, &op))
        {
            let breach = format!("{op:?} was submitted while {:?} was in flight", other.op);
            disk.breaches.push(breach);
        }
        let covers = disk.ends;
        disk.pending.push(Pending {
            op,
            store: self.number,
            memory: memory.to_vec(),
            data,
            effect_at,
            due,
            effect: None,
            held: false,
            result,
            covers,
        });
        // An op may take effect at once.
        if result.is_ok() && effect_at == self.now && disk.random.chance(500) {
            let last = disk.pending.len() - 1;
            disk.take_effect(last);
        }
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<OpDone>) {
        self.now += 1;
        let mut disk = self.disk();
        if disk.conditions.stalled {
            return;
        }
        for at in 0..disk.pending.len() {
            let Pending { store, effect_at, effect, held, result, .. } = &disk.pending[at];
            let due = *store == self.number && !held && *effect_at < self.now;
            if due && effect.is_none() && result.is_ok() {
                disk.take_effect(at);
            }
        }
        let begin = out.len();
        let mut at = 0;
        while at < disk.pending.len() {
            let Pending { store, due, held, .. } = &disk.pending[at];
            if *store == self.number && !held && *due < self.now {
                out.push(disk.end(at, &self.region));
            } else {
                at += 1;
            }
        }
        for last in (begin + 1..out.len()).rev() {
            out.swap(last, begin + disk.random.index(last + 1 - begin));
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight_on(&self.disk())
    }
}
