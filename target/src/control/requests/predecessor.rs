//! [`Predecessor`]: a running program, as the next one has to follow it, and all checks before one
//! does. Nothing changes meanwhile.
//!
//! A start binds, opens and reads. The new program reports its own plan for that, and the parts
//! that it would do anew are tried here. The parts that it would inherit are compared with the open
//! files: a program that is killed in its start leaves only the files at the paths.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::{AccessFlags, eaccess};
use rblk_config::{HostConfig, TargetConfig};
use rblk_fabric::{DeviceCaps, Transport};
use rblk_operate::said_once;

use super::remembered::Remembered;
use crate::control::hand_over::{Checked, ask_program, can_hand_over, judge};
use crate::memory::demand::{GivenBack, HostMemory};
use crate::store::at_path::AtPath;
use crate::store::{Backing, OpenStore};

/// A running program. See the module.
#[derive(Debug)]
pub(crate) struct Predecessor {
    /// The volumes and addresses that it serves.
    pub(in crate::control) serves: Checked,
    /// Its running configuration.
    pub(in crate::control) running: TargetConfig,
    /// The memory that it gives back.
    pub(in crate::control) gives_back: GivenBack,
    /// The devices that it serves by.
    pub(in crate::control) devices: Vec<DeviceCaps>,
    /// Its stores, by volume.
    pub(in crate::control) stores: Vec<(String, OpenStore)>,
    /// The records that the state directory must hold.
    pub(in crate::control) remembered: Remembered,
    /// The upgrade is forced: data may be lost.
    pub(in crate::control) forced: bool,
}

/// A program that may take over, and the facts behind that judgement.
#[derive(Debug)]
pub(crate) struct Agreed {
    /// The program.
    pub(in crate::control) program: PathBuf,
    /// The configuration, in TOML, that it would start with by its own report.
    pub(in crate::control) config: Option<String>,
    /// The hosts that were allowed when it was asked.
    pub(in crate::control) hosts: Vec<HostConfig>,
}

impl Predecessor {
    /// The volumes that are written back before the upgrade.
    pub(in crate::control) fn volumes_on_stores(&self) -> Vec<String> {
        self.stores.iter().map(|(volume, _)| volume.clone()).collect()
    }

    /// Asks a program whether it can follow. Blocks, for as long as file systems do.
    ///
    /// # Errors
    /// The program cannot follow, or a start would miss something that this one has; and why.
    pub(in crate::control) fn may_be_followed_by(self, program: &Path) -> Result<Agreed, String> {
        can_hand_over().map_err(|error| format!("this program cannot hand over: {error}"))?;
        self.can_go_on()?;
        if !self.forced {
            self.remembered.is_on_disk()?;
            self.stores.iter().try_for_each(|(volume, store)| would_be_found(volume, store))?;
        }
        let checked = ask_program(program)?;
        let fault = |error: String| format!("{}: {error}", program.display());
        judge(&self.serves, &checked).map_err(fault)?;
        can_bind(&self.serves, &checked).map_err(fault)?;
        serves_by(&self.devices, checked.devices.as_deref()).map_err(fault)?;
        if let Some(demand) = &checked.demand {
            let follows = demand.follows(self.gives_back, &HostMemory::read(), &self.devices);
            follows.map_err(|error| {
                fault(format!(
                    "it could not start with its configuration, even with the memory that this target gives back: \
                     {error}"
                ))
            })?;
        }
        Ok(Agreed {
            program: program.to_owned(),
            config: checked.config,
            hosts: self.running.hosts,
        })
    }

    /// Whether this program could start again, if the other one could not.
    fn can_go_on(&self) -> Result<(), String> {
        let running = self.running.dump().and_then(|text| TargetConfig::parse(&text, "running"));
        let fault = |error: String| {
            format!("this program could not start again, if the other one could not: {error}")
        };
        running.map_err(|error| fault(error.to_string()))?;
        self.running.secret_keys().map(drop).map_err(|error| fault(said_once(&error)))
    }
}

/// Whether a start would find an open store unchanged.
fn would_be_found(volume: &str, store: &OpenStore) -> Result<(), String> {
    match store {
        OpenStore::Local(backing) => is_at_its_path(volume, backing),
        OpenStore::Image(image) => match image.look() {
            None => Ok(()),
            Some(fault) => Err(format!("volume `{volume}`: {fault}. A start could not open it")),
        },
    }
}

/// Whether a start would find an open file or device at its path, unchanged.
fn is_at_its_path(volume: &str, backing: &Backing) -> Result<(), String> {
    let fault = |what: String| {
        format!(
            "volume `{volume}`: {what}. A start would not find it as it is served. Mend it, or use --force, which \
             serves on from the open one"
        )
    };
    let there = AtPath::look(backing);
    if there != AtPath::Same {
        return Err(fault(there.describe(backing)));
    }
    // The rights of this process now, not those of the open file.
    let (rights, access) = match backing.read_only() {
        true => (AccessFlags::R_OK, "read"),
        false => (AccessFlags::R_OK | AccessFlags::W_OK, "read and write"),
    };
    match eaccess(backing.path(), rights) {
        Err(Errno::EACCES | Errno::EPERM) => Err(fault(format!(
            "the user of this target may not open {} any more ({access})",
            backing.path().display()
        ))),
        _ => Ok(()),
    }
}

/// Whether the other program's addresses are free, save those that it takes over from this one.
fn can_bind(served: &Checked, checked: &Checked) -> Result<(), String> {
    match checked.http {
        Some(address) if served.http != checked.http => {
            TcpListener::bind(address).map(drop).map_err(|error| {
                format!(
                    "it could not listen on http = \"{address}\": {error} (another program may use the port)"
                )
            })
        }
        _ => Ok(()),
    }
}

/// Whether the other program would serve by the devices that mounts come by.
fn serves_by(devices: &[DeviceCaps], allowed: Option<&[String]>) -> Result<(), String> {
    let is_rdma =
        |caps: &&DeviceCaps| !matches!(caps.transport, Transport::SoftTcp | Transport::SoftMemory);
    let is_refused =
        |caps: &&DeviceCaps| allowed.is_some_and(|allowed| !allowed.contains(&caps.name));
    devices.iter().filter(is_rdma).find(is_refused).map_or(Ok(()), |caps| {
        Err(format!(
            "its `devices` would not name {}, by which mounts come back: change the key with a drain and a start",
            caps.name
        ))
    })
}

#[cfg(test)]
mod tests {
    use rblk_fabric::{Device, soft};

    use super::*;

    #[test]
    fn devices_of_mounts_must_stay_in_use() {
        let tcp = Device::Soft(soft::Device::tcp()).caps().clone();
        let card =
            DeviceCaps { name: "mlx5_0".to_owned(), transport: Transport::Roce, ..tcp.clone() };
        let devices = [tcp, card];
        let named = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(serves_by(&devices, None), Ok(()));
        assert_eq!(serves_by(&devices, Some(&named(&["mlx5_0", "mlx5_1"]))), Ok(()));
        let error = serves_by(&devices, Some(&named(&["mlx5_1"]))).unwrap_err();
        assert!(error.contains("would not name mlx5_0"), "{error}");
        assert_eq!(serves_by(&devices[..1], Some(&named(&["mlx5_1"]))), Ok(()), "over TCP");
    }
}
