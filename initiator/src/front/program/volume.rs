//! [`Volume`]: an open volume, and the thread that keeps its session.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rblk_protocol::BlockSize;
use tokio::sync::oneshot;

use super::upkeep::{GivenQueue, Standing, Upkeep, VolumeWish};
use super::{OpenError, Queue};
use crate::engine::durability::Durability;
use crate::volume::course;
use crate::volume::host_identity::{host_name, own_id};
use crate::volume::session::HostIdentity;

/// Time that [`Volume::close`] waits for the LOGOUT.
const CLOSE: Duration = Duration::from_secs(5);
/// The interval of its polls.
const LOOK: Duration = Duration::from_millis(1);
/// Time for the remains of tries to connect.
const RUNTIME_END: Duration = Duration::from_secs(1);

/// The state of a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum State {
    /// Requests are served.
    Connected,
    /// The target is lost and tried again. Requests wait.
    Reconnecting,
    /// The target is lost for longer than `fail_after`: requests fail until it is back.
    Failing,
    /// The target has removed the volume: requests fail until it serves the volume again.
    Removed,
    /// Another host holds the volume: every request fails, permanently.
    Fenced,
    /// The target has a different volume of that name: every request fails, permanently.
    Changed,
}

/// Every state, at the index that is its number.
const STATES: [State; 6] = [
    State::Connected,
    State::Reconnecting,
    State::Failing,
    State::Removed,
    State::Fenced,
    State::Changed,
];

impl From<course::CourseState> for State {
    fn from(state: course::CourseState) -> Self {
        match state {
            course::CourseState::Connected => Self::Connected,
            course::CourseState::Lost => Self::Reconnecting,
            course::CourseState::Failing => Self::Failing,
            course::CourseState::Removed => Self::Removed,
            course::CourseState::Fenced => Self::Fenced,
            course::CourseState::Changed => Self::Changed,
        }
    }
}

/// The state that control publishes to the program. Written by control only.
#[derive(Debug)]
struct PublishedState {
    state: AtomicU8,
    size_bytes: AtomicU64,
    read_only: AtomicBool,
}

impl PublishedState {
    fn new(standing: Standing) -> Self {
        let told = Self {
            state: AtomicU8::new(0),
            size_bytes: AtomicU64::new(0),
            read_only: AtomicBool::new(false),
        };
        told.tell(standing);
        told
    }

    fn tell(&self, standing: Standing) {
        let Standing { state, size_bytes, read_only } = standing;
        let state = State::from(state);
        let place = STATES.iter().position(|known| *known == state).unwrap_or(0);
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
        self.read_only.store(read_only, Ordering::Relaxed);
        self.state.store(u8::try_from(place).unwrap_or(0), Ordering::Release);
    }

    fn state(&self) -> State {
        let place = usize::from(self.state.load(Ordering::Acquire));
        STATES.get(place).copied().unwrap_or(State::Connected)
    }
}

/// The parts that control hands over when the volume is open.
struct OpenVolumeParts {
    told: Arc<PublishedState>,
    durability: Arc<Durability>,
    block_size: BlockSize,
    queues: Vec<GivenQueue>,
}

/// The volume is still in use.
#[derive(Debug, thiserror::Error)]
#[error("the volume is not closed yet: a queue of it is in use, or the target does not answer")]
pub struct NotClosed;

/// An open volume. A thread of its own keeps the session: it sends KEEP_ALIVEs, reconnects, and
/// learns of changes. The session ends when the volume and all of its queues are dropped.
///
/// Threads may share it to read its state. Each queue goes to one thread.
#[derive(Debug)]
pub struct Volume {
    // Only the owner of the volume takes queues out: the lock makes the volume `Sync`, and is never
    // waited for.
    queues: Mutex<std::vec::IntoIter<Queue>>,
    told: Arc<PublishedState>,
    durability: Arc<Durability>,
    block_size: BlockSize,
    max_io: usize,
    closed: Option<oneshot::Sender<()>>,
    control: Option<JoinHandle<()>>,
}

impl Volume {
    fn open(mut wish: VolumeWish) -> Result<Self, OpenError> {
        let config = &mut wish.config;
        config.queues.get_or_insert(1);
        config.validate().map_err(|error| OpenError::new(error.into()))?;
        let id = wish.host_id.map_or_else(own_id, Ok);
        let id = id.map_err(|error| OpenError::new(error.into()))?;
        let host = HostIdentity { id, name: host_name(config.host_name.as_deref()) };
        let system = |source: io::Error| OpenError::new(source.into());
        let (closed, is_closed) = oneshot::channel();
        let (ready, is_ready) = mpsc::sync_channel(1);
        let control = std::thread::Builder::new()
            .name("rblk-control".to_owned())
            .spawn(move || control(wish, host, is_closed, &ready))
            .map_err(system)?;
        let opened = is_ready.recv();
        let opened = opened.map_err(|_| system(io::Error::other("the control thread ended")))?;
        let OpenVolumeParts { told, durability, block_size, queues } =
            opened.map_err(OpenError::new)?;
        let max_io = queues.first().map_or(0, |queue| queue.parts.data_max);
        let queues = queues.into_iter().map(|given| Queue::new(given, block_size));
        let queues = queues.collect::<io::Result<Vec<_>>>().map_err(system)?.into_iter();
        let (queues, closed, control) = (Mutex::new(queues), Some(closed), Some(control));
        Ok(Self { queues, told, durability, block_size, max_io, closed, control })
    }

    /// The next of its queues; `None` when all have been taken. Give each thread its own. A queue
    /// that is not taken is dropped with the volume. Until then it is not driven, which holds the
    /// others up when the target is restarted: take them all, or ask for fewer.
    pub fn queue(&mut self) -> Option<Queue> {
        self.queues.get_mut().unwrap_or_else(PoisonError::into_inner).next()
    }

    /// Bytes of the volume. The target can change it.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.told.size_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of a block: ranges of requests are whole blocks.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.block_size.bytes()
    }

    /// The most data of one request.
    #[must_use]
    pub fn max_io(&self) -> usize {
        self.max_io
    }

    /// Whether the volume refuses writes. The target can change it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.told.read_only.load(Ordering::Relaxed)
    }

    /// The state of the volume. Requests may report a change a moment earlier.
    #[must_use]
    pub fn state(&self) -> State {
        self.told.state()
    }

    /// Completed writes that no flush has covered yet. 0 for a volume with durable completed
    /// writes.
    #[must_use]
    pub fn unflushed_writes(&self) -> u64 {
        self.durability.unflushed()
    }

    /// How often the target lost completed writes without a flush. Flushes fail after that by the
    /// configuration's `on_loss`.
    #[must_use]
    pub fn losses(&self) -> u64 {
        self.durability.losses()
    }

    /// Drops the volume, and waits for the LOGOUT, if the target is connected. Flush before this if
    /// completed writes must be durable. Drop its queues first.
    ///
    /// # Errors
    /// [`NotClosed`]: the session goes on to its end in the background.
    pub fn close(mut self) -> Result<(), NotClosed> {
        let control = self.control.take();
        drop(self);
        let Some(control) = control else { return Ok(()) };
        let deadline = Instant::now() + CLOSE;
        while !control.is_finished() {
            if Instant::now() >= deadline {
                return Err(NotClosed);
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// Opens a volume. Blocks until the target answers, as long as the configuration says.
///
/// # Errors
/// [`OpenError`] with the reason. Nothing is left then.
pub fn open(wish: VolumeWish) -> Result<Volume, OpenError> {
    Volume::open(wish)
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Control notices that this end is gone.
        drop(self.closed.take());
    }
}

/// The control thread of a volume.
fn control(
    wish: VolumeWish,
    host: HostIdentity,
    closed: oneshot::Receiver<()>,
    ready: &mpsc::SyncSender<anyhow::Result<OpenVolumeParts>>,
) {
    // The opener waits for the message, so it is received.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = ready.send(Err(error.into()));
            return;
        }
    };
    runtime.block_on(async {
        let (upkeep, queues) = match Upkeep::begin(wish, host).await {
            Ok(begun) => begun,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let told = Arc::new(PublishedState::new(upkeep.standing()));
        let durability = Arc::clone(upkeep.durability());
        let block_size = upkeep.volume().block_size;
        let opened = OpenVolumeParts { told: Arc::clone(&told), durability, block_size, queues };
        let _ = ready.send(Ok(opened));
        upkeep.serve(closed, |standing| told.tell(standing)).await;
    });
    runtime.shutdown_timeout(RUNTIME_END);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_comes_through() {
        use course::CourseState as Of;
        let standing = |state| Standing { state, size_bytes: 4096, read_only: true };
        let told = PublishedState::new(standing(Of::Lost));
        for state in [Of::Connected, Of::Lost, Of::Failing, Of::Removed, Of::Fenced, Of::Changed] {
            told.tell(standing(state));
            assert_eq!(told.state(), State::from(state));
        }
        assert_eq!(told.size_bytes.load(Ordering::Relaxed), 4096);
        assert!(told.read_only.load(Ordering::Relaxed));
    }
}
