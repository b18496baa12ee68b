//! [`HostFile`]: the drop-in of the configuration of a target that holds one host,
//! `X.d/host-NAME.toml`.
//!
//! Commands write these files, people may read and edit them. A file is replaced whole and durably,
//! and only when the configuration with the new file is valid. So a target that starts next finds
//! the old host or the new host, and never a configuration that is refused.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::document::{Document, Draft, drop_ins_of};
use crate::error::ConfigError;
use crate::host::{HOST_KEYS, HostConfig};
use crate::rule::{Key, Rule, Schema, check_name};
use crate::{Exit, TargetConfig};

static FILE_KEYS: Schema = Schema { keys: &[Key::optional("host", Rule::Tables(&HOST_KEYS))] };

/// First lines of a file.
const HEAD: &str = "\
# Written by `rblk-target host add`. `host add` and `host remove` write it anew: remarks are lost.

";

#[derive(Serialize, Deserialize)]
struct Content {
    #[serde(rename = "host", default)]
    hosts: Vec<HostConfig>,
}

/// The file of one host. While this value exists, no other program changes a file of the same
/// directory by this type.
#[derive(Debug)]
pub struct HostFile {
    config: PathBuf,
    path: PathBuf,
    name: String,
    /// The directory, locked.
    directory: File,
}

/// Why a file of a host was not read or changed. Then the old file is there, or, if a `sync`
/// failed, the new one.
#[derive(Debug, thiserror::Error)]
pub enum HostFileError {
    /// The configuration with the file is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Not the name of a host.
    #[error("host {name:?}: {problem}; write letters, digits, \".\", \"_\" or \"-\"")]
    Name {
        /// The text.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A configuration that has no directory of drop-ins.
    #[error("{}: only a file whose name ends in .toml has a directory for hosts", .0.display())]
    NoDropIns(PathBuf),
    /// The file holds something else.
    #[error("{}: does not hold just the host {name}; edit it by hand", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The host.
        name: String,
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

impl HostFileError {
    /// The exit code of a program that stops for this.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Config(error) => error.exit(),
            Self::Write { error, .. } => match error.kind() {
                io::ErrorKind::PermissionDenied => Exit::NotPermitted,
                _ => Exit::Failure,
            },
            _ => Exit::Usage,
        }
    }
}

impl HostFile {
    /// The file of a host beside a configuration. Makes the directory if it is absent, and waits
    /// until no other program changes it.
    ///
    /// # Errors
    /// [`HostFileError`].
    pub fn lock(config: &Path, name: &str) -> Result<Self, HostFileError> {
        let path = Self::path_of(config, name)?;
        let directory = path.parent().unwrap_or(Path::new("/"));
        // No directory is made for a configuration that is not there.
        fs::metadata(config)
            .map_err(|error| ConfigError::Read { path: config.to_owned(), error })?;
        let fail = |error| HostFileError::Write { path: directory.to_owned(), error };
        let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
        made.and_then(|()| sync(directory.parent())).map_err(fail)?;
        let directory = File::open(directory).map_err(fail)?;
        directory.lock().map_err(fail)?;
        Ok(Self { config: config.to_owned(), path, name: name.to_owned(), directory })
    }

    /// Where the file of a host is, if it is there.
    ///
    /// # Errors
    /// Not a name, or a configuration without drop-ins.
    pub fn path_of(config: &Path, name: &str) -> Result<PathBuf, HostFileError> {
        check_name(name)
            .map_err(|problem| HostFileError::Name { name: name.to_owned(), problem })?;
        let directory =
            drop_ins_of(config).ok_or_else(|| HostFileError::NoDropIns(config.to_owned()))?;
        Ok(directory.join(format!("host-{name}.toml")))
    }

    /// Where it is, or will be.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The host. `None` if there is no file.
    ///
    /// # Errors
    /// The file is wrong, or holds something else.
    pub fn read(&self) -> Result<Option<HostConfig>, HostFileError> {
        if !self.path.exists() {
            return Ok(None);
        }
        let mut document = Document::default();
        document.lay(&self.path)?;
        let foreign =
            || HostFileError::Foreign { path: self.path.clone(), name: self.name.clone() };
        let content: Content = document.decode(&FILE_KEYS, |_, _| {})?;
        let [host] = <[HostConfig; 1]>::try_from(content.hosts).map_err(|_| foreign())?;
        if host.name == self.name { Ok(Some(host)) } else { Err(foreign()) }
    }

    /// Replaces the host, or adds it. Returns the configuration with it.
    ///
    /// # Errors
    /// The configuration with it is refused, or the file cannot be written.
    pub fn write(&self, host: HostConfig) -> Result<TargetConfig, HostFileError> {
        let text = toml::to_string(&Content { hosts: vec![host] })
            .map_err(|error| ConfigError::Dump(error.to_string()))?;
        let text = format!("{HEAD}{text}");
        let draft = Draft { path: self.path.clone(), text: Some(text.clone()) };
        let config = TargetConfig::load_draft(&self.config, &draft)?;
        self.replace(&text).map_err(|error| self.unwritten(error))?;
        Ok(config)
    }

    /// Removes the host. Returns the configuration without it.
    ///
    /// # Errors
    /// The configuration without it is refused, or the file cannot be removed.
    pub fn remove(&self) -> Result<TargetConfig, HostFileError> {
        let draft = Draft { path: self.path.clone(), text: None };
        let config = TargetConfig::load_draft(&self.config, &draft)?;
        let removed = fs::remove_file(&self.path).and_then(|()| self.directory.sync_all());
        removed.map_err(|error| self.unwritten(error))?;
        Ok(config)
    }

    /// The new file gets the owner and the group of the main file, so that a target that may read
    /// the one may read the other.
    fn replace(&self, text: &str) -> io::Result<()> {
        let new = self.path.with_file_name(format!(".host-{}.toml.new", self.name));
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o640).open(&new)?;
        if nix::unistd::geteuid().is_root() {
            let main = fs::metadata(&self.config)?;
            fchown(&file, Some(main.uid()), Some(main.gid()))?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        self.directory.sync_all()
    }

    fn unwritten(&self, error: io::Error) -> HostFileError {
        HostFileError::Write { path: self.path.clone(), error }
    }
}

fn sync(directory: Option<&Path>) -> io::Result<()> {
    match directory {
        Some(directory) if !directory.as_os_str().is_empty() => File::open(directory)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}
