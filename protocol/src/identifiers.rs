//! The identifiers of sessions, hosts, targets, holders and volumes.

use std::fmt;

use crate::limits::NAME_BYTES;

macro_rules! id128 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub [u8; 16]);

        impl $name {
            /// Whether it is all zeros, which means "none" on the wire.
            #[must_use]
            pub fn is_none(self) -> bool {
                self.0 == [0; 16]
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }
    };
}

id128! {
    /// A session: the use of one target by one initiator. The target gives a random one at the
    /// first LOGIN. Only an initiator that knows it can join or supersede the session.
    SessionId
}
id128! {
    /// The host that an initiator runs on. Stable over restarts.
    HostId
}
id128! {
    /// One run of a target. New at every start.
    InstanceId
}
id128! {
    /// Tells whether acknowledged writes of a volume may be lost, as the verifier of NFS COMMIT
    /// does. While it stays the same, every acknowledged write is durable or the next FLUSH makes
    /// it so. When it changes, writes that no completed FLUSH covered may be lost.
    WriteVerifier
}

id128! {
    /// The random value of one end for one connection, so that a proof fits one connection only. It
    /// is no secret.
    Nonce
}

/// Counts the reconnects of a session. A reconnect raises it. Commands of older epochs are finished
/// or dropped before the first command of the new epoch is admitted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Epoch(pub u32);

impl Epoch {
    /// The next one. `None` after the last number: then a new session is needed.
    #[must_use]
    pub fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }
}

/// Which holder may write a volume. It rises with every change of the holder, and never falls. A
/// holder that lost its session names its generation when it opens the volume again. If the volume
/// has another generation by then, another holder may have written, and nothing that the old holder
/// had queued may be written. 0 is for an initiator that has queued nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Generation(pub u64);

impl Generation {
    /// For an initiator that has not held the volume before.
    pub const FRESH: Self = Self(0);

    /// Whether the initiator has not held the volume before.
    #[must_use]
    pub fn is_fresh(self) -> bool {
        self == Self::FRESH
    }

    /// The generation of the next holder. `None` after the last number.
    #[must_use]
    pub fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a command on its queue in one epoch. It wraps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sequence(pub u32);

impl Sequence {
    /// The low 16 bits. An answer carries them, so that an answer to another command with the same
    /// tag does not match.
    #[must_use]
    #[inline]
    pub fn check(self) -> u16 {
        (self.0 & 0xffff) as u16
    }

    /// The next one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// The number that OPEN gave to a volume. Valid within the session. 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct VolumeHandle(pub u32);

/// A name of 1 to 64 bytes of `[A-Za-z0-9._-]`, not starting with a dot or dash: safe in paths,
/// logs and command lines without quoting.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    bytes: [u8; NAME_BYTES],
    len: u8,
}

/// Why a text is not a [`Name`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NameError {
    /// Empty.
    #[error("the name is empty")]
    Empty,
    /// Too long.
    #[error("the name has {0} bytes, the limit is 64")]
    TooLong(usize),
    /// Not `[A-Za-z0-9._-]`, or a bad first character.
    #[error(
        "the name may have letters, digits, `.`, `_` and `-`, and starts with a letter, digit or `_`"
    )]
    BadCharacter,
    /// Bytes that are not zero behind the padding.
    #[error("the name's padding is not zero")]
    BadPadding,
}

impl Name {
    /// Checks a text.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn new(text: &str) -> Result<Self, NameError> {
        let source = text.as_bytes();
        if source.is_empty() {
            return Err(NameError::Empty);
        }
        let len = u8::try_from(source.len())
            .ok()
            .filter(|len| usize::from(*len) <= NAME_BYTES)
            .ok_or(NameError::TooLong(source.len()))?;
        let fine = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if !source.iter().all(fine) || matches!(source[0], b'.' | b'-') {
            return Err(NameError::BadCharacter);
        }
        let mut bytes = [0; NAME_BYTES];
        bytes[..source.len()].copy_from_slice(source);
        Ok(Self { bytes, len })
    }

    /// From the wire: zero-padded.
    ///
    /// # Errors
    /// [`NameError`].
    pub fn from_wire(bytes: &[u8; NAME_BYTES]) -> Result<Self, NameError> {
        let len = bytes.iter().position(|b| *b == 0).unwrap_or(NAME_BYTES);
        if bytes[len..].iter().any(|b| *b != 0) {
            return Err(NameError::BadPadding);
        }
        std::str::from_utf8(&bytes[..len]).map_err(|_| NameError::BadCharacter).and_then(Self::new)
    }

    /// As it is on the wire.
    #[must_use]
    pub fn to_wire(self) -> [u8; NAME_BYTES] {
        self.bytes
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // `new` has checked that it is ASCII, so the fallback is never used.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or("")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({})", self.as_str())
    }
}

impl std::str::FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let name = Name::new("vol-1.a_B").unwrap();
        assert_eq!(name.as_str(), "vol-1.a_B");
        assert_eq!(Name::from_wire(&name.to_wire()), Ok(name));
        assert_eq!(Name::new(""), Err(NameError::Empty));
        assert_eq!(Name::new(&"x".repeat(65)), Err(NameError::TooLong(65)));
        assert!(Name::new(&"x".repeat(64)).is_ok());
        for bad in ["a b", "a/b", ".a", "-a", "ü", "a\0b"] {
            assert_eq!(Name::new(bad), Err(NameError::BadCharacter), "{bad:?}");
        }
        let mut wire = name.to_wire();
        wire[63] = b'x';
        assert_eq!(Name::from_wire(&wire), Err(NameError::BadPadding));
        assert_eq!(Name::from_wire(&[0; 64]), Err(NameError::Empty));
        assert_eq!(Name::from_wire(&[0xff; 64]), Err(NameError::BadCharacter));
    }
}
