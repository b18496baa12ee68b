//! Where a run runs: everything about this machine that its numbers depend on.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rblk_operate::sysfs;

use crate::child;
use crate::result::{Fact, Place};

/// How long a tool may take to tell its version.
const LIMIT: Duration = Duration::from_secs(20);
/// Longest value kept.
const VALUE_MAX: usize = 300;
/// Set by the lab's guest.
const LAB: &str = "RBLK_LAB_RDMA_ADDR";
/// The commit, where the sources are not beside the program.
const COMMIT: &str = "RBLK_COMMIT";

/// What can be known of this machine; what cannot is left out.
#[must_use]
pub fn here() -> Place {
    let cpuinfo = read("/proc/cpuinfo");
    Place {
        host: read("/proc/sys/kernel/hostname"),
        kernel: read("/proc/sys/kernel/osrelease"),
        cpu: field(&cpuinfo, "model name").unwrap_or_default(),
        cpus: std::thread::available_parallelism()
            .map_or(0, |count| u32::try_from(count.get()).unwrap_or(u32::MAX)),
        commit: commit(),
        lab: std::env::var_os(LAB).is_some(),
        facts: facts(),
    }
}

fn facts() -> Vec<Fact> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| {
        let value: String = value.trim().chars().take(VALUE_MAX).collect();
        if !value.is_empty() {
            facts.push(Fact { name: name.to_owned(), value });
        }
    };
    add("kernel build", read("/proc/version"));
    add("kernel command line", read("/proc/cmdline"));
    add("memory", field(&read("/proc/meminfo"), "MemTotal").unwrap_or_default());
    let clock = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    add("clock source", read(clock));
    add("governor", read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"));
    add("hypervisor", hypervisor());
    for device in sysfs::names_in(&sysfs::rdma_class(Path::new("/"))) {
        add(&format!("RDMA device {device}"), rdma_device(&device));
    }
    add("load", read("/proc/loadavg"));
    add("fio", said("fio", &["--version"]));
    if child::is_installed("nbdkit") {
        add("nbdkit", said("nbdkit", &["--version"]));
    }
    facts
}

/// A device's link, firmware, and the interface under it.
fn rdma_device(device: &str) -> String {
    let dir = sysfs::rdma_class(Path::new("/")).join(device);
    let read = |file: &str| read(dir.join(file));
    let mut words = Vec::new();
    let mut add = |name: &str, value: String| {
        if !value.is_empty() {
            words.push(format!("{name} {value}"));
        }
    };
    add("type", read("node_type"));
    add("board", read("board_id"));
    add("firmware", read("fw_ver"));
    add("link", read("ports/1/link_layer"));
    add("state", read("ports/1/state"));
    add("rate", read("ports/1/rate"));
    let net = read("ports/1/gid_attrs/ndevs/0");
    if !net.is_empty() {
        let mtu = self::read(Path::new("/sys/class/net").join(&net).join("mtu"));
        add("interface", format!("{net}, MTU {mtu}"));
    }
    words.join(", ")
}

/// Who emulates this machine, as far as it says so.
fn hypervisor() -> String {
    let product = read("/sys/class/dmi/id/product_name");
    let vendor = read("/sys/class/dmi/id/sys_vendor");
    let flag = field(&read("/proc/cpuinfo"), "flags").unwrap_or_default();
    if flag.split(' ').any(|flag| flag == "hypervisor") {
        format!("{vendor} {product}")
    } else {
        String::new()
    }
}

/// The commit of the sources around this program, with `+` if they have been changed.
fn commit() -> String {
    if let Ok(commit) = std::env::var(COMMIT) {
        return commit;
    }
    let Ok(exe) = std::env::current_exe() else { return String::new() };
    let Some(dir) = exe.ancestors().find(|dir| dir.join(".git").exists()) else {
        return String::new();
    };
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        // Its owner may be another user: this only looks.
        command.args(["-c", "safe.directory=*", "-C"]).arg(dir).args(arguments);
        child::output(&mut command, LIMIT).map(|text| text.trim().to_owned())
    };
    let Ok(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return String::new() };
    let changed = git(&["diff", "--quiet", "HEAD"]).is_err();
    format!("{commit}{}", if changed { "+" } else { "" })
}

fn said(program: &str, arguments: &[&str]) -> String {
    child::output(Command::new(program).args(arguments), LIMIT)
        .map(|text| text.lines().next().unwrap_or_default().to_owned())
        .unwrap_or_default()
}

fn read(file: impl AsRef<Path>) -> String {
    fs::read_to_string(file).unwrap_or_default().trim().to_owned()
}

/// The value of the first line `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known() {
        let place = here();
        assert!(!place.kernel.is_empty() && place.cpus > 0);
        assert!(place.facts.iter().any(|fact| fact.name == "memory"));
    }

    #[test]
    fn fields_are_found() {
        let text = "processor\t: 0\nmodel name\t: A B\nmodel name\t: C\n";
        assert_eq!(field(text, "model name"), Some("A B".to_owned()));
        assert_eq!(field(text, "flags"), None);
    }
}
