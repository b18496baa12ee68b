//! Normal events must not look like failures: initiators that come, look and leave, and initiators
//! that come back to a restarted target.

use std::process::Command;
use std::time::Duration;

use rblk_fabric::ConnectOptions;
use rblk_initiator::volume::session::{HostIdentity, Session};
use rblk_protocol::{Epoch, HostId, Name, SessionId};
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, DEADLINE, Target, program, run, wait_for};

/// Lines of a target's log that look like failures.
fn complaints(target: &Target) -> Vec<String> {
    const WORDS: [&str; 4] = ["WARN", "ERROR", "failed", "was lost"];
    let log = target.log();
    log.lines()
        .filter(|line| WORDS.iter().any(|word| line.contains(word)))
        // Skips warnings of the start: this target has no store, and no RDMA device.
        .skip_while(|line| !line.contains("peer"))
        .map(str::to_owned)
        .collect()
}

fn wait_until_alone(target: &Target) {
    wait_for("every session to end", || target.status().sessions.is_empty().then_some(()));
}

#[track_caller]
fn assert_nothing_failed(target: &Target) {
    assert_eq!(complaints(target), Vec::<String>::new());
    assert_eq!(target.status().total.lost_connections, 0, "{}", target.log());
}

#[test]
fn a_host_that_leaves_is_no_lost_connection() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    for _ in 0..5 {
        let address = target.address.to_string();
        let ended = run(Command::new(program("rblk-initiator")).args(["discover", &address]));
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
    // In the order of `umount`: the queues leave first, then the session.
    for host in 1..=5 {
        let mut client = Client::connect(&target.address, "m", host).unwrap();
        client.write(0, &pattern(u64::from(host), 4096));
        client.logout();
    }
    wait_until_alone(&target);
    assert_nothing_failed(&target);
    // A thread of the target writes the log.
    wait_for("the line of the log", || target.log().contains("the initiator left").then_some(()));
}

/// A mount does this after a restart of its target: it asks for its session, and begins a new one
/// if the old one is gone.
#[test]
fn a_host_that_returns_after_a_restart_is_no_warning() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let host = HostIdentity { id: HostId([1; 16]), name: Name::new("test").unwrap() };
    let options = ConnectOptions { timeout: DEADLINE, ..ConnectOptions::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let of_before = Some((SessionId([7; 16]), Epoch(2)));
        let refused =
            Session::connect(&target.address, &options, &host, None, of_before).await.unwrap_err();
        assert!(refused.is_session_gone(), "{refused}");
        let session = Session::connect(&target.address, &options, &host, None, None).await.unwrap();
        session.logout(Duration::from_secs(5)).await;
    });
    wait_until_alone(&target);
    assert_nothing_failed(&target);
    let line = "an initiator comes back with a session that this target does not know";
    // A thread of the target writes the log.
    wait_for("the line of the log", || target.log().contains(line).then_some(()));
}

#[test]
fn a_volume_in_memory_shows_no_generation() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let client = Client::connect(&target.address, "m", 1).unwrap();
    let number = target.status().volumes[0].generation;
    assert!(number > 1 << 40, "it begins at the time: {number}");
    let mut command = Command::new(program("rblk-target"));
    command.args(["status", "--control-socket"]).arg(&target.socket);
    let shown = run(&mut command).stdout;
    assert!(!shown.contains(&number.to_string()), "{shown}");
    let json = run(command.args(["--output", "json"])).stdout;
    assert!(json.contains(&number.to_string()), "{json}");
    client.logout();
}
