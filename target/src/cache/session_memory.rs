//! [`Sessions`]: how much memory of a shard the peers of each host keep from all others, and of
//! that the peers of each session.
//!
//! Memory that is lent for a READ comes back when the peer has the data. Memory that is reserved
//! for a WRITE is filled when the peer gives the data. A peer may take its time for both, so what
//! it keeps is bounded, first by host: a host gets more only while that is at most a third of what
//! no peer keeps. One host alone keeps up to a quarter of the memory, each of two a fifth, each of
//! `n` one part of `n + 3`: however many hosts take nothing, something is left for the next one.
//! (A dynamic threshold, as for the shared buffer of a switch: Choudhury and Hahne, IEEE/ACM
//! Transactions on Networking 6, 1998.) A host that keeps nothing gets what it asks for, however
//! much that is. A host has that first request once, and not once for each of its sessions: else
//! many sessions of one host would have all of the memory.
//!
//! The sessions of a host share what the host may keep in the same way, with another factor: a
//! session gets more only while that is at most four times what its host may still take. One
//! session alone keeps four parts of nineteen of the memory, and something is left to the next
//! session of the host. A session that keeps nothing, and for which the host has too little left,
//! goes before all other sessions of the host ([`HostShare::is_short`]): no number of small
//! requests keeps it from a large one.
//!
//! So that most lends need no more than one comparison, a host may always keep one part of
//! [`QUICK`] of the memory, unless a job of one of its sessions waits.
//!
//! Each shard counts on its own, so nothing is shared between poll groups: a host that keeps at
//! most a quarter of each shard keeps at most a quarter of the arena. Control tells every shard
//! which session is of which host ([`Sessions::set_host`]). Before that, a session is of
//! [`HostIndex::NONE`].
//!
//! Memory that may be dirty does not count as memory that could be kept. A slot that is lent twice
//! counts twice for the hosts that have it, and once for all.

use std::collections::VecDeque;

use rblk_protocol::width::wide;

use crate::volume::ids::{HostIndex, SessionIndex};

/// A job that waits, and the slots that it needs.
type Waiter = (u32, usize);

/// A host may keep at least one of so many parts of the memory.
const QUICK: usize = 128;
/// A host keeps at most one of so many parts of what no peer keeps.
const HOST: usize = 3;
/// A session keeps at most so many times what its host may still take.
const SESSION: usize = 4;

#[derive(Debug, Default)]
struct SessionState {
    // Whose it is.
    host: HostIndex,
    // Slots lent to its peers or reserved for their data, or promised.
    kept: usize,
    // Jobs that wait until the session or its host keeps less, oldest first.
    waiting: VecDeque<Waiter>,
}

#[derive(Debug, Default)]
struct HostShare {
    // What its sessions keep.
    kept: usize,
    // What it may keep in any case: nothing while a job of it waits.
    quick: usize,
    // Its sessions with jobs that wait, in turn.
    line: VecDeque<SessionIndex>,
    // The first of them keeps nothing, and waits until the host keeps less: nobody overtakes it.
    is_short: bool,
}

impl HostShare {
    // What it may take beyond what it keeps. `free`: slots that no peer keeps.
    fn room(&self, free: usize) -> usize {
        (free / HOST).saturating_sub(self.kept)
    }

    fn may_take(&self, need: usize, free: usize) -> bool {
        self.kept == 0 || HOST * (self.kept + need) <= free
    }
}

impl SessionState {
    // `room`: what its host may take.
    fn may_take(&self, need: usize, room: usize) -> bool {
        self.kept == 0 || self.kept + need <= SESSION * room
    }
}

/// What the peers of each host and session keep. See the module.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    table: Vec<SessionState>,
    hosts: Vec<HostShare>,
    // Slots that peers may keep, all together.
    slots: usize,
    // One part of `QUICK` of these.
    quick: usize,
    // Slots that jobs were promised and that are not lent yet.
    promised: usize,
    // Hosts with jobs that wait, in turn.
    line: VecDeque<HostIndex>,
}

/// The place of a session in the table. The first is [`SessionIndex::NONE`], of which control asks.
#[inline(always)]
fn place(session: SessionIndex) -> usize {
    wide(session.index.wrapping_add(1))
}

impl Sessions {
    /// So many slots are never dirty: peers may keep these.
    pub(super) fn set_slots(&mut self, slots: usize) {
        (self.slots, self.quick) = (slots, slots / QUICK);
        for host in self.hosts.iter_mut().filter(|host| host.line.is_empty()) {
            host.quick = self.quick;
        }
    }

    /// A session is of that host from now on, with all that it keeps.
    pub(super) fn set_host(&mut self, session: SessionIndex, host: HostIndex) {
        let former = self.state(session).host;
        if former == host {
            return;
        }
        let waits = self.waits_itself(session);
        if waits {
            self.leave_line(session, former);
        }
        let state = self.state(session);
        let kept = state.kept;
        state.host = host;
        self.host(former).kept -= kept;
        self.host(host).kept += kept;
        if waits {
            self.enter_line(session, host);
        }
    }

    // `pinned`: slots that are lent, each counted once.
    fn free(&self, pinned: usize) -> usize {
        self.slots.saturating_sub(self.promised + pinned)
    }

    /// Takes slots to be lent to a session at once. False: it, or its host, keeps as much as it
    /// may.
    #[inline(always)]
    pub(super) fn take(&mut self, session: SessionIndex, slots: usize, pinned: usize) -> bool {
        if let Some(state) = self.table.get_mut(place(session))
            && let Some(host) = self.hosts.get_mut(state.host.place())
            && host.kept + slots <= host.quick
        {
            host.kept += slots;
            state.kept += slots;
            return true;
        }
        self.take_much(session, slots, pinned)
    }

    #[inline(never)]
    fn take_much(&mut self, session: SessionIndex, slots: usize, pinned: usize) -> bool {
        let free = self.free(pinned);
        let host = self.state(session).host;
        let of_host = self.host(host);
        let (room, host_may) = (of_host.room(free), of_host.may_take(slots, free));
        let is_short = of_host.is_short;
        let state = self.state(session);
        let takes =
            state.waiting.is_empty() && !is_short && host_may && state.may_take(slots, room);
        if takes {
            state.kept += slots;
            self.host(host).kept += slots;
        }
        takes
    }

    fn state(&mut self, session: SessionIndex) -> &mut SessionState {
        let at = place(session);
        if self.table.len() <= at {
            self.table.resize_with(at + 1, SessionState::default);
        }
        &mut self.table[at]
    }

    fn host(&mut self, host: HostIndex) -> &mut HostShare {
        let (at, quick) = (host.place(), self.quick);
        if self.hosts.len() <= at {
            self.hosts.resize_with(at + 1, || HostShare { quick, ..HostShare::default() });
        }
        &mut self.hosts[at]
    }

    /// Promises slots to a job of a session, or puts the job in the session's line and returns
    /// false.
    #[inline(always)]
    pub(super) fn promise(
        &mut self,
        session: SessionIndex,
        job: u32,
        slots: usize,
        pinned: usize,
    ) -> bool {
        if self.take(session, slots, pinned) {
            self.promised += slots;
            return true;
        }
        self.stand_in_line(session, job, slots);
        false
    }

    #[cold]
    #[inline(never)]
    fn stand_in_line(&mut self, session: SessionIndex, job: u32, slots: usize) {
        let state = self.state(session);
        let is_first = state.waiting.is_empty();
        let (host, keeps_nothing) = (state.host, state.kept == 0);
        state.waiting.push_back((job, slots));
        if is_first {
            self.enter_line(session, host);
            self.host(host).is_short |= keeps_nothing;
        }
    }

    // The first job of a session waits.
    fn enter_line(&mut self, session: SessionIndex, host: HostIndex) {
        let of_host = self.host(host);
        of_host.quick = 0;
        of_host.line.push_back(session);
        if of_host.line.len() == 1 {
            self.line.push_back(host);
        }
    }

    // A session has no job that waits, or goes to another host.
    fn leave_line(&mut self, session: SessionIndex, host: HostIndex) {
        let quick = self.quick;
        let of_host = self.host(host);
        of_host.line.retain(|other| *other != session);
        of_host.is_short = false;
        if of_host.line.is_empty() {
            of_host.quick = quick;
            self.line.retain(|other| *other != host);
        }
    }

    /// Promises slots to the first job of the first session of the first host in line that may have
    /// them. Returns the job and its slots; `None`: none may.
    pub(super) fn promise_next(&mut self, pinned: usize) -> Option<Waiter> {
        let free = self.free(pinned);
        for _ in 0..self.line.len() {
            let host = self.line.pop_front()?;
            let served = self.promise_next_of(host, free);
            if self.host(host).line.is_empty() {
                let quick = self.quick;
                self.host(host).quick = quick;
            } else {
                self.line.push_back(host);
            }
            if let Some((_, need)) = served {
                self.promised += need;
                return served;
            }
        }
        None
    }

    // The same, of one host.
    fn promise_next_of(&mut self, host: HostIndex, free: usize) -> Option<Waiter> {
        let of_host = self.host(host);
        of_host.is_short = false;
        let room = of_host.room(free);
        for _ in 0..of_host.line.len() {
            let session = self.host(host).line.pop_front()?;
            let first = self.state(session).waiting.front().copied();
            // Who waits has a job.
            let Some((job, need)) = first else { continue };
            let host_may = self.host(host).may_take(need, free);
            let state = self.state(session);
            if host_may && state.may_take(need, room) {
                state.waiting.pop_front();
                state.kept += need;
                let waits = !state.waiting.is_empty();
                let of_host = self.host(host);
                of_host.kept += need;
                if waits {
                    of_host.line.push_back(session);
                }
                return Some((job, need));
            }
            let keeps_nothing = state.kept == 0;
            let of_host = self.host(host);
            if keeps_nothing {
                of_host.is_short = true;
                of_host.line.push_front(session);
                return None;
            }
            of_host.line.push_back(session);
        }
        None
    }

    /// Slots that a job was promised are lent: [`Self::give_back`] takes them when they come back.
    #[inline]
    pub(super) fn lent(&mut self, slots: usize) {
        debug_assert!(slots <= self.promised, "{slots} slots are lent of {}", self.promised);
        self.promised = self.promised.saturating_sub(slots);
    }

    /// Slots that a job was promised are not the peer's affair any more: its data came, or it gets
    /// none.
    #[inline]
    pub(super) fn end_promise(&mut self, session: SessionIndex, slots: usize) {
        self.lent(slots);
        self.give_back(session, slots);
    }

    /// Lent slots came back.
    #[inline(always)]
    pub(super) fn give_back(&mut self, session: SessionIndex, slots: usize) {
        if let Some(state) = self.table.get_mut(place(session))
            && let Some(host) = self.hosts.get_mut(state.host.place())
        {
            debug_assert!(slots <= state.kept, "{slots} slots come back of {}", state.kept);
            state.kept -= slots;
            host.kept -= slots;
        }
    }

    /// Hosts that have jobs in line.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.line.len()
    }

    fn waits_itself(&self, session: SessionIndex) -> bool {
        self.table.get(place(session)).is_some_and(|state| !state.waiting.is_empty())
    }

    /// The host of a session.
    pub(super) fn host_of(&self, session: SessionIndex) -> HostIndex {
        self.table.get(place(session)).map_or(HostIndex::NONE, |state| state.host)
    }

    /// Whether a session, or another one of its host, has jobs in line.
    pub(super) fn waits(&self, session: SessionIndex) -> bool {
        self.hosts.get(self.host_of(session).place()).is_some_and(|host| !host.line.is_empty())
    }

    /// The hosts that have jobs in line.
    pub(super) fn in_line(&self) -> impl Iterator<Item = HostIndex> {
        self.line.iter().copied()
    }

    /// Slots that jobs were promised and that are not lent yet.
    #[cfg(test)]
    pub(super) fn promised(&self) -> usize {
        self.promised
    }

    /// Slots that all sessions keep, each as often as it is kept.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        let by_host: usize = self.hosts.iter().map(|host| host.kept).sum();
        let by_session = self.table.iter().map(|state| state.kept).sum();
        assert_eq!(by_host, by_session, "a host keeps what its sessions keep");
        by_session
    }
}

#[cfg(test)]
mod tests;
