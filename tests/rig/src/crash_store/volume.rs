//! [`VolumeBytes`]: the bytes of a volume, the durable ones, and the possible survivors of the
//! rest.
//!
//! Changes become durable in any order, by sectors. An older change never comes back over a newer
//! durable one.

use std::ops::Range;

use crate::seed::Random;

use super::SECTOR;

/// A change that took effect and is not durable.
#[derive(Clone, Debug)]
pub(super) struct Change {
    // Place in the order of effects.
    pub(super) effect: u64,
    // Place in the order of ends; none while the op is in flight.
    pub(super) done: Option<u64>,
    pub(super) offset: usize,
    pub(super) len: usize,
    // None for zeroes.
    pub(super) data: Option<Vec<u8>>,
}

#[derive(Clone, Debug)]
pub(super) struct VolumeBytes {
    // The bytes that reads return.
    pub(super) now: Vec<u8>,
    pub(super) durable: Vec<u8>,
    // Effect of the newest durable change, by sector: an older one cannot come back over it.
    pub(super) durable_effects: Vec<u64>,
    // In the order of their effects.
    pub(super) volatile: Vec<Change>,
}

impl VolumeBytes {
    pub(super) fn make_durable(&mut self, covered: impl Fn(&Change) -> bool) {
        let mut at = 0;
        while at < self.volatile.len() {
            if covered(&self.volatile[at]) {
                let change = self.volatile.remove(at);
                for sector in sectors(change.offset, change.len) {
                    if self.durable_effects[sector.start / SECTOR] < change.effect {
                        self.durable_effects[sector.start / SECTOR] = change.effect;
                        put(&mut self.durable, &change, sector);
                    }
                }
            } else {
                at += 1;
            }
        }
    }

    /// Applies a random part of `changes` to an image.
    pub(super) fn keep_some(
        &self,
        image: &mut [u8],
        mut changes: Vec<Change>,
        random: &mut Random,
    ) {
        // Crashes of one kind find a mistake more easily than a mixture.
        let (keep, tear) = [(0, 0), (1000, 0), (500, 0), (100, 300), (300, 700)][random.index(5)];
        for last in (1..changes.len()).rev() {
            changes.swap(last, random.index(last + 1));
        }
        for change in changes {
            let whole = random.chance(keep);
            let torn = random.chance(tear);
            for sector in sectors(change.offset, change.len) {
                let newer = change.effect > self.durable_effects[sector.start / SECTOR];
                if newer && (whole || torn && random.chance(500)) {
                    put(image, &change, sector);
                }
            }
        }
    }
}

fn sectors(offset: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = offset + len;
    (offset / SECTOR..end.div_ceil(SECTOR))
        .map(move |at| (at * SECTOR).max(offset)..((at + 1) * SECTOR).min(end))
}

pub(super) fn put(image: &mut [u8], change: &Change, range: Range<usize>) {
    match &change.data {
        Some(data) => {
            let from = range.start - change.offset..range.end - change.offset;
            image[range].copy_from_slice(&data[from]);
        }
        None => image[range].fill(0),
    }
}
