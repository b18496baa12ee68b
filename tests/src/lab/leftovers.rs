//! What a test must not leave: devices, mounts, processes, RDMA objects.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use super::process::signal;
use super::usage::rdma_resources;

const DAEMONS: [&str; 5] =
    ["rblk-target", "rblk-targetd", "rblk-initiator", "rblk-initiatord", "fio"];

/// What is still there after `patience`, in words. `before` is what the RDMA core had at the start.
pub(super) fn find(before: &BTreeMap<String, u64>, patience: Duration) -> Vec<String> {
    let since = Instant::now();
    loop {
        let found = look(before);
        if found.is_empty() || since.elapsed() > patience {
            return found;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn look(before: &BTreeMap<String, u64>) -> Vec<String> {
    let mut found: Vec<String> =
        named("/dev", "ublkb").iter().map(|name| format!("/dev/{name}")).collect();
    found.extend(
        named("/run/rblk/mounts", "").iter().map(|name| format!("/run/rblk/mounts/{name}")),
    );
    found.extend(daemons().iter().map(|(pid, name)| format!("process {pid} ({name})")));
    found.extend(super::disk::left());
    let now = rdma_resources();
    let more = |(name, count): (&String, &u64)| {
        let was = before.get(name).copied().unwrap_or(0);
        (*count > was).then(|| format!("{} {name} of RDMA devices", count - was))
    };
    found.extend(now.iter().filter_map(more));
    found
}

/// Takes down what an earlier test, or this one, left.
pub(super) fn sweep() {
    for (pid, _) in daemons() {
        signal("KILL", &pid.to_string());
    }
    let since = Instant::now();
    while !daemons().is_empty() && since.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(50));
    }
    if Path::new("/run/netns/rblkfar").exists() {
        super::far::take_down();
    }
    super::disk::sweep();
    for name in named("/run/rblk/mounts", "") {
        let _ = std::fs::remove_file(Path::new("/run/rblk/mounts").join(name));
    }
}

/// How many ublk devices have no server any more. A killed daemon leaves its device's number taken.
pub(super) fn dead_devices() -> usize {
    named("/dev", "ublkc").len()
}

fn daemons() -> Vec<(u32, String)> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    processes
        .flatten()
        .filter_map(|process| {
            let pid: u32 = process.file_name().to_str()?.parse().ok()?;
            // A zombie has a name, too, but holds nothing.
            let stat = std::fs::read_to_string(process.path().join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
            let dead = rest.starts_with('Z') || rest.starts_with('X');
            (!dead && DAEMONS.contains(&name)).then(|| (pid, name.to_owned()))
        })
        .collect()
}

fn named(dir: &str, prefix: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).collect()
}
