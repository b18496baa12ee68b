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

    /// All abilities, except those that need another one that is missing.
    #[must_use]
    pub fn possible(self) -> Self {
        if self.has(Self::CAPSULE_LISTS) { self } else { self.without(Self::DATA_LISTS) }
    }

    /// All abilities except `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}
