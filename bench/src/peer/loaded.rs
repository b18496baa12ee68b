//! [`Loaded`]: the kernel modules that a run loaded. Each is in the journal before it is loaded, so
//! that it is unloaded at the end.

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::module::{is_there, load, with_dependencies};
use super::undo::{Journal, Step, Undo};
use crate::child;

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
