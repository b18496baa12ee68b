//! The volumes that a target serves, and the resources that it uses.

pub(crate) mod difference;
pub(crate) mod drop_in;
pub(crate) mod narrowing;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use rblk_protocol::auth::{PublicKey, SecretKey};
use rblk_protocol::limits;

use crate::Exit;
use crate::error::{ConfigError, Fault};
use crate::host_config::{HOST_KEYS, HostConfig};
use crate::key_file::{self, KeyFileError, Side, TARGET_KEY_FILE};
use crate::schema::document::{Document, Draft, Sites, lay_with_drop_ins};
use crate::schema::faults::judge;
use crate::schema::flag_layer::{FlagLayer, Flagged};
use crate::schema::key_table::{key_table, key_values};
use crate::schema::rule::Rule;
use crate::schema::rule::{Key, Schema};
use crate::schema::text_rules::{ADDRESS, DIRECTORY, KEY_FILE, NAME, SOCKET, SOCKET_ADDRESS};
use crate::schema::word::words;
use crate::setting::connection_protection::{Auth, Encrypt, is_loopback};
use crate::setting::transport_keys::{TRANSPORT_KEYS, TransportKeys};
use crate::units::{ByteSize, Duration};
use crate::volume::cache_part::{self, CacheRoom};
use crate::volume::{StoreKind, VOLUME_KEYS, VolumeConfig};

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

/// Why a group serves no file and no disk.
const NO_FENCE: &str = "a group serves images of Ceph only. Ceph cuts a dead member off from its image; nothing cuts one \
    off from a file or a disk, as rblk makes no reservations (SCSI-3, NVMe): two members could write to it at once";

/// Why a group serves no memory.
const NOT_SHARED: &str =
    "a group serves images of Ceph only: each member would have data of its own under this name";

/// The way without a group.
const STANDBY: &str =
    "write store = \"rbd\", or remove member and start one target at a time (a standby target)";

/// The commands that set keys up, the first one and the last one at the target.
pub(crate) const SET_UP: &str = "`rblk-target key new`, `rblk-initiator key new` on each host, \
    `rblk-target host add NAME --key KEY --volume VOLUME:rw`";

key_table! {
    /// Configuration of a target.
    #[extra(serde(deny_unknown_fields))]
    pub struct TargetConfig in TARGET_KEYS {
        /// Addresses to listen on: `rdma://` for InfiniBand, RoCE or iWARP, `tcp://` for hosts
        /// without an RDMA card. The port may be left out. `[::]` is every address, of IPv4 too.
        pub listen: Vec<String> = Vec::new()
            => Key::list(&ADDRESS, 64)
                .absent("tcp://[::]:7721, and rdma://[::]:7720 if this host has an RDMA device",
                    "[\"rdma://[::]:7720\", \"tcp://[::]:7721\"]");
        /// RDMA devices that connections may come by, by their names in `rdma link`.
        pub devices: Option<Vec<String>> = None
            => Key::list(&NAME, 64).absent("all", "[\"mlx5_0\", \"mlx5_1\"]");
        /// Name of the target, as initiators show it. Set it where DHCP or cloud-init may change
        /// the name of the host: mounts do not go to a target of another name.
        pub name: Option<String> = None
            => Key::new(NAME).absent("the name of the host", "\"store1\"");
        /// Name of this target in a group of targets, which all have one `name`: each serves images
        /// of the same Ceph cluster, and takes those over whose member does not answer.
        pub member: Option<String> = None
            => Key::new(NAME).absent("it is in no group", "\"store1\"").more("ceph.md#a-group-of-targets");
        /// Socket by which `rblk-target status`, `drain` and other commands reach the target.
        pub control_socket: PathBuf = PathBuf::from("/run/rblk/target/control.sock")
            => Key::new(SOCKET);
        /// Directory where the target records whether it stopped cleanly, and which hosts held its
        /// volumes; it is made if it is absent. Targets of the same name need one each. Keep it
        /// together with the volumes: without it the target cannot tell whether another host wrote
        /// a volume before a mount reconnects.
        pub state_dir: PathBuf = PathBuf::from("/var/lib/rblk") => Key::new(DIRECTORY);
        /// Data threads.
        pub poll_groups: Option<u16> = None
            => Key::count(1, limits::QUEUES_MAX as u32)
                .absent("half the number of CPUs, from 1 to 4", "4");
        /// CPUs to pin the data threads to, one each. Those of the NUMA node of the RDMA device are
        /// best.
        pub cpus: Option<Vec<u16>> = None
            => Key::list(&Rule::Count { min: 0, max: CPU_MAX }, 1024)
                .absent("any", "[2, 3, 4, 5]");
        /// Memory for data in flight and for the block cache, at least 4 x `max_io`. It is
        /// registered with the RDMA device and locked: see `ulimit -l` or `LimitMEMLOCK=`. More
        /// memory means more cached blocks.
        pub arena: ByteSize = ByteSize(256 << 20) => Key::size(1 << 20, ARENA_MAX, 4096);
        /// Reserved huge pages of 2 MiB for the arena (sysctl `vm.nr_hugepages`): "auto" uses them
        /// if enough are free, "never" uses ordinary pages, "required" does not start without them.
        /// With them an RDMA device needs fewer translation entries.
        pub hugepages: HugePages = HugePages::Auto => Key::word(HugePages::WORDS);
        /// Most acknowledged data of write-back volumes that is only in memory, from `max_io` to
        /// half of `arena`. At the limit, writes wait for the stores.
        pub dirty_max: Option<ByteSize> = None
            => Key::size(limits::IO_MIN_BYTES as u64, ARENA_MAX / 2, 4096)
                .absent("a quarter of arena", "\"64MiB\"");
        /// How long a dirty block of a write-back volume waits at most before it is written to its
        /// store.
        pub write_back_delay: Duration = Duration::from_secs(1)
            => Key::span(Duration::from_millis(10), Duration::from_secs(3600));
        /// Most data of one command. Initiators may ask for less.
        pub max_io: ByteSize = ByteSize(1 << 20) => Key::new(Rule::PowerOfTwo {
            min: limits::IO_MIN_BYTES as u64,
            max: limits::IO_MAX_BYTES as u64,
        });
        /// Most requests outstanding on one queue. Initiators may ask for less.
        pub queue_depth_max: u16 = limits::QUEUE_DEPTH_GRANTED_DEFAULT
            => Key::count(1, limits::QUEUE_DEPTH_MAX as u32);
        /// Writes up to this size travel inside the command, which saves a message and a round
        /// trip. 16KiB is for writes of 8 or 16 KiB, such as the pages of a database: each takes 2
        /// messages instead of 3. It costs 520 KiB more for each queue over RDMA, and a copy of
        /// each write of 4 KiB.
        pub inline: ByteSize = ByteSize(limits::IN_CAPSULE_DEFAULT_BYTES as u64)
            => Key::size(0, limits::IN_CAPSULE_MAX_BYTES as u64, 512).more("performance.md#memory");
        /// How long a target that stops waits for initiators and for commands in flight.
        pub drain_timeout: Duration = Duration::from_secs(10)
            => Key::span(Duration::from_secs(0), Duration::from_secs(3600));
        /// How long a target that stops goes on with the write of dirty data to stores that refuse
        /// it or do not answer. Then that data is lost. systemd must wait longer:
        /// `TimeoutStopSec=`.
        pub stop_timeout: Duration = STOP_TIMEOUT
            => Key::span(Duration::from_secs(0), Duration::from_secs(3600));
        /// Most sessions at once. Each mount is one. One host has a quarter of them, at least 8:
        /// for 1000 mounts of one host write 4000.
        pub sessions_max: u32 = 1024
            => Key::count(1, 65_536).more("security.md#how-much-a-host-may-take");
        /// How long an initiator without connections keeps its volumes. After that another host may
        /// open them, and the first host is fenced when it reconnects. Also how long a restarted
        /// target waits for the hosts that held a volume before the restart.
        pub lease: Duration = Duration::from_secs(30)
            => Key::span(Duration::from_secs(1), Duration::from_secs(3600));
        /// Hosts that may connect. "required": the hosts of the `[[host]]` tables, each by its key.
        /// "none": every host that reaches an address; with an address that other hosts reach,
        /// `insecure` is needed, too.
        pub auth: Option<Auth> = None
            => Key::word(Auth::WORDS)
                .absent("\"none\" if every address of listen is a loopback address (127.0.0.1, [::1]) or if \
                    insecure is set, else \"required\"", "\"required\"");
        /// Whether every host may connect by an address that other hosts reach, and read, write and
        /// take over every volume.
        pub insecure: bool = false => Key::new(Rule::Flag).more("security.md#insecure-targets");
        /// File of the secret key of the target, or credential:NAME, a credential of systemd.
        /// `rblk-target key new` makes it.
        pub key_file: PathBuf = PathBuf::from(TARGET_KEY_FILE) => Key::new(KEY_FILE);
        /// File of a second key, while mounts learn the new key.
        pub key_file_next: Option<PathBuf> = None
            => Key::new(KEY_FILE).absent("no second key", "\"/etc/rblk/target-next.key\"")
                .more("security.md#change-the-key-of-the-target");
        /// Address and port of metrics (/metrics, for Prometheus), health (/healthz) and a live
        /// page (/) over HTTP. Read-only, and without authentication: 127.0.0.1 and `[::1]` keep it
        /// on this host.
        pub http: Option<SocketAddr> = None
            => Key::new(SOCKET_ADDRESS).absent("no HTTP", "\"127.0.0.1:9720\"")
                .more("monitor.md#the-live-page-and-http");
        /// Commands that take at least this long become events, at most one a second. `rblk-target
        /// events` shows what they waited for.
        pub slow_io: Option<Duration> = None
            => Key::span(Duration::from_micros(1), Duration::from_secs(3600))
                .absent("none", "\"100ms\"").more("monitor.md#events");
        /// The keys of connections.
        #[serde(flatten)]
        pub transport: TransportKeys = TransportKeys::default()
            => Key::new(Rule::Keys(&TRANSPORT_KEYS));
        /// The volumes.
        #[serde(rename = "volume")]
        pub volumes: Vec<VolumeConfig> = Vec::new()
            => Key::new(Rule::Tables(&VOLUME_KEYS)).named("volume")
                .absent("no volume", "").no_flag().live();
        /// The hosts that may connect.
        #[serde(rename = "host")]
        pub hosts: Vec<HostConfig> = Vec::new()
            => Key::new(Rule::Tables(&HOST_KEYS)).named("host").absent("no host", "").no_flag().live();
    }
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

key_values!(HugePages);

words!(HugePages, { Auto = "auto", Never = "never", Required = "required" });

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

    /// As [`Self::load`], or without a file, with the values of flags over it.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_with(path: Option<&Path>, flags: &FlagLayer) -> Result<Self, ConfigError> {
        let mut document = match path {
            Some(path) => lay_with_drop_ins(path, None)?,
            None => Document::default(),
        };
        document.lay_flags(flags);
        Self::decode(document)
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
        self.relate_group(faults);
        let (arena, dirty_max) = (self.arena, self.dirty_max);
        let room = CacheRoom { arena, dirty_max, dirty_limit: self.dirty_limit() };
        cache_part::relate(&self.volumes, &room, faults);
        self.relate_hosts(faults);
    }

    /// Members share images of Ceph only. They know each other by the cluster, which has the lock
    /// and the record of an image, and which fences a client.
    fn relate_group(&self, faults: &mut Vec<Fault>) {
        if self.member.is_none() {
            return;
        }
        for (index, volume) in self.volumes.iter().enumerate() {
            let problem = match volume.store {
                StoreKind::Rbd => continue,
                StoreKind::File => NO_FENCE,
                StoreKind::Memory | StoreKind::Null => NOT_SHARED,
            };
            let fault = Fault::new(format!("volume[{index}].store"), problem, STANDBY);
            faults.push(fault.value(volume.store.to_string()).other("member"));
        }
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
        if self.transport.encrypt == Encrypt::Required && self.authentication() == Auth::None {
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
            host.limits.relate(&at, self.max_io, faults);
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
        let mut images: HashMap<(&str, Option<&PathBuf>), usize> = HashMap::new();
        for (index, volume) in self.volumes.iter().enumerate() {
            let at = format!("volume[{index}]");
            volume.relate(&at, faults);
            volume.limits.relate(&at, self.max_io, faults);
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
            // The lock of an image finds other names of the same cluster. Two volumes on one
            // snapshot would have one UUID.
            if let Some(image) = volume.image.as_deref() {
                let place = (image, volume.ceph_conf.as_ref());
                let first = *images.entry(place).or_insert(index);
                if first != index {
                    let problem = format!("volume[{first}] has the same image");
                    let fault = Fault::new(
                        format!("{at}.image"),
                        problem,
                        "give each volume its own image",
                    );
                    faults.push(fault.value(image).other(format!("volume[{first}].image")));
                }
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

impl Flagged for TargetConfig {
    fn schema() -> &'static Schema {
        &TARGET_KEYS
    }
}
