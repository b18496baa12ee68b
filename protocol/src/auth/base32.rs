//! Base32 of RFC 4648, section 6, in lower case and without padding, for texts of a fixed size.
//!
//! Every text has one value and every value one text: the bits of the last character that no byte
//! uses must be zero.

const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// The number of characters for a number of bytes.
pub(super) const fn text_len(bytes: usize) -> usize {
    (bytes * 8).div_ceil(5)
}

/// The text of some bytes, ASCII.
pub(super) fn encode<const TEXT: usize>(bytes: &[u8]) -> [u8; TEXT] {
    debug_assert_eq!(text_len(bytes.len()), TEXT);
    let mut text = [0; TEXT];
    for (at, character) in text.iter_mut().enumerate() {
        let value = (0..5).fold(0, |value, bit| value << 1 | bit_of(bytes, at * 5 + bit));
        *character = ALPHABET[usize::from(value)];
    }
    text
}

/// The bytes of a text of the right length. `None` if the last character has bits that no byte
/// uses.
///
/// # Errors
/// Where the first character is that is not of the alphabet.
pub(super) fn decode<const BYTES: usize>(text: &[u8]) -> Result<Option<[u8; BYTES]>, usize> {
    debug_assert_eq!(text_len(BYTES), text.len());
    let mut bytes = [0; BYTES];
    let mut left_over = 0;
    for (at, character) in text.iter().enumerate() {
        let value = value_of(*character).ok_or(at)?;
        for bit in 0..5 {
            let one = value >> (4 - bit) & 1;
            let place = at * 5 + bit;
            match bytes.get_mut(place / 8) {
                Some(byte) => *byte |= one << (7 - place % 8),
                None => left_over |= one,
            }
        }
    }
    Ok((left_over == 0).then_some(bytes))
}

/// A bit, the highest of the first byte first; 0 behind the end.
fn bit_of(bytes: &[u8], place: usize) -> u8 {
    bytes.get(place / 8).map_or(0, |byte| byte >> (7 - place % 8) & 1)
}

fn value_of(character: u8) -> Option<u8> {
    match character {
        b'a'..=b'z' => Some(character - b'a'),
        b'2'..=b'7' => Some(character - b'2' + 26),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// RFC 4648, section 10, without the padding.
    #[test]
    fn vectors_of_the_rfc() {
        assert_eq!(&encode::<2>(b"f"), b"my");
        assert_eq!(&encode::<4>(b"fo"), b"mzxq");
        assert_eq!(&encode::<5>(b"foo"), b"mzxw6");
        assert_eq!(&encode::<7>(b"foob"), b"mzxw6yq");
        assert_eq!(&encode::<8>(b"fooba"), b"mzxw6ytb");
        assert_eq!(&encode::<10>(b"foobar"), b"mzxw6ytboi");
        assert_eq!(decode::<6>(b"mzxw6ytboi"), Ok(Some(*b"foobar")));
        assert_eq!(decode::<1>(b"mz"), Ok(None), "a second text of the same value");
        assert_eq!(decode::<6>(b"mzxw6YTBOI"), Err(5));
    }

    proptest! {
        #[test]
        fn every_value_has_one_text(bytes: [u8; 36]) {
            let text = encode::<{ text_len(36) }>(&bytes);
            prop_assert_eq!(decode::<36>(&text), Ok(Some(bytes)));
        }
    }
}
