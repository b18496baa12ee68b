//! NBD: nbdkit's `memory` plugin behind the kernel's own client. Only an unused device is taken,
//! and only that one is given back.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::server::{NbdSocket, Server};
use crate::child;

const LIMIT: Duration = Duration::from_secs(20);
const BLOCK_BYTES: u32 = 4096;
const DEVICES_MAX: u32 = 256;

/// A server and the device on it. Dropped, both are gone.
#[derive(Debug)]
pub(crate) struct Nbd {
    // The device goes first: with its server gone it would only fail.
    device: Device,
    server: Server,
}

#[derive(Debug)]
struct Device {
    path: PathBuf,
}

impl Nbd {
    /// Serves `bytes` of zeroes at `at`, and connects a free device to them by `queues`
    /// connections. nbdkit ends with the thread that calls this.
    pub(super) fn start(at: SocketAddr, queues: u16, bytes: u64, tag: &str) -> Result<Self> {
        ensure!(child::is_installed("nbd-client"), "there is no nbd-client: install it");
        let server = Server::nbd(None, &NbdSocket::Tcp(at), bytes, tag)?;
        let device = Device::connect(at, queues)?;
        let sectors = attribute(&device.path, "size");
        ensure!(
            sectors == Some(bytes / 512),
            "{} has {sectors:?} sectors instead of {}",
            device.path.display(),
            bytes / 512
        );
        Ok(Self { device, server })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.device.path
    }

    pub(super) fn server_pid(&self) -> u32 {
        self.server.pid()
    }
}

impl Device {
    fn connect(at: SocketAddr, queues: u16) -> Result<Self> {
        ensure!(
            Path::new("/sys/block/nbd0").exists(),
            "there is no /sys/block/nbd0: `modprobe nbd` makes it"
        );
        let mut last = None;
        for number in 0..DEVICES_MAX {
            let path = PathBuf::from(format!("/dev/nbd{number}"));
            if !path.exists() {
                break;
            }
            if is_connected(&path) {
                continue;
            }
            let mut command = Command::new("nbd-client");
            command.args([at.ip().to_string(), at.port().to_string()]).arg(&path);
            command.args(["-C", &queues.to_string(), "-b", &BLOCK_BYTES.to_string()]);
            // Another program may have taken it meanwhile: then there is the next one.
            match child::output(&mut command, LIMIT) {
                Ok(_) => {
                    let device = Self { path };
                    child::until(LIMIT, || attribute(&device.path, "size").filter(|s| *s > 0))
                        .with_context(|| {
                            format!("{} has no size after {LIMIT:?}", device.path.display())
                        })?;
                    return Ok(device);
                }
                Err(error) if !is_connected(&path) => return Err(error),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| anyhow!("no free /dev/nbdN")))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(error) = disconnect(&self.path) {
            eprintln!("rblk-bench: {error:#}");
        }
    }
}

/// Disconnects a device, if it is there and connected.
pub(crate) fn disconnect(device: &Path) -> Result<()> {
    if !is_connected(device) {
        return Ok(());
    }
    let mut command = Command::new("nbd-client");
    let told = child::output_uninterrupted(command.arg("-d").arg(device), LIMIT);
    match child::until(LIMIT, || (!is_connected(device)).then_some(())) {
        Some(()) => Ok(()),
        None => {
            told?;
            bail!("{} is still connected after {LIMIT:?}", device.display())
        }
    }
}

/// Whether a device has a client: the kernel names the process that made it one.
fn is_connected(device: &Path) -> bool {
    let Some(name) = device.file_name() else { return false };
    Path::new("/sys/block").join(name).join("pid").exists()
}

fn attribute(device: &Path, name: &str) -> Option<u64> {
    let place = Path::new("/sys/block").join(device.file_name()?).join(name);
    std::fs::read_to_string(place).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests;
