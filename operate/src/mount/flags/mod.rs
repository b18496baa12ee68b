//! The command line of `rblk-initiator` and `rblk-initiatord`.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use rblk_config::key_file::HOST_KEY_FILE;
use rblk_config::{ByteSize, ConfigError, Duration, Exit, KeyFileError, MountConfig};
use rblk_protocol::auth::PublicKey;

use super::configured::{ByFlags, Configured, KeysFile};
use super::guest_keys::{UnsuitedKey, must_suit_guests};
use super::mount_status::MountStatus;
use super::not_there::{NotInBackground, NotMounted, NotRoot, WhichMount};
use crate::config_flags::ConfigFlags;
use crate::config_flags::flag_sets::{ConnectFlagSet, IdentityFlagSet, MountFlagSet};
use crate::{CpuList, Output};

mod examples;

/// Turns volumes of a target into local block devices.
#[derive(Debug, Parser)]
#[command(
    name = "rblk-initiator",
    version,
    arg_required_else_help = true,
    // The width of the terminal, if that is less: clap wraps all of it.
    max_term_width = 100,
    after_help = format!("{}\n\n{}", examples::EXAMPLES, Exit::help())
)]
pub struct Cli {
    /// Form of the answer, and of an error: "table" for people, "json" for programs.
    #[arg(short, long, global = true, value_name = "table|json", default_value_t)]
    pub output: Output,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// The command line of this process.
    ///
    /// # Errors
    /// The command line is wrong, or asked for help. The message is printed: the program ends with
    /// that code.
    pub fn of_process() -> Result<Self, ExitCode> {
        Self::try_parse().map_err(|error| {
            let asked = !error.use_stderr();
            Output::end_of_parser("rblk-initiator", asked, &error.to_string(), || error.print())
        })
    }
}

/// The commands of `rblk-initiator`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a block device of a volume. Needs root and the ublk_drv module.
    Mount(Box<MountArgs>),
    /// Serve a volume as the disk of a virtual machine: a vhost-user socket for QEMU,
    /// cloud-hypervisor or Firecracker.
    ///
    /// The target moves data straight between its memory and the guest's pages. Needs no ublk_drv.
    Vhost(Box<VhostArgs>),
    /// Make or show the key by which this host authenticates.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Remove a block device.
    #[command(visible_alias = "unmount")]
    Umount {
        /// Name of the mount, or its device.
        #[arg(value_name = "NAME|DEVICE")]
        what: String,
        /// Unmount the file systems on it first, as umount(8) does.
        #[arg(long, conflicts_with = "force")]
        file_systems: bool,
        /// Also if it is in use or its target is lost: requests that wait fail. Returns within 5 s.
        #[arg(long)]
        force: bool,
    },
    /// Recover block devices whose process died: requests to them wait, and nothing is lost.
    ///
    /// The target need not be reachable yet. A `mount` of the same volume under the same name
    /// recovers the device, too.
    Recover(Box<RecoverArgs>),
    /// Hand block devices over to another program, such as a newer version, while they are in use:
    /// requests wait.
    Upgrade {
        /// Which mounts.
        #[command(flatten)]
        which: Which,
        /// The program; the rblk-initiatord beside this one by default.
        #[arg(long, value_name = "PATH")]
        program: Option<PathBuf>,
    },
    /// Read the keys of a target again, and the key of this host, while mounts go on. No request
    /// waits.
    ///
    /// target_keys and key_file come from the file of the mount (--config). Nothing else of that
    /// file is read again.
    Reload {
        /// Which mounts.
        #[command(flatten)]
        which: Which,
        /// Key that the target may prove, for a mount that has no file; repeat for the next key.
        #[arg(long, value_name = "KEY", conflicts_with = "all")]
        target_key: Vec<PublicKey>,
    },
    /// Write the page cache of a disk back.
    #[command(hide = true)]
    WriteBack {
        /// The disk.
        disk: String,
        /// Do nothing if it is in use.
        #[arg(long)]
        unless_used: bool,
        /// Only say whether it is in use.
        #[arg(long, requires = "unless_used")]
        only_look: bool,
    },
    /// Limit the requests of a disk until the standard input ends, for the process of a mount.
    #[command(hide = true)]
    LimitRequests(LimitArgs),
    /// Print a contradiction between the first bytes of a disk and its block size.
    #[command(hide = true)]
    LookAt {
        /// The disk.
        disk: String,
        /// Its size in bytes.
        size_bytes: u64,
        /// Bytes of a block.
        block_size: u32,
    },
    /// Print the names of a disk as properties of udev, or nothing if no mount has it. For the
    /// rules of udev: it waits for nothing.
    #[command(hide = true)]
    Udev {
        /// Name of the disk in the kernel.
        disk: String,
        /// The kernel's sequence number of the disk, which the event has as DISKSEQ.
        sequence: Option<u64>,
    },
    /// Print the leftovers of dead mounts, for other commands.
    #[command(hide = true)]
    Leftovers {
        /// Names of dead mounts.
        names: Vec<String>,
    },
    /// Print the users of disks, for other commands.
    #[command(hide = true)]
    Users {
        /// The disks.
        disks: Vec<String>,
    },
    /// Show the mounts of this host.
    List,
    /// Print the state of the mounts as metrics of Prometheus, for node_exporter's textfile
    /// collector.
    Metrics {
        /// Replace this file at once instead, such as
        /// /var/lib/prometheus/node-exporter/rblk.prom.
        #[arg(long, value_name = "FILE")]
        write: Option<PathBuf>,
    },
    /// Show one mount in full: its state, queues, counters and latencies.
    Status {
        /// Name of the mount; may be left out if there is only one.
        name: Option<String>,
    },
    /// Show rates, latencies and depth of each mount, refreshed until q or ctrl-C.
    Top {
        /// Time between two refreshes.
        #[arg(long, value_name = "TIME", default_value = "1s")]
        interval: Duration,
        /// Print once, and end.
        #[arg(long)]
        once: bool,
    },
    /// Show the volumes of a target.
    Discover {
        /// Address of the target.
        address: String,
        /// How long to wait for an answer.
        #[arg(long, value_name = "TIME", default_value = "5s")]
        timeout: Duration,
        /// The keys of both ends.
        #[command(flatten)]
        identity: ConfigFlags<IdentityFlagSet>,
    },
    /// Find what keeps this host from mounting, and print the command that fixes it.
    ///
    /// Looks at kernel, ublk, io_uring, locked memory, RDMA devices, keys, units and leftovers of
    /// dead mounts; and for each address at name, route, port, a connection with its self-test, and
    /// one read of a volume. Changes nothing. Some of it only root may see. The exit code is 7 if
    /// something fails.
    Doctor(Box<DoctorArgs>),
}

/// The limit of the requests of a disk.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Number of the ublk device.
    pub device: u32,
    /// The requests of each queue meanwhile.
    pub limit: u16,
    /// The requests of each queue afterwards.
    pub usual: u16,
    /// The CPUs that submit to each queue, such as 0-3,8.
    pub cpus: Vec<CpuList>,
}

/// The subject of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Addresses of targets; those of the configuration by default.
    pub address: Vec<String>,
    /// Configuration of a mount, such as /etc/rblk/mounts.d/NAME.toml; flags win.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// How long to wait for each answer.
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub timeout: Duration,
    /// The keys of both ends, and encryption.
    #[command(flatten)]
    pub keys: ConfigFlags<ConnectFlagSet>,
    /// Only try the one address, and say how that went.
    #[arg(long, hide = true)]
    pub probe: bool,
    /// The volume to read then; by default the first one.
    #[arg(long, hide = true, requires = "probe", default_value = "")]
    pub read: String,
    /// How much of it.
    #[arg(long, hide = true, requires = "probe", default_value = "262144")]
    pub read_bytes: u32,
}

/// The commands of `rblk-initiator key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make the secret key of this host, and print its public key. A key that is there stays.
    New(KeyArgs),
    /// Print the public key of this host.
    Show(KeyArgs),
}

/// Names a key file.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// Key file; key_file of a mount names another one.
    #[arg(long, value_name = "PATH", default_value = HOST_KEY_FILE)]
    pub file: PathBuf,
}

/// One mount, or every mount that needs it.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Which {
    /// Name of the mount.
    pub name: Option<String>,
    /// Every mount that needs it.
    #[arg(long)]
    pub all: bool,
}

/// The mounts to recover.
#[derive(Debug, Args)]
pub struct RecoverArgs {
    /// Which mounts.
    #[command(flatten)]
    pub which: Which,
    /// Stay in the foreground and log to the terminal (for services).
    #[arg(long, short = 'f', conflicts_with = "all")]
    pub foreground: bool,
    /// Log more; twice for everything. RBLK_LOG overrides.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Only check whether this program could recover the mount: its note is read and nothing is
    /// changed.
    #[arg(long, hide = true)]
    pub check: bool,
    /// The standard input holds the lock of the name.
    #[arg(long, hide = true, requires = "foreground")]
    pub lock_on_stdin: bool,
}

/// The mount and its settings.
#[derive(Debug, Args)]
#[command(mut_arg("shared", |arg| arg.conflicts_with("read_only")))]
pub struct MountArgs {
    /// Address of the target.
    #[arg(required_unless_present = "config")]
    pub address: Option<String>,
    /// Volume.
    #[arg(required_unless_present = "config")]
    pub volume: Option<String>,
    /// Everything from a file instead, such as /etc/rblk/mounts.d/NAME.toml; flags win.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Another address of the same target, for failover when the path by the address before it
    /// dies; repeat for several.
    #[arg(long, value_name = "ADDRESS")]
    pub path: Vec<String>,
    /// Name of the mount; by default that of the file of --config without .toml, else the volume's.
    #[arg(long)]
    pub name: Option<String>,
    /// Take the volume from the host that holds it: every request of that host fails from then on,
    /// and writes that it had not flushed may be lost. For a host that is dead or permanently cut
    /// off. Not possible in a file.
    #[arg(long, conflicts_with = "read_only")]
    pub take_over: bool,
    /// Mount even if the release of the kernel is known for a ublk that fails, such as on a kernel
    /// that was mended and kept its number. Not possible in a file.
    #[arg(long)]
    pub any_kernel: bool,
    /// For the disk with the root file system of this host, in an initramfs: the process has this
    /// mount point as its root, and systemd does not end it at shutdown. The programs are there
    /// under the same paths as here.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "foreground")]
    pub root_disk: Option<PathBuf>,
    /// The keys of the configuration.
    #[command(flatten)]
    pub keys: ConfigFlags<MountFlagSet>,
    /// Stay in the foreground and log to the terminal (for services).
    #[arg(long, short = 'f')]
    pub foreground: bool,
    /// Print the configuration that flags and files result in, and end.
    #[arg(long)]
    pub dump_config: bool,
    /// Log more; twice for everything. RBLK_LOG overrides.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The disk of a guest and its settings.
#[derive(Debug, Args)]
#[command(
    mut_arg("any_kernel", |arg| arg.hide(true)),
    mut_arg("device_id", |arg| arg.hide(true)),
    mut_arg("shared_memory", |arg| arg.hide(true)),
    mut_arg("root_disk", |arg| arg.hide(true)),
    mut_arg("digest", |arg| arg.hide(true)),
)]
pub struct VhostArgs {
    /// Socket by which the virtual machine's front end connects, such as /run/vm1.sock. A user with
    /// access to the socket has the disk.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Most memory that the front end may share for its guest, such as 64GiB. Without it there is
    /// no bound.
    #[arg(long, value_name = "SIZE")]
    pub memory_max: Option<ByteSize>,
    /// The rest is as for a mount.
    #[command(flatten)]
    pub mount: MountArgs,
}

impl VhostArgs {
    /// The configuration of file and flags together, validated.
    ///
    /// # Errors
    /// [`ConfigError`], or a key that does not suit the disk of a guest.
    pub fn configuration(&self) -> anyhow::Result<MountConfig> {
        let config = self.mount.configuration()?;
        must_suit_guests(&config)?;
        Ok(config)
    }
}

impl VhostArgs {
    /// As [`MountArgs::configured`].
    ///
    /// # Errors
    /// As there; or a key that does not suit the disk of a guest.
    pub fn configured(&self) -> anyhow::Result<Configured> {
        must_suit_guests(&self.mount.configuration()?)?;
        self.mount.configured()
    }
}

impl MountArgs {
    /// The configuration of file and flags together, validated.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn configuration(&self) -> Result<MountConfig, ConfigError> {
        let mut flags = self.keys.layer().clone();
        if let Some(address) = &self.address {
            flags.set_argument("target", vec![address.as_str()]);
        }
        if let Some(volume) = &self.volume {
            flags.set_argument("volume", volume.as_str());
        }
        flags.extend("target", "--path", &self.path);
        MountConfig::load_with(self.config.as_deref(), &flags)
    }

    /// The configuration of the mount, and the file that names the target's keys later.
    ///
    /// # Errors
    /// [`ConfigError`], or there is no current directory.
    pub fn configured(&self) -> anyhow::Result<Configured> {
        let keys_file = self.config.as_deref().filter(|_| !self.keys.has("target_keys"));
        let keys_file = keys_file.map(std::path::absolute).transpose()?;
        let by_flags =
            ByFlags { volume: self.volume.is_some(), key_file: self.keys.has("key_file") };
        let keys_file = keys_file.map(|path| KeysFile::new(path, by_flags));
        Ok(Configured { config: self.configuration()?, keys_file })
    }

    /// Name of the mount.
    ///
    /// # Errors
    /// The name is part of paths, so it follows the rules of names.
    pub fn mount_name(&self, config: &MountConfig) -> anyhow::Result<String> {
        // As rblk-mount@NAME.service calls it.
        let of_file = self.config.as_deref().and_then(Path::file_stem);
        let name = match (&self.name, of_file) {
            (Some(name), _) => name.clone(),
            (None, Some(stem)) => stem.to_string_lossy().into_owned(),
            (None, None) => config.volume.clone(),
        };
        rblk_protocol::Name::new(&name).with_context(|| format!("--name {name}"))?;
        Ok(name)
    }
}

/// The first character of the name of a process that serves the disk with the root file system.
/// systemd does not kill such a process at shutdown, nor when the root file system becomes `/`
/// (<https://systemd.io/ROOT_STORAGE_DAEMONS/>).
pub const OF_ROOT_DISK: char = '@';

/// The output of `recover --check`, followed by the program's version, for a mount that the program
/// could recover.
pub const CHECKED: &str = "rblk-initiatord ";

/// The daemon's message to the command that started it: one JSON line.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Report {
    /// The device exists.
    Mounted(Box<MountStatus>),
    /// The device could not be made.
    Failed {
        /// Text for people.
        error: String,
        /// Exit code.
        exit: u8,
    },
}

/// The daemon could not start: its message.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct StartFailed {
    /// Text for people.
    pub error: String,
    /// The exit code.
    pub exit: Exit,
}

/// A mount without an answer of its process: the known facts.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeadMount(pub String);

/// The exit code for a cause that both programs of an initiator know.
#[must_use]
pub fn exit_of_cause(cause: &(dyn Error + 'static)) -> Option<Exit> {
    if let Some(error) = cause.downcast_ref::<ConfigError>() {
        return Some(error.exit());
    }
    if let Some(error) = cause.downcast_ref::<KeyFileError>() {
        return Some(error.exit());
    }
    if cause.is::<rblk_protocol::NameError>()
        || cause.is::<UnsuitedKey>()
        || cause.is::<WhichMount>()
    {
        return Some(Exit::Usage);
    }
    if cause.is::<NotRoot>() || cause.is::<NotInBackground>() {
        return Some(Exit::NotPermitted);
    }
    if cause.is::<NotMounted>() || cause.is::<DeadMount>() {
        return Some(Exit::NotConnected);
    }
    if let Some(StartFailed { exit, .. }) = cause.downcast_ref::<StartFailed>() {
        return Some(*exit);
    }
    let system = cause.downcast_ref::<std::io::Error>();
    let is_denied = system.is_some_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied);
    is_denied.then_some(Exit::NotPermitted)
}

#[cfg(test)]
mod tests {
    use rblk_config::key_file::HOST_KEY_FILE;
    use rblk_config::{DigestWish, Encrypt, OnLoss};

    use super::*;

    fn configuration(flags: &[&str]) -> Result<MountConfig, ConfigError> {
        let words = ["rblk-initiator", "mount", "192.0.2.1", "v"];
        match Cli::try_parse_from(words.iter().chain(flags)).unwrap().command {
            Command::Mount(args) => args.configuration(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_flag_says_which_flushes_fail_after_a_loss() {
        let mode = |flags: &[&str]| configuration(flags).unwrap().on_loss;
        assert_eq!(mode(&[]), OnLoss::UntilRemount);
        assert_eq!(mode(&["--on-loss", "once"]), OnLoss::Once);
        assert_eq!(mode(&["--on-loss", "until-remount"]), OnLoss::UntilRemount);
        assert_eq!(
            configuration(&["--on-loss", "never"]).unwrap_err().to_string(),
            "--on-loss never: not one of the choices; write \"once\" or \"until-remount\""
        );
        // The flag wins over the file.
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "target = ['tcp://192.0.2.1']\nvolume = 'v'\non_loss = 'once'\n";
        std::fs::write(file.path(), text).unwrap();
        let path = file.path().to_str().unwrap();
        let of_file = |flags: &[&str]| {
            let words = ["rblk-initiator", "mount", "--config", path];
            match Cli::try_parse_from(words.iter().chain(flags)).unwrap().command {
                Command::Mount(args) => args.configuration().unwrap().on_loss,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(of_file(&[]), OnLoss::Once);
        assert_eq!(of_file(&["--on-loss", "until-remount"]), OnLoss::UntilRemount);
    }

    #[test]
    fn flags_set_the_keys_of_both_ends() {
        let keys = [
            "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe",
            "rblk1:n4ja2ifhmaemcmpyur5k7rpesrcxf2h5xwdzd6wpggvre7d3kyu752zoua",
        ];
        let of = |flags: &[&str]| configuration(flags).unwrap();
        assert!(of(&[]).target_keys.is_empty());
        let config = of(&["--target-key", keys[0], "--target-key", keys[1], "--key-file", "/k"]);
        assert_eq!(config.target_keys, keys.map(|key| key.parse().unwrap()));
        assert_eq!(config.key_file, PathBuf::from("/k"));
        let config = of(&["--target-key", keys[0], "--encrypt", "required", "--digest", "crc32c"]);
        assert_eq!(
            (config.transport.encrypt, config.digest),
            (Encrypt::Required, DigestWish::Crc32c)
        );
        assert_eq!(config.key_file, PathBuf::from(HOST_KEY_FILE));
        // The target's keys come from the flags, or else from the file.
        let file = tempfile::NamedTempFile::new().unwrap();
        let text =
            format!("target = ['tcp://192.0.2.1']\nvolume = 'v'\ntarget_keys = ['{}']\n", keys[0]);
        std::fs::write(file.path(), text).unwrap();
        let path = file.path().to_str().unwrap();
        for (flags, expected) in [(&[][..], keys[0]), (&["--target-key", keys[1]], keys[1])] {
            let words = ["rblk-initiator", "mount", "--config", path];
            let Command::Mount(args) =
                Cli::try_parse_from(words.iter().chain(flags)).unwrap().command
            else {
                panic!("{flags:?}")
            };
            let found = args.configuration().unwrap().target_keys;
            assert_eq!(found, [expected.parse().unwrap()]);
        }
        for wrong in [
            &["--target-key", "rblk1:abc"][..],
            &["--target-key", &keys[0].replace("rmnt", "rmnu")],
            &["--encrypt", "yes"],
        ] {
            let error = configuration(wrong).unwrap_err().to_string();
            assert!(error.starts_with(wrong[0]), "{error}");
        }
        let error = configuration(&["--encrypt", "required"]).unwrap_err();
        assert!(error.to_string().contains("there are no target_keys"), "{error}");
        let error = configuration(&["--key-file", "/k"]).unwrap_err();
        assert!(error.to_string().contains("without target_keys nobody asks"), "{error}");
    }

    #[test]
    fn values_of_flags_beside_the_keys_file_are_kept() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let key = "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe";
        let text = format!("target = ['tcp://192.0.2.1']\nvolume = 'v'\ntarget_keys = ['{key}']\n");
        std::fs::write(file.path(), text).unwrap();
        let path = file.path().to_str().unwrap();
        let of = |words: &[&str]| {
            let words = [&["rblk-initiator", "mount", "--config", path], words].concat();
            match Cli::try_parse_from(words).unwrap().command {
                Command::Mount(args) => args.configured().unwrap().keys_file,
                other => panic!("{other:?}"),
            }
        };
        let with = |volume, key_file| {
            Some(KeysFile::new(file.path().to_owned(), ByFlags { volume, key_file }))
        };
        assert_eq!(of(&[]), with(false, false));
        assert_eq!(of(&["--key-file", "/k"]), with(false, true));
        assert_eq!(of(&["192.0.2.1", "w"]), with(true, false));
        assert_eq!(of(&["--target-key", key, "--key-file", "/k"]), None);
    }

    #[test]
    fn more_qps_than_a_session_has_numbers_are_refused() {
        for flags in [["--queues", "15", "--lanes", "4"], ["--queues", "63", "--lanes", "1"]] {
            assert!(configuration(&flags).is_ok(), "{flags:?}");
        }
        // Without `--lanes`, as many as possible.
        assert_eq!(configuration(&["--queues", "63"]).unwrap().lanes, None);
        let error = configuration(&["--queues", "16", "--lanes", "4"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--lanes 4: queues x lanes = 16 x 4 = 64 QPs, the limit of a mount is 63; lower lanes to 3, or queues to 15"
        );
        assert_eq!(error.exit(), Exit::Usage);
        for (flag, most) in [("--queues", 63), ("--lanes", 4), ("--queue-depth", 1024)] {
            let rule = format!("write a whole number from 1 to {most}");
            for (number, fault) in
                [("0", "less than 1".to_owned()), ("99999", format!("more than {most}"))]
            {
                let error = configuration(&[flag, number]).unwrap_err().to_string();
                assert_eq!(error, format!("{flag} {number}: {fault}; {rule}"));
            }
            let error = configuration(&[flag, "x"]).unwrap_err().to_string();
            assert_eq!(error, format!("{flag} x: a string, not a number; {rule}"));
        }
    }

    #[test]
    fn every_fault_of_flags_and_file_is_told_with_its_origin() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "target = ['tcp://192.0.2.1']\ndetect = '1ms'\n").unwrap();
        let path = file.path().to_str().unwrap();
        let words =
            ["rblk-initiator", "mount", "--config", path, "--max-io", "3MiB", "--retain", "1"];
        let Command::Mount(args) = Cli::try_parse_from(words).unwrap().command else { panic!() };
        let error = args.configuration().unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        assert!(lines.iter().any(|line| line.starts_with("--max-io 3MiB: not a power")), "{error}");
        assert!(lines.iter().any(|line| line.starts_with("--retain 1: not a multiple")), "{error}");
        let detect = format!("{path}:2:10: detect = \"1ms\": less than 100ms");
        assert!(lines.iter().any(|line| line.starts_with(&detect)), "{error}");
        assert!(error.contains("volume: missing"), "{error}");
    }

    #[test]
    fn flags_win_over_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "target = ['tcp://192.0.2.1']\nvolume = 'v'\nread_only = true\nwait = '1s'\n\
                    shared_memory = ['/dev/shm/a']\n";
        std::fs::write(file.path(), text).unwrap();
        let path = file.path().to_str().unwrap();
        let of = |flags: &[&str]| {
            let words = [&["rblk-initiator", "mount", "--config", path], flags].concat();
            match Cli::try_parse_from(words).unwrap().command {
                Command::Mount(args) => args.configuration().unwrap(),
                other => panic!("{other:?}"),
            }
        };
        assert!(of(&[]).read_only && of(&["--ro"]).read_only);
        assert!(!of(&["--ro=false"]).read_only && !of(&["--read-only=false"]).read_only);
        assert_eq!(of(&["--wait"]).wait.to_string(), "30days");
        assert_eq!(of(&["--wait=5s", "--path", "tcp://b"]).target, ["tcp://192.0.2.1", "tcp://b"]);
        assert_eq!(of(&["tcp://c", "--path", "tcp://b"]).target, ["tcp://c", "tcp://b"]);
        let shared = of(&["--shared-memory", "/dev/shm/b", "--shared-memory", "/dev/shm/c"]);
        assert_eq!(shared.shared_memory, ["/dev/shm/b", "/dev/shm/c"].map(PathBuf::from));
        assert!(!of(&["--relaxed-ordering=false"]).transport.relaxed_ordering);
    }

    #[test]
    fn a_mount_of_a_file_has_the_name_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let name_in = |file: &str, flags: &[&str]| {
            let path = dir.path().join(file);
            std::fs::write(&path, "target = ['tcp://192.0.2.1']\nvolume = 'vol0'\n").unwrap();
            let words = ["rblk-initiator", "mount", "--config", path.to_str().unwrap()];
            match Cli::try_parse_from(words.iter().chain(flags)).unwrap().command {
                Command::Mount(args) => args.mount_name(&args.configuration().unwrap()),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(name_in("data.toml", &[]).unwrap(), "data");
        assert_eq!(name_in("data.toml", &["--name", "other"]).unwrap(), "other");
        let error = format!("{:#}", name_in("my data.toml", &[]).unwrap_err());
        assert!(error.contains("--name my data"), "{error}");
        assert_eq!(name_in("my data.toml", &["--name", "data"]).unwrap(), "data");
        let words = ["rblk-initiator", "mount", "192.0.2.1", "vol0"];
        let Command::Mount(args) = Cli::try_parse_from(words).unwrap().command else { panic!() };
        assert_eq!(args.mount_name(&args.configuration().unwrap()).unwrap(), "vol0");
    }
}
