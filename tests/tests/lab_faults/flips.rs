//! Bits that flip between a real RDMA device and the programs: in commands and their data, in data
//! placed by RDMA READ and WRITE, in answers and trailers. With digests no read returns a wrong
//! byte, and none is stored. Without digests both happen: so the flips are real.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::Instant;

use rblk_rig::seed::Random;
use rblk_tests::lab::{
    Aligned, Counts, DELIVERIES, FlipRates, Flips, Lab, MountFlags, Mounted, Target, pattern, run,
};
use rblk_tests::long::times;

use super::{PATIENCE, serve_file};

const BLOCK: usize = 4096;
const BLOCKS: usize = 4096;
/// Threads with a part of the volume each, so that no two requests overlap.
const USERS: usize = 8;
const EIO: i32 = 5;

/// A flip in a command ends its connection, and a flip in an answer its path. After a flip in data
/// the request is sent again.
const EVERYWHERE: FlipRates = [800, 5, 8, 800, 8, 40];
/// Without digests a flip in a command may do anything. Flips in data change data.
const IN_DATA: FlipRates = [0, 10, 10, 0, 10, 0];

/// One block of the volume: the seeds of its possible patterns, of the last successful write and of
/// the writes that failed since. A failed write may have stored a part of its blocks.
#[derive(Clone, Default)]
struct Block {
    now: u64,
    failed: Vec<u64>,
}

impl Block {
    fn may_hold(&self, found: &[u8]) -> bool {
        let content = |seed| if seed == 0 { vec![0; BLOCK] } else { pattern(seed, BLOCK) };
        found == content(self.now) || self.failed.iter().any(|seed| found == content(*seed))
    }

    /// Describes bytes that the block must not have.
    fn difference(&self, found: &[u8]) -> String {
        let expected = if self.now == 0 { vec![0; BLOCK] } else { pattern(self.now, BLOCK) };
        let differ = found.iter().zip(&expected).filter(|(found, expected)| found != expected);
        let (bytes, failed) = (differ.count(), self.failed.len());
        let older = (1..=4 * BLOCKS as u64).map(|back| self.now.wrapping_sub(back));
        let older = older.take_while(|seed| *seed > 0).find(|seed| found == pattern(*seed, BLOCK));
        format!("{bytes} bytes differ; {failed} writes failed; it is of an older write: {older:?}")
    }
}

/// The requests of users, and the wrong blocks.
#[derive(Default, Debug)]
struct Seen {
    reads: u64,
    writes: u64,
    failed: u64,
    // Blocks of reads with bytes that were never written there.
    wrong: u64,
}

/// Writes and reads its part of a device, until `is_over`.
struct User {
    file: File,
    first: usize,
    blocks: Vec<Block>,
    random: Random,
    seeds: u64,
    seen: Seen,
}

impl User {
    fn new(device: &Path, part: usize) -> Self {
        let blocks = BLOCKS / USERS;
        Self {
            file: Aligned::open(device, true, 0).expect("opening the device"),
            first: part * blocks,
            blocks: vec![Block::default(); blocks],
            random: Random::new(part as u64),
            seeds: (part as u64) << 20,
            seen: Seen::default(),
        }
    }

    fn run(mut self, is_over: impl Fn() -> bool) -> Self {
        let since = Instant::now();
        while !is_over() {
            for _ in 0..16 {
                self.request();
            }
            assert!(since.elapsed() < 30 * PATIENCE, "too few bits flip: {:?}", self.seen);
        }
        self
    }

    fn request(&mut self) {
        let count = [1, 1, 2, 3, 8, 16][self.random.index(6)];
        let at = self.random.index(self.blocks.len() - count);
        let offset = ((self.first + at) * BLOCK) as u64;
        let blocks = &mut self.blocks[at..at + count];
        if self.random.chance(500) {
            self.seen.writes += 1;
            let mut data = Vec::new();
            for block in &mut *blocks {
                self.seeds += 1;
                block.failed.push(self.seeds);
                data.extend(pattern(self.seeds, BLOCK));
            }
            match Aligned::write_at(&self.file, &data, offset) {
                Ok(()) => blocks.iter_mut().for_each(|block| {
                    *block = Block { now: block.failed.pop().unwrap_or(0), failed: Vec::new() };
                }),
                Err(error) => self.seen.fail(&error),
            }
            return;
        }
        self.seen.reads += 1;
        match Aligned::read_at(&self.file, count * BLOCK, offset) {
            Ok(data) => {
                for (found, block) in data.chunks(BLOCK).zip(&*blocks) {
                    if !block.may_hold(found) {
                        self.seen.wrong += 1;
                        println!("a wrong block: {}", block.difference(found));
                    }
                }
            }
            Err(error) => self.seen.fail(&error),
        }
    }
}

impl Seen {
    /// A request with two spoilt attempts fails, with this error only.
    fn fail(&mut self, error: &std::io::Error) {
        assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
        self.failed += 1;
    }

    fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.failed += other.failed;
        self.wrong += other.wrong;
    }
}

/// The result of flips.
struct Outcome {
    flips: u64,
    seen: Seen,
    // Blocks of the file behind the volume with bytes that were never written there.
    stored: u64,
    at_initiator: Counts,
    at_target: Counts,
}

/// Reads and writes until `goal` bits have flipped.
fn outcome(lab: &Lab, seed: u64, rates: FlipRates, digest: &str, goal: u64) -> Outcome {
    let flips = Flips::new(lab, seed, rates);
    // No spinning: threads that spin take the CPUs from the users here.
    let serve = serve_file(lab, (BLOCKS * BLOCK) as u64)
        .flag("--spin", "0s")
        .environment(flips.environment());
    let target = Target::start(lab, &serve);
    let mount = MountFlags::new(lab.rdma(), "v0").flag("--digest", digest).flag("--spin", "0s");
    let mounted = Mounted::new(lab, &mount.environment(flips.environment()));
    let is_over = || flips.total() >= goal;
    // The users close the disk before it is unmounted.
    let users: Vec<(usize, Vec<Block>, Seen)> = thread::scope(|scope| {
        let (device, is_over) = (mounted.device(), &is_over);
        let start = |part| scope.spawn(move || User::new(device, part).run(is_over));
        let users: Vec<_> = (0..USERS).map(start).collect();
        let ended = users.into_iter().map(|user| user.join().expect("a user"));
        ended.map(|User { first, blocks, seen, .. }| (first, blocks, seen)).collect()
    });
    let epoch = mounted.status().epoch;
    let at_initiator = mounted.counts();
    mounted.umount();
    let at_target = target.counts();
    drop(target);
    let image = File::open(lab.path("v0.img")).expect("the image");
    let (mut seen, mut stored) = (Seen::default(), 0);
    for (first, blocks, of_user) in &users {
        seen.add(of_user);
        for (at, block) in blocks.iter().enumerate() {
            let mut found = vec![0; BLOCK];
            let offset = ((first + at) * BLOCK) as u64;
            image.read_exact_at(&mut found, offset).expect("reading the image");
            stored += u64::from(!block.may_hold(&found));
        }
    }
    let counts = flips.counts();
    println!(
        "{}: seed {seed}, digest {digest}: {} flips; {seen:?}, {stored} blocks stored wrong; {} and {} \
         mismatches (initiator, target), {} sent again, epoch {epoch}",
        lab.test(),
        flips.total(),
        at_initiator.get("digest_mismatches"),
        at_target.get("digest_mismatches"),
        at_initiator.get("digest_retries"),
    );
    for (what, (deliveries, flips)) in DELIVERIES.iter().zip(counts) {
        println!("    {what}: {flips} flips in {deliveries} deliveries");
    }
    for ((what, rate), (deliveries, flips)) in DELIVERIES.iter().zip(rates).zip(counts) {
        // With this many deliveries, no flip at all would be a fault of the library.
        assert!(rate == 0 || flips > 0 || deliveries < 10 * rate, "no flip in {what}");
    }
    Outcome { flips: flips.total(), seen, stored, at_initiator, at_target }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn flips_are_found_at_every_layer() {
    run("flips_are_found_at_every_layer", |lab| {
        let goal = times(400, 1000);
        let found = outcome(lab, 1, EVERYWHERE, "crc32c", goal);
        assert_eq!((found.seen.wrong, found.stored), (0, 0), "wrong blocks, read and stored");
        let mismatches =
            [&found.at_initiator, &found.at_target].map(|counts| counts.get("digest_mismatches"));
        assert!(mismatches.iter().all(|&count| count > 0), "{mismatches:?}");
        // Some messages and ranges have two flips, and the counters of a path end with it.
        assert!(mismatches.iter().sum::<u64>() >= found.flips / 2, "{mismatches:?}");
        assert!(found.at_initiator.get("digest_retries") > 0);
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn flips_without_digests_are_seen_by_users() {
    run("flips_without_digests_are_seen_by_users", |lab| {
        let found = outcome(lab, 2, IN_DATA, "off", 100);
        assert!(found.seen.wrong > 0 && found.stored > 0, "no wrong block was read, or stored");
    });
}
