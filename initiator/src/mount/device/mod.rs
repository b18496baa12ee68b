//! The ublk device of a mount, with parameters derived from the volume.

mod block_device;
pub(crate) mod disk;
pub mod file_systems;
pub mod holder;
pub mod namespace;
mod openers;
pub(super) mod queue_settings;
pub(super) mod queues;
pub mod request_limit;
#[allow(unsafe_code)] // descriptors of processes have no safe call
pub mod server;
pub mod write_back;

use std::sync::{Arc, mpsc};

use rblk_protocol::{OpenReply, VolumeFlags};

use crate::front::ublk::{
    Control, Device, DeviceSpec, DeviceToken, DiscardParams, DiskParams, Features, Recovery,
    UblkError,
};
use crate::volume::session::QueueWish;
use crate::volume::setup::Setup;

/// Longest discard or write-zeroes of one command, in sectors: 1 GiB.
const RANGE_SECTORS_MAX: u32 = 1 << 21;

/// Adds the device of a mount. Its disk does not exist yet.
///
/// # Errors
/// The driver's.
pub(super) fn add(
    control: Control,
    setup: &Setup,
    volume: &OpenReply,
    id: Option<u32>,
    token: DeviceToken,
) -> Result<Device, UblkError> {
    let wish = &setup.wish;
    let mut spec = DeviceSpec::new(setup.queues, wish.depth.get(), wish.io_max_bytes);
    spec.id = id;
    // The next server gets the requests of a dead one again.
    spec.recovery = Recovery::Reissue;
    spec.token = Some(token);
    let shared = setup.shared.regions();
    if !shared.is_empty() {
        spec.need = spec.need | Features::SHMEM_ZC;
    }
    let (shared, params) = (Arc::clone(shared), params(volume, wish));
    aside(move || {
        let mut device = Device::add(control, spec, params)?;
        shared.iter().try_for_each(|memory| device.share(memory))?;
        Ok(device)
    })
}

/// Runs a closure on a thread of its own, and waits for its result. The kernel adds a worker to a
/// thread that gives commands to the driver. The worker lives as long as that thread, and wakes
/// every 5 s.
///
/// Nothing waits for the end of the thread: a thread ends only after the kernel is done with its
/// commands, and the kernel never is with a command in which it crashed.
pub(super) fn aside<T: Send + 'static>(
    what: impl FnOnce() -> Result<T, UblkError> + Send + 'static,
) -> Result<T, UblkError> {
    let (answer, answers) = mpsc::sync_channel(1);
    let named = std::thread::Builder::new().name("rblk-driver".to_owned());
    let thread = named.spawn(move || {
        // The receiver waits.
        let _ = answer.send(what());
    });
    let thread = thread.map_err(|e| UblkError::system("starting a thread", e))?;
    match answers.recv() {
        Ok(result) => result,
        // The closure panicked.
        Err(_) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => Err(UblkError::system(
                "asking the ublk driver",
                std::io::ErrorKind::BrokenPipe.into(),
            )),
        },
    }
}

/// Refuses a taken device number before anything is asked of the target: a take-over of a volume
/// cannot be undone.
pub(super) fn must_be_free(control: &mut Control, id: Option<u32>) -> Result<(), UblkError> {
    match id {
        Some(id) if control.info(id).is_ok() => Err(UblkError::DeviceIdTaken { id }),
        _ => Ok(()),
    }
}

/// The size of the disk of a volume.
pub(super) fn sectors(volume: &OpenReply) -> u64 {
    volume.blocks.0.saturating_mul(u64::from(volume.block_size.bytes() / 512))
}

/// The parameters of the disk.
fn params(volume: &OpenReply, wish: &QueueWish) -> DiskParams {
    let block = volume.block_size.bytes();
    let mut params = DiskParams::new(sectors(volume), block, wish.io_max_bytes);
    // At least a page, so that file systems and readahead send no requests below a page.
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
