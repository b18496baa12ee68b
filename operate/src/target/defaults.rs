//! What a target takes where its configuration says nothing.

use rblk_config::TargetConfig;
use rblk_protocol::Name;

/// The warning of a target without hosts.
pub const NO_HOST: &str = "no host may connect yet; `rblk-target host add` lets one in";
/// The warning of a target without volumes.
pub const NO_VOLUME: &str = "there is no volume yet; `rblk-target volume add` adds one";

/// Half of the CPUs. Interrupts, the fabric's own threads and the stores need the others. With
/// fewer poll groups, fewer requests belong to the shard of another poll group.
pub fn default_poll_groups() -> usize {
    std::thread::available_parallelism().map_or(1, |cpus| (cpus.get() / 2).clamp(1, 4))
}

/// The poll groups of a configuration, or their default.
pub fn poll_groups(config: &TargetConfig) -> usize {
    config.poll_groups.map_or_else(default_poll_groups, usize::from)
}

/// The name of a target: from the configuration, or made of the host's name.
pub fn target_name(config: &TargetConfig) -> anyhow::Result<Name> {
    if let Some(name) = &config.name {
        return Ok(Name::new(name)?);
    }
    let host = nix::unistd::gethostname().ok().and_then(|h| h.into_string().ok());
    Ok(name_of(&host.unwrap_or_default()))
}

/// A name made of a host's name. The kernel reports `(none)` for a host without a name.
fn name_of(host: &str) -> Name {
    let clean: String = host
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' })
        .take(64)
        .collect();
    Some(clean)
        .filter(|_| host != "(none)")
        .and_then(|clean| Name::new(&clean).ok())
        .or_else(|| Name::new("target").ok())
        .unwrap_or_else(|| unreachable!("a fixed name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_name_is_a_target_with_one() {
        for (host, name) in
            [("store1", "store1"), ("a.b", "a_b"), ("(none)", "target"), ("", "target")]
        {
            assert_eq!(name_of(host).as_str(), name, "{host:?}");
        }
    }
}
