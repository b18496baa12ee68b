//! One volume of a target.

pub(crate) mod cache_part;
pub mod image;

use std::path::{Path, PathBuf};

use rblk_protocol::limits::{IO_MAX_BYTES, VOLUME_MAX_BYTES};
use serde::{Deserialize, Serialize};

use crate::error::{ConfigError, Fault};
use crate::schema::rule::{Key, NAME, PATH, Rule, Schema, join};
use crate::schema::word::words;
use crate::setting::rate_limits::{self, ByteRate, Limits};
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

pub(crate) static VOLUME_KEYS: Schema = Schema {
    keys: &[
        Key::required("name", NAME),
        Key::required("store", Rule::Word(StoreKind::WORDS)),
        Key::optional("path", PATH),
        Key::optional("size", Rule::Size { min: 512, max: SIZE_MAX, step: 512 }),
        Key::optional("block_size", Rule::Choice(BLOCK_SIZES)),
        Key::optional("read_only", Rule::Flag),
        Key::optional("direct", Rule::Word(DirectIo::WORDS)),
        Key::optional("cache", Rule::Word(CacheMode::WORDS)),
        Key::optional("read_ahead", Rule::Size { min: 0, max: READ_AHEAD_MAX, step: 4096 }),
        Key::optional(
            "cache_min",
            Rule::Size { min: CACHE_PART_LEAST, max: CACHE_PART_MOST, step: 4096 },
        ),
        Key::optional(
            "cache_max",
            Rule::Size { min: CACHE_PART_LEAST, max: CACHE_PART_MOST, step: 4096 },
        ),
        Key::optional("snapshot_of", NAME),
        rate_limits::IOPS,
        rate_limits::BANDWIDTH,
        rate_limits::IOPS_BURST,
        rate_limits::BANDWIDTH_BURST,
    ],
};

/// A volume: a `[[volume]]` table.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeConfig {
    /// The name that initiators open it by. The table of keys requires it.
    #[serde(default)]
    pub name: String,
    /// Where its data is. The table of keys requires it.
    #[serde(default)]
    pub store: StoreKind,
    /// The file or block device. For `file` only, and required there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Size. Required for `memory` and `null`. For `file` it must be the size of the file, or the
    /// volume is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<ByteSize>,
    /// Bytes of a logical block: 512 or 4096.
    #[serde(default = "block_size_default")]
    pub block_size: u32,
    /// Whether the target refuses writes.
    #[serde(default)]
    pub read_only: bool,
    /// Whether the page cache of the kernel is bypassed. Has an effect for `file` only.
    #[serde(default)]
    pub direct: DirectIo,
    /// The cache mode of the volume. For `file` only. If absent there: `write-through`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheMode>,
    /// How far ahead of a sequential reader the target reads. 0 is off. Has an effect only with a
    /// cache.
    #[serde(default = "read_ahead_default")]
    pub read_ahead: ByteSize,
    /// How much of the cache it keeps when other volumes need memory, once it has used it. If
    /// absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_min: Option<ByteSize>,
    /// How much of the cache it has at most. If absent: as much as there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_max: Option<ByteSize>,
    /// The volume that this one shows as it once was. Only for people: nothing depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_of: Option<String>,
    /// Most commands per second. If absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u32>,
    /// Most bytes per second. If absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<ByteRate>,
    /// Most commands at once after a pause. If absent: those of a tenth of a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops_burst: Option<u32>,
    /// Most bytes at once after a pause. If absent: those of a tenth of a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_burst: Option<ByteSize>,
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
        Self {
            name,
            store,
            path: None,
            size: None,
            block_size: BLOCK_SIZE_DEFAULT,
            read_only: false,
            direct: DirectIo::default(),
            cache: None,
            read_ahead: READ_AHEAD_DEFAULT,
            cache_min: None,
            cache_max: None,
            snapshot_of: None,
            iops: None,
            bandwidth: None,
            iops_burst: None,
            bandwidth_burst: None,
        }
    }

    /// The limits per second.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits {
            iops: self.iops,
            bandwidth: self.bandwidth,
            iops_burst: self.iops_burst,
            bandwidth_burst: self.bandwidth_burst,
        }
    }

    /// The volume with other limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        let Limits { iops, bandwidth, iops_burst, bandwidth_burst } = limits;
        Self { iops, bandwidth, iops_burst, bandwidth_burst, ..self }
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

fn read_ahead_default() -> ByteSize {
    READ_AHEAD_DEFAULT
}

fn block_size_default() -> u32 {
    BLOCK_SIZE_DEFAULT
}
