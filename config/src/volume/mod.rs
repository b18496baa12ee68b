//! One volume of a target.

pub(crate) mod cache_part;
pub mod image;

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

/// Block size if the key is absent.
const BLOCK_SIZE_DEFAULT: u32 = 4096;

/// Block sizes that a volume may have.
const BLOCK_SIZES: &[u32] = &[512, 4096];

/// Most bytes of a volume: a round number below the limit of the protocol.
const SIZE_MAX: u64 = 7 << 60;
const _: () = assert!(SIZE_MAX <= VOLUME_MAX_BYTES);

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
        /// Where the data is. "file": a file or a block device, named by `path`. "memory": the
        /// memory of the target; the data is lost when the target stops. "null": nowhere, for
        /// measurements; writes are dropped and reads return zeros.
        pub store: StoreKind = StoreKind::File
            => Key::word(StoreKind::WORDS).required("\"file\"").no_flag();
        /// File or block device. Required for "file", and for "file" only. Each volume of each
        /// target needs its own.
        pub path: Option<PathBuf> = None
            => Key::new(PATH).absent("none", "\"/srv/rblk/vol0.img\"").no_flag();
        /// Size, a multiple of `block_size`. Required for "memory" and "null". With "file" the file
        /// must have this size. If it has another one, the target does not serve this volume, and
        /// serves all others.
        pub size: Option<ByteSize> = None
            => Key::size(512, SIZE_MAX, 512)
                .absent("the size of the file or device", "\"64GiB\"").no_flag().live();
        /// Bytes of a logical block. An image of a whole disk (an installer, a cloud image, a copy
        /// by dd) mostly has a partition table of 512-byte sectors: it needs 512.
        pub block_size: u32 = BLOCK_SIZE_DEFAULT => Key::new(Rule::Choice(BLOCK_SIZES));
        /// Whether the target refuses writes, also those of hosts that have the volume open.
        pub read_only: bool = false => Key::new(Rule::Flag).live();
        /// Use of direct I/O (`O_DIRECT`) for "file". If the file system does not support it,
        /// "required" refuses the volume and "preferred" uses the page cache. "off" always uses the
        /// page cache.
        pub direct: DirectIo = DirectIo::Preferred => Key::word(DirectIo::WORDS);
        /// Mode of the block cache, for "file" only. "none": every read and every write goes to the
        /// store. "write-through": reads come from memory if the blocks are there; a write is
        /// acknowledged when the store has it. "write-back": a write is acknowledged when it is in
        /// memory, and written to the store later; a FLUSH, and a write with FUA, wait for the
        /// store. Other acknowledged writes are lost when the target dies. Not with `read_only`.
        pub cache: Option<CacheMode> = None
            => Key::word(CacheMode::WORDS)
                .absent("\"write-through\" for \"file\", \"none\" for the others", "\"write-through\"")
                .live().more("durability.md#cache-modes");
        /// Bytes to read ahead of a sequential reader into the cache. 0 is off.
        pub read_ahead: ByteSize = READ_AHEAD_DEFAULT => Key::size(0, READ_AHEAD_MAX, 4096).live();
        /// Part of the cache (clean blocks) that the volume keeps when other volumes need memory,
        /// once it has used it. Those of all volumes together are at most half of `arena` (without
        /// `dirty_max`, if a volume is cached with "write-back"). For "file" with a cache only.
        pub cache_min: Option<ByteSize> = None
            => Key::size(CACHE_PART_LEAST, CACHE_PART_MOST, 4096)
                .absent("nothing is kept", "\"64MiB\"").live()
                .more("change.md#a-minimum-of-the-cache-for-a-volume");
        /// Largest part of the cache that the volume uses, dirty blocks included: at least
        /// `cache_min`, at most `arena`. For a volume that is read from end to end, such as by a
        /// backup: the blocks of other volumes stay cached. For "file" with a cache only.
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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

impl VolumeConfig {
    /// A volume on a file or a block device.
    #[must_use]
    pub fn file(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()), ..Self::new(name.into(), StoreKind::File) }
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
        match (store, &self.path) {
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
            (StoreKind::Memory | StoreKind::Null, Some(path)) => {
                let problem = format!("store = \"{store}\" has no path");
                let fault = Fault::new("path", problem, "remove path or write store = \"file\"");
                Err(Box::new(fault.value(path.display().to_string())))
            }
            (StoreKind::Memory, None) => Ok(BackingConfig::Memory { size: sized(self.size)? }),
            (StoreKind::Null, None) => Ok(BackingConfig::Null { size: sized(self.size)? }),
        }
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
            (StoreKind::File, CacheMode::WriteBack) if self.read_only => {
                let fix = "write cache = \"write-through\" or read_only = false";
                Fault::new("cache", "the volume is read-only", fix).other("read_only")
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

words!(StoreKind, { File = "file", Memory = "memory", Null = "null" });

words!(DirectIo, { Required = "required", Preferred = "preferred", Off = "off" });

words!(CacheMode, { None = "none", WriteThrough = "write-through", WriteBack = "write-back" });

impl Flagged for VolumeConfig {
    fn schema() -> &'static Schema {
        &VOLUME_KEYS
    }
}
