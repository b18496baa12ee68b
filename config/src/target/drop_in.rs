//! [`HostFile`] and [`VolumeFile`]: the drop-in of the configuration of a target that holds one
//! host or one volume, `X.d/host-NAME.toml` or `X.d/volume-NAME.toml`.
//!
//! Commands write these files, people may read and edit them. A file is replaced whole and durably,
//! and only when the configuration with the new file is valid. So a target that starts next finds
//! the old entry or the new entry, and never a configuration that is refused.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::marker::PhantomData;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::error::ConfigError;
use crate::host_config::{HOST_KEYS, HostConfig};
use crate::schema::document::{Document, Draft, drop_ins_of};
use crate::schema::rule::Rule;
use crate::schema::rule::{Key, Schema};
use crate::schema::text_rules::check_name;
use crate::volume::{VOLUME_KEYS, VolumeConfig};
use crate::{Exit, TargetConfig};

/// How long to wait for another program: a change of a volume takes less, if its store answers.
const LOCK_TIME: Duration = Duration::from_secs(60);
/// Time between two looks.
const LOCK_LOOK: Duration = Duration::from_millis(20);
/// A directory with this bit gives its group to new files in it.
const SETGID: u32 = 0o2000;
/// Owner, group and others may read.
const OTHERS_READ: u32 = 0o004;

static HOST_FILE: Schema = Schema {
    entries: &[Key::new(Rule::Tables(&HOST_KEYS)).named("host")],
    defaults: Table::new,
    retired: &[],
};
static VOLUME_FILE: Schema = Schema {
    entries: &[Key::new(Rule::Tables(&VOLUME_KEYS)).named("volume")],
    defaults: Table::new,
    retired: &[],
};

/// The content of a drop-in: one table of a list of the configuration.
pub trait Entry: Serialize + DeserializeOwned {
    /// The name of the list, and the first word of the file.
    const LIST: &'static str;
    /// First lines of a file.
    const HEAD: &'static str;

    /// Its name.
    fn name(&self) -> &str;

    /// The keys of a file.
    fn file_keys() -> &'static Schema;
}

impl Entry for HostConfig {
    const LIST: &'static str = "host";
    const HEAD: &'static str = "\
# Written by `rblk-target host add`. `host add` and `host remove` write it anew: remarks are lost.

";

    fn name(&self) -> &str {
        &self.name
    }

    fn file_keys() -> &'static Schema {
        &HOST_FILE
    }
}

impl Entry for VolumeConfig {
    const LIST: &'static str = "volume";
    const HEAD: &'static str = "\
# Written by `rblk-target volume --persist`, which writes it anew: remarks are lost.

";

    fn name(&self) -> &str {
        &self.name
    }

    fn file_keys() -> &'static Schema {
        &VOLUME_FILE
    }
}

/// The file of one host.
pub type HostFile = DropIn<HostConfig>;

/// The file of one volume.
pub type VolumeFile = DropIn<VolumeConfig>;

/// The file of one entry. While this value exists, no other program changes a file of the same
/// directory by this type.
#[derive(Debug)]
pub struct DropIn<T> {
    config: PathBuf,
    path: PathBuf,
    name: String,
    /// The directory, locked.
    directory: File,
    entry: PhantomData<fn() -> T>,
}

/// Why a drop-in was not read or changed. Then the old file is there, or, if a `sync`
/// failed, the new one.
#[derive(Debug, thiserror::Error)]
pub enum DropInError {
    /// The configuration with the file is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Not a name.
    #[error("{list} {name:?}: {problem}; write letters, digits, \".\", \"_\" or \"-\"")]
    Name {
        /// `host` or `volume`.
        list: &'static str,
        /// The text.
        name: String,
        /// The cause.
        problem: String,
    },
    /// A configuration that has no directory of drop-ins.
    #[error("{}: only a file whose name ends in .toml has a directory for {list}s", path.display())]
    NoDropIns {
        /// `host` or `volume`.
        list: &'static str,
        /// The configuration.
        path: PathBuf,
    },
    /// The file holds something else.
    #[error("{}: does not hold just the {list} {name}; edit it by hand", path.display())]
    Foreign {
        /// `host` or `volume`.
        list: &'static str,
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// Another program changes a file of the directory, and does not end.
    #[error(
        "{}: another `rblk-target volume --persist` or `rblk-target host` changes this configuration, and has not \
         ended; nothing was changed here: try again when it has", config.display()
    )]
    Busy {
        /// The configuration.
        config: PathBuf,
    },
    /// The system's.
    #[error("{}: cannot be written: {error}", path.display())]
    Write {
        /// The file or the directory.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
}

impl DropInError {
    /// The exit code of a program that stops for this.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Write { error, .. } => match error.kind() {
                io::ErrorKind::PermissionDenied => Exit::NotPermitted,
                _ => Exit::Failure,
            },
            Self::Busy { .. } => Exit::Failure,
            _ => Exit::Usage,
        }
    }
}

impl<T: Entry> DropIn<T> {
    /// The file of an entry beside a configuration. Makes the directory if it is absent, and waits
    /// until no other program changes it.
    ///
    /// # Errors
    /// [`DropInError`].
    pub fn lock(config: &Path, name: &str) -> Result<Self, DropInError> {
        let path = Self::path_of(config, name)?;
        let directory = path.parent().unwrap_or(Path::new("/"));
        // No directory is made for a configuration that is not there.
        fs::metadata(config)
            .map_err(|error| ConfigError::Read { path: config.to_owned(), error })?;
        let fail = |error| DropInError::Write { path: directory.to_owned(), error };
        let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
        made.and_then(|()| sync(directory.parent())).map_err(fail)?;
        let directory = File::open(directory).map_err(fail)?;
        lock(&directory, LOCK_TIME, config)?;
        Ok(Self {
            config: config.to_owned(),
            path,
            name: name.to_owned(),
            directory,
            entry: PhantomData,
        })
    }

    /// Where the file of an entry is, if it is there.
    ///
    /// # Errors
    /// Not a name, or a configuration without drop-ins.
    pub fn path_of(config: &Path, name: &str) -> Result<PathBuf, DropInError> {
        check_name(name).map_err(|problem| DropInError::Name {
            list: T::LIST,
            name: name.to_owned(),
            problem,
        })?;
        let none = || DropInError::NoDropIns { list: T::LIST, path: config.to_owned() };
        let directory = drop_ins_of(config).ok_or_else(none)?;
        Ok(directory.join(format!("{}-{name}.toml", T::LIST)))
    }

    /// Where it is, or will be.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The entry. `None` if there is no file.
    ///
    /// # Errors
    /// The file is wrong, or holds something else.
    pub fn read(&self) -> Result<Option<T>, DropInError> {
        if !self.path.exists() {
            return Ok(None);
        }
        let mut document = Document::default();
        document.lay(&self.path)?;
        let (path, name) = (self.path.clone(), self.name.clone());
        let foreign = || DropInError::Foreign { list: T::LIST, path, name };
        let mut content: Table = document.decode(T::file_keys(), |_, _| {})?;
        let entries = content.remove(T::LIST).unwrap_or(Value::Array(Vec::new()));
        let entries: Vec<T> =
            entries.try_into().map_err(|error| ConfigError::Dump(error.to_string()))?;
        match <[T; 1]>::try_from(entries) {
            Ok([entry]) if entry.name() == self.name => Ok(Some(entry)),
            _ => Err(foreign()),
        }
    }

    /// Checks the configuration with this entry instead of the one that is there, or with one
    /// more. Nothing is written.
    ///
    /// # Errors
    /// The configuration with it is refused.
    pub fn check(&self, entry: &T) -> Result<TargetConfig, DropInError> {
        Ok(TargetConfig::load_draft(&self.config, &self.draft(Some(self.text(entry)?)))?)
    }

    /// Replaces the entry, or adds it. Returns the configuration with it.
    ///
    /// # Errors
    /// The configuration with it is refused, or the file cannot be written.
    pub fn write(&self, entry: &T) -> Result<TargetConfig, DropInError> {
        let config = self.check(entry)?;
        self.replace(&self.text(entry)?).map_err(|error| self.unwritten(error))?;
        Ok(config)
    }

    /// Checks the configuration without the entry. Nothing is removed.
    ///
    /// # Errors
    /// The configuration without it is refused.
    pub fn check_without(&self) -> Result<TargetConfig, DropInError> {
        Ok(TargetConfig::load_draft(&self.config, &self.draft(None))?)
    }

    fn draft(&self, text: Option<String>) -> Draft {
        Draft { path: self.path.clone(), text }
    }

    fn text(&self, entry: &T) -> Result<String, ConfigError> {
        let dump = |error: toml::ser::Error| ConfigError::Dump(error.to_string());
        let entry = Value::try_from(entry).map_err(dump)?;
        let content = Table::from_iter([(T::LIST.to_owned(), Value::Array(vec![entry]))]);
        Ok(format!("{}{}", T::HEAD, toml::to_string(&content).map_err(dump)?))
    }

    /// Removes the entry. Returns the configuration without it.
    ///
    /// # Errors
    /// The configuration without it is refused, or the file cannot be removed.
    pub fn remove(&self) -> Result<TargetConfig, DropInError> {
        let config = self.check_without()?;
        let removed = fs::remove_file(&self.path).and_then(|()| self.directory.sync_all());
        removed.map_err(|error| self.unwritten(error))?;
        Ok(config)
    }

    /// The new file gets the owner and the mode of the main file, so that a target that may read
    /// the one may read the other. Its group is that of the main file, too, unless the directory
    /// gives its own group to new files (setgid).
    fn replace(&self, text: &str) -> io::Result<()> {
        let new = self.path.with_file_name(format!(".{}-{}.toml.new", T::LIST, self.name));
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o640).open(&new)?;
        let main = fs::metadata(&self.config)?;
        if nix::unistd::geteuid().is_root() {
            let gives_group = self.directory.metadata()?.mode() & SETGID != 0;
            fchown(&file, Some(main.uid()), (!gives_group).then_some(main.gid()))?;
        }
        // Independent of the umask.
        file.set_permissions(Permissions::from_mode(0o640 | main.mode() & OTHERS_READ))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        self.directory.sync_all()
    }

    fn unwritten(&self, error: io::Error) -> DropInError {
        DropInError::Write { path: self.path.clone(), error }
    }
}

/// Locks a directory of drop-ins once no other process has it locked.
fn lock(directory: &File, patience: Duration, config: &Path) -> Result<(), DropInError> {
    let until = Instant::now() + patience;
    loop {
        match directory.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(LOCK_LOOK),
            Err(TryLockError::WouldBlock) => {
                return Err(DropInError::Busy { config: config.to_owned() });
            }
            Err(TryLockError::Error(error)) => {
                let path = drop_ins_of(config).unwrap_or_else(|| config.to_owned());
                return Err(DropInError::Write { path, error });
            }
        }
    }
}

fn sync(directory: Option<&Path>) -> io::Result<()> {
    match directory {
        Some(directory) if !directory.as_os_str().is_empty() => File::open(directory)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_another_program_keeps_is_not_waited_for_without_end() {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("target.toml");
        let open = || File::open(directory.path()).unwrap();
        let (first, second) = (open(), open());
        lock(&first, Duration::ZERO, &config).unwrap();
        let error = lock(&second, Duration::ZERO, &config).unwrap_err();
        assert!(error.to_string().contains("try again when it has"), "{error}");
        drop(first);
        lock(&second, Duration::ZERO, &config).unwrap();
    }
}
