//! The command line of `rblk-target` and `rblk-targetd`.

mod group_flags;
mod host_flags;
mod running_flags;
mod volume_flags;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::Output;
use clap::{Args, Parser, Subcommand};
use rblk_config::{
    ByteSize, ConfigError, DropInError, Duration, Exit, FlagLayer, KeyFileError, NoTargetKey,
    TargetConfig, VolumeConfig,
};
use rblk_protocol::auth::PublicKey;

use crate::config_flags::ConfigFlags;
use crate::config_flags::flag_sets::TargetFlagSet;
use crate::target::refusal::Refusal;

pub use group_flags::GroupCommand;
pub use host_flags::{
    HostAddArgs, HostCommand, HostPlace, HostRemoveArgs, HostSetArgs, KeyArgs, KeyCommand,
};
pub use running_flags::{CONFIG, RunningArgs};
pub use volume_flags::{
    ChangeArgs, SessionCommand, VolumeAddArgs, VolumeCommand, VolumeMoveArgs, VolumeRemoveArgs,
    VolumeResizeArgs, VolumeSetArgs, VolumeSnapshotArgs,
};

/// The control socket of a target by default.
pub const CONTROL_SOCKET: &str = "/run/rblk/target/control.sock";

/// Serves volumes to initiators over RDMA.
#[derive(Debug, Parser)]
#[command(
    name = "rblk-target",
    version,
    arg_required_else_help = true,
    // The width of the terminal, if that is less: clap wraps all of it.
    max_term_width = 100,
    after_help = format!("{EXAMPLES}\n\n{}", Exit::help())
)]
pub struct Cli {
    /// Form of the answer, and of an error: "table" for people, "json" for programs.
    #[arg(short, long, global = true, value_name = "table|json", default_value_t)]
    pub output: Output,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The text below `--help`, before the exit codes.
const EXAMPLES: &str = "\
Examples:
  One file, over RDMA and TCP:
    rblk-target serve --file vol0=/srv/vol0.img
  An image of a Ceph cluster:
    rblk-target serve --rbd vol0=rbd/vol0 --user rblk
  A RAM disk:
    rblk-target serve --memory ram0=4GiB
  Volumes, hosts and limits from a file:
    rblk-target serve --config /etc/rblk/target.toml
  The key by which this target authenticates:
    rblk-target key new
  Let a host in, whose `rblk-initiator key new` printed the key:
    rblk-target host add db1 --key rblk1:... --volume vol0:rw
  A larger volume, now and after a restart:
    rblk-target volume resize vol0 200GiB --persist
  What a changed configuration would change:
    rblk-target reload --dry-run
  What keeps this host from serving, and the command that fixes it:
    rblk-target doctor
  The state, for programs:
    rblk-target status -o json
  Go over to the version that was installed, without an interruption:
    rblk-target upgrade
  Stop it in good order, and wait until it has stopped:
    rblk-target drain";

impl Cli {
    /// The command line of this process.
    ///
    /// # Errors
    /// The command line is wrong, or asked for help. The text is printed already: the program ends
    /// with that code.
    pub fn of_process() -> Result<Self, ExitCode> {
        Self::try_parse().map_err(|error| {
            let asked = !error.use_stderr();
            Output::end_of_parser("rblk-target", asked, &error.to_string(), || error.print())
        })
    }
}

/// The commands of `rblk-target`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve volumes until SIGTERM, which drains and ends.
    ///
    /// SIGHUP reloads the configuration file, like `rblk-target reload`, and does not end the
    /// target: one that was started in a terminal keeps running when the terminal closes.
    Serve(Box<ServeArgs>),
    /// Make or show the key by which this target authenticates.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Manage the hosts that may connect, and their rights to volumes.
    #[command(subcommand)]
    Host(HostCommand),
    /// Add, remove and change the volumes of the running target.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Show and end the sessions of the running target.
    #[command(subcommand)]
    Session(SessionCommand),
    /// Show the group of targets that this target is a member of.
    #[command(subcommand)]
    Group(GroupCommand),
    /// Make the running target read its configuration again, and change its hosts and volumes
    /// accordingly: all of them, or none.
    ///
    /// Hosts and keys that are gone lose their sessions at once. A volume that is gone must not be
    /// in use. Other keys need a restart, and are named.
    Reload {
        /// Only show the changes.
        #[arg(long)]
        dry_run: bool,
        /// Only the hosts: keys and rights that are gone are revoked, also where the rest of the
        /// configuration would be refused.
        #[arg(long, conflicts_with = "dry_run")]
        hosts: bool,
        /// The target.
        #[command(flatten)]
        socket: SocketArgs,
    },
    /// Print the configuration that the target runs with, with every change since its start, as a
    /// file that gives the same again.
    Dump {
        /// The target.
        #[command(flatten)]
        socket: SocketArgs,
    },
    /// Check a configuration, its key files, the stores it names and this host, without serving.
    ///
    /// The running target may use this configuration. Does not wait for any lock.
    Check {
        /// Configuration file.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Find the faults that keep this host from serving, and print the commands that fix them.
    ///
    /// Looks at kernel, io_uring, memory, RDMA devices, addresses, keys, stores, directories, units
    /// and the running target. Changes nothing. Run it as root, or as the user of the target. The
    /// exit code is 7 if something fails.
    Doctor(DoctorArgs),
    /// Show the state of the running target: devices, volumes, sessions. Rates are those of the
    /// last second; the first call takes a second, to measure them.
    Status {
        /// The target.
        #[command(flatten)]
        socket: SocketArgs,
        /// Show more counters; -o json shows all.
        #[arg(short, long)]
        verbose: bool,
    },
    /// Show recent events: hosts that connected, were lost or fenced, lost writes, errors of
    /// stores.
    Events {
        /// The target.
        #[command(flatten)]
        socket: SocketArgs,
        /// Then print new events as they come, also after a restart of the target.
        #[arg(long, short = 'f')]
        follow: bool,
    },
    /// Show rates, latencies and depth of each volume, refreshed until q or ctrl-C.
    Top {
        /// The target.
        #[command(flatten)]
        socket: SocketArgs,
        /// Time between two refreshes.
        #[arg(long, value_name = "TIME", default_value = "1s")]
        interval: Duration,
        /// Print once, and end.
        #[arg(long)]
        once: bool,
    },
    /// Replace the running target by another program, such as a newer version, while its volumes
    /// are in use: requests wait for a moment.
    ///
    /// The program is asked first whether it can take over with the present configuration, and the
    /// stores and the state directory are looked at. If it cannot, or if a restart would not find
    /// them as they are, nothing changes. Waits until every mount is back, or the target is gone.
    Upgrade {
        /// The program; the rblk-targetd beside this one by default.
        #[arg(long, value_name = "PATH")]
        program: Option<PathBuf>,
        /// Also if volumes in memory lose their data, if mounts report a loss or are fenced, or if
        /// the file of a volume is not at its path any more: it is served on.
        #[arg(long)]
        force: bool,
        /// How long the other program and the mounts may take.
        #[arg(long, value_name = "TIME", default_value = "30s")]
        timeout: Duration,
        /// The target.
        #[command(flatten)]
        socket: SocketArgs,
    },
    /// Show each command of a volume that takes long, as it is answered: its kind, its host, and
    /// the causes of its waits. Ends by ctrl-C.
    ///
    /// A command that never waited is not shown. One trace at a time.
    Trace {
        /// Name of the volume.
        volume: String,
        /// The shortest time of a command to be shown.
        #[arg(long, value_name = "TIME", default_value = "10ms")]
        slower: Duration,
        /// End after N commands.
        #[arg(long, value_name = "N")]
        count: Option<u64>,
        /// The target.
        #[command(flatten)]
        socket: SocketArgs,
    },
    /// Let I/O finish, tell the initiators, and stop the running target. Waits until it has ended.
    ///
    /// A member of a group of targets first hands its volumes over to the others: their hosts go on
    /// there within about a second, and nothing is lost.
    Drain {
        /// The target.
        #[command(flatten)]
        socket: SocketArgs,
        /// Begin the drain, and do not wait for its end.
        #[arg(long)]
        no_wait: bool,
    },
}

/// The scope of the doctor.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Configuration file; /etc/rblk/target.toml by default, if there is one.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Become this user, and print how the configuration looks to it. Not for people.
    #[arg(long, hide = true, value_name = "UID", requires = "config")]
    pub as_user: Option<u32>,
    /// Try the stores, too.
    #[arg(long, hide = true, requires = "as_user")]
    pub with_stores: bool,
}

/// Names a running target.
#[derive(Debug, Args)]
pub struct SocketArgs {
    /// Control socket of the target.
    #[arg(long = "control-socket", value_name = "PATH", default_value = CONTROL_SOCKET)]
    pub path: PathBuf,
}

/// The volumes to serve, and the settings. All of this can also stand in the configuration file;
/// flags win.
#[derive(Debug, Args, Default)]
pub struct ServeArgs {
    /// Configuration file (TOML). For X.toml, the files X.d/*.toml beside it are read too.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Volume on a file or block device; repeat for several.
    #[arg(long, value_name = "NAME=PATH")]
    pub file: Vec<String>,
    /// Volume on an image of a Ceph cluster, or on a snapshot of one; repeat for several.
    #[arg(long, value_name = "NAME=POOL/IMAGE")]
    pub rbd: Vec<String>,
    /// Configuration file of the Ceph cluster of the volumes named by --rbd.
    #[arg(long, value_name = "FILE", requires = "rbd")]
    pub ceph_conf: Option<PathBuf>,
    /// Ceph user for the volumes named by --rbd: rblk is client.rblk.
    #[arg(long, value_name = "USER", requires = "rbd")]
    pub user: Option<String>,
    /// File with the key of the Ceph user.
    #[arg(long, value_name = "FILE", requires = "rbd")]
    pub keyring: Option<PathBuf>,
    /// Volume in memory, lost when the target ends.
    #[arg(long, value_name = "NAME=SIZE")]
    pub memory: Vec<String>,
    /// Volume of zeros that drops writes, for measuring the rest.
    #[arg(long, value_name = "NAME=SIZE")]
    pub null: Vec<String>,
    /// Block size of the volumes named by flags: 512 or 4096.
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    pub block_size: u32,
    /// Refuse writes to the volumes named by flags.
    #[arg(long)]
    pub read_only: bool,
    /// Let a host open every volume; repeat for several hosts, or for a second key. The tables of
    /// hosts in a file can say more.
    #[arg(long, value_name = "NAME=KEY")]
    pub host: Vec<String>,
    /// The keys of the configuration.
    #[command(flatten)]
    pub keys: ConfigFlags<TargetFlagSet>,
    /// Print the configuration that flags and files result in, and end.
    #[arg(long)]
    pub dump_config: bool,
    /// Say whether this program can take over a target that runs with the same arguments, and end.
    #[arg(long, hide = true)]
    pub check_take_over: bool,
    /// Log more; twice for everything. RBLK_LOG overrides.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// A volume flag that is not `NAME=VALUE`.
#[derive(Debug, thiserror::Error)]
#[error("--{flag} {text}: {reason}")]
pub struct BadFlag {
    flag: &'static str,
    text: String,
    reason: String,
}

impl ServeArgs {
    /// The configuration of file and flags together, validated. `can_rdma`: the serving program
    /// has RDMA.
    ///
    /// # Errors
    /// [`ConfigError`] or [`BadFlag`].
    pub fn configuration(&self, can_rdma: bool) -> anyhow::Result<TargetConfig> {
        let mut flags = self.keys.layer().clone();
        for volume in self.volumes()? {
            flags.add_volume(&volume)?;
        }
        self.hosts(&mut flags)?;
        let mut config = TargetConfig::load_with(self.config.as_deref(), &flags)?;
        crate::target::listen::fill_in(&mut config, can_rdma);
        // The volumes of a target with a file may come while it runs, and the last of them may have
        // gone.
        if config.volumes.is_empty() && self.config.is_none() {
            return Err(NoVolumes.into());
        }
        Ok(config)
    }
}

impl ServeArgs {
    /// The volumes of the flags.
    fn volumes(&self) -> anyhow::Result<Vec<VolumeConfig>> {
        let split = |flag: &'static str, text: &str| {
            text.split_once('=').map(|(n, v)| (n.to_owned(), v.to_owned())).ok_or_else(|| BadFlag {
                flag,
                text: text.to_owned(),
                reason: format!(
                    "write --{flag} NAME={}",
                    match flag {
                        "file" => "PATH",
                        "rbd" => "POOL/IMAGE",
                        _ => "SIZE",
                    }
                ),
            })
        };
        let size = |flag: &'static str, text: &str, value: &str| {
            value.parse::<ByteSize>().map_err(|e| BadFlag {
                flag,
                text: text.to_owned(),
                reason: e.to_string(),
            })
        };
        let mut volumes = Vec::new();
        for text in &self.file {
            let (name, path) = split("file", text)?;
            volumes.push(VolumeConfig::file(name, std::path::absolute(path)?));
        }
        for text in &self.rbd {
            let (name, image) = split("rbd", text)?;
            let absolute =
                |path: &Option<PathBuf>| path.as_ref().map(std::path::absolute).transpose();
            volumes.push(VolumeConfig {
                ceph_conf: absolute(&self.ceph_conf)?,
                user: self.user.clone(),
                keyring: absolute(&self.keyring)?,
                ..VolumeConfig::rbd(name, image)
            });
        }
        for text in &self.memory {
            let (name, value) = split("memory", text)?;
            volumes.push(VolumeConfig::memory(name, size("memory", text, &value)?));
        }
        for text in &self.null {
            let (name, value) = split("null", text)?;
            volumes.push(VolumeConfig::null(name, size("null", text, &value)?));
        }
        for volume in &mut volumes {
            volume.block_size = self.block_size;
            volume.read_only = self.read_only;
        }
        Ok(volumes)
    }

    /// Adds the hosts of the flags.
    fn hosts(&self, flags: &mut FlagLayer) -> Result<(), BadFlag> {
        for text in &self.host {
            let bad = |reason: String| BadFlag { flag: "host", text: text.clone(), reason };
            let (name, key) =
                text.split_once('=').ok_or_else(|| bad("write --host NAME=KEY".to_owned()))?;
            key.parse::<PublicKey>().map_err(|error| BadFlag {
                flag: "host",
                // The value may be a secret key.
                text: format!("{name}=..."),
                reason: format!("{error}"),
            })?;
            flags.add_host(name, key);
        }
        Ok(())
    }
}

/// Nothing to serve.
#[derive(Debug, thiserror::Error)]
#[error(
    "no volume to serve: name one with --file NAME=PATH, --rbd NAME=POOL/IMAGE or --memory NAME=SIZE, or in [[volume]] tables of --config FILE"
)]
pub struct NoVolumes;

/// The exit code for a cause that both programs of a target know.
#[must_use]
pub fn exit_of_cause(cause: &(dyn Error + 'static)) -> Option<Exit> {
    if let Some(error) = cause.downcast_ref::<ConfigError>() {
        return Some(error.exit());
    }
    if let Some(refusal) = cause.downcast_ref::<Refusal>() {
        return Some(refusal.exit());
    }
    if let Some(error) = cause.downcast_ref::<DropInError>() {
        return Some(error.exit());
    }
    if let Some(error) = cause.downcast_ref::<KeyFileError>() {
        return Some(error.exit());
    }
    if let Some(error) = cause.downcast_ref::<NoTargetKey>() {
        return Some(error.exit());
    }
    (cause.is::<BadFlag>() || cause.is::<NoVolumes>()).then_some(Exit::Usage)
}
