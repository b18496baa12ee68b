//! [`Control`]: commands to the driver, over `/dev/ublk-control`.
//!
//! Every command runs on a worker thread of the ring (the driver answers EAGAIN to a non-blocking
//! try) and is waited for with a deadline. A command without an answer is cancelled; most commands
//! wait interruptibly and end with EINTR. A STOP waits uninterruptibly for requests in flight: it
//! is reported as [`UblkError::Timeout`] with `still_running`, its buffer (at most a kilobyte) is
//! left to the kernel, and this value stays usable.

mod command;
mod info;
mod node;

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, squeue};
use rblk_fabric::Region;
use rblk_protocol::width::{narrow, wide64};

use self::command::{
    ADD, CANCEL, DELETE, DELETE_ASYNC, END_RECOVERY, FEATURES, GET_PARAMS, INFO, PLAIN_INFO,
    QUEUE_CPUS, REGISTER, SET_PARAMS, START, START_RECOVERY, STOP, UPDATE_SIZE, header, missing,
};
use self::node::wait_node;
use super::abi::{self, CtrlCmd};
use super::disk_params::{DeviceSpec, DiskParams, PARAMS_LEN};
use super::error::{Result, UblkError, kernel_release};
use super::feature::Features;
use super::token::DeviceToken;

pub use self::info::{DeviceInfo, DeviceState};
pub use self::node::disk_path;
pub(crate) use self::node::{char_path, disk_sequence};

/// Deadline of commands that wait for no other process.
const QUICK: Duration = Duration::from_secs(10);

/// Deadline of a command that has the kernel pin up to 4 GiB of memory.
const PINNING: Duration = Duration::from_secs(60);

/// How long a device that was deleted is waited for, where its users are in no hurry.
const HELD_WAIT: Duration = Duration::from_secs(2);

/// Step of waits that can only be polled.
const POLL_STEP: Duration = Duration::from_millis(5);

/// A channel to the driver. One command at a time; use several for commands that wait for each
/// other. It may move between threads.
pub struct Control {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: File,
    features: Features,
    issued: u64,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("features", &self.features).finish_non_exhaustive()
    }
}

impl Control {
    /// Opens the driver and asks for its features.
    ///
    /// # Errors
    /// [`UblkError::NoDriver`], [`UblkError::NotPermitted`], [`UblkError::NoIoUring`], or the
    /// driver refuses ioctl-encoded commands (kernels before 6.4).
    pub fn open() -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(abi::CONTROL_PATH).map_err(
            |source| match source.raw_os_error() {
                Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => {
                    UblkError::NoDriver { kernel: kernel_release() }
                }
                Some(libc::EACCES | libc::EPERM) => {
                    UblkError::NotPermitted { action: format!("opening {}", abi::CONTROL_PATH) }
                }
                _ => UblkError::system(format!("opening {}", abi::CONTROL_PATH), source),
            },
        )?;
        let ring = IoUring::builder().build(8).map_err(|source| UblkError::NoIoUring { source })?;
        let mut control = Self { ring, file, features: Features::NONE, issued: CANCEL };
        control.features = control.ask_features()?;
        Ok(control)
    }

    fn ask_features(&mut self) -> Result<Features> {
        let header = header(abi::ANY_DEVICE);
        match self.exchange(FEATURES, header, 0_u64, QUICK) {
            Ok(bits) => Ok(Features::from_bits(bits)),
            // 6.4 looks for the device first, and later kernels may refuse the number.
            Err(UblkError::NoSuchDevice { .. }) => Ok(Features::OF_6_4),
            Err(UblkError::Refused { source, .. })
                if source.raw_os_error() == Some(libc::EOPNOTSUPP) =>
            {
                Err(missing(Features::CMD_IOCTL_ENCODE))
            }
            Err(other) => Err(other),
        }
    }

    /// The features of this kernel.
    #[must_use]
    pub(crate) fn features(&self) -> Features {
        self.features
    }

    /// Creates a device and its `/dev/ublkcN`. Returns the device as the driver made it from
    /// `spec`: fewer queues if there are fewer CPUs, the id that it chose.
    ///
    /// # Errors
    /// A field of `spec` is outside its rule, a needed feature is missing, the id is taken, the
    /// limit of devices is reached, or the caller is not privileged.
    pub(crate) fn add(&mut self, spec: DeviceSpec) -> Result<DeviceInfo> {
        let must = spec.need | spec.recovery.features();
        if !self.features.contains(must) {
            return Err(missing(must.without(self.features)));
        }
        let info = spec.to_abi(self.features, own_pid())?;
        let header = header(info.dev_id);
        let answer = self.exchange(ADD, header, info, QUICK)?;
        let info = DeviceInfo::from_abi(&answer);
        if !info.flags.contains(must) {
            let features = must.without(info.flags);
            let _ = self.delete(info.id, QUICK);
            return Err(UblkError::FeatureRefused { id: info.id, features });
        }
        Ok(info)
    }

    /// Sets the disk's parameters. Only before the start.
    ///
    /// # Errors
    /// A field is outside its rule, or the device was started before.
    pub(crate) fn set_params(&mut self, id: u32, params: &DiskParams) -> Result<()> {
        self.exchange(SET_PARAMS, header(id), params.to_abi()?, QUICK).map(drop)
    }

    /// Changes the capacity of a live disk. Waits for no request. The kernel notifies udev
    /// (`RESIZE=1`), and file systems that ask for the size see the new one.
    ///
    /// # Errors
    /// [`UblkError::FeatureMissing`] before 6.16.
    pub(crate) fn update_size(&mut self, id: u32, sectors: u64) -> Result<()> {
        if !self.features.contains(Features::UPDATE_SIZE) {
            return Err(missing(Features::UPDATE_SIZE));
        }
        self.plain(UPDATE_SIZE, CtrlCmd { data: sectors, ..header(id) }, QUICK)
    }

    /// Registers memory for the direct I/O of programs: their requests come as
    /// [`DataAt::Shared`](super::DataAt) with the returned index. The driver keeps the pages until
    /// the device is gone. Call it before the start: on a live device the driver would wait for
    /// requests.
    ///
    /// # Errors
    /// The device was made without [`Features::SHMEM_ZC`], the memory has more than 4 GiB, or other
    /// memory of the device has the same pages.
    pub(crate) fn register(&mut self, id: u32, memory: &Region) -> Result<u32> {
        let buffer = abi::ShmemBufReg {
            addr: memory.address(),
            len: wide64(memory.len()),
            ..abi::ShmemBufReg::default()
        };
        let (index, _) = self.exchange_for_number(REGISTER, header(id), buffer, PINNING)?;
        Ok(index)
    }

    /// The disk's parameters as the driver has them.
    ///
    /// # Errors
    /// The device does not exist.
    pub(crate) fn params(&mut self, id: u32) -> Result<DiskParams> {
        self.raw_params(id).map(|params| DiskParams::from_abi(&params))
    }

    fn raw_params(&mut self, id: u32) -> Result<abi::Params> {
        let ask = abi::Params { len: PARAMS_LEN, ..abi::Params::default() };
        self.exchange(GET_PARAMS, header(id), ask, QUICK)
    }

    /// State, sizes, features and server of a device.
    ///
    /// # Errors
    /// The device does not exist.
    pub fn info(&mut self, id: u32) -> Result<DeviceInfo> {
        let mut ask = abi::InfoExchange::default();
        let path = char_path(id);
        let path = path.as_os_str().as_encoded_bytes();
        ask.path[..path.len()].copy_from_slice(path);
        let header = CtrlCmd { dev_path_len: narrow(abi::INFO_PATH_BYTES), ..header(id) };
        match self.exchange(INFO, header, ask, QUICK) {
            Ok(answer) => Ok(DeviceInfo::from_abi(&answer.info)),
            // The node does not exist (yet, or any more); the device does.
            Err(UblkError::Refused { source, .. })
                if source.raw_os_error() == Some(libc::ENOENT) =>
            {
                let ask = abi::DevInfo::default();
                let header = self::header(id);
                self.exchange(PLAIN_INFO, header, ask, QUICK)
                    .map(|answer| DeviceInfo::from_abi(&answer))
            }
            Err(other) => Err(other),
        }
    }

    /// The CPUs that submit to a queue of a device.
    ///
    /// # Errors
    /// The device or queue does not exist.
    pub(crate) fn queue_cpus(&mut self, id: u32, queue: u16) -> Result<Vec<usize>> {
        let header = CtrlCmd { data: queue.into(), ..header(id) };
        let abi::CpuBits(words) = self.exchange(QUEUE_CPUS, header, abi::CpuBits::NONE, QUICK)?;
        Ok(cpus_in(&words))
    }

    /// Exposes the disk. Waits until every tag of every queue has been fetched (by other threads of
    /// this process, the one that opened the char node). `more` gets the time spent now and then,
    /// and returns whether to go on waiting.
    ///
    /// # Errors
    /// [`UblkError::Timeout`] when a queue is not ready in time; the device is as before.
    pub(crate) fn start(&mut self, id: u32, more: &mut dyn FnMut(Duration) -> bool) -> Result<()> {
        let header = CtrlCmd { data: own_pid().unsigned_abs().into(), ..header(id) };
        self.plain_while(START, header, more)
    }

    /// Removes the disk. Waits for the requests in flight, so the queues have to go on serving;
    /// then every fetch ends with "stopping". With recovery on, data left in the page cache is
    /// lost: unmount and sync first.
    ///
    /// # Errors
    /// [`UblkError::Timeout`] when requests are not answered in time; the stop goes on in the
    /// kernel.
    pub fn stop(&mut self, id: u32, deadline: Duration) -> Result<()> {
        self.plain(STOP, header(id), deadline)
    }

    /// Deletes a device and waits until its id is free. Stop it first: the driver would stop it
    /// under its global lock. The holders of the char node (the queues) have to let go meanwhile.
    ///
    /// # Errors
    /// [`UblkError::StillHeld`] when a holder does not; the device then goes with its last holder.
    pub fn delete(&mut self, id: u32, deadline: Duration) -> Result<()> {
        let begin = Instant::now();
        self.delete_async(id, deadline)?;
        loop {
            match self.info(id) {
                Err(UblkError::NoSuchDevice { .. }) => return Ok(()),
                Ok(_) => {}
                Err(other) => return Err(other),
            }
            if begin.elapsed() >= deadline {
                return Err(UblkError::StillHeld { id, waited: begin.elapsed() });
            }
            std::thread::sleep(POLL_STEP);
        }
    }

    /// Removes a device without a server, in any state: the disk first (requests that wait for a
    /// server fail), then the device. A stop does no harm to a device without a disk, and a
    /// deletion without a stop would run under the lock of all devices.
    ///
    /// A device with an open disk, such as under a mounted file system, goes when the disk is
    /// closed: its number is taken until then, and nothing else waits for it.
    ///
    /// # Errors
    /// As [`stop`](Self::stop) and [`delete_async`](Self::delete_async). A missing device counts as
    /// removed.
    pub fn remove(&mut self, id: u32, deadline: Duration) -> Result<()> {
        let removed = match self.info(id) {
            Ok(info) if info.state == DeviceState::Dead => Ok(()),
            Ok(_) => self.stop(id, deadline),
            Err(error) => Err(error),
        };
        match removed.and_then(|()| self.delete(id, deadline.min(HELD_WAIT))) {
            Err(UblkError::NoSuchDevice { .. }) => Ok(()),
            Err(UblkError::StillHeld { .. }) => {
                tracing::warn!(
                    device = id,
                    "the device is deleted; it goes when its last user closes it"
                );
                Ok(())
            }
            other => other,
        }
    }

    /// Deletes a device; it is gone when its last user lets go. On kernels without the asynchronous
    /// command (before 6.9) the wait is part of it, and is cut short at the deadline without harm.
    ///
    /// # Errors
    /// The device does not exist.
    pub(crate) fn delete_async(&mut self, id: u32, deadline: Duration) -> Result<()> {
        match self.plain(DELETE_ASYNC, header(id), deadline) {
            Err(UblkError::Refused { source, .. })
                if source.raw_os_error() == Some(libc::EOPNOTSUPP) =>
            {
                match self.plain(DELETE, header(id), deadline) {
                    Err(UblkError::Timeout { still_running: false, .. }) => Ok(()),
                    other => other,
                }
            }
            other => other,
        }
    }

    /// Makes the driver forget a dead server. Tries again until that server has let go, or until
    /// the deadline; also when the driver does not answer: kernels before 6.16 hold the device's
    /// lock while they wait for a timer of 30 s.
    ///
    /// # Errors
    /// [`UblkError::StillServed`], [`UblkError::NotRecoverable`], [`UblkError::Timeout`].
    pub(crate) fn start_recovery(&mut self, id: u32, deadline: Duration) -> Result<DeviceInfo> {
        let begin = Instant::now();
        loop {
            let info = self.info(id)?;
            if !info.flags.contains(Features::USER_RECOVERY) {
                return Err(UblkError::NotRecoverable { id });
            }
            match self.plain(START_RECOVERY, header(id), QUICK) {
                Ok(()) => return self.info(id),
                Err(UblkError::StillServed { .. }) if begin.elapsed() < deadline => {
                    std::thread::sleep(POLL_STEP);
                }
                Err(UblkError::StillServed { .. }) => {
                    return Err(UblkError::StillServed { id, pid: info.server_pid });
                }
                // If an abandoned command completes later, the next one completes, too, or is
                // refused as below.
                Err(UblkError::Timeout { .. }) if begin.elapsed() < deadline => {}
                // Kernels before 6.16 refuse a second START_USER_RECOVERY when the first one's
                // process died before it fetched anything. The device is ready for a server all the
                // same.
                Err(UblkError::Refused { source, .. })
                    if source.raw_os_error() == Some(libc::EINVAL)
                        && info.state == DeviceState::Quiesced =>
                {
                    return Ok(info);
                }
                Err(other) => return Err(other),
            }
        }
    }

    /// Waits until the driver knows that nobody serves a live disk.
    ///
    /// # Errors
    /// [`UblkError::StillServed`] at the deadline; the driver does not answer.
    pub(crate) fn wait_without_server(&mut self, id: u32, deadline: Duration) -> Result<()> {
        let begin = Instant::now();
        loop {
            let info = self.info(id)?;
            if info.state != DeviceState::Live {
                return Ok(());
            }
            if begin.elapsed() >= deadline {
                return Err(UblkError::StillServed { id, pid: info.server_pid });
            }
            std::thread::sleep(POLL_STEP);
        }
    }

    /// Hands the disk to this process. Waits as [`start`](Self::start) does.
    ///
    /// # Errors
    /// [`UblkError::Timeout`] when a queue is not ready in time.
    pub(crate) fn end_recovery(
        &mut self,
        id: u32,
        more: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<()> {
        let header = CtrlCmd { data: own_pid().unsigned_abs().into(), ..header(id) };
        self.plain_while(END_RECOVERY, header, more)
    }

    /// The device with `token`, if it exists. `id` is its last number; without it, only devices
    /// with a node in `/dev` are searched.
    ///
    /// # Errors
    /// The driver does not answer for some device, which may have the token.
    pub fn find(&mut self, token: DeviceToken, id: Option<u32>) -> Result<Option<DeviceInfo>> {
        let noted = id.map(|id| self.info(id));
        marked(token, noted, || self.list())
    }

    /// All devices that have a node in `/dev`, by id.
    ///
    /// # Errors
    /// `/dev` cannot be read, or the driver does not answer for one of them.
    pub(crate) fn list(&mut self) -> Result<Vec<DeviceInfo>> {
        let nodes = std::fs::read_dir("/dev").map_err(|e| UblkError::system("listing /dev", e))?;
        let mut ids: Vec<u32> = nodes
            .filter_map(|node| node.ok()?.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok())
            .collect();
        ids.sort_unstable();
        let mut devices = Vec::new();
        for id in ids {
            devices.extend(if_there(self.info(id))?);
        }
        Ok(devices)
    }

    /// Waits for `/dev/ublkcN` to exist as the device's own node.
    ///
    /// # Errors
    /// [`UblkError::NoNode`].
    pub(crate) fn wait_char_node(&mut self, id: u32, deadline: Duration) -> Result<PathBuf> {
        let devt = self.raw_params(id)?.devt;
        let path = char_path(id);
        wait_node(&path, (devt.char_major, devt.char_minor), deadline).map(|()| path)
    }

    /// Waits for `/dev/ublkbN` to exist as the device's own disk.
    ///
    /// # Errors
    /// [`UblkError::NoNode`].
    pub(crate) fn wait_disk_node(&mut self, id: u32, deadline: Duration) -> Result<PathBuf> {
        let devt = self.raw_params(id)?.devt;
        let path = disk_path(id);
        wait_node(&path, (devt.disk_major, devt.disk_minor), deadline).map(|()| path)
    }
}

/// The numbers of the bits that are set.
fn cpus_in(words: &[u64]) -> Vec<usize> {
    let bits = 64 * words.len();
    (0..bits).filter(|cpu| words[cpu / 64] >> (cpu % 64) & 1 == 1).collect()
}

fn own_pid() -> i32 {
    narrow(std::process::id())
}

/// A device may go between the list and the query. That is no error; any other error does not prove
/// that the device is gone.
fn if_there(answer: Result<DeviceInfo>) -> Result<Option<DeviceInfo>> {
    match answer {
        Ok(info) => Ok(Some(info)),
        Err(UblkError::NoSuchDevice { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The device with `token`: at its known number, or among all devices.
fn marked(
    token: DeviceToken,
    noted: Option<Result<DeviceInfo>>,
    list: impl FnOnce() -> Result<Vec<DeviceInfo>>,
) -> Result<Option<DeviceInfo>> {
    let is_it = |info: &DeviceInfo| info.token == Some(token);
    if let Some(answer) = noted
        && let Some(info) = if_there(answer)?.filter(is_it)
    {
        return Ok(Some(info));
    }
    Ok(list()?.into_iter().find(is_it))
}

#[cfg(test)]
mod tests {
    use super::command::{refusal, timeout};
    use super::*;
    use crate::front::ublk::abi;

    #[test]
    fn a_device_is_gone_only_if_the_driver_says_so() {
        let token = DeviceToken::new(7);
        let there = |id, token| {
            let info = DeviceInfo::from_abi(&abi::DevInfo { dev_id: id, ..Default::default() });
            DeviceInfo { token, ..info }
        };
        let gone = || Err(UblkError::NoSuchDevice { id: 3 });
        let other = || there(3, Some(DeviceToken::new(8)));
        let mute = || Err(timeout(INFO, 3, QUICK, false));
        let refused = || Err(refusal(INFO, 3, libc::EINTR));
        let none = || Ok(Vec::new());
        let id = |found: Result<Option<DeviceInfo>>| found.unwrap().map(|info| info.id);
        assert_eq!(id(marked(token, Some(Ok(there(3, Some(token)))), none)), Some(3));
        assert_eq!(id(marked(token, Some(gone()), none)), None);
        assert_eq!(id(marked(token, Some(Ok(other())), none)), None);
        assert_eq!(id(marked(token, None, none)), None);
        // The device is not where it was noted.
        for noted in [None, Some(gone()), Some(Ok(other()))] {
            let listed = || Ok(vec![there(4, None), there(5, Some(token))]);
            assert_eq!(id(marked(token, noted, listed)), Some(5));
        }
        // A device that does not answer is not gone, even if it was noted or listed.
        assert!(marked(token, Some(mute()), none).is_err());
        assert!(marked(token, Some(refused()), none).is_err());
        assert!(
            marked(token, Some(gone()), || Err(UblkError::StillServed { id: 9, pid: None }))
                .is_err()
        );
        assert!(if_there(mute()).is_err() && if_there(refused()).is_err());
        assert_eq!(if_there(gone()).unwrap(), None);
    }
}
