//! [`credentials`]: the keys of both ends, from the flags of a command.

use std::path::Path;

use rblk_config::key_file::{self, HOST_KEY_FILE, Side};
use rblk_operate::mount::flags::IdentityArgs;

use crate::volume::session::Credentials;

/// The credentials from the flags alone. `None` without keys of the target.
///
/// # Errors
/// The key file is missing, is no key file, or others may read it. Or it is named without a key
/// of the target.
pub fn credentials(identity: &IdentityArgs) -> anyhow::Result<Option<Credentials>> {
    let file = match (&identity.key_file, identity.target_key.is_empty()) {
        (None, true) => return Ok(None),
        (Some(_), true) => return Err(KeyWithoutTarget.into()),
        (file, false) => file.as_deref().unwrap_or(Path::new(HOST_KEY_FILE)),
    };
    let key = key_file::read(file, Side::Initiator)?;
    Ok(Some(Credentials::new(key, identity.target_key.clone())?))
}

/// A key of this host without a key of the target.
#[derive(Debug, thiserror::Error)]
#[error(
    "--key-file has no effect without --target-key; `rblk-target key show` prints the key at the target"
)]
pub(crate) struct KeyWithoutTarget;
