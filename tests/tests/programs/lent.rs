//! Descriptors that a daemon keeps of the script that starts it, and the daemon's protection:
//! `serve` and `vhost`. The process of a mount is in `lab_faults/in_use.rs`.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use rblk_tests::program::{Target, program, wait_for};

/// Opens descriptors, as a script that holds a lock does, and executes its arguments.
const SCRIPT: &str = r#"exec 9>"$0"; flock -n 9; exec 12</; exec "$@""#;

/// Whether this process, and so a program that it starts, has CAP_SYS_RESOURCE (24).
fn may_lower_scores() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(set.trim(), 16).unwrap() >> 24 & 1 == 1
}

/// Checks that the process keeps no descriptor of the script, and leaves no core file.
#[track_caller]
fn keeps_nothing(pid: u32, lent: &Path, score: &str) {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let open: Vec<PathBuf> = fs::read_dir(proc.join("fd"))
        .unwrap()
        .flatten()
        .map(|fd| fs::read_link(fd.path()).unwrap_or_default())
        .collect();
    assert!(!open.iter().any(|to| to == lent || to == Path::new("/")), "kept: {open:?}");
    let taken = Command::new("flock").arg("-n").arg(lent).arg("true").status().unwrap();
    assert!(taken.success(), "the lock of the script is held");
    let limits = fs::read_to_string(proc.join("limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["0", "0"], "{core}");
    // Without CAP_SYS_RESOURCE, which root of a container may lack, the score stays.
    if may_lower_scores() {
        assert_eq!(fs::read_to_string(proc.join("oom_score_adj")).unwrap().trim(), score);
    }
}

/// A process that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_target_keeps_no_descriptor_of_its_script() {
    let dir = tempfile::tempdir().unwrap();
    let lent = dir.path().join("lock");
    let script = ["bash", "-ec", SCRIPT, lent.to_str().unwrap()];
    let args = ["--memory", "m=1MiB", "--auth", "none"];
    let target = Target::start_by(&script, dir.path(), &args);
    keeps_nothing(target.status().pid, &lent, "-900");
}

#[test]
fn a_disk_of_a_guest_keeps_no_descriptor_of_its_script() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let target = Target::start(dir.path(), &["--memory", "m=1MiB", "--auth", "none"]);
    let name = format!("lent-{}", std::process::id());
    let (lent, socket) = (at("lock"), at("guest.sock"));
    let child = Command::new("bash")
        .args(["-ec", SCRIPT])
        .arg(&lent)
        .arg(program("rblk-initiator"))
        .args(["vhost", "--foreground", "--name", &name, &target.address.to_string(), "m"])
        .arg("--socket")
        .arg(&socket)
        .stderr(fs::File::create(at("vhost.log")).unwrap())
        .stdout(fs::File::create(at("vhost.out")).unwrap())
        .spawn()
        .unwrap();
    let child = Ended(child);
    // Printed when guests may connect.
    wait_for("a disk for a guest", || {
        let out = fs::read_to_string(at("vhost.out")).unwrap_or_default();
        (!out.is_empty()).then_some(())
    });
    keeps_nothing(child.0.id(), &lent, "-1000");
}
