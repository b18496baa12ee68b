//! [`Note`]: the state of a mount, with which another process can serve its device after this one
//! has died. A JSON file with the mount's name, replaced as a whole.
//!
//! A mount writes its note before the disk exists, so there is no disk without a note. It writes
//! the note before every try to connect, so every used epoch is in the note, and again after every
//! success. The note has the session's id, with which its reader can take the session over: only
//! root may read it.
//!
//! A reader checks everything in it: another version may have written it, or it may be damaged.

mod form;
#[cfg(feature = "fuzzing")]
pub mod guest;
#[cfg(not(feature = "fuzzing"))]
pub(crate) mod guest;
pub mod leftovers;
pub mod neighbour;
pub(crate) mod note_keeper;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rblk_config::MountConfig;
use rblk_fabric::Address;
use rblk_protocol::{
    BlockCount, BlockSize, Epoch, Features, Generation, HostId, InstanceId, Name, OpenReply,
    QueueDepth, SessionId, VolumeFlags, VolumeHandle, WriteVerifier, limits,
};
use serde::{Deserialize, Deserializer, Serialize, de};

use crate::front::ublk::{DeviceToken, disk_path, disk_sequence};
use crate::volume::course::Facts;
use crate::volume::session::{HostIdentity, MESSAGES, QueueWish};
use crate::volume::setup::{Endpoint, Setup, digest_wish};
use crate::volume::shared_memory::{NotedFile, SharedMemory};
use rblk_operate::mount::configured::{ByFlags, KeysFile};
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::run_dir;
use rblk_operate::mount::run_dir::RUN_DIR;

/// The form that this version writes and reads. It changes when an older program must not use a
/// newer note, or the reverse.
const FORM: u32 = 2;
/// Stands for the number of a device without one.
pub(super) const NO_DEVICE: u32 = u32::MAX;
/// Limit of each text for people in a note.
const TEXT_MAX: usize = 1024;

/// The reason why a note is invalid.
#[derive(Debug, thiserror::Error)]
#[error(
    "the note of mount `{name}` cannot be used: {why}. If another version of rblk wrote it, recover the mount with \
     that; `rblk-initiator umount --force {name}` gives it up"
)]
pub struct BadNote {
    name: String,
    why: String,
}

/// The state that a mount leaves to the next process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Note {
    form: u32,
    /// Name of the mount.
    pub name: String,
    /// The process that wrote the note.
    pub pid: u32,
    /// The ublk device.
    pub device_id: u32,
    /// The kernel's sequence number of the disk, for [`DiskNames`]; `None` before there is a disk.
    ///
    /// [`DiskNames`]: rblk_operate::mount::disk_names::DiskNames
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disk_sequence: Option<u64>,
    /// The token of the device.
    #[serde(with = "as_text")]
    pub token: DeviceToken,
    /// The configuration of the mount.
    #[serde(deserialize_with = "without_retired_keys")]
    pub config: MountConfig,
    // The host that the target knows as the holder. The host's id may have changed since.
    #[serde(with = "as_hex")]
    host: [u8; 16],
    // The session, and the highest epoch requested in it.
    session: Option<NotedSession>,
    #[serde(with = "as_hex")]
    instance: [u8; 16],
    target_name: String,
    volume: Volume,
    wish: NotedWish,
    queues: u16,
    /// Acknowledged writes may be in the target's memory only.
    pub maybe_unflushed: bool,
    /// Acknowledged writes may be lost, and FLUSHes must still fail because of it.
    pub loss_untold: bool,
    /// The shared memory that the driver has registered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shared_memory: Vec<NotedFile>,
    /// The host that fenced this mount, and holds the volume.
    pub fenced: Option<String>,
    /// Times the device was taken over by another process.
    pub recovered: u32,
    address: String,
    rdma_device: String,
    transport: String,
    // The file with the keys that the target may prove.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keys_file: Option<PathBuf>,
    // The values that flags set beside the file.
    #[serde(default, skip_serializing_if = "ByFlags::is_none")]
    keys_by_flags: ByFlags,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct NotedSession {
    #[serde(with = "as_hex")]
    id: [u8; 16],
    epoch: u32,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Volume {
    blocks: u64,
    block_size: u32,
    flags: u32,
    discard_granularity: u32,
    #[serde(with = "as_hex")]
    uuid: [u8; 16],
    #[serde(with = "as_hex")]
    verifier: [u8; 16],
    generation: u64,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct NotedWish {
    depth: u16,
    io_max: u32,
    in_capsule: u32,
    features: u32,
}

/// The doubts about writes in a note, and the number of takeovers of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Doubts {
    pub(super) maybe_unflushed: bool,
    pub(super) loss_untold: bool,
    pub(super) recovered: u32,
}

impl Note {
    /// The note of a mount that this process serves.
    pub(super) fn of(
        name: &str,
        device: (u32, DeviceToken),
        config: &MountConfig,
        (setup, facts): (&Setup, &Facts),
        doubts: Doubts,
    ) -> Self {
        let volume = &facts.volume;
        Self {
            form: FORM,
            name: name.to_owned(),
            pid: std::process::id(),
            device_id: device.0,
            disk_sequence: disk_sequence(device.0),
            token: device.1,
            config: config.clone(),
            host: setup.host.id.0,
            session: facts.resume.map(|(id, epoch)| NotedSession { id: id.0, epoch: epoch.0 }),
            instance: facts.instance.0,
            target_name: facts.target_name.to_string(),
            volume: Volume {
                blocks: volume.blocks.0,
                block_size: volume.block_size.bytes(),
                flags: volume.flags.0,
                discard_granularity: volume.discard_granularity_bytes,
                uuid: volume.uuid,
                verifier: volume.verifier.0,
                generation: volume.generation.0,
            },
            wish: NotedWish {
                depth: setup.wish.depth.get(),
                io_max: setup.wish.io_max_bytes,
                in_capsule: setup.wish.in_capsule_bytes,
                // Another version of the program asks for its own messages.
                features: setup.wish.features.without(MESSAGES).0,
            },
            queues: setup.queues,
            maybe_unflushed: doubts.maybe_unflushed,
            loss_untold: doubts.loss_untold,
            shared_memory: setup.shared.noted().to_vec(),
            fenced: facts.fenced.as_deref().map(cut),
            recovered: doubts.recovered,
            address: cut(&setup.endpoint.address),
            rdma_device: cut(&setup.endpoint.rdma_device),
            transport: cut(&setup.endpoint.transport),
            keys_file: setup.keys_file.as_ref().map(|file| file.path().to_owned()),
            keys_by_flags: setup.keys_file.as_ref().map(KeysFile::by_flags).unwrap_or_default(),
        }
    }

    fn path(dir: &Path, name: &str) -> PathBuf {
        dir.join(format!("{name}.json"))
    }

    /// Replaces the older note.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn write(&self) -> io::Result<()> {
        run_dir::make()?;
        self.write_in(Path::new(RUN_DIR))
    }

    fn write_in(&self, dir: &Path) -> io::Result<()> {
        let text = serde_json::to_vec(self).map_err(io::Error::other)?;
        let new = dir.join(format!("{}.json.new", self.name));
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options
            .open(&new)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| std::fs::rename(&new, Self::path(dir, &self.name)));
        if written.is_err() {
            // A partial note is useless and takes space, perhaps the space that is missing.
            let _ = std::fs::remove_file(new);
        }
        written
    }

    /// The note of a mount; `None` when there is none.
    ///
    /// # Errors
    /// [`BadNote`].
    pub fn read(name: &str) -> Result<Option<Self>, BadNote> {
        Self::read_in(Path::new(RUN_DIR), name)
    }

    fn read_in(dir: &Path, name: &str) -> Result<Option<Self>, BadNote> {
        let bad = |why: String| BadNote { name: name.to_owned(), why };
        match form::load(&Self::path(dir, name)) {
            Ok(text) => Self::parse(&text, name).map(Some).map_err(bad),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(bad(error.to_string())),
        }
    }

    /// The token of a mount's device, from a note that may otherwise be invalid.
    #[must_use]
    pub(crate) fn token_of(name: &str) -> Option<DeviceToken> {
        let text = form::load(&Self::path(Path::new(RUN_DIR), name)).ok()?;
        let value: serde_json::Value = serde_json::from_slice(&text).ok()?;
        value.get("token")?.as_str()?.parse().ok()
    }

    /// Removes the note of a mount.
    pub(crate) fn remove(name: &str) {
        let _ = std::fs::remove_file(Self::path(Path::new(RUN_DIR), name));
    }

    fn parse(text: &[u8], name: &str) -> Result<Self, String> {
        let note: Self = form::parse(text, FORM)?;
        note.check(name)?;
        Ok(note)
    }

    /// Checks that a mount could have written every value.
    fn check(&self, name: &str) -> Result<(), String> {
        let rule = |good: bool, what: &str| if good { Ok(()) } else { Err(what.to_owned()) };
        rule(self.name == name, "it is another mount's")?;
        rule(Name::new(&self.name).is_ok(), "the name is none")?;
        self.config.validate().map_err(|error| format!("its configuration: {error}"))?;
        rule(!HostId(self.host).is_none(), "the host's id is none")?;
        rule(Name::new(&self.target_name).is_ok(), "the target's name is none")?;
        rule(self.block_size().is_some(), "the block size is none")?;
        rule(self.volume.blocks > 0, "the volume is empty")?;
        rule(
            BlockCount(self.volume.blocks)
                .bytes(self.block_size().ok_or("the block size is none")?)
                .is_some(),
            "the volume is too large",
        )?;
        rule(QueueDepth::new(self.wish.depth).is_some(), "the queue depth is none")?;
        rule(
            self.wish.io_max.is_multiple_of(limits::IO_MIN_BYTES)
                && (limits::IO_MIN_BYTES..=limits::IO_MAX_BYTES).contains(&self.wish.io_max),
            "the I/O size is none",
        )?;
        rule(self.wish.in_capsule <= limits::IN_CAPSULE_MAX_BYTES, "too much in-capsule data")?;
        rule((1..=limits::MOUNT_QPS_MAX).contains(&self.queues), "the number of queues is none")?;
        let texts = [Some(&self.address), Some(&self.rdma_device), Some(&self.transport)];
        let longest = texts.into_iter().chain([self.fenced.as_ref()]).flatten().map(String::len);
        rule(longest.max() <= Some(TEXT_MAX), "a text is too long")?;
        let is_address = |text: &String| text.parse::<Address>().is_ok();
        rule(self.config.target.iter().all(is_address), "an address of the target is none")
    }

    /// For `tests/fuzz`: whether the bytes are a note of mount `m`. An accepted note can be used,
    /// and does not change when it is written and read again.
    #[cfg(feature = "fuzzing")]
    #[must_use]
    #[expect(clippy::missing_panics_doc, reason = "it panics when the parser breaks a promise")]
    pub fn accepts(text: &[u8]) -> bool {
        let Ok(note) = Self::parse(text, "m") else { return false };
        let written = serde_json::to_vec(&note).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(Self::parse(&written, "m"), Ok(note.clone()), "another note after a write");
        let _ = note.status("lost");
        let name = Name::new("h").unwrap_or_else(|error| panic!("{error}"));
        note.restore(&note.config, name).unwrap_or_else(|error| panic!("{error}"));
        true
    }

    fn block_size(&self) -> Option<BlockSize> {
        BlockSize::new(self.volume.block_size)
    }

    /// Restores the setup and the facts of the mount, without memory for its queues. The target
    /// knows this host by the id in the note, and by `host_name`.
    ///
    /// # Errors
    /// A bad address in `config`, which may differ from that in the note.
    pub(super) fn restore(
        &self,
        config: &MountConfig,
        host_name: Name,
    ) -> anyhow::Result<(Setup, Facts)> {
        let none = || anyhow::anyhow!("a note that was not checked");
        let addresses =
            config.target.iter().map(|t| t.parse()).collect::<Result<Vec<Address>, _>>()?;
        let facts = Facts {
            resume: self.session.as_ref().map(|s| (SessionId(s.id), Epoch(s.epoch))),
            volume: OpenReply {
                handle: VolumeHandle(0),
                flags: VolumeFlags(self.volume.flags),
                block_size: self.block_size().ok_or_else(none)?,
                blocks: BlockCount(self.volume.blocks),
                discard_granularity_bytes: self.volume.discard_granularity,
                uuid: self.volume.uuid,
                verifier: WriteVerifier(self.volume.verifier),
                generation: Generation(self.volume.generation),
            },
            instance: InstanceId(self.instance),
            target_name: Name::new(&self.target_name)?,
            fenced: self.fenced.clone(),
        };
        let shared = SharedMemory::again(self.shared_memory.clone())?;
        let setup = Setup {
            volume_name: Name::new(&self.config.volume)?,
            addresses,
            host: HostIdentity { id: HostId(self.host), name: host_name },
            // A note has no secrets.
            credentials: None,
            keys_file: self.keys_file(),
            wish: QueueWish {
                depth: QueueDepth::new(self.wish.depth).ok_or_else(none)?,
                io_max_bytes: self.wish.io_max,
                in_capsule_bytes: self.wish.in_capsule,
                features: Features(self.wish.features).or(MESSAGES),
                digest: digest_wish(config, &shared),
                lanes: config.lanes,
                queues: self.queues,
            },
            queues: self.queues,
            buffers: Vec::new(),
            shared,
            tests_paths: false,
            endpoint: Endpoint {
                address: self.address.clone(),
                rdma_device: self.rdma_device.clone(),
                transport: self.transport.clone(),
                // Known after the connect.
                is_encrypted: false,
            },
        };
        Ok((setup, facts))
    }

    /// The file with the keys that the target may prove.
    pub(super) fn keys_file(&self) -> Option<KeysFile> {
        self.keys_file.clone().map(|path| KeysFile::new(path, self.keys_by_flags))
    }

    /// The host that the target knows as the holder.
    pub(super) fn host(&self) -> HostId {
        HostId(self.host)
    }

    /// The name of the target.
    pub(super) fn target_name(&self) -> &str {
        &self.target_name
    }

    /// The device's number, if its process has noted one.
    #[must_use]
    pub(crate) fn numbered(&self) -> Option<u32> {
        (self.device_id != NO_DEVICE).then_some(self.device_id)
    }

    /// The disk's path.
    #[must_use]
    pub fn disk(&self) -> String {
        disk_path(self.device_id).display().to_string()
    }

    /// The line of `list` for a mount without a process.
    #[must_use]
    pub fn status(&self, state: &str) -> MountStatus {
        let has = |flag| VolumeFlags(self.volume.flags).has(flag);
        let size = self.block_size().and_then(|size| BlockCount(self.volume.blocks).bytes(size));
        MountStatus {
            name: self.name.clone(),
            device: self.disk(),
            volume: self.config.volume.clone(),
            target: self.config.target.clone(),
            address: self.address.clone(),
            target_name: self.target_name.clone(),
            rdma_device: self.rdma_device.clone(),
            transport: self.transport.clone(),
            state: state.to_owned(),
            pid: self.pid,
            size_bytes: size.unwrap_or(0),
            block_size: self.volume.block_size,
            read_only: has(VolumeFlags::READ_ONLY),
            volatile_cache: has(VolumeFlags::VOLATILE_CACHE),
            queues: self.queues,
            queue_depth: self.wish.depth,
            max_io_bytes: self.wish.io_max,
            in_capsule_bytes: self.wish.in_capsule,
            loss_untold: self.loss_untold,
            on_loss: self.config.on_loss,
            epoch: self.session.as_ref().map_or(0, |session| session.epoch),
            generation: self.volume.generation,
            ephemeral: has(VolumeFlags::EPHEMERAL),
            ..MountStatus::default()
        }
        .with_lost()
    }
}

fn cut(text: &str) -> String {
    let end = (0..=TEXT_MAX.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or(0)].to_owned()
}

/// Reads the configuration of a mount whose program may have had keys that are retired now.
fn without_retired_keys<'de, D: Deserializer<'de>>(from: D) -> Result<MountConfig, D::Error> {
    let mut keys = serde_json::Map::deserialize(from)?;
    for retired in MountConfig::keys().retired() {
        keys.remove(retired.name);
    }
    serde_json::from_value(keys.into()).map_err(de::Error::custom)
}

/// A value as its own text.
mod as_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<T: Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

/// 128 bits as 32 hexadecimal digits.
mod as_hex {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8; 16], to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{:032x}", u128::from_be_bytes(*bytes)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<[u8; 16], D::Error> {
        let text = String::deserialize(from)?;
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let value = u128::from_str_radix(&text, 16).ok().filter(|_| digits);
        value.map(u128::to_be_bytes).ok_or_else(|| de::Error::custom("not 32 hexadecimal digits"))
    }
}
