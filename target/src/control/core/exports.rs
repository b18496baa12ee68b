//! [`Exports`]: what this run of the target exports, and under which identity. Never changes.

use std::sync::Arc;

use rblk_protocol::{InstanceId, Name, WriteVerifier};

use crate::holders::VolumeUuid;
use crate::store::VolumeIndex;
use crate::verifier::Lineage;
use crate::volume::Volume;

/// What a run of the target exports.
#[derive(Debug)]
pub(super) struct Exports {
    name: Name,
    instance: InstanceId,
    lineage: Lineage,
    volumes: Vec<Arc<Volume>>,
}

impl Exports {
    pub(super) fn new(
        name: Name,
        instance: InstanceId,
        lineage: Lineage,
        volumes: Vec<Arc<Volume>>,
    ) -> Self {
        Self { name, instance, lineage, volumes }
    }

    /// The target's name.
    pub(super) fn name(&self) -> Name {
        self.name
    }

    /// This run.
    pub(super) fn instance(&self) -> InstanceId {
        self.instance
    }

    /// All volumes.
    pub(super) fn volumes(&self) -> &[Arc<Volume>] {
        &self.volumes
    }

    /// The volume with that index.
    pub(super) fn volume(&self, index: VolumeIndex) -> Option<&Arc<Volume>> {
        self.volumes.iter().find(|volume| volume.index == index)
    }

    /// Exports a volume as it is now, instead of the one with its index.
    #[cfg(test)]
    pub(super) fn put(&mut self, volume: Arc<Volume>) {
        match self.volumes.iter_mut().find(|old| old.index == volume.index) {
            Some(old) => *old = volume,
            None => self.volumes.push(volume),
        }
    }

    /// The volume with that name.
    pub(super) fn named(&self, name: Name) -> Option<&Arc<Volume>> {
        self.volumes.iter().find(|volume| volume.name == name)
    }

    /// The volume with that identity.
    pub(super) fn with_uuid(&self, uuid: &VolumeUuid) -> Option<&Arc<Volume>> {
        self.volumes.iter().find(|volume| volume.uuid == *uuid)
    }

    /// The write verifier of a volume.
    pub(super) fn verifier_of(&self, volume: &Volume) -> WriteVerifier {
        self.lineage.verifier_for(volume, self.instance)
    }
}
