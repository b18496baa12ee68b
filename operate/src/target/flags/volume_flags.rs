//! The command lines of `rblk-target volume` and `rblk-target session`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use rblk_config::ByteSize;

use super::running_flags::RunningArgs;
use crate::config_flags::ConfigFlags;
use crate::config_flags::flag_sets::{NewVolumeFlagSet, VolumeFlagSet};

/// The commands of `rblk-target volume`.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Serve another volume.
    Add(VolumeAddArgs),
    /// Stop serving a volume. Dirty data is written first, and its file is closed.
    ///
    /// A volume that a host has open stays, unless --force or --drain is given.
    Remove(VolumeRemoveArgs),
    /// Give a volume another size: a file is made longer, a device is measured again.
    ///
    /// Hosts that have it open go on; they learn of the size at once, or when they connect again.
    Resize(VolumeResizeArgs),
    /// Change how a volume is served. The other settings stay.
    ///
    /// For another mode of the cache, dirty data is written first, and hosts that have the volume
    /// open are cut off for a moment.
    Set(VolumeSetArgs),
    /// Clone the file of a volume while hosts use it, and serve the clone read-only.
    ///
    /// The clone shares its blocks with the volume, so it takes a moment and no space, for any
    /// size. It holds every write that was acknowledged before one instant, and nothing later; new
    /// writes wait for that instant. The file system has to be XFS with reflink=1, or btrfs.
    Snapshot(VolumeSnapshotArgs),
    /// Hand a volume over to another member of the group of targets, without a loss.
    ///
    /// Dirty data is written first. With --to, that member takes the volume, and its host goes
    /// there. Without, its host goes to another member of its addresses, which takes the volume,
    /// and goes on there. Without another member it comes back after a few seconds.
    Move(VolumeMoveArgs),
    /// Show the volumes of the running target.
    List(RunningArgs),
}

/// The commands of `rblk-target session`.
#[derive(Debug, Subcommand)]
pub enum SessionCommand {
    /// Show the sessions of the running target.
    List(RunningArgs),
    /// End a session: its volumes are free, and its connections end.
    ///
    /// Its mount connects again as after a loss of the link, and repeats its unanswered requests,
    /// unless another host has the volume then. To keep a host out, take its right away first:
    /// `rblk-target host remove`.
    Kick {
        /// Host, peer or number of the session, as `session list` shows them. A host may have
        /// several sessions; all of them end. If a host is named like the number of a session,
        /// write `host:NAME` or `number:N`.
        session: String,
        /// The target.
        #[command(flatten)]
        running: RunningArgs,
    },
}

/// The target, and whether the change stays.
#[derive(Debug, Args)]
pub struct ChangeArgs {
    /// Write the change into the configuration too, so that it stays after a restart: into
    /// FILE.d/volume-NAME.toml.
    #[arg(long)]
    pub persist: bool,
    /// The target.
    #[command(flatten)]
    pub running: RunningArgs,
}

/// A volume to serve.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("store").required(true).args(["file", "rbd", "memory", "null"]))]
pub struct VolumeAddArgs {
    /// Name that hosts open it by.
    pub name: String,
    /// On this file or block device.
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// On this image of a Ceph cluster, or on a snapshot of one.
    #[arg(long, value_name = "POOL/IMAGE")]
    pub rbd: Option<String>,
    /// In memory, of this size; lost when the target ends.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Of zeros, of this size; drops writes.
    #[arg(long, value_name = "SIZE")]
    pub null: Option<ByteSize>,
    /// The other keys of the volume.
    #[command(flatten)]
    pub keys: ConfigFlags<NewVolumeFlagSet>,
    /// The target.
    #[command(flatten)]
    pub place: ChangeArgs,
}

/// A volume to serve no longer.
#[derive(Debug, Args)]
pub struct VolumeRemoveArgs {
    /// Name of the volume.
    pub name: String,
    /// Take it from the hosts that have it open: their connections end, and they do not get it
    /// again. It goes even if its store takes nothing any more; then the answer names the lost
    /// data.
    #[arg(long, conflicts_with = "drain")]
    pub force: bool,
    /// Let no further host open it, and wait until no host has it open.
    #[arg(long)]
    pub drain: bool,
    /// The target.
    #[command(flatten)]
    pub place: ChangeArgs,
}

/// A volume for another member of the group.
#[derive(Debug, Args)]
pub struct VolumeMoveArgs {
    /// Name of the volume.
    pub name: String,
    /// The member that is to serve it. If it does not answer, the volume stays where it is. Type
    /// this at the member that serves the volume, or at the one that is to serve it.
    #[arg(long, value_name = "MEMBER")]
    pub to: Option<String>,
    /// The target.
    #[command(flatten)]
    pub running: RunningArgs,
}

/// Another size for a volume.
#[derive(Debug, Args)]
pub struct VolumeResizeArgs {
    /// Name of the volume.
    pub name: String,
    /// The size. Without it: the size that its file or device has now.
    pub size: Option<ByteSize>,
    /// Make the volume smaller, and drop the data behind its new end. Hosts that have it open are
    /// cut off for a moment.
    #[arg(long)]
    pub shrink: bool,
    /// The target.
    #[command(flatten)]
    pub place: ChangeArgs,
}

/// A snapshot of a volume.
#[derive(Debug, Args)]
pub struct VolumeSnapshotArgs {
    /// Name of the volume.
    pub name: String,
    /// Name of the snapshot; without it NAME-YYYYMMDD-HHMMSS, by the time in UTC.
    #[arg(long = "as", value_name = "NEWNAME")]
    pub new_name: Option<String>,
    /// The new file, in the file system of the volume; without it beside the file of the volume.
    #[arg(long, value_name = "FILE")]
    pub path: Option<PathBuf>,
    /// The target.
    #[command(flatten)]
    pub place: ChangeArgs,
}

/// The new settings of a volume.
#[derive(Debug, Args)]
pub struct VolumeSetArgs {
    /// Name of the volume.
    pub name: String,
    /// The keys to change.
    #[command(flatten)]
    pub keys: ConfigFlags<VolumeFlagSet>,
    /// The target.
    #[command(flatten)]
    pub place: ChangeArgs,
}
