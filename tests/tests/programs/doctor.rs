//! `doctor` of both sides as an administrator runs it, over TCP. Each fault adds exactly one line,
//! which names it.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rblk_tests::program::{Ended, Target, free_port, program, run};
use serde_json::Value;

/// The exit code of a failure.
const FAILED: i32 = 7;

/// A line of the report: verdict, subject, finding, and the command that mends it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Line {
    verdict: String,
    subject: String,
    found: String,
    fix: Option<String>,
}

fn report(command: &mut Command) -> Vec<Line> {
    let Ended { code, stdout, stderr } = run(command.args(["-o", "json"]));
    let report: Value =
        serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}{stderr}"));
    let failed: Option<Value> = serde_json::from_str(&stderr).ok();
    assert_eq!(
        failed.map(|error| error["exit_code"].clone()),
        code.filter(|code| *code != 0).map(Value::from)
    );
    let text = |finding: &Value, key: &str| finding[key].as_str().map(str::to_owned);
    let lines: Vec<Line> = report["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .map(|finding| Line {
            verdict: text(finding, "verdict").expect("a verdict"),
            subject: text(finding, "subject").expect("a subject"),
            found: text(finding, "found").expect("what was found"),
            fix: text(finding, "fix"),
        })
        .collect();
    let count = |verdict: &str| lines.iter().filter(|l| l.verdict == verdict).count();
    assert_eq!(report["failures"], count("fail"));
    assert_eq!(report["warnings"], count("warn"));
    assert_eq!(code, Some(if count("fail") == 0 { 0 } else { FAILED }));
    lines
}

/// Warnings and failures. This host may lack ublk, RDMA and TLS; the report has these, too.
fn faults(command: &mut Command) -> BTreeSet<Line> {
    // Mounts of other tests come and go.
    let lines = report(command).into_iter().filter(|line| line.subject != "mounts");
    lines.filter(|line| ["warn", "fail"].contains(&line.verdict.as_str())).collect()
}

/// The one fault in `after` that is not in `before`.
#[track_caller]
fn new_fault(before: &BTreeSet<Line>, after: &BTreeSet<Line>) -> Line {
    let new: Vec<&Line> = after.difference(before).collect();
    assert_eq!(new.len(), 1, "{new:#?}");
    new[0].clone()
}

fn initiator(args: &[&str]) -> Command {
    let mut command = Command::new(program("rblk-initiator"));
    command.arg("doctor").args(args);
    command
}

fn new_key(name: &str, path: &Path) -> String {
    let ended = run(Command::new(program(name)).args(["key", "new", "--file"]).arg(path));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.stdout.trim().to_owned()
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// A target that wants keys, a host that it knows, and the flags of that host.
struct Ends {
    dir: tempfile::TempDir,
    target: Target,
    target_key: String,
}

impl Ends {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let target_key = new_key("rblk-target", &at("target.key"));
        let host_key = new_key("rblk-initiator", &at("host.key"));
        let (file, host) = (at("target.key").display().to_string(), format!("h={host_key}"));
        let args = ["--memory", "m=1MiB", "--auth", "required", "--key-file", &file, "--host"];
        let target = Target::start(dir.path(), &[&args[..], &[&host]].concat());
        Self { dir, target, target_key }
    }

    fn host_key(&self) -> String {
        self.dir.path().join("host.key").display().to_string()
    }

    fn doctor(&self) -> Command {
        let address = self.target.address.to_string();
        initiator(&[&address, "--key-file", &self.host_key(), "--target-key", &self.target_key])
    }
}

#[test]
fn a_target_that_works_is_connected_tested_and_proven() {
    let ends = Ends::new();
    let lines = report(&mut ends.doctor());
    let found = |subject: &str| {
        let line = lines.iter().find(|line| line.subject == subject);
        let line = line.unwrap_or_else(|| panic!("no {subject} in {lines:#?}"));
        (line.verdict.as_str(), line.found.as_str())
    };
    assert_eq!(found("io_uring"), ("ok", "allowed"));
    assert_eq!(found("keys"), ("ok", "both ends proved their keys"));
    assert_eq!(found("key file").0, "ok");
    let (verdict, connected) = found("connect");
    assert_eq!(verdict, "ok");
    assert!(connected.ends_with("soft/TCP over soft, self-test passed, 1 volume"), "{connected}");
    assert_eq!(found("route"), ("ok", "to 127.0.0.1 leaves by lo"));
    // The target does not report a doctor as a fault. It may warn of the limits of this host.
    let log = ends.target.log();
    let warnings = log.lines().filter(|line| line.contains("WARN"));
    let of_peers: Vec<&str> = warnings.filter(|line| line.contains("peer")).collect();
    assert!(of_peers.is_empty(), "{of_peers:#?}");
    assert_eq!(ends.target.status().total.lost_connections, 0);
}

#[test]
fn each_fault_of_keys_and_addresses_is_one_line() {
    let mut ends = Ends::new();
    let address = ends.target.address.to_string();
    let before = faults(&mut ends.doctor());
    let (file, key) = (ends.host_key(), ends.target_key.clone());
    let host_key = Path::new(&file);

    set_mode(host_key, 0o644);
    let fault = new_fault(&before, &faults(&mut ends.doctor()));
    assert_eq!((fault.verdict.as_str(), fault.subject.as_str()), ("fail", "key file"));
    let fix = fault.fix.unwrap();
    assert_eq!(fix, format!("chmod 600 {file}"));
    assert_eq!(run(Command::new("sh").args(["-c", &fix])).code, Some(0));
    assert_eq!(faults(&mut ends.doctor()), before);

    let other = new_key("rblk-target", &ends.dir.path().join("other.key"));
    let wrong = ["--key-file", &file, "--target-key", &other];
    let fault = new_fault(&before, &faults(&mut initiator(&[&[&*address], &wrong[..]].concat())));
    assert_eq!((&*fault.subject, fault.fix.as_deref()), ("keys", Some("rblk-target key show")));

    let stranger = ends.dir.path().join("stranger.key");
    let public = new_key("rblk-initiator", &stranger);
    let stranger = stranger.display().to_string();
    let args = [&address, "--key-file", &stranger, "--target-key", &key];
    let fault = new_fault(&before, &faults(&mut initiator(&args)));
    assert_eq!(fault.subject, "keys");
    assert!(fault.fix.unwrap().contains(&format!("rblk-target host add NAME --key {public}")));

    let port = free_port();
    let closed = format!("tcp://127.0.0.1:{}", port.number);
    let right = ["--key-file", &file, "--target-key", &key];
    let fault = new_fault(&before, &faults(&mut initiator(&[&[&*closed], &right[..]].concat())));
    assert_eq!(fault.subject, "port");
    assert!(fault.fix.unwrap().contains("systemctl start rblk-target"));

    let name = "tcp://no-such-name.invalid";
    let fault = new_fault(&before, &faults(&mut initiator(&[&[name], &right[..]].concat())));
    assert_eq!(fault.subject, "name");

    ends.target.kill();
    let fault = new_fault(&before, &faults(&mut ends.doctor()));
    assert_eq!((fault.verdict.as_str(), fault.subject.as_str()), ("fail", "port"));
}

#[test]
fn a_host_without_keys_is_told_to_make_one() {
    let ends = Ends::new();
    let missing = ends.dir.path().join("missing.key").display().to_string();
    let address = ends.target.address.to_string();
    let lines = faults(&mut initiator(&[&address]));
    let keys: Vec<&Line> = lines.iter().filter(|line| line.subject == "keys").collect();
    assert_eq!(keys.len(), 1, "{lines:#?}");
    assert!(keys[0].found.contains("only hosts that prove a key"), "{keys:?}");
    let args = [&address, "--key-file", &missing, "--target-key", &ends.target_key];
    let lines = faults(&mut initiator(&args));
    let file = lines.iter().find(|line| line.subject == "key file").expect("a line");
    assert_eq!(file.fix, Some(format!("rblk-initiator key new --file {missing}")));
}

#[test]
fn a_configuration_is_checked_with_its_volume() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let file = dir.path().join("m.toml");
    let write = |volume: &str| {
        let text = format!("target = ['{}']\nvolume = '{volume}'\n", target.address);
        std::fs::write(&file, text).unwrap();
    };
    let path = file.display().to_string();
    write("m");
    let before = faults(&mut initiator(&["--config", &path]));
    assert!(before.iter().all(|line| line.subject != "volume"), "{before:#?}");
    write("other");
    let fault = new_fault(&before, &faults(&mut initiator(&["--config", &path])));
    assert_eq!(fault.subject, "volume");
    assert!(fault.found.ends_with("it shows: m"), "{fault:?}");
    std::fs::write(&file, "target = []\n").unwrap();
    let lines = faults(&mut initiator(&["--config", &path]));
    assert!(lines.iter().any(|line| line.subject == "config"), "{lines:#?}");
}

/// A configuration of a target that can serve, and its doctor.
struct Home {
    dir: tempfile::TempDir,
    port: rblk_tests::program::FreePort,
}

impl Home {
    fn new() -> Self {
        let home = Self { dir: tempfile::tempdir().unwrap(), port: free_port() };
        home.write("");
        new_key("rblk-target", &home.dir.path().join("t.key"));
        std::fs::File::create(home.dir.path().join("v.img")).unwrap().set_len(1 << 20).unwrap();
        home
    }

    fn write(&self, more: &str) {
        let dir = self.dir.path().display();
        let text = format!(
            "listen = ['tcp://127.0.0.1:{}']\ncontrol_socket = '{dir}/c.sock'\nstate_dir = '{dir}/state'\n\
             arena = '8MiB'\nauth = 'required'\nkey_file = '{dir}/t.key'\n{more}\n\
             [[volume]]\nname = 'v'\nstore = 'file'\npath = '{dir}/v.img'\n",
            self.port.number
        );
        std::fs::write(self.dir.path().join("t.toml"), text).unwrap();
    }

    fn faults(&self) -> BTreeSet<Line> {
        let mut command = Command::new(program("rblk-target"));
        faults(command.arg("doctor").arg("--config").arg(self.dir.path().join("t.toml")))
    }

    /// The one new fault, after its command has mended it.
    #[track_caller]
    fn mended(&self, before: &BTreeSet<Line>) -> Line {
        let fault = new_fault(before, &self.faults());
        let path = program("rblk-target");
        let dir = path.parent().expect("a directory").display();
        let fix = fault.fix.as_ref().expect("a command");
        let ended = run(Command::new("sh").args(["-c", &format!("PATH={dir}:$PATH; {fix}")]));
        assert_eq!(ended.code, Some(0), "{fix}: {ended:?}");
        assert_eq!(self.faults(), *before, "after {fix}");
        fault
    }
}

#[test]
fn each_fault_of_a_target_is_one_line_whose_command_mends_it() {
    let home = Home::new();
    let at = |name: &str| home.dir.path().join(name);
    let before = home.faults();
    assert!(before.iter().all(|line| line.verdict == "warn"), "{before:#?}");
    assert!(before.iter().any(|line| line.subject == "target"), "it does not run: {before:#?}");

    set_mode(&at("t.key"), 0o640);
    assert_eq!(home.mended(&before).subject, "keys");
    std::fs::remove_file(at("t.key")).unwrap();
    assert_eq!(home.mended(&before).subject, "keys");
    std::fs::remove_file(at("v.img")).unwrap();
    assert_eq!(home.mended(&before).subject, "volumes");

    home.write("arena_ = 1");
    assert_eq!(new_fault(&BTreeSet::new(), &home.config_faults()).subject, "config");
    home.write("");
    let listener = std::net::TcpListener::bind(("127.0.0.1", home.port.number)).unwrap();
    let taken = new_fault(&before, &home.faults());
    assert_eq!(taken.subject, "listen");
    assert!(taken.found.contains("in use"), "{taken:?}");
    drop(listener);
    assert_eq!(home.faults(), before);
}

impl Home {
    fn config_faults(&self) -> BTreeSet<Line> {
        self.faults().into_iter().filter(|line| line.subject == "config").collect()
    }
}

#[test]
fn the_doctor_of_a_running_target_disturbs_nothing() {
    let home = Home::new();
    let before = home.faults();
    let config = home.dir.path().join("t.toml").display().to_string();
    let mut child = Command::new(program("rblk-target"))
        .args(["serve", "--config", &config])
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    rblk_tests::program::wait_for("a target", || {
        let now = home.faults();
        let gone: Vec<&Line> = before.difference(&now).collect();
        (gone.len() == 1 && gone[0].subject == "target").then_some(())
    });
    let now = home.faults();
    assert!(now.is_subset(&before), "{now:#?}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_table_has_at_most_100_columns() {
    let ends = Ends::new();
    let stranger = ends.dir.path().join("a-file-with-a-name-that-is-not-short-at-all.key");
    new_key("rblk-initiator", &stranger);
    let stranger = stranger.display().to_string();
    let address = ends.target.address.to_string();
    let args = [&address, "--key-file", &stranger, "--target-key", &ends.target_key];
    let ended = run(&mut initiator(&args));
    assert_eq!(ended.code, Some(FAILED), "{ended:?}");
    for line in ended.stdout.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    assert!(ended.stdout.contains("FAIL  keys"), "{}", ended.stdout);
    assert!(ended.stdout.trim_end().ends_with("(exit 7)"), "{}", ended.stdout);
}

/// The file of its control socket is removed. The target keeps serving, but no command reaches it.
#[test]
fn a_target_without_its_control_socket_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB", "--auth", "none"]);
    let (pid, socket) = (target.status().pid, target.socket.clone());
    let config = dir.path().join("target.toml");
    let text = format!(
        "auth = 'none'\nlisten = ['{}']\ncontrol_socket = '{}'\nstate_dir = '{}'\n",
        target.address,
        socket.display(),
        dir.path().display()
    );
    std::fs::write(&config, text).unwrap();
    let doctor = || {
        let mut command = Command::new(program("rblk-target"));
        command.args(["doctor", "--config"]).arg(&config);
        faults(&mut command)
    };
    let before = doctor();
    std::fs::remove_file(&socket).unwrap();
    let fault = new_fault(&before, &doctor());
    let found =
        format!("process {pid} serves, and its control socket {} was removed", socket.display());
    assert_eq!((&*fault.verdict, &*fault.subject, &fault.found), ("fail", "target", &found));
    assert_eq!(fault.fix, Some(format!("kill {pid}")));
    let mut command = Command::new(program("rblk-target"));
    let ended = run(command.args(["status", "--control-socket"]).arg(&socket));
    assert!(ended.stderr.contains(&found), "{ended:?}");
}
