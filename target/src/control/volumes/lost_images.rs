//! [`LostImages`]: the images that other clients have taken while their volumes were served.
//!
//! An image reports its loss once, from a thread of its own or from a poll group. The poll groups
//! end the connections of the volume at once. The volume itself goes by a change, which waits for
//! the one under way.

use tokio::sync::mpsc;

use crate::store::OpenStore;
use crate::volume::ids::VolumeIndex;

/// An image that is lost, and the reason.
pub(in crate::control) type LostImage = (VolumeIndex, String);

/// See the module.
#[derive(Debug)]
pub(super) struct LostImages {
    reports: (mpsc::UnboundedSender<LostImage>, mpsc::UnboundedReceiver<LostImage>),
    // Volumes that are to go.
    waiting: Vec<VolumeIndex>,
}

impl LostImages {
    /// None is lost.
    pub(super) fn new() -> Self {
        Self { reports: mpsc::unbounded_channel(), waiting: Vec::new() }
    }

    /// Learns of the loss of a store. Files and devices are never lost.
    pub(super) fn listen_to(&self, volume: VolumeIndex, store: &OpenStore) {
        if let Some(image) = store.image() {
            let reports = self.reports.0.clone();
            // An error means that control has ended.
            image.on_loss(move |why| drop(reports.send((volume, why.to_owned()))));
        }
    }

    /// The next report. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<LostImage> {
        self.reports.1.recv().await
    }

    /// Notes a volume that is to go.
    pub(super) fn add(&mut self, volume: VolumeIndex) {
        self.waiting.push(volume);
    }

    /// The volumes that are to go.
    pub(super) fn waiting(&self) -> &[VolumeIndex] {
        &self.waiting
    }

    /// A volume goes, or is gone.
    pub(super) fn remove(&mut self, volume: VolumeIndex) {
        self.waiting.retain(|waiting| *waiting != volume);
    }
}
