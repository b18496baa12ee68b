//! [`QueueWish`]: what one I/O queue asks a target for.

use rblk_fabric::DeviceCaps;
use rblk_protocol::{Features, QueueDepth, limits};

/// The queue by which writes are written again. Its number is above those of all queues and lanes
/// that a mount can have.
pub const REPLAY_QUEUE: u16 = limits::MOUNT_QPS_MAX;
const _: () = assert!(REPLAY_QUEUE < limits::QUEUES_MAX, "targets refuse others");

/// Lists of capsules, in every form that this version knows. A queue asks for them unless it has a
/// reason not to.
pub(crate) const LISTS: Features = Features(Features::CAPSULE_LISTS.0 | Features::DATA_LISTS.0);

/// What one I/O queue asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueWish {
    /// Commands outstanding.
    pub depth: QueueDepth,
    /// Most data per command.
    pub io_max_bytes: u32,
    /// In-capsule data.
    pub in_capsule_bytes: u32,
    /// Optional verbs to try.
    pub features: Features,
    /// QPs of each queue; if absent, as many as the device profits from. A queue gets fewer where
    /// the target has no room for them.
    pub lanes: Option<u16>,
    /// Queues of the session: lanes other than the first are numbered behind them.
    pub queues: u16,
}

impl QueueWish {
    /// How many lanes to try on such a device. A card serves one QP with all its power. A software
    /// device has a kernel thread for each QP, and one thread moves less than its host can.
    ///
    /// All queues have as many lanes, and none has the number of the [`REPLAY_QUEUE`]. A
    /// configuration was checked for that; a number from elsewhere is lowered.
    pub(super) fn lanes(&self, caps: &DeviceCaps) -> u16 {
        let wanted = self.lanes.unwrap_or(if caps.kernel_software { 2 } else { 1 });
        let room = limits::MOUNT_QPS_MAX / self.queues.max(1);
        wanted.min(room).clamp(1, limits::LANES_MAX)
    }

    /// The number of a lane among the queues of the session.
    pub(super) fn number(&self, queue: u16, lane: u16) -> u16 {
        queue.saturating_add(lane.saturating_mul(self.queues))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn lanes_have_numbers_of_their_own_and_all_queues_as_many() {
        let card = rblk_fabric::soft::Device::tcp().caps().clone();
        let played = DeviceCaps { kernel_software: true, ..card.clone() };
        let wish = |queues, lanes| QueueWish {
            depth: QueueDepth::new(1).unwrap(),
            io_max_bytes: limits::IO_MIN_BYTES,
            in_capsule_bytes: 0,
            features: Features::default(),
            lanes,
            queues,
        };
        for (queues, lanes, on_card, on_played) in [
            (4, None, 1, 2),
            (31, None, 1, 2),
            (32, None, 1, 1),
            (63, None, 1, 1),
            (4, Some(1), 1, 1),
            (15, Some(4), 4, 4),
            // Not from a configuration.
            (16, Some(4), 3, 3),
            (1, Some(9), limits::LANES_MAX, limits::LANES_MAX),
        ] {
            let wish = wish(queues, lanes);
            let found = (wish.lanes(&card), wish.lanes(&played));
            assert_eq!(found, (on_card, on_played), "{queues} queues, {lanes:?}");
            let numbers: HashSet<u16> = (0..queues)
                .flat_map(|queue| (0..wish.lanes(&played)).map(move |lane| (queue, lane)))
                .map(|(queue, lane)| wish.number(queue, lane))
                .collect();
            assert_eq!(numbers.len(), usize::from(queues * on_played), "each once");
            assert!(numbers.iter().all(|number| *number < REPLAY_QUEUE), "{numbers:?}");
        }
    }
}
