//! The volumes that a target serves, and the resources that it uses.

pub(crate) mod difference;
pub(crate) mod drop_in;
pub(crate) mod narrowing;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rblk_protocol::auth::{PublicKey, SecretKey};
use rblk_protocol::limits;
use serde::{Deserialize, Serialize};

use crate::Exit;
use crate::error::{ConfigError, Fault};
use crate::host_config::{HOST_KEYS, HostConfig};
use crate::key_file::{self, KeyFileError, Side, TARGET_KEY_FILE};
use crate::schema::document::{Document, Draft, Sites, lay_with_drop_ins};
use crate::schema::faults::judge;
use crate::schema::rule::{
    ADDRESS, DIRECTORY, KEY_FILE, Key, NAME, Rule, SOCKET, SOCKET_ADDRESS, Schema,
};
use crate::schema::word::words;
use crate::setting::connection_protection::{Auth, Encrypt, is_loopback};
use crate::setting::spin_key::Spin;
use crate::units::{ByteSize, Duration};
use crate::volume::cache_part::{self, CacheRoom};
use crate::volume::{VOLUME_KEYS, VolumeConfig};

/// The arena holds at least this many I/Os of the largest size: one that is read from the store,
/// one that is written to it, and one in transfer in each direction.
const ARENA_IOS_MIN: u64 = 4;

/// How long a target that stops tries to write dirty blocks, by default.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// The addresses that a target without `listen` listens on in any case.
pub const LISTEN_DEFAULT: &str = "tcp://[::]:7721";

/// Most bytes of the arena.
const ARENA_MAX: u64 = 1 << 40;

/// Highest CPU number of the largest kernel configuration.
const CPU_MAX: u32 = 8191;

/// The commands that set keys up, the first one and the last one at the target.
pub(crate) const SET_UP: &str = "`rblk-target key new`, `rblk-initiator key new` on each host, \
    `rblk-target host add NAME --key KEY --volume VOLUME:rw`";

static TARGET_KEYS: Schema = Schema {
    keys: &[
        Key::optional("listen", Rule::List { item: &ADDRESS, max: 64 }),
        Key::optional("devices", Rule::List { item: &NAME, max: 64 }),
        Key::optional("name", NAME),
        Key::optional("control_socket", SOCKET),
        Key::optional("state_dir", DIRECTORY),
        Key::optional("poll_groups", Rule::Count { min: 1, max: limits::QUEUES_MAX as u32 }),
        Key::optional(
            "cpus",
            Rule::List { item: &Rule::Count { min: 0, max: CPU_MAX }, max: 1024 },
        ),
        Key::optional("arena", Rule::Size { min: 1 << 20, max: ARENA_MAX, step: 4096 }),
        Key::optional("hugepages", Rule::Word(HugePages::WORDS)),
        Key::optional(
            "dirty_max",
            Rule::Size { min: limits::IO_MIN_BYTES as u64, max: ARENA_MAX / 2, step: 4096 },
        ),
        Key::optional(
            "write_back_delay",
            Rule::Span { min: Duration::from_millis(10), max: Duration::from_secs(3600) },
        ),
        Key::optional(
            "max_io",
            Rule::PowerOfTwo { min: limits::IO_MIN_BYTES as u64, max: limits::IO_MAX_BYTES as u64 },
        ),
        Key::optional(
            "queue_depth_max",
            Rule::Count { min: 1, max: limits::QUEUE_DEPTH_MAX as u32 },
        ),
        Key::optional(
            "inline",
            Rule::Size { min: 0, max: limits::IN_CAPSULE_MAX_BYTES as u64, step: 512 },
        ),
        Key::optional(
            "drain_timeout",
            Rule::Span { min: Duration::from_secs(0), max: Duration::from_secs(3600) },
        ),
        Key::optional(
            "stop_timeout",
            Rule::Span { min: Duration::from_secs(0), max: Duration::from_secs(3600) },
        ),
        Key::optional("sessions_max", Rule::Count { min: 1, max: 65_536 }),
        Key::optional(
            "lease",
            Rule::Span { min: Duration::from_secs(1), max: Duration::from_secs(3600) },
        ),
        Key::optional("spin", Rule::Spin { max: Duration::from_millis(10) }),
        Key::optional("auth", Rule::Word(Auth::WORDS)),
        Key::optional("insecure", Rule::Flag),
        Key::optional("key_file", KEY_FILE),
        Key::optional("key_file_next", KEY_FILE),
        Key::optional("encrypt", Rule::Word(Encrypt::WORDS)),
        Key::optional("http", SOCKET_ADDRESS),
        Key::optional(
            "slow_io",
            Rule::Span { min: Duration::from_micros(1), max: Duration::from_secs(3600) },
        ),
        Key::optional("relaxed_ordering", Rule::Flag),
        Key::optional("tos", Rule::Count { min: 0, max: 255 }),
        Key::optional(
            "ack_timeout",
            Rule::Span { min: Duration::from_millis(1), max: Duration::from_secs(30) },
        ),
        Key::optional("volume", Rule::Tables(&VOLUME_KEYS)),
        Key::optional("host", Rule::Tables(&HOST_KEYS)),
    ],
};

/// Configuration of a target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TargetConfig {
    /// Addresses to listen on, such as `rdma://[::]:7720` or `tcp://[::]:7721`. If absent: every
    /// address of this host, over TCP, and over RDMA if there is a device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub listen: Vec<String>,
    /// The RDMA devices that connections may come by, such as `mlx5_0`. If absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<Vec<String>>,
    /// The name of the target, as initiators show it. If absent: the name of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The socket by which `rblk-target status` and other commands reach the running target.
    pub control_socket: PathBuf,
    /// Where the target records whether it stopped cleanly, and which hosts held its volumes.
    pub state_dir: PathBuf,
    /// Data threads. If absent: half the number of CPUs, from 1 to 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub poll_groups: Option<u16>,
    /// CPUs that the data threads are pinned to, one each. If absent: they are not pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Vec<u16>>,
    /// Memory for data in transfer and for the block cache. It is locked and registered with the
    /// RDMA device.
    pub arena: ByteSize,
    /// Whether the arena uses reserved huge pages.
    pub hugepages: HugePages,
    /// Most acknowledged bytes of write-back volumes that are only in memory. If absent: see
    /// [`Self::dirty_limit`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_max: Option<ByteSize>,
    /// How long a dirty block of a write-back volume waits at most before it is written to its
    /// store.
    pub write_back_delay: Duration,
    /// Most data of one read or write.
    pub max_io: ByteSize,
    /// Most commands outstanding on one queue.
    pub queue_depth_max: u16,
    /// Most write data that is sent inside a command.
    pub inline: ByteSize,
    /// How long a target that stops waits for commands in flight.
    pub drain_timeout: Duration,
    /// How long a target that stops tries to write dirty blocks to stores that refuse them or do
    /// not answer, before it gives them up.
    pub stop_timeout: Duration,
    /// Most sessions at once.
    pub sessions_max: u32,
    /// How long an initiator that the target does not hear keeps the volumes that it opened. Also
    /// over a restart of the target.
    pub lease: Duration,
    /// How long an idle data thread looks for work before it sleeps.
    pub spin: Spin,
    /// The hosts that may connect. If absent: see [`Self::authentication`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auth: Option<Auth>,
    /// Whether every host may connect by an address that other hosts reach.
    pub insecure: bool,
    /// The file of the secret key of the target, or `credential:NAME`.
    pub key_file: PathBuf,
    /// The file of a second key, while mounts learn the first one or the second one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_file_next: Option<PathBuf>,
    /// Whether `tcp://` connections are encrypted.
    pub encrypt: Encrypt,
    /// Where metrics, health and the live page are served over HTTP, to every host that reaches the
    /// address. If absent: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<SocketAddr>,
    /// Commands that take at least this time become events. If absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_io: Option<Duration>,
    /// Whether devices may write to memory in any order before they tell of it. Faster on many
    /// hosts.
    pub relaxed_ordering: bool,
    /// The type of service of the packets of connections: DSCP and, in the two lowest bits, ECN. If
    /// absent: the default of the system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tos: Option<u8>,
    /// How long an RDMA card waits for an acknowledgement before it sends again. If absent: it
    /// follows from how soon a mount finds a dead path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ack_timeout: Option<Duration>,
    /// The volumes that are served.
    #[serde(rename = "volume", skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeConfig>,
    /// The hosts that may connect.
    #[serde(rename = "host", skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostConfig>,
}

/// A target without the key that it needs.
#[derive(Debug, thiserror::Error)]
#[error("{error}{lesson}")]
pub struct NoTargetKey {
    error: KeyFileError,
    lesson: String,
}

impl NoTargetKey {
    /// The exit code of a program that stops for this.
    #[must_use]
    pub fn exit(&self) -> Exit {
        self.error.exit()
    }
}

/// Use of reserved huge pages for the arena.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum HugePages {
    /// Huge pages, if enough of them are free.
    #[default]
    Auto,
    /// Ordinary pages.
    Never,
    /// Huge pages. The target does not start without them.
    Required,
}

words!(HugePages, { Auto = "auto", Never = "never", Required = "required" });

impl Default for TargetConfig {
    /// The defaults of the keys.
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            devices: None,
            name: None,
            control_socket: PathBuf::from("/run/rblk/target/control.sock"),
            state_dir: PathBuf::from("/var/lib/rblk"),
            poll_groups: None,
            cpus: None,
            arena: ByteSize(256 << 20),
            hugepages: HugePages::default(),
            dirty_max: None,
            write_back_delay: Duration::from_secs(1),
            max_io: ByteSize(1 << 20),
            queue_depth_max: limits::QUEUE_DEPTH_GRANTED_DEFAULT,
            inline: ByteSize(limits::IN_CAPSULE_DEFAULT_BYTES as u64),
            drain_timeout: Duration::from_secs(10),
            stop_timeout: STOP_TIMEOUT,
            sessions_max: 1024,
            lease: Duration::from_secs(30),
            spin: Spin::Adaptive,
            auth: None,
            insecure: false,
            key_file: PathBuf::from(TARGET_KEY_FILE),
            key_file_next: None,
            encrypt: Encrypt::default(),
            http: None,
            slow_io: None,
            relaxed_ordering: true,
            tos: None,
            ack_timeout: None,
            volumes: Vec::new(),
            hosts: Vec::new(),
        }
    }
}

impl TargetConfig {
    /// Loads `X.toml` and, over it, every `*.toml` of the directory `X.d` beside it.
    ///
    /// The files of the directory are read in the order of their names, without hidden files. Each
    /// file adds its `[[volume]]` and `[[host]]` tables to the earlier ones, and replaces every
    /// other key that it sets, also lists. The result is checked once, at the end.
    ///
    /// # Errors
    /// [`ConfigError`], with all faults at once.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::decode(lay_with_drop_ins(path, None)?)
    }

    /// As [`Self::load`], as if one of the files were already changed. So a change is checked
    /// before it is made.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(crate) fn load_draft(path: &Path, draft: &Draft) -> Result<Self, ConfigError> {
        Self::decode(lay_with_drop_ins(path, Some(draft))?)
    }

    /// Parses text. Errors name it `path`.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse(text: &str, path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut document = Document::default();
        document.lay_text(text, path.as_ref())?;
        Self::decode(document)
    }

    /// Applies the rules of a file to values that came from elsewhere.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        match judge(self.table()?, &TARGET_KEYS, Self::relate) {
            Ok(_) => Ok(()),
            Err(faults) => Err(Sites::default().refuse(faults)),
        }
    }

    /// TOML that loads to the same value, with every key that has a value.
    ///
    /// # Errors
    /// [`ConfigError::Dump`] if a path is not UTF-8.
    pub fn dump(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(|error| ConfigError::Dump(error.to_string()))
    }

    /// `dirty_max`, or its default of a quarter of the arena, in whole 4 KiB. At least `max_io` in
    /// a valid configuration.
    #[must_use]
    pub fn dirty_limit(&self) -> ByteSize {
        self.dirty_max.unwrap_or(ByteSize(self.arena.0 / ARENA_IOS_MIN / 4096 * 4096))
    }

    /// The hosts that may connect: `auth`, or its default. Without `auth`, hosts must prove their
    /// keys, unless only this host reaches the target, or `insecure` lets every host connect.
    #[must_use]
    pub fn authentication(&self) -> Auth {
        let default = match self.exposed().is_none() || self.insecure {
            true => Auth::None,
            false => Auth::Required,
        };
        self.auth.unwrap_or(default)
    }

    /// The secret keys that the target proves: of `key_file`, and of `key_file_next` if there is
    /// one. None if no key is proven.
    ///
    /// # Errors
    /// A file is missing, others may read it, or it is no key file.
    pub fn secret_keys(&self) -> Result<Vec<SecretKey>, NoTargetKey> {
        if self.authentication() == Auth::None {
            return Ok(Vec::new());
        }
        let files = std::iter::once(&self.key_file).chain(&self.key_file_next);
        let keys = files.map(|file| key_file::read(file, Side::Target)).collect::<Result<_, _>>();
        keys.map_err(|error| NoTargetKey {
            lesson: match (error.is_missing(), self.exposed()) {
                (true, Some(address)) => format!(
                    ". Other hosts reach {address}, so every host must prove its key. These commands set \
                     keys up: {SET_UP}. --insecure lets everybody in instead"
                ),
                _ => String::new(),
            },
            error,
        })
    }

    /// The first address that other hosts reach.
    #[must_use]
    pub fn exposed(&self) -> Option<&str> {
        if self.listen.is_empty() {
            return Some(LISTEN_DEFAULT);
        }
        self.listen.iter().map(String::as_str).find(|address| !is_loopback(address))
    }

    /// The keys of the file.
    #[must_use]
    pub fn keys() -> &'static Schema {
        &TARGET_KEYS
    }

    fn decode(document: Document) -> Result<Self, ConfigError> {
        document.decode(&TARGET_KEYS, Self::relate)
    }

    fn table(&self) -> Result<toml::Table, ConfigError> {
        toml::Table::try_from(self).map_err(|error| ConfigError::Dump(error.to_string()))
    }

    /// Adds the faults between keys that are valid alone.
    fn relate(&self, faults: &mut Vec<Fault>) {
        let arena_min = ByteSize(ARENA_IOS_MIN * self.max_io.0);
        if self.arena < arena_min {
            let lower = ByteSize((self.arena.0 / ARENA_IOS_MIN + 1).next_power_of_two() / 2);
            let problem = format!(
                "too small: {ARENA_IOS_MIN} x max_io = {ARENA_IOS_MIN} x {} = {arena_min}",
                self.max_io
            );
            let fix = format!("raise arena to \"{arena_min}\" or lower max_io to \"{lower}\"");
            let fault = Fault::new("arena", problem, fix).value(self.arena.to_string());
            faults.push(fault.rests_on(&["max_io"]));
        }
        self.relate_dirty(faults);
        if self.inline > self.max_io {
            let problem = format!("more than max_io = \"{}\"", self.max_io);
            let fix = format!("lower inline to \"{0}\" or raise max_io", self.max_io);
            let fault = Fault::new("inline", problem, fix).value(self.inline.to_string());
            faults.push(fault.rests_on(&["max_io"]));
        }
        if let (Some(groups), Some(cpus)) = (self.poll_groups, &self.cpus)
            && usize::from(groups) > cpus.len()
        {
            let problem =
                format!("each poll group needs a CPU of its own, and cpus lists {}", cpus.len());
            let fix = format!("lower poll_groups to {} or list {groups} CPUs in cpus", cpus.len());
            let fault = Fault::new("poll_groups", problem, fix).value(i64::from(groups));
            faults.push(fault.rests_on(&["cpus"]));
        }
        self.relate_protection(faults);
        self.relate_volumes(faults);
        let (arena, dirty_max) = (self.arena, self.dirty_max);
        let room = CacheRoom { arena, dirty_max, dirty_limit: self.dirty_limit() };
        cache_part::relate(&self.volumes, &room, faults);
        self.relate_hosts(faults);
    }

    fn relate_protection(&self, faults: &mut Vec<Fault>) {
        match (self.auth, self.exposed()) {
            (Some(Auth::None), Some(address)) if !self.insecure => {
                let problem =
                    format!("everybody who reaches {address} could read and write every volume");
                let fix = format!(
                    "write auth = \"required\" and set keys up: {SET_UP}; or write insecure = true as well"
                );
                let fault = Fault::new("auth", problem, fix).value("none");
                faults.push(fault.rests_on(&["listen", "insecure"]));
            }
            (Some(Auth::Required), _) if self.insecure => {
                let problem = "auth = \"required\" lets in only hosts that prove their keys";
                let fault = Fault::new("insecure", problem, "remove insecure or auth");
                faults.push(fault.value(true).other("auth"));
            }
            _ => {}
        }
        if self.encrypt == Encrypt::Required && self.authentication() == Auth::None {
            let problem = "the keys of encryption come from authentication, and there is none";
            let fix = "write auth = \"required\", or encrypt = \"auto\"";
            let fault = Fault::new("encrypt", problem, fix).value("required");
            faults.push(fault.rests_on(&["auth", "listen", "insecure"]));
        }
        if self.key_file_next.as_ref() == Some(&self.key_file) {
            let problem = "the same file as key_file";
            let fix = "name the file of another key, or remove key_file_next";
            let fault = Fault::new("key_file_next", problem, fix);
            faults.push(fault.value(self.key_file.display().to_string()).rests_on(&["key_file"]));
        }
    }

    fn relate_hosts(&self, faults: &mut Vec<Fault>) {
        let volumes: BTreeSet<&str> = self.volumes.iter().map(|v| v.name.as_str()).collect();
        let mut names: HashMap<&str, usize> = HashMap::new();
        let mut keys: HashMap<PublicKey, (usize, usize)> = HashMap::new();
        for (index, host) in self.hosts.iter().enumerate() {
            let at = format!("host[{index}]");
            let first = *names.entry(&host.name).or_insert(index);
            if first != index {
                let problem = format!("host[{first}] has the same name");
                let fix = "rename one of them, or give one of them both keys";
                let fault = Fault::new(format!("{at}.name"), problem, fix);
                faults.push(fault.value(host.name.as_str()).other(format!("host[{first}].name")));
            }
            for (number, key) in host.keys.iter().enumerate() {
                let (owner, first) = *keys.entry(*key).or_insert((index, number));
                if owner != index {
                    let problem = format!("a key belongs to one host, and host[{owner}] has it");
                    let fix = "make a key on each host with `rblk-initiator key new`";
                    let fault = Fault::new(format!("{at}.keys[{number}]"), problem, fix);
                    let other = format!("host[{owner}].keys[{first}]");
                    faults.push(fault.value(key.to_string()).other(other));
                }
            }
            host.relate(&at, &volumes, faults);
            host.limits().relate(&at, self.max_io, faults);
        }
    }

    /// At least one write of the largest size may be dirty, and half of the arena must stay free
    /// for everything else.
    fn relate_dirty(&self, faults: &mut Vec<Fault>) {
        let Some(dirty) = self.dirty_max else { return };
        let half = ByteSize(self.arena.0 / 2 / 4096 * 4096);
        let fault = if dirty < self.max_io {
            let problem = format!("less than max_io = \"{}\"", self.max_io);
            let fix = format!("raise dirty_max to \"{}\" or lower max_io", self.max_io);
            Fault::new("dirty_max", problem, fix)
        } else if dirty > half {
            let problem = format!("more than half of arena = \"{}\"", self.arena);
            let above = ByteSize(dirty.0.saturating_mul(2));
            let fix = match above.0 {
                0..=ARENA_MAX => {
                    format!("lower dirty_max to \"{half}\" or raise arena to \"{above}\"")
                }
                _ => format!("lower dirty_max to \"{half}\""),
            };
            Fault::new("dirty_max", problem, fix)
        } else {
            return;
        };
        faults.push(fault.value(dirty.to_string()).rests_on(&["max_io", "arena"]));
    }

    fn relate_volumes(&self, faults: &mut Vec<Fault>) {
        let mut names: HashMap<&str, usize> = HashMap::new();
        let mut paths: HashMap<PathBuf, usize> = HashMap::new();
        for (index, volume) in self.volumes.iter().enumerate() {
            let at = format!("volume[{index}]");
            volume.relate(&at, faults);
            volume.limits().relate(&at, self.max_io, faults);
            let first = *names.entry(&volume.name).or_insert(index);
            if first != index {
                let key = format!("{at}.name");
                faults.push(
                    Fault::new(
                        key,
                        format!("volume[{first}] has the same name"),
                        "rename one of them",
                    )
                    .value(volume.name.as_str())
                    .other(format!("volume[{first}].name")),
                );
            }
            // Compared by components, so that `/a//b` and `/a/./b` are `/a/b`. The lock of the
            // store finds links to the same file.
            let Some(path) = &volume.path else { continue };
            let first = *paths.entry(path.components().collect()).or_insert(index);
            if first != index {
                let key = format!("{at}.path");
                faults.push(
                    Fault::new(
                        key,
                        format!("volume[{first}] has the same path"),
                        "give each volume its own file or device",
                    )
                    .value(path.display().to_string())
                    .other(format!("volume[{first}].path")),
                );
            }
        }
    }
}
