//! Real targets that stop while a store refuses acknowledged writes: their attempts, their reports,
//! and their exit codes.
//!
//! RLIMIT_FSIZE of the target's process stands for a full file system: `prlimit` sets and lifts it
//! while the target runs, without root, and writes behind it fail with EFBIG.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rblk_operate::target::status::{DrainStatus, UnsavedStatus};
use rblk_protocol::WriteVerifier;
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Target, program, run, wait_for};

/// The error of a write behind the limit.
const CAUSE: &str = "File too large (os error 27)";
/// The exit code of a target that gave writes up.
const GAVE_UP: i32 = 10;
const KIB: usize = 1 << 10;
const MIB: u64 = 1 << 20;
/// Files have no room from this offset on.
const FULL_AT: u64 = 2 * MIB;

/// Two volumes, `v` and `w`, which keep dirty blocks in memory for an hour.
fn start(dir: &Path, more: &[&str]) -> Target {
    let volume = |name: &str| {
        let path = dir.join(name);
        if !path.exists() {
            File::create(&path).unwrap().set_len(4 * MIB).unwrap();
        }
        let path = path.display();
        format!(
            "[[volume]]\nname = '{name}'\nstore = 'file'\npath = '{path}'\ncache = 'write-back'\n"
        )
    };
    let config = dir.join("target.toml");
    fs::write(&config, format!("write_back_delay = '1h'\n{}{}", volume("v"), volume("w"))).unwrap();
    let config = config.display().to_string();
    let args = [&["--config", &config, "--poll-groups", "2"], more].concat();
    // A write behind the limit is an error, and no signal ends the process.
    Target::start_by(&["env", "--ignore-signal=XFSZ"], dir, &args)
}

fn limit(target: &Target, bytes: &str) {
    let pid = target.status().pid.to_string();
    let limit = format!("--fsize={bytes}:unlimited");
    let ended = run(Command::new("prlimit").args(["--pid", &pid, &limit]));
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

/// Writes to both volumes, acknowledged and not flushed. `v` has no room for one of them. Returns
/// the verifiers.
fn fill_up(target: &Target) -> [WriteVerifier; 2] {
    limit(target, &MIB.to_string());
    [("v", 1), ("w", 2)].map(|(volume, host)| {
        let mut client = Client::connect(&target.address, volume, host).unwrap();
        client.write(0, &pattern(1, 64 * KIB));
        if volume == "v" {
            client.write(FULL_AT, &pattern(2, 64 * KIB));
        }
        let verifier = client.volume.verifier;
        client.logout();
        verifier
    })
}

fn verifiers(target: &Target) -> [WriteVerifier; 2] {
    [("v", 1), ("w", 2)].map(|(volume, host)| {
        let client = Client::connect(&target.address, volume, host).unwrap();
        let verifier = client.volume.verifier;
        client.logout();
        verifier
    })
}

fn has(dir: &Path, volume: &str, at: u64, bytes: &[u8]) -> bool {
    let mut found = vec![0; bytes.len()];
    File::open(dir.join(volume)).unwrap().read_exact_at(&mut found, at).unwrap();
    found == bytes
}

fn drain(target: &Target) -> Child {
    let mut command = Command::new(program("rblk-target"));
    command.args(["drain", "--control-socket"]).arg(&target.socket);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The end of a drain: code, output, errors.
fn outcome(mut drain: Child) -> (Option<i32>, String, String) {
    wait_for("the end of the drain", || drain.try_wait().unwrap());
    let output = drain.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_store_that_refuses_to_the_end_is_reported_everywhere() {
    for by_command in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let mut target = start(dir.path(), &["--stop-timeout", "2s"]);
        let before = fill_up(&target);
        if by_command {
            let (code, said, complaint) = outcome(drain(&target));
            assert_eq!(code, Some(GAVE_UP), "{said}{complaint}");
            let waits =
                format!("not in its store yet, and tried again: volume `v` 64KiB ({CAUSE})");
            assert!(said.contains(&waits), "{said}");
            let lost =
                format!("data is lost, as its store did not take it: volume `v` 64KiB ({CAUSE})");
            assert!(complaint.contains(&lost) && !complaint.contains("`w`"), "{complaint}");
        } else {
            target.terminate();
        }
        assert_eq!(target.wait(), Some(GAVE_UP), "{}", target.log());
        let log = target.log();
        for (words, count) in [
            ("the store refuses acknowledged data: it is tried again", 1),
            ("the target stopped, and acknowledged data is lost: its store did not take it", 1),
            ("the target stopped, and acknowledged data is lost: volume `v` 64KiB", 1),
        ] {
            let lines = log.lines().filter(|line| line.contains(words));
            let errors =
                lines.filter(|line| line.contains("ERROR") || line.contains("rblk-target:"));
            assert_eq!(errors.count(), count, "{words}:\n{log}");
        }
        assert!(log.contains("dirty_bytes=65536") && log.contains(CAUSE), "{log}");
        // Everything that fits, of both.
        assert!(has(dir.path(), "v", 0, &pattern(1, 64 * KIB)));
        assert!(has(dir.path(), "w", 0, &pattern(1, 64 * KIB)));
        let target = start(dir.path(), &[]);
        let [v, _] = verifiers(&target);
        assert_ne!(v, before[0], "its mounts hear of the loss");
        assert!(has(dir.path(), "v", FULL_AT, &[0; 64 * KIB]), "it was given up");
    }
}

#[test]
fn room_that_comes_in_time_saves_everything() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &["--stop-timeout", "1h"]);
    let before = fill_up(&target);
    let drain = drain(&target);
    let refused = wait_for("a refusal", || {
        let DrainStatus { unsaved, .. } = target.status_if_any()?.drain?;
        (!unsaved.is_empty()).then_some(unsaved)
    });
    let cause = CAUSE.to_owned();
    assert_eq!(refused, [UnsavedStatus { volume: "v".to_owned(), dirty_bytes: 65536, cause }]);
    let mut events = Command::new(program("rblk-target"));
    let events = run(events.args(["events", "--control-socket"]).arg(&target.socket)).stdout;
    let told =
        format!("the target stops, and the store refuses 64KiB of acknowledged data: {CAUSE}");
    assert!(events.contains("store-error") && events.contains(&told), "{events}");
    let mut status = Command::new(program("rblk-target"));
    let status = run(status.args(["status", "--control-socket"]).arg(&target.socket)).stdout;
    assert!(status.contains("volume `v` 64KiB"), "{status}");
    limit(&target, "unlimited");
    let (code, said, complaint) = outcome(drain);
    assert_eq!((code, complaint.as_str()), (Some(0), ""), "{said}");
    assert!(said.lines().last().unwrap().starts_with("stopped after "), "{said}");
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    assert!(has(dir.path(), "v", FULL_AT, &pattern(2, 64 * KIB)));
    let target = start(dir.path(), &[]);
    assert_eq!(verifiers(&target), before, "nothing is lost");
}

#[test]
fn a_target_killed_in_a_drain_is_not_reported_as_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &["--stop-timeout", "1h"]);
    fill_up(&target);
    let drain = drain(&target);
    wait_for("a refusal", || {
        let drain = target.status_if_any()?.drain?;
        (!drain.unsaved.is_empty()).then_some(())
    });
    target.kill();
    let (code, said, complaint) = outcome(drain);
    assert_eq!(code, Some(1), "{said}");
    assert!(complaint.contains("ended without a word"), "{complaint}");
}

#[test]
fn an_upgrade_by_force_tries_to_save_and_reports_losses() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path(), &["--stop-timeout", "2s"]);
    let before = fill_up(&target);
    let upgrade = |force: bool| {
        let mut command = Command::new(program("rblk-target"));
        command.arg("upgrade").args(force.then_some("--force"));
        run(command.arg("--control-socket").arg(&target.socket))
    };
    let refused = upgrade(false);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(
        refused.stderr.contains("(os error 27)") || refused.stderr.contains("EFBIG"),
        "{refused:?}"
    );
    let forced = upgrade(true);
    assert_eq!(forced.code, Some(GAVE_UP), "{forced:?}");
    assert!(forced.stderr.contains("volume `v` 64KiB"), "{forced:?}");
    assert!(forced.stdout.contains("not everything was made durable before"), "{forced:?}");
    assert_ne!(verifiers(&target)[0], before[0], "its mounts hear of the loss");
    limit(&target, "unlimited");
}
