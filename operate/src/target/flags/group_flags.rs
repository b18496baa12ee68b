//! [`GroupCommand`]: the commands for a group of targets.

use std::path::PathBuf;

use clap::Subcommand;

use super::running_flags::CONFIG;

/// The group of targets that this target is a member of.
#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Show which member owns each image, which host holds its volume, and the clients of the
    /// cluster that a group has fenced.
    ///
    /// The Ceph cluster tells, and nothing is changed: it is the same at every member, and the
    /// target need not run. OWNER is the member that serves the volume; EPOCH counts the changes of
    /// owner. LOCK is "owner" if the owner has the lock of the image, "free" if nobody has it, and
    /// "other" if another client has it: one that takes the image just now, or one that does not
    /// belong to the group.
    Status {
        /// Configuration file of a member.
        #[arg(long, value_name = "FILE", default_value = CONFIG)]
        config: PathBuf,
    },
}
