//! What the connections of one session may take.

use rblk_protocol::RejectReason;
use rblk_protocol::limits::QUEUES_MAX;
use rblk_protocol::width::wide64;

use super::proof::Rights;
use super::{Core, Refused, refused};
use crate::identity::SessionIndex;
use crate::session::Session;

/// What connections may take together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Budget {
    /// Connections at a time, admin included.
    pub(super) connections_max: u32,
    /// Bytes of their memory: receive slots, answers and replies.
    pub(super) memory_max: u64,
}

impl Budget {
    /// Of one session, where no host is known: every queue that the protocol allows.
    pub(super) const OF_A_SESSION: Self =
        Self { connections_max: QUEUES_MAX as u32 + 1, memory_max: 512 << 20 };

    /// Whether another connection with so much memory fits.
    ///
    /// # Errors
    /// The text for the peer: which limit it reached, and its key.
    fn check(self, connections: u64, used: u64, memory_bytes: u64) -> Result<(), String> {
        let Self { connections_max, memory_max } = self;
        if connections >= connections_max.into() {
            return Err(format!(
                "{connections_max} connections are your limit here (connections_max)"
            ));
        }
        if used.saturating_add(memory_bytes) > memory_max {
            return Err(format!(
                "{} MiB for connections are your limit here (memory_max): less --queue-depth",
                memory_max >> 20
            ));
        }
        Ok(())
    }
}

impl Core {
    /// Whether the session may have another connection with so much memory, and so may its host.
    pub(super) fn check_budget(
        &self,
        session: SessionIndex,
        memory_bytes: u64,
    ) -> Result<(), Refused> {
        let Some(state) = self.sessions.get(session) else { return Ok(()) };
        let used = |session: &Session| (wide64(session.all_connections()), session.memory_bytes());
        let check = |budget: Budget, (connections, used)| {
            let checked = budget.check(connections, used, memory_bytes);
            checked.map_err(|text| refused(RejectReason::LimitReached, text))
        };
        check(Budget::OF_A_SESSION, used(state))?;
        let Rights::Of(host) = self.rights(session) else { return Ok(()) };
        let of_host = self.sessions.iter().filter(|session| session.host == host.id()).map(used);
        check(host.budget(), of_host.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1)))
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::limits::REJECT_TEXT_BYTES;

    use super::*;

    #[test]
    fn a_refusal_names_the_limit_and_its_key() {
        let budget = Budget { connections_max: u32::MAX, memory_max: u64::MAX - 1 };
        budget.check(u64::from(u32::MAX) - 1, 1, u64::MAX - 2).unwrap();
        let text = budget.check(u64::from(u32::MAX), 0, 0).unwrap_err();
        assert!(text.contains("connections_max") && text.len() <= REJECT_TEXT_BYTES, "{text}");
        let text = budget.check(0, 1, u64::MAX - 1).unwrap_err();
        assert!(text.contains("memory_max") && text.len() <= REJECT_TEXT_BYTES, "{text}");
    }
}
