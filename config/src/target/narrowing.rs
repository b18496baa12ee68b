//! The rights that a new configuration takes from hosts and volumes. Pure.
//!
//! A target takes first and gives last, so that no host has a new volume, or a volume more, by a
//! key or a right that goes in the same edit.

use crate::host_config::{HostConfig, VolumeAccess, VolumeRight};

/// The hosts that both configurations let in, each with the rights that both of them allow.
#[must_use]
pub fn narrowed(from: &[HostConfig], to: &[HostConfig]) -> Vec<HostConfig> {
    from.iter()
        .filter_map(|was| {
            let host = common(was, to.iter().find(|host| host.name == was.name)?);
            (!host.keys.is_empty()).then_some(host)
        })
        .collect()
}

/// The names of the hosts from which something is taken.
#[must_use]
pub fn losers(from: &[HostConfig], to: &[HostConfig]) -> Vec<String> {
    let left = narrowed(from, to);
    let keeps_all = |was: &HostConfig| {
        left.iter().any(|host| host.name == was.name && allows_all_of(host, was))
    };
    from.iter().filter(|was| !keeps_all(was)).map(|host| host.name.clone()).collect()
}

/// Whether an entry that is left of another one allows as much as that.
fn allows_all_of(left: &HostConfig, was: &HostConfig) -> bool {
    let volumes = left.volumes.iter().chain(&was.volumes).map(VolumeRight::volume);
    let keeps = |volume: Option<&str>| access(left, volume) >= access(was, volume);
    let limits = |host: &HostConfig| (host.connections_max, host.memory_max, host.take_over);
    left.keys == was.keys && limits(left) == limits(was) && volumes.into_iter().all(keeps)
}

/// The access of a host to a volume, or (`None`) to all volumes without a right of their own.
fn access(host: &HostConfig, volume: Option<&str>) -> Option<VolumeAccess> {
    match volume {
        Some(volume) => host.access(volume),
        None => host.volumes.iter().find(|r| r.volume().is_none()).map(VolumeRight::access),
    }
}

/// The rights that two entries of a host both allow.
fn common(one: &HostConfig, other: &HostConfig) -> HostConfig {
    let keys = one.keys.iter().filter(|key| other.keys.contains(key)).copied().collect();
    let mut volumes: Vec<VolumeRight> = Vec::new();
    for right in one.volumes.iter().chain(&other.volumes) {
        if volumes.iter().any(|have| have.volume() == right.volume()) {
            continue;
        }
        if let (Some(first), Some(second)) =
            (access(one, right.volume()), access(other, right.volume()))
        {
            let volume = right.volume().map(str::to_owned);
            volumes.push(VolumeRight::new(volume, first.min(second)));
        }
    }
    let least = |one: Option<u64>, other: Option<u64>| match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    };
    let memory = least(one.memory_max.map(|size| size.0), other.memory_max.map(|size| size.0));
    let connections =
        least(one.connections_max.map(u64::from), other.connections_max.map(u64::from));
    HostConfig {
        keys,
        volumes,
        take_over: one.take_over && other.take_over,
        connections_max: connections.and_then(|count| u32::try_from(count).ok()),
        memory_max: memory.map(crate::ByteSize),
        ..other.clone()
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::auth::{PublicKey, SecretKey};

    use super::*;

    fn key(byte: u8) -> PublicKey {
        SecretKey::from_bytes(&mut [byte; 32]).public()
    }

    fn host(name: &str, keys: &[u8], rights: &[&str]) -> HostConfig {
        let rights = rights.iter().map(|right| right.parse().unwrap()).collect();
        HostConfig::new(name, keys.iter().copied().map(key).collect(), rights)
    }

    fn rights(host: &HostConfig) -> Vec<String> {
        host.volumes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_both_allow_is_left() {
        let from = [
            host("gone", &[1], &["*:rw"]),
            host("rekeyed", &[2], &["*:rw"]),
            HostConfig {
                take_over: true,
                memory_max: Some(crate::ByteSize(7)),
                ..host("db1", &[3, 4], &["a:rw", "b:ro", "c:rw", "*:ro"])
            },
            host("same", &[5], &["a:ro"]),
        ];
        let to = [
            host("new", &[1], &["*:rw"]),
            host("rekeyed", &[9], &["*:rw"]),
            HostConfig {
                connections_max: Some(4),
                ..host("db1", &[4, 8], &["a:ro", "b:rw", "d:rw"])
            },
            host("same", &[5], &["a:rw", "b:rw"]),
        ];
        let left = narrowed(&from, &to);
        let names: Vec<&str> = left.iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names, ["db1", "same"]);
        assert_eq!(left[0].keys, [key(4)]);
        assert_eq!(rights(&left[0]), ["a:ro", "b:ro", "d:ro"], "the right to all others went");
        let db1 = &left[0];
        assert_eq!((db1.take_over, db1.connections_max), (false, Some(4)));
        assert_eq!(db1.memory_max, Some(crate::ByteSize(7)));
        assert_eq!(rights(&left[1]), ["a:ro"]);
        assert_eq!(losers(&from, &to), ["gone", "rekeyed", "db1"]);
        assert_eq!(losers(&from, &from), [""; 0]);
        let all = [host("db1", &[1], &["*:rw"])];
        let one = [host("db1", &[1], &["a:ro", "*:rw"])];
        assert_eq!(rights(&narrowed(&all, &one)[0]), ["*:rw", "a:ro"]);
        assert_eq!((losers(&all, &one), losers(&one, &all)), (vec!["db1".to_owned()], Vec::new()));
        let named = [host("db1", &[1], &["a:rw", "*:rw"])];
        assert_eq!(losers(&all, &named), [""; 0], "it may do the same");
    }
}
