//! [`warnings`]: what is wrong with a target now, for people. Pure: `status`, the live page and
//! JSON have the same lines.

use std::time::Duration;

use nix::errno::Errno;
use rblk_config::figures;

use crate::control::status::{
    AwayStatus, DeviceStatus, ListenerStatus, TargetStatus, UnsavedStatus, VolumeStatus,
};
use crate::store::room::{ThinFile, shortages};

/// What is wrong now, a sentence each.
#[must_use]
pub fn warnings(status: &TargetStatus) -> Vec<String> {
    let mut warnings = Vec::new();
    if status.insecure {
        warnings.push(
            "insecure: everybody who reaches an address can read, write and take over".to_owned(),
        );
    }
    for listener in &status.listen_down {
        let ListenerStatus { address, down_s, why, .. } = listener;
        let since = figures::duration(Duration::from_secs(*down_s));
        warnings.push(format!("nobody can connect by {address}, for {since}: {why}"));
    }
    warnings.extend(status.devices.iter().filter_map(without_link));
    if let Some(fault) = &status.state_dir_fault {
        warnings.push(fault.clone());
    }
    for AwayStatus { name, why } in &status.volumes_away {
        warnings.push(format!(
            "volume `{name}` is not served: {why}. Then `rblk-target reload` adds it"
        ));
    }
    warnings.extend(shortages(status.volumes.iter().filter_map(thin_file)));
    status.volumes.iter().for_each(|volume| of_volume(volume, &mut warnings));
    warnings.extend(status.drain.iter().flat_map(|drain| &drain.unsaved).map(refused));
    for session in status.sessions.iter().filter(|session| session.fenced) {
        warnings.push(format!("the session of {} is fenced", session.host));
    }
    warnings
}

fn of_volume(volume: &VolumeStatus, warnings: &mut Vec<String>) {
    let (name, counts) = (&volume.name, &volume.counts);
    warnings.extend(store_fault(volume));
    if counts.failed_blocks > 0 {
        let blocks = counts.failed_blocks;
        warnings.push(format!(
            "{name}: {blocks} dirty blocks could not be written, and every FLUSH fails until they are"
        ));
    }
    if counts.store_errors > 0 {
        let age = volume.last_error_age_s.map_or_else(String::new, |age| {
            format!(" {} ago", figures::duration(Duration::from_secs(age)))
        });
        let last = volume
            .last_errno
            .map_or_else(String::new, |errno| format!(", last {:?}{age}", Errno::from_raw(errno)));
        warnings.push(format!("{name}: {} store errors{last}", counts.store_errors));
    }
    if let Some(holder) = volume.holder.as_ref().filter(|holder| !holder.present) {
        warnings.push(format!("{name}: its holder {} is away", holder.host));
    }
}

/// What is wrong with the file or device of a volume.
#[must_use]
pub fn store_fault(volume: &VolumeStatus) -> Option<String> {
    volume.store_fault.as_ref().map(|fault| format!("{}: {fault}", volume.name))
}

/// What a store refuses while the target stops.
#[must_use]
pub fn refused(unsaved: &UnsavedStatus) -> String {
    format!(
        "not in its store yet, and tried again: {unsaved}; it is lost if the store does not take it in time"
    )
}

/// The file of a volume, if hosts may fill it.
fn thin_file(volume: &VolumeStatus) -> Option<ThinFile<'_>> {
    let room = volume.room.as_ref().filter(|_| !volume.read_only)?;
    Some((&volume.name, volume.notes.path.as_deref()?, room))
}

/// What is said of an RDMA device that has no port with a link. A card may have a port that nobody
/// uses.
fn without_link(device: &DeviceStatus) -> Option<String> {
    // Over TCP a target needs no interface but the one that is used.
    if !device.is_rdma() || device.ports.is_empty() || device.ports.iter().any(|port| port.is_up())
    {
        return None;
    }
    let port = |port: &crate::control::status::PortStatus| format!("{} {}", port.name, port.state);
    let ports: Vec<String> = device.ports.iter().map(port).collect();
    Some(format!("no port of {} has a link: {}", device.name, ports.join(", ")))
}
