//! NBD: nbdkit's `memory` plugin behind the kernel's own client.
//!
//! | made | by | removed by |
//! | --- | --- | --- |
//! | a server | `nbdkit -f --exit-with-parent ... memory BYTES` | [`Nbd::stop`], drop, or our end |
//! | a device | `nbd-client ADDRESS PORT /dev/nbdN ...` | the same; after a crash [`disconnect`] |
//!
//! The caller loads the module `nbd`. Only an unused device is taken, and only that one is given
//! back.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::nbd_server::{NbdProgram, NbdServer, NbdSocket};
use crate::child;

/// Deadline of a client command and of what it waits for.
const LIMIT: Duration = Duration::from_secs(20);
/// Block size of the device in bytes, that of the other systems.
const BLOCK_BYTES: u32 = 4096;
/// Most devices looked at.
const DEVICES_MAX: u32 = 256;

/// A server and the device on it. Dropped, both are gone.
#[derive(Debug)]
pub struct Nbd {
    // The device goes first: with its server gone it would only fail.
    device: Device,
    server: NbdServer,
}

/// A connected device. Dropped, it is disconnected.
#[derive(Debug)]
struct Device {
    path: PathBuf,
    connected: bool,
}

impl Nbd {
    /// Serves `bytes` of zeroes at `address` and `port`, and connects a free device to them by
    /// `queues` connections. The server carries `tag` as [`child::TAG`]. The thread that calls this
    /// has to live as long as the server: the end of the one ends the other.
    ///
    /// # Errors
    /// nbdkit, nbd-client or the module is not there; the port is in use; nothing is there in time.
    pub fn start(address: IpAddr, port: u16, queues: u16, bytes: u64, tag: &str) -> Result<Self> {
        ensure!(child::is_installed("nbd-client"), "there is no nbd-client: install it");
        let at = NbdSocket::Tcp(SocketAddr::new(address, port));
        let server = NbdServer::start(&NbdProgram::Nbdkit, &at, bytes, tag)?;
        let device = Device::connect(address, port, queues)?;
        let sectors = attribute(&device.path, "size");
        ensure!(
            sectors == Some(bytes / 512),
            "{} has {sectors:?} sectors instead of {}",
            device.path.display(),
            bytes / 512
        );
        Ok(Self { device, server })
    }

    /// The block device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.device.path
    }

    /// The server's process.
    #[must_use]
    pub fn server_pid(&self) -> u32 {
        self.server.pid()
    }

    /// Disconnects the device and ends the server.
    ///
    /// # Errors
    /// The device does not let go in time. The server is ended all the same.
    pub fn stop(mut self) -> Result<()> {
        self.device.disconnect()
    }
}

impl Device {
    fn connect(address: IpAddr, port: u16, queues: u16) -> Result<Self> {
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
            command.args([&address.to_string(), &port.to_string()]).arg(&path);
            command.args(["-C", &queues.to_string(), "-b", &BLOCK_BYTES.to_string()]);
            // Somebody may have taken it meanwhile: then there is the next one.
            match child::output(&mut command, LIMIT) {
                Ok(_) => {
                    let device = Self { path, connected: true };
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

    fn disconnect(&mut self) -> Result<()> {
        // It is tried once; the drop need not try again.
        if std::mem::take(&mut self.connected) { disconnect(&self.path) } else { Ok(()) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(error) = self.disconnect() {
            eprintln!("rblk-bench: {error:#}");
        }
    }
}

/// Disconnects a device, as after a run that was killed. One that is not connected, or not there,
/// is left alone.
///
/// # Errors
/// It is still connected after 20 s.
pub fn disconnect(device: &Path) -> Result<()> {
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

/// A number in the device's directory.
fn attribute(device: &Path, name: &str) -> Option<u64> {
    let place = Path::new("/sys/block").join(device.file_name()?).join(name);
    std::fs::read_to_string(place).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_connected_devices_are_touched() {
        assert!(!is_connected(Path::new("/dev/no-such-device")));
        assert!(!is_connected(Path::new("/")));
        assert!(disconnect(Path::new("/dev/no-such-device")).is_ok());
        assert_eq!(attribute(Path::new("/dev/no-such-device"), "size"), None);
    }
}
