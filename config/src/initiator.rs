//! All the mounts of a host.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::document::{Document, Sites, toml_files};
use crate::error::{ConfigError, Fault};
use crate::mount::{MOUNT_KEYS, MountConfig};
use crate::rule::{Key, NAME, Rule, Schema};

static INITIATOR_KEYS: Schema = Schema {
    keys: &[Key::optional("host_name", NAME), Key::optional("mount", Rule::Named(&MOUNT_KEYS))],
};

/// Configuration of an initiator host: `initiator.toml` and the files of `mounts.d` beside it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InitiatorConfig {
    /// This host's name as targets show it, for mounts that set none; the system's if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_name: Option<String>,
    /// The mounts by name: `[mount.NAME]` tables and `mounts.d/NAME.toml` files.
    #[serde(rename = "mount", skip_serializing_if = "BTreeMap::is_empty")]
    pub mounts: BTreeMap<String, MountConfig>,
}

impl InitiatorConfig {
    /// Loads a file such as `/etc/rblk/initiator.toml`, and every `mounts.d/NAME.toml` beside it as the mount NAME.
    ///
    /// Either may be absent. A mount that is in both is refused.
    ///
    /// # Errors
    /// [`ConfigError`], with all the faults at once.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let mut document = Document::default();
        match document.lay(path) {
            Err(ConfigError::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => {}
            laid => laid?,
        }
        for file in toml_files(&path.with_file_name("mounts.d"))? {
            document.lay_named("mount", &file)?;
        }
        Self::decode(document)
    }

    /// From text; `path` is what errors call it.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse(text: &str, path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let mut document = Document::default();
        document.lay_text(text, path.as_ref())?;
        Self::decode(document)
    }

    /// Applies the rules of a file to values that came from elsewhere.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        let table =
            toml::Table::try_from(self).map_err(|error| ConfigError::Dump(error.to_string()))?;
        let mut faults = Vec::new();
        INITIATOR_KEYS.judge("", &table, &mut faults);
        if faults.is_empty() {
            self.relate(&mut faults);
        }
        if faults.is_empty() { Ok(()) } else { Err(Sites::default().refuse(faults)) }
    }

    /// As one TOML file that loads to the same value, with every key that has one.
    ///
    /// # Errors
    /// [`ConfigError::Dump`]; in practice never.
    pub fn dump(&self) -> Result<String, ConfigError> {
        toml::to_string(self).map_err(|error| ConfigError::Dump(error.to_string()))
    }

    /// The keys of the file.
    #[must_use]
    pub fn keys() -> &'static Schema {
        &INITIATOR_KEYS
    }

    fn decode(document: Document) -> Result<Self, ConfigError> {
        let (config, sites): (Self, _) = document.decode(&INITIATOR_KEYS)?;
        let mut faults = Vec::new();
        config.relate(&mut faults);
        if faults.is_empty() { Ok(config) } else { Err(sites.refuse(faults)) }
    }

    /// What is wrong within and between the mounts.
    fn relate(&self, faults: &mut Vec<Fault>) {
        let mut devices: HashMap<u32, &str> = HashMap::new();
        let mut volumes: HashMap<(&str, &str), &str> = HashMap::new();
        for (name, mount) in &self.mounts {
            let at = format!("mount.{name}");
            mount.relate(&at, faults);
            if let Some(id) = mount.device_id {
                let first = *devices.entry(id).or_insert(name);
                if first != name {
                    let key = format!("{at}.device_id");
                    faults.push(
                        Fault::new(
                            key,
                            format!("the device of mount.{first} too"),
                            "number one of them anew",
                        )
                        .value(i64::from(id))
                        .other(format!("mount.{first}.device_id")),
                    );
                }
            }
            let clash = mount
                .target
                .iter()
                .map(|target| *volumes.entry((target, &mount.volume)).or_insert(name))
                .find(|first| first != name);
            if let Some(first) = clash {
                let key = format!("{at}.volume");
                let problem = format!("the volume of mount.{first} too, at the same address");
                faults.push(
                    Fault::new(key, problem, "remove one of the two mounts")
                        .value(mount.volume.as_str())
                        .other(format!("mount.{first}.volume")),
                );
            }
        }
    }
}
