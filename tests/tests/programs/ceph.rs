//! Volumes on images of a real Ceph cluster: fio verifies them while an OSD stands still, while it
//! is killed and while the target is replaced, and an image that another client takes is served no
//! longer.
//!
//! Each test makes a cluster of its own on loopback (`tests/src/lab/ceph-cluster.sh`).

use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rblk_config::Exit;
use rblk_initiator::engine::io::IoOp;
use rblk_operate::target::events::{Event, EventKind};
use rblk_operate::target::status::VolumeStatus;
use rblk_operate::target::store_fault::StoreFaultKind;
use rblk_tests::bed::pattern;
use rblk_tests::lab::ceph::CephCluster;
use rblk_tests::program::{Client, Target, program, run, wait_for};

use super::fio_engine::{Fio, engine};

const REASON_OF_OSDS: &str = "has not answered for";

/// Serves the image `rbd/v` as the volume `v`.
fn serve(cluster: &CephCluster, more: &[&str]) -> Target {
    let conf = cluster.conf().display().to_string();
    let args = ["--rbd", "v=rbd/v", "--ceph-conf", &conf];
    Target::start(cluster.directory(), &[&args[..], more].concat())
}

fn volume(target: &Target) -> Option<VolumeStatus> {
    target.status().volumes.into_iter().find(|volume| volume.name == "v")
}

/// The bytes of the image, as Ceph has them.
fn exported(cluster: &CephCluster) -> Vec<u8> {
    let file = cluster.directory().join("export");
    let _ = std::fs::remove_file(&file);
    cluster.run(&format!("rbd export --no-progress rbd/v {}", file.display()));
    std::fs::read(file).unwrap()
}

/// The bytes of the volume, as its hosts have them.
fn all_of(target: &Target, host: u8) -> Vec<u8> {
    let mut client = Client::connect(&target.address, "v", host).unwrap();
    let blocks = client.volume.blocks.0 * u64::from(client.volume.block_size.bytes());
    const PIECE: usize = 64 << 10;
    let whole = (0..blocks).step_by(PIECE).flat_map(|at| client.read(at, PIECE)).collect();
    client.logout();
    whole
}

fn events(target: &Target) -> Vec<Event> {
    let mut command = Command::new(program("rblk-target"));
    command.args(["-o", "json", "events", "--control-socket"]).arg(&target.socket);
    let said = run(&mut command).stdout;
    said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Stops a target in good order, and checks that its lock is free at once.
fn stop(cluster: &CephCluster, mut target: Target) {
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    assert_eq!(cluster.run("rbd lock ls rbd/v").trim(), "", "the lock is still there");
}

fn verified_under_faults(cache: &str) {
    let Some(engine) = engine() else { return };
    let cluster = CephCluster::start("bluestore", 1);
    cluster.run("rbd create --size 32M rbd/v");
    // In a file, so that the program that takes its place has the cache mode, too.
    let (file, conf) = (cluster.directory().join("target.toml"), cluster.conf());
    let text = format!(
        "[[volume]]\nname = 'v'\nstore = 'rbd'\nimage = 'rbd/v'\nceph_conf = '{}'\ncache = '{cache}'\n",
        conf.display()
    );
    std::fs::write(&file, text).unwrap();
    let args = ["--config", file.to_str().unwrap(), "--poll-groups", "2"];
    let target = Target::start(cluster.directory(), &args);
    assert_eq!(volume(&target).unwrap().store, "rbd");

    let config = cluster.directory().join("mount.toml");
    let text = format!("target = ['{}']\nvolume = 'v'\nreconnect_delay = '20ms'\n", target.address);
    std::fs::write(&config, text).unwrap();
    // A limited rate, so that each fault meets requests.
    let job = ["--rw=randwrite", "--bsrange=4k-64k", "--size=12M", "--iodepth=16"];
    let more = format!("--rblk_config={}", config.display());
    let job =
        [&job[..], &["--rate_iops=60", "--verify=crc32c", "--verify_fatal=1", &more]].concat();
    let fio = Fio::start(&engine, cluster.directory(), &target, "v", &job);
    // An OSD that stands still for so long that all requests wait, and one that dies.
    for (begin, end, time) in
        [("osd-pause 0", "osd-continue 0", 13), ("osd-kill 0", "osd-start 0", 7)]
    {
        let written = target.status().total.written_bytes;
        let more = || (target.status().total.written_bytes > written + (1 << 20)).then_some(());
        wait_for("some writes", more);
        cluster.script(begin);
        thread::sleep(Duration::from_secs(time));
        let fault = wait_for("the stall", || volume(&target)?.store_fault);
        assert_eq!(fault.kind, StoreFaultKind::Stalled);
        assert!(fault.text.contains(REASON_OF_OSDS), "{fault}");
        cluster.script(end);
        wait_for("the end of the stall", || volume(&target)?.store_fault.is_none().then_some(()));
    }
    let is_fault = |event: &Event| event.kind == EventKind::StoreFault;
    assert!(events(&target).iter().any(is_fault), "{:?}", events(&target));

    // Another program takes the place of the target, and its client that of the old one.
    let mut command = Command::new(program("rblk-target"));
    command.args(["upgrade", "--timeout", "60s", "--control-socket"]);
    let upgraded = run(command.arg(&target.socket));
    assert_eq!(upgraded.code, Some(0), "{upgraded:?}\n{}", target.log());
    let results = fio.end();
    results.assert_well(&["write", "read"]);

    let served = all_of(&target, 9);
    stop(&cluster, target);
    assert!(exported(&cluster) == served, "the image differs from the volume");
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_fio_verifies_a_volume_under_faults_written_through() {
    verified_under_faults("write-through");
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_fio_verifies_a_volume_under_faults_written_back() {
    verified_under_faults("write-back");
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_an_image_that_another_client_takes_is_served_no_longer() {
    for poll_groups in ["1", "2"] {
        taken_by_another_client(poll_groups);
    }
}

fn taken_by_another_client(poll_groups: &str) {
    let cluster = CephCluster::start("memstore", 1);
    cluster.run("rbd create --size 8M rbd/v");
    let target = serve(&cluster, &["--poll-groups", poll_groups]);
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    let (old, new) = (pattern(1, 4096), pattern(2, 4096));
    client.write(0, &old);
    client.flush();
    assert_eq!(client.read(0, 4096), old, "a hit");
    let owner = cluster.lock_owner("rbd/v").unwrap();
    cluster.run(&format!("ceph osd blocklist add {owner}"));
    // Another client writes at once: no answer may have the old data after the loss was noticed.
    cluster.run("rbd bench --io-type write --io-size 4096 --io-threads 1 --io-total 4096 rbd/v");
    let until = Instant::now() + Duration::from_secs(30);
    // Hits and misses of every shard: none of them is an error.
    let mut at = (0..8).cycle();
    while let Some(result) = client.try_io(IoOp::Read, at.next().unwrap() << 20, 4096) {
        assert_eq!(result, 4096, "{}", target.log());
        assert!(Instant::now() < until, "the target still answers");
        thread::sleep(Duration::from_millis(20));
    }
    let status = wait_for("the end of the volume", || {
        let status = target.status();
        status.volumes.is_empty().then_some(status)
    });
    let [away] = &status.volumes_away[..] else { panic!("{:?}", status.volumes_away) };
    assert!(away.why.contains("its image is lost") && away.why.contains("fenced"), "{}", away.why);
    let of_loss = |event: &Event| event.text.contains("its image is lost");
    assert!(events(&target).iter().any(of_loss), "{:?}", events(&target));
    assert!(Client::connect(&target.address, "v", 1).is_err(), "it is not served");

    // It comes back when an administrator says so, with a new client of the cluster.
    let mut command = Command::new(program("rblk-target"));
    let reloaded = run(command.args(["reload", "--control-socket"]).arg(&target.socket));
    assert_eq!(reloaded.code, Some(0), "{reloaded:?}");
    let mut client = Client::connect(&target.address, "v", 2).unwrap();
    assert_ne!(client.read(0, 4096), old, "it has what the other client wrote");
    client.write(0, &new);
    client.logout();
    stop(&cluster, target);
    assert!(exported(&cluster)[..4096] == new[..]);
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_cached_blocks_wait_while_the_cluster_is_silent() {
    let cluster = CephCluster::start("memstore", 1);
    cluster.run("rbd create --size 8M rbd/v");
    let target = serve(&cluster, &[]);
    let mut client = Client::connect(&target.address, "v", 1).unwrap();
    let old = pattern(1, 4096);
    client.write(0, &old);
    client.flush();
    assert_eq!(client.read(0, 4096), old, "a hit");
    cluster.script("osd-pause 0");
    thread::sleep(Duration::from_secs(13));
    // Another client may have the image by now, for all that the target knows.
    let read = thread::spawn(move || (client.read(0, 4096), client));
    thread::sleep(Duration::from_secs(3));
    assert!(!read.is_finished(), "answered from the cache");
    cluster.script("osd-continue 0");
    let (got, client) = read.join().unwrap_or_else(|_| panic!("{}", target.log()));
    assert_eq!(got, old);
    client.logout();
    stop(&cluster, target);
}

/// Its image cannot be closed, and threads of its client are left.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_target_ends_in_good_order_while_the_cluster_is_silent() {
    let cluster = CephCluster::start("memstore", 1);
    cluster.run("rbd create --size 8M rbd/v");
    let mut target = serve(&cluster, &["--stop-timeout", "1s"]);
    cluster.script("osd-pause 0");
    target.terminate();
    // It waits for the image for 30 s.
    thread::sleep(Duration::from_secs(31));
    let code = target.wait();
    // Nothing was written, but no FLUSH was answered either.
    assert!(code == Some(0) || code == Some(i32::from(Exit::GaveUp.code())), "{}", target.log());
    assert!(target.log().contains("an image was not closed"), "{}", target.log());
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_volume_follows_its_image_and_doctor_names_its_faults() {
    let cluster = CephCluster::start("memstore", 1);
    cluster.run("rbd create --size 8M rbd/v");
    let target = serve(&cluster, &[]);
    let size = |target: &Target| volume(target).unwrap().size_bytes;
    let command = |words: &[&str]| {
        let mut command = Command::new(program("rblk-target"));
        run(command.args(words).args(["--control-socket"]).arg(&target.socket))
    };
    assert_eq!(size(&target), 8 << 20);
    // The image is made longer by Ceph, and by rblk.
    cluster.run("rbd resize --no-progress --size 12M rbd/v");
    wait_for("the news", || (command(&["volume", "resize", "v"]).code == Some(0)).then_some(()));
    wait_for("the size", || (size(&target) == 12 << 20).then_some(()));
    let resized = command(&["volume", "resize", "v", "16MiB"]);
    assert_eq!((resized.code, size(&target)), (Some(0), 16 << 20), "{resized:?}");
    assert!(cluster.run("rbd info rbd/v").contains("16 MiB"));
    let resized = command(&["volume", "resize", "v", "8MiB", "--shrink"]);
    assert_eq!((resized.code, size(&target)), (Some(0), 8 << 20), "{resized:?}");
    let snapshot = command(&["volume", "snapshot", "v"]);
    assert_ne!(snapshot.code, Some(0));
    // A snapshot is a volume of its own, beside its image.
    cluster.run("rbd snap create --no-progress rbd/v@s");
    let conf = cluster.conf().display().to_string();
    let added = command(&["volume", "add", "s", "--rbd", "rbd/v@s", "--ceph-conf", &conf]);
    assert_eq!(added.code, Some(0), "{added:?}");
    let status = target.status();
    assert!(status.volumes.iter().any(|volume| volume.name == "s" && volume.read_only));
    // A check finds the running target, and not a locked image.
    let file = config(&cluster, "rbd/v", &target.socket);
    let checked = run(Command::new(program("rblk-target")).args(["check", "--config"]).arg(&file));
    assert_eq!(checked.code, Some(0), "{checked:?}");
    // Another target finds the lock.
    let lonely = cluster.directory().join("lonely");
    std::fs::create_dir(&lonely).unwrap();
    let file = config(&cluster, "rbd/v", &lonely.join("target.sock"));
    let checked = run(Command::new(program("rblk-target")).args(["check", "--config"]).arg(&file));
    assert_ne!(checked.code, Some(0));
    let said = checked.stdout + &checked.stderr;
    assert!(said.contains("locked by a live client at 127.0.0.1:"), "{said}");
    stop(&cluster, target);
}

/// A configuration of a target with one image.
fn config(cluster: &CephCluster, image: &str, socket: &std::path::Path) -> PathBuf {
    let directory = socket.parent().unwrap();
    let file = directory.join("checked.toml");
    let text = format!(
        "listen = ['tcp://127.0.0.1:1']\nstate_dir = '{}'\ncontrol_socket = '{}'\narena = '8MiB'\n\
         max_io = '1MiB'\n[[volume]]\nname = 'v'\nstore = 'rbd'\nimage = '{image}'\nceph_conf = '{}'\n",
        directory.display(),
        socket.display(),
        cluster.conf().display()
    );
    std::fs::write(&file, text).unwrap();
    file
}
