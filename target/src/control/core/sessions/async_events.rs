//! [`AsyncEvents`]: the ASYNC_EVENTs that are parked until there is news, and the news that their
//! sessions still miss.
//!
//! An event says that there is news, but not which: it is not sealed, so a host asks for the new
//! state by a sealed command (`list.rs`). So news of volumes add up to one event. An epoch without
//! a parked ASYNC_EVENT gets the news at its next one; nothing is lost. A host that connects anew
//! learns the state from OPEN.
//!
//! Each way of a session is told. A way may be dying, and take the news with it: so one that joins
//! the session is told that there may be news.

use std::collections::BTreeSet;

use rblk_protocol::{AsyncEvent, CommandCapsule, Epoch, Status, Tag};

use crate::control::core::admin_command::{AdminAnswer, refuse};
use crate::control::core::effect::ConnectionRef;
use crate::control::core::outbox::Outbox;
use crate::control::peers::session::EndedEpochs;
use crate::volume::ids::SessionIndex;

/// ASYNC_EVENTs that may be parked in one epoch.
const PARKED_PER_EPOCH: usize = 4;

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
    // Epochs that miss the news of a changed volume, and have nothing parked.
    untold: BTreeSet<(SessionIndex, Epoch)>,
}

impl AsyncEvents {
    /// The admin connection of an epoch of a session is gone.
    pub(super) fn forget_epoch(&mut self, session: SessionIndex, epoch: Epoch) {
        self.parked.retain(|parked| parked.way() != (session, epoch));
    }

    /// Epochs of a session ended. Returns whether one of them misses news.
    pub(super) fn end_epochs(&mut self, session: SessionIndex, ended: &EndedEpochs) -> bool {
        let before = self.untold.len();
        self.untold.retain(|(of, epoch)| *of != session || !ended.has(*epoch));
        self.untold.len() < before
    }

    /// An epoch begins that may miss news.
    pub(super) fn begin_untold(&mut self, session: SessionIndex, epoch: Epoch) {
        self.untold.insert((session, epoch));
    }

    /// A session ended.
    pub(super) fn forget(&mut self, session: SessionIndex) {
        self.parked.retain(|parked| parked.session != session);
        self.untold.retain(|(of, _)| *of != session);
    }

    fn count(&self, way: (SessionIndex, Epoch)) -> usize {
        self.parked.iter().filter(|parked| parked.way() == way).count()
    }

    /// The newest.
    fn take_of(&mut self, way: (SessionIndex, Epoch)) -> Option<Parked> {
        let at = self.parked.iter().rposition(|parked| parked.way() == way)?;
        Some(self.parked.remove(at))
    }

    /// The sessions with these epochs have a volume open that changed: tells each epoch, now or at
    /// its next command.
    pub(super) fn tell(&mut self, ways: &[(SessionIndex, Epoch)], out: &mut Outbox) {
        for way in ways {
            match self.take_of(*way) {
                Some(parked) => parked.answer(AsyncEvent::VolumesChanged, out),
                None => {
                    self.untold.insert(*way);
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
        parked.iter().map(Parked::way).collect()
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
        if self.count((session, epoch)) >= PARKED_PER_EPOCH {
            return refuse(Status::LimitReached);
        }
        if let Some(event) = news() {
            return AdminAnswer::Now(Status::Ok, event as u32, Vec::new());
        }
        if self.untold.remove(&(session, epoch)) {
            return AdminAnswer::Now(Status::Ok, AsyncEvent::VolumesChanged as u32, Vec::new());
        }
        self.parked.push(Parked { from, tag, session, epoch });
        AdminAnswer::Later
    }
}

impl Parked {
    fn way(&self) -> (SessionIndex, Epoch) {
        (self.session, self.epoch)
    }

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
        park_in(events, of, Epoch(1), tag)
    }

    fn park_in(events: &mut AsyncEvents, of: u16, epoch: Epoch, tag: u16) -> Option<u32> {
        let connection = ConnectionId { index: of, generation: 1 };
        let from = ConnectionRef { group: 0, connection };
        let capsule = CommandCapsule::new(Opcode::AsyncEvent, Tag(tag), epoch, Sequence(1));
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
        let way = |of| (session(of), Epoch(1));
        events.tell(&[way(0), way(1)], &mut out);
        assert_eq!(told(&mut out), [2]);
        events.tell(&[way(1)], &mut out);
        assert!(told(&mut out).is_empty(), "nothing of it is parked");
        let changed = Some(AsyncEvent::VolumesChanged as u32);
        assert_eq!((park(&mut events, 1, 3), park(&mut events, 1, 4)), (changed, None));
        events.forget(session(0));
        events.tell_all(AsyncEvent::Draining, &mut out);
        assert_eq!(told(&mut out), [4]);
    }

    #[test]
    fn each_way_is_told_and_a_new_one_may_have_missed_it() {
        let (mut events, mut out) = (AsyncEvents::default(), Outbox::default());
        let [one, two, three] = [1, 2, 3].map(Epoch);
        assert_eq!(park_in(&mut events, 0, one, 1), None);
        assert_eq!(park_in(&mut events, 0, two, 2), None);
        events.tell(&[(session(0), one), (session(0), two)], &mut out);
        assert_eq!(told(&mut out), [1, 2]);
        let changed = Some(AsyncEvent::VolumesChanged as u32);
        events.begin_untold(session(0), three);
        assert_eq!(park_in(&mut events, 0, three, 3), changed);
        assert_eq!(park_in(&mut events, 0, three, 4), None, "once");
        // The news of an epoch that ended concerns no other, unless that takes its place.
        events.tell(&[(session(0), two)], &mut out);
        events.forget_epoch(session(0), two);
        assert!(events.end_epochs(session(0), &EndedEpochs::One(two)));
        assert!(!events.end_epochs(session(0), &EndedEpochs::Below(three)));
        assert_eq!(park_in(&mut events, 0, one, 5), None);
    }

    #[test]
    fn an_epoch_parks_a_bounded_number_of_commands() {
        let mut events = AsyncEvents::default();
        (0..4).for_each(|tag| assert_eq!(park(&mut events, 0, tag), None));
        assert_eq!(park(&mut events, 0, 4), Some(0), "refused");
        assert_eq!(park(&mut events, 1, 5), None, "another session");
    }
}
