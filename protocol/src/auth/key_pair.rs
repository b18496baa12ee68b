//! [`PublicKey`] and [`SecretKey`]: Curve25519 keys (RFC 7748), and their texts.
//!
//! ```text
//! rblk1:        base32(key, 32 bytes | checksum, 4 bytes)     a public key, in a configuration
//! rblk1-secret: base32(key, 32 bytes | checksum, 4 bytes)     a secret key, in a file of mode 0600
//! ```
//!
//! Base32 is that of RFC 4648 in lower case, without padding. The checksum is the begin of
//! SHA-256(prefix without the colon || key). So a key that was mistyped is an error that says so,
//! and never another key.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use zeroize::{Zeroize, Zeroizing};

pub use super::noise::KEY_BYTES;
use super::{base32, noise};

const CHECKSUM_BYTES: usize = 4;
const CODED_BYTES: usize = KEY_BYTES + CHECKSUM_BYTES;
const TEXT_LEN: usize = base32::text_len(CODED_BYTES);
const PUBLIC: &str = "rblk1";
const SECRET: &str = "rblk1-secret";

/// The key that identifies an end. Safe to publish.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; KEY_BYTES]);

/// The key by which an end proves its identity. Its memory is cleared when it is dropped, and no
/// format prints it, except [`text`](Self::text).
#[derive(Clone)]
pub struct SecretKey {
    bytes: Zeroizing<[u8; KEY_BYTES]>,
    public: PublicKey,
}

/// Why a text is not a key. No error holds a part of the text: it may be of a secret key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KeyError {
    /// Another begin.
    #[error("a public key begins with `rblk1:`")]
    NotPublic,
    /// Another begin.
    #[error("a secret key begins with `rblk1-secret:`")]
    NotSecret,
    /// A secret key where a public key belongs.
    #[error(
        "this is a secret key, and belongs only into the key file of its own host. Give the public key here: `key \
         show` prints it. If others can read this place, the key is no longer secret: make a new one"
    )]
    SecretInPublic,
    /// Too short or too long.
    #[error("a key has {TEXT_LEN} characters behind the colon, this text has {0}")]
    Length(usize),
    /// A character of no key.
    #[error(
        "character {0} behind the colon is none of a key: keys have the letters a to z and the digits \
         2 to 7"
    )]
    Character(usize),
    /// The checksum is another.
    #[error("the key is mistyped: its checksum does not fit. Copy it once more")]
    Checksum,
    /// A point of small order.
    #[error("the key is weak: every host could prove it. Make a new key")]
    Weak,
    /// A key file without a key.
    #[error("the file has no line that begins with `rblk1-secret:`")]
    NoKey,
    /// A key file with more than a key.
    #[error("line {0} is neither the one secret key nor a comment, which begins with `#`")]
    Line(usize),
    /// No random bytes.
    #[error("the system gives no random bytes")]
    Random,
}

impl PublicKey {
    /// From the bytes, as they are on the wire (RFC 7748).
    #[must_use]
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// The bytes, as they are on the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&encode(PUBLIC, &self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;

    /// The text must be exactly the output of [`Display`](fmt::Display).
    fn from_str(text: &str) -> Result<Self, KeyError> {
        let coded = match text.strip_prefix(PUBLIC) {
            Some(rest) if rest.starts_with("-secret:") => return Err(KeyError::SecretInPublic),
            Some(rest) => rest.strip_prefix(':').ok_or(KeyError::NotPublic)?,
            None => return Err(KeyError::NotPublic),
        };
        let key = Self(*decode(PUBLIC, coded)?);
        if noise::is_weak(&key.0) { Err(KeyError::Weak) } else { Ok(key) }
    }
}

impl SecretKey {
    /// A new one.
    ///
    /// # Errors
    /// [`KeyError::Random`].
    pub fn generate() -> Result<Self, KeyError> {
        let mut bytes = noise::random_secret().map_err(|_| KeyError::Random)?;
        Ok(Self::from_bytes(&mut bytes))
    }

    /// From the bytes of RFC 7748, which are cleared. Any bytes are a key.
    #[must_use]
    pub fn from_bytes(bytes: &mut [u8; KEY_BYTES]) -> Self {
        let own = Zeroizing::new(*bytes);
        bytes.zeroize();
        let public = PublicKey(noise::public_of(&own));
        Self { bytes: own, public }
    }

    /// The public key.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// The text of the key, without the end of a line.
    #[must_use]
    pub fn text(&self) -> Zeroizing<String> {
        encode(SECRET, &self.bytes)
    }

    /// The content of a key file: a comment line with the public key, and a line with the secret
    /// key.
    #[must_use]
    pub fn file_text(&self) -> Zeroizing<String> {
        let (public, secret) = (self.public, self.text());
        // The whole text fits, so that no smaller piece of memory is left with a part of the key.
        let mut text = Zeroizing::new(String::with_capacity(2 * (SECRET.len() + TEXT_LEN + 32)));
        for part in ["# public key: ", &public.to_string(), "\n", &secret, "\n"] {
            text.push_str(part);
        }
        text
    }

    /// From the text of a key file: one line with the key. Empty lines and lines that begin with
    /// `#` say nothing.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn from_file_text(text: &str) -> Result<Self, KeyError> {
        let mut key = None;
        for (number, line) in (1..).zip(text.lines()) {
            match line.trim() {
                line if line.is_empty() || line.starts_with('#') => {}
                line if line.starts_with(SECRET) && key.is_none() => key = Some(line.parse()?),
                line if line.starts_with("rblk1:") => return Err(KeyError::NotSecret),
                _ => return Err(KeyError::Line(number)),
            }
        }
        key.ok_or(KeyError::NoKey)
    }

    pub(super) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.bytes
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey(of {})", self.public)
    }
}

impl FromStr for SecretKey {
    type Err = KeyError;

    /// The text must be exactly that of [`SecretKey::text`].
    fn from_str(text: &str) -> Result<Self, KeyError> {
        let coded = text
            .strip_prefix(SECRET)
            .and_then(|rest| rest.strip_prefix(':'))
            .ok_or(KeyError::NotSecret)?;
        let mut bytes = decode(SECRET, coded)?;
        Ok(Self::from_bytes(&mut bytes))
    }
}

fn checksum(kind: &str, key: &[u8; KEY_BYTES]) -> [u8; CHECKSUM_BYTES] {
    let digest = Sha256::new().chain_update(kind).chain_update(key).finalize();
    std::array::from_fn(|i| digest[i])
}

fn encode(kind: &str, key: &[u8; KEY_BYTES]) -> Zeroizing<String> {
    let mut coded = Zeroizing::new([0; CODED_BYTES]);
    coded[..KEY_BYTES].copy_from_slice(key);
    coded[KEY_BYTES..].copy_from_slice(&checksum(kind, key));
    let characters = Zeroizing::new(base32::encode::<TEXT_LEN>(coded.as_slice()));
    let mut text = Zeroizing::new(String::with_capacity(kind.len() + 1 + TEXT_LEN));
    text.push_str(kind);
    text.push(':');
    text.extend(characters.iter().copied().map(char::from));
    text
}

fn decode(kind: &str, coded: &str) -> Result<Zeroizing<[u8; KEY_BYTES]>, KeyError> {
    let length = coded.chars().count();
    if length != TEXT_LEN {
        return Err(KeyError::Length(length));
    }
    // One byte each from here on.
    if let Some(at) = coded.chars().position(|c| !c.is_ascii()) {
        return Err(KeyError::Character(at + 1));
    }
    let bytes = base32::decode::<CODED_BYTES>(coded.as_bytes())
        .map_err(|at| KeyError::Character(at + 1))?
        .map(Zeroizing::new)
        .ok_or(KeyError::Checksum)?;
    let (key, sum) = bytes.split_at(KEY_BYTES);
    let mut own = Zeroizing::new([0; KEY_BYTES]);
    own.copy_from_slice(key);
    if checksum(kind, &own) == *sum { Ok(own) } else { Err(KeyError::Checksum) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // Of the secret key 00 01 02 ... 1f; made by another program (Python, base64 and hashlib).
    const GOLDEN_PUBLIC: &str = "rblk1:r5amllnwr4swesxfwikou5t2n3eu3au5hv5v4gwrxjxt4ijyfbpsdbfivi";
    const GOLDEN_SECRET: &str =
        "rblk1-secret:aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dyps2nwvjm";

    fn secret() -> SecretKey {
        SecretKey::from_bytes(&mut std::array::from_fn(|i| u8::try_from(i).unwrap()))
    }

    #[test]
    fn golden_texts() {
        let secret = secret();
        let public = secret.public();
        assert_eq!(public.to_string(), GOLDEN_PUBLIC);
        assert_eq!(*secret.text(), GOLDEN_SECRET);
        assert_eq!(public.to_string().parse(), Ok(public));
        assert_eq!(secret.text().parse::<SecretKey>().unwrap().public(), public);
        let file = secret.file_text();
        assert_eq!(*file, format!("# public key: {public}\n{}\n", *secret.text()));
        assert_eq!(SecretKey::from_file_text(&file).unwrap().public(), public);
    }

    #[test]
    fn every_wrong_character_is_found() {
        let (public, secret) = (secret().public().to_string(), secret().text());
        for at in 0..public.len() {
            for other in (b' '..=b'~').filter(|other| *other != public.as_bytes()[at]) {
                let mut text = public.clone().into_bytes();
                text[at] = other;
                let text = String::from_utf8(text).unwrap();
                assert!(text.parse::<PublicKey>().is_err(), "{text}");
            }
        }
        for at in 0..secret.len() {
            for other in (b' '..=b'~').filter(|other| *other != secret.as_bytes()[at]) {
                let mut text = secret.as_bytes().to_vec();
                text[at] = other;
                let text = String::from_utf8(text).unwrap();
                assert!(text.parse::<SecretKey>().is_err(), "{text}");
            }
        }
    }

    #[test]
    fn every_swapped_pair_is_found() {
        let public = secret().public().to_string();
        for at in 1..public.len() {
            let mut text = public.clone().into_bytes();
            text.swap(at - 1, at);
            let text = String::from_utf8(text).unwrap();
            assert!(text == public || text.parse::<PublicKey>().is_err(), "{text}");
        }
    }

    #[test]
    fn errors_name_the_fix() {
        let secret = secret();
        let public = secret.public().to_string();
        let parse = |text: &str| text.parse::<PublicKey>().unwrap_err();
        assert_eq!(parse("abc"), KeyError::NotPublic);
        assert_eq!(parse("rblk1"), KeyError::NotPublic);
        assert_eq!(parse(&secret.text()), KeyError::SecretInPublic);
        assert_eq!(parse("rblk1:"), KeyError::Length(0));
        assert_eq!(parse(&public[..public.len() - 1]), KeyError::Length(TEXT_LEN - 1));
        assert_eq!(parse(&format!("{public} ")), KeyError::Length(TEXT_LEN + 1));
        assert_eq!(parse(&public.to_uppercase().replace("RBLK", "rblk")), KeyError::Character(1));
        let umlaut = format!("rblk1:a\u{fc}{}", &public[8..]);
        assert_eq!(parse(&umlaut), KeyError::Character(2));
        assert_eq!(parse(&encode(PUBLIC, &[0; KEY_BYTES])), KeyError::Weak);
        assert_eq!(public.parse::<SecretKey>().unwrap_err(), KeyError::NotSecret);
    }

    #[test]
    fn a_key_file_has_one_key() {
        let text = secret().text();
        let read = |file: &str| SecretKey::from_file_text(file).map(|key| key.public());
        let public = secret().public();
        assert_eq!(read(&format!("\n# of db1\n  {}  \r\n\n", *text)), Ok(public));
        assert_eq!(read(&text), Ok(public));
        assert_eq!(read(""), Err(KeyError::NoKey));
        assert_eq!(read(&format!("{0}\n{0}\n", *text)), Err(KeyError::Line(2)));
        assert_eq!(read(&public.to_string()), Err(KeyError::NotSecret));
        assert_eq!(read("key = \"abc\""), Err(KeyError::Line(1)));
        assert_eq!(read(&text[..text.len() - 1]), Err(KeyError::Length(TEXT_LEN - 1)));
    }

    #[test]
    fn a_secret_key_is_not_printed() {
        let secret = secret();
        let debug = format!("{secret:?}");
        assert_eq!(debug, format!("SecretKey(of {})", secret.public()));
        assert_ne!(
            SecretKey::generate().unwrap().public(),
            SecretKey::generate().unwrap().public()
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_text_is_survived(text: String, tail in "[a-z2-7]{50,60}") {
            for text in [text.clone(), format!("rblk1:{text}"), format!("rblk1:{tail}")] {
                let _ = text.parse::<PublicKey>();
                let _ = SecretKey::from_file_text(&text);
            }
        }

        #[test]
        fn every_key_has_one_text(mut bytes: [u8; KEY_BYTES]) {
            let secret = SecretKey::from_bytes(&mut bytes);
            let public = secret.public();
            prop_assert_eq!(public.to_string().parse(), Ok(public));
            prop_assert_eq!(secret.text().parse::<SecretKey>().unwrap().public(), public);
            prop_assert_eq!(bytes, [0; KEY_BYTES], "cleared");
        }
    }
}
