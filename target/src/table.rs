//! Tables for people.

use std::fmt::{self, Write};

use nix::errno::Errno;
use rblk_config::{ByteSize, CacheMode, HostConfig};
use rblk_protocol::width::wide;
use rblk_target::control::status::{
    DrainStatus, HolderStatus, SessionStatus, TargetStatus, VolumeStatus,
};

/// The state of a target.
pub(crate) fn status(status: &TargetStatus) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = target(&mut text, status)
        .and_then(|()| volumes(&mut text, &status.volumes))
        .and_then(|()| caches(&mut text, &status.volumes))
        .and_then(|()| sessions(&mut text, &status.sessions))
        .and_then(|()| counters(&mut text, status));
    text
}

/// The hosts that may connect to a target.
pub(crate) fn hosts(hosts: &[HostConfig]) -> String {
    let mut text = format!("{:<20} {:<9} {:<30} KEYS\n", "HOST", "TAKE-OVER", "VOLUMES");
    for host in hosts {
        let volumes: Vec<String> = host.volumes.iter().map(ToString::to_string).collect();
        let keys: Vec<String> = host.keys.iter().map(ToString::to_string).collect();
        let take_over = if host.take_over { "yes" } else { "no" };
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<20} {take_over:<9} {:<30} {}",
            host.name,
            volumes.join(","),
            keys.join(",")
        );
    }
    text
}

fn target(text: &mut String, status: &TargetStatus) -> fmt::Result {
    let state = if status.draining { "draining" } else { "serving" };
    writeln!(
        text,
        "target {} ({state}, pid {}, version {}, up {} s)",
        status.name, status.pid, status.version, status.uptime_s
    )?;
    if let Some(drain) = &status.drain {
        writeln!(text, "{}", draining(drain))?;
    }
    writeln!(text, "listening on {}", status.listen.join(", "))?;
    writeln!(text, "{}", authentication(status))?;
    for device in &status.devices {
        writeln!(text, "device {} ({})", device.name, device.transport)?;
    }
    Ok(())
}

/// Who may log in.
fn authentication(status: &TargetStatus) -> String {
    let who = match status.auth.as_str() {
        "required" => "hosts prove their keys",
        _ if status.insecure => {
            "none, insecure: everybody who reaches an address can read, write and take over"
        }
        _ => "none (auth = \"none\"): everybody on this host may log in",
    };
    let mut text = format!("authentication: {who}");
    let unproven = status.unproven + status.total.failed_proofs;
    if unproven > 0 {
        let _ = write!(text, "; {unproven} connections did not prove who they are");
    }
    if status.total.bad_records > 0 {
        let _ = write!(text, "; {} ended by records changed on the way", status.total.bad_records);
    }
    text
}

fn volumes(text: &mut String, volumes: &[VolumeStatus]) -> fmt::Result {
    writeln!(
        text,
        "\n{:<20} {:<7} {:>10} {:>6} {:<6} {:<6} {:>10} {:<20} BACKING",
        "VOLUME", "STORE", "SIZE", "BLOCK", "MODE", "IN USE", "GENERATION", "HELD BY"
    )?;
    for v in volumes {
        writeln!(
            text,
            "{:<20} {:<7} {:>10} {:>6} {:<6} {:<6} {:>10} {:<20} {}",
            v.name,
            v.store,
            ByteSize(v.size_bytes).to_string(),
            v.block_size,
            if v.read_only { "ro" } else { "rw" },
            if v.in_use { "yes" } else { "no" },
            generation(v),
            holder(v.holder.as_ref()),
            v.notes.path.as_deref().unwrap_or("-")
        )?;
    }
    Ok(())
}

fn sessions(text: &mut String, sessions: &[SessionStatus]) -> fmt::Result {
    writeln!(
        text,
        "\n{:<20} {:<24} {:<4} {:<3} {:>6} {:>12} {:<6} VOLUMES",
        "SESSION OF", "FROM", "AUTH", "ENC", "EPOCH", "CONNECTIONS", "DIGEST"
    )?;
    for s in sessions {
        let volumes = if s.fenced { "(fenced)".to_owned() } else { s.volumes.join(", ") };
        let auth = if s.key.is_some() { "key" } else { "-" };
        let encrypted = if s.encrypted { "yes" } else { "no" };
        writeln!(
            text,
            "{:<20} {:<24} {auth:<4} {encrypted:<3} {:>6} {:>12} {:<6} {volumes}",
            s.host,
            s.peer,
            s.epoch,
            s.connections,
            if s.digest { "crc32c" } else { "-" }
        )?;
    }
    Ok(())
}

fn counters(text: &mut String, status: &TargetStatus) -> fmt::Result {
    let t = &status.total;
    writeln!(
        text,
        "\ncommands: {} reads, {} writes ({} in capsule), {} flushes, {} discards, {} write-zeroes, {} failed",
        t.reads,
        t.writes,
        t.in_capsule_writes,
        t.flushes,
        t.discards,
        t.write_zeroes,
        t.failed_commands
    )?;
    writeln!(
        text,
        "fenced: {} holders ({} by take-over), {} commands, {} stale RDMA operations; a lost initiator keeps its volumes for {} s",
        status.fencings,
        status.take_overs,
        t.fenced_commands,
        t.stale_rdma_blocked,
        status.lease_ms.div_ceil(1000)
    )?;
    writeln!(
        text,
        "messages: {} SEND, {} WRITE, {} WRITE_WITH_IMM, {} READ, {} signaled, {} doorbells, {} completions",
        t.sends,
        t.rdma_writes,
        t.rdma_writes_with_imm,
        t.rdma_reads,
        t.signaled,
        t.send_doorbells,
        t.completions
    )?;
    writeln!(
        text,
        "cache: {} arena of {} pages, {} cached, {} of {} dirty, {} hits, {} evictions, {} read ahead",
        rough(status.arena_bytes),
        rough(status.arena_page_bytes),
        rough(t.cached_bytes),
        rough(t.dirty_bytes),
        rough(t.dirty_max_bytes),
        percent(t.hit_ratio()),
        t.cache_evictions,
        t.cache_prefetched
    )?;
    writeln!(
        text,
        "write-backs: {} of {} ({} each), {} writes beyond the limit of dirty blocks; waits: {} for memory, {} for ranges",
        t.write_backs,
        rough(t.write_back_bytes),
        t.bytes_per_write_back().map_or_else(|| "-".to_owned(), rough),
        t.dirty_limited,
        t.memory_waits,
        t.range_waits
    )
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

/// The generation of a volume with a store. A volume without one is gone when this process ends, so
/// its generation is not remembered: it begins at the time in microseconds and says nothing.
fn generation(volume: &VolumeStatus) -> String {
    match volume.store.as_str() {
        "file" => volume.generation.to_string(),
        _ => "-".to_owned(),
    }
}

/// Who may write to a volume.
fn holder(holder: Option<&HolderStatus>) -> String {
    let Some(holder) = holder else { return "-".to_owned() };
    let more = if holder.shared { " and others" } else { "" };
    let away = if holder.present { "" } else { " (away)" };
    format!("{}{more}{away}", holder.host)
}

/// What the cache does for volumes with a store; nothing if there are none.
fn caches(text: &mut String, volumes: &[VolumeStatus]) -> fmt::Result {
    let mut with_store = volumes.iter().filter(|v| v.store == "file").peekable();
    if with_store.peek().is_none() {
        return Ok(());
    }
    writeln!(
        text,
        "\n{:<20} {:<13} {:>6} {:>10} {:>10} {:>10} {:>9} STORE ERRORS",
        "CACHE OF", "MODE", "HITS", "CACHED", "DIRTY", "UNWRITABLE", "EVICTIONS"
    )?;
    for v in with_store {
        let c = &v.counts;
        let mode = match v.cache {
            CacheMode::None => "none",
            CacheMode::WriteThrough => "write-through",
            CacheMode::WriteBack => "write-back",
        };
        let last = match v.last_errno {
            None => String::new(),
            Some(errno) => format!(" (last {:?})", Errno::from_raw(errno)),
        };
        writeln!(
            text,
            "{:<20} {mode:<13} {:>6} {:>10} {:>10} {:>10} {:>9} {}{last}",
            v.name,
            percent(c.hit_ratio()),
            rough(c.cached_bytes),
            rough(c.dirty_bytes),
            c.failed_blocks,
            c.evictions,
            c.store_errors
        )?;
    }
    Ok(())
}

/// A ratio as people read it; `-` for none.
fn percent(ratio: Option<f64>) -> String {
    ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{:.1}%", ratio * 100.0))
}

/// Bytes to about three digits, rounded down: [`ByteSize`] is exact, and long where a number is not
/// round.
fn rough(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = wide(bytes.max(1).ilog2() / 10);
    let (whole, rest) = (bytes >> (10 * unit), bytes & ((1 << (10 * unit)) - 1));
    let tenths = (u128::from(rest) * 10) >> (10 * unit);
    let name = UNITS[unit];
    if tenths == 0 { format!("{whole}{name}") } else { format!("{whole}.{tenths}{name}") }
}

#[cfg(test)]
mod tests {
    use rblk_target::control::status::VolumeNotes;
    use rblk_target::volume_stats::VolumeCounts;

    use super::*;

    #[test]
    fn bytes_are_rounded_down() {
        let cases = [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1KiB"),
            (1535, "1.4KiB"),
            (1536, "1.5KiB"),
            ((1 << 20) - 1, "1023.9KiB"),
            (64 << 20, "64MiB"),
            (u64::MAX, "15.9EiB"),
        ];
        for (bytes, shown) in cases {
            assert_eq!(rough(bytes), shown, "{bytes}");
        }
    }

    #[test]
    fn a_drain_is_told_in_words() {
        let told = |sessions, left_ms| draining(&DrainStatus { lasted_ms: 1, left_ms, sessions });
        assert_eq!(told(0, 5000), "draining: every initiator has left");
        assert_eq!(told(1, 4001), "draining: 1 session left, ended in 5 s at the latest");
        assert_eq!(told(2, 0), "draining: ending 2 sessions that stayed");
    }

    #[test]
    fn holders_are_told_in_words() {
        let of = |shared, present| HolderStatus { host: "db1".to_owned(), shared, present };
        assert_eq!(holder(None), "-");
        assert_eq!(holder(Some(&of(false, true))), "db1");
        assert_eq!(holder(Some(&of(true, false))), "db1 and others (away)");
    }

    fn volume(name: &str, store: &str, cache: CacheMode, counts: VolumeCounts) -> VolumeStatus {
        VolumeStatus {
            name: name.to_owned(),
            store: store.to_owned(),
            size_bytes: 1 << 30,
            block_size: 4096,
            read_only: false,
            volatile_cache: true,
            cache,
            counts,
            io: rblk_target::traffic::IoCounts::default(),
            latency: rblk_target::traffic::VolumeTimes::default(),
            rates: None,
            last_errno: None,
            in_use: false,
            generation: 0,
            holder: None,
            notes: VolumeNotes::default(),
        }
    }

    #[test]
    fn only_a_volume_with_a_store_shows_its_generation() {
        let shown = |store, number| {
            let volume = volume("v", store, CacheMode::None, VolumeCounts::default());
            generation(&VolumeStatus { generation: number, ..volume })
        };
        assert_eq!(shown("file", 3), "3");
        assert_eq!(shown("file", 0), "0");
        assert_eq!(shown("memory", 1_795_360_000_000_001), "-");
        assert_eq!(shown("null", 1_795_360_000_000_001), "-");
    }

    #[test]
    fn only_volumes_with_a_store_have_a_line_about_their_cache() {
        let mut text = String::new();
        caches(&mut text, &[volume("m", "memory", CacheMode::None, VolumeCounts::default())])
            .unwrap();
        assert_eq!(text, "");

        let busy = VolumeCounts {
            hits: 999,
            misses: 1,
            evictions: 12,
            store_errors: 3,
            cached_bytes: 3 << 19,
            dirty_bytes: 8192,
            failed_blocks: 2,
        };
        let volumes = [
            volume("m", "memory", CacheMode::None, VolumeCounts::default()),
            VolumeStatus {
                last_errno: Some(Errno::ENOSPC as i32),
                ..volume("busy", "file", CacheMode::WriteBack, busy)
            },
            volume("idle", "file", CacheMode::WriteThrough, VolumeCounts::default()),
        ];
        caches(&mut text, &volumes).unwrap();
        let lines: Vec<Vec<&str>> =
            text.lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines,
            [
                vec![
                    "busy",
                    "write-back",
                    "99.9%",
                    "1.5MiB",
                    "8KiB",
                    "2",
                    "12",
                    "3",
                    "(last",
                    "ENOSPC)"
                ],
                vec!["idle", "write-through", "-", "0B", "0B", "0", "0", "0"]
            ]
        );
    }
}
