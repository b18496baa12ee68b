//! [`Violation`]: why a connection ends that its poll group serves.

/// A rule that the peer broke, or a bug of ours: the connection ends, and the log says why.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Violation(pub(crate) &'static str);

impl Violation {
    /// No fault of anybody: a command came for a volume that changes. Its host connects again, and
    /// sends the command again when it has opened the volume again.
    pub(crate) const VOLUME_CHANGES: Self = Self("its volume changes");
}

/// What comes of serving a connection.
pub(crate) type Served = Result<(), Violation>;
