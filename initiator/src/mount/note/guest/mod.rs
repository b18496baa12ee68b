//! [`GuestNote`]: what the process that serves the disk of a guest writes down for the next one, in
//! a JSON file beside the socket, replaced as a whole. The kernel of the guest goes on with what it
//! wrote, so a new process has to know at least as much of that as the one before it.
//!
//! The note is there before a front end may connect, and before requests go by a new path. While
//! the process runs it says what is true if the process is killed at that moment: writes may not be
//! flushed, and no ring has an end that anybody knows. A process that ends in good order replaces
//! it, or removes it where no guest is left that could go on ([`GuestNote::outlives`]).
//!
//! Only a FLUSH ends the doubt about writes. A guest that resets its disk does not: one that wakes
//! from sleep does so, too, and its file systems go on with what they wrote before. A start of the
//! host ends it, for no guest outlives that.
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

/// The form that is written and read here.
const FORM: u32 = 1;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A note cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {why}. It says what the guest of the process before this one may lose. Restore it, or end the virtual \
     machine and remove the file", path.display()
)]
pub(crate) struct BadGuestNote {
    path: PathBuf,
    why: String,
}

/// A note is of another volume, and somebody may still need it.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: the process before this one served volume {volume:?} of target {target:?} by this socket, and what its guest \
     wrote may not be durable. Serve that volume, or end the virtual machine and remove the file", path.display()
)]
pub(crate) struct NoteOfAnother {
    path: PathBuf,
    volume: String,
    target: String,
}

/// A note cannot be written.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {error}: without this file the next process would not know what the guest may lose. The directory of the \
     socket has to have room, and be writable", path.display()
)]
pub(crate) struct UnwrittenGuestNote {
    path: PathBuf,
    error: io::Error,
}

/// What a process leaves to the next one, beside the socket of a guest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct GuestNote {
    form: u32,
    // The start of this host in which it was written.
    boot: String,
    // For people.
    volume: String,
    target: String,
    #[serde(with = "as_hex")]
    uuid: u128,
    // The run of the target, which matters where the volume is in its memory.
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

/// What a note says of writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GuestDoubts {
    pub(super) maybe_unflushed: bool,
    pub(super) loss_untold: bool,
}

/// What a process begins with, by the note of the one before it.
#[derive(Debug)]
pub(crate) struct Inherited {
    /// Which acknowledged writes are durable.
    pub(crate) account: Arc<Durability>,
    /// What is known of the rings.
    pub(crate) left: GuestLeft,
    /// Writes of the process before are lost now, and were not known to be.
    pub(crate) is_new_loss: bool,
    /// Why no ring can be gone on with, if the volume is not what the guest left.
    pub(crate) other: Option<&'static str>,
}

impl Inherited {
    /// From a process that was killed and wrote no note.
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

    /// Whether there has to be a note after the end of a process: a guest may go on, or what it
    /// wrote may not be durable.
    pub(super) fn outlives(doubts: GuestDoubts, left: &GuestLeft) -> bool {
        left.guest_stays || doubts.maybe_unflushed
    }

    /// The path of the note, by that of the socket.
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

    /// Without an id, a start of the host is taken for the same.
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
        // The directory may be another user's: no link of theirs is followed.
        options.write(true).create_new(true).mode(0o600);
        let written = serde_json::to_vec(self).map_err(io::Error::other).and_then(|text| {
            let _ = std::fs::remove_file(&new);
            let mut file = options.open(&new)?;
            file.write_all(&text)?;
            std::fs::rename(&new, &path)
        });
        if written.is_err() {
            // Part of a note is of no use, and takes space, which may be what is missing.
            let _ = std::fs::remove_file(new);
        }
        written.map_err(|error| UnwrittenGuestNote { path, error })
    }

    /// Forgets the note beside a socket.
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

    /// The generation in which the process before had the volume.
    pub(crate) fn generation(&self) -> Generation {
        Generation(self.generation)
    }

    /// Whether it is of a volume of that name.
    pub(crate) fn is_of(&self, volume: &str) -> bool {
        self.volume == volume
    }

    /// Whether it may be replaced by a note of the volume that was opened: by one of another volume
    /// only if nothing of it has to be told.
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

    /// What the next process begins with, which has opened the volume. `was_away`: another host had
    /// it since. FLUSHes fail after a loss as either process says, whichever fails more.
    pub(crate) fn inherit(&self, facts: &Facts, on_loss: OnLoss, was_away: bool) -> Inherited {
        let volume = &facts.volume;
        let is_ephemeral = volume.flags.has(VolumeFlags::EPHEMERAL);
        let is_other = u128::from_be_bytes(volume.uuid) != self.uuid
            || is_ephemeral && u128::from_be_bytes(facts.instance.0) != self.instance;
        let other = match (is_other, was_away) {
            (true, _) => Some("it is another volume"),
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
        // What was written to another volume says nothing of this one.
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
        // The rings that this process serves have nothing that was submitted to another one.
        account.arrived();
        Inherited { account, left, is_new_loss, other }
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

    /// Whether the bytes are a note of a guest. What was accepted is the same when it is written
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
            let Inherited { account, left, is_new_loss, other } =
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
