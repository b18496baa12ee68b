//! [`Detached`]: a queue of a program, controlled by the caller: for simulations, which decide when
//! paths come, die and are destroyed.

use std::io;
use std::sync::{Arc, Weak};

use rblk_fabric::{PageKind, Region};
use rblk_protocol::{BlockSize, QueueDepth};
use rblk_runtime::mailbox::Sender;
use rblk_runtime::spin::SpinMode;
use tokio::sync::mpsc;

use super::Queue;
use super::upkeep::GivenQueue;
use crate::engine::path::{DeadPath, Path};
use crate::engine::{PathEnd, QueueStats};
use crate::queue::undestroyed::UndestroyedPath;
use crate::queue::{EngineDriverParts, FromQueue, ToQueue};

/// The control of one queue.
#[derive(Debug)]
pub struct Detached {
    mail: Sender<ToQueue>,
    news: mpsc::UnboundedReceiver<FromQueue>,
    // This reference does not keep the memory.
    memory: Weak<Region>,
}

/// A path that ended. The owner first drops `dead`, which destroys the path, and then
/// `undestroyed`.
#[derive(Debug)]
pub struct Ended {
    /// The reason.
    pub end: PathEnd,
    /// The remains of the path.
    pub dead: Box<DeadPath>,
    /// To be dropped once the path is destroyed.
    pub undestroyed: Option<UndestroyedPath>,
}

impl Detached {
    /// A queue without a path, with `depth` buffers of `data_max` bytes and so many `spare` ones.
    ///
    /// # Errors
    /// Memory or a descriptor is missing.
    pub fn new(
        depth: QueueDepth,
        data_max: usize,
        spare: usize,
        block_size: BlockSize,
    ) -> io::Result<(Self, Queue)> {
        let bytes = (usize::from(depth.get()) + spare) * data_max;
        let memory = Region::allocate(bytes, PageKind::Normal).map_err(io::Error::other)?;
        let (mail, receiver) = crate::queue::mail()?;
        let (outbox, news) = mpsc::unbounded_channel();
        let parts = EngineDriverParts {
            queue: 0,
            depth,
            stride: data_max,
            data_max,
            shared: 0,
            ledger: None,
            ways: None,
            pulse: None,
            mail: receiver,
            outbox,
            stats: Arc::new(QueueStats::default()),
        };
        let detached = Self { mail, news, memory: Arc::downgrade(&memory) };
        let given = GivenQueue { parts, memory, spin: SpinMode::Always };
        Ok((detached, Queue::new(given, block_size)?))
    }

    /// The memory of the queue, while it has an owner.
    #[must_use]
    pub fn memory(&self) -> Option<Arc<Region>> {
        self.memory.upgrade()
    }

    /// Gives the queue a path over its [memory](Self::memory).
    pub fn connect(&self, path: Path) {
        ToQueue::Connect(Box::new(path)).post(&self.mail);
    }

    /// Drops the path of the queue: requests wait.
    pub fn disconnect(&self) {
        ToQueue::Disconnect.post(&self.mail);
    }

    /// Makes requests fail with that errno, or wait again.
    pub fn fail(&self, errno: Option<i32>) {
        ToQueue::Fail(errno).post(&self.mail);
    }

    /// A path that ended since the last call.
    pub fn next_end(&mut self) -> Option<Ended> {
        loop {
            if let FromQueue::PathEnded { end, dead, undestroyed, .. } =
                self.news.try_recv().ok()?
            {
                return Some(Ended { end, dead, undestroyed });
            }
        }
    }
}
