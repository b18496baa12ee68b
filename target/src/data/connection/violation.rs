//! [`Violation`]: the reason why a poll group ends a connection.

/// A rule that the peer broke, or a bug in this code: the connection ends, and the log has the
/// reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Violation(pub(crate) &'static str);

impl Violation {
    /// No fault: a command came for a volume that changes. Its host connects again, opens the
    /// volume again, and repeats the command.
    pub(crate) const VOLUME_CHANGES: Self = Self("its volume changes");
}

/// The result of serving a connection.
pub(crate) type Served = Result<(), Violation>;
