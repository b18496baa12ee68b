//! The volume that a change makes, and its configuration.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use rblk_config::{TargetConfig, VolumeConfig};
use rblk_fabric::{PageKind, Region};

use crate::control::core::Core;
use crate::control::running_config::RunningConfig;
use crate::store::OpenStore;
use crate::volume::ids::VolumeIndex;
use crate::volume::limits::Limiter;
use crate::volume::{Placement, Volume};

/// The volume of a name that is served.
///
/// # Errors
/// It is not served.
pub(super) fn served<'a>(name: &str, core: &'a Core) -> Result<&'a Arc<Volume>, String> {
    core.volume_named(name).ok_or_else(|| "it is not served".to_owned())
}

/// A served volume as another configuration makes it, with this size if it gets another one.
///
/// # Errors
/// The text for the client: it cannot be made so.
pub(super) fn altered(
    config: &VolumeConfig,
    bytes: Option<u64>,
    before: &Volume,
    (running, backings): (&RunningConfig, &HashMap<VolumeIndex, OpenStore>),
) -> Result<Volume, String> {
    let name = &config.name;
    let old = running.volume(name)?;
    fn place(config: &VolumeConfig) -> impl PartialEq {
        let files = (config.path.clone(), config.ceph_conf.clone(), config.keyring.clone());
        (
            config.store,
            files,
            (config.image.clone(), config.user.clone()),
            config.block_size,
            config.direct,
        )
    }
    if place(old) != place(config) {
        return Err(format!(
            "store, path, image (with ceph_conf, user, keyring), block_size and direct of {name} cannot change while it is served: remove it first \
             (`rblk-target volume remove {name}`)"
        ));
    }
    let limits = Limiter::renewed(before.limits.as_ref(), config.limits);
    let mut volume = Volume { read_only: config.read_only, limits, ..before.clone() };
    let bytes = bytes.unwrap_or(before.size_bytes());
    let block = before.block_size;
    volume.blocks = block.blocks_in(bytes).filter(|blocks| blocks.0 > 0).ok_or_else(|| {
        format!("{bytes} bytes are not a multiple of the block size {}", block.bytes())
    })?;
    if let Some(backing) = backings.get(&before.index) {
        if backing.read_only() && !config.read_only {
            return Err(format!(
                "the store of {name} was opened for reading: remove it and add it again without read_only"
            ));
        }
        let is_fixed = !backing.can_grow();
        let has = backing.measured().map_err(|error| error.to_string())?;
        if is_fixed && bytes > has {
            return Err(format!("the store of {name} has {has} bytes, and {bytes} are more"));
        }
        if backing.memory_alignment() <= config.block_size {
            volume.cache = config.cache.unwrap_or_default();
        }
        volume.cache_min_bytes = config.cache_min.unwrap_or_default().0;
        volume.cache_max_bytes = config.cache_max.map(|max| max.0);
        volume.read_ahead_bytes = u32::try_from(config.read_ahead.0).unwrap_or(u32::MAX);
    }
    Ok(volume)
}

/// Allocates the memory of a volume in memory that gets another size than `before`.
///
/// # Errors
/// There is not as much.
pub(super) fn take_memory(volume: &mut Volume, before: &Volume) -> Result<(), String> {
    let bytes = volume.size_bytes();
    if let (Placement::Memory(_), true) = (&before.placement, bytes != before.size_bytes()) {
        let len = usize::try_from(bytes).map_err(|error| error.to_string())?;
        let region = Region::allocate(len, PageKind::Normal);
        volume.placement = Placement::Memory(region.map_err(|error| error.to_string())?);
    }
    Ok(())
}

/// Why a target that began without a file or device takes none.
pub(super) fn forgets(running: &TargetConfig, volume: &VolumeConfig) -> String {
    let path = volume.path.as_deref().unwrap_or(Path::new(""));
    format!(
        "this target began without a volume on a file or device, so this run keeps no record of hosts and losses in \
         {} (state_dir), and the next start would refuse the mounts of {}: write `[[volume]]` with `name = \"{1}\"`, \
         `store = \"file\"` and `path = {:?}` into the configuration, and restart the target. From then on volumes \
         on files and devices can be added while it runs",
        running.state_dir.display(),
        volume.name,
        path
    )
}

/// Why another volume of the name of a removed one stays.
pub(in crate::control) fn anew(name: &str) -> String {
    format!(
        "{name} was removed by another command meanwhile; if a volume of that name is served now, it is a different \
        one, and stays"
    )
}
