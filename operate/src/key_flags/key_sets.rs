//! The sets of keys that commands take as flags.

use rblk_config::{HostConfig, Key, Limits, MountConfig, Schema, TargetConfig, VolumeConfig};

use super::KeySet;

/// All keys of a mount.
#[derive(Debug)]
pub struct MountKeySet;

/// The keys of a mount by which both ends prove their identity.
#[derive(Debug)]
pub struct IdentityKeySet;

/// The keys of a mount that matter to a connection that is only tried.
#[derive(Debug)]
pub struct ConnectKeySet;

/// All keys of a target.
#[derive(Debug)]
pub struct TargetKeySet;

/// The keys of a new volume.
#[derive(Debug)]
pub struct NewVolumeKeySet;

/// The keys that a volume may change while it is served.
#[derive(Debug)]
pub struct VolumeKeySet;

/// The keys of a host, old or new, beside its name, keys and rights.
#[derive(Debug)]
pub struct HostKeySet;

/// The limits of a host.
#[derive(Debug)]
pub struct LimitKeySet;

fn is_identity(key: &Key) -> bool {
    matches!(key.name, "target_keys" | "key_file")
}

impl KeySet for MountKeySet {
    fn schema() -> &'static Schema {
        MountConfig::keys()
    }
}

impl KeySet for IdentityKeySet {
    fn schema() -> &'static Schema {
        MountConfig::keys()
    }

    fn takes(key: &Key) -> bool {
        is_identity(key)
    }
}

impl KeySet for ConnectKeySet {
    fn schema() -> &'static Schema {
        MountConfig::keys()
    }

    fn takes(key: &Key) -> bool {
        is_identity(key) || key.name == "encrypt"
    }
}

impl KeySet for TargetKeySet {
    fn schema() -> &'static Schema {
        TargetConfig::keys()
    }
}

impl KeySet for NewVolumeKeySet {
    const CLEARS: bool = true;

    fn schema() -> &'static Schema {
        VolumeConfig::keys()
    }
}

impl KeySet for VolumeKeySet {
    const CLEARS: bool = true;
    const CHANGES: bool = true;

    fn schema() -> &'static Schema {
        VolumeConfig::keys()
    }

    fn takes(key: &Key) -> bool {
        key.live
    }
}

impl KeySet for HostKeySet {
    fn schema() -> &'static Schema {
        HostConfig::keys()
    }

    fn takes(key: &Key) -> bool {
        key.name == "take_over"
    }
}

impl KeySet for LimitKeySet {
    const CLEARS: bool = true;
    const CHANGES: bool = true;

    fn schema() -> &'static Schema {
        Limits::keys()
    }
}
