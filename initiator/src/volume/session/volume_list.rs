//! LIST: the volumes of a target, page by page. The target is not trusted: the number of entries is
//! bounded, and so is the time of all pages together.

use std::time::{Duration, Instant};

use rblk_protocol::limits::LIST_ENTRIES_MAX;
use rblk_protocol::width::wide;
use rblk_protocol::{VolumeEntry, VolumeListHeader};

use crate::volume::error::SessionError;

const ENDLESS: SessionError = SessionError::Protocol("a list that does not add up");
const LONG: SessionError = SessionError::Protocol("a list of more than 65536 volumes");
const _: () = assert!(LIST_ENTRIES_MAX == 65_536, "the text says so");

/// A list under construction.
#[derive(Debug)]
pub(super) struct VolumeList {
    volumes: Vec<VolumeEntry>,
    deadline: Instant,
}

impl VolumeList {
    /// An empty list, with a time limit for all its pages.
    pub(super) fn new(timeout: Duration, now: Instant) -> Self {
        Self { volumes: Vec::new(), deadline: now + timeout }
    }

    /// The index of the next entry to request.
    pub(super) fn next(&self) -> u64 {
        // At most LIST_ENTRIES_MAX.
        self.volumes.len() as u64
    }

    /// Time left for the next page.
    pub(super) fn left(&self, now: Instant) -> Duration {
        self.deadline.saturating_duration_since(now)
    }

    /// Takes a page. Returns whether the list is complete.
    ///
    /// # Errors
    /// [`SessionError::Protocol`]: the numbers are inconsistent, or an entry breaks a rule.
    pub(super) fn take(&mut self, page: &[u8]) -> Result<bool, SessionError> {
        let (head, rest) = page.split_at_checked(VolumeListHeader::BYTES).ok_or(ENDLESS)?;
        let header = VolumeListHeader::from_wire(head).map_err(SessionError::Protocol)?;
        if header.total > LIST_ENTRIES_MAX {
            return Err(LONG);
        }
        let (entries, total) = (wide(header.entries), wide(header.total));
        // Volumes may have been removed meanwhile: then the list is complete.
        let wanted = total.saturating_sub(self.volumes.len());
        let room = rest.len() / VolumeEntry::BYTES;
        if entries > room || entries > wanted || (entries == 0 && wanted > 0) {
            return Err(ENDLESS);
        }
        for entry in rest.chunks_exact(VolumeEntry::BYTES).take(entries) {
            self.volumes.push(VolumeEntry::from_wire(entry).map_err(SessionError::Protocol)?);
        }
        Ok(entries == wanted)
    }

    /// The volumes.
    pub(super) fn finish(self) -> Vec<VolumeEntry> {
        self.volumes
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{BlockCount, BlockSize, Name, VolumeFlags};

    use super::*;

    fn list() -> VolumeList {
        VolumeList::new(Duration::from_secs(1), Instant::now())
    }

    fn page(total: u32, says: u32, has: usize) -> Vec<u8> {
        let entry = VolumeEntry {
            name: Name::new("v").unwrap(),
            flags: VolumeFlags::default(),
            block_size: BlockSize::new(4096).unwrap(),
            blocks: BlockCount(1),
            uuid: [1; 16],
        };
        let mut page = VolumeListHeader { entries: says, total }.to_wire().to_vec();
        (0..has).for_each(|_| page.extend(entry.to_wire()));
        page
    }

    #[test]
    fn pages_add_up() {
        let mut list = list();
        assert!(!list.take(&page(3, 2, 40)).unwrap());
        assert_eq!(list.next(), 2);
        assert!(list.take(&page(3, 1, 40)).unwrap());
        assert_eq!(list.finish().len(), 3);
    }

    #[test]
    fn a_target_without_volumes_and_one_that_lost_some() {
        assert!(list().take(&page(0, 0, 0)).unwrap());
        let mut list = list();
        assert!(!list.take(&page(3, 2, 2)).unwrap());
        assert!(list.take(&page(1, 0, 0)).unwrap());
        assert_eq!(list.finish().len(), 2);
    }

    #[test]
    fn a_list_that_does_not_add_up_is_an_error() {
        for (total, says, has) in
            [(1, 0, 0), (1, 2, 2), (0, 1, 1), (9, 2, 1), (u32::MAX, 40, 40), (65_537, 40, 40)]
        {
            let error = list().take(&page(total, says, has)).unwrap_err();
            assert!(matches!(error, SessionError::Protocol(_)), "{total} {says} {has}");
        }
        assert!(list().take(&[]).is_err());
        assert!(list().take(&page(1, 1, 1)[..50]).is_err());
    }

    #[test]
    fn a_list_does_not_grow_beyond_its_bound() {
        let mut list = list();
        let full = page(LIST_ENTRIES_MAX, 64, 64);
        for _ in 1..LIST_ENTRIES_MAX / 64 {
            assert!(!list.take(&full).unwrap());
        }
        assert!(list.take(&full).unwrap());
        assert!(list.take(&full).is_err(), "no entry more");
        assert_eq!(list.finish().len(), 65_536);
    }
}
