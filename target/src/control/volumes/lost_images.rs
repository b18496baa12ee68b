//! [`LostImages`]: the images that other clients have taken while their volumes were served.
//!
//! An image reports its loss once, from a thread of its own or from a poll group. The poll groups
//! end the connections of the volume at once. When all of them have done so, and not before, they
//! let the ops of the image end: a poll group answers its hosts with the results of another's ops.
//! The volume itself goes by a change, which waits for the one under way.

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
    // Lost volumes, each with the poll groups that do not know of it yet.
    unknown: Vec<(VolumeIndex, Vec<usize>)>,
}

impl LostImages {
    /// None is lost.
    pub(super) fn new() -> Self {
        Self { reports: mpsc::unbounded_channel(), waiting: Vec::new(), unknown: Vec::new() }
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

    /// Notes a volume that is to go. These poll groups are told now.
    pub(super) fn add(&mut self, volume: VolumeIndex, told: Vec<usize>) {
        self.waiting.push(volume);
        self.unknown.push((volume, told));
    }

    /// A poll group knows that a volume is lost, or has ended (`None`) and answers nothing at all.
    /// Returns the volumes that no poll group answers for any more.
    pub(super) fn knows(&mut self, group: usize, volume: Option<VolumeIndex>) -> Vec<VolumeIndex> {
        for (lost, unknowing) in &mut self.unknown {
            if volume.is_none_or(|volume| volume == *lost) {
                unknowing.retain(|other| *other != group);
            }
        }
        let known = self.unknown.extract_if(.., |(_, unknowing)| unknowing.is_empty());
        known.map(|(lost, _)| lost).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    const V: VolumeIndex = VolumeIndex(3);
    const W: VolumeIndex = VolumeIndex(4);

    #[test]
    fn a_loss_is_known_when_every_poll_group_knows_it_or_has_ended() {
        let mut lost = LostImages::new();
        lost.add(V, vec![0, 1, 2]);
        lost.add(W, vec![1, 2]);
        assert_eq!(lost.knows(1, Some(V)), []);
        assert_eq!(lost.knows(1, Some(V)), [], "each counts once");
        assert_eq!(lost.knows(0, Some(V)), []);
        assert_eq!(lost.knows(1, Some(W)), []);
        assert_eq!(lost.knows(2, None), [V, W], "it has ended");
        assert_eq!(lost.knows(2, None), [], "each is told once");
        assert_eq!(lost.waiting(), [V, W]);
    }
}
