//! [`Keys`]: the keys of a measured target and of its one host, in files of the target's directory.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rblk_config::key_file::{self, Side};
use rblk_config::{Auth, Encrypt, HostConfig, TargetConfig, VolumeAccess, VolumeRight};
use rblk_initiator::volume::session::Credentials;
use rblk_protocol::auth::PublicKey;

const HOST: &str = "bench";

#[derive(Debug)]
pub(crate) struct Keys {
    target: PublicKey,
    host_file: PathBuf,
    config: PathBuf,
}

impl Keys {
    /// Makes new keys in a directory, and the configuration of a target that listens there and lets
    /// this one host do everything.
    pub(crate) fn generate(dir: &Path, listen: &str) -> Result<Self> {
        let [target_file, host_file] = ["target.key", "host.key"].map(|name| dir.join(name));
        let target = key_file::create(&target_file)?;
        let every = VolumeRight::new(None, VolumeAccess::ReadWrite);
        let host = HostConfig::new(HOST, vec![key_file::create(&host_file)?], vec![every]);
        let config = dir.join("keys.toml");
        let content = TargetConfig {
            listen: vec![listen.to_owned()],
            auth: Some(Auth::Required),
            key_file: target_file,
            hosts: vec![HostConfig { take_over: true, ..host }],
            ..TargetConfig::default()
        };
        std::fs::write(&config, content.dump()?)
            .with_context(|| format!("cannot write {}", config.display()))?;
        Ok(Self { target, host_file, config })
    }

    /// The configuration file of the target.
    pub(crate) fn config(&self) -> &Path {
        &self.config
    }

    /// Words of `rblk-target serve`: with keys, or for every host.
    pub(crate) fn of_target(keys: Option<&Self>) -> Vec<String> {
        match keys {
            Some(keys) => vec!["--config".to_owned(), keys.config.display().to_string()],
            None => vec!["--insecure".to_owned()],
        }
    }

    /// Words of a mount. The stream stays in clear, as that of other systems, unless `flags` say
    /// otherwise.
    pub(crate) fn of_mount(keys: Option<&Self>, flags: &[String]) -> Vec<String> {
        let Some(Self { target, host_file, .. }) = keys else { return Vec::new() };
        let (file, target) = (host_file.display().to_string(), target.to_string());
        let mut words = vec!["--key-file".to_owned(), file, "--target-key".to_owned(), target];
        if !flags.iter().any(|flag| flag.starts_with("--encrypt")) {
            words.push("--encrypt=off".to_owned());
        }
        words
    }

    /// The configuration file of a mount, with the content of [`Self::of_mount`].
    pub(crate) fn file_of_mount(keys: Option<&Self>, url: &str, volume: &str) -> String {
        let mut text = format!("target = [\"{url}\"]\nvolume = \"{volume}\"\n");
        if let Some(Self { target, host_file, .. }) = keys {
            text += &format!("target_keys = [\"{target}\"]\nkey_file = {host_file:?}\n");
            text += "encrypt = \"off\"\n";
        }
        text
    }

    /// The credentials of a session of this process, in clear.
    pub(crate) fn credentials(&self) -> Result<Credentials> {
        let key = key_file::read(&self.host_file, Side::Initiator)?;
        Ok(Credentials::new(key, vec![self.target])?.encrypting(Encrypt::Off))
    }
}

#[cfg(test)]
mod tests;
