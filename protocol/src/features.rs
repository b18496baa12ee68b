//! [`Features`]: optional abilities that the two ends agree on.

/// Optional abilities, one bit each. A connection has those that both ends have.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Features(pub u32);

impl Features {
    /// READs may be answered by WRITE_WITH_IMM, after the self-test passed.
    pub const WRITE_WITH_IMM: Self = Self(1);
    /// Capsules and data carry CRC-32C digests: [`crate::digest`]. Not where one command may move
    /// more than [`crate::limits::DIGEST_IO_MAX_BYTES`].
    pub const DIGEST: Self = Self(2);
    /// A message may hold several capsules, in both directions: [`crate::CommandList`],
    /// [`crate::ResponseList`].
    pub const CAPSULE_LISTS: Self = Self(4);
    /// Up to [`crate::limits::LIST_DATA_MAX`] commands of a message may have in-capsule data, not
    /// only the last. Only together with [`Self::CAPSULE_LISTS`].
    pub const DATA_LISTS: Self = Self(8);

    /// The ends prove their keys ([`crate::auth`]): an initiator offers it if it has keys, a target
    /// takes it if it asks for proof. On an I/O connection it says that the self-test carries
    /// proofs.
    pub const AUTH: Self = Self(16);
    /// The stream of an I/O connection is encrypted behind the handshake reply
    /// ([`crate::auth::StreamKeys`]). Over TCP only, and only together with [`Self::AUTH`].
    pub const ENCRYPT: Self = Self(32);

    /// In-capsule data is at the front of a message, and the capsules are behind it, that of the
    /// first command last: [`crate::CommandList`]. So the receiver's device can put the data of a
    /// command where it is to stay, without knowing how many capsules there are.
    pub const DATA_FIRST: Self = Self(64);

    /// A session may have several epochs at a time, one for each way of its host to the target: a
    /// LOGIN may [join](crate::Join) it, and [`Drop`](crate::Opcode::Drop) ends epochs. On admin
    /// connections.
    pub const WAYS: Self = Self(128);

    /// Whether it has all of `other`.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The abilities that both have.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The abilities of both together.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// All abilities, except those that need another one that is missing, and digests where the
    /// stream is encrypted: its records find every change, too.
    #[must_use]
    pub fn possible(self) -> Self {
        let lists = if self.has(Self::CAPSULE_LISTS) { Self(0) } else { Self::DATA_LISTS };
        let auth = if self.has(Self::AUTH) { Self(0) } else { Self::ENCRYPT };
        let fine = self.without(lists.or(auth));
        if fine.has(Self::ENCRYPT) { fine.without(Self::DIGEST) } else { fine }
    }

    /// All abilities except `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}
