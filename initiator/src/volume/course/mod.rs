//! [`Course`]: the reconnects of a mount: when to try each address, with which session, epoch and
//! generation, and when to stop. No I/O, no clock, no random numbers: time and random numbers are
//! arguments, so a simulation can drive it.
//!
//! The caller reports events ([`Course::lose`], [`Course::logged_in`], [`Course::opened`], ...). It
//! calls [`Course::due`] until that returns `None`, and again at [`Course::deadline`] at the
//! latest.
//!
//! A lost target is tried in rounds. A round tries every address once, without pauses, and the
//! address of the dead path last. The pause between two rounds grows. Every try names the last
//! session, in an epoch that was never named before, and the generation of the volume that this
//! mount holds. A target that knows both lets the mount resume. A target that lost the session, but
//! knows the generation, lets it resume in a new session. A target that gave the volume to another
//! host meanwhile reports that in its reply to OPEN, which is final.
//!
//! Invariants, for any order of calls:
//! - While the target is lost, a try is under way or a deadline is set.
//! - The epochs named in one session rise strictly.
//! - A try names the generation of the newest OPEN.
//! - After a fence, or a change to a different volume, nothing is ever due again.
//!
//! A volume may change its size and become read-only or writable meanwhile: it is the same volume.
//! A volume that the target has removed may come back: the mount goes on trying, with its
//! generation, but its requests do not wait for that.

mod decision;
mod failback;
mod rounds;
mod shape;

use std::time::{Duration, Instant};

use rblk_protocol::width::narrow;
use rblk_protocol::{Epoch, InstanceId, LoginReply, Mutation, OpenReply, VolumeEntry, VolumeFlags};

use failback::{Failback, Probed};
use rounds::Rounds;

pub use decision::{Act, Attempt, CourseState, Facts, Failure, LossKind, OpenVerdict, Rules};
pub(crate) use decision::{Arrival, Leaving, OtherTarget};

/// A session that lived at least so long is followed by a new round at once.
pub(crate) const LASTING: Duration = Duration::from_secs(2);
/// Longest pause between two rounds of the first minute, and of a long outage: a pause is not
/// longer than a thirtieth of the outage.
const PAUSE_MAX: (Duration, Duration) = (Duration::from_millis(1500), Duration::from_secs(10));
/// Longest time for in-flight requests when the target drains.
const DRAIN_HOLD_MAX: Duration = Duration::from_secs(2);
/// Longest time for in-flight requests when another program takes the target's place. The target
/// waits a little longer than that.
const UPGRADE_HOLD_MAX: Duration = Duration::from_secs(1);
/// The time in which a target under upgrade may return at any moment, and the pause between two
/// rounds meanwhile.
const UPGRADE_SOON: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(100));

/// The time in which a target under upgrade is tried only at the address in use. The old program
/// hands its TCP sockets to the new one, and its RDMA listener ends with it. So TCP would always
/// answer first.
const UPGRADE_STAY: Duration = Duration::from_secs(3);

/// A running try and its progress.
#[derive(Clone, Debug)]
struct RunningTry {
    attempt: Attempt,
    since: Instant,
    instance: Option<InstanceId>,
    opened: Option<OpenReply>,
}

/// A plan to leave a target that lives.
#[derive(Clone, Copy, Debug)]
struct Switch {
    leaving: Leaving,
    until: Instant,
    holding: bool,
    quiet: bool,
}

/// The reconnects of a mount.
#[derive(Clone, Debug)]
pub struct Course {
    rules: Rules,
    facts: Facts,
    state: CourseState,
    // The address in use, or last in use.
    address: usize,
    connected_at: Instant,
    lost_at: Option<Instant>,
    rounds: Rounds,
    retry_at: Option<Instant>,
    // The end of the time in which a target under upgrade may return at any moment.
    soon_until: Option<Instant>,
    // The end of the time in which only the address in use is tried: the target is being upgraded.
    stay_until: Option<Instant>,
    under_way: Option<RunningTry>,
    switch: Option<Switch>,
    failback: Failback,
    // Every address is in use, so none is better than another.
    uses_all: bool,
}

impl Course {
    /// The course of a mount that has just connected, at that address.
    #[must_use]
    pub fn connected(rules: Rules, facts: Facts, address: usize, now: Instant) -> Self {
        let mut course = Self::lost(rules, facts, now);
        if course.state == CourseState::Lost {
            course.state = CourseState::Connected;
            course.address = address;
            course.lost_at = None;
            course.retry_at = None;
            course.rounds.clear();
            course.failback.schedule(course.rules.failback, now);
        }
        course
    }

    /// The course of a mount that knows its volume and is not connected: the first try is due at
    /// once. A fenced mount stays fenced.
    #[must_use]
    pub fn lost(rules: Rules, facts: Facts, now: Instant) -> Self {
        let addresses = rules.addresses.max(1);
        let is_fenced = facts.fenced.is_some();
        Self {
            rules,
            facts,
            state: if is_fenced { CourseState::Fenced } else { CourseState::Lost },
            address: 0,
            connected_at: now,
            lost_at: Some(now),
            rounds: Rounds::new(addresses),
            retry_at: (!is_fenced).then_some(now),
            soon_until: None,
            stay_until: None,
            under_way: None,
            switch: None,
            failback: Failback::new(addresses, now),
            uses_all: false,
        }
    }

    /// Whether the mount uses every address at once, and goes back to none.
    pub fn uses_all_addresses(&mut self, all: bool) {
        self.uses_all = all;
    }

    /// Sets the first address to try: the one that was in use. Call it only before the first try.
    pub(crate) fn prefer(&mut self, address: usize) {
        if self.state == CourseState::Lost
            && self.under_way.is_none()
            && address < self.rounds.addresses()
        {
            self.rounds.prefer(address);
            self.rounds.begin();
        }
    }

    /// The address in use, or last in use.
    #[must_use]
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// The rules.
    #[must_use]
    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The state of the mount.
    #[must_use]
    pub fn state(&self) -> CourseState {
        self.state
    }

    /// The known facts about the volume.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The time of the loss, while the target is lost.
    #[must_use]
    pub(crate) fn lost_at(&self) -> Option<Instant> {
        self.lost_at
    }

    /// Whether the mount is about to leave a living target, and holds new requests.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        self.switch.is_some_and(|switch| switch.holding)
    }

    /// Whether no act will ever be due again.
    #[must_use]
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, CourseState::Fenced | CourseState::Changed)
    }

    /// The next act, if one is due. Call it until it returns `None`.
    pub fn due(&mut self, now: Instant, random: u64) -> Option<Act> {
        match self.state {
            CourseState::Connected => self.due_connected(now, random),
            CourseState::Lost | CourseState::Failing | CourseState::Removed => self.due_lost(now),
            CourseState::Fenced | CourseState::Changed => None,
        }
    }

    /// The time of the next act, if no event comes before. A running try or probe has its own
    /// deadlines.
    #[must_use]
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.state {
            CourseState::Connected => match self.switch {
                // The hold itself, or the end of a quiet one, is due now.
                Some(Switch { until, holding: true, quiet: false, .. }) => Some(until),
                Some(_) => Some(self.connected_at),
                None => self.probe_at(),
            },
            CourseState::Lost | CourseState::Failing | CourseState::Removed => {
                let retry = if self.under_way.is_some() { None } else { self.retry_at };
                [retry, self.fails_at()].into_iter().flatten().min()
            }
            CourseState::Fenced | CourseState::Changed => None,
        }
    }

    fn due_connected(&mut self, now: Instant, random: u64) -> Option<Act> {
        let Some(switch) = &mut self.switch else {
            self.probe_at().filter(|at| now >= *at)?;
            return Some(Act::Probe(self.failback.begin()));
        };
        if !switch.holding {
            switch.holding = true;
            return Some(Act::Hold);
        }
        if !switch.quiet && now < switch.until {
            return None;
        }
        let leaving = switch.leaving;
        self.leave(LossKind::Path, now, random);
        Some(Act::Leave(leaving))
    }

    fn due_lost(&mut self, now: Instant) -> Option<Act> {
        if self.fails_at().is_some_and(|at| now >= at) {
            self.state = CourseState::Failing;
            return Some(Act::Fail);
        }
        if self.under_way.is_some() || self.retry_at.is_none_or(|at| now < at) {
            return None;
        }
        let address = if self.stays(now) { self.address } else { self.rounds.next() };
        self.retry_at = None;
        // A try that fails half way has used its epoch.
        self.facts.resume =
            self.facts.resume.and_then(|(id, epoch)| epoch.next().map(|next| (id, next)));
        let attempt = Attempt {
            address,
            resume: self.facts.resume,
            generation: self.facts.volume.generation,
            limit: self.rules.try_limit(),
        };
        self.under_way = Some(RunningTry { attempt, since: now, instance: None, opened: None });
        Some(Act::Try(attempt))
    }

    fn fails_at(&self) -> Option<Instant> {
        match (self.state, self.lost_at, self.rules.fail_after) {
            (CourseState::Lost, Some(at), Some(after)) => at.checked_add(after),
            _ => None,
        }
    }

    /// One more way joins the session, in this epoch: it was never named before. Write the note
    /// before the way is tried.
    pub fn joins(&mut self, epoch: Epoch) {
        if let Some((_, newest)) = &mut self.facts.resume
            && !Mutation::WayEpochAgain.is_on()
        {
            *newest = (*newest).max(epoch);
        }
    }

    /// The target is lost. For a connected mount only.
    pub fn lose(&mut self, loss: LossKind, now: Instant, random: u64) {
        if self.state == CourseState::Connected {
            self.leave(loss, now, random);
        }
    }

    fn leave(&mut self, loss: LossKind, now: Instant, random: u64) {
        let lasted = now.saturating_duration_since(self.connected_at);
        let leaving = self.switch.take().map(|switch| switch.leaving);
        self.state = CourseState::Lost;
        self.lost_at = Some(now);
        self.failback.path_ended(self.address, lasted, loss, leaving);
        let mut at_once = lasted >= LASTING;
        match (leaving, loss) {
            (Some(Leaving::Back { to }), _) => {
                self.rounds.prefer(to);
                at_once = true;
            }
            (Some(Leaving::Upgrade), _) => {
                self.rounds.prefer(self.address);
                self.soon_until = Some(now + UPGRADE_SOON.0);
                self.stay_until = (self.rules.addresses > 1).then(|| now + UPGRADE_STAY);
                at_once = true;
            }
            (None, LossKind::Renegotiate) => {
                self.rounds.prefer(self.address);
                at_once = true;
            }
            (Some(Leaving::Drain), _) => {
                self.rounds.suspect_only(self.address);
                // A draining target needs some time to return, so the next try comes at once only
                // at another address.
                at_once = self.rules.addresses > 1;
            }
            (None, LossKind::Path) => self.rounds.suspect_only(self.address),
        }
        if lasted >= LASTING {
            self.rounds.restart();
        }
        if at_once {
            self.rounds.begin();
            self.retry_at = Some(now);
        } else {
            // A short session counts as a failed try at its address: that address is not tried
            // again at once.
            self.next_of_round(now, random);
        }
    }

    /// Whether only the address in use is tried for now.
    fn stays(&self, now: Instant) -> bool {
        self.stay_until.is_some_and(|until| now < until)
    }

    /// Goes to the next address, or to the next round after a pause.
    fn next_of_round(&mut self, now: Instant, random: u64) {
        if self.stays(now) {
            self.retry_at = Some(now + UPGRADE_SOON.1);
            return;
        }
        let pause = match self.rounds.try_failed() {
            true => self.pause(now, random),
            false => Duration::ZERO,
        };
        self.retry_at = Some(now + pause);
    }

    /// The pause before the next round: the configured one, doubled with every round, with jitter
    /// so that the initiators of a restarted target do not all connect at once. A target under
    /// upgrade is tried often.
    fn pause(&self, now: Instant, random: u64) -> Duration {
        if self.soon_until.is_some_and(|until| now < until) {
            return UPGRADE_SOON.1;
        }
        let outage = self.lost_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let limit = (outage / 30).clamp(PAUSE_MAX.0, PAUSE_MAX.1);
        let least = self.rules.reconnect_delay;
        let doublings = self.rounds.failed().saturating_sub(1).min(10);
        let base = least.saturating_mul(1 << doublings).min(limit).max(least);
        let share = narrow::<u32, _>(random >> 32);
        base.mul_f64(0.5 + 0.5 * f64::from(share) / f64::from(u32::MAX))
    }

    /// The try under way has a session.
    ///
    /// # Errors
    /// The session is another target's. The try is over: log out there, and call [`Self::failed`].
    pub fn logged_in(&mut self, login: &LoginReply) -> Result<(), OtherTarget> {
        let Some(under_way) = &mut self.under_way else { return Ok(()) };
        if login.target_name != self.facts.target_name {
            return Err(OtherTarget {
                found: login.target_name.to_string(),
                expected: self.facts.target_name.to_string(),
            });
        }
        under_way.instance = Some(login.instance);
        let epoch = match under_way.attempt.resume {
            Some((id, asked)) if id == login.session => asked.max(login.epoch),
            _ => login.epoch,
        };
        self.facts.resume = Some((login.session, epoch));
        Ok(())
    }

    /// The try has opened the volume. Returns the next step.
    pub fn opened(&mut self, volume: &OpenReply) -> OpenVerdict {
        let Some(under_way) = &mut self.under_way else { return OpenVerdict::Go };
        let known = self.facts.volume;
        let is_same = volume.block_size == known.block_size && volume.uuid == known.uuid;
        let another_run =
            under_way.instance.is_some_and(|instance| instance != self.facts.instance);
        let how = if !is_same {
            Some("came back as another volume or block size")
        } else if volume.flags.has(VolumeFlags::EPHEMERAL) && another_run {
            Some("was in the memory of a target that ended")
        } else {
            None
        };
        if let Some(how) = how {
            self.end(CourseState::Changed);
            return OpenVerdict::Changed(how);
        }
        // The target records the generation even if the try fails later.
        self.facts.volume.generation = volume.generation;
        under_way.opened = Some(*volume);
        if volume.verifier == known.verifier {
            OpenVerdict::Go
        } else {
            OpenVerdict::ResolveUnflushed
        }
    }

    /// Takes an entry about the open volume from the target. Returns whether it is the same volume.
    pub(crate) fn seen(&mut self, entry: &VolumeEntry) -> bool {
        let known = &self.facts.volume;
        if entry.uuid != known.uuid || entry.block_size != known.block_size {
            return false;
        }
        self.facts.volume = shape::changed(known, entry);
        true
    }

    /// The target serves the volume no longer. A connected mount has lost it; otherwise call
    /// [`Self::missing`].
    pub fn removed(&mut self, now: Instant, random: u64) {
        if self.state == CourseState::Connected {
            self.leave(LossKind::Path, now, random);
            self.state = CourseState::Removed;
        }
    }

    /// The target of the try under way does not have the volume. Returns whether requests start to
    /// fail: if this run of the target served the volume before, it was removed. Another run may
    /// not have it yet. The try is over: call [`Self::failed`].
    pub fn missing(&mut self) -> bool {
        let Some(under_way) = &self.under_way else { return false };
        let is_same_run = under_way.instance == Some(self.facts.instance);
        let is_news = matches!(self.state, CourseState::Lost | CourseState::Failing) && is_same_run;
        if is_news {
            self.state = CourseState::Removed;
        }
        is_news
    }

    /// OPEN was answered with `Fenced`: another host holds the volume, or held it since.
    pub fn fenced(&mut self, by: impl Into<String>) {
        if !self.is_over() {
            self.facts.fenced = Some(by.into());
            self.end(CourseState::Fenced);
        }
    }

    fn end(&mut self, state: CourseState) {
        self.state = state;
        self.under_way = None;
        self.retry_at = None;
        self.switch = None;
        self.failback.cancel();
        self.rounds.clear();
    }

    /// The try under way has a path for every queue: requests are served again. `None` when there
    /// is no such try, or it did not open the volume: give the session up.
    pub fn arrived(&mut self, now: Instant) -> Option<Arrival> {
        let under_way = self.under_way.take()?;
        let Some(opened) = under_way.opened else {
            self.under_way = Some(under_way);
            return None;
        };
        let verifier_changed = opened.verifier != self.facts.volume.verifier;
        self.facts.volume = shape::reopened(&self.facts.volume, opened);
        let is_new_run = under_way.instance.is_some_and(|instance| instance != self.facts.instance);
        if let Some(instance) = under_way.instance {
            self.facts.instance = instance;
        }
        let lost_at = self.lost_at.take().unwrap_or(now);
        let arrival = Arrival {
            address: under_way.attempt.address,
            stalled: now.saturating_duration_since(lost_at),
            was_failing: matches!(self.state, CourseState::Failing | CourseState::Removed),
            verifier_changed,
        };
        self.state = CourseState::Connected;
        self.address = arrival.address;
        self.connected_at = now;
        self.rounds.set_suspect(arrival.address, false);
        self.retry_at = None;
        (self.soon_until, self.stay_until) = (None, None);
        self.failback.connected(arrival.address);
        if is_new_run {
            self.failback.hurry(now);
        }
        self.failback.schedule(self.rules.failback, now);
        Some(arrival)
    }

    /// The try under way failed.
    pub fn failed(&mut self, why: Failure, now: Instant, random: u64) {
        let Some(RunningTry { attempt, since, .. }) = self.under_way.take() else { return };
        // A silent address would make every round as long as its limit.
        let is_silent = now.saturating_duration_since(since) >= attempt.limit / 2;
        self.rounds.set_suspect(attempt.address, is_silent);
        if why == Failure::Transient {
            self.failback.try_failed(attempt.address);
        }
        if why == Failure::SessionGone {
            self.facts.resume = None;
            if attempt.resume.is_some() && self.stays(now) {
                self.retry_at = Some(now);
                return;
            }
            if attempt.resume.is_some() {
                // The target restarted, or gave the session up: start a new one there, at once.
                self.rounds.again(attempt.address);
            }
        }
        self.next_of_round(now, random);
    }

    /// The target drains: the mount waits briefly for its replies, and then leaves.
    pub fn draining(&mut self, now: Instant) {
        let hold = (self.rules.detect * 3 / 4).min(DRAIN_HOLD_MAX);
        self.plan(Leaving::Drain, hold, now);
    }

    /// Another program takes the target's place: the mount waits briefly for its replies, leaves,
    /// and returns as soon as the new program answers.
    pub fn upgrading(&mut self, now: Instant) {
        let hold = (self.rules.detect * 3 / 4).min(UPGRADE_HOLD_MAX);
        self.plan(Leaving::Upgrade, hold, now);
    }

    fn plan(&mut self, leaving: Leaving, hold: Duration, now: Instant) {
        if self.state != CourseState::Connected {
            return;
        }
        let until = now + hold;
        match &mut self.switch {
            // The departure of the target replaces any planned reason.
            Some(switch) if matches!(leaving, Leaving::Drain | Leaving::Upgrade) => {
                switch.leaving = leaving;
                switch.until = switch.until.min(until);
            }
            Some(_) => {}
            None => {
                self.switch = Some(Switch { leaving, until, holding: false, quiet: false });
            }
        }
    }

    /// Every sent request is answered.
    pub fn quiet(&mut self) {
        if let Some(switch) = &mut self.switch {
            switch.quiet |= switch.holding;
        }
    }

    /// A probe ended. `answers`: this run of the target answers at that address.
    pub fn probed(&mut self, address: usize, answers: bool, now: Instant) {
        match self.failback.probed(address, answers, self.address) {
            Probed::GoBack => {
                self.plan(Leaving::Back { to: address }, self.rules.detect, now);
                self.failback.schedule(self.rules.failback, now);
            }
            Probed::Later => self.failback.schedule(self.rules.failback, now),
            Probed::Next | Probed::Unknown => {}
        }
    }

    /// The time of the next probe, if there is a better address.
    fn probe_at(&self) -> Option<Instant> {
        let wanted = self.address > 0 && !self.uses_all && !self.rules.failback.is_zero();
        self.failback.due_at().filter(|_| wanted)
    }
}

#[cfg(test)]
mod tests;
