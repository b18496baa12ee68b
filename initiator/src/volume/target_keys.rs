//! The keys by which a target and this host prove their identity, read again while a mount goes on:
//! by `rblk-initiator reload`, and by each process that takes the mount over.
//!
//! The keys come from the file of the mount ([`KeysFile`]). No other key of the file is read again:
//! the disk was made by the rest. A mount with keys does not become one without, nor the reverse:
//! that needs a new mount.

use std::path::PathBuf;
use std::sync::Arc;

use rblk_config::key_file::credential;
use rblk_config::{ConfigError, MountConfig};
use rblk_operate::said_once;
use rblk_protocol::auth::PublicKey;

use super::session::Credentials;
use super::setup::credentials_of;
use rblk_operate::mount::configured::KeysFile;

/// The reason why the keys stay as they were.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotReread {
    /// The command names no keys, and the mount has no file of keys.
    #[error(
        "its keys came by --target-key: name them again, `rblk-initiator reload {name} --target-key KEY`"
    )]
    ByFlags {
        /// The mount.
        name: String,
    },
    /// The command names keys, but the next process would read those of the file.
    #[error(
        "its keys come from {}: write them into `target_keys` there, and run `rblk-initiator reload {name}` without \
         --target-key; an upgrade or a recovery would undo keys that are named here",
        file.display()
    )]
    ByFile {
        /// The mount.
        name: String,
        /// The file.
        file: PathBuf,
    },
    /// The file is missing or has faults.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// The file is of another volume now.
    #[error("{}: volume = \"{found}\", and the mount is of `{volume}`: unmount, and mount again", file.display())]
    OtherVolume {
        /// The file.
        file: PathBuf,
        /// The volume in the file.
        found: String,
        /// The volume of the mount.
        volume: String,
    },
    /// The mount has keys, and the new configuration has none.
    #[error(
        "there are no target_keys any more, and the mount asks for them: unmount, and mount again"
    )]
    NoKeys,
    /// The mount has no keys, and the new configuration has some.
    #[error("the mount was made without target_keys: unmount, and mount again")]
    NewKeys,
}

/// The configuration of the mount of a name with new keys: the named ones, or those of its file.
///
/// # Errors
/// [`NotReread`].
pub(crate) fn reread(
    config: &MountConfig,
    keys_file: Option<&KeysFile>,
    name: &str,
    named: Vec<PublicKey>,
) -> Result<MountConfig, NotReread> {
    let name = || name.to_owned();
    match (keys_file, named.is_empty()) {
        (Some(file), true) => read(config, file),
        (Some(file), false) => {
            Err(NotReread::ByFile { name: name(), file: file.path().to_owned() })
        }
        (None, false) => with_keys(config, named, config.key_file.clone()),
        (None, true) if config.target_keys.is_empty() => Ok(config.clone()),
        (None, true) => Err(NotReread::ByFlags { name: name() }),
    }
}

/// The configuration of a mount with the present keys of its file.
fn read(config: &MountConfig, file: &KeysFile) -> Result<MountConfig, NotReread> {
    let (path, by_flags) = (file.path(), file.by_flags());
    let now = MountConfig::load(path)?;
    if now.volume != config.volume && !by_flags.volume {
        let (found, volume) = (now.volume, config.volume.clone());
        return Err(NotReread::OtherVolume { file: path.to_owned(), found, volume });
    }
    let key_file = if by_flags.key_file { config.key_file.clone() } else { now.key_file };
    with_keys(config, now.target_keys, key_file)
}

/// The configuration of a mount with other keys.
fn with_keys(
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

/// Checks that a process could take a mount over with the keys of its file: the file may be
/// missing, but an existing file must be valid. A credential of systemd can be read only in a
/// process of the service, and such a process takes the mount over.
///
/// # Errors
/// A process could not.
pub(crate) fn check(config: &MountConfig, keys_file: Option<&KeysFile>) -> anyhow::Result<()> {
    let Some(file) = keys_file.filter(|file| file.path().exists()) else { return Ok(()) };
    let config = read(config, file)?;
    let is_of_service = credential(&config.key_file).is_some();
    if !is_of_service || std::env::var_os("CREDENTIALS_DIRECTORY").is_some() {
        credentials_of(&config)?;
    }
    Ok(())
}

/// For a process that takes a mount over: the configuration of its note with the keys of its file,
/// and its credentials. If the file is unusable, the keys of the note stay: requests wait for this
/// process.
///
/// # Errors
/// The key file of this host is invalid.
pub(crate) fn taken_over(
    config: &MountConfig,
    keys_file: Option<&KeysFile>,
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
    use std::path::Path;

    use rblk_protocol::auth::SecretKey;

    use super::*;
    use rblk_operate::mount::configured::ByFlags;

    fn key() -> PublicKey {
        SecretKey::generate().unwrap().public()
    }

    fn file(dir: &Path, volume: &str, keys: &[PublicKey]) -> KeysFile {
        let path = dir.join("m.toml");
        let keys: Vec<String> = keys.iter().map(|key| format!("'{key}'")).collect();
        let keys = format!("target_keys = [{}]\n", keys.join(", "));
        let keys = if keys.contains("rblk1") { keys } else { String::new() };
        let text =
            format!("target = ['tcp://192.0.2.1']\nvolume = '{volume}'\n{keys}detect = '1s'\n");
        std::fs::write(&path, text).unwrap();
        KeysFile::new(path, ByFlags::default())
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
        let gone = KeysFile::new(dir.path().join("gone.toml"), ByFlags::default());
        assert_eq!(taken_over(&config, Some(&gone)).unwrap().0, config);
        assert!(check(&config, Some(&gone)).is_ok(), "it may be removed while the disk is used");
        assert!(check(&config, None).is_ok());
    }

    #[test]
    fn flags_beside_the_file_win_after_a_reload() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (key(), key());
        let mut config = MountConfig::new("tcp://192.0.2.9", "of-flag");
        (config.target_keys, config.key_file) = (vec![old], "/of/flag.key".into());
        let file = file(dir.path(), "of-file", &[new]);
        let with =
            |volume, key_file| KeysFile::new(file.path().to_owned(), ByFlags { volume, key_file });
        let reread = |file: &KeysFile| reread(&config, Some(file), "m", Vec::new());
        let again = reread(&with(true, true)).unwrap();
        assert_eq!((again.target_keys, again.key_file), (vec![new], "/of/flag.key".into()));
        let again = reread(&with(true, false)).unwrap();
        assert_eq!(again.key_file, Path::new(rblk_config::key_file::HOST_KEY_FILE));
        assert_eq!(again.volume, "of-flag");
        assert!(matches!(reread(&with(false, true)), Err(NotReread::OtherVolume { .. })));
    }

    #[test]
    fn keys_are_named_only_where_no_file_has_them() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (key(), key());
        let mut config = MountConfig::new("tcp://192.0.2.9", "v");
        config.target_keys = vec![old];
        let file = file(dir.path(), "v", &[old]);
        let error = reread(&config, Some(&file), "m", vec![new]).unwrap_err().to_string();
        let path = file.path().display();
        assert!(error.starts_with(&format!("its keys come from {path}: write them")), "{error}");
        assert!(error.contains("`target_keys`"), "{error}");
        assert_eq!(reread(&config, None, "m", vec![new]).unwrap().target_keys, [new]);
        assert!(matches!(reread(&config, None, "m", vec![]), Err(NotReread::ByFlags { .. })));
    }

    #[test]
    fn a_credential_of_a_service_keeps_no_upgrade_by_hand_away() {
        assert!(std::env::var_os("CREDENTIALS_DIRECTORY").is_none(), "this test is no service");
        let dir = tempfile::tempdir().unwrap();
        let mut config = MountConfig::new("tcp://192.0.2.9", "v");
        config.target_keys = vec![key()];
        let file = file(dir.path(), "v", &[key()]);
        let add = |line: &str| {
            let text = std::fs::read_to_string(file.path()).unwrap();
            std::fs::write(file.path(), format!("{text}{line}\n")).unwrap();
        };
        add("key_file = 'credential:host.key'");
        check(&config, Some(&file)).unwrap();
        add("no_such_key = 1");
        assert!(check(&config, Some(&file)).is_err(), "the file itself has to be of use");
        let file = self::file(dir.path(), "v", &[key()]);
        let text = std::fs::read_to_string(file.path()).unwrap();
        let no_key = dir.path().join("none.key");
        let text = format!("{text}key_file = '{}'\n", no_key.display());
        std::fs::write(file.path(), text).unwrap();
        assert!(check(&config, Some(&file)).is_err(), "a key of its own has to be there");
    }
}
