//! [`Ghost`]: the keys of blocks that recently left the small queue, in fixed memory.
//!
//! A ring keeps the order of arrival. A table of buckets answers "is this key remembered?" with one
//! cache line. A key is kept as a fingerprint of 32 bits; 32 other bits choose its bucket. So about
//! one lookup in 2^29 wrongly finds its key, which only costs a place in the main queue. There are
//! two cells per remembered key. Where more than [`CELLS`] keys meet in one bucket, the oldest of
//! them is forgotten early (with well mixed keys, less than one in a hundred).
//!
//! Invariant: `ring[p]` names cell `c` exactly when cell `c` has the stamp `p`; all other stamps
//! are [`NONE`].

use rblk_protocol::width::{narrow, wide, wide64};

/// Cells of a bucket: one cache line.
pub(super) const CELLS: usize = 8;

const NONE: u32 = u32::MAX;

/// Fingerprints and, beside each, the ring position that names its cell, or [`NONE`] if the cell is
/// empty.
#[derive(Clone)]
#[repr(align(64))]
struct GhostBucket {
    fingerprint: [u32; CELLS],
    stamp: [u32; CELLS],
}

/// The last remembered keys, up to a fixed number. About 20 bytes per key.
pub(super) struct Ghost {
    buckets: Box<[GhostBucket]>,
    /// Number of a cell (bucket × `CELLS` + cell), or `NONE` if the key was forgotten.
    ring: Box<[u32]>,
    /// The oldest ring position, which is written next.
    next: u32,
    len: u32,
}

/// The place of a key: its bucket and its fingerprint. Mixes the bits, so plain numbers serve as
/// keys, too.
fn place(key: u64, buckets: usize) -> (usize, u32) {
    let mut h = key ^ (key >> 32);
    h = h.wrapping_mul(0xd6e8_feb8_6659_fd93);
    h ^= h >> 32;
    h = h.wrapping_mul(0xd6e8_feb8_6659_fd93);
    h ^= h >> 32;
    // The upper half, scaled to the number of buckets, and the lower half.
    (wide(((h >> 32) * wide64(buckets)) >> 32), narrow(h & 0xffff_ffff))
}

impl Ghost {
    /// Remembers up to `keys` keys. 0 counts as 1.
    pub(super) fn new(keys: u32) -> Self {
        let keys = keys.max(1) as usize;
        let empty = GhostBucket { fingerprint: [0; CELLS], stamp: [NONE; CELLS] };
        let buckets = (2 * keys).div_ceil(CELLS);
        assert!(u32::try_from(buckets * CELLS).is_ok_and(|cells| cells < NONE), "ghost too large");
        Self {
            buckets: vec![empty; buckets].into(),
            ring: vec![NONE; keys].into(),
            next: 0,
            len: 0,
        }
    }

    /// Number of remembered keys.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Remembers `key` as the newest. A full ghost forgets its oldest key.
    pub(super) fn remember(&mut self, key: u64) {
        self.take(key);
        let expired = self.ring[self.next as usize];
        if expired != NONE {
            self.forget_cell(expired);
        }
        let (bucket, fingerprint) = place(key, self.buckets.len());
        let (next, keys) = (self.next, self.ring.len() as u64);
        // An empty cell has the largest age, so it is taken first.
        let age = |stamp: u32| match stamp {
            NONE => u64::MAX,
            stamp if stamp < next => u64::from(next - stamp),
            stamp => u64::from(next) + keys - u64::from(stamp),
        };
        let stamps = &self.buckets[bucket].stamp;
        let mut cell = 0;
        for other in 1..CELLS {
            if age(stamps[other]) > age(stamps[cell]) {
                cell = other;
            }
        }
        // Checked in `new`: every cell's number fits.
        let number = narrow(bucket * CELLS + cell);
        if stamps[cell] != NONE {
            self.forget_cell(number);
        }
        self.buckets[bucket].fingerprint[cell] = fingerprint;
        self.buckets[bucket].stamp[cell] = next;
        self.ring[next as usize] = number;
        self.len += 1;
        self.next = if next as usize + 1 == self.ring.len() { 0 } else { next + 1 };
    }

    /// Forgets `key`. Returns whether it was remembered.
    pub(super) fn take(&mut self, key: u64) -> bool {
        let (bucket, fingerprint) = place(key, self.buckets.len());
        let b = &self.buckets[bucket];
        let found = (0..CELLS).find(|&c| b.fingerprint[c] == fingerprint && b.stamp[c] != NONE);
        if let Some(cell) = found {
            // Checked in `new`: every cell's number fits.
            self.forget_cell(narrow(bucket * CELLS + cell));
        }
        found.is_some()
    }

    fn forget_cell(&mut self, number: u32) {
        let stamp = &mut self.buckets[number as usize / CELLS].stamp[number as usize % CELLS];
        self.ring[*stamp as usize] = NONE;
        *stamp = NONE;
        self.len -= 1;
    }

    /// Bucket of `key`, for the model in the tests.
    #[cfg(test)]
    pub(super) fn bucket(&self, key: u64) -> usize {
        place(key, self.buckets.len()).0
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut stamped = 0;
        for (b, bucket) in self.buckets.iter().enumerate() {
            for (c, &stamp) in bucket.stamp.iter().enumerate() {
                if stamp != NONE {
                    stamped += 1;
                    assert_eq!(self.ring[stamp as usize] as usize, b * CELLS + c);
                }
            }
        }
        assert_eq!(stamped, self.len);
        assert_eq!(self.ring.iter().filter(|&&c| c != NONE).count(), stamped as usize);
    }
}
