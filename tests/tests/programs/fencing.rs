//! Real targets with volumes that change hands: by force, after a lease, and over a restart.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rblk_fabric::Address;
use rblk_initiator::engine::io::IoOp;
use rblk_initiator::volume::error::SessionError;
use rblk_initiator::volume::session::VolumeClaim;
use rblk_protocol::{AccessMode, Generation};
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Target, free_port, program, run, wait_for};

const ALICE: u8 = 1;
const BOB: u8 = 2;
const CAROL: u8 = 3;
const LEN: usize = 4096;

fn start(dir: &Path, more: &[&str]) -> Target {
    let path = dir.join("v.img");
    if !path.exists() {
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    }
    let file = format!("v={}", path.display());
    let mut flags = vec!["--name", "store1", "--file", &file];
    flags.extend(more);
    Target::start(dir, &flags)
}

/// The record of volume `v`.
fn record(dir: &Path) -> PathBuf {
    let mut files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let is_record = |path: &PathBuf| path.extension().is_some_and(|of| of == "volume");
    files.find(is_record).expect("a record")
}

/// The file of the next record, before it replaces the last one.
fn next_record(dir: &Path) -> PathBuf {
    let mut path = record(dir).into_os_string();
    path.push(".new");
    path.into()
}

fn returning(generation: Generation) -> VolumeClaim {
    VolumeClaim { generation, ..AccessMode::Exclusive.into() }
}

fn taking_over() -> VolumeClaim {
    VolumeClaim { take_over: true, ..AccessMode::Exclusive.into() }
}

fn claim(at: &Address, host: u8, claim: impl Into<VolumeClaim>) -> Result<Client, SessionError> {
    Client::claim(at, "v", host, claim)
}

/// Checks that the holder of that generation hears that it lost the volume.
fn assert_fenced(target: &Target, host: u8, generation: Generation) {
    match claim(&target.address, host, returning(generation)) {
        Err(SessionError::Fenced { by, .. }) => println!("{by}"),
        other => panic!("not fenced: {other:?}"),
    }
}

/// A target may answer before its last lines are in its log.
fn await_words(target: &Target, words: &[&str]) {
    wait_for(&format!("{words:?} in the log"), || {
        let log = target.log();
        words.iter().all(|word| log.contains(word)).then_some(())
    });
}

fn assert_in_use(target: &Target, host: u8, words: &str) {
    assert_says_in_use(&claim(&target.address, host, AccessMode::Exclusive).unwrap_err(), words);
}

fn assert_says_in_use(error: &SessionError, words: &str) {
    let error = error.to_string();
    assert!(error.contains("in use") && error.contains(words), "{error}");
}

#[test]
fn a_holder_whose_volume_was_taken_over_is_out_for_good() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[]);
    let mut alice = Client::connect(&target.address, "v", ALICE).unwrap();
    alice.write(0, &pattern(1, LEN));
    assert_in_use(&target, BOB, "held by test (");
    let mut bob = claim(&target.address, BOB, taking_over()).unwrap();
    assert!(bob.volume.generation > alice.volume.generation);
    bob.write(0, &pattern(2, LEN));
    assert_eq!(alice.try_io(IoOp::Write, 0, LEN as u64), None, "the path is lost");
    assert_fenced(&target, ALICE, alice.volume.generation);
    let status = target.status();
    assert_eq!((status.fencings, status.take_overs), (2, 1));
    let volume = &status.volumes[0];
    assert_eq!(volume.generation, bob.volume.generation.0);
    assert!(volume.holder.as_ref().is_some_and(|holder| holder.present && !holder.shared));

    // The next run knows it too, after a crash as after a clean stop.
    target.kill();
    let mut target = start(dir.path(), &[]);
    assert_fenced(&target, ALICE, alice.volume.generation);
    assert_in_use(&target, CAROL, "may come back");
    assert!(target.status().volumes[0].holder.as_ref().is_some_and(|holder| !holder.present));
    let mut bob = claim(&target.address, BOB, returning(bob.volume.generation)).unwrap();
    assert!(bob.read(0, LEN) == pattern(2, LEN));
    let last = bob.volume.generation;
    bob.logout();
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    let target = start(dir.path(), &[]);
    assert_fenced(&target, ALICE, alice.volume.generation);
    assert_fenced(&target, ALICE, last);
    // Without connections the volume is free at once.
    let carol = claim(&target.address, CAROL, AccessMode::Exclusive).unwrap();
    assert!(carol.volume.generation > last);
    assert_fenced(&target, BOB, last);
    carol.logout();
}

#[test]
fn a_holder_that_was_cut_off_too_long_is_out_when_another_came() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path(), &["--lease", "1s"]);
    assert_eq!(target.status().lease_ms, 1000);
    // On a busy machine the claim may miss the lease; then try again.
    let cut_off = |_: u8| {
        let alice = Client::connect(&target.address, "v", ALICE).unwrap();
        let (first, begun) = (alice.volume.generation, Instant::now());
        drop(alice);
        match claim(&target.address, BOB, AccessMode::Exclusive) {
            Err(error) => assert_says_in_use(&error, "held by test ("),
            Ok(bob) => {
                assert!(begun.elapsed() >= Duration::from_secs(1), "the lease was not kept");
                bob.logout();
                return None;
            }
        }
        Some(first)
    };
    let first = (0..4).find_map(cut_off).expect("a claim within the lease");
    let session_ended = || target.status().sessions.is_empty().then_some(());
    wait_for("the lease's end", session_ended);
    let alice = claim(&target.address, ALICE, returning(first)).unwrap();
    assert_eq!(alice.volume.generation, first, "no other holder came between");
    drop(alice);
    wait_for("the lease's end", session_ended);
    let bob = claim(&target.address, BOB, AccessMode::Exclusive).unwrap();
    bob.logout();
    assert_fenced(&target, ALICE, first);
    let status = target.status();
    assert_eq!((status.fencings, status.take_overs), (1, 0));
    assert_eq!(status.volumes[0].holder, None);
}

#[test]
fn a_holder_that_cannot_be_recorded_is_not_let_in() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[]);
    let mut alice = Client::connect(&target.address, "v", ALICE).unwrap();
    // A directory at the new file's name: it cannot be written any more.
    let new = next_record(dir.path());
    std::fs::create_dir(&new).unwrap();
    let error = claim(&target.address, BOB, taking_over()).unwrap_err().to_string();
    assert!(error.contains("cannot record the holder of the volume"), "{error}");
    // The holder keeps the volume, and may even come back.
    alice.write(0, &pattern(1, LEN));
    assert_eq!(target.status().take_overs, 0);
    let first = alice.volume.generation;
    drop(alice);
    // The end of the lease cannot be recorded, either.
    let is_cut_off = || target.status().sessions.iter().all(|session| session.connections == 0);
    wait_for("the loss of the connections", || is_cut_off().then_some(()));
    let alice = claim(&target.address, ALICE, returning(first)).unwrap();
    std::fs::remove_dir(&new).unwrap();
    drop(alice);
    target.kill();
    // For the next run the holder is the old one.
    let mut target = start(dir.path(), &[]);
    let alice = claim(&target.address, ALICE, returning(first)).unwrap();
    drop(alice);
    target.kill();
    // An unreadable record proves nothing for any holder, so all are fenced.
    std::fs::write(record(dir.path()), "{").unwrap();
    let target = start(dir.path(), &[]);
    assert_fenced(&target, ALICE, first);
    let alice = claim(&target.address, ALICE, AccessMode::Exclusive).unwrap();
    assert!(alice.volume.generation > first);
    alice.logout();
    wait_for("a file that can be read", || {
        serde_json::from_slice::<serde_json::Value>(&std::fs::read(record(dir.path())).ok()?).ok()
    });
}

#[test]
fn a_record_that_cannot_be_read_is_neither_forgotten_nor_missing() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[]);
    let alice = Client::connect(&target.address, "v", ALICE).unwrap();
    let first = alice.volume.generation;
    drop(alice);
    target.kill();
    // A record that cannot be read: the start fails, and the file stays.
    let (path, aside) = (record(dir.path()), dir.path().join("aside"));
    std::fs::rename(&path, &aside).unwrap();
    std::fs::create_dir(&path).unwrap();
    let file = format!("v={}", dir.path().join("v.img").display());
    let mut serve = std::process::Command::new(program("rblk-target"));
    serve.args(["serve", "--name", "store1", "--file", &file, "--listen"]);
    let port = free_port();
    serve.arg(format!("tcp://127.0.0.1:{}", port.number)).arg("--state-dir").arg(dir.path());
    serve.arg("--control-socket").arg(dir.path().join("other.sock"));
    serve.args(["--poll-groups", "1", "--arena", "8MiB", "--max-io", "1MiB"]);
    let ended = run(&mut serve);
    assert_ne!(ended.code, Some(0));
    for words in ["cannot read", ".volume", "Is a directory", "state_dir"] {
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    }
    std::fs::remove_dir(&path).unwrap();
    std::fs::rename(&aside, &path).unwrap();
    let mut target = start(dir.path(), &[]);
    assert!(!target.log().contains("no record of this"), "{}", target.log());
    drop(claim(&target.address, ALICE, returning(first)).unwrap());
    target.kill();
    // A missing record fences every holder, and the log says so.
    std::fs::remove_file(&path).unwrap();
    let target = start(dir.path(), &[]);
    await_words(&target, &["no record of this volume", "mounted anew"]);
    assert_fenced(&target, ALICE, first);
    let bob = claim(&target.address, BOB, AccessMode::Exclusive).unwrap();
    assert!(bob.volume.generation > first, "a generation that was given before");
}

#[test]
fn a_volume_on_another_file_fences_its_old_holders() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[]);
    let mut alice = Client::connect(&target.address, "v", ALICE).unwrap();
    alice.write(0, &pattern(1, LEN));
    let first = alice.volume.generation;
    drop(alice);
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    // The path now leads to another file of the same size, with other bytes.
    let (path, old) = (dir.path().join("v.img"), dir.path().join("old.img"));
    std::fs::rename(&path, &old).unwrap();
    let mut target = start(dir.path(), &[]);
    await_words(&target, &["not the file or device", "v.img"]);
    match claim(&target.address, ALICE, returning(first)) {
        Err(SessionError::Fenced { by, .. }) => assert!(by.contains("another file"), "{by}"),
        other => panic!("not fenced: {other:?}"),
    }
    let alice = claim(&target.address, ALICE, AccessMode::Exclusive).unwrap();
    let second = alice.volume.generation;
    assert!(second > first);
    drop(alice);
    target.kill();
    // The old file under another name is still the same volume.
    std::fs::rename(&path, dir.path().join("moved.img")).unwrap();
    std::fs::hard_link(dir.path().join("moved.img"), &path).unwrap();
    let mut target = start(dir.path(), &[]);
    drop(claim(&target.address, ALICE, returning(second)).unwrap());
    target.kill();
    // The older file is another one again.
    std::fs::remove_file(&path).unwrap();
    std::fs::rename(&old, &path).unwrap();
    let target = start(dir.path(), &[]);
    assert_fenced(&target, ALICE, second);
    assert_fenced(&target, ALICE, first);
}

#[test]
fn a_fenced_host_stays_fenced_if_no_record_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[]);
    let alice = Client::connect(&target.address, "v", ALICE).unwrap();
    let bob = claim(&target.address, BOB, taking_over()).unwrap();
    let generations = (alice.volume.generation, bob.volume.generation);
    drop((alice, bob));
    target.kill();
    // A directory at the new file's name: as on a full disk, the record can be read but not
    // replaced.
    std::fs::create_dir(next_record(dir.path())).unwrap();
    let target = start(dir.path(), &["--lease", "1s"]);
    assert_fenced(&target, ALICE, generations.0);
    let bob = claim(&target.address, BOB, returning(generations.1)).unwrap();
    bob.logout();
    let error = wait_for("the end of the grace", || {
        let error = claim(&target.address, CAROL, AccessMode::Exclusive).unwrap_err().to_string();
        (!error.contains("in use")).then_some(error)
    });
    assert!(error.contains("cannot record the holder of the volume"), "{error}");
}
