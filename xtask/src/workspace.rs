//! The workspace that this program belongs to, and cargo for it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::process;

/// Where the sources and the build output are.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Workspace {
    /// The directory of the workspace's Cargo.toml.
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
    /// Cargo's target directory.
    #[serde(rename = "target_directory")]
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Asks cargo; the workspace is the one this program was built in.
    pub(crate) fn find() -> Result<Self> {
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let mut command = Command::new(cargo());
        command.args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(manifest);
        let json = process::output(&mut command, Duration::from_secs(120))?;
        serde_json::from_str(&json).context("cargo metadata gave something else than expected")
    }

    /// Cargo in this workspace.
    pub(crate) fn cargo(&self, words: &[&str]) -> Command {
        let mut command = self.command(cargo());
        command.args(words);
        command
    }

    fn command(&self, program: OsString) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        // What `cargo run` set for this program is not for the crates that are built now.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
                command.env_remove(&name);
            }
        }
        command
    }
}

fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}
