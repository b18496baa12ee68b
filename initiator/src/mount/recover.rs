//! Recovers the device of a mount after its process died, or handed it over: by its note, on the
//! same disk. The users of the disk notice a pause. The target need not be reachable: requests wait
//! for it as in any other mount.
//!
//! The driver sends unanswered requests of the dead process again (REISSUE). So a request may run
//! twice. The LOGIN in a higher epoch makes that safe: the target answers it when nothing of the
//! older epochs can happen any more.
//!
//! A write that the dead process acknowledged without a later FLUSH is in one of two states. Either
//! the target still has it and can make it durable: then its verifier is the note's. Or it may be
//! lost, and FLUSHes fail as `on_loss` requires: the copies in the dead process died with it. If
//! the dead process had a loss to report, the loss is in the note, and this process reports it.

use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::{MountConfig, OnLoss};
use rblk_fabric::Region;
use rblk_protocol::VolumeFlags;
use tokio::sync::mpsc;

use super::AlreadyMounted;
use super::end_signals::EndSignals;
use super::mounted::Mount;
use super::note::Note;
use super::note::leftovers::{Claimed, ENDING_DEADLINE, Purpose, claim, find};
use super::serving::Serving;
use super::socket::MountSocket;
use super::start::start_device;
use crate::engine::durability::Durability;
use crate::front::ublk::{Control, Device, DeviceInfo, DiskParams};
use crate::volume::begin::queue_memory;
use crate::volume::host_identity::host_name;
use crate::volume::setup::credentials_of;
use crate::volume::{Volume, target_keys};
use rblk_operate::mount::configured::Configured;
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_ask::lock_unless_served;
use rblk_operate::mount::not_there::NotMounted;

const PAGE: usize = 4096;
/// Time for the device of a failed mount to go away.
const GONE_DEADLINE: Duration = Duration::from_secs(5);
const GONE_STEP: Duration = Duration::from_millis(10);

/// The device does not match its note.
#[derive(Debug, thiserror::Error)]
#[error(
    "{device} has {what}, unlike the note of mount `{name}`; `rblk-initiator umount --force {name}` gives it up"
)]
struct Mismatch {
    name: String,
    device: String,
    what: String,
}

/// Takes the lock of a name, or the lock that this process inherited.
///
/// # Errors
/// [`AlreadyMounted`], or the system's.
pub(super) async fn lock(name: &str, inherited: bool) -> anyhow::Result<MountLock> {
    let lock = match inherited {
        true => MountLock::inherited(name).map(Some),
        false => lock_unless_served(name).await,
    };
    let lock = lock.with_context(|| format!("the lock of mount {name}"))?;
    lock.ok_or_else(|| AlreadyMounted { name: name.to_owned() }.into())
}

/// Takes over the device of a mount, by its note. The lock is that of the name. Blocks before the
/// first await until the driver has noticed the death of the old process.
///
/// # Errors
/// [`NotMounted`] when there is nothing to recover; any reason why the device cannot be served,
/// which then stays for another try.
pub(super) async fn resume(lock: MountLock, signals: &mut EndSignals) -> anyhow::Result<Serving> {
    let Claimed::Waiting(note) = claim(&lock, |_| Purpose::Recover)? else {
        return Err(NotMounted { what: lock.name().to_owned() }.into());
    };
    take_over(lock, *note, None, signals).await
}

/// Checks that this program could recover a mount: its note is valid. Changes nothing.
///
/// # Errors
/// [`NotMounted`], or the note or the keys of the mount's file are invalid.
pub fn check(name: &str) -> anyhow::Result<()> {
    let note = Note::read(name)?.ok_or_else(|| NotMounted { what: name.to_owned() })?;
    target_keys::check(&note.config, note.keys_file().as_ref())?;
    note.restore(&note.config, host_name(note.config.host_name.as_deref())).map(drop)
}

/// Whether `config` names the mount of the note: the same volume by an address of the same target,
/// as writable. The rest may differ.
pub(super) fn is_same(note: &Note, config: &MountConfig) -> bool {
    note.config.volume == config.volume
        && note.config.read_only == config.read_only
        && note.config.shared == config.shared
        && config.target.iter().any(|target| note.config.target.contains(target))
}

/// Takes over the device of a note. `configured` sets the values that the device leaves open;
/// without it, they come from the note, and the keys from the file of the note.
pub(super) async fn take_over(
    lock: MountLock,
    note: Note,
    configured: Option<&Configured>,
    signals: &mut EndSignals,
) -> anyhow::Result<Serving> {
    let socket = MountSocket::bind(&lock).context("the mount's socket")?;
    let mut mount = mount_of(lock.name(), &note, configured)?;
    let id = note.device_id;
    let recovered =
        tokio::task::spawn_blocking(move || Device::recover(Control::open()?, id, ENDING_DEADLINE));
    let mut device = recovered.await?.with_context(|| format!("taking over {}", note.disk()))?;
    if let Some(what) = mismatch(mount.volume(), &note, device.info(), device.params()) {
        let (name, device) = (lock.name().to_owned(), note.disk());
        return Err(Mismatch { name, device, what }.into());
    }
    mount.write_note();
    let (outbox, mut from_queues) = mpsc::unbounded_channel();
    mount.start_queues(&mut device, &outbox)?;
    let device = start_device(&mut mount, device, &mut from_queues, signals).await?;
    tell(mount.disk(), &note);
    Ok(Serving { mount, device, socket, lock, from_queues })
}

/// Logs the takeover: of a process that died, or of this process before it became this program.
fn tell(device: &str, note: &Note) {
    let times = recovered_times(note);
    if note.pid == std::process::id() {
        tracing::info!(rblk_event = "hand-over", device, times, "goes on with its device");
    } else {
        let dead = note.pid;
        let text = "took over the device of a process that ended";
        tracing::info!(rblk_event = "recover", device, dead, times, "{text}");
    }
}

fn recovered_times(note: &Note) -> u32 {
    note.recovered.saturating_add(1)
}

/// The mount of a note, with a lost target. All memory is allocated here, before any request waits
/// for this process.
fn mount_of(name: &str, note: &Note, configured: Option<&Configured>) -> anyhow::Result<Mount> {
    let (config, credentials, keys_file) = match configured {
        Some(Configured { config, keys_file }) => {
            (config.clone(), credentials_of(config)?, keys_file.clone())
        }
        None => {
            let keys_file = note.keys_file();
            let (config, credentials) = target_keys::taken_over(&note.config, keys_file.as_ref())?;
            (config, credentials, keys_file)
        }
    };
    let (mut setup, facts) = note.restore(&config, host_name(config.host_name.as_deref()))?;
    (setup.credentials, setup.keys_file) = (credentials, keys_file);
    for _ in 0..setup.queues {
        let memory = queue_memory(&setup.wish, 0)?;
        touch(&memory);
        setup.buffers.push(Some(memory));
    }
    let volatile = facts.volume.flags.has(VolumeFlags::VOLATILE_CACHE);
    let config = {
        let mut config = config;
        config.on_loss = on_loss(note, &config);
        config
    };
    let doubt = volatile && note.maybe_unflushed;
    let durability = match note.loss_untold {
        true => Durability::inheriting_loss(config.on_loss, doubt),
        false if doubt => Durability::inheriting(config.on_loss),
        false => Durability::new(config.on_loss),
    };
    let times = recovered_times(note);
    let volume = Volume::lost(&config, setup, facts, durability);
    let mut mount = Mount::recovered(name, volume, times);
    mount.adopt_device(note.device_id, note.token);
    Ok(mount)
}

/// The mode after a loss: that of `config`. But a loss that had to fail every FLUSH still does:
/// some users of the disk may not know of it yet.
fn on_loss(note: &Note, config: &MountConfig) -> OnLoss {
    match note.loss_untold {
        true => note.config.on_loss.max(config.on_loss),
        false => config.on_loss,
    }
}

/// Makes the system allocate the pages of the memory now.
fn touch(memory: &Region) {
    (0..memory.len()).step_by(PAGE).for_each(|at| memory.write(at, &[0]));
}

/// The property of a device that contradicts the mount.
fn mismatch(
    volume: &Volume,
    note: &Note,
    info: &DeviceInfo,
    params: &DiskParams,
) -> Option<String> {
    let (setup, volume) = (volume.setup(), &volume.facts().volume);
    let block = volume.block_size.bytes();
    // The disk may not know a new size or read-only mode of the volume yet: it follows when the
    // target is connected.
    let read_only = note.config.read_only;
    [
        (info.token != Some(note.token), "another token".to_owned()),
        (info.queues != setup.queues, format!("{} queues", info.queues)),
        (info.depth != setup.wish.depth.get(), format!("{} tags a queue", info.depth)),
        (
            info.max_io_bytes != setup.wish.io_max_bytes,
            format!("buffers of {} bytes", info.max_io_bytes),
        ),
        (params.logical_block != block, format!("blocks of {} bytes", params.logical_block)),
        (params.read_only != read_only, format!("read_only = {}", params.read_only)),
    ]
    .into_iter()
    .find_map(|(differs, what)| differs.then_some(what))
}

/// Removes the note of a mount that could not begin, unless its device still exists.
pub(super) async fn forget_if_gone(name: &str) {
    let begun = Instant::now();
    while begun.elapsed() < GONE_DEADLINE {
        match find(name) {
            Ok(found) if found.device.is_none() => return Note::remove(name),
            // The device is removed once its queue threads have left.
            Ok(_) => tokio::time::sleep(GONE_STEP).await,
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_every_flush_tells_outlives_a_change_of_the_mode() {
        use OnLoss::{Once, UntilRemount};
        for (noted, loss, asked, expected) in [
            (Once, false, UntilRemount, UntilRemount),
            (UntilRemount, false, Once, Once),
            (UntilRemount, true, Once, UntilRemount),
            (UntilRemount, true, UntilRemount, UntilRemount),
            (Once, true, UntilRemount, UntilRemount),
            (Once, true, Once, Once),
        ] {
            let mut note = Note::sample();
            note.config.on_loss = noted;
            note.loss_untold = loss;
            let mut config = note.config.clone();
            config.on_loss = asked;
            assert_eq!(on_loss(&note, &config), expected, "{noted} {loss} {asked}");
        }
    }
}
