//! [`UringStore`]: one io_uring that is both the file I/O of a data thread and its only sleeping
//! place.
//!
//! A turn of the thread is: submit ops, [`UringStore::turn`], reap. The turn enters the kernel at
//! most once, and not at all when there is nothing to submit and the flags the kernel keeps in the
//! ring show nothing to collect. Watched descriptors (completion channel, mailbox) end the same
//! sleep as I/O does.
//!
//! Invariants:
//!
//! - An op has at most one entry in the kernel at a time. The submission queue has room for all ops
//!   and watches at once, and the completion queue is twice as large, so neither is full in normal
//!   operation.
//! - The memory an entry points to (the region, the zero pages, the slot's list of parts) is held
//!   by this store and stays where it is until the kernel has answered; a store dropped while the
//!   kernel does not answer leaks that memory rather than freeing it.
//! - With `DEFER_TASKRUN` nothing completes unless we enter; `TASKRUN_FLAG` is what tells us to.
//!   One without the other would poll for ever.
//! - The ring is made disabled and is enabled by the first turn: the thread of that turn becomes
//!   its only issuer, whoever made it. From then on volumes and watches are for that thread too.

#![allow(unsafe_code)]

mod counters;
mod memory;
mod setup;
mod shared_sync;
mod slot;
mod watch;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, squeue};
use nix::errno::Errno;
use rblk_fabric::{PageKind, Region};

pub use self::counters::Counters;
use self::memory::Pieces;
pub(super) use self::setup::cooperative;
pub use self::setup::{MAX_CAPACITY, UringOptions, Warning};
use self::setup::{deferred, register_file_table};
use self::slot::{Phase, Slot, ZERO_CHUNK};
use self::watch::{DOOR, WATCHES, Watch};
pub use self::watch::{MAX_WATCHES, WatchSet, WatchToken};
use super::backing::Backing;
use super::syncs::Door;
use super::{Op, OpDone, Segment, Store, StoreError, VolumeIndex, refusal};

// The kernel's time is signed; nobody tells this from for ever.
const LONGEST_SLEEP: Duration = Duration::from_secs(1 << 30);

// How long dropping a store waits for the kernel.
const DRAIN: Duration = Duration::from_secs(5);

// The top byte of an entry's user data says whose it is.
const USER_OP: u64 = 0;
const USER_WATCH: u64 = 1;
const USER_NOBODY: u64 = 2;

/// How long a turn may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until something is done or woken, at most this long. It does not sleep when something
    /// already is.
    Until(Duration),
}

#[derive(Debug)]
struct Volume {
    backing: Arc<Backing>,
    // Slots in use by it.
    ops: usize,
}

/// The io_uring engine. See the module.
pub struct UringStore {
    // First, so that it is dropped before the memory it uses.
    ring: IoUring,
    enabled: bool,
    no_iowait: bool,
    region: Arc<Region>,
    pieces: Pieces,
    zeroes: Arc<Region>,
    volumes: Box<[Option<Volume>]>,
    slots: Box<[Slot]>,
    free: Vec<u32>,
    done: Vec<OpDone>,
    // Slots that wait for syncs of their backings, and what wakes us for them.
    awaiting: Vec<u32>,
    door: Door,
    // Backings that lost writes, for the owner.
    lost: Vec<(VolumeIndex, Arc<Backing>)>,
    watches: Box<[Watch]>,
    // Watches to arm again; room in the queue permitting.
    unarmed: bool,
    // Tokens of watches that are armed for a sleep.
    asleep: u64,
    counters: Counters,
    warnings: Vec<Warning>,
}

impl std::fmt::Debug for UringStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringStore")
            .field("params", self.ring.params())
            .field("volumes", &self.volumes.iter().flatten().count())
            .field("in_flight", &self.in_flight())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl UringStore {
    /// A store for ops on `region`. Any thread may make it; the thread of the first [`Self::turn`]
    /// owns it.
    ///
    /// # Errors
    /// The kernel has no ring for us. What it merely lacks is in [`Self::warnings`].
    pub fn new(region: Arc<Region>, options: &UringOptions) -> Result<Self, StoreError> {
        // Room for every op and for a watch and an unwatch under every token.
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
        let door = Door::new().map_err(fail)?;
        let mut store = Self {
            enabled: false,
            no_iowait: ring.params().is_feature_no_iowait(),
            ring,
            region,
            pieces,
            zeroes,
            volumes: (0..options.volumes).map(|_| None).collect(),
            slots: (0..capacity).map(|_| Slot::idle()).collect(),
            free: (0..capacity).rev().collect(),
            done: Vec::with_capacity(capacity as usize),
            awaiting: Vec::with_capacity(capacity as usize),
            lost: Vec::new(),
            watches: (0..WATCHES).map(|_| Watch::default()).collect(),
            unarmed: false,
            asleep: 0,
            counters: Counters::default(),
            warnings,
            door,
        };
        // It is armed when something waits for the first time.
        store.add_watch(store.door.fd(), DOOR).map_err(fail)?;
        Ok(store)
    }

    /// What the store has to do without.
    #[must_use]
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Ops it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Puts a volume in.
    ///
    /// # Errors
    /// The place is taken or beyond the table, or the kernel refuses the file.
    pub fn add_volume(
        &mut self,
        index: VolumeIndex,
        backing: Arc<Backing>,
    ) -> Result<(), StoreError> {
        let volumes = u16::try_from(self.volumes.len()).unwrap_or(u16::MAX);
        let place = self.volumes.get_mut(usize::from(index.0));
        let place = place.ok_or(StoreError::TableFull { index: index.0, volumes })?;
        if let Some(other) = place {
            return Err(StoreError::Taken {
                index: index.0,
                path: other.backing.path().to_owned(),
            });
        }
        self.ring
            .submitter()
            .register_files_update(index.0.into(), &[backing.file().as_raw_fd()])
            .map_err(|source| StoreError::Register { path: backing.path().to_owned(), source })?;
        *place = Some(Volume { backing, ops: 0 });
        Ok(())
    }

    /// A backing of which this store has just learnt that writes were lost: told once, and by one
    /// store of the backing. Until the owner calls [`Backing::loss_noted`] its flushes may wait,
    /// see [`Losses`](super::Losses).
    pub fn take_lost(&mut self) -> Option<(VolumeIndex, Arc<Backing>)> {
        self.lost.pop()
    }

    /// Takes a volume out. Its ops must have ended; results not yet reaped may wait.
    ///
    /// # Errors
    /// There is none, or it has ops in the kernel.
    pub fn remove_volume(&mut self, index: VolumeIndex) -> Result<Arc<Backing>, StoreError> {
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
                if let Err(source) =
                    self.ring.submitter().register_files_update(index.0.into(), &[-1])
                {
                    let path = volume.backing.path().to_owned();
                    *place = Some(volume);
                    return Err(StoreError::Register { path, source });
                }
                Ok(volume.backing)
            }
        }
    }

    /// Hands everything submitted to the kernel, sleeps if asked to and if nothing is done yet, and
    /// collects what is done (for [`Store::reap`]) and what woke (added to `woken`). At most one
    /// `io_uring_enter`. What is still in `woken` or waits for `reap` counts as done already: there
    /// is no sleep on top of it.
    ///
    /// # Errors
    /// The ring is unusable, for example from a thread other than that of the first turn
    /// (`EEXIST`).
    pub fn turn(&mut self, wait: Wait, woken: &mut WatchSet) -> io::Result<()> {
        if !self.enabled {
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        self.arm_the_rest();
        let wait = match wait {
            // What finds no room is armed in the next turn; this one makes the room.
            Wait::Until(time) if !time.is_zero() && !self.arm_for_sleep() => Wait::No,
            wait => wait,
        };
        let busy = self.free.len() < self.slots.len();
        let (submitter, queue, completions) = self.ring.split();
        let queued = u32::try_from(queue.len()).unwrap_or(u32::MAX);
        let due = queue.taskrun() || queue.cq_overflow();
        let ready = !completions.is_empty() || !self.done.is_empty() || !woken.is_empty();
        drop((queue, completions));
        let sleep = match wait {
            Wait::Until(time) if !ready && !time.is_zero() => Some(time.min(LONGEST_SLEEP)),
            _ => None,
        };
        if queued > 0 || due || sleep.is_some() {
            self.counters.enters += 1;
            let mut flags = EnterFlags::GETEVENTS;
            let result = if let Some(time) = sleep {
                self.counters.sleeps += 1;
                flags |= EnterFlags::EXT_ARG;
                if self.no_iowait && !busy {
                    // Waiting for a peer is not waiting for a disk.
                    flags |= EnterFlags::NO_IOWAIT;
                }
                let time = Timespec::from(time);
                let args = SubmitArgs::new().timespec(&time);
                // SAFETY: the queued entries obey `push`; `args` is the extended argument EXT_ARG
                // announces and outlives the call, as does the time it points to.
                unsafe { submitter.enter(queued, 1, flags.bits(), Some(&args)) }
            } else {
                // SAFETY: the queued entries obey `push`; without EXT_ARG a null argument means no
                // signal mask.
                unsafe { submitter.enter::<libc::sigset_t>(queued, 0, flags.bits(), None) }
            };
            match result.map_err(|error| error.raw_os_error()) {
                // The time is over, a signal came, or the kernel wants completions collected or
                // memory back first: what was not taken is still queued.
                Ok(_)
                | Err(Some(
                    libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN | libc::ENOMEM,
                )) => {}
                Err(code) => return Err(code.map_or(Errno::EIO, Errno::from_raw).into()),
            }
        }
        // One at a time: handling one may queue entries.
        while let Some(entry) = { self.ring.completion().next() } {
            self.complete(&entry, woken);
        }
        if woken.take_door() {
            self.door.answer();
            self.look_at_syncs();
        }
        Ok(())
    }

    fn complete(&mut self, entry: &cqueue::Entry, woken: &mut WatchSet) {
        let user_data = entry.user_data();
        match user_data >> 56 {
            USER_OP => {
                let index = usize::try_from(user_data).unwrap_or(usize::MAX);
                if self.slots.get(index).is_some_and(|slot| slot.phase != Phase::Idle) {
                    self.advance(index, entry.result());
                }
            }
            USER_WATCH => self.woke(entry, woken),
            _ => {}
        }
    }

    // What the kernel said about a slot's entry.
    fn advance(&mut self, index: usize, result: i32) {
        let slot = &mut self.slots[index];
        let volume = self.volumes.get(usize::from(slot.op.volume.0)).and_then(Option::as_ref);
        let ended = match volume {
            Some(volume) => slot.advance(result, &volume.backing, &mut self.counters),
            None => Some(Err(Errno::ENXIO)),
        };
        match ended {
            Some(result) => self.ended(index, result),
            None => self.send(index),
        }
    }

    // The kernel has done a slot's part, or not.
    fn ended(&mut self, index: usize, result: Result<u32, Errno>) {
        let slot = &self.slots[index];
        match slot.phase {
            Phase::Sync(number) => self.sync_ended(index, number, result),
            _ if result.is_ok() && slot.owes_sync() => self.await_sync(index),
            _ => self.finish(index, result),
        }
    }

    // Queues the next entry of a slot.
    fn send(&mut self, index: usize) {
        let entry = self.slots[index].entry(&self.pieces, &self.zeroes);
        let sent = entry.is_some_and(|entry| {
            // SAFETY: the data is inside the region or the zero pages (`Region::pointer` checked),
            // both held by this store until the slot's completion or leaked by drop. No reference
            // to it exists anywhere: a region hands out none. A list of parts is in the slot, which
            // stays as it is until its completion (only that, or the end of the op, changes it) and
            // where it is (the heap memory of its `Vec`), or is leaked by drop.
            unsafe { self.push(&entry.user_data(USER_OP << 56 | index as u64)) }
        });
        if !sent {
            self.ended(index, Err(Errno::EIO));
        }
    }

    fn finish(&mut self, index: usize, result: Result<u32, Errno>) {
        let slot = &mut self.slots[index];
        slot.stop();
        let op = slot.op;
        if let Some(Some(volume)) = self.volumes.get_mut(usize::from(op.volume.0)) {
            volume.ops -= 1;
        }
        self.free.push(u32::try_from(index).unwrap_or(0));
        self.record(&op, result);
    }

    fn record(&mut self, op: &Op, result: Result<u32, Errno>) {
        self.counters.count(&op.kind, result);
        self.done.push(OpDone { token: op.token, result });
    }

    // Queues an entry. False when the queue stays full even after offering it to the kernel.
    //
    // SAFETY: the caller vouches that memory the entry names is valid until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: passed on from the caller.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return true;
        }
        // Only watches put on and off many times within one turn come here.
        self.counters.enters += 1;
        // SAFETY: passed on from the caller.
        self.ring.submit().is_ok() && unsafe { self.ring.submission().push(entry) }.is_ok()
    }
}

impl Store for UringStore {
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op> {
        if self.in_flight() >= self.slots.len() {
            return Err(op);
        }
        let volume = self.volumes.get_mut(usize::from(op.volume.0)).and_then(Option::as_mut);
        let backing = volume.as_ref().map(|volume| volume.backing.as_ref());
        if let Some(result) = refusal(backing, self.region.len(), &op.kind, memory) {
            self.record(&op, result);
            return Ok(());
        }
        let Some(volume) = volume else { return Err(op) };
        let Some(phase) = Phase::first(&op.kind, &volume.backing) else {
            self.record(&op, Err(Errno::EOPNOTSUPP));
            return Ok(());
        };
        let Some(index) = self.free.pop() else { return Err(op) };
        volume.ops += 1;
        let has_own_fua = volume.backing.has_own_fua();
        let index = index as usize;
        let started = self.slots[index].start(op, phase, has_own_fua, &self.region, memory);
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
        self.slots.len() - self.free.len() + self.done.len()
    }
}

impl Drop for UringStore {
    fn drop(&mut self) {
        let deadline = Instant::now() + DRAIN;
        let mut woken = WatchSet::default();
        while self.free.len() < self.slots.len() {
            self.done.clear();
            woken.clear();
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.turn(Wait::Until(left), &mut woken).is_err() {
                break;
            }
        }
        for volume in self.volumes.iter().flatten() {
            volume.backing.syncs().leave(&self.door);
        }
        if self.free.len() < self.slots.len() {
            // The kernel may still write to this memory and still works on these files. The lists
            // in the slots it has copied when it took the entries, but nothing is lost by not
            // relying on that.
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(Arc::clone(&self.region));
            std::mem::forget(Arc::clone(&self.zeroes));
            for volume in self.volumes.iter().flatten().filter(|volume| volume.ops > 0) {
                std::mem::forget(Arc::clone(&volume.backing));
            }
        } else if self.volumes.iter().any(Option::is_some) {
            // The kernel takes a ring apart in the background. Without this the files would stay
            // open until then, and a claimed device claimed.
            let _ = self.ring.submitter().unregister_files();
        }
    }
}
