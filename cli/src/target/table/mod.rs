//! Tables for people: the output of `status`. [`details`] has the rest, for `-v`.

mod details;

use std::fmt::Write;
use std::time::Duration;

use rblk_config::{CacheMode, HostConfig};
use rblk_operate::figures;
use rblk_operate::table::{Column, Table, wrapped};
use rblk_operate::target::status::{
    DrainStatus, HolderStatus, SessionStatus, TargetStatus, VolumeStatus,
};
use rblk_operate::target::warnings::warnings;

/// The state of a target; with `details`, more counters.
pub(crate) fn status(status: &TargetStatus, details: bool) -> String {
    let mut text = target(status);
    for warning in warnings(status) {
        text += &wrapped(&format!("WARN  {warning}"), "");
    }
    text += &wrapped(&format!("listening on {}", status.listen.join(", ")), "");
    for away in status.volumes_away.iter().filter(|away| away.elsewhere) {
        text += &wrapped(&away.to_string(), "");
    }
    for table in [devices(status), volumes(&status.volumes), sessions(&status.sessions)] {
        if !table.is_empty() {
            let _ = write!(text, "\n{table}");
        }
    }
    if details {
        text += &details::of(status);
    }
    text
}

/// The hosts that may connect to a target.
pub(crate) fn hosts(hosts: &[HostConfig]) -> String {
    let mut table = Table::new([
        Column::name("HOST"),
        Column::word("TAKE-OVER"),
        Column::name("VOLUMES"),
        Column::name("KEYS"),
    ]);
    for host in hosts {
        let volumes: Vec<String> = host.volumes.iter().map(ToString::to_string).collect();
        let keys: Vec<String> = host.keys.iter().map(ToString::to_string).collect();
        let take_over = if host.take_over { "yes" } else { "no" };
        table.row([host.name.clone(), take_over.to_owned(), volumes.join(", "), keys.join(", ")]);
    }
    table.to_string()
}

fn target(status: &TargetStatus) -> String {
    let state = if status.draining { "draining" } else { "serving" };
    let up = figures::duration(Duration::from_secs(status.uptime_s));
    let TargetStatus { name, version, pid, .. } = status;
    let mut text = wrapped(&format!("{name}  {state}, up {up}, rblk {version}, pid {pid}"), "");
    if let Some(drain) = &status.drain {
        text += &format!("{}\n", draining(drain));
    }
    text
}

/// How far a drain is.
pub(crate) fn draining(drain: &DrainStatus) -> String {
    let sessions = match drain.sessions {
        1 => "1 session".to_owned(),
        n => format!("{n} sessions"),
    };
    let seconds = drain.left_ms.div_ceil(1000);
    match (drain.sessions, seconds) {
        (0, _) => "draining: every initiator has left".to_owned(),
        (_, 0) => format!("draining: ending {sessions} that stayed"),
        _ => format!("draining: {sessions} left, ended in {seconds} s at the latest"),
    }
}

fn devices(status: &TargetStatus) -> Table {
    let mut table = Table::new([
        Column::name("DEVICE"),
        Column::word("LINK"),
        Column::figure("SESSIONS"),
        Column::figure("CONNS"),
        Column::figure("READ"),
        Column::figure("WRITTEN"),
        Column::figure("IN FLIGHT"),
        Column::figure("ERRORS"),
    ]);
    for device in &status.devices {
        let of_session = |session: &&SessionStatus| {
            session.queues.iter().filter(|queue| queue.device == device.name).count()
        };
        let sessions = status.sessions.iter().filter(|session| of_session(session) > 0).count();
        let conns: usize = status.sessions.iter().map(|session| of_session(&session)).sum();
        let io = &device.io;
        table.row([
            device.name.clone(),
            device.transport.clone(),
            sessions.to_string(),
            conns.to_string(),
            figures::size(io.read_bytes),
            figures::size(io.written_bytes),
            io.in_flight.to_string(),
            figures::count(io.errors),
        ]);
    }
    table
}

fn volumes(volumes: &[VolumeStatus]) -> Table {
    let mut table = Table::new([
        Column::name("VOLUME"),
        Column::figure("SIZE"),
        Column::word("CACHE"),
        Column::figure("HITS"),
        Column::figure("DIRTY"),
        Column::figure("R/s"),
        Column::figure("W/s"),
        Column::figure("MiB/s"),
        Column::figure("p99 R"),
        Column::figure("p99 W"),
        Column::name("HELD BY"),
    ]);
    for v in volumes {
        let has_store = v.has_store();
        let rate = |of: fn(&rblk_runtime::rates::Rates) -> String| {
            v.rates.as_ref().map_or_else(|| "-".to_owned(), of)
        };
        table.row([
            v.name.clone(),
            figures::size(v.size_bytes),
            cache(v),
            figures::percent(v.counts.hit_ratio()),
            if has_store { figures::size(v.counts.dirty_bytes) } else { "-".to_owned() },
            rate(|r| figures::count(r.reads)),
            rate(|r| figures::count(r.writes)),
            rate(|r| figures::mib_per_second(r.read_bytes.saturating_add(r.written_bytes))),
            rate(|r| figures::latency(r.read_p99_us)),
            rate(|r| figures::latency(r.write_p99_us)),
            holder(v.holder.as_ref()),
        ]);
    }
    table
}

/// The cache of a volume; with `ro` if it refuses writes.
fn cache(volume: &VolumeStatus) -> String {
    let mode = match volume.cache {
        _ if !volume.has_store() => volume.store.as_str(),
        CacheMode::None => "none",
        CacheMode::WriteThrough => "thru",
        CacheMode::WriteBack => "back",
    };
    let access = match volume.mode() {
        "rw" => String::new(),
        access => format!(",{access}"),
    };
    format!("{mode}{access}")
}

/// The hosts that may write to a volume.
fn holder(holder: Option<&HolderStatus>) -> String {
    let Some(holder) = holder else { return "-".to_owned() };
    let more = if holder.shared { " and others" } else { "" };
    let away = if holder.present { "" } else { " (away)" };
    format!("{}{more}{away}", holder.host)
}

fn sessions(sessions: &[SessionStatus]) -> Table {
    let mut table = Table::new([
        Column::name("SESSION"),
        Column::name("FROM"),
        Column::figure("CONNS"),
        Column::word("AUTH"),
        Column::word("ENC"),
        Column::figure("IN FLIGHT"),
        Column::figure("ERRORS"),
        Column::name("VOLUMES"),
    ]);
    for s in sessions {
        let volumes = if s.fenced { "(fenced)".to_owned() } else { s.volumes.join(", ") };
        table.row([
            s.host.clone(),
            s.peer.clone(),
            s.connections.to_string(),
            if s.key.is_some() { "key" } else { "-" }.to_owned(),
            if s.encrypted { "yes" } else { "no" }.to_owned(),
            s.io.in_flight.to_string(),
            figures::count(s.io.errors),
            volumes,
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use rblk_operate::table::WIDTH;
    use rblk_operate::target::group_counts::StatsSnapshot;
    use rblk_operate::target::status::{DeviceStatus, ListenerStatus, QueueStatus, UsageStatus};
    use rblk_operate::target::traffic::{IoCounts, VolumeTimes};
    use rblk_operate::target::volume_counts::VolumeCounts;
    use rblk_operate::target::volume_notes::VolumeNotes;
    use rblk_runtime::rates::Rates;

    use super::*;

    #[test]
    fn a_drain_in_words() {
        let told = |sessions, left_ms| {
            draining(&DrainStatus { left_ms, sessions, ..DrainStatus::default() })
        };
        assert_eq!(told(0, 5000), "draining: every initiator has left");
        assert_eq!(told(1, 4001), "draining: 1 session left, ended in 5 s at the latest");
        assert_eq!(told(2, 0), "draining: ending 2 sessions that stayed");
    }

    #[test]
    fn holders_in_words() {
        let of = |shared, present| HolderStatus { host: "db1".to_owned(), shared, present };
        assert_eq!(holder(None), "-");
        assert_eq!(holder(Some(&of(false, true))), "db1");
        assert_eq!(holder(Some(&of(true, false))), "db1 and others (away)");
    }

    pub(super) fn volume(name: &str, store: &str, cache: CacheMode) -> VolumeStatus {
        VolumeStatus {
            name: name.to_owned(),
            store: store.to_owned(),
            size_bytes: 512 << 30,
            block_size: 4096,
            read_only: false,
            volatile_cache: true,
            cache,
            cache_min_bytes: 0,
            cache_max_bytes: None,
            counts: VolumeCounts::default(),
            io: IoCounts::default(),
            limits: rblk_config::Limits::default(),
            delays: rblk_operate::target::delays::DelayCounts::default(),
            latency: VolumeTimes::default(),
            rates: None,
            last_errno: None,
            last_error_age_s: None,
            dirty_age_s: None,
            room: None,
            store_fault: None,
            in_use: false,
            generation: 0,
            holder: None,
            notes: VolumeNotes::default(),
        }
    }

    #[test]
    fn a_store_that_takes_no_writes_shows_in_the_mode() {
        let fault = rblk_operate::target::store_fault::StoreFault {
            kind: rblk_operate::target::store_fault::StoreFaultKind::ReadOnly,
            text: "its device /dev/x is read-only".to_owned(),
            advice: Some("`blockdev --setrw /dev/x`".to_owned()),
            ends_with_target: false,
        };
        let mut faulty =
            VolumeStatus { store_fault: Some(fault), ..volume("v", "file", CacheMode::WriteBack) };
        assert_eq!((faulty.mode(), cache(&faulty).as_str()), ("(ro)", "back,(ro)"));
        assert_eq!(
            rblk_operate::target::warnings::store_fault(&faulty).unwrap(),
            "v: its device /dev/x is read-only: `blockdev --setrw /dev/x`"
        );
        faulty.read_only = true;
        assert_eq!((faulty.mode(), cache(&faulty).as_str()), ("ro", "back,ro"));
        let sound = volume("v", "file", CacheMode::WriteBack);
        assert_eq!(
            (sound.mode(), rblk_operate::target::warnings::store_fault(&sound)),
            ("rw", None)
        );
    }

    #[test]
    fn the_errors_of_a_store_are_shown_for_a_while() {
        let told = |age| {
            let mut status = busy();
            status.volumes[1].last_error_age_s = age;
            warnings(&status).into_iter().find(|line| line.contains("store errors"))
        };
        assert_eq!(told(Some(61)).unwrap(), "logs: 3 store errors, last ENOSPC 1m 1s ago");
        assert!(told(Some(600)).is_some());
        assert_eq!(told(Some(601)), None);
        assert_eq!(told(None).unwrap(), "logs: 3 store errors, last ENOSPC", "of an older target");
    }

    fn busy_volumes() -> Vec<VolumeStatus> {
        let rates = Rates {
            reads: 41_234,
            writes: 9_800,
            read_bytes: 161 << 20,
            written_bytes: 38 << 20,
            read_p99_us: Some(84),
            write_p99_us: Some(61),
            ..Rates::default()
        };
        let holder =
            |present| Some(HolderStatus { host: "db1".to_owned(), shared: false, present });
        let vol0 = VolumeStatus {
            counts: VolumeCounts {
                hits: 94,
                misses: 6,
                dirty_bytes: 38 << 20,
                ..VolumeCounts::default()
            },
            rates: Some(rates),
            holder: holder(true),
            ..volume("vol0", "file", CacheMode::WriteBack)
        };
        let logs = VolumeStatus {
            counts: VolumeCounts { store_errors: 3, failed_blocks: 2, ..VolumeCounts::default() },
            last_errno: Some(Errno::ENOSPC as i32),
            last_error_age_s: Some(125),
            holder: holder(false),
            size_bytes: 64 << 30,
            read_only: true,
            ..volume("logs", "file", CacheMode::WriteThrough)
        };
        vec![vol0, logs, volume("ram", "memory", CacheMode::None)]
    }

    fn busy() -> TargetStatus {
        let session = SessionStatus {
            host: "db1".to_owned(),
            peer: "192.0.2.2:55039".to_owned(),
            key: None,
            encrypted: false,
            number: 1,
            place: 0,
            epoch: 1,
            connections: 5,
            volumes: vec!["vol0".to_owned()],
            digest: true,
            fenced: false,
            io: IoCounts { in_flight: 7, ..IoCounts::default() },
            queues: vec![QueueStatus { device: "mlx5_0".to_owned(), ..QueueStatus::default() }; 4],
        };
        TargetStatus {
            name: "store1".to_owned(),
            version: "0.2.0".to_owned(),
            pid: 121,
            instance: String::new(),
            uptime_s: 273_600,
            started_unix_ms: 0,
            condition: "serving".to_owned(),
            warnings: Vec::new(),
            usage: UsageStatus::default(),
            draining: false,
            drain: None,
            upgrade: None,
            lease_ms: 30_000,
            fencings: 0,
            auth: "none".to_owned(),
            insecure: false,
            strangers: 0,
            unproven: 0,
            take_overs: 0,
            listen: vec!["rdma://192.0.2.1:7720".to_owned()],
            listen_down: Vec::new(),
            state_dir_fault: None,
            arena_bytes: 256 << 20,
            arena_page_bytes: 4096,
            devices: vec![DeviceStatus {
                name: "mlx5_0".to_owned(),
                transport: "RoCE".to_owned(),
                io: IoCounts { read_bytes: 5 << 30, ..IoCounts::default() },
                ports: Vec::new(),
            }],
            volumes_away: Vec::new(),
            volumes: busy_volumes(),
            sessions: vec![session],
            rates: None,
            total: StatsSnapshot::default(),
            poll_groups: Vec::new(),
            events: Vec::new(),
        }
    }

    #[test]
    fn the_status_screen_shows_state_and_faults() {
        let text = status(&busy(), false);
        let expected = "\
store1  serving, up 3d 4h, rblk 0.2.0, pid 121
WARN  logs: 2 dirty blocks could not be written, and every FLUSH fails until they are
WARN  logs: 3 store errors, last ENOSPC 2m 5s ago
WARN  logs: its holder db1 is away
listening on rdma://192.0.2.1:7720

DEVICE  LINK  SESSIONS  CONNS  READ  WRITTEN  IN FLIGHT  ERRORS
mlx5_0  RoCE         1      4  5GiB       0B          0       0

VOLUME    SIZE  CACHE    HITS  DIRTY    R/s   W/s  MiB/s  p99 R  p99 W  HELD BY
vol0    512GiB  back      94%  38MiB  41.2k  9.8k    199   84us   61us  db1
logs     64GiB  thru,ro     -     0B      -     -      -      -      -  db1 (away)
ram     512GiB  memory      -      -      -     -      -      -      -  -

SESSION  FROM             CONNS  AUTH  ENC  IN FLIGHT  ERRORS  VOLUMES
db1      192.0.2.2:55039      5  -     no           7       0  vol0
";
        assert_eq!(text, expected);
    }

    #[test]
    fn no_line_is_too_wide_and_every_name_is_whole() {
        let mut busy = busy();
        let long = |c: char| c.to_string().repeat(64);
        let [target, vol, host] = ['t', 'v', 'h'].map(long);
        busy.name.clone_from(&target);
        busy.listen = vec![format!("rdma://[{}1]:7720", "2001:db8:".repeat(4)); 3];
        busy.volumes[0].name.clone_from(&vol);
        busy.volumes[0].notes.path = Some(format!("/srv/{}", long('p')));
        busy.volumes[0].holder =
            Some(HolderStatus { host: host.clone(), shared: true, present: false });
        busy.volumes[0].latency.read.total.record(84);
        busy.sessions[0].host.clone_from(&host);
        busy.sessions[0].peer = "[2001:db8:1234:5678:9abc:def0:1234:5678]:55039".to_owned();
        busy.sessions[0].volumes = vec![vol.clone(); 5];
        busy.sessions[0].key = Some(format!("rblk1:{}", "k".repeat(56)));
        busy.total.reads = u64::MAX;
        for details in [false, true] {
            let text = status(&busy, details);
            assert!(!text.contains('{'), "every counter has its figure: {text}");
            for line in text.lines() {
                assert!(line.chars().count() <= WIDTH, "{line}\nin:\n{text}");
            }
            for name in [&target, &vol, &host] {
                assert!(text.contains(name.as_str()), "{text}");
            }
        }
    }

    #[test]
    fn a_fenced_session_and_an_insecure_target_are_warned_of() {
        let mut busy = busy();
        busy.insecure = true;
        busy.listen_down = vec![ListenerStatus {
            address: "rdma://192.0.2.1:7720".to_owned(),
            down_s: 12,
            tries: 4,
            why: "rdma_listen failed: No such device".to_owned(),
        }];
        busy.sessions[0].fenced = true;
        let text = status(&busy, false);
        assert!(text.contains("WARN  insecure: any host"), "{text}");
        let down =
            "WARN  no host can connect by rdma://192.0.2.1:7720, for 12s: rdma_listen failed";
        assert!(text.contains(down), "{text}");
        assert!(text.contains("WARN  the session of db1 is fenced"), "{text}");
    }
}
