//! [`StoreWorks`]: the work of changes at the stores of volumes, by threads that may block.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::data::poll_group::{StepTicket, VolumeStep};
use crate::pool::reflink::CloneFile;
use crate::store::{Backing, OpenStore};
use crate::volume::{Placement, Volume};

/// The end of work at a store.
pub(in crate::control) type StoreDone = (StepTicket, Result<StoreWork, String>);

/// The work that was done at a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::control) enum StoreWork {
    /// The store has its new size. The former length, if the file was made longer.
    Sized(Option<u64>),
    /// The file is as long as before; or (false) writes have reached past that length.
    CutBack(bool),
    /// The file is cloned, or can be.
    Cloned,
}

/// See the module.
#[derive(Debug)]
pub(super) struct StoreWorks {
    ended: (mpsc::UnboundedSender<StoreDone>, mpsc::UnboundedReceiver<StoreDone>),
}

impl StoreWorks {
    /// None is under way.
    pub(super) fn new() -> Self {
        Self { ended: mpsc::unbounded_channel() }
    }

    /// The next work that ended. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<StoreDone> {
        self.ended.1.recv().await
    }

    fn begin(
        &self,
        ticket: StepTicket,
        work: impl FnOnce() -> Result<StoreWork, String> + Send + 'static,
    ) {
        let ended = self.ended.0.clone();
        // An error means that control has ended.
        tokio::task::spawn_blocking(move || drop(ended.send((ticket, work()))));
    }

    /// Gives the store of a volume its size, or the new memory of a volume its contents.
    pub(super) fn size(
        &self,
        ticket: StepTicket,
        volume: Arc<Volume>,
        before: Option<Arc<Volume>>,
        backing: Option<OpenStore>,
    ) {
        self.begin(ticket, move || {
            match (&volume.placement, before.as_ref().map(|old| &old.placement)) {
                (Placement::Memory(to), Some(Placement::Memory(from))) => {
                    // No poll group touches either.
                    from.copy_to(0, to, 0, from.len().min(to.len()));
                    Ok(StoreWork::Sized(None))
                }
                _ => backing.map_or(Ok(StoreWork::Sized(None)), |backing| {
                    let work = backing.resize(volume.size_bytes()).map(StoreWork::Sized);
                    work.map_err(|error| error.to_string())
                }),
            }
        });
    }

    /// Gives a file the length that it had before it was made longer.
    pub(super) fn cut_back(&self, ticket: StepTicket, backing: Arc<Backing>, len: u64, size: u64) {
        self.begin(ticket, move || {
            let cut = backing.cut_back(len, size).map(StoreWork::CutBack);
            cut.map_err(|error| error.to_string())
        });
    }

    /// Clones the file of a volume, or tests whether that can be done.
    pub(super) fn clone_file(
        &self,
        ticket: StepTicket,
        step: VolumeStep,
        files: (Option<Arc<CloneFile>>, Option<OpenStore>),
    ) {
        self.begin(ticket, move || {
            let (clone, store) = files;
            let result = match (clone, store.as_ref().and_then(OpenStore::local)) {
                (Some(clone), Some(backing)) if step == VolumeStep::Probe => clone.probe(backing),
                (Some(clone), Some(backing)) => clone.share_all(backing),
                _ => Ok(()),
            };
            result.map(|()| StoreWork::Cloned).map_err(|error| error.to_string())
        });
    }
}
