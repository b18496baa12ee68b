//! The disk of the driver: a data thread for each of its hardware queues.

mod gathering;
mod placement;
mod queue_thread;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc as sync_mpsc;
use std::time::Duration;

use rblk_protocol::BlockSize;
use rblk_runtime::data_thread;
use rblk_runtime::spin::SpinMode;
use tokio::sync::mpsc;

use self::queue_thread::QueueThread;
use super::ublk::{Buffers, QueueConfig, TurnSleep, UblkQueue};
use crate::engine::QueueStats;
use crate::engine::durability::Ledger;
use crate::engine::pulse::Pulse;
use crate::engine::ways::choice::ChoicePolicy;
use crate::queue::{DescriptorToken, DescriptorWatch, FromQueue, QueueHandle, mail};
use crate::volume::begin::Front;

/// The driver's queues test their paths themselves, and have room for digests in their buffers.
pub(crate) const FRONT: Front =
    Front { tests_paths: false, shares_memory: true, has_room_for_digests: true, spare_buffers: 0 };

/// Time limit for a thread to fetch every tag.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// The parts of a queue thread.
#[derive(Debug)]
pub(crate) struct QueueParts {
    /// The ublk queue.
    pub config: QueueConfig,
    /// One buffer per tag.
    pub buffers: Buffers,
    /// Bytes of each memory of other programs that requests may have their data in.
    pub shared: Arc<[u64]>,
    /// Most data of a request: the rest of its buffer is for a trailer.
    pub data_max: usize,
    /// Block size of the volume.
    pub block_size: BlockSize,
    /// The account of durable writes, made for the queue's depth. `None` for a volume with durable
    /// acknowledged writes.
    pub ledger: Option<Ledger>,
    /// How requests are spread, for a queue that may have several ways.
    pub ways: Option<ChoicePolicy>,
    /// The time until a path with a silent target is given up while answers are outstanding.
    pub pulse: Option<Pulse>,
    /// The time to poll before a sleep.
    pub spin: SpinMode,
    /// The CPUs for the thread. Empty: any.
    pub cpus: Vec<usize>,
    /// The channel to control.
    pub outbox: mpsc::UnboundedSender<FromQueue>,
}

/// Starts the thread and waits until it has fetched every tag.
///
/// # Errors
/// The ublk queue could not be made.
pub(crate) fn start(parts: QueueParts) -> io::Result<QueueHandle> {
    let (mail, receiver) = mail()?;
    let stats = Arc::new(QueueStats::default());
    let engine_stats = Arc::clone(&stats);
    let (ready, is_ready) = sync_mpsc::sync_channel(1);
    let queue = parts.config.queue_id();
    let thread =
        std::thread::Builder::new().name(format!("rblk-queue-{queue}")).spawn(move || {
            let outbox = parts.outbox.clone();
            placement::run_on(&parts.cpus);
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let spin = parts.spin;
                let mut thread = QueueThread::new(parts, receiver, engine_stats)?;
                // An error means that control no longer waits, and drops the mailbox.
                let _ = ready.send(Ok(()));
                data_thread::run(&mut thread, spin).map(|()| thread.end())
            }));
            let error = match result {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("it panicked".to_owned()),
            };
            if let Some(error) = &error {
                // The message is dropped if the queue was ready already.
                let _ = ready.try_send(Err(io::Error::other(error.clone())));
            }
            let _ = outbox.send(FromQueue::Stopped { queue, error });
        })?;
    match is_ready.recv_timeout(START_DEADLINE) {
        Ok(Ok(())) => Ok(QueueHandle::with_thread(mail, stats, thread)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "a queue thread did not start")),
    }
}

impl DescriptorWatch for UblkQueue {
    fn watch(&mut self, fd: BorrowedFd<'_>, token: DescriptorToken) -> io::Result<()> {
        self.watch_asleep(fd.as_raw_fd(), token).map_err(io::Error::other)
    }

    fn unwatch(&mut self, token: DescriptorToken) {
        Self::unwatch(self, token);
    }

    fn submit_removals(&mut self) -> io::Result<()> {
        // Submits the removal while the descriptor is still open.
        self.enter(TurnSleep::No).map_err(io::Error::other)
    }
}
