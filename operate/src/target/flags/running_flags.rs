//! [`RunningArgs`]: the running target that a command is for.

use std::path::PathBuf;

use clap::Args;

/// The configuration of a target by default.
pub const CONFIG: &str = "/etc/rblk/target.toml";

/// Names a running target.
#[derive(Debug, Args)]
pub struct RunningArgs {
    /// Configuration file of the target, which names its control socket.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub config: PathBuf,
    /// Control socket of the running target; that of the configuration by default.
    #[arg(long, value_name = "PATH")]
    pub control_socket: Option<PathBuf>,
}
