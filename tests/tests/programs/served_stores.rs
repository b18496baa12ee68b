//! A target whose files are deleted, replaced, cut or write-protected while it serves them, and
//! with a `state_dir` that cannot be written: the messages and the refusals of each command.
//!
//! Tests named `as_root_...` need root and are ignored unless `--ignored` asks for
//! them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use rblk_initiator::engine::io::IoOp;
use rblk_operate::target::events::{Event, EventKind};
use rblk_operate::target::status::TargetStatus;
use rblk_operate::target::store_fault::StoreFaultKind;
use rblk_tests::bed::pattern;
use rblk_tests::http::get;
use rblk_tests::nobody::assert_is_root;
use rblk_tests::program::{
    Client, Ended, FreePort, Target, free_port, program, run, wait_for, wait_for_equal,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const EIO: i32 = -5;

/// A directory with a configuration of the volumes `v` and `w`, each on a file of 1 MiB.
struct Bed {
    directory: TempDir,
    http: FreePort,
}

impl Bed {
    fn new() -> Self {
        let bed = Self { directory: tempfile::tempdir().unwrap(), http: free_port() };
        let table = |name: &str| {
            let path = bed.path(name);
            File::create(&path).unwrap().set_len(MIB).unwrap();
            format!("[[volume]]\nname = '{name}'\nstore = 'file'\npath = '{}'\n", path.display())
        };
        let tables = [table("v"), table("w")].concat();
        let socket = bed.path("target.sock");
        let head = format!(
            "listen = ['tcp://127.0.0.1:1']\ncontrol_socket = '{}'\nstate_dir = '{}'\n",
            socket.display(),
            bed.directory.path().display()
        );
        fs::write(bed.path("target.toml"), head + &tables).unwrap();
        bed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn serve(&self) -> Target {
        let (config, http) = (self.path("target.toml"), format!("127.0.0.1:{}", self.http.number));
        let config = config.display().to_string();
        Target::start(self.directory.path(), &["--config", &config, "--http", &http])
    }

    /// `rblk-target` with these arguments, for the running target.
    fn run(&self, what: &str) -> Ended {
        let mut command = Command::new(program("rblk-target"));
        command.args(what.split_whitespace());
        let word = what.split_whitespace().next().unwrap();
        if ["check", "doctor", "volume"].contains(&word) {
            command.arg("--config").arg(self.path("target.toml"));
        }
        if !["check", "doctor"].contains(&word) {
            command.arg("--control-socket").arg(self.path("target.sock"));
        }
        run(&mut command)
    }

    /// Both outputs of `rblk-target` with these arguments.
    fn said(&self, what: &str) -> String {
        let Ended { stdout, stderr, .. } = self.run(what);
        stdout + &stderr
    }

    /// The lines of `doctor` about this subject.
    fn doctor(&self, subject: &str) -> Vec<String> {
        let report = self.run("doctor --output json").stdout;
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        let text = |finding: &serde_json::Value, key: &str| {
            finding[key].as_str().unwrap_or_default().to_owned()
        };
        let line = |f| format!("{} {} {}", text(f, "verdict"), text(f, "found"), text(f, "fix"));
        findings.filter(|f| f["subject"] == subject).map(line).collect()
    }

    fn metric(&self, name: &str) -> String {
        let text = get(self.http.number, "/metrics").body;
        let sample = text.lines().find_map(|line| line.strip_prefix(name));
        sample.unwrap_or_else(|| panic!("no {name} in {text}")).trim().to_owned()
    }

    fn events(&self, kind: EventKind) -> Vec<Event> {
        let lines = self.run("events --output json-lines").stdout;
        let events = lines.lines().map(|line| serde_json::from_str::<Event>(line).unwrap());
        events.filter(|event| event.kind == kind).collect()
    }
}

fn fault_of(status: &TargetStatus, name: &str) -> Option<StoreFaultKind> {
    let volume = status.volumes.iter().find(|volume| volume.name == name).unwrap();
    volume.store_fault.as_ref().map(|fault| fault.kind)
}

/// Waits until `status` shows this fault of `v`: an answer may be a moment old.
fn wait_for_fault(target: &Target, kind: Option<StoreFaultKind>) {
    wait_for(&format!("{kind:?}"), || (fault_of(&target.status(), "v") == kind).then_some(()));
}

#[track_caller]
fn assert_says(said: &str, pieces: &[&str]) {
    for piece in pieces {
        assert!(said.contains(piece), "{piece:?} is not in {said}");
    }
}

#[test]
fn a_deleted_file_is_named_by_every_command_until_it_is_saved() {
    let bed = Bed::new();
    let target = bed.serve();
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    client.write(0, &pattern(1, 4096));
    client.flush();
    assert!(!bed.said("status").contains("WARN"), "{}", bed.said("status"));
    assert_eq!(bed.doctor("volumes"), ["ok the running target serves 2 "]);
    assert_says(&bed.said("check"), &["v: ok", "w: ok"]);
    assert_eq!(bed.metric("rblk_target_volume_store_fault{volume=\"v\"}"), "0");

    fs::remove_file(bed.path("v")).unwrap();
    wait_for_fault(&target, Some(StoreFaultKind::Deleted));
    assert_eq!(fault_of(&target.status(), "w"), None);
    let copy = format!("cp --sparse=always /proc/{}/fd/", target.status().pid);
    let (found, whole) =
        ("is deleted, and the data is gone when this target ends", "WARN  v: its file");
    assert_says(&bed.said("volume list"), &[whole, found, &copy]);
    // The table on a screen breaks lines.
    assert_says(&bed.said("status"), &[whole, "deleted"]);
    assert_says(&bed.said("reload --dry-run"), &[whole, found, &copy]);
    assert_says(&bed.said("reload"), &[whole, found, &copy]);
    let check = bed.run("check");
    assert_ne!(check.code, Some(0), "{check:?}");
    assert_says(&check.stderr, &["volume `v`", found, &copy]);
    assert_says(&check.stdout, &["w: ok"]);
    let [bad, good] = &bed.doctor("volumes")[..] else { panic!("{:?}", bed.doctor("volumes")) };
    assert!(bad.starts_with("fail v: its file") && bad.contains(&copy), "{bad}");
    assert_eq!(good, "ok the running target serves 1 ");
    // An answer over HTTP may be a moment old.
    wait_for_equal("the metric", &"1".to_owned(), || {
        bed.metric("rblk_target_volume_store_fault{volume=\"v\"}")
    });
    assert_eq!(bed.metric("rblk_target_volume_store_fault{volume=\"w\"}"), "0");
    let events = bed.events(EventKind::StoreFault);
    assert_eq!(events.len(), 1, "it is told once: {events:?}");
    assert_eq!(events[0].volume.as_deref(), Some("v"));

    // Commands that make it worse are refused; others print a warning.
    let resize = bed.run("volume resize v 2MiB");
    assert_ne!(resize.code, Some(0), "{resize:?}");
    assert_says(&resize.stderr, &["the size of v does not change", found]);
    let remove = bed.run("volume remove v");
    assert_ne!(remove.code, Some(0), "{remove:?}");
    assert_says(&remove.stderr, &["v is not removed, since its data would be gone", "--force"]);
    let set = bed.run("volume set v --read-ahead 0");
    assert_eq!(set.code, Some(0), "{set:?}");
    assert_says(&set.stderr, &["v: WARNING: its file", found]);

    // The command in the message saves the data.
    let list = bed.said("volume list");
    let command = list.split('`').nth(1).expect("a command").replace("FILE", "saved");
    let words: Vec<&str> = command.split_whitespace().collect();
    let saved = run(Command::new(words[0]).args(&words[1..]).current_dir(bed.directory.path()));
    assert_eq!(saved.code, Some(0), "{command}: {saved:?}");
    let saved = fs::read(bed.path("saved")).unwrap();
    assert!(saved.len() as u64 == MIB && saved[..4096] == pattern(1, 4096));

    client.logout();
    let drain = bed.run("drain");
    assert_says(&drain.stderr, &[whole, found, &copy]);
    assert_says(&target.log(), &["the target begins to stop, and its file", &copy]);
}

#[test]
fn a_file_that_is_replaced_or_away_is_named_until_it_is_back() {
    let bed = Bed::new();
    let target = bed.serve();
    wait_for_fault(&target, None);
    let (path, kept) = (bed.path("v"), bed.path("kept"));
    fs::rename(&path, &kept).unwrap();
    wait_for_fault(&target, Some(StoreFaultKind::Away));
    assert_says(&bed.said("volume list"), &["WARN  v: its file is not at", "put it back"]);
    File::create(&path).unwrap().set_len(MIB).unwrap();
    wait_for_fault(&target, Some(StoreFaultKind::Replaced));
    // The other file can be opened, so `check` must not take it for the volume.
    let check = bed.run("check");
    assert_ne!(check.code, Some(0), "{check:?}");
    assert_says(&check.stderr, &["its file is elsewhere, and another file or device is at"]);
    let resize = bed.run("volume resize v 2MiB");
    assert_says(&resize.stderr, &["the size of v does not change"]);
    assert_eq!([&path, &kept].map(|path| fs::metadata(path).unwrap().len()), [MIB; 2]);
    fs::rename(&kept, &path).unwrap();
    wait_for_fault(&target, None);
    assert_eq!(bed.run("check").code, Some(0));
    assert!(target.log().contains("is as it is served again"), "{}", target.log());
}

#[test]
fn a_file_that_was_cut_says_how_much_it_has() {
    let bed = Bed::new();
    let target = bed.serve();
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    let set = |bytes| File::options().write(true).open(bed.path("v")).unwrap().set_len(bytes);
    set(MIB / 2).unwrap();
    assert_eq!(client.try_io(IoOp::Read, MIB / 2, 4096), Some(EIO));
    wait_for_fault(&target, Some(StoreFaultKind::Resized));
    assert_says(&bed.said("volume list"), &["has 524288 of 1048576 bytes", "truncate -s 1048576"]);
    let check = bed.run("check");
    assert_ne!(check.code, Some(0), "{check:?}");
    assert_says(&check.stderr, &["has 524288 of 1048576 bytes"]);
    set(MIB).unwrap();
    wait_for_fault(&target, None);
    set(MIB + 1).unwrap();
    wait_for_fault(&target, Some(StoreFaultKind::Resized));
    assert_says(&bed.said("check"), &["has 1048577 bytes, which are not whole blocks"]);
}

/// The fault of `state_dir`, from the socket at that path.
fn state_fault(socket: &Path) -> Option<String> {
    let mut command = Command::new(program("rblk-target"));
    command.args(["status", "--output", "json", "--control-socket"]).arg(socket);
    let status: TargetStatus = serde_json::from_str(&run(&mut command).stdout).unwrap();
    status.state_dir_fault
}

#[test]
fn a_state_dir_that_is_away_is_named_until_it_is_back() {
    let bed = Bed::new();
    let _target = bed.serve();
    let other = tempfile::tempdir().unwrap();
    let (here, there) = (bed.directory.path().to_owned(), other.path().join("state"));
    assert_eq!(state_fault(&here.join("target.sock")), None);
    fs::rename(&here, &there).unwrap();
    let socket = there.join("target.sock");
    let fault = wait_for("a fault", || state_fault(&socket));
    assert_says(&fault, &["(state_dir) cannot be written", "No such file"]);
    let mut list = Command::new(program("rblk-target"));
    let list = run(list.args(["volume", "list", "--control-socket"]).arg(&socket));
    assert_says(&list.stdout, &["WARN  ", "(state_dir) cannot be written"]);
    let one = "1".to_owned();
    wait_for_equal("the metric", &one, || bed.metric("rblk_target_state_dir_fault"));
    // Another directory at that path does not count.
    fs::create_dir(&here).unwrap();
    wait_for("another", || {
        state_fault(&socket)
            .filter(|fault| fault.contains("is not the directory that it was"))
            .map(drop)
    });
    fs::remove_dir_all(&here).unwrap();
    fs::rename(&there, &here).unwrap();
    wait_for("no fault", || state_fault(&here.join("target.sock")).is_none().then_some(()));
    assert_eq!(bed.events(EventKind::StateDir).len(), 1);
    let left = fs::read_dir(&here).unwrap().flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name.contains("probe")), "{left:?}");
}

/// A file system in memory. Drop removes it.
struct Tmpfs(TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(directory.path());
        let mounted = run(&mut mount);
        assert_eq!(mounted.code, Some(0), "{mounted:?}");
        Self(directory)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_full_state_dir_is_named_while_it_is_full() {
    assert_is_root(&["mount", "umount"]);
    let (state, stores) = (Tmpfs::mount("size=256k"), tempfile::tempdir().unwrap());
    let path = stores.path().join("v");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let log = File::create(stores.path().join("log")).unwrap();
    let volume = format!("v={}", path.display());
    let target = Target::start_with_log(state.0.path(), &["--file", &volume], log);
    assert_eq!(target.status().state_dir_fault, None);
    let filler = state.0.path().join("filler");
    let _ = fs::write(&filler, vec![1; 1 << 20]);
    let fault = wait_for("a fault", || target.status().state_dir_fault);
    assert_says(&fault, &["cannot be written (No space left on device", "make room"]);
    fs::remove_file(&filler).unwrap();
    wait_for("room", || target.status().state_dir_fault.is_none().then_some(()));
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_file_system_that_cannot_hold_its_thin_files_is_named_before_it_is_full() {
    assert_is_root(&["mount", "umount"]);
    let (bed, store) = (Bed::new(), Tmpfs::mount("size=8m"));
    let path = store.0.path().join("thin.img");
    File::create(&path).unwrap().set_len(16 * MIB).unwrap();
    let table = format!("[[volume]]\nname = 'thin'\nstore = 'file'\npath = '{}'\n", path.display());
    let plain = fs::read_to_string(bed.path("target.toml")).unwrap();
    fs::write(bed.path("target.toml"), plain + &table).unwrap();
    let target = bed.serve();
    let of_thin = |what| bed.said(what).contains("its thin files may still take");
    // The thin file may need more than the file system has, but nine tenths are free.
    assert_eq!(
        (target.status().condition.as_str(), of_thin("status"), of_thin("check")),
        ("serving", false, false)
    );

    let filler = store.0.path().join("filler");
    fs::write(&filler, vec![1; 15 << 19]).unwrap();
    let pieces = [
        "the file system of",
        "thin.img has 512KiB of 8MiB left (6 %)",
        "may still take 16MiB (thin)",
        "make room",
    ];
    // The table breaks its lines.
    let flat = |what| bed.said(what).split_whitespace().collect::<Vec<_>>().join(" ");
    wait_for("a warning", || flat("status").contains(pieces[0]).then_some(()));
    for what in ["status", "check"] {
        assert_says(&flat(what), &pieces);
    }
    assert_eq!(bed.metric("rblk_target_volume_file_system_free_bytes{volume=\"thin\"}"), "524288");
    assert_eq!(target.status().condition, "serving", "writes still succeed");

    let mut client = Client::connect(&target.address, "thin", 1).unwrap();
    let codes: Vec<_> = (0..10).map(|at| client.try_io(IoOp::Write, at << 16, 1 << 16)).collect();
    assert!(codes.contains(&Some(-28)), "{codes:?}");
    wait_for("a full store", || (target.status().condition == "full").then_some(()));
    let warned = target.status().warnings;
    let errors = warned.iter().find(|line| line.contains("store errors")).expect("a warning");
    assert!(errors.contains("last ENOSPC ") && errors.ends_with(" ago"), "{errors}");
    fs::remove_file(&filler).unwrap();
    wait_for("room", || (!of_thin("status")).then_some(()));
}

/// A loop device over a file of 1 MiB. Drop removes it.
struct LoopDevice {
    path: PathBuf,
    _file: tempfile::NamedTempFile,
}

impl LoopDevice {
    fn attach() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MIB).unwrap();
        let made = run(Command::new("losetup").args(["-f", "--show"]).arg(file.path()));
        assert_eq!(made.code, Some(0), "{made:?}");
        Self { path: made.stdout.trim().into(), _file: file }
    }

    fn set(&self, flag: &str) {
        let set = run(Command::new("blockdev").arg(flag).arg(&self.path));
        assert_eq!(set.code, Some(0), "{set:?}");
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // Clears the flag for the next user of this loop device.
        let _ = Command::new("blockdev").arg("--setrw").arg(&self.path).status();
        let _ = Command::new("losetup").arg("-d").arg(&self.path).status();
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_read_only_device_is_no_writable_volume() {
    assert_is_root(&["losetup", "blockdev"]);
    let (bed, device) = (Bed::new(), LoopDevice::attach());
    let table =
        format!("[[volume]]\nname = 'd'\nstore = 'file'\npath = '{}'\n", device.path.display());
    let plain = fs::read_to_string(bed.path("target.toml")).unwrap();
    let whole = format!("{plain}{table}");
    fs::write(bed.path("target.toml"), &whole).unwrap();
    let refused = [
        "is read-only (file system or device, or a path outside ReadWritePaths=",
        "export the volume read-only",
    ];
    device.set("--setro");
    let check = bed.run("check");
    assert_ne!(check.code, Some(0), "{check:?}");
    assert_says(&check.stderr, &refused);
    let mut serve = Command::new(program("rblk-target"));
    let serve = run(serve.arg("serve").arg("--config").arg(bed.path("target.toml")));
    assert_ne!(serve.code, Some(0), "{serve:?}");
    assert_says(&serve.stderr, &refused);

    // The running target refuses it, too.
    fs::write(bed.path("target.toml"), &plain).unwrap();
    let target = bed.serve();
    let add = bed.run(&format!("volume add d --file {}", device.path.display()));
    assert_ne!(add.code, Some(0), "{add:?}");
    assert_says(&add.stderr, &refused);
    fs::write(bed.path("target.toml"), &whole).unwrap();
    let reload = bed.run("reload");
    assert_ne!(reload.code, Some(0), "{reload:?}");
    assert_says(&reload.stderr, &refused);

    // The device becomes read-only while it is served.
    device.set("--setrw");
    assert_eq!(bed.run("reload").code, Some(0));
    let mode = || {
        let list = bed.run("volume list").stdout;
        let row = list.lines().find(|line| line.starts_with("d ")).unwrap().to_owned();
        row.split_whitespace().nth(3).unwrap().to_owned()
    };
    assert_eq!(mode(), "rw");
    let mut client = Client::connect(&target.address, "d", 1).unwrap();
    device.set("--setro");
    assert_eq!(client.try_io(IoOp::Write, 0, 4096), Some(EIO));
    wait_for("its mode", || (mode() == "(ro)").then_some(()));
    assert_says(
        &bed.said("volume list"),
        &["WARN  d: its device", "is read-only, and writes fail"],
    );
    assert_says(&bed.said("volume list"), &["blockdev --setrw"]);
    client.logout();
    wait_for("nobody", || {
        let status = target.status();
        status.volumes.iter().all(|volume| !volume.in_use).then_some(())
    });
    let set = bed.run("volume set d --read-only=true");
    assert_eq!(set.code, Some(0), "{set:?}");
    assert_eq!(mode(), "ro");
    let set = bed.run("volume set d --read-only=false");
    assert_ne!(set.code, Some(0), "{set:?}");
    assert_says(&set.stderr, &["d stays read-only: its device", "is read-only"]);
    device.set("--setrw");
    assert_eq!(bed.run("volume set d --read-only=false").code, Some(0));
    assert_eq!(mode(), "rw");
}
