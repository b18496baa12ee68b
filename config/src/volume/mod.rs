//! One volume of a target.

pub(crate) mod cache_part;
pub mod image;
pub(crate) mod image_name;

use std::path::{Path, PathBuf};

use rblk_protocol::limits::{IO_MAX_BYTES, VOLUME_MAX_BYTES};

use crate::error::{ConfigError, Fault};
use crate::schema::flag_layer::Flagged;
use crate::schema::key_table::{key_table, key_values};
use crate::schema::rule::{Key, Schema};
use crate::schema::rule::{Rule, join};
use crate::schema::text_rules::{NAME, PATH};
use crate::schema::word::words;
use crate::setting::rate_limits::{LIMIT_KEYS, Limits};
use crate::units::ByteSize;
use image_name::{CEPH_USER, IMAGE, ImageName};

/// Block size if the key is absent.
const BLOCK_SIZE_DEFAULT: u32 = 4096;

/// Block sizes that a volume may have.
const BLOCK_SIZES: &[u32] = &[512, 4096];

/// Most bytes of a volume: a round number below the limit of the protocol.
const SIZE_MAX: u64 = 7 << 60;
const _: () = assert!(SIZE_MAX <= VOLUME_MAX_BYTES);

/// User of a Ceph cluster if the key is absent.
const CEPH_USER_DEFAULT: &str = "admin";

/// Bytes to read ahead if the key is absent.
const READ_AHEAD_DEFAULT: ByteSize = ByteSize(512 << 10);

/// Most bytes to read ahead. More than the largest I/O would hide no more latency.
const READ_AHEAD_MAX: u64 = IO_MAX_BYTES as u64;

/// Least of the cache that is worth a bound: every poll group has a part of it.
pub(crate) const CACHE_PART_LEAST: u64 = 1 << 20;
/// Most of the cache that a volume keeps, or has at most.
const CACHE_PART_MOST: u64 = 1 << 40;

key_table! {
    /// A volume: a `[[volume]]` table.
    #[extra(serde(deny_unknown_fields))]
    pub struct VolumeConfig in VOLUME_KEYS {
        /// Name by which initiators open the volume.
        pub name: String = String::new() => Key::new(NAME).required("\"vol0\"").no_flag();
        /// Where the data is. "file": a file or a block device, named by `path`. "rbd": an image of
        /// a Ceph cluster, named by `image`. "memory": the memory of the target; the data is lost
        /// when the target stops. "null": nowhere, for measurements; writes are dropped and reads
        /// return zeros.
        pub store: StoreKind = StoreKind::File
            => Key::word(StoreKind::WORDS).required("\"file\"").no_flag();
        /// File or block device. Required for "file", and for "file" only. Each volume of each
        /// target needs its own.
        pub path: Option<PathBuf> = None
            => Key::new(PATH).absent("none", "\"/srv/rblk/vol0.img\"").no_flag();
        /// Image of a Ceph cluster, or a snapshot of one, which is served read-only. Required for
        /// "rbd", and for "rbd" only. The target holds the exclusive lock of an image as long as it
        /// serves the volume.
        pub image: Option<String> = None
            => Key::new(IMAGE).absent("none", "\"rbd/vol0\"").no_flag();
        /// Configuration file of the Ceph cluster, for "rbd".
        pub ceph_conf: Option<PathBuf> = None
            => Key::new(PATH).absent("the files that Ceph's own programs read", "\"/etc/ceph/ceph.conf\"");
        /// User of the Ceph cluster, for "rbd": "rblk" is client.rblk. The user needs the
        /// capabilities `profile rbd` of the monitors and of the pool.
        pub user: Option<String> = None
            => Key::new(CEPH_USER).absent("\"admin\"", "\"rblk\"");
        /// File with the key of `user`, for "rbd".
        pub keyring: Option<PathBuf> = None
            => Key::new(PATH)
                .absent("the file that `ceph_conf` names", "\"/etc/ceph/ceph.client.rblk.keyring\"");
        /// Size, a multiple of `block_size`. Required for "memory" and "null". With "file" and
        /// "rbd" the file or image must have this size. If it has another one, the target does not
        /// serve this volume, and serves all others.
        pub size: Option<ByteSize> = None
            => Key::size(512, SIZE_MAX, 512)
                .absent("the size of the file, device or image", "\"64GiB\"").no_flag().live();
        /// Bytes of a logical block. An image of a whole disk (an installer, a cloud image, a copy
        /// by dd) mostly has a partition table of 512-byte sectors: it needs 512.
        pub block_size: u32 = BLOCK_SIZE_DEFAULT => Key::new(Rule::Choice(BLOCK_SIZES));
        /// Whether the target refuses writes, also those of hosts that have the volume open.
        pub read_only: bool = false => Key::new(Rule::Flag).live();
        /// Use of direct I/O (`O_DIRECT`) for "file". If the file system does not support it,
        /// "required" refuses the volume and "preferred" uses the page cache. "off" always uses the
        /// page cache.
        pub direct: DirectIo = DirectIo::Preferred => Key::word(DirectIo::WORDS);
        /// Mode of the block cache, for "file" and "rbd". "none": every read and every write goes
        /// to the store. "write-through": reads come from memory if the blocks are there; a write
        /// is acknowledged when the store has it. "write-back": a write is acknowledged when it is
        /// in memory, and written to the store later; a FLUSH, and a write with FUA, wait for the
        /// store. Other acknowledged writes are lost when the target dies. Not with `read_only`.
        pub cache: Option<CacheMode> = None
            => Key::word(CacheMode::WORDS)
                .absent(
                    "\"write-through\" for \"file\" and \"rbd\", \"none\" for the others",
                    "\"write-through\"",
                )
                .live().more("durability.md#cache-modes");
        /// Bytes to read ahead of a sequential reader into the cache. 0 is off.
        pub read_ahead: ByteSize = READ_AHEAD_DEFAULT => Key::size(0, READ_AHEAD_MAX, 4096).live();
        /// Part of the cache (clean blocks) that the volume keeps when other volumes need memory,
        /// once it has used it. Those of all volumes together are at most half of `arena` (without
        /// `dirty_max`, if a volume is cached with "write-back"). For volumes with a cache only.
        pub cache_min: Option<ByteSize> = None
            => Key::size(CACHE_PART_LEAST, CACHE_PART_MOST, 4096)
                .absent("nothing is kept", "\"64MiB\"").live()
                .more("change.md#a-minimum-of-the-cache-for-a-volume");
        /// Largest part of the cache that the volume uses, dirty blocks included: at least
        /// `cache_min`, at most `arena`. For a volume that is read from end to end, such as by a
        /// backup: the blocks of other volumes stay cached. For volumes with a cache only.
        pub cache_max: Option<ByteSize> = None
            => Key::size(CACHE_PART_LEAST, CACHE_PART_MOST, 4096)
                .absent("as much as there is", "\"256MiB\"").live()
                .more("change.md#a-maximum-of-the-cache-for-a-volume");
        /// Volume that this one shows as it once was. `rblk-target volume snapshot` writes it, and
        /// the value is only displayed.
        pub snapshot_of: Option<String> = None
            => Key::new(NAME).absent("no snapshot", "\"vol1\"").no_flag().live()
                .more("change.md#snapshots");
        /// The limits.
        #[serde(flatten)]
        pub limits: Limits = Limits::default() => Key::new(Rule::Keys(&LIMIT_KEYS));
    }
}

/// Where the data of a volume is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum StoreKind {
    /// A file or a block device.
    #[default]
    File,
    /// An image of a Ceph cluster.
    Rbd,
    /// The memory of the target. The data is lost when the target stops.
    Memory,
    /// Nowhere: writes are dropped and reads return zeros. For measurements.
    Null,
}

/// Use of `O_DIRECT`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum DirectIo {
    /// Always. If the file system does not support it, the volume is refused.
    Required,
    /// If the file system supports it.
    #[default]
    Preferred,
    /// Never: I/O goes through the page cache.
    Off,
}

key_values!(StoreKind, DirectIo);

/// The work of the target's block cache for a volume.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CacheMode {
    /// Every read and every write goes to the store.
    None,
    /// Reads are answered from memory if the blocks are there. Writes are acknowledged when the
    /// store has them.
    #[default]
    WriteThrough,
    /// Writes are acknowledged when they are in memory, and written to the store later. A FLUSH,
    /// and a write with FUA, wait for the store. Other acknowledged writes are lost when the target
    /// dies.
    WriteBack,
}

/// The keys that apply to the store of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BackingConfig<'c> {
    /// A file or a block device.
    File {
        /// Where it is.
        path: &'c Path,
        /// The size it must have, if given.
        size: Option<ByteSize>,
        /// Use of `O_DIRECT`.
        direct: DirectIo,
        /// Use of the block cache.
        cache: CacheMode,
        /// Bytes to read ahead of a sequential reader, a multiple of 4096; 0 is off.
        read_ahead: ByteSize,
    },
    /// An image of a Ceph cluster.
    Rbd {
        /// The image or snapshot.
        image: ImageName,
        /// How the target reaches the cluster.
        cluster: ClusterConfig<'c>,
        /// The size it must have, if given.
        size: Option<ByteSize>,
        /// Use of the block cache.
        cache: CacheMode,
        /// Bytes to read ahead of a sequential reader, a multiple of 4096; 0 is off.
        read_ahead: ByteSize,
    },
    /// The memory of the target.
    Memory {
        /// Size.
        size: ByteSize,
    },
    /// Nowhere.
    Null {
        /// Size.
        size: ByteSize,
    },
}

/// How a target reaches a Ceph cluster.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ClusterConfig<'c> {
    /// The configuration file; none: those that Ceph's own programs read.
    pub conf: Option<&'c Path>,
    /// The user, without its type.
    pub user: &'c str,
    /// The file with the user's key; none: the one that the configuration names.
    pub keyring: Option<&'c Path>,
}

impl VolumeConfig {
    /// A volume on a file or a block device.
    #[must_use]
    pub fn file(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()), ..Self::new(name.into(), StoreKind::File) }
    }

    /// A volume on an image of a Ceph cluster.
    #[must_use]
    pub fn rbd(name: impl Into<String>, image: impl Into<String>) -> Self {
        Self { image: Some(image.into()), ..Self::new(name.into(), StoreKind::Rbd) }
    }

    /// A volume in memory.
    #[must_use]
    pub fn memory(name: impl Into<String>, size: ByteSize) -> Self {
        Self { size: Some(size), ..Self::new(name.into(), StoreKind::Memory) }
    }

    /// A volume that drops its data.
    #[must_use]
    pub fn null(name: impl Into<String>, size: ByteSize) -> Self {
        Self { size: Some(size), ..Self::new(name.into(), StoreKind::Null) }
    }

    fn new(name: String, store: StoreKind) -> Self {
        Self { name, store, ..Self::default() }
    }

    /// The keys of a `[[volume]]` table.
    #[must_use]
    pub fn keys() -> &'static Schema {
        &VOLUME_KEYS
    }

    /// The keys of the store.
    ///
    /// # Errors
    /// A key that the store needs is absent, or a key that it cannot have is set. Never after
    /// [`TargetConfig::validate`](crate::TargetConfig::validate).
    pub fn backing(&self) -> Result<BackingConfig<'_>, ConfigError> {
        self.choose().map_err(|fault| ConfigError::Invalid { faults: vec![*fault] })
    }

    fn choose(&self) -> Result<BackingConfig<'_>, Box<Fault>> {
        let store = self.store;
        let sized = |size: Option<ByteSize>| {
            size.ok_or_else(|| {
                let problem = format!("missing, and store = \"{store}\" needs it");
                Box::new(Fault::new("size", problem, "write a size such as size = \"1GiB\""))
            })
        };
        if let Some(fault) = self.misplaced() {
            return Err(Box::new(fault));
        }
        match (store, &self.path) {
            (StoreKind::Rbd, _) => self.choose_image(),
            (StoreKind::File, Some(path)) => Ok(BackingConfig::File {
                path,
                size: self.size,
                direct: self.direct,
                cache: self.cache.unwrap_or_default(),
                read_ahead: self.read_ahead,
            }),
            (StoreKind::File, None) => Err(Box::new(Fault::new(
                "path",
                "missing, and store = \"file\" needs it",
                "write the path of a file or a block device such as path = \"/srv/rblk/a.img\"",
            ))),
            (StoreKind::Memory, _) => Ok(BackingConfig::Memory { size: sized(self.size)? }),
            (StoreKind::Null, _) => Ok(BackingConfig::Null { size: sized(self.size)? }),
        }
    }

    fn choose_image(&self) -> Result<BackingConfig<'_>, Box<Fault>> {
        let Some(text) = &self.image else {
            return Err(Box::new(Fault::new(
                "image",
                "missing, and store = \"rbd\" needs it",
                "write the pool and the name of an image such as image = \"rbd/vol0\"",
            )));
        };
        // The rule of the key says more.
        let image = text.parse().map_err(|error: String| {
            Box::new(Fault::new("image", error, "write pool/image").value(text.clone()))
        })?;
        let cluster = ClusterConfig {
            conf: self.ceph_conf.as_deref(),
            user: self.user.as_deref().unwrap_or(CEPH_USER_DEFAULT),
            keyring: self.keyring.as_deref(),
        };
        let (size, cache) = (self.size, self.cache.unwrap_or_default());
        Ok(BackingConfig::Rbd { image, cluster, size, cache, read_ahead: self.read_ahead })
    }

    /// The fault of a key that names a store of another kind.
    fn misplaced(&self) -> Option<Fault> {
        let store = self.store;
        let shown = |path: &PathBuf| path.display().to_string();
        let named = [
            ("path", StoreKind::File, self.path.as_ref().map(shown)),
            ("image", StoreKind::Rbd, self.image.clone()),
            ("ceph_conf", StoreKind::Rbd, self.ceph_conf.as_ref().map(shown)),
            ("user", StoreKind::Rbd, self.user.clone()),
            ("keyring", StoreKind::Rbd, self.keyring.as_ref().map(shown)),
        ];
        let is_misplaced =
            |(_, of, value): &(&str, StoreKind, Option<String>)| value.is_some() && *of != store;
        let (key, of, value) = named.into_iter().find(is_misplaced)?;
        let problem = format!("store = \"{store}\" has no {key}");
        let fault = Fault::new(key, problem, format!("remove {key} or write store = \"{of}\""));
        Some(fault.value(value.unwrap_or_default()))
    }

    /// Adds the faults between keys that are valid alone. `path` is the path of the table.
    pub(crate) fn relate(&self, path: &str, faults: &mut Vec<Fault>) {
        let lacking = self.choose().err().map(|fault| *fault);
        let own = lacking.into_iter().chain(self.misfit()).chain(self.miscached());
        faults.extend(own.map(|mut fault| {
            fault.key = join(path, &fault.key);
            fault.rests_beside = true;
            fault.other = fault.other.map(|other| join(path, &other));
            fault
        }));
    }

    /// The fault of a cache mode that the volume cannot have.
    fn miscached(&self) -> Option<Fault> {
        let cache = self.cache?;
        let fault = match (self.store, cache) {
            (
                StoreKind::Memory | StoreKind::Null,
                CacheMode::WriteThrough | CacheMode::WriteBack,
            ) => {
                let problem =
                    format!("store = \"{}\" is in memory already and needs no cache", self.store);
                Fault::new("cache", problem, "remove cache or write cache = \"none\"")
            }
            (StoreKind::File | StoreKind::Rbd, CacheMode::WriteBack) if self.read_only => {
                let fix = "write cache = \"write-through\" or read_only = false";
                Fault::new("cache", "the volume is read-only", fix).other("read_only")
            }
            (StoreKind::Rbd, CacheMode::WriteBack)
                if self.image.as_ref().is_some_and(|image| image.contains('@')) =>
            {
                let fix = "write cache = \"write-through\"";
                Fault::new("cache", "a snapshot is read-only", fix).other("image")
            }
            _ => return None,
        };
        Some(fault.value(cache.word()))
    }

    /// The fault of a size that is not a whole number of blocks.
    fn misfit(&self) -> Option<Fault> {
        let size = self.size?;
        let block = u64::from(self.block_size);
        let over = size.0.checked_rem(block).filter(|over| *over != 0)?;
        let blocks = size.0 / block;
        let problem =
            format!("not a multiple of block_size: {} = {blocks} x {block} + {over}", size.0);
        let below = ByteSize(blocks.max(1) * block);
        let fix = match ByteSize((blocks + 1) * block) {
            above if above == below => format!("write \"{above}\""),
            above => format!("write \"{below}\" or \"{above}\""),
        };
        let fix = if block == 4096 { format!("{fix}, or block_size = 512") } else { fix };
        Some(Fault::new("size", problem, fix).value(size.to_string()))
    }
}

words!(StoreKind, { File = "file", Rbd = "rbd", Memory = "memory", Null = "null" });

words!(DirectIo, { Required = "required", Preferred = "preferred", Off = "off" });

words!(CacheMode, { None = "none", WriteThrough = "write-through", WriteBack = "write-back" });

impl Flagged for VolumeConfig {
    fn schema() -> &'static Schema {
        &VOLUME_KEYS
    }
}
