//! [`Exports`]: what this run of the target exports, and under which identity.

use std::collections::BTreeSet;
use std::sync::Arc;

use rblk_protocol::{InstanceId, Name, WriteVerifier};

use crate::holders::VolumeUuid;
use crate::store::VolumeIndex;
use crate::verifier::Lineage;
use crate::volume::{CacheMode, Volume};

/// What a run of the target exports.
#[derive(Debug)]
pub(super) struct Exports {
    name: Name,
    instance: InstanceId,
    lineage: Lineage,
    volumes: Vec<Arc<Volume>>,
    // Volumes that were write-back in this run.
    written_back: BTreeSet<VolumeIndex>,
}

impl Exports {
    pub(super) fn new(
        name: Name,
        instance: InstanceId,
        lineage: Lineage,
        volumes: Vec<Arc<Volume>>,
    ) -> Self {
        let mut exports =
            Self { name, instance, lineage, volumes: Vec::new(), written_back: BTreeSet::new() };
        volumes.into_iter().for_each(|volume| exports.put(volume));
        exports
    }

    /// Exports a volume, instead of the one with its index.
    pub(super) fn put(&mut self, volume: Arc<Volume>) {
        if volume.cache == CacheMode::WriteBack {
            self.written_back.insert(volume.index);
        }
        match self.volumes.iter_mut().find(|old| old.index == volume.index) {
            Some(old) => *old = volume,
            None => self.volumes.push(volume),
        }
    }

    /// Exports a volume no longer.
    pub(super) fn remove(&mut self, volume: VolumeIndex) {
        self.volumes.retain(|old| old.index != volume);
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

    /// The volume with that name.
    pub(super) fn named(&self, name: Name) -> Option<&Arc<Volume>> {
        self.volumes.iter().find(|volume| volume.name == name)
    }

    /// The volume with that identity.
    pub(super) fn with_uuid(&self, uuid: &VolumeUuid) -> Option<&Arc<Volume>> {
        self.volumes.iter().find(|volume| volume.uuid == *uuid)
    }

    /// The write verifier of a volume. A volume that was write-back keeps the verifier of one for
    /// this run: it changes whenever the other one does, and hosts that know it see no loss where
    /// there is none.
    pub(super) fn verifier_of(&self, volume: &Volume) -> WriteVerifier {
        if self.written_back.contains(&volume.index) {
            let as_it_was = Volume { cache: CacheMode::WriteBack, ..volume.clone() };
            return self.lineage.verifier_for(&as_it_was, self.instance);
        }
        self.lineage.verifier_for(volume, self.instance)
    }
}
