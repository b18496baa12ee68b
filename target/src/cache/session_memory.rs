//! [`Sessions`]: limits on the memory of a shard that the peers of each host keep from other hosts,
//! and the peers of each session from other sessions.
//!
//! Memory lent for a READ comes back when the peer has the data. Memory reserved for a WRITE is
//! filled when the peer sends the data. A peer may take its time for both, so the memory it keeps
//! is bounded, first by host: a host gets more only while it keeps at most a third of the memory
//! that no peer keeps. One host alone keeps up to a quarter of the memory, each of two a fifth,
//! each of `n` one part of `n + 3`: however many hosts keep all they may, some memory remains for
//! the next one. (A dynamic threshold, as for the shared buffer of a switch: Choudhury and Hahne,
//! IEEE/ACM Transactions on Networking 6, 1998.) A host that keeps nothing gets its first request,
//! whatever its size. This applies once to a host, not once to each of its sessions: else many
//! sessions of one host would get all of the memory.
//!
//! The sessions of a host share the host's memory in the same way, with another factor: a session
//! gets more only while it keeps at most four times the memory that its host may still take. One
//! session alone keeps four parts of nineteen of the memory, so some of its host's memory is left
//! to the next session. When a session keeps nothing and its host has too little left for its
//! request, that session goes before all other sessions of the host ([`HostShare::is_short`]):
//! small requests of others, however many, cannot keep it from a large one.
//!
//! Most lends need only one comparison: a host may always keep one part of [`QUICK`] of the memory,
//! unless a job of one of its sessions waits.
//!
//! Each shard counts on its own, so poll groups share nothing: a host that keeps at most a quarter
//! of each shard keeps at most a quarter of the arena. Control assigns each session to its host in
//! every shard ([`Sessions::set_host`]). Until then, the session belongs to [`HostIndex::NONE`].
//!
//! Memory that may be dirty does not count as memory for peers. A slot lent twice counts twice for
//! the hosts that have it, and once in the total.

use std::collections::VecDeque;

use rblk_protocol::width::wide;

use crate::volume::ids::{HostIndex, SessionIndex};

/// A waiting job, and the slots that it needs.
type Waiter = (u32, usize);

/// A host may keep at least one of this many parts of the memory.
const QUICK: usize = 128;
/// A host keeps at most one of this many parts of the memory that no peer keeps.
const HOST: usize = 3;
/// A session keeps at most this many times the memory that its host may still take.
const SESSION: usize = 4;

#[derive(Debug, Default)]
struct SessionState {
    // The host of the session.
    host: HostIndex,
    // Slots lent to its peers or reserved for their data, or promised.
    kept: usize,
    // Jobs that wait until the session or its host gives memory back, oldest first.
    waiting: VecDeque<Waiter>,
}

#[derive(Debug, Default)]
struct HostShare {
    // Slots that the host's sessions keep.
    kept: usize,
    // Slots that the host may keep without further checks: 0 while one of its jobs waits.
    quick: usize,
    // The host's sessions with waiting jobs, in turn.
    line: VecDeque<SessionIndex>,
    // The first of these sessions keeps nothing, and waits until the host gives memory back: no
    // other session overtakes it.
    is_short: bool,
}

impl HostShare {
    // Slots that the host may take on top of those it keeps. `free`: slots that no peer keeps.
    fn room(&self, free: usize) -> usize {
        (free / HOST).saturating_sub(self.kept)
    }

    fn may_take(&self, need: usize, free: usize) -> bool {
        self.kept == 0 || HOST * (self.kept + need) <= free
    }
}

impl SessionState {
    // `room`: slots that the session's host may take.
    fn may_take(&self, need: usize, room: usize) -> bool {
        self.kept == 0 || self.kept + need <= SESSION * room
    }
}

/// The slots that the peers of each host and session keep. See the module.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    table: Vec<SessionState>,
    hosts: Vec<HostShare>,
    // Total of slots that peers may keep.
    slots: usize,
    // `slots / QUICK`.
    quick: usize,
    // Slots promised to jobs and not yet lent.
    promised: usize,
    // Hosts with waiting jobs, in turn.
    line: VecDeque<HostIndex>,
}

/// The index of a session in the table. Index 0 is [`SessionIndex::NONE`], the session of control.
#[inline(always)]
fn place(session: SessionIndex) -> usize {
    wide(session.index.wrapping_add(1))
}

impl Sessions {
    /// Sets the number of slots that are never dirty: peers may keep these.
    pub(super) fn set_slots(&mut self, slots: usize) {
        (self.slots, self.quick) = (slots, slots / QUICK);
        for host in self.hosts.iter_mut().filter(|host| host.line.is_empty()) {
            host.quick = self.quick;
        }
    }

    /// Moves a session, with all the slots it keeps, to a host.
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

    // `pinned`: lent slots, each counted once.
    fn free(&self, pinned: usize) -> usize {
        self.slots.saturating_sub(self.promised + pinned)
    }

    /// Takes slots to lend to a session at once. False: the session or its host is at its limit.
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

    /// Promises slots to a job of a session. Otherwise puts the job in the session's queue and
    /// returns false.
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

    // The first job of a session starts to wait.
    fn enter_line(&mut self, session: SessionIndex, host: HostIndex) {
        let of_host = self.host(host);
        of_host.quick = 0;
        of_host.line.push_back(session);
        if of_host.line.len() == 1 {
            self.line.push_back(host);
        }
    }

    // A session has no waiting job any more, or moves to another host.
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

    /// Promises slots to the first job of the first session of the first waiting host that may have
    /// them. Returns the job and its slots, or `None`.
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

    // [`Self::promise_next`] for one host.
    fn promise_next_of(&mut self, host: HostIndex, free: usize) -> Option<Waiter> {
        let of_host = self.host(host);
        of_host.is_short = false;
        let room = of_host.room(free);
        for _ in 0..of_host.line.len() {
            let session = self.host(host).line.pop_front()?;
            let first = self.state(session).waiting.front().copied();
            // A session in the queue has a waiting job.
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

    /// A job's promised slots are lent: [`Self::give_back`] takes them when they come back.
    #[inline]
    pub(super) fn lent(&mut self, slots: usize) {
        debug_assert!(slots <= self.promised, "{slots} slots are lent of {}", self.promised);
        self.promised = self.promised.saturating_sub(slots);
    }

    /// Ends a promise without a lend: the data of the job came, or will not come.
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

    /// Number of hosts with waiting jobs.
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

    /// Whether a session, or another session of its host, has waiting jobs.
    pub(super) fn waits(&self, session: SessionIndex) -> bool {
        self.hosts.get(self.host_of(session).place()).is_some_and(|host| !host.line.is_empty())
    }

    /// The hosts with waiting jobs.
    pub(super) fn in_line(&self) -> impl Iterator<Item = HostIndex> {
        self.line.iter().copied()
    }

    /// Slots promised to jobs and not yet lent.
    #[cfg(test)]
    pub(super) fn promised(&self) -> usize {
        self.promised
    }

    /// Slots that all sessions keep; a slot kept twice counts twice.
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
