//! [`Queue`]: the data side of one hardware queue, owned by one thread.
//!
//! A tag is with the kernel (a fetch is queued or pending) or with the caller (a request was delivered and
//! not completed yet). `fetch_all` gives every tag to the kernel; an [`Event::Request`] gives one to the
//! caller; `complete` gives it back. The driver copies data in this thread only: write data before a
//! request is delivered, read data while a completion is submitted. So a buffer belongs to the caller
//! exactly while the tag does, and to nobody once the queue is dropped.
//!
//! The ring also carries polls of other descriptors (a completion channel, an eventfd), so that a thread
//! has one place to sleep in.

use std::io;
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::abi::{self, IoCmd, IoDesc};
use super::buffers::Buffers;
use super::device::{CharNode, QueueConfig};
use super::error::{Result, UblkError};
use super::request::BlockRequest;

/// Descriptors one queue can watch.
pub const MAX_WATCHES: u8 = 8;

/// The char node is file 0 of the ring's table: no reference count is touched per command.
const NODE: types::Fixed = types::Fixed(0);

/// Upper bits of `user_data`: what the completion is of. Lower bits: tag, or watch slot and generation.
const KIND_WATCH: u64 = 1 << 62;
const KIND_UNWATCH: u64 = 1 << 63;
const KIND_MASK: u64 = KIND_WATCH | KIND_UNWATCH;

const POLL_READ: u32 = libc::POLLIN.cast_unsigned() as u32;
const POLL_ENDED: i32 = (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) as i32;

/// The caller's name for a watched descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WatchToken(pub u32);

/// How long a turn may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Not at all; a turn with nothing to submit and nothing to reap makes no system call.
    No,
    /// Until something completes, or this long.
    For(Duration),
}

/// What a turn found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A request; its tag and buffer are the caller's until [`Queue::complete`].
    Request(u16, BlockRequest),
    /// A watched descriptor became readable, or was hung up. Edge-like: read until it would block.
    Watch(WatchToken),
    /// A watched descriptor cannot be watched any more (errno); its place is free.
    WatchEnded(WatchToken, i32),
    /// Sent once: the disk is being stopped or parked. Answer what is held; the queue is
    /// [down](Queue::is_down) after that and can be dropped.
    Stopping,
    /// The driver refused a command (errno). The tag is lost until the device is recovered; any of its
    /// requests hangs. Not seen with a correct caller.
    TagLost(u16, i32),
}

/// How the kernel runs this ring's completions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RingMode {
    /// In this thread's turns only (DEFER_TASKRUN): the normal way, from 6.1 on.
    Deferred,
    /// In any of this thread's system calls (COOP_TASKRUN): where the other is refused.
    Cooperative,
}

/// Counters of a queue. Plain numbers: the owner copies them out where others can see them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueStats {
    /// System calls made.
    pub enters: u64,
    /// Those that were allowed to sleep.
    pub sleeps: u64,
    /// System calls the kernel cut short (no memory, or a full completion queue); nothing is lost by one.
    pub retries: u64,
    /// Requests delivered.
    pub fetched: u64,
    /// Completions queued.
    pub committed: u64,
    /// Descriptors that were no request, answered here.
    pub rejected: u64,
    /// Watch events delivered.
    pub watched: u64,
}

/// Who has a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Holder {
    /// Nobody: never fetched, aborted or lost.
    None,
    /// The kernel.
    Kernel,
    /// The caller, with a request that has data (of so many bytes) or not.
    Caller { data_len: u32, has_data: bool },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WatchState {
    Free,
    Armed,
    Removing,
}

#[derive(Clone, Copy, Debug)]
struct Watch {
    state: WatchState,
    fd: RawFd,
    token: WatchToken,
    generation: u32,
}

/// The data side of a hardware queue. Lives and dies on the thread that made it.
pub struct Queue {
    // Dropped first: with the ring go all commands of this queue, before the memory they name.
    ring: IoUring,
    descriptors: Descriptors,
    buffers: Buffers,
    holders: Box<[Holder]>,
    watches: [Watch; MAX_WATCHES as usize],
    generation: u32,
    mode: RingMode,
    queue_id: u16,
    max_io_bytes: u32,
    with_kernel: u16,
    with_caller: u16,
    stopping: bool,
    stats: QueueStats,
    _node: Arc<CharNode>,
    // The driver takes a tag's commands from one thread only, and so does a single-issuer ring.
    _one_thread: PhantomData<*mut ()>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("queue_id", &self.queue_id)
            .field("mode", &self.mode)
            .field("with_kernel", &self.with_kernel)
            .field("with_caller", &self.with_caller)
            .field("stopping", &self.stopping)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl Queue {
    /// Makes the queue of the calling thread. Allocates all it ever needs.
    ///
    /// # Errors
    /// The buffers do not fit the queue, io_uring is refused, or the char node cannot be mapped.
    pub fn new(config: &QueueConfig, buffers: Buffers) -> Result<Self> {
        let QueueConfig { node, queue_id, depth, max_io_bytes } = config;
        if buffers.count() < *depth || buffers.stride() < *max_io_bytes as usize {
            return Err(UblkError::Invalid {
                name: "buffers",
                value: buffers.count().into(),
                rule: "a queue needs one buffer per tag, each of the device's buffer size",
            });
        }
        let (ring, mode) = build_ring(*depth)?;
        ring.submitter()
            .register_files(&[node.raw_fd()])
            .map_err(|e| UblkError::system("registering the ublk char node with io_uring", e))?;
        let descriptors = Descriptors::map(node, *queue_id, *depth)?;
        let free = Watch { state: WatchState::Free, fd: -1, token: WatchToken(0), generation: 0 };
        Ok(Self {
            ring,
            descriptors,
            buffers,
            holders: vec![Holder::None; usize::from(*depth)].into_boxed_slice(),
            watches: [free; MAX_WATCHES as usize],
            generation: 0,
            mode,
            queue_id: *queue_id,
            max_io_bytes: *max_io_bytes,
            with_kernel: 0,
            with_caller: 0,
            stopping: false,
            stats: QueueStats::default(),
            _node: Arc::clone(node),
            _one_thread: PhantomData,
        })
    }

    /// Which hardware queue.
    #[must_use]
    pub fn queue_id(&self) -> u16 {
        self.queue_id
    }

    /// Number of tags.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.descriptors.depth
    }

    /// How the ring works here.
    #[must_use]
    pub fn mode(&self) -> RingMode {
        self.mode
    }

    /// Where the data is.
    #[must_use]
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.stats
    }

    /// Requests the caller holds.
    #[must_use]
    pub fn held(&self) -> u16 {
        self.with_caller
    }

    /// The disk is being stopped or parked.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Nothing is left to do: stopping, no request held, every completion submitted. Drop the queue.
    #[must_use]
    pub fn is_down(&mut self) -> bool {
        self.stopping && self.with_caller == 0 && self.ring.submission().is_empty()
    }

    /// Queues the first fetch of every tag. The next turn submits them, and makes this thread the one that
    /// serves the queue. Once per queue; later calls do nothing.
    pub fn fetch_all(&mut self) {
        for tag in 0..self.depth() {
            if self.holders[usize::from(tag)] == Holder::None && !self.stopping {
                self.push_io(abi::IO_FETCH_REQ, tag, 0);
            }
        }
    }

    /// Answers a request and fetches the tag's next one: bytes moved for a read or write, 0 (or anything
    /// positive) for the rest, a negative errno for a failure. The next turn submits it.
    ///
    /// Fewer bytes than asked for are whole sectors of a partial success: the kernel sends the rest as a
    /// new request. None at all is EIO, since the kernel would try for ever. More is cut down.
    ///
    /// # Errors
    /// The caller does not hold the tag. Nothing happens.
    #[inline]
    pub fn complete(&mut self, tag: u16, result: i32) -> Result<()> {
        let Some(Holder::Caller { data_len, has_data }) =
            self.holders.get(usize::from(tag)).copied()
        else {
            return Err(UblkError::NotOwned { queue_id: self.queue_id, tag });
        };
        self.with_caller -= 1;
        self.stats.committed += 1;
        self.push_io(abi::IO_COMMIT_AND_FETCH_REQ, tag, driver_result(result, data_len, has_data));
        Ok(())
    }

    /// Adds a descriptor to what wakes this thread. Interest is in reading.
    ///
    /// The caller keeps `fd` open until it has been [unwatched](Self::unwatch) and a turn has gone by.
    ///
    /// # Errors
    /// All places are taken, or the token is.
    pub fn watch(&mut self, fd: RawFd, token: WatchToken) -> Result<()> {
        let taken = |w: &Watch| w.state != WatchState::Free;
        let refuse = |reason| Err(UblkError::CannotWatch { queue_id: self.queue_id, reason });
        if self.watches.iter().any(|w| w.state == WatchState::Armed && w.token == token) {
            return refuse("the token is in use");
        }
        let Some(slot) = self.watches.iter().position(|w| !taken(w)) else {
            return refuse("all places are taken");
        };
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        self.watches[slot] = Watch { state: WatchState::Armed, fd, token, generation };
        self.arm(slot);
        Ok(())
    }

    /// Takes a descriptor off again; its place is free after the next turn. Unknown tokens are ignored.
    pub fn unwatch(&mut self, token: WatchToken) {
        let found =
            self.watches.iter().position(|w| w.state == WatchState::Armed && w.token == token);
        if let Some(slot) = found {
            self.watches[slot].state = WatchState::Removing;
            let target = self.watch_data(slot);
            // POLL_REMOVE leaves a poll alone that is just being woken (EALREADY), as one of a dying path is; it would
            // keep its place for ever. A cancellation ends it whatever it is doing.
            let entry = opcode::AsyncCancel::new(target).build().user_data(KIND_UNWATCH);
            self.push(&entry);
        }
    }

    /// A turn would enter the kernel: commands are queued, or the kernel has completions to hand over.
    /// A look at shared memory.
    #[inline]
    #[must_use]
    pub fn needs_enter(&mut self) -> bool {
        let queue = self.ring.submission();
        !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    /// A turn without waiting would do something. A look at shared memory.
    #[inline]
    #[must_use]
    pub fn is_ready(&mut self) -> bool {
        self.needs_enter() || !self.ring.completion().is_empty()
    }

    /// One turn: at most one system call, which submits everything queued and sleeps if `wait` says so and
    /// nothing is there yet; then every event goes to `sink`. Returns the number of events.
    ///
    /// To complete requests while taking events, call [`enter`](Self::enter) and then
    /// [`next_event`](Self::next_event) until it has none.
    ///
    /// # Errors
    /// [`UblkError::Enter`]: the ring is unusable, the queue has to be dropped.
    #[inline]
    pub fn turn(&mut self, wait: Wait, mut sink: impl FnMut(Event)) -> Result<usize> {
        self.enter(wait)?;
        let mut events = 0;
        while let Some(event) = self.next_event() {
            events += 1;
            sink(event);
        }
        Ok(events)
    }

    /// The system call of a turn, if one is needed.
    ///
    /// # Errors
    /// [`UblkError::Enter`]: the ring is unusable, the queue has to be dropped.
    #[inline]
    pub fn enter(&mut self, wait: Wait) -> Result<()> {
        let entered = match wait {
            Wait::For(time) if !time.is_zero() && self.ring.completion().is_empty() => {
                let timespec = types::Timespec::from(time);
                let args = types::SubmitArgs::new().timespec(&timespec);
                self.stats.sleeps += 1;
                self.ring.submitter().submit_with_args(1, &args)
            }
            _ if self.needs_enter() => self.ring.submitter().submit(),
            _ => return Ok(()),
        };
        self.stats.enters += 1;
        match entered {
            Ok(_) => Ok(()),
            Err(source) => match source.raw_os_error() {
                // Time is up, or a signal: both are ordinary ends of a sleep.
                Some(libc::ETIME | libc::EINTR) => Ok(()),
                // No memory for a request, or completions to reap first. What was not taken stays queued.
                Some(libc::EAGAIN | libc::EBUSY) => {
                    self.stats.retries += 1;
                    Ok(())
                }
                _ => Err(UblkError::Enter { queue_id: self.queue_id, source }),
            },
        }
    }

    /// The next event that is in the completion queue already.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            let entry = self.ring.completion().next()?;
            let event = match entry.user_data() & KIND_MASK {
                0 => self.io_event(entry.user_data(), entry.result()),
                KIND_WATCH => self.watch_event(&entry),
                _ => None,
            };
            if event.is_some() {
                return event;
            }
        }
    }

    #[inline]
    fn io_event(&mut self, user_data: u64, result: i32) -> Option<Event> {
        let tag = u16::try_from(user_data).ok()?;
        let holder = self.holders.get_mut(usize::from(tag))?;
        if *holder != Holder::Kernel {
            return None;
        }
        self.with_kernel -= 1;
        if result != abi::IO_RES_OK {
            *holder = Holder::None;
            if result != abi::IO_RES_ABORT {
                return Some(Event::TagLost(tag, -result));
            }
            let first = !std::mem::replace(&mut self.stopping, true);
            return first.then_some(Event::Stopping);
        }
        match BlockRequest::parse(&self.descriptors.read(tag), self.max_io_bytes) {
            Ok(request) => {
                let has_data = request.op.has_data();
                *holder = Holder::Caller { data_len: request.data_len(), has_data };
                self.with_caller += 1;
                self.stats.fetched += 1;
                Some(Event::Request(tag, request))
            }
            Err(bad) => {
                self.stats.rejected += 1;
                self.push_io(abi::IO_COMMIT_AND_FETCH_REQ, tag, -bad.errno());
                None
            }
        }
    }

    fn watch_event(&mut self, entry: &cqueue::Entry) -> Option<Event> {
        let slot = usize::from(entry.user_data().to_le_bytes()[0]);
        let watch = self.watches.get(slot).copied()?;
        if self.watch_data(slot) != entry.user_data() || watch.state == WatchState::Free {
            return None;
        }
        let armed = cqueue::more(entry.flags());
        let result = entry.result();
        if watch.state == WatchState::Removing {
            if !armed {
                self.watches[slot].state = WatchState::Free;
            }
            return None;
        }
        self.stats.watched += 1;
        if armed {
            return Some(Event::Watch(watch.token));
        }
        // The multishot ended: for good if the descriptor did, else (the completion queue was full, say)
        // it is armed again.
        if result < 0 || result & POLL_ENDED != 0 {
            self.watches[slot].state = WatchState::Free;
            return Some(Event::WatchEnded(
                watch.token,
                if result < 0 { -result } else { libc::EPIPE },
            ));
        }
        self.arm(slot);
        Some(Event::Watch(watch.token))
    }

    fn watch_data(&self, slot: usize) -> u64 {
        KIND_WATCH | u64::from(self.watches[slot].generation) << 8 | slot as u64
    }

    fn arm(&mut self, slot: usize) {
        let entry = opcode::PollAdd::new(types::Fd(self.watches[slot].fd), POLL_READ)
            .multi(true)
            .build()
            .user_data(self.watch_data(slot));
        self.push(&entry);
    }

    #[inline]
    fn push_io(&mut self, command: u32, tag: u16, result: i32) {
        let addr = self.buffers.address(tag);
        let body = IoCmd { q_id: self.queue_id, tag, result, addr };
        let entry = opcode::UringCmd16::new(NODE, command)
            .cmd(body.to_sqe_bytes())
            .build()
            .user_data(tag.into());
        self.holders[usize::from(tag)] = Holder::Kernel;
        self.with_kernel += 1;
        self.push(&entry);
    }

    #[inline]
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry names the node (file 0, registered for the ring's life) and a buffer inside
        // `self.buffers`, both held by `self` until after the ring is gone; or a poll, which has no memory.
        let pushed = unsafe { self.ring.submission().push(entry) };
        // There is room by construction. Between two submissions a tag queues one command (only its
        // holder queues, and queuing makes the kernel the holder), a watch slot one poll and one removal
        // (arming needs it free or just ended, removing makes it wait for the end), and the queue has
        // depth + 2 * MAX_WATCHES entries. An enter that takes less than all has queued nothing new.
        debug_assert!(pushed.is_ok(), "submission queue full");
    }
}

/// What the driver is told, from what the caller said. See [`Queue::complete`].
#[inline]
fn driver_result(result: i32, data_len: u32, has_data: bool) -> i32 {
    match u32::try_from(result) {
        Err(_) => result,
        Ok(_) if !has_data => 0,
        Ok(bytes) => {
            let whole = bytes.min(data_len) & !(abi::SECTOR_BYTES - 1);
            if whole == 0 { -libc::EIO } else { whole.cast_signed() }
        }
    }
}

/// Builds the ring: completions only in this thread's turns where the kernel can, and a flag in shared
/// memory when there are some. Without that flag a turn that does not wait would see none, ever.
fn build_ring(depth: u16) -> Result<(IoUring, RingMode)> {
    let entries = u32::from(depth) + 2 * u32::from(MAX_WATCHES);
    // Every command completes once, a watch any number of times: room for several rounds of watches, and
    // the kernel keeps what does not fit (NODROP).
    let completions = (2 * entries).next_power_of_two().max(256);
    let refused = |source: io::Error| match source.raw_os_error() {
        Some(libc::EPERM | libc::ENOSYS) => UblkError::NoIoUring { source },
        _ => UblkError::system("making an io_uring for a ublk queue", source),
    };
    let deferred = IoUring::builder()
        .setup_cqsize(completions)
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries);
    let (ring, mode) = match deferred {
        Ok(ring) => (ring, RingMode::Deferred),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let ring = IoUring::builder()
                .setup_cqsize(completions)
                .setup_submit_all()
                .setup_coop_taskrun()
                .setup_taskrun_flag()
                .build(entries)
                .map_err(refused)?;
            (ring, RingMode::Cooperative)
        }
        Err(e) => return Err(refused(e)),
    };
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        let source = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        return Err(UblkError::system("io_uring without EXT_ARG and NODROP", source));
    }
    Ok((ring, mode))
}

/// The queue's descriptor array, mapped read-only from the char node.
struct Descriptors {
    base: NonNull<IoDesc>,
    len: usize,
    depth: u16,
}

impl Descriptors {
    fn map(node: &CharNode, queue_id: u16, depth: u16) -> Result<Self> {
        let action = "mapping the ublk request descriptors";
        // SAFETY: sysconf reads a constant.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).map_err(|_| {
            UblkError::system("asking for the page size", io::Error::last_os_error())
        })?;
        let len = abi::descriptors_len(depth, page);
        let offset = libc::off_t::try_from(abi::descriptors_offset(queue_id, page))
            .map_err(|_| UblkError::system(action, io::ErrorKind::InvalidInput.into()))?;
        // SAFETY: a new shared read-only mapping at an address the kernel chooses; it aliases nothing.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                node.raw_fd(),
                offset,
            )
        };
        match NonNull::new(base.cast::<IoDesc>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { base, len, depth }),
            _ => Err(UblkError::system(action, io::Error::last_os_error())),
        }
    }

    /// A copy of a tag's descriptor.
    #[inline]
    fn read(&self, tag: u16) -> IoDesc {
        assert!(tag < self.depth, "tag of this queue");
        // SAFETY: the mapping holds `depth` descriptors (its length was made from the depth) and the tag is
        // below it. The driver wrote it before the completion that brought us here and writes it again
        // only after the tag is completed; the read is volatile because the writer is outside the program.
        unsafe { self.base.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`, of that length, unmapped once; no reference into it exists.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_what_the_driver_can_use() {
        assert_eq!(driver_result(4096, 4096, true), 4096);
        assert_eq!(driver_result(8192, 4096, true), 4096);
        assert_eq!(driver_result(1000, 4096, true), 512);
        assert_eq!(driver_result(511, 4096, true), -libc::EIO);
        assert_eq!(driver_result(0, 4096, true), -libc::EIO);
        assert_eq!(driver_result(0, 0, false), 0);
        assert_eq!(driver_result(4096, 0, false), 0);
        assert_eq!(driver_result(-libc::ENOSPC, 0, false), -libc::ENOSPC);
        assert_eq!(driver_result(i32::MIN, 4096, true), i32::MIN);
    }
}
