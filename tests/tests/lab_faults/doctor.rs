//! The report of `doctor` on seeded faults: each fault adds exactly one line, and the command of
//! that line mends it.
//!
//! The network faults happen to an interface of the test's own, with a Soft-RoCE device of its own.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use rblk_config::{TargetConfig, VolumeConfig};
use rblk_tests::lab::{DEADLINE, Lab, MountFlags, Mounted, Running, run, start, until};

use super::{MIB, PATIENCE, sh};

/// The interface of the test, its device and its address.
const INTERFACE: &str = "d9";
const DEVICE: &str = "rxe9";
const ADDRESS: &str = "10.99.0.1";
/// A user without rights.
const NOBODY: &str = "65534";

/// A line other than `ok`: verdict, subject, finding; and the command.
type Line = ([String; 3], Option<String>);

/// The interface of the test, while this lives.
struct Net;

impl Net {
    fn new() -> Self {
        let net = Self;
        sh(&["ip", "link", "add", INTERFACE, "type", "dummy"]);
        sh(&["ip", "addr", "add", &format!("{ADDRESS}/24"), "dev", INTERFACE]);
        sh(&["ip", "link", "set", INTERFACE, "up", "mtu", "4500"]);
        sh(&["rdma", "link", "add", DEVICE, "type", "rxe", "netdev", INTERFACE]);
        net
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for words in [["rdma", "link", "del", DEVICE], ["ip", "link", "del", INTERFACE]] {
            // A fault may have removed it already.
            let _ = Command::new(words[0]).args(&words[1..]).status();
        }
    }
}

/// The doctors, and their findings.
struct Ward<'l> {
    lab: &'l Lab,
    rows: Vec<String>,
}

impl Ward<'_> {
    fn initiator(&self, address: &str, more: &[String]) -> Command {
        let mut command = self.lab.program("rblk-initiator");
        command.args(["doctor", address, "-o", "json"]).args(more);
        command
    }

    fn target(&self, config: &Path) -> Command {
        let mut command = self.lab.program("rblk-target");
        command.args(["doctor", "-o", "json", "--config"]).arg(config);
        command
    }

    /// Starts the target of a configuration, and waits until its port answers.
    fn serve(&self, config: &Path) -> Running {
        let mut command = self.lab.program("rblk-target");
        command.args(["serve", "--config"]).arg(config);
        let target = Running::start(command);
        until("the target to serve", DEADLINE, || {
            let address = format!("rdma://{ADDRESS}");
            let lines = look(self.initiator(&address, &self.lab.proofs()));
            lines.iter().all(|(line, _)| line[1] != "port").then_some(())
        });
        target
    }

    /// Runs a line as an administrator would, with the programs in the path.
    fn shell(&self, line: &str) {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("PATH={}:{path}", self.lab.programs().display());
        sh(&["env", &path, "sh", "-c", line]);
    }

    /// Seeds one fault. `mend` gets the command that the doctor proposes.
    fn seed(
        &mut self,
        fault: &str,
        doctor: &dyn Fn(&Self) -> Command,
        plant: impl FnOnce(),
        mend: impl FnOnce(&Self, &str),
    ) {
        let before = look(doctor(self));
        plant();
        let found = until("the doctor to see it", DEADLINE, || {
            let found: Vec<Line> = look(doctor(self)).difference(&before).cloned().collect();
            (!found.is_empty()).then_some(found)
        });
        let [([verdict, subject, what], Some(fix))] = found.as_slice() else {
            panic!("{fault}: not one line with a command: {found:#?}")
        };
        mend(self, fix);
        until("the doctor to see that it is mended", PATIENCE, || {
            let left: Vec<Line> = look(doctor(self)).difference(&before).cloned().collect();
            left.is_empty().then_some(())
        });
        println!("doctor: {fault}: {verdict} {subject}: {what} -> {fix}");
        self.rows.push(format!("| {fault} | {verdict} {subject}: {what} | `{fix}` | yes |"));
    }
}

/// The lines of a doctor that are warnings or failures.
fn look(command: Command) -> BTreeSet<Line> {
    let said = Running::start(command).finish(DEADLINE);
    let report: serde_json::Value = serde_json::from_str(&said.stdout)
        .unwrap_or_else(|e| panic!("the doctor gives no JSON: {e}: {said}"));
    let failures = report["failures"].as_u64().expect("a count");
    assert_eq!(said.code(), if failures == 0 { 0 } else { 7 }, "{said}");
    let text = |finding: &serde_json::Value, key: &str| finding[key].as_str().map(str::to_owned);
    let findings = report["findings"].as_array().expect("findings").iter();
    findings
        .filter(|finding| ["warn", "fail"].map(Some).contains(&finding["verdict"].as_str()))
        .map(|finding| {
            let line =
                ["verdict", "subject", "found"].map(|key| text(finding, key).expect("a text"));
            (line, text(finding, "fix"))
        })
        .collect()
}

/// A configuration for every address, with a volume on a file.
fn configuration(lab: &Lab) -> TargetConfig {
    TargetConfig {
        listen: vec!["rdma://0.0.0.0".to_owned(), "tcp://0.0.0.0".to_owned()],
        state_dir: lab.path("state"),
        poll_groups: Some(1),
        volumes: vec![VolumeConfig::file("v0", lab.path("v0.img"))],
        ..TargetConfig::default()
    }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn doctor_names_each_seeded_fault_and_its_command_mends_it() {
    run("doctor_names_each_seeded_fault_and_its_command_mends_it", |lab| {
        let _net = Net::new();
        let _image = lab.image("v0.img", 64 * MIB);
        let config = lab.configuration("all.toml", configuration(lab));
        let mut ward = Ward { lab, rows: Vec::new() };
        let target = ward.serve(&config);
        network(&mut ward);
        host(&mut ward);
        keys(&mut ward, &config);
        dead_mount(&mut ward);
        drop(target);
        target_is_down(&mut ward, &config);
        devices(&mut ward);
        target_side(&mut ward);
        println!("| fault | line | command | mended |\n| --- | --- | --- | --- |");
        ward.rows.iter().for_each(|row| println!("{row}"));
        assert!(ward.rows.len() >= 12, "{} faults", ward.rows.len());
    });
}

/// Faults on the way to the target.
fn network(ward: &mut Ward<'_>) {
    let address = format!("rdma://{ADDRESS}");
    let proofs = ward.lab.proofs();
    let doctor = |ward: &Ward<'_>| ward.initiator(&address, &proofs);
    let run_it = |ward: &Ward<'_>, fix: &str| ward.shell(fix);
    ward.seed("link down", &doctor, || _ = sh(&["ip", "link", "set", INTERFACE, "down"]), run_it);
    let small = || _ = sh(&["ip", "link", "set", INTERFACE, "mtu", "1500"]);
    ward.seed("MTU of 1500", &doctor, small, run_it);
    let wrong = format!("rdma://{ADDRESS}:7799");
    let port = std::cell::RefCell::new(address.clone());
    let doctor = |ward: &Ward<'_>| ward.initiator(&port.borrow(), &proofs);
    ward.seed(
        "wrong port",
        &doctor,
        || port.replace(wrong).clear(),
        |ward, fix| {
            ward.shell(&format!("{fix} {}", proofs.join(" ")));
            *port.borrow_mut() = fix.rsplit(' ').next().expect("an address").to_owned();
        },
    );
}

/// RDMA devices that vanish while no connection uses them.
fn devices(ward: &mut Ward<'_>) {
    let address = format!("rdma://{ADDRESS}");
    let proofs = ward.lab.proofs();
    let doctor = |ward: &Ward<'_>| ward.initiator(&address, &proofs);
    let run_it = |ward: &Ward<'_>, fix: &str| ward.shell(fix);
    let delete = |device: &str| _ = sh(&["rdma", "link", "del", device]);
    let make = |device: &str, interface: &str| {
        sh(&["rdma", "link", "add", device, "type", "rxe", "netdev", interface]);
    };
    ward.seed("no RDMA device on the route", &doctor, || delete(DEVICE), run_it);
    delete(&format!("rxe_{INTERFACE}"));
    make(DEVICE, INTERFACE);
    let others = rblk_operate::doctor::rdma_devices(Path::new("/"));
    let others: Vec<_> = others.iter().filter(|device| device.name != DEVICE).collect();
    let all = || {
        others.iter().for_each(|device| delete(&device.name));
        delete(DEVICE);
    };
    ward.seed("no RDMA device at all", &doctor, all, run_it);
    delete(&format!("rxe_{INTERFACE}"));
    make(DEVICE, INTERFACE);
    others.iter().for_each(|device| make(&device.name, &device.ports[0].interfaces[0]));
}

/// Features that the kernel or this process lacks.
fn host(ward: &mut Ward<'_>) {
    let address = format!("rdma://{ADDRESS}");
    let proofs = ward.lab.proofs();
    let doctor = |ward: &Ward<'_>| ward.initiator(&address, &proofs);
    let run_it = |ward: &Ward<'_>, fix: &str| ward.shell(fix);
    let off = || _ = sh(&["sysctl", "kernel.io_uring_disabled=2"]);
    ward.seed("io_uring disabled", &doctor, off, run_it);
    let control = || std::fs::remove_file("/dev/ublk-control").expect("the driver's node");
    ward.seed("no /dev/ublk-control", &doctor, control, run_it);
    // A shell without CAP_IPC_LOCK, and its limits.
    let limits = std::cell::RefCell::new("true".to_owned());
    let doctor = |ward: &Ward<'_>| {
        let mut command = Command::new("setpriv");
        let inner = ward.initiator(&address, &proofs);
        let line = format!("{} && exec \"$@\"", limits.borrow());
        command.args(["--bounding-set=-ipc_lock", "sh", "-c", &line, "sh"]);
        command.arg(inner.get_program()).args(inner.get_args());
        command
    };
    let low = || _ = limits.replace("ulimit -l 64".to_owned());
    ward.seed("memlock of 64 KiB", &doctor, low, |_, fix| {
        let line = format!("ulimit -l 64 && {fix}");
        *limits.borrow_mut() = line;
    });
}

/// Keys of both ends.
fn keys(ward: &mut Ward<'_>, config: &Path) {
    let address = format!("rdma://{ADDRESS}");
    let proofs = ward.lab.proofs();
    let [_, file, _, target] = proofs.as_slice() else { panic!("{proofs:?}") };
    let doctor = |ward: &Ward<'_>| ward.initiator(&address, &proofs);
    let open = || _ = sh(&["chmod", "644", file]);
    ward.seed("key file with mode 0644", &doctor, open, |ward, fix| ward.shell(fix));

    let key = |ward: &Ward<'_>, name: &str| {
        let path = ward.lab.path(name).display().to_string();
        let made = ward.lab.initiator(&["key", "new", "--file", &path], DEADLINE).ok();
        (path, made.trim().to_owned())
    };
    let (other_file, other_key) = key(ward, "other.key");
    let given = std::cell::RefCell::new(target.clone());
    let doctor = |ward: &Ward<'_>| {
        let flags = ["--key-file", file, "--target-key", &given.borrow()].map(str::to_owned);
        ward.initiator(&address, &flags)
    };
    ward.seed(
        "wrong key of the target",
        &doctor,
        || _ = given.replace(other_key),
        |ward, fix| {
            // The command runs at the target, with its key file, which has another name here.
            let text = std::fs::read_to_string(config).expect("the configuration");
            let config = TargetConfig::parse(&text, config).expect("a configuration");
            let mut words = fix.split(' ').skip(1);
            let mut command = ward.lab.program("rblk-target");
            command.args(words.by_ref()).arg("--file").arg(&config.key_file);
            *given.borrow_mut() = Running::start(command).finish(DEADLINE).ok().trim().to_owned();
        },
    );

    let used = std::cell::RefCell::new(file.clone());
    let doctor = |ward: &Ward<'_>| {
        let flags = ["--key-file", &used.borrow(), "--target-key", target].map(str::to_owned);
        ward.initiator(&address, &flags)
    };
    let stranger = || _ = used.replace(other_file);
    ward.seed("host that the target does not know", &doctor, stranger, |ward, fix| {
        let fix = fix.replace("NAME", "other").replace("VOLUME", "v0");
        ward.shell(&format!("{fix} --config {}", config.display()));
    });
}

/// A mount with a killed process.
fn dead_mount(ward: &mut Ward<'_>) {
    let lab = ward.lab;
    let address = format!("rdma://{ADDRESS}");
    let mounted = Mounted::new(lab, &MountFlags::new(address.clone(), "v0"));
    let proofs = lab.proofs();
    let doctor = |ward: &Ward<'_>| ward.initiator(&address, &proofs);
    let kill = || _ = sh(&["kill", "-9", &mounted.pid().to_string()]);
    ward.seed("mount whose process died", &doctor, kill, |ward, fix| ward.shell(fix));
    drop(mounted);
}

/// A target that was not started, as both ends see it.
fn target_is_down(ward: &mut Ward<'_>, config: &Path) {
    let lab = ward.lab;
    let address = format!("rdma://{ADDRESS}");
    let proofs = lab.proofs();
    let running = std::cell::RefCell::new(Some(ward.serve(config)));
    let doctor = |ward: &Ward<'_>| ward.initiator(&address, &proofs);
    let stop = || drop(running.borrow_mut().take());
    ward.seed("target not running, at the initiator", &doctor, stop, |ward, fix| {
        // systemd does not run here, so the test asks the target's doctor for the command.
        assert!(fix.contains("systemctl start rblk-target || rblk-target doctor"), "{fix}");
        let there = look(ward.target(config));
        let line = there.iter().find(|line| line.0[1] == "target").expect("a line of the target");
        let fix = line.1.clone().expect("a command");
        assert_eq!(fix, format!("rblk-target serve --config {}", config.display()));
        *running.borrow_mut() = Some(ward.serve(config));
    });
    let doctor = |ward: &Ward<'_>| ward.target(config);
    let stop = || drop(running.borrow_mut().take());
    ward.seed("target not running, at the target", &doctor, stop, |ward, fix| {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("PATH={}:{path}", ward.lab.programs().display());
        *running.borrow_mut() = Some(start(&["env", &path, "sh", "-c", &format!("exec {fix}")]));
    });
}

/// Faults of a target that does not run.
fn target_side(ward: &mut Ward<'_>) {
    let lab = ward.lab;
    let alone = TargetConfig {
        listen: vec![format!("rdma://{ADDRESS}:7730"), "tcp://127.0.0.1:7731".to_owned()],
        control_socket: lab.path("alone.sock"),
        ..configuration(lab)
    };
    let config = lab.configuration("alone.toml", alone);
    let doctor = |ward: &Ward<'_>| ward.target(&config);
    let run_it = |ward: &Ward<'_>, fix: &str| ward.shell(fix);
    let cidr = format!("{ADDRESS}/24");
    let gone = || _ = sh(&["ip", "addr", "del", &cidr, "dev", INTERFACE]);
    ward.seed("address of the target gone", &doctor, gone, run_it);
    let image = lab.path("v0.img");
    let missing = || std::fs::remove_file(&image).expect("the store");
    ward.seed("store missing", &doctor, missing, run_it);
    state_of_another_user(ward);
}

/// A state directory that the target's user may not write to.
fn state_of_another_user(ward: &mut Ward<'_>) {
    let lab = ward.lab;
    let home: PathBuf = lab.path("nobody");
    std::fs::create_dir_all(home.join("state")).expect("a directory");
    sh(&["chown", "-R", NOBODY, &home.display().to_string()]);
    let config = home.join("t.toml");
    let text = TargetConfig {
        listen: vec!["tcp://127.0.0.1:7732".to_owned()],
        state_dir: home.join("state"),
        control_socket: home.join("c.sock"),
        volumes: vec![VolumeConfig::memory("m", rblk_config::ByteSize(MIB))],
        ..TargetConfig::default()
    };
    std::fs::write(&config, text.dump().expect("TOML")).expect("a file");
    let doctor = |ward: &Ward<'_>| {
        let inner = ward.target(&config);
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
        command.arg(inner.get_program()).args(inner.get_args());
        command
    };
    let state = home.join("state").display().to_string();
    let taken = || _ = sh(&["chown", "0", &state]);
    ward.seed("state_dir not writable", &doctor, taken, |ward, fix| ward.shell(fix));
}
