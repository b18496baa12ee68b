//! [`RingThread`]: the requests of one ring of a guest to the [`Engine`](crate::engine::Engine),
//! and their outcomes. It serves a guest as the queue thread of a disk serves the driver.
//!
//! The rules that keep late RDMA out of memory that the guest has reused:
//!
//! - A request is done when the target has answered it, or when every path that had it is
//!   destroyed.
//! - A ring is stopped when none of its requests is under way. A front end that stops a ring waits
//!   for some time for answers. Then the path is given up, and the remaining requests fail once it
//!   is destroyed.
//! - Memory is replaced when every path that had registered it is destroyed.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use rblk_fabric::Region;
use rblk_protocol::{BlockSize, Tag};
use rblk_runtime::Moment;
use rblk_runtime::data_thread::{DataThread, Found, Turn, Woken};
use rblk_runtime::spin::Hint;

use super::guest_memory::GuestMemory;
use super::guest_request::ID_BYTES;
use super::guest_ring::{GuestRing, RingParts};
use super::ring_orders::{Given, RingOrder};
use super::under_way::UnderWay;
use crate::queue::{
    DescriptorToken, DescriptorWatch, EngineDriver, EngineDriverParts, Epoll, MAIL,
};

/// How often a thread polls sources that cannot wake it.
const LOOK: Duration = Duration::from_millis(1);
/// Limit of the requests taken in one turn, so that answers are taken in between.
const TAKEN_AT_ONCE: usize = 64;
/// Tokens of the epoll. Paths use tokens from 2 on.
const ORDERS: DescriptorToken = DescriptorToken(u32::MAX);
const KICK: DescriptorToken = DescriptorToken(u32::MAX - 1);
const EIO: i32 = 5;

/// The parts of a thread.
#[derive(Debug)]
pub(crate) struct ThreadParts {
    /// The parts of the engine driver.
    pub(crate) target: EngineDriverParts,
    /// Depth buffers of `target.stride` bytes each.
    pub(crate) buffers: Arc<Region>,
    /// Block size of the volume.
    pub(crate) block_size: BlockSize,
    /// The name of the disk.
    pub(crate) id: [u8; ID_BYTES],
}

#[derive(Debug)]
struct Stopping {
    by: Instant,
    reply: SyncSender<u16>,
}

/// The thread of one ring.
pub(super) struct RingThread {
    driver: EngineDriver,
    epoll: Epoll,
    orders: Given,
    under_way: UnderWay,
    ring: Option<GuestRing>,
    memory: Option<Arc<GuestMemory>>,
    enabled: bool,
    stopping: Option<Stopping>,
    // Waits until no device touches the replaced memory.
    replaced: Option<SyncSender<()>>,
    // Waits for a FLUSH of this end.
    flushing: Option<SyncSender<bool>>,
    answers: Vec<(Tag, i32)>,
}

impl RingThread {
    /// A thread without a ring and without a path.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(super) fn new(parts: ThreadParts, orders: Given) -> io::Result<Self> {
        let ThreadParts { target, buffers, block_size, id } = parts;
        let under_way = UnderWay::new(&target, buffers, block_size, id);
        let answers = Vec::with_capacity(usize::from(target.depth.get()));
        let driver = EngineDriver::new(target);
        let mut epoll = Epoll::new()?;
        epoll.watch(driver.mail_fd(), MAIL)?;
        epoll.watch(std::os::fd::AsFd::as_fd(&orders), ORDERS)?;
        Ok(Self {
            driver,
            epoll,
            orders,
            under_way,
            ring: None,
            memory: None,
            enabled: false,
            stopping: None,
            replaced: None,
            flushing: None,
            answers,
        })
    }

    /// Carries out the orders. Returns whether there was one.
    fn take_orders(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(order) = self.orders.take() {
            any = true;
            // A reply without a receiver is dropped.
            match order {
                RingOrder::Start(parts, reply) => drop(reply.send(self.start(*parts))),
                RingOrder::Enable(enabled) => self.enabled = enabled,
                RingOrder::Flushed(flushed) => self.under_way.set_durable(!flushed),
                RingOrder::SetCall(call) => {
                    if let Some(ring) = &mut self.ring {
                        ring.set_call(call);
                    }
                }
                RingOrder::SetError(error) => {
                    if let Some(ring) = &mut self.ring {
                        ring.set_error(error);
                    }
                }
                RingOrder::Memory(memory, reply) => self.replace_memory(memory, reply),
                RingOrder::Stop { patience, reply } => {
                    self.stopping = Some(Stopping { by: now + patience, reply });
                }
                RingOrder::Flush(reply) => self.flush(reply),
            }
        }
        any
    }

    fn start(&mut self, parts: RingParts) -> io::Result<bool> {
        if self.ring.is_some() {
            return Err(io::Error::other("a ring that is served already"));
        }
        let memory = self.memory.as_ref();
        let memory = memory.ok_or_else(|| io::Error::other("a ring, but no memory"))?;
        let ring = GuestRing::new(parts, Arc::clone(memory))?;
        self.epoll.watch_edges(ring.kick(), KICK)?;
        self.under_way.make_room(ring.size());
        let is_served = !ring.is_broken();
        self.ring = Some(ring);
        Ok(is_served)
    }

    /// Sends a FLUSH of this end. An unanswered earlier FLUSH means that the target is away.
    fn flush(&mut self, reply: SyncSender<bool>) {
        if self.under_way.flush(&mut self.driver) {
            self.flushing = Some(reply);
        } else {
            let _ = reply.send(false);
        }
    }

    /// Replaces the memory. Requests under way go on in the new memory: they are not sent before
    /// there is a path that has registered it.
    fn replace_memory(&mut self, memory: Option<Arc<GuestMemory>>, reply: SyncSender<()>) {
        let regions = |memory: &Option<Arc<GuestMemory>>| {
            memory.as_ref().map_or_else(Arc::default, |memory| Arc::clone(memory.regions()))
        };
        let (old, new) = (regions(&self.memory), regions(&memory));
        let same = Arc::ptr_eq(&old, &new) || old.is_empty() && new.is_empty();
        if let (Some(ring), Some(memory)) = (&mut self.ring, &memory) {
            ring.set_memory(Arc::clone(memory));
        }
        if !same {
            let engine = self.driver.engine_mut();
            engine.replace_shared(&new);
            self.under_way.move_to(memory.as_deref(), engine);
        }
        self.memory = memory;
        self.replaced = Some(reply);
    }

    /// Takes requests from the ring. Returns whether there was one.
    fn take_requests(&mut self) -> bool {
        let (Some(ring), Some(memory)) = (&mut self.ring, &self.memory) else { return false };
        let mut any = self.under_way.go_on(memory, &mut self.driver);
        if !self.enabled || self.stopping.is_some() {
            return any;
        }
        for _ in 0..TAKEN_AT_ONCE {
            if !self.under_way.has_room() {
                break;
            }
            let Some(chain) = ring.next() else { break };
            any = true;
            if self.under_way.take(chain, memory, &mut self.driver).is_err() {
                ring.breaks("a request of it has no place for its status");
            }
        }
        any
    }

    /// One turn of the engine. Returns whether it did any work, and the number of answered requests
    /// of the target.
    fn turn_engine(&mut self, moment: Moment) -> (bool, usize) {
        let Self { driver, answers, .. } = self;
        let turned = driver.turn(moment, |tag, result| answers.push((tag, result)));
        self.finish();
        turned
    }

    /// Notifies the guest of completions.
    fn finish(&mut self) {
        let Self { answers, under_way, flushing, .. } = self;
        answers.retain(|(tag, result)| {
            let is_own = under_way.is_own(*tag);
            if is_own && let Some(reply) = flushing.take() {
                let _ = reply.send(*result == 0);
            }
            !is_own
        });
        let (Some(memory), Some(ring)) = (&self.memory, &mut self.ring) else {
            debug_assert!(self.answers.is_empty(), "without a ring nothing is under way");
            return;
        };
        for (tag, result) in self.answers.drain(..) {
            self.under_way.answered(tag, result, memory, self.driver.stats());
        }
        while let Some(done) = self.under_way.next_done(memory) {
            ring.put(done);
        }
        ring.call();
    }

    /// Ends the patience of a stop: requests that wait for the target fail, as soon as no device
    /// has them.
    fn give_up(&mut self, now: Instant) -> bool {
        let is_over = self.stopping.as_ref().is_some_and(|stopping| now >= stopping.by);
        if !is_over || self.under_way.is_empty() {
            return false;
        }
        self.under_way.give_up();
        self.driver.engine_mut().give_up_path();
        if !self.driver.has_let_go() {
            return false;
        }
        let Self { driver, answers, .. } = self;
        driver.engine_mut().cancel_waiting(EIO, |tag, result| answers.push((tag, result)))
    }

    /// Ends a stop once nothing is under way, and a replacement of memory once no device uses the
    /// old one.
    fn end_orders(&mut self) {
        if self.under_way.is_empty()
            && let Some(Stopping { reply, .. }) = self.stopping.take()
        {
            let base = self.ring.take().map_or(0, |ring| ring.base());
            self.epoll.unwatch(KICK);
            self.enabled = false;
            let _ = reply.send(base);
        }
        if self.driver.has_let_go()
            && let Some(reply) = self.replaced.take()
        {
            let _ = reply.send(());
        }
    }

    /// Sleeps and takes the events of the epoll.
    fn take_events(&mut self, longest: Duration) -> io::Result<bool> {
        let Self { driver, epoll, orders, ring, .. } = self;
        epoll.wait(longest, |token| match token {
            MAIL => driver.clear_mail(),
            ORDERS => orders.clear_event(),
            KICK => ring.iter_mut().for_each(GuestRing::clear_kick),
            token => driver.clear_event_of(token),
        })
    }
}

impl DataThread for RingThread {
    type End = ();
    type Error = io::Error;

    fn turn(&mut self, moment: Moment) -> io::Result<ControlFlow<(), Turn>> {
        #[cfg(feature = "fuzzing")]
        super::pace::keep();
        let now = moment.instant();
        let mut busy = self.take_orders(now);
        busy |= self.give_up(now);
        busy |= self.driver.begin(&mut self.epoll, moment)?;
        let taken = self.take_requests();
        let (did, answers) = self.turn_engine(moment);
        busy |= did | taken;
        busy |= self.driver.end(&mut self.epoll, now)?;
        self.end_orders();
        if self.orders.ends() {
            self.driver.send_all_off();
            self.driver.tell_stopped(None);
            return Ok(ControlFlow::Break(()));
        }
        if busy {
            self.driver.after_work();
        }
        let found = Found::of(busy, taken || answers > 0);
        Ok(ControlFlow::Continue(Turn { found, may_sleep: found == Found::Nothing }))
    }

    fn awaited(&mut self) -> Option<Hint> {
        self.driver.awaited()
    }

    fn arm(&mut self) {
        // The path of a CQ that cannot be armed has ended: the next poll finds that.
        let _ = self.driver.engine_mut().arm();
        if let Some(ring) = &mut self.ring {
            ring.ask_for_kicks();
        }
    }

    fn look_again(&mut self, moment: Moment) -> Found {
        let takes = self.enabled && self.stopping.is_none() && self.under_way.has_room();
        let offered = takes && self.ring.as_ref().is_some_and(GuestRing::has_some);
        let (busy, answers) = self.turn_engine(moment);
        let news = self.driver.has_news() || self.orders.has_some();
        Found::of(busy || news, offered || answers > 0)
    }

    fn publish(&mut self, _: Moment) {
        self.driver.publish();
    }

    fn has_software_device(&mut self) -> bool {
        self.driver.has_software_device()
    }

    fn longest_sleep(&self, now: Instant) -> Duration {
        let longest = self.driver.longest_sleep(now, false);
        match &self.stopping {
            _ if self.replaced.is_some() => longest.min(LOOK),
            Some(Stopping { by, .. }) => longest.min(by.saturating_duration_since(now).max(LOOK)),
            None => longest,
        }
    }

    fn enter(&mut self, sleep: Option<Duration>) -> io::Result<Woken> {
        let Some(longest) = sleep else { return Ok(Woken::DidNotSleep) };
        self.driver.stats().sleeps.add(1);
        Ok(if self.take_events(longest)? { Woken::ByEvent } else { Woken::ByTime })
    }

    fn ask_devices(&mut self) {
        self.driver.clear_path_events();
    }

    fn yielded(&mut self) {
        self.driver.stats().yields.add(1);
    }
}
