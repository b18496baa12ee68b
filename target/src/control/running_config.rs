//! [`RunningConfig`]: the configuration that the target runs with: that of the start, with every
//! change since.

use std::time::Instant;

use rblk_config::{Auth, CacheMode, HostConfig, TargetConfig, VolumeConfig, named_in_rights};
use rblk_operate::target::ask::LimitsWish;
use rblk_operate::target::refusal::Refusal;

use super::core::{Core, Hosts};
use super::requests::reread::Reading;

/// See the module.
#[derive(Debug)]
pub(super) struct RunningConfig {
    config: TargetConfig,
    // The reading of the files that the hosts in force came from.
    hosts_of: Reading,
}

impl RunningConfig {
    /// The configuration of the start.
    pub(super) fn new(config: TargetConfig) -> Self {
        Self { config, hosts_of: Reading::default() }
    }

    /// The configuration.
    pub(super) fn get(&self) -> &TargetConfig {
        &self.config
    }

    /// The configuration, for tests that begin with another one.
    #[cfg(test)]
    pub(super) fn get_mut(&mut self) -> &mut TargetConfig {
        &mut self.config
    }

    /// The entry of a volume.
    ///
    /// # Errors
    /// The text for the client: there is no such volume.
    pub(super) fn volume(&self, name: &str) -> Result<&VolumeConfig, String> {
        self.config.volumes.iter().find(|volume| volume.name == name).ok_or_else(|| {
            format!("there is no volume {name}; `rblk-target volume list` shows all")
        })
    }

    /// Whether the configuration is whole with one volume changed, added (`Some`) or removed.
    ///
    /// # Errors
    /// The text for the client.
    pub(super) fn check_volume(
        &self,
        name: &str,
        config: Option<&VolumeConfig>,
    ) -> Result<(), String> {
        if let (None, Some(rights)) = (config, named_in_rights(&self.config.hosts, name)) {
            return Err(rights);
        }
        let whole = self.with_volume(name, config);
        whole.validate().map_err(|error| of_volume(&whole, name, &error.to_string()))
    }

    /// Notes that a volume was changed, added (`Some`) or removed.
    pub(super) fn put_volume(&mut self, name: &str, config: Option<&VolumeConfig>) {
        self.config = self.with_volume(name, config);
    }

    fn with_volume(&self, name: &str, config: Option<&VolumeConfig>) -> TargetConfig {
        let mut changed = self.config.clone();
        let at = changed.volumes.iter().position(|volume| volume.name == name);
        match (at, config) {
            (Some(at), Some(config)) => changed.volumes[at] = config.clone(),
            (Some(at), None) => drop(changed.volumes.remove(at)),
            (None, Some(config)) => changed.volumes.push(config.clone()),
            (None, None) => {}
        }
        changed
    }

    /// Lets in these hosts and no others, unless those in force were read later. Returns the names
    /// of the hosts that lost sessions.
    ///
    /// # Errors
    /// Why the hosts stay as they were.
    pub(super) fn let_in_only(
        &mut self,
        hosts: &[HostConfig],
        reading: Reading,
        core: &mut Core,
    ) -> Result<Vec<String>, String> {
        if reading < self.hosts_of {
            tracing::info!(
                "the hosts were read anew meanwhile: those that were read before are not used"
            );
            return Ok(Vec::new());
        }
        let configured = hosts.to_vec();
        let hosts = Hosts::new(hosts).map_err(|error| error.to_string())?;
        self.config.hosts = configured;
        self.hosts_of = reading;
        let ended = core.set_hosts(hosts, Instant::now());
        let ended: Vec<String> = ended.iter().map(ToString::to_string).collect();
        tracing::info!(?ended, "hosts were reloaded");
        Ok(ended)
    }

    /// Changes the limits of a host among those in force now. Returns its entry.
    ///
    /// # Errors
    /// Why it stays as it was.
    pub(super) fn limit_host(
        &mut self,
        name: &str,
        limits: LimitsWish,
        core: &mut Core,
    ) -> Result<HostConfig, Refusal> {
        let (hosts, host) = limited(&self.config, name, limits)?;
        self.let_in_only(&hosts, self.hosts_of, core)?;
        Ok(host)
    }
}

/// The hosts that may log in to a running target, one of them with other limits, and the entry of
/// that one. No host loses a key or a right.
///
/// # Errors
/// Why the hosts stay as they are.
fn limited(
    running: &TargetConfig,
    name: &str,
    limits: LimitsWish,
) -> Result<(Vec<HostConfig>, HostConfig), Refusal> {
    if running.authentication() == Auth::None {
        return Err(format!(
            "authentication is off, so no host is known, and the limits of {name} have no effect: write \
             auth = \"required\" into the configuration, and restart the target"
        )
        .into());
    }
    let mut changed = running.clone();
    let host = changed.hosts.iter_mut().find(|host| host.name == name);
    let host = host.ok_or_else(|| {
        let text = format!("the running target has no host {name}; `rblk-target dump` shows all");
        Refusal::no_such_thing(text)
    })?;
    host.limits = limits.on(host.limits);
    let host = host.clone();
    changed.validate().map_err(|error| error.to_string())?;
    Ok((changed.hosts, host))
}

/// A fault of a volume in words of the command that changes it: by its name, and not by its place
/// in a file.
fn of_volume(whole: &TargetConfig, name: &str, fault: &str) -> String {
    let at = whole.volumes.iter().position(|volume| volume.name == name);
    let read_only_back = whole
        .volumes
        .iter()
        .any(|v| v.name == name && v.read_only && v.cache == Some(CacheMode::WriteBack));
    if read_only_back {
        return format!(
            "{name} is read-only then, and its cache is write-back, which is for writes: change both, \
             `rblk-target volume set {name} --read-only --cache write-through`"
        );
    }
    match at {
        Some(at) => fault.replace(&format!("volume[{at}]."), &format!("{name}: ")),
        None => fault.to_owned(),
    }
}
