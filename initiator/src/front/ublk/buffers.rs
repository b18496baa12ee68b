//! [`Buffers`]: the memory the driver copies request data to and from, one slice per tag.

use std::sync::Arc;

use rblk_fabric::Region;

use super::error::{Result, UblkError};

/// Evenly spaced slices of one [`Region`], slice `t` for tag `t`. The region stays mapped as long
/// as this lives. Its bytes are accessed by copies only, since the kernel and a device write them,
/// too.
#[derive(Clone, Debug)]
pub struct Buffers {
    region: Arc<Region>,
    offset: usize,
    stride: usize,
    count: u16,
}

impl Buffers {
    /// `count` slices, `stride` bytes apart, from `offset` on.
    ///
    /// # Errors
    /// The slices do not lie inside the region.
    pub fn new(region: Arc<Region>, offset: usize, stride: usize, count: u16) -> Result<Self> {
        let inside = stride > 0
            && stride
                .checked_mul(count.into())
                .is_some_and(|total| region.pointer(offset, total).is_some());
        if !inside {
            return Err(UblkError::Invalid {
                name: "buffer stride",
                value: stride as u64,
                rule: "offset + tags * stride must lie inside the region",
            });
        }
        Ok(Self { region, offset, stride, count })
    }

    /// Bytes of each slice.
    #[must_use]
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Number of slices.
    #[must_use]
    pub(crate) fn count(&self) -> u16 {
        self.count
    }

    /// Offset of a tag's slice in the region.
    #[inline]
    #[must_use]
    pub(crate) fn offset(&self, tag: u16) -> usize {
        self.offset + usize::from(tag) * self.stride
    }

    /// Address of a tag's slice, for the driver and for scatter-gather entries.
    #[inline]
    #[must_use]
    pub(crate) fn address(&self, tag: u16) -> u64 {
        self.region.address() + self.offset(tag) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rblk_fabric::PageKind;

    #[test]
    fn slices_lie_inside_the_region() {
        let region = Region::allocate(64 << 10, PageKind::Normal).unwrap();
        let buffers = Buffers::new(Arc::clone(&region), 4096, 8192, 7).unwrap();
        assert_eq!(buffers.address(3), region.address() + 4096 + 3 * 8192);
        assert!(region.pointer(buffers.offset(6), buffers.stride()).is_some());
        assert!(Buffers::new(Arc::clone(&region), 8192, 8192, 8).is_err());
        assert!(Buffers::new(Arc::clone(&region), 0, 0, 1).is_err());
        assert!(Buffers::new(region, 0, usize::MAX, 2).is_err());
    }
}
