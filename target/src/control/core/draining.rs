//! [`Drain`]: tells the initiators that the target goes, and stops the poll groups when all
//! initiators have left or the time is over.
//!
//! A target goes to stop, or to make room for the next program ([`Going::Upgrade`]). A stop that is
//! ordered while it makes room wins.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_protocol::{AsyncEvent, Epoch};

use super::effect::Effect;
use super::outbox::Outbox;
use super::sessions::HostSessions;
use crate::volume::ids::SessionIndex;

/// How long mounts may take to leave a target that is being upgraded. They leave a little sooner,
/// even with commands unanswered.
const UPGRADE_WAIT: Duration = Duration::from_millis(1500);

/// Why a target goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Going {
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

    /// Begins to drain: tells the initiators, and stops the poll groups when they have left or
    /// after the drain's time. Does nothing the second time, but that a stop takes the place of an
    /// upgrade.
    pub(super) fn stop(&mut self, sessions: &mut HostSessions, out: &mut Outbox, now: Instant) {
        match &mut self.begun {
            Some(begun) if begun.going == Going::Upgrade => {
                tracing::info!("draining: the target stops, and no other program takes its place");
                (begun.going, begun.limit) = (Going::Stop, self.timeout);
            }
            Some(_) => {}
            None => {
                let text = "the target stops; connected sessions: ";
                let why = (Going::Stop, self.timeout);
                self.begin(why, (EventKind::Drain, text), (sessions, out), now);
            }
        }
    }

    /// Drains because another program takes the place of this one. Mounts have little time to
    /// leave.
    pub(super) fn upgrade(&mut self, sessions: &mut HostSessions, out: &mut Outbox, now: Instant) {
        if !self.has_begun() {
            let text = "another program takes the place of the target; connected sessions: ";
            let why = (Going::Upgrade, UPGRADE_WAIT);
            self.begin(why, (EventKind::Upgrade, text), (sessions, out), now);
        }
    }

    fn begin(
        &mut self,
        (going, limit): (Going, Duration),
        (kind, text): (EventKind, &str),
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        tracing::info!(sessions = sessions.table().iter().count(), "draining");
        let connected = sessions.connected();
        out.happened(Occurrence::new(kind, format!("{text}{connected}")));
        let event = match going {
            Going::Stop => AsyncEvent::Draining,
            Going::Upgrade => AsyncEvent::Upgrading,
        };
        let told = sessions.tell_all(event, out).into_iter().map(|whom| (whom, event)).collect();
        self.begun = Some(Begun { going, limit, since: now, stopped: false, stayed: 0, told });
        self.stop_if_drained(connected, out, now);
    }

    /// Whether the target drains to make room for another program.
    pub(super) fn is_upgrading(&self) -> bool {
        self.begun.as_ref().is_some_and(|begun| begun.going == Going::Upgrade)
    }

    /// Sessions that a drain ended, because they had not left in time.
    pub(super) fn stayed(&self) -> usize {
        self.begun.as_ref().map_or(0, |begun| begun.stayed)
    }

    /// How far the drain is; `None` when there is none. `sessions`: those with connections.
    pub(super) fn state(&self, sessions: usize, now: Instant) -> Option<DrainState> {
        let begun = self.begun.as_ref()?;
        let lasted = now.saturating_duration_since(begun.since);
        let left = begun.limit.saturating_sub(lasted);
        Some(DrainState { lasted, left, sessions })
    }

    /// How far a drain is that begins when something has ended that has lasted so long, and may
    /// last so much longer.
    pub(super) fn ahead(
        &self,
        sessions: usize,
        (lasted, left): (Duration, Duration),
    ) -> DrainState {
        DrainState { lasted, left: left + self.timeout, sessions }
    }

    /// Stops the poll groups if no session with connections is left, or the time is over.
    pub(super) fn stop_if_drained(&mut self, sessions: usize, out: &mut Outbox, now: Instant) {
        let Some(begun) = self.begun.as_mut().filter(|begun| !begun.stopped) else { return };
        let late = now.saturating_duration_since(begun.since) > begun.limit;
        if sessions > 0 && !late {
            return;
        }
        if sessions > 0 {
            tracing::info!(sessions, "drained: ending the sessions that stayed");
        }
        (begun.stopped, begun.stayed) = (true, sessions);
        out.order(Effect::StopGroups);
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

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn begun(going: Going) -> Drain {
        let since = Instant::now();
        let told = BTreeMap::new();
        let begun = Begun { going, limit: LIMIT, since, stopped: false, stayed: 0, told };
        Drain { timeout: LIMIT, begun: Some(begun) }
    }

    #[test]
    fn a_session_hears_once_in_each_epoch_that_the_target_goes() {
        let (session, mut none) = (SessionIndex { index: 0, life: 1 }, Drain::new(LIMIT));
        assert_eq!(none.news_for(session, Epoch(1)), None);
        let mut stops = begun(Going::Stop);
        let news = |drain: &mut Drain, epoch| drain.news_for(session, Epoch(epoch));
        assert_eq!(news(&mut stops, 1), Some(AsyncEvent::Draining));
        assert_eq!((news(&mut stops, 1), news(&mut stops, 2)), (None, Some(AsyncEvent::Draining)));
        // A session that asks again does not know the first event.
        let mut makes_room = begun(Going::Upgrade);
        assert_eq!(news(&mut makes_room, 1), Some(AsyncEvent::Upgrading));
        assert_eq!(news(&mut makes_room, 1), Some(AsyncEvent::Draining));
        assert_eq!(news(&mut makes_room, 1), None);
    }

    #[test]
    fn the_poll_groups_stop_once_and_those_that_stay_are_counted() {
        let (mut drain, mut out) = (begun(Going::Stop), Outbox::default());
        let since = drain.begun.as_ref().unwrap().since;
        drain.stop_if_drained(2, &mut out, since + LIMIT);
        assert!(drain.is_about_to_stop() && out.next_effect().is_none());
        let late = since + LIMIT + Duration::from_millis(1);
        drain.stop_if_drained(2, &mut out, late);
        drain.stop_if_drained(0, &mut out, late);
        assert_eq!(out.next_effect(), Some(Effect::StopGroups));
        assert_eq!((out.next_effect(), drain.stayed()), (None, 2));
    }
}
