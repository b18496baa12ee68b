//! Other mounts of a volume on this host. The target gives a returning host its volume at once, and
//! a host is the machine, not the mount. While one mount waits for its target, a second mount under
//! another name would look like the return of the first, and would fence it permanently. So the
//! mounts of a host look for each other by their notes.

use std::path::Path;

use rblk_config::MountConfig;
use rblk_config::key_file::HOST_KEY_FILE;
use rblk_protocol::{HostId, Name};

use super::Note;
use super::leftovers::find;
use crate::front::ublk::DeviceState;
use crate::volume::session::HostIdentity;
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::run_dir;
use rblk_operate::mount::run_dir::names;

/// Another mount of this host has the volume.
#[derive(Debug, thiserror::Error)]
#[error(
    "volume `{volume}` is mounted on this host already: `{name}` is {device}, and its users may only be waiting for \
     the target; `rblk-initiator umount {name}` first, or take the volume from them permanently with --take-over"
)]
pub(crate) struct HeldHere {
    /// The volume.
    pub volume: String,
    /// The mount that holds the volume.
    pub name: String,
    /// The disk.
    pub device: String,
}

/// This process cannot see whether another mount of this host has the volume.
#[derive(Debug, thiserror::Error)]
#[error(
    "volume `{volume}` may be mounted on this host: this user cannot see its mounts, and the key of the host is \
     theirs, too. Make a key of its own for this program (`rblk-initiator key new --file FILE`, key_file = \"FILE\"), \
     or take the volume from its holder with --take-over"
)]
pub(crate) struct Unseen {
    /// The volume.
    pub volume: String,
}

/// Refuses to mount a volume that another mount of this host holds, even if that mount's target is
/// lost or its process is dead. `target_name` is the name of the target, once it is known.
///
/// # Errors
/// [`HeldHere`], or the driver cannot be asked about the device of the other one.
pub fn must_not_hold(
    name: &str,
    config: &MountConfig,
    host: HostId,
    target_name: Option<&Name>,
) -> anyhow::Result<()> {
    if is_unseen(config, run_dir::must_be_readable().is_ok()) {
        let volume = config.volume.clone();
        return Err(Unseen { volume }.into());
    }
    for other in names().into_iter().filter(|other| other != name) {
        let Ok(Some(note)) = Note::read(&other) else { continue };
        if !is_held_by(&note, config, host, target_name) {
            continue;
        }
        let Some(device) = find(&other)?.device else { continue };
        // A device without a disk has no users, unless its process is about to make the disk.
        if device.state != DeviceState::Dead || MountLock::is_held(&other) {
            let volume = config.volume.clone();
            return Err(HeldHere { volume, name: other, device: note.disk() }.into());
        }
    }
    Ok(())
}

/// For a mount of that name: whether the volume may be opened by a host at a target.
pub(crate) fn may_open(
    name: &str,
    config: &MountConfig,
) -> impl Fn(&HostIdentity, &Name) -> anyhow::Result<()> {
    move |host, target_name| must_not_hold(name, config, host.id, Some(target_name))
}

/// Whether `config` might fence a mount that this process cannot see: one with the key of the host.
fn is_unseen(config: &MountConfig, sees_mounts: bool) -> bool {
    let has_host_key =
        !config.target_keys.is_empty() && config.key_file == Path::new(HOST_KEY_FILE);
    has_host_key && !config.read_only && !sees_mounts
}

/// Whether `config` would fence the mount of a note, if that mount lives.
fn is_held_by(note: &Note, config: &MountConfig, host: HostId, target_name: Option<&Name>) -> bool {
    let same_target = config.target.iter().any(|target| note.config.target.contains(target))
        || target_name.is_some_and(|name| note.target_name() == name.as_str());
    let is_shared = config.shared && note.config.shared;
    let tolerates = config.read_only || note.config.read_only || is_shared || note.fenced.is_some();
    // The target itself keeps different hosts apart. It knows them by their keys, if they have any.
    let has_keys = |config: &MountConfig| !config.target_keys.is_empty();
    let same_key =
        has_keys(config) && has_keys(&note.config) && note.config.key_file == config.key_file;
    let same_host = same_key || note.host() == host;
    !tolerates && same_host && note.config.volume == config.volume && same_target
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_one_writer_of_a_host_unless_all_share_it() {
        let note = Note::sample();
        let (us, target) = (note.host(), Name::new(note.target_name()).unwrap());
        let same = note.config.clone();
        let held = |change: &dyn Fn(&mut Note, &mut MountConfig)| {
            let (mut note, mut config) = (note.clone(), same.clone());
            change(&mut note, &mut config);
            let elsewhere = Name::new("elsewhere").unwrap();
            (
                is_held_by(&note, &config, us, None),
                is_held_by(&note, &config, us, Some(&target)),
                is_held_by(&note, &config, us, Some(&elsewhere)),
            )
        };
        assert_eq!(held(&|_, _| {}), (true, true, true));
        // The target has another address, and reports one name.
        let other_address = |_: &mut Note, config: &mut MountConfig| {
            config.target = vec!["10.9.9.9".to_owned()];
        };
        assert_eq!(held(&other_address), (false, true, false));
        let free = (false, false, false);
        assert_eq!(held(&|_, config| config.volume = "vol1".to_owned()), free);
        assert_eq!(held(&|_, config| config.read_only = true), free);
        assert_eq!(held(&|note, _| note.config.read_only = true), free);
        assert_eq!(held(&|note, _| note.fenced = Some("b".to_owned())), free);
        assert_eq!(held(&|_, config| config.shared = true), (true, true, true));
        let both = |note: &mut Note, config: &mut MountConfig| {
            (note.config.shared, config.shared) = (true, true);
        };
        assert_eq!(held(&both), free);
        assert!(!is_held_by(&note, &same, HostId([8; 16]), Some(&target)), "another host's");
        // A program has another id. The id does not count if the program proves the key of the
        // mount.
        let (mut note, mut program) = (note, same);
        let key = "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe";
        for config in [&mut note.config, &mut program] {
            config.target_keys = vec![key.parse().unwrap()];
        }
        assert!(is_held_by(&note, &program, HostId([8; 16]), Some(&target)));
        program.key_file = "/srv/program/key".into();
        assert!(!is_held_by(&note, &program, HostId([8; 16]), Some(&target)));
    }

    #[test]
    fn the_key_of_the_host_needs_the_right_to_see_its_mounts() {
        let mut config = MountConfig::new("tcp://store1", "v");
        assert!(!is_unseen(&config, false), "without keys it has an id of its own");
        let key = "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe";
        config.target_keys = vec![key.parse().unwrap()];
        assert!(is_unseen(&config, false) && !is_unseen(&config, true));
        config.read_only = true;
        assert!(!is_unseen(&config, false));
        config.read_only = false;
        config.key_file = "/srv/program/key".into();
        assert!(!is_unseen(&config, false));
    }
}
