//! Occurrences of hosts and volumes, for the log of events. Core decides and goes on; its caller
//! takes the occurrences together with the effects.

use std::time::Duration;

use rblk_protocol::{Epoch, Name};

use super::Core;
use crate::control::peers::session::Session;
use crate::volume::ids::SessionIndex;
use rblk_operate::target::events::{EventKind, Occurrence};

/// Occurrences that wait for the caller. Beyond them the oldest are dropped, so a caller that takes
/// none, such as a test, costs no memory.
const WAITING_MAX: usize = 256;

impl Core {
    /// The next occurrence. After every call, take all.
    pub fn next_occurrence(&mut self) -> Option<Occurrence> {
        self.occurrences.pop_front()
    }

    pub(super) fn happened(&mut self, what: Occurrence) {
        if self.occurrences.len() >= WAITING_MAX {
            self.occurrences.pop_front();
        }
        self.occurrences.push_back(what);
    }

    /// The LOGIN of a session was answered.
    pub(super) fn told_login(&mut self, index: SessionIndex) {
        let Some(session) = self.sessions.get(index) else { return };
        let what = match session.epoch {
            Epoch(1) => Occurrence::new(EventKind::Connect, "the host began a session"),
            Epoch(epoch) => Occurrence::new(
                EventKind::Resume,
                format!("the host came back to its session, in epoch {epoch}"),
            ),
        };
        self.happened(what.of_host(session.host_name, &session.peer));
    }

    /// The admin connection of an epoch is gone. That is no loss if the session is ending, if the
    /// host is back in a newer epoch, or if the target stops.
    pub(super) fn told_gone(&mut self, index: SessionIndex, epoch: Epoch) {
        let Some(session) = self.sessions.get(index) else { return };
        let is_lost = session.leave().is_none() && session.logged_in && session.epoch == epoch;
        if !is_lost || self.drain.has_begun() {
            return;
        }
        let lease = in_words(self.sessions.lease());
        let held = self.held_by(session);
        // A host that was refused its volume leaves without a LOGOUT.
        let what = match held.is_empty() {
            true => Occurrence::new(EventKind::Leave, "the host left; it held no volume"),
            false => {
                let text = format!("the host lost its connections; it keeps {held} for {lease}");
                Occurrence::new(EventKind::Loss, text)
            }
        };
        self.happened(what.of_host(session.host_name, &session.peer));
    }

    /// A host reached a limit and wanted more.
    pub(super) fn told_limit(&mut self, host: Name, peer: &str, why: &str) {
        let what = Occurrence::new(EventKind::Refuse, format!("the host wanted more: {why}"));
        self.happened(what.of_host(host, peer));
    }

    /// A host logs out.
    pub(super) fn told_logout(&mut self, index: SessionIndex) {
        let Some(session) = self.sessions.get(index) else { return };
        let what = Occurrence::new(EventKind::Leave, "the host ended its session");
        self.happened(what.of_host(session.host_name, &session.peer));
    }

    /// The occurrences for sessions that may lose their lease now. Taken before the sessions are
    /// gone.
    pub(super) fn expiries(&self) -> Vec<(SessionIndex, Occurrence)> {
        let silent = self.sessions.iter().filter(|session| session.connections() == 0);
        let told = silent.filter_map(|session| {
            let held = self.held_by(session);
            let text = format!("the lease of the lost session ended: {held} is free");
            let what = Occurrence::new(EventKind::Expire, text);
            let what = what.of_host(session.host_name, &session.peer);
            (!held.is_empty()).then_some((session.index, what))
        });
        told.collect()
    }

    /// The names of the volumes that a session opened.
    fn held_by(&self, session: &Session) -> String {
        let volumes = session.opened().filter_map(|(index, _)| self.exports.volume(index));
        volumes.map(|volume| volume.name.to_string()).collect::<Vec<_>>().join(", ")
    }
}

/// A time for people: in whole seconds, from one second on.
fn in_words(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds => format!("{seconds} s"),
    }
}
