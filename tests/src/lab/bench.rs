//! [`Bench`]: runs of `rblk-bench`, and checks for leftovers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rblk_bench::result::Run;
use rblk_bench::{JOURNALS, TAG, folder};

use super::Lab;
use super::call_probe::CallProbe;
use super::kernel_feature::KernelFeature;
use super::process::{Finished, Running, signal, start};
use super::wait::{DEADLINE, until};

/// Time to set everything up, to run two cells of a second each, and to take it down again.
/// Programs start slowly here.
const COMPARE: Duration = Duration::from_secs(600);
/// Time for all parts of a quick check.
const HW_CHECK: Duration = Duration::from_secs(400);
/// Time to clean up after a killed run: every step has its own deadline.
const CLEAN_UP: Duration = Duration::from_secs(120);

/// The bench. Drop cleans up, in case a test failed during a run.
#[derive(Debug)]
pub struct Bench<'l> {
    lab: &'l Lab,
    modules: BTreeSet<String>,
    _probe: Option<CallProbe>,
}

impl<'l> Bench<'l> {
    /// Notes the kernel's modules before any run.
    #[must_use]
    pub fn new(lab: &'l Lab) -> Self {
        let probe = KernelFeature::COUNTED_CALLS.is_there() && CallProbe::trigger().exists();
        Self { lab, modules: modules(), _probe: probe.then(CallProbe::keep) }
    }

    /// Compares systems in the cells of `smoke`, one round of a second each, with small disks.
    ///
    /// # Panics
    /// The program cannot be started.
    #[must_use]
    pub fn start(&self, name: &str, systems: &[&str]) -> Running {
        let mut command = self.lab.program("rblk-bench");
        command.args(["compare", "--cells", "smoke", "--rounds", "1", "--seconds", "1"]);
        command.args(["--size", "32MiB", "--no-perftest", "--address", self.lab.host()]);
        command.arg("--out").arg(self.folder(name));
        if !systems.is_empty() {
            command.args(["--systems", &systems.join(",")]);
        }
        if !self.may_probe() {
            command.arg("--no-probe");
        }
        Running::start(command)
    }

    /// Compares all systems and returns the results.
    ///
    /// # Panics
    /// The run fails, or takes too long.
    #[must_use]
    pub fn compare(&self, name: &str) -> Run {
        let finished = self.start(name, &[]).finish(COMPARE);
        println!("{finished}");
        let _ = finished.ok();
        let run = folder::read(&self.folder(name).join("run.json"));
        run.unwrap_or_else(|e| panic!("{e:#}")).expect("a run.json")
    }

    /// Whether the costs of I/Os may be measured here. To count system calls, the kernel patches
    /// the code of their entry. The emulator may run an instruction that is half patched, and
    /// Linux 6 ends by that (`Oops: int3`).
    #[must_use]
    pub fn may_probe(&self) -> bool {
        KernelFeature::COUNTED_CALLS.is_there()
    }

    /// Checks the device of the lab quickly, and returns the JSON output.
    ///
    /// # Panics
    /// The check takes too long, or prints no JSON.
    #[must_use]
    pub fn hw_check(&self, words: &[&str]) -> (Finished, serde_json::Value) {
        let mut command = self.lab.program("rblk-bench");
        command.args(["hw-check", self.lab.host(), "--quick", "--output", "json"]).args(words);
        let finished = Running::start(command).finish(HW_CHECK);
        println!("{finished}");
        let said = serde_json::from_str(&finished.stdout);
        let said = said.unwrap_or_else(|e| panic!("no JSON: {e}"));
        (finished, said)
    }

    /// Compares one system of each kind that leaves something, and kills the program alone during
    /// its measurements.
    ///
    /// # Panics
    /// The program ends before, or takes too long.
    pub fn kill_amid(&self, name: &str) {
        let mut running = self.start(name, &["rblk-verbs", "nvme-rdma", "nbd"]);
        let raw = self.folder(name).join("raw");
        until("a first sample", COMPARE, || {
            assert!(running.is_running(), "rblk-bench ended before it measured anything");
            std::fs::read_dir(&raw).ok()?.flatten().next()
        });
        signal("KILL", &running.pid().to_string());
        let finished = running.finish(DEADLINE);
        assert_eq!(finished.code(), 128 + 9, "{finished}");
    }

    /// `rblk-bench clean-up`.
    ///
    /// # Panics
    /// The command takes too long.
    #[must_use]
    pub fn clean_up(&self) -> Finished {
        let mut command = self.lab.program("rblk-bench");
        command.arg("clean-up");
        Running::start(command).finish(CLEAN_UP)
    }

    /// Leftovers of runs, in words.
    #[must_use]
    pub fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        for dir in [
            JOURNALS,
            "/run/rblk/mounts",
            "/sys/kernel/config/nvmet/subsystems",
            "/sys/kernel/config/nvmet/ports",
            "/sys/class/nvme",
        ] {
            left.extend(names(Path::new(dir)).into_iter().map(|name| format!("{dir}/{name}")));
        }
        for disk in names(Path::new("/sys/block")) {
            if disk.starts_with("ublkb") || disk.starts_with("nvme") {
                left.push(format!("/dev/{disk}"));
            }
            if Path::new("/sys/block").join(&disk).join("pid").exists() {
                left.push(format!("/dev/{disk}, connected"));
            }
        }
        let ublk = names(Path::new("/dev")).into_iter().filter(|name| name.starts_with("ublkc"));
        left.extend(ublk.map(|name| format!("/dev/{name}")));
        let loaded = modules();
        let more = loaded.difference(&self.modules).filter(|name| !is_algorithm(name));
        left.extend(more.map(|name| format!("module {name}")));
        left.extend(children().into_iter().map(|pid| format!("process {pid}")));
        if std::fs::read_to_string(CallProbe::trigger())
            .is_ok_and(|text| text.contains("rblk_bench"))
        {
            left.push("system calls are counted".to_owned());
        }
        left
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.lab.path(name)
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        if !self.left().is_empty() {
            println!("{}", self.clean_up());
        }
    }
}

/// Modules that were loaded: parts of the kernel have no such file.
fn modules() -> BTreeSet<String> {
    let place = Path::new("/sys/module");
    names(place).into_iter().filter(|name| place.join(name).join("initstate").exists()).collect()
}

/// Whether a module is an algorithm of the kernel's crypto API, or a library that only those use.
/// The kernel loads them when something asks for an algorithm, and no run takes them away.
fn is_algorithm(name: &str) -> bool {
    let said = start(&["modinfo", "-F", "alias", name]).finish(DEADLINE);
    let users = names(&Path::new("/sys/module").join(name).join("holders"));
    said.stdout.lines().any(|alias| alias.starts_with("crypto-"))
        || !users.is_empty() && users.iter().all(|user| is_algorithm(user))
}

/// Processes that a run has started.
fn children() -> Vec<String> {
    let mark = format!("{TAG}=");
    let is_child = |pid: &String| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|word| word.starts_with(mark.as_bytes()))
    };
    let processes = names(Path::new("/proc")).into_iter();
    processes.filter(|name| name.bytes().all(|b| b.is_ascii_digit())).filter(is_child).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
