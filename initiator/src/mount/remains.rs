//! What a mount leaves on disk for whoever comes after it, should its process die.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::socket::RUN_DIR;
use crate::ublk::{Control, DeviceState, UblkError};

/// Time for a dead mount's device to go away.
const STOP_DEADLINE: Duration = Duration::from_secs(30);

/// Removes what a mount of that name left when its process died: its ublk device and its note. Returns
/// whether there was anything.
///
/// # Errors
/// The device cannot be removed.
pub fn sweep(control: &mut Control, name: &str) -> Result<bool, UblkError> {
    let Some(remains) = Remains::read(name) else { return Ok(false) };
    match control.info(remains.device_id) {
        // Another server's device has the number by now.
        Ok(info) if info.server_pid.is_some_and(|pid| i64::from(pid) != i64::from(remains.pid)) => {
        }
        Ok(info) => {
            if info.state == DeviceState::Live {
                control.stop(info.id, STOP_DEADLINE)?;
            }
            control.delete(info.id, STOP_DEADLINE)?;
            tracing::info!(device = info.id, "removed the device of a dead mount");
        }
        Err(UblkError::NoSuchDevice { .. }) => {}
        Err(error) => return Err(error),
    }
    Remains::remove(name);
    Ok(true)
}

/// What a mount leaves on disk so that its device can be removed when it dies.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Remains {
    /// Its process.
    pub pid: u32,
    /// Its ublk device.
    pub device_id: u32,
}

impl Remains {
    fn path(name: &str) -> PathBuf {
        Path::new(RUN_DIR).join(format!("{name}.json"))
    }

    /// Notes them for a mount, until the result is dropped.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, name: &str) -> io::Result<Noted> {
        let new = Self::path(name).with_extension("new");
        std::fs::write(&new, serde_json::to_vec(self).map_err(io::Error::other)?)?;
        std::fs::rename(new, Self::path(name))?;
        Ok(Noted(name.to_owned()))
    }

    /// Those of a mount, if it left any.
    #[must_use]
    pub fn read(name: &str) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(Self::path(name)).ok()?).ok()
    }

    /// Forgets them.
    pub fn remove(name: &str) {
        let _ = std::fs::remove_file(Self::path(name));
    }
}

/// The note of a living mount; goes with it when it ends in good order.
#[derive(Debug)]
pub struct Noted(String);

impl Drop for Noted {
    fn drop(&mut self) {
        Remains::remove(&self.0);
    }
}
