//! [`AsyncEvents`]: the ASYNC_EVENTs that are parked until there is news, and the news that their
//! sessions still miss.
//!
//! An event says that there is news, but not which: it is not sealed, so a host asks for the new
//! state by a sealed command (`list.rs`). So news of volumes add up to one event. A session without
//! a parked ASYNC_EVENT gets the news at its next one; nothing is lost. A host that connects anew
//! learns the state from OPEN.

use std::collections::BTreeSet;

use rblk_protocol::{AsyncEvent, CommandCapsule, Epoch, Status, Tag};

use crate::control::core::admin_command::{AdminAnswer, refuse};
use crate::control::core::effect::ConnectionRef;
use crate::control::core::outbox::Outbox;
use crate::volume::ids::SessionIndex;

/// ASYNC_EVENTs one session may park.
const PARKED_PER_SESSION: usize = 4;

/// A parked ASYNC_EVENT.
#[derive(Debug)]
struct Parked {
    from: ConnectionRef,
    tag: Tag,
    session: SessionIndex,
    epoch: Epoch,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct AsyncEvents {
    // In the order in which they came.
    parked: Vec<Parked>,
    // Sessions that miss the news of a changed volume, and have nothing parked.
    untold: BTreeSet<SessionIndex>,
}

impl AsyncEvents {
    /// The admin connection of an epoch of a session is gone.
    pub(super) fn forget_epoch(&mut self, session: SessionIndex, epoch: Epoch) {
        self.parked.retain(|parked| (parked.session, parked.epoch) != (session, epoch));
    }

    /// A session ended.
    pub(super) fn forget(&mut self, session: SessionIndex) {
        self.parked.retain(|parked| parked.session != session);
        self.untold.remove(&session);
    }

    fn count(&self, session: SessionIndex) -> usize {
        self.parked.iter().filter(|parked| parked.session == session).count()
    }

    /// The newest: the connection of an older one may be dying.
    fn take_of(&mut self, session: SessionIndex) -> Option<Parked> {
        let at = self.parked.iter().rposition(|parked| parked.session == session)?;
        Some(self.parked.remove(at))
    }

    /// These sessions have a volume open that changed: tells them, now or at their next command.
    pub(super) fn tell(&mut self, sessions: &[SessionIndex], out: &mut Outbox) {
        for session in sessions {
            match self.take_of(*session) {
                Some(parked) => parked.answer(AsyncEvent::VolumesChanged, out),
                None => {
                    self.untold.insert(*session);
                }
            }
        }
    }

    /// Answers every parked command. Returns the sessions that were told, and their epochs.
    pub(super) fn tell_all(
        &mut self,
        event: AsyncEvent,
        out: &mut Outbox,
    ) -> BTreeSet<(SessionIndex, Epoch)> {
        let parked = std::mem::take(&mut self.parked);
        parked.iter().for_each(|parked| parked.answer(event, out));
        parked.iter().map(|parked| (parked.session, parked.epoch)).collect()
    }

    /// ASYNC_EVENT. `news`: what the session does not know yet of the end of the target.
    pub(super) fn park(
        &mut self,
        from: ConnectionRef,
        session: SessionIndex,
        command: &CommandCapsule,
        news: impl FnOnce() -> Option<AsyncEvent>,
    ) -> AdminAnswer {
        let (tag, epoch) = (command.tag, command.epoch);
        if self.count(session) >= PARKED_PER_SESSION {
            return refuse(Status::LimitReached);
        }
        if let Some(event) = news() {
            return AdminAnswer::Now(Status::Ok, event as u32, Vec::new());
        }
        if self.untold.remove(&session) {
            return AdminAnswer::Now(Status::Ok, AsyncEvent::VolumesChanged as u32, Vec::new());
        }
        self.parked.push(Parked { from, tag, session, epoch });
        AdminAnswer::Later
    }
}

impl Parked {
    fn answer(&self, event: AsyncEvent, out: &mut Outbox) {
        out.reply(self.from, self.tag, (Status::Ok, event as u32), Vec::new());
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{Opcode, Sequence};

    use super::*;
    use crate::control::core::effect::Effect;
    use crate::volume::ids::ConnectionId;

    fn session(index: u16) -> SessionIndex {
        SessionIndex { index, life: 1 }
    }

    fn park(events: &mut AsyncEvents, of: u16, tag: u16) -> Option<u32> {
        let connection = ConnectionId { index: of, generation: 1 };
        let from = ConnectionRef { group: 0, connection };
        let capsule = CommandCapsule::new(Opcode::AsyncEvent, Tag(tag), Epoch(1), Sequence(1));
        match events.park(from, session(of), &capsule, || None) {
            AdminAnswer::Now(_, value, _) => Some(value),
            AdminAnswer::Later => None,
        }
    }

    fn told(out: &mut Outbox) -> Vec<u16> {
        let tag = |effect| match effect {
            Effect::Reply { tag, .. } => tag.0,
            other => panic!("{other:?}"),
        };
        std::iter::from_fn(|| out.next_effect()).map(tag).collect()
    }

    #[test]
    fn news_reach_the_newest_command_or_wait_for_the_next() {
        let (mut events, mut out) = (AsyncEvents::default(), Outbox::default());
        assert_eq!((park(&mut events, 0, 1), park(&mut events, 0, 2)), (None, None));
        events.tell(&[session(0), session(1)], &mut out);
        assert_eq!(told(&mut out), [2]);
        events.tell(&[session(1)], &mut out);
        assert!(told(&mut out).is_empty(), "nothing of it is parked");
        let changed = Some(AsyncEvent::VolumesChanged as u32);
        assert_eq!((park(&mut events, 1, 3), park(&mut events, 1, 4)), (changed, None));
        events.forget(session(0));
        events.tell_all(AsyncEvent::Draining, &mut out);
        assert_eq!(told(&mut out), [4]);
    }

    #[test]
    fn a_session_parks_a_bounded_number_of_commands() {
        let mut events = AsyncEvents::default();
        (0..4).for_each(|tag| assert_eq!(park(&mut events, 0, tag), None));
        assert_eq!(park(&mut events, 0, 4), Some(0), "refused");
        assert_eq!(park(&mut events, 1, 5), None, "another session");
    }
}
