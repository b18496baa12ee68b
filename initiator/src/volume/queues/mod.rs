//! [`Queues`]: the queue threads of a mount as control sees them: mail to each, and the state that
//! each reported.

use std::sync::Arc;

use rblk_config::Spin;
use rblk_protocol::width::wide;
use rblk_protocol::{BlockSize, Features};
use rblk_runtime::mailbox::Sender;
use rblk_runtime::spin::SpinMode;
use tokio::sync::mpsc;

use super::setup::Setup;
use crate::engine::QueueStats;
use crate::engine::durability::retain::RetainRing;
use crate::engine::durability::{Durability, Ledger};
use crate::engine::path::Path;
use crate::engine::pulse::Pulse;
use crate::engine::ways::choice::ChoicePolicy;
use crate::engine::ways::{PLACES, WayIndex};
use crate::queue::{EngineDriverParts, FromQueue, MailFate, QueueHandle, ToQueue};
use rblk_operate::mount::mount_times::MountTimes;
use rblk_operate::mount::path_status::PathWork;
use rblk_operate::mount::queue_counts::QueueCounts;

/// The queue threads of a mount, by the number of their queue.
#[derive(Debug, Default)]
pub(crate) struct Queues {
    threads: Vec<Thread>,
    // Threads that left.
    stopped: usize,
    // The least number of QPs of a queue, at the last connect.
    lanes: usize,
    // Whether all queues had digests at the last connect.
    digest: bool,
}

#[derive(Debug, Default)]
struct Thread {
    // `None` in tests only.
    handle: Option<QueueHandle>,
    // By way, paths that have not ended.
    paths: [u32; PLACES],
    // The queue is held, and every sent request is answered.
    quiet: bool,
    // The thread takes no more mail.
    stopped: bool,
}

/// The parts of a device's queue threads.
#[derive(Debug)]
pub(crate) struct QueuePlan<'p> {
    pub(crate) setup: &'p Setup,
    pub(crate) block_size: BlockSize,
    /// The account of durable writes; `None` where every acknowledged write is durable.
    pub(crate) durability: Option<&'p Arc<Durability>>,
    /// Memory of each queue for retained writes; 0 retains none.
    pub(crate) retain_bytes: usize,
    /// How requests are spread, for a mount that may have several ways.
    pub(crate) ways: Option<ChoicePolicy>,
    pub(crate) pulse: Pulse,
    pub(crate) spin: Spin,
    pub(crate) outbox: &'p mpsc::UnboundedSender<FromQueue>,
}

impl QueuePlan<'_> {
    /// A queue's part of the account.
    pub(crate) fn ledger(&self) -> Option<Ledger> {
        let depth = self.setup.wish.depth;
        let ring = (self.retain_bytes > 0).then(|| RetainRing::for_queue(self.retain_bytes, depth));
        self.durability.map(|durability| Ledger::new(Arc::clone(durability), depth, ring))
    }
}

/// The spin mode for a value of the configuration.
pub(crate) fn spin_mode(spin: Spin) -> SpinMode {
    match spin {
        Spin::Adaptive => SpinMode::ADAPTIVE,
        Spin::Always => SpinMode::Always,
        Spin::For(time) => SpinMode::Fixed(time.get()),
    }
}

impl Queues {
    /// One more queue, which has a thread and no path yet.
    pub(crate) fn add(&mut self, handle: QueueHandle) {
        self.threads.push(Thread { handle: Some(handle), ..Thread::default() });
    }

    /// Makes every queue of a volume without a device: a program drives them. They have no paths:
    /// requests wait.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(crate) fn give(&mut self, plan: &QueuePlan<'_>) -> anyhow::Result<Vec<EngineDriverParts>> {
        let wish = plan.setup.wish;
        let mut given = Vec::new();
        for queue in 0..plan.setup.queues {
            let (sender, mail) = crate::queue::mail()?;
            let stats = Arc::new(QueueStats::default());
            let handle = QueueHandle::without_thread(sender, Arc::clone(&stats));
            self.threads.push(Thread { handle: Some(handle), ..Thread::default() });
            given.push(EngineDriverParts {
                queue,
                depth: wish.depth,
                stride: wish.buffer_stride(),
                data_max: wide(wish.io_max_bytes),
                shared: plan.setup.shared.lens().len(),
                ledger: plan.ledger(),
                ways: plan.ways,
                pulse: Some(plan.pulse),
                mail,
                outbox: plan.outbox.clone(),
                stats,
            });
        }
        Ok(given)
    }

    fn handles(&self) -> impl Iterator<Item = &QueueHandle> {
        self.threads.iter().filter_map(|thread| thread.handle.as_ref())
    }

    /// The number of queues.
    pub(super) fn len(&self) -> usize {
        self.threads.len()
    }

    /// Mail to every thread.
    pub(super) fn mail(&self) -> Vec<Sender<ToQueue>> {
        self.handles().map(|queue| queue.mail.clone()).collect()
    }

    /// I/Os answered so far.
    pub(super) fn ios(&self) -> u64 {
        self.handles().map(|queue| queue.stats.answered()).sum()
    }

    /// Counts the I/Os answered so far, in another task.
    pub(super) fn io_count(&self) -> impl Fn() -> u64 + Send + Sync + use<> {
        let stats: Vec<_> = self.handles().map(|queue| Arc::clone(&queue.stats)).collect();
        move || stats.iter().map(|stats| stats.answered()).sum()
    }

    /// The counters of each queue.
    pub(crate) fn counts(&self) -> Vec<QueueCounts> {
        self.handles().map(|queue| queue.stats.snapshot()).collect()
    }

    /// What all queues have sent by one of several ways.
    pub(crate) fn sent_by(&self, way: WayIndex) -> PathWork {
        let mut all = PathWork::default();
        self.handles().for_each(|queue| all.add(&queue.stats.by_way(way)));
        all
    }

    /// The times of each queue's requests.
    pub(crate) fn times(&self) -> Vec<MountTimes> {
        self.handles().map(|queue| queue.stats.times()).collect()
    }

    /// The least number of QPs of a queue.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes
    }

    /// Whether commands and data of every queue have digests.
    pub(crate) fn digest(&self) -> bool {
        self.digest
    }

    /// Gives each queue its path. Destroys a path for a queue that the driver did not make.
    pub(crate) fn connect(&mut self, paths: Vec<(u16, Path)>) {
        if let Some(lanes) = paths.iter().map(|(_, path)| path.lanes()).min() {
            self.lanes = lanes;
            let has_digests = |path: &Path| path.accept.features.has(Features::DIGEST);
            self.digest = paths.iter().all(|(_, path)| has_digests(path));
        }
        for (queue, path) in paths {
            let Some(thread) = self.threads.get_mut(usize::from(queue)) else {
                path.retire();
                continue;
            };
            thread.paths[path.way.get()] += 1;
            thread.post(ToQueue::Connect(Box::new(path)));
        }
    }

    /// Gives each queue one more path, beside those of other ways.
    pub(super) fn add_way(&mut self, paths: Vec<(u16, Path)>) {
        for (queue, path) in paths {
            let Some(thread) = self.threads.get_mut(usize::from(queue)) else {
                path.retire();
                continue;
            };
            thread.paths[path.way.get()] += 1;
            thread.post(ToQueue::Join(Box::new(path)));
        }
    }

    /// A way is lost: requests go by the others.
    pub(super) fn end_way(&mut self, way: WayIndex) {
        self.post_all(|| ToQueue::EndWay(way));
    }

    /// The target has ended the epoch of a way that was lost.
    pub(super) fn way_dropped(&mut self, way: WayIndex) {
        self.post_all(|| ToQueue::WayDropped(way));
    }

    /// A path of a queue ended. Returns whether the queue has a newer one of that way already.
    pub(super) fn path_ended(&mut self, queue: u16, way: WayIndex) -> bool {
        let Some(thread) = self.threads.get_mut(usize::from(queue)) else { return false };
        let paths = &mut thread.paths[way.get()];
        *paths = paths.saturating_sub(1);
        *paths > 0
    }

    /// Whether a queue has a path of some way.
    pub(super) fn has_path(&self, queue: u16) -> bool {
        let thread = self.threads.get(usize::from(queue));
        thread.is_some_and(|thread| thread.paths.iter().any(|paths| *paths > 0))
    }

    /// The paths are lost: requests wait for the next ones.
    pub(crate) fn disconnect(&mut self) {
        self.post_all(|| ToQueue::Disconnect);
    }

    /// Fails requests with that errno; with `None` they wait again.
    pub(crate) fn fail(&mut self, errno: Option<i32>) {
        self.post_all(|| ToQueue::Fail(errno));
    }

    /// Holds new requests. Each queue reports when it is [quiet](Self::quiet).
    pub(super) fn hold(&mut self) {
        self.threads.iter_mut().for_each(|thread| thread.quiet = thread.stopped);
        self.post_all(|| ToQueue::Hold(true));
    }

    /// Ends the hold.
    pub(super) fn release(&mut self) {
        self.post_all(|| ToQueue::Hold(false));
    }

    /// A held queue has no unanswered request. Returns whether all of them are quiet.
    pub(super) fn quiet(&mut self, queue: u16) -> bool {
        if let Some(thread) = self.threads.get_mut(usize::from(queue)) {
            thread.quiet = true;
        }
        self.threads.iter().all(|thread| thread.quiet)
    }

    /// The threads leave the device as it is: once every sent request is answered, or after that
    /// time.
    pub(crate) fn leave(&mut self, within: std::time::Duration) {
        self.post_all(|| ToQueue::Leave(within));
    }

    /// A thread left.
    pub(crate) fn stopped(&mut self, queue: u16) {
        self.stopped += 1;
        if let Some(thread) = self.threads.get_mut(usize::from(queue)) {
            (thread.stopped, thread.quiet) = (true, true);
        }
    }

    /// Whether a thread has left.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stopped > 0
    }

    /// Whether every thread has left.
    pub(crate) fn have_stopped(&self) -> bool {
        self.stopped >= self.threads.len()
    }

    /// Waits for the threads to end.
    pub(crate) fn join(&mut self) {
        let handles = self.threads.iter_mut().filter_map(|thread| thread.handle.as_mut());
        handles.for_each(QueueHandle::join);
    }

    fn post_all(&mut self, message: impl Fn() -> ToQueue) {
        self.threads.iter_mut().for_each(|thread| thread.post(message()));
    }

    /// Queues without threads, with so many paths each.
    #[cfg(test)]
    pub(crate) fn without_threads(paths: &[u32]) -> Self {
        let of_first = |paths| std::array::from_fn(|way| if way == 0 { paths } else { 0 });
        let thread = |&paths| Thread { paths: of_first(paths), ..Thread::default() };
        Self { threads: paths.iter().map(thread).collect(), ..Self::default() }
    }
}

impl Thread {
    fn post(&mut self, message: ToQueue) {
        let Some(handle) = &self.handle else { return };
        let MailFate { is_taken, paths } = message.post(&handle.mail);
        for way in paths {
            let paths = &mut self.paths[way.get()];
            *paths = paths.saturating_sub(1);
        }
        if !is_taken {
            // The thread left, and reports it by `FromQueue::Stopped`.
            tracing::debug!("a queue takes no mail");
        }
    }
}

#[cfg(test)]
mod tests;
