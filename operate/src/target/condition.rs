//! [`Condition`]: the state of a target in one word, the worst that applies. Pure.

use nix::errno::Errno;

use crate::target::events::EventKind;
use crate::target::status::{TargetStatus, VolumeStatus};

/// How long after an error a store counts as failing, in seconds, if no write is tried again.
const RECENT_S: u64 = 60;

/// The state of a target, the worst first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Condition {
    /// Acknowledged writes may be lost. Every FLUSH of the volume fails until a restart.
    LostWrites,
    /// A store has no room.
    Full,
    /// A store fails.
    StoreErrors,
    /// A file or device is not the served one.
    StoreFault,
    /// The target stops.
    Draining,
    /// Another program takes its place.
    Upgrading,
    /// `state_dir` cannot be written.
    StateDir,
    /// An address has no listener.
    ListenerDown,
    /// A configured volume is not served, and not by another member of the group either.
    VolumeAway,
    /// The target serves, without a fault.
    Serving,
}

impl Condition {
    /// The word in JSON.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::LostWrites => "lost-writes",
            Self::Full => "full",
            Self::StoreErrors => "store-errors",
            Self::StoreFault => "store-fault",
            Self::Draining => "draining",
            Self::Upgrading => "upgrading",
            Self::StateDir => "state-dir",
            Self::ListenerDown => "listener-down",
            Self::VolumeAway => "volume-away",
            Self::Serving => "serving",
        }
    }

    /// The worst condition that applies.
    #[must_use]
    pub fn of(status: &TargetStatus) -> Self {
        let has_lost = status
            .events
            .iter()
            .any(|event| event.kind == EventKind::LostWrites && event.total > 0);
        let is_upgrade = status.drain.as_ref().is_some_and(|drain| drain.upgrade);
        let any = |test: fn(&VolumeStatus) -> bool| status.volumes.iter().any(test);
        let so = [
            (has_lost, Self::LostWrites),
            (any(is_full), Self::Full),
            (any(is_failing), Self::StoreErrors),
            (any(|volume| volume.store_fault.is_some()), Self::StoreFault),
            (status.draining && !is_upgrade, Self::Draining),
            (is_upgrade, Self::Upgrading),
            (status.state_dir_fault.is_some(), Self::StateDir),
            (!status.listen_down.is_empty(), Self::ListenerDown),
            (status.volumes_away.iter().any(|away| !away.elsewhere), Self::VolumeAway),
        ];
        so.into_iter().find(|(is_so, _)| *is_so).map_or(Self::Serving, |(_, condition)| condition)
    }
}

/// Whether a store fails: it refuses dirty blocks now, or it failed a moment ago.
fn is_failing(volume: &VolumeStatus) -> bool {
    let recent = volume.last_error_age_s.is_some_and(|age| age < RECENT_S);
    volume.counts.failed_blocks > 0 || (recent && volume.counts.store_errors > 0)
}

/// Whether a store has no room for writes.
#[must_use]
pub fn is_full(volume: &VolumeStatus) -> bool {
    let no_room = |errno| errno == Errno::ENOSPC as i32 || errno == Errno::EDQUOT as i32;
    let refuses = is_failing(volume) && volume.last_errno.is_some_and(no_room);
    let has_none = volume.room.as_ref().is_some_and(|room| room.is_full());
    refuses || (has_none && !volume.read_only)
}
