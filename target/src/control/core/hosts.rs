//! [`Hosts`]: the hosts that may log in, by their keys, and their rights. Pure.
//!
//! A host is known by the name of its `[[host]]` entry, whichever of its keys it proves: so it
//! stays the same host when it gets a new key. A volume that it may not see does not exist for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use rblk_config::{HostConfig, VolumeAccess};
use rblk_protocol::auth::PublicKey;
use rblk_protocol::{AccessMode, HostId, Name, OpenRequest, Status};
use sha2::{Digest, Sha256};

use super::budget::Budget;
use crate::volume::limits::Limiter;

/// The hosts that may log in.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    by_key: BTreeMap<PublicKey, Arc<Host>>,
    limits: BTreeMap<HostId, Arc<Limiter>>,
}

/// Why a table of hosts cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HostsError {
    /// A name that the wire does not allow.
    #[error("host {0:?}: the name is empty, too long, or has a character that no name may have")]
    Name(String),
    /// One key of two hosts.
    #[error("hosts {0:?} and {1:?} have the same key: give each host a key of its own")]
    Key(String, String),
}

/// A host that may log in.
#[derive(Debug)]
pub(super) struct Host {
    id: HostId,
    name: Name,
    rights: HostConfig,
}

impl Hosts {
    /// The hosts of `[[host]]` entries.
    ///
    /// # Errors
    /// [`HostsError`].
    pub fn new(entries: &[HostConfig]) -> Result<Self, HostsError> {
        let mut by_key: BTreeMap<PublicKey, Arc<Host>> = BTreeMap::new();
        let mut limits = BTreeMap::new();
        for entry in entries {
            let name = Name::new(&entry.name).map_err(|_| HostsError::Name(entry.name.clone()))?;
            let host = Arc::new(Host { id: id_of(name), name, rights: entry.clone() });
            if let Some(limiter) = Limiter::renewed(None, entry.limits) {
                limits.insert(host.id, limiter);
            }
            for key in &entry.keys {
                let before = by_key.insert(*key, Arc::clone(&host));
                if let Some(before) = before.filter(|before| before.id != host.id) {
                    return Err(HostsError::Key(before.name.to_string(), name.to_string()));
                }
            }
        }
        Ok(Self { by_key, limits })
    }

    /// The limits of a host; none if it has none.
    pub(super) fn limits(&self, host: HostId) -> Option<&Arc<Limiter>> {
        self.limits.get(&host)
    }

    /// Takes the place of another table: hosts with unchanged limits keep their use of them.
    pub(super) fn follow(&mut self, before: &Self) {
        for (host, limiter) in &mut self.limits {
            if let Some(same) = Limiter::renewed(before.limits.get(host), limiter.limits()) {
                *limiter = same;
            }
        }
    }

    /// The host that a key belongs to.
    pub(super) fn with_key(&self, key: &PublicKey) -> Option<&Arc<Host>> {
        self.by_key.get(key)
    }
}

/// The id of the host of an entry: the begin of SHA-256("rblk host" || name).
fn id_of(name: Name) -> HostId {
    let digest = Sha256::new().chain_update(b"rblk host").chain_update(name.as_str()).finalize();
    let mut id = HostId::default();
    id.0.iter_mut().zip(digest).for_each(|(id, byte)| *id = byte);
    id
}

impl Host {
    /// The target's id of the host.
    pub(super) fn id(&self) -> HostId {
        self.id
    }

    /// The name of its entry.
    pub(super) fn name(&self) -> Name {
        self.name
    }

    /// Whether the host may know of a volume.
    pub(super) fn may_see(&self, volume: Name) -> bool {
        self.rights.access(volume.as_str()).is_some()
    }

    /// Whether the host may have a volume open in that mode.
    pub(super) fn may_open(&self, volume: Name, mode: AccessMode) -> bool {
        match self.rights.access(volume.as_str()) {
            Some(VolumeAccess::ReadWrite) => true,
            Some(VolumeAccess::ReadOnly) => mode == AccessMode::ReadOnly,
            None => false,
        }
    }

    /// Whether an OPEN is allowed.
    ///
    /// # Errors
    /// The status and the text of the refusal. The text names nothing that the host may not see.
    pub(super) fn check_open(&self, request: &OpenRequest) -> Result<(), (Status, String)> {
        let (host, volume) = (self.name, request.name);
        if !self.may_see(volume) {
            return Err((Status::NoSuchVolume, String::new()));
        }
        if !self.may_open(volume, request.mode) {
            let text = format!(
                "host {host} may only read it (`{volume}:ro` in its [[host]] entry): mount it with --read-only"
            );
            return Err((Status::NotAllowed, text));
        }
        // A host that comes back takes nothing over, even if it asks to.
        if request.take_over && request.generation.is_fresh() && !self.rights.take_over {
            let text =
                format!("host {host} may take no volume over (take_over in its [[host]] entry)");
            return Err((Status::NotAllowed, text));
        }
        Ok(())
    }

    /// The budget of the connections of the host: from its entry, or the usual one.
    pub(super) fn budget(&self, usual: Budget) -> Budget {
        Budget {
            connections_max: self.rights.connections_max.unwrap_or(usual.connections_max),
            memory_max: self.rights.memory_max.map_or(usual.memory_max, |size| size.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::Generation;
    use rblk_protocol::auth::SecretKey;

    use super::*;

    fn key(byte: u8) -> PublicKey {
        SecretKey::from_bytes(&mut [byte; 32]).public()
    }

    fn entry(name: &str, keys: &[u8], volumes: &[&str]) -> HostConfig {
        let rights = volumes.iter().map(|right| right.parse().unwrap()).collect();
        HostConfig::new(name, keys.iter().copied().map(key).collect(), rights)
    }

    fn open(volume: &str, mode: AccessMode) -> OpenRequest {
        let (name, generation) = (Name::new(volume).unwrap(), Generation::FRESH);
        OpenRequest { name, mode, take_over: false, generation }
    }

    #[test]
    fn a_host_stays_itself_whichever_key_it_proves() {
        let hosts = Hosts::new(&[entry("db1", &[1, 2], &["*:rw"]), entry("db2", &[3], &[])]);
        let hosts = hosts.unwrap();
        let [one, two, three] = [1, 2, 3].map(|byte| hosts.with_key(&key(byte)).unwrap());
        assert_eq!((one.id(), one.name().as_str()), (two.id(), "db1"));
        assert_ne!(one.id(), three.id());
        assert!(hosts.with_key(&key(4)).is_none());
        let anew = Hosts::new(&[entry("db1", &[9], &[])]).unwrap();
        assert_eq!(anew.with_key(&key(9)).unwrap().id(), one.id());
    }

    #[test]
    fn bad_tables_are_refused() {
        let twice = Hosts::new(&[entry("a", &[1], &[]), entry("b", &[1], &[])]).unwrap_err();
        assert_eq!(twice, HostsError::Key("a".to_owned(), "b".to_owned()));
        let nameless = Hosts::new(&[entry("", &[1], &[])]).unwrap_err();
        assert!(matches!(nameless, HostsError::Name(_)));
    }

    #[test]
    fn rights() {
        let hosts = Hosts::new(&[entry("db1", &[1], &["vol0:rw", "logs:ro"])]).unwrap();
        let host = hosts.with_key(&key(1)).unwrap();
        let refused = |request| host.check_open(&request).err().map(|(status, _)| status);
        for mode in [AccessMode::ReadOnly, AccessMode::Shared, AccessMode::Exclusive] {
            let reads = mode == AccessMode::ReadOnly;
            assert_eq!(refused(open("vol0", mode)), None);
            assert_eq!(refused(open("logs", mode)), (!reads).then_some(Status::NotAllowed));
            assert_eq!(refused(open("other", mode)), Some(Status::NoSuchVolume));
        }
        let force = OpenRequest { take_over: true, ..open("vol0", AccessMode::Exclusive) };
        let (status, text) = host.check_open(&force).unwrap_err();
        assert!(status == Status::NotAllowed && text.contains("take_over"), "{text}");
        let returns = OpenRequest { generation: Generation(3), ..force };
        assert_eq!(host.check_open(&returns), Ok(()), "it takes over nothing");
    }
}
