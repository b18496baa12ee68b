//! [`write()`]: the files of all packages in one archive, for systems with neither dpkg nor rpm.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::checkout::Checkout;
use super::machine;
use super::tree::Tree;
use crate::process;

/// Limit on the compression.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Writes it: sorted names, one owner and one time. The units and examples in it name `/usr/bin`,
/// so it is unpacked at `/`, without its first directory.
pub(crate) fn write(tree: &Tree, checkout: &Checkout, out: &Path) -> Result<()> {
    let name = format!("rblk-{}-{}", checkout.version, machine()?.0);
    let archive = out.join(format!("{name}.tar"));
    let mut tar = checkout.command("tar");
    tar.args(["--sort=name", "--format=gnu", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.args(["--mode=go=rX,u+rw,a-s"]).arg(format!("--mtime=@{}", checkout.time));
    tar.arg(format!("--transform=s,^\\.,{name},"));
    tar.arg("-C").arg(tree.root()).arg("-cf").arg(&archive).arg(".");
    process::output(&mut tar, LIMIT)?;
    // One thread: the number of threads decides the bytes.
    let packed = out.join(format!("{name}.tar.xz"));
    let mut xz = Command::new("xz");
    xz.args(["-T1", "-6", "-c"]).arg(&archive).stdin(Stdio::null()).stdout(File::create(&packed)?);
    let mut child = xz.spawn().context("xz")?;
    let ended = process::wait(&mut child, LIMIT, true)?;
    ensure!(ended.success(), "xz: {ended}");
    fs::remove_file(&archive).context("cannot remove the archive that was compressed")
}
