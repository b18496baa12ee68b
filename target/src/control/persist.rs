//! [`Persister`]: makes changes of holders durable for control, and brings back what became of
//! each. The start is here too: what earlier runs remembered, and which volumes have another store
//! now.

use std::path::Path;

use anyhow::Context;
use tokio::sync::mpsc;

use super::Parts;
use super::core::Ticket;
use crate::holders::file::HoldersFile;
use crate::holders::{HolderRecord, Holders, Served, VolumeUuid};
use crate::store::StoreIdentity;
use crate::verifier::{Beside, LineageFile};
use crate::volume::Placement;

/// What became of a change: durable, or why it may not be.
pub(super) type Persisted = (Ticket, Result<(), String>);

/// Where changes of holders go.
#[derive(Debug)]
pub(super) struct Persister {
    // `None` where nothing can be remembered.
    file: Option<HoldersFile>,
    persisted: mpsc::UnboundedReceiver<Persisted>,
}

impl Persister {
    /// Reads what earlier runs remembered, and keeps it from now on. Returns the holders to start
    /// with.
    ///
    /// # Errors
    /// The file of the holders is there and cannot be read, or the system has no thread left for
    /// it.
    pub(super) fn open(parts: &Parts) -> anyhow::Result<(Self, Holders)> {
        let (confirmed, persisted) = mpsc::unbounded_channel();
        let (mut holders, path) = match parts.lineage.beside("holders") {
            // Where the file cannot be replaced, every change of a holder is refused, so a host
            // that was fenced stays fenced.
            Beside::Ours(path) => (remembered(&path, &parts.lineage)?, Some(path)),
            Beside::Foreign(path) => (remembered(&path, &parts.lineage)?, None),
            Beside::Nothing => (HoldersFile::nothing(), None),
        };
        let changed = compare_stores(&mut holders, parts);
        let has_store = parts.volumes.iter().any(|v| matches!(v.placement, Placement::Store));
        if path.is_none() && has_store {
            tracing::warn!(
                "cannot remember who holds the volumes (state_dir): after the next start of this target an initiator \
                 that comes back is let in, even if another held its volume meanwhile"
            );
        }
        let confirm = Box::new(move |number, result| {
            // An error means that control has ended, and nothing waits for the answer.
            let _ = confirmed.send((Ticket(number), result));
        });
        let file =
            path.map(|path| HoldersFile::keep(path, &holders, changed, confirm)).transpose()?;
        Ok((Self { file, persisted }, holders))
    }

    /// Begins to make a record durable. Returns the outcome if it is known at once; else it comes
    /// from [`Self::next`].
    pub(super) fn persist(
        &self,
        ticket: Ticket,
        record: HolderRecord,
    ) -> Option<Result<(), String>> {
        match &self.file {
            // Nothing has to be remembered, or nothing can be. The log said so at the start.
            None => Some(Ok(())),
            Some(file) if file.write(ticket.0, record) => None,
            Some(_) => Some(Err("its thread is gone".to_owned())),
        }
    }

    /// Remembers, soon, from which store a volume is served.
    pub(super) fn serve(&self, volume: VolumeUuid, store: Option<StoreIdentity>) {
        if let Some(file) = &self.file {
            file.serve(volume, store);
        }
    }

    /// The next change that is durable, or failed. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<Persisted> {
        self.persisted.recv().await
    }
}

/// What earlier runs remembered of the holders.
fn remembered(path: &Path, lineage: &LineageFile) -> anyhow::Result<Holders> {
    let holders = HoldersFile::read(path).with_context(|| {
        format!(
            "cannot read {}, which says who may write to the volumes: let this target read it, or put back what was \
             there (state_dir); only without the file does it start as if no host had ever held them, and fences every \
             mount that comes back",
            path.display()
        )
    })?;
    if holders.is_none() && lineage.is_inherited() {
        tracing::error!(
            path = %path.display(),
            "the file that remembers the holders of the volumes is gone: every mount that comes back is refused \
             (fenced) and has to be mounted anew. If the file was moved away, stop this target and put it back"
        );
    }
    Ok(match holders {
        Some(holders) => holders,
        // Earlier runs may have given generations that this run does not know.
        None if lineage.is_inherited() => HoldersFile::missing(),
        None => Holders::durable([]),
    })
}

/// Fences the mounts of volumes that have another file or device than before. Returns whether there
/// is anything new to remember.
fn compare_stores(holders: &mut Holders, parts: &Parts) -> bool {
    let mut changed = false;
    for (uuid, store) in &parts.stores {
        let served = holders.serve(*uuid, store.as_ref());
        changed |= served != Served::AsBefore;
        let volume = parts.volumes.iter().find(|volume| volume.uuid == *uuid);
        if let (Served::Replaced, Some(volume)) = (served, volume) {
            let path = parts.volume_notes.get(volume.name.as_str()).and_then(|n| n.path.as_deref());
            tracing::error!(
                volume = %volume.name,
                path,
                "this is another file or device than the one this volume was served from before: a mount that comes \
                 back is refused (fenced), since its caches belong to the other one. Unmount it and mount it again; if \
                 the path is wrong, stop this target and put the old store back"
            );
        }
    }
    changed
}
