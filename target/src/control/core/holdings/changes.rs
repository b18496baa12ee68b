//! [`Changes`]: records of holders on their way to the disk. Each has a [`Ticket`], in the order in
//! which they are written.
//!
//! There are two kinds. A *claim* is the record of a new holder: it takes effect when it is
//! durable, and a volume has one at a time. A *change* of the record in force has taken effect
//! already, and a reply that reveals it waits until it is durable. While a volume has a claim, no
//! change of its record is written: a generation that a peer has seen never falls, not even on
//! the disk.

use std::collections::BTreeMap;

use crate::control::core::effect::Ticket;
use crate::record::holders::{HolderRecord, VolumeUuid};

/// Records that may be on their way to the disk before OPENs are refused.
const UNCONFIRMED_MAX: u64 = 1024;

/// A record in force that may not be durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Undurable {
    /// The record is being written.
    Writing(Ticket),
    /// The record could not be written, or has to wait for a claim.
    NotWritten,
}

/// A new holder; its record is being written.
#[derive(Debug)]
struct Claim {
    ticket: Ticket,
    record: HolderRecord,
}

/// Records on their way to the disk.
#[derive(Debug, Default)]
pub(super) struct Changes {
    undurable: BTreeMap<VolumeUuid, Undurable>,
    claims: BTreeMap<VolumeUuid, Claim>,
    // Tickets given so far, and how many of them are not confirmed.
    tickets: u64,
    unconfirmed: u64,
}

impl Changes {
    /// A record goes to the disk.
    pub(super) fn next_ticket(&mut self) -> Ticket {
        self.tickets += 1;
        self.unconfirmed += 1;
        Ticket(self.tickets)
    }

    /// Whether OPENs have to be refused because the disk does not keep up.
    pub(super) fn are_too_many(&self) -> bool {
        self.unconfirmed >= UNCONFIRMED_MAX
    }

    /// Whether every record is confirmed.
    pub(super) fn are_confirmed(&self) -> bool {
        self.unconfirmed == 0
    }

    /// The record in force of a volume goes to the disk by that ticket.
    pub(super) fn writes(&mut self, volume: VolumeUuid, ticket: Ticket) {
        self.undurable.insert(volume, Undurable::Writing(ticket));
    }

    /// The record in force of a volume changed and is not written yet.
    pub(super) fn postpone(&mut self, volume: VolumeUuid) {
        self.undurable.insert(volume, Undurable::NotWritten);
    }

    /// The record in force of a volume is durable.
    pub(super) fn is_durable_now(&mut self, volume: &VolumeUuid) {
        self.undurable.remove(volume);
    }

    /// Forgets a volume: its record is at another target now.
    pub(super) fn forget(&mut self, volume: &VolumeUuid) {
        self.undurable.remove(volume);
        self.claims.remove(volume);
    }

    /// How far the record in force of a volume is from durable; `None` if it is.
    pub(super) fn undurable(&self, volume: &VolumeUuid) -> Option<Undurable> {
        self.undurable.get(volume).copied()
    }

    /// The disk has confirmed or failed the record of a ticket.
    pub(super) fn confirmed(&mut self, ticket: Ticket, durable: bool) {
        debug_assert!(self.unconfirmed > 0, "{ticket:?} is confirmed twice");
        self.unconfirmed = self.unconfirmed.saturating_sub(1);
        // Not found where a later record of the volume is being written.
        let of_ticket =
            |(_, state): &(&VolumeUuid, &mut Undurable)| **state == Undurable::Writing(ticket);
        let Some((volume, state)) = self.undurable.iter_mut().find(of_ticket) else { return };
        let volume = *volume;
        *state = Undurable::NotWritten;
        if durable {
            self.undurable.remove(&volume);
        }
    }

    /// The record of a new holder goes to the disk by that ticket.
    pub(super) fn claim(&mut self, record: HolderRecord, ticket: Ticket) {
        let before = self.claims.insert(record.volume, Claim { ticket, record });
        debug_assert!(before.is_none(), "a volume has one claim at a time");
    }

    /// Whether a new holder of the volume is on its way to the disk.
    pub(super) fn has_claim(&self, volume: &VolumeUuid) -> bool {
        self.claims.contains_key(volume)
    }

    /// Ends the claim of a ticket, if it has one.
    pub(super) fn take_claim(&mut self, ticket: Ticket) -> Option<HolderRecord> {
        let volume = *self.claims.iter().find(|(_, claim)| claim.ticket == ticket)?.0;
        self.claims.remove(&volume).map(|claim| claim.record)
    }
}
