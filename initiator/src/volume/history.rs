//! [`History`]: a mount's record of its connections to the target: the last loss and its reason,
//! and the longest stall. Logs each reason for a failed try once.

use std::time::{Duration, SystemTime};

use rblk_operate::mount::mount_status::MountStatus;

/// Limit of the logged reasons for failed tries in one outage.
const LOGGED_MAX: usize = 32;

/// Past losses of the target.
#[derive(Debug, Default)]
pub(super) struct History {
    last_loss: Option<String>,
    lost_at_unix_ms: Option<u64>,
    stall_ms_max: u64,
    verifier_changes: u64,
    // The last epoch, while no session has one.
    epoch: u32,
    // Reasons for failed tries since the target was lost. Each is logged once.
    logged: Vec<String>,
}

/// A duration in milliseconds.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl History {
    /// No loss yet, except the reason why a recovered mount cannot connect.
    pub(super) fn new(last_loss: Option<String>) -> Self {
        Self { last_loss, ..Self::default() }
    }

    /// The target was lost.
    pub(super) fn lost(&mut self, why: &str) {
        self.last_loss = Some(why.to_owned());
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.lost_at_unix_ms = since_epoch.ok().map(millis);
    }

    /// A try to reconnect failed. Returns whether to log the reason.
    pub(super) fn failed(&mut self, why: &str) -> bool {
        self.last_loss = Some(why.to_owned());
        let known = self.logged.iter().any(|logged| logged == why);
        let is_new = !known && self.logged.len() < LOGGED_MAX;
        if is_new {
            self.logged.push(why.to_owned());
        }
        is_new
    }

    /// No try will succeed.
    pub(super) fn over(&mut self, why: String) {
        self.last_loss = Some(why);
    }

    /// The session is gone; `epoch` was its epoch.
    pub(super) fn session_gone(&mut self, epoch: u32) {
        self.epoch = epoch;
    }

    /// The target is back.
    pub(super) fn connected(&mut self, stalled: Duration, verifier_changed: bool) {
        self.stall_ms_max = self.stall_ms_max.max(millis(stalled));
        self.verifier_changes += u64::from(verifier_changed);
        self.logged.clear();
    }

    /// The last epoch of the lost session.
    pub(super) fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Fills in its part of the status. The target has been lost for `lost_ms_ago`.
    pub(super) fn report(&self, status: &mut MountStatus, lost_ms_ago: Option<u64>) {
        status.last_loss.clone_from(&self.last_loss);
        status.lost_at_unix_ms = self.lost_at_unix_ms;
        status.lost_ms_ago = lost_ms_ago;
        status.stall_ms_max = self.stall_ms_max.max(lost_ms_ago.unwrap_or(0));
        status.verifier_changes = self.verifier_changes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_logged_once_in_an_outage() {
        let mut history = History::new(None);
        history.lost("silent");
        assert!(history.failed("refused"));
        assert!(!history.failed("refused"));
        assert!(history.failed("no route"));
        history.connected(Duration::from_millis(30), true);
        assert!(history.failed("refused"), "a new outage");
        for reason in 0..100 {
            history.failed(&reason.to_string());
        }
        assert!(!history.failed("another"), "not without a limit");
        let mut status = MountStatus::default();
        history.report(&mut status, Some(7));
        assert_eq!((status.stall_ms_max, status.lost_ms_ago), (30, Some(7)));
        assert_eq!((status.verifier_changes, status.last_loss.as_deref()), (1, Some("another")));
        assert!(status.lost_at_unix_ms.is_some());
    }
}
