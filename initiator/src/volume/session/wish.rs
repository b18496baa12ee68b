//! [`QueueWish`]: the values that one I/O queue requests from a target.

use rblk_config::DigestWish;
use rblk_fabric::{DeviceCaps, Transport};
use rblk_protocol::width::wide;
use rblk_protocol::{Features, QueueDepth, limits};

/// The queue of a replay. Its number is above those of all queues and lanes of a mount.
pub const REPLAY_QUEUE: u16 = limits::MOUNT_QPS_MAX;
const _: () = assert!(REPLAY_QUEUE < limits::QUEUES_MAX, "targets refuse others");

/// The best form of messages in this version. A queue asks for it unless it has a reason not to.
pub(crate) const MESSAGES: Features =
    Features(Features::CAPSULE_LISTS.0 | Features::DATA_LISTS.0 | Features::DATA_FIRST.0);

/// The wish of one I/O queue.
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
    /// Whether to ask for digests.
    pub digest: DigestWish,
    /// QPs of each queue; if absent, as many as benefit the device. A queue gets fewer if the
    /// target has no room for them.
    pub lanes: Option<u16>,
    /// Queues of the session: lanes other than the first are numbered after them.
    pub queues: u16,
}

impl QueueWish {
    /// The number of lanes to try on a device. A card gives one QP its full speed. A software
    /// device has a kernel thread for each QP, and one thread moves less than the host can.
    ///
    /// All queues have that many lanes, and none has the number of the [`REPLAY_QUEUE`]. The
    /// configuration was checked for that; a number from another source is lowered.
    pub(super) fn lanes(&self, caps: &DeviceCaps) -> u16 {
        let wanted = self.lanes.unwrap_or(if caps.kernel_software { 2 } else { 1 });
        let room = limits::MOUNT_QPS_MAX / self.queues.max(1);
        wanted.min(room).clamp(1, limits::LANES_MAX)
    }

    /// Whether the session may ask for digests on some device.
    fn may_have_digests(&self) -> bool {
        self.digest != DigestWish::Off && self.io_max_bytes <= limits::DIGEST_IO_MAX_BYTES
    }

    /// Whether to ask for digests on a device: where only software and a 16-bit checksum protect
    /// data on the way.
    pub(super) fn asks_for_digests(&self, caps: &DeviceCaps) -> bool {
        let stream = matches!(caps.transport, Transport::SoftTcp | Transport::SoftMemory);
        let needs = caps.kernel_software || stream;
        self.may_have_digests() && (self.digest == DigestWish::Crc32c || needs)
    }

    /// Bytes from the buffer of one tag to the buffer of the next: the data, and a page for the
    /// trailer of a READ if digests are possible. The data begins at a page.
    #[must_use]
    pub fn buffer_stride(&self) -> usize {
        let room = if self.may_have_digests() { wide(limits::IO_MIN_BYTES) } else { 0 };
        wide(self.io_max_bytes) + room
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
    fn digests_are_asked_for_where_only_software_checks_data() {
        let stream = rblk_fabric::soft::Device::tcp().caps().clone();
        let card = DeviceCaps { transport: Transport::Roce, ..stream.clone() };
        let rxe = DeviceCaps { kernel_software: true, ..card.clone() };
        let siw = DeviceCaps { transport: Transport::Iwarp, ..rxe.clone() };
        let wish = |digest, io_max_bytes| QueueWish {
            depth: QueueDepth::new(1).unwrap(),
            io_max_bytes,
            in_capsule_bytes: 0,
            features: Features::default(),
            digest,
            lanes: None,
            queues: 1,
        };
        for (digest, on_card, elsewhere, room) in [
            (DigestWish::Auto, false, true, 4096),
            (DigestWish::Crc32c, true, true, 4096),
            (DigestWish::Off, false, false, 0),
        ] {
            let small = wish(digest, 1 << 20);
            assert_eq!(small.asks_for_digests(&card), on_card, "{digest}");
            for caps in [&stream, &rxe, &siw] {
                assert_eq!(small.asks_for_digests(caps), elsewhere, "{digest} on {caps:?}");
            }
            assert_eq!(small.buffer_stride(), (1 << 20) + room);
            let large = wish(digest, 2 << 20);
            assert!(!large.asks_for_digests(&stream));
            assert_eq!(large.buffer_stride(), 2 << 20, "no room for what is not asked for");
        }
    }

    #[test]
    fn lanes_have_numbers_of_their_own_and_all_queues_as_many() {
        let card = rblk_fabric::soft::Device::tcp().caps().clone();
        let played = DeviceCaps { kernel_software: true, ..card.clone() };
        let wish = |queues, lanes| QueueWish {
            depth: QueueDepth::new(1).unwrap(),
            io_max_bytes: limits::IO_MIN_BYTES,
            in_capsule_bytes: 0,
            features: Features::default(),
            digest: DigestWish::Auto,
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
            // A number from another source than a configuration.
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
