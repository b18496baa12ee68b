//! [`Drain`]: the initiators are told, and the poll groups are stopped when all initiators have
//! left or the time is over.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rblk_protocol::{AsyncEvent, Epoch};

use super::{Core, Effect, EventKind, Occurrence};
use crate::identity::SessionIndex;

/// The drain of a target.
#[derive(Debug)]
pub(super) struct Drain {
    timeout: Duration,
    begun: Option<Begun>,
}

#[derive(Debug)]
struct Begun {
    since: Instant,
    stopped: bool,
    // Sessions that were told. When they ask again, there is nothing else to tell them.
    told: BTreeSet<(SessionIndex, Epoch)>,
}

impl Drain {
    /// No drain yet. A drain may take that long.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { timeout, begun: None }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// Whether it has begun, and has not ended the sessions that stay.
    pub(super) fn is_about_to_stop(&self) -> bool {
        self.begun.as_ref().is_some_and(|begun| !begun.stopped)
    }

    /// Whether a session has to be told now that it has begun: once in each epoch.
    pub(super) fn must_tell(&mut self, session: SessionIndex, epoch: Epoch) -> bool {
        self.begun.as_mut().is_some_and(|begun| begun.told.insert((session, epoch)))
    }
}

/// How far a drain is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DrainState {
    /// How long it has taken so far.
    pub lasted: Duration,
    /// Time until the sessions that stay are ended, at the latest.
    pub left: Duration,
    /// Sessions that still have connections.
    pub sessions: usize,
}

impl Core {
    /// Takes no new connections from now on, tells the initiators, and stops the poll groups when
    /// they have left or after the drain's time. Does nothing the second time.
    pub fn drain(&mut self, now: Instant) {
        if self.drain.has_begun() {
            return;
        }
        tracing::info!(sessions = self.sessions.iter().count(), "draining");
        self.latest = now;
        let sessions = self.connected_sessions();
        let text = format!("the target stops; connected sessions: {sessions}");
        self.happened(Occurrence::new(EventKind::Drain, text));
        let told = self.tell_all(AsyncEvent::Draining);
        self.drain.begun = Some(Begun { since: now, stopped: false, told });
        self.stop_if_drained(now);
    }

    /// Whether it drains.
    #[must_use]
    pub(crate) fn is_draining(&self) -> bool {
        self.drain.has_begun()
    }

    /// How far the drain is; `None` when there is none.
    #[must_use]
    pub(crate) fn drain_state(&self, now: Instant) -> Option<DrainState> {
        let lasted = now.saturating_duration_since(self.drain.begun.as_ref()?.since);
        let left = self.drain.timeout.saturating_sub(lasted);
        Some(DrainState { lasted, left, sessions: self.connected_sessions() })
    }

    fn connected_sessions(&self) -> usize {
        self.sessions.iter().filter(|s| s.connections() > 0).count()
    }

    pub(super) fn stop_if_drained(&mut self, now: Instant) {
        let sessions = self.connected_sessions();
        let timeout = self.drain.timeout;
        let Some(begun) = self.drain.begun.as_mut().filter(|begun| !begun.stopped) else { return };
        let late = now.saturating_duration_since(begun.since) > timeout;
        if sessions > 0 && !late {
            return;
        }
        if sessions > 0 {
            tracing::info!(sessions, "drained: ending the sessions that stayed");
        }
        begun.stopped = true;
        self.effects.push_back(Effect::StopGroups);
    }
}
