//! [`HolderBook`]: the last holders of the volumes, and how far their records are on the way to the
//! disk.
//!
//! Invariant: no peer hears of a change that the next run must know before its record is durable.
//! So each change has a [`Ticket`], and a reply that reveals it waits for that one.

use std::collections::BTreeMap;
use std::time::Instant;

use rblk_protocol::{AccessMode, Generation, Mutation};

use super::changes::{Changes, Undurable};
use super::given_up::OwedFences;
use super::image_proofs::ImageProofs;
use crate::control::core::effect::{Effect, Ticket};
use crate::control::core::outbox::Outbox;
use crate::record::holders::{
    Claimant, HolderRecord, Holders, NoGeneration, ServedFrom, VolumeUuid,
};
use crate::store::StoreIdentity;
use crate::volume::Volume;
use crate::volume::ids::VolumeIndex;

/// See the module.
#[derive(Debug)]
pub(in crate::control::core) struct HolderBook {
    holders: Holders,
    // Changes of the holders that are not durable yet.
    changes: Changes,
    // Until when an absent holder may come back, by volume.
    kept_for: BTreeMap<VolumeIndex, Instant>,
    fences: OwedFences,
    proofs: ImageProofs,
}

impl HolderBook {
    /// The holders that earlier runs left. All their records are durable.
    pub(in crate::control::core) fn new(holders: Holders) -> Self {
        let (changes, fences) = (Changes::default(), OwedFences::default());
        let (kept_for, proofs) = (BTreeMap::new(), ImageProofs::default());
        Self { holders, changes, kept_for, fences, proofs }
    }

    /// The holders, as peers may know them.
    pub(in crate::control::core) fn holders(&self) -> &Holders {
        &self.holders
    }

    /// Whether the time alone may change something: an absent holder may come back, a fence is
    /// owed, or a decision waits for a record and uses the time of the last call.
    pub(super) fn needs_ticks(&self) -> bool {
        !self.kept_for.is_empty() || self.fences.are_owed() || !self.changes.are_confirmed()
    }

    /// Takes over the records that an earlier run left of a volume, before it is served.
    pub(in crate::control::core) fn adopt(
        &mut self,
        volume: VolumeUuid,
        holder: Option<HolderRecord>,
        store: Option<StoreIdentity>,
    ) {
        self.holders.adopt(volume, holder, store);
    }

    /// Takes over the records of a volume of a group, before it is served: other members may have
    /// written them since this run served it.
    pub(in crate::control::core) fn adopt_shared(
        &mut self,
        volume: VolumeUuid,
        known: (Option<HolderRecord>, Option<StoreIdentity>),
        base: Generation,
    ) {
        self.holders.adopt_shared(volume, known, base);
    }

    /// Forgets a volume of a group that this member serves no longer: others write its record.
    pub(super) fn forget(&mut self, volume: &VolumeUuid) {
        self.holders.forget(volume);
        self.changes.forget(volume);
        self.fences.forget(volume);
    }

    /// A volume that is to be added is served from that store; one in memory has none. If it may be
    /// another store than before, the hosts that had the volume are fenced. Returns whether it may.
    pub(in crate::control::core) fn serve_from(
        &mut self,
        volume: &Volume,
        store: Option<&StoreIdentity>,
        out: &mut Outbox,
    ) -> bool {
        let served = self.holders.serve_anew(volume.uuid, store);
        if served != ServedFrom::AsBefore {
            self.write_in_force(&volume.uuid, out);
        }
        served == ServedFrom::Replaced
    }

    // Absent holders.

    /// Keeps these volumes for their absent holders.
    pub(super) fn keep<'a>(
        &mut self,
        volumes: impl IntoIterator<Item = &'a Volume>,
        until: Instant,
    ) {
        for volume in volumes {
            if self.holders.record(&volume.uuid).is_some_and(|record| record.present) {
                self.kept_for.insert(volume.index, until);
            }
        }
    }

    /// Keeps a volume for its holder, which is away and did not leave it.
    pub(super) fn keep_for_absent(&mut self, volume: VolumeIndex, until: Instant) {
        self.kept_for.insert(volume, until);
    }

    /// Keeps a volume for no absent holder any more.
    pub(super) fn keep_no_longer(&mut self, volume: VolumeIndex) {
        self.kept_for.remove(&volume);
    }

    /// Whether an absent holder of the volume may come back.
    pub(in crate::control::core) fn is_kept(&self, volume: VolumeIndex) -> bool {
        self.kept_for.contains_key(&volume)
    }

    /// Ends the waits for absent holders that are over.
    pub(super) fn expire(&mut self, now: Instant) {
        self.kept_for.retain(|_, until| *until > now);
    }

    /// Refuses an opener that would exclude an absent holder, and names that one.
    ///
    /// # Errors
    /// The text for the peer.
    pub(super) fn check_absent(
        &self,
        volume: &Volume,
        claimant: &Claimant,
        now: Instant,
    ) -> Result<(), String> {
        let absent = self.holders.record(&volume.uuid).filter(|record| {
            let shares = (record.mode, claimant.mode) == (AccessMode::Shared, AccessMode::Shared);
            // One record stands for all hosts that share: the opener's host may only have been the
            // first of them.
            let other = record.mode == AccessMode::Shared || record.host != claimant.host;
            record.present && other && !shares
        });
        let (Some(record), Some(until)) = (absent, self.kept_for.get(&volume.index)) else {
            return Ok(());
        };
        if *until <= now {
            return Ok(());
        }
        let seconds = until.saturating_duration_since(now).as_secs_f32().ceil();
        let name = &record.host_name;
        let holders = match record.mode {
            AccessMode::Shared => format!("shared by {name} and perhaps others, which"),
            AccessMode::Exclusive | AccessMode::ReadOnly => format!("held by {name}, which"),
        };
        Err(format!("{holders} may come back for another {seconds:.0} s"))
    }

    // Changes of holders.

    /// Whether OPENs have to be refused because the disk does not keep up.
    pub(super) fn is_behind(&self) -> bool {
        self.changes.are_too_many()
    }

    /// Whether a new holder of the volume is on its way to the disk.
    pub(super) fn has_claim(&self, volume: &VolumeUuid) -> bool {
        self.changes.has_claim(volume)
    }

    /// Begins the claim of a host that needs a new generation: its record goes to the disk, and
    /// nothing changes before it is there. `None`: the host [joins](Self::join) the holders.
    ///
    /// # Errors
    /// There is no generation left.
    pub(super) fn claim(
        &mut self,
        volume: &VolumeUuid,
        claimant: &Claimant,
        out: &mut Outbox,
    ) -> Result<Option<Ticket>, NoGeneration> {
        let Some(record) = self.holders.claim(volume, claimant)? else { return Ok(None) };
        let ticket = self.write(record.clone(), out);
        self.changes.claim(record, ticket);
        Ok(Some(ticket))
    }

    /// A host shares the volume with its holders. Returns the record if that changed it.
    pub(super) fn join(
        &mut self,
        volume: &VolumeUuid,
        claimant: &Claimant,
    ) -> Option<HolderRecord> {
        self.holders.join(volume, claimant)
    }

    /// The last holder comes back. Returns the record if that changed it.
    pub(super) fn come_back(
        &mut self,
        volume: &VolumeUuid,
        claimant: &Claimant,
        generation: Generation,
    ) -> Option<HolderRecord> {
        self.holders.come_back(volume, claimant, generation)
    }

    /// Makes the record of a volume durable, which perhaps `changed`. Returns the ticket for which
    /// the reply to the holder waits.
    ///
    /// For a volume of a group that ticket is also the proof that this member has the image, later
    /// than this call: a member that is cut off from the cluster does not let a host in again,
    /// which may have had the volume from the next owner meanwhile. Only the owner can write the
    /// record.
    pub(super) fn confirm(
        &mut self,
        (volume, index): (&VolumeUuid, VolumeIndex),
        changed: Option<HolderRecord>,
        out: &mut Outbox,
    ) -> Option<Ticket> {
        let proves = self.holders.is_shared(volume) && !Mutation::GroupOpensUnproven.is_on();
        // A record that did not change now may still be on its way, or has to be tried again.
        match (changed, self.changes.undurable(volume)) {
            (Some(record), _) => Some(self.write_change(record, out)),
            (None, Some(Undurable::Writing(ticket))) if !proves => Some(ticket),
            (None, Some(_)) => self.write_in_force(volume, out),
            (None, None) if proves => {
                let ticket = self.changes.next_ticket();
                Some(self.proofs.ask(index, ticket, out))
            }
            (None, None) => None,
        }
    }

    /// The proof of a ticket is there. Returns false if nobody waits for it any more.
    pub(super) fn proven(&mut self, which: (VolumeIndex, Ticket), out: &mut Outbox) -> bool {
        self.proofs.proven(which, out)
    }

    /// A volume is gone, and its proofs with it.
    pub(super) fn prove_no_longer(&mut self, volume: VolumeIndex) {
        self.proofs.forget(volume);
    }

    /// The last writer left the volume in good order: no opener has to wait for its return.
    pub(super) fn leave(&mut self, volume: &Volume, out: &mut Outbox) {
        // Another host that shared it may come back.
        if self.is_kept(volume.index) {
            return;
        }
        if let Some(record) = self.holders.leave(&volume.uuid) {
            self.write_or_postpone(record, out);
        }
    }

    /// A volume goes although its store misses writes of hosts: no host that held it may resume.
    pub(super) fn fence(&mut self, volume: VolumeUuid, out: &mut Outbox) {
        if let Some(record) = self.holders.fence(volume) {
            self.fences.owe(volume);
            self.write_or_postpone(record, out);
        }
    }

    /// Writes a change, or has it wait for the outcome of a claim.
    fn write_or_postpone(&mut self, record: HolderRecord, out: &mut Outbox) {
        if self.changes.has_claim(&record.volume) {
            // The record is written if the claim fails.
            self.changes.postpone(record.volume);
        } else {
            self.write_change(record, out);
        }
    }

    // The disk.

    /// The record of a ticket is durable, or may not be durable for that reason. Returns the claim
    /// that it was of.
    pub(super) fn written(
        &mut self,
        ticket: Ticket,
        result: &Result<(), String>,
    ) -> Option<HolderRecord> {
        self.changes.confirmed(ticket, result.is_ok());
        self.fences.look(&self.changes, result);
        self.changes.take_claim(ticket)
    }

    /// The claim of a host is durable: it is the holder.
    pub(super) fn establish(&mut self, record: HolderRecord, volume: VolumeIndex) {
        self.changes.is_durable_now(&record.volume);
        self.holders.put(record);
        self.keep_no_longer(volume);
    }

    /// A claim failed, but the disk may have it: writes the record in force again.
    pub(super) fn withdraw(&mut self, volume: &VolumeUuid, out: &mut Outbox) {
        // Without a record no peer was ever told anything that the claim contradicts.
        let Some(record) = self.holders.record(volume).cloned() else { return };
        if self.changes.undurable(volume).is_some() {
            self.write_change(record, out);
        } else {
            // This record was durable before: a holder that comes back in that generation need not
            // wait for it.
            self.write(record, out);
        }
    }

    /// True while a fence is not durable.
    pub(in crate::control::core) fn owes_fences(&self) -> bool {
        self.fences.are_owed()
    }

    /// The volumes with such a fence.
    pub(in crate::control::core) fn owed_fences(&self) -> impl Iterator<Item = VolumeUuid> {
        self.fences.iter()
    }

    /// Writes the records of fences again that could not be written.
    pub(super) fn fence_again(&mut self, out: &mut Outbox) {
        for volume in self.fences.due(&self.changes) {
            self.write_in_force(&volume, out);
        }
    }

    /// Makes the record in force durable, if there is one.
    fn write_in_force(&mut self, volume: &VolumeUuid, out: &mut Outbox) -> Option<Ticket> {
        let record = self.holders.record(volume).cloned()?;
        Some(self.write_change(record, out))
    }

    /// Makes the record in force durable, which just changed.
    fn write_change(&mut self, record: HolderRecord, out: &mut Outbox) -> Ticket {
        let volume = record.volume;
        let ticket = self.write(record, out);
        self.changes.writes(volume, ticket);
        ticket
    }

    /// Makes a record durable. It need not be the one in force.
    fn write(&mut self, record: HolderRecord, out: &mut Outbox) -> Ticket {
        let ticket = self.changes.next_ticket();
        out.order(Effect::Persist { ticket, record });
        ticket
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{HostId, Name};

    use super::*;

    const VOLUME: VolumeUuid = [7; 16];

    fn claimant(host: u8) -> Claimant {
        let host_name = Name::new(&format!("host{host}")).unwrap();
        Claimant { mode: AccessMode::Exclusive, host: HostId([host; 16]), host_name }
    }

    fn written(out: &mut Outbox) -> Vec<(Ticket, HostId)> {
        let record = |effect| match effect {
            Effect::Persist { ticket, record } => (ticket, record.host),
            other => panic!("{other:?}"),
        };
        std::iter::from_fn(|| out.next_effect()).map(record).collect()
    }

    #[test]
    fn a_claim_changes_the_holder_when_it_is_durable() {
        let (mut book, mut out) = (HolderBook::new(Holders::durable([])), Outbox::default());
        let ticket = book.claim(&VOLUME, &claimant(1), &mut out).unwrap().expect("a claim");
        assert_eq!(written(&mut out), [(ticket, HostId([1; 16]))]);
        assert!(book.has_claim(&VOLUME) && book.holders().record(&VOLUME).is_none());
        let record = book.written(ticket, &Ok(())).expect("the claim");
        assert!(!book.has_claim(&VOLUME) && !book.needs_ticks());
        book.establish(record, VolumeIndex(0));
        assert_eq!(book.holders().record(&VOLUME).unwrap().host, HostId([1; 16]));
    }

    #[test]
    fn a_claim_that_failed_is_written_over_by_the_record_in_force() {
        let (mut book, mut out) = (HolderBook::new(Holders::durable([])), Outbox::default());
        let first = book.claim(&VOLUME, &claimant(1), &mut out).unwrap().expect("a claim");
        let record = book.written(first, &Ok(())).expect("the claim");
        book.establish(record, VolumeIndex(0));
        let second = book.claim(&VOLUME, &claimant(2), &mut out).unwrap().expect("a claim");
        written(&mut out);
        let failed = book.written(second, &Err("disk".to_owned())).expect("the claim");
        assert_eq!(failed.host, HostId([2; 16]));
        book.withdraw(&VOLUME, &mut out);
        assert_eq!(
            written(&mut out),
            [(Ticket(3), HostId([1; 16]))],
            "the disk may have the other"
        );
        assert_eq!(
            book.confirm((&VOLUME, VolumeIndex(0)), None, &mut out),
            None,
            "it was durable before"
        );
    }

    #[test]
    fn a_fence_is_owed_until_it_is_durable_and_waits_for_a_claim() {
        let (mut book, mut out) = (HolderBook::new(Holders::durable([])), Outbox::default());
        let first = book.claim(&VOLUME, &claimant(1), &mut out).unwrap().expect("a claim");
        let record = book.written(first, &Ok(())).expect("the claim");
        book.establish(record, VolumeIndex(0));
        let second = book.claim(&VOLUME, &claimant(2), &mut out).unwrap().expect("a claim");
        written(&mut out);
        book.fence(VOLUME, &mut out);
        book.fence_again(&mut out);
        assert!(written(&mut out).is_empty() && book.owes_fences(), "a generation never falls");
        assert!(book.written(second, &Err("disk".to_owned())).is_some());
        book.fence_again(&mut out);
        let [(ticket, _)] = written(&mut out)[..] else { panic!("one record") };
        assert!(book.written(ticket, &Ok(())).is_none() && !book.owes_fences());
    }
}
