//! [`Exports`]: the volumes of this run of the target.

use std::collections::BTreeMap;
use std::sync::Arc;

use rblk_protocol::{InstanceId, Name, WriteVerifier};

use crate::record::holders::VolumeUuid;
use crate::volume::ids::VolumeIndex;
use crate::volume::{Placement, Volume};

/// The volumes of a run of the target.
#[derive(Debug)]
pub(super) struct Exports {
    instance: InstanceId,
    // Of volumes with a store, as their records have them.
    verifiers: BTreeMap<VolumeUuid, WriteVerifier>,
    volumes: Vec<Arc<Volume>>,
}

impl Exports {
    pub(super) fn new(instance: InstanceId, volumes: Vec<Arc<Volume>>) -> Self {
        Self { instance, verifiers: BTreeMap::new(), volumes }
    }

    /// The verifier of a volume in this run.
    pub(super) fn vouch(&mut self, volume: VolumeUuid, verifier: WriteVerifier) {
        self.verifiers.insert(volume, verifier);
    }

    /// Exports a volume, instead of the one with its index.
    pub(super) fn put(&mut self, volume: Arc<Volume>) {
        match self.volumes.iter_mut().find(|old| old.index == volume.index) {
            Some(old) => *old = volume,
            None => self.volumes.push(volume),
        }
    }

    /// Exports a volume no longer.
    pub(super) fn remove(&mut self, volume: VolumeIndex) {
        self.volumes.retain(|old| old.index != volume);
    }

    /// All volumes.
    pub(super) fn volumes(&self) -> &[Arc<Volume>] {
        &self.volumes
    }

    /// The volume with that index.
    pub(super) fn volume(&self, index: VolumeIndex) -> Option<&Arc<Volume>> {
        self.volumes.iter().find(|volume| volume.index == index)
    }

    /// The volume with that name.
    pub(super) fn named(&self, name: Name) -> Option<&Arc<Volume>> {
        self.volumes.iter().find(|volume| volume.name == name)
    }

    /// The volume with that identity.
    pub(super) fn with_uuid(&self, uuid: &VolumeUuid) -> Option<&Arc<Volume>> {
        self.volumes.iter().find(|volume| volume.uuid == *uuid)
    }

    /// The write verifier of a volume. It stays for the whole run, also when the cache mode
    /// changes. A volume without a verifier in its record keeps no data beyond the run.
    pub(super) fn verifier_of(&self, volume: &Volume) -> WriteVerifier {
        let of_record = self.verifiers.get(&volume.uuid);
        let of_record = of_record.filter(|_| matches!(volume.placement, Placement::Store));
        of_record.copied().unwrap_or(WriteVerifier(self.instance.0))
    }
}
