//! Drain: the initiators are told, and the poll groups stopped when they have left or the time is
//! over.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rblk_protocol::{AsyncEvent, CommandCapsule, Epoch, Status, Tag};

use super::{Answer, ConnectionRef, Core, Effect, refuse};
use crate::connection::SessionSlot;

/// ASYNC_EVENTs one session may park.
const PARKED_PER_SESSION: usize = 4;

/// An ASYNC_EVENT that waits for something to happen.
#[derive(Debug)]
pub(super) struct Parked {
    from: ConnectionRef,
    tag: Tag,
    pub(super) session: SessionSlot,
    pub(super) epoch: Epoch,
}

#[derive(Debug)]
pub(super) struct Draining {
    since: Instant,
    stopped: bool,
    // Who knows of it: one that asks again has nothing else to be told.
    told: BTreeSet<(SessionSlot, Epoch)>,
}

/// How far a drain is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DrainState {
    /// How long it has taken so far.
    pub lasted: Duration,
    /// When those who stayed will be ended, at the latest; from now.
    pub left: Duration,
    /// Sessions that still have connections.
    pub sessions: usize,
}

impl Core {
    /// Takes no new connections from now on, tells the initiators, and stops the poll groups when
    /// they have left or after the drain's time. Does nothing the second time.
    pub fn drain(&mut self, now: Instant) {
        if self.draining.is_some() {
            return;
        }
        tracing::info!(sessions = self.sessions.iter().count(), "draining");
        self.latest = now;
        let mut told = BTreeSet::new();
        for parked in std::mem::take(&mut self.parked) {
            let event = AsyncEvent::Draining as u32;
            told.insert((parked.session, parked.epoch));
            self.reply(parked.from, parked.tag, Status::Ok, event, Vec::new());
        }
        self.draining = Some(Draining { since: now, stopped: false, told });
        self.stop_if_drained(now);
    }

    /// Whether it drains.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.is_some()
    }

    /// Whether it drains, and has not ended those who stay.
    pub(super) fn is_about_to_stop(&self) -> bool {
        self.draining.as_ref().is_some_and(|draining| !draining.stopped)
    }

    /// How far the drain is; `None` when there is none.
    #[must_use]
    pub fn drain_state(&self, now: Instant) -> Option<DrainState> {
        let lasted = now.saturating_duration_since(self.draining.as_ref()?.since);
        let left = self.drain_timeout.saturating_sub(lasted);
        Some(DrainState { lasted, left, sessions: self.connected_sessions() })
    }

    fn connected_sessions(&self) -> usize {
        self.sessions.iter().filter(|s| s.connections() > 0).count()
    }

    pub(super) fn stop_if_drained(&mut self, now: Instant) {
        let sessions = self.connected_sessions();
        let Some(draining) = self.draining.as_mut().filter(|d| !d.stopped) else { return };
        let late = now.saturating_duration_since(draining.since) > self.drain_timeout;
        if sessions > 0 && !late {
            return;
        }
        if sessions > 0 {
            tracing::info!(sessions, "drained: ending the sessions that stayed");
        }
        draining.stopped = true;
        self.effects.push_back(Effect::StopGroups);
    }

    pub(super) fn async_event(
        &mut self,
        from: ConnectionRef,
        session: SessionSlot,
        command: &CommandCapsule,
    ) -> Answer {
        if self.parked.iter().filter(|p| p.session == session).count() >= PARKED_PER_SESSION {
            return refuse(Status::LimitReached);
        }
        let epoch = command.epoch;
        if self.draining.as_mut().is_some_and(|draining| draining.told.insert((session, epoch))) {
            return Answer::Now(Status::Ok, AsyncEvent::Draining as u32, Vec::new());
        }
        self.parked.push(Parked { from, tag: command.tag, session, epoch });
        Answer::Later
    }
}
