//! A write that the store held while its path died never overwrites a later write.

use std::path::Path;
use std::time::{Duration, Instant};

use rblk_config::{CacheMode, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, DEADLINE, FarHost, KernelFeature, Lab, LoopDisk, Mapped, MountFlags, Mounted, Target,
    TargetFlags, pattern, run, until,
};

use super::MIB;

/// A disk with two ways to it: requests on the first way can be held, while others take the second
/// way.
struct TwoWays {
    disk: LoopDisk,
    // In the order of their removal.
    both: Mapped,
    first: Mapped,
}

impl TwoWays {
    fn new(lab: &Lab, name: &str, bytes: u64) -> Self {
        let disk = LoopDisk::new(lab, name, bytes);
        let (sectors, under) = (disk.sectors(), disk.device().display());
        let first =
            Mapped::new(lab, &format!("{name}-a"), &format!("0 {sectors} linear {under} 0"));
        // Bio-based, no handler, two groups of one path each; the first group is used.
        let path = |device: &Path| format!("round-robin 0 1 0 {}", device.display());
        let (way, other) = (path(&first.device()), path(disk.device()));
        let table = format!("0 {sectors} multipath 2 queue_mode bio 0 2 1 {way} {other}");
        let both = Mapped::new(lab, &format!("{name}-m"), &table);
        Self { disk, both, first }
    }

    /// Holds requests.
    fn hold(&self) {
        self.first.suspend();
    }

    /// Sends requests the other way; held requests stay held.
    fn turn(&self) {
        self.both.message(&format!("fail_path {}", self.first.numbers()));
    }

    /// Releases the held requests, and sends later ones the first way again.
    fn release(&self) {
        self.first.resume();
        until("what was held to land", DEADLINE, || (self.both.in_flight() == 0).then_some(()));
        self.both.message(&format!("reinstate_path {}", self.first.numbers()));
        self.both.message("switch_group 1");
    }
}

/// The bytes in the store itself.
fn stored(ways: &TwoWays, len: usize, offset: u64) -> Vec<u8> {
    let disk = Aligned::open(ways.disk.device(), false, 0).expect("opening the disk");
    Aligned::read_at(&disk, len, offset).expect("reading the disk")
}

fn stale_writes(lab: &Lab, cache: CacheMode, rounds: usize) {
    let far = FarHost::with_cables(lab, 2);
    let ways = TwoWays::new(lab, "two", 32 * MIB);
    let mut volume = VolumeConfig::file("v0", ways.both.device());
    volume.cache = Some(cache);
    let config = TargetConfig { volumes: vec![volume], ..TargetConfig::default() };
    let target = Target::start(lab, &TargetFlags::default().config(lab, &config).on(&far));
    let addresses = [0, 1].map(|cable| format!("rdma://{}", far.hosts()[cable]));
    let [one, two] = &addresses;
    let flags = MountFlags::new(one.clone(), "v0").path(two).flag("--detect", "1s");
    let mounted = Mounted::new(lab, &flags.flag("--failback", "0s"));
    let file = Aligned::open(mounted.device(), true, 0).expect("opening");
    for round in 0..rounds {
        // In-capsule data, and data fetched by the target.
        let len = [4 << 10, 64 << 10][round % 2];
        let offset = (round as u64 % 16) * MIB;
        let [w0, w1, w2] = [0, 1, 2].map(|n| pattern(3 * round as u64 + n + 1, len));
        Aligned::write_at(&file, &w0, offset).expect("writing");
        ways.hold();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                Aligned::write_at(&file, &w1, offset).expect("writing W1");
                let first = Instant::now();
                Aligned::write_at(&file, &w2, offset).expect("writing W2");
                first
            });
            until("W1 to be held", DEADLINE, || (ways.both.in_flight() > 0).then_some(()));
            ways.turn();
            // The cut comes only now: with W1 under way, the mount takes no other path before the
            // old copy has landed.
            let in_use = mounted.status().address;
            let cable = far.hosts().iter().position(|host| in_use.contains(host)).expect("a cable");
            let cut = far.cut_cable(cable);
            until("the loss of the path", DEADLINE, || {
                mounted.look().filter(|status| status.state != "connected")
            });
            // An initiator that did not wait for the old write would have enough time to send the
            // new ones.
            std::thread::sleep(Duration::from_millis(800 + 100 * (round as u64 % 20)));
            let released = Instant::now();
            let held = ways.both.in_flight();
            ways.release();
            drop(cut);
            let acknowledged = writer.join().expect("the writer");
            assert_eq!(held, 1, "round {round}: other writes went on while W1 was held");
            assert!(
                acknowledged >= released,
                "round {round}: W1 was acknowledged while its old copy was held"
            );
        });
        let found = Aligned::read_at(&file, len, offset).expect("reading");
        assert!(found == w2, "round {round}: the device does not have W2");
        let found = stored(&ways, len, offset);
        assert!(found == w2, "round {round}: the store does not have W2");
        mounted.wait_connected();
    }
    let status = mounted.status();
    println!(
        "{}: {cache:?}: {rounds} of {rounds}; {} requests were sent again",
        lab.test(),
        status.total.replayed
    );
    assert_eq!(status.total.errors, 0);
    assert!(status.total.replayed >= rounds as u64, "W1 was not on its way when its path died");
    drop(file);
    mounted.umount();
    drop(target);
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn stale_write_20() {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run("stale_write_20", |lab| {
        let rounds = lab.times(2, 4);
        for cache in [CacheMode::None, CacheMode::WriteThrough] {
            stale_writes(lab, cache, rounds);
        }
    });
}
