//! [`AsyncEvents`]: the ASYNC_EVENTs that are parked until there is news, and the news that their
//! sessions still miss.
//!
//! An event says that there is news, but not which: it is not sealed, so a host asks for the new
//! state by a sealed command (`list.rs`). So news of volumes add up to one event. A session without
//! a parked ASYNC_EVENT gets the news at its next one; nothing is lost. A host that connects anew
//! learns the state from OPEN.

use std::collections::BTreeSet;

use rblk_protocol::{AsyncEvent, CommandCapsule, Epoch, Status, Tag};

use super::{AdminAnswer, ConnectionRef, Core, refuse};
use crate::control::peers::session::Session;
use crate::volume::ids::{SessionIndex, VolumeIndex};

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
}

impl Core {
    /// A volume has another size, became read-only or writable, or is about to be taken from its
    /// users. Tells the sessions that have it open. Call it
    ///
    /// - after a change, when LIST and OPEN answer with the new state;
    /// - for a removal, before the sessions lose the volume.
    pub fn volume_changed(&mut self, volume: VolumeIndex) {
        let has = |session: &&Session| session.mode_of(volume).is_some();
        let sessions: Vec<SessionIndex> =
            self.sessions.iter().filter(has).map(|session| session.index).collect();
        for session in sessions {
            match self.events.take_of(session) {
                Some(parked) => self.tell(&parked, AsyncEvent::VolumesChanged),
                None => {
                    self.events.untold.insert(session);
                }
            }
        }
    }

    fn tell(&mut self, parked: &Parked, event: AsyncEvent) {
        self.reply(parked.from, parked.tag, Status::Ok, event as u32, Vec::new());
    }

    /// Answers every parked command. Returns the sessions that it told.
    pub(super) fn tell_all(&mut self, event: AsyncEvent) -> BTreeSet<(SessionIndex, Epoch)> {
        let parked = std::mem::take(&mut self.events.parked);
        parked.iter().for_each(|parked| self.tell(parked, event));
        parked.iter().map(|parked| (parked.session, parked.epoch)).collect()
    }

    pub(super) fn async_event(
        &mut self,
        from: ConnectionRef,
        session: SessionIndex,
        command: &CommandCapsule,
    ) -> AdminAnswer {
        let (tag, epoch) = (command.tag, command.epoch);
        if self.events.count(session) >= PARKED_PER_SESSION {
            return refuse(Status::LimitReached);
        }
        if let Some(event) = self.drain.news_for(session, epoch) {
            return AdminAnswer::Now(Status::Ok, event as u32, Vec::new());
        }
        if self.events.untold.remove(&session) {
            return AdminAnswer::Now(Status::Ok, AsyncEvent::VolumesChanged as u32, Vec::new());
        }
        self.events.parked.push(Parked { from, tag, session, epoch });
        AdminAnswer::Later
    }
}
