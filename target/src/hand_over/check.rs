//! Whether another program can take over: what it says of itself, and what must be so. Pure.

use std::path::PathBuf;

use rblk_config::{CacheMode, StoreKind, TargetConfig, VolumeConfig};
use serde::{Deserialize, Serialize};

use super::FORMS;

/// The flag of `serve` that makes a program print its [`Checked`], and end.
pub const CHECK_FLAG: &str = "--check-take-over";

/// What a program says that was asked whether it can take over, with the arguments of the running
/// one: its configuration is valid, and its keys can be read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Checked {
    /// Its version.
    pub version: String,
    /// The forms of a [`HandOver`](super::HandOver) that it reads: the oldest and the newest.
    pub hand_over_forms: [u32; 2],
    /// The name of its target.
    pub name: String,
    /// Where it remembers what must outlive it.
    pub state_dir: PathBuf,
    /// What it would serve.
    pub volumes: Vec<CheckedVolume>,
}

/// A volume that a program would serve.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckedVolume {
    /// Its name.
    pub name: String,
    /// `file`, `memory` or `null`.
    pub store: String,
    /// Its file or device.
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// Its block size in bytes.
    pub block_size: u32,
    /// Writes are acknowledged when they are in memory only.
    #[serde(default)]
    pub write_back: bool,
}

impl From<&VolumeConfig> for CheckedVolume {
    fn from(volume: &VolumeConfig) -> Self {
        let store = match volume.store {
            StoreKind::File => "file",
            StoreKind::Memory => "memory",
            StoreKind::Null => "null",
        };
        Self {
            name: volume.name.clone(),
            store: store.to_owned(),
            path: volume.path.clone(),
            block_size: volume.block_size,
            write_back: volume.cache == Some(CacheMode::WriteBack),
        }
    }
}

impl Checked {
    /// What this program says, with that configuration and name.
    #[must_use]
    pub fn of_this_program(config: &TargetConfig, name: String) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hand_over_forms: FORMS,
            name,
            state_dir: config.state_dir.clone(),
            volumes: config.volumes.iter().map(CheckedVolume::from).collect(),
        }
    }
}

/// What runs now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Served {
    /// The name of the target.
    pub name: String,
    /// Where it remembers what must outlive it.
    pub state_dir: PathBuf,
    /// Its volumes.
    pub volumes: Vec<CheckedVolume>,
}

/// Whether a program can take the place of the running one, so that mounts notice nothing but a
/// pause.
///
/// # Errors
/// What is different, and what to do.
pub fn judge(served: &Served, checked: &Checked) -> Result<(), String> {
    let [oldest, newest] = checked.hand_over_forms;
    if !(oldest..=newest).contains(&FORMS[1]) {
        return Err(format!(
            "version {} takes over from programs that hand over in form {oldest} to {newest}, and this one does so in \
             form {}: drain, install, start",
            checked.version, FORMS[1]
        ));
    }
    if checked.name != served.name {
        return Err(format!(
            "its target would be `{}`, and this one is `{}`: mounts would not take it for theirs. Set `name`",
            checked.name, served.name
        ));
    }
    if checked.state_dir != served.state_dir {
        return Err(format!(
            "its state_dir would be {}, and this target's is {}: mounts would report a loss. Change it with a drain \
             and a start",
            checked.state_dir.display(),
            served.state_dir.display()
        ));
    }
    for volume in &served.volumes {
        let name = &volume.name;
        match checked.volumes.iter().find(|its| its.name == *name) {
            None => {
                return Err(format!(
                    "it would not serve volume `{name}`: write the volume into the configuration, or remove it first \
                     (`rblk-target volume remove {name}`)"
                ));
            }
            Some(its)
                if (&its.store, &its.path, its.block_size)
                    != (&volume.store, &volume.path, volume.block_size) =>
            {
                return Err(format!(
                    "it would serve volume `{name}` from another store, path or block size than now: put the \
                     configuration right, or remove the volume first (`rblk-target volume remove {name}`)"
                ));
            }
            Some(its) if its.write_back != volume.write_back => {
                return Err(format!(
                    "it would serve volume `{name}` with another cache mode than now, and mounts would take that for \
                     a loss: change it first (`rblk-target volume set {name} --cache MODE --persist`)"
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str) -> CheckedVolume {
        CheckedVolume {
            name: name.to_owned(),
            store: "file".to_owned(),
            path: Some(format!("/srv/{name}").into()),
            block_size: 4096,
            write_back: false,
        }
    }

    fn pair() -> (Served, Checked) {
        let (name, state_dir) = ("store1".to_owned(), PathBuf::from("/var/lib/rblk"));
        let volumes = vec![volume("a"), volume("b")];
        let served =
            Served { name: name.clone(), state_dir: state_dir.clone(), volumes: volumes.clone() };
        let checked =
            Checked { version: "9.9".to_owned(), hand_over_forms: FORMS, name, state_dir, volumes };
        (served, checked)
    }

    #[test]
    fn a_program_that_would_serve_the_same_can_take_over() {
        let (served, mut checked) = pair();
        assert_eq!(judge(&served, &checked), Ok(()));
        checked.volumes.push(volume("more"));
        checked.hand_over_forms = [1, 7];
        assert_eq!(judge(&served, &checked), Ok(()), "more is no fault");
    }

    #[test]
    fn a_program_that_mounts_would_not_take_for_theirs_is_refused() {
        type Fault = fn(&mut Checked);
        let faults: [(Fault, &str); 8] = [
            (|c| c.hand_over_forms = [2, 3], "drain, install, start"),
            (|c| c.hand_over_forms = [0, 0], "form 0 to 0"),
            (|c| c.name = "other".to_owned(), "its target would be `other`"),
            (|c| c.state_dir = "/tmp".into(), "its state_dir would be /tmp"),
            (|c| drop(c.volumes.remove(0)), "would not serve volume `a`"),
            (|c| c.volumes[1].path = None, "volume `b` from another store"),
            (|c| c.volumes[1].block_size = 512, "volume `b` from another store"),
            (|c| c.volumes[1].write_back = true, "another cache mode"),
        ];
        for (fault, why) in faults {
            let (served, mut checked) = pair();
            fault(&mut checked);
            let error = judge(&served, &checked).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn what_a_later_version_says_of_itself_is_understood() {
        let (_, checked) = pair();
        let mut json = serde_json::to_value(&checked).unwrap();
        json["more"] = 1.into();
        json["volumes"][0]["more"] = 1.into();
        assert_eq!(serde_json::from_value::<Checked>(json).unwrap(), checked);
    }
}
