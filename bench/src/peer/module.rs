//! Kernel modules: whether one is there, loading and unloading.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::child;

/// How long loading or unloading one may take.
const LIMIT: Duration = Duration::from_secs(30);
/// How long a module's last users may take to let go.
const USERS: Duration = Duration::from_secs(10);

/// Whether a module is loaded or a part of the kernel.
#[must_use]
pub fn is_there(name: &str) -> bool {
    Path::new("/sys/module").join(file_name(name)).exists()
}

/// Loads a module.
///
/// # Errors
/// The module cannot be loaded.
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

/// A module and what it needs, in the order of loading.
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

/// A module's name as sysfs writes it.
fn file_name(name: &str) -> String {
    name.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_from_paths() {
        let text = "insmod /lib/modules/7.2/kernel/drivers/nvme/common/nvme-keyring.ko.xz \n\
                    builtin x\ninsmod /lib/modules/7.2/kernel/drivers/nvme/target/nvmet.ko a=b\n";
        assert_eq!(insertions(text), ["nvme_keyring", "nvmet"]);
    }
}
