//! [`Keys`]: the keys of the target and of the hosts of one test.
//!
//! In every mount of the lab both ends prove their keys. That is the default off loopback.

use std::fs::{OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rblk_config::{HostConfig, TargetConfig, VolumeAccess, VolumeRight};
use rblk_protocol::auth::{PublicKey, SecretKey};

/// The host that mounts by default.
const HERE: &str = "here";
/// Every host that a test may name.
const HOSTS: [&str; 3] = [HERE, "alice", "bob"];

/// See the module.
#[derive(Debug)]
pub(super) struct Keys {
    directory: PathBuf,
    target: PublicKey,
    hosts: Vec<(&'static str, PublicKey)>,
}

impl Keys {
    /// New keys, with their files in a directory.
    pub(super) fn generate(directory: &Path) -> Self {
        std::fs::create_dir_all(directory)
            .unwrap_or_else(|e| panic!("making {}: {e}", directory.display()));
        let made = |name: &str| write(&file(directory, name));
        let target = made("target");
        let hosts = HOSTS.map(|name| (name, made(name))).to_vec();
        Self { directory: directory.to_owned(), target, hosts }
    }

    /// Lets every host into a target, to do everything with every volume.
    pub(super) fn let_in(&self, config: &mut TargetConfig) {
        config.key_file = file(&self.directory, "target");
        let every = VolumeRight::new(None, VolumeAccess::ReadWrite);
        let host = |(name, key): &(&str, PublicKey)| {
            let host = HostConfig::new(*name, vec![*key], vec![every.clone()]);
            HostConfig { take_over: true, ..host }
        };
        config.hosts = self.hosts.iter().map(host).collect();
    }

    /// The flags with a host's keys, for a mount or a `discover`.
    pub(super) fn of_host(&self, host: Option<&str>) -> Vec<String> {
        let file = file(&self.directory, host.unwrap_or(HERE)).display().to_string();
        let target = self.target.to_string();
        ["--key-file".to_owned(), file, "--target-key".to_owned(), target].to_vec()
    }
}

fn file(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.key"))
}

/// Writes a new key into a file, and returns the public key.
fn write(path: &Path) -> PublicKey {
    let key = SecretKey::generate().unwrap_or_else(|e| panic!("a key: {e}"));
    let made = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    let written = made.and_then(|mut file| {
        // The file may be left from an earlier run, with another mode.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(key.file_text().as_bytes())
    });
    written.unwrap_or_else(|e| panic!("writing {}: {e}", path.display()));
    key.public()
}
