//! Values of sectors and blocks: zeroes, the bytes of the beginning, or the stamp of a write.
//!
//! A stamp is the number of the write, that of the sector, and words made of both: no sector of
//! another write, and no other sector of this one, looks like it. Numbers count from 1.

use super::{ChangeId, SECTOR};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    // The bytes of the volume when this life began.
    Base,
    Zeroes(ChangeId),
    Stamp(ChangeId),
}

// The kinds of values that a block's bytes alone identify.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Content {
    Base,
    Zeroes,
    Stamp(ChangeId),
}

impl Source {
    pub(super) fn id(self) -> Option<ChangeId> {
        match self {
            Self::Base => None,
            Self::Zeroes(id) | Self::Stamp(id) => Some(id),
        }
    }

    /// Whether `bytes` of sector `number` have this value. `base` has the sector's bytes at the
    /// beginning.
    pub(super) fn is(self, bytes: &[u8], base: &[u8], number: usize) -> bool {
        match self {
            Self::Base => bytes == base,
            Self::Zeroes(_) => is_zero(bytes),
            Self::Stamp(id) => is_stamp(bytes, id, number),
        }
    }
}

pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
    u64::from_le_bytes(word)
}

fn stamp_words(id: ChangeId, sector: usize) -> impl Iterator<Item = u64> {
    let sector = sector as u64;
    let salt = (id.0 << 32 ^ sector).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..SECTOR as u64 / 8).map(move |at| match at {
        0 => id.0,
        1 => sector,
        _ => salt.wrapping_mul(2 * at + 1),
    })
}

pub(super) fn stamp(id: ChangeId, sector: usize, bytes: &mut [u8]) {
    for (word, into) in stamp_words(id, sector).zip(bytes.chunks_exact_mut(8)) {
        into.copy_from_slice(&word.to_le_bytes());
    }
}

pub(super) fn is_stamp(bytes: &[u8], id: ChangeId, sector: usize) -> bool {
    id.0 != 0
        && bytes.len() == SECTOR
        && stamp_words(id, sector)
            .zip(bytes.chunks_exact(8))
            .all(|(word, is)| is == word.to_le_bytes())
}
