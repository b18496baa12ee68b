//! The ublk device of a mount: its parameters from what the volume is, and who uses it.

use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use rblk_protocol::{OpenReply, VolumeFlags};

use super::Mount;
use super::note::NO_DEVICE;
use crate::session::QueueWish;
use crate::ublk::{
    Control, Device, DeviceSpec, DeviceToken, DiscardParams, DiskParams, Features, Recovery,
    UblkError,
};

/// Longest discard or write-zeroes of one command, in sectors: 1 GiB.
const RANGE_SECTORS_MAX: u32 = 1 << 21;

/// The kernel takes no less than 4 for the number of requests.
const DEPTH_TO_SPARE: u16 = 5;

const NO_NOTE: &str = "writing the note by which the device could be recovered";

impl Mount {
    /// Adds the device, whose disk is not there yet. It is noted before, by its mark, and after, by
    /// its number: so there is never one that nobody knows of. Without a note there is no device:
    /// nobody could recover it.
    pub(super) fn add_device(&mut self, control: Control) -> anyhow::Result<Device> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| anyhow!("random numbers: {error}"))?;
        let token = DeviceToken::new(u64::from_ne_bytes(random));
        self.device = Some((NO_DEVICE, token));
        self.must_note().context(NO_NOTE)?;
        let known = &self.known;
        let params = params(&known.volume, &known.wish);
        let mut spec =
            DeviceSpec::new(known.queues, known.wish.depth.get(), known.wish.io_max_bytes);
        spec.id = self.config.device_id;
        // A request that a dead process held comes again to the next one.
        spec.recovery = Recovery::Reissue;
        spec.token = Some(token);
        let device = aside(|| Device::add(control, spec, params))?;
        // The driver cuts the number of queues to that of the CPUs.
        self.known.queues = device.info().queues;
        self.device = Some((device.info().id, token));
        self.must_note().context(NO_NOTE)?;
        Ok(device)
    }
}

/// Does it on a thread of its own, and waits. To a thread that gives the driver commands the kernel
/// adds a worker, which lives as long as that thread does, and wakes every 5 s.
pub(super) fn aside<T: Send>(
    what: impl FnOnce() -> Result<T, UblkError> + Send,
) -> Result<T, UblkError> {
    let named = std::thread::Builder::new().name("rblk-driver".to_owned());
    std::thread::scope(|scope| match named.spawn_scoped(scope, what) {
        Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        Err(source) => Err(UblkError::System { action: "starting a thread".to_owned(), source }),
    })
}

/// Refuses a number that is taken, before anything is asked of the target: taking a volume over
/// cannot be undone.
pub(super) fn must_be_free(control: &mut Control, id: Option<u32>) -> Result<(), UblkError> {
    match id {
        Some(id) if control.info(id).is_ok() => Err(UblkError::DeviceIdTaken { id }),
        _ => Ok(()),
    }
}

/// What is set on a new disk, in the background: the kernel waits for the requests under way.
pub(super) fn tune_disk(device: &mut Device) {
    let (id, depth) = (device.info().id, device.info().depth);
    let spare = !device.control().features().contains(Features::QUIESCE) && depth >= DEPTH_TO_SPARE;
    std::thread::spawn(move || {
        let spared = spare.then(|| depth - 1);
        tune(id, spared);
    });
}

/// Has requests go to the queue as they come, where the kernel would sort them first: the disk of
/// the target does that, and with a scheduler every request takes one thread more, and batches are
/// torn apart. And has the kernel leave a tag of each queue unused (`requests`), where it needs
/// that to see this process die at once: before 6.16 it does so by a fetch that is idle, and when
/// there is none, by a timer of 30 s. What the disk was told stays with it when another process
/// takes it over.
///
/// The kernel waits without end when the target goes at that moment. So it is a process of its own
/// that writes: it holds nothing of ours, and ours can end.
fn tune(id: u32, requests: Option<u16>) {
    let queue = format!("/sys/block/ublkb{id}/queue");
    let unsorted = || {
        std::fs::read_to_string(format!("{queue}/scheduler")).is_ok_and(|s| s.contains("[none]"))
    };
    if unsorted() && requests.is_none() {
        return;
    }
    // With a scheduler `nr_requests` is the number of its own tags.
    let script =
        "echo none >\"$0/scheduler\" && { [ -z \"$1\" ] || echo \"$1\" >\"$0/nr_requests\"; }";
    let requests = requests.map(|n| n.to_string()).unwrap_or_default();
    let child = Command::new("/bin/sh")
        .args(["-c", script, &queue, &requests])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match child {
        Ok(status) if status.success() => {}
        how if !unsorted() => {
            tracing::warn!(?how, "{queue}/scheduler: `none` was not taken; more CPU time is used");
        }
        how => tracing::debug!(?how, "{queue}/nr_requests"),
    }
}

/// What the disk tells its users.
fn params(volume: &OpenReply, wish: &QueueWish) -> DiskParams {
    let block = volume.block_size.bytes();
    let sectors = volume.blocks.0.saturating_mul(u64::from(block / 512));
    let mut params = DiskParams::new(sectors, block, wish.io_max_bytes);
    // A page at least, so that file systems and readahead do not send less without need.
    params.physical_block = block.max(4096);
    params.io_min = block.max(4096);
    params.io_opt = wish.io_max_bytes;
    let has = |flag| volume.flags.has(flag);
    params.read_only = has(VolumeFlags::READ_ONLY);
    params.volatile_cache = has(VolumeFlags::VOLATILE_CACHE);
    params.fua = params.volatile_cache;
    let discard = has(VolumeFlags::DISCARD);
    if !params.read_only && (discard || has(VolumeFlags::WRITE_ZEROES)) {
        let granularity = volume
            .discard_granularity_bytes
            .max(block)
            .checked_next_power_of_two()
            .unwrap_or(block);
        params.discard = Some(DiscardParams {
            granularity,
            max_discard_sectors: if discard { RANGE_SECTORS_MAX } else { 0 },
            max_write_zeroes_sectors: if has(VolumeFlags::WRITE_ZEROES) {
                RANGE_SECTORS_MAX
            } else {
                0
            },
        });
    }
    params
}

/// Who uses a block device, in words; `None` when nobody does. Opening a disk may read it, and
/// closing it may write it back: not in the process that serves it.
pub(super) fn find_holder(device: &str) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/1/mounts")
        .or_else(|_| std::fs::read_to_string("/proc/mounts"));
    if let Ok(mounts) = mounts
        && let Some(line) = mounts.lines().find(|l| l.split(' ').next() == Some(device))
    {
        let at = line.split(' ').nth(1).unwrap_or("?");
        return Some(format!("mounted at {at}; `umount {at}` first, or use --force"));
    }
    let name = device.rsplit('/').next().unwrap_or(device);
    let holders = std::fs::read_dir(format!("/sys/block/{name}/holders")).ok()?;
    let names: Vec<String> =
        holders.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
    if !names.is_empty() {
        return Some(format!("held by {}", names.join(", ")));
    }
    // Claimed exclusively: a mount in another namespace, swap, or an exclusive opener.
    use std::os::unix::fs::OpenOptionsExt;
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device);
    match opened {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            Some("something holds it exclusively (a mount elsewhere, swap, device mapper); --force ignores that".to_owned())
        }
        _ => None,
    }
}
