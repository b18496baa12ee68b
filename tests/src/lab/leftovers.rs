//! Leftovers that a test must not have: devices, mounts, processes, RDMA objects.
//!
//! Users of a ublk device without a server wait, and cannot be killed. So the servers are killed
//! first. Then the devices are stopped, which fails the waiting requests. Only then this waits for
//! the end of processes.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use rblk_initiator::front::ublk::{Control, DeviceState, UblkError};

use super::process::signal;
use super::usage::rdma_resources;

/// Sockets, notes and locks of mounts.
const MOUNTS: &str = "/run/rblk/mounts";
/// Logs of mounts, which unmounting keeps.
const LOGS: &str = "/run/rblk/log";
/// Time for each step of removing a device. Linux 6.12 may take 30 s to see that a server died.
const REMOVAL: Duration = Duration::from_secs(40);

const DAEMONS: [&str; 5] =
    ["rblk-target", "rblk-targetd", "rblk-initiator", "rblk-initiatord", "fio"];

/// The leftovers that still exist after `patience`, in words. `before` has the objects that the
/// RDMA core had at the start.
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
    let mut found: Vec<String> = ["ublkb", "ublkc"]
        .iter()
        .flat_map(|prefix| named("/dev", prefix))
        .map(|name| format!("/dev/{name}"))
        .collect();
    found.extend(named(MOUNTS, "").iter().map(|name| format!("{MOUNTS}/{name}")));
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

/// Removes the leftovers of this test and of earlier ones.
pub(super) fn sweep() {
    for (pid, _) in daemons() {
        signal("KILL", &pid.to_string());
    }
    // A daemon must end before its device can be stopped; users of the device end after that.
    wait_for_no("rblk");
    remove_devices();
    wait_for_no("");
    if Path::new("/run/netns/rblkfar").exists() {
        super::far::take_down();
    }
    super::group_network::take_down();
    super::disk::sweep();
    for dir in [MOUNTS, LOGS] {
        for name in named(dir, "") {
            let _ = std::fs::remove_file(Path::new(dir).join(name));
        }
    }
}

/// Kills the daemons of mounts, and the commands that may be about to start one.
pub(super) fn kill_initiators() {
    const NAMES: [&str; 3] = ["rblk-initiator", "setsid", "rblk-initiatord"];
    // A command becomes a daemon, so one look may miss both. Two looks that find none are enough.
    let mut none = 0;
    while none < 2 {
        let found = processes(&NAMES);
        none = if found.is_empty() { none + 1 } else { 0 };
        for (pid, _) in found {
            signal("KILL", &pid.to_string());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn wait_for_no(prefix: &str) {
    let since = Instant::now();
    while daemons().iter().any(|(_, name)| name.starts_with(prefix))
        && since.elapsed() < Duration::from_secs(5)
    {
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Removes all ublk devices: the lab has no others.
fn remove_devices() {
    let ids: Vec<u32> = named("/dev", "ublkc").iter().filter_map(|n| n[5..].parse().ok()).collect();
    if ids.is_empty() {
        return;
    }
    let remove = |id: u32| {
        // After a deadline the channel may still have a command in progress, so this opens a new
        // one.
        let mut control = Control::open()?;
        if control.info(id)?.state != DeviceState::Dead {
            control.stop(id, REMOVAL)?;
        }
        control.delete(id, REMOVAL)
    };
    for id in ids {
        match remove(id) {
            Ok(()) => println!("removed ublk device {id}, which a test had left"),
            Err(UblkError::NoSuchDevice { .. }) => {}
            Err(error) => println!("ublk device {id} cannot be removed: {error}"),
        }
    }
}

fn daemons() -> Vec<(u32, String)> {
    processes(&DAEMONS)
}

/// Live processes with one of these names.
fn processes(names: &[&str]) -> Vec<(u32, String)> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    processes
        .flatten()
        .filter_map(|process| {
            let pid: u32 = process.file_name().to_str()?.parse().ok()?;
            // A zombie has a name, too, but holds nothing.
            let stat = std::fs::read_to_string(process.path().join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
            let dead = rest.starts_with('Z') || rest.starts_with('X');
            (!dead && names.contains(&name)).then(|| (pid, name.to_owned()))
        })
        .collect()
}

fn named(dir: &str, prefix: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(prefix)).collect()
}
