//! [`review`]: the findings of a start with a configuration: stores, keys, and the resources of the
//! host.
//!
//! Contract: changes nothing, and waits for nothing. A target that runs with the same control
//! socket holds its stores and its memory; that is no fault.

use std::fs::File;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::path::Path;

use rblk_config::image::Contradiction;
use rblk_config::{Encrypt, TargetConfig, VolumeConfig};
use rblk_fabric::soft::tls::kernel_has_tls;
use rblk_fabric::{Address, Scheme};
use rblk_operate::CpuList;
use rblk_operate::doctor::{far_cpus, rdma_devices};
use rblk_operate::said_once;
use serde::Serialize;

use crate::daemon::addresses::addresses;
use crate::memory::demand::{Demand, HostMemory};
use crate::pool::image;
use crate::pool::opening::{LockWait, is_elsewhere, member_of, open_volume};
use crate::store::StoreError;
use crate::store::rbd::{CLOSE_WAIT, wait_until_closed};
use rblk_operate::target::defaults::{poll_groups, target_name};
use rblk_operate::target::status::{TargetStatus, VolumeStatus};
use rblk_operate::target::store_fault::StoreFault;
use rblk_operate::target::store_room::{StoreRoom, shortages};

/// The findings.
#[derive(Debug)]
pub struct Review {
    /// Each volume, in the order of the configuration, with its name.
    pub volumes: Vec<(String, anyhow::Result<FoundVolume>)>,
    /// Why the target might not start on this host now, though its configuration is right.
    pub warnings: Vec<String>,
}

/// A volume without a fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FoundVolume {
    /// It can be served here.
    Here(Reviewed),
    /// Another member of the group serves it: which one.
    Elsewhere(String),
}

impl FoundVolume {
    fn of(name: &str, opened: anyhow::Result<Reviewed>) -> anyhow::Result<Self> {
        match opened {
            Ok(reviewed) => Ok(Self::Here(reviewed)),
            Err(error) if is_elsewhere(&error) => Ok(Self::Elsewhere(said_once(error.as_ref()))),
            Err(error) => Err(error.context(format!("volume `{name}`"))),
        }
    }
}

/// A volume that can be served.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Reviewed {
    /// Size in blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// The process of the running target, if it serves the volume.
    pub served_by: Option<u32>,
    /// The contradiction between its image and its block size.
    pub contradiction: Option<Contradiction>,
}

/// Reads every key, opens every store of a configuration, and closes it again. `running` is the
/// target that answers at the control socket of the configuration.
///
/// # Errors
/// A fault that belongs to no volume: an address or a key file.
pub fn review(config: &TargetConfig, running: Option<&TargetStatus>) -> anyhow::Result<Review> {
    let name = target_name(config)?;
    let addresses = addresses(config)?;
    config.secret_keys()?;
    // A target in no group that opens an image of a group fences the hosts of the group.
    let member = member_of(config);
    let volumes = config.volumes.iter().enumerate().map(|(index, volume)| {
        if let Some(fault) = fault_of(volume, running) {
            let error = anyhow::anyhow!("{fault}").context(format!("volume `{}`", volume.name));
            return (volume.name.clone(), Err(error));
        }
        if let Some(served) = served_image(volume, running) {
            return (volume.name.clone(), Ok(FoundVolume::Here(served)));
        }
        let opened = open_volume(index, volume, (&name, member.as_ref()), LockWait::No);
        let reviewed = match opened {
            Ok(opened) => Ok(Reviewed {
                blocks: opened.volume.blocks.0,
                block_bytes: opened.volume.block_size.bytes(),
                served_by: None,
                contradiction: opened.contradiction,
            }),
            Err(error) => served(&error, &volume.name, running).ok_or(error),
        };
        (volume.name.clone(), FoundVolume::of(&volume.name, reviewed))
    });
    let volumes = volumes.collect();
    // A target that starts next finds the locks free.
    wait_until_closed(CLOSE_WAIT);
    let mut warnings = warnings(config, &addresses, running);
    warnings.extend(little_room(&config.volumes));
    Ok(Review { volumes, warnings })
}

/// The store fault of a volume in the running target, if it serves the volume from the same path.
fn fault_of<'a>(
    volume: &VolumeConfig,
    running: Option<&'a TargetStatus>,
) -> Option<&'a StoreFault> {
    let served = running?.volumes.iter().find(|served| served.name == volume.name)?;
    let named = volume.path.as_deref().or(volume.image.as_deref().map(Path::new));
    let is_there = served.notes.path.as_deref().map(Path::new) == named;
    served.store_fault.as_ref().filter(|_| is_there)
}

/// A volume on an image that the running target serves. An open would only find its lock.
fn served_image(volume: &VolumeConfig, running: Option<&TargetStatus>) -> Option<Reviewed> {
    let image = volume.image.as_deref()?;
    let running = running?;
    let is_it = |v: &&VolumeStatus| v.name == volume.name && v.notes.path.as_deref() == Some(image);
    let served = running.volumes.iter().find(is_it)?;
    Some(Reviewed {
        blocks: served.size_bytes / u64::from(served.block_size.max(1)),
        block_bytes: served.block_size,
        served_by: Some(running.pid),
        contradiction: None,
    })
}

/// The volume, if the running target holds its store.
fn served(error: &anyhow::Error, name: &str, running: Option<&TargetStatus>) -> Option<Reviewed> {
    let running = running?;
    let of_path = |volume: &&VolumeStatus, path: &Path| {
        volume.notes.path.as_deref().map(Path::new) == Some(path)
    };
    let path = match error.downcast_ref::<StoreError>()? {
        StoreError::Locked { path, pid, .. } if pid.is_none_or(|pid| pid == running.pid) => path,
        // The kernel does not name the owner.
        StoreError::Claimed { path } => path,
        _ => return None,
    };
    let volume = running.volumes.iter().find(|v| v.name == name && of_path(v, path))?;
    Some(Reviewed {
        blocks: volume.size_bytes / u64::from(volume.block_size.max(1)),
        block_bytes: volume.block_size,
        served_by: Some(running.pid),
        contradiction: image::look(path, volume.size_bytes, volume.block_size),
    })
}

fn warnings(
    config: &TargetConfig,
    addresses: &[Address],
    running: Option<&TargetStatus>,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut host = HostMemory::read();
    if let Some(running) = running {
        warnings.extend(running.state_dir_fault.clone());
        give_back(&mut host, running);
    }
    if let Err(error) = Demand::of(config, poll_groups(config)).check(&host) {
        warnings.push(error.to_string());
    }
    let cpus = config.cpus.as_deref().unwrap_or_default();
    warnings.extend(missing_cpus(cpus, &CpuList::online()));
    if addresses.iter().any(|address| address.scheme == Scheme::Rdma) {
        let far = far_cpus(&rdma_devices(Path::new("/")), config.devices.as_deref(), cpus);
        warnings.extend(far.into_iter().map(|far| format!("cpus: {far}")));
    }
    for address in addresses {
        let encrypted =
            address.scheme == Scheme::Tcp && config.transport.encrypt == Encrypt::Required;
        if encrypted && let Err(error) = kernel_has_tls() {
            warnings.push(format!("cannot encrypt {address} (encrypt = \"required\"): {error}"));
        }
        if running.is_none() {
            warnings.extend(cannot_listen(address));
        }
    }
    warnings
}

/// The warnings about file systems that may not hold the rest of thin files.
fn little_room(volumes: &[VolumeConfig]) -> Vec<String> {
    let room_of = |volume: &VolumeConfig| {
        // Opening a pipe would wait for a writer.
        let path = volume.path.as_deref().filter(|path| path.is_file() && !volume.read_only)?;
        let room = StoreRoom::of(&File::open(path).ok()?).ok()?;
        Some((volume.name.clone(), path.display().to_string(), room))
    };
    let rooms: Vec<_> = volumes.iter().filter_map(room_of).collect();
    shortages(rooms.iter().map(|(name, path, room)| (name.as_str(), path.as_str(), room)))
}

/// Adds the memory of the running target, which is free for its successor.
fn give_back(host: &mut HostMemory, running: &TargetStatus) {
    let in_memory = running.volumes.iter().filter(|volume| volume.store == "memory");
    let volumes: u64 = in_memory.map(|volume| volume.size_bytes).sum();
    let (mut normal, mut huge) = (volumes, 0);
    match running.arena_page_bytes {
        page if page > 4096 => huge = running.arena_bytes / page,
        _ => normal += running.arena_bytes,
    }
    host.available_bytes = host.available_bytes.map(|bytes| bytes.saturating_add(normal));
    if let Some(pool) = &mut host.huge {
        pool.free = pool.free.saturating_add(huge);
    }
}

/// The warning about CPUs that this host does not have.
fn missing_cpus(cpus: &[u16], online: &CpuList) -> Option<String> {
    let missing = online.lacks(cpus)?;
    Some(format!(
        "cpus: this host has no CPU {missing}; its CPUs are {online}. A poll group without its CPU runs anywhere"
    ))
}

/// Why this host cannot listen on an address now.
fn cannot_listen(address: &Address) -> Option<String> {
    // The port of an RDMA device is not one of TCP: only the host is looked at.
    let port = if address.scheme == Scheme::Tcp { address.port } else { 0 };
    let bind = || -> io::Result<()> {
        let mut candidates = (address.host.as_str(), port).to_socket_addrs()?;
        let first = candidates.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
        TcpListener::bind(first).map(drop)
    };
    let problem = match bind().err()?.kind() {
        io::ErrorKind::AddrInUse => "another program uses the port; see `ss -ltnp`",
        io::ErrorKind::AddrNotAvailable => {
            "it is no address of this host now; see `ip address`. The target waits 5 s for it"
        }
        _ => return None,
    };
    Some(format!("listen: {address}: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::rbd::ImageError;

    #[test]
    fn a_volume_that_another_member_serves_has_no_fault() {
        let image = || "rbd/v".to_owned();
        let (member, addresses) = ("b".to_owned(), vec!["tcp://192.0.2.2".to_owned()]);
        let elsewhere = ImageError::Elsewhere { image: image(), member, addresses, why: None };
        let found = FoundVolume::of("v", Err(StoreError::from(elsewhere).into())).unwrap();
        let FoundVolume::Elsewhere(who) = found else { panic!("{found:?}") };
        assert!(who.contains("member `b`") && who.contains("tcp://192.0.2.2"), "{who}");
        let locked = ImageError::Locked { image: image(), owner: "192.0.2.7:0/1".to_owned() };
        let error = FoundVolume::of("v", Err(StoreError::from(locked).into())).unwrap_err();
        assert!(said_once(error.as_ref()).contains("volume `v`"), "{error:#}");
    }

    #[test]
    fn missing_cpus_are_named() {
        let online = |text: &str| text.parse::<CpuList>().unwrap();
        assert_eq!(missing_cpus(&[0, 3, 8], &online("0-3,8")), None);
        assert_eq!(missing_cpus(&[900], &CpuList::default()), None, "no list could be read");
        assert_eq!(missing_cpus(&[], &online("0")), None);
        let text = missing_cpus(&[2, 900, 4], &online("0-3")).unwrap();
        assert!(text.starts_with("cpus: this host has no CPU 900, 4; its CPUs are 0-3."), "{text}");
    }

    #[test]
    fn addresses_that_cannot_be_listened_on_are_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = format!("tcp://{}", listener.local_addr().unwrap());
        let of = |text: &str| cannot_listen(&text.parse().unwrap());
        assert!(of(&taken).unwrap().contains("another program uses the port"));
        assert!(of("tcp://192.0.2.77:7721").unwrap().contains("no address of this host"));
        assert!(of("rdma://192.0.2.77").unwrap().contains("no address of this host"));
        assert_eq!(of(&taken.replace("tcp", "rdma")), None);
    }
}
