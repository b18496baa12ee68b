//! [`UblkNull`]: a disk that answers every request at once and moves no byte itself: the floor
//! under everything that has our front end. What it costs is the block layer, the ublk driver with
//! its copy, and one thread per queue.
//!
//! ```text
//! UblkNull::start -- one thread per queue -> Queue: request -> complete, until its bell is rung
//! drop            -- bells -> threads leave -> stop, delete; each step with a deadline
//! ```
//!
//! The device has no recovery: a run that is killed leaves a device without a disk, which
//! [`remove_left_over`](UblkNull::remove_left_over) takes away by its mark.

use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use nix::sys::eventfd::{EfdFlags, EventFd};
use rblk_fabric::{PageKind, Region};
use rblk_initiator::front::ublk::{
    Buffers, Control, Device, DeviceSpec, DeviceToken, DiskParams, Event, Queue, QueueConfig,
    QueueStats, Recovery, Wait,
};
use rblk_initiator::queue::WatchToken;

/// How long the disk may take to appear.
const START_DEADLINE: Duration = Duration::from_secs(15);
/// How long the threads, and then each step of the removal, may take.
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// How long a thread sleeps when there is nothing to do; its bell ends that.
const SLEEP: Duration = Duration::from_secs(60);
/// Logical block of the disk.
const BLOCK_BYTES: u32 = 4096;
/// Longest request, as that of a mount.
const IO_MAX_BYTES: u32 = 1 << 20;

/// What kind of disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NullDisk {
    /// Hardware queues. The driver cuts this to the number of CPUs.
    pub queues: u16,
    /// Tags of each.
    pub depth: u16,
    /// Size in bytes, a multiple of 4096.
    pub bytes: u64,
    /// The mark by which a later run knows the device.
    pub token: DeviceToken,
}

impl NullDisk {
    /// A disk of 256 MiB, with a mark of its own.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn new(queues: u16, depth: u16) -> io::Result<Self> {
        let mut random = [0; 8];
        io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut random)?;
        let token = DeviceToken::new(u64::from_ne_bytes(random));
        Ok(Self { queues, depth, bytes: 256 << 20, token })
    }
}

/// A running null disk. Dropping it removes the disk; processes that have it open get errors.
#[derive(Debug)]
pub struct UblkNull {
    device: Option<Device>,
    path: PathBuf,
    token: DeviceToken,
    bells: Vec<Arc<EventFd>>,
    ends: Receiver<Result<QueueStats>>,
}

impl UblkNull {
    /// Starts a disk of 256 MiB with `queues` of `depth` tags.
    ///
    /// # Errors
    /// There is no ublk driver, or a step of the start failed; nothing is left behind.
    pub fn start(queues: u16, depth: u16) -> Result<Self> {
        Self::start_disk(NullDisk::new(queues, depth)?)
    }

    /// Starts `disk`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_disk(disk: NullDisk) -> Result<Self> {
        let mut spec = DeviceSpec::new(disk.queues, disk.depth, IO_MAX_BYTES);
        spec.recovery = Recovery::Never;
        spec.token = Some(disk.token);
        let params = DiskParams::new(disk.bytes >> 9, BLOCK_BYTES, IO_MAX_BYTES);
        let device = Device::add(Control::open()?, spec, params)?;
        let (end, ends) = mpsc::channel();
        // From here on the drop undoes it all.
        let mut null = Self {
            path: device.disk_path(),
            device: Some(device),
            token: disk.token,
            bells: Vec::new(),
            ends,
        };
        null.spawn(&end)?;
        drop(end);
        let device = null.device.as_mut().context("the device")?;
        let started = device.start(START_DEADLINE);
        if let Err(error) = started {
            // A thread that failed knows better than the driver, which only misses its fetches.
            return Err(match null.ends.try_recv() {
                Ok(Err(cause)) => cause,
                _ => error.into(),
            });
        }
        Ok(null)
    }

    fn spawn(&mut self, end: &Sender<Result<QueueStats>>) -> Result<()> {
        let device = self.device.as_ref().context("the device")?;
        for id in 0..device.info().queues {
            let config = device.queue_config(id).context("a queue of the device")?;
            let bell = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK)?);
            self.bells.push(Arc::clone(&bell));
            let end = end.clone();
            std::thread::Builder::new().name(format!("ublk-null-{id}")).spawn(move || {
                let served = serve(config, &bell);
                // The receiver is gone after a deadline.
                let _ = end.send(served.with_context(|| format!("null queue {id}")));
            })?;
        }
        Ok(())
    }

    /// Path of the disk.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Hardware queues it has: at most those that were asked for.
    #[must_use]
    pub fn queues(&self) -> u16 {
        u16::try_from(self.bells.len()).unwrap_or(u16::MAX)
    }

    /// The mark of its device.
    #[must_use]
    pub fn token(&self) -> DeviceToken {
        self.token
    }

    /// Takes the disk away and says what its queues did.
    ///
    /// # Errors
    /// A queue failed, or a step did not end in time.
    pub fn stop(mut self) -> Result<Vec<QueueStats>> {
        self.take_down()
    }

    /// Takes a device away that a run left when it was killed. Whether there was one.
    ///
    /// # Errors
    /// The driver does not answer, or the device does not go.
    pub fn remove_left_over(token: DeviceToken) -> Result<bool> {
        let mut control = Control::open()?;
        let Some(info) = control.find(token, None)? else {
            return Ok(false);
        };
        control.remove(info.id, STOP_DEADLINE)?;
        Ok(true)
    }

    fn take_down(&mut self) -> Result<Vec<QueueStats>> {
        let Some(device) = self.device.take() else {
            return Ok(Vec::new());
        };
        for bell in &self.bells {
            bell.write(1)?;
        }
        let by = Instant::now() + STOP_DEADLINE;
        let mut stats = Vec::new();
        let mut failed = None;
        loop {
            match self.ends.recv_timeout(by.saturating_duration_since(Instant::now())) {
                Ok(Ok(queue)) => stats.push(queue),
                Ok(Err(error)) => failed = Some(error),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    failed = Some(anyhow!("a null queue did not end within {STOP_DEADLINE:?}"));
                    break;
                }
            }
        }
        // Also when a queue is still there: then the guard's own drop stops the disk and deletes
        // it.
        device.close(STOP_DEADLINE).context("deleting the null disk")?;
        failed.map_or(Ok(stats), Err)
    }
}

impl Drop for UblkNull {
    fn drop(&mut self) {
        if let Err(error) = self.take_down() {
            eprintln!("{}: {error:#}", self.path.display());
        }
    }
}

/// A data thread: every request is complete when it comes.
fn serve(config: QueueConfig, bell: &EventFd) -> Result<QueueStats> {
    let stride = config.max_io_bytes() as usize;
    let memory = Region::allocate(stride * usize::from(config.depth()), PageKind::Normal)?;
    let buffers = Buffers::new(memory, 0, stride, config.depth())?;
    let mut queue = Queue::new(&config, buffers)?;
    // The device's node goes when the last queue is gone.
    drop(config);
    queue.watch(bell.as_raw_fd(), WatchToken(0))?;
    queue.fetch_all();
    let mut leaving = false;
    while !leaving && !queue.is_down() {
        queue.enter(Wait::For(SLEEP))?;
        while let Some(event) = queue.next_event() {
            match event {
                Event::Request(tag, request) => {
                    // At most 1 MiB.
                    let bytes = i32::try_from(request.data_len()).unwrap_or(i32::MAX);
                    queue.complete(tag, bytes)?;
                }
                Event::Watch(_) => leaving = true,
                Event::Stopping => {}
                other => return Err(anyhow!("{other:?}")),
            }
        }
    }
    // The last answers.
    queue.enter(Wait::No)?;
    Ok(queue.stats())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_disk_has_a_mark_of_its_own() {
        let (one, other) = (NullDisk::new(1, 128).unwrap(), NullDisk::new(1, 128).unwrap());
        assert_ne!(one.token, other.token);
        assert_eq!((one.queues, one.depth, one.bytes % 4096), (1, 128, 0));
    }
}
