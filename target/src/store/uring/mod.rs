//! [`UringStore`]: one io_uring for the file I/O of a data thread. The thread sleeps only there.
//!
//! A turn of the thread is: submit ops, [`UringStore::turn`], reap. The turn enters the kernel at
//! most once, and not at all when no entry is queued and the kernel's flags in the ring show no
//! completion to collect. Watched descriptors (completion channel, mailbox) end the sleep like I/O
//! does.
//!
//! Invariants:
//!
//! - An op has at most one entry in the kernel at a time. The submission queue has room for all ops
//!   and watches at once, and the completion queue is twice as large, so neither is full in normal
//!   operation.
//! - This store holds the memory an entry points to (the region, the zero pages, the op's list of
//!   parts), and does not move it until the kernel has completed the entry; a store dropped while
//!   the kernel does not answer leaks that memory rather than freeing it.
//! - Ops of images do not touch the ring: librbd ends them by its own threads, which ring the
//!   store's door while the data thread sleeps.
//! - The thread of the first turn owns the ring; after that, only that thread may change volumes
//!   and watches.

#![allow(unsafe_code)]

mod counters;
mod entry_memory;
mod op;
mod ring;
mod ring_setup;
mod sync_wait;
mod watch_set;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue};
use nix::errno::Errno;
use rblk_fabric::{PageKind, Region};
use rblk_protocol::width::{narrow, wide};

pub use self::counters::Counters;
pub(super) use self::entry_memory::IoVecs;
use self::entry_memory::{EntryMemory, Pieces};
use self::op::{Ops, Phase, ZERO_CHUNK};
use self::ring::{Ring, USER_OP, USER_WATCH};
pub(super) use self::ring_setup::cooperative;
pub use self::ring_setup::{MAX_CAPACITY, UringOptions, Warning};
use self::ring_setup::{deferred, register_file_table};
use self::sync_wait::SyncWaiters;
use self::watch_set::{DOOR, Watches, checked};
pub use self::watch_set::{FdToken, MAX_WATCHES, WatchSet};
use super::backing::Backing;
use super::open_store::OpenStore;
use super::rbd::image_ops::ImageOps;
use super::syncs::{SyncLook, SyncNumber};
use super::{Op, OpDone, Segment, Store, StoreError, refusal};
use crate::volume::ids::VolumeIndex;

// Time that a dropped store waits for the kernel.
const DRAIN: Duration = Duration::from_secs(5);

/// How long a turn may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TurnSleep {
    /// Not at all.
    No,
    /// Until an op ends or a watch wakes, at most this long. Does not sleep when an op or a watch
    /// is already reported.
    Until(Duration),
}

#[derive(Debug)]
struct RingVolume {
    backing: Arc<Backing>,
    // Ops of the volume that have not ended.
    ops: usize,
}

/// The io_uring engine. See the module.
pub struct UringStore {
    // First, so that it is dropped before the memory it uses.
    ring: Ring,
    memory: EntryMemory,
    volumes: Box<[Option<RingVolume>]>,
    ops: Ops,
    // The volumes on images, with their ops.
    images: ImageOps,
    done: Vec<OpDone>,
    sync_waiters: SyncWaiters,
    watches: Watches,
    counters: Counters,
    warnings: Vec<Warning>,
}

impl std::fmt::Debug for UringStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringStore")
            .field("params", self.ring.get().params())
            .field("volumes", &self.volumes.iter().flatten().count())
            .field("in_flight", &self.in_flight())
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl UringStore {
    /// A store for ops on `region`. Any thread may make it; the thread of the first [`Self::turn`]
    /// owns it.
    ///
    /// # Errors
    /// The kernel refuses the ring. Optional features that it lacks are in [`Self::warnings`].
    pub fn new(region: Arc<Region>, options: &UringOptions) -> Result<Self, StoreError> {
        // Room for every op, and for a watch and an unwatch under every token.
        let ops = options.capacity.clamp(1, MAX_CAPACITY);
        let entries = (ops + 2 * u32::from(MAX_WATCHES)).next_power_of_two();
        let ring = match deferred(entries) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => cooperative(entries),
            result => result,
        };
        Self::with_ring(
            ring.map_err(|source| StoreError::Ring { entries, source })?,
            region,
            options,
        )
    }

    pub(super) fn with_ring(
        ring: IoUring,
        region: Arc<Region>,
        options: &UringOptions,
    ) -> Result<Self, StoreError> {
        let entries = ring.params().sq_entries();
        let fail = |source| StoreError::Ring { entries, source };
        let capacity = options.capacity.clamp(1, MAX_CAPACITY);
        let mut warnings = Vec::new();
        if !ring.params().is_setup_single_issuer() {
            warnings.push(Warning::NoDeferredCompletions);
        }
        register_file_table(&ring, options.volumes).map_err(fail)?;
        let zeroes = Region::allocate(ZERO_CHUNK as usize, PageKind::Normal)
            .map_err(|e| fail(io::Error::other(e)))?;
        let wanted = options.registered.clone().unwrap_or(0..region.len());
        let wanted = wanted.start.min(region.len())..wanted.end.min(region.len());
        let pieces = Pieces::register(&ring, &region, wanted.clone()).unwrap_or_else(|errno| {
            warnings.push(Warning::PlainBuffers { bytes: wanted.len(), errno });
            Pieces::none()
        });
        let sync_waiters = SyncWaiters::new(wide(capacity)).map_err(fail)?;
        let mut watches = Watches::new();
        // Armed when an op waits for the first time.
        watches.add(sync_waiters.fd(), DOOR).map_err(fail)?;
        let images = ImageOps::new(Arc::clone(&region), capacity, sync_waiters.door());
        Ok(Self {
            ring: Ring::new(ring),
            memory: EntryMemory { region, pieces, zeroes },
            volumes: (0..options.volumes).map(|_| None).collect(),
            ops: Ops::new(capacity),
            images,
            done: Vec::with_capacity(wide(capacity)),
            sync_waiters,
            watches,
            counters: Counters::default(),
            warnings,
        })
    }

    /// Optional features that the store lacks.
    #[must_use]
    pub(crate) fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// The store's counters.
    #[must_use]
    pub(crate) fn counters(&self) -> Counters {
        let (enters, sleeps) = self.ring.enters();
        Counters { enters, sleeps, watch_errors: self.watches.errors(), ..self.counters }
    }

    /// Adds a volume.
    ///
    /// # Errors
    /// The index is taken or beyond the table, or the kernel refuses the file.
    pub(crate) fn add_volume(
        &mut self,
        index: VolumeIndex,
        store: impl Into<OpenStore>,
    ) -> Result<(), StoreError> {
        let volumes = narrow(self.volumes.len());
        let place = self.volumes.get_mut(usize::from(index.0));
        let place = place.ok_or(StoreError::TableFull { index: index.0, volumes })?;
        if let Some(other) = place {
            return Err(StoreError::Taken {
                index: index.0,
                path: other.backing.path().to_owned(),
            });
        }
        if let Some(image) = self.images.image(index) {
            return Err(StoreError::Taken { index: index.0, path: image.name().into() });
        }
        let backing = match store.into() {
            OpenStore::Local(backing) => backing,
            OpenStore::Image(image) => {
                self.images.add(index, image);
                self.done.reserve(wide(self.images.capacity()));
                // Its ops end by threads that ring the door.
                self.watches.arm(&mut self.ring, DOOR.0);
                return Ok(());
            }
        };
        self.ring
            .set_file(index.0, backing.file().as_raw_fd())
            .map_err(|source| StoreError::Register { path: backing.path().to_owned(), source })?;
        *place = Some(RingVolume { backing, ops: 0 });
        Ok(())
    }

    /// Returns a backing that lost writes. One store of the backing reports the loss, once. Until
    /// the owner calls [`Backing::loss_noted`], the backing's flushes may wait, see
    /// [`Losses`](super::Losses).
    pub(crate) fn take_lost(&mut self) -> Option<(VolumeIndex, Arc<Backing>)> {
        self.sync_waiters.take_lost()
    }

    /// Removes a volume. Its ops must have ended; results not yet reaped may wait.
    ///
    /// # Errors
    /// The volume does not exist, or has ops in the kernel.
    pub(crate) fn remove_volume(&mut self, index: VolumeIndex) -> Result<Arc<Backing>, StoreError> {
        let place = self.volumes.get_mut(usize::from(index.0));
        let place = place.ok_or(StoreError::NoVolume { index: index.0 })?;
        match place.take() {
            None => Err(StoreError::NoVolume { index: index.0 }),
            Some(volume) if volume.ops > 0 => {
                let ops = volume.ops;
                *place = Some(volume);
                Err(StoreError::Busy { index: index.0, ops })
            }
            Some(volume) => {
                if let Err(source) = self.ring.set_file(index.0, -1) {
                    let path = volume.backing.path().to_owned();
                    *place = Some(volume);
                    return Err(StoreError::Register { path, source });
                }
                Ok(volume.backing)
            }
        }
    }

    /// Wakes [`Self::turn`] when `fd` becomes readable, until [`Self::unwatch`]. Level-triggered at
    /// first (a readable descriptor wakes at once), edge-triggered afterwards: the owner must read
    /// until no data is left before the next sleep. The descriptor is duplicated.
    ///
    /// # Errors
    /// The token is too large or in use, or the descriptor cannot be duplicated.
    pub(crate) fn watch(&mut self, fd: RawFd, token: FdToken) -> io::Result<()> {
        checked(token)?;
        self.watches.add(fd, token)?;
        self.watches.arm(&mut self.ring, token.0);
        Ok(())
    }

    /// Like [`Self::watch`], for a descriptor that matters only during a sleep: every sleep of
    /// [`Self::turn`] ends when it is readable or becomes so. Between sleeps it costs nothing and
    /// is not reported, except when it woke a sleep that was already over.
    ///
    /// # Errors
    /// As for [`Self::watch`].
    pub(crate) fn watch_asleep(&mut self, fd: RawFd, token: FdToken) -> io::Result<()> {
        checked(token)?;
        self.watches.add_asleep(fd, token)
    }

    /// Ends a watch, if it exists. A turn may still report it once.
    pub(crate) fn unwatch(&mut self, token: FdToken) {
        self.watches.remove(&mut self.ring, token);
    }

    /// Hands queued entries to the kernel, sleeps if `wait` allows it and no result is ready, and
    /// collects ended ops (for [`Store::reap`]) and woken watches (added to `woken`). At most one
    /// `io_uring_enter`. Entries left in `woken` and results not yet reaped count as ready: the
    /// turn then does not sleep.
    ///
    /// # Errors
    /// The ring is unusable, for example from a thread other than that of the first turn
    /// (`EEXIST`).
    pub(crate) fn turn(&mut self, wait: TurnSleep, woken: &mut WatchSet) -> io::Result<()> {
        self.watches.arm_the_rest(&mut self.ring);
        let sleep = match wait {
            TurnSleep::No => None,
            // A watch without room in the queue is armed in the next turn; this turn makes the
            // room.
            TurnSleep::Until(time) => Some(time).filter(|t| {
                !t.is_zero()
                    && self.watches.arm_for_sleep(&mut self.ring)
                    && self.images.fall_asleep()
            }),
        };
        let ready = !self.done.is_empty() || !woken.is_empty();
        self.ring.enter(sleep, ready, self.ops.active() > 0)?;
        // One at a time: each completion may queue entries.
        while let Some(entry) = self.ring.next_completion() {
            self.complete(&entry, woken);
        }
        if woken.take_door() {
            self.sync_waiters.answer();
            self.look_at_syncs();
        }
        if self.images.is_busy() {
            self.images.wake_up();
            self.images.collect(&mut self.done, &mut self.counters);
        }
        Ok(())
    }

    fn complete(&mut self, entry: &cqueue::Entry, woken: &mut WatchSet) {
        let user_data = entry.user_data();
        match user_data >> 56 {
            USER_OP => {
                let index = narrow(user_data);
                if self.ops.is_active(index) {
                    self.advance(index, entry.result());
                } else {
                    debug_assert!(false, "a completion of op {index}, which has ended");
                    tracing::error!(op = index, "bug: a completion of an op that has ended");
                }
            }
            USER_WATCH => self.watches.woke(&mut self.ring, entry, woken),
            _ => {}
        }
    }

    // Handles the kernel's result of an op's entry.
    fn advance(&mut self, index: u32, result: i32) {
        let op = self.ops.get(index);
        let volume = self.volumes.get(usize::from(op.op.volume.0)).and_then(Option::as_ref);
        let ended = match volume {
            Some(volume) => op.advance(result, &volume.backing, &mut self.counters),
            None => Some(Err(no_volume(op.op.volume))),
        };
        match ended {
            Some(result) => self.ended(index, result),
            None => self.send(index),
        }
    }

    // The kernel ended a part of an op, with or without an error.
    fn ended(&mut self, index: u32, result: Result<u32, Errno>) {
        let op = self.ops.peek(index);
        match op.phase {
            Phase::Sync(number) => self.sync_ended(index, number, result),
            _ if result.is_ok() && op.owes_sync() => self.await_sync(index),
            _ => self.finish(index, result),
        }
    }

    // Queues the next entry of an op.
    fn send(&mut self, index: u32) {
        let EntryMemory { pieces, zeroes, .. } = &self.memory;
        let sent = self.ops.get(index).entry(pieces, zeroes).is_some_and(|entry| {
            // SAFETY: the data is inside the region or the zero pages (`Region::pointer` checked),
            // both held by this store until the op's completion or leaked by drop. No reference to
            // it exists anywhere: a region hands out none. A list of parts is in the op's place,
            // which stays as it is until its completion (only that, or the end of the op, changes
            // it) and where it is (the heap memory of its `Vec`), or is leaked by drop.
            unsafe { self.ring.push(&entry.user_data(USER_OP << 56 | u64::from(index))) }
        });
        if !sent {
            self.ended(index, Err(Errno::EIO));
        }
    }

    fn finish(&mut self, index: u32, result: Result<u32, Errno>) {
        let op = self.ops.end(index);
        match self.volumes.get_mut(usize::from(op.volume.0)) {
            Some(Some(volume)) => volume.ops -= 1,
            _ => drop(no_volume(op.volume)),
        }
        self.record(&op, result);
    }

    fn record(&mut self, op: &Op, result: Result<u32, Errno>) {
        self.counters.count(&op.kind, result);
        self.done.push(OpDone { token: op.token, result });
    }

    // The volume of an op. The op keeps the volume until it ends.
    fn volume_of(&self, index: u32) -> Result<&RingVolume, Errno> {
        let volume = self.ops.peek(index).op.volume;
        let state = self.volumes.get(usize::from(volume.0)).and_then(Option::as_ref);
        state.ok_or_else(|| no_volume(volume))
    }

    // Makes an op wait for the first sync that covers it, or run that sync.
    fn await_sync(&mut self, index: u32) {
        let number = match self.volume_of(index) {
            Ok(volume) => volume.backing.syncs().join(),
            Err(errno) => return self.finish(index, Err(errno)),
        };
        self.ops.get(index).phase = Phase::Awaiting(number);
        if !self.look_at(index) {
            self.put_off(index);
        }
    }

    // The sync that an op ran ended.
    fn sync_ended(&mut self, index: u32, number: SyncNumber, result: Result<u32, Errno>) {
        self.counters.syncs += 1;
        let backing = match self.volume_of(index) {
            Ok(volume) => Arc::clone(&volume.backing),
            Err(errno) => return self.finish(index, Err(errno)),
        };
        let volume = self.ops.peek(index).op.volume;
        self.sync_waiters.sync_ended(volume, &backing, result.map(drop));
        self.ops.get(index).phase = Phase::Awaiting(number);
        self.put_off(index);
        self.look_at_syncs();
    }

    // Looks at all ops that wait for syncs: some syncs ended, and one op may have to run the next.
    fn look_at_syncs(&mut self) {
        let mut at = 0;
        // Takes each op off the list first: the steps that follow may change the list.
        while let Some(index) = self.sync_waiters.take(at) {
            if !self.look_at(index) {
                self.sync_waiters.put_back(at, index);
                at += 1;
            }
        }
    }

    // Whether an op stopped waiting: it runs the sync, or has ended.
    fn look_at(&mut self, index: u32) -> bool {
        let Phase::Awaiting(number) = self.ops.peek(index).phase else { return true };
        let look = match self.volume_of(index) {
            Ok(volume) => self.sync_waiters.look(&volume.backing, number),
            Err(errno) => SyncLook::Over(Err(errno)),
        };
        match look {
            SyncLook::Wait => return false,
            SyncLook::Run => {
                self.ops.get(index).phase = Phase::Sync(number);
                self.send(index);
            }
            SyncLook::Over(result) => {
                let value = self.ops.peek(index).value();
                self.finish(index, result.map(|()| value));
            }
        }
        true
    }

    fn put_off(&mut self, index: u32) {
        self.sync_waiters.add(index);
        self.watches.arm(&mut self.ring, DOOR.0);
    }
}

// A volume stays in the table until its ops have ended, so this is a bug.
#[cold]
fn no_volume(volume: VolumeIndex) -> Errno {
    debug_assert!(false, "an op of volume {}, which is not in the table", volume.0);
    tracing::error!(volume = volume.0, "bug: an op of a volume that is not in the table");
    Errno::ENXIO
}

impl Store for UringStore {
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op> {
        let region = &self.memory.region;
        let volume = self.volumes.get_mut(usize::from(op.volume.0)).and_then(Option::as_mut);
        let Some(volume) = volume else {
            // On an image, or nowhere.
            if self.done.len() >= self.done.capacity() {
                return Err(op);
            }
            return self.images.submit(op, memory, (&mut self.done, &mut self.counters));
        };
        if self.ops.active() + self.done.len() >= self.ops.capacity() {
            return Err(op);
        }
        let backing = Some(volume.backing.as_ref());
        if let Some(result) = refusal(backing, region.len(), &op.kind, memory) {
            self.record(&op, result);
            return Ok(());
        }
        let Some(phase) = Phase::first(&op.kind, &volume.backing) else {
            self.record(&op, Err(Errno::EOPNOTSUPP));
            return Ok(());
        };
        let Some(index) = self.ops.take() else { return Err(op) };
        volume.ops += 1;
        let started = self.ops.get(index).start(op, phase, &volume.backing, region, memory);
        if started && phase == Phase::Unsynced {
            self.await_sync(index);
        } else if started {
            self.send(index);
        } else {
            self.finish(index, Err(Errno::EINVAL));
        }
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<OpDone>) {
        out.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.ops.active() + self.images.in_flight() + self.done.len()
    }

    #[inline]
    fn may_fall_silent(&self) -> bool {
        self.images.has_any()
    }

    fn next_silence(&mut self) -> Option<(VolumeIndex, bool)> {
        self.images.next_silence()
    }

    fn let_go(&mut self, volume: VolumeIndex) {
        self.images.let_go(volume, (&mut self.done, &mut self.counters));
    }

    fn close(&mut self, volume: VolumeIndex) -> Result<(), StoreError> {
        if self.images.image(volume).is_none() {
            return self.remove_volume(volume).map(drop);
        }
        match self.images.ops_of(volume) {
            0 => {
                self.images.remove(volume);
                Ok(())
            }
            ops => Err(StoreError::Busy { index: volume.0, ops }),
        }
    }
}

impl Drop for UringStore {
    fn drop(&mut self) {
        let deadline = Instant::now() + DRAIN;
        let mut woken = WatchSet::default();
        while self.ops.active() > 0 || self.images.is_busy() {
            self.done.clear();
            woken.clear();
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.turn(TurnSleep::Until(left), &mut woken).is_err() {
                break;
            }
        }
        for volume in self.volumes.iter().flatten() {
            self.sync_waiters.leave(&volume.backing);
        }
        if self.images.is_busy() {
            self.images.leak();
        }
        if self.ops.active() > 0 {
            // The kernel may still write to this memory and still works on these files. The kernel
            // copied the lists of parts when it took the entries, but relying on that would gain
            // nothing.
            self.ops.leak();
            self.memory.leak();
            for volume in self.volumes.iter().flatten().filter(|volume| volume.ops > 0) {
                std::mem::forget(Arc::clone(&volume.backing));
            }
        } else if self.volumes.iter().any(Option::is_some) {
            self.ring.forget_files();
        }
    }
}
