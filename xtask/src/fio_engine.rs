//! `cargo xtask fio-engine`: the engine by which fio uses volumes without a block device.
//!
//! An engine is compiled against the headers of the very fio that loads it, because it shares fio's
//! structures. They come from the source package of the fio that is installed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::lab::apt::Apt;
use crate::lab::cache::Cache;
use crate::library::{self, Build};
use crate::process;
use crate::workspace::Workspace;

/// Limit on unpacking and configuring.
const LIMIT: Duration = Duration::from_secs(10 * 60);
/// What fio's configure finds out.
const CONFIGURED: &str = "config-host.h";

/// Build the engine by which fio uses volumes without a block device
///
/// It is for the fio that is installed. Its headers come from the source package of the same
/// version, which is fetched once from the Debian mirror that apt is configured for, and kept in
/// the cache of the lab. docs/performance.md explains the use.
///
/// Exit status: 0, or 1 when something failed.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct FioEngineArgs {
    /// The engine [default: librblk_fio.so in the directory of what is built]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// A directory of fio's source, configured, for a fio that is no package
    #[arg(long, value_name = "DIR")]
    fio_source: Option<PathBuf>,

    // librblk.a, where it is built already.
    #[arg(skip)]
    archive: Option<PathBuf>,

    #[command(flatten)]
    build: Build,
}

impl FioEngineArgs {
    /// For the fio that is installed, of what a profile of cargo left when rblk-capi was built with
    /// RDMA.
    pub(crate) fn of_built(workspace: &Workspace, profile: &str, out: PathBuf) -> Self {
        let build = Build::with(profile);
        let archive = Some(build.archive_path(workspace));
        Self { out: Some(out), fio_source: None, archive, build }
    }

    /// Builds it.
    pub(crate) fn run(&self) -> Result<i32> {
        let workspace = Workspace::find()?;
        println!("{}", self.build_in(&workspace)?.display());
        Ok(0)
    }

    /// Builds it in a workspace; gives its path.
    pub(crate) fn build_in(&self, workspace: &Workspace) -> Result<PathBuf> {
        let source = match &self.fio_source {
            Some(directory) => directory.clone(),
            None => fetched()?,
        };
        let configured = source.join(CONFIGURED);
        if !configured.is_file() {
            bail!("there is no {}: run ./configure there", configured.display());
        }
        let archive = match &self.archive {
            Some(archive) => archive.clone(),
            None => self.build.archive(workspace)?,
        };
        let out = self.out.clone().unwrap_or_else(|| workspace.target.join("librblk_fio.so"));
        let directory = workspace.root.join("bench/fio");
        let mut command = library::link(&out, &directory.join("engine.map"));
        command.args(["-O2", "-g", "-fPIC", "-Wall", "-D_GNU_SOURCE", "-include"]).arg(&configured);
        command.arg("-isystem").arg(&source);
        command.arg("-I").arg(library::directory(workspace).join("include"));
        command.arg(directory.join("engine.c")).arg(&archive).args(self.build.libraries());
        // No path of this machine, so that two builds are equal. Of several that fit, the last
        // counts: the workspace may lie below the present directory.
        let here = std::env::current_dir()?;
        for (from, to) in [(&here, "."), (&source, "fio"), (&workspace.root, "rblk")] {
            command.arg(format!("-ffile-prefix-map={}={to}", from.display()));
        }
        library::run(&mut command)?;
        Ok(out)
    }
}

/// The source of the fio that is installed, configured.
fn fetched() -> Result<PathBuf> {
    let version = installed()
        .context("cannot tell which fio is installed: apt-get install fio, or give --fio-source")?;
    let upstream = upstream(&version);
    let cache = Cache::open()?;
    let _lock = cache.lock()?;
    let kept = cache.path("fio").join(&upstream);
    if kept.join(CONFIGURED).is_file() {
        return Ok(kept);
    }
    let scratch = cache.scratch_dir()?;
    let archive = Apt::update_sources(&cache)
        .and_then(|apt| apt.source("fio", &version, scratch.path()))
        .with_context(|| {
            format!(
                "cannot get the source package of fio {version}; --fio-source names a directory \
                 with the configured source of that fio"
            )
        })?;
    let unpacked = scratch.path().join("unpacked");
    fs::create_dir(&unpacked)?;
    let mut tar = Command::new("tar");
    tar.args(["--strip-components=1", "-xf"]).arg(&archive).arg("-C").arg(&unpacked);
    process::output(&mut tar, LIMIT)?;
    let mut configure = Command::new("sh");
    configure.args(["./configure", "--disable-native"]).current_dir(&unpacked);
    process::output(&mut configure, LIMIT).context("fio's configure failed")?;
    fs::create_dir_all(cache.path("fio"))?;
    if kept.exists() {
        fs::remove_dir_all(&kept)?;
    }
    fs::rename(&unpacked, &kept).with_context(|| format!("cannot make {}", kept.display()))?;
    Ok(kept)
}

/// The version of the source package of the fio that is installed.
fn installed() -> Result<String> {
    let mut command = Command::new("dpkg-query");
    command.args(["-W", "-f", "${source:Version}", "fio"]);
    process::output(&mut command, Duration::from_secs(60))
}

/// Its part that names the archive of the source: without epoch and Debian's revision.
fn upstream(version: &str) -> String {
    let version = version.split_once(':').map_or(version, |(_, version)| version);
    version.rsplit_once('-').map_or(version, |(upstream, _)| upstream).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_has_the_version_of_upstream() {
        assert_eq!(upstream("3.33-3"), "3.33");
        assert_eq!(upstream("1:3.39-rc1-2+b1"), "3.39-rc1");
        assert_eq!(upstream("3.40"), "3.40");
    }
}
