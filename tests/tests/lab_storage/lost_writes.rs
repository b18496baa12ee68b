//! A disk that begins to lose writes below a buffered or a direct store, two mounts of the volume, and four
//! writers that synchronise at the same time: a sync that covered a lost write must fail.
//!
//! The kernel tells of a write that it could not write back once, to one caller of each open file. A target has
//! one open file for a volume and a FLUSH may come from any connection, so the target must tell every FLUSH.
//!
//! `RBLK_ROUNDS=N` sets the number of rounds, `RBLK_SEED=N` the seed of the first round, and
//! `RBLK_FAULTS=error,flakey` leaves out the thin pool. A round follows from its seed, but for the order in which
//! threads run: repeat a failed round often.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use rblk_bench::seed::Random;
use rblk_config::{ByteSize, CacheMode, DirectIo, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, BLOCK, DEADLINE, Diary, Fault, FaultyDisk, Lab, MountFlags, Mounted, Target, begin,
    run, until,
};

use super::{MIB, config, serve, with_delay};

/// Rounds of one life of a target: a volume for each, since a store that lost writes fails until a restart.
const ROUNDS_OF_A_LIFE: usize = 6;
const WRITERS: u64 = 4;
/// Each writer has one block of each of its chunks, then the next block of each.
const CHUNKS: u64 = FaultyDisk::BYTES / FaultyDisk::CHUNK_BYTES;
const CHUNKS_OF_A_WRITER: u64 = (CHUNKS - 1) / WRITERS;
const BLOCKS_OF_A_CHUNK: u64 = FaultyDisk::CHUNK_BYTES / BLOCK as u64;
/// What a writer goes on with after the fault, if nothing fails.
const BURSTS_AFTER: u64 = 8;
/// Time for writers to come to their syncs, and for syncs to end. No judgement depends on it, only how
/// many syncs overlap.
const GATHER: Duration = Duration::from_millis(30);
/// What a failed disk and a full one say.
const ERRNOS: [i32; 2] = [libc::EIO, libc::ENOSPC];

/// When the fault comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scene {
    /// While all writers write and synchronise.
    AmidSyncs,
    /// While nobody synchronises: the kernel writes back, and fails, and the disk works again when all writers
    /// synchronise.
    BetweenSyncs,
}

/// How a writer writes and synchronises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// `O_DIRECT`, then `fdatasync`.
    Direct,
    /// By the page cache of the mount, then `fdatasync`.
    Buffered,
    /// `O_DIRECT` with `O_DSYNC`: a FUA write, and a FLUSH.
    Fua,
}

/// One round, as its seed says.
#[derive(Clone, Debug)]
struct Plan {
    seed: u64,
    fault: Fault,
    direct: bool,
    cache: CacheMode,
    scene: Scene,
    rdma: bool,
    /// Whether the disk has a volatile cache.
    volatile: bool,
    /// Whether the target stands still while the disk fails, as on a machine that is busy: which of its threads
    /// hears of its FLUSH first is open then.
    standstill: bool,
    room: u64,
    /// Acknowledged writes before the fault.
    writes_before: u64,
    ways: [Way; WRITERS as usize],
}

impl Plan {
    fn of(seed: u64, faults: &[Fault]) -> Self {
        let mut random = Random::new(seed);
        let kinds = faults.len() as u64;
        let (fault, turn) = (faults[by_turns(seed, kinds)], seed / kinds);
        let scene = match (turn % 4, turn / 4 % 2) {
            (0 | 2, _) | (3, 0) => Scene::AmidSyncs,
            _ => Scene::BetweenSyncs,
        };
        let caches = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];
        Self {
            seed,
            fault,
            direct: turn % 4 == 3,
            cache: caches[by_turns(turn, 3)],
            scene,
            rdma: seed % 5 == 4,
            volatile: random.chance(500),
            standstill: random.chance(750),
            // The header's chunk, those that each writer fills before a scene needs them, and some more.
            room: 1 + 4 * WRITERS + random.within(0, 20),
            writes_before: random.within(8, 80),
            ways: std::array::from_fn(|_| match random.below(4) {
                0 => Way::Buffered,
                1 => Way::Fua,
                _ => Way::Direct,
            }),
        }
    }

    fn store(&self) -> &'static str {
        if self.direct { "direct" } else { "buffered" }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, fault, cache, scene, ways, .. } = self;
        let address = if self.rdma { "rdma" } else { "tcp" };
        let disk = if self.volatile { "volatile" } else { "non-volatile" };
        let still = if self.standstill { ", standstill" } else { "" };
        write!(f, "seed {seed}: fault {fault}, {} store, cache {cache}, ", self.store())?;
        write!(f, "{scene:?}{still}, {disk} disk, {address}, writers {ways:?}")
    }
}

/// By turns, so that few rounds have every kind.
fn by_turns(number: u64, len: u64) -> usize {
    usize::try_from(number % len).expect("an index")
}

/// What the writers of a round and the test share.
#[derive(Debug, Default)]
struct Shared {
    acknowledged: AtomicU64,
    faulty: AtomicBool,
}

/// A writer: a thread that stops at its first error.
struct Writer {
    plan: Arc<Plan>,
    way: Way,
    diary: Diary,
    random: Random,
    file: File,
    /// The same device, opened so that each write is durable when it is acknowledged.
    durable: Option<File>,
    shared: Arc<Shared>,
    /// Tells the test that the writer has done what comes before the fault.
    ready: Option<Sender<()>>,
    go: Receiver<()>,
}

/// A step of a writer; an error is noted in the diary, and ends the writer.
type Step = Result<(), ()>;

impl Writer {
    fn open(device: &Path, way: Way) -> io::Result<(File, Option<File>)> {
        Ok(match way {
            Way::Direct => (Aligned::open(device, true, 0)?, None),
            Way::Buffered => (File::options().write(true).open(device)?, None),
            Way::Fua => {
                (Aligned::open(device, true, 0)?, Some(Aligned::open(device, true, libc::O_DSYNC)?))
            }
        })
    }

    /// Writes until an error or the end of the scene, and gives the diary.
    fn work(mut self) -> Diary {
        let _ = match self.plan.scene {
            Scene::AmidSyncs => self.amid_syncs(),
            Scene::BetweenSyncs => self.between_syncs(),
        };
        self.diary
    }

    fn amid_syncs(&mut self) -> Step {
        let since = Instant::now();
        while !self.shared.faulty.load(Ordering::Relaxed) {
            self.burst()?;
            if self.shared.acknowledged.load(Ordering::Relaxed) >= self.plan.writes_before {
                self.tell_ready();
            }
            assert!(since.elapsed() < 2 * DEADLINE, "the fault does not come");
        }
        (0..BURSTS_AFTER).try_for_each(|_| self.burst())
    }

    fn between_syncs(&mut self) -> Step {
        self.burst()?;
        for _ in 0..self.random.within(4, 12) {
            self.write(false)?;
        }
        // For a thin pool: more than there is room for, by all writers together.
        if self.plan.fault == Fault::Full {
            for _ in 0..10 {
                self.write(false)?;
            }
        }
        self.tell_ready();
        self.go.recv_timeout(2 * DEADLINE).expect("the fault has come and gone");
        self.write(false)?;
        self.sync()?;
        (0..BURSTS_AFTER / 2).try_for_each(|_| self.burst())
    }

    fn tell_ready(&mut self) {
        if let Some(ready) = self.ready.take() {
            ready.send(()).expect("the test listens");
        }
    }

    /// A few writes, and a sync that covers them.
    fn burst(&mut self) -> Step {
        for _ in 0..self.random.within(1, 3) {
            self.write(self.way == Way::Fua)?;
        }
        if self.way == Way::Fua { Ok(()) } else { self.sync() }
    }

    fn write(&mut self, durable: bool) -> Step {
        let begun = self.diary.begun();
        let again = self.random.chance(120) && begun > 0;
        let place = if again { self.random.below(begun) } else { begun };
        let chunk = 1 + self.diary.writer() + WRITERS * (place % CHUNKS_OF_A_WRITER);
        let block = chunk * BLOCKS_OF_A_CHUNK + place / CHUNKS_OF_A_WRITER % BLOCKS_OF_A_CHUNK;
        let bytes = self.diary.begin(block);
        let file = if durable { self.durable.as_ref().expect("a second file") } else { &self.file };
        match file.write_all_at(Aligned::of(&bytes).as_ref(), block * BLOCK as u64) {
            Ok(()) if durable => self.diary.cover_last(),
            Ok(()) => self.diary.acknowledge(),
            Err(error) => return self.failed("write", &error),
        }
        self.shared.acknowledged.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn sync(&mut self) -> Step {
        match self.file.sync_data() {
            Ok(()) => self.diary.cover_all(),
            Err(error) => return self.failed("sync", &error),
        }
        Ok(())
    }

    fn failed(&mut self, what: &'static str, error: &io::Error) -> Step {
        self.diary.failed.push((what, error.raw_os_error().unwrap_or(0)));
        Err(())
    }
}

/// The volume of a round, mounted twice, with its writers at work.
struct Round<'l> {
    plan: Arc<Plan>,
    mounts: [Mounted<'l>; 2],
    shared: Arc<Shared>,
    ready: Receiver<()>,
    go: Vec<Sender<()>>,
    diaries: Vec<Receiver<Diary>>,
}

impl<'l> Round<'l> {
    fn start(lab: &'l Lab, plan: &Arc<Plan>, volume: &str) -> Self {
        let address = if plan.rdma { lab.rdma() } else { lab.tcp() };
        let mounts = ["a", "b"].map(|mount| {
            let flags = MountFlags::new(address.clone(), volume).name(&format!("{volume}{mount}"));
            // However long the machine stands still, no path is lost for that.
            let flags = flags.flag("--detect", "30s").flag("--queue-depth", "16");
            Mounted::new(lab, &flags.switch("--shared"))
        });
        let shared = Arc::new(Shared::default());
        let (sender, ready) = channel();
        let (mut go, mut diaries) = (Vec::new(), Vec::new());
        for (number, way) in (0..WRITERS).zip(plan.ways) {
            let device = mounts[by_turns(number, 2)].device();
            let (file, durable) = Writer::open(device, way)
                .unwrap_or_else(|e| panic!("{plan}: opening {}: {e}", device.display()));
            let (go_sender, go_receiver) = channel();
            let writer = Writer {
                plan: Arc::clone(plan),
                way,
                diary: Diary::new(plan.seed, number),
                random: Random::new(plan.seed ^ (number + 1) << 56),
                file,
                durable,
                shared: Arc::clone(&shared),
                ready: Some(sender.clone()),
                go: go_receiver,
            };
            go.push(go_sender);
            diaries.push(begin(move || writer.work()));
        }
        Self { plan: Arc::clone(plan), mounts, shared, ready, go, diaries }
    }

    /// Waits until `writers` are where the fault may come, or have ended.
    fn wait_ready(&self, writers: u64) {
        for _ in 0..writers {
            match self.ready.recv_timeout(2 * DEADLINE) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => panic!("{}: the writers hang", self.plan),
            }
        }
    }

    fn fault_comes(&self, target: &Target<'_>, volume: &str, disk: &FaultyDisk) {
        let held = || {
            std::thread::sleep(GATHER);
            self.plan.standstill.then(|| target.freeze())
        };
        let still = match self.plan.scene {
            Scene::AmidSyncs => {
                self.wait_ready(1);
                disk.begin(held)
            }
            Scene::BetweenSyncs => {
                self.wait_ready(WRITERS);
                if self.plan.direct {
                    // There is no page cache from which the kernel could lose writes: the fault stays.
                    disk.begin(|| self.go());
                    None
                } else {
                    until("the cache to have written back", DEADLINE, || {
                        let status = target.status();
                        let found = status.volumes.iter().find(|v| v.name == volume);
                        found.filter(|v| v.counts.dirty_bytes == 0).map(|_| ())
                    });
                    disk.begin(|| {});
                    // The error is told to this caller, too, and is not news.
                    let _ = disk.write_back();
                    disk.mend(|| {
                        self.go();
                        held()
                    })
                }
            }
        };
        if still.is_some() {
            std::thread::sleep(GATHER);
        }
        drop(still);
        self.shared.faulty.store(true, Ordering::Relaxed);
    }

    /// Lets the writers go on that wait for the fault.
    fn go(&self) {
        for go in &self.go {
            // A writer that has ended does not listen.
            let _ = go.send(());
        }
    }

    fn finish(self) -> Vec<Diary> {
        let Self { plan, mounts, diaries, .. } = self;
        let diary = |receiver: Receiver<Diary>| {
            receiver.recv_timeout(3 * DEADLINE).unwrap_or_else(|e| panic!("{plan}: a writer: {e}"))
        };
        let diaries = diaries.into_iter().map(diary).collect();
        for mounted in mounts {
            mounted.umount_by_force();
        }
        diaries
    }
}

/// Sums over rounds.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    rounds: usize,
    rounds_with_loss: usize,
    rounds_that_lied: usize,
    writes: usize,
    writes_lost: usize,
    syncs: u64,
    failures: usize,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.rounds_with_loss += other.rounds_with_loss;
        self.rounds_that_lied += other.rounds_that_lied;
        self.writes += other.writes;
        self.writes_lost += other.writes_lost;
        self.syncs += other.syncs;
        self.failures += other.failures;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, rounds_with_loss, rounds_that_lied, writes, writes_lost, .. } = self;
        write!(f, "{rounds} rounds, {rounds_with_loss} lost writes, {rounds_that_lied} lied; ")?;
        write!(f, "{writes} writes, {writes_lost} lost; ")?;
        write!(f, "{} syncs OK, {} writers failed", self.syncs, self.failures)
    }
}

/// Compares the disk with what the writers noted. Adds lies, in words, to `lies`.
fn judge(plan: &Plan, diaries: &[Diary], disk: &[u8], lies: &mut Vec<String>) -> Tally {
    let mut tally = Tally { rounds: 1, ..Tally::default() };
    let block = |block: u64| {
        let at = usize::try_from(block).expect("a block of the disk") * BLOCK;
        &disk[at..at + BLOCK]
    };
    let before = lies.len();
    for (diary, way) in diaries.iter().zip(plan.ways) {
        let (found, lost) = diary.judge(block);
        lies.extend(found.iter().map(|lie| format!("{plan}: {lie}")));
        tally.writes += diary.acknowledged();
        if way != Way::Buffered {
            // What is missing of a buffered writer may never have left the mount's own page cache.
            tally.writes_lost += lost;
        }
        tally.syncs += diary.synced;
        tally.failures += diary.failed.len();
        for (what, errno) in &diary.failed {
            assert!(ERRNOS.contains(errno), "{plan}: a {what} failed with errno {errno}");
        }
    }
    tally.rounds_with_loss = usize::from(tally.writes_lost > 0);
    tally.rounds_that_lied = usize::from(lies.len() > before);
    tally
}

/// One life of a target: a volume and a disk for each round. Returns a tally for each round.
fn life(lab: &Lab, plans: &[Arc<Plan>], lies: &mut Vec<String>) -> Vec<Tally> {
    let names: Vec<String> = (0..plans.len()).map(|number| format!("lost{number}")).collect();
    let disks: Vec<FaultyDisk> = plans
        .iter()
        .zip(&names)
        .map(|(plan, name)| FaultyDisk::new(lab, name, plan.fault, plan.room, plan.volatile))
        .collect();
    let volume = |((plan, name), disk): ((&Arc<Plan>, &String), &FaultyDisk)| VolumeConfig {
        cache: Some(plan.cache),
        direct: if plan.direct { DirectIo::Required } else { DirectIo::Off },
        read_ahead: ByteSize(0),
        ..VolumeConfig::file(name, disk.device())
    };
    let volumes = plans.iter().zip(&names).zip(&disks).map(volume).collect();
    let config = TargetConfig { volumes, ..config(Path::new("/"), CacheMode::None, 32 * MIB) };
    let target = serve(lab, &with_delay(config, "20ms"));
    let mut diaries = Vec::new();
    for ((plan, name), disk) in plans.iter().zip(&names).zip(&disks) {
        let round = Round::start(lab, plan, name);
        round.fault_comes(&target, name, disk);
        diaries.push(round.finish());
    }
    let flushes: Vec<u64> = target.status().poll_groups.iter().map(|g| g.flushes).collect();
    assert!(
        flushes.len() >= 2 && flushes.iter().all(|count| *count > 0),
        "FLUSHes by poll group: {flushes:?}; they cannot overlap, and the rounds prove nothing"
    );
    target.kill();
    let judged = plans.iter().zip(&diaries).zip(disks);
    judged.map(|((plan, diaries), disk)| judge(plan, diaries, &disk.read_back(), lies)).collect()
}

fn number_of(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|e| panic!("{variable}={text}: {e}")))
}

fn rounds(lab: &Lab) {
    let faults = Fault::asked_for();
    let rounds = number_of("RBLK_ROUNDS").unwrap_or_else(|| lab.times(12, 1000) as u64);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |d| d.as_secs());
    let first = number_of("RBLK_SEED").unwrap_or(now);
    println!("{}: {rounds} rounds, the first of RBLK_SEED={first}", lab.test());
    let plans: Vec<Arc<Plan>> =
        (first..first + rounds).map(|seed| Arc::new(Plan::of(seed, &faults))).collect();
    let (mut lies, mut tallies) = (Vec::new(), BTreeMap::<_, Tally>::new());
    let (mut total, since) = (Tally::default(), Instant::now());
    for plans in plans.chunks(ROUNDS_OF_A_LIFE) {
        let before = lies.len();
        for (plan, tally) in plans.iter().zip(life(lab, plans, &mut lies)) {
            println!("{plan}: {tally}");
            let kind = (plan.fault, plan.store(), plan.cache.to_string(), plan.scene as u8);
            tallies.entry(kind).or_default().add(&tally);
            total.add(&tally);
        }
        lies[before..].iter().for_each(|lie| println!("LIE: {lie}"));
        // libtest keeps what is printed in a pipe until there is much of it.
        let _ = io::stdout().flush();
    }
    for ((fault, store, cache, scene), tally) in &tallies {
        let scene = if *scene == Scene::AmidSyncs as u8 { "amid" } else { "between" };
        println!("{fault:<6} {store:<8} {cache:<13} {scene:<7}: {tally}");
    }
    println!("{}: in all, in {:.0?}: {total}", lab.test(), since.elapsed());
    let (lied, some) = (total.rounds_that_lied, &lies[..lies.len().min(20)]);
    assert!(
        lied == 0,
        "{lied} of {rounds} rounds lied; all lies are above, the first are {some:#?}"
    );
    for fault in faults {
        let buffered =
            || tallies.iter().filter(|(kind, _)| kind.0 == fault && kind.1 == "buffered");
        let lost = buffered().any(|(_, tally)| tally.writes_lost > 0);
        assert!(
            lost || buffered().count() == 0,
            "the fault {fault} lost nothing: nothing was at stake"
        );
    }
    assert!(total.writes_lost > 0 && total.failures > 0, "nothing was at stake: {total}");
}

#[test]
fn lost_writes() {
    run("lost_writes", rounds);
}
