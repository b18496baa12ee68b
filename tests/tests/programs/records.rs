//! Real targets that restart, fail to start, change their volumes and hand volumes on: the records
//! of each volume, and reports of a loss exactly where there may be one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use rblk_initiator::volume::session::VolumeClaim;
use rblk_protocol::{AccessMode, WriteVerifier};
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Target, assert_refused, free_port, program, run};
use serde_json::Value;

const FILE_BYTES: usize = 1 << 20;
const LEN: usize = 4096;

/// Starts target `store1` with volumes on files, which are made if they are missing. `volumes`:
/// names, with further lines of their tables.
fn start(dir: &Path, volumes: &[(&str, &str)]) -> Target {
    Target::start(dir, &["--config", &configuration(dir, volumes).display().to_string()])
}

fn configuration(dir: &Path, volumes: &[(&str, &str)]) -> PathBuf {
    let mut text = "name = 'store1'\nwrite_back_delay = '1h'\n".to_owned();
    for (name, more) in volumes {
        let path = dir.join(format!("{name}.img"));
        if !path.exists() {
            std::fs::write(&path, vec![0; FILE_BYTES]).unwrap();
        }
        let path = path.display();
        text += &format!("[[volume]]\nname = '{name}'\nstore = 'file'\npath = '{path}'\n{more}\n");
    }
    let path = dir.join("target.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn stop(mut target: Target) {
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
}

/// The files of the state directory with this extension.
fn files(dir: &Path, extension: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let paths = paths.filter(|path| path.extension().is_some_and(|its| its == extension));
    paths.map(|path| (path.clone(), std::fs::read(&path).unwrap())).collect()
}

fn records(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    files(dir, "volume")
}

/// Pretends that the machine has booted since the target ran.
fn boot(dir: &Path) {
    for (path, text) in records(dir) {
        let mut record: Value = serde_json::from_slice(&text).unwrap();
        assert!(record["boot_id"].is_string());
        record["boot_id"] = "another".into();
        std::fs::write(path, record.to_string()).unwrap();
    }
}

fn verifier(target: &Target, volume: &str) -> WriteVerifier {
    let client = Client::connect(&target.address, volume, 1).expect("a client");
    let verifier = client.volume.verifier;
    client.logout();
    verifier
}

/// Writes as a host, without a FLUSH.
fn write(target: &Target, volume: &str) -> WriteVerifier {
    let mut client = Client::connect(&target.address, volume, 1).expect("a client");
    client.write(0, &pattern(1, LEN));
    client.volume.verifier
}

/// A command for a running target.
fn order(target: &Target, args: &[&str]) {
    let mut command = Command::new(program("rblk-target"));
    command.args(args).arg("--control-socket").arg(&target.socket);
    assert_refused(&run(&mut command), 0, &[]);
}

#[test]
fn a_start_that_fails_hides_no_loss() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[("v", "")]);
    let known = write(&target, "v");
    target.kill();
    let left = records(dir.path());
    assert_eq!(left.len(), 1);
    // Starts that fail later and later, as after the kernel killed a target for want of memory.
    let config = configuration(dir.path(), &[("v", "")]);
    let mut failed = 0;
    for limit in (10..64).step_by(3) {
        let mut command = Command::new("sh");
        let script = format!("ulimit -Hn {limit}; ulimit -n {limit}; exec timeout -k 1 3 \"$@\"");
        command.args(["-c", &script, "sh"]).arg(program("rblk-targetd")).arg("serve");
        command.arg("--config").arg(&config).args(["--poll-groups", "2", "--arena", "8MiB"]);
        command.arg("--listen").arg(format!("tcp://127.0.0.1:{}", free_port().number));
        command.arg("--state-dir").arg(dir.path());
        command.arg("--control-socket").arg(dir.path().join("other.sock"));
        let ended = run(&mut command);
        if ended.stderr.contains(" ready ") {
            break;
        }
        assert!(ended.stderr.contains("Too many open files"), "{}", ended.stderr);
        failed += 1;
        assert!(records(dir.path()) == left, "at {limit} it wrote: {}", ended.stderr);
    }
    assert!(failed > 3, "no start has failed");
    // The last start did not fail, and its stop synced the store.
    left.iter().for_each(|(path, text)| std::fs::write(path, text).unwrap());
    boot(dir.path());
    let target = start(dir.path(), &[("v", "")]);
    assert_ne!(verifier(&target, "v"), known, "the kernel's memory is gone, and a write with it");
}

#[test]
fn a_clean_stop_vouches_only_for_synced_volumes() {
    for between in [&[("w", "")][..], &[("v", "read_only = true")], &[]] {
        let dir = tempfile::tempdir().unwrap();
        let mut target = start(dir.path(), &[("v", "")]);
        let known = write(&target, "v");
        target.kill();
        stop(start(dir.path(), between));
        // The end of the process alone loses nothing.
        let target = start(dir.path(), between);
        stop(target);
        boot(dir.path());
        let target = start(dir.path(), &[("v", "")]);
        assert_ne!(verifier(&target, "v"), known, "{between:?}");
    }
    // A run that serves the volume for writing syncs it, even if an earlier run wrote.
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[("v", "")]);
    let known = write(&target, "v");
    target.kill();
    stop(start(dir.path(), &[("v", "")]));
    boot(dir.path());
    assert_eq!(verifier(&start(dir.path(), &[("v", "")]), "v"), known);
}

#[test]
fn a_change_of_the_cache_mode_is_no_loss() {
    let back = &[("v", "cache = 'write-back'")];
    for how in ["kill", "stop", "upgrade"] {
        let dir = tempfile::tempdir().unwrap();
        let mut target = start(dir.path(), back);
        let known = write(&target, "v");
        order(&target, &["volume", "set", "v", "--cache", "write-through"]);
        let through = &[("v", "cache = 'write-through'")];
        configuration(dir.path(), through);
        match how {
            "kill" => target.kill(),
            "stop" => {
                target.terminate();
                assert_eq!(target.wait(), Some(0));
            }
            _ => order(&target, &["upgrade"]),
        }
        let target = if how == "upgrade" { target } else { start(dir.path(), through) };
        assert_eq!(verifier(&target, "v"), known, "{how}");
        let mut client = Client::connect(&target.address, "v", 1).unwrap();
        assert!(client.read(0, LEN) == pattern(1, LEN), "{how}");
    }
    // In the other direction: write-back data is lost with the process.
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[("v", "")]);
    let known = verifier(&target, "v");
    order(&target, &["volume", "set", "v", "--cache", "write-back"]);
    assert_eq!(write(&target, "v"), known, "nothing is lost by that");
    target.kill();
    assert_ne!(verifier(&start(dir.path(), back), "v"), known);
}

#[test]
fn a_volume_made_writable_after_an_upgrade_is_synced_at_the_stop() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path(), &[("v", "")]);
    order(&target, &["volume", "set", "v", "--read-only"]);
    configuration(dir.path(), &[("v", "read_only = true")]);
    order(&target, &["upgrade"]);
    order(&target, &["volume", "set", "v", "--read-only=false", "--cache", "write-back"]);
    let known = write(&target, "v");
    stop(target);
    let stored = std::fs::read(dir.path().join("v.img")).unwrap();
    assert!(stored[..LEN] == pattern(1, LEN), "what was acknowledged is in the store");
    boot(dir.path());
    let target = start(dir.path(), &[("v", "cache = 'write-back'")]);
    assert_eq!(verifier(&target, "v"), known);
}

#[test]
fn a_volume_that_was_removed_and_added_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = start(dir.path(), &[("v", ""), ("w", "")]);
    let known = write(&target, "v");
    order(&target, &["volume", "remove", "v", "--force"]);
    let file = dir.path().join("v.img").display().to_string();
    order(&target, &["volume", "add", "v", "--file", &file]);
    assert_eq!(verifier(&target, "v"), known, "what hosts wrote was made durable first");
    target.kill();
    boot(dir.path());
    // The volume was served, and perhaps written to: the records cannot tell.
    let target = start(dir.path(), &[("v", ""), ("w", "")]);
    assert_ne!(verifier(&target, "v"), known);
    let known = verifier(&target, "v");
    order(&target, &["volume", "remove", "v"]);
    drop(target);
    boot(dir.path());
    // The volume was safe when it was removed, and the end of the run does not matter.
    assert_eq!(verifier(&start(dir.path(), &[("v", ""), ("w", "")]), "v"), known);
}

#[test]
fn the_next_holder_reads_only_what_is_durable() {
    let dir = tempfile::tempdir().unwrap();
    let back = &[("v", "cache = 'write-back'")];
    let mut target = start(dir.path(), back);
    let mut first = Client::connect(&target.address, "v", 1).unwrap();
    first.write(0, &pattern(7, LEN));
    drop(first);
    let taking_over = VolumeClaim { take_over: true, ..AccessMode::Exclusive.into() };
    let mut second = Client::claim(&target.address, "v", 2, taking_over).unwrap();
    assert!(second.read(0, LEN) == pattern(7, LEN));
    let generation = second.volume.generation;
    target.kill();
    let target = start(dir.path(), back);
    let claim = VolumeClaim { generation, ..AccessMode::Exclusive.into() };
    let mut second = Client::claim(&target.address, "v", 2, claim).unwrap();
    assert!(second.read(0, LEN) == pattern(7, LEN), "what it has read is there");
}

/// The version before has served the volume since, without a record: it left files of its own.
#[test]
fn a_record_is_old_beside_files_of_the_version_before() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path(), &[("v", "")]);
    let client = Client::connect(&target.address, "v", 1).unwrap();
    let (generation, known) = (client.volume.generation, client.volume.verifier);
    drop(client);
    stop(target);
    let lineage = serde_json::json!({
        "version": 1, "boot_id": "another", "process": "01".repeat(16), "machine": "02".repeat(16), "clean": true,
    });
    std::fs::write(dir.path().join("store1.lineage"), lineage.to_string()).unwrap();
    let target = start(dir.path(), &[("v", "")]);
    let claim = VolumeClaim { generation, ..AccessMode::Exclusive.into() };
    let fenced = Client::claim(&target.address, "v", 1, claim).unwrap_err();
    assert!(
        matches!(fenced, rblk_initiator::volume::error::SessionError::Fenced { .. }),
        "{fenced}"
    );
    assert_ne!(verifier(&target, "v"), known);
    assert!(files(dir.path(), "lineage").is_empty());
}

#[test]
fn a_record_that_is_no_file_fails_the_start_at_once() {
    let dir = tempfile::tempdir().unwrap();
    stop(start(dir.path(), &[("v", "")]));
    let record = records(dir.path()).into_keys().next().unwrap();
    std::fs::remove_file(&record).unwrap();
    nix::unistd::mkfifo(&record, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let config = configuration(dir.path(), &[("v", "")]);
    let mut serve = Command::new(program("rblk-targetd"));
    serve.arg("serve").arg("--config").arg(&config).arg("--state-dir").arg(dir.path());
    serve.arg("--listen").arg(format!("tcp://127.0.0.1:{}", free_port().number));
    serve.arg("--control-socket").arg(dir.path().join("other.sock")).args(["--arena", "8MiB"]);
    let ended = run(&mut serve);
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains("not a regular file"), "{}", ended.stderr);
}

#[test]
fn files_of_the_version_before_are_converted() {
    let dir = tempfile::tempdir().unwrap();
    let target = start(dir.path(), &[("v", ""), ("w", "cache = 'write-back'")]);
    let generation = Client::connect(&target.address, "v", 1).unwrap().volume.generation;
    stop(target);
    // The same facts in the files of the version before.
    let mut holders = Vec::new();
    for (path, text) in records(dir.path()) {
        let record: Value = serde_json::from_slice(&text).unwrap();
        if let Some(holder) = record.get("holder") {
            let mut holder = holder.clone();
            holder["uuid"] = record["uuid"].clone();
            holders.push(holder);
        }
        std::fs::remove_file(path).unwrap();
    }
    assert_eq!(holders.len(), 1);
    let holders = serde_json::json!({ "version": 2, "volumes": holders, "stores": [] });
    std::fs::write(dir.path().join("store1.holders"), holders.to_string()).unwrap();
    let lineage = serde_json::json!({
        "version": 1, "boot_id": "another", "process": "01".repeat(16), "machine": "02".repeat(16), "clean": true,
    });
    std::fs::write(dir.path().join("store1.lineage"), lineage.to_string()).unwrap();
    let mut target = start(dir.path(), &[("v", ""), ("w", "cache = 'write-back'")]);
    assert_eq!(verifier(&target, "w"), WriteVerifier([1; 16]));
    let claim = VolumeClaim { generation, ..AccessMode::Exclusive.into() };
    let client = Client::claim(&target.address, "v", 1, claim).expect("it is known");
    assert_eq!(client.volume.verifier, WriteVerifier([2; 16]));
    drop(client);
    assert!(files(dir.path(), "holders").is_empty() && files(dir.path(), "lineage").is_empty());
    assert_eq!(records(dir.path()).len(), 2);
    target.kill();
    let target = start(dir.path(), &[("v", ""), ("w", "cache = 'write-back'")]);
    assert_eq!(verifier(&target, "v"), WriteVerifier([2; 16]));
    assert_ne!(verifier(&target, "w"), WriteVerifier([1; 16]));
}
