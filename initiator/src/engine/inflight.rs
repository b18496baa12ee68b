//! [`Inflight`]: the commands of one queue by tag. Pure.
//!
//! ```text
//! Idle -> Queued -> Sent -> Idle (answered)
//!            ^--------'  (the path died: the outcome is unknown, so the request is sent again)
//! ```
//!
//! A buffer is lent to the peer while its tag is `Sent`, and ours in the other states. An answer or
//! the end of the path gives it back, never a timeout. After the end of a path its device may still
//! touch the buffer, until the QPs are destroyed: see [`crate::queue::undestroyed`].

use rblk_protocol::width::narrow;
use rblk_protocol::{Mutation, QueueDepth, Sequence, Tag};

use super::io::{Io, IoOp};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TagState {
    Idle,
    Queued(Io),
    Sent(Io, Sequence),
}

/// Commands by tag.
#[derive(Debug)]
pub(crate) struct Inflight {
    states: Box<[TagState]>,
    queued: usize,
    sent: usize,
    data_bytes: u64,
}

/// A tag was used in a wrong state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("tag {0} is not in a state for that")]
pub struct WrongState(pub u16);

impl Inflight {
    /// A table for a queue; the connection's own tag is not in it.
    #[must_use]
    pub(crate) fn new(depth: QueueDepth) -> Self {
        Self {
            states: vec![TagState::Idle; usize::from(depth.get())].into_boxed_slice(),
            queued: 0,
            sent: 0,
            data_bytes: 0,
        }
    }

    /// Requests that wait for their SEND.
    #[must_use]
    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    /// Requests that await an answer.
    #[must_use]
    pub(crate) fn sent(&self) -> usize {
        self.sent
    }

    /// Bytes of their data.
    #[must_use]
    pub(crate) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Whether a tag is free.
    #[must_use]
    pub(crate) fn is_idle(&self, tag: Tag) -> bool {
        self.states.get(tag.index()) == Some(&TagState::Idle)
    }

    /// Takes a request.
    ///
    /// # Errors
    /// The tag is in use or out of bounds.
    pub(crate) fn queue(&mut self, tag: Tag, io: Io) -> Result<(), WrongState> {
        match self.states.get_mut(tag.index()) {
            Some(state @ TagState::Idle) => {
                *state = TagState::Queued(io);
                self.queued += 1;
                self.data_bytes += u64::from(io.data_bytes);
                Ok(())
            }
            _ => Err(WrongState(tag.0)),
        }
    }

    /// The waiting request of a tag.
    #[must_use]
    pub(crate) fn waiting(&self, tag: Tag) -> Option<Io> {
        match self.states.get(tag.index()) {
            Some(TagState::Queued(io)) => Some(*io),
            _ => None,
        }
    }

    /// Records that a waiting request was sent with that sequence.
    ///
    /// # Errors
    /// The tag does not wait.
    pub(crate) fn send(&mut self, tag: Tag, sequence: Sequence) -> Result<(), WrongState> {
        match self.states.get_mut(tag.index()) {
            Some(state @ TagState::Queued(_)) => {
                if let TagState::Queued(io) = *state {
                    *state = TagState::Sent(io, sequence);
                }
                self.queued -= 1;
                self.sent += 1;
                Ok(())
            }
            _ => Err(WrongState(tag.0)),
        }
    }

    /// Takes an answer for a tag; `answers` checks it against the request and its sequence. Returns
    /// the request.
    ///
    /// # Errors
    /// No request was sent with that tag, or it had another sequence: the peer broke a rule.
    pub(crate) fn answer(
        &mut self,
        tag: Tag,
        answers: impl FnOnce(&Io, Sequence) -> bool,
    ) -> Result<Io, WrongState> {
        match self.states.get_mut(tag.index()) {
            Some(state) => match *state {
                TagState::Sent(io, sequence) if answers(&io, sequence) => {
                    *state = TagState::Idle;
                    self.sent -= 1;
                    self.data_bytes -= u64::from(io.data_bytes);
                    Ok(io)
                }
                _ => Err(WrongState(tag.0)),
            },
            None => Err(WrongState(tag.0)),
        }
    }

    /// A path died: every request sent by it waits again. `was_sent_by_it` says which of the sent
    /// ones that are. Returns their number.
    pub(crate) fn path_lost(&mut self, mut was_sent_by_it: impl FnMut(Tag, &Io) -> bool) -> usize {
        let mut lost = 0;
        for (state, tag) in self.states.iter_mut().zip(0..) {
            if let TagState::Sent(io, _) = *state
                && was_sent_by_it(Tag(tag), &io)
            {
                *state = TagState::Queued(sent_again(io));
                lost += 1;
            }
        }
        self.queued += lost;
        self.sent -= lost;
        lost
    }

    /// Removes a waiting request, which then fails.
    pub(crate) fn cancel(&mut self, tag: Tag) -> Option<Io> {
        let io = self.waiting(tag)?;
        self.states[tag.index()] = TagState::Idle;
        self.queued -= 1;
        self.data_bytes -= u64::from(io.data_bytes);
        Some(io)
    }

    /// All tags.
    pub(crate) fn tags(&self) -> impl Iterator<Item = Tag> + use<> {
        (0..narrow(self.states.len())).map(Tag)
    }
}

/// The request to send again after its path died: the same one.
fn sent_again(io: Io) -> Io {
    if Mutation::ReplayForgotten.is_on() && io.op == IoOp::Write {
        // A FLUSH is harmless, and ends as the write would have.
        return Io { op: IoOp::Flush, ..io };
    }
    io
}

#[cfg(test)]
mod tests {
    use super::*;
    use rblk_protocol::BlockSize;

    fn io(n: u64) -> Io {
        Io::new(IoOp::Write, n * 512, 512, BlockSize::new(512).unwrap()).unwrap()
    }

    #[test]
    fn a_life_with_a_lost_path() {
        let mut table = Inflight::new(QueueDepth::new(2).unwrap());
        table.queue(Tag(0), io(1)).unwrap();
        assert_eq!(table.queue(Tag(0), io(1)), Err(WrongState(0)));
        assert_eq!(table.queue(Tag(2), io(1)), Err(WrongState(2)), "the connection's own tag");
        table.send(Tag(0), Sequence(7)).unwrap();
        assert_eq!((table.queued(), table.sent(), table.data_bytes()), (0, 1, 512));
        assert_eq!(
            table.answer(Tag(0), |_, s| s == Sequence(6)),
            Err(WrongState(0)),
            "stale answer"
        );
        let mut asked = Vec::new();
        let mut lost = |by_it: bool| {
            table.path_lost(|tag, io| {
                asked.push((tag, *io));
                by_it
            })
        };
        assert_eq!([lost(false), lost(true), lost(true)], [0, 1, 0]);
        assert_eq!(asked, [(Tag(0), io(1)); 2], "the sent ones");
        assert_eq!((table.queued(), table.sent()), (1, 0));
        assert_eq!(table.data_bytes(), 512, "it is sent again");
        assert_eq!(
            table.answer(Tag(0), |_, _| true),
            Err(WrongState(0)),
            "answer of the dead path"
        );
        assert_eq!(table.waiting(Tag(0)), Some(io(1)));
        table.send(Tag(0), Sequence(8)).unwrap();
        assert_eq!(table.answer(Tag(0), |_, s| s == Sequence(8)), Ok(io(1)));
        assert_eq!(table.answer(Tag(0), |_, _| true), Err(WrongState(0)), "answered twice");
        table.queue(Tag(1), io(2)).unwrap();
        assert_eq!(table.cancel(Tag(1)), Some(io(2)));
        assert_eq!((table.queued(), table.sent(), table.data_bytes()), (0, 0, 0));
    }
}
