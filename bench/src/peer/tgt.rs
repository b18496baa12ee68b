//! [`Tgt`]: the iSCSI target `tgtd` (Debian: tgt) with one LUN on a file in memory, for
//! `iscsi-perf` of libiscsi (Debian: libiscsi-bin).

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use crate::child;

/// Names of the target and of the client.
const TARGET: &str = "iqn.2026-11.rblk-bench:target";
/// The name that the client of [`Tgt`] gives itself.
pub const CLIENT: &str = "iqn.2026-11.rblk-bench:client";
/// How long `tgtd` may take to answer; programs start slowly on a guest's shared file system.
const LIMIT: Duration = Duration::from_secs(30);
/// Bytes of a block of its LUNs.
pub const BLOCK: u64 = 512;

/// A running `tgtd`. Dropped, it is killed.
#[derive(Debug)]
pub struct Tgt {
    child: Child,
    control: u16,
}

impl Tgt {
    /// Serves a file, which is there already, at an address. `control` is the number of its control
    /// socket, which no other `tgtd` has. The server carries `tag` as [`child::TAG`].
    ///
    /// # Errors
    /// It is not installed; the number or the address is in use; it does not answer in time.
    pub fn start(file: &Path, at: SocketAddr, control: u16, tag: &str) -> Result<Self> {
        for name in ["tgtd", "tgtadm", "iscsi-perf"] {
            let packages = "Debian: tgt, libiscsi-bin";
            ensure!(child::is_installed(name), "there is no {name}: install it ({packages})");
        }
        let mut command = Command::new("tgtd");
        command.args(["--foreground", "--control-port", &control.to_string()]);
        command.args(["--iscsi", &format!("portal={at}")]);
        command.env(child::TAG, tag).stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = Self { child: child::spawn(&mut command)?, control };
        let ready = child::until(LIMIT, || match server.child.try_wait() {
            Ok(None) => server.admin(&["--op", "show", "--mode", "sys"]).ok().map(Ok),
            Ok(Some(status)) => Some(Err(anyhow!("tgtd at {at} ended: {status}"))),
            Err(error) => Some(Err(error.into())),
        });
        ready.with_context(|| format!("tgtd does not answer after {LIMIT:?}"))??;
        server.admin(&["--op", "new", "--mode", "target", "--tid", "1", "--targetname", TARGET])?;
        let path = file.to_str().context("the name of the volume is no UTF-8")?;
        let lun = ["--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1"];
        server.admin(&[lun.as_slice(), &["--backing-store", path]].concat())?;
        let ip = at.ip().to_string();
        server.admin(&[
            "--op",
            "bind",
            "--mode",
            "target",
            "--tid",
            "1",
            "--initiator-address",
            &ip,
        ])?;
        Ok(server)
    }

    /// What a client calls the LUN at that address.
    #[must_use]
    pub fn url(at: SocketAddr) -> String {
        format!("iscsi://{at}/{TARGET}/1")
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn admin(&self, words: &[&str]) -> Result<()> {
        let mut command = Command::new("tgtadm");
        command.args(["--control-port", &self.control.to_string(), "--lld", "iscsi"]).args(words);
        child::output(&mut command, LIMIT).map(drop)
    }
}

impl Drop for Tgt {
    fn drop(&mut self) {
        if !child::end(&mut self.child) {
            eprintln!("rblk-bench: tgtd, process {}, cannot be killed", self.child.id());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lun_is_told_by_a_url() {
        let at = "127.0.0.1:10830".parse().unwrap();
        let url = "iscsi://127.0.0.1:10830/iqn.2026-11.rblk-bench:target/1";
        assert_eq!(Tgt::url(at), url);
    }
}
