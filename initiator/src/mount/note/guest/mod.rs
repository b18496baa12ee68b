//! [`GuestNote`]: the state that the process of a guest's disk leaves to the next one, in a JSON
//! file beside the socket, replaced as a whole. The kernel of the guest relies on its acknowledged
//! writes, so the new process must know at least as much about them as the one before it.
//!
//! The note exists before a front end may connect, and before requests use a new path. While the
//! process runs, the note describes a process killed at that moment: writes may not be flushed, and
//! the end of each ring is unknown. A process that ends in good order replaces the note, or removes
//! it where no guest is left that could go on ([`GuestNote::outlives`]).
//!
//! Only a FLUSH ends the doubt about writes. A reset of the disk does not: a guest that wakes from
//! sleep resets its disk, too, and its file systems still rely on earlier writes. A restart of the
//! host ends the doubt, for no guest outlives it.
//!
//! Nothing in a note needs to be on disk before power is lost: the guest would be lost with it.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rblk_config::OnLoss;
use rblk_protocol::{Generation, VolumeFlags, limits};
use serde::{Deserialize, Serialize};

use super::form;
use crate::engine::durability::Durability;
use crate::front::vhost::GuestLeft;
use crate::volume::course::Facts;

/// The form that this version writes and reads.
const FORM: u32 = 1;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A note cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {why}. This file records the writes that the guest of the process before this one may lose. Restore it, or \
     end the virtual machine and remove the file", path.display()
)]
pub(crate) struct BadGuestNote {
    path: PathBuf,
    why: String,
}

/// The note is of another volume, and may still be needed.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: the process before this one served volume {volume:?} of target {target:?} by this socket, and the writes of \
     its guest may not be durable. Serve that volume, or end the virtual machine and remove the file", path.display()
)]
pub(crate) struct NoteOfAnother {
    path: PathBuf,
    volume: String,
    target: String,
}

/// A note cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {error}: without this file the next process would not know the writes that the guest may lose. The directory \
     of the socket has to have room, and be writable", path.display()
)]
pub(crate) struct UnwrittenGuestNote {
    path: PathBuf,
    error: io::Error,
}

/// The state that a process leaves to the next one, beside the socket of a guest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct GuestNote {
    form: u32,
    // The start of this host in which the note was written.
    boot: String,
    // For people.
    volume: String,
    target: String,
    #[serde(with = "as_hex")]
    uuid: u128,
    // The run of the target, for a volume in its memory.
    #[serde(with = "as_hex")]
    instance: u128,
    #[serde(with = "as_hex")]
    verifier: u128,
    generation: u64,
    /// Acknowledged writes may be in the target's memory only.
    maybe_unflushed: bool,
    /// Acknowledged writes may be lost, and FLUSHes must still fail because of it.
    loss_untold: bool,
    on_loss: OnLoss,
    rings_in_doubt: Vec<u16>,
}

/// The doubts about writes in a note.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GuestDoubts {
    pub(super) maybe_unflushed: bool,
    pub(super) loss_untold: bool,
}

/// The initial state of a process, from the note of the one before it.
#[derive(Debug)]
pub(crate) struct InheritedGuestState {
    /// Which acknowledged writes are durable.
    pub(crate) account: Arc<Durability>,
    /// The known state of the rings.
    pub(crate) left: GuestLeft,
    /// Whether writes of the process before are newly found lost.
    pub(crate) is_new_loss: bool,
    /// Why no ring can be resumed, if the volume is not the one that the guest left.
    pub(crate) other: Option<&'static str>,
}

impl InheritedGuestState {
    /// The state after a killed process without a note.
    pub(crate) fn unknown(on_loss: OnLoss) -> Self {
        let account = Durability::inheriting(on_loss);
        account.arrived();
        let left = GuestLeft { guest_stays: true, rings_in_doubt: every_ring() };
        Self { account, left, is_new_loss: false, other: None }
    }
}

impl GuestNote {
    /// The note of a process that serves a guest.
    pub(super) fn of(
        volume: &str,
        facts: &Facts,
        doubts: GuestDoubts,
        on_loss: OnLoss,
        rings_in_doubt: Vec<u16>,
    ) -> Self {
        Self {
            form: FORM,
            boot: boot_id(),
            volume: volume.to_owned(),
            target: facts.target_name.to_string(),
            uuid: u128::from_be_bytes(facts.volume.uuid),
            instance: u128::from_be_bytes(facts.instance.0),
            verifier: u128::from_be_bytes(facts.volume.verifier.0),
            generation: facts.volume.generation.0,
            maybe_unflushed: doubts.maybe_unflushed,
            loss_untold: doubts.loss_untold,
            on_loss,
            rings_in_doubt,
        }
    }

    /// Whether a process that ends must leave a note: a guest may go on, or its writes may not be
    /// durable.
    pub(super) fn outlives(doubts: GuestDoubts, left: &GuestLeft) -> bool {
        left.guest_stays || doubts.maybe_unflushed
    }

    /// The path of the note beside a socket.
    pub(super) fn path(socket: &Path) -> PathBuf {
        with_ending(socket, ".note")
    }

    /// The note beside a socket; `None` when there is none, or it is of an earlier start of this
    /// host, which no guest has outlived.
    ///
    /// # Errors
    /// [`BadGuestNote`].
    pub(crate) fn read(socket: &Path) -> Result<Option<Self>, BadGuestNote> {
        let path = Self::path(socket);
        let text = match form::load(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(BadGuestNote { path, why: error.to_string() }),
        };
        let note = Self::parse(&text).map_err(|why| BadGuestNote { path, why })?;
        Ok(note.is_of_boot(&boot_id()).then_some(note))
    }

    fn parse(text: &[u8]) -> Result<Self, String> {
        form::parse(text, FORM)
    }

    /// Without a boot id, a note counts as of this start.
    fn is_of_boot(&self, boot: &str) -> bool {
        self.boot == boot || self.boot.is_empty() || boot.is_empty()
    }

    /// Replaces the older note.
    ///
    /// # Errors
    /// [`UnwrittenGuestNote`].
    pub(super) fn write(&self, socket: &Path) -> Result<(), UnwrittenGuestNote> {
        let (path, new) = (Self::path(socket), with_ending(socket, ".note.new"));
        let mut options = std::fs::OpenOptions::new();
        // The directory may belong to another user: links are not followed.
        options.write(true).create_new(true).mode(0o600);
        let written = serde_json::to_vec(self).map_err(io::Error::other).and_then(|text| {
            let _ = std::fs::remove_file(&new);
            let mut file = options.open(&new)?;
            file.write_all(&text)?;
            std::fs::rename(&new, &path)
        });
        if written.is_err() {
            // A partial note is useless and takes space, perhaps the space that is missing.
            let _ = std::fs::remove_file(new);
        }
        written.map_err(|error| UnwrittenGuestNote { path, error })
    }

    /// Removes the note beside a socket.
    ///
    /// # Errors
    /// [`UnwrittenGuestNote`]: it stays as it was.
    pub(super) fn remove(socket: &Path) -> Result<(), UnwrittenGuestNote> {
        let path = Self::path(socket);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(UnwrittenGuestNote { path, error })
            }
            _ => Ok(()),
        }
    }

    /// The generation of the volume in the process before.
    pub(crate) fn generation(&self) -> Generation {
        Generation(self.generation)
    }

    /// Whether the note is of a volume of that name.
    pub(crate) fn is_of(&self, volume: &str) -> bool {
        self.volume == volume
    }

    /// Whether a note of the opened volume may replace this one. A note of another volume may be
    /// replaced only if no loss and no doubt is left in it.
    ///
    /// # Errors
    /// [`NoteOfAnother`].
    pub(crate) fn must_not_be_needed(
        &self,
        facts: &Facts,
        socket: &Path,
    ) -> Result<(), NoteOfAnother> {
        let is_same = u128::from_be_bytes(facts.volume.uuid) == self.uuid;
        if is_same || !(self.maybe_unflushed || self.loss_untold) {
            return Ok(());
        }
        let (volume, target) = (self.volume.clone(), self.target.clone());
        Err(NoteOfAnother { path: Self::path(socket), volume, target })
    }

    /// The initial state of the next process, which has opened the volume. `was_away`: another host
    /// had it since. Of the two settings of `on_loss`, the stricter one counts.
    pub(crate) fn inherit(
        &self,
        facts: &Facts,
        on_loss: OnLoss,
        was_away: bool,
    ) -> InheritedGuestState {
        let volume = &facts.volume;
        let is_ephemeral = volume.flags.has(VolumeFlags::EPHEMERAL);
        let is_other = u128::from_be_bytes(volume.uuid) != self.uuid
            || is_ephemeral && u128::from_be_bytes(facts.instance.0) != self.instance;
        let other = match (is_other, was_away) {
            (true, _) => Some("it is a different volume"),
            (false, true) => Some("another host had it"),
            (false, false) => None,
        };
        let left = GuestLeft {
            guest_stays: true,
            rings_in_doubt: match other {
                Some(_) => every_ring(),
                None => self.rings_in_doubt.clone(),
            },
        };
        // Writes to another volume do not concern this one.
        let doubt = self.maybe_unflushed && !is_other;
        let was_told = self.loss_untold && !is_other;
        let is_new_loss = doubt && u128::from_be_bytes(volume.verifier.0) != self.verifier;
        let account = match (was_told || is_new_loss, doubt && !is_new_loss) {
            (true, doubt) => {
                let on_loss = if was_told { self.on_loss.max(on_loss) } else { on_loss };
                Durability::inheriting_loss(on_loss, doubt)
            }
            (false, true) => Durability::inheriting(on_loss),
            (false, false) => Durability::new(on_loss),
        };
        // The rings of this process have no requests that were submitted to another.
        account.arrived();
        InheritedGuestState { account, left, is_new_loss, other }
    }
}

fn every_ring() -> Vec<u16> {
    (0..=limits::MOUNT_QPS_MAX).collect()
}

fn with_ending(socket: &Path, ending: &str) -> PathBuf {
    let mut path = OsString::from(socket);
    path.push(ending);
    path.into()
}

fn boot_id() -> String {
    std::fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned()
}

/// 128 bits as 32 hexadecimal digits.
mod as_hex {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(value: &u128, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{value:032x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u128, D::Error> {
        let text = String::deserialize(from)?;
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let value = u128::from_str_radix(&text, 16).ok().filter(|_| digits);
        value.ok_or_else(|| de::Error::custom("not 32 hexadecimal digits"))
    }
}

/// For `tests/fuzz`.
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    use rblk_protocol::{
        BlockCount, BlockSize, InstanceId, Name, OpenReply, VolumeHandle, WriteVerifier,
    };

    use super::*;

    /// Whether the bytes are a note of a guest. An accepted note does not change when it is written
    /// and read again, and the next process knows no less than the note says.
    #[must_use]
    #[expect(clippy::missing_panics_doc, reason = "it panics when the parser breaks a promise")]
    pub fn accepts(text: &[u8]) -> bool {
        let Ok(note) = GuestNote::parse(text) else { return false };
        let written = serde_json::to_vec(&note).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(GuestNote::parse(&written), Ok(note.clone()), "another note after a write");
        for (verifier, instance) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for flags in [VolumeFlags::VOLATILE_CACHE, VolumeFlags::EPHEMERAL] {
                let mut facts = facts_of(&note, flags);
                facts.volume.verifier = WriteVerifier((note.verifier ^ verifier).to_be_bytes());
                facts.instance = InstanceId((note.instance ^ instance).to_be_bytes());
                follow(
                    &note,
                    &facts,
                    flags == VolumeFlags::EPHEMERAL && instance == 1,
                    verifier == 1,
                );
            }
        }
        true
    }

    fn facts_of(note: &GuestNote, flags: VolumeFlags) -> Facts {
        Facts {
            resume: None,
            volume: OpenReply {
                handle: VolumeHandle(0),
                flags,
                block_size: BlockSize::new(512).unwrap_or_else(|| panic!("a size")),
                blocks: BlockCount(1),
                discard_granularity_bytes: 0,
                uuid: note.uuid.to_be_bytes(),
                verifier: WriteVerifier([0; 16]),
                generation: note.generation(),
            },
            instance: InstanceId([0; 16]),
            target_name: Name::new("t").unwrap_or_else(|error| panic!("{error}")),
            fenced: None,
        }
    }

    fn follow(note: &GuestNote, facts: &Facts, is_other: bool, has_lost: bool) {
        for on_loss in [OnLoss::UntilRemount, OnLoss::Once] {
            let InheritedGuestState { account, left, is_new_loss, other } =
                note.inherit(facts, on_loss, false);
            assert!(left.guest_stays);
            assert_eq!(other.is_some(), is_other);
            if is_other {
                assert_eq!(left.rings_in_doubt, every_ring());
                continue;
            }
            assert_eq!(left.rings_in_doubt, note.rings_in_doubt);
            assert_eq!(is_new_loss, note.maybe_unflushed && has_lost);
            assert_eq!(account.has_untold_loss(), note.loss_untold || is_new_loss);
            assert!(account.on_loss() >= on_loss.min(note.on_loss));
            let is_in_doubt = account.inherits_doubt() || is_new_loss;
            assert!(is_in_doubt || !note.maybe_unflushed, "a doubt is forgotten");
        }
    }
}

#[cfg(test)]
mod tests;
