//! [`CrashStore`]: volumes in memory of which only a part survives a crash.
//!
//! It does what the contract of [`Store`] allows and no more than it promises, decided by a seed:
//!
//! - An op takes effect at any moment between its submission and its end, not only at its end.
//! - What is written is volatile until a `Flush` that was submitted after the write was done has succeeded;
//!   a write with `fua` is durable when it is done. [`CrashStore::crash`] keeps, drops or tears the rest, by
//!   sectors of [`SECTOR`] bytes and in any order.
//! - While a read is in flight its segments hold [`POISON`]. A write's segments are compared with what they
//!   were when it ends: [`CrashStore::breaches`] tells of submitters that broke the lending.
//!
//! Time is the number of [`Store::reap`] calls, as for [`crate::ram_store::RamStore`]. Several stores may share
//! the disk ([`CrashStore::another`]), one for each poll group.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use rblk_fabric::Region;
use rblk_target::store::{MAX_SEGMENTS, Op, OpDone, OpKind, Segment, Store, VolumeIndex};

use crate::ram_store::{Kind, StoreConditions};
use crate::seed::Random;

/// What a device writes whole or not at all, in bytes.
pub const SECTOR: usize = 512;

/// What fills the memory of a read that is not done.
pub const POISON: u8 = 0xdb;

/// A part of a volume where ops of one kind fail.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Which ops.
    pub kind: Kind,
    /// Of which volume.
    pub volume: VolumeIndex,
    /// In bytes: an op fails that touches any of it. For `Flush` it does not matter.
    pub range: Range<u64>,
    /// What it fails with.
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

/// A change that took effect and is not durable.
#[derive(Clone, Debug)]
struct Change {
    // Place in the order of effects.
    effect: u64,
    // Place in the order of ends; none while the op is in flight.
    done: Option<u64>,
    offset: usize,
    len: usize,
    // None for zeroes.
    data: Option<Vec<u8>>,
}

#[derive(Clone, Debug)]
struct VolumeBytes {
    // What reads see.
    now: Vec<u8>,
    durable: Vec<u8>,
    // Effect of the newest durable change, by sector: an older one cannot come back over it.
    durable_effects: Vec<u64>,
    // In the order of their effects.
    volatile: Vec<Change>,
}

impl VolumeBytes {
    fn make_durable(&mut self, covered: impl Fn(&Change) -> bool) {
        let mut at = 0;
        while at < self.volatile.len() {
            if covered(&self.volatile[at]) {
                let change = self.volatile.remove(at);
                for sector in sectors(change.offset, change.len) {
                    if self.durable_effects[sector.start / SECTOR] < change.effect {
                        self.durable_effects[sector.start / SECTOR] = change.effect;
                        put(&mut self.durable, &change, sector);
                    }
                }
            } else {
                at += 1;
            }
        }
    }

    /// Adds what chance keeps of `changes` to an image.
    fn keep_some(&self, image: &mut [u8], mut changes: Vec<Change>, random: &mut Random) {
        // Whole crashes of one kind are likelier to show a mistake than a mixture of all.
        let (keep, tear) = [(0, 0), (1000, 0), (500, 0), (100, 300), (300, 700)][random.index(5)];
        for last in (1..changes.len()).rev() {
            changes.swap(last, random.index(last + 1));
        }
        for change in changes {
            let whole = random.chance(keep);
            let torn = random.chance(tear);
            for sector in sectors(change.offset, change.len) {
                let newer = change.effect > self.durable_effects[sector.start / SECTOR];
                if newer && (whole || torn && random.chance(500)) {
                    put(image, &change, sector);
                }
            }
        }
    }
}

fn sectors(offset: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = offset + len;
    (offset / SECTOR..end.div_ceil(SECTOR))
        .map(move |at| (at * SECTOR).max(offset)..((at + 1) * SECTOR).min(end))
}

fn put(image: &mut [u8], change: &Change, range: Range<usize>) {
    match &change.data {
        Some(data) => {
            let from = range.start - change.offset..range.end - change.offset;
            image[range].copy_from_slice(&data[from]);
        }
        None => image[range].fill(0),
    }
}

#[derive(Debug)]
struct Pending {
    op: Op,
    // The store it was given to.
    store: usize,
    memory: Vec<Segment>,
    // A write's data, or what a read has found.
    data: Vec<u8>,
    effect_at: u64,
    due: u64,
    // Place in the order of effects, once it took effect.
    effect: Option<u64>,
    // Nothing becomes of it for now.
    held: bool,
    result: Result<u32, Errno>,
    // A flush covers what had ended by then.
    covers: u64,
}

/// What the stores of one disk share.
#[derive(Debug)]
struct Disk {
    volumes: Vec<Option<VolumeBytes>>,
    random: Random,
    conditions: StoreConditions,
    faults: Vec<Fault>,
    pending: Vec<Pending>,
    breaches: Vec<String>,
    exclusive: bool,
    stores: usize,
    effects: u64,
    ends: u64,
    ops: u64,
}

/// A store whose contents are partly lost in a crash. See the module.
#[derive(Debug)]
pub struct CrashStore {
    region: Arc<Region>,
    disk: Arc<Mutex<Disk>>,
    // Its number among those of the disk.
    number: usize,
    now: u64,
}

impl CrashStore {
    /// A store whose segments are in `region`. Of [`StoreConditions`] it obeys all.
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

    /// Another store of the same disk: of the same bytes, faults and fate.
    #[must_use]
    pub fn another(&self) -> Self {
        let mut disk = self.disk();
        disk.stores += 1;
        let number = disk.stores - 1;
        Self { region: Arc::clone(&self.region), disk: Arc::clone(&self.disk), number, now: 0 }
    }

    /// The first store of a next user of the disk, whose segments are in `region`. What the users before had in
    /// flight must have been [settled](Self::settle).
    #[must_use]
    pub fn over(&self, region: &Arc<Region>) -> Self {
        Self { region: Arc::clone(region), ..self.another() }
    }

    /// The user of the disk has died, the machine has not: of what was in flight each op is done, whole, or is not,
    /// by chance, and nobody waits for it.
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

    /// Sets how it behaves from now on.
    pub fn set_conditions(&mut self, conditions: StoreConditions) {
        self.disk().conditions = conditions;
    }

    /// How it behaves.
    #[must_use]
    pub fn conditions(&self) -> StoreConditions {
        self.disk().conditions
    }

    /// Sets which parts are bad for ops submitted from now on. What is in flight fails as it was to.
    pub fn set_faults(&mut self, faults: Vec<Fault>) {
        self.disk().faults = faults;
    }

    /// What a read of the whole volume would find; nothing when there is no such volume.
    #[must_use]
    pub fn bytes(&self, index: VolumeIndex) -> Vec<u8> {
        self.disk().volume(index).map_or_else(Vec::new, |volume| volume.now.clone())
    }

    /// What is sure to be there after a crash.
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

    /// Of what is in flight now nothing becomes anything until [`Self::release`]; what comes later overtakes it.
    pub fn hold(&mut self) {
        self.disk().pending.iter_mut().for_each(|pending| pending.held = true);
    }

    /// What was held goes on.
    pub fn release(&mut self) {
        self.disk().pending.iter_mut().for_each(|pending| pending.held = false);
    }

    /// Ops in flight at any store of the disk that change something.
    #[must_use]
    pub fn changes_in_flight(&self) -> usize {
        self.disk().pending.iter().filter(|pending| pending.op.kind.changes()).count()
    }

    /// Ops in flight at any store of the disk that are not held.
    #[must_use]
    pub fn disk_busy(&self) -> usize {
        self.disk().pending.iter().filter(|pending| !pending.held).count()
    }

    /// From now on it is a breach when ops of overlapping ranges are in flight together, whichever they are.
    pub fn set_exclusive(&mut self) {
        self.disk().exclusive = true;
    }

    /// How submitters broke the contract, in words.
    #[must_use]
    pub fn breaches(&self) -> Vec<String> {
        self.disk().breaches.clone()
    }

    /// What the volume holds after this machine lost its power now: everything durable, and of the rest
    /// what the seed keeps.
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

    /// What the volume holds after its user died and the machine did not: everything that took effect, and
    /// of what was in flight what the seed keeps.
    #[must_use]
    pub fn kill(&self, index: VolumeIndex, seed: u64) -> Vec<u8> {
        let disk = self.disk();
        let Some(volume) = disk.volume(index) else { return Vec::new() };
        let mut image = volume.now.clone();
        volume.keep_some(&mut image, disk.not_yet(index).collect(), &mut Random::new(seed));
        image
    }
}

impl Disk {
    fn volume(&self, index: VolumeIndex) -> Option<&VolumeBytes> {
        self.volumes.get(usize::from(index.0)).and_then(Option::as_ref)
    }

    /// Changes in flight that took no effect yet.
    fn not_yet(&self, index: VolumeIndex) -> impl Iterator<Item = Change> + '_ {
        let waits = |p: &&Pending| p.effect.is_none() && p.result.is_ok();
        self.pending
            .iter()
            .filter(move |p| p.op.volume == index && p.op.kind.changes())
            .filter(waits)
            .map(|p| change(p, u64::MAX))
    }

    fn verdict(&mut self, op: &Op, memory: &[Segment], region: &Region) -> Result<u32, Errno> {
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

    fn take_effect(&mut self, at: usize) {
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

    fn end(&mut self, at: usize, region: &Region) -> OpDone {
        let pending = &self.pending[at];
        // The contents of the range are unknown after an error: as often as not they are the new ones.
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

fn overlap(first: &Op, second: &Op) -> bool {
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

fn gather(region: &Region, memory: &[Segment]) -> Vec<u8> {
    let mut data = vec![0; memory.iter().map(|s| s.len as usize).sum()];
    let mut rest = &mut data[..];
    for segment in memory {
        let (part, after) = rest.split_at_mut(segment.len as usize);
        region.read(segment.offset, part);
        rest = after;
    }
    data
}

fn scatter(region: &Region, memory: &[Segment], mut data: &[u8]) {
    for segment in memory {
        let (part, rest) = data.split_at(segment.len as usize);
        region.write(segment.offset, part);
        data = rest;
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
        // An op may have its effect at once.
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

#[cfg(test)]
mod tests {
    use super::*;
    use rblk_fabric::PageKind;
    use rblk_target::store::OpToken;

    const V: VolumeIndex = VolumeIndex(1);

    fn store(seed: u64) -> CrashStore {
        let region = Arc::new(Region::allocate(4096, PageKind::Normal).unwrap());
        let mut store = CrashStore::new(&region, seed);
        store.set_volume(V, vec![0; 4096]);
        store
    }

    fn submit(store: &mut CrashStore, kind: OpKind, memory: &[Segment]) {
        store.submit(Op { token: OpToken(1), volume: V, kind }, memory).unwrap();
    }

    fn finish(store: &mut CrashStore) -> Vec<OpDone> {
        let mut out = Vec::new();
        while store.in_flight() > 0 {
            store.reap(&mut out);
        }
        out
    }

    fn write(store: &mut CrashStore, byte: u8, fua: bool) {
        store.region.write(0, &[byte; 1024]);
        let kind = OpKind::Write { offset: 512, len: 1024, fua };
        let memory = [Segment { offset: 512, len: 512 }, Segment { offset: 0, len: 512 }];
        submit(store, kind, &memory);
        assert!(finish(store).iter().all(|done| done.result.is_ok()));
    }

    /// Values that two sectors have after crashes by many seeds.
    fn outcomes(store: &CrashStore) -> Vec<(u8, u8)> {
        let mut all: Vec<_> = (0..400).map(|seed| store.crash(V, seed)).collect();
        for image in &all {
            assert!(image[512..1024].iter().all(|b| *b == image[512]), "a torn sector");
            assert!(image[..512].iter().chain(&image[1536..]).all(|b| *b == 0), "elsewhere");
        }
        let mut pairs: Vec<_> = all.drain(..).map(|image| (image[512], image[1024])).collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    #[test]
    fn what_was_not_flushed_is_kept_dropped_or_torn() {
        let mut store = store(1);
        write(&mut store, 1, false);
        assert_eq!(store.bytes(V)[512], 1);
        assert_eq!(outcomes(&store), [(0, 0), (0, 1), (1, 0), (1, 1)]);
        write(&mut store, 2, false);
        assert_eq!(outcomes(&store).len(), 9);
        assert_eq!(store.kill(V, 1)[512], 2);
    }

    #[test]
    fn a_flush_covers_what_was_done_before_it() {
        let mut store = store(2);
        write(&mut store, 1, false);
        submit(&mut store, OpKind::Flush, &[]);
        assert_eq!(outcomes(&store).len(), 4, "the flush is not done");
        // Submitted after the flush, so not covered.
        write(&mut store, 2, false);
        finish(&mut store);
        assert_eq!(outcomes(&store), [(1, 1), (1, 2), (2, 1), (2, 2)]);
        write(&mut store, 3, true);
        assert_eq!(outcomes(&store), [(3, 3)]);
        submit(&mut store, OpKind::Discard { offset: 512, len: 512 }, &[]);
        assert_eq!(outcomes(&store), [(0, 3), (3, 3)]);
        store.set_faults(vec![Fault {
            kind: Kind::Flush,
            volume: V,
            range: 0..0,
            errno: Errno::EIO,
        }]);
        finish(&mut store);
        submit(&mut store, OpKind::Flush, &[]);
        assert_eq!(finish(&mut store)[0].result, Err(Errno::EIO));
        assert_eq!(outcomes(&store), [(0, 3), (3, 3)], "a failed flush covers nothing");
    }

    #[test]
    fn lent_memory_is_watched() {
        let mut store = store(3);
        let memory = [Segment { offset: 0, len: 512 }];
        store.set_conditions(StoreConditions { stalled: true, ..StoreConditions::default() });
        submit(&mut store, OpKind::Read { offset: 0, len: 512 }, &memory);
        let mut bytes = [0; 512];
        store.region.read(0, &mut bytes);
        assert_eq!(bytes, [POISON; 512]);
        store.set_conditions(StoreConditions::default());
        finish(&mut store);
        assert!(store.breaches().is_empty());
        store.set_conditions(StoreConditions { stalled: true, ..StoreConditions::default() });
        submit(&mut store, OpKind::Write { offset: 0, len: 512, fua: false }, &memory);
        store.region.write(0, &[9; 512]);
        store.set_conditions(StoreConditions::default());
        finish(&mut store);
        assert_eq!(store.breaches().len(), 1);
    }

    #[test]
    fn what_is_held_is_overtaken() {
        let mut store = store(6);
        let memory = [Segment { offset: 0, len: 512 }];
        store.region.write(0, &[1; 512]);
        store.set_conditions(StoreConditions { delay_min: 2, ..StoreConditions::default() });
        submit(&mut store, OpKind::Write { offset: 0, len: 512, fua: false }, &memory);
        let early = store.bytes(V)[0] == 1;
        store.hold();
        submit(&mut store, OpKind::Discard { offset: 0, len: 512 }, &[]);
        let mut done = Vec::new();
        for _ in 0..10 {
            store.reap(&mut done);
        }
        assert_eq!((done.len(), store.in_flight(), store.disk_busy()), (1, 1, 0));
        assert_eq!(store.bytes(V)[0], 0);
        store.release();
        store.reap(&mut done);
        assert_eq!((done.len(), store.in_flight()), (2, 0));
        assert_eq!(store.bytes(V)[0], u8::from(!early), "it took effect last");
    }

    #[test]
    fn overlaps_are_breaches_when_they_are_forbidden() {
        for (exclusive, offset, breaches) in [(false, 512, 0), (true, 512, 1), (true, 1024, 0)] {
            let mut store = store(5);
            if exclusive {
                store.set_exclusive();
            }
            submit(&mut store, OpKind::Discard { offset: 0, len: 1024 }, &[]);
            let mut other = store.another();
            submit(&mut store, OpKind::Flush, &[]);
            submit(&mut other, OpKind::Discard { offset, len: 512 }, &[]);
            assert_eq!(store.breaches().len(), breaches);
        }
    }

    #[test]
    fn faults_are_in_their_range_only() {
        let mut store = store(4);
        let errno = Errno::ENOSPC;
        store.set_faults(vec![Fault { kind: Kind::Write, volume: V, range: 512..1024, errno }]);
        let memory = [Segment { offset: 0, len: 512 }];
        for (offset, result) in [(0, Ok(512)), (512, Err(errno)), (1024, Ok(512))] {
            submit(&mut store, OpKind::Write { offset, len: 512, fua: false }, &memory);
            assert_eq!(finish(&mut store)[0].result, result);
            submit(&mut store, OpKind::Read { offset, len: 512 }, &memory);
            assert_eq!(finish(&mut store)[0].result, Ok(512));
        }
    }
}
