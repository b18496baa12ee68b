//! [`DigestWish`]: whether a mount asks its target for digests of capsules and data.
//!
//! The default is [`DigestWish::Auto`]. A card checks each packet with a CRC of its own, and so
//! does the target's; between them a few buses and caches, each with an ECC or a CRC. With a
//! software device, a checksum of 16 bits for each segment of TCP or UDP is the only guard against
//! faults of memory, drivers and switches. Encrypted data needs no digest: its tag finds every
//! change.

use crate::schema::word::words;

/// Whether a mount asks for digests: `"auto"`, `"crc32c"` or `"off"`.
///
/// ```
/// use rblk_config::DigestWish;
///
/// assert_eq!("crc32c".parse(), Ok(DigestWish::Crc32c));
/// assert_eq!(DigestWish::default(), DigestWish::Auto);
/// assert_eq!(DigestWish::Off.to_string(), "off");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum DigestWish {
    /// On a software device (Soft-RoCE, soft-iWARP) and on TCP without encryption.
    #[default]
    Auto,
    /// Always; a target that does not agree is refused.
    Crc32c,
    /// Never.
    Off,
}

/// A text that is not a [`DigestWish`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is none of \"auto\", \"crc32c\" and \"off\"")]
pub struct DigestWishError(String);

words!(DigestWish, DigestWishError, |text: &str| DigestWishError(text.to_owned()), {
    Auto = "auto",
    Crc32c = "crc32c",
    Off = "off",
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_and_the_type_have_the_same_words() {
        for word in DigestWish::WORDS {
            assert_eq!(word.parse::<DigestWish>().unwrap().to_string(), *word);
        }
        assert_eq!(DigestWish::WORDS.len(), 3);
        let error = "on".parse::<DigestWish>().unwrap_err().to_string();
        assert_eq!(error, "\"on\" is none of \"auto\", \"crc32c\" and \"off\"");
    }
}
