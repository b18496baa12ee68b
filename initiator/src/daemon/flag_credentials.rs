//! [`credentials`]: the keys of both ends, from the flags of a command.

use rblk_config::key_file::{self, Side};
use rblk_config::{FlagLayer, MountConfig};

use crate::volume::session::Credentials;

/// The credentials from the flags alone. `None` without keys of the target.
///
/// # Errors
/// The key file is missing, is no key file, or others may read it. Or it is named without a key
/// of the target.
pub fn credentials(flags: &FlagLayer) -> anyhow::Result<Option<Credentials>> {
    match (flags.has("key_file"), flags.has("target_keys")) {
        (false, false) => return Ok(None),
        (true, false) => return Err(KeyWithoutTarget.into()),
        (_, true) => {}
    }
    let MountConfig { key_file, target_keys, .. } = flags.over(&MountConfig::default())?;
    let key = key_file::read(&key_file, Side::Initiator)?;
    Ok(Some(Credentials::new(key, target_keys)?))
}

/// A key of this host without a key of the target.
#[derive(Debug, thiserror::Error)]
#[error(
    "--key-file has no effect without --target-key; `rblk-target key show` prints the key at the target"
)]
pub(crate) struct KeyWithoutTarget;
