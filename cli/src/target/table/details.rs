//! More counters of a target: the part that `status -v` adds. `-o json` has all of them.

use std::fmt::Write;

use rblk_config::{ByteSize, CacheMode};
use rblk_operate::figures;
use rblk_operate::table::{Column, Table, wrapped};
use rblk_operate::target::status::{SessionStatus, TargetStatus, VolumeStatus};

/// More counters of a target.
pub(super) fn of(status: &TargetStatus) -> String {
    let mut text = String::new();
    let tables = [
        backing(&status.volumes),
        caches(&status.volumes),
        limits(&status.volumes),
        latencies(&status.volumes),
        epochs(&status.sessions),
        queues(&status.sessions),
    ];
    for table in tables.iter().filter(|table| !table.is_empty()) {
        // Writing to a String cannot fail.
        let _ = write!(text, "\n{table}");
    }
    text.push('\n');
    text += &wrapped(&authentication(status), "");
    counters(status).iter().for_each(|line| text += &wrapped(line, ""));
    text
}

/// The hosts that may log in.
fn authentication(status: &TargetStatus) -> String {
    let who = match status.auth.as_str() {
        "required" => "hosts prove their keys",
        _ if status.insecure => {
            "none, insecure: any host that reaches an address can read, write and take over"
        }
        _ => "none (auth = \"none\"): any program on this host may log in",
    };
    let mut text = format!("authentication: {who}");
    let unproven = status.unproven + status.total.failed_proofs;
    if unproven > 0 {
        let _ = write!(text, "; {unproven} connections failed to prove a key");
    }
    if status.total.bad_records > 0 {
        let _ = write!(text, "; {} ended by records changed on the way", status.total.bad_records);
    }
    text
}

fn backing(volumes: &[VolumeStatus]) -> Table {
    let mut table = Table::new([
        Column::name("BACKING OF"),
        Column::word("STORE"),
        Column::figure("BLOCK"),
        Column::word("MODE"),
        Column::word("IN USE"),
        Column::figure("GENERATION"),
        Column::name("PATH"),
    ]);
    for v in volumes {
        table.row([
            v.name.clone(),
            v.store.clone(),
            v.block_size.to_string(),
            v.mode().to_owned(),
            if v.in_use { "yes" } else { "no" }.to_owned(),
            generation(v),
            v.notes.path.clone().unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table
}

/// The generation of a volume with a store. A volume without one is gone when this process ends, so
/// its generation is not remembered: it begins at the time in microseconds and says nothing.
fn generation(volume: &VolumeStatus) -> String {
    if volume.has_store() { volume.generation.to_string() } else { "-".to_owned() }
}

/// The caches of volumes with a store.
fn caches(volumes: &[VolumeStatus]) -> Table {
    let mut table = Table::new([
        Column::name("CACHE OF"),
        Column::word("MODE"),
        Column::figure("HITS"),
        Column::figure("CACHED"),
        Column::figure("KEEPS"),
        Column::figure("DIRTY"),
        Column::figure("UNWRITABLE"),
        Column::figure("EVICTIONS"),
        Column::figure("STORE ERRORS"),
    ]);
    for v in volumes.iter().filter(|v| v.has_store()) {
        let c = &v.counts;
        let mode = match v.cache {
            CacheMode::None => "none",
            CacheMode::WriteThrough => "write-through",
            CacheMode::WriteBack => "write-back",
        };
        table.row([
            v.name.clone(),
            mode.to_owned(),
            figures::percent(c.hit_ratio()),
            match v.cache_max_bytes {
                None => figures::size(c.cached_bytes),
                Some(max) => format!("{} of {}", figures::size(c.cached_bytes), figures::size(max)),
            },
            match v.cache_min_bytes {
                0 => "-".to_owned(),
                bytes => figures::size(bytes),
            },
            figures::size(c.dirty_bytes),
            c.failed_blocks.to_string(),
            c.evictions.to_string(),
            c.store_errors.to_string(),
        ]);
    }
    table
}

/// Volumes with limits, and those with commands that waited for the limit of a host.
fn limits(volumes: &[VolumeStatus]) -> Table {
    let mut table = Table::new([
        Column::name("LIMITS OF"),
        Column::figure("IOPS"),
        Column::figure("BYTES/S"),
        Column::figure("DELAYED"),
        Column::figure("MEAN DELAY"),
    ]);
    let delayed = |v: &&VolumeStatus| !v.limits.is_none() || v.delays.commands > 0;
    for v in volumes.iter().filter(delayed) {
        let none = || "-".to_owned();
        table.row([
            v.name.clone(),
            v.limits.iops.map_or_else(none, |iops| iops.to_string()),
            v.limits.bandwidth.map_or_else(none, |rate| ByteSize(rate.0).to_string()),
            figures::count(v.delays.commands),
            figures::latency(v.delays.mean_us()),
        ]);
    }
    table
}

/// The times of commands since the start, and their waits: the mean of each stage.
fn latencies(volumes: &[VolumeStatus]) -> Table {
    let mut table = Table::new([
        Column::name("LATENCY OF"),
        Column::word("KIND"),
        Column::figure("COUNT"),
        Column::figure("MEAN"),
        Column::figure("P50"),
        Column::figure("P99"),
        Column::figure("QUEUE"),
        Column::figure("DATA"),
        Column::figure("CACHE"),
        Column::figure("STORE"),
        Column::figure("ANSWER"),
    ]);
    for v in volumes {
        for (kind, times) in v.latency.kinds() {
            let total = &times.total;
            if total.count() == 0 {
                continue;
            }
            let figures = [
                figures::count(total.count()),
                figures::mean(total),
                figures::latency(total.p50_us()),
                figures::latency(total.p99_us()),
            ];
            let stages = times.stages().map(|(_, stage)| figures::mean(stage));
            let names = [v.name.clone(), kind.to_owned()];
            table.row(names.into_iter().chain(figures).chain(stages));
        }
    }
    table
}

fn epochs(sessions: &[SessionStatus]) -> Table {
    let mut table = Table::new([
        Column::name("EPOCH OF"),
        Column::figure("EPOCH"),
        Column::word("DIGEST"),
        Column::name("KEY"),
    ]);
    for s in sessions {
        table.row([
            s.host.clone(),
            s.epoch.to_string(),
            if s.digest { "crc32c" } else { "-" }.to_owned(),
            s.key.clone().unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    table
}

fn queues(sessions: &[SessionStatus]) -> Table {
    let mut table = Table::new([
        Column::name("QUEUE OF"),
        Column::figure("QUEUE"),
        Column::figure("GROUP"),
        Column::name("DEVICE"),
        Column::figure("READS"),
        Column::figure("WRITES"),
        Column::figure("READ"),
        Column::figure("WRITTEN"),
        Column::figure("IN FLIGHT"),
        Column::figure("ERRORS"),
    ]);
    for s in sessions {
        for q in &s.queues {
            table.row([
                s.host.clone(),
                q.queue.to_string(),
                q.poll_group.to_string(),
                q.device.clone(),
                figures::count(q.io.reads),
                figures::count(q.io.writes),
                figures::size(q.io.read_bytes),
                figures::size(q.io.written_bytes),
                q.io.in_flight.to_string(),
                figures::count(q.io.errors),
            ]);
        }
    }
    table
}

/// Sentences with the counters of all poll groups together.
fn counters(status: &TargetStatus) -> [String; 5] {
    let t = &status.total;
    [
        "commands: {reads} reads, {writes} writes ({in_capsule_writes} in capsule), {flushes} flushes, \
         {discards} discards, {write_zeroes} write-zeroes, {failed_commands} failed"
            .to_owned(),
        format!(
            "fenced: {} holders ({} by take-over), {{fenced_commands}} commands, {{stale_rdma_blocked}} stale RDMA \
             operations; a lost initiator keeps its volumes for {} s",
            status.fencings,
            status.take_overs,
            status.lease_ms.div_ceil(1000)
        ),
        "messages: {sends} SEND, {rdma_writes} WRITE, {rdma_writes_with_imm} WRITE_WITH_IMM, {rdma_reads} READ, \
         {signaled} signaled, {send_doorbells} doorbells, {completions} completions"
            .to_owned(),
        format!(
            "cache: {} arena of {} pages, {{arena_free_bytes}} free, {{cached_bytes}} cached, {{dirty_bytes}} of \
             {{dirty_max_bytes}} dirty, {} hits, {{cache_evictions}} evictions, {{cache_moved}} moved, \
             {{cache_prefetched}} read ahead",
            figures::size(status.arena_bytes),
            figures::size(status.arena_page_bytes),
            figures::percent(t.hit_ratio())
        ),
        format!(
            "write-backs: {{write_backs}} of {{write_back_bytes}} ({} each), {{dirty_limited}} writes beyond the \
             limit of dirty blocks; waits: {{memory_waits}} for memory, {{range_waits}} for ranges",
            t.bytes_per_write_back().map_or_else(|| "-".to_owned(), figures::size)
        ),
    ]
    .map(|sentence| figures::with_counters(&sentence, t))
}

#[cfg(test)]
mod tests {
    use rblk_operate::target::volume_counts::VolumeCounts;

    use super::super::tests::volume;
    use super::*;

    #[test]
    fn only_a_volume_with_a_store_shows_its_generation() {
        let shown = |store, number| {
            let volume = volume("v", store, CacheMode::None);
            generation(&VolumeStatus { generation: number, ..volume })
        };
        assert_eq!(shown("file", 3), "3");
        assert_eq!(shown("file", 0), "0");
        assert_eq!(shown("memory", 1_795_360_000_000_001), "-");
        assert_eq!(shown("null", 1_795_360_000_000_001), "-");
    }

    #[test]
    fn only_volumes_with_a_store_have_a_line_about_their_cache() {
        assert!(caches(&[volume("m", "memory", CacheMode::None)]).is_empty());
        let counts = VolumeCounts {
            hits: 999,
            misses: 1,
            evictions: 12,
            store_errors: 3,
            cached_bytes: 3 << 19,
            dirty_bytes: 8192,
            failed_blocks: 2,
        };
        let cache_min_bytes = 64 << 20;
        let busy = VolumeStatus {
            counts,
            cache_min_bytes,
            ..volume("busy", "file", CacheMode::WriteBack)
        };
        let bounded = VolumeStatus {
            cache_max_bytes: Some(256 << 20),
            ..volume("bounded", "file", CacheMode::WriteThrough)
        };
        let volumes = [
            volume("m", "memory", CacheMode::None),
            busy,
            volume("idle", "file", CacheMode::WriteThrough),
        ];
        let text = caches(&[bounded]).to_string();
        assert!(text.contains("0B of 256MiB"), "{text}");
        let text = caches(&volumes).to_string();
        let lines: Vec<Vec<&str>> =
            text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines,
            [
                ["busy", "write-back", "99%", "1.5MiB", "64MiB", "8KiB", "2", "12", "3"],
                ["idle", "write-through", "-", "0B", "-", "0B", "0", "0", "0"]
            ]
        );
    }

    #[test]
    fn times_are_shown_by_stage() {
        let mut v = volume("v", "file", CacheMode::None);
        let read = &mut v.latency.read;
        (1..=100).for_each(|us| read.total.record(us * 10));
        (1..=100).for_each(|us| read.store.record(us * 9));
        let text = latencies(&[v]).to_string();
        let row: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            ["v", "read", "100", "505us", "480us", "960us", "-", "-", "-", "454us", "-"]
        );
    }
}
