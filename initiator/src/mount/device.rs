//! The ublk device of a mount: its parameters from what the volume is, and who uses it.

use rblk_config::MountConfig;
use rblk_protocol::{OpenReply, VolumeFlags};

use crate::session::QueueWish;
use crate::ublk::Control;
use crate::ublk::Device;
use crate::ublk::UblkError;
use crate::ublk::{DeviceSpec, DiscardParams, DiskParams};

/// Longest discard or write-zeroes of one command, in sectors: 1 GiB.
const RANGE_SECTORS_MAX: u32 = 1 << 21;

pub(super) fn add(
    control: Control,
    config: &MountConfig,
    volume: &OpenReply,
    queues: u16,
    wish: &QueueWish,
) -> Result<Device, UblkError> {
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
    let mut spec = DeviceSpec::new(queues, wish.depth.get(), wish.io_max_bytes);
    spec.id = config.device_id;
    // Until a restarted initiator can take devices over, a device must not outlive its server.
    spec.recovery = crate::ublk::Recovery::Never;
    Device::add(control, spec, params)
}

/// Who uses a block device, in words; `None` when nobody does.
pub(super) fn holder(device: &str) -> Option<String> {
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
