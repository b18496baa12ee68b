//! [`UblkQueue`]: the data side of one hardware queue, owned by one thread.
//!
//! A tag is with the kernel (a fetch is queued or pending) or with the caller (a request was
//! delivered and is not completed). `fetch_all` gives every tag to the kernel; an
//! [`UblkEvent::Request`] gives one to the caller; `complete` gives it back, with a command of its
//! own for each tag. The driver copies data in this thread only: write data before a request is
//! delivered, read data while a completion is submitted. So a buffer belongs to the caller exactly
//! while the tag does. After the queue is dropped, the driver touches no buffer.
//!
//! The ring also carries polls of other descriptors (a completion channel, an eventfd), so that a
//! thread has one place to sleep in.

mod descriptors;
mod tag_command;
mod tags;
mod ublk_ring;
mod watches;

use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{cqueue, squeue, types};

pub(crate) use self::ublk_ring::RingMode;

use self::descriptors::Descriptors;
use self::tag_command::TagCompletion;
use self::tags::{TagRequest, Tags};
use self::ublk_ring::{RingCounts, UblkRing};
use self::watches::DescriptorPolls;
use rblk_protocol::width::wide;

use super::abi;
use super::buffers::Buffers;
use super::control::Control;
use super::device::{CharNode, QueueConfig};
use super::error::{Result, UblkError};
use super::leave_gate::LeaveGate;
use super::request::BlockRequest;
use crate::queue::DescriptorToken;

/// Descriptors one queue can watch: the mailbox, two of the path of each way, and some of paths
/// that ended.
pub(crate) const MAX_WATCHES: u8 = 32;

/// The char node is file 0 of the ring's table: no reference count is touched per command.
const NODE: types::Fixed = types::Fixed(0);

/// Upper bits of `user_data`: the kind of the completion. Lower bits: the tag, or the place and the
/// generation of a watch.
const KIND_WATCH: u64 = 1 << 62;
const KIND_UNWATCH: u64 = 1 << 63;
const KIND_MASK: u64 = KIND_WATCH | KIND_UNWATCH;

/// Time for the kernel to take the requests back from a server that left. The other queues of the
/// device may leave later.
pub(crate) const LEFT_DEADLINE: Duration = Duration::from_secs(4);

/// The sleep of a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TurnSleep {
    /// No sleep; a turn with nothing to submit and nothing to reap makes no system call.
    No,
    /// Until the first completion, or this long.
    For(Duration),
    /// Until so many events have come, or some after `within`, or this long. Kernels before 6.12
    /// wake for the first event.
    Gather {
        /// Events that end the sleep at once.
        events: usize,
        /// After this time a single event ends the sleep.
        within: Duration,
        /// The longest sleep.
        longest: Duration,
    },
}

/// The events of a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UblkEvent {
    /// A request; its tag and buffer are the caller's until [`UblkQueue::complete`].
    Request(u16, BlockRequest),
    /// A watched descriptor became readable, or was hung up. Edge-like: read until it would block.
    Watch(DescriptorToken),
    /// A watched descriptor cannot be watched any more (errno); its place is free.
    WatchEnded(DescriptorToken, i32),
    /// Sent once: the disk is being stopped or parked. Answer the held requests; the queue is
    /// [down](UblkQueue::is_down) after that and can be dropped.
    Stopping,
    /// The driver refused a command (errno). The tag is lost until the device is recovered; any of
    /// its requests hangs. Not seen with a correct caller.
    TagLost(u16, i32),
}

/// Counters of a queue. Plain numbers: the owner copies them to where other threads can read them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct UblkQueueStats {
    /// System calls made.
    pub enters: u64,
    /// System calls that were allowed to sleep.
    pub sleeps: u64,
    /// System calls the kernel cut short (no memory, or a full completion queue); nothing is lost
    /// by one.
    pub retries: u64,
    /// Requests delivered.
    pub fetched: u64,
    /// Completions queued.
    pub committed: u64,
    /// Invalid descriptors, answered here.
    pub rejected: u64,
    /// Watch events delivered.
    pub watched: u64,
    /// Commands queued, of every kind.
    pub commands: u64,
}

/// The data side of a hardware queue. Lives and dies on the thread that made it.
pub struct UblkQueue {
    // Dropped first: with the ring go all commands of this queue, before the memory they name.
    ring: UblkRing,
    descriptors: Descriptors,
    buffers: Buffers,
    // Bytes of each registered memory.
    shared: Arc<[u64]>,
    tags: Tags,
    watches: DescriptorPolls,
    queue_id: u16,
    max_io_bytes: u32,
    gate: Option<Arc<LeaveGate>>,
    stopping: bool,
    counts: RequestCounts,
    _node: Arc<CharNode>,
    // The driver takes a tag's commands from one thread only, and so does a single-issuer ring.
    _one_thread: PhantomData<*mut ()>,
}

/// Counts of requests and watches. The fields are those of [`UblkQueueStats`].
#[derive(Clone, Copy, Default, Debug)]
struct RequestCounts {
    fetched: u64,
    committed: u64,
    rejected: u64,
    watched: u64,
}

impl std::fmt::Debug for UblkQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UblkQueue")
            .field("queue_id", &self.queue_id)
            .field("mode", &self.mode())
            .field("tags", &self.tags)
            .field("stopping", &self.stopping)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl UblkQueue {
    /// Makes the queue of the calling thread. Allocates all it ever needs.
    ///
    /// # Errors
    /// The buffers do not fit the queue, io_uring is refused, or the char node cannot be mapped.
    pub fn new(config: &QueueConfig, buffers: Buffers) -> Result<Self> {
        let QueueConfig { node, queue_id, depth, max_io_bytes, gate } = config;
        if buffers.count() < *depth || buffers.stride() < wide(*max_io_bytes) {
            return Err(UblkError::Invalid {
                name: "buffers",
                value: buffers.count().into(),
                rule: "a queue needs one buffer per tag, each of the device's buffer size",
            });
        }
        Ok(Self {
            ring: UblkRing::new(*depth, node.raw_fd())?,
            descriptors: Descriptors::map(node, *queue_id, *depth)?,
            buffers,
            shared: Arc::default(),
            tags: Tags::new(*depth),
            watches: DescriptorPolls::new(),
            queue_id: *queue_id,
            max_io_bytes: *max_io_bytes,
            gate: gate.clone(),
            stopping: false,
            counts: RequestCounts::default(),
            _node: Arc::clone(node),
            _one_thread: PhantomData,
        })
    }

    /// Data of requests may be in [registered](super::Device::share) memories of these lengths.
    #[must_use]
    pub(crate) fn with_shared(mut self, shared: Arc<[u64]>) -> Self {
        self.shared = shared;
        self
    }

    /// Number of tags.
    #[must_use]
    pub(crate) fn depth(&self) -> u16 {
        self.descriptors.depth()
    }

    /// The mode of the ring.
    #[must_use]
    pub(crate) fn mode(&self) -> RingMode {
        self.ring.mode()
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> UblkQueueStats {
        let RequestCounts { fetched, committed, rejected, watched } = self.counts;
        let RingCounts { enters, sleeps, retries, commands } = self.ring.counts();
        UblkQueueStats { enters, sleeps, retries, fetched, committed, rejected, watched, commands }
    }

    /// Whether the work is over: stopping, no request held, every completion submitted. Drop the
    /// queue then.
    #[must_use]
    pub fn is_down(&mut self) -> bool {
        self.stopping && self.tags.with_caller() == 0 && self.ring.is_submitted()
    }

    /// Leaves the held requests to the next server of the device. The calling thread may end
    /// afterwards, not before.
    ///
    /// Drivers before 6.16 hand a request to its thread even while that thread ends: the kernel
    /// cancels the fetches of an ending thread before it marks the thread (`do_exit` in
    /// kernel/exit.c, `ublk_abort_requests` and `__ublk_rq_task_work` in
    /// drivers/block/ublk_drv.c). Nobody answers such a request, and the device is stuck until the
    /// machine restarts (seen on 6.12). So a queue leaves when [`may_leave`](Self::may_leave) says
    /// that no request is on its way, and closes its ring while its thread lives.
    ///
    /// Without that, a worker of the kernel that takes the ring down gives back most requests on
    /// their way. It loses one that comes between two of its steps (`io_move_task_work_from_local`
    /// and the first cancel, in `io_ring_exit_work`): the worker cannot run the work of this
    /// thread, and tries without end.
    ///
    /// # Errors
    /// The kernel did not take the requests back in time. All queues of the device must leave.
    pub(crate) fn leave(self) -> Result<()> {
        let Some(gate) = self.gate.clone() else { return Ok(()) };
        drop(self);
        Control::open()?.wait_without_server(gate.device(), LEFT_DEADLINE)
    }

    /// Whether the gate of the device lets this queue [leave](Self::leave), while the caller
    /// answers no request.
    #[must_use]
    pub(crate) fn may_leave(&self) -> bool {
        self.gate.as_ref().is_none_or(|gate| gate.may_leave(self.queue_id, self.tags.with_caller()))
    }

    /// Queues the first fetch of every tag. The next turn submits them, and makes this thread the
    /// one that serves the queue. Once per queue: a later call does nothing while a tag is in use.
    pub fn fetch_all(&mut self) {
        let depth = self.depth();
        if self.stopping || !self.tags.fetch_all(depth) {
            return;
        }
        for tag in 0..depth {
            self.push(&tag_command::fetch(self.queue_id, tag, self.buffers.address(tag)));
        }
    }

    /// Answers a request and fetches the tag's next one: bytes moved for a read or write, 0 (or
    /// anything positive) for the rest, a negative errno for a failure. The next turn submits it.
    ///
    /// Fewer bytes than asked for are whole sectors of a partial success: the kernel sends the rest
    /// as a new request. None at all is EIO, since the kernel would try again
    /// without end. More is cut down.
    ///
    /// # Errors
    /// The caller does not hold the tag. Nothing happens.
    #[inline]
    pub fn complete(&mut self, tag: u16, result: i32) -> Result<()> {
        let Some(asked) = self.tags.give_back(tag) else {
            return Err(UblkError::NotOwned { queue_id: self.queue_id, tag });
        };
        self.counts.committed += 1;
        self.commit(tag, driver_result(result, asked));
        Ok(())
    }

    /// Queues the command with the result of a tag, which fetches its next request.
    #[inline]
    fn commit(&mut self, tag: u16, result: i32) {
        let addr = self.buffers.address(tag);
        self.push(&tag_command::commit(self.queue_id, tag, result, addr));
    }

    /// Adds a descriptor that wakes this thread when it becomes readable.
    ///
    /// The caller keeps `fd` open until it has been [unwatched](Self::unwatch) and a turn has gone
    /// by.
    ///
    /// # Errors
    /// All places are taken, or the token is.
    pub fn watch(&mut self, fd: RawFd, token: DescriptorToken) -> Result<()> {
        self.add_watch(fd, token, false)
    }

    /// As [`Self::watch`], for a descriptor that matters to a sleeper only: every sleep ends when
    /// it is readable or becomes so. While the thread is awake the descriptor costs nothing and
    /// causes no event.
    ///
    /// # Errors
    /// As [`Self::watch`].
    pub(crate) fn watch_asleep(&mut self, fd: RawFd, token: DescriptorToken) -> Result<()> {
        self.add_watch(fd, token, true)
    }

    fn add_watch(&mut self, fd: RawFd, token: DescriptorToken, asleep: bool) -> Result<()> {
        let armed = self
            .watches
            .add(fd, token, asleep)
            .map_err(|reason| UblkError::CannotWatch { queue_id: self.queue_id, reason })?;
        if let Some(armed) = armed {
            self.push(&armed);
        }
        Ok(())
    }

    /// Removes a descriptor; its place is free after the next turn. Unknown tokens are ignored.
    pub(crate) fn unwatch(&mut self, token: DescriptorToken) {
        if let Some(removal) = self.watches.remove(token) {
            self.push(&removal);
        }
    }

    /// Whether a turn would enter the kernel: commands are queued, or the kernel reports
    /// completions to hand over, perhaps a stale report. Reads shared memory only.
    #[inline]
    #[must_use]
    pub(crate) fn needs_enter(&mut self) -> bool {
        self.ring.needs_enter()
    }

    /// Whether an event has arrived. Reads shared memory only.
    #[inline]
    #[must_use]
    pub(crate) fn has_event(&mut self) -> bool {
        self.ring.has_completion()
    }

    /// The system call of a turn, if one is needed.
    ///
    /// # Errors
    /// [`UblkError::Enter`]: the ring is unusable, the queue has to be dropped.
    #[inline]
    pub fn enter(&mut self, wait: TurnSleep) -> Result<()> {
        if self.ring.may_sleep(wait) {
            while let Some(armed) = self.watches.arm_next() {
                self.push(&armed);
            }
        }
        let queue_id = self.queue_id;
        self.ring.enter(wait).map_err(|source| UblkError::Enter { queue_id, source })
    }

    /// The next event in the completion queue.
    #[inline]
    pub fn next_event(&mut self) -> Option<UblkEvent> {
        loop {
            let entry = self.ring.next_completion()?;
            let event = match entry.user_data() & KIND_MASK {
                0 => self.io_event(&entry),
                KIND_WATCH => self.watch_event(&entry),
                _ => None,
            };
            if event.is_some() {
                return event;
            }
        }
    }

    #[inline]
    fn io_event(&mut self, entry: &cqueue::Entry) -> Option<UblkEvent> {
        let tag =
            u16::try_from(entry.user_data()).ok().filter(|tag| self.tags.is_with_kernel(*tag));
        // The tag is the kernel's. A completion without a matching fetch is dropped.
        let tag = tag?;
        match TagCompletion::from_result(entry.result()) {
            TagCompletion::Request => self.delivered(tag),
            TagCompletion::Abort => {
                self.tags.lose(tag);
                self.stop()
            }
            TagCompletion::Refused(errno) => {
                self.tags.lose(tag);
                Some(UblkEvent::TagLost(tag, errno))
            }
        }
    }

    /// The disk is being stopped or parked; reported once.
    fn stop(&mut self) -> Option<UblkEvent> {
        let first = !std::mem::replace(&mut self.stopping, true);
        first.then_some(UblkEvent::Stopping)
    }

    /// A tag of the kernel has a request.
    #[inline]
    fn delivered(&mut self, tag: u16) -> Option<UblkEvent> {
        match BlockRequest::parse(&self.descriptors.read(tag), self.max_io_bytes, &self.shared) {
            Ok(request) => {
                let (data_len, has_data) = (request.data_len(), request.op.has_data());
                self.tags.deliver(tag, TagRequest { data_len, has_data });
                self.counts.fetched += 1;
                Some(UblkEvent::Request(tag, request))
            }
            Err(bad) => {
                // Answered here: the tag stays with the kernel.
                self.counts.rejected += 1;
                self.commit(tag, -bad.errno());
                None
            }
        }
    }

    fn watch_event(&mut self, entry: &cqueue::Entry) -> Option<UblkEvent> {
        let (event, again) = self.watches.completed(entry);
        if let Some(again) = again {
            self.push(&again);
        }
        self.counts.watched += u64::from(matches!(event, Some(UblkEvent::Watch(_))));
        event
    }

    #[inline]
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry names the node (file 0, registered for the ring's life, and held open
        // by `self`) and a buffer inside `self.buffers`, which `self` holds until after the ring is
        // gone; or it is a poll, which names no memory, or the end of one.
        unsafe { self.ring.push(entry) };
    }
}

/// The result for the driver, from the result of the caller. See [`UblkQueue::complete`].
#[inline]
fn driver_result(result: i32, asked: TagRequest) -> i32 {
    let TagRequest { data_len, has_data } = asked;
    match u32::try_from(result) {
        Err(_) => result,
        Ok(_) if !has_data => 0,
        Ok(bytes) => {
            let whole = bytes.min(data_len) & !(abi::SECTOR_BYTES - 1);
            if whole == 0 { -libc::EIO } else { whole.cast_signed() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_what_the_driver_can_use() {
        let result =
            |result, data_len, has_data| driver_result(result, TagRequest { data_len, has_data });
        assert_eq!(result(4096, 4096, true), 4096);
        assert_eq!(result(8192, 4096, true), 4096);
        assert_eq!(result(1000, 4096, true), 512);
        assert_eq!(result(511, 4096, true), -libc::EIO);
        assert_eq!(result(0, 4096, true), -libc::EIO);
        assert_eq!(result(0, 0, false), 0);
        assert_eq!(result(4096, 0, false), 0);
        assert_eq!(result(-libc::ENOSPC, 0, false), -libc::ENOSPC);
        assert_eq!(result(i32::MIN, 4096, true), i32::MIN);
    }
}
