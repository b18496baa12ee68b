//! [`Seen`]: the configuration, the keys and the stores as the user that runs the target finds
//! them. Root may read and write everything, so root's own look says nothing about a target that
//! runs as another user: a process that became that user looks, and root reads its answer.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use nix::unistd::{User, geteuid, initgroups, setgid, setuid};
use rblk_config::key_file::{self, KeyFileError, Side};
use rblk_config::quoted::Quoted;
use rblk_config::unit_file::{TARGET_UNIT, UnitFile};
use rblk_config::{Auth, BackingConfig, ConfigError, TargetConfig, VolumeConfig};
use serde::{Deserialize, Serialize};

use crate::pool::opening::{is_elsewhere, open_volumes};
use crate::store::StoreError;
use crate::store::rbd::{CLOSE_WAIT, wait_until_closed};
use rblk_operate::target::defaults::target_name;

/// A fault of a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Trouble {
    /// The fault, without the fix.
    pub why: String,
    /// The command that mends it.
    pub fix: Option<String>,
}

/// The findings of one user.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Seen {
    /// Why the configuration cannot be used.
    pub config: Option<Trouble>,
    /// The key files that the configuration needs.
    pub keys: Vec<(PathBuf, Option<Trouble>)>,
    /// The volumes on files and devices. Empty while a target runs: it has them.
    pub stores: Vec<(String, Option<Trouble>)>,
}

impl Seen {
    /// Examines the files as a user. This process does so itself, if it is that user.
    ///
    /// # Errors
    /// The process of the other user cannot be started, or prints no findings.
    pub(super) fn by(user: u32, config: &Path, with_stores: bool) -> anyhow::Result<Self> {
        if geteuid().as_raw() == user || !geteuid().is_root() {
            return Ok(Self::here(config, with_stores));
        }
        let mut command = Command::new("/proc/self/exe");
        command.arg("doctor").arg("--config").arg(config).arg("--as-user").arg(user.to_string());
        if with_stores {
            command.arg("--with-stores");
        }
        let output = command.stdin(Stdio::null()).output().context("the look of another user")?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("the check as user {user} failed: {}", said.trim())
        })
    }

    /// Becomes a user for good, and examines the files. Call it while the process has one thread.
    ///
    /// # Errors
    /// There is no such user, or this process is not root.
    pub fn as_user(user: u32, config: &Path, with_stores: bool) -> anyhow::Result<Self> {
        let found = User::from_uid(user.into())?.with_context(|| format!("no user {user}"))?;
        let name = std::ffi::CString::new(found.name.as_str())?;
        initgroups(&name, found.gid)?;
        setgid(found.gid)?;
        setuid(found.uid)?;
        Ok(Self::here(config, with_stores))
    }

    fn here(path: &Path, with_stores: bool) -> Self {
        let config = match TargetConfig::load(path) {
            Ok(config) => config,
            Err(error) => return Self { config: Some(of_config(&error)), ..Self::default() },
        };
        Self {
            config: None,
            keys: keys(&config),
            stores: if with_stores { stores(&config) } else { Vec::new() },
        }
    }
}

/// The name of the user of this process, for commands.
fn own_name() -> String {
    let user = geteuid();
    let found = User::from_uid(user).ok().flatten();
    found.map_or_else(|| user.to_string(), |found| found.name)
}

fn word(path: &Path) -> String {
    Quoted(&path.to_string_lossy()).to_string()
}

/// The text of each fault contains its remedy, except for the rights to a file.
fn of_config(error: &ConfigError) -> Trouble {
    let denied = match error {
        ConfigError::Read { path, error }
            if error.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            Some(path)
        }
        _ => None,
    };
    let fix = denied.and_then(|path| {
        let metadata = std::fs::metadata(path).ok()?;
        let group = nix::unistd::getegid().as_raw();
        let group = nix::unistd::Group::from_gid(group.into()).ok().flatten()?.name;
        // If the group may read it already, the group is the wrong one.
        let reads = metadata.mode() & 0o040 != 0;
        let path = word(path);
        Some(match reads {
            true => format!("chgrp {group} {path}"),
            false => format!("chgrp {group} {path} && chmod g+r {path}"),
        })
    });
    let who = denied.map(|_| format!(" (user {})", own_name())).unwrap_or_default();
    Trouble { why: format!("{error}{who}"), fix }
}

fn keys(config: &TargetConfig) -> Vec<(PathBuf, Option<Trouble>)> {
    if config.authentication() == Auth::None {
        return Vec::new();
    }
    let files = std::iter::once(&config.key_file).chain(&config.key_file_next);
    files.map(|file| (file.clone(), key(file))).collect()
}

/// A key that systemd hands over is read by systemd, which is root.
fn key(file: &Path) -> Option<Trouble> {
    if let Some(name) = key_file::credential(file)
        && std::env::var_os("CREDENTIALS_DIRECTORY").is_none()
        && let Some(path) = UnitFile::find(Path::new("/"), TARGET_UNIT)?.credential(name)
    {
        let is_there = path.symlink_metadata().is_ok();
        return (!is_there).then(|| Trouble {
            why: format!("LoadCredential={name}:{}: no such file", path.display()),
            fix: Some(format!("rblk-target key new --file {}", word(&path))),
        });
    }
    key_file::read(file, Side::Target).err().map(|error| of_key(file, &error))
}

fn of_key(file: &Path, error: &KeyFileError) -> Trouble {
    let name = own_name();
    match error.is_denied() {
        true => Trouble {
            why: format!("the target runs as user {name}, which may not read it"),
            fix: Some(format!("chown {name} {}", word(file))),
        },
        false => Trouble { why: error.brief(), fix: error.fix() },
    }
}

/// Opens each volume that has a store, and closes it again.
fn stores(config: &TargetConfig) -> Vec<(String, Option<Trouble>)> {
    let Ok(name) = target_name(config) else { return Vec::new() };
    let on_stores = config.volumes.iter().filter(|volume| {
        let backing = volume.backing();
        matches!(backing, Ok(BackingConfig::File { .. } | BackingConfig::Rbd { .. }))
    });
    let open = |volume: &VolumeConfig| {
        let alone = TargetConfig { volumes: vec![volume.clone()], ..config.clone() };
        let opened = open_volumes(&alone, &name).and_then(|opened| {
            let images = opened.iter().filter_map(|volume| volume.backing.as_ref()?.image());
            images.into_iter().try_for_each(|image| image.may_fence())?;
            Ok(())
        });
        // Another member of the group serves it.
        let fault = opened.err().filter(|error| !is_elsewhere(error));
        (volume.name.clone(), fault.map(|error| of_store(&error)))
    };
    let found = on_stores.map(open).collect();
    wait_until_closed(CLOSE_WAIT);
    found
}

fn of_store(error: &anyhow::Error) -> Trouble {
    let denied = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(StoreError::Permission { path, access }) => Some((path, *access)),
        _ => None,
    });
    if let Some((path, access)) = denied {
        let name = own_name();
        // A directory on the way may refuse.
        let fix = path.metadata().is_ok().then(|| format!("chown {name} {}", word(path)));
        let path = path.display();
        return Trouble {
            why: format!("the target runs as user {name}, which may not {access} {path}"),
            fix,
        };
    }
    let text = error.root_cause().to_string();
    // The command that an error quotes comes first after its reason.
    let fix = text.split('`').nth(1).map(str::to_owned);
    let why = match (&fix, text.split_once(';')) {
        (Some(_), Some((why, _))) => why.to_owned(),
        _ => text,
    };
    Trouble { why, fix }
}
