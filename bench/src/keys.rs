//! [`Keys`]: the keys of a target that is measured and of the one host that uses it, in files of
//! the target's own directory.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rblk_config::key_file::{self, Side};
use rblk_config::{Auth, Encrypt, HostConfig, TargetConfig, VolumeAccess, VolumeRight};
use rblk_initiator::volume::session::Credentials;
use rblk_protocol::auth::PublicKey;

/// The name of the host at the target.
const HOST: &str = "bench";

/// See the module.
#[derive(Debug)]
pub struct Keys {
    target: PublicKey,
    host_file: PathBuf,
    config: PathBuf,
}

impl Keys {
    /// Makes new keys in a directory, and the configuration of a target that listens there and lets
    /// this one host do everything.
    ///
    /// # Errors
    /// A file cannot be written, or is there already.
    pub fn generate(dir: &Path, listen: &str) -> Result<Self> {
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

    /// What the target is started with: with keys, or for everybody.
    #[must_use]
    pub fn of_target(keys: Option<&Self>) -> Vec<String> {
        match keys {
            Some(keys) => vec!["--config".to_owned(), keys.config.display().to_string()],
            None => vec!["--insecure".to_owned()],
        }
    }

    /// What a mount is started with. Its stream stays in clear, as that of other systems does, if
    /// `flags`, which follow, do not say how it is to be.
    #[must_use]
    pub fn of_mount(keys: Option<&Self>, flags: &[String]) -> Vec<String> {
        let Some(Self { target, host_file, .. }) = keys else { return Vec::new() };
        let (file, target) = (host_file.display().to_string(), target.to_string());
        let mut words = vec!["--key-file".to_owned(), file, "--target-key".to_owned(), target];
        if !flags.iter().any(|flag| flag.starts_with("--encrypt")) {
            words.push("--encrypt=off".to_owned());
        }
        words
    }

    /// The file of a mount of that volume, with what [`Self::of_mount`] says.
    #[must_use]
    pub fn file_of_mount(keys: Option<&Self>, url: &str, volume: &str) -> String {
        let mut text = format!("target = [\"{url}\"]\nvolume = \"{volume}\"\n");
        if let Some(Self { target, host_file, .. }) = keys {
            text += &format!("target_keys = [\"{target}\"]\nkey_file = {host_file:?}\n");
            text += "encrypt = \"off\"\n";
        }
        text
    }

    /// What a session of this process proves. Its stream stays in clear.
    ///
    /// # Errors
    /// The file of the host's key cannot be read.
    pub fn credentials(&self) -> Result<Credentials> {
        let key = key_file::read(&self.host_file, Side::Initiator)?;
        Ok(Credentials::new(key, vec![self.target])?.encrypting(Encrypt::Off))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_reads_what_is_written_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let keys = Keys::generate(dir.path(), "tcp://127.0.0.1:7721").unwrap();
        let flags = Keys::of_target(Some(&keys));
        assert_eq!(flags[0], "--config");
        let config = TargetConfig::load(Path::new(&flags[1])).unwrap();
        assert_eq!(config.auth, Some(Auth::Required));
        let [host] = &config.hosts[..] else { panic!("{:?}", config.hosts) };
        let key = key_file::read(&dir.path().join("host.key"), Side::Initiator).unwrap();
        assert_eq!(host.keys, [key.public()]);
        let mount = Keys::of_mount(Some(&keys), &[]);
        assert_eq!(mount[3..], [keys.target.to_string(), "--encrypt=off".to_owned()]);
        assert_eq!(Keys::of_mount(Some(&keys), &["--encrypt=required".to_owned()]), mount[..4]);
        keys.credentials().unwrap();
        let file = dir.path().join("mount.toml");
        let text = Keys::file_of_mount(Some(&keys), "tcp://127.0.0.1:7721", "bench");
        std::fs::write(&file, text).unwrap();
        let mount = rblk_config::MountConfig::load(&file).unwrap();
        assert_eq!((mount.target_keys, mount.encrypt), (vec![keys.target], Encrypt::Off));
        assert_eq!(Keys::of_target(None), ["--insecure"]);
        assert!(Keys::of_mount(None, &[]).is_empty());
    }
}
