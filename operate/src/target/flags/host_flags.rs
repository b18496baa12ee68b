//! The command lines of `rblk-target key` and `rblk-target host`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use rblk_config::VolumeRight;
use rblk_config::key_file::TARGET_KEY_FILE;
use rblk_protocol::auth::PublicKey;

use super::running_flags::{CONFIG, RunningArgs};
use crate::config_flags::ConfigFlags;
use crate::config_flags::flag_sets::{HostFlagSet, LimitFlagSet};

/// The commands of `rblk-target key`.
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

/// The commands of `rblk-target host`.
#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Let a host connect, or change its rights. A running target applies that at once.
    ///
    /// For a known host: --key adds a second key, --volume adds a right or replaces the right to
    /// the same volume, and the rest stays.
    Add(HostAddArgs),
    /// Change the limits of a host per second, all its mounts together. The other limits stay.
    Set(HostSetArgs),
    /// Let a host connect no longer, or take one key or one right from it. Its sessions that need
    /// the key or the right end at once.
    Remove(HostRemoveArgs),
    /// Show the hosts of the configuration.
    List {
        /// Configuration file of the target.
        #[arg(long, value_name = "FILE", default_value = CONFIG)]
        config: PathBuf,
    },
}

/// The configuration to change, and the target that has to read it.
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
    /// Name of the host: the target shows it under this name, and remembers its volumes by it.
    pub name: String,
    /// Public key, as `rblk-initiator key show` prints it on the host. At most two.
    #[arg(long, value_name = "KEY")]
    pub key: Vec<PublicKey>,
    /// A volume that the host may open: VOLUME:rw, VOLUME:ro, or "*:rw" for every volume. Repeat
    /// for several.
    #[arg(long, value_name = "VOLUME:rw|ro")]
    pub volume: Vec<VolumeRight>,
    /// The other keys of the host.
    #[command(flatten)]
    pub keys: ConfigFlags<HostFlagSet>,
    /// The configuration and the target.
    #[command(flatten)]
    pub place: HostPlace,
}

/// Other limits for a host.
#[derive(Debug, Args)]
pub struct HostSetArgs {
    /// Name of the host.
    pub name: String,
    /// The limits.
    #[command(flatten)]
    pub limits: ConfigFlags<LimitFlagSet>,
    /// Write the change into the configuration too, so that it stays after a restart: into
    /// FILE.d/host-NAME.toml.
    #[arg(long)]
    pub persist: bool,
    /// The target.
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
    /// The configuration and the target.
    #[command(flatten)]
    pub place: HostPlace,
}
