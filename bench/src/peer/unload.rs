//! Unloading kernel modules.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::child;

const LIMIT: Duration = Duration::from_secs(30);
/// Time for a module's last users to let go.
const USERS: Duration = Duration::from_secs(10);

/// Unloads modules, those that need others first. One that is in use is given some time.
pub(super) fn unload(names: &[String]) -> Result<()> {
    for name in names.iter().rev() {
        let dir = Path::new("/sys/module").join(file_name(name));
        let deadline = Instant::now() + USERS;
        // Parts of the kernel have no such file.
        while let Ok(users) = std::fs::read_to_string(dir.join("refcnt")) {
            if users.trim() == "0" {
                child::output_uninterrupted(Command::new("rmmod").arg(name), LIMIT)?;
                break;
            }
            if Instant::now() > deadline {
                bail!("the module {name} is still in use ({} users)", users.trim());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

/// The name of a module in `/sys/module`.
pub(super) fn file_name(name: &str) -> String {
    name.replace('-', "_")
}
