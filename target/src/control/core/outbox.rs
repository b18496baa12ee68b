//! [`Outbox`]: what core has decided and its caller has not taken yet: effects, and occurrences for
//! the log of events. And how a peer hears of a decision: replies are sealed here, and the lines of
//! the log that peers cause are limited.

use std::collections::VecDeque;

use rblk_operate::target::events::Occurrence;
use rblk_protocol::width::narrow;
use rblk_protocol::{Status, Tag};

use super::effect::{ConnectionRef, Effect};
use super::seals::Seals;
use crate::control::peers::peer_lines::PeerLines;
use crate::data::poll_group::Notice;

/// Occurrences that wait for the caller. Beyond them the oldest are dropped, so a caller that takes
/// none, such as a test, costs no memory.
const OCCURRENCES_MAX: usize = 256;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    effects: VecDeque<Effect>,
    occurrences: VecDeque<Occurrence>,
    // Admin connections with sealed commands.
    seals: Seals,
    lines: PeerLines,
}

impl Outbox {
    /// The next action for the caller.
    pub(super) fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// The next occurrence for the caller.
    pub(super) fn next_occurrence(&mut self) -> Option<Occurrence> {
        self.occurrences.pop_front()
    }

    /// The admin connections with sealed commands.
    pub(super) fn seals(&mut self) -> &mut Seals {
        &mut self.seals
    }

    /// The bytes by which the seal makes a reply there longer.
    pub(super) fn overhead(&self, to: ConnectionRef) -> usize {
        self.seals.overhead(to)
    }

    /// The lines that peers make control log.
    pub(super) fn lines(&mut self) -> &mut PeerLines {
        &mut self.lines
    }

    /// Orders an action.
    pub(super) fn order(&mut self, effect: Effect) {
        self.effects.push_back(effect);
    }

    /// Orders a notice to every poll group.
    pub(super) fn tell_all(&mut self, notice: Notice) {
        self.order(Effect::All(notice));
    }

    /// Notes an occurrence.
    pub(super) fn happened(&mut self, what: Occurrence) {
        if self.occurrences.len() >= OCCURRENCES_MAX {
            self.occurrences.pop_front();
        }
        self.occurrences.push_back(what);
    }

    /// Answers a command: sealed if the command was.
    pub(super) fn reply(
        &mut self,
        to: ConnectionRef,
        tag: Tag,
        (status, value): (Status, u32),
        payload: Vec<u8>,
    ) {
        let (value, payload) = match self.seals.seal(to, tag, (status, value), &payload) {
            Some(sealed) => (narrow(sealed.len()), sealed),
            None => (value, payload),
        };
        self.order(Effect::Reply { to, tag, status, value, payload });
    }

    /// Answers a command with nothing but a status.
    pub(super) fn reply_status(&mut self, to: ConnectionRef, tag: Tag, status: Status) {
        self.reply(to, tag, (status, 0), Vec::new());
    }

    /// Answers a command with a status and a text.
    pub(super) fn reply_saying(
        &mut self,
        to: ConnectionRef,
        tag: Tag,
        status: Status,
        text: String,
    ) {
        let text = text.into_bytes();
        self.reply(to, tag, (status, narrow(text.len())), text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::ids::ConnectionId;
    use rblk_operate::target::events::EventKind;

    #[test]
    fn effects_come_in_the_order_of_the_decisions() {
        let mut out = Outbox::default();
        let connection = ConnectionId { index: 0, generation: 1 };
        let to = ConnectionRef { group: 0, connection };
        out.reply_saying(to, Tag(1), Status::InUse, "held by a".to_owned());
        out.order(Effect::Expel { connection: to });
        let said = Effect::Reply {
            to,
            tag: Tag(1),
            status: Status::InUse,
            value: 9,
            payload: b"held by a".to_vec(),
        };
        assert_eq!(out.next_effect(), Some(said));
        assert_eq!(out.next_effect(), Some(Effect::Expel { connection: to }));
        assert_eq!(out.next_effect(), None);
    }

    #[test]
    fn a_caller_that_takes_no_occurrences_costs_bounded_memory() {
        let mut out = Outbox::default();
        let what = |number: usize| Occurrence::new(EventKind::Leave, number.to_string());
        (0..=OCCURRENCES_MAX).for_each(|number| out.happened(what(number)));
        assert_eq!(out.next_occurrence().map(|what| what.text), Some("1".to_owned()), "the oldest");
        assert_eq!(std::iter::from_fn(|| out.next_occurrence()).count(), OCCURRENCES_MAX - 1);
    }
}
