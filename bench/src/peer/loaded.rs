//! [`Loaded`]: the kernel modules that a run loaded. Each is in the journal before it is loaded, so
//! that it is unloaded at the end.

use std::cell::RefCell;

use anyhow::Result;

use super::module;
use super::undo::{Journal, Step, Undo};

/// Makes sure that a module is there; `None` when it was before: loaded, or a part of the kernel.
///
/// # Errors
/// It is not there and cannot be loaded.
pub fn ensure(journal: &Journal, name: &str, parameters: &[&str]) -> Result<Option<Undo>> {
    if module::is_there(name) {
        return Ok(None);
    }
    let names = module::with_dependencies(name)?
        .into_iter()
        .filter(|name| !module::is_there(name))
        .collect();
    let undo = journal.note(Step::Modules { names })?;
    module::load(name, parameters)?;
    Ok(Some(undo))
}

/// The modules that a run loaded. Several systems need the same ones, so they stay until this is
/// dropped; then they are unloaded, the last one first.
#[derive(Debug)]
pub struct Loaded {
    journal: Journal,
    undos: RefCell<Vec<Undo>>,
}

impl Loaded {
    /// None yet.
    #[must_use]
    pub fn new(journal: &Journal) -> Self {
        Self { journal: journal.clone(), undos: RefCell::default() }
    }

    /// Makes sure that a module is there: loaded, or a part of the kernel.
    ///
    /// # Errors
    /// It is not there and cannot be loaded.
    pub fn ensure(&self, name: &str, parameters: &[&str]) -> Result<()> {
        self.undos.borrow_mut().extend(ensure(&self.journal, name, parameters)?);
        Ok(())
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        while let Some(undo) = self.undos.get_mut().pop() {
            drop(undo);
        }
    }
}
