//! [`Device`]: one ublk device held by this process, from ADD_DEV to DEL_DEV or to the next server.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::Region;

use super::control::{Control, DeviceInfo, DeviceState, disk_path};
use super::disk_params::{DeviceSpec, DiskParams};
use super::error::{Result, UblkError};
use super::feature::Features;
use super::leave_gate::LeaveGate;

/// Time for device nodes to appear.
const NODE_DEADLINE: Duration = Duration::from_secs(10);
/// Time for a stop when the guard is dropped.
const DROP_STOP_DEADLINE: Duration = Duration::from_secs(5);
/// Time for a deletion when the guard is dropped.
const DROP_DELETE_DEADLINE: Duration = Duration::from_secs(1);
/// Interval of polling waits.
const POLL_STEP: Duration = Duration::from_millis(5);

/// The open `/dev/ublkcN`. The driver lets one process open it once. When the last holder (the
/// device guard, every queue) closes it, the driver knows that the server is gone.
#[derive(Debug)]
pub(crate) struct CharNode {
    file: File,
}

impl CharNode {
    pub(super) fn raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// The parameters for a data thread to make its queue. They may be sent to that thread.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    pub(super) node: Arc<CharNode>,
    pub(super) queue_id: u16,
    pub(super) depth: u16,
    pub(super) max_io_bytes: u32,
    // Where a request that is on its way to a thread that ends is lost.
    pub(super) gate: Option<Arc<LeaveGate>>,
}

impl QueueConfig {
    /// The index of the hardware queue.
    #[must_use]
    pub(crate) fn queue_id(&self) -> u16 {
        self.queue_id
    }

    /// Number of tags.
    #[must_use]
    pub fn depth(&self) -> u16 {
        self.depth
    }

    /// Size a tag's buffer must have.
    #[must_use]
    pub fn max_io_bytes(&self) -> u32 {
        self.max_io_bytes
    }
}

/// The stage of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DeviceStage {
    /// Added, no disk yet.
    Added,
    /// START_USER_RECOVERY done, the disk waits.
    Recovering,
    /// The disk is served by this process.
    Live,
    /// The disk is gone.
    Stopped,
    /// The device is gone too.
    Deleted,
}

/// A guard over a device. When the guard is dropped, on every path, it stops and deletes a device
/// that this process added. It leaves a device that this process recovered or has
/// [disowned](Self::disown) to the next server.
#[derive(Debug)]
pub struct Device {
    control: Control,
    info: DeviceInfo,
    params: DiskParams,
    node: Option<Arc<CharNode>>,
    stage: DeviceStage,
    leave: bool,
    // Memory that this process registered.
    shared: u32,
    gate: Option<Arc<LeaveGate>>,
}

/// The gate of a device of a kernel that needs one. The release with this feature sees the end of a
/// server when the char node is closed.
fn gate_of(control: &Control, info: &DeviceInfo) -> Option<Arc<LeaveGate>> {
    let sees_end = control.features().contains(Features::QUIESCE);
    (!sees_end).then(|| Arc::new(LeaveGate::new(info.id, info.queues)))
}

impl Device {
    /// Adds a device, sets its parameters and opens its char node. Next: make every queue on its
    /// thread, fetch all tags, then [`start`](Self::start).
    ///
    /// # Errors
    /// The error of any step; nothing is left behind.
    pub fn add(mut control: Control, spec: DeviceSpec, params: DiskParams) -> Result<Self> {
        let info = control.add(spec)?;
        let mut device = Self {
            gate: gate_of(&control, &info),
            control,
            info,
            params,
            node: None,
            stage: DeviceStage::Added,
            leave: false,
            shared: 0,
        };
        device.control.set_params(info.id, &params)?;
        device.node = Some(device.open_node(NODE_DEADLINE)?);
        Ok(device)
    }

    /// Registers the next memory for the direct I/O of programs. The first has index 0. Call it
    /// before the start.
    ///
    /// # Errors
    /// As of [`Control::register`]; the driver gave another index.
    pub(crate) fn share(&mut self, memory: &Region) -> Result<()> {
        let index = self.control.register(self.info.id, memory)?;
        let expected = self.shared;
        self.shared += 1;
        if index != expected {
            let rule = "the driver counts shared memory from 0";
            return Err(UblkError::Invalid { name: "shared memory", value: index.into(), rule });
        }
        Ok(())
    }

    /// Takes over a device after its server died or parked it. Next as after [`add`](Self::add),
    /// with the queues, depth and buffer size of [`info`](Self::info). Until [`start`](Self::start)
    /// has returned, a drop leaves the device as it was, for another try.
    ///
    /// `deadline` bounds the wait for the old server to let go; 60 s is right, since some kernels
    /// before 6.16 use a 30 s timer to notice the death of a server that had all tags in flight.
    ///
    /// # Errors
    /// [`UblkError::StillServed`], [`UblkError::NotRecoverable`], [`UblkError::NoSuchDevice`].
    pub(crate) fn recover(mut control: Control, id: u32, deadline: Duration) -> Result<Self> {
        let info = control.start_recovery(id, deadline)?;
        let params = control.params(id)?;
        let mut device = Self {
            gate: gate_of(&control, &info),
            control,
            info,
            params,
            node: None,
            stage: DeviceStage::Recovering,
            leave: true,
            shared: 0,
        };
        device.node = Some(device.open_node(NODE_DEADLINE)?);
        Ok(device)
    }

    fn open_node(&mut self, deadline: Duration) -> Result<Arc<CharNode>> {
        let path = self.control.wait_char_node(self.info.id, deadline)?;
        let begin = Instant::now();
        loop {
            match OpenOptions::new().read(true).write(true).open(&path) {
                Ok(file) => return Ok(Arc::new(CharNode { file })),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && begin.elapsed() < deadline => {
                    std::thread::sleep(POLL_STEP);
                }
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                    return Err(UblkError::StillServed { id: self.info.id, pid: None });
                }
                Err(e) => return Err(UblkError::system(format!("opening {}", path.display()), e)),
            }
        }
    }

    /// The device as the driver made it.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The disk's parameters.
    #[must_use]
    pub(crate) fn params(&self) -> &DiskParams {
        &self.params
    }

    /// The parameters with another capacity, for [`Control::update_size`] and
    /// [`resized`](Self::resized).
    ///
    /// # Errors
    /// The capacity is outside its rule.
    pub(crate) fn params_with(&self, sectors: u64) -> Result<DiskParams> {
        let params = DiskParams { sectors, ..self.params };
        params.to_abi().map(|_| params)
    }

    /// The driver has changed the capacity of the disk.
    pub(crate) fn resized(&mut self, params: DiskParams) {
        self.params = params;
    }

    /// Path of the disk.
    #[must_use]
    pub fn disk_path(&self) -> PathBuf {
        disk_path(self.info.id)
    }

    /// The channel to the driver, for commands that this guard has no method for.
    pub(crate) fn control(&mut self) -> &mut Control {
        &mut self.control
    }

    /// The parameters for the data thread of `queue_id`; `None` for a queue that the device does
    /// not have, or after the deletion.
    #[must_use]
    pub fn queue_config(&self, queue_id: u16) -> Option<QueueConfig> {
        let node = Arc::clone(self.node.as_ref()?);
        (queue_id < self.info.queues).then_some(QueueConfig {
            node,
            queue_id,
            depth: self.info.depth,
            max_io_bytes: self.info.max_io_bytes,
            gate: self.gate.clone(),
        })
    }

    /// The gate that keeps the queues from leaving. `None` where they may leave at any time.
    pub(crate) fn gate(&self) -> Option<&Arc<LeaveGate>> {
        self.gate.as_ref()
    }

    /// The CPUs that submit to a queue.
    ///
    /// # Errors
    /// The device has no such queue.
    pub(crate) fn queue_cpus(&mut self, queue_id: u16) -> Result<Vec<usize>> {
        self.control.queue_cpus(self.info.id, queue_id)
    }

    /// Exposes the disk, or hands the recovered one to this process, and waits for its node. Blocks
    /// until every queue has fetched every tag, so they must be served by other threads meanwhile;
    /// kernels before 7.0 also read the partition table in here.
    ///
    /// # Errors
    /// [`UblkError::Timeout`] when a queue is not ready in time.
    pub fn start(&mut self, deadline: Duration) -> Result<PathBuf> {
        self.start_while(&mut |waited| waited < deadline)
    }

    /// Like [`start`](Self::start), but `more` decides how long to wait: it gets the time spent
    /// every tenth of a second.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub(crate) fn start_while(
        &mut self,
        more: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<PathBuf> {
        match self.stage {
            DeviceStage::Recovering => self.control.end_recovery(self.info.id, more)?,
            _ => self.control.start(self.info.id, more)?,
        }
        self.stage = DeviceStage::Live;
        self.info = self.control.info(self.info.id)?;
        self.control.wait_disk_node(self.info.id, NODE_DEADLINE)
    }

    /// Ends the service for good: waits until the driver has seen that no queue is left, removes
    /// the disk and deletes the device. Before this the data threads answer their requests and drop
    /// their queues; later requests fail with EIO. Unmount and sync first: the kernel drops the
    /// data left in its page cache.
    ///
    /// This order, unlike a stop of a live disk, never waits in the kernel for a request that this
    /// process would have to answer (see [`stop`](Self::stop)).
    ///
    /// # Errors
    /// [`UblkError::StillHeld`] when a queue still exists after `deadline`, or a step's error.
    pub fn close(mut self, deadline: Duration) -> Result<()> {
        let (begin, id) = (Instant::now(), self.info.id);
        self.node = None;
        while self.control.info(id)?.state == DeviceState::Live {
            if begin.elapsed() >= deadline {
                return Err(UblkError::StillHeld { id, waited: begin.elapsed() });
            }
            std::thread::sleep(POLL_STEP);
        }
        self.stop(deadline)?;
        self.delete(deadline)
    }

    /// Stops the disk while the queues serve it, until each gets
    /// [`UblkEvent::Stopping`](super::UblkEvent::Stopping). Waits for requests in flight. Unmount
    /// and sync first: on a recoverable device the kernel drops the data left in its page cache.
    ///
    /// Only for a server that is sure to answer. The kernel waits uninterruptibly, on a worker
    /// thread of this process: if the process is killed meanwhile with a request unanswered, it
    /// hangs on exit, the device with it, until the machine is restarted (seen on 7.2). Prefer
    /// [`close`](Self::close). When this runs into its deadline, dropping the queues and the guard
    /// lets the kernel go on.
    ///
    /// # Errors
    /// [`UblkError::Timeout`] when requests in flight are not answered in time.
    pub(crate) fn stop(&mut self, deadline: Duration) -> Result<()> {
        self.control.stop(self.info.id, deadline)?;
        self.stage = DeviceStage::Stopped;
        Ok(())
    }

    /// Deletes the device after a [`stop`](Self::stop). Drop the queues first.
    ///
    /// # Errors
    /// [`UblkError::StillHeld`] when a queue still exists; the device goes when it does.
    pub(crate) fn delete(mut self, deadline: Duration) -> Result<()> {
        self.node = None;
        // Also after a failure: a second command in `drop` would not help.
        self.stage = DeviceStage::Deleted;
        self.control.delete(self.info.id, deadline)
    }

    /// The number of holders of the device's node, this guard included. While another holder is
    /// left, the driver takes the device for served.
    #[must_use]
    pub(crate) fn holders(&self) -> usize {
        self.node.as_ref().map_or(0, Arc::strong_count)
    }

    /// Makes a drop leave the device to the next server.
    pub(crate) fn disown(&mut self) {
        self.leave = true;
    }

    /// Makes a drop stop and delete the device, also a recovered one.
    pub(crate) fn own(&mut self) {
        self.leave = false;
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.leave || self.stage == DeviceStage::Deleted {
            return;
        }
        let id = self.info.id;
        // If no queue is left, the driver now learns that the server is gone, and the stop does not
        // wait.
        self.node = None;
        // Stop before delete: the driver would otherwise stop it under the lock of all its devices.
        if self.stage != DeviceStage::Stopped
            && let Err(error) = self.control.stop(id, DROP_STOP_DEADLINE)
        {
            tracing::warn!(%error, "stopping a ublk device on the way out");
        }
        match self.control.delete_async(id, DROP_DELETE_DEADLINE) {
            Ok(()) | Err(UblkError::NoSuchDevice { .. }) => {}
            Err(error) => tracing::warn!(%error, "deleting a ublk device on the way out"),
        }
    }
}
