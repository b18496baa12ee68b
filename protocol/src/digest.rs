//! Digests: CRC-32C (Castagnoli; RFC 3720, appendix B.4) of capsules and of data, from end to end.
//!
//! Where [`Features::DIGEST`](crate::Features::DIGEST) was agreed:
//!
//! - Each capsule has the CRC of its own bytes, the digest field taken as zero. A capsule with a
//!   wrong digest cannot be parsed: no field of it can be trusted, not even its tag.
//! - The command of a WRITE has the [`DataDigests`] of its data, wherever the data travels.
//! - The data of a READ is followed by a [`ReadTrailer`], in the same RDMA WRITE. Its sequence says
//!   which command the data answers, so that the data of another command does not pass.
//!
//! A WRITE has two CRCs because a target may have to commit the data of one stripe before it has
//! memory for the next: each part can be checked before it is committed, without the other.

use crate::identifiers::Sequence;
use crate::limits::{DIGEST_IO_MAX_BYTES, DIGEST_STRIPE_BYTES, READ_TRAILER_BYTES};

/// The CRC-32C of bytes in one piece.
pub use rblk_crc32c::crc32c;
pub(crate) use rblk_crc32c::{of_capsule, of_two_words};

/// The CRC-32C of bytes in several pieces.
#[derive(Clone, Copy, Debug, Default)]
pub struct Crc32c(u32);

impl Crc32c {
    /// Adds the next piece.
    #[inline]
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = rblk_crc32c::extend(self.0, bytes);
    }

    /// The CRC of all pieces.
    #[inline]
    #[must_use]
    pub fn value(&self) -> u32 {
        self.0
    }
}

/// The CRC-32C of bytes of which the first have one CRC, and the `second_len` bytes behind them
/// another. A few thousand instructions: for rare cases.
#[must_use]
pub fn join(first: u32, second: u32, second_len: u32) -> u32 {
    // As a polynomial, the CRC of the first bytes is multiplied by x for each bit behind them.
    let (mut power, mut bits, mut shifted) = (X, u64::from(second_len) * 8, first);
    while bits > 0 {
        if bits & 1 == 1 {
            shifted = times(shifted, power);
        }
        power = times(power, power);
        bits >>= 1;
    }
    shifted ^ second
}

/// The polynomial x: the highest bit is the coefficient of 1.
const X: u32 = 1 << 30;

/// The product of two polynomials modulo that of the CRC.
fn times(a: u32, mut b: u32) -> u32 {
    (0..32).rev().fold(0, |product, bit| {
        let sum = if a >> bit & 1 == 1 { product ^ b } else { product };
        b = if b & 1 == 1 { b >> 1 ^ 0x82f6_3b78 } else { b >> 1 };
        sum
    })
}

/// The CRCs of the data of a WRITE. A WRITE touches at most two stripes of the volume
/// ([`DIGEST_STRIPE_BYTES`]); its data has a CRC for each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct DataDigests {
    /// Of the bytes in the first stripe.
    pub first: u32,
    /// Of the bytes in the second; 0 if there are none.
    pub second: u32,
}

impl DataDigests {
    /// Of `len` bytes for the volume from `offset` on. `crc` gives the CRC of so many bytes of the
    /// data, from that byte of it on.
    #[inline]
    #[must_use]
    pub fn of(offset: u64, len: u32, mut crc: impl FnMut(u32, u32) -> u32) -> Self {
        let cut = Self::cut(offset, len);
        if cut == len {
            return Self { first: crc(0, len), second: 0 };
        }
        Self::of_two_stripes(cut, len, &mut crc)
    }

    #[cold]
    #[inline(never)]
    fn of_two_stripes(cut: u32, len: u32, crc: &mut impl FnMut(u32, u32) -> u32) -> Self {
        Self { first: crc(0, cut), second: crc(cut, len - cut) }
    }

    /// How many of `len` bytes for the volume from `offset` on are in its first stripe.
    #[inline]
    #[must_use]
    pub fn cut(offset: u64, len: u32) -> u32 {
        let left = DIGEST_STRIPE_BYTES - offset % DIGEST_STRIPE_BYTES;
        u32::try_from(left).map_or(len, |left| left.min(len))
    }
}

const _: () = assert!(DIGEST_IO_MAX_BYTES as u64 <= DIGEST_STRIPE_BYTES, "two stripes at most");

/// The trailer behind the data of a READ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadTrailer {
    /// CRC-32C of the data.
    pub crc: u32,
    /// The sequence of the READ.
    pub sequence: Sequence,
}

impl ReadTrailer {
    /// The 8 bytes.
    #[inline]
    #[must_use]
    pub fn to_wire(self) -> [u8; READ_TRAILER_BYTES] {
        (u64::from(self.crc) | u64::from(self.sequence.0) << 32).to_le_bytes()
    }

    /// Any 8 bytes are a trailer; whether it is the right one is for the reader to compare.
    #[inline]
    #[must_use]
    pub fn from_wire(bytes: [u8; READ_TRAILER_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h] = bytes;
        Self {
            crc: u32::from_le_bytes([a, b, c, d]),
            sequence: Sequence(u32::from_le_bytes([e, f, g, h])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bit by bit, as the polynomial is defined.
    fn slow(bytes: &[u8]) -> u32 {
        let crc = bytes.iter().fold(!0u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 }
            })
        });
        !crc
    }

    #[test]
    fn golden_vectors_of_rfc_3720() {
        let up: Vec<u8> = (0..32).collect();
        let down: Vec<u8> = (0..32).rev().collect();
        #[rustfmt::skip]
        let read_10 = [
            0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0x14, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18,
            0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0,
        ];
        let golden: [(&[u8], u32); 6] = [
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&up, 0x46dd_794e),
            (&down, 0x113f_db5c),
            (&read_10, 0xd996_3a56),
            (b"123456789", 0xe306_9283),
        ];
        for (bytes, crc) in golden {
            assert_eq!((crc32c(bytes), slow(bytes)), (crc, crc), "{bytes:x?}");
        }
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn golden_trailer() {
        let trailer = ReadTrailer { crc: 0x0403_0201, sequence: Sequence(0x0807_0605) };
        assert_eq!(trailer.to_wire(), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(ReadTrailer::from_wire(trailer.to_wire()), trailer);
    }

    #[test]
    fn data_is_cut_where_a_stripe_ends() {
        for (offset, len, first) in [
            (0, 512, 512),
            (0, 1 << 20, 1 << 20),
            ((1 << 20) - 512, 4096, 512),
            (5 << 20, 1 << 20, 1 << 20),
            ((5 << 20) + 512, 1 << 20, (1 << 20) - 512),
            (u64::MAX - 511, 512, 512),
        ] {
            assert_eq!(DataDigests::cut(offset, len), first, "{len} bytes from {offset}");
            let digests = DataDigests::of(offset, len, |from, len| from ^ len << 1);
            let second = if first == len { 0 } else { first ^ (len - first) << 1 };
            assert_eq!(digests, DataDigests { first: first << 1, second });
        }
    }

    proptest! {
        // Every length that an implementation may treat in a way of its own, at every alignment.
        #[test]
        fn the_crc_is_that_of_the_polynomial(
            bytes in proptest::collection::vec(any::<u8>(), 0..5000), skip in 0usize..64,
        ) {
            let bytes = &bytes[skip.min(bytes.len())..];
            prop_assert_eq!(crc32c(bytes), slow(bytes));
        }

        #[test]
        fn pieces_have_the_crc_of_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..5000), a: usize, b: usize,
        ) {
            let (a, b) = (a % (bytes.len() + 1), b % (bytes.len() + 1));
            let mut pieces = Crc32c::default();
            for piece in [&bytes[..a.min(b)], &bytes[a.min(b)..a.max(b)], &bytes[a.max(b)..]] {
                pieces.add(piece);
            }
            prop_assert_eq!(pieces.value(), crc32c(&bytes));
            let (one, other) = bytes.split_at(a);
            let other_len = u32::try_from(other.len()).unwrap();
            prop_assert_eq!(join(crc32c(one), crc32c(other), other_len), crc32c(&bytes));
        }

        #[test]
        fn any_flipped_bit_of_data_or_trailer_is_found(
            mut bytes in proptest::collection::vec(any::<u8>(), 1..5000),
            sequence: u32,
            at: usize,
        ) {
            let sequence = Sequence(sequence);
            let data_bytes = bytes.len();
            bytes.extend(ReadTrailer { crc: crc32c(&bytes), sequence }.to_wire());
            let fits = |bytes: &[u8]| {
                let (data, trailer) = bytes.split_at(data_bytes);
                let expected = ReadTrailer { crc: crc32c(data), sequence };
                ReadTrailer::from_wire(trailer.try_into().unwrap()) == expected
            };
            prop_assert!(fits(&bytes));
            let bit = at % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!fits(&bytes));
        }
    }
}
