//! One mount: a volume of a target as a local block device.

use std::path::{Path, PathBuf};

use rblk_protocol::auth::{PublicKey, SecretKey};
use rblk_protocol::limits;
use serde::{Deserialize, Serialize};

use crate::error::{ConfigError, Fault};
use crate::host_config::{KEYS_MAX, PUBLIC_KEY, read_keys, write_keys};
use crate::key_file::{self, HOST_KEY_FILE, KeyFileError, Side};
use crate::schema::document::{Document, Sites};
use crate::schema::faults::judge;
use crate::schema::rule::{ADDRESS, KEY_FILE, Key, MEMORY_FILE, NAME, Rule, Schema};
use crate::setting::connection_protection::Encrypt;
use crate::setting::digest_wish::DigestWish;
use crate::setting::on_loss::OnLoss;
use crate::setting::spin_key::Spin;
use crate::units::{ByteSize, Duration};

/// Most memory for the buffers of one mount: all queues full of the largest I/Os.
const BUFFERS_MAX: u64 = 8 << 30;

/// Number of queues that is assumed in that sum if the key is absent.
const QUEUES_ASSUMED: u16 = 4;

/// Most memory for retained writes of one mount.
const RETAIN_MAX: u64 = 64 << 30;

/// Most files of shared memory of one mount.
const SHARED_FILES_MAX: usize = 8;

/// Highest number of a ublk device. Minor numbers have 20 bits.
const DEVICE_ID_MAX: u32 = (1 << 20) - 1;

static MOUNT_KEYS: Schema = Schema {
    keys: &[
        Key::required("target", Rule::List { item: &ADDRESS, max: 16 }),
        Key::required("volume", NAME),
        Key::optional("queues", Rule::Count { min: 1, max: limits::MOUNT_QPS_MAX as u32 }),
        Key::optional("lanes", Rule::Count { min: 1, max: limits::LANES_MAX as u32 }),
        Key::optional("queue_depth", Rule::Count { min: 1, max: limits::QUEUE_DEPTH_MAX as u32 }),
        Key::optional(
            "max_io",
            Rule::PowerOfTwo { min: limits::IO_MIN_BYTES as u64, max: limits::IO_MAX_BYTES as u64 },
        ),
        Key::optional("digest", Rule::Word(DigestWish::WORDS)),
        Key::optional("shared_memory", Rule::List { item: &MEMORY_FILE, max: SHARED_FILES_MAX }),
        Key::optional("read_only", Rule::Flag),
        Key::optional("shared", Rule::Flag),
        Key::optional("retain", Rule::Size { min: 0, max: RETAIN_MAX, step: 4096 }),
        Key::optional("on_loss", Rule::Word(OnLoss::WORDS)),
        Key::optional("device_id", Rule::Count { min: 0, max: DEVICE_ID_MAX }),
        Key::optional(
            "reconnect_delay",
            Rule::Span { min: Duration::from_millis(10), max: Duration::from_secs(300) },
        ),
        Key::optional(
            "fail_after",
            Rule::Span { min: Duration::from_secs(0), max: Duration::from_secs(30 * 86_400) },
        ),
        Key::optional(
            "detect",
            Rule::Span { min: Duration::from_millis(100), max: Duration::from_secs(300) },
        ),
        Key::optional(
            "connect_timeout",
            Rule::Span { min: Duration::from_millis(100), max: Duration::from_secs(300) },
        ),
        Key::optional(
            "failback",
            Rule::Span { min: Duration::from_secs(0), max: Duration::from_secs(86_400) },
        ),
        Key::optional(
            "wait",
            Rule::Span { min: Duration::from_secs(0), max: Duration::from_secs(30 * 86_400) },
        ),
        Key::optional("spin", Rule::Spin { max: Duration::from_millis(10) }),
        Key::optional("pin_queues", Rule::Flag),
        Key::optional("host_name", NAME),
        Key::optional("target_keys", Rule::List { item: &PUBLIC_KEY, max: KEYS_MAX }),
        Key::optional("key_file", KEY_FILE),
        Key::optional("encrypt", Rule::Word(Encrypt::WORDS)),
        Key::optional("relaxed_ordering", Rule::Flag),
        Key::optional("tos", Rule::Count { min: 0, max: 255 }),
        Key::optional(
            "ack_timeout",
            Rule::Span { min: Duration::from_millis(1), max: Duration::from_secs(30) },
        ),
    ],
};

/// Configuration of a mount: a file of `mounts.d`, or the command line of `rblk-initiator mount`.
/// Programs set it, too, so a new key must not break their code.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct MountConfig {
    /// Addresses of one target, the preferred one first. At least one.
    pub target: Vec<String>,
    /// The name of the volume at the target.
    pub volume: String,
    /// Hardware queues of the device. If absent: the number of CPUs, at most 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// QPs of each hardware queue, which share large requests. If absent: 2 on a software device
    /// (rxe, siw) unless there are too many queues, else 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lanes: Option<u16>,
    /// Most commands outstanding on one queue.
    pub queue_depth: u16,
    /// Most data of one read or write.
    pub max_io: ByteSize,
    /// Whether commands and data carry digests.
    pub digest: DigestWish,
    /// Files of tmpfs or hugetlbfs that programs map: their direct I/O with that memory is not
    /// copied. Linux 7.1.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shared_memory: Vec<PathBuf>,
    /// Whether the device refuses writes.
    pub read_only: bool,
    /// Whether other hosts may write the volume at the same time. For software that coordinates the
    /// writers, such as a cluster file system.
    pub shared: bool,
    /// Memory for copies of acknowledged writes that no FLUSH has covered yet, divided among the
    /// queues. 0 keeps none.
    pub retain: ByteSize,
    /// Which FLUSHes fail after a loss of acknowledged writes.
    pub on_loss: OnLoss,
    /// N of `/dev/ublkbN`. If absent: the first free one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_id: Option<u32>,
    /// Pause after every address of a lost target was tried. It grows up to 10 s.
    pub reconnect_delay: Duration,
    /// How long I/O waits for a lost target before it fails. If absent: indefinitely.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fail_after: Option<Duration>,
    /// After how much silence a path counts as lost.
    pub detect: Duration,
    /// How long one attempt to connect may take. An attempt to reconnect to a lost target may take
    /// no longer than `detect`, or 1 s if that is more.
    pub connect_timeout: Duration,
    /// How often an address that is preferred to the one in use is tried, to fail back to it. Zero
    /// never does.
    pub failback: Duration,
    /// How long the mount command waits for a target that cannot be reached.
    pub wait: Duration,
    /// How long an idle data thread looks for work before it sleeps.
    pub spin: Spin,
    /// Whether the thread of each hardware queue runs on the CPUs whose requests the queue serves.
    pub pin_queues: bool,
    /// The name of this host, as the target shows it. If absent: the name of the system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_name: Option<String>,
    /// The keys that the target may prove: one, or two while it changes its key. Empty: neither end
    /// proves its identity, and a target that requires keys refuses the mount.
    #[serde(
        serialize_with = "write_keys",
        deserialize_with = "read_keys",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub target_keys: Vec<PublicKey>,
    /// The file of the secret key of this host, or `credential:NAME`. Used with
    /// [`Self::target_keys`] only.
    pub key_file: PathBuf,
    /// Whether `tcp://` connections are encrypted.
    pub encrypt: Encrypt,
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
}

impl Default for MountConfig {
    /// The defaults of the keys. `target` and `volume` are empty and must be set.
    fn default() -> Self {
        Self {
            target: Vec::new(),
            volume: String::new(),
            queues: None,
            lanes: None,
            queue_depth: limits::QUEUE_DEPTH_DEFAULT,
            max_io: ByteSize(256 << 10),
            digest: DigestWish::Auto,
            shared_memory: Vec::new(),
            read_only: false,
            shared: false,
            retain: ByteSize(0),
            on_loss: OnLoss::default(),
            device_id: None,
            reconnect_delay: Duration::from_secs(1),
            fail_after: None,
            detect: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            failback: Duration::from_secs(30),
            wait: Duration::from_secs(0),
            spin: Spin::Adaptive,
            pin_queues: true,
            host_name: None,
            target_keys: Vec::new(),
            key_file: PathBuf::from(HOST_KEY_FILE),
            encrypt: Encrypt::default(),
            relaxed_ordering: true,
            tos: None,
            ack_timeout: None,
        }
    }
}

impl MountConfig {
    /// A mount with the defaults.
    #[must_use]
    pub fn new(target: impl Into<String>, volume: impl Into<String>) -> Self {
        Self { target: vec![target.into()], volume: volume.into(), ..Self::default() }
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
        if self.encrypt == Encrypt::Required && self.target_keys.is_empty() {
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
