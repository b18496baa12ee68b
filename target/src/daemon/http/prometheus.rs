//! The metrics of a target, made of its status. Pure.
//!
//! Names and units follow Prometheus' conventions: `rblk_target_`, base units (seconds, bytes),
//! `_total` for values that only rise. Counters begin at 0 with each run of the target.

use rblk_operate::exposition::{Exposition, Kind, Labels, Scale};

use rblk_operate::target::group_counts::StatsSnapshot;
use rblk_operate::target::status::{DeviceStatus, SessionStatus, TargetStatus, VolumeStatus};
use rblk_operate::target::store_room::StoreRoom;
use rblk_operate::target::traffic::IoCounts;
use rblk_operate::target::volume_counts::VolumeCounts;

/// A counter of a poll group: the name of its metric, its help, and its value.
type OfGroup = (&'static str, Kind, &'static str, fn(&StatsSnapshot) -> u64);

/// Every counter of a poll group. The answered commands have one metric with a label instead.
const GROUPS: &[OfGroup] = &[
    ("rblk_target_failed_commands_total", Kind::Counter, "Commands answered with an error.", |s| {
        s.failed_commands
    }),
    (
        "rblk_target_fenced_commands_total",
        Kind::Counter,
        "Commands refused as their host lost the volume, or came by an older epoch.",
        |s| s.fenced_commands,
    ),
    ("rblk_target_read_bytes_total", Kind::Counter, "Bytes sent for READs.", |s| s.read_bytes),
    ("rblk_target_written_bytes_total", Kind::Counter, "Bytes taken by WRITEs.", |s| {
        s.written_bytes
    }),
    (
        "rblk_target_in_capsule_writes_total",
        Kind::Counter,
        "Writes whose data came inside the command.",
        |s| s.in_capsule_writes,
    ),
    (
        "rblk_target_copied_bytes_total",
        Kind::Counter,
        "Bytes that the CPU copied between buffers.",
        |s| s.copied_bytes,
    ),
    (
        "rblk_target_merged_bytes_total",
        Kind::Counter,
        "Bytes copied for writes of parts of a cached block.",
        |s| s.merged_bytes,
    ),
    (
        "rblk_target_protocol_errors_total",
        Kind::Counter,
        "Connections ended because the peer broke a rule.",
        |s| s.protocol_errors,
    ),
    (
        "rblk_target_failed_proofs_total",
        Kind::Counter,
        "I/O connections that did not prove that they are of their session.",
        |s| s.failed_proofs,
    ),
    (
        "rblk_target_digest_mismatches_total",
        Kind::Counter,
        "Commands and data that were changed on the way.",
        |s| s.digest_mismatches,
    ),
    (
        "rblk_target_lost_connections_total",
        Kind::Counter,
        "Connections whose path failed or whose initiator went silent.",
        |s| s.lost_connections,
    ),
    (
        "rblk_target_stale_rdma_blocked_total",
        Kind::Counter,
        "RDMA operations that the initiator's device refused.",
        |s| s.stale_rdma_blocked,
    ),
    (
        "rblk_target_memory_waits_total",
        Kind::Counter,
        "Requests that waited for memory of the arena.",
        |s| s.memory_waits,
    ),
    (
        "rblk_target_range_waits_total",
        Kind::Counter,
        "Requests that waited for others on the same blocks.",
        |s| s.range_waits,
    ),
    (
        "rblk_target_cache_hits_total",
        Kind::Counter,
        "Blocks of 4 KiB that reads found in the cache.",
        |s| s.cache_hits,
    ),
    (
        "rblk_target_cache_misses_total",
        Kind::Counter,
        "Blocks of 4 KiB that reads did not find.",
        |s| s.cache_misses,
    ),
    (
        "rblk_target_cache_prefetched_blocks_total",
        Kind::Counter,
        "Blocks of 4 KiB read ahead of sequential readers.",
        |s| s.cache_prefetched,
    ),
    (
        "rblk_target_cache_evictions_total",
        Kind::Counter,
        "Blocks of 4 KiB that left the cache to make room.",
        |s| s.cache_evictions,
    ),
    (
        "rblk_target_cache_moved_blocks_total",
        Kind::Counter,
        "Blocks of 4 KiB copied to other memory of the cache, so that large requests find runs.",
        |s| s.cache_moved,
    ),
    (
        "rblk_target_cache_fill_bytes_total",
        Kind::Counter,
        "Bytes read from the stores of cached volumes.",
        |s| s.fill_bytes,
    ),
    (
        "rblk_target_write_backs_total",
        Kind::Counter,
        "Store operations that wrote dirty blocks.",
        |s| s.write_backs,
    ),
    ("rblk_target_write_back_bytes_total", Kind::Counter, "Bytes written by write-backs.", |s| {
        s.write_back_bytes
    }),
    (
        "rblk_target_dirty_limited_writes_total",
        Kind::Counter,
        "Writes that found no room for dirty blocks and went to the store.",
        |s| s.dirty_limited,
    ),
    ("rblk_target_store_errors_total", Kind::Counter, "Operations that a store failed.", |s| {
        s.store_errors
    }),
    ("rblk_target_arena_free_bytes", Kind::Gauge, "Bytes of the arena that hold nothing.", |s| {
        s.arena_free_bytes
    }),
    ("rblk_target_cached_bytes", Kind::Gauge, "Bytes in the cache.", |s| s.cached_bytes),
    ("rblk_target_dirty_bytes", Kind::Gauge, "Acknowledged bytes that are in memory only.", |s| {
        s.dirty_bytes
    }),
    ("rblk_target_dirty_limit_bytes", Kind::Gauge, "The limit of the dirty bytes.", |s| {
        s.dirty_max_bytes
    }),
    ("rblk_target_lent_slots", Kind::Gauge, "Slots of the cache that are lent for sending.", |s| {
        s.lent_slots
    }),
    (
        "rblk_target_landing_slots",
        Kind::Gauge,
        "Slots of the cache that are set apart for the data of small writes.",
        |s| s.landing_slots,
    ),
    ("rblk_target_peer_messages_total", Kind::Counter, "Messages to other poll groups.", |s| {
        s.peer_messages
    }),
    (
        "rblk_target_read_credit_waits_total",
        Kind::Counter,
        "Commands that waited for a READ credit.",
        |s| s.read_credit_waits,
    ),
    (
        "rblk_target_send_credit_waits_total",
        Kind::Counter,
        "Commands that waited for a place in the send queue.",
        |s| s.send_credit_waits,
    ),
    ("rblk_target_turns_total", Kind::Counter, "Turns of the data thread.", |s| s.turns),
    ("rblk_target_sleeps_total", Kind::Counter, "Times the data thread slept.", |s| s.sleeps),
    (
        "rblk_target_yields_total",
        Kind::Counter,
        "Times the data thread yielded its CPU while it looked for work.",
        |s| s.yields,
    ),
    ("rblk_target_ring_enters_total", Kind::Counter, "Calls of io_uring_enter.", |s| s.ring_enters),
    ("rblk_target_sends_total", Kind::Counter, "SENDs posted.", |s| s.sends),
    (
        "rblk_target_rdma_writes_total",
        Kind::Counter,
        "RDMA WRITEs posted, without immediate.",
        |s| s.rdma_writes,
    ),
    (
        "rblk_target_rdma_writes_with_imm_total",
        Kind::Counter,
        "RDMA WRITE_WITH_IMMs posted: data and answer in one message.",
        |s| s.rdma_writes_with_imm,
    ),
    ("rblk_target_rdma_reads_total", Kind::Counter, "RDMA READs posted.", |s| s.rdma_reads),
    ("rblk_target_signaled_total", Kind::Counter, "Send WRs that asked for a completion.", |s| {
        s.signaled
    }),
    ("rblk_target_send_doorbells_total", Kind::Counter, "Posts of a list of send WRs.", |s| {
        s.send_doorbells
    }),
    ("rblk_target_recv_doorbells_total", Kind::Counter, "Posts of a list of RECVs.", |s| {
        s.recv_doorbells
    }),
    ("rblk_target_recvs_total", Kind::Counter, "RECVs posted.", |s| s.recvs),
    ("rblk_target_completions_total", Kind::Counter, "Completions reaped.", |s| s.completions),
    ("rblk_target_cq_arms_total", Kind::Counter, "Times a CQ was asked for an event.", |s| s.arms),
    ("rblk_target_cq_events_total", Kind::Counter, "Events of the CQs that were taken.", |s| {
        s.events
    }),
    (
        "rblk_target_link_calls_total",
        Kind::Counter,
        "Calls of the software provider into its links.",
        |s| s.link_calls,
    ),
    (
        "rblk_target_bad_records_total",
        Kind::Counter,
        "Encrypted connections that ended because a record was changed on the way.",
        |s| s.bad_records,
    ),
    ("rblk_target_answer_lists_total", Kind::Counter, "SENDs that carried several answers.", |s| {
        s.lists
    }),
    ("rblk_target_listed_answers_total", Kind::Counter, "Answers in them.", |s| s.listed),
];

/// A counter of a volume in the cache.
type OfVolume = (&'static str, Kind, &'static str, fn(&VolumeCounts) -> u64);

const VOLUMES: &[OfVolume] = &[
    (
        "rblk_target_volume_cache_hits_total",
        Kind::Counter,
        "Blocks of 4 KiB that reads found in the cache.",
        |c| c.hits,
    ),
    (
        "rblk_target_volume_cache_misses_total",
        Kind::Counter,
        "Blocks of 4 KiB that reads did not find.",
        |c| c.misses,
    ),
    (
        "rblk_target_volume_cache_evictions_total",
        Kind::Counter,
        "Blocks of 4 KiB that left the cache to make room.",
        |c| c.evictions,
    ),
    (
        "rblk_target_volume_store_errors_total",
        Kind::Counter,
        "Operations that the store failed.",
        |c| c.store_errors,
    ),
    (
        "rblk_target_volume_cached_bytes",
        Kind::Gauge,
        "Bytes in the cache, dirty ones included.",
        |c| c.cached_bytes,
    ),
    (
        "rblk_target_volume_dirty_bytes",
        Kind::Gauge,
        "Acknowledged bytes that are in memory only.",
        |c| c.dirty_bytes,
    ),
    (
        "rblk_target_volume_unwritable_blocks",
        Kind::Gauge,
        "Dirty blocks of 4 KiB that the store refused last time.",
        |c| c.failed_blocks,
    ),
];

/// The names of the metrics of block commands: commands, bytes read, bytes written, errors, in
/// flight.
type OfCommands = [&'static str; 5];

const VOLUME_COMMANDS: OfCommands = [
    "rblk_target_volume_commands_total",
    "rblk_target_volume_read_bytes_total",
    "rblk_target_volume_written_bytes_total",
    "rblk_target_volume_command_errors_total",
    "rblk_target_volume_commands_in_flight",
];
const SESSION_COMMANDS: OfCommands = [
    "rblk_target_session_commands_total",
    "rblk_target_session_read_bytes_total",
    "rblk_target_session_written_bytes_total",
    "rblk_target_session_command_errors_total",
    "rblk_target_session_commands_in_flight",
];
const DEVICE_COMMANDS: OfCommands = [
    "rblk_target_device_commands_total",
    "rblk_target_device_read_bytes_total",
    "rblk_target_device_written_bytes_total",
    "rblk_target_device_command_errors_total",
    "rblk_target_device_commands_in_flight",
];

/// The metrics of a target.
#[must_use]
pub fn metrics(status: &TargetStatus) -> String {
    let mut all = Exposition::default();
    of_target(&mut all, status);
    of_decisions(&mut all, status);
    of_groups(&mut all, &status.poll_groups);
    of_volumes(&mut all, &status.volumes);
    of_limits(&mut all, &status.volumes);
    let of_volume = |v: &VolumeStatus| (vec![("volume", v.name.clone())], v.io);
    let volumes: Vec<Busy> = status.volumes.iter().map(of_volume).collect();
    of_commands(&mut all, VOLUME_COMMANDS, "the volume", &volumes);
    of_times(&mut all, &status.volumes);
    of_sessions(&mut all, &status.sessions);
    // A host may have several sessions, and a counter must not fall when one of them ends. The
    // place of a session is used again, unlike its address: the number of series is bounded.
    let labels =
        |s: &SessionStatus| vec![("host", s.host.clone()), ("session", s.place.to_string())];
    let sessions: Vec<Busy> = status.sessions.iter().map(|s| (labels(s), s.io)).collect();
    of_commands(&mut all, SESSION_COMMANDS, "the session", &sessions);
    let of_device = |d: &DeviceStatus| (vec![("device", d.name.clone())], d.io);
    let devices: Vec<Busy> = status.devices.iter().map(of_device).collect();
    of_commands(&mut all, DEVICE_COMMANDS, "the device", &devices);
    all.into_text()
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
    let help = "1 if nobody has to prove anything and other hosts reach the target, else 0.";
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
    let help = "Initiators that did not prove who they are.";
    one(all, "rblk_target_unproven_total", help, status.unproven);
    let strangers = u64::try_from(status.strangers).unwrap_or(u64::MAX);
    one(all, "rblk_target_strangers", "Connections that have not logged in.", strangers);
    let mut events = all.family("rblk_target_events_total", Kind::Counter, "Events, by kind.");
    for count in &status.events {
        events.sample(&[("kind", count.kind.word())], count.total);
    }
}

fn of_groups(all: &mut Exposition, groups: &[StatsSnapshot]) {
    let names: Vec<String> = (0..groups.len()).map(|index| index.to_string()).collect();
    let help = "Commands answered, by kind.";
    let mut family = all.family("rblk_target_commands_total", Kind::Counter, help);
    for (name, s) in names.iter().zip(groups) {
        for (op, count) in [
            ("read", s.reads),
            ("write", s.writes),
            ("flush", s.flushes),
            ("discard", s.discards),
            ("write_zeroes", s.write_zeroes),
            ("admin", s.admin_commands),
        ] {
            family.sample(&[("poll_group", name), ("op", op)], count);
        }
    }
    for (metric, kind, help, value) in GROUPS {
        let mut family = all.family(metric, *kind, help);
        for (name, stats) in names.iter().zip(groups) {
            family.sample(&[("poll_group", name)], value(stats));
        }
    }
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
    let help = "1 if the file or device is not what is served any more, else 0.";
    let mut family = all.family("rblk_target_volume_store_fault", Kind::Gauge, help);
    for v in volumes.iter().filter(|v| v.store == "file") {
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
    for (metric, kind, help, value) in VOLUMES {
        let mut family = all.family(metric, *kind, help);
        for v in volumes {
            family.sample(&[("volume", &v.name)], value(&v.counts));
        }
    }
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
    let help = "Block commands that had to wait for a limit of the volume or of their host.";
    let mut family = all.family("rblk_target_volume_delayed_commands_total", Kind::Counter, help);
    for v in volumes {
        family.sample(&[("volume", &v.name)], v.delays.commands);
    }
    let help = "Time that block commands waited for a limit of the volume or of their host.";
    let mut family = all.family("rblk_target_volume_delay_seconds_total", Kind::Counter, help);
    for v in volumes {
        // Exact up to 2^53 microseconds.
        family.sample(&[("volume", &v.name)], v.delays.waited_us as f64 / 1e6);
    }
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

/// A counter of block commands: the name of its metric, its words for the help, and its value.
type OfIo = (&'static str, &'static str, fn(&IoCounts) -> u64);

/// The labels and the counters of a volume, a session or a device.
type Busy = (Vec<(&'static str, String)>, IoCounts);

fn of_commands(all: &mut Exposition, names: OfCommands, whose: &str, busy: &[Busy]) {
    let [commands, read_bytes, written_bytes, errors, in_flight] = names;
    let help = format!("Block commands of {whose} that were answered, by kind.");
    let mut family = all.family(commands, Kind::Counter, &help);
    for (labels, io) in busy {
        for (op, count) in [
            ("read", io.reads),
            ("write", io.writes),
            ("flush", io.flushes),
            ("discard", io.discards),
            ("write_zeroes", io.write_zeroes),
        ] {
            let mut labels: Vec<(&str, &str)> = borrowed(labels);
            labels.push(("op", op));
            family.sample(&labels, count);
        }
    }
    let others: [OfIo; 4] = [
        (read_bytes, "Bytes read from", |io| io.read_bytes),
        (written_bytes, "Bytes written to", |io| io.written_bytes),
        (errors, "Block commands answered with an error, of", |io| io.errors),
        (in_flight, "Block commands that are not answered, of", |io| io.in_flight),
    ];
    for (name, what, value) in others {
        let kind = if name.ends_with("_total") { Kind::Counter } else { Kind::Gauge };
        let mut family = all.family(name, kind, &format!("{what} {whose}."));
        for (labels, io) in busy {
            family.sample(&borrowed(labels), value(io));
        }
    }
}

fn borrowed<'a>(labels: &'a [(&'static str, String)]) -> Vec<(&'a str, &'a str)> {
    labels.iter().map(|(name, value)| (*name, value.as_str())).collect()
}

fn of_times(all: &mut Exposition, volumes: &[VolumeStatus]) {
    let help = "Time from the arrival of a command to its answer.";
    let mut family = all.family("rblk_target_volume_latency_seconds", Kind::Histogram, help);
    for v in volumes {
        for (op, times) in v.latency.kinds() {
            family.latency(&[("volume", &v.name), ("op", op)], &times.total, Scale::Fine);
        }
    }
    let help = "What a command waited for: queue, data, cache, store, answer. The stages add up.";
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

    use super::*;

    fn distinct() -> (StatsSnapshot, BTreeMap<String, u64>) {
        let json = serde_json::to_value(StatsSnapshot::default()).unwrap();
        let names = json.as_object().unwrap().keys().cloned();
        let numbers: BTreeMap<String, u64> = names.zip(1_000_001..).collect();
        let stats = serde_json::from_value(serde_json::to_value(&numbers).unwrap()).unwrap();
        (stats, numbers)
    }

    /// A counter that is added to a poll group and has no metric fails here.
    #[test]
    fn every_counter_of_a_poll_group_has_one_metric() {
        let (stats, numbers) = distinct();
        let mut all = Exposition::default();
        of_groups(&mut all, &[stats]);
        let text = all.into_text();
        for (name, number) in numbers {
            let lines = text.lines().filter(|line| line.ends_with(&format!(" {number}"))).count();
            assert_eq!(lines, 1, "{name}\n{text}");
        }
    }

    #[test]
    fn every_counter_of_a_volume_has_one_metric() {
        let json = serde_json::to_value(VolumeCounts::default()).unwrap();
        assert_eq!(json.as_object().unwrap().len(), VOLUMES.len());
        let names = json.as_object().unwrap().keys().cloned();
        let numbers: BTreeMap<String, u64> = names.zip(1..).collect();
        let counts: VolumeCounts =
            serde_json::from_value(serde_json::to_value(&numbers).unwrap()).unwrap();
        let mut values: Vec<u64> = VOLUMES.iter().map(|(.., value)| value(&counts)).collect();
        values.sort_unstable();
        assert!(values.into_iter().eq(numbers.into_values()), "each once");
    }
}
