//! A running target is replaced by another program in its process, under sessions of the real
//! initiator: the effects on mounts, and the end of an upgrade that fails.

mod keys;
mod starts;
mod stores;

use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rblk_initiator::volume::session::VolumeClaim;
use rblk_operate::target::events::{Event, EventKind};
use rblk_protocol::{AccessMode, AsyncEvent, WriteVerifier};
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Ended, Target, assert_refused, program, run, wait_for};
use serde_json::Value;

/// A configuration with one volume on a file, which keeps dirty blocks in memory for an hour.
fn configuration(dir: &Path) -> PathBuf {
    let volume = dir.join("v.img");
    if !volume.exists() {
        std::fs::File::create(&volume).unwrap().set_len(4 << 20).unwrap();
    }
    let path = dir.join("target.toml");
    let text = format!(
        "write_back_delay = '1h'\n[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\ncache = 'write-back'\n",
        volume.display()
    );
    std::fs::write(&path, text).unwrap();
    path
}

fn start(dir: &Path) -> Target {
    let config = configuration(dir);
    Target::start(dir, &["--config", &config.display().to_string(), "--drain-timeout", "60s"])
}

fn command(target: &Target, args: &[&str]) -> Command {
    let mut command = Command::new(program("rblk-target"));
    command.arg("upgrade").args(args).arg("--control-socket").arg(&target.socket);
    command
}

/// Begins an upgrade with its outcome in JSON.
fn begin(target: &Target, args: &[&str]) -> Child {
    let mut command = command(target, &["--output", "json"]);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn end(mut child: Child) -> (Option<i32>, Value, String) {
    wait_for("the command's end", || child.try_wait().unwrap());
    let output = child.wait_with_output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    let said = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), said, complaint)
}

/// Leaves and comes back at once, as a mount does at an upgrade.
fn go_along(mut client: Client, target: &Target) -> Client {
    assert_eq!(client.next_event(), Some(AsyncEvent::Upgrading));
    let generation = client.volume.generation;
    drop(client);
    let claim = VolumeClaim { generation, ..AccessMode::Exclusive.into() };
    // One attempt is enough: the socket lets it wait for the next program.
    Client::claim(&target.address, "v", 1, claim).expect("the same volume")
}

fn events(target: &Target) -> Vec<Event> {
    let mut events = Command::new(program("rblk-target"));
    events.args(["events", "-o", "json-lines", "--control-socket"]).arg(&target.socket);
    let Ended { stdout, .. } = run(&mut events);
    stdout.lines().map(|line| serde_json::from_str(line).expect("an event")).collect()
}

/// A program that runs a script before the real one.
fn wrapper(dir: &Path, script: &str) -> String {
    let path = dir.join("other-program");
    let real = program("rblk-targetd");
    let text = format!("#!/bin/sh\nREAL='{}'\n{script}\nexec \"$REAL\" \"$@\"\n", real.display());
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
fn a_mount_notices_a_pause_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    // Acknowledged, in the memory of the target alone, and covered by no FLUSH.
    client.write(0, &pattern(1, 64 << 10));
    let (before, volume) = (target.status(), client.volume);
    // The kernel never refuses a connection, at any moment of the upgrade.
    let (refused, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let knocking = {
        let (refused, over, port) = (Arc::clone(&refused), Arc::clone(&over), target.address.port);
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                if TcpStream::connect(("127.0.0.1", port)).is_err() {
                    refused.fetch_add(1, Ordering::Relaxed);
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        })
    };
    let upgrade = begin(&target, &[]);
    let mut client = go_along(client, &target);
    let (code, said, complaint) = end(upgrade);
    over.store(true, Ordering::Relaxed);
    knocking.join().unwrap();
    assert_eq!(code, Some(0), "{complaint}\n{}", target.log());
    assert_eq!(refused.load(Ordering::Relaxed), 0, "{}", target.log());

    let now = target.status();
    assert_eq!(now.pid, before.pid, "the process is the same");
    assert_ne!(now.instance, before.instance, "the run is not");
    assert_eq!((now.fencings, now.draining), (0, false));
    println!("{said:#}");
    let number = |key: &str| said[key].as_u64().unwrap_or_else(|| panic!("{key}: {said}"));
    assert_eq!((number("mounts"), number("back"), number("stayed")), (1, 1, 0));
    assert_eq!((number("sent_again"), number("pid")), (0, before.pid.into()));
    assert!(number("pause_ms") >= number("ready_ms"), "{said}");
    assert_eq!((&said["clean"], &said["from_version"]), (&true.into(), &before.version.into()));

    // Every write survives, and no verifier changes.
    let is = |of: &Client| (of.volume.verifier, of.volume.generation);
    assert_eq!(is(&client), (volume.verifier, volume.generation));
    assert!(client.read(0, 64 << 10) == pattern(1, 64 << 10));
    client.flush();
    let other = Client::connect(&target.address, "v", 2).unwrap_err();
    assert!(other.to_string().contains("in use"), "{other}");
    let told: Vec<Event> = events(&target);
    assert!(told.iter().all(|event| event.kind != EventKind::Loss), "{told:?}");
    let upgrades = told.iter().filter(|event| event.kind == EventKind::Upgrade).count();
    assert_eq!(upgrades, 2, "it took over, and every mount is back: {told:?}");

    // Once more, from the program that took over.
    let upgrade = begin(&target, &[]);
    let client = go_along(client, &target);
    let (code, _, complaint) = end(upgrade);
    assert_eq!((code, target.status().pid), (Some(0), before.pid), "{complaint}");
    assert_eq!(is(&client), (volume.verifier, volume.generation));
}

#[test]
fn a_target_is_handed_over_by_way_of_the_command_too() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    client.write(0, &pattern(1, 64 << 10));
    let before = target.status();
    // `rblk-target serve` executes the daemon, which keeps the target's open files: also a store
    // without a path.
    std::fs::remove_file(dir.path().join("v.img")).unwrap();
    let command = program("rblk-target").display().to_string();
    let upgrade = begin(&target, &["--force", "--program", &command]);
    let mut client = go_along(client, &target);
    let (code, said, complaint) = end(upgrade);
    assert_eq!(code, Some(0), "{said} {complaint}\n{}", target.log());
    let now = target.status();
    assert_eq!(now.pid, before.pid);
    assert_ne!(now.instance, before.instance, "another program serves");
    assert!(client.read(0, 64 << 10) == pattern(1, 64 << 10));
}

#[test]
fn another_host_cannot_slip_in() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    let upgrade = begin(&target, &["--timeout", "2s"]);
    assert_eq!(client.next_event(), Some(AsyncEvent::Upgrading));
    let generation = client.volume.generation;
    drop(client);
    // The holder is away, and another host comes first.
    let other = Client::connect(&target.address, "v", 2).unwrap_err();
    assert!(other.to_string().contains("in use"), "{other}");
    let (code, said, complaint) = end(upgrade);
    assert_eq!((code, &said["back"]), (Some(1), &0.into()), "{said}");
    assert!(complaint.contains("not back yet: test"), "{complaint}");
    let claim = VolumeClaim { generation, ..AccessMode::Exclusive.into() };
    Client::claim(&target.address, "v", 1, claim).expect("it is kept for its holder");
    wait_for("the mount", || (target.status().upgrade?.back == 1).then_some(()));
}

/// Two properties of a target that a refused upgrade must not change.
fn of(target: &Target, client: &mut Client) -> (String, WriteVerifier) {
    client.write(0, &pattern(3, 4096));
    client.flush();
    (target.status().instance, client.volume.verifier)
}

#[test]
fn a_refused_upgrade_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    let before = of(&target, &mut client);
    let refused = |args: &[&str], pieces: &[&str]| {
        assert_refused(&run(&mut command(&target, args)), 1, pieces);
    };
    refused(
        &["--program", "/no/such/program"],
        &["cannot run /no/such/program", "serves as before"],
    );
    refused(&["--program", "/bin/true"], &["is it an rblk-targetd?"]);
    refused(&["--program", "/bin/false"], &["cannot take over"]);
    let old = wrapper(
        dir.path(),
        "case \"$*\" in *--check-take-over) \"$REAL\" \"$@\" | sed 's/\"hand_over_forms\":\\[1,2\\]/\"hand_over_forms\":[1,1]/'; exit 0;; esac",
    );
    refused(&["--program", &old], &["in form 1 to 1", "drain, install, start"]);

    // The next program would need more memory than there is.
    let large = wrapper(
        dir.path(),
        "case \"$*\" in *--check-take-over) \"$REAL\" \"$@\" | sed 's/\"share\":[0-9]*/\"share\":1125899906842624/'; exit 0;; esac",
    );
    refused(
        &["--program", &large],
        &["even with the memory", "an arena of 1024TiB", "lower `arena`"],
    );

    // A configuration that the next program would reject, or that lacks the volume.
    let config = configuration(dir.path());
    let good = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("nonsense = 1\n{good}")).unwrap();
    refused(&[], &["cannot take over", "nonsense", "serves as before"]);
    std::fs::write(&config, good.replace("'v'", "'w'")).unwrap();
    refused(&[], &["would not serve volume `v`"]);
    std::fs::write(&config, good.replace("write-back'", "none'")).unwrap();
    refused(&[], &["another cache mode"]);
    std::fs::write(&config, format!("name = 'other'\n{good}")).unwrap();
    refused(&[], &["its target would be `other`"]);
    std::fs::write(&config, &good).unwrap();

    assert_eq!(of(&target, &mut client), before, "its path has not been cut either");
    assert!(events(&target).iter().all(|event| event.kind != EventKind::Upgrade));
    let nobody = Command::new(program("rblk-target"))
        .args(["upgrade", "--control-socket", "/no/such/socket"])
        .output()
        .unwrap();
    assert_eq!(nobody.status.code(), Some(3), "{nobody:?}");
}

#[test]
fn memory_is_lost_only_by_force() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let instance = target.status().instance;
    let refused = run(&mut command(&target, &[]));
    assert_refused(&refused, 1, &["volume `m` is in the memory of this process", "--force"]);
    assert_eq!(target.status().instance, instance);
    let forced = run(&mut command(&target, &["--force"]));
    assert_eq!(forced.code, Some(0), "{forced:?}");
    assert!(forced.stdout.contains("mounts back 0 of 0, requests sent again 0"), "{forced:?}");
    assert_ne!(target.status().instance, instance);
}

#[test]
fn a_mount_that_does_not_leave_is_cut_off_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let client = Client::connect(&target.address, "v", 1).unwrap();
    let upgrade = begin(&target, &["--timeout", "60s"]);
    // This client never asks for events.
    wait_for("the next program", || target.status_if_any()?.upgrade);
    let generation = client.volume.generation;
    drop(client);
    let claim = VolumeClaim { generation, ..AccessMode::Exclusive.into() };
    let _client = Client::claim(&target.address, "v", 1, claim).unwrap();
    let (code, said, complaint) = end(upgrade);
    assert_eq!(code, Some(0), "{complaint}");
    assert_eq!((&said["stayed"], &said["back"]), (&1.into(), &1.into()), "{said}");
}

#[test]
fn a_stop_that_is_ordered_meanwhile_wins() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path());
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    let upgrade = begin(&target, &["--timeout", "1s"]);
    assert_eq!(client.next_event(), Some(AsyncEvent::Upgrading));
    target.terminate();
    wait_for("the stop", || {
        target.log().contains("no other program takes its place").then_some(())
    });
    drop(client);
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    assert!(!target.socket.exists());
    assert_eq!(end(upgrade).0, Some(1));
}

/// Checks a stop that came during an upgrade: an exit code of 0, and everything in the store.
fn assert_stopped_well(dir: &Path, target: &mut Target, verifier: WriteVerifier, what: &str) {
    assert_eq!(target.wait(), Some(0), "{what}:\n{}", target.log());
    assert!(!target.socket.exists(), "{what}");
    let stored = std::fs::read(dir.join("v.img")).unwrap();
    assert!(stored[..4096] == pattern(1, 4096), "{what}: the volume has what was written");
    let config = configuration(dir);
    target.start_again(dir, &["--config", &config.display().to_string()]);
    // Another verifier would report a loss to the mounts.
    let client = Client::connect(&target.address, "v", 1).unwrap();
    assert_eq!(client.volume.verifier, verifier, "{what}: the run ended clean");
    client.logout();
}

/// Writes a block that stays dirty in the target's memory, and leaves.
fn write_and_leave(target: &Target) -> WriteVerifier {
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    client.write(0, &pattern(1, 4096));
    let verifier = client.volume.verifier;
    client.logout();
    verifier
}

#[test]
fn a_stop_that_comes_with_the_exec_is_heard_by_the_next_program() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path());
    let verifier = write_and_leave(&target);
    // At the first moment of the other program.
    let script = "case \"$*\" in *--check-take-over) ;; *) kill -TERM $$; kill -HUP $$;; esac";
    let other = wrapper(dir.path(), script);
    let upgrade = begin(&target, &["--program", &other, "--timeout", "1s"]);
    assert_stopped_well(dir.path(), &mut target, verifier, "at the exec");
    assert_eq!(end(upgrade).0, Some(1), "no target serves");
}

#[test]
fn a_stop_at_any_moment_of_an_upgrade_is_heard() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path());
    for step in 0..12_u32 {
        let verifier = write_and_leave(&target);
        let told = target.log().matches("another program takes over").count();
        let upgrade = begin(&target, &["--timeout", "1s"]);
        wait_for("the begin", || {
            (target.log().matches("another program takes over").count() > told).then_some(())
        });
        // From the stop of the poll groups until the next program serves.
        std::thread::sleep(std::time::Duration::from_millis(3) * step);
        target.terminate();
        assert_stopped_well(dir.path(), &mut target, verifier, &format!("at step {step}"));
        let _ = end(upgrade);
    }
}

#[test]
fn every_thread_blocks_the_signals_of_the_signal_reader() {
    let blocked = |path: &Path| {
        let status = std::fs::read_to_string(path).ok()?;
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?.trim();
        u64::from_str_radix(mask, 16).ok()
    };
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path());
    let client = Client::connect(&target.address, "v", 1).unwrap();
    // SIGHUP, SIGINT, SIGTERM.
    let held = 1 | 1 << 1 | 1 << 14;
    let tasks = PathBuf::from(format!("/proc/{}/task", target.status().pid));
    let threads: Vec<u64> = std::fs::read_dir(tasks)
        .unwrap()
        .filter_map(|task| blocked(&task.unwrap().path().join("status")))
        .collect();
    assert!(threads.len() > 2 && threads.iter().all(|mask| mask & held == held), "{threads:x?}");
    client.logout();
    // A program that only answers questions does not inherit the mask.
    let seen = dir.path().join("seen");
    let script = format!(
        "case \"$*\" in *--check-take-over) grep SigBlk /proc/self/status >'{}';; esac; exit 1",
        seen.display()
    );
    let other = wrapper(dir.path(), &script);
    assert_refused(&run(&mut command(&target, &["--program", &other])), 1, &["exit status: 1"]);
    assert_eq!(blocked(&seen), Some(0));
}
