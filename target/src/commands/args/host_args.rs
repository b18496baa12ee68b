//! The command lines of `rblk-target key` and `rblk-target host`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use rblk_config::VolumeRight;
use rblk_config::key_file::TARGET_KEY_FILE;
use rblk_protocol::auth::PublicKey;

use crate::commands::args::limit_args::LimitArgs;
use crate::commands::args::running_args::{CONFIG, RunningArgs};

/// What `rblk-target key` can do.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make the secret key of this target, and print its public key. A key that is there stays.
    New(KeyArgs),
    /// Print the public key of this target.
    Show(KeyArgs),
}

/// Names a key file.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// Key file; key_file in the configuration names another one.
    #[arg(long, value_name = "PATH", default_value = TARGET_KEY_FILE)]
    pub file: PathBuf,
}

/// What `rblk-target host` can do.
#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Let a host connect, or change what it may do. A running target uses that at once.
    ///
    /// For a host that is there: --key adds a second key, --volume adds a right or replaces the
    /// right to the same volume, and the rest stays.
    Add(HostAddArgs),
    /// Change what a host may have per second, all its mounts together. What is not named stays.
    Set(HostSetArgs),
    /// Let a host connect no longer, or take one key or one right from it. Its sessions that need
    /// what is taken end at once.
    Remove(HostRemoveArgs),
    /// Show the hosts of the configuration.
    List {
        /// Configuration file of the target.
        #[arg(long, value_name = "FILE", default_value = CONFIG)]
        config: PathBuf,
    },
}

/// Which configuration is changed, and which target is told.
#[derive(Debug, Args)]
pub struct HostPlace {
    /// Configuration file of the target; the host is written beside it, into FILE.d/host-NAME.toml.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub config: PathBuf,
    /// Control socket of the running target; that of the configuration by default.
    #[arg(long, value_name = "PATH")]
    pub control_socket: Option<PathBuf>,
}

/// A host to let in.
#[derive(Debug, Args)]
pub struct HostAddArgs {
    /// Name of the host, by which the target shows it and remembers what it holds.
    pub name: String,
    /// Public key, as `rblk-initiator key show` prints it on the host. At most two.
    #[arg(long, value_name = "KEY")]
    pub key: Vec<PublicKey>,
    /// What the host may open: VOLUME:rw, VOLUME:ro, or "*:rw" for every volume. Repeat for
    /// several.
    #[arg(long, value_name = "VOLUME:rw|ro")]
    pub volume: Vec<VolumeRight>,
    /// Whether the host may take a volume over from the host that holds it.
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub take_over: Option<bool>,
    /// Where.
    #[command(flatten)]
    pub place: HostPlace,
}

/// Other limits for a host.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true)
    .args(["iops", "bandwidth", "iops_burst", "bandwidth_burst"]))]
pub struct HostSetArgs {
    /// Name of the host.
    pub name: String,
    /// How much it may have.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Write the change into the configuration too, so that it stays after a restart: into
    /// FILE.d/host-NAME.toml.
    #[arg(long)]
    pub persist: bool,
    /// Which target.
    #[command(flatten)]
    pub running: RunningArgs,
}

/// A host, or a part of it, to take away.
#[derive(Debug, Args)]
pub struct HostRemoveArgs {
    /// Name of the host.
    pub name: String,
    /// Take this key from the host, and leave the other one.
    #[arg(long, value_name = "KEY")]
    pub key: Option<PublicKey>,
    /// Take the right to this volume from the host, and leave the others. "*" takes the right to
    /// every volume that is not named.
    #[arg(long, value_name = "VOLUME", conflicts_with = "key")]
    pub volume: Option<String>,
    /// Where.
    #[command(flatten)]
    pub place: HostPlace,
}
