//! Volumes that are added, removed and changed while the target runs: which changes are allowed,
//! their steps, and the way back when a step fails.
//!
//! One alteration at a time. Its steps are carried out by every poll group, or at the store, and
//! each waits for the one before ([`Core::stepped`]).
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

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::{Name, Status};

use super::{Core, Effect, Notice, VolumeStep};
use crate::cache::SLOT_BYTES;
use crate::record::AtRisk;
use crate::record::holders::ServedFrom;
use crate::store::StoreIdentity;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use crate::volume::{CacheMode, Placement, Volume};

/// How long the connections of a volume may take to end, and its dirty blocks to be written.
const STEP_DEADLINE: Duration = Duration::from_secs(60);

/// How long writes may be held, all steps together.
const HOLD_DEADLINE: Duration = Duration::from_secs(10);

/// A change of a volume.
#[derive(Clone, Debug)]
pub enum VolumeOrder {
    /// Serve it. Its index was never used in this run.
    Add(Arc<Volume>),
    /// Serve it no longer.
    Remove {
        /// The volume.
        volume: VolumeIndex,
        /// Also if hosts have it open: they lose it. Also if its store does not take the dirty
        /// blocks: they are lost.
        force: bool,
    },
    /// Make its dirty blocks durable. The volume is served meanwhile and does not change.
    WriteBack(VolumeIndex),
    /// Change the volume that has this index.
    Alter {
        /// The volume as it shall be.
        volume: Arc<Volume>,
        /// Whether it may become smaller.
        shrink: bool,
    },
    /// Clone the file of this volume. The volume stays as it is.
    Snapshot(Arc<Volume>),
}

/// Why an order is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OrderError {
    /// The name is taken.
    #[error("there is a volume {0} already")]
    Exists(Name),
    /// The volume is not served.
    #[error("there is no such volume; `rblk-target volume list` shows all")]
    Unknown,
    /// Hosts have it.
    #[error("{volume} is in use: {}", users.join(", "))]
    InUse {
        /// The volume.
        volume: Name,
        /// The hosts that have it open or may come back.
        users: Vec<String>,
    },
    /// Another order is under way.
    #[error("{0} is being changed already; try again when that is done")]
    Busy(Name),
    /// The target stops.
    #[error("the target is stopping")]
    Stopping,
    /// The volume would lose data.
    #[error(
        "{volume} would lose the data behind its new end: it has {was} bytes, and {bytes} are fewer; --shrink does it"
    )]
    Smaller {
        /// The volume.
        volume: Name,
        /// Bytes now.
        was: u64,
        /// Bytes asked for.
        bytes: u64,
    },
    /// A host could not learn of a loss.
    #[error(
        "{volume} cannot become write-back while hosts have it open, since they would not hear of writes that a crash \
         loses: unmount it first ({})", users.join(", ")
    )]
    WriteBackInUse {
        /// The volume.
        volume: Name,
        /// The hosts that have it open or may come back.
        users: Vec<String>,
    },
}

impl VolumeStep {
    // A step that may fail late and can be given up, since its wait changes nothing. A file's
    // length does not qualify: a late change would cut off newer writes of hosts.
    fn has_deadline(self) -> bool {
        use VolumeStep::{Clone, Close, Hold, Lower, Probe, Quiet, Record, WriteBack};
        matches!(self, Record | Lower | Close | WriteBack | Quiet | Probe | Hold | Clone)
    }

    // The work that did not end in time.
    fn waits_for(self) -> &'static str {
        match self {
            Self::Record | Self::Lower => "the write of its record (state_dir)",
            Self::Close => "the connections of its hosts",
            Self::WriteBack => "the writes of its dirty blocks",
            _ => "the work of its store",
        }
    }
}

/// The volume's state after the alteration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AlterationEnd {
    Served,
    Removed,
}

/// An order that is carried out.
#[derive(Debug)]
pub(super) struct Alteration {
    // As it will be, or is again after a failure.
    volume: Arc<Volume>,
    // As it was. `None`: it is new.
    before: Option<Arc<Volume>>,
    end: AlterationEnd,
    is_forced: bool,
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
    // Whether a failure does not lead back: hosts were told that the volume is gone, or some poll
    // groups have forgotten it.
    fn must_go(&self) -> bool {
        let step = self.steps.front().copied();
        let is_late = self.is_forced || step == Some(VolumeStep::Drop);
        self.end == AlterationEnd::Removed && is_late && step != Some(VolumeStep::Abandon)
    }
}

impl Alteration {
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

/// The steps that make one volume of another.
fn steps_between(before: &Volume, after: &Volume) -> Vec<VolumeStep> {
    let risk = |volume: &Volume| {
        let by_writes = AtRisk::by_writes_to(volume).filter(|_| !volume.read_only);
        by_writes.unwrap_or(AtRisk::Nothing)
    };
    let mut steps = steps_to(before, after);
    if risk(after) > risk(before) {
        steps.insert(0, VolumeStep::Record);
    }
    if AtRisk::by_writes_to(after) < AtRisk::by_writes_to(before) {
        steps.insert(steps.len() - 1, VolumeStep::Lower);
    }
    steps
}

/// The steps that change the volume itself.
fn steps_to(before: &Volume, after: &Volume) -> Vec<VolumeStep> {
    use VolumeStep::{Access, Add, Close, Drop, Grow, Hold, Quiet, Reshape, Store, WriteBack};
    let becomes_read_only = after.read_only && !before.read_only;
    let (was, bytes) = (before.size_bytes(), after.size_bytes());
    let is_partial = was % (SLOT_BYTES as u64) != 0 && before.cache != CacheMode::None;
    match before.placement {
        Placement::Memory(_) if was != bytes => vec![Close, Quiet, Store, Drop, Add, Access],
        Placement::Memory(_) | Placement::Null if becomes_read_only => vec![Hold, Access],
        Placement::Memory(_) | Placement::Null => vec![Access],
        Placement::Store if bytes < was => {
            vec![Close, WriteBack, Quiet, Reshape, Store, Access]
        }
        // The last block is cached as far as it reached.
        Placement::Store
            if bytes > was && (is_partial || before.cache != after.cache || becomes_read_only) =>
        {
            vec![Store, Close, WriteBack, Quiet, Reshape, Access]
        }
        Placement::Store if bytes > was => vec![Store, Grow, Access],
        Placement::Store if before.cache != after.cache => {
            vec![Close, WriteBack, Quiet, Reshape, Access]
        }
        // A write-back volume does not come here: read-only changes its cache mode, too, which
        // closes it.
        Placement::Store if becomes_read_only => vec![Hold, Access],
        Placement::Store => vec![Access],
    }
}

/// The steps that lead back when one failed after these. `grew`: the volume was to be larger.
fn steps_back(
    done: &[VolumeStep],
    failed: Option<VolumeStep>,
    is_new: bool,
    grew: bool,
) -> Vec<VolumeStep> {
    let has = |step| done.contains(&step);
    let mut back = match () {
        // Some poll groups may serve it.
        () if is_new => vec![VolumeStep::Drop],
        () if has(VolumeStep::Hold) => vec![VolumeStep::Access],
        () if !has(VolumeStep::Close) => Vec::new(),
        () if has(VolumeStep::Drop) => vec![VolumeStep::Add, VolumeStep::Access],
        () if has(VolumeStep::Reshape) => vec![VolumeStep::Reshape, VolumeStep::Access],
        () => vec![VolumeStep::Access],
    };
    if !is_new && (has(VolumeStep::Record) || failed == Some(VolumeStep::Record)) {
        back.push(VolumeStep::Lower);
    }
    let is_longer = has(VolumeStep::Store) || failed == Some(VolumeStep::Store);
    // Commands of a shard that has the new size may have come to the end of the file.
    if grew && !is_new && is_longer && !has(VolumeStep::Grow) && !has(VolumeStep::Reshape) {
        back.push(VolumeStep::CutBack);
    }
    back
}

impl Core {
    /// Whether an order may be carried out. Nothing changes.
    ///
    /// # Errors
    /// [`OrderError`].
    pub fn judge(&self, order: &VolumeOrder) -> Result<(), OrderError> {
        if self.is_draining() {
            return Err(OrderError::Stopping);
        }
        let in_use = |volume: &Volume, users: Vec<String>| match users.is_empty() {
            true => Ok(()),
            false => Err(OrderError::InUse { volume: volume.name, users }),
        };
        match order {
            VolumeOrder::Add(volume) => match self.exports.named(volume.name) {
                Some(_) => Err(OrderError::Exists(volume.name)),
                None => Ok(()),
            },
            VolumeOrder::Remove { volume, force } => {
                let volume = self.exports.volume(*volume).ok_or(OrderError::Unknown)?;
                if *force { Ok(()) } else { in_use(volume, self.users(volume.index)) }
            }
            VolumeOrder::WriteBack(volume) => {
                self.exports.volume(*volume).map(drop).ok_or(OrderError::Unknown)
            }
            VolumeOrder::Alter { volume, shrink } => {
                let before = self.exports.volume(volume.index).ok_or(OrderError::Unknown)?;
                let (was, bytes) = (before.size_bytes(), volume.size_bytes());
                if bytes < was && !shrink {
                    return Err(OrderError::Smaller { volume: volume.name, was, bytes });
                }
                let users = self.users(volume.index);
                let becomes = |mode| before.cache != mode && volume.cache == mode;
                if becomes(CacheMode::WriteBack) && !users.is_empty() {
                    return Err(OrderError::WriteBackInUse { volume: volume.name, users });
                }
                Ok(())
            }
            VolumeOrder::Snapshot(volume) => match self.exports.volume(volume.index) {
                Some(_) => Ok(()),
                None => Err(OrderError::Unknown),
            },
        }
    }

    /// Begins to carry out an order. [`Effect::Altered`] tells how it ended.
    ///
    /// # Errors
    /// [`OrderError`]. Nothing has changed.
    pub fn order(&mut self, order: VolumeOrder, now: Instant) -> Result<(), OrderError> {
        self.latest = now;
        if let Some(alteration) = &self.alteration {
            return Err(OrderError::Busy(alteration.volume.name));
        }
        self.judge(&order)?;
        let is_forced = matches!(order, VolumeOrder::Remove { force: true, .. });
        let (volume, before, end, steps) = match order {
            VolumeOrder::Add(volume) => {
                let steps = vec![VolumeStep::Record, VolumeStep::Add, VolumeStep::Access];
                (volume, None, AlterationEnd::Served, steps)
            }
            VolumeOrder::Remove { volume, .. } => {
                let volume = self.exports.volume(volume).cloned().ok_or(OrderError::Unknown)?;
                self.volume_changed(volume.index);
                self.take_from_all(volume.index);
                let steps = match volume.placement {
                    Placement::Store => {
                        use VolumeStep::{Close, Drop, Lower, Quiet, WriteBack};
                        vec![Close, WriteBack, Quiet, Drop, Lower]
                    }
                    Placement::Memory(_) | Placement::Null => {
                        vec![VolumeStep::Close, VolumeStep::Quiet, VolumeStep::Drop]
                    }
                };
                (Arc::clone(&volume), Some(volume), AlterationEnd::Removed, steps)
            }
            VolumeOrder::WriteBack(volume) => {
                let volume = self.exports.volume(volume).cloned().ok_or(OrderError::Unknown)?;
                let steps = vec![VolumeStep::WriteBack];
                (Arc::clone(&volume), Some(volume), AlterationEnd::Served, steps)
            }
            VolumeOrder::Alter { volume, .. } => {
                let before = self.exports.volume(volume.index).cloned();
                let before = before.ok_or(OrderError::Unknown)?;
                let steps = steps_between(&before, &volume);
                (volume, Some(before), AlterationEnd::Served, steps)
            }
            VolumeOrder::Snapshot(volume) => {
                use VolumeStep::{Access, Clone, Hold, Probe, WriteBack};
                let steps = vec![Probe, WriteBack, Hold, WriteBack, Clone, Access];
                (Arc::clone(&volume), Some(volume), AlterationEnd::Served, steps)
            }
        };
        let done = Vec::new();
        let (steps, since) = (VecDeque::from(steps), now);
        let (held, failure, is_told) = (None, None, false);
        self.alteration = Some(Alteration {
            volume,
            before,
            end,
            is_forced,
            steps,
            done,
            since,
            held,
            failure,
            is_told,
        });
        self.begin_step();
        Ok(())
    }

    /// The volume that is being altered, as it will be.
    #[must_use]
    pub fn altered(&self) -> Option<&Arc<Volume>> {
        self.alteration.as_ref().map(|alteration| &alteration.volume)
    }

    /// Whether an OPEN of a volume has to wait: it is closed while it changes.
    pub(super) fn is_closed(&self, volume: VolumeIndex) -> bool {
        self.alteration.as_ref().is_some_and(|alteration| {
            let mut steps = alteration.steps.iter().chain(&alteration.done);
            alteration.volume.index == volume && steps.any(|step| *step == VolumeStep::Close)
        })
    }

    /// Whether an alteration is under way. Its step may take too long.
    pub(super) fn is_altering(&self) -> bool {
        self.alteration.is_some()
    }

    /// The step that [`Effect::Step`] asked for is done everywhere, or failed somewhere.
    pub fn stepped(&mut self, result: Result<(), String>, now: Instant) {
        self.latest = now;
        let Some(alteration) = &mut self.alteration else { return };
        alteration.since = now;
        let cannot_fail =
            matches!(alteration.steps.front(), Some(VolumeStep::Abandon | VolumeStep::Lower));
        match if cannot_fail { Ok(()) } else { result } {
            Ok(()) => alteration.done.extend(alteration.steps.pop_front()),
            Err(_) if alteration.failure.is_some() => {
                // The rollback failed too. Keep what the poll groups serve.
                alteration.steps.pop_front();
            }
            Err(failure) if alteration.must_go() => {
                alteration.done.extend(alteration.steps.front().filter(|s| s.has_deadline()));
                alteration.steps = VecDeque::from([VolumeStep::Abandon]);
                let volume = Arc::clone(&alteration.volume);
                self.abandon(&volume, failure);
            }
            Err(failure) => {
                let failed = alteration.steps.front().copied();
                let after = alteration.volume.size_bytes();
                let grew = alteration.before.as_ref().is_some_and(|b| b.size_bytes() < after);
                alteration.done.extend(alteration.steps.front().filter(|s| s.has_deadline()));
                let back = steps_back(&alteration.done, failed, alteration.before.is_none(), grew);
                alteration.steps = back.into();
                alteration.failure = Some(failure);
                if let Some(before) = &alteration.before {
                    alteration.volume = Arc::clone(before);
                }
            }
        }
        self.begin_step();
    }

    /// Gives up a volume although its store misses writes of hosts.
    fn abandon(&mut self, volume: &Volume, why: String) {
        tracing::error!(volume = %volume.name, why, "a volume is removed without its store");
        if let Some(record) = self.holders.fence(volume.uuid) {
            self.fences.owe(volume.uuid);
            if self.changes.has_claim(&volume.uuid) {
                self.changes.postpone(volume.uuid);
            } else {
                self.persist_change(record);
            }
        }
        self.effects.push_back(Effect::GivenUp(why));
    }

    fn begin_step(&mut self) {
        let Some(alteration) = &mut self.alteration else { return };
        match alteration.steps.front() {
            Some(VolumeStep::Hold) => {
                alteration.held = Some(alteration.since);
                self.effects.push_back(Effect::Step(VolumeStep::Hold));
            }
            Some(step) => self.effects.push_back(Effect::Step(*step)),
            None => self.end_alteration(),
        }
    }

    fn end_alteration(&mut self) {
        let Some(alteration) = self.alteration.take() else { return };
        let Alteration { volume, before, end, failure, .. } = alteration;
        let (index, is_new) = (volume.index, before.is_none());
        let result = match (failure, end) {
            (Some(failure), _) => Err(failure),
            (None, AlterationEnd::Served) => {
                let is_news = before.is_some_and(|before| {
                    (before.blocks, before.read_only) != (volume.blocks, volume.read_only)
                });
                if is_new {
                    self.keep_for_absent(&volume);
                }
                self.exports.put(volume);
                if is_news {
                    self.volume_changed(index);
                }
                Ok(())
            }
            (None, AlterationEnd::Removed) => {
                self.exports.remove(index);
                self.kept_for.remove(&index);
                self.closing.remove(&index);
                for open in self.take_opens(|open| open.volume == index) {
                    self.reply(open.from, open.tag, Status::NoSuchVolume, 0, Vec::new());
                }
                Ok(())
            }
        };
        self.effects.push_back(Effect::Altered(result));
        self.finish_opens();
    }

    /// A new volume may have an earlier holder that may come back.
    fn keep_for_absent(&mut self, volume: &Volume) {
        let record = self.holders.record(&volume.uuid);
        if record.is_some_and(|record| record.present) {
            self.kept_for.insert(volume.index, self.latest + self.sessions.lease());
        }
    }

    /// Takes the volume from every session.
    fn take_from_all(&mut self, volume: VolumeIndex) {
        let has =
            |session: &&crate::control::peers::session::Session| session.mode_of(volume).is_some();
        let sessions: Vec<SessionIndex> =
            self.sessions.iter().filter(has).map(|session| session.index).collect();
        for open in self.take_opens(|open| open.volume == volume) {
            self.reply(open.from, open.tag, Status::NoSuchVolume, 0, Vec::new());
        }
        for session in sessions {
            self.give_up(session, volume, Status::VolumeGone);
        }
    }

    /// Ends an alteration if its step takes too long.
    pub(super) fn end_late_step(&mut self, now: Instant) {
        let Some(alteration) = &mut self.alteration else { return };
        let Some(step) = alteration.steps.front().filter(|step| step.has_deadline()) else {
            return alteration.tell_if_late(now);
        };
        let (since, deadline, what) = match alteration.held {
            Some(held) => {
                let mut steps = alteration.steps.iter();
                let what = match steps.any(|step| *step == VolumeStep::Clone) {
                    true => "the writes in flight, its dirty blocks and the clone",
                    false => "the writes in flight and its dirty blocks",
                };
                (held, HOLD_DEADLINE, what)
            }
            None => (alteration.since, STEP_DEADLINE, step.waits_for()),
        };
        if now.saturating_duration_since(since) > deadline {
            let failure = format!("{what} did not end within {} s", deadline.as_secs());
            self.effects.push_back(Effect::GiveUpStep);
            self.stepped(Err(failure), now);
        }
    }

    /// A volume that is to be added is served from that store; one in memory has none. If it may be
    /// another store than before, the hosts that had the volume are fenced. Returns whether it may.
    pub(crate) fn serve_from(&mut self, volume: &Volume, store: Option<&StoreIdentity>) -> bool {
        let served = self.holders.serve_anew(volume.uuid, store);
        if served != ServedFrom::AsBefore
            && let Some(record) = self.holders.record(&volume.uuid).cloned()
        {
            self.persist_change(record);
        }
        served == ServedFrom::Replaced
    }

    /// The hosts that have a volume open, or may come back to it.
    #[must_use]
    pub fn users(&self, volume: VolumeIndex) -> Vec<String> {
        let has =
            |session: &&crate::control::peers::session::Session| session.mode_of(volume).is_some();
        let name = |session: &crate::control::peers::session::Session| match session.connections() {
            0 => format!("{} ({}, away)", session.host_name, session.peer),
            _ => format!("{} ({})", session.host_name, session.peer),
        };
        let mut users: Vec<String> = self.sessions.iter().filter(has).map(name).collect();
        if users.is_empty() && self.kept_for.contains_key(&volume) {
            let uuid = self.exports.volume(volume).map(|volume| volume.uuid);
            let record = uuid.and_then(|uuid| self.holders.record(&uuid));
            users.extend(record.map(|record| format!("{} (may come back)", record.host_name)));
        }
        users
    }

    /// Closes a volume to hosts that do not have it open, or opens it (false) to all again.
    pub fn close_to_others(&mut self, volume: VolumeIndex, close: bool) {
        match close {
            true => self.closing.insert(volume),
            false => self.closing.remove(&volume),
        };
    }

    /// Ends a session: its volumes are free, and its connections end. Its host may connect again at
    /// once, and is then admitted as after a loss of the link. Returns whether there was such a
    /// session.
    pub fn kick(&mut self, session: SessionIndex, now: Instant) -> bool {
        self.latest = now;
        let Some(state) = self.sessions.get(session) else { return false };
        tracing::warn!(host = %state.host_name, peer = state.peer, "ending a session: it is kicked");
        // The connections first: so no command under way is refused, and the host resends them all.
        if let Some(before) = state.epoch.next() {
            self.all(Notice::EndConnections { session, before });
        }
        self.end_session(session, Status::NotReady);
        self.finish_opens();
        self.stop_if_drained(now);
        true
    }
}
