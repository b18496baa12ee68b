//! The keys by which a target and this host prove who they are, read again while a mount goes on:
//! by `rblk-initiator reload`, and by each process that takes the mount over.
//!
//! They come from the file that the mount was made of ([`Configured`]). Nothing else of the file is
//! read again: the disk has been made by the rest. A mount with keys does not become one without,
//! nor the reverse: who may connect is for a new mount to say.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rblk_config::{ConfigError, MountConfig, said_once};
use rblk_protocol::auth::PublicKey;

use super::setup::credentials_of;
use crate::session::Credentials;

/// What a mount is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Configured {
    /// What file and flags say together.
    pub config: MountConfig,
    /// The file that says which keys the target may prove, an absolute path. None where flags said
    /// it, or nothing.
    pub keys_file: Option<PathBuf>,
}

/// Why the keys stay as they were.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotReread {
    /// Nobody says what to read.
    #[error(
        "its keys came by --target-key: name them again, `rblk-initiator reload {name} --target-key KEY`"
    )]
    ByFlags {
        /// The mount.
        name: String,
    },
    /// The file is missing or has faults.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// The file is about something else now.
    #[error("{}: volume = \"{found}\", and the mount is of `{volume}`: unmount, and mount again", file.display())]
    OtherVolume {
        /// The file.
        file: PathBuf,
        /// The volume there.
        found: String,
        /// The mount's.
        volume: String,
    },
    /// It has keys, and is to have none.
    #[error(
        "there are no target_keys any more, and the mount asks for them: unmount, and mount again"
    )]
    NoKeys,
    /// It has no keys, and is to have some.
    #[error("the mount was made without target_keys: unmount, and mount again")]
    NewKeys,
}

/// The configuration of a mount with the keys that its file has now.
///
/// # Errors
/// [`NotReread`].
pub(super) fn read(config: &MountConfig, file: &Path) -> Result<MountConfig, NotReread> {
    let now = MountConfig::load(file)?;
    if now.volume != config.volume {
        let (found, volume) = (now.volume, config.volume.clone());
        return Err(NotReread::OtherVolume { file: file.to_owned(), found, volume });
    }
    with_keys(config, now.target_keys, now.key_file)
}

/// The configuration of a mount with other keys.
///
/// # Errors
/// [`NotReread`].
pub(super) fn with_keys(
    config: &MountConfig,
    target_keys: Vec<PublicKey>,
    key_file: PathBuf,
) -> Result<MountConfig, NotReread> {
    match (config.target_keys.is_empty(), target_keys.is_empty()) {
        (false, true) => return Err(NotReread::NoKeys),
        (true, false) => return Err(NotReread::NewKeys),
        _ => {}
    }
    let mut config = config.clone();
    (config.target_keys, config.key_file) = (target_keys, key_file);
    config.validate()?;
    Ok(config)
}

/// Whether a process could take a mount over with the keys of its file: the file may be gone, but
/// what is there must be of use.
///
/// # Errors
/// It is not.
pub(super) fn check(config: &MountConfig, keys_file: Option<&Path>) -> anyhow::Result<()> {
    match keys_file {
        Some(file) if file.exists() => {
            credentials_of(&read(config, file)?)?;
        }
        _ => {}
    }
    Ok(())
}

/// For a process that takes a mount over: the configuration of its note with the keys of its file,
/// and what is proven by them. Where the file is of no use, the keys of the note stay: requests
/// wait for this process.
///
/// # Errors
/// The key file of this host is of no use.
pub(super) fn taken_over(
    config: &MountConfig,
    keys_file: Option<&Path>,
) -> anyhow::Result<(MountConfig, Option<Arc<Credentials>>)> {
    if let Some(file) = keys_file {
        let found = read(config, file).map_err(anyhow::Error::from);
        match found.and_then(|config| Ok((credentials_of(&config)?, config))) {
            Ok((credentials, config)) => return Ok((config, credentials)),
            Err(error) => tracing::warn!(
                error = said_once(error.as_ref()),
                "the keys cannot be read again; those from before stay"
            ),
        }
    }
    Ok((config.clone(), credentials_of(config)?))
}

#[cfg(test)]
mod tests {
    use rblk_protocol::auth::SecretKey;

    use super::*;

    fn key() -> PublicKey {
        SecretKey::generate().unwrap().public()
    }

    fn file(dir: &Path, volume: &str, keys: &[PublicKey]) -> PathBuf {
        let path = dir.join("m.toml");
        let keys: Vec<String> = keys.iter().map(|key| format!("'{key}'")).collect();
        let keys = format!("target_keys = [{}]\n", keys.join(", "));
        let keys = if keys.contains("rblk1") { keys } else { String::new() };
        let text =
            format!("target = ['tcp://192.0.2.1']\nvolume = '{volume}'\n{keys}detect = '1s'\n");
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn only_the_keys_of_the_file_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (key(), key());
        let mut config = MountConfig::new("tcp://192.0.2.9", "v");
        config.target_keys = vec![old];
        let path = file(dir.path(), "v", &[old, new]);
        let mut read_again = read(&config, &path).unwrap();
        assert_eq!(read_again.target_keys, [old, new]);
        read_again.target_keys = vec![old];
        assert_eq!(read_again, config);
        let refused = |volume, keys: &[PublicKey], config: &MountConfig| {
            read(config, &file(dir.path(), volume, keys)).unwrap_err().to_string()
        };
        assert!(refused("w", &[new], &config).contains("volume = \"w\", and the mount is of `v`"));
        assert!(refused("v", &[], &config).contains("no target_keys any more"));
        let bare = MountConfig::new("tcp://192.0.2.9", "v");
        assert!(refused("v", &[new], &bare).contains("made without target_keys"));
        assert!(read(&bare, &file(dir.path(), "v", &[])).is_ok());
    }

    #[test]
    fn a_file_of_no_use_leaves_a_take_over_its_keys_and_refuses_an_upgrade() {
        let dir = tempfile::tempdir().unwrap();
        let config = MountConfig::new("tcp://192.0.2.9", "v");
        let path = file(dir.path(), "w", &[]);
        assert_eq!(taken_over(&config, Some(&path)).unwrap().0, config);
        assert!(check(&config, Some(&path)).is_err());
        let gone = dir.path().join("gone.toml");
        assert_eq!(taken_over(&config, Some(&gone)).unwrap().0, config);
        assert!(check(&config, Some(&gone)).is_ok(), "it may be removed while the disk is used");
        assert!(check(&config, None).is_ok());
    }
}
