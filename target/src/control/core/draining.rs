//! [`Drain`]: tells the initiators that the target goes, and stops the poll groups when all
//! initiators have left or the time is over.
//!
//! A target goes to stop, or to make room for the next program ([`Going::Upgrade`]). A stop that is
//! ordered while it makes room wins.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rblk_protocol::{AsyncEvent, Epoch};

use super::{Core, Effect, EventKind, Occurrence};
use crate::volume::ids::SessionIndex;

/// How long mounts may take to leave a target that is being upgraded. They leave a little sooner,
/// even with commands unanswered.
const UPGRADE_WAIT: Duration = Duration::from_millis(1500);

/// Why a target goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Going {
    /// The target stops.
    Stop,
    /// Another program takes its place.
    Upgrade,
}

/// The drain of a target.
#[derive(Debug)]
pub(super) struct Drain {
    timeout: Duration,
    begun: Option<Begun>,
}

#[derive(Debug)]
struct Begun {
    going: Going,
    limit: Duration,
    since: Instant,
    stopped: bool,
    // Sessions that had not left by then.
    stayed: usize,
    // The last event of each session, which it does not get again.
    told: BTreeMap<(SessionIndex, Epoch), AsyncEvent>,
}

impl Drain {
    /// No drain yet. A drain that stops the target may take `timeout`.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { timeout, begun: None }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// Whether the drain has begun, but has not ended the sessions that stay.
    pub(super) fn is_about_to_stop(&self) -> bool {
        self.begun.as_ref().is_some_and(|begun| !begun.stopped)
    }

    /// The event for a session after the drain began: once in each epoch. A session that asks again
    /// after [`AsyncEvent::Upgrading`] does not know it, and gets the event that every version
    /// knows.
    pub(super) fn news_for(&mut self, session: SessionIndex, epoch: Epoch) -> Option<AsyncEvent> {
        let begun = self.begun.as_mut()?;
        let before = begun.told.get(&(session, epoch));
        let event = match (begun.going, before) {
            (Going::Upgrade, None) => AsyncEvent::Upgrading,
            (_, Some(AsyncEvent::Draining)) => return None,
            (_, _) => AsyncEvent::Draining,
        };
        begun.told.insert((session, epoch), event);
        Some(event)
    }
}

/// How far a drain is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DrainState {
    /// How long the drain has taken so far.
    pub lasted: Duration,
    /// Time until the sessions that stay are ended, at the latest.
    pub left: Duration,
    /// Sessions that still have connections.
    pub sessions: usize,
}

impl Core {
    /// Begins to drain: refuses new connections, tells the initiators, and stops the poll groups
    /// when they have left or after the drain's time. Does nothing the second time.
    pub fn drain(&mut self, now: Instant) {
        match &mut self.drain.begun {
            Some(begun) if begun.going == Going::Upgrade => {
                tracing::info!("draining: the target stops, and no other program takes its place");
                (begun.going, begun.limit) = (Going::Stop, self.drain.timeout);
            }
            Some(_) => {}
            None => {
                let text = "the target stops; connected sessions: ";
                self.begin_to_go(Going::Stop, self.drain.timeout, (EventKind::Drain, text), now);
            }
        }
    }

    /// Drains because another program takes the place of this one. Mounts have little time to
    /// leave.
    pub fn drain_for_upgrade(&mut self, now: Instant) {
        if !self.drain.has_begun() {
            let text = "another program takes the place of the target; connected sessions: ";
            self.begin_to_go(Going::Upgrade, UPGRADE_WAIT, (EventKind::Upgrade, text), now);
        }
    }

    fn begin_to_go(
        &mut self,
        going: Going,
        limit: Duration,
        (kind, text): (EventKind, &str),
        now: Instant,
    ) {
        tracing::info!(sessions = self.sessions.iter().count(), "draining");
        self.latest = now;
        let sessions = self.connected_sessions();
        self.happened(Occurrence::new(kind, format!("{text}{sessions}")));
        let event = match going {
            Going::Stop => AsyncEvent::Draining,
            Going::Upgrade => AsyncEvent::Upgrading,
        };
        let told = self.tell_all(event).into_iter().map(|whom| (whom, event)).collect();
        self.drain.begun =
            Some(Begun { going, limit, since: now, stopped: false, stayed: 0, told });
        self.stop_if_drained(now);
    }

    /// Whether the target drains.
    #[must_use]
    pub(crate) fn is_draining(&self) -> bool {
        self.drain.has_begun()
    }

    /// Whether the target drains to make room for another program.
    #[must_use]
    pub fn is_upgrading(&self) -> bool {
        self.drain.begun.as_ref().is_some_and(|begun| begun.going == Going::Upgrade)
    }

    /// Sessions that a drain ended, because they had not left in time.
    #[must_use]
    pub fn stayed(&self) -> usize {
        self.drain.begun.as_ref().map_or(0, |begun| begun.stayed)
    }

    /// How far the drain is; `None` when there is none.
    #[must_use]
    pub(crate) fn drain_state(&self, now: Instant) -> Option<DrainState> {
        let begun = self.drain.begun.as_ref()?;
        let lasted = now.saturating_duration_since(begun.since);
        let left = begun.limit.saturating_sub(lasted);
        Some(DrainState { lasted, left, sessions: self.connected_sessions() })
    }

    fn connected_sessions(&self) -> usize {
        self.sessions.iter().filter(|s| s.connections() > 0).count()
    }

    pub(super) fn stop_if_drained(&mut self, now: Instant) {
        let sessions = self.connected_sessions();
        let Some(begun) = self.drain.begun.as_mut().filter(|begun| !begun.stopped) else { return };
        let late = now.saturating_duration_since(begun.since) > begun.limit;
        if sessions > 0 && !late {
            return;
        }
        if sessions > 0 {
            tracing::info!(sessions, "drained: ending the sessions that stayed");
        }
        (begun.stopped, begun.stayed) = (true, sessions);
        self.effects.push_back(Effect::StopGroups);
    }
}
