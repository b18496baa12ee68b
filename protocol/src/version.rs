//! Versions of the protocol, newest first.

/// A protocol version. The two ends agree on the newest that both speak.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version(pub u16);

impl Version {
    /// The newest version that this code speaks.
    pub const NEWEST: Self = VERSIONS[0].0;
    /// The oldest version that this code speaks.
    pub const OLDEST: Self = VERSIONS[VERSIONS.len() - 1].0;
}

/// Every version that this code speaks, newest first, with the changes.
///
/// An optional ability needs no new version. It is a bit of [`Features`](crate::Features), and an
/// end that does not know the bit does not set it. Lists of capsules, and data of several commands
/// in one message, were added in this way.
pub const VERSIONS: &[(Version, &str)] = &[(
    Version(3),
    "first of a release: 64 B commands, 16 B responses, one keyed descriptor, in-capsule data, sessions with epochs, \
     write verifiers, generations of a volume's holders, a nonce in each accept for the proofs of both ends. Version \
     1 had no generations: an end that speaks only that cannot be fenced. Version 2 had no nonce: its ends cannot \
     prove their keys. Both are refused",
)];

const _: () = {
    let mut i = 1;
    while i < VERSIONS.len() {
        assert!(VERSIONS[i - 1].0.0 > VERSIONS[i].0.0, "newest first");
        i += 1;
    }
};
