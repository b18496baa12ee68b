//! [`must_suit_guests`]: refuses the configuration keys that the disk of a guest cannot have.

use rblk_config::{DigestWish, MountConfig};

/// Refuses configurations that a guest's disk cannot have.
///
/// # Errors
/// The configuration has an unsuited key.
pub fn must_suit_guests(config: &MountConfig) -> anyhow::Result<()> {
    let refuse = |key: &str, why: &str| -> anyhow::Result<()> {
        Err(UnsuitedKey { key: key.to_owned(), why: why.to_owned() }.into())
    };
    if config.digest == DigestWish::Crc32c {
        return refuse(
            "digest",
            "the digest of a READ travels behind its data, and in the memory of a guest there is no room for it: \
             set it to \"auto\", which is \"off\" here",
        );
    }
    if !config.shared_memory.is_empty() {
        return refuse(
            "shared_memory",
            "the memory of the guest is shared by its front end: remove it",
        );
    }
    if config.device_id.is_some() {
        return refuse("device_id", "the disk of a guest has a socket and no device: remove it");
    }
    Ok(())
}

/// A key of the configuration that has no meaning for a guest's disk.
#[derive(Debug, thiserror::Error)]
#[error("`{key}` is for mounts, and not for the disk of a guest: {why}")]
pub struct UnsuitedKey {
    key: String,
    why: String,
}
