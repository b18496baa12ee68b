//! [`Lives`]: the lives of the ways of a mount: when to join the session by one more way, which
//! epochs to drop and by which way, when to try a way again. No I/O, no clock, no random numbers:
//! time and random numbers are arguments. The design is in docs/internals/ways.md.
//!
//! It stands beside [`Course`](super::course::Course), which brings the mount back when no way
//! lives, and gives the numbers of epochs.
//!
//! The caller reports events. It calls [`Lives::due`] until that returns `None`, and again at
//! [`Lives::deadline`] at the latest.
//!
//! Invariants, for any order of calls:
//! - One join and one DROP are under way at most.
//! - The epochs of joins rise strictly, if the caller's counter does.
//! - A join names an epoch of a living way beside it, and never ends one.
//! - An epoch that was tried and does not live is named in a DROP, or ended by a join, until the
//!   target has said that it is over. So is the epoch of a failed try: the target may have taken
//!   its LOGIN, and the answer was lost.
//! - While a way lives and another does not, a join, a probe or a deadline is there.

mod flapping;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rblk_protocol::limits::WAYS_MAX;
use rblk_protocol::width::wide;
use rblk_protocol::{DropRequest, Epoch, InstanceId, Join, LoginReply, Mutation, SessionId};

use crate::engine::ways::WayIndex;
use flapping::Flapping;

/// Good probes before a way that died joins again.
const GOOD_PROBES: u32 = 2;

/// Whether a mount with so many addresses may use each as a way.
#[must_use]
pub fn may_be_ways(addresses: usize) -> bool {
    (2..=wide(WAYS_MAX)).contains(&addresses)
}

/// The fixed configuration of a mount's ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WayRules {
    /// Their number, 1 to [`WAYS_MAX`]. They are named by index.
    pub ways: usize,
    /// The first pause before a way is tried again.
    pub reconnect_delay: Duration,
}

/// The state of a way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WayState {
    /// It carries requests, in this epoch.
    Live(Epoch),
    /// It logs in, in this epoch.
    Joining(Epoch),
    /// It is tried again later.
    Away,
}

/// How a way stands, for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Standing {
    /// Its state.
    pub state: WayState,
    /// Whether a probe is under way.
    pub is_probed: bool,
    /// Since when it lives, or since when it does not.
    pub since: Instant,
    /// How often it died.
    pub lost: u64,
}

/// An act that the caller carries out now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WayAct {
    /// Note the epoch. Then connect, log in beside the others, and connect the queues. Call
    /// [`Lives::joined`] or [`Lives::join_failed`].
    Join(WayTry),
    /// End these epochs, by the admin connection of a living way. Call [`Lives::dropped`], or
    /// [`Lives::drop_failed`] if the time was too short, or [`Lives::drop_refused`].
    Drop {
        /// The way to ask by.
        by: WayIndex,
        /// The epochs.
        epochs: DropRequest,
    },
    /// Check whether this run of the target answers by a way, and call [`Lives::probed`].
    Probe(WayIndex),
}

/// A try to join.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WayTry {
    /// The way.
    pub way: WayIndex,
    /// The epoch: the next number.
    pub epoch: Epoch,
    /// For LOGIN.
    pub join: Join,
}

impl WayTry {
    /// Whether the reply to its LOGIN is of this session, in that run of the target.
    #[must_use]
    pub fn leads_to(&self, session: SessionId, run: InstanceId, reply: &LoginReply) -> bool {
        let is_its_run = reply.instance == run || Mutation::WayOtherRun.is_on();
        is_its_run && (reply.session, reply.epoch) == (session, self.epoch)
    }
}

/// The reason for a failed join.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum JoinFailure {
    /// The way leads to another run, another target, or one that does not know the session.
    Misled,
    /// Any other reason.
    Transient,
}

/// One way.
#[derive(Clone, Debug)]
struct Life {
    state: WayState,
    // Since when it lives, or since when it does not.
    since: Instant,
    lost: u64,
    // Epochs that were tried and are not live, until the target says that they are over.
    old: BTreeSet<Epoch>,
    // The time of the next try, and what the probes said.
    at: Instant,
    is_probed: bool,
    good_probes: u32,
    needs_probes: u32,
    flapping: Flapping,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Lives {
    rules: WayRules,
    ways: Vec<Life>,
    dropping: Option<(WayIndex, DropRequest)>,
    // The time of the next DROP after a refused one, and the refusals in a row.
    drop_at: Option<Instant>,
    refusals: Flapping,
}

impl Lives {
    /// A mount whose first session is by that way, in that epoch. The others join at once.
    #[must_use]
    pub fn new(rules: WayRules, first: WayIndex, epoch: Epoch, now: Instant) -> Self {
        let away = Life {
            state: WayState::Away,
            since: now,
            lost: 0,
            old: BTreeSet::new(),
            at: now,
            is_probed: false,
            good_probes: 0,
            needs_probes: 0,
            flapping: Flapping::default(),
        };
        let count = rules.ways.clamp(first.get() + 1, wide(WAYS_MAX));
        let (ways, refusals) = (vec![away; count], Flapping::default());
        let mut lives = Self { rules, ways, dropping: None, drop_at: None, refusals };
        lives.restarted(first, epoch, now);
        lives
    }

    /// No way lived, and the mount is back by that way, in an epoch that ended all others. So all
    /// their requests may be sent again.
    pub fn restarted(&mut self, by: WayIndex, epoch: Epoch, now: Instant) {
        (self.dropping, self.drop_at, self.refusals) = (None, None, Flapping::default());
        for life in &mut self.ways {
            if matches!(life.state, WayState::Live(_)) {
                life.since = now;
            }
            life.state = WayState::Away;
            life.old.clear();
            // The reason was the target, or the last way died after the others. A join is a test of
            // its own.
            (life.at, life.is_probed) = (now, false);
            (life.good_probes, life.needs_probes) = (0, 0);
        }
        if let Some(life) = self.ways.get_mut(by.get()) {
            life.begin(epoch, now);
        }
    }

    /// The state of a way.
    #[must_use]
    pub fn state(&self, way: WayIndex) -> WayState {
        self.ways.get(way.get()).map_or(WayState::Away, |life| life.state)
    }

    /// How each way stands, in their order.
    pub fn standings(&self) -> impl Iterator<Item = Standing> {
        self.ways.iter().map(|life| Standing {
            state: life.state,
            is_probed: life.is_probed,
            since: life.since,
            lost: life.lost,
        })
    }

    /// The living ways and their epochs.
    pub fn living(&self) -> impl Iterator<Item = (WayIndex, Epoch)> {
        self.indices().filter_map(|way| match self.state(way) {
            WayState::Live(epoch) => Some((way, epoch)),
            WayState::Joining(_) | WayState::Away => None,
        })
    }

    /// Whether no way lives, and none is about to.
    #[must_use]
    pub fn are_lost(&self) -> bool {
        self.ways.iter().all(|life| life.state == WayState::Away)
    }

    fn indices(&self) -> impl Iterator<Item = WayIndex> + use<> {
        (0..self.ways.len()).filter_map(WayIndex::new)
    }

    /// Epochs that are not over.
    fn old(&self) -> BTreeSet<Epoch> {
        self.ways.iter().flat_map(|life| &life.old).copied().collect()
    }

    /// The next act, if one is due. `newest` is the highest epoch that the mount has used; the
    /// epoch of a join is above it.
    pub fn due(&mut self, newest: Epoch, now: Instant) -> Option<WayAct> {
        let (by, beside) = self.living().next()?;
        if self.dropping.is_none() && self.drop_at.is_none_or(|at| now >= at) {
            let old: Vec<Epoch> = self.old().into_iter().take(wide(WAYS_MAX)).collect();
            if let Some(epochs) = DropRequest::new(&old) {
                self.dropping = Some((by, epochs));
                return Some(WayAct::Drop { by, epochs });
            }
        }
        let may_join = !self.is_joining();
        let is_due = |life: &Life| {
            let waits = life.is_probed || now < life.at;
            life.state == WayState::Away && !waits && (may_join || life.needs_probe())
        };
        // Of those that may join, one whose earlier tries are over but for one: that one it ends.
        let way = self.indices().find(|way| {
            let life = &self.ways[way.get()];
            is_due(life) && (life.needs_probe() || life.old.len() <= 1)
        })?;
        let life = &mut self.ways[way.get()];
        if life.needs_probe() {
            life.is_probed = true;
            return Some(WayAct::Probe(way));
        }
        // The last epoch is of no use: no LOGIN could end it.
        let epoch = newest.next().filter(|epoch| epoch.next().is_some())?;
        let join = Join { beside, ends: life.old.first().copied() };
        life.state = WayState::Joining(epoch);
        Some(WayAct::Join(WayTry { way, epoch, join }))
    }

    /// The time of the next act, if no event comes before. Acts under way have their own deadlines.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.living().next()?;
        let may_join = !self.is_joining();
        let waits = |life: &&Life| {
            let is_away = life.state == WayState::Away && !life.is_probed;
            is_away && (life.needs_probe() || may_join && life.old.len() <= 1)
        };
        let tries = self.ways.iter().filter(waits).map(|life| life.at).min();
        let has_old = self.ways.iter().any(|life| !life.old.is_empty());
        let drop_at = self.drop_at.filter(|_| self.dropping.is_none() && has_old);
        tries.into_iter().chain(drop_at).min()
    }

    fn is_joining(&self) -> bool {
        self.ways.iter().any(|life| matches!(life.state, WayState::Joining(_)))
    }

    /// A way died. Its epoch is dropped as soon as another lives.
    pub fn died(&mut self, way: WayIndex, now: Instant, random: u64) {
        let delay = self.rules.reconnect_delay;
        let Some(life) = self.ways.get_mut(way.get()) else { return };
        match life.state {
            WayState::Live(epoch) => {
                life.flapping.died(now.saturating_duration_since(life.since));
                (life.since, life.lost) = (now, life.lost + 1);
                life.go_away(epoch, delay, now, random);
            }
            WayState::Joining(_) => self.join_failed(way, JoinFailure::Transient, now, random),
            WayState::Away => {}
        }
        // Another way asks again.
        self.dropping = self.dropping.filter(|(by, _)| *by != way);
    }

    /// A way that joined lives in that epoch: its queues have passed their self-tests. Returns the
    /// epoch that is over by that. `None` for a join that is not under way.
    pub fn joined(&mut self, joined: &WayTry, now: Instant) -> Option<Epoch> {
        let WayTry { way, epoch, join } = *joined;
        let life = self.ways.get_mut(way.get())?;
        if life.state != WayState::Joining(epoch) {
            return None;
        }
        life.begin(epoch, now);
        join.ends.filter(|ends| life.old.remove(ends))
    }

    /// A join failed. The target may have taken it.
    pub fn join_failed(&mut self, way: WayIndex, why: JoinFailure, now: Instant, random: u64) {
        let delay = self.rules.reconnect_delay;
        let Some(life) = self.ways.get_mut(way.get()) else { return };
        let WayState::Joining(epoch) = life.state else { return };
        match why {
            JoinFailure::Misled => life.flapping.misled(),
            JoinFailure::Transient => life.flapping.failed(),
        }
        life.go_away(epoch, delay, now, random);
    }

    /// The result of a probe.
    pub fn probed(&mut self, way: WayIndex, answers: bool, now: Instant, random: u64) {
        let delay = self.rules.reconnect_delay;
        let Some(life) = self.ways.get_mut(way.get()) else { return };
        if !std::mem::take(&mut life.is_probed) {
            return;
        }
        if answers {
            life.good_probes += 1;
            life.at = if life.needs_probe() { now + delay } else { now };
        } else {
            life.good_probes = 0;
            life.flapping.failed();
            life.at = now + life.flapping.pause(delay, random);
        }
    }

    /// The target has answered a DROP. Returns the epochs that are over by that.
    pub fn dropped(&mut self, by: WayIndex, epochs: &DropRequest) -> Vec<Epoch> {
        if self.dropping != Some((by, *epochs)) {
            return Vec::new();
        }
        (self.dropping, self.drop_at, self.refusals) = (None, None, Flapping::default());
        let is_old = |epoch: &&Epoch| self.ways.iter().any(|life| life.old.contains(epoch));
        let over: Vec<Epoch> = epochs.epochs().iter().filter(is_old).copied().collect();
        for life in &mut self.ways {
            life.old.retain(|epoch| !over.contains(epoch));
        }
        over
    }

    /// The target did not end the epochs in its time: it is asked again.
    pub fn drop_failed(&mut self, by: WayIndex) {
        self.dropping = self.dropping.filter(|(asked, _)| *asked != by);
    }

    /// The target refused a DROP: too many wait there. It is asked again after a pause, and the way
    /// goes on.
    pub fn drop_refused(&mut self, by: WayIndex, now: Instant, random: u64) {
        if self.dropping.is_some_and(|(asked, _)| asked == by) {
            self.dropping = None;
            self.drop_at = Some(now + self.refusals.pause(self.rules.reconnect_delay, random));
            self.refusals.failed();
        }
    }
}

impl Life {
    fn begin(&mut self, epoch: Epoch, now: Instant) {
        self.state = WayState::Live(epoch);
        self.since = now;
        self.flapping.lives();
    }

    fn go_away(&mut self, from: Epoch, delay: Duration, now: Instant, random: u64) {
        self.state = WayState::Away;
        self.old.insert(from);
        (self.good_probes, self.needs_probes, self.is_probed) = (0, GOOD_PROBES, false);
        self.at = now + self.flapping.pause(delay, random);
    }

    fn needs_probe(&self) -> bool {
        self.good_probes < self.needs_probes
    }
}
