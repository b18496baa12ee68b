//! Whether a host may have another session, and a session another connection: compares their use
//! with their [budgets](crate::control::core::budget).
//!
//! Only proven use counts. A session is booked on its host when its LOGIN is accepted, and an I/O
//! connection when it has proven its session. Until then they have [places](super::places) that
//! belong to no host.

use rblk_protocol::RejectReason;
use rblk_protocol::width::wide64;

use crate::control::core::budget::{Budget, Capacity};
use crate::control::core::connect_refusal::{ConnectRefusal, refused};
use crate::control::core::hosts::Host;
use crate::control::core::sessions::HostSessions;
use crate::control::core::sessions::proofs::Rights;
use crate::control::peers::account::Payer;
use crate::control::peers::session::{Session, SessionTable};
use crate::volume::ids::SessionIndex;

/// The resources in use by a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Used {
    // Those with connections.
    sessions: u64,
    // Those without, which are kept for the lease.
    kept_sessions: u64,
    connections: u64,
    memory_bytes: u64,
}

impl Used {
    /// The resources in use by all sessions of an account.
    fn by(account: &Payer, table: &SessionTable) -> Self {
        let theirs = table.iter().filter(|session| session.account == *account);
        theirs.fold(Self::default(), Self::and)
    }

    fn and(self, session: &Session) -> Self {
        let is_kept = session.connections() == 0;
        Self {
            sessions: self.sessions + u64::from(!is_kept),
            kept_sessions: self.kept_sessions + u64::from(is_kept),
            // A session without connections may come back with one at any time.
            connections: self.connections + wide64(session.connections()).max(1),
            memory_bytes: self.memory_bytes.saturating_add(session.memory_bytes()),
        }
    }
}

/// The parts of the target's resources that hosts and sessions may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostAllowance {
    capacity: Capacity,
}

impl HostAllowance {
    /// The allowance of a target with these resources.
    pub(super) fn new(capacity: Capacity) -> Self {
        Self { capacity }
    }

    /// The budget of the connections of a host. Where hosts prove their identity, its entry may set
    /// it.
    fn budget_of(self, host: Option<&Host>) -> Budget {
        let usual = self.capacity.of_a_host();
        host.map_or(usual, |host| host.budget(usual))
    }

    /// Whether a host may begin another session with this much memory for its admin connection.
    ///
    /// # Errors
    /// The text for the peer names the limit.
    pub(super) fn check_new_session(
        self,
        table: &SessionTable,
        (account, host): (&Payer, Option<&Host>),
        memory_bytes: u64,
    ) -> Result<(), String> {
        let used = Used::by(account, table);
        let sessions_max = self.capacity.sessions_of_a_host();
        if used.sessions >= u64::from(sessions_max) {
            return Err(format!(
                "{sessions_max} sessions are your limit here, a quarter of sessions_max"
            ));
        }
        let kept_max = self.capacity.kept_sessions_of_a_host();
        if used.sessions + used.kept_sessions >= u64::from(kept_max) {
            return Err(format!(
                "{kept_max} sessions are your limit here with those that a lease keeps: wait for its end"
            ));
        }
        self.budget_of(host).check(used.connections, used.memory_bytes, memory_bytes)
    }

    /// Whether the session and its host may have another proven connection with this much memory.
    pub(super) fn check_budget(
        self,
        sessions: &HostSessions,
        session: SessionIndex,
        memory_bytes: u64,
    ) -> Result<(), ConnectRefusal> {
        let Some(state) = sessions.table().get(session) else { return Ok(()) };
        let host = match sessions.proofs().rights(session) {
            Rights::Of(host) => Some(host),
            Rights::All | Rights::None => None,
        };
        let used = Used::by(&state.account, sessions.table());
        let of_session = (wide64(state.connections()), state.memory_bytes());
        let checked = Budget::OF_A_SESSION.check(of_session.0, of_session.1, memory_bytes);
        let checked = checked.and_then(|()| {
            self.budget_of(host).check(used.connections, used.memory_bytes, memory_bytes)
        });
        checked.map_err(|text| refused(RejectReason::LimitReached, text))
    }
}
