//! Tables for people: the mounts of this host, and one mount in full.

use std::fmt::Write;
use std::time::Duration;

use rblk_operate::figures;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::path_status::PathStatus;
use rblk_operate::table::{Column, Table, wrapped};
use rblk_runtime::rates::Rates;

use crate::program::top::{rate_columns, rate_figures};

/// The mounts of this host. `used_by` returns the use of a disk, in words.
pub(crate) fn mounts(mounts: &[MountStatus], used_by: impl Fn(&str) -> Option<String>) -> String {
    let has_paths = mounts.iter().any(|m| !m.paths.is_empty());
    let first = [
        Column::name("NAME"),
        Column::name("DEVICE"),
        Column::figure("SIZE"),
        Column::word("STATE"),
        Column::name("TARGET"),
    ];
    let last = [
        Column::figure("R/s"),
        Column::figure("W/s"),
        Column::figure("p99"),
        Column::name("USED BY"),
    ];
    let paths = has_paths.then_some(Column::word("PATHS"));
    let mut table = Table::new(first.into_iter().chain(paths).chain(last));
    for m in mounts {
        let first = [
            m.name.clone(),
            or_dash(!m.device.is_empty(), || m.device.clone()),
            or_dash(m.size_bytes > 0, || figures::size(m.size_bytes)),
            state(m),
            format!("{} {}", m.target_name, transport(m)).trim().to_owned(),
        ];
        let last = [
            rate(m, |r| figures::count(r.reads)),
            rate(m, |r| figures::count(r.writes)),
            rate(m, |r| figures::latency(r.read_p99_us.max(r.write_p99_us))),
            uses(m, &used_by),
        ];
        let paths = has_paths.then(|| m.paths_in_use().unwrap_or_else(|| "-".to_owned()));
        table.row(first.into_iter().chain(paths).chain(last));
    }
    table.to_string()
}

/// A value that is known, or a dash: a mount that waits for its first target has neither device
/// nor size.
fn or_dash(known: bool, value: impl FnOnce() -> String) -> String {
    if known { value() } else { "-".to_owned() }
}

/// How often another process took the device over: after a death, or in an upgrade.
fn taken_over(times: u32) -> String {
    match times {
        0 => "never taken over".to_owned(),
        1 => "taken over once".to_owned(),
        times => format!("taken over {times} times"),
    }
}

/// The state of a mount; with a lost target, the time since the loss.
fn state(mount: &MountStatus) -> String {
    match mount.lost_ms_ago {
        Some(ms) => format!("{} {}s", mount.state, ms / 1000),
        None => mount.state.clone(),
    }
}

/// The transport of the data; `soft/TLS` for encrypted TCP.
fn transport(mount: &MountStatus) -> &str {
    match mount.transport.as_str() {
        "soft/TCP" if mount.encrypted => "soft/TLS",
        transport => transport,
    }
}

fn rate(mount: &MountStatus, of: impl Fn(&Rates) -> String) -> String {
    mount.rates.as_ref().map_or_else(|| "-".to_owned(), of)
}

/// The use of a mount's disk, and the number of requests that wait for its target.
fn uses(mount: &MountStatus, used_by: impl Fn(&str) -> Option<String>) -> String {
    let user = used_by(&mount.device);
    let waiting = (mount.lost_ms_ago.is_some() && mount.total.in_flight > 0)
        .then(|| format!("{} requests wait", mount.total.in_flight));
    let words: Vec<String> = user.into_iter().chain(waiting).collect();
    if words.is_empty() { "-".to_owned() } else { words.join(", ") }
}

/// One mount in full.
pub(crate) fn mount(m: &MountStatus, used_by: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::new();
    let up = figures::duration(Duration::from_secs(m.uptime_s));
    let yes = |is: bool, word: &'static str| if is { word } else { "no" };
    let facts = [
        ("state", state(m)),
        ("device", m.device.clone()),
        ("used by", uses(m, used_by)),
        (
            "volume",
            format!("{}, {}, blocks of {}", m.volume, figures::size(m.size_bytes), m.block_size),
        ),
        ("mode", if m.read_only { "read-only" } else { "read and write" }.to_owned()),
        ("generation", m.generation_shown()),
        (
            "target",
            format!("{} at {}, {} by {}", m.target_name, m.address, transport(m), m.rdma_device),
        ),
        ("addresses", m.target.join(", ")),
        ("fallback", m.fallback_line().unwrap_or_default()),
        ("paths", m.one_path_line().or_else(|| paths_in_use(m)).unwrap_or_default()),
        (
            "auth",
            format!(
                "{}, encrypted: {}, digests: {}",
                m.auth,
                yes(m.encrypted, "yes"),
                yes(m.digest, "crc32c")
            ),
        ),
        ("queues", format!("{} of depth {}, {} lanes each", m.queues, m.queue_depth, m.lanes)),
        ("process", format!("{}, rblk {}, up {up}, {}", m.pid, m.version, taken_over(m.recovered))),
        ("epoch", m.epoch.to_string()),
        ("last disconnect", m.last_loss.clone().unwrap_or_else(|| "none".to_owned())),
        ("hint", m.hint.clone().unwrap_or_default()),
        ("longest stall", figures::duration(Duration::from_millis(m.stall_ms_max))),
        (
            "not flushed yet",
            format!(
                "{} writes, {} of copies kept",
                m.unflushed_writes,
                figures::size(m.retain_bytes)
            ),
        ),
        ("guest's memory", guests_memory(m)),
        ("lost writes", m.lost.clone().unwrap_or_else(|| m.losses.to_string())),
    ];
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{}", m.name);
    for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
        let lines = wrapped(value, &" ".repeat(FACT_INDENT));
        let _ = write!(text, "  {name:<width$}{}", lines.trim_start(), width = FACT_INDENT - 2);
    }
    for table in [paths(m), queues(m), latencies(m)] {
        if !table.is_empty() {
            let _ = write!(text, "\n{table}");
        }
    }
    text
}

const FACT_INDENT: usize = 18;

fn paths_in_use(m: &MountStatus) -> Option<String> {
    m.paths_in_use().map(|count| format!("{count} in use"))
}

/// The paths of a mount that uses all its addresses at once.
fn paths(m: &MountStatus) -> Table {
    let mut table = Table::new([
        Column::name("PATH"),
        Column::word("DEVICE"),
        Column::word("STATE"),
        Column::figure("FOR"),
        Column::figure("LOST"),
        Column::figure("READ"),
        Column::figure("WRITTEN"),
        Column::name("REASON"),
    ]);
    for path in &m.paths {
        let PathStatus { address, rdma_device, state, for_ms, lost, reason, work, .. } = path;
        table.row([
            address.clone(),
            if rdma_device.is_empty() { "-".to_owned() } else { rdma_device.clone() },
            state.clone(),
            figures::duration(Duration::from_millis(*for_ms)),
            figures::count(*lost),
            figures::size(work.read_bytes),
            figures::size(work.written_bytes),
            reason.clone().unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table
}

fn queues(m: &MountStatus) -> Table {
    let mut table = Table::new([
        Column::word("QUEUE"),
        Column::figure("READS"),
        Column::figure("WRITES"),
        Column::figure("FLUSHES"),
        Column::figure("READ"),
        Column::figure("WRITTEN"),
        Column::figure("IN FLIGHT"),
        Column::figure("ERRORS"),
        Column::figure("SENT AGAIN"),
    ]);
    let queues = m.by_queue.iter().enumerate().map(|(at, queue)| (at.to_string(), queue));
    for (name, q) in queues.chain([("all".to_owned(), &m.total)]) {
        table.row([
            name,
            figures::count(q.reads),
            figures::count(q.writes),
            figures::count(q.flushes),
            figures::size(q.read_bytes),
            figures::size(q.written_bytes),
            q.in_flight.to_string(),
            figures::count(q.errors),
            figures::count(q.replayed + q.digest_retries),
        ]);
    }
    table
}

/// The times of the requests since the start, and the mean of each stage.
fn latencies(m: &MountStatus) -> Table {
    let mut table = Table::new([
        Column::word("LATENCY"),
        Column::figure("COUNT"),
        Column::figure("MEAN"),
        Column::figure("P50"),
        Column::figure("P99"),
        Column::figure("QUEUE"),
        Column::figure("TARGET"),
    ]);
    for (kind, times) in m.latency.kinds() {
        let total = &times.total;
        if total.count() == 0 {
            continue;
        }
        let figures = [
            kind.to_owned(),
            figures::count(total.count()),
            figures::mean(total),
            figures::latency(total.p50_us()),
            figures::latency(total.p99_us()),
        ];
        table.row(figures.into_iter().chain(times.stages().map(|(_, stage)| figures::mean(stage))));
    }
    table
}

/// The present work of this host's mounts, busiest first.
pub(crate) fn top(mounts: &[MountStatus]) -> String {
    let columns = [Column::name("NAME"), Column::word("STATE")].into_iter().chain(rate_columns());
    let others = [Column::figure("DEPTH"), Column::name("TARGET")];
    let mut table = Table::new(columns.chain(others));
    for m in mounts {
        let rates = [m.name.clone(), state(m)].into_iter().chain(rate_figures(m.rates.as_ref()));
        table.row(rates.chain([m.total.in_flight.to_string(), m.target_name.clone()]));
        for path in &m.paths {
            let name = [format!("  {}", path.address), path.state.clone()];
            let rates = name.into_iter().chain(rate_figures(path.rates.as_ref()));
            table.row(rates.chain(["-".to_owned(), String::new()]));
        }
    }
    table.to_string()
}

/// For the disk of a guest: the bytes moved directly, and the bytes copied.
fn guests_memory(m: &MountStatus) -> String {
    // A mount has a device, or will have one.
    if m.device.is_empty() || m.device.starts_with("/dev/ublkb") {
        return String::new();
    }
    let (straight, copied) = (m.total.shared_memory_bytes, m.total.bounced_bytes);
    format!("{} straight, {} copied", figures::size(straight), figures::size(copied))
}

#[cfg(test)]
mod tests {
    use rblk_operate::table::WIDTH;

    use super::*;
    use rblk_operate::mount::path_status::PathWork;

    fn busy() -> MountStatus {
        let rates = Rates {
            reads: 41_234,
            writes: 9_800,
            read_p99_us: Some(84),
            write_p99_us: Some(91),
            ..Rates::default()
        };
        MountStatus {
            name: "vol0".to_owned(),
            device: "/dev/ublkb0".to_owned(),
            volume: "vol0".to_owned(),
            target_name: "store1".to_owned(),
            transport: "RoCE".to_owned(),
            state: "connected".to_owned(),
            size_bytes: 512 << 30,
            rates: Some(rates),
            ..MountStatus::default()
        }
    }

    #[test]
    fn a_list_has_a_row_for_each_mount() {
        let mut lost = MountStatus {
            name: "logs".to_owned(),
            state: "reconnecting".to_owned(),
            lost_ms_ago: Some(12_345),
            rates: None,
            transport: "soft/TCP".to_owned(),
            encrypted: true,
            ..busy()
        };
        lost.total.in_flight = 3;
        let used = |device: &str| (device == "/dev/ublkb0").then(|| "/mnt (ext4)".to_owned());
        let text = mounts(&[busy(), lost], used);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "NAME  DEVICE         SIZE  STATE             TARGET             R/s   W/s   p99  USED BY",
                "vol0  /dev/ublkb0  512GiB  connected         store1 RoCE      41.2k  9.8k  91us  /mnt (ext4)",
                "logs  /dev/ublkb0  512GiB  reconnecting 12s  store1 soft/TLS      -     -     -",
                "    used by: /mnt (ext4), 3 requests wait",
            ]
        );
    }

    fn path(address: &str, state: &str, reason: Option<&str>) -> PathStatus {
        PathStatus {
            address: address.to_owned(),
            rdma_device: "mlx5_0".to_owned(),
            state: state.to_owned(),
            for_ms: 12_345,
            lost: u64::from(reason.is_some()),
            reason: reason.map(str::to_owned),
            ..PathStatus::default()
        }
    }

    #[test]
    fn a_mount_by_several_paths_shows_each() {
        let mut one = path("rdma://192.0.2.1:7720", "in use", None);
        one.work = PathWork { writes: 24, written_bytes: 3 << 20, ..PathWork::default() };
        one.rates = Some(one.work.rates(&PathWork::default(), Duration::from_secs(1)));
        let other = path("rdma://198.51.100.1:7720", "waiting", Some("queue 1: Silent"));
        let both = MountStatus { name: "both".to_owned(), paths: vec![one, other], ..busy() };
        let text = mounts(&[busy(), both.clone()], |_| None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "NAME  DEVICE         SIZE  STATE      TARGET       PATHS     R/s   W/s   p99  USED BY",
                "vol0  /dev/ublkb0  512GiB  connected  store1 RoCE  -       41.2k  9.8k  91us  -",
                "both  /dev/ublkb0  512GiB  connected  store1 RoCE  1 of 2  41.2k  9.8k  91us  -",
            ]
        );
        let text = mount(&both, |_| None);
        let at = text.find("PATH ").unwrap();
        let lines: Vec<&str> = text[at..].lines().take(3).collect();
        assert_eq!(
            lines,
            [
                "PATH                      DEVICE  STATE    FOR  LOST  READ  WRITTEN  REASON",
                "rdma://192.0.2.1:7720     mlx5_0  in use   12s     0    0B     3MiB  -",
                "rdma://198.51.100.1:7720  mlx5_0  waiting  12s     1    0B       0B  queue 1: Silent",
            ]
        );
        assert!(text.contains("  paths           1 of 2 in use\n"), "{text}");
        let text = top(&[both.clone()]);
        let rows: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().take(6).collect()).collect();
        assert_eq!(rows[0], ["NAME", "STATE", "R/s", "W/s", "rMiB/s", "wMiB/s"]);
        assert_eq!(rows[2][..2], ["rdma://192.0.2.1:7720", "in"]);
        assert_eq!(rows[2][3..], ["0", "24", "0"]);
        assert_eq!(rows[3][..4], ["rdma://198.51.100.1:7720", "waiting", "-", "-"]);
        let told =
            ["its path to rdma://198.51.100.1:7720 is not in use (for 12 s: queue 1: Silent)"];
        assert_eq!(both.path_lines(), told);
        let lost = MountStatus { state: "reconnecting".to_owned(), ..both };
        assert_eq!(lost.path_lines(), [] as [&str; 0], "the loss of the target is told");
    }

    #[test]
    fn a_target_that_knows_one_path_is_told_of() {
        let target = vec!["a".to_owned(), "b".to_owned()];
        let m = MountStatus { one_path: true, target, ..busy() };
        let line = "it uses one of its 2 addresses at a time, because its target does not know";
        let lines = m.path_lines();
        assert!(lines.len() == 1 && lines[0].starts_with(line), "{lines:?}");
        assert!(mount(&m, |_| None).contains(&line[..60]));
    }

    #[test]
    fn no_line_is_too_wide_and_every_name_is_whole() {
        let long = |c: char| c.to_string().repeat(64);
        let mut m = MountStatus {
            name: long('n'),
            volume: long('v'),
            target_name: long('t'),
            address: format!("rdma://[{}]:7720", "2001:db8::".repeat(4)),
            target: vec![format!("rdma://{}.example", long('h')); 3],
            last_loss: Some("it went away ".repeat(20)),
            ..busy()
        };
        m.by_queue = vec![m.total; 2];
        m.paths = vec![path(&m.address, "waiting", Some(&"it went away ".repeat(20)))];
        m.latency.read.total.record(5);
        for text in [mounts(&[busy(), m.clone()], |_| None), mount(&m, |_| None), top(&[m.clone()])]
        {
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
            assert!(text.contains(&m.name) && text.contains(&m.target_name), "{text}");
        }
    }

    #[test]
    fn a_generation_is_shown_only_where_it_has_a_meaning() {
        let shown = |generation, ephemeral| {
            let m = MountStatus { generation, ephemeral, ..busy() };
            let json = serde_json::to_value(&m).unwrap();
            assert_eq!(json["generation"], generation, "JSON has the number");
            let text = mount(&m, |_| None);
            let line = text.lines().find(|line| line.contains("generation")).unwrap();
            line.split_whitespace().last().unwrap().to_owned()
        };
        assert_eq!(shown(7, false), "7");
        assert_eq!(shown(1_795_360_000_000_001, true), "-", "a volume in memory");
        assert_eq!(shown(0, false), "-", "a mount that waits for its first connect");
    }
}
