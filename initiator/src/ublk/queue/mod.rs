//! [`Queue`]: the data side of one hardware queue, owned by one thread.
//!
//! A tag is with the kernel (a fetch is queued or pending) or with the caller (a request was
//! delivered and not completed yet). `fetch_all` gives every tag to the kernel; an
//! [`Event::Request`] gives one to the caller; `complete` gives it back. The driver copies data in
//! this thread only: write data before a request is delivered, read data while a completion is
//! submitted. So a buffer belongs to the caller exactly while the tag does, and to nobody once the
//! queue is dropped.
//!
//! How tags go to and fro is a matter of the device: a command for each ([`single`]), or for many
//! ([`batch`]). A device is of one kind or the other for its whole life, over all its servers.
//!
//! The ring also carries polls of other descriptors (a completion channel, an eventfd), so that a
//! thread has one place to sleep in.

mod batch;
mod descriptors;
mod ring;
mod single;
mod watches;

use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, cqueue, squeue, types};

pub use self::ring::RingMode;

use self::batch::{Batch, Command, Said};
use self::descriptors::Descriptors;
use self::single::Came;
use self::watches::Watches;
use super::abi;
use super::buffers::Buffers;
use super::device::{CharNode, QueueConfig};
use super::error::{Result, UblkError};
use super::request::BlockRequest;

/// Descriptors one queue can watch.
pub const MAX_WATCHES: u8 = 8;

/// The char node is file 0 of the ring's table: no reference count is touched per command.
const NODE: types::Fixed = types::Fixed(0);

/// Upper bits of `user_data`: what the completion is of. Lower bits: tag, batch command, or watch
/// slot and generation.
const KIND_WATCH: u64 = 1 << 62;
const KIND_UNWATCH: u64 = 1 << 63;
const KIND_MASK: u64 = KIND_WATCH | KIND_UNWATCH;

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
    /// The driver refused a command (errno). The tag is lost until the device is recovered; any of
    /// its requests hangs. Not seen with a correct caller.
    TagLost(u16, i32),
}

/// Counters of a queue. Plain numbers: the owner copies them out where others can see them.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueStats {
    /// System calls made.
    pub enters: u64,
    /// Those that were allowed to sleep.
    pub sleeps: u64,
    /// System calls the kernel cut short (no memory, or a full completion queue); nothing is lost
    /// by one.
    pub retries: u64,
    /// Requests delivered.
    pub fetched: u64,
    /// Completions queued.
    pub committed: u64,
    /// Descriptors that were no request, answered here.
    pub rejected: u64,
    /// Watch events delivered.
    pub watched: u64,
    /// Commands queued, of every kind.
    pub commands: u64,
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

/// How tags go to and fro.
#[allow(clippy::large_enum_variant)] // One of them to a thread.
enum Protocol {
    /// A command for each.
    Single,
    /// A command for many.
    Batch(Batch),
}

/// The data side of a hardware queue. Lives and dies on the thread that made it.
pub struct Queue {
    // Dropped first: with the ring go all commands of this queue, before the memory they name.
    ring: IoUring,
    descriptors: Descriptors,
    buffers: Buffers,
    protocol: Protocol,
    holders: Box<[Holder]>,
    watches: Watches,
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
            .field("batch", &self.is_batch())
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
        let QueueConfig { node, queue_id, depth, max_io_bytes, batch } = config;
        if buffers.count() < *depth || buffers.stride() < *max_io_bytes as usize {
            return Err(UblkError::Invalid {
                name: "buffers",
                value: buffers.count().into(),
                rule: "a queue needs one buffer per tag, each of the device's buffer size",
            });
        }
        let commands = if *batch { batch::COMMANDS } else { *depth };
        let (ring, mode) = ring::build(commands, *depth)?;
        ring.submitter()
            .register_files(&[node.raw_fd()])
            .map_err(|e| UblkError::system("registering the ublk char node with io_uring", e))?;
        let descriptors = Descriptors::map(node, *queue_id, *depth)?;
        let protocol = if *batch {
            Protocol::Batch(Batch::new(&ring, *queue_id, *depth)?)
        } else {
            Protocol::Single
        };
        Ok(Self {
            ring,
            descriptors,
            buffers,
            protocol,
            holders: vec![Holder::None; usize::from(*depth)].into_boxed_slice(),
            watches: Watches::new(),
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
        self.descriptors.depth()
    }

    /// Tags go to and fro by the batch.
    #[must_use]
    pub fn is_batch(&self) -> bool {
        matches!(self.protocol, Protocol::Batch(_))
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

    /// Nothing is left to do: stopping, no request held, every completion submitted. Drop the
    /// queue.
    #[must_use]
    pub fn is_down(&mut self) -> bool {
        self.stopping
            && self.with_caller == 0
            && !self.has_results()
            && self.ring.submission().is_empty()
    }

    /// Queues the first fetch of every tag. The next turn submits them, and makes this thread the
    /// one that serves the queue. Once per queue; later calls do nothing while a tag is anybody's.
    pub fn fetch_all(&mut self) {
        if self.stopping || self.with_kernel + self.with_caller > 0 {
            return;
        }
        self.holders.fill(Holder::Kernel);
        self.with_kernel = self.depth();
        match &mut self.protocol {
            Protocol::Single => {
                for tag in 0..self.depth() {
                    self.push(&single::fetch(self.queue_id, tag, self.buffers.address(tag)));
                }
            }
            Protocol::Batch(batch) => {
                let prepare = batch.prepare_all(|tag| self.buffers.address(tag));
                self.push_batch(prepare);
                self.push_batch(Command::Fetch);
            }
        }
    }

    /// Answers a request and fetches the tag's next one: bytes moved for a read or write, 0 (or
    /// anything positive) for the rest, a negative errno for a failure. The next turn submits it.
    ///
    /// Fewer bytes than asked for are whole sectors of a partial success: the kernel sends the rest
    /// as a new request. None at all is EIO, since the kernel would try for ever. More is cut down.
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
        self.give_back(tag, driver_result(result, data_len, has_data));
        Ok(())
    }

    /// Tells the driver of a tag's result; the tag is the kernel's.
    #[inline]
    fn give_back(&mut self, tag: u16, result: i32) {
        self.holders[usize::from(tag)] = Holder::Kernel;
        self.with_kernel += 1;
        let addr = self.buffers.address(tag);
        match &mut self.protocol {
            Protocol::Single => self.push(&single::commit(self.queue_id, tag, result, addr)),
            Protocol::Batch(batch) => {
                // There is room by construction: a tag comes again only after the list that has it
                // was handed in.
                let noted = batch.add(tag, result, addr);
                debug_assert!(noted, "list full");
            }
        }
    }

    /// Results that wait for the next turn to become a command.
    #[inline]
    fn has_results(&self) -> bool {
        match &self.protocol {
            Protocol::Single => false,
            Protocol::Batch(batch) => batch.has_results(),
        }
    }

    /// Adds a descriptor to what wakes this thread. Interest is in reading.
    ///
    /// The caller keeps `fd` open until it has been [unwatched](Self::unwatch) and a turn has gone
    /// by.
    ///
    /// # Errors
    /// All places are taken, or the token is.
    pub fn watch(&mut self, fd: RawFd, token: WatchToken) -> Result<()> {
        self.add_watch(fd, token, false)
    }

    /// As [`Self::watch`], for a descriptor that matters to a sleeper only: every sleep ends when
    /// it is readable or becomes so, and what happens to it while the thread is awake costs nothing
    /// and is not told.
    ///
    /// # Errors
    /// As [`Self::watch`].
    pub fn watch_asleep(&mut self, fd: RawFd, token: WatchToken) -> Result<()> {
        self.add_watch(fd, token, true)
    }

    fn add_watch(&mut self, fd: RawFd, token: WatchToken, asleep: bool) -> Result<()> {
        let armed = self
            .watches
            .add(fd, token, asleep)
            .map_err(|reason| UblkError::CannotWatch { queue_id: self.queue_id, reason })?;
        if let Some(armed) = armed {
            self.push(&armed);
        }
        Ok(())
    }

    /// Takes a descriptor off again; its place is free after the next turn. Unknown tokens are
    /// ignored.
    pub fn unwatch(&mut self, token: WatchToken) {
        if let Some(removal) = self.watches.remove(token) {
            self.push(&removal);
        }
    }

    /// A turn would enter the kernel: commands are queued, or the kernel says that it has
    /// completions to hand over, which may be stale. A look at shared memory.
    #[inline]
    #[must_use]
    pub fn needs_enter(&mut self) -> bool {
        let results = self.has_results();
        let queue = self.ring.submission();
        results || !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    /// An event is there already. A look at shared memory.
    #[inline]
    #[must_use]
    pub fn has_event(&mut self) -> bool {
        let tags = matches!(&self.protocol, Protocol::Batch(batch) if batch.has_tags());
        tags || !self.ring.completion().is_empty()
    }

    /// One turn: at most one system call, which submits everything queued and sleeps if `wait` says
    /// so and nothing is there yet; then every event goes to `sink`. Returns the number of events.
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
        let mut wanted = 1;
        let mut ready = false;
        if let Protocol::Batch(batch) = &mut self.protocol {
            let sealed = batch.seal();
            // A list completes within its submission, and is not what a sleeper waits for.
            wanted += batch.lists_out();
            ready = batch.has_tags();
            if let Some(commit) = sealed {
                self.push_batch(commit);
            }
        }
        let entered = match wait {
            Wait::For(time) if !time.is_zero() && !ready && self.ring.completion().is_empty() => {
                while let Some(armed) = self.watches.arm_next() {
                    self.push(&armed);
                }
                let timespec = types::Timespec::from(time);
                let args = types::SubmitArgs::new().timespec(&timespec);
                self.stats.sleeps += 1;
                self.ring.submitter().submit_with_args(wanted, &args)
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
                // No memory for a request, or completions to reap first. What was not taken stays
                // queued.
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
            while let Some(tag) = self.next_tag() {
                if self.holders.get(usize::from(tag)) == Some(&Holder::Kernel)
                    && let Some(request) = self.delivered(tag)
                {
                    return Some(request);
                }
            }
            let entry = self.ring.completion().next()?;
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

    /// The next tag of those that one completion brought.
    #[inline]
    fn next_tag(&mut self) -> Option<u16> {
        match &mut self.protocol {
            Protocol::Single => None,
            Protocol::Batch(batch) => batch.next_tag(),
        }
    }

    #[inline]
    fn io_event(&mut self, entry: &cqueue::Entry) -> Option<Event> {
        match &mut self.protocol {
            Protocol::Single => {
                let tag = u16::try_from(entry.user_data()).ok()?;
                if self.holders.get(usize::from(tag)) != Some(&Holder::Kernel) {
                    return None;
                }
                match Came::from_result(entry.result()) {
                    Came::Request => self.delivered(tag),
                    Came::Abort => {
                        self.lose(tag);
                        self.stop()
                    }
                    Came::Refused(errno) => {
                        self.lose(tag);
                        Some(Event::TagLost(tag, errno))
                    }
                }
            }
            Protocol::Batch(batch) => {
                let said = batch.completed(entry.user_data(), entry.result(), entry.flags());
                self.batch_event(said)
            }
        }
    }

    /// What a batch command said, beyond the tags it brought.
    #[inline]
    fn batch_event(&mut self, said: Said) -> Option<Event> {
        match said {
            Said::Nothing => None,
            Said::Again(command) => {
                self.push_again(command);
                None
            }
            Said::Abort => self.stop(),
            Said::Refused(errno) => {
                // The queue gets no request any more; the first tag stands for all.
                Some(Event::TagLost(0, errno))
            }
            Said::Lost(tag, errno, rest) => {
                if self.holders.get(usize::from(tag)) == Some(&Holder::Kernel) {
                    self.lose(tag);
                }
                if let Some(rest) = rest {
                    self.push_again(rest);
                }
                Some(Event::TagLost(tag, errno))
            }
        }
    }

    fn push_again(&mut self, command: Command) {
        if let (Command::Fetch, Protocol::Batch(batch)) = (command, &mut self.protocol) {
            self.stats.retries += 1;
            if let Err(error) = batch.renew_buffers(&self.ring) {
                // The fetch then ends again for want of buffers, and this is tried again.
                tracing::error!(%error, "renewing the buffers of a ublk queue");
            }
        }
        self.push_batch(command);
    }

    /// The disk is being stopped or parked; said once.
    fn stop(&mut self) -> Option<Event> {
        let first = !std::mem::replace(&mut self.stopping, true);
        first.then_some(Event::Stopping)
    }

    /// A tag that was the kernel's is nobody's.
    fn lose(&mut self, tag: u16) {
        self.with_kernel -= 1;
        self.holders[usize::from(tag)] = Holder::None;
    }

    /// A tag that was the kernel's has a request.
    #[inline]
    fn delivered(&mut self, tag: u16) -> Option<Event> {
        self.with_kernel -= 1;
        match BlockRequest::parse(&self.descriptors.read(tag), self.max_io_bytes) {
            Ok(request) => {
                let has_data = request.op.has_data();
                self.holders[usize::from(tag)] =
                    Holder::Caller { data_len: request.data_len(), has_data };
                self.with_caller += 1;
                self.stats.fetched += 1;
                Some(Event::Request(tag, request))
            }
            Err(bad) => {
                self.stats.rejected += 1;
                self.give_back(tag, -bad.errno());
                None
            }
        }
    }

    fn watch_event(&mut self, entry: &cqueue::Entry) -> Option<Event> {
        let (event, again) = self.watches.completed(entry);
        if let Some(again) = again {
            self.push(&again);
        }
        self.stats.watched += u64::from(matches!(event, Some(Event::Watch(_))));
        event
    }

    #[inline]
    fn push_batch(&mut self, command: Command) {
        if let Protocol::Batch(batch) = &self.protocol {
            let entry = batch.entry(command);
            self.push(&entry);
        }
    }

    #[inline]
    fn push(&mut self, entry: &squeue::Entry) {
        self.stats.commands += 1;
        // SAFETY: the entry names the node (file 0, registered for the ring's life) and a buffer
        // inside `self.buffers`, or a list inside the batch's memory, all held by `self` until
        // after the ring is gone; or a poll, which has no memory.
        let pushed = unsafe { self.ring.submission().push(entry) };
        // There is room by construction. Between two submissions a tag queues one command (only its
        // holder queues, and queuing makes the kernel the holder), or in a batch a list one
        // (handing it in needs it to be ours, or just completed) and the fetch one (arming needs it
        // just ended); a watch slot queues one poll and one removal (arming needs it free or just
        // ended, removing makes it wait for the end), and the queue has room for all. An enter that
        // takes less than all has queued nothing new.
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
