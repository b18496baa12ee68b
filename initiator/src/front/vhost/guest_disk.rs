//! [`GuestDisk`]: the disk as the guest sees it: features and configuration space. Pure.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::guest_request::{ID_BYTES, RANGE_SECTORS_MAX, RANGES_MAX};

/// VHOST_USER_F_PROTOCOL_FEATURES.
pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
/// Bytes of the configuration in use.
const CONFIG_BYTES: usize = 60;
/// Limit of the pieces of one request: as many as QEMU's own disk takes with a ring of 128
/// requests.
const PIECES_MAX: u32 = 126;
const SECTOR: u64 = 512;

/// The disk as the guest sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GuestDisk {
    /// Bytes of the volume.
    pub(crate) size_bytes: u64,
    /// Bytes of a block.
    pub(crate) block: u32,
    /// The disk refuses writes.
    pub(crate) read_only: bool,
    /// Writes need a flush to be durable.
    pub(crate) volatile_cache: bool,
    /// Bytes of a unit that a DISCARD frees; `None`: a DISCARD frees nothing.
    pub(crate) discard: Option<u32>,
    /// The disk zeroes ranges.
    pub(crate) write_zeroes: bool,
    /// Limit of the bytes that are moved at once.
    pub(crate) max_io: u32,
    /// The number of rings.
    pub(crate) queues: u16,
    /// The name.
    pub(crate) id: [u8; ID_BYTES],
}

impl GuestDisk {
    /// The disk's name: the first bytes of the volume's.
    pub(crate) fn id_of(volume: &str) -> [u8; ID_BYTES] {
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(volume.bytes()) {
            *to = from;
        }
        id
    }

    /// The features offered to the guest.
    pub(super) fn features(&self) -> u64 {
        let bit = |number: u32| 1u64 << number;
        let always = bit(VIRTIO_F_VERSION_1)
            | bit(VIRTIO_RING_F_EVENT_IDX)
            | bit(VIRTIO_RING_F_INDIRECT_DESC)
            | bit(VIRTIO_BLK_F_SEG_MAX)
            | bit(VIRTIO_BLK_F_BLK_SIZE)
            | bit(VIRTIO_BLK_F_TOPOLOGY)
            | bit(VIRTIO_BLK_F_MQ)
            | PROTOCOL_FEATURES;
        let when = |has: bool, number| if has { bit(number) } else { 0 };
        always
            | when(self.read_only, VIRTIO_BLK_F_RO)
            | when(self.volatile_cache, VIRTIO_BLK_F_FLUSH)
            | when(self.discard.is_some() && !self.read_only, VIRTIO_BLK_F_DISCARD)
            | when(self.write_zeroes && !self.read_only, VIRTIO_BLK_F_WRITE_ZEROES)
    }

    /// Whether a guest with these features makes its writes durable itself.
    pub(super) fn is_flushed(features: u64) -> bool {
        features & (1 << VIRTIO_BLK_F_FLUSH) != 0
    }

    /// Whether rings request notifications by event index.
    pub(super) fn has_event_index(features: u64) -> bool {
        features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0
    }

    /// A part of the configuration space (virtio 1.3, 5.2.4): zeros outside the fields in use.
    pub(super) fn config(&self, offset: usize, len: usize) -> Vec<u8> {
        let all = self.config_space();
        (offset..offset.saturating_add(len)).map(|at| all.get(at).copied().unwrap_or(0)).collect()
    }

    fn config_space(&self) -> [u8; CONFIG_BYTES] {
        let mut space = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.size_bytes / SECTOR).to_le_bytes());
        put(12, &PIECES_MAX.to_le_bytes());
        put(20, &self.block.to_le_bytes());
        // Blocks in a physical block, as a power of two: file systems should use whole pages.
        let physical = self.block.max(4096) / self.block.max(1);
        put(24, &[physical.ilog2().to_le_bytes()[0], 0]);
        let blocks = u16::try_from(physical).unwrap_or(1);
        put(26, &blocks.to_le_bytes());
        put(28, &(self.max_io / self.block.max(1)).to_le_bytes());
        // Whether writes go to a cache.
        put(32, &[u8::from(self.volatile_cache)]);
        put(34, &self.queues.to_le_bytes());
        if let Some(granularity) = self.discard {
            put(36, &RANGE_SECTORS_MAX.to_le_bytes());
            put(40, &RANGES_MAX.to_le_bytes());
            put(44, &(granularity / 512).max(1).to_le_bytes());
        }
        if self.write_zeroes {
            put(48, &RANGE_SECTORS_MAX.to_le_bytes());
            put(52, &RANGES_MAX.to_le_bytes());
            put(56, &[u8::from(self.discard.is_some())]);
        }
        space
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> GuestDisk {
        GuestDisk {
            size_bytes: 1 << 30,
            block: 512,
            read_only: false,
            volatile_cache: true,
            discard: Some(4096),
            write_zeroes: true,
            max_io: 256 << 10,
            queues: 3,
            id: GuestDisk::id_of("a volume with quite a long name"),
        }
    }

    #[test]
    fn the_configuration_describes_the_disk() {
        let number = |at, len| {
            disk().config(at, len).iter().rev().fold(0u64, |all, byte| all << 8 | u64::from(*byte))
        };
        assert_eq!((number(0, 8), number(20, 4), number(34, 2)), (2 << 20, 512, 3));
        assert_eq!((number(24, 1), number(26, 2), number(28, 4)), (3, 8, 512));
        assert_eq!((number(44, 4), number(56, 1)), (8, 1));
        assert_eq!(disk().config(58, 9), [0; 9], "beyond its end");
        assert_eq!(disk().config(u32::MAX as usize, 1), [0]);
        assert_eq!(&disk().id, b"a volume with quite ");
    }

    #[test]
    fn a_disk_that_refuses_writes_offers_none() {
        let has = |disk: GuestDisk, number: u32| disk.features() & (1 << number) != 0;
        let read_only = GuestDisk { read_only: true, ..disk() };
        for number in [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES] {
            assert!(has(disk(), number) && !has(read_only, number));
        }
        assert!(has(read_only, VIRTIO_BLK_F_RO) && !has(disk(), VIRTIO_BLK_F_RO));
        assert!(!has(GuestDisk { volatile_cache: false, ..disk() }, VIRTIO_BLK_F_FLUSH));
    }
}
