//! The metrics of a target, made of its status. Pure.
//!
//! Names and units follow Prometheus' conventions: `rblk_target_`, base units (seconds, bytes),
//! `_total` for values that only rise. Counters begin at 0 with each run of the target.

use rblk_operate::exposition::{Exposition, Kind, Labeled, Labels, Scale};

use rblk_operate::target::group_counts::StatsSnapshot;
use rblk_operate::target::status::{DeviceStatus, SessionStatus, TargetStatus, VolumeStatus};
use rblk_operate::target::store_room::StoreRoom;

/// The metrics of a target.
#[must_use]
pub fn metrics(status: &TargetStatus) -> String {
    let mut all = Exposition::default();
    of_target(&mut all, status);
    of_decisions(&mut all, status);
    of_groups(&mut all, &status.poll_groups);
    of_volumes(&mut all, &status.volumes);
    of_limits(&mut all, &status.volumes);
    let volumes = &status.volumes;
    let of_volume = |v: &VolumeStatus| vec![("volume", v.name.clone())];
    all.counters("volume", &labeled(volumes, of_volume, |v| &v.io));
    of_times(&mut all, volumes);
    of_sessions(&mut all, &status.sessions);
    // A host may have several sessions, and a counter must not fall when one of them ends. The
    // place of a session is used again, unlike its address: the number of series is bounded.
    let of_session =
        |s: &SessionStatus| vec![("host", s.host.clone()), ("session", s.place.to_string())];
    all.counters("session", &labeled(&status.sessions, of_session, |s| &s.io));
    let of_device = |d: &DeviceStatus| vec![("device", d.name.clone())];
    all.counters("device", &labeled(&status.devices, of_device, |d| &d.io));
    all.into_text()
}

/// Counters with the labels of those that have them.
fn labeled<'a, S, T>(
    all: &'a [S],
    labels: impl Fn(&S) -> Vec<(&'a str, String)>,
    counts: impl Fn(&'a S) -> &'a T,
) -> Vec<Labeled<'a, T>> {
    all.iter().map(|one| (labels(one), counts(one))).collect()
}

fn one(all: &mut Exposition, name: &'static str, help: &str, value: u64) {
    let kind = if name.ends_with("_total") { Kind::Counter } else { Kind::Gauge };
    all.family(name, kind, help).sample(&[], value);
}

fn of_target(all: &mut Exposition, status: &TargetStatus) {
    let labels: Labels<'_> = &[("target", &status.name), ("version", &status.version)];
    let help = "The target and its version; always 1.";
    all.family("rblk_target_info", Kind::Gauge, help).sample(labels, 1);
    let help = "Time since the start.";
    one(all, "rblk_target_uptime_seconds", help, status.uptime_s);
    let help = "1 while the target stops, else 0.";
    one(all, "rblk_target_draining", help, u64::from(status.draining));
    let help = "1 if hosts need no key and other hosts reach the target, else 0.";
    one(all, "rblk_target_insecure", help, u64::from(status.insecure));
    let help = "1 if state_dir cannot be written, else 0.";
    one(all, "rblk_target_state_dir_fault", help, u64::from(status.state_dir_fault.is_some()));
    one(all, "rblk_target_arena_bytes", "Size of the arena.", status.arena_bytes);
    let help = "1 if the target listens at the address, 0 while it cannot.";
    let mut listeners = all.family("rblk_target_listener_up", Kind::Gauge, help);
    for address in &status.listen {
        let is_down = status.listen_down.iter().any(|down| down.address == *address);
        listeners.sample(&[("address", address)], u64::from(!is_down));
    }
    let help = "1 if the port of the RDMA device has a link, else 0.";
    let mut ports = all.family("rblk_target_device_port_up", Kind::Gauge, help);
    for device in status.devices.iter().filter(|device| device.is_rdma()) {
        for port in &device.ports {
            let labels: Labels<'_> = &[("device", &device.name), ("port", &port.name)];
            ports.sample(labels, u64::from(port.is_up()));
        }
    }
    let mut devices = all.family("rblk_target_device_info", Kind::Gauge, "The devices; always 1.");
    for device in &status.devices {
        devices.sample(&[("device", &device.name), ("transport", &device.transport)], 1);
    }
}

fn of_decisions(all: &mut Exposition, status: &TargetStatus) {
    let help = "Times a host lost a volume to another host.";
    one(all, "rblk_target_fencings_total", help, status.fencings);
    let help = "How many of these were take-overs.";
    one(all, "rblk_target_take_overs_total", help, status.take_overs);
    let help = "Initiators that did not prove their key.";
    one(all, "rblk_target_unproven_total", help, status.unproven);
    let strangers = u64::try_from(status.strangers).unwrap_or(u64::MAX);
    one(all, "rblk_target_strangers", "Connections that have not logged in.", strangers);
    let mut events = all.family("rblk_target_events_total", Kind::Counter, "Events, by kind.");
    for count in &status.events {
        events.sample(&[("kind", count.kind.word())], count.total);
    }
}

fn of_groups(all: &mut Exposition, groups: &[StatsSnapshot]) {
    let groups = groups.iter().enumerate();
    let all_groups: Vec<Labeled<'_, _>> =
        groups.map(|(index, counts)| (vec![("poll_group", index.to_string())], counts)).collect();
    all.counters("", &all_groups);
}

fn of_volumes(all: &mut Exposition, volumes: &[VolumeStatus]) {
    let help = "The volumes; always 1.";
    let mut family = all.family("rblk_target_volume_info", Kind::Gauge, help);
    for v in volumes {
        let access = if v.read_only { "ro" } else { "rw" };
        let cache = v.cache.to_string();
        let labels: Labels<'_> =
            &[("volume", &v.name), ("store", &v.store), ("cache", &cache), ("access", access)];
        family.sample(labels, 1);
    }
    let mut family =
        all.family("rblk_target_volume_size_bytes", Kind::Gauge, "Size of the volume.");
    for v in volumes {
        family.sample(&[("volume", &v.name)], v.size_bytes);
    }
    let help = "1 if a session has the volume open, else 0.";
    let mut family = all.family("rblk_target_volume_in_use", Kind::Gauge, help);
    for v in volumes {
        family.sample(&[("volume", &v.name)], u64::from(v.in_use));
    }
    let help = "1 if the path no longer leads to the file or device that is served, or the image does not answer, else 0.";
    let mut family = all.family("rblk_target_volume_store_fault", Kind::Gauge, help);
    for v in volumes.iter().filter(|v| v.has_store()) {
        family.sample(&[("volume", &v.name)], u64::from(v.store_fault.is_some()));
    }
    of_rooms(all, volumes);
    let help = "For how long the oldest dirty block has been dirty; 0: nothing is.";
    let mut family = all.family("rblk_target_volume_dirty_age_seconds", Kind::Gauge, help);
    for v in volumes.iter().filter(|v| v.store == "file") {
        family.sample(&[("volume", &v.name)], v.dirty_age_s.unwrap_or(0));
    }
    let help = "The host that may write: 1 if it has a session, 0 if it may come back.";
    let mut family = all.family("rblk_target_volume_holder", Kind::Gauge, help);
    for (v, holder) in volumes.iter().filter_map(|v| Some((v, v.holder.as_ref()?))) {
        family.sample(&[("volume", &v.name), ("host", &holder.host)], u64::from(holder.present));
    }
    all.counters("", &labeled(volumes, |v| vec![("volume", v.name.clone())], |v| &v.counts));
    let help = "Bytes of the cache that the volume keeps when others need memory.";
    let mut family = all.family("rblk_target_volume_cache_min_bytes", Kind::Gauge, help);
    for v in volumes.iter().filter(|v| v.cache_min_bytes > 0) {
        family.sample(&[("volume", &v.name)], v.cache_min_bytes);
    }
    let help = "Most bytes of the cache that the volume has.";
    let mut family = all.family("rblk_target_volume_cache_max_bytes", Kind::Gauge, help);
    for (v, max) in volumes.iter().filter_map(|v| Some((v, v.cache_max_bytes?))) {
        family.sample(&[("volume", &v.name)], max);
    }
}

/// A metric of the space of a file.
type OfRoom = (&'static str, &'static str, fn(&StoreRoom) -> u64);

/// The space of files and of their file systems.
fn of_rooms(all: &mut Exposition, volumes: &[VolumeStatus]) {
    let rooms: [OfRoom; 3] = [
        (
            "rblk_target_volume_file_system_free_bytes",
            "Free bytes of the file system of the file.",
            |room| room.free_bytes,
        ),
        ("rblk_target_volume_file_system_bytes", "Size of the file system of the file.", |room| {
            room.total_bytes
        }),
        (
            "rblk_target_volume_unallocated_bytes",
            "Bytes of the file that have no space yet: a thin file takes space as hosts write.",
            |room| room.unallocated_bytes,
        ),
    ];
    for (name, help, value) in rooms {
        let mut family = all.family(name, Kind::Gauge, help);
        for (v, room) in volumes.iter().filter_map(|v| Some((v, v.room.as_ref()?))) {
            family.sample(&[("volume", &v.name)], value(room));
        }
    }
}

/// Limits, and the commands that waited for them. A volume without a limit has no sample of it.
fn of_limits(all: &mut Exposition, volumes: &[VolumeStatus]) {
    all.counters("", &labeled(volumes, |v| vec![("volume", v.name.clone())], |v| &v.delays));
    let help = "Most block commands of the volume in a second.";
    let mut family = all.family("rblk_target_volume_limit_commands", Kind::Gauge, help);
    for (v, iops) in volumes.iter().filter_map(|v| Some((v, v.limits.iops?))) {
        family.sample(&[("volume", &v.name)], iops);
    }
    let help = "Most bytes of the volume in a second.";
    let mut family = all.family("rblk_target_volume_limit_bytes", Kind::Gauge, help);
    for (v, rate) in volumes.iter().filter_map(|v| Some((v, v.limits.bandwidth?))) {
        family.sample(&[("volume", &v.name)], rate.0);
    }
}

fn of_times(all: &mut Exposition, volumes: &[VolumeStatus]) {
    let help = "Time from the arrival of a command to its answer.";
    let mut family = all.family("rblk_target_volume_latency_seconds", Kind::Histogram, help);
    for v in volumes {
        for (op, times) in v.latency.kinds() {
            family.latency(&[("volume", &v.name), ("op", op)], &times.total, Scale::Fine);
        }
    }
    let help = "Time of commands by stage: queue, data, cache, store, answer. The stages add up.";
    let mut family = all.family("rblk_target_volume_stage_seconds", Kind::Histogram, help);
    for v in volumes {
        for (op, times) in v.latency.kinds() {
            for (stage, counts) in times.stages() {
                let labels: Labels<'_> = &[("volume", &v.name), ("op", op), ("stage", stage)];
                family.latency(labels, counts, Scale::Coarse);
            }
        }
    }
}

/// Sessions together by host: a host that comes and goes is one series, not one for each session.
fn of_sessions(all: &mut Exposition, sessions: &[SessionStatus]) {
    let mut hosts: Vec<(&str, u64, u64)> = Vec::new();
    for session in sessions {
        let connections = u64::try_from(session.connections).unwrap_or(u64::MAX);
        match hosts.iter_mut().find(|(host, ..)| *host == session.host) {
            Some((_, count, all)) => (*count, *all) = (*count + 1, all.saturating_add(connections)),
            None => hosts.push((&session.host, 1, connections)),
        }
    }
    let mut family = all.family("rblk_target_sessions", Kind::Gauge, "Sessions, by host.");
    for (host, sessions, _) in &hosts {
        family.sample(&[("host", host)], sessions);
    }
    let help = "Live connections, by host, admin included.";
    let mut family = all.family("rblk_target_connections", Kind::Gauge, help);
    for (host, _, connections) in &hosts {
        family.sample(&[("host", host)], connections);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rblk_operate::target::traffic::IoCounts;
    use rblk_operate::target::volume_counts::VolumeCounts;
    use rblk_runtime::Described;
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use super::*;

    /// Counters with distinct values, by name.
    fn distinct<T: Serialize + DeserializeOwned + Default>() -> (T, BTreeMap<String, u64>) {
        let json = serde_json::to_value(T::default()).unwrap();
        let names = json.as_object().unwrap().keys().cloned();
        let numbers: BTreeMap<String, u64> = names.zip(1_000_001..).collect();
        (serde_json::from_value(serde_json::to_value(&numbers).unwrap()).unwrap(), numbers)
    }

    /// Each counter of a `T` has one sample with its value.
    fn each_has_one_sample<T: Described + Serialize + DeserializeOwned + Default>() {
        let (counts, numbers) = distinct::<T>();
        let mut all = Exposition::default();
        all.counters("volume", &[(Vec::new(), &counts)]);
        let text = all.into_text();
        for (name, number) in numbers {
            let lines = text.lines().filter(|line| line.ends_with(&format!(" {number}"))).count();
            assert_eq!(lines, 1, "{name}\n{text}");
        }
    }

    /// A counter without a metric fails here.
    #[test]
    fn every_counter_has_one_metric() {
        each_has_one_sample::<StatsSnapshot>();
        each_has_one_sample::<VolumeCounts>();
        each_has_one_sample::<IoCounts>();
    }
}
