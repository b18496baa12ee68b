//! A standby target (docs/availability.md): two targets of one name on two machines, of which one
//! serves. fio verifies the disk of a mount that knows both, while the target dies, its machine
//! loses its power, and the target moves in good order.
//!
//! The machines share a file, or have a DRBD resource with a file system. `state_dir` is beside the
//! file. Nothing that was flushed is lost, and nothing at all where the mount retains. The longest
//! stall of each kind of event is printed.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rblk_config::{ByteSize, CacheMode, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, DrbdPair, Fio, GroupCable, GroupNetwork, KernelFeature, Lab, MountFlags, Mounted,
    RunningFio, StallMeter, Target, TargetFlags, pattern, run, until,
};

use super::{KIB, MIB, NEVER, errno, open};

/// The disk that fio uses, and the one whose mount retains nothing.
const VOLUMES: [&str; 2] = ["raw", "bare"];
const VOLUME_BYTES: u64 = 16 * MIB;
const DISK_BYTES: u64 = 96 * MIB;
const PATIENCE: Duration = Duration::from_secs(240);
/// Requests that show that the disk works.
const SOME: u64 = 30;
const LEN: usize = 64 << 10;

/// Where the volumes and the records are.
enum Storage {
    /// In a directory that both machines have.
    Shared(PathBuf),
    /// On the file system of a DRBD resource.
    Replicated(Box<DrbdPair>),
}

impl Storage {
    /// A machine gets it. Returns the directory.
    fn give(&mut self, machine: usize) -> PathBuf {
        match self {
            Self::Shared(directory) => directory.clone(),
            Self::Replicated(pair) => pair.promote(machine),
        }
    }

    /// A machine gives it up in good order.
    fn take(&mut self, machine: usize) {
        match self {
            Self::Shared(_) => {}
            Self::Replicated(pair) => pair.demote(machine),
        }
    }

    /// A machine is off.
    fn lose(&mut self, machine: usize) {
        match self {
            Self::Shared(_) => {}
            Self::Replicated(pair) => pair.lose_power(machine),
        }
    }

    /// A machine that was off is back, and has everything.
    fn mend(&mut self, machine: usize) {
        match self {
            Self::Shared(_) => {}
            Self::Replicated(pair) => {
                pair.clear_away(machine);
                pair.power_on(machine);
                println!("after the power is back: {}", pair.states());
                pair.wait_equal();
            }
        }
    }
}

/// All of it. The fields are dropped in this order.
struct Standby<'l> {
    fio: Option<RunningFio>,
    meter: StallMeter,
    mounted: Mounted<'l>,
    target: Option<Target<'l>>,
    /// The machine whose target serves.
    serving: usize,
    storage: Storage,
    network: GroupNetwork,
    lab: &'l Lab,
    scheme: &'static str,
    cache: CacheMode,
    boots: u32,
    stalls: BTreeMap<&'static str, Duration>,
}

/// A target on one of the machines.
fn flags(lab: &Lab, network: &GroupNetwork, machine: usize, of: (&Path, CacheMode)) -> TargetFlags {
    let (directory, cache) = of;
    let volume = |name: &str| {
        let mut volume = VolumeConfig::file(name, directory.join(name));
        volume.cache = Some(cache);
        volume.read_ahead = ByteSize(0);
        volume
    };
    let config = TargetConfig {
        name: Some("store".to_owned()),
        arena: ByteSize(48 * MIB),
        max_io: ByteSize(256 * KIB),
        write_back_delay: NEVER.parse().expect("a duration"),
        volumes: VOLUMES.map(volume).to_vec(),
        ..TargetConfig::default()
    };
    let flags = TargetFlags::default().on_member(network, machine).config(lab, &config);
    flags.state(directory.join("state"))
}

/// Another boot of a machine.
fn boot(lab: &Lab, number: u32) -> PathBuf {
    let path = lab.path(&format!("boot-{number}"));
    let id = format!("00000000-0000-4000-8000-{number:012}\n");
    std::fs::write(&path, id).expect("the id of a boot");
    path
}

impl<'l> Standby<'l> {
    fn start(lab: &'l Lab, scheme: &'static str, cache: CacheMode, mut storage: Storage) -> Self {
        let network = GroupNetwork::new(lab);
        let directory = storage.give(0);
        std::fs::create_dir_all(directory.join("state")).expect("a directory");
        for name in VOLUMES {
            let made = File::create(directory.join(name)).and_then(|f| f.set_len(VOLUME_BYTES));
            made.expect("a volume");
        }
        let flags = flags(lab, &network, 0, (&directory, cache)).boot(boot(lab, 0));
        let target = Some(Target::start(lab, &flags));
        let mounted = mount(lab, &network, scheme, VOLUMES[0], Some("16MiB"));
        let fio = Fio::verifying(mounted.device())
            .with("bsrange", "4k-32k")
            .with("size", 4 * MIB)
            .with("thinktime", "20ms");
        let fio = Some(fio.start());
        let meter = StallMeter::start(mounted.device());
        let (serving, boots, stalls) = (0, 0, BTreeMap::new());
        let standby = Self {
            fio,
            meter,
            mounted,
            target,
            serving,
            storage,
            network,
            lab,
            scheme,
            cache,
            boots,
            stalls,
        };
        standby.refuses_a_second();
        standby
    }

    /// On one machine, or on a file that both have locked, a second target does not start.
    fn refuses_a_second(&self) {
        let Storage::Shared(directory) = &self.storage else { return };
        let flags = flags(self.lab, &self.network, 1, (directory, self.cache));
        let mut second = Target::begin(self.lab, &flags);
        let status = second.wait(PATIENCE);
        let log = second.log();
        println!("{}: a second target ends with {status}: {}", self.lab.test(), log.trim());
        assert_eq!(status.code(), Some(9), "{log}");
        assert!(log.contains("in use by process"), "{log}");
    }

    /// Waits until requests go on, and notes the longest stall since the last event.
    fn note(&mut self, kind: &'static str) {
        let before = self.mounted.counts();
        let (mounted, fio) = (&self.mounted, &mut self.fio);
        until(&format!("requests to go on after: {kind}"), PATIENCE, || {
            assert!(fio.as_mut().is_some_and(RunningFio::is_running), "fio has ended: {kind}");
            let since = mounted.counts().since(&before);
            (since.get("reads") + since.get("writes") > SOME).then_some(())
        });
        let longest = self.meter.longest();
        let known = self.stalls.entry(kind).or_default();
        *known = longest.max(*known);
        println!("{}: {kind}: a stall of {longest:.1?}", self.lab.test());
    }

    /// The other machine gets the storage, and its target starts.
    fn start_other(&mut self) {
        self.serving = 1 - self.serving;
        let directory = self.storage.give(self.serving);
        self.boots += 1;
        let of = (&*directory, self.cache);
        let flags = flags(self.lab, &self.network, self.serving, of);
        let target = Target::start(self.lab, &flags.boot(boot(self.lab, self.boots)));
        self.target = Some(target);
    }

    /// The machine of the serving target loses its power. `before` ends with that.
    fn lose_power(&mut self) {
        let off = self.serving;
        self.network.cut(GroupCable::ToMember(off));
        self.target.take().expect("a target").kill();
        self.storage.lose(off);
        self.start_other();
        self.note("a machine without power");
        self.network.mend(GroupCable::ToMember(off));
        self.storage.mend(off);
        self.note("the machine is back");
    }

    /// The target moves in good order.
    fn drain(&mut self) {
        let mut target = self.target.take().expect("a target");
        target.terminate();
        assert_eq!(target.wait(PATIENCE).code(), Some(0), "{}", target.log());
        drop(target);
        self.storage.take(self.serving);
        self.start_other();
        self.note("a move in good order");
    }

    /// Without `retain`, flushed data survives, and the loss of other data is told.
    fn loses_only_the_unflushed(&mut self) {
        let (lab, network) = (self.lab, &self.network);
        let bare = mount(lab, network, self.scheme, VOLUMES[1], None);
        let device = open(bare.device());
        Aligned::write_at(&device, &pattern(1, LEN), 0).expect("writing");
        device.sync_all().expect("fsync");
        Aligned::write_at(&device, &pattern(2, LEN), MIB).expect("writing");
        self.lose_power();
        bare.wait_connected();
        let read = |at| Aligned::read_at(&device, LEN, at).expect("reading");
        assert!(read(0) == pattern(1, LEN), "flushed data is lost");
        let kept = read(MIB) == pattern(2, LEN);
        println!("{}: the unflushed write is {}there", lab.test(), if kept { "" } else { "not " });
        assert_eq!(errno(device.sync_all()), libc::EIO, "the loss is told");
        assert_eq!(bare.status().losses, 1);
        drop(device);
        bare.umount();
        let again = mount(lab, &self.network, self.scheme, VOLUMES[1], None);
        open(again.device()).sync_all().expect("fsync after the remount");
        again.umount();
    }

    /// Ends all, and compares the disk with its copies.
    fn end(mut self) {
        let fio = self.fio.take().expect("fio").stop(PATIENCE).ok();
        let status = self.mounted.status();
        println!(
            "{}: fio made {} writes and {} reads; {} writes were written again",
            self.lab.test(),
            fio.writes,
            fio.reads,
            status.writes_rewritten
        );
        assert_eq!((status.losses, status.total.errors), (0, 0));
        let disk = std::fs::read(self.mounted.device()).expect("the bytes of the disk");
        self.mounted.umount();
        let mut target = self.target.take().expect("a target");
        target.terminate();
        assert_eq!(target.wait(PATIENCE).code(), Some(0), "{}", target.log());
        drop(target);
        let directory = match &mut self.storage {
            Storage::Shared(directory) => directory.clone(),
            Storage::Replicated(pair) => {
                pair.demote(self.serving);
                // The copy on the other machine has it, too.
                pair.promote(1 - self.serving)
            }
        };
        let stored = std::fs::read(directory.join(VOLUMES[0])).expect("the bytes of the volume");
        assert!(stored == disk, "the volume differs from the disk");
        if let Storage::Replicated(mut pair) = self.storage {
            pair.demote(1 - self.serving);
            pair.wait_equal();
            let [a, b] = pair.disks();
            assert!(a == b, "the copies differ");
            println!("{}: both copies have the same {} MiB", self.lab.test(), a.len() >> 20);
        }
        for (kind, stall) in &self.stalls {
            println!("{}: the longest stall: {kind}: {stall:.1?}", self.lab.test());
        }
    }
}

fn mount<'l>(
    lab: &'l Lab,
    network: &GroupNetwork,
    scheme: &str,
    volume: &str,
    retain: Option<&str>,
) -> Mounted<'l> {
    let [first, second] = [0, 1].map(|machine| format!("{scheme}://{}", network.host(machine)));
    let flags = MountFlags::new(first, volume).path(&second).flag("--detect", "2s");
    Mounted::new(
        lab,
        &match retain {
            Some(bytes) => flags.flag("--retain", bytes),
            None => flags,
        },
    )
}

fn survives(
    test: &'static str,
    (scheme, cache): (&'static str, CacheMode),
    storage: impl FnOnce(&Lab) -> Storage,
) {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run(test, |lab| {
        let mut standby = Standby::start(lab, scheme, cache, storage(lab));
        standby.note("no event");
        standby.loses_only_the_unflushed();
        for _ in 0..lab.times(1, 5) {
            standby.lose_power();
            standby.drain();
            standby.lose_power();
        }
        standby.end();
    });
}

fn shared(lab: &Lab) -> Storage {
    let directory = lab.path("shared");
    std::fs::create_dir_all(&directory).expect("a directory");
    Storage::Shared(directory)
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_standby_target_has_a_locked_file() {
    let of = ("rdma", CacheMode::WriteBack);
    survives("standby_locked_file", of, shared);
}

#[test]
#[ignore = "needs the lab: ublk, RDMA, DRBD and root; `cargo xtask test` runs it there"]
fn a_standby_target_has_a_drbd_resource() {
    if KernelFeature::DRBD.is_missing() {
        return;
    }
    let of = ("tcp", CacheMode::WriteBack);
    let storage = |lab: &Lab| Storage::Replicated(Box::new(DrbdPair::new(lab, DISK_BYTES)));
    survives("standby_drbd", of, storage);
}

#[test]
#[ignore = "needs the lab: ublk, RDMA, DRBD and root; `cargo xtask test` runs it there"]
fn a_standby_target_has_a_drbd_resource_written_through() {
    if KernelFeature::DRBD.is_missing() {
        return;
    }
    let of = ("rdma", CacheMode::WriteThrough);
    let storage = |lab: &Lab| Storage::Replicated(Box::new(DrbdPair::new(lab, DISK_BYTES)));
    survives("standby_drbd_written_through", of, storage);
}
