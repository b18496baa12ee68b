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
    /// No target answers there, or nothing is mounted under that name.
    NotConnected = 3,
    /// The object is there already: mounted, served, made. Nothing was changed.
    AlreadyThere = 4,
    /// The target refused: authorization, unknown volume, version.
    Refused = 5,
    /// The target cannot be reached.
    Unreachable = 6,
    /// This host lacks something: no RDMA device, no ublk, locked memory limit too small.
    HostLacks = 7,
    /// Not permitted: needs root, or the user of the target.
    NotPermitted = 8,
    /// A backing store is missing, locked or of a wrong size.
    Store = 9,
    /// A target that stopped gave acknowledged data up: a store did not take it.
    GaveUp = 10,
    /// The target has no volume, host or session of that name.
    NoSuchThing = 11,
    /// A reload did, or would do, all possible changes; some keys need a restart of the target.
    NeedsRestart = 12,
}

impl Exit {
    /// All of them, in order.
    pub const ALL: [Self; 13] = [
        Self::Ok,
        Self::Failure,
        Self::Usage,
        Self::NotConnected,
        Self::AlreadyThere,
        Self::Refused,
        Self::Unreachable,
        Self::HostLacks,
        Self::NotPermitted,
        Self::Store,
        Self::GaveUp,
        Self::NoSuchThing,
        Self::NeedsRestart,
    ];

    /// The number.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The meaning, in one line. `--help` and docs/reference.md have these words.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Ok => "done",
            Self::Failure => "failed; the message says why",
            Self::Usage => "wrong usage or bad configuration",
            Self::NotConnected => "no target answers, or nothing is mounted under that name",
            Self::AlreadyThere => "already there (mounted, served or made), nothing was changed",
            Self::Refused => "refused by the target (authorization, unknown volume, version)",
            Self::Unreachable => "the target cannot be reached, or an address cannot be used",
            Self::HostLacks => {
                "this host lacks something (RDMA device, ublk driver, lockable memory)"
            }
            Self::NotPermitted => "not permitted, needs root",
            Self::Store => "a backing store is missing, locked or of a wrong size",
            Self::GaveUp => {
                "the target stopped and acknowledged data is lost, as a store did not take it"
            }
            Self::NoSuchThing => "the target has no such volume, host or session",
            Self::NeedsRestart => "reloaded, and some keys need a restart of the target",
        }
    }

    /// The exit code of that number.
    #[must_use]
    pub fn of_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|exit| exit.code() == code)
    }

    /// All codes with their meanings, as they stand below `--help`.
    #[must_use]
    pub fn help() -> String {
        let mut text = "Exit codes:".to_owned();
        for exit in Self::ALL {
            text += &format!("\n  {:>2}  {exit}", exit.code());
        }
        text
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
        assert_eq!(codes, (0..13).collect::<Vec<u8>>());
        assert_eq!(Exit::AlreadyThere.code(), 4);
        assert_eq!((Exit::Store.code(), Exit::GaveUp.code()), (9, 10));
        assert_eq!((Exit::NoSuchThing.code(), Exit::NeedsRestart.code()), (11, 12));
        assert_eq!((Exit::of_code(12), Exit::of_code(13)), (Some(Exit::NeedsRestart), None));
    }
}
