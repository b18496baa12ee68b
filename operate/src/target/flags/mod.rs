//! The command line of `rblk-target` and `rblk-targetd`.

mod host_flags;
mod limit_flags;
mod running_flags;
mod volume_flags;

use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::Output;
use clap::{Args, Parser, Subcommand};
use rblk_config::{
    Auth, ByteSize, ConfigError, DropInError, Duration, Exit, HostConfig, KeyFileError,
    NoTargetKey, Spin, TargetConfig, VolumeAccess, VolumeConfig, VolumeRight,
};
use rblk_protocol::auth::PublicKey;

use crate::target::refusal::Refusal;

pub use host_flags::{
    HostAddArgs, HostCommand, HostPlace, HostRemoveArgs, HostSetArgs, KeyArgs, KeyCommand,
};
pub use limit_flags::LimitArgs;
pub use running_flags::{CONFIG, RunningArgs};
pub use volume_flags::{
    ChangeArgs, SessionCommand, VolumeAddArgs, VolumeCommand, VolumeRemoveArgs, VolumeResizeArgs,
    VolumeSetArgs, VolumeSnapshotArgs,
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
        /// Show every counter, too.
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
    /// Address to listen on, rdma://HOST:PORT or tcp://HOST:PORT; the port may be left out. Repeat
    /// for several.
    ///
    /// Without any, here and in the file: every address of this host, IPv6 and IPv4, by TCP on port
    /// 7721, and by RDMA on port 7720 when this host has an RDMA device.
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<String>,
    /// Volume on a file or block device; repeat for several.
    #[arg(long, value_name = "NAME=PATH")]
    pub file: Vec<String>,
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
    /// Name shown to initiators; the host's name by default.
    #[arg(long)]
    pub name: Option<String>,
    /// Where `status` and `drain` reach this target.
    #[arg(long, value_name = "PATH")]
    pub control_socket: Option<PathBuf>,
    /// Where this target remembers whether it stopped cleanly and which hosts held its volumes;
    /// targets of the same name need one each.
    #[arg(long, value_name = "DIRECTORY")]
    pub state_dir: Option<PathBuf>,
    /// Data threads; one per two CPUs, 1 to 4, by default.
    #[arg(long, value_name = "N")]
    pub poll_groups: Option<u16>,
    /// Registered memory for the cache and data in flight.
    #[arg(long, value_name = "SIZE")]
    pub arena: Option<ByteSize>,
    /// Most data of one command.
    #[arg(long, value_name = "SIZE")]
    pub max_io: Option<ByteSize>,
    /// Write data up to this size travels inside the command.
    #[arg(long, value_name = "SIZE")]
    pub inline: Option<ByteSize>,
    /// How long an idle data thread looks for work before it sleeps: a time, "adaptive" or
    /// "always".
    #[arg(long, value_name = "TIME")]
    pub spin: Option<Spin>,
    /// How long a drain waits for initiators to leave.
    #[arg(long, value_name = "TIME")]
    pub drain_timeout: Option<Duration>,
    /// How long a target that stops goes on with the write of dirty data to a store that refuses
    /// it.
    #[arg(long, value_name = "TIME")]
    pub stop_timeout: Option<Duration>,
    /// How long an initiator without connections keeps its volumes.
    #[arg(long, value_name = "TIME")]
    pub lease: Option<Duration>,
    /// Serve metrics, health and a live page over HTTP at this address and port, such as
    /// 127.0.0.1:9720. Read-only, and without authentication.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub http: Option<SocketAddr>,
    /// Hosts that may connect: "required" lets in hosts that prove their keys, "none" all hosts.
    /// Without it: "none" if only this host reaches the addresses, else "required".
    #[arg(long, value_name = "none|required")]
    pub auth: Option<Auth>,
    /// Let every host that reaches an address read, write and take over every volume.
    #[arg(long)]
    pub insecure: bool,
    /// File of the secret key of this target, or credential:NAME.
    #[arg(long, value_name = "PATH")]
    pub key_file: Option<PathBuf>,
    /// Let a host open every volume; repeat for several hosts, or for a second key. The tables of
    /// hosts in a file can say more.
    #[arg(long, value_name = "NAME=KEY")]
    pub host: Vec<String>,
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
        let mut config = match &self.config {
            Some(path) => TargetConfig::load(path)?,
            None => TargetConfig::default(),
        };
        config.volumes.extend(self.volumes()?);
        self.protect(&mut config)?;
        if !self.listen.is_empty() {
            config.listen.clone_from(&self.listen);
        }
        crate::target::listen::fill_in(&mut config, can_rdma);
        if self.name.is_some() {
            config.name.clone_from(&self.name);
        }
        if let Some(path) = &self.control_socket {
            config.control_socket.clone_from(path);
        }
        if let Some(path) = &self.state_dir {
            config.state_dir = std::path::absolute(path)?;
        }
        if self.poll_groups.is_some() {
            config.poll_groups = self.poll_groups;
        }
        config.arena = self.arena.unwrap_or(config.arena);
        config.max_io = self.max_io.unwrap_or(config.max_io);
        config.inline = self.inline.unwrap_or(config.inline);
        config.spin = self.spin.unwrap_or(config.spin);
        config.drain_timeout = self.drain_timeout.unwrap_or(config.drain_timeout);
        config.stop_timeout = self.stop_timeout.unwrap_or(config.stop_timeout);
        config.lease = self.lease.unwrap_or(config.lease);
        config.http = self.http.or(config.http);
        config.validate()?;
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
                    if flag == "file" { "PATH" } else { "SIZE" }
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

    /// Adds the flags about the hosts that may connect.
    fn protect(&self, config: &mut TargetConfig) -> anyhow::Result<()> {
        config.auth = self.auth.or(config.auth);
        config.insecure |= self.insecure;
        if let Some(file) = &self.key_file {
            config.key_file.clone_from(file);
        }
        for text in &self.host {
            let bad = |reason: String| BadFlag { flag: "host", text: text.clone(), reason };
            let (name, key) =
                text.split_once('=').ok_or_else(|| bad("write --host NAME=KEY".to_owned()))?;
            let key: PublicKey = key.parse().map_err(|error| BadFlag {
                flag: "host",
                // The value may be a secret key.
                text: format!("{name}=..."),
                reason: format!("{error}"),
            })?;
            match config.hosts.iter_mut().find(|host| host.name == name) {
                Some(host) => host.keys.push(key),
                None => {
                    let every = VolumeRight::new(None, VolumeAccess::ReadWrite);
                    config.hosts.push(HostConfig::new(name, vec![key], vec![every]));
                }
            }
        }
        Ok(())
    }
}

/// Nothing to serve.
#[derive(Debug, thiserror::Error)]
#[error(
    "no volume to serve: name one with --file NAME=PATH or --memory NAME=SIZE, or in [[volume]] tables of --config FILE"
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
