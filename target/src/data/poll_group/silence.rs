//! [`Silence`]: the commands of volumes whose stores are silent.
//!
//! An image of a cluster belongs to this target as long as the cluster says so. When it has said
//! nothing for some seconds, another client may have the image and write to it. So no command of
//! the volume begins, not even one that the cache could answer, until the cluster speaks: it has
//! the image still, and the commands go on in their order; or it is lost. To a host that is a
//! stall.
//!
//! While a store is silent, its volume is hidden from new commands ([`AccessTable::set_silent`]),
//! so the I/O path has no test of its own for it.
//!
//! [`AccessTable::set_silent`]: super::access::AccessTable::set_silent

use rblk_protocol::CommandCapsule;
use rblk_runtime::Micros;

use super::held::Held;
use crate::data::connection::Connection;
use crate::volume::Volume;
use crate::volume::ids::VolumeIndex;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Silence {
    // In order of arrival. At most the depth of all connections: each tag has one command.
    kept: Vec<(VolumeIndex, Held)>,
}

impl Silence {
    /// Whether a command waits.
    pub(super) fn has_any(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Keeps a command of a volume, which arrived at `came`.
    #[cold]
    pub(super) fn keep(
        &mut self,
        connection: &mut Connection,
        (command, volume): (&CommandCapsule, &Volume),
        came: Micros,
    ) {
        let held = Held::of(connection, (command, volume), came, false);
        self.kept.push((volume.index, held));
    }

    /// Takes out the commands of a volume.
    pub(super) fn take(&mut self, volume: VolumeIndex) -> Vec<Held> {
        self.kept.extract_if(.., |(of, _)| *of == volume).map(|(_, held)| held).collect()
    }
}
