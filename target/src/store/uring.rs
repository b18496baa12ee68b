//! [`UringStore`]: one io_uring that is both the file I/O of a data thread and its only sleeping place.
//!
//! A turn of the thread is: submit ops, [`UringStore::turn`], reap. The turn enters the kernel at most once,
//! and not at all when there is nothing to submit and the flags the kernel keeps in the ring show nothing to
//! collect. Watched descriptors (completion channel, mailbox) end the same sleep as I/O does.
//!
//! Invariants:
//!
//! - An op has at most one entry in the kernel at a time. The submission queue has room for all ops and
//!   watches at once, and the completion queue is twice as large, so neither is full in normal operation.
//! - The memory an entry points to (the region, the zero pages) is held by this store until the kernel has
//!   answered; a store dropped while the kernel does not answer leaks that memory rather than freeing it.
//! - With `DEFER_TASKRUN` nothing completes unless we enter; `TASKRUN_FLAG` is what tells us to. One without
//!   the other would poll for ever.
//! - The ring is made disabled and is enabled by the first turn: the thread of that turn becomes its only
//!   issuer, whoever made it. From then on volumes and watches are for that thread too.

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};
use nix::errno::Errno;
use rblk_fabric::{PageKind, Region};

use super::backing::{Backing, Method};
use super::{Op, OpDone, OpKind, OpToken, Store, StoreError, VolumeIndex, refusal};
use crate::arena::MAX_EXTENT_BYTES;

/// Most ops a store can be made for; the ring then has 32768 entries, the kernel's limit.
pub const MAX_CAPACITY: u32 = 16384;

/// Descriptors a store can watch; tokens are below this.
pub const MAX_WATCHES: u8 = 64;

// The kernel takes at most 1 GiB as one registered buffer. Extents are aligned to their own length, which
// divides this, so no extent crosses from one piece into the next.
const PIECE: usize = 1 << 30;
const _: () = assert!(PIECE.is_multiple_of(MAX_EXTENT_BYTES as usize));

// Bytes zeroed by one write where nothing better works.
const ZERO_CHUNK: u32 = 1 << 20;

// Discard and zeroing advance to multiples of this: file systems hold the inode's lock for the whole of a
// fallocate, and other I/O on the file waits for it.
const RANGE_STEP: u64 = 1 << 30;

// How often one op is sent again when the kernel says EAGAIN or EINTR, before that becomes its result.
const RETRIES: u32 = 1000;

// The kernel's time is signed; nobody tells this from for ever.
const LONGEST_SLEEP: Duration = Duration::from_secs(1 << 30);

// How long dropping a store waits for the kernel.
const DRAIN: Duration = Duration::from_secs(5);

// BLOCK_URING_CMD_DISCARD: _IO(0x12, 0) of linux/blkdev.h.
const BLOCK_DISCARD: u32 = 0x1200;

// The top byte of an entry's user data says whose it is.
const USER_OP: u64 = 0;
const USER_WATCH: u64 = 1;
const USER_NOBODY: u64 = 2;

/// How to make a [`UringStore`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UringOptions {
    /// Ops that can be in flight, at most [`MAX_CAPACITY`].
    pub capacity: u32,
    /// Places for volumes. Each costs one of the descriptors `RLIMIT_NOFILE` allows.
    pub volumes: u16,
    /// Bytes of the region to register as fixed buffers; all of it when `None`. I/O elsewhere in the region
    /// works, a little slower.
    pub registered: Option<Range<usize>>,
}

impl Default for UringOptions {
    /// 1024 ops, 64 volumes, all of the region.
    fn default() -> Self {
        Self { capacity: 1024, volumes: 64, registered: None }
    }
}

/// Something the store works without, but better with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// The kernel would not register the region.
    #[error(
        "cannot register {bytes} bytes of memory with io_uring ({errno}); I/O works, but maps its memory every time; \
         raise LimitMEMLOCK (ulimit -l)"
    )]
    PlainBuffers {
        /// Bytes that were to be registered.
        bytes: usize,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The kernel is older than 6.1.
    #[error(
        "the kernel has no IORING_SETUP_DEFER_TASKRUN (Linux 6.1); completions may interrupt the data thread"
    )]
    NoDeferredCompletions,
}

/// How long a turn may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until something is done or woken, at most this long. It does not sleep when something already is.
    Until(Duration),
}

/// Names a watched descriptor; below [`MAX_WATCHES`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WatchToken(pub u8);

/// A set of watched descriptors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WatchSet(u64);

impl WatchSet {
    /// Whether it is in the set.
    #[must_use]
    pub fn contains(&self, token: WatchToken) -> bool {
        token.0 < MAX_WATCHES && self.0 >> token.0 & 1 == 1
    }

    /// Whether nothing is in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.0 = 0;
    }

    fn insert(&mut self, token: u8) {
        self.0 |= 1 << token;
    }
}

/// What a store has done since it was made. Ops are counted when they end, bytes only when they end well.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Those of them that were allowed to sleep.
    pub sleeps: u64,
    /// Reads.
    pub reads: u64,
    /// Writes, with FUA or without.
    pub writes: u64,
    /// Writes with FUA.
    pub fua_writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Write-zeroes.
    pub write_zeroes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes discarded.
    pub discarded_bytes: u64,
    /// Bytes zeroed.
    pub zeroed_bytes: u64,
    /// Ops that ended with an error, refused ones included.
    pub errors: u64,
    /// Reads and writes the kernel did only a part of, each time.
    pub short: u64,
    /// Entries sent again after EAGAIN or EINTR.
    pub retried: u64,
    /// Watches that ended with an error.
    pub watch_errors: u64,
}

#[derive(Debug)]
struct Volume {
    backing: Arc<Backing>,
    // Slots in use by it.
    ops: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Idle,
    Transfer,
    Sync,
    Change(Method),
}

// An op from submit to its last completion.
#[derive(Clone, Copy, Debug)]
struct Slot {
    op: Op,
    phase: Phase,
    // Bytes finished.
    progress: u64,
    // Bytes the entry in the kernel covers, for the entries whose result does not say.
    step: u64,
    retries: u32,
}

#[derive(Debug, Default)]
struct Watch {
    // Our own duplicate: arming again must find the same file whatever the owner did with the number.
    fd: Option<OwnedFd>,
    armed: bool,
    // Tells late completions of an earlier watch under the same token.
    generation: u32,
}

/// The io_uring engine. See the module.
pub struct UringStore {
    // First, so that it is dropped before the memory it uses.
    ring: IoUring,
    enabled: bool,
    no_iowait: bool,
    region: Arc<Region>,
    registered: Range<usize>,
    zeroes: Arc<Region>,
    volumes: Box<[Option<Volume>]>,
    slots: Box<[Slot]>,
    free: Vec<u32>,
    done: Vec<OpDone>,
    watches: Box<[Watch]>,
    // Watches to arm again; room in the queue permitting.
    unarmed: bool,
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
    /// A store for ops on `region`. Any thread may make it; the thread of the first [`Self::turn`] owns it.
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
        let registered = match register_buffers(&ring, &region, wanted.clone()) {
            Ok(()) => wanted,
            Err(errno) => {
                warnings.push(Warning::PlainBuffers { bytes: wanted.len(), errno });
                0..0
            }
        };
        let idle = Op { token: OpToken(0), volume: VolumeIndex(0), kind: OpKind::Flush };
        let idle = Slot { op: idle, phase: Phase::Idle, progress: 0, step: 0, retries: 0 };
        Ok(Self {
            enabled: false,
            no_iowait: ring.params().is_feature_no_iowait(),
            ring,
            region,
            registered,
            zeroes,
            volumes: (0..options.volumes).map(|_| None).collect(),
            slots: vec![idle; capacity as usize].into_boxed_slice(),
            free: (0..capacity).rev().collect(),
            done: Vec::with_capacity(capacity as usize),
            watches: (0..MAX_WATCHES).map(|_| Watch::default()).collect(),
            unarmed: false,
            counters: Counters::default(),
            warnings,
        })
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

    /// Wakes [`Self::turn`] when `fd` becomes readable, until [`Self::unwatch`]. Level at first (something
    /// already there wakes at once), edges from then on: whoever is woken must read until nothing is left
    /// before the next sleep. The descriptor is duplicated.
    ///
    /// # Errors
    /// The token is too large or in use, or the descriptor cannot be duplicated.
    pub fn watch(&mut self, fd: RawFd, token: WatchToken) -> io::Result<()> {
        let watch =
            self.watches.get_mut(usize::from(token.0)).ok_or(io::ErrorKind::InvalidInput)?;
        if watch.fd.is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // SAFETY: duplicating a number that is not an open descriptor fails with EBADF.
        let copy = Errno::result(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) })?;
        // SAFETY: the call has just made this descriptor and nothing else knows it.
        watch.fd = Some(unsafe { OwnedFd::from_raw_fd(copy) });
        watch.armed = false;
        watch.generation = watch.generation.wrapping_add(1);
        self.arm(token.0);
        Ok(())
    }

    /// Ends a watch; does nothing when there is none. A turn may still report it once.
    pub fn unwatch(&mut self, token: WatchToken) {
        let Some(watch) = self.watches.get_mut(usize::from(token.0)) else { return };
        if watch.fd.take().is_some() && watch.armed {
            watch.armed = false;
            let armed = watch_user_data(token.0, watch.generation);
            let remove = opcode::PollRemove::new(armed).build().user_data(USER_NOBODY << 56);
            // SAFETY: the entry names no memory.
            unsafe { self.push(&remove) };
        }
    }

    /// Hands everything submitted to the kernel, sleeps if asked to and if nothing is done yet, and collects
    /// what is done (for [`Store::reap`]) and what woke (added to `woken`). At most one `io_uring_enter`.
    /// What is still in `woken` or waits for `reap` counts as done already: there is no sleep on top of it.
    ///
    /// # Errors
    /// The ring is unusable, for example from a thread other than that of the first turn (`EEXIST`).
    pub fn turn(&mut self, wait: Wait, woken: &mut WatchSet) -> io::Result<()> {
        if !self.enabled {
            self.ring.submitter().register_enable_rings()?;
            self.enabled = true;
        }
        if self.unarmed {
            self.unarmed = false;
            (0..MAX_WATCHES).for_each(|token| self.arm(token));
        }
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
                // SAFETY: the queued entries obey `push`; `args` is the extended argument EXT_ARG announces
                // and outlives the call, as does the time it points to.
                unsafe { submitter.enter(queued, 1, flags.bits(), Some(&args)) }
            } else {
                // SAFETY: the queued entries obey `push`; without EXT_ARG a null argument means no signal mask.
                unsafe { submitter.enter::<libc::sigset_t>(queued, 0, flags.bits(), None) }
            };
            match result.map_err(|error| error.raw_os_error()) {
                // The time is over, a signal came, or the kernel wants completions collected or memory
                // back first: what was not taken is still queued.
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
            USER_WATCH => {
                let [token, ..] = user_data.to_le_bytes();
                let Some(watch) = self.watches.get_mut(usize::from(token)) else { return };
                if watch.fd.is_none() || watch_user_data(token, watch.generation) != user_data {
                    return;
                }
                woken.insert(token);
                if entry.result() < 0 {
                    // Arming again would fail again; the owner is told and will find out by reading.
                    self.counters.watch_errors += 1;
                    watch.armed = false;
                } else if !cqueue::more(entry.flags()) {
                    watch.armed = false;
                    self.arm(token);
                }
            }
            _ => {}
        }
    }

    fn arm(&mut self, token: u8) {
        let watch = &mut self.watches[usize::from(token)];
        let Some(fd) = watch.fd.as_ref().filter(|_| !watch.armed) else { return };
        let events = u32::try_from(libc::POLLIN).unwrap_or(1);
        let poll = opcode::PollAdd::new(Fd(fd.as_raw_fd()), events)
            .multi(true)
            .build()
            .user_data(watch_user_data(token, watch.generation));
        watch.armed = true;
        // SAFETY: the entry names no memory.
        if !unsafe { self.push(&poll) } {
            self.watches[usize::from(token)].armed = false;
            self.unarmed = true;
        }
    }

    // What the kernel said about a slot's entry.
    fn advance(&mut self, index: usize, result: i32) {
        let slot = &mut self.slots[index];
        let Some(volume) = self.volumes.get(usize::from(slot.op.volume.0)).and_then(Option::as_ref)
        else {
            return self.finish(index, Err(Errno::ENXIO));
        };
        let (_, len) = slot.op.kind.range();
        let Ok(bytes) = u32::try_from(result) else {
            let errno = Errno::from_raw(result.wrapping_neg());
            if matches!(errno, Errno::EAGAIN | Errno::EINTR) && slot.retries < RETRIES {
                slot.retries += 1;
                self.counters.retried += 1;
            } else if let Phase::Change(method) = slot.phase
                && method.is_refused_by(errno)
            {
                volume.backing.refuse(method);
                match method_for(&slot.op.kind, &volume.backing) {
                    Some(next) => slot.phase = Phase::Change(next),
                    None => return self.finish(index, Err(Errno::EOPNOTSUPP)),
                }
            } else {
                return self.finish(index, Err(errno));
            }
            return self.send(index);
        };
        let counted = matches!(slot.phase, Phase::Transfer | Phase::Change(Method::WriteZeroes));
        let moved = if counted { u64::from(bytes).min(slot.step) } else { slot.step };
        slot.progress += moved;
        if slot.progress >= len {
            let bytes =
                if slot.phase == Phase::Transfer { u32::try_from(len).unwrap_or(0) } else { 0 };
            return self.finish(index, Ok(bytes));
        }
        if counted && moved < slot.step {
            self.counters.short += 1;
            // The end of the file: nothing more, or direct I/O that stopped where it may not go on.
            if moved == 0 || !moved.is_multiple_of(volume.backing.alignment().into()) {
                return self.finish(index, Err(Errno::EIO));
            }
        }
        self.send(index);
    }

    // Queues the next entry of a slot.
    fn send(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let file = Fixed(slot.op.volume.0.into());
        let done = slot.progress;
        let entry = match (slot.phase, slot.op.kind) {
            (Phase::Transfer, OpKind::Read { offset, extent_offset, len }) => {
                slot.step = u64::from(len) - done;
                let (at, bytes) = rest(extent_offset, len, done);
                self.region.pointer(at, bytes as usize).map(|to| {
                    match piece(&self.registered, at, bytes) {
                        Some(piece) => opcode::ReadFixed::new(file, to.as_ptr(), bytes, piece)
                            .offset(offset + done)
                            .build(),
                        None => opcode::Read::new(file, to.as_ptr(), bytes)
                            .offset(offset + done)
                            .build(),
                    }
                })
            }
            (Phase::Transfer, OpKind::Write { offset, extent_offset, len, fua }) => {
                slot.step = u64::from(len) - done;
                let (at, bytes) = rest(extent_offset, len, done);
                let flags = if fua { libc::RWF_DSYNC } else { 0 };
                self.region.pointer(at, bytes as usize).map(|from| {
                    match piece(&self.registered, at, bytes) {
                        Some(piece) => opcode::WriteFixed::new(file, from.as_ptr(), bytes, piece)
                            .offset(offset + done)
                            .rw_flags(flags)
                            .build(),
                        None => opcode::Write::new(file, from.as_ptr(), bytes)
                            .offset(offset + done)
                            .rw_flags(flags)
                            .build(),
                    }
                })
            }
            (Phase::Change(method), kind) => {
                let (offset, len) = kind.range();
                let (at, left) = (offset + done, len - done);
                match method {
                    Method::WriteZeroes => {
                        let bytes = u32::try_from(left).unwrap_or(u32::MAX).min(ZERO_CHUNK);
                        slot.step = bytes.into();
                        self.zeroes.pointer(0, bytes as usize).map(|from| {
                            opcode::Write::new(file, from.as_ptr(), bytes).offset(at).build()
                        })
                    }
                    Method::BlockDiscard => {
                        slot.step = left.min(RANGE_STEP - at % RANGE_STEP);
                        // The start goes into `addr`, the length into `addr3`, which is where `cmd` begins.
                        let mut cmd = [0; 16];
                        cmd[..8].copy_from_slice(&slot.step.to_ne_bytes());
                        Some(
                            opcode::UringCmd16::new(file, BLOCK_DISCARD)
                                .addr(Some(at))
                                .cmd(cmd)
                                .build(),
                        )
                    }
                    Method::PunchHole | Method::ZeroRange => {
                        slot.step = left.min(RANGE_STEP - at % RANGE_STEP);
                        let mode = method.fallocate_mode().bits();
                        Some(opcode::Fallocate::new(file, slot.step).offset(at).mode(mode).build())
                    }
                }
            }
            (Phase::Sync, _) => Some(opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build()),
            (Phase::Idle | Phase::Transfer, _) => None,
        };
        let sent = entry.is_some_and(|entry| {
            // SAFETY: the memory is inside the region or the zero pages (`pointer` checked), both held by
            // this store until the slot's completion or leaked by drop. No reference to it exists anywhere:
            // a region hands out none.
            unsafe { self.push(&entry.user_data(USER_OP << 56 | index as u64)) }
        });
        if !sent {
            self.finish(index, Err(Errno::EIO));
        }
    }

    fn finish(&mut self, index: usize, result: Result<u32, Errno>) {
        let slot = &mut self.slots[index];
        slot.phase = Phase::Idle;
        let op = slot.op;
        if let Some(Some(volume)) = self.volumes.get_mut(usize::from(op.volume.0)) {
            volume.ops -= 1;
        }
        self.free.push(u32::try_from(index).unwrap_or(0));
        self.record(&op, result);
    }

    fn record(&mut self, op: &Op, result: Result<u32, Errno>) {
        let counters = &mut self.counters;
        let (_, len) = op.kind.range();
        let (ops, bytes) = match op.kind {
            OpKind::Read { .. } => (&mut counters.reads, &mut counters.read_bytes),
            OpKind::Write { fua, .. } => {
                counters.fua_writes += u64::from(fua);
                (&mut counters.writes, &mut counters.written_bytes)
            }
            OpKind::Flush => (&mut counters.flushes, &mut 0),
            OpKind::Discard { .. } => (&mut counters.discards, &mut counters.discarded_bytes),
            OpKind::WriteZeroes { .. } => (&mut counters.write_zeroes, &mut counters.zeroed_bytes),
        };
        *ops += 1;
        match result {
            Ok(_) => *bytes += len,
            Err(_) => counters.errors += 1,
        }
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
    fn submit(&mut self, op: Op) -> Result<(), Op> {
        if self.in_flight() >= self.slots.len() {
            return Err(op);
        }
        let volume = self.volumes.get_mut(usize::from(op.volume.0)).and_then(Option::as_mut);
        let backing = volume.as_ref().map(|volume| volume.backing.as_ref());
        if let Some(result) = refusal(backing, self.region.len(), &op.kind) {
            self.record(&op, result);
            return Ok(());
        }
        let Some(volume) = volume else { return Err(op) };
        let phase = match op.kind {
            OpKind::Read { .. } | OpKind::Write { .. } => Phase::Transfer,
            OpKind::Flush => Phase::Sync,
            OpKind::Discard { .. } | OpKind::WriteZeroes { .. } => {
                let Some(method) = method_for(&op.kind, &volume.backing) else {
                    self.record(&op, Err(Errno::EOPNOTSUPP));
                    return Ok(());
                };
                Phase::Change(method)
            }
        };
        let Some(index) = self.free.pop() else { return Err(op) };
        volume.ops += 1;
        self.slots[index as usize] = Slot { op, phase, progress: 0, step: 0, retries: 0 };
        self.send(index as usize);
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
        if self.free.len() < self.slots.len() {
            // The kernel may still write to this memory and still works on these files.
            std::mem::forget(Arc::clone(&self.region));
            std::mem::forget(Arc::clone(&self.zeroes));
            for volume in self.volumes.iter().flatten().filter(|volume| volume.ops > 0) {
                std::mem::forget(Arc::clone(&volume.backing));
            }
        } else if self.volumes.iter().any(Option::is_some) {
            // The kernel takes a ring apart in the background. Without this the files would stay open until
            // then, and a claimed device claimed.
            let _ = self.ring.submitter().unregister_files();
        }
    }
}

fn method_for(kind: &OpKind, backing: &Backing) -> Option<Method> {
    match *kind {
        OpKind::Discard { .. } => backing.discard_method(),
        OpKind::WriteZeroes { may_unmap, .. } => Some(backing.zero_method(may_unmap)),
        OpKind::Read { .. } | OpKind::Write { .. } | OpKind::Flush => None,
    }
}

// What is left of a transfer: place in the region and bytes.
fn rest(extent_offset: usize, len: u32, done: u64) -> (usize, u32) {
    // `done` is below `len`: a finished transfer is not sent again.
    let done = u32::try_from(done).unwrap_or(len).min(len);
    (extent_offset + done as usize, len - done)
}

// The registered buffer a range of the region lies in, if it lies in one.
fn piece(registered: &Range<usize>, at: usize, bytes: u32) -> Option<u16> {
    if at < registered.start || at + bytes as usize > registered.end {
        return None;
    }
    let first = (at - registered.start) / PIECE;
    let last = (at + bytes as usize - 1 - registered.start) / PIECE;
    u16::try_from(first).ok().filter(|_| first == last)
}

fn watch_user_data(token: u8, generation: u32) -> u64 {
    USER_WATCH << 56 | u64::from(generation) << 8 | u64::from(token)
}

// Completions wait until we ask: Linux 6.1.
fn deferred(entries: u32) -> io::Result<IoUring> {
    IoUring::builder()
        .setup_r_disabled()
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries)
}

// Completions wait until we enter the kernel for any reason: Linux 5.19.
pub(super) fn cooperative(entries: u32) -> io::Result<IoUring> {
    IoUring::builder()
        .setup_r_disabled()
        .setup_submit_all()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .build(entries)
}

fn register_file_table(ring: &IoUring, volumes: u16) -> io::Result<()> {
    if volumes == 0 {
        return Ok(());
    }
    ring.submitter().register_files_sparse(volumes.into())
}

fn register_buffers(ring: &IoUring, region: &Region, range: Range<usize>) -> Result<(), Errno> {
    let pieces: Vec<libc::iovec> = range
        .clone()
        .step_by(PIECE)
        .filter_map(|start| {
            let len = PIECE.min(range.end - start);
            let base = region.pointer(start, len)?;
            Some(libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len })
        })
        .collect();
    if pieces.is_empty() {
        return Ok(());
    }
    // SAFETY: every piece is inside the region (`pointer` checked), which the store holds until the ring is
    // gone; the kernel pins the pages, so even then nobody else gets them.
    unsafe { ring.submitter().register_buffers(&pieces) }
        .map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}
