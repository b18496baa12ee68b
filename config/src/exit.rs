//! [`Exit`]: the exit codes of the programs.

use std::fmt;
use std::process::ExitCode;

/// Exit code of `rblk-target` and `rblk-initiator`. Scripts and units depend on the numbers, so
/// they do not change.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// A failure without a code of its own. The message says which.
    Failure = 1,
    /// Wrong usage, or a bad configuration.
    Usage = 2,
    /// Not connected, or not mounted.
    NotConnected = 3,
    /// Mounted already. Nothing was changed.
    AlreadyMounted = 4,
    /// The target refused: authorization, unknown volume, version.
    Refused = 5,
    /// The target cannot be reached.
    Unreachable = 6,
    /// This host lacks something: no RDMA device, no ublk, locked memory limit too small.
    HostLacks = 7,
    /// Not permitted: needs root.
    NotPermitted = 8,
    /// A backing store is missing, locked or of a wrong size.
    Store = 9,
    /// A target that stopped gave acknowledged data up: a store did not take it.
    GaveUp = 10,
}

impl Exit {
    /// All of them, in order, for manual pages and `--help`.
    pub const ALL: [Self; 11] = [
        Self::Ok,
        Self::Failure,
        Self::Usage,
        Self::NotConnected,
        Self::AlreadyMounted,
        Self::Refused,
        Self::Unreachable,
        Self::HostLacks,
        Self::NotPermitted,
        Self::Store,
        Self::GaveUp,
    ];

    /// The number.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The meaning, in one line.
    #[must_use]
    pub(crate) const fn meaning(self) -> &'static str {
        match self {
            Self::Ok => "done",
            Self::Failure => "failed",
            Self::Usage => "wrong usage or bad configuration",
            Self::NotConnected => "not connected or not mounted",
            Self::AlreadyMounted => "already mounted, nothing was changed",
            Self::Refused => "refused by the target (authorization, unknown volume, version)",
            Self::Unreachable => "the target cannot be reached",
            Self::HostLacks => {
                "this host lacks something (no RDMA device, no ublk, memlock too small)"
            }
            Self::NotPermitted => "not permitted, needs root",
            Self::Store => "a backing store is missing, locked or of a wrong size",
            Self::GaveUp => {
                "the target stopped and acknowledged data is lost, as a store did not take it"
            }
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.meaning())
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_documented_ones() {
        let codes: Vec<u8> = Exit::ALL.iter().map(|exit| exit.code()).collect();
        assert_eq!(codes, (0..11).collect::<Vec<u8>>());
        assert_eq!(Exit::AlreadyMounted.code(), 4);
        assert_eq!((Exit::Store.code(), Exit::GaveUp.code()), (9, 10));
    }
}
