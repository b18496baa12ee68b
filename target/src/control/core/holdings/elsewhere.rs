//! [`Elsewhere`]: the volumes of a group of targets that other members serve, or nobody, and the
//! OPENs that wait until this member has claimed one.
//!
//! An OPEN is the cause of a claim: the host that comes has lost the other member, or never had
//! one. While the claim is made, the OPENs of the volume wait. After it they are decided like
//! all others, or refused: their hosts go to another member, and come back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rblk_protocol::{CommandCapsule, Name};

use crate::control::core::effect::ConnectionRef;
use crate::volume::ids::{AdmissionId, SessionIndex};

/// How long a member that has just given a volume away does not claim it: the other one is about
/// to.
const GIVEN_AWAY: Duration = Duration::from_secs(5);
/// How long an OPEN waits for a claim. Its host tries another member then, and comes back.
const CLAIM_DEADLINE: Duration = Duration::from_secs(30);

/// An OPEN that waits for a claim.
#[derive(Debug)]
pub(super) struct ClaimingOpen {
    pub(super) name: Name,
    pub(super) from: ConnectionRef,
    pub(super) id: AdmissionId,
    pub(super) session: SessionIndex,
    pub(super) capsule: CommandCapsule,
    pub(super) body: Vec<u8>,
    since: Instant,
}

#[derive(Debug)]
struct OtherVolume {
    is_claimed: bool,
    given_away: Option<Instant>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    volumes: BTreeMap<Name, OtherVolume>,
    waiting: Vec<ClaimingOpen>,
}

/// What an OPEN of a volume elsewhere does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    /// Its volume is in no group.
    Unknown,
    /// It is refused: the volume was just given away.
    GivenAway,
    /// It begins a claim, and waits.
    Begins,
    /// It waits for a claim under way.
    Waits,
}

impl Elsewhere {
    /// This member does not serve a volume of the group now. `given_away`: since this moment.
    pub(super) fn put(&mut self, name: Name, given_away: Option<Instant>) {
        let is_claimed = self.volumes.get(&name).is_some_and(|volume| volume.is_claimed);
        self.volumes.insert(name, OtherVolume { is_claimed, given_away });
    }

    /// This member serves the volume. OPENs that wait for a claim under way go on to wait.
    pub(super) fn begin(&mut self, name: Name) {
        self.volumes.remove(&name);
    }

    /// The volumes of the group that this member does not serve, by its configuration now.
    pub(super) fn configure(&mut self, names: &BTreeSet<Name>) {
        self.volumes.retain(|name, volume| names.contains(name) || volume.is_claimed);
        for name in names {
            let other = || OtherVolume { is_claimed: false, given_away: None };
            self.volumes.entry(*name).or_insert_with(other);
        }
    }

    /// Whether the volume is of the group, and not served by this member.
    pub(super) fn has(&self, name: Name) -> bool {
        self.volumes.contains_key(&name)
    }

    /// Whether no OPEN waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A host asks for a volume.
    pub(super) fn ask(&mut self, name: Name, now: Instant) -> Asked {
        let Some(volume) = self.volumes.get_mut(&name) else { return Asked::Unknown };
        let is_recent = |at: Instant| now.saturating_duration_since(at) < GIVEN_AWAY;
        if volume.is_claimed {
            return Asked::Waits;
        }
        if volume.given_away.is_some_and(is_recent) {
            return Asked::GivenAway;
        }
        volume.is_claimed = true;
        Asked::Begins
    }

    /// An OPEN waits for a claim.
    pub(super) fn push(
        &mut self,
        name: Name,
        (from, id): (ConnectionRef, AdmissionId),
        session: SessionIndex,
        (capsule, body): (&CommandCapsule, &[u8]),
        since: Instant,
    ) {
        let (capsule, body) = (*capsule, body.to_vec());
        self.waiting.push(ClaimingOpen { name, from, id, session, capsule, body, since });
    }

    /// The claim has ended. Returns the OPENs that waited for it. `is_served`: by this member now.
    pub(super) fn claimed(&mut self, name: Name, is_served: bool) -> Vec<ClaimingOpen> {
        if is_served {
            self.volumes.remove(&name);
        } else if let Some(volume) = self.volumes.get_mut(&name) {
            volume.is_claimed = false;
        }
        self.take(|open| open.name == name)
    }

    /// Takes out the OPENs that waited for too long. Their claims go on.
    pub(super) fn take_late(&mut self, now: Instant) -> Vec<ClaimingOpen> {
        self.take(|open| now.saturating_duration_since(open.since) > CLAIM_DEADLINE)
    }

    /// Forgets the OPENs of a session that ended.
    pub(super) fn forget(&mut self, session: SessionIndex) {
        drop(self.take(|open| open.session == session));
    }

    fn take(&mut self, which: impl Fn(&ClaimingOpen) -> bool) -> Vec<ClaimingOpen> {
        self.waiting.extract_if(.., |open| which(open)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_claim_of_a_volume_at_a_time_and_none_of_one_just_given_away() {
        let (mut elsewhere, now) = (Elsewhere::default(), Instant::now());
        let (v, w) = (Name::new("v").unwrap(), Name::new("w").unwrap());
        assert_eq!(elsewhere.ask(v, now), Asked::Unknown);
        elsewhere.put(v, None);
        assert_eq!(elsewhere.ask(v, now), Asked::Begins);
        assert_eq!(elsewhere.ask(v, now), Asked::Waits);
        assert!(elsewhere.claimed(v, false).is_empty());
        assert_eq!(elsewhere.ask(v, now), Asked::Begins, "and again when a host asks again");
        elsewhere.claimed(v, true);
        assert_eq!(elsewhere.ask(v, now), Asked::Unknown, "it is served");
        elsewhere.put(w, Some(now));
        assert_eq!(elsewhere.ask(w, now), Asked::GivenAway);
        assert_eq!(elsewhere.ask(w, now + GIVEN_AWAY), Asked::Begins);
    }
}
