//! Whether a session may have another connection: what it and its host have is compared with their
//! [budgets](super::budget).

use rblk_protocol::RejectReason;
use rblk_protocol::width::wide64;

use super::budget::Budget;
use super::proof::Rights;
use super::{Core, Refused, refused};
use crate::identity::SessionIndex;
use crate::session::Session;

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
