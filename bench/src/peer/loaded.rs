//! [`Loaded`]: kernel modules, loaded with their dependencies.

use std::cell::RefCell;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::undo::{Journal, Step, Undo};
use super::unload::file_name;
use crate::child;

const LIMIT: Duration = Duration::from_secs(30);

/// The modules that a run loaded. Several systems need the same ones, so they stay until this is
/// dropped; then they are unloaded, the last one first.
#[derive(Debug)]
pub(crate) struct Loaded {
    journal: Journal,
    undos: RefCell<Vec<Undo>>,
}

impl Loaded {
    pub(crate) fn new(journal: &Journal) -> Self {
        Self { journal: journal.clone(), undos: RefCell::default() }
    }

    pub(crate) fn ensure(&self, name: &str, parameters: &[&str]) -> Result<()> {
        if is_there(name) {
            return Ok(());
        }
        let names = with_dependencies(name)?.into_iter().filter(|name| !is_there(name)).collect();
        let undo = self.journal.note(Step::Modules { names })?;
        load(name, parameters)?;
        self.undos.borrow_mut().push(undo);
        Ok(())
    }

    /// Makes sure that there is a ublk driver.
    pub(crate) fn ensure_ublk(&self) -> Result<()> {
        let control = Path::new("/dev/ublk-control");
        if !control.exists() {
            self.ensure("ublk_drv", &[])?;
        }
        child::until(Duration::from_secs(5), || control.exists().then_some(()))
            .context("there is no /dev/ublk-control")
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        while let Some(undo) = self.undos.get_mut().pop() {
            drop(undo);
        }
    }
}

fn is_there(name: &str) -> bool {
    Path::new("/sys/module").join(file_name(name)).exists()
}

fn load(name: &str, parameters: &[&str]) -> Result<()> {
    let mut command = Command::new("modprobe");
    child::output(command.arg(name).args(parameters), LIMIT)
        .with_context(|| format!("this kernel has no {name} and cannot load it"))?;
    Ok(())
}

/// A module and its dependencies, in the order of loading.
fn with_dependencies(name: &str) -> Result<Vec<String>> {
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

#[cfg(test)]
mod tests;
