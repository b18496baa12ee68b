//! A mount from the first connect to its unmount: [`run`] and [`recover`]. One task owns the
//! session, the device and the mail to the queue threads.
//!
//! Order of the start: lock of the name, leftovers of a dead mount of that name (a disk that waits
//! is recovered), socket, session, volume, buffers, I/O connections, note, ublk device, queue
//! threads, START_DEV, ready. A failure before START_DEV leaves nothing. After it, only an unmount
//! removes the device: any other end of this process leaves the device to the next one.
//!
//! The loss of the target is a stall: requests wait in their queues while the session reconnects in
//! a higher epoch. The target admits it when nothing of the old epoch is left, and every unanswered
//! request is sent again. Only `--fail-after` turns a stall into errors, and they end when the
//! target is back.
//!
//! A volume that comes back with another write verifier may have lost acknowledged writes that no
//! FLUSH covered. Before the queues go on, those writes are written again (`retain`), or
//! FLUSHes fail (`on_loss`).
//!
//! ```text
//! run, recover -> waiting, begin              a Mount with its first session
//!              |  recover                     a Mount of a note, with a lost target
//!              '> Serving -> UnmountProgress  the loop, and how it ends
//! Guest                                       a Mount with a socket in place of a device: a guest
//!                                             has its queues
//!                    '> Mount -> Volume -> TargetLink -> Course (decides), Tries
//!                             |         '> Queues           Tries -> resolve_unflushed
//!                             '> NoteKeeper, Disk
//! ```

pub mod device;
mod end_signals;
mod first_connect;
mod guest;
mod guest_end;
mod kernel_guard;
mod mounted;
pub mod note;
mod recover;
mod serving;
pub mod socket;
mod start;
mod unmount;
mod upgrade;

use anyhow::Context;
use rblk_protocol::Generation;
use tokio::sync::mpsc;

use crate::front::disk;
use crate::front::ublk::{Control, Device};
use crate::queue::FromQueue;
use crate::volume::begin::First;
use crate::volume::session::HostIdentity;
use end_signals::EndSignals;
pub use first_connect::ToldToEnd;
pub(crate) use guest::BadSocket;
pub use guest::{GuestSocket, run_guest};
pub(crate) use kernel_guard::BadKernel;
use mounted::Mount;
use note::leftovers::{self, Claimed, Purpose};
use note::neighbour;
use rblk_operate::mount::configured::Configured;
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_status::MountStatus;
use recover::FormerServer;
pub use recover::check;
use serving::{DeviceHandOver, Serving};
use socket::MountSocket;

/// Called with the state of a mount once its device exists.
pub type OnReady<'r> = &'r mut dyn FnMut(&MountStatus);

/// A mount of that name exists already.
#[derive(Debug, thiserror::Error)]
#[error("`{name}` is mounted already; see `rblk-initiator list`, or give another --name")]
pub(crate) struct AlreadyMounted {
    /// The name.
    pub name: String,
}

/// What the user allows to a mount that begins.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Consent {
    /// To fence the host that holds the volume: in the first OPEN, and in no later one.
    pub take_over: bool,
    /// To use the ublk of a kernel that is known to fail.
    pub any_kernel: bool,
}

/// Mounts a volume, and serves until it is unmounted.
///
/// # Errors
/// Any reason why the volume cannot be mounted, or a queue that broke.
pub async fn run(
    configured: &Configured,
    name: &str,
    host: HostIdentity,
    consent: Consent,
    on_ready: OnReady<'_>,
) -> anyhow::Result<()> {
    let config = &configured.config;
    let mut signals = EndSignals::listen()?;
    let lock = recover::lock(name, false).await?;
    // Before anything is asked of the target.
    let same = |note: Option<&note::Note>| note.is_some_and(|note| recover::is_same(note, config));
    let claimed = leftovers::claim(&lock, |note| Purpose::Mount { same: same(note) })?;
    let serving = match claimed {
        Claimed::Waiting(note) => {
            recover::take_over(lock, (*note, FormerServer::Ended), Some(configured), &mut signals)
                .await?
        }
        Claimed::Free | Claimed::Cleared => {
            kernel_guard::must_serve_disks(consent.any_kernel)?;
            if !consent.take_over {
                neighbour::must_not_hold(name, config, host.id, None)?;
            }
            begin(configured, lock, host, consent.take_over, &mut signals).await?
        }
    };
    serve(serving, &mut signals, on_ready).await
}

/// Recovers the mount of a name, and serves until it is unmounted. With `inherited`, the standard
/// input of this process holds the name's lock. Blocks before the first await until the driver has
/// noticed the death of the old process.
///
/// # Errors
/// [`NotMounted`](rblk_operate::mount::not_there::NotMounted) when there is nothing to recover,
/// [`AlreadyMounted`] when another process serves it; any reason why the device cannot be served,
/// which then stays for another try.
pub async fn recover(name: &str, inherited: bool, on_ready: OnReady<'_>) -> anyhow::Result<()> {
    let mut signals = EndSignals::listen()?;
    let lock = recover::lock(name, inherited).await?;
    // Only a process that hands a device over leaves its lock to this one.
    let before = if inherited { FormerServer::Itself } else { FormerServer::Ended };
    let serving = recover::resume(lock, before, &mut signals).await?;
    serve(serving, &mut signals, on_ready).await
}

/// Starts a new mount.
async fn begin(
    configured: &Configured,
    lock: MountLock,
    host: HostIdentity,
    take_over: bool,
    signals: &mut EndSignals,
) -> anyhow::Result<Serving> {
    let config = &configured.config;
    let id = config.device_id;
    let control = device::aside(move || {
        let mut control = Control::open()?;
        device::must_be_free(&mut control, id)?;
        Ok(control)
    })?;
    let socket = MountSocket::bind(&lock).context("the mount's socket")?;
    let (outbox, mut from_queues) = mpsc::unbounded_channel();
    let (volume, paths) = {
        let first = First {
            config,
            keys_file: configured.keys_file.as_ref(),
            take_over,
            may_open: &neighbour::may_open(lock.name(), config),
            front: disk::FRONT,
            generation: Generation::FRESH,
        };
        first_connect::connect(&socket, lock.name(), first, host, signals).await?
    };
    let mut mount = Mount::new(lock.name(), volume);
    let built = async {
        let mut device = mount.add_device(control)?;
        mount.start_queues(&mut device, &outbox)?;
        mount.volume_mut().connect_queues(paths);
        start_new(&mut mount, device, &mut from_queues, signals).await
    };
    match built.await {
        Ok(device) => Ok(Serving { mount, device, socket, lock, from_queues }),
        Err(error) => {
            // The failed start has removed the device.
            recover::forget_if_gone(lock.name()).await;
            Err(error)
        }
    }
}

async fn start_new(
    mount: &mut Mount,
    device: Device,
    from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    signals: &mut EndSignals,
) -> anyhow::Result<Device> {
    let mut device = start::start_device(mount, device, from_queues, signals).await?;
    device::queue_settings::tune_disk(&mut device);
    Ok(device)
}

/// Serves until the mount is unmounted, or breaks. Hands the device over on a command, and resumes
/// the mount if that fails.
async fn serve(
    mut serving: Serving,
    signals: &mut EndSignals,
    on_ready: OnReady<'_>,
) -> anyhow::Result<()> {
    loop {
        let ended = serving.serve(signals, &mut *on_ready).await?;
        let Some(DeviceHandOver { lock, program }) = ended else { return Ok(()) };
        let error = upgrade::become_program(&program, &lock);
        tracing::error!(%error, program = %program.display(), "cannot hand over; going on");
        serving = recover::resume(lock, FormerServer::Itself, signals).await?;
    }
}
