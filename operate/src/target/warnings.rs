//! [`warnings`]: the present faults of a target, for people. Pure: `status`, the live page and JSON
//! have the same lines.

use std::time::Duration;

use crate::figures;
use nix::errno::Errno;

use crate::target::status::{
    DeviceStatus, ListenerStatus, TargetStatus, UnsavedStatus, VolumeStatus,
};
use crate::target::store_room::{ThinFile, shortages};

/// How long after its last error a store is reported.
const STORE_ERRORS_TIME: Duration = Duration::from_secs(600);

/// The present faults, a sentence each.
#[must_use]
pub fn warnings(status: &TargetStatus) -> Vec<String> {
    let mut warnings = Vec::new();
    if status.insecure {
        warnings.push(
            "insecure: any host that reaches an address can read, write and take over".to_owned(),
        );
    }
    for listener in &status.listen_down {
        let ListenerStatus { address, down_s, why, .. } = listener;
        let since = figures::duration(Duration::from_secs(*down_s));
        warnings.push(format!("no host can connect by {address}, for {since}: {why}"));
    }
    warnings.extend(status.devices.iter().filter_map(without_link));
    warnings.extend(faults_of_target(status));
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
    warnings.extend(store_errors(volume));
    if let Some(holder) = volume.holder.as_ref().filter(|holder| !holder.present) {
        warnings.push(format!("{name}: its holder {} is away", holder.host));
    }
}

/// The faults of a target beyond the volumes that it serves: a state directory with a fault,
/// volumes that no target of its group serves.
#[must_use]
pub fn faults_of_target(status: &TargetStatus) -> Vec<String> {
    let away = status.volumes_away.iter().filter(|away| !away.elsewhere);
    status.state_dir_fault.iter().cloned().chain(away.map(ToString::to_string)).collect()
}

/// The errors of a store, for a while after the last one. `-v` and the metrics count all.
fn store_errors(volume: &VolumeStatus) -> Option<String> {
    let (name, errors) = (&volume.name, volume.counts.store_errors);
    let last = volume.last_errno.map(|errno| format!("{:?}", Errno::from_raw(errno)));
    // A target of an older version reports no time.
    let age = match volume.last_error_age_s.map(Duration::from_secs) {
        Some(age) if age > STORE_ERRORS_TIME => return None,
        Some(age) => format!(" {} ago", figures::duration(age)),
        None => String::new(),
    };
    let last = last.map(|last| format!(", last {last}{age}")).unwrap_or_default();
    (errors > 0).then(|| format!("{name}: {errors} store errors{last}"))
}

/// The fault of the file or device of a volume.
#[must_use]
pub fn store_fault(volume: &VolumeStatus) -> Option<String> {
    volume.store_fault.as_ref().map(|fault| format!("{}: {fault}", volume.name))
}

/// The data that a store refuses while the target stops.
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

/// The warning about an RDMA device without a linked port. A card may have a port that is not in
/// use.
fn without_link(device: &DeviceStatus) -> Option<String> {
    // Over TCP a target needs only the interface in use.
    if !device.is_rdma() || device.ports.is_empty() || device.ports.iter().any(|port| port.is_up())
    {
        return None;
    }
    let port = |port: &crate::target::status::PortStatus| format!("{} {}", port.name, port.state);
    let ports: Vec<String> = device.ports.iter().map(port).collect();
    Some(format!("no port of {} has a link: {}", device.name, ports.join(", ")))
}
