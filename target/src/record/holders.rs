//! [`Holders`]: for each volume, the host that held it last for writing, and in which
//! [`Generation`]. Pure; [`VolumeRecord`](crate::record::VolumeRecord) keeps it.
//!
//! A generation rises with every change of holder and never falls. A holder that comes back after
//! its session was forgotten names the generation that it was given. If the volume has another
//! generation now, another host may have written, and the writes that this holder has queued must
//! not follow. Nothing else protects a volume after the end of a lease or a restart of the target,
//! so:
//!
//! - The next run must know every generation that a host has seen: a record is made durable before
//!   the OPEN that changed it is answered.
//! - A generation that this run does not know is refused. The exception is a target that cannot
//!   keep any record ([`Holders::forgetful`]): it would refuse every holder after every start.
//! - The number alone is not enough for an exclusive holder: one generation is one host's.
//! - A generation belongs to one store, too. When a volume is served from another file or device
//!   than the last time ([`Holders::serve`]), no host that held it before may resume.

use std::collections::{BTreeMap, BTreeSet};

use rblk_protocol::{AccessMode, Generation, HostId, Name};

use crate::store::StoreIdentity;

/// The stable identity of a volume.
pub(crate) type VolumeUuid = [u8; 16];

/// Highest generation that is accepted from a holder that this run does not know.
const ADOPTED_MAX: u64 = 1 << 62;

/// The last holder of a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HolderRecord {
    /// The volume.
    pub volume: VolumeUuid,
    /// The generation in which the host holds it.
    pub generation: Generation,
    /// Exclusive, or shared: then it is the first of several.
    pub mode: AccessMode,
    /// Its host.
    pub host: HostId,
    /// Its host's name, for people.
    pub host_name: Name,
    /// It did not log out, so it may come back.
    pub present: bool,
}

/// A host that opens a volume for writing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Claimant {
    /// Exclusive or shared.
    pub mode: AccessMode,
    /// Its host.
    pub host: HostId,
    /// Its host's name.
    pub host_name: Name,
}

/// The last holders of all volumes.
#[derive(Clone, Debug)]
pub struct Holders {
    records: BTreeMap<VolumeUuid, HolderRecord>,
    // The generations of volumes without a record begin above this.
    base: Generation,
    // The same of volumes of a group that had no holder there.
    bases: BTreeMap<VolumeUuid, Generation>,
    // Volumes that a group of targets has in turn.
    shared: BTreeSet<VolumeUuid>,
    forgetful: bool,
    // The last store of each volume.
    stores: BTreeMap<VolumeUuid, StoreIdentity>,
    // Volumes that this run serves from another store than the run before.
    replaced: BTreeSet<VolumeUuid>,
}

/// The store of a volume, compared with the last time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ServedFrom {
    /// The last store, or a store without an identity both times.
    AsBefore,
    /// The first store that is known: its identity is recorded.
    First,
    /// Another store.
    Replaced,
}

impl Holders {
    /// The holders in the records of earlier runs. Generations that they did not give are refused.
    #[must_use]
    pub fn durable(records: impl IntoIterator<Item = HolderRecord>) -> Self {
        Self {
            records: records.into_iter().map(|record| (record.volume, record)).collect(),
            ..Self::empty(Generation::FRESH, false)
        }
    }

    fn empty(base: Generation, forgetful: bool) -> Self {
        Self {
            records: BTreeMap::new(),
            base,
            bases: BTreeMap::new(),
            shared: BTreeSet::new(),
            forgetful,
            stores: BTreeMap::new(),
            replaced: BTreeSet::new(),
        }
    }

    /// Earlier runs may have given generations of volumes that have no record: those begin above
    /// `base`, which must be above all that were ever given.
    #[must_use]
    pub(crate) fn with_base(mut self, base: Generation) -> Self {
        self.base = base;
        self
    }

    /// The holders of a target without records of earlier runs. The first holder that comes back is
    /// believed, unless another host came before. `base` as for [`Self::with_base`].
    #[must_use]
    pub(crate) fn forgetful(base: Generation) -> Self {
        Self::empty(base, true)
    }

    /// Adds the stores in the records of earlier runs.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_stores(
        mut self,
        stores: impl IntoIterator<Item = (VolumeUuid, StoreIdentity)>,
    ) -> Self {
        self.stores = stores.into_iter().collect();
        self
    }

    /// Adds the records of one volume from an earlier run, unless this run has its own.
    pub(crate) fn adopt(
        &mut self,
        volume: VolumeUuid,
        holder: Option<HolderRecord>,
        store: Option<StoreIdentity>,
    ) {
        if let (None, Some(holder)) = (self.record(&volume), holder) {
            self.put(holder);
        }
        if let (None, Some(store)) = (self.stores.get(&volume), store) {
            self.stores.insert(volume, store);
        }
    }

    /// Takes over the records of one volume that other targets may have written since this run
    /// served it. They count, and not those of this run. But a generation that a host has seen
    /// never falls: if the records know less than this run, no host that held the volume may
    /// resume. If no host is known at all, a target in no group may have given generations:
    /// those of the volume begin above `base`, as for [`Self::with_base`], and nobody is believed.
    pub(crate) fn adopt_shared(
        &mut self,
        volume: VolumeUuid,
        (holder, store): (Option<HolderRecord>, Option<StoreIdentity>),
        base: Generation,
    ) {
        let known = self.records.remove(&volume);
        self.forget(&volume);
        self.shared.insert(volume);
        self.stores.extend(store.map(|store| (volume, store)));
        let seen = known.as_ref().map_or(Generation::FRESH, |known| known.generation);
        match (holder, known) {
            (Some(holder), _) if holder.generation >= seen => self.put(holder),
            (_, Some(known)) => {
                self.put(known);
                self.replace(volume);
            }
            (Some(_), None) | (None, None) => {
                self.bases.insert(volume, base);
            }
        }
    }

    /// Whether other members of a group may have the volume later.
    pub(crate) fn is_shared(&self, volume: &VolumeUuid) -> bool {
        self.shared.contains(volume)
    }

    /// Forgets a volume: its records are at another target now.
    pub(crate) fn forget(&mut self, volume: &VolumeUuid) {
        self.shared.remove(volume);
        self.records.remove(volume);
        self.stores.remove(volume);
        self.replaced.remove(volume);
        self.bases.remove(volume);
    }

    /// Serves a volume from that store, which may have no identity. If it is another store than
    /// before, the generation of the last holder ends: a host that has it is refused when it comes
    /// back. Any result but [`ServedFrom::AsBefore`] must be recorded before that.
    pub(crate) fn serve(
        &mut self,
        volume: VolumeUuid,
        store: Option<&StoreIdentity>,
    ) -> ServedFrom {
        let before = match store {
            Some(store) => self.stores.insert(volume, store.clone()),
            None => self.stores.remove(&volume),
        };
        match before {
            None if store.is_some() => ServedFrom::First,
            Some(before) if Some(&before) != store => {
                self.replace(volume);
                ServedFrom::Replaced
            }
            _ => ServedFrom::AsBefore,
        }
    }

    /// As [`Self::serve`], for a volume that this run did not serve until now. A volume that may
    /// not be the one that was served before under this name is [`ServedFrom::Replaced`]: one in
    /// memory, and one whose store has no identity.
    pub(crate) fn serve_anew(
        &mut self,
        volume: VolumeUuid,
        store: Option<&StoreIdentity>,
    ) -> ServedFrom {
        let is_known = store.is_some() && self.stores.get(&volume) == store;
        let served = self.serve(volume, store);
        if is_known || served == ServedFrom::Replaced || !self.records.contains_key(&volume) {
            return served;
        }
        self.replace(volume);
        ServedFrom::Replaced
    }

    /// Ends the generation of the last holder.
    fn replace(&mut self, volume: VolumeUuid) {
        if let Some(mut record) = self.records.remove(&volume)
            && let Some(generation) = record.generation.next()
        {
            (record.generation, record.present) = (generation, false);
            self.put(record);
        }
        self.replaced.insert(volume);
    }

    /// Fences all hosts that held a volume, since its store misses writes of hosts: none may
    /// resume. Returns the record, which must be made durable.
    pub(crate) fn fence(&mut self, volume: VolumeUuid) -> Option<HolderRecord> {
        self.replace(volume);
        self.record(&volume).cloned()
    }

    /// Whether this run serves a volume from another store than the run before, or a volume that
    /// was fenced.
    #[must_use]
    pub(crate) fn is_replaced(&self, volume: &VolumeUuid) -> bool {
        self.replaced.contains(volume)
    }

    /// All records, in the order of the volumes' identities.
    #[cfg(test)]
    pub(crate) fn records(&self) -> impl Iterator<Item = &HolderRecord> {
        self.records.values()
    }

    /// The last holder.
    #[must_use]
    pub(crate) fn record(&self, volume: &VolumeUuid) -> Option<&HolderRecord> {
        self.records.get(volume)
    }

    /// The volume's generation; fresh if no host ever held it for writing, as far as is known.
    #[must_use]
    pub(crate) fn generation(&self, volume: &VolumeUuid) -> Generation {
        self.record(volume).map_or(Generation::FRESH, |record| record.generation)
    }

    /// Whether a host that comes back with `generation` still is the last holder, or one of them.
    #[must_use]
    pub(crate) fn is_last(
        &self,
        volume: &VolumeUuid,
        claimant: &Claimant,
        generation: Generation,
    ) -> bool {
        match self.record(volume) {
            Some(record) => {
                record.mode == claimant.mode && record.may_be(claimant.host, generation)
            }
            None => {
                let believes = self.forgetful && !self.bases.contains_key(volume);
                believes && !generation.is_fresh() && generation.0 < ADOPTED_MAX
            }
        }
    }

    /// A holder that [`Self::is_last`] came back. Returns the record if that changed it.
    pub(crate) fn come_back(
        &mut self,
        volume: &VolumeUuid,
        claimant: &Claimant,
        generation: Generation,
    ) -> Option<HolderRecord> {
        if let Some(record) = self.records.get_mut(volume) {
            let changed = !record.present;
            record.present = true;
            return changed.then(|| record.clone());
        }
        let record = record_of(*volume, claimant, generation);
        self.put(record.clone());
        Some(record)
    }

    /// The record of a holder that would begin now, in the next generation. `None` for another host
    /// that shares: it only [joins](Self::join).
    ///
    /// # Errors
    /// No generation is left.
    pub(crate) fn claim(
        &self,
        volume: &VolumeUuid,
        claimant: &Claimant,
    ) -> Result<Option<HolderRecord>, NoGeneration> {
        if self.record(volume).is_some_and(|record| record.is_shared_with(claimant)) {
            return Ok(None);
        }
        let base = self.bases.get(volume).copied().unwrap_or(self.base);
        let last = match self.record(volume).filter(|_| !self.forgetful) {
            Some(record) => record.generation,
            None => self.generation(volume).max(base),
        };
        let generation = last.next().ok_or(NoGeneration)?;
        Ok(Some(record_of(*volume, claimant, generation)))
    }

    /// Adds another host to a shared volume. Returns the record if that changed it.
    pub(crate) fn join(
        &mut self,
        volume: &VolumeUuid,
        claimant: &Claimant,
    ) -> Option<HolderRecord> {
        let record =
            self.records.get_mut(volume).filter(|record| record.is_shared_with(claimant))?;
        if record.present {
            return None;
        }
        (record.host, record.host_name) = (claimant.host, claimant.host_name);
        record.present = true;
        Some(record.clone())
    }

    /// Begins a new holder, or adds a host that shares. Returns the record if that changed it.
    ///
    /// # Errors
    /// As of [`Self::claim`].
    #[cfg(test)]
    pub(crate) fn begin(
        &mut self,
        volume: &VolumeUuid,
        claimant: &Claimant,
    ) -> Result<Option<HolderRecord>, NoGeneration> {
        let Some(record) = self.claim(volume, claimant)? else {
            return Ok(self.join(volume, claimant));
        };
        self.put(record.clone());
        Ok(Some(record))
    }

    /// The holder, or the last of several, logged out. Returns the record if that changed it.
    pub(crate) fn leave(&mut self, volume: &VolumeUuid) -> Option<HolderRecord> {
        let record = self.records.get_mut(volume).filter(|record| record.present)?;
        record.present = false;
        Some(record.clone())
    }

    /// Puts a record as it is, such as a claim.
    pub(crate) fn put(&mut self, record: HolderRecord) {
        self.records.insert(record.volume, record);
    }
}

impl HolderRecord {
    /// Whether a host that comes back with this generation is the holder, or may be one of several:
    /// the record names the first of them.
    pub(crate) fn may_be(&self, host: HostId, generation: Generation) -> bool {
        let is_host = self.mode == AccessMode::Shared || self.host == host;
        is_host && self.generation == generation
    }

    fn is_shared_with(&self, claimant: &Claimant) -> bool {
        (self.mode, claimant.mode) == (AccessMode::Shared, AccessMode::Shared)
    }
}

fn record_of(volume: VolumeUuid, claimant: &Claimant, generation: Generation) -> HolderRecord {
    let (mode, host, host_name) = (claimant.mode, claimant.host, claimant.host_name);
    HolderRecord { volume, generation, mode, host, host_name, present: true }
}

/// No generation is left.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no generation is left")]
pub(crate) struct NoGeneration;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const V: VolumeUuid = [7; 16];

    fn claimant(host: u8, mode: AccessMode) -> Claimant {
        Claimant { mode, host: HostId([host; 16]), host_name: Name::new("h").unwrap() }
    }

    #[test]
    fn every_exclusive_holder_has_a_generation_of_its_own() {
        let mut holders = Holders::durable([]);
        let (a, b) = (claimant(1, AccessMode::Exclusive), claimant(2, AccessMode::Exclusive));
        assert_eq!(holders.generation(&V), Generation::FRESH);
        let first = holders.begin(&V, &a).unwrap().unwrap();
        assert_eq!((first.generation, first.present), (Generation(1), true));
        assert!(holders.is_last(&V, &a, Generation(1)));
        assert!(!holders.is_last(&V, &b, Generation(1)), "one generation is one host's");
        assert!(!holders.is_last(&V, &claimant(1, AccessMode::Shared), Generation(1)));
        assert_eq!(holders.come_back(&V, &a, Generation(1)), None, "nothing changed");
        let left = holders.leave(&V).unwrap();
        assert_eq!((left.generation, left.present), (Generation(1), false));
        assert_eq!(holders.leave(&V), None);
        assert!(holders.is_last(&V, &a, Generation(1)), "no other host came between");
        assert!(holders.come_back(&V, &a, Generation(1)).unwrap().present);
        assert_eq!(holders.begin(&V, &a).unwrap().unwrap().generation, Generation(2));
        assert_eq!(holders.begin(&V, &b).unwrap().unwrap().generation, Generation(3));
        for generation in [0, 1, 2, 4, u64::MAX] {
            assert!(!holders.is_last(&V, &a, Generation(generation)));
            assert!(!holders.is_last(&V, &b, Generation(generation)));
        }
        // The next run knows it all.
        let next = Holders::durable(holders.records().cloned());
        assert!(next.is_last(&V, &b, Generation(3)) && !next.is_last(&V, &a, Generation(1)));
    }

    #[test]
    fn hosts_that_share_have_one_generation() {
        let mut holders = Holders::durable([]);
        let (a, b) = (claimant(1, AccessMode::Shared), claimant(2, AccessMode::Shared));
        assert_eq!(holders.begin(&V, &a).unwrap().unwrap().generation, Generation(1));
        assert_eq!(holders.begin(&V, &b), Ok(None));
        assert!(holders.is_last(&V, &a, Generation(1)) && holders.is_last(&V, &b, Generation(1)));
        holders.leave(&V).unwrap();
        let again = holders.begin(&V, &b).unwrap().unwrap();
        assert_eq!((again.generation, again.host), (Generation(1), HostId([2; 16])));
        let c = claimant(3, AccessMode::Exclusive);
        assert_eq!(holders.begin(&V, &c).unwrap().unwrap().generation, Generation(2));
        assert!(!holders.is_last(&V, &a, Generation(1)) && !holders.is_last(&V, &a, Generation(2)));
    }

    #[test]
    fn a_volume_on_another_file_fences_its_earlier_holder() {
        let store = |text: &str| StoreIdentity::parse(text);
        for mode in [AccessMode::Exclusive, AccessMode::Shared] {
            let a = claimant(1, mode);
            let mut holders = Holders::durable([]);
            assert_eq!(holders.serve(V, store("inode:1").as_ref()), ServedFrom::First);
            holders.begin(&V, &a).unwrap().unwrap();
            assert_eq!(holders.serve(V, store("inode:1").as_ref()), ServedFrom::AsBefore);
            assert!(holders.is_last(&V, &a, Generation(1)) && !holders.is_replaced(&V));
            assert_eq!(holders.serve(V, store("inode:2").as_ref()), ServedFrom::Replaced);
            assert!(!holders.is_last(&V, &a, Generation(1)) && holders.is_replaced(&V));
            assert!(!holders.record(&V).unwrap().present, "no holder may come back");
            // An earlier holder may not come back after others have come, either.
            assert_eq!(
                holders.begin(&V, &a).unwrap().map(|r| r.generation),
                match mode {
                    AccessMode::Shared => Some(Generation(2)),
                    _ => Some(Generation(3)),
                }
            );
            assert!(!holders.is_last(&V, &a, Generation(1)));
            // A store without an identity counts as another one.
            assert_eq!(holders.serve(V, None), ServedFrom::Replaced);
            assert_eq!(holders.serve(V, None), ServedFrom::AsBefore);
        }
        // A number that has none after it ends, too.
        let last = record_of(V, &claimant(1, AccessMode::Exclusive), Generation(u64::MAX));
        let mut holders = Holders::durable([last]).with_stores([(V, store("inode:1").unwrap())]);
        assert_eq!(holders.serve(V, store("inode:2").as_ref()), ServedFrom::Replaced);
        assert!(!holders.is_last(&V, &claimant(1, AccessMode::Exclusive), Generation(u64::MAX)));
    }

    #[test]
    fn a_volume_that_is_served_anew_is_resumed_only_if_its_store_is_known() {
        let (a, inode) = (claimant(1, AccessMode::Exclusive), StoreIdentity::parse("inode:1"));
        let held = |stores| Holders::durable([record_of(V, &a, Generation(1))]).with_stores(stores);
        let mut holders = held(vec![(V, inode.clone().unwrap())]);
        assert_eq!(holders.serve_anew(V, inode.as_ref()), ServedFrom::AsBefore);
        assert!(holders.is_last(&V, &a, Generation(1)), "the same file");
        // Memory is empty again; a file may not be that of before; a store of no identity, neither.
        for (stores, now) in [(vec![], None), (vec![], inode.as_ref())] {
            let mut holders = held(stores);
            assert_eq!(holders.serve_anew(V, now), ServedFrom::Replaced);
            assert!(!holders.is_last(&V, &a, Generation(1)));
        }
        // The volume had no holder.
        assert_eq!(Holders::durable([]).serve_anew(V, None), ServedFrom::AsBefore);
    }

    proptest! {
        /// A volume goes round among members, each with one run: they decide as one target does.
        #[test]
        fn members_that_have_a_volume_in_turn_decide_as_one_target(
            steps in prop::collection::vec((0..6_u8, 0..3_usize, 1..4_u8, any::<bool>()), 1..60),
            forgets in any::<bool>(),
        ) {
            let mut truth = Holders::durable([]);
            let mut members = [(); 3].map(|()| Holders::durable([]));
            // The record beside the image: as the owner wrote it last.
            let (mut object, mut owner): (Option<HolderRecord>, usize) = (None, 0);
            let mut given = BTreeSet::from([Generation::FRESH]);
            for (what, to, host, is_shared) in steps {
                let mode = if is_shared { AccessMode::Shared } else { AccessMode::Exclusive };
                let opener = claimant(host, mode);
                let at = &mut members[owner];
                match what {
                    0 | 1 => {
                        if forgets {
                            at.forget(&V);
                        }
                        owner = to;
                        members[owner].adopt_shared(V, (object.clone(), None), Generation::FRESH);
                    }
                    2 => {
                        prop_assert_eq!(at.leave(&V), truth.leave(&V));
                    }
                    _ => {
                        prop_assert_eq!(at.begin(&V, &opener), truth.begin(&V, &opener));
                    }
                }
                let at = &members[owner];
                object = at.record(&V).cloned();
                prop_assert_eq!(object.as_ref(), truth.record(&V));
                given.insert(at.generation(&V));
                prop_assert_eq!(Some(&at.generation(&V)), given.last(), "none falls");
                for generation in &given {
                    prop_assert_eq!(
                        at.is_last(&V, &opener, *generation),
                        truth.is_last(&V, &opener, *generation)
                    );
                }
            }
        }
    }

    #[test]
    fn a_shared_record_that_knows_less_than_this_run_lets_nobody_resume() {
        let (a, b) = (claimant(1, AccessMode::Exclusive), claimant(2, AccessMode::Exclusive));
        let older = record_of(V, &b, Generation(3));
        for kept in [None, Some(older)] {
            let mut holders = Holders::durable([record_of(V, &a, Generation(5))]);
            holders.adopt_shared(V, (kept, None), Generation(1000));
            assert_eq!((holders.generation(&V), holders.is_replaced(&V)), (Generation(6), true));
            for generation in 0..6 {
                assert!(!holders.is_last(&V, &a, Generation(generation)));
                assert!(!holders.is_last(&V, &b, Generation(generation)));
            }
        }
    }

    /// A target in no group had the volume before, and the state directory of a member is gone.
    #[test]
    fn the_first_member_of_a_group_believes_no_host_and_begins_above_all_generations() {
        let a = claimant(1, AccessMode::Shared);
        for mut holders in [Holders::durable([]), Holders::forgetful(Generation(50))] {
            holders.adopt_shared(V, (None, None), Generation(1000));
            assert!((0..2000).all(|generation| !holders.is_last(&V, &a, Generation(generation))));
            assert_eq!(holders.begin(&V, &a).unwrap().unwrap().generation, Generation(1001));
        }
    }

    #[test]
    fn generations_without_a_record() {
        let a = claimant(1, AccessMode::Exclusive);
        assert!(!Holders::durable([]).is_last(&V, &a, Generation(5)), "it remembers all it gave");
        let mut lost = Holders::durable([]).with_base(Generation(1000));
        assert!(!lost.is_last(&V, &a, Generation(5)));
        assert_eq!(lost.begin(&V, &a).unwrap().unwrap().generation, Generation(1001));
        // A record that is there goes on.
        let known = Holders::durable([record_of(V, &a, Generation(5))]);
        let mut known = known.with_base(Generation(1000));
        assert_eq!(known.begin(&V, &a).unwrap().unwrap().generation, Generation(6));
        let mut forgetful = Holders::forgetful(Generation(1000));
        assert!(forgetful.is_last(&V, &a, Generation(5)), "no other host came before it");
        assert!(!forgetful.is_last(&V, &a, Generation::FRESH));
        assert!(!forgetful.is_last(&V, &a, Generation(u64::MAX)));
        assert_eq!(forgetful.come_back(&V, &a, Generation(5)).unwrap().generation, Generation(5));
        assert!(!forgetful.is_last(&V, &claimant(2, AccessMode::Exclusive), Generation(5)));
        let mut forgetful = Holders::forgetful(Generation(1000));
        forgetful.begin(&V, &claimant(2, AccessMode::Exclusive)).unwrap();
        assert!(!forgetful.is_last(&V, &a, Generation(5)), "another host did");
        let full = HolderRecord {
            volume: V,
            generation: Generation(u64::MAX),
            mode: AccessMode::Exclusive,
            host: HostId([1; 16]),
            host_name: Name::new("h").unwrap(),
            present: true,
        };
        assert_eq!(Holders::durable([full]).begin(&V, &a), Err(NoGeneration));
    }
}
