//! The machine of a run: all facts that its numbers depend on.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rblk_operate::sysfs::{self, names_in, rdma_class};

use crate::child;
use crate::result::{Fact, Place};
use crate::sysfs::Card;

const LIMIT: Duration = Duration::from_secs(20);
const VALUE_MAX: usize = 300;
const LAB: &str = "RBLK_LAB_RDMA_ADDR";
/// The commit, where the sources are not beside the program.
const COMMIT: &str = "RBLK_COMMIT";

pub(crate) fn here() -> Place {
    let cpuinfo = text("/proc/cpuinfo");
    Place {
        host: text("/proc/sys/kernel/hostname"),
        kernel: text("/proc/sys/kernel/osrelease"),
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
    add("kernel build", text("/proc/version"));
    add("kernel command line", text("/proc/cmdline"));
    add("memory", field(&text("/proc/meminfo"), "MemTotal").unwrap_or_default());
    let clock = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    add("clock source", text(clock));
    add("governor", text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"));
    add("hypervisor", hypervisor());
    for device in names_in(&rdma_class(Path::new("/"))) {
        add(&format!("RDMA device {device}"), rdma_device(&device));
    }
    add("load", text("/proc/loadavg"));
    add("fio", said("fio", &["--version"]));
    if child::is_installed("nbdkit") {
        add("nbdkit", said("nbdkit", &["--version"]));
    }
    facts
}

fn rdma_device(device: &str) -> String {
    let card = Card::read(Path::new("/"), device, 1, 0);
    let interface = card.interface_mtu.map(|mtu| format!("{}, MTU {mtu}", card.interface));
    let facts = [
        ("type", card.hca),
        ("board", card.board),
        ("firmware", card.firmware),
        ("link", card.link_layer),
        ("state", card.state),
        ("rate", card.rate),
        ("interface", interface.unwrap_or_default()),
    ];
    let known = facts.into_iter().filter(|(_, value)| !value.is_empty());
    known.map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
}

/// The emulator of this machine, if there is one that gives its name.
fn hypervisor() -> String {
    let product = text("/sys/class/dmi/id/product_name");
    let vendor = text("/sys/class/dmi/id/sys_vendor");
    let flag = field(&text("/proc/cpuinfo"), "flags").unwrap_or_default();
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
        // The repository may belong to another user.
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

fn text(file: &str) -> String {
    sysfs::text(Path::new(file))
}

fn field(lines: &str, name: &str) -> Option<String> {
    lines.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

#[cfg(test)]
mod tests;
