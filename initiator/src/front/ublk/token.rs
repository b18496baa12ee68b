//! [`DeviceToken`]: the owner's mark on a device. The driver keeps 64 bits for the process that
//! adds a device, and gives them back untouched. Process ids and device numbers are reused; these
//! bits are not.

use std::fmt;

/// The first two of the eight bytes, in every device of rblk: `rb`.
const MAGIC: u64 = 0x7262_0000_0000_0000;
const MAGIC_MASK: u64 = 0xffff_0000_0000_0000;

/// A mark that a server puts on its device when it adds it: constant for the device's life, and
/// different for every other device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceToken(u64);

impl DeviceToken {
    /// A token of 48 bits of `random`.
    #[must_use]
    pub const fn new(random: u64) -> Self {
        Self(MAGIC | (random & !MAGIC_MASK))
    }

    /// The token in the driver's 64 bits; `None` if no server of rblk has written them.
    #[must_use]
    pub(crate) const fn of(word: u64) -> Option<Self> {
        if word & MAGIC_MASK == MAGIC { Some(Self(word)) } else { None }
    }

    /// The driver's 64 bits.
    #[must_use]
    pub(crate) const fn word(self) -> u64 {
        self.0
    }
}

impl fmt::Display for DeviceToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for DeviceToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceToken({self})")
    }
}

/// As 16 hexadecimal digits.
impl std::str::FromStr for DeviceToken {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let word = u64::from_str_radix(text, 16).ok().filter(|_| digits);
        word.and_then(Self::of).ok_or("not the token of a device")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_tokens_are_ours() {
        for random in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            let token = DeviceToken::new(random);
            assert_eq!(DeviceToken::of(token.word()), Some(token));
            assert_eq!(token.to_string().parse(), Ok(token));
            assert_eq!(token.word() & !MAGIC_MASK, random & !MAGIC_MASK);
        }
        for word in [0, 1, u64::MAX, MAGIC >> 1] {
            assert_eq!(DeviceToken::of(word), None);
        }
        for text in ["", "7262", "+262000000000001", "0000000000000000", "72620000000000zz", "ü262"]
        {
            assert!(text.parse::<DeviceToken>().is_err(), "{text}");
        }
    }
}
