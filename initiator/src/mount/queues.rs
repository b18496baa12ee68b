//! [`Queues`]: the queue threads of a mount as control sees them: mail to each, and what they said.

use std::sync::Arc;

use anyhow::Context;
use rblk_config::Spin;
use rblk_protocol::width::wide;
use rblk_protocol::{BlockSize, Features};
use rblk_runtime::mailbox::Sender;
use rblk_runtime::spin::SpinMode;
use tokio::sync::mpsc;

use super::setup::Setup;
use crate::durability::{Durability, Ledger};
use crate::engine::{MountTimes, QueueCounts, QueueStats};
use crate::path::Path;
use crate::pulse::Pulse;
use crate::queue::{FromQueue, Posted, QueueHandle, QueueParts, TargetParts, ToQueue};
use crate::retain::RetainRing;
use crate::ublk::{Buffers, Device};

/// The queue threads of a mount, by the number of their queue.
#[derive(Debug, Default)]
pub(super) struct Queues {
    threads: Vec<Thread>,
    // Threads that left.
    stopped: usize,
    // QPs of each queue, at least, as of the last time they were connected.
    lanes: usize,
    // Whether all of them had digests then.
    digest: bool,
}

#[derive(Debug, Default)]
struct Thread {
    // `None` in tests only.
    handle: Option<QueueHandle>,
    // Paths that did not end yet.
    paths: u32,
    // It is held, and everything that it sent is answered.
    quiet: bool,
    // It takes no mail any more.
    stopped: bool,
}

/// What the queue threads of a device are made of.
#[derive(Debug)]
pub(super) struct QueuePlan<'p> {
    pub(super) setup: &'p Setup,
    pub(super) block_size: BlockSize,
    /// The account of what is durable; `None` where every acknowledged write is.
    pub(super) durability: Option<&'p Arc<Durability>>,
    /// Memory of each queue for retained writes; 0 retains none.
    pub(super) retain_bytes: usize,
    pub(super) pulse: Pulse,
    pub(super) spin: Spin,
    /// Whether each thread runs on the CPUs whose requests its queue serves.
    pub(super) pin: bool,
    pub(super) outbox: &'p mpsc::UnboundedSender<FromQueue>,
}

impl QueuePlan<'_> {
    /// A queue's part of the account.
    fn ledger(&self) -> Option<Ledger> {
        let depth = self.setup.wish.depth;
        let ring = (self.retain_bytes > 0).then(|| RetainRing::for_queue(self.retain_bytes, depth));
        self.durability.map(|durability| Ledger::new(Arc::clone(durability), depth, ring))
    }
}

/// The CPUs whose requests come to a queue of the device. None if the driver does not say: then the
/// thread runs anywhere.
fn cpus_of(device: &mut Device, queue: u16) -> Vec<usize> {
    device.queue_cpus(queue).unwrap_or_else(|error| {
        tracing::debug!(queue, %error, "the driver does not say which CPUs a queue serves");
        Vec::new()
    })
}

/// The configuration's word for how long to look for work.
pub(super) fn spin_mode(spin: Spin) -> SpinMode {
    match spin {
        Spin::Adaptive => SpinMode::ADAPTIVE,
        Spin::Always => SpinMode::Always,
        Spin::For(time) => SpinMode::Fixed(time.get()),
    }
}

impl Queues {
    /// Starts a thread for every queue of the device, which fetches every tag. The queues have no
    /// paths: requests wait.
    ///
    /// # Errors
    /// Memory or a thread is missing, or the driver refuses.
    pub(super) fn start(
        &mut self,
        device: &mut Device,
        plan: &QueuePlan<'_>,
    ) -> anyhow::Result<()> {
        let wish = plan.setup.wish;
        for queue in 0..device.info().queues {
            let Some(config) = device.queue_config(queue) else { continue };
            let region = plan.setup.buffers.get(usize::from(queue)).and_then(Option::as_ref);
            let region = region.context("a queue too many")?;
            let buffers =
                Buffers::new(Arc::clone(region), 0, wish.buffer_stride(), wish.depth.get())?;
            let handle = crate::queue::start(QueueParts {
                config,
                buffers,
                shared: Arc::clone(plan.setup.shared.lens()),
                data_max: wide(wish.io_max_bytes),
                block_size: plan.block_size,
                ledger: plan.ledger(),
                pulse: Some(plan.pulse),
                spin: spin_mode(plan.spin),
                cpus: if plan.pin { cpus_of(device, queue) } else { Vec::new() },
                outbox: plan.outbox.clone(),
            })?;
            self.threads.push(Thread { handle: Some(handle), ..Thread::default() });
        }
        Ok(())
    }

    /// Makes every queue of a volume that has no device: a program drives them. They have no paths:
    /// requests wait.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(super) fn give(&mut self, plan: &QueuePlan<'_>) -> anyhow::Result<Vec<TargetParts>> {
        let wish = plan.setup.wish;
        let mut given = Vec::new();
        for queue in 0..plan.setup.queues {
            let (sender, mail) = crate::queue::mail()?;
            let stats = Arc::new(QueueStats::default());
            let handle = QueueHandle::without_thread(sender, Arc::clone(&stats));
            self.threads.push(Thread { handle: Some(handle), ..Thread::default() });
            given.push(TargetParts {
                queue,
                depth: wish.depth,
                stride: wish.buffer_stride(),
                data_max: wide(wish.io_max_bytes),
                shared: plan.setup.shared.lens().len(),
                ledger: plan.ledger(),
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

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.threads.len()
    }

    /// Mail to every thread.
    pub(super) fn mail(&self) -> Vec<Sender<ToQueue>> {
        self.handles().map(|queue| queue.mail.clone()).collect()
    }

    /// I/Os that were answered so far.
    pub(super) fn ios(&self) -> u64 {
        self.handles().map(|queue| queue.stats.answered()).sum()
    }

    /// The counters of each queue.
    pub(super) fn counts(&self) -> Vec<QueueCounts> {
        self.handles().map(|queue| queue.stats.snapshot()).collect()
    }

    /// The times of each queue's requests.
    pub(super) fn times(&self) -> Vec<MountTimes> {
        self.handles().map(|queue| queue.stats.times()).collect()
    }

    /// QPs of each queue, at least.
    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    /// Whether commands and data of every queue have digests.
    pub(super) fn digest(&self) -> bool {
        self.digest
    }

    /// Gives each queue its path. A path of a queue that the driver did not make ends here.
    pub(super) fn connect(&mut self, paths: Vec<(u16, Path)>) {
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
            thread.paths += 1;
            thread.post(ToQueue::Connect(Box::new(path)));
        }
    }

    /// A path of a queue ended. Returns whether the queue has a newer one already.
    pub(super) fn path_ended(&mut self, queue: u16) -> bool {
        let Some(thread) = self.threads.get_mut(usize::from(queue)) else { return false };
        thread.paths = thread.paths.saturating_sub(1);
        thread.paths > 0
    }

    /// The paths are lost: requests wait for the next ones.
    pub(super) fn disconnect(&mut self) {
        self.post_all(|| ToQueue::Disconnect);
    }

    /// Requests fail with that errno from now on, or wait again.
    pub(super) fn fail(&mut self, errno: Option<i32>) {
        self.post_all(|| ToQueue::Fail(errno));
    }

    /// The queues send nothing new. Each says when it is [quiet](Self::quiet).
    pub(super) fn hold(&mut self) {
        self.threads.iter_mut().for_each(|thread| thread.quiet = thread.stopped);
        self.post_all(|| ToQueue::Hold(true));
    }

    /// The queues send again.
    pub(super) fn release(&mut self) {
        self.post_all(|| ToQueue::Hold(false));
    }

    /// A queue that is held has no request unanswered. Returns whether all of them are so.
    pub(super) fn quiet(&mut self, queue: u16) -> bool {
        if let Some(thread) = self.threads.get_mut(usize::from(queue)) {
            thread.quiet = true;
        }
        self.threads.iter().all(|thread| thread.quiet)
    }

    /// The threads leave the device as it is, when what was sent is answered or after that time.
    pub(super) fn leave(&mut self, within: std::time::Duration) {
        self.post_all(|| ToQueue::Leave(within));
    }

    /// A thread left.
    pub(super) fn stopped(&mut self, queue: u16) {
        self.stopped += 1;
        if let Some(thread) = self.threads.get_mut(usize::from(queue)) {
            (thread.stopped, thread.quiet) = (true, true);
        }
    }

    /// Whether a thread has left.
    pub(super) fn has_stopped(&self) -> bool {
        self.stopped > 0
    }

    /// Whether every thread has left.
    pub(super) fn have_stopped(&self) -> bool {
        self.stopped >= self.threads.len()
    }

    /// Waits for the threads to end.
    pub(super) fn join(&mut self) {
        let handles = self.threads.iter_mut().filter_map(|thread| thread.handle.as_mut());
        handles.for_each(QueueHandle::join);
    }

    fn post_all(&mut self, message: impl Fn() -> ToQueue) {
        self.threads.iter_mut().for_each(|thread| thread.post(message()));
    }

    /// Queues without threads, which have so many paths.
    #[cfg(test)]
    pub(super) fn without_threads(paths: &[u32]) -> Self {
        let thread = |&paths| Thread { paths, ..Thread::default() };
        Self { threads: paths.iter().map(thread).collect(), ..Self::default() }
    }
}

impl Thread {
    fn post(&mut self, message: ToQueue) {
        let Some(handle) = &self.handle else { return };
        let Posted { is_taken, paths } = message.post(&handle.mail);
        self.paths = self.paths.saturating_sub(paths);
        if !is_taken {
            // The thread left, and says so by `FromQueue::Stopped`.
            tracing::debug!("a queue takes no mail");
        }
    }
}

#[cfg(test)]
mod tests;
