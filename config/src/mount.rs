//! One mount: a volume of a target as a local block device.

use std::path::{Path, PathBuf};

use rblk_protocol::auth::{PublicKey, SecretKey};
use rblk_protocol::limits;

use crate::error::{ConfigError, Fault};
use crate::host_config::{KEYS_MAX, PUBLIC_KEY, read_keys, write_keys};
use crate::key_file::{self, HOST_KEY_FILE, KeyFileError, Side};
use crate::schema::document::{Document, Sites, retired_keys};
use crate::schema::faults::judge;
use crate::schema::flag_layer::{FlagLayer, Flagged};
use crate::schema::key_table::key_table;
use crate::schema::rule::Rule;
use crate::schema::rule::{Key, RetiredKey, Schema};
use crate::schema::text_rules::{ADDRESS, KEY_FILE, MEMORY_FILE, NAME};
use crate::setting::connection_protection::Encrypt;
use crate::setting::digest_wish::DigestWish;
use crate::setting::on_loss::OnLoss;
use crate::setting::paths::Paths;
use crate::setting::transport_keys::{TRANSPORT_KEYS, TransportKeys};
use crate::units::{ByteSize, Duration};

/// Most memory for the buffers of one mount: all queues full of the largest I/Os.
const BUFFERS_MAX: u64 = 8 << 30;

/// Number of queues that is assumed in that sum if the key is absent.
const QUEUES_ASSUMED: u16 = 4;

/// Most memory for retained writes of one mount.
const RETAIN_MAX: u64 = 64 << 30;

/// Most files of shared memory of one mount.
const SHARED_FILES_MAX: usize = 8;

/// Most days that a mount waits for its target.
const WAIT_MAX_DAYS: u64 = 30;

/// Highest number of a ublk device. Minor numbers have 20 bits.
const DEVICE_ID_MAX: u32 = (1 << 20) - 1;

key_table! {
    /// Configuration of a mount: a file of `mounts.d`, or the command line of `rblk-initiator
    /// mount`. Programs set it, too, so a new key must not break their code.
    #[extra(serde(deny_unknown_fields), non_exhaustive)]
    pub struct MountConfig in MOUNT_KEYS {
        /// Addresses of one target, the best first. When the path in use fails, the mount tries the
        /// other addresses at once (failover). All must lead to the same target, so give each
        /// target a name of its own.
        pub target: Vec<String> = Vec::new()
            => Key::list(&ADDRESS, 16)
                .required("[\"rdma://192.0.2.1:7720\", \"tcp://192.0.2.1:7721\"]").no_flag();
        /// Name of the volume at the target.
        pub volume: String = String::new() => Key::new(NAME).required("\"vol0\"").no_flag();
        /// Hardware queues of the disk, each with a connection and a thread.
        pub queues: Option<u16> = None
            => Key::count(1, limits::MOUNT_QPS_MAX as u32)
                .absent("the number of CPUs, at most 4", "4");
        /// QPs of each queue. Large requests use all of them, small requests use the first.
        /// `queues` times `lanes` is at most 63. 1 is for many mounts by Soft-iWARP or Soft-RoCE: a
        /// second lane takes 335 KiB of the target for each queue, and 2 MiB more over iWARP.
        pub lanes: Option<u16> = None
            => Key::count(1, limits::LANES_MAX as u32)
                .absent("2 on Soft-RoCE and Soft-iWARP (rxe, siw), where each QP has a thread of its \
                    own, and 1 on a card", "2").more("performance.md#memory");
        /// Most requests outstanding on one queue. The target may allow fewer. A program on
        /// `io_uring` that has more outstanding becomes slow: the kernel uses a thread for each one
        /// that waits.
        pub queue_depth: u16 = limits::QUEUE_DEPTH_DEFAULT
            => Key::count(1, limits::QUEUE_DEPTH_MAX as u32);
        /// Most data of one command; longer requests are split. The target may allow less. The
        /// mount takes `queues` x `queue_depth` x `max_io` bytes of memory, at most 8 GiB.
        pub max_io: ByteSize = ByteSize(256 << 10) => Key::new(Rule::PowerOfTwo {
            min: limits::IO_MIN_BYTES as u64,
            max: limits::IO_MAX_BYTES as u64,
        });
        /// Whether commands and data carry CRC-32C digests, which find every changed bit on the
        /// way.
        ///
        /// "auto": on software devices (Soft-RoCE, Soft-iWARP) and on TCP without encryption,
        /// unless `max_io` is above 1MiB. Cards check the data that they move, and encryption finds
        /// every change. "crc32c": always; a target without digests is refused. "off": never. With
        /// digests one command moves at most 1 MiB.
        pub digest: DigestWish = DigestWish::Auto
            => Key::word(DigestWish::WORDS).more("internals/wire.md#digests");
        /// Files of tmpfs or hugetlbfs that programs map: direct I/O (`O_DIRECT`) with that memory
        /// is not copied on this host. A file has its size already, whole pages and at most 4 GiB.
        /// Linux 7.1; without digests.
        pub shared_memory: Vec<PathBuf> = Vec::new()
            => Key::list(&MEMORY_FILE, SHARED_FILES_MAX)
                .absent("all I/O is copied", "[\"/dev/shm/database\"]")
                .more("performance.md#direct-io-without-a-copy");
        /// Whether the disk refuses writes. A read-only mount excludes no other host, and no other
        /// host excludes it.
        pub read_only: bool = false => Key::new(Rule::Flag).flag("ro");
        /// Whether other hosts may write, too, if their mounts also set it. For software that can
        /// share a disk, such as a cluster file system. Not with `read_only`.
        pub shared: bool = false => Key::new(Rule::Flag);
        /// Memory for copies of acknowledged writes that no FLUSH has covered yet, divided among
        /// the queues. If the target or its machine dies, the mount writes these copies again. 0
        /// keeps none: then those writes are lost, see `on_loss`. 64MiB is a good value.
        pub retain: ByteSize = ByteSize(0)
            => Key::size(0, RETAIN_MAX, 4096).more("durability.md#retained-writes");
        /// Which FLUSHes (fsync, a journal's commit) fail after acknowledged writes may be lost.
        ///
        /// "until-remount": every FLUSH fails with EIO until the disk is unmounted and mounted
        /// again, so that every user of the disk hears of the loss: two file systems on two
        /// partitions, a database beside a file system. "once": the FLUSHes that wait then, or the
        /// next one, fail; later ones succeed. Only for a disk with one user that handles a failed
        /// FLUSH itself. Reads and writes go on in both cases.
        pub on_loss: OnLoss = OnLoss::UntilRemount
            => Key::word(OnLoss::WORDS).more("durability.md#how-a-loss-is-reported");
        /// N of /dev/ublkbN.
        pub device_id: Option<u32> = None
            => Key::count(0, DEVICE_ID_MAX).absent("the lowest free number", "7");
        /// Pause after every address of a lost target was tried, with jitter. It doubles each time,
        /// up to 1.5s, or up to 10s if the target has been away for a long time.
        pub reconnect_delay: Duration = Duration::from_secs(1)
            => Key::span(Duration::from_millis(10), Duration::from_secs(300));
        /// How long requests wait for a lost target before they fail.
        pub fail_after: Option<Duration> = None
            => Key::span(Duration::from_secs(0), Duration::from_secs(30 * 86_400))
                .absent("without a limit, and no request fails", "\"10min\"");
        /// After how much silence a path counts as lost. Up to three times as long on a disk
        /// without I/O. A target waits at most 5 s, also with a longer `detect`, for a connection
        /// that receives none of its data.
        pub detect: Duration = Duration::from_secs(5)
            => Key::span(Duration::from_millis(100), Duration::from_secs(300));
        /// How long one attempt to connect may take. An attempt to reconnect to a lost target may
        /// take no longer than `detect`, or 1s if that is more.
        pub connect_timeout: Duration = Duration::from_secs(5)
            => Key::span(Duration::from_millis(100), Duration::from_secs(300));
        /// How often an address that stands before the one in use is tried. When it answers twice,
        /// the mount goes back to it, after the requests in flight are done. 0s never goes back.
        pub failback: Duration = Duration::from_secs(30)
            => Key::span(Duration::from_secs(0), Duration::from_secs(86_400));
        /// How the addresses are used. "failover": one at a time, the first that answers. "all":
        /// all at once, up to eight. A path that dies then stalls only the requests that were under
        /// way on it, and large requests use every path. `failback` has no meaning then. A target
        /// that does not know that is used with "failover".
        pub paths: Paths = Paths::Failover
            => Key::word(Paths::WORDS).more("fail.md#all-addresses-at-once");
        /// How long the mount command waits for a target that cannot be reached yet.
        pub wait: Duration = Duration::from_secs(0)
            => Key::span(Duration::from_secs(0), Duration::from_secs(WAIT_MAX_DAYS * 86_400))
                .bare("30days");
        /// Name of this host, as the target shows it. A target that asks for keys uses the name of
        /// its `[[host]]` table.
        pub host_name: Option<String> = None
            => Key::new(NAME).absent("the name of the system", "\"db1\"");
        /// Public key of the target, as `rblk-target key show` prints it there; two while it
        /// changes its key. Both ends then prove their keys, and a target with another key is
        /// refused.
        #[serde(serialize_with = "write_keys", deserialize_with = "read_keys")]
        pub target_keys: Vec<PublicKey> = Vec::new()
            => Key::list(&PUBLIC_KEY, KEYS_MAX)
                .absent("neither end proves its identity, and a target that requires keys refuses the mount",
                    "[\"rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe\"]")
                .flag("target-key").live();
        /// File of the secret key of this host, or credential:NAME, a credential of systemd.
        /// `rblk-initiator key new` makes it. Used with `target_keys` only.
        pub key_file: PathBuf = PathBuf::from(HOST_KEY_FILE) => Key::new(KEY_FILE).live();
        /// The keys of connections.
        #[serde(flatten)]
        pub transport: TransportKeys = TransportKeys::default()
            => Key::new(Rule::Keys(&TRANSPORT_KEYS));
    }
    retired {
        RetiredKey {
            name: "pin_queues",
            since: "0.1.0",
            now: "the thread of each hardware queue runs on the CPUs whose requests the queue serves",
        },
    }
}

impl MountConfig {
    /// A mount with the defaults.
    #[must_use]
    pub fn new(target: impl Into<String>, volume: impl Into<String>) -> Self {
        Self { target: vec![target.into()], volume: volume.into(), ..Self::default() }
    }

    /// Whether all addresses are used at once.
    #[must_use]
    pub fn uses_all_paths(&self) -> bool {
        self.paths == Paths::All
    }

    /// Loads one file.
    ///
    /// # Errors
    /// [`ConfigError`], with all faults at once.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let mut document = Document::default();
        document.lay(path)?;
        Self::decode(document)
    }

    /// Loads a file, or none, with the values of flags over it.
    ///
    /// # Errors
    /// [`ConfigError`], with all faults at once.
    pub fn load_with(path: Option<&Path>, flags: &FlagLayer) -> Result<Self, ConfigError> {
        let mut document = Document::default();
        if let Some(path) = path {
            document.lay(path)?;
        }
        document.lay_flags(flags);
        Self::decode(document)
    }

    /// Warnings of a file: keys of former versions, which have no effect any more.
    #[must_use]
    pub fn warnings(path: &Path) -> Vec<String> {
        retired_keys(path, &MOUNT_KEYS)
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

    /// Applies the rules of a file to values that came from elsewhere, such as a command line.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        let table =
            toml::Table::try_from(self).map_err(|error| ConfigError::Dump(error.to_string()))?;
        match judge(table, &MOUNT_KEYS, Self::relate) {
            Ok(_) => Ok(()),
            Err(faults) => Err(Sites::default().refuse(faults)),
        }
    }

    /// TOML that loads to the same value, with every key that has a value.
    ///
    /// # Errors
    /// [`ConfigError::Dump`]. It does not happen in practice.
    pub fn dump(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(|error| ConfigError::Dump(error.to_string()))
    }

    /// The secret key that this host proves. `None` if there are no `target_keys`: then neither end
    /// proves its identity.
    ///
    /// # Errors
    /// The file is missing, others may read it, or it is no key file.
    pub fn secret_key(&self) -> Result<Option<SecretKey>, KeyFileError> {
        if self.target_keys.is_empty() {
            return Ok(None);
        }
        key_file::read(&self.key_file, Side::Initiator).map(Some)
    }

    /// The keys of the file.
    #[must_use]
    pub fn keys() -> &'static Schema {
        &MOUNT_KEYS
    }

    fn decode(document: Document) -> Result<Self, ConfigError> {
        document.decode(&MOUNT_KEYS, Self::relate)
    }

    /// Adds the faults between keys that are valid alone.
    fn relate(&self, faults: &mut Vec<Fault>) {
        let queues = self.queues.unwrap_or(QUEUES_ASSUMED);
        let buffers = u64::from(queues) * u64::from(self.queue_depth);
        let sum = ByteSize(buffers * self.max_io.0);
        if sum.0 > BUFFERS_MAX {
            let problem = format!(
                "queues x queue_depth x max_io = {queues} x {} x {} = {sum} of buffers, the limit is {}",
                self.queue_depth,
                self.max_io,
                ByteSize(BUFFERS_MAX)
            );
            let fit = ByteSize((BUFFERS_MAX / buffers + 1).next_power_of_two() / 2);
            let fix = format!("lower max_io to \"{fit}\", or queues or queue_depth");
            let fault = Fault::new("max_io", problem, fix).value(self.max_io.to_string());
            faults.push(fault.rests_on(&["queues", "queue_depth"]));
        }
        let lanes = self.lanes.unwrap_or(1);
        let qps = queues * lanes;
        if qps > limits::MOUNT_QPS_MAX {
            let most = limits::MOUNT_QPS_MAX;
            let problem = format!(
                "queues x lanes = {queues} x {lanes} = {qps} QPs, the limit of a mount is {most}"
            );
            let fix = format!("lower lanes to {}, or queues to {}", most / queues, most / lanes);
            let fault = Fault::new("lanes", problem, fix).value(i64::from(lanes));
            faults.push(fault.rests_on(&["queues"]));
        }
        if self.key_file != Path::new(HOST_KEY_FILE) && self.target_keys.is_empty() {
            let problem = "without target_keys nobody asks for the key of this host";
            let fix = "add target_keys = [\"rblk1:...\"], or remove key_file; `rblk-target key show` prints the key";
            let fault = Fault::new("key_file", problem, fix);
            let fault = fault.value(self.key_file.display().to_string());
            faults.push(fault.rests_on(&["target_keys"]));
        }
        if self.transport.encrypt == Encrypt::Required && self.target_keys.is_empty() {
            let problem =
                "the keys of encryption come from authentication, and there are no target_keys";
            let fix = "add target_keys = [\"rblk1:...\"]; `rblk-target key show` prints the key";
            let fault = Fault::new("encrypt", problem, fix).value("required");
            faults.push(fault.rests_on(&["target_keys"]));
        }
        let digest_max = ByteSize(limits::DIGEST_IO_MAX_BYTES.into());
        if self.digest == DigestWish::Crc32c && self.max_io > digest_max {
            let problem = format!("max_io = \"{}\" is more than \"{digest_max}\"", self.max_io);
            let fix = format!("lower max_io to \"{digest_max}\", or set digest to \"auto\"");
            let fault = Fault::new("digest", problem, fix).value(self.digest.word());
            faults.push(fault.rests_on(&["max_io"]));
        }
        if self.digest == DigestWish::Crc32c && !self.shared_memory.is_empty() {
            let problem = "the digest of a READ travels behind its data, and in shared_memory there is \
                           data of programs behind it";
            let fix = "set digest to \"auto\", which is \"off\" here, or remove shared_memory";
            let fault = Fault::new("digest", problem, fix).value(self.digest.word());
            faults.push(fault.rests_on(&["shared_memory"]));
        }
        if self.shared && self.read_only {
            let problem = "a read-only mount never excludes other hosts, so shared has no effect";
            let fault = Fault::new("shared", problem, "remove shared or read_only").value(true);
            faults.push(fault.rests_on(&["read_only"]));
        }
        if self.shared && self.retain.0 > 0 {
            let problem = "after a loss, writing retained data again could overwrite newer data of another host";
            let fault = Fault::new("retain", problem, "remove retain or shared");
            faults.push(fault.value(self.retain.to_string()).rests_on(&["shared"]));
        }
    }
}

impl Flagged for MountConfig {
    fn schema() -> &'static Schema {
        &MOUNT_KEYS
    }
}
