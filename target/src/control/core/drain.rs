//! [`Drain`]: the initiators are told, and the poll groups are stopped when all initiators have
//! left or the time is over.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rblk_protocol::{AsyncEvent, CommandCapsule, Epoch, Status, Tag};

use super::{Answer, ConnectionRef, Core, Effect, EventKind, Occurrence, refuse};
use crate::identity::SessionIndex;

/// ASYNC_EVENTs one session may park.
const PARKED_PER_SESSION: usize = 4;

/// An ASYNC_EVENT that waits for something to happen.
#[derive(Debug)]
struct Parked {
    from: ConnectionRef,
    tag: Tag,
    session: SessionIndex,
    epoch: Epoch,
}

/// The drain of a target. Before it begins: the events by which initiators will be told.
#[derive(Debug)]
pub(super) struct Drain {
    timeout: Duration,
    parked: Vec<Parked>,
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
        Self { timeout, parked: Vec::new(), begun: None }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// Whether it has begun, and has not ended the sessions that stay.
    pub(super) fn is_about_to_stop(&self) -> bool {
        self.begun.as_ref().is_some_and(|begun| !begun.stopped)
    }

    /// Forgets the ASYNC_EVENTs of a session, or those of one epoch of it.
    pub(super) fn forget_events(&mut self, session: SessionIndex, epoch: Option<Epoch>) {
        self.parked.retain(|p| p.session != session || epoch.is_some_and(|e| e != p.epoch));
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
        let mut told = BTreeSet::new();
        for parked in std::mem::take(&mut self.drain.parked) {
            let event = AsyncEvent::Draining as u32;
            told.insert((parked.session, parked.epoch));
            self.reply(parked.from, parked.tag, Status::Ok, event, Vec::new());
        }
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

    pub(super) fn async_event(
        &mut self,
        from: ConnectionRef,
        session: SessionIndex,
        command: &CommandCapsule,
    ) -> Answer {
        let Drain { parked, begun, .. } = &mut self.drain;
        if parked.iter().filter(|p| p.session == session).count() >= PARKED_PER_SESSION {
            return refuse(Status::LimitReached);
        }
        let epoch = command.epoch;
        if begun.as_mut().is_some_and(|begun| begun.told.insert((session, epoch))) {
            return Answer::Now(Status::Ok, AsyncEvent::Draining as u32, Vec::new());
        }
        parked.push(Parked { from, tag: command.tag, session, epoch });
        Answer::Later
    }
}
