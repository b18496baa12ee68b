//! Who and which: sessions, epochs, hosts, instances, names.

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
    /// A session: one initiator's use of one target. Random, given by the target at the first
    /// LOGIN, so that knowing it is needed to join or supersede a session.
    SessionId
}
id128! {
    /// The host an initiator runs on; stable over restarts.
    HostId
}
id128! {
    /// One run of a target. New at every start.
    InstanceId
}
id128! {
    /// What the promise of a volume's acknowledged writes rests on, as the verifier of NFS COMMIT.
    /// While it is the same, every write that was acknowledged is there or will be made durable by
    /// the next FLUSH. When it is another, writes that no completed FLUSH covered may be lost.
    WriteVerifier
}

/// Counts the lives of a session's connections. A reconnect raises it; commands of older epochs are
/// finished or dropped before the first of the new one is admitted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Epoch(pub u32);

impl Epoch {
    /// The next one, or `None` at the end of the numbers (a new session is needed then).
    #[must_use]
    pub fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }
}

/// Who may write a volume: rises with every change of holder, and never falls. A holder that lost
/// its session names the one it was given when it opens again; if the volume's is another by now,
/// somebody else may have written since, and nothing that was queued before may follow. 0 is a
/// fresh start, which has no past to answer for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Generation(pub u64);

impl Generation {
    /// Of an initiator that has not held the volume before.
    pub const FRESH: Self = Self(0);

    /// Whether it is of a fresh start.
    #[must_use]
    pub fn is_fresh(self) -> bool {
        self == Self::FRESH
    }

    /// That of the next holder, or `None` at the end of the numbers.
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

/// Numbers the commands of one queue in one epoch; wraps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sequence(pub u32);

impl Sequence {
    /// The next one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// A volume as the target named it at OPEN; meaningful within the session. 0 is none.
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
    /// Bytes after the padding began.
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
        // Checked to be ASCII in `new`, so the fallback is never taken.
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
