//! [`Note`]: what a mount writes down so that another process can serve its device when its own has died. A file of
//! its name, JSON, replaced whole.
//!
//! It is written before the disk is there (so there is no disk without a note), before every try to connect (so the
//! epoch in it was never used for anything that is not in it), and after every success. It has the session's id,
//! which lets its reader take the session over: only root may read it.
//!
//! Whoever reads it takes nothing in it for granted: it may be another version's, or damaged.

use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rblk_config::MountConfig;
use rblk_fabric::Address;
use rblk_protocol::{
    BlockCount, BlockSize, Epoch, Features, Generation, HostId, InstanceId, Name, OpenReply,
    QueueDepth, SessionId, VolumeFlags, VolumeHandle, WriteVerifier, limits,
};
use serde::{Deserialize, Serialize};

use super::known::Known;
use super::lock::make_run_dir;
use super::socket::RUN_DIR;
use super::status::MountStatus;
use crate::session::{HostIdentity, LISTS, QueueWish};
use crate::ublk::{DeviceToken, disk_path};

/// The form written and read here. It changes when an older program must not go by a newer note, or the reverse.
const FORM: u32 = 2;
/// No note is longer.
const LEN_MAX: u64 = 64 << 10;
/// The number of a device that has none yet.
pub(super) const NO_DEVICE: u32 = u32::MAX;
/// No text in a note that is for people is longer.
const TEXT_MAX: usize = 1024;

/// Why there is no note to go by, where there should be one.
#[derive(Debug, thiserror::Error)]
#[error(
    "the note of mount `{name}` cannot be used: {why}. If another version of rblk wrote it, recover the mount with \
     that; `rblk-initiator umount --force {name}` gives it up"
)]
pub struct BadNote {
    name: String,
    why: String,
}

/// What a mount leaves.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Note {
    form: u32,
    /// Name of the mount.
    pub name: String,
    /// Process that wrote it.
    pub pid: u32,
    /// Its ublk device.
    pub device_id: u32,
    /// The device's mark.
    #[serde(with = "as_text")]
    pub token: DeviceToken,
    /// What it was mounted with.
    pub config: MountConfig,
    // Whom the target knows as the holder. What it was made of may be another by now.
    #[serde(with = "as_hex")]
    host: [u8; 16],
    // The session, and the highest epoch that was asked for in it.
    session: Option<Session>,
    #[serde(with = "as_hex")]
    instance: [u8; 16],
    target_name: String,
    volume: Volume,
    wish: Wish,
    queues: u16,
    /// Acknowledged writes may be in the target's memory only.
    pub maybe_unflushed: bool,
    /// Acknowledged writes were lost, and no FLUSH was failed for it yet.
    pub loss_untold: bool,
    /// Who holds the volume instead.
    pub fenced: Option<String>,
    /// Times the device was taken over by another process.
    pub recovered: u32,
    address: String,
    rdma_device: String,
    transport: String,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Session {
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
struct Wish {
    depth: u16,
    io_max: u32,
    in_capsule: u32,
    features: u32,
}

/// The parts of a note that are not in [`Known`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Doubts {
    pub(super) maybe_unflushed: bool,
    pub(super) loss_untold: bool,
    pub(super) recovered: u32,
}

impl Note {
    /// What is to be written of a mount that is served by this process.
    pub(super) fn of(
        name: &str,
        device: (u32, DeviceToken),
        config: &MountConfig,
        known: &Known,
        doubts: Doubts,
    ) -> Self {
        let volume = &known.volume;
        Self {
            form: FORM,
            name: name.to_owned(),
            pid: std::process::id(),
            device_id: device.0,
            token: device.1,
            config: config.clone(),
            host: known.host.id.0,
            session: known.resume.map(|(id, epoch)| Session { id: id.0, epoch: epoch.0 }),
            instance: known.instance.0,
            target_name: known.target_name.to_string(),
            volume: Volume {
                blocks: volume.blocks.0,
                block_size: volume.block_size.bytes(),
                flags: volume.flags.0,
                discard_granularity: volume.discard_granularity_bytes,
                uuid: volume.uuid,
                verifier: volume.verifier.0,
                generation: volume.generation.0,
            },
            wish: Wish {
                depth: known.wish.depth.get(),
                io_max: known.wish.io_max_bytes,
                in_capsule: known.wish.in_capsule_bytes,
                // Another version decides anew: what it cannot do must not be asked for in its name.
                features: known.wish.features.without(LISTS).0,
            },
            queues: known.queues,
            maybe_unflushed: doubts.maybe_unflushed,
            loss_untold: doubts.loss_untold,
            fenced: known.fenced.as_deref().map(cut),
            recovered: doubts.recovered,
            address: cut(&known.address),
            rdma_device: cut(&known.rdma_device),
            transport: cut(&known.transport),
        }
    }

    fn path(dir: &Path, name: &str) -> PathBuf {
        dir.join(format!("{name}.json"))
    }

    /// Writes it in the place of an older one.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self) -> io::Result<()> {
        make_run_dir()?;
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
            // Half a note is of no use, and takes room that may be what is missing.
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
        match load(&Self::path(dir, name)) {
            Ok(text) => Self::parse(&text, name).map(Some).map_err(bad),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(bad(error.to_string())),
        }
    }

    /// The mark of a mount's device, from a note of which nothing else needs to make sense.
    #[must_use]
    pub fn token_of(name: &str) -> Option<DeviceToken> {
        let text = load(&Self::path(Path::new(RUN_DIR), name)).ok()?;
        let value: serde_json::Value = serde_json::from_slice(&text).ok()?;
        value.get("token")?.as_str()?.parse().ok()
    }

    /// Forgets the note of a mount.
    pub fn remove(name: &str) {
        let _ = std::fs::remove_file(Self::path(Path::new(RUN_DIR), name));
    }

    fn parse(text: &[u8], name: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Head {
            form: u32,
        }
        let head: Head = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if head.form != FORM {
            return Err(format!("its form is {}, and this program knows {FORM}", head.form));
        }
        let note: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        note.check(name)?;
        Ok(note)
    }

    /// Whether every value is one that a mount could have written.
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
        rule(longest.max() <= Some(TEXT_MAX), "a text is too long")
    }

    fn block_size(&self) -> Option<BlockSize> {
        BlockSize::new(self.volume.block_size)
    }

    /// What the mount knew of its volume, with no memory for its queues yet. The target goes on knowing this host by
    /// the id that it had then, and by `host_name`.
    ///
    /// # Errors
    /// An address of `config`, which may be another than the note's, is none.
    pub(super) fn known(&self, config: &MountConfig, host_name: Name) -> anyhow::Result<Known> {
        let none = || anyhow::anyhow!("a note that was not checked");
        let session =
            self.session.as_ref().map(|session| (SessionId(session.id), Epoch(session.epoch)));
        Ok(Known {
            volume_name: Name::new(&self.config.volume)?,
            addresses: config
                .target
                .iter()
                .map(|target| target.parse())
                .collect::<Result<Vec<Address>, _>>()?,
            host: HostIdentity { id: HostId(self.host), name: host_name },
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
            resume: session,
            instance: InstanceId(self.instance),
            target_name: Name::new(&self.target_name)?,
            wish: QueueWish {
                depth: QueueDepth::new(self.wish.depth).ok_or_else(none)?,
                io_max_bytes: self.wish.io_max,
                in_capsule_bytes: self.wish.in_capsule,
                features: Features(self.wish.features).or(LISTS),
                lanes: config.lanes,
                queues: self.queues,
            },
            queues: self.queues,
            buffers: Vec::new(),
            address: self.address.clone(),
            rdma_device: self.rdma_device.clone(),
            transport: self.transport.clone(),
            fenced: self.fenced.clone(),
        })
    }

    /// Whom the target knows as the holder.
    pub(super) fn host(&self) -> HostId {
        HostId(self.host)
    }

    /// What its target calls itself.
    pub(super) fn target_name(&self) -> &str {
        &self.target_name
    }

    /// The device's number, once its process had noted one.
    #[must_use]
    pub fn numbered(&self) -> Option<u32> {
        (self.device_id != NO_DEVICE).then_some(self.device_id)
    }

    /// The disk's path.
    #[must_use]
    pub fn disk(&self) -> String {
        disk_path(self.device_id).display().to_string()
    }

    /// What `list` says of a mount that nobody serves.
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
            epoch: self.session.as_ref().map_or(0, |session| session.epoch),
            generation: self.volume.generation,
            ephemeral: has(VolumeFlags::EPHEMERAL),
            ..MountStatus::default()
        }
    }
}

fn cut(text: &str) -> String {
    let end = (0..=TEXT_MAX.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or(0)].to_owned()
}

fn load(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(LEN_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LEN_MAX {
        return Err(io::Error::other("it is too long"));
    }
    Ok(text)
}

/// A value by its own text.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn host() -> HostIdentity {
        HostIdentity { id: HostId([9; 16]), name: Name::new("host").unwrap() }
    }

    fn known() -> Known {
        Known {
            volume_name: Name::new("vol0").unwrap(),
            addresses: vec!["rdma://10.0.0.1".parse().unwrap(), "tcp://store".parse().unwrap()],
            host: host(),
            volume: OpenReply {
                handle: VolumeHandle(7),
                flags: VolumeFlags::VOLATILE_CACHE.with(VolumeFlags::DISCARD, true),
                block_size: BlockSize::new(4096).unwrap(),
                blocks: BlockCount(1 << 20),
                discard_granularity_bytes: 65_536,
                uuid: [1; 16],
                verifier: WriteVerifier([0xfe; 16]),
                generation: Generation(u64::MAX),
            },
            resume: Some((SessionId([0xab; 16]), Epoch(u32::MAX))),
            instance: InstanceId([3; 16]),
            target_name: Name::new("store1").unwrap(),
            wish: QueueWish {
                depth: QueueDepth::new(128).unwrap(),
                io_max_bytes: 262_144,
                in_capsule_bytes: 4096,
                features: Features::WRITE_WITH_IMM.or(LISTS),
                lanes: None,
                queues: 2,
            },
            queues: 2,
            buffers: Vec::new(),
            address: "tcp://store:7721".to_owned(),
            rdma_device: "rxe0".to_owned(),
            transport: "RoCE".to_owned(),
            fenced: None,
        }
    }

    fn note_of(known: &Known) -> Note {
        let mut config = MountConfig::new("rdma://10.0.0.1", "vol0");
        config.target.push("tcp://store".to_owned());
        config.retain = rblk_config::ByteSize(1 << 20);
        config.host_name = Some("a".to_owned());
        let doubts = Doubts { maybe_unflushed: true, loss_untold: true, recovered: 3 };
        Note::of("vol0", (4, DeviceToken::new(77)), &config, known, doubts)
    }

    impl Note {
        /// The note of a living mount.
        pub(in crate::mount) fn sample() -> Self {
            note_of(&known())
        }
    }

    fn text(note: &Note) -> Vec<u8> {
        serde_json::to_vec(note).unwrap()
    }

    #[test]
    fn what_is_known_survives_the_process() {
        let fenced = Known { fenced: Some("held by b".to_owned()), resume: None, ..known() };
        for known in [known(), fenced] {
            let note = note_of(&known);
            let read = Note::parse(&text(&note), "vol0").unwrap();
            assert_eq!(read, note);
            assert_eq!((read.device_id, read.token), (4, DeviceToken::new(77)));
            assert!(read.maybe_unflushed && read.loss_untold && read.recovered == 3);
            // The id of this host may be another by now, and the holder is who mounted.
            let again = read.known(&read.config, Name::new("renamed").unwrap()).unwrap();
            assert_eq!((again.host.id, again.host.name.as_str()), (host().id, "renamed"));
            // The handle was the old session's.
            let volume = OpenReply { handle: VolumeHandle(0), ..known.volume };
            assert_eq!(again.volume, volume);
            assert_eq!(again.resume, known.resume);
            assert_eq!((again.instance, again.target_name), (known.instance, known.target_name));
            assert_eq!((again.wish, again.queues), (known.wish, known.queues));
            assert_eq!(again.volume_name, known.volume_name);
            assert_eq!(again.addresses, known.addresses);
            assert_eq!(again.fenced, known.fenced);
        }
    }

    #[test]
    fn a_note_is_roots_and_replaced_whole() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        assert!(Note::read_in(dir.path(), "vol0").unwrap().is_none());
        let mut note = note_of(&known());
        note.write_in(dir.path()).unwrap();
        note.recovered = 4;
        note.write_in(dir.path()).unwrap();
        assert_eq!(Note::read_in(dir.path(), "vol0").unwrap().unwrap(), note);
        let file = dir.path().join("vol0.json");
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "more than the note is left");
        // One that cannot be written leaves the one before, or nothing.
        std::fs::create_dir(dir.path().join("vol1.json")).unwrap();
        let other = Note { name: "vol1".to_owned(), ..note.clone() };
        assert!(other.write_in(dir.path()).is_err());
        assert!(!dir.path().join("vol1.json.new").exists());
        std::fs::write(&file, vec![b' '; usize::try_from(LEN_MAX).unwrap() + 1]).unwrap();
        let bad = Note::read_in(dir.path(), "vol0").unwrap_err().to_string();
        assert!(bad.contains("too long") && bad.contains("umount --force vol0"), "{bad}");
    }

    #[test]
    fn a_note_with_a_bad_value_is_refused() {
        let cases: [(&str, Value, &str); 26] = [
            ("/form", json!(1), "form"),
            ("/form", json!("2"), "invalid type"),
            ("/name", json!("../../etc/x"), "another mount's"),
            ("/token", json!("7262"), "token"),
            ("/token", json!("0000000000000001"), "token"),
            ("/token", json!(5), "invalid type"),
            ("/device_id", json!(-1), "invalid value"),
            ("/pid", json!(1u64 << 40), "invalid value"),
            ("/host", json!("0".repeat(32)), "host's id"),
            ("/host", json!("1"), "hexadecimal"),
            ("/session/id", json!("+".repeat(32)), "hexadecimal"),
            ("/session/epoch", json!(1u64 << 32), "invalid value"),
            ("/instance", json!("é".repeat(16)), "hexadecimal"),
            ("/target_name", json!("a b"), "target's name"),
            ("/volume/blocks", json!(0), "empty"),
            ("/volume/blocks", json!(u64::MAX), "too large"),
            ("/volume/block_size", json!(3), "block size"),
            ("/volume/block_size", json!(0), "block size"),
            ("/wish/depth", json!(0), "depth"),
            ("/wish/io_max", json!(4097), "I/O size"),
            ("/wish/io_max", json!(1u32 << 30), "I/O size"),
            ("/wish/in_capsule", json!(1u32 << 30), "in-capsule"),
            ("/queues", json!(0), "queues"),
            ("/queues", json!(65_535), "queues"),
            ("/address", json!("x".repeat(TEXT_MAX + 1)), "too long"),
            ("/config/target", json!([]), "configuration"),
        ];
        let good: Value = serde_json::from_slice(&text(&note_of(&known()))).unwrap();
        for (path, value, why) in cases {
            let mut bad = good.clone();
            *bad.pointer_mut(path).unwrap() = value.clone();
            let error = Note::parse(&serde_json::to_vec(&bad).unwrap(), "vol0").unwrap_err();
            assert!(error.contains(why), "{path} = {value}: {error}");
        }
        for path in ["token", "config", "host", "volume", "wish", "queues", "maybe_unflushed"] {
            let mut bad = good.clone();
            bad.as_object_mut().unwrap().remove(path);
            let error = Note::parse(&serde_json::to_vec(&bad).unwrap(), "vol0").unwrap_err();
            assert!(error.contains("missing field"), "{path}: {error}");
        }
    }

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(cut("abc"), "abc");
        let long = "ü".repeat(TEXT_MAX);
        assert_eq!(cut(&long), "ü".repeat(TEXT_MAX / 2));
        assert_eq!(cut(&format!("x{long}")).len(), TEXT_MAX - 1);
        let mut known = known();
        known.fenced = Some(long);
        Note::parse(&text(&note_of(&known)), "vol0").unwrap();
    }

    proptest! {
        /// Whatever is in the file, reading it ends, and what it takes for a note has values that can be used.
        #[test]
        fn damage_is_no_panic(at in 0..4096usize, with in proptest::collection::vec(any::<u8>(), 0..40)) {
            let mut text = text(&note_of(&known()));
            let at = at % text.len();
            let end = (at + with.len()).min(text.len());
            text.splice(at..end, with);
            if let Ok(note) = Note::parse(&text, "vol0") {
                let _ = note.known(&note.config, host().name);
                let _ = note.status("no server");
            }
        }

        #[test]
        fn garbage_is_no_note(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Note::parse(&text, "vol0").is_err());
        }
    }
}
