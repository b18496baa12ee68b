//! The pattern a target writes in answer to SELF_TEST.

use crate::identifiers::Sequence;

/// Bytes of the pattern, and of the buffer that a SELF_TEST must name at least.
pub const SELF_TEST_BYTES: usize = 64;

/// The pattern that the target writes. The sequence is part of it, so that an old answer is not
/// taken for a new one.
#[must_use]
pub fn self_test_pattern(sequence: Sequence) -> [u8; SELF_TEST_BYTES] {
    let seed = sequence.0.to_le_bytes();
    let mut pattern = [0; SELF_TEST_BYTES];
    for (i, byte) in (0u8..).zip(&mut pattern) {
        *byte = seed[usize::from(i % 4)] ^ i.wrapping_mul(0x3d) ^ 0xa5;
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_is_frozen_and_depends_on_the_sequence() {
        assert_eq!(self_test_pattern(Sequence(0))[..4], [0xa5, 0x98, 0xdf, 0x12]);
        assert_ne!(self_test_pattern(Sequence(1)), self_test_pattern(Sequence(2)));
    }
}
