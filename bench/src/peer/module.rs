//! Kernel modules: loaded with their dependencies, and unloaded.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::child;

const LIMIT: Duration = Duration::from_secs(30);
/// Time for a module's last users to let go.
const USERS: Duration = Duration::from_secs(10);

pub(crate) fn is_there(name: &str) -> bool {
    Path::new("/sys/module").join(file_name(name)).exists()
}

pub(super) fn load(name: &str, parameters: &[&str]) -> Result<()> {
    let mut command = Command::new("modprobe");
    child::output(command.arg(name).args(parameters), LIMIT)
        .with_context(|| format!("this kernel has no {name} and cannot load it"))?;
    Ok(())
}

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

/// A module and its dependencies, in the order of loading.
pub(super) fn with_dependencies(name: &str) -> Result<Vec<String>> {
    let mut command = Command::new("modprobe");
    let text = child::output(command.args(["--show-depends", name]), LIMIT)
        .with_context(|| format!("this kernel has no {name}, and there is no such module"))?;
    Ok(insertions(&text))
}

/// The names in lines such as `insmod /lib/modules/7.2/kernel/drivers/block/brd.ko.xz rd_nr=4`.
fn insertions(text: &str) -> Vec<String> {
    let paths = text.lines().filter_map(|line| line.strip_prefix("insmod ")?.split(' ').next());
    paths.filter_map(|path| Some(file_name(path.rsplit('/').next()?.split('.').next()?))).collect()
}

fn file_name(name: &str) -> String {
    name.replace('-', "_")
}

#[cfg(test)]
mod tests;
