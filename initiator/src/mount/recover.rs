//! Going on with the device of a mount whose process died, or handed it over: by its note, on the
//! same disk, whose users notice a pause. The target need not be reachable: requests wait for it as
//! they do in any other mount.
//!
//! What the dead process had sent and got no answer to, the driver sends again (REISSUE), and so
//! may this process do twice what was done once. What makes that safe is the LOGIN in a higher
//! epoch: the target answers it when nothing of the older epochs can happen any more. What the dead
//! process had got an answer to, but no FLUSH for, is either still the target's to make durable
//! (its verifier is the note's), or may be lost, and then FLUSHes fail as `on_loss` says: the
//! copies that the dead one may have retained died with it. A loss that the dead process had to
//! tell is in the note, and this process has to tell it.

use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::{MountConfig, OnLoss};
use rblk_fabric::Region;
use rblk_protocol::VolumeFlags;
use tokio::sync::mpsc;

use super::lock::MountLock;
use super::note::{Doubts, Note};
use super::remains::{Claimed, ENDING_DEADLINE, Purpose, claim, find};
use super::signals::Signals;
use super::socket::MountSocket;
use super::upgrade::Serving;
use super::{AlreadyMounted, Mount, NotMounted, OnReady, begin};
use crate::durability::Durability;
use crate::identity::host_identity;
use crate::ublk::{Control, Device, DeviceInfo, DiskParams};

const PAGE: usize = 4096;
/// How soon it is noted that a loss came or was told, where FLUSHes tell each of many losses.
const NOTE_STEP: Duration = Duration::from_secs(1);
/// Time for a device to go that was added in vain.
const GONE_DEADLINE: Duration = Duration::from_secs(5);
const GONE_STEP: Duration = Duration::from_millis(10);

/// A device is not the one of its note.
#[derive(Debug, thiserror::Error)]
#[error(
    "{device} has {what}, which is not what the note of mount `{name}` says; `rblk-initiator umount --force {name}` \
     gives it up"
)]
struct Mismatch {
    name: String,
    device: String,
    what: String,
}

/// Takes the lock of a name, or uses the one that this process was started with.
///
/// # Errors
/// [`AlreadyMounted`], or the system's.
pub(super) async fn lock(name: &str, inherited: bool) -> anyhow::Result<MountLock> {
    let lock = match inherited {
        true => MountLock::inherited(name).map(Some),
        false => MountLock::take_unless_served(name).await,
    };
    let lock = lock.with_context(|| format!("the lock of mount {name}"))?;
    lock.ok_or_else(|| AlreadyMounted { name: name.to_owned() }.into())
}

/// Goes on with the mount of a name, and serves until it is unmounted. With `inherited`, the
/// standard input that this process was started with holds the name's lock. Blocks before the first
/// await for as long as the driver needs to see that the old process died.
///
/// # Errors
/// [`NotMounted`] when there is nothing to go on with, [`AlreadyMounted`] when somebody does;
/// anything that keeps the device from being served, which then stays for another try.
pub async fn run(name: &str, inherited: bool, on_ready: OnReady<'_>) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let lock = lock(name, inherited).await?;
    let Claimed::Waiting(note) = claim(&lock, |_| Purpose::Recover)? else {
        return Err(NotMounted { what: name.to_owned() }.into());
    };
    take_over(lock, *note, None, &mut signals).await?.run(&mut signals, on_ready).await
}

/// The same, in the process that has just let go of the device.
pub(super) async fn again(lock: MountLock, signals: &mut Signals) -> anyhow::Result<Serving> {
    let Claimed::Waiting(note) = claim(&lock, |_| Purpose::Recover)? else {
        return Err(NotMounted { what: lock.name().to_owned() }.into());
    };
    take_over(lock, *note, None, signals).await
}

/// Whether this program could go on with a mount: its note makes sense. Changes nothing.
///
/// # Errors
/// [`NotMounted`], or the note is of no use.
pub fn check(name: &str) -> anyhow::Result<()> {
    let note = Note::read(name)?.ok_or_else(|| NotMounted { what: name.to_owned() })?;
    let host = host_identity(note.config.host_name.as_deref());
    note.known(&note.config, host.name).map(drop)
}

/// Whether `config` asks for what the note says is mounted: the same volume by an address of the
/// same target, as writable. The rest may differ.
pub(super) fn is_same(note: &Note, config: &MountConfig) -> bool {
    note.config.volume == config.volume
        && note.config.read_only == config.read_only
        && note.config.shared == config.shared
        && config.target.iter().any(|target| note.config.target.contains(target))
}

/// Takes over the device of a note, with what `config` says wherever the device leaves a choice,
/// and the note's where that is none.
pub(super) async fn take_over(
    lock: MountLock,
    note: Note,
    config: Option<&MountConfig>,
    signals: &mut Signals,
) -> anyhow::Result<Serving> {
    let name = lock.name().to_owned();
    let config = config.unwrap_or(&note.config);
    let host = host_identity(config.host_name.as_deref());
    let socket = MountSocket::bind(&lock).context("the mount's socket")?;
    // All that can fail for want of memory comes first, while nobody waits for this process in
    // particular.
    let mut known = note.known(config, host.name)?;
    for _ in 0..known.queues {
        let memory = begin::queue_memory(&known.wish)?;
        touch(&memory);
        known.buffers.push(memory);
    }
    let volatile = known.volume.flags.has(VolumeFlags::VOLATILE_CACHE);
    let config = MountConfig { on_loss: on_loss(&note, config), ..config.clone() };
    let mut mount = Mount::from_known(&config, &name, known);
    let doubt = volatile && note.maybe_unflushed;
    mount.durability = match note.loss_untold {
        true => Durability::inheriting_loss(config.on_loss, doubt),
        false if doubt => Durability::inheriting(config.on_loss),
        false => mount.durability,
    };
    mount.status.recovered = note.recovered.saturating_add(1);
    mount.device = Some((note.device_id, note.token));

    let id = note.device_id;
    let recovered =
        tokio::task::spawn_blocking(move || Device::recover(Control::open()?, id, ENDING_DEADLINE));
    let device = recovered.await?.with_context(|| format!("taking over {}", note.disk()))?;
    if let Some(what) = mismatch(&mount, device.info(), device.params()) {
        return Err(Mismatch { name, device: note.disk(), what }.into());
    }
    mount.note();
    let (outbox, mut from_queues) = mpsc::unbounded_channel();
    mount.start_queues(&device, &outbox)?;
    let device = mount.start_device(device, &mut from_queues, signals).await?;
    tracing::info!(
        device = mount.status.device,
        dead = note.pid,
        times = mount.status.recovered,
        "took over the device of a process that ended"
    );
    Ok(Serving { mount, device, socket, lock, from_queues })
}

/// Which FLUSHes are to fail after a loss: what `config` says. But a loss after which every FLUSH
/// had to fail goes on failing them: the users of the disk may not have heard of it yet.
fn on_loss(note: &Note, config: &MountConfig) -> OnLoss {
    match note.loss_untold {
        true => note.config.on_loss.max(config.on_loss),
        false => config.on_loss,
    }
}

/// Has the system find the memory now.
fn touch(memory: &Region) {
    (0..memory.len()).step_by(PAGE).for_each(|at| memory.write(at, &[0]));
}

/// What of a device is not as the mount needs it.
fn mismatch(mount: &Mount, info: &DeviceInfo, params: &DiskParams) -> Option<String> {
    let known = &mount.known;
    let block = known.volume.block_size.bytes();
    let sectors = known.volume.blocks.0.saturating_mul(u64::from(block / 512));
    let token = mount.device.map(|(_, token)| token);
    let read_only = known.volume.flags.has(VolumeFlags::READ_ONLY);
    [
        (info.token != token, "another token".to_owned()),
        (info.queues != known.queues, format!("{} queues", info.queues)),
        (info.depth != known.wish.depth.get(), format!("{} tags a queue", info.depth)),
        (
            info.max_io_bytes != known.wish.io_max_bytes,
            format!("buffers of {} bytes", info.max_io_bytes),
        ),
        (params.sectors != sectors, format!("{} sectors", params.sectors)),
        (params.logical_block != block, format!("blocks of {} bytes", params.logical_block)),
        (params.read_only != read_only, format!("read_only = {}", params.read_only)),
    ]
    .into_iter()
    .find_map(|(differs, what)| differs.then_some(what))
}

impl Mount {
    /// Writes down what another process needs to go on with the device, once there is one. Where
    /// that fails the mount goes on: what is lost is the way to recover it.
    pub(super) fn note(&mut self) {
        self.note_with(self.status.volatile_cache);
    }

    /// The same, with a word on whether acknowledged writes may be in the target's memory only.
    pub(super) fn note_with(&mut self, maybe_unflushed: bool) {
        if let Err(error) = self.write_note(maybe_unflushed) {
            tracing::error!(%error, "cannot note the state of the mount: it could not be recovered now");
        }
    }

    /// The same, for whom the note matters more than to go on.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn must_note(&mut self) -> std::io::Result<()> {
        self.write_note(self.status.volatile_cache)
    }

    /// Whether a loss became known, or was told, since the last note: a process that goes on by it
    /// would tell a loss again, or not at all.
    pub(super) fn owes_note(&self) -> bool {
        self.device.is_some() && self.noted_loss != self.durability.has_untold_loss()
    }

    /// How long a change of that may wait. A loss that every FLUSH tells is noted once in the life
    /// of the mount, and at once: the next process has to know of it.
    pub(super) fn note_step(&self) -> Duration {
        match self.config.on_loss {
            OnLoss::Once => NOTE_STEP,
            OnLoss::UntilRemount => Duration::ZERO,
        }
    }

    fn write_note(&mut self, maybe_unflushed: bool) -> std::io::Result<()> {
        let Some(device) = self.device else { return Ok(()) };
        let doubts = Doubts {
            maybe_unflushed,
            loss_untold: self.durability.has_untold_loss(),
            recovered: self.status.recovered,
        };
        // Also where it fails: then it is tried again with the next change.
        self.noted_loss = doubts.loss_untold;
        Note::of(&self.name, device, &self.config, &self.known, doubts).write()
    }
}

/// Forgets the note of a mount that could not begin, unless its device is still there.
pub(super) async fn forget_if_gone(name: &str) {
    let begun = Instant::now();
    while begun.elapsed() < GONE_DEADLINE {
        match find(name) {
            Ok(found) if found.device.is_none() => return Note::remove(name),
            // It goes when its queue threads have let go.
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
            let config = MountConfig { on_loss: asked, ..note.config.clone() };
            assert_eq!(on_loss(&note, &config), expected, "{noted} {loss} {asked}");
        }
    }
}
