//! A disk that begins to lose writes below a buffered or a direct store, two mounts of the volume,
//! and four writers that synchronise at the same time: a sync that covered a lost write must fail.
//!
//! The kernel reports a write that it could not write back once, to one caller of each open file. A
//! target has one open file for a volume, and a FLUSH may come from any connection, so the target
//! must report the loss to every FLUSH.
//!
//! Each round has a small disk, a fault and a volume. After the target's death, the test reads the
//! bytes from below the fault, and compares them with the writers' notes.
//!
//! `RBLK_ROUNDS=N` sets the number of rounds, `RBLK_SEED=N` the seed of the first round, and
//! `RBLK_FAULTS=error,flakey` leaves out the thin pool. A round depends on its seed and on the list
//! of faults, except for the order in which threads run: repeat a failed round often.

mod plan;
mod round;
mod writer;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use rblk_config::{ByteSize, CacheMode, DirectIo, TargetConfig, VolumeConfig};
use rblk_tests::lab::{BLOCK, Diary, Fault, FaultyDisk, Lab, run};
use rblk_tests::long::times;

use self::plan::{Plan, Scene, Way};
use self::round::Round;
use super::{MIB, config, serve, with_delay};

/// Rounds of one life of a target: each has its own volume, since a store that lost writes fails
/// until a restart.
const ROUNDS_OF_A_LIFE: usize = 6;
const WRITERS: usize = 4;
/// The errors of a failed disk and of a full one.
const ERRNOS: [i32; 2] = [libc::EIO, libc::ENOSPC];

/// Takes turns, so that a few rounds cover every kind.
fn by_turns(number: u64, len: u64) -> usize {
    usize::try_from(number % len).expect("an index")
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
    syncs_failed: usize,
    writes_failed: usize,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.rounds_with_loss += other.rounds_with_loss;
        self.rounds_that_lied += other.rounds_that_lied;
        self.writes += other.writes;
        self.writes_lost += other.writes_lost;
        self.syncs += other.syncs;
        self.syncs_failed += other.syncs_failed;
        self.writes_failed += other.writes_failed;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, rounds_with_loss, rounds_that_lied, .. } = self;
        let Self { writes, writes_lost, syncs, syncs_failed, writes_failed, .. } = self;
        write!(
            f,
            "rounds {rounds}, with a loss {rounds_with_loss}, with a lie {rounds_that_lied}; "
        )?;
        write!(f, "writes {writes}, lost {writes_lost}, failed {writes_failed}; ")?;
        write!(f, "syncs OK {syncs}, failed {syncs_failed}")
    }
}

/// Compares the disk with the writers' notes. Adds lies, in words, to `lies`.
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
            // Missing writes of a buffered writer may never have left the mount's own page cache.
            tally.writes_lost += lost;
        }
        tally.syncs += diary.synced;
        for (what, errno) in &diary.failed {
            let failed =
                if *what == "write" { &mut tally.writes_failed } else { &mut tally.syncs_failed };
            *failed += 1;
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
    // The writers of one round may all run on one CPU, and use one queue and one poll group.
    assert!(
        plans.len() < ROUNDS_OF_A_LIFE || flushes.iter().filter(|count| **count > 0).count() >= 2,
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
    let rounds = number_of("RBLK_ROUNDS").unwrap_or_else(|| times(12, 36));
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
            let kind = (plan.fault, plan.store(), plan.cache.to_string(), plan.scene);
            tallies.entry(kind).or_default().add(&tally);
            total.add(&tally);
        }
        lies[before..].iter().for_each(|lie| println!("LIE: {lie}"));
        // libtest buffers output to a pipe.
        let _ = io::stdout().flush();
    }
    for ((fault, store, cache, scene), tally) in &tallies {
        let scene = if *scene == Scene::DuringSyncs { "during" } else { "between" };
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
        let lost = buffered().any(|(_, tally)| tally.writes_lost > 0 && tally.syncs_failed > 0);
        assert!(
            lost || buffered().count() == 0,
            "the fault {fault} lost nothing: nothing was at stake"
        );
    }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn lost_writes() {
    run("lost_writes", rounds);
}
