//! [`DescriptorPolls`]: the descriptors besides the node that wake a queue's thread, as polls of
//! its ring.
//!
//! A watch has a place from its `add` to the end of its poll, which may come after its removal. The
//! generation distinguishes late completions of the earlier watch of that place.
//!
//! A descriptor may be watched always, by a poll that stays; or only asleep, by a poll that a sleep
//! makes if the last poll was used up. While the thread is awake, an event of the latter costs
//! nothing.

use std::os::fd::RawFd;

use io_uring::{cqueue, opcode, squeue, types};

use super::{KIND_UNWATCH, KIND_WATCH, MAX_WATCHES, UblkEvent};
use crate::queue::DescriptorToken;

const POLL_READ: u32 = libc::POLLIN.cast_unsigned() as u32;
const POLL_ENDED: i32 = (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) as i32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WatchState {
    Free,
    /// Watched asleep, without a poll at present.
    Resting,
    Armed,
    Removing,
}

#[derive(Clone, Copy, Debug)]
struct WatchedDescriptor {
    state: WatchState,
    asleep: bool,
    fd: RawFd,
    token: DescriptorToken,
    generation: u32,
}

#[derive(Debug)]
pub(super) struct DescriptorPolls {
    places: [WatchedDescriptor; MAX_WATCHES as usize],
    // Places from this one on were never used.
    unused_from: usize,
    generation: u32,
}

impl DescriptorPolls {
    pub(super) fn new() -> Self {
        let (state, token) = (WatchState::Free, DescriptorToken(0));
        let free = WatchedDescriptor { state, asleep: false, fd: -1, token, generation: 0 };
        Self { places: [free; MAX_WATCHES as usize], unused_from: 0, generation: 0 }
    }

    /// Takes a place. The entry arms the watch, if it must be armed now.
    pub(super) fn add(
        &mut self,
        fd: RawFd,
        token: DescriptorToken,
        asleep: bool,
    ) -> Result<Option<squeue::Entry>, &'static str> {
        if self.place_of(token).is_some() {
            return Err("the token is in use");
        }
        let Some(place) = self.places.iter().position(|w| w.state == WatchState::Free) else {
            return Err("all places are taken");
        };
        self.unused_from = self.unused_from.max(place + 1);
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let state = if asleep { WatchState::Resting } else { WatchState::Armed };
        self.places[place] = WatchedDescriptor { state, asleep, fd, token, generation };
        Ok((!asleep).then(|| self.arming(place)))
    }

    /// The entry that arms the next resting watch; `None` when all are armed.
    pub(super) fn arm_next(&mut self) -> Option<squeue::Entry> {
        let used = &self.places[..self.unused_from];
        let place = used.iter().position(|w| w.state == WatchState::Resting)?;
        self.places[place].state = WatchState::Armed;
        Some(self.arming(place))
    }

    /// Starts the removal of a watch, if it exists; the entry ends its poll.
    pub(super) fn remove(&mut self, token: DescriptorToken) -> Option<squeue::Entry> {
        let place = self.place_of(token)?;
        if self.places[place].state == WatchState::Resting {
            self.places[place].state = WatchState::Free;
            return None;
        }
        self.places[place].state = WatchState::Removing;
        // POLL_REMOVE leaves a poll alone that is just being woken (EALREADY), as the poll of a
        // dying path is; the poll would keep its place. A cancellation ends a poll in any state.
        Some(opcode::AsyncCancel::new(self.user_data(place)).build().user_data(KIND_UNWATCH))
    }

    /// Takes a completion of a poll. Returns its event, and an entry that arms the poll again if
    /// necessary.
    pub(super) fn completed(
        &mut self,
        entry: &cqueue::Entry,
    ) -> (Option<UblkEvent>, Option<squeue::Entry>) {
        let place = usize::from(entry.user_data().to_le_bytes()[0]);
        let Some(watch) = self.places.get(place).copied() else {
            return (None, None);
        };
        if self.user_data(place) != entry.user_data() || watch.state == WatchState::Free {
            return (None, None);
        }
        let armed = cqueue::more(entry.flags());
        let result = entry.result();
        if watch.state == WatchState::Removing {
            if !armed {
                self.places[place].state = WatchState::Free;
            }
            return (None, None);
        }
        if armed {
            return (Some(UblkEvent::Watch(watch.token)), None);
        }
        // The poll ended: for good if the descriptor did, else (the completion queue was full, say)
        // it is armed again.
        if result < 0 || result & POLL_ENDED != 0 {
            self.places[place].state = WatchState::Free;
            let errno = if result < 0 { -result } else { libc::EPIPE };
            return (Some(UblkEvent::WatchEnded(watch.token, errno)), None);
        }
        if watch.asleep {
            self.places[place].state = WatchState::Resting;
            return (Some(UblkEvent::Watch(watch.token)), None);
        }
        (Some(UblkEvent::Watch(watch.token)), Some(self.arming(place)))
    }

    fn place_of(&self, token: DescriptorToken) -> Option<usize> {
        let known =
            |w: &WatchedDescriptor| matches!(w.state, WatchState::Armed | WatchState::Resting);
        self.places.iter().position(|w| known(w) && w.token == token)
    }

    fn user_data(&self, place: usize) -> u64 {
        KIND_WATCH | u64::from(self.places[place].generation) << 8 | place as u64
    }

    fn arming(&self, place: usize) -> squeue::Entry {
        opcode::PollAdd::new(types::Fd(self.places[place].fd), POLL_READ)
            .multi(!self.places[place].asleep)
            .build()
            .user_data(self.user_data(place))
    }
}
