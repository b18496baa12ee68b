//! Images of a real cluster: against the model, and when the cluster or the image goes away.
//!
//! Each test makes a cluster of its own, on loopback and in memory, by
//! `tests/src/lab/ceph-cluster.sh`.

use std::cell::RefCell;
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use rblk_config::TargetConfig;
use rblk_operate::target::store_fault::StoreFaultKind;
use rblk_protocol::Name;

use super::model::{BLOCKS, Kind, compare, rounds};
use super::*;
use crate::pool::opening::open_right_ones;
use crate::store::rbd::{ClusterPlace, ImageError, ImageOptions, Opening, wait_until_closed};

use proptest::prelude::*;

const NEEDS: &str = "install ceph-mon, ceph-osd, ceph-common and librbd1";

/// A cluster, as long as this value lives.
pub(super) struct Cluster {
    directory: TempDir,
    port: u16,
    store: &'static str,
    osds: u16,
    // Tests wait until all images of this process are closed.
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Cluster {
    pub(super) fn start() -> Self {
        Self::of(1)
    }

    fn of(osds: u16) -> Self {
        Self::stored_by("memstore", osds)
    }

    /// A second cluster of a test.
    fn another(&self) -> Self {
        Self::made(self.store, self.osds, None)
    }

    fn stored_by(store: &'static str, osds: u16) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        Self::made(store, osds, Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn made(store: &'static str, osds: u16, alone: Option<MutexGuard<'static, ()>>) -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        // Below the ports that the system gives to clients.
        let place = u16::try_from(std::process::id() % 16).unwrap();
        let port = 10_000 + place * 512 + NEXT.fetch_add(1, Ordering::Relaxed) % 8 * 64;
        let cluster =
            Self { directory: tempfile::tempdir().unwrap(), port, store, osds, _alone: alone };
        cluster.script("start");
        cluster
    }

    pub(super) fn script(&self, what: &str) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/src/lab/ceph-cluster.sh");
        let mut command = Command::new("timeout");
        command.arg("120").arg(script).arg(self.directory.path()).args(what.split(' '));
        command.env("PORT", self.port.to_string()).env("OSDS", self.osds.to_string());
        command.env("STORE", self.store);
        let output = command.output().expect(NEEDS);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{NEEDS}; {what}: {said}");
    }

    /// Its directory, for other files of the test, too.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    fn conf(&self) -> PathBuf {
        self.directory.path().join("ceph.conf")
    }

    /// What `ceph` or `rbd` prints. In a word, "+" is a space.
    pub(super) fn run(&self, words: &str) -> String {
        let mut words = words.split(' ').map(|word| word.replace('+', " "));
        let mut command = Command::new("timeout");
        command.args(["60", &words.next().unwrap(), "-c"]).arg(self.conf()).args(words);
        let output = command.output().expect(NEEDS);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command:?}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub(super) fn options(&self, name: &str) -> ImageOptions {
        ImageOptions {
            name: name.parse().unwrap(),
            cluster: ClusterPlace {
                conf: Some(self.conf()),
                user: "admin".to_owned(),
                keyring: None,
            },
            block_size: 512,
            lock_wait: Duration::from_secs(5),
            group: None,
        }
    }

    pub(super) fn open(&self, name: &str) -> Result<Arc<Image>, ImageError> {
        open(self.options(name)).map(Arc::new)
    }

    /// A new image of so many KiB.
    fn image(&self, name: &str, kib: usize) -> Arc<Image> {
        self.run(&format!("rbd create --size {kib}K {name}"));
        self.open(name).unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.script("stop");
    }
}

pub(super) fn open(options: ImageOptions) -> Result<Image, ImageError> {
    rbd::begin_open(options).and_then(Opening::end)
}

fn store_of(region: &Arc<Region>, image: &Arc<Image>) -> UringStore {
    let options = UringOptions { capacity: 4, volumes: 4, registered: None };
    let mut store = UringStore::new(Arc::clone(region), &options).unwrap();
    store.add_volume(VOLUME, Arc::clone(image)).unwrap();
    store
}

/// Works for a while. Returns the ops that ended.
fn work_for(store: &mut UringStore, time: Duration) -> Vec<OpDone> {
    let (until, mut done) = (Instant::now() + time, Vec::new());
    while Instant::now() < until {
        let sleep = TurnSleep::Until(Duration::from_millis(20));
        store.turn(sleep, &mut WatchSet::default()).unwrap();
        store.reap(&mut done);
    }
    done
}

/// Waits for the loss of an image, and returns its reason.
pub(super) fn loss_of(image: &Image) -> String {
    let (sender, reason) = mpsc::channel();
    image.on_loss(move |why| drop(sender.send(why.to_owned())));
    reason.recv_timeout(Duration::from_secs(40)).expect("the image was never lost")
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_images_agree_with_the_model() {
    let cluster = Cluster::start();
    let region = region(2 * MIB);
    for (name, block) in [("rbd/small", 512), ("rbd/large", 4096)] {
        let image = cluster.image(name, BLOCKS * block / 1024);
        let store = RefCell::new(store_of(&region, &image));
        let all = (BLOCKS * block) as u64;
        proptest!(ProptestConfig::with_cases(40), |(rounds in rounds())| {
            let mut rounds = rounds;
            // A discard is a hint here.
            for (kind, ..) in rounds.iter_mut().flat_map(|round| &mut round.steps) {
                if let Kind::Discard = kind {
                    *kind = Kind::WriteZeroes { may_unmap: true };
                }
            }
            let store = &mut *store.borrow_mut();
            prop_assert_eq!(store.run_one(zeroes(0, all, true)), Ok(0));
            compare(store, &region, block, 1, &rounds)?;
        });
    }
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_ops_keep_within_the_image_and_a_snapshot_takes_no_writes() {
    let cluster = Cluster::start();
    let region = region(2 * MIB);
    let image = cluster.image("rbd/v", 1024);
    let mut store = store_of(&region, &image);
    let end = MIB as u64;
    region.write(0, &pattern(7, 0, 64 << 10));
    assert_eq!(store.run_one(write(0, 0, 64 << 10)), Ok(64 << 10));
    for io in [write(end - 4096, 0, 8192), read(end, 0, 512), zeroes(end - 512, 1024, false)] {
        assert_eq!(store.run_one(io.clone()), Err(Errno::EINVAL), "{io:?}");
    }
    // A discard that frees whole granules, and one that frees none.
    assert_eq!(store.run_one(discard(512 << 10, 512 << 10)), Ok(0));
    assert_eq!(store.run_one(discard(512, 512)), Ok(0));
    assert_eq!(store.run_one(flush()), Ok(0));
    cluster.run("rbd snap create --no-progress rbd/v@s");
    region.write(0, &pattern(9, 0, 4096));
    assert_eq!(store.run_one(write_from(0, &[segment(0, 4096)], true)), Ok(4096));

    let snap = cluster.open("rbd/v@s").unwrap();
    assert!(snap.read_only() && snap.uuid() != image.uuid());
    let mut frozen = store_of(&region, &snap);
    assert_eq!(frozen.run_one(write(0, 0, 512)), Err(Errno::EROFS));
    assert_eq!(frozen.run_one(zeroes(0, 512, true)), Err(Errno::EROFS));
    assert_eq!(frozen.run_one(read(0, MIB, 64 << 10)), Ok(64 << 10));
    let got = gather(&region, &[segment(MIB, 64 << 10)]);
    assert!(got[1024..] == pattern(7, 0, 64 << 10)[1024..], "the snapshot changed");

    // The size follows orders, and not what others do.
    image.resize(2 * end).unwrap();
    assert_eq!((image.size_bytes(), image.measured().unwrap()), (2 * end, 2 * end));
    assert_eq!(store.run_one(write(2 * end - 512, 0, 512)), Ok(512));
    image.resize(end).unwrap();
    assert_eq!(store.run_one(write(2 * end - 512, 0, 512)), Err(Errno::EINVAL));
    assert!(image.look().is_none(), "{:?}", image.look());
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_lost_image_ends_no_op_until_it_is_let_go() {
    let cluster = Cluster::start();
    let region = region(2 * MIB);
    // Fenced; made smaller; the lock taken without a fence.
    let fence = |name: &str| {
        let status = cluster.run(&format!("rbd lock ls {name}"));
        let line = status.lines().find(|line| line.contains("client.")).unwrap().to_owned();
        let words: Vec<&str> = line.split_whitespace().collect();
        let (locker, id, address) =
            (words[0], words[1..words.len() - 1].join(" "), *words.last().unwrap());
        (locker.to_owned(), id, address.to_owned())
    };
    for (name, says) in [
        ("rbd/fenced", "has fenced this target"),
        ("rbd/shrunk", "was made smaller"),
        ("rbd/robbed", "lock"),
    ] {
        let image = cluster.image(name, 1024);
        let mut store = store_of(&region, &image);
        assert_eq!(store.run_one(write(0, 0, 4096)), Ok(4096));
        match name {
            "rbd/fenced" => {
                let (_, _, address) = fence(name);
                cluster.run(&format!("ceph osd blocklist add {address}"));
            }
            "rbd/shrunk" => {
                cluster.run(&format!("rbd resize --no-progress --allow-shrink --size 512K {name}"));
            }
            _ => {
                let (locker, id, _) = fence(name);
                let mut command = Command::new("rbd");
                command.arg("-c").arg(cluster.conf()).args(["lock", "rm", name, &id, &locker]);
                assert!(
                    command
                        .args(["--rbd_blocklist_on_break_lock=false"])
                        .status()
                        .unwrap()
                        .success()
                );
            }
        }
        let why = loss_of(&image);
        assert!(why.contains(says), "{name}: {why}");
        assert_eq!(image.look().unwrap().kind, StoreFaultKind::Lost);
        for (token, io) in [write(0, 0, 4096), read(0, 0, 4096), flush()].iter().enumerate() {
            store.start(token as u64, io).unwrap();
        }
        let ended = work_for(&mut store, Duration::from_millis(500));
        assert_eq!(ended, [], "{name}: nothing is answered");
        store.let_go(VOLUME);
        let ended = work_for(&mut store, Duration::from_millis(100));
        assert_eq!(ended.len(), 3);
        assert!(ended.iter().all(|done| done.result == Err(Errno::ESHUTDOWN)), "{ended:?}");
        assert_eq!(store.run_one(flush()), Err(Errno::ESHUTDOWN), "later ones fail at once");
        store.close(VOLUME).unwrap();
        drop((store, image));
        assert!(wait_until_closed(Duration::from_secs(30)), "{name} was not closed");
    }
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_an_osd_that_does_not_answer_is_a_stall_and_no_error() {
    let cluster = Cluster::start();
    let region = region(2 * MIB);
    let image = cluster.image("rbd/v", 1024);
    let mut store = store_of(&region, &image);
    region.write(0, &pattern(3, 0, 4096));
    cluster.script("osd-pause");
    store.start(1, &write(0, 0, 4096)).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while image.look().is_none() {
        assert!(Instant::now() < until, "no stall was seen");
        assert_eq!(work_for(&mut store, Duration::from_millis(200)), []);
    }
    let fault = image.look().unwrap();
    assert_eq!(fault.kind, StoreFaultKind::Stalled);
    assert!(fault.to_string().contains("ceph -s"), "{fault}");
    cluster.script("osd-continue");
    let done = loop {
        assert!(Instant::now() < until + Duration::from_secs(40), "the write never ended");
        let done = work_for(&mut store, Duration::from_millis(200));
        if !done.is_empty() {
            break done;
        }
    };
    assert_eq!(done, [OpDone { token: OpToken(1), result: Ok(4096) }]);
    assert_eq!(store.run_one(read(0, MIB, 4096)), Ok(4096));
    assert!(gather(&region, &[segment(MIB, 4096)]) == pattern(3, 0, 4096));
    thread::sleep(Duration::from_secs(3));
    assert!(image.look().is_none(), "{:?}", image.look());
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_silent_cluster_is_told_within_seconds_even_without_ops() {
    let cluster = Cluster::start();
    let region = region(2 * MIB);
    let image = cluster.image("rbd/v", 1024);
    let mut store = store_of(&region, &image);
    thread::sleep(Duration::from_secs(12));
    assert!(store.may_fall_silent());
    assert_eq!(store.next_silence(), None, "the looks prove the lock");
    cluster.script("osd-pause");
    let began = Instant::now();
    let mut news_within = |seconds| {
        let until = Instant::now() + Duration::from_secs(seconds);
        loop {
            match store.next_silence() {
                None => assert!(Instant::now() < until, "no news within {seconds} s"),
                Some(news) => return news,
            }
            thread::sleep(Duration::from_millis(10));
        }
    };
    assert_eq!(news_within(15), (VOLUME, true));
    assert!(began.elapsed() > Duration::from_secs(7), "{:?}", began.elapsed());
    // A resize waits for the cluster, and does not keep the next look.
    let resizes = Arc::clone(&image);
    let resize = thread::spawn(move || resizes.resize(2 * MIB as u64));
    cluster.script("osd-continue");
    assert_eq!(news_within(40), (VOLUME, false));
    resize.join().unwrap().unwrap();
    assert_eq!(store.next_silence(), None);
}

/// The OSD of the image's header answers, and one that the resize needs does not.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_a_resize_that_waits_ends_with_the_loss_of_its_image() {
    let cluster = Cluster::of(2);
    cluster.run("ceph osd pool set rbd size 1 --yes-i-really-mean-it");
    let region = region(2 * MIB);
    let image = cluster.image("rbd/v", 64 << 10);
    let mut store = store_of(&region, &image);
    for object in 0..16 {
        assert_eq!(store.run_one(write(object << 22, 0, 4096)), Ok(4096));
    }
    let info = cluster.run("rbd info rbd/v");
    let id = info.lines().find_map(|line| line.trim().strip_prefix("id: ")).unwrap();
    let header = cluster.run(&format!("ceph osd map rbd rbd_header.{id}"));
    let locks = cluster.run("rbd lock ls rbd/v");
    let owner = locks.lines().last().unwrap().split_whitespace().last().unwrap();
    let other = if header.contains("p0)") { 1 } else { 0 };
    cluster.script(&format!("osd-pause {other}"));
    let resizes = Arc::clone(&image);
    let resize = thread::spawn(move || resizes.resize(MIB as u64));
    thread::sleep(Duration::from_secs(3));
    assert!(!resize.is_finished(), "it needs no object of osd.{other}");
    cluster.run(&format!("ceph osd blocklist add {owner}"));
    let text = resize.join().unwrap().unwrap_err().to_string();
    assert!(text.contains("has fenced this target"), "{text}");
    cluster.script(&format!("osd-continue {other}"));
}

/// A watch lives on at an OSD that dies for longer than a watch lives without news of its client.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_an_osd_that_dies_for_long_takes_no_image() {
    let cluster = Cluster::stored_by("bluestore", 1);
    let region = region(2 * MIB);
    let image = cluster.image("rbd/v", 1024);
    let mut store = store_of(&region, &image);
    assert_eq!(store.run_one(write(0, 0, 4096)), Ok(4096));
    cluster.script("osd-kill");
    store.start(1, &write(0, 0, 4096)).unwrap();
    assert_eq!(work_for(&mut store, Duration::from_secs(40)), []);
    cluster.script("osd-start");
    let (until, mut done) = (Instant::now() + Duration::from_secs(40), Vec::new());
    while done.is_empty() {
        assert!(Instant::now() < until, "the write never ended: {:?}", image.look());
        done = work_for(&mut store, Duration::from_millis(200));
    }
    assert_eq!(done, [OpDone { token: OpToken(1), result: Ok(4096) }]);
    thread::sleep(Duration::from_secs(5));
    assert!(image.look().is_none(), "{:?}", image.look());
}

/// Images of a cluster that does not answer take one deadline, and not one each.
#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_images_are_opened_side_by_side() {
    let well = Cluster::start();
    let stalled = well.another();
    for (cluster, name) in [(&stalled, "rbd/a"), (&stalled, "rbd/b"), (&well, "rbd/c")] {
        cluster.run(&format!("rbd create --size 1M {name}"));
    }
    let volume = |cluster: &Cluster, name: &str| {
        let conf = cluster.conf();
        let (image, conf) = (format!("rbd/{name}"), conf.display());
        format!(
            "[[volume]]\nname = '{name}'\nstore = 'rbd'\nimage = '{image}'\nceph_conf = '{conf}'\n"
        )
    };
    let volumes = [volume(&stalled, "a"), volume(&stalled, "b"), volume(&well, "c")].concat();
    let text = format!("listen = ['tcp://127.0.0.1']\n{volumes}");
    let config = TargetConfig::parse(&text, "test").unwrap();
    stalled.script("osd-pause");
    let began = Instant::now();
    let name = Name::new("test").unwrap();
    let (opened, away) = open_right_ones(&config, &name, None).unwrap();
    assert!(began.elapsed() < Duration::from_secs(90), "{:?}", began.elapsed());
    stalled.script("osd-continue");
    let opened: Vec<&str> = opened.iter().map(|one| one.volume.name.as_str()).collect();
    let away: Vec<&str> = away.iter().map(|one| one.name.as_str()).collect();
    assert_eq!((opened, away), (vec!["c"], vec!["a", "b"]));
}

#[test]
#[ignore = "needs the programs of Ceph: `cargo xtask test --long` runs it"]
fn with_ceph_each_reason_why_an_image_cannot_be_opened_is_named() {
    let cluster = Cluster::start();
    let image = cluster.image("rbd/v", 1024);
    let refused = |options: ImageOptions, pieces: &[&str]| {
        let text = open(options).map(drop).unwrap_err().to_string();
        println!("{text}");
        for piece in pieces {
            assert!(text.contains(piece), "{piece:?} is not in: {text}");
        }
    };
    let named = |name: &str| ImageOptions { lock_wait: Duration::ZERO, ..cluster.options(name) };
    let by = |user: &str, keyring: Option<PathBuf>| {
        let at = ClusterPlace { user: user.to_owned(), keyring, ..named("rbd/v").cluster };
        ImageOptions { cluster: at, ..named("rbd/free") }
    };
    refused(named("rbd/v"), &["rbd/v: the image is locked by a live client at 127.0.0.1:"]);
    refused(named("none/v"), &["no pool none", "ceph osd pool ls"]);
    refused(named("rbd/none"), &["no such image", "rbd create --size 64G rbd/none"]);
    refused(named("rbd/v@none"), &["no such image or snapshot"]);
    refused(named("rbd/space/v"), &["no such image"]);
    cluster.run("rbd create --size 1M --image-feature layering rbd/plain");
    refused(named("rbd/plain"), &["rbd feature enable rbd/plain exclusive-lock"]);
    cluster.run("rbd create --size 1M rbd/cached");
    for (setting, wrong, right) in [
        ("rbd_cache", "true", "false"),
        ("rbd_blocklist_on_break_lock", "false", "true"),
        ("rbd_non_blocking_aio", "false", "true"),
        ("rbd_disable_zero_copy_writes", "false", "true"),
    ] {
        cluster.run(&format!("rbd config image set rbd/cached {setting} {wrong}"));
        let fix = format!("rbd config image set rbd/cached {setting} {right}");
        refused(named("rbd/cached"), &[&fix]);
        cluster.run(&fix);
    }
    drop(cluster.open("rbd/cached").unwrap());
    cluster.run("rbd create --size 1M rbd/free");
    refused(by("nobody", None), &["refuses the key of client.nobody"]);
    refused(by("admin", Some("/nowhere/keyring".into())), &["there is no key of client.admin"]);
    let weak = cluster.directory.path().join("weak.keyring");
    cluster.run("ceph auth add client.weak mon profile+rbd");
    cluster.run(&format!("ceph auth export client.weak -o {}", weak.display()));
    refused(by("weak", Some(weak.clone())), &["client.weak may not", "osd 'profile rbd pool=rbd'"]);
    let wrong = cluster.directory.path().join("wrong.keyring");
    let text = "[client.weak]\n\tkey = AQBs2WdpAAAAABAAc0uYtPZ3ZQmbnEfuRnzxUg==\n";
    std::fs::write(&wrong, text).unwrap();
    refused(by("weak", Some(wrong)), &["refuses the key of client.weak"]);
    let conf = ClusterPlace { conf: Some("/nowhere/ceph.conf".into()), ..named("rbd/v").cluster };
    refused(
        ImageOptions { cluster: conf, ..named("rbd/v") },
        &["/nowhere/ceph.conf cannot be read"],
    );

    // Without a monitor there is a deadline.
    let alone = cluster.directory.path().join("alone.conf");
    let text = std::fs::read_to_string(cluster.conf()).unwrap();
    let text = text.replace(&format!("v2:127.0.0.1:{}", cluster.port), "v2:127.0.0.1:9");
    std::fs::write(&alone, text).unwrap();
    let conf = ClusterPlace { conf: Some(alone), ..named("rbd/v").cluster };
    let begun = Instant::now();
    refused(ImageOptions { cluster: conf, ..named("rbd/v") }, &["no monitor", "within 10 s"]);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    drop(image);
    assert!(wait_until_closed(Duration::from_secs(30)));
    // The lock is free at once.
    cluster.open("rbd/v").unwrap();
}
