//! [`SharedPlaces`]: the places of records that the members of a group of targets have in turn, and
//! [`GroupKeepers`]: those beside the state directory of this target.
//!
//! A place is there as long as this target owns its volume. The record there is read again each
//! time.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::keeper::{KeepError, Keeper, KeeperContent, Keepers, Place, Revision};
use super::{AtRisk, StateDirectory, VolumeRecord};
use crate::record::holders::VolumeUuid;

/// See the module. Copies are of one table.
#[derive(Clone, Debug, Default)]
pub struct SharedPlaces(Arc<Mutex<BTreeMap<VolumeUuid, SharedPlace>>>);

impl SharedPlaces {
    /// The record of a volume is at this place, from the next load of the volume on.
    pub fn put(&self, volume: VolumeUuid, place: Arc<dyn Keeper + Sync>) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.insert(volume, SharedPlace(place));
    }

    /// Whether the record of a volume is at such a place.
    pub fn has(&self, volume: &VolumeUuid) -> bool {
        self.of(volume).is_some()
    }

    fn of(&self, volume: &VolumeUuid) -> Option<SharedPlace> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(volume).cloned()
    }
}

/// A place that others have, too.
#[derive(Clone, Debug)]
struct SharedPlace(Arc<dyn Keeper + Sync>);

impl Keeper for SharedPlace {
    fn read(&self) -> io::Result<KeeperContent> {
        self.0.read()
    }

    fn replace(&self, record: &VolumeRecord, expected: Revision) -> Result<Revision, KeepError> {
        self.0.replace(record, expected)
    }

    fn renounce(&self) -> io::Result<()> {
        self.0.renounce()
    }

    fn place(&self) -> String {
        self.0.place()
    }
}

/// The places of all records of a target. See the module.
#[derive(Debug)]
pub struct GroupKeepers {
    own: StateDirectory,
    shared: SharedPlaces,
}

impl GroupKeepers {
    /// Those in the directory, and the shared ones.
    #[must_use]
    pub fn new(own: StateDirectory, shared: SharedPlaces) -> Self {
        Self { own, shared }
    }
}

impl Keepers for GroupKeepers {
    fn of(&self, volume: &VolumeUuid) -> Place {
        match self.shared.of(volume) {
            Some(place) => Place::Ours(Box::new(place)),
            None => self.own.of(volume),
        }
    }

    fn former(&self, volume: &VolumeUuid, risk: Option<AtRisk>) -> Option<VolumeRecord> {
        self.own.former(volume, risk).filter(|_| !self.is_shared(volume))
    }

    fn former_volumes(&self) -> BTreeSet<VolumeUuid> {
        self.own.former_volumes()
    }

    fn left(&self, volume: &VolumeUuid) -> Option<(VolumeRecord, Revision)> {
        self.own.left(volume).filter(|_| !self.is_shared(volume))
    }

    fn is_shared(&self, volume: &VolumeUuid) -> bool {
        self.shared.of(volume).is_some()
    }

    fn forget_former(&mut self) {
        self.own.forget_former();
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{Name, WriteVerifier};

    use super::super::{BootId, Records, ServedVolume};
    use super::*;

    const V: VolumeUuid = [1; 16];

    /// A place in memory.
    #[derive(Debug, Default)]
    struct Memory(Mutex<Option<(VolumeRecord, Revision)>>);

    impl Keeper for Memory {
        fn read(&self) -> io::Result<KeeperContent> {
            let kept = self.0.lock().unwrap().clone();
            Ok(kept.map_or(KeeperContent::Nothing, |(r, at)| KeeperContent::Record(r, at)))
        }

        fn replace(
            &self,
            record: &VolumeRecord,
            expected: Revision,
        ) -> Result<Revision, KeepError> {
            let mut kept = self.0.lock().unwrap();
            if let Some((_, found)) = *kept
                && found != expected
            {
                return Err(KeepError::Conflict { found, expected });
            }
            *kept = Some((record.clone(), expected.next()));
            Ok(expected.next())
        }

        fn renounce(&self) -> io::Result<()> {
            Ok(())
        }

        fn place(&self) -> String {
            "memory".to_owned()
        }
    }

    fn member(place: &Arc<Memory>, first: u8) -> Records {
        let shared = SharedPlaces::default();
        shared.put(V, Arc::clone(place) as Arc<dyn Keeper + Sync>);
        let keepers = GroupKeepers::new(StateDirectory::nothing(), shared);
        let fresh = move || WriteVerifier([first; 16]);
        Records::new(Box::new(keepers), BootId::new(&format!("boot {first}")), Box::new(fresh))
    }

    fn served(risk: AtRisk) -> ServedVolume {
        let name = Name::new("v").unwrap();
        ServedVolume {
            volume: V,
            name,
            risk: Some(risk),
            is_writable: true,
            begins: true,
            attachment: None,
        }
    }

    fn serve(records: &mut Records, risk: AtRisk) -> WriteVerifier {
        records.load(&served(risk)).unwrap();
        records.put_at_risk(&served(risk));
        assert!(records.write(&BTreeSet::from([V])).is_empty());
        records.record(&V).unwrap().verifier().unwrap()
    }

    #[test]
    fn members_have_one_record_in_turn() {
        let place = Arc::new(Memory::default());
        let (mut a, mut b) = (member(&place, 1), member(&place, 2));
        let verifier = serve(&mut a, AtRisk::Nothing);
        // Killed or not, on whichever machine: a write that was done is in the cluster.
        assert_eq!(serve(&mut b, AtRisk::Nothing), verifier);
        // The former owner writes nothing over it.
        a.lose(&V);
        assert_eq!(a.write(&BTreeSet::from([V])).len(), 1);
        // It serves the volume again, and reads the record again.
        assert_eq!(serve(&mut a, AtRisk::Process), verifier);
        // It dies with dirty blocks.
        assert_ne!(serve(&mut b, AtRisk::Process), verifier);
        let verifier = b.record(&V).unwrap().verifier();
        // It hands over in good order.
        b.lower_risk(&V, AtRisk::Nothing);
        assert!(b.write(&BTreeSet::from([V])).is_empty());
        assert_eq!(Some(serve(&mut a, AtRisk::Process)), verifier);
    }
}
