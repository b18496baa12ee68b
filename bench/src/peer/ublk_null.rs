//! [`UblkNull`]: a disk that answers every request at once and moves no byte itself: the floor
//! under all mounts of rblk: the block layer, the ublk driver with its copy, and one thread per
//! queue.
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
    Buffers, Control, Device, DeviceSpec, DeviceToken, DiskParams, QueueConfig, Recovery,
    TurnSleep, UblkEvent, UblkQueue,
};
use rblk_initiator::queue::DescriptorToken;

const START_DEADLINE: Duration = Duration::from_secs(15);
/// Deadline of the threads, and of each step of the removal.
const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// Longest sleep of a thread; its bell ends it.
const SLEEP: Duration = Duration::from_secs(60);
const BLOCK_BYTES: u32 = 4096;
const IO_MAX_BYTES: u32 = 1 << 20;

/// A running null disk. Dropping it removes the disk; processes that have it open get errors.
#[derive(Debug)]
pub(crate) struct UblkNull {
    device: Option<Device>,
    path: PathBuf,
    bells: Vec<Arc<EventFd>>,
    ends: Receiver<Result<()>>,
}

impl UblkNull {
    /// A mark, by which a later run knows the device.
    pub(crate) fn new_token() -> io::Result<DeviceToken> {
        let mut random = [0; 8];
        io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut random)?;
        Ok(DeviceToken::new(u64::from_ne_bytes(random)))
    }

    /// A disk of `bytes`, a multiple of 4096. The driver cuts `queues` to the number of CPUs.
    pub(crate) fn start(queues: u16, depth: u16, bytes: u64, token: DeviceToken) -> Result<Self> {
        let mut spec = DeviceSpec::new(queues, depth, IO_MAX_BYTES);
        spec.recovery = Recovery::Never;
        spec.token = Some(token);
        let params = DiskParams::new(bytes >> 9, BLOCK_BYTES, IO_MAX_BYTES);
        let device = Device::add(Control::open()?, spec, params)?;
        let (end, ends) = mpsc::channel();
        // After this the drop undoes it all.
        let mut null =
            Self { path: device.disk_path(), device: Some(device), bells: Vec::new(), ends };
        null.spawn(&end)?;
        drop(end);
        let device = null.device.as_mut().context("the device")?;
        let started = device.start(START_DEADLINE);
        if let Err(error) = started {
            // The error of a thread says more than that of the driver, which only misses its
            // fetches.
            return Err(match null.ends.try_recv() {
                Ok(Err(cause)) => cause,
                _ => error.into(),
            });
        }
        Ok(null)
    }

    fn spawn(&mut self, end: &Sender<Result<()>>) -> Result<()> {
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

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn queues(&self) -> u16 {
        u16::try_from(self.bells.len()).unwrap_or(u16::MAX)
    }

    /// Removes a device of a killed run. False if there was none.
    pub(crate) fn remove_left_over(token: DeviceToken) -> Result<bool> {
        let mut control = Control::open()?;
        let Some(info) = control.find(token, None)? else {
            return Ok(false);
        };
        control.remove(info.id, STOP_DEADLINE)?;
        Ok(true)
    }

    fn take_down(&mut self) -> Result<()> {
        let Some(device) = self.device.take() else {
            return Ok(());
        };
        for bell in &self.bells {
            bell.write(1)?;
        }
        let by = Instant::now() + STOP_DEADLINE;
        let mut failed = None;
        loop {
            match self.ends.recv_timeout(by.saturating_duration_since(Instant::now())) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => failed = Some(error),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    failed = Some(anyhow!("a null queue did not end within {STOP_DEADLINE:?}"));
                    break;
                }
            }
        }
        // Also while a thread still runs.
        device.close(STOP_DEADLINE).context("deleting the null disk")?;
        failed.map_or(Ok(()), Err)
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
fn serve(config: QueueConfig, bell: &EventFd) -> Result<()> {
    let stride = config.max_io_bytes() as usize;
    let memory = Region::allocate(stride * usize::from(config.depth()), PageKind::Normal)?;
    let buffers = Buffers::new(memory, 0, stride, config.depth())?;
    let mut queue = UblkQueue::new(&config, buffers)?;
    // The device's node goes when the last queue is gone.
    drop(config);
    queue.watch(bell.as_raw_fd(), DescriptorToken(0))?;
    queue.fetch_all();
    let mut leaving = false;
    while !leaving && !queue.is_down() {
        queue.enter(TurnSleep::For(SLEEP))?;
        while let Some(event) = queue.next_event() {
            match event {
                UblkEvent::Request(tag, request) => {
                    let bytes = i32::try_from(request.data_len()).unwrap_or(i32::MAX);
                    queue.complete(tag, bytes)?;
                }
                UblkEvent::Watch(_) => leaving = true,
                UblkEvent::Stopping => {}
                other => return Err(anyhow!("{other:?}")),
            }
        }
    }
    queue.enter(TurnSleep::No)?;
    Ok(())
}
