//! [`Burials`]: the LOGINs and DROPs that wait for the last connection of the epochs that they end.

use std::time::Instant;

use rblk_protocol::{Epoch, Tag};

use crate::control::core::QUIESCE_DEADLINE;
use crate::control::core::effect::ConnectionRef;
use crate::control::peers::session::EndedEpochs;
use crate::volume::ids::SessionIndex;

/// So much of one session may wait. Its ways have more tags than that.
const PER_SESSION: usize = 32;

/// The command that waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waits {
    /// A LOGIN. An epoch has one.
    Login,
    /// A DROP.
    Drop,
}

/// A command that waits for burials.
#[derive(Debug)]
pub(super) struct Waiting {
    /// Its kind.
    pub(super) waits: Waits,
    /// The connection that takes the reply.
    pub(super) from: ConnectionRef,
    /// Its tag.
    pub(super) tag: Tag,
    /// Its session.
    pub(super) session: SessionIndex,
    /// The epoch that it came in.
    pub(super) epoch: Epoch,
    /// The epochs whose connections it waits for.
    pub(super) ends: EndedEpochs,
    /// The time at which it came.
    pub(super) since: Instant,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Burials {
    // In the order in which they came.
    waiting: Vec<Waiting>,
}

impl Burials {
    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether as much of a session waits as may.
    pub(super) fn are_full(&self, session: SessionIndex) -> bool {
        self.waiting.iter().filter(|waiting| waiting.session == session).count() >= PER_SESSION
    }

    /// Whether the LOGIN of an epoch waits.
    pub(super) fn has_login(&self, session: SessionIndex, epoch: Epoch) -> bool {
        let is_it =
            |w: &Waiting| w.waits == Waits::Login && (w.session, w.epoch) == (session, epoch);
        self.waiting.iter().any(is_it)
    }

    /// A command waits. [`Self::take`] takes it at once, if there is nothing to wait for.
    pub(super) fn push(&mut self, waiting: Waiting) {
        self.waiting.push(waiting);
    }

    /// Takes out what waits no longer.
    pub(super) fn take(&mut self, is_over: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        self.waiting.extract_if(.., |waiting| is_over(waiting)).collect()
    }

    /// Takes out what waited too long.
    pub(super) fn take_late(&mut self, now: Instant) -> Vec<Waiting> {
        self.take(|waiting| now.saturating_duration_since(waiting.since) > QUIESCE_DEADLINE)
    }

    /// These epochs of a session ended: their connections take no reply any more.
    pub(super) fn forget_asked_in(&mut self, session: SessionIndex, ended: &EndedEpochs) {
        self.waiting.retain(|w| w.session != session || !ended.has(w.epoch));
    }

    /// A session ended.
    pub(super) fn forget(&mut self, session: SessionIndex) {
        self.waiting.retain(|waiting| waiting.session != session);
    }
}
