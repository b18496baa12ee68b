//! [`GuestDevice`]: the disk of a guest, for one front end after the other: the threads of its
//! rings and the way to control.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rblk_config::ByteSize;
use rblk_runtime::data_thread;
use rblk_runtime::spin::SpinMode;
use tokio::sync::mpsc::UnboundedSender;

use super::guest_disk::GuestDisk;
use super::guest_memory::GuestMemory;
use super::guest_news::{GuestNews, Memories};
use super::guest_ring::RingParts;
use super::ring_orders::{Orders, RingOrder};
use super::ring_thread::{RingThread, ThreadParts};
use crate::engine::durability::Durability;
use crate::queue::FromQueue;

/// Extra time for an order, beyond the order's own patience: the kernel may be slow to destroy QPs.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time for a FLUSH of the guest's writes when a front end leaves.
const FLUSH_PATIENCE: Duration = Duration::from_secs(5);
/// That time when the disk is removed by force.
const FORCED_FLUSH: Duration = Duration::from_millis(500);

/// The disk of a guest.
#[derive(Debug)]
pub(super) struct GuestDevice {
    disk: GuestDisk,
    news: Arc<GuestNews>,
    orders: Vec<Orders>,
    threads: Vec<JoinHandle<()>>,
    memories: UnboundedSender<Memories>,
    memory_max: Option<ByteSize>,
    // `None` for a volume with durable acknowledged writes.
    durability: Option<Arc<Durability>>,
}

impl GuestDevice {
    /// Starts a thread for each ring.
    ///
    /// # Errors
    /// The system has no descriptor or no thread.
    pub(super) fn start_threads(
        disk: GuestDisk,
        news: Arc<GuestNews>,
        (parts, durability): (Vec<ThreadParts>, Option<Arc<Durability>>),
        spin: SpinMode,
        (memories, memory_max): (UnboundedSender<Memories>, Option<ByteSize>),
    ) -> io::Result<Self> {
        let (orders, threads) = (Vec::new(), Vec::new());
        let mut device = Self { disk, news, orders, threads, memories, memory_max, durability };
        for parts in parts {
            let (orders, given) = Orders::pair()?;
            let (queue, outbox) = (parts.target.queue, parts.target.outbox.clone());
            let mut thread = RingThread::new(parts, given)?;
            let run = move || {
                let _ = nix::sys::prctl::set_timerslack(1);
                let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    data_thread::run(&mut thread, spin)
                }));
                let error = match served {
                    // The ring has reported its end itself.
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "it panicked".to_owned(),
                };
                // The receiver in control lives until the process ends.
                let _ = outbox.send(FromQueue::Stopped { queue, error: Some(error) });
            };
            let name = format!("rblk-ring-{queue}");
            device.threads.push(std::thread::Builder::new().name(name).spawn(run)?);
            device.orders.push(orders);
        }
        Ok(device)
    }

    /// The number of rings.
    pub(super) fn rings(&self) -> usize {
        self.orders.len()
    }

    /// The present disk.
    pub(super) fn disk(&self) -> GuestDisk {
        self.news.disk(self.disk)
    }

    /// Sends an order to a ring.
    ///
    /// # Errors
    /// The thread of the ring has ended.
    pub(super) fn order(&self, ring: usize, order: RingOrder) -> io::Result<()> {
        let orders = self.orders.get(ring).ok_or_else(|| gone(ring))?;
        orders.give(order).map_err(|_| gone(ring))
    }

    /// Serves a ring. A ring that a predecessor left in doubt is left alone, until the guest has
    /// made it anew.
    ///
    /// # Errors
    /// The ring cannot be served like this, or its thread has ended.
    pub(super) fn start(&self, ring: usize, mut parts: RingParts) -> io::Result<()> {
        parts.in_doubt = self.news.is_in_doubt(ring);
        let (reply, answer) = sync_channel(1);
        self.order(ring, RingOrder::Start(Box::new(parts), reply))?;
        if wait(ring, &answer, PATIENCE)?? {
            self.news.is_sure(ring);
        }
        Ok(())
    }

    /// Stops a ring, once none of its requests is under way. Returns the index of its next request.
    ///
    /// # Errors
    /// The thread of the ring has ended, or the kernel does not destroy a connection.
    pub(super) fn stop(&self, ring: usize, patience: Duration) -> io::Result<u16> {
        let (reply, answer) = sync_channel(1);
        self.order(ring, RingOrder::Stop { patience, reply })?;
        wait(ring, &answer, patience + PATIENCE)
    }

    /// Stops several rings.
    ///
    /// # Errors
    /// As of [`Self::stop`].
    pub(super) fn stop_all(
        &self,
        rings: impl Iterator<Item = usize>,
        patience: Duration,
    ) -> io::Result<()> {
        let mut answers = Vec::new();
        for ring in rings {
            let (reply, answer) = sync_channel(1);
            self.order(ring, RingOrder::Stop { patience, reply })?;
            answers.push((ring, answer));
        }
        answers
            .iter()
            .try_for_each(|(ring, answer)| wait(*ring, answer, patience + PATIENCE).map(drop))
    }

    /// Has the target make the guest's writes durable, if it does so in time. No ring is served.
    /// After a failure the account of this process, and its note, still have the writes.
    ///
    /// # Errors
    /// The thread of a ring has ended.
    pub(super) fn flush(&self) -> io::Result<()> {
        let Some(durability) = self.durability.as_ref().filter(|its| its.unflushed() > 0) else {
            return Ok(());
        };
        let (reply, answer) = sync_channel(1);
        self.order(0, RingOrder::Flush(reply))?;
        let forced = self.news.ends_by_force();
        let answered = answer.recv_timeout(if forced { FORCED_FLUSH } else { FLUSH_PATIENCE });
        let writes = durability.unflushed();
        match answered {
            _ if writes == 0 => tracing::info!("the writes of the guest are durable"),
            Err(RecvTimeoutError::Disconnected) => return Err(gone(0)),
            Ok(_) | Err(RecvTimeoutError::Timeout) => tracing::warn!(
                writes,
                "cannot flush the writes of the guest: the target is away, or refuses. The next FLUSH of the guest \
                 reports whether they were lost"
            ),
        }
        Ok(())
    }

    /// The limit of a guest's memory, if there is one.
    pub(super) fn memory_max(&self) -> Option<ByteSize> {
        self.memory_max
    }

    /// The news for the disk.
    pub(super) fn news(&self) -> &GuestNews {
        &self.news
    }

    /// Replaces the guest's memory. No device touches any other when this returns.
    ///
    /// # Errors
    /// As of [`Self::stop`].
    pub(super) fn set_memory(&self, memory: Option<&Arc<GuestMemory>>) -> io::Result<()> {
        let ask = |ring| {
            let (reply, answer): (SyncSender<()>, _) = sync_channel(1);
            self.order(ring, RingOrder::Memory(memory.cloned(), reply))?;
            Ok((ring, answer))
        };
        let answers = (0..self.rings()).map(ask).collect::<io::Result<Vec<_>>>()?;
        // New paths register this memory.
        let (reply, is_known) = sync_channel(1);
        let regions = memory.map_or_else(Arc::default, |memory| Arc::clone(memory.regions()));
        let sent = self.memories.send(Memories { regions, reply });
        sent.map_err(|_| io::Error::other("the mount is ending"))?;
        answers.iter().try_for_each(|(ring, answer)| wait(*ring, answer, PATIENCE))?;
        wait(0, &is_known, PATIENCE)
    }

    /// Gives a broken device up: does not wait for a thread that hangs.
    pub(super) fn give_up(self) {
        self.orders.iter().for_each(Orders::end);
    }

    /// Ends the threads.
    pub(super) fn end(self) {
        self.orders.iter().for_each(Orders::end);
        for thread in self.threads {
            // The thread has reported its error to control.
            let _ = thread.join();
        }
    }
}

fn gone(ring: usize) -> io::Error {
    io::Error::other(format!("the thread of ring {ring} ended, or takes no orders"))
}

fn wait<T>(ring: usize, answer: &Receiver<T>, patience: Duration) -> io::Result<T> {
    answer.recv_timeout(patience).map_err(|error| match error {
        RecvTimeoutError::Disconnected => gone(ring),
        RecvTimeoutError::Timeout => io::Error::new(
            io::ErrorKind::TimedOut,
            format!("ring {ring} is not done after {patience:?}: the kernel may not have destroyed a connection"),
        ),
    })
}
