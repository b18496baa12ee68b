//! The leftovers of a mount after the death of its process, and the action for each: a [`Note`],
//! and a ublk device. Requests to its disk wait for the next server.
//!
//! Process ids are not used: they are reused. A process that serves a mount holds the [`MountLock`]
//! of its name. A device belongs to a note if it carries the note's token. Only the holder of the
//! lock changes anything.
//!
//! Only `umount --force` removes a device with a waiting disk: its users get errors.

use std::time::{Duration, Instant};

use super::{BadNote, Note};
use crate::front::ublk::{Control, DeviceInfo, DeviceState, DeviceToken, UblkError};
use crate::mount::device::aside;
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::not_there::NotMounted;
use rblk_operate::mount::run_dir;

/// Time for the driver to notice the death of a server: it notices it at once, or by a timer of 30
/// s on some kernels before 6.16.
pub(crate) const ENDING_DEADLINE: Duration = Duration::from_secs(60);
/// Time to remove a dead mount's device.
const REMOVE_DEADLINE: Duration = Duration::from_secs(30);
/// Interval of polling waits.
const POLL_STEP: Duration = Duration::from_millis(10);

/// The state of a mount's name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Condition {
    /// Nothing.
    Nothing,
    /// A process serves the mount, starts it, or clears it.
    Running,
    /// The note is invalid.
    Unusable,
    /// The process died, and the driver has not noticed it yet.
    Ending,
    /// The process died; the disk waits for the next one.
    Waiting,
    /// A device without a disk: the process died before the disk existed, or after it was removed.
    Diskless,
    /// There is a note, and its device is gone.
    Gone,
}

impl Condition {
    /// Derives the condition: whether the lock is held, whether there is a note and whether it is
    /// valid, and the state of the device with its token.
    #[must_use]
    pub(crate) fn of(held: bool, note: Option<bool>, device: Option<DeviceState>) -> Self {
        match (held, note, device) {
            (true, ..) => Self::Running,
            (false, None, _) => Self::Nothing,
            (false, Some(false), _) => Self::Unusable,
            (false, Some(true), None) => Self::Gone,
            (false, Some(true), Some(DeviceState::Dead)) => Self::Diskless,
            (false, Some(true), Some(DeviceState::Quiesced | DeviceState::FailIo)) => Self::Waiting,
            (false, Some(true), Some(DeviceState::Live | DeviceState::Unknown(_))) => Self::Ending,
        }
    }

    /// The word in `list`; `None` for a name without a line.
    #[must_use]
    pub fn word(self) -> Option<&'static str> {
        match self {
            Self::Nothing | Self::Running => None,
            Self::Unusable => Some("bad note"),
            Self::Ending => Some("ending"),
            Self::Waiting => Some("no server"),
            Self::Diskless | Self::Gone => Some("dead"),
        }
    }
}

/// The purpose of a command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Purpose {
    /// To mount; `same` if the note names this mount.
    Mount {
        /// The volume, target and mode are those of the note.
        same: bool,
    },
    /// To recover the mount.
    Recover,
    /// To unmount the mount.
    Unmount {
        /// Even if requests fail.
        force: bool,
    },
}

/// The action for a condition and a purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum LeftoversAction {
    /// Nothing stands against a new mount.
    Begin,
    /// Remove the device and the note; then go on as if there had been nothing.
    Clear,
    /// Wait until the driver is done, and check again.
    Wait,
    /// Take the device over.
    Recover,
    /// Ask the process that serves it.
    Ask,
    /// A process serves it.
    RefuseRunning,
    /// There is no mount of that name.
    RefuseNothing,
    /// The disk waits for a volume other than the requested one.
    RefuseOther,
    /// The disk waits, and only force takes it from its users.
    RefuseWaiting,
    /// The note is invalid.
    RefuseUnusable,
}

/// Chooses the action for a condition and a purpose.
#[must_use]
pub(crate) fn decide(condition: Condition, purpose: Purpose) -> LeftoversAction {
    use Purpose::{Mount, Recover, Unmount};
    match (condition, purpose) {
        (Condition::Nothing, Mount { .. }) => LeftoversAction::Begin,
        (Condition::Nothing, Recover | Unmount { .. }) => LeftoversAction::RefuseNothing,
        (Condition::Running, Unmount { .. }) => LeftoversAction::Ask,
        (Condition::Running, Mount { .. } | Recover) => LeftoversAction::RefuseRunning,
        (Condition::Unusable, Unmount { force: true }) => LeftoversAction::Clear,
        (Condition::Unusable, _) => LeftoversAction::RefuseUnusable,
        (Condition::Ending, _) => LeftoversAction::Wait,
        (Condition::Waiting, Mount { same: true } | Recover) => LeftoversAction::Recover,
        (Condition::Waiting, Mount { same: false }) => LeftoversAction::RefuseOther,
        (Condition::Waiting, Unmount { force: true }) => LeftoversAction::Clear,
        (Condition::Waiting, Unmount { force: false }) => LeftoversAction::RefuseWaiting,
        (Condition::Diskless | Condition::Gone, _) => LeftoversAction::Clear,
    }
}

/// A dead mount's leftovers hold the name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    /// The disk waits for another volume.
    #[error(
        "`{name}` is the name of {device}, which waits for volume `{volume}` since its process died; `rblk-initiator \
         recover {name}` recovers it, `rblk-initiator umount --force {name}` gives it up"
    )]
    Other {
        /// The name.
        name: String,
        /// The disk.
        device: String,
        /// Its volume.
        volume: String,
    },
    /// Requests wait.
    #[error(
        "the process of `{name}` died and requests to {device} wait for another; `rblk-initiator recover {name}` \
         recovers it, --force fails them"
    )]
    Waiting {
        /// The name.
        name: String,
        /// The disk.
        device: String,
    },
}

/// The leftovers of a mount without a process.
#[derive(Debug)]
pub struct Found {
    /// The state of the name.
    pub condition: Condition,
    /// Its note, if that is valid.
    pub note: Result<Option<Note>, BadNote>,
    /// Its device.
    pub device: Option<DeviceInfo>,
}

/// Finds the leftovers of a name. The caller holds its lock.
///
/// # Errors
/// There is a note, and the driver cannot report its device.
pub fn find(name: &str) -> Result<Found, UblkError> {
    let mut note = Note::read(name);
    let (usable, token, id) = match &note {
        Ok(None) => (None, None, None),
        Ok(Some(note)) => (Some(true), Some(note.token), note.numbered()),
        Err(_) => (Some(false), Note::token_of(name), None),
    };
    // Without a note the driver is not asked: a host may have no driver.
    let device = match token {
        Some(token) => aside(move || Control::open()?.find(token, id))?,
        None => None,
    };
    if let (Ok(Some(note)), Some(info)) = (&mut note, &device) {
        // The process may have died before it could note the number.
        note.device_id = info.id;
    }
    let condition = Condition::of(false, usable, device.map(|info| info.state));
    Ok(Found { condition, note, device })
}

/// The result of a claim.
#[derive(Debug)]
pub enum Claimed {
    /// Nothing stands against a new mount.
    Free,
    /// A disk waits; this is its note.
    Waiting(Box<Note>),
    /// The leftovers were removed.
    Cleared,
}

/// Prepares the leftovers of a mount for a purpose: waits until the driver has seen the death of a
/// server, and removes useless leftovers. Blocks meanwhile. The lock is that of the name; a purpose
/// may depend on the note.
///
/// # Errors
/// [`NotMounted`], [`BadNote`], [`Refused`], or the driver's.
pub fn claim(
    lock: &MountLock,
    purpose: impl Fn(Option<&Note>) -> Purpose,
) -> anyhow::Result<Claimed> {
    let name = lock.name();
    let begun = Instant::now();
    let mut cleared = false;
    loop {
        let Found { condition, note, device } = find(name)?;
        let action = decide(condition, purpose(note.as_ref().ok().and_then(Option::as_ref)));
        let note = match (action, note) {
            (LeftoversAction::Clear, _) => {
                if let Some(info) = device {
                    aside(move || Control::open()?.remove(info.id, REMOVE_DEADLINE))?;
                    tracing::info!(device = info.id, "removed the device of a dead mount");
                }
                Note::remove(name);
                crate::mount::socket::remove_file(name);
                cleared = true;
                continue;
            }
            (LeftoversAction::Begin, _) => return Ok(Claimed::Free),
            (_, note) => note?,
        };
        let refused = match (action, note, device) {
            (LeftoversAction::Recover, Some(note), _) => {
                return Ok(Claimed::Waiting(Box::new(note)));
            }
            (LeftoversAction::Wait, _, Some(info)) => {
                if begun.elapsed() < ENDING_DEADLINE {
                    std::thread::sleep(POLL_STEP);
                    continue;
                }
                return Err(UblkError::StillServed { id: info.id, pid: info.server_pid }.into());
            }
            (LeftoversAction::RefuseOther, Some(note), _) => Refused::Other {
                name: name.to_owned(),
                device: note.disk(),
                volume: note.config.volume,
            },
            (LeftoversAction::RefuseWaiting, Some(note), _) => {
                Refused::Waiting { name: name.to_owned(), device: note.disk() }
            }
            _ if cleared => return Ok(Claimed::Cleared),
            _ => return Err(NotMounted { what: name.to_owned() }.into()),
        };
        return Err(refused.into());
    }
}

/// Devices of rblk without notes. The kernel's list has them. Without the note, a live server has
/// no socket to ask, and only a signal reaches it; a device of a dead server cannot be recovered.
///
/// # Errors
/// The driver cannot be asked.
pub fn without_note() -> Result<Vec<DeviceInfo>, UblkError> {
    let mut control = Control::open()?;
    let before = only_without_note(control.list()?);
    if before.is_empty() {
        return Ok(before);
    }
    // A mount that began or ended between the two lists only seemed to have no note.
    let mut now = only_without_note(control.list()?);
    now.retain(|info| before.iter().any(|before| before.token == info.token));
    Ok(now)
}

fn only_without_note(mut devices: Vec<DeviceInfo>) -> Vec<DeviceInfo> {
    let names = run_dir::names();
    let noted: Vec<DeviceToken> = names.iter().filter_map(|name| Note::token_of(name)).collect();
    devices.retain(|info| {
        // A device that is being added has no disk either, but has a note.
        let has_disk = !matches!(info.state, DeviceState::Dead | DeviceState::Unknown(_));
        has_disk && info.token.is_some_and(|token| !noted.contains(&token))
    });
    devices
}

/// Whether a device still exists.
///
/// # Errors
/// The driver cannot be asked.
pub fn is_there(info: &DeviceInfo) -> Result<bool, UblkError> {
    let devices = Control::open()?.list()?;
    Ok(devices.iter().any(|other| other.id == info.id && other.token == info.token))
}

/// Removes a device that has no note and no live server. A device with a live server stays, even if
/// the server is in another namespace.
///
/// # Errors
/// The driver's, or a server is alive.
pub fn remove_without_note(info: &DeviceInfo) -> Result<(), UblkError> {
    let mut control = Control::open()?;
    let now = info.token.map(|token| control.find(token, Some(info.id))).transpose()?.flatten();
    if let Some(DeviceInfo { id, server_pid: pid, .. }) =
        now.filter(|now| now.state == DeviceState::Live)
    {
        return Err(UblkError::StillServed { id, pid });
    }
    control.remove(info.id, REMOVE_DEADLINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_condition_has_its_row() {
        use LeftoversAction::{
            Ask, Begin, Clear, Recover, RefuseNothing, RefuseOther, RefuseRunning, RefuseUnusable,
            RefuseWaiting, Wait,
        };
        // Mount the same, mount another, recover, umount, umount --force.
        let rows = [
            (Condition::Nothing, [Begin, Begin, RefuseNothing, RefuseNothing, RefuseNothing]),
            (Condition::Running, [RefuseRunning, RefuseRunning, RefuseRunning, Ask, Ask]),
            (
                Condition::Unusable,
                [RefuseUnusable, RefuseUnusable, RefuseUnusable, RefuseUnusable, Clear],
            ),
            (Condition::Ending, [Wait, Wait, Wait, Wait, Wait]),
            (Condition::Waiting, [Recover, RefuseOther, Recover, RefuseWaiting, Clear]),
            (Condition::Diskless, [Clear, Clear, Clear, Clear, Clear]),
            (Condition::Gone, [Clear, Clear, Clear, Clear, Clear]),
        ];
        let purposes = [
            Purpose::Mount { same: true },
            Purpose::Mount { same: false },
            Purpose::Recover,
            Purpose::Unmount { force: false },
            Purpose::Unmount { force: true },
        ];
        for (condition, actions) in rows {
            for (purpose, action) in purposes.into_iter().zip(actions) {
                assert_eq!(decide(condition, purpose), action, "{condition:?} {purpose:?}");
            }
        }
    }

    #[test]
    fn a_waiting_disk_is_removed_by_force_only() {
        for purpose in [
            Purpose::Mount { same: true },
            Purpose::Mount { same: false },
            Purpose::Recover,
            Purpose::Unmount { force: false },
        ] {
            for condition in [Condition::Running, Condition::Ending, Condition::Waiting] {
                assert_ne!(
                    decide(condition, purpose),
                    LeftoversAction::Clear,
                    "{condition:?} {purpose:?}"
                );
                assert_ne!(
                    decide(condition, purpose),
                    LeftoversAction::Begin,
                    "{condition:?} {purpose:?}"
                );
            }
        }
    }

    #[test]
    fn conditions_follow_from_lock_note_and_device() {
        use DeviceState::{Dead, FailIo, Live, Quiesced, Unknown};
        let states = [None, Some(Dead), Some(Live), Some(Quiesced), Some(FailIo), Some(Unknown(7))];
        for state in states {
            for note in [None, Some(false), Some(true)] {
                assert_eq!(Condition::of(true, note, state), Condition::Running);
            }
            assert_eq!(Condition::of(false, None, state), Condition::Nothing);
            assert_eq!(Condition::of(false, Some(false), state), Condition::Unusable);
        }
        let of = |state| Condition::of(false, Some(true), state);
        let wanted = [
            Condition::Gone,
            Condition::Diskless,
            Condition::Ending,
            Condition::Waiting,
            Condition::Waiting,
            Condition::Ending,
        ];
        assert_eq!(states.map(of), wanted);
    }
}
