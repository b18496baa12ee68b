//! [`Alterations`]: volumes that are added, removed and changed while the target runs: which
//! changes are allowed, their steps, and the way back when a step fails.
//!
//! One alteration at a time. Its steps are carried out by every poll group, or at the store, and
//! each waits for the one before ([`Core::stepped`](super::Core::stepped)).
//!
//! | change | steps |
//! | --- | --- |
//! | a new volume | record, add, access |
//! | hosts may write, or their writes are more at risk | record, and then as below |
//! | read-ahead, limits, read-only no longer | access |
//! | read-only | hold, access |
//! | larger | store, grow, access |
//! | smaller, cache mode | close, write back, quiet, reshape, store, access |
//! | less is at risk | lower, before the last access |
//! | a volume in memory gets another size | close, quiet, store, drop, add, access |
//! | removed | close, write back, quiet, drop, lower |
//! | its image is lost | close, abandon |
//! | another member of the group serves it | as removed, and its hosts are not told |
//! | nothing: dirty blocks are made durable | write back |
//! | a snapshot | probe, write back, hold, write back, clone, access |
//!
//! Every step that waits for hosts or for a store has a deadline, and comes before the steps that
//! change something in each poll group. So a late failure leads back to the volume as it was. There
//! are two exceptions. A step that changes the length of a file (store, cut back) is waited for: if
//! it were given up, it could cut the file later, under newer writes of hosts. And a removal by
//! force always ends, since its hosts have lost the volume when it begins. Blocks that cannot be
//! written are given up ([`VolumeStep::Abandon`]), and no host that held the volume may resume.
//!
//! "Record" makes durable, before a host may write, that writes are at risk
//! ([`AtRisk`]). "Lower" records a smaller risk. If that cannot be written,
//! the record overstates the risk, which is safe.
//!
//! "Close" ends the connections of the hosts that have the volume open, and an OPEN that comes
//! meanwhile waits for the end of the alteration. To its hosts the volume looks like a target that
//! was out of reach for a moment: they connect again, and resend all commands without a reply.
//!
//! "Hold" lets no new write begin, at any poll group, and waits for those in flight. So the clone
//! has every write that was acknowledged before it, none that a host sent because it saw a later
//! reply, and each request whole or not at all. Most dirty blocks are written before that, and no
//! host waits for them. A volume that becomes read-only is held for that reason, too: once the
//! order is answered, its file changes no more, and a copy of it is complete.
//!
//! A place among the volumes ([`VolumeIndex`]) is used once in a run. A host may have a command on
//! its way that names the place and is older than the removal. It must never reach another volume,
//! however late it comes.

mod order_error;
mod step_plan;
mod volume_change;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::effect::Effect;
use super::holdings::Holdings;
use super::outbox::Outbox;
use super::sessions::HostSessions;
use crate::data::poll_group::VolumeStep;
use crate::volume::ids::VolumeIndex;
use crate::volume::{CacheMode, Volume};

pub use order_error::OrderError;
pub use volume_change::VolumeChange;

use step_plan::{steps_back, steps_of};

/// How long the connections of a volume may take to end, and its dirty blocks to be written.
const STEP_DEADLINE: Duration = Duration::from_secs(60);

/// How long writes may be held, all steps together.
const HOLD_DEADLINE: Duration = Duration::from_secs(10);

/// A change that is carried out.
#[derive(Debug)]
struct Alteration {
    change: VolumeChange,
    // As it will be, or is again after a failure.
    volume: Arc<Volume>,
    // As it was. `None`: it is new.
    before: Option<Arc<Volume>>,
    // The step under way, and those behind it.
    steps: VecDeque<VolumeStep>,
    // The steps that are done.
    done: Vec<VolumeStep>,
    since: Instant,
    // Since when writes are held.
    held: Option<Instant>,
    // Why it failed. Then the steps lead back.
    failure: Option<String>,
    // The log says that its store does not answer.
    is_told: bool,
}

impl Alteration {
    /// Whether a failure does not lead back: hosts were told that the volume is gone, or some poll
    /// groups have forgotten it.
    fn must_go(&self) -> bool {
        let step = self.steps.front().copied();
        let is_late = self.change.is_forced() || step == Some(VolumeStep::Drop);
        self.change.is_removal() && is_late && step != Some(VolumeStep::Abandon)
    }

    /// Whether the volume is closed while it changes.
    fn closes(&self) -> bool {
        self.steps.iter().chain(&self.done).any(|step| *step == VolumeStep::Close)
    }

    /// The step under way is done, or failed. Returns the reason if the volume goes without its
    /// store.
    fn stepped(&mut self, result: Result<(), String>) -> Option<String> {
        let step = self.steps.front().copied();
        let cannot_fail = matches!(step, Some(VolumeStep::Abandon | VolumeStep::Lower));
        match if cannot_fail { Ok(()) } else { result } {
            Ok(()) => self.done.extend(self.steps.pop_front()),
            Err(_) if self.failure.is_some() => {
                // The rollback failed too. Keep what the poll groups serve.
                self.steps.pop_front();
            }
            Err(failure) if self.must_go() => {
                self.done.extend(step.filter(|step| step.has_deadline()));
                self.steps = VecDeque::from([VolumeStep::Abandon]);
                return Some(failure);
            }
            Err(failure) => self.lead_back(failure),
        }
        None
    }

    fn lead_back(&mut self, failure: String) {
        let failed = self.steps.front().copied();
        let after = self.volume.size_bytes();
        let grew = self.before.as_ref().is_some_and(|before| before.size_bytes() < after);
        self.done.extend(failed.filter(|step| step.has_deadline()));
        self.steps = steps_back(&self.done, failed, self.before.is_none(), grew).into();
        self.failure = Some(failure);
        if let Some(before) = &self.before {
            self.volume = Arc::clone(before);
        }
    }

    /// Why the step under way fails now: it takes too long.
    fn lateness(&mut self, now: Instant) -> Option<String> {
        let Some(step) = self.steps.front().filter(|step| step.has_deadline()) else {
            self.tell_if_late(now);
            return None;
        };
        let (since, deadline, what) = match self.held {
            Some(held) => {
                let mut steps = self.steps.iter();
                let what = match steps.any(|step| *step == VolumeStep::Clone) {
                    true => "the writes in flight, its dirty blocks and the clone",
                    false => "the writes in flight and its dirty blocks",
                };
                (held, HOLD_DEADLINE, what)
            }
            None => (self.since, STEP_DEADLINE, step.waits_for()),
        };
        let is_late = now.saturating_duration_since(since) > deadline;
        is_late.then(|| format!("{what} did not end within {} s", deadline.as_secs()))
    }

    /// Logs once that a step that cannot be given up takes long, and that other changes wait for
    /// it.
    fn tell_if_late(&mut self, now: Instant) {
        let at_store = matches!(self.steps.front(), Some(VolumeStep::Store | VolumeStep::CutBack));
        let is_late = now.saturating_duration_since(self.since) > STEP_DEADLINE;
        if at_store && is_late && !std::mem::replace(&mut self.is_told, true) {
            tracing::error!(
                volume = %self.volume.name,
                "the file of the volume does not take its new size: its disk or file system does not answer. Other \
                 changes of volumes wait for it; `rblk-target reload --hosts` and `session kick` do not"
            );
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Alterations {
    under_way: Option<Alteration>,
}

impl Alterations {
    /// Whether a change may be carried out that makes this volume. Nothing changes.
    ///
    /// # Errors
    /// [`OrderError`].
    pub(super) fn judge(
        change: &VolumeChange,
        volume: &Volume,
        holdings: &Holdings,
        sessions: &HostSessions,
    ) -> Result<(), OrderError> {
        let exports = holdings.exports();
        if change.is_addition() {
            return match exports.named(volume.name) {
                Some(_) => Err(OrderError::Exists(volume.name)),
                None => Ok(()),
            };
        }
        let before = exports.volume(volume.index).ok_or(OrderError::Unknown)?;
        let users = || holdings.users(volume.index, sessions);
        if change.is_removal() && !change.is_forced() && !change.yields() {
            let users = users();
            return match users.is_empty() {
                true => Ok(()),
                false => Err(OrderError::InUse { volume: before.name, users }),
            };
        }
        if !change.alters() {
            return Ok(());
        }
        let (was, bytes) = (before.size_bytes(), volume.size_bytes());
        if bytes < was && !change.may_shrink() {
            return Err(OrderError::Smaller { volume: volume.name, was, bytes });
        }
        if before.cache != volume.cache && volume.cache == CacheMode::WriteBack {
            let users = users();
            if !users.is_empty() {
                return Err(OrderError::WriteBackInUse { volume: volume.name, users });
            }
        }
        Ok(())
    }

    /// Begins a [judged](Self::judge) change; [no other](Self::check_free) is under way. `volume`:
    /// as it will be; as it is, if it goes or stays.
    ///
    /// # Errors
    /// [`OrderError`]. Nothing has changed.
    pub(super) fn begin(
        &mut self,
        (change, volume): (&VolumeChange, Arc<Volume>),
        holdings: &mut Holdings,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) -> Result<(), OrderError> {
        debug_assert!(self.under_way.is_none(), "one change at a time");
        let before = match change.is_addition() {
            true => None,
            false => {
                let before = holdings.exports().volume(volume.index).cloned();
                Some(before.ok_or(OrderError::Unknown)?)
            }
        };
        // Hosts of a group go to another member, and go on.
        let is_elsewhere = change.yields() || holdings.is_elsewhere(volume.name);
        if change.is_removal() && !is_elsewhere {
            sessions.volume_changed(volume.index, out);
            holdings.take_from_all(volume.index, sessions, out);
        }
        if matches!(change, VolumeChange::Lose { .. }) && !is_elsewhere {
            // Others may write to its image now.
            holdings.fence_holders(&volume, out);
        }
        // A change that alters nothing is of the volume as it is.
        let volume = before.clone().filter(|_| !change.alters()).unwrap_or(volume);
        let steps = steps_of(change, before.as_deref(), &volume).into();
        let (done, held, failure, is_told) = (Vec::new(), None, None, false);
        let change = change.clone();
        let since = now;
        self.under_way =
            Some(Alteration { change, volume, before, steps, done, since, held, failure, is_told });
        self.begin_step(holdings, (sessions, out), now);
        Ok(())
    }

    /// Whether no change is under way.
    ///
    /// # Errors
    /// [`OrderError::Busy`].
    pub(super) fn check_free(&self) -> Result<(), OrderError> {
        match &self.under_way {
            Some(alteration) => Err(OrderError::Busy(alteration.volume.name)),
            None => Ok(()),
        }
    }

    /// The volume that is being altered, as it will be.
    pub(super) fn altered(&self) -> Option<&Arc<Volume>> {
        self.under_way.as_ref().map(|alteration| &alteration.volume)
    }

    /// Whether a change is under way. Its step may take too long.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// The step that [`Effect::Step`] asked for is done everywhere, or failed somewhere.
    pub(super) fn stepped(
        &mut self,
        result: Result<(), String>,
        holdings: &mut Holdings,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        let Some(alteration) = &mut self.under_way else { return };
        alteration.since = now;
        if let Some(why) = alteration.stepped(result) {
            let volume = &alteration.volume;
            tracing::error!(volume = %volume.name, why, "a volume is removed without its store");
            holdings.fence_holders(volume, out);
            out.order(Effect::GivenUp(why));
        }
        self.begin_step(holdings, (sessions, out), now);
    }

    fn begin_step(
        &mut self,
        holdings: &mut Holdings,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        let Some(alteration) = &mut self.under_way else { return };
        let closed: Option<VolumeIndex> = alteration.closes().then_some(alteration.volume.index);
        holdings.shut(closed);
        let Some(step) = alteration.steps.front().copied() else {
            return self.end(holdings, (sessions, out), now);
        };
        if step == VolumeStep::Hold {
            alteration.held = Some(alteration.since);
        }
        out.order(Effect::Step(step));
    }

    fn end(
        &mut self,
        holdings: &mut Holdings,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        let Some(Alteration { change, volume, before, failure, .. }) = self.under_way.take() else {
            return;
        };
        holdings.shut(None);
        let index = volume.index;
        let result = match (failure, before) {
            (Some(failure), _) => Err(failure),
            (None, _) if change.is_removal() => {
                if change.yields() {
                    holdings.leave_to_others(volume.name, Some(now));
                }
                holdings.end(index, out);
                Ok(())
            }
            (None, None) => {
                holdings.begin(volume, now + sessions.table().lease());
                Ok(())
            }
            (None, Some(before)) => {
                let is_news =
                    (before.blocks, before.read_only) != (volume.blocks, volume.read_only);
                holdings.exports_mut().put(volume);
                if is_news {
                    sessions.volume_changed(index, out);
                }
                Ok(())
            }
        };
        out.order(Effect::Altered(result));
        holdings.finish_opens(sessions, out, now);
    }

    /// Ends a change if its step takes too long.
    pub(super) fn end_late_step(
        &mut self,
        holdings: &mut Holdings,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        let late = self.under_way.as_mut().and_then(|alteration| alteration.lateness(now));
        if let Some(failure) = late {
            out.order(Effect::GiveUpStep);
            self.stepped(Err(failure), holdings, (sessions, out), now);
        }
    }
}
