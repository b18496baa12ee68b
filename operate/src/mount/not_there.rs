//! Errors of a command about a mount that lacks its rights, or that finds no mount.

/// Mounts need root.
#[derive(Debug, thiserror::Error)]
#[error("this needs root: the ublk driver and the mounts are root's. Run it with sudo")]
pub struct NotRoot;

/// A process in the background is listed with the mounts.
#[derive(Debug, thiserror::Error)]
#[error("in the background this needs root: give --foreground, or run it with sudo")]
pub struct NotInBackground;

/// No mount was named, and there is not exactly one.
#[derive(Debug, thiserror::Error)]
#[error("which mount? {}", if .0.is_empty() { "There is none".to_owned() } else { format!("Name one of {}", .0.join(", ")) })]
pub struct WhichMount(pub Vec<String>);

/// There is no mount of that name or device.
#[derive(Debug, thiserror::Error)]
#[error("`{what}` is not mounted; see `rblk-initiator list`")]
pub struct NotMounted {
    /// Name or device.
    pub what: String,
}
