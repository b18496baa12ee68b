//! Conversion between ranges and slots: the slots of lent memory, the slots of a volume's range,
//! and the bytes of a sequence of slots.

use rblk_protocol::width::{narrow, wide, wide64};

use super::super::SLOT_BYTES;
use super::super::policy::Slot;
use super::Slots;
use crate::store::Segment;
use crate::volume::ids::VolumeIndex;

impl Slots {
    /// The slot of a segment that lies in one slot. `None`: the segment spans several.
    #[inline(always)]
    pub(crate) fn slot_of(&self, segment: Segment) -> Option<Slot> {
        let from = segment.offset - self.free.start();
        (from % SLOT_BYTES + wide(segment.len) <= SLOT_BYTES)
            .then(|| Slot(narrow(from / SLOT_BYTES)))
    }

    /// Slots that a segment touches.
    #[inline(always)]
    pub(crate) fn slots_of(&self, segment: Segment) -> impl Iterator<Item = Slot> + use<> {
        let first = self.free.slot_at(segment.offset);
        let last = self.free.slot_at(segment.offset + (segment.len as usize).max(1) - 1);
        (first.0..=last.0).map(Slot)
    }

    /// Calls `act` with every slot of a volume's blocks `first..=last` in the index. The cost is
    /// the number of these blocks, or of all slots if that is less.
    pub(crate) fn for_each_in(
        &mut self,
        volume: VolumeIndex,
        first: u64,
        last: u64,
        mut act: impl FnMut(&mut Self, Slot),
    ) {
        if last - first < wide64(self.metas.len()) {
            for block in first..=last {
                if let Some(slot) = self.find(volume, block) {
                    act(self, slot);
                }
            }
        } else {
            for at in (0u32..).take(self.metas.len()) {
                let meta = &self.metas[at as usize];
                if meta.volume == volume.0
                    && (first..=last).contains(&meta.block)
                    && meta.state.is_in_index()
                {
                    act(self, Slot(at));
                }
            }
        }
    }

    /// Appends the bytes `skip..skip + len` of a sequence of slots to `out`, with neighbours
    /// joined.
    pub(crate) fn segments(
        &self,
        slots: impl Iterator<Item = Slot>,
        mut skip: usize,
        len: u32,
        out: &mut Vec<Segment>,
    ) {
        let mut left = len as usize;
        for slot in slots {
            if left == 0 {
                break;
            }
            let take = (SLOT_BYTES - skip).min(left);
            let offset = self.offset(slot) + skip;
            let bytes = narrow(take);
            match out.last_mut() {
                Some(last) if last.offset + last.len as usize == offset => last.len += bytes,
                _ => out.push(Segment { offset, len: bytes }),
            }
            skip = 0;
            left -= take;
        }
    }
}
