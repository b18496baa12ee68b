//! Events of a real target about hosts that come, go and are lost.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rblk_operate::target::events::{Event, EventKind};
use rblk_protocol::AccessMode;
use rblk_tests::program::{Client, Ended, Target, program, run, wait_for};

fn command(target: &Target, args: &[&str]) -> Command {
    let mut command = Command::new(program("rblk-target"));
    command.arg("events").args(args).arg("--control-socket").arg(&target.socket);
    command
}

fn events(target: &Target) -> Vec<Event> {
    let Ended { code, stdout, stderr } = run(&mut command(target, &["-o", "json-lines"]));
    assert_eq!(code, Some(0), "{stderr}");
    stdout.lines().map(|line| serde_json::from_str(line).expect("an event")).collect()
}

fn kinds(target: &Target) -> Vec<EventKind> {
    events(target).into_iter().map(|event| event.kind).collect()
}

#[track_caller]
fn wait_for_kinds(target: &Target, expected: &[EventKind]) {
    wait_for(&format!("{expected:?}"), || (kinds(target) == expected).then_some(()));
}

#[test]
fn only_a_host_that_vanishes_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    assert!(events(&target).is_empty());
    let address = target.address.to_string();
    let discover = run(Command::new(program("rblk-initiator")).args(["discover", &address]));
    assert_eq!(discover.code, Some(0), "{discover:?}");
    wait_for_kinds(&target, &[EventKind::Connect, EventKind::Leave]);

    drop(Client::connect(&target.address, "m", 1).unwrap());
    let (connect, leave, loss) = (EventKind::Connect, EventKind::Leave, EventKind::Loss);
    wait_for_kinds(&target, &[connect, leave, connect, loss]);
    let all = events(&target);
    let lost = &all[3];
    assert_eq!((lost.number, lost.host.as_deref()), (4, Some("test")));
    assert!(lost.address.as_ref().is_some_and(|from| from.contains("127.0.0.1")), "{lost:?}");
    assert_eq!(lost.text, "the host lost its connections; it keeps m for 30 s");
    assert!(all.windows(2).all(|two| two[0].unix_ms <= two[1].unix_ms));

    // A refused host holds nothing, and loses nothing.
    let other = Client::claim(&target.address, "m", 2, AccessMode::Shared);
    assert!(other.is_err(), "it is kept");
    wait_for_kinds(&target, &[connect, leave, connect, loss, connect, leave]);
    let counts = target.status().events;
    let total = |kind| counts.iter().find(|count| count.kind == kind).map(|count| count.total);
    assert_eq!((total(loss), total(EventKind::Fence)), (Some(1), Some(0)));
}

#[test]
fn a_take_over_is_an_event_of_the_host_that_lost_the_volume() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let _first = Client::connect(&target.address, "m", 1).unwrap();
    let claim = rblk_initiator::volume::session::VolumeClaim {
        take_over: true,
        ..rblk_initiator::volume::session::VolumeClaim::from(AccessMode::Exclusive)
    };
    let _second = Client::claim(&target.address, "m", 2, claim).unwrap();
    let fence =
        wait_for("a fence", || events(&target).into_iter().find(|e| e.kind == EventKind::Fence));
    assert_eq!((fence.volume.as_deref(), fence.host.as_deref()), (Some("m"), Some("test")));
    assert!(fence.text.contains("took the volume over"), "{fence:?}");
}

#[test]
fn a_slow_command_is_an_event_only_if_configured() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vol0.img");
    std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).unwrap();
    let config = dir.path().join("target.toml");
    // Every command that waits for a store exceeds this limit.
    let text = format!(
        "listen = ['tcp://127.0.0.1:1']\nslow_io = '1us'\n[[volume]]\nname = 'vol0'\nstore = 'file'\npath = '{}'\n",
        path.display()
    );
    std::fs::write(&config, text).unwrap();
    let target = Target::start(dir.path(), &["--config", &config.display().to_string()]);
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    client.write(0, &[7; 8192]);
    client.flush();
    let is_slow = |event: &Event| event.kind == EventKind::SlowIo;
    let slow = wait_for("a slow command", || events(&target).into_iter().find(is_slow));
    assert_eq!((slow.volume.as_deref(), slow.host.as_deref()), (Some("vol0"), Some("test")));
    assert!(slow.text.contains(" took ") && slow.text.contains(" in poll group 0: "), "{slow:?}");
    drop(target);

    let quiet_dir = tempfile::tempdir().unwrap();
    let file = format!("vol0={}", path.display());
    let target = Target::start(quiet_dir.path(), &["--file", &file]);
    let mut client = Client::connect(&target.address, "vol0", 1).unwrap();
    client.write(0, &[7; 8192]);
    client.flush();
    assert!(!events(&target).iter().any(is_slow));
}

#[test]
fn a_follower_gets_events_of_the_next_run() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let mut follow = command(&target, &["--follow", "-o", "json"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    // Without `-o` the command reports the end of the target on stderr.
    let mut shown = command(&target, &["--follow"]);
    let mut shown = shown.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut shows = BufReader::new(shown.stdout.take().unwrap()).lines();
    let mut said = BufReader::new(shown.stderr.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Event>(&lines.next().unwrap().unwrap()).unwrap();
    Client::connect(&target.address, "m", 1).unwrap().logout();
    assert_eq!((next().kind, next().kind), (EventKind::Connect, EventKind::Leave));
    // Both follow.
    assert!(shows.next().unwrap().unwrap().contains("connect"));
    target.kill();
    let gone = said.next().unwrap().unwrap();
    assert_eq!(gone, "rblk-target: the target is gone; waiting for it");
    shown.kill().unwrap();
    shown.wait().unwrap();
    let again = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let client = Client::connect(&again.address, "m", 1).unwrap();
    let event = next();
    assert_eq!((event.number, event.kind), (1, EventKind::Connect));
    client.logout();
    assert_eq!(next().kind, EventKind::Leave);
    follow.kill().unwrap();
    follow.wait().unwrap();
}

#[test]
fn events_are_printed_as_lines() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let _client = Client::connect(&target.address, "m", 1).unwrap();
    let shown = run(&mut command(&target, &[])).stdout;
    let mut words = shown.split_whitespace();
    assert!(words.next().is_some_and(|time| time.ends_with('Z')), "{shown}");
    assert_eq!((words.next(), words.next()), (Some("connect"), Some("test")));
    assert!(shown.trim_end().ends_with(": the host began a session"), "{shown}");
    let log = target.log();
    assert!(!log.contains("rblk_event"), "these lines are for a journal:\n{log}");
}
