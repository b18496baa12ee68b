//! Whether a target serves, for load balancers and probes. Pure.

use rblk_operate::target::status::TargetStatus;

/// Whether a target serves, and the reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Health {
    /// Whether the target takes new sessions.
    pub serving: bool,
    /// The state in one line.
    pub text: String,
}

/// The health of a target; `None`: it did not answer in time, or its control has ended.
#[must_use]
pub fn health(status: Option<&TargetStatus>) -> Health {
    let Some(status) = status else {
        return Health { serving: false, text: "stopping: control does not answer".to_owned() };
    };
    let text = match &status.drain {
        Some(drain) => format!(
            "draining for {:.1} s: {} sessions left, ended in {:.1} s at the latest",
            seconds(drain.lasted_ms),
            drain.sessions,
            seconds(drain.left_ms)
        ),
        None if status.draining => "draining".to_owned(),
        None => format!(
            "serving {} volumes to {} sessions",
            status.volumes.len(),
            status.sessions.len()
        ),
    };
    Health { serving: !status.draining, text }
}

fn seconds(ms: u64) -> f64 {
    // Exact for all times that occur.
    ms as f64 / 1000.0
}
