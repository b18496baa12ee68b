//! The sets of keys that commands take as flags.

use rblk_config::{HostConfig, Key, Limits, MountConfig, Schema, TargetConfig, VolumeConfig};

use super::FlagSet;

/// All keys of a mount.
#[derive(Debug)]
pub struct MountFlagSet;

/// The keys of a mount by which both ends prove their identity.
#[derive(Debug)]
pub struct IdentityFlagSet;

/// The keys of a mount that matter to a connection that is only tried.
#[derive(Debug)]
pub struct ConnectFlagSet;

/// All keys of a target.
#[derive(Debug)]
pub struct TargetFlagSet;

/// The keys of a new volume.
#[derive(Debug)]
pub struct NewVolumeFlagSet;

/// The keys that a volume may change while it is served.
#[derive(Debug)]
pub struct VolumeFlagSet;

/// The keys of a host, old or new, beside its name, keys and rights.
#[derive(Debug)]
pub struct HostFlagSet;

/// The limits of a host.
#[derive(Debug)]
pub struct LimitFlagSet;

fn is_identity(key: &Key) -> bool {
    matches!(key.name, "target_keys" | "key_file")
}

impl FlagSet for MountFlagSet {
    fn schema() -> &'static Schema {
        MountConfig::keys()
    }
}

impl FlagSet for IdentityFlagSet {
    fn schema() -> &'static Schema {
        MountConfig::keys()
    }

    fn takes(key: &Key) -> bool {
        is_identity(key)
    }
}

impl FlagSet for ConnectFlagSet {
    fn schema() -> &'static Schema {
        MountConfig::keys()
    }

    fn takes(key: &Key) -> bool {
        is_identity(key) || key.name == "encrypt"
    }
}

impl FlagSet for TargetFlagSet {
    fn schema() -> &'static Schema {
        TargetConfig::keys()
    }
}

impl FlagSet for NewVolumeFlagSet {
    const CLEARS: bool = true;

    fn schema() -> &'static Schema {
        VolumeConfig::keys()
    }
}

impl FlagSet for VolumeFlagSet {
    const CLEARS: bool = true;
    const CHANGES: bool = true;

    fn schema() -> &'static Schema {
        VolumeConfig::keys()
    }

    fn takes(key: &Key) -> bool {
        key.live
    }
}

impl FlagSet for HostFlagSet {
    fn schema() -> &'static Schema {
        HostConfig::keys()
    }

    fn takes(key: &Key) -> bool {
        key.name == "take_over"
    }
}

impl FlagSet for LimitFlagSet {
    const CLEARS: bool = true;
    const CHANGES: bool = true;

    fn schema() -> &'static Schema {
        Limits::keys()
    }
}
