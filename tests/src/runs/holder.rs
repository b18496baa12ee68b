//! [`Holder`]: a host that writes to volumes, and comes back after each run with its knowledge.

use std::collections::BTreeMap;

use rblk_protocol::WriteVerifier;

use super::{CELLS, HOSTS, VOLUMES};

/// A host's knowledge of a cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Known {
    /// This write was acknowledged, and no FLUSH covered it.
    Acknowledged(u64),
    /// This write is durable.
    Durable(u64),
}

/// A host's knowledge of a volume.
#[derive(Clone, Debug, Default)]
pub struct Claim {
    /// The verifier in the reply to its OPEN.
    pub told: Option<WriteVerifier>,
    /// The count of the volume's account then.
    pub causes: u64,
    /// The host has the volume open in this run.
    pub is_open: bool,
    cells: BTreeMap<usize, Known>,
}

impl Claim {
    /// The known value of each cell.
    pub fn cells(&self) -> impl Iterator<Item = (usize, Known)> {
        self.cells.iter().map(|(at, known)| (*at, *known))
    }

    /// Writes that no FLUSH covered.
    #[must_use]
    pub fn unflushed(&self) -> usize {
        self.cells.values().filter(|known| matches!(known, Known::Acknowledged(_))).count()
    }

    /// A write was answered.
    pub fn answered(&mut self, at: usize, known: Known) {
        self.cells.insert(at, known);
    }

    /// Forgets the value of a cell.
    pub fn forget(&mut self, at: usize) {
        self.cells.remove(&at);
    }

    /// A FLUSH was answered: everything is durable.
    pub fn flushed(&mut self) {
        for known in self.cells.values_mut() {
            let (Known::Acknowledged(value) | Known::Durable(value)) = *known;
            *known = Known::Durable(value);
        }
    }

    /// Forgets unflushed writes, which may be there or not: a loss was reported, or the host begins
    /// again.
    pub fn drop_unflushed(&mut self) {
        self.cells.retain(|_, known| matches!(known, Known::Durable(_)));
    }

    /// Forgets cells beyond the new end of the volume.
    pub fn cut(&mut self, cells: usize) {
        self.cells.retain(|at, _| *at < cells);
    }
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Holder {
    /// By volume.
    pub claims: [Claim; VOLUMES],
}

/// The cells that a host writes to.
pub(super) fn cells_of(host: usize) -> impl Iterator<Item = usize> {
    (host..CELLS).step_by(HOSTS)
}
