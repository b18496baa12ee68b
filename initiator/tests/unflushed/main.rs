//! Acknowledged writes and a target that forgets: engines with ledgers over the in-memory network,
//! against a target that loses unflushed writes. Everything follows from a seed.

mod target;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::OnLoss;
use rblk_fabric::{PageKind, Region};
use rblk_initiator::engine::durability::retain::{RangeContent, ReplayLog, RetainRing, Retained};
use rblk_initiator::engine::durability::{Durability, Ledger};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::{Engine, QueueStats};
use rblk_initiator::volume::replay::{Progress, ReplayError, ReplayOutcome, Replayer, buffers};
use rblk_initiator::volume::resolve_unflushed::{Judgement, judge};
use rblk_initiator::volume::session::QueueWish;
use rblk_protocol::{BlockCount, BlockSize, Features, Lba, Opcode, QueueDepth, Status, Tag};

use target::Target;

const BLOCKS: usize = 64;
const IO_MAX: u32 = 4096;
const DEPTH: u16 = 8;
const QUEUES: usize = 3;
const EIO: i32 = -5;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

fn size() -> BlockSize {
    BlockSize::new(512).unwrap()
}

fn depth() -> QueueDepth {
    QueueDepth::new(DEPTH).unwrap()
}

fn wish() -> QueueWish {
    QueueWish {
        depth: depth(),
        io_max_bytes: IO_MAX,
        in_capsule_bytes: IO_MAX,
        features: Features::default(),
        digest: rblk_config::DigestWish::Off,
        lanes: Some(1),
        queues: 1,
    }
}

struct Queue {
    engine: Engine,
    buffers: Arc<Region>,
    // By tag: the request under way, with the value of its first block.
    ops: Vec<Option<(Io, u64)>>,
    stats: Arc<QueueStats>,
}

struct Bed {
    target: Target,
    queues: Vec<Queue>,
    durability: Arc<Durability>,
    random: Random,
    now: Instant,
    // The value of each block, as acknowledged.
    expected: Vec<u64>,
    // A request for the block is under way.
    busy: Vec<bool>,
    next_value: u64,
    flushed: Vec<i32>,
}

impl Bed {
    fn new(on_loss: OnLoss, seed: u64, retain_bytes: Option<usize>) -> Self {
        Self::over(Durability::new(on_loss), seed, retain_bytes)
    }

    fn over(durability: Arc<Durability>, seed: u64, retain_bytes: Option<usize>) -> Self {
        let queues = (0..QUEUES)
            .map(|_| {
                let ring = retain_bytes.map(|bytes| RetainRing::new(bytes, bytes / 2048 + 4));
                let stats = Arc::new(QueueStats::default());
                let ledger = Ledger::new(Arc::clone(&durability), depth(), ring);
                let engine =
                    Engine::new(depth(), IO_MAX as usize, Arc::clone(&stats)).with_ledger(ledger);
                let buffers =
                    Region::allocate(usize::from(DEPTH) * IO_MAX as usize, PageKind::Normal)
                        .unwrap();
                Queue { engine, buffers, ops: vec![None; usize::from(DEPTH)], stats }
            })
            .collect();
        let mut bed = Self {
            target: Target::new(seed),
            queues,
            durability,
            random: Random(seed),
            now: Instant::now(),
            expected: vec![0; BLOCKS],
            busy: vec![false; BLOCKS],
            next_value: 0,
            flushed: Vec::new(),
        };
        bed.connect();
        bed
    }

    fn connect(&mut self) {
        for queue in &mut self.queues {
            let path = self.target.connect(&queue.buffers);
            queue.engine.connect(path, self.now);
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_micros(10);
        self.target.turn(&mut self.random);
        for queue in &mut self.queues {
            let (ops, expected, busy) = (&mut queue.ops, &mut self.expected, &mut self.busy);
            let flushed = &mut self.flushed;
            queue.engine.turn(self.now, |tag, result| {
                let (io, value) = ops[tag.index()].take().expect("it was asked for");
                if io.op == IoOp::Flush {
                    flushed.push(result);
                    return;
                }
                assert!(result >= 0, "{io:?}: {result}");
                let first = usize::try_from(io.lba.0).unwrap();
                for (block, at) in (first..).zip(0..io.count.0) {
                    busy[block] = false;
                    expected[block] = if io.op == IoOp::Write { value + at } else { 0 };
                }
            });
            while let Some((_, dead)) = queue.engine.take_ended() {
                drop(dead);
            }
        }
    }

    /// Submits a request under any idle tag, for blocks without a request.
    fn submit(&mut self, queue: usize, op: IoOp) {
        let idle = self.queues[queue].ops.iter().position(Option::is_none);
        let Some(tag) = idle else { return };
        let (mut first, mut count) = (0, 0);
        if op != IoOp::Flush {
            first = self.random.below(BLOCKS);
            count = (1 + self.random.below(8)).min(BLOCKS - first);
            if self.busy[first..first + count].contains(&true) {
                return;
            }
            self.busy[first..first + count].fill(true);
        }
        let mut io = Io::new(op, first as u64 * 512, count as u64 * 512, size()).unwrap();
        io.fua = op == IoOp::Write && self.random.one_in(6);
        let value = self.next_value + 1;
        self.next_value += count as u64;
        let queue = &mut self.queues[queue];
        if op == IoOp::Write {
            for (at, value) in (0..count).zip(value..) {
                let block = [value.to_le_bytes(); 64].concat();
                queue.buffers.write(tag * IO_MAX as usize + at * 512, &block);
            }
        }
        queue.ops[tag] = Some((io, value));
        queue.engine.submit(Tag(u16::try_from(tag).unwrap()), io).unwrap();
    }

    fn submit_any(&mut self) {
        let queue = self.random.below(QUEUES);
        let op = match self.random.below(20) {
            0 => IoOp::Flush,
            1 => IoOp::Discard,
            2 => IoOp::WriteZeroes,
            _ => IoOp::Write,
        };
        self.submit(queue, op);
    }

    fn outstanding(&self) -> usize {
        self.queues.iter().map(|queue| queue.engine.outstanding()).sum()
    }

    fn settle(&mut self) {
        for _ in 0..100_000 {
            if self.outstanding() == 0 {
                return;
            }
            self.step();
        }
        panic!("{} requests are stuck", self.outstanding());
    }

    /// The target comes back without its memory: runs control's part before the queues go on. If
    /// the queues retain copies, returns the outcome of the replay.
    fn recover(&mut self) -> Option<ReplayOutcome> {
        self.target.crash(&mut self.random);
        self.settle_account()
    }

    /// The mount connects, and settles its account.
    fn settle_account(&mut self) -> Option<ReplayOutcome> {
        let mut stock = Some(Vec::new());
        for queue in &mut self.queues {
            match (&mut stock, queue.engine.take_stock()) {
                (Some(all), Some(entries)) => all.extend(entries),
                _ => stock = None,
            }
            while let Some((_, dead)) = queue.engine.take_ended() {
                drop(dead);
            }
        }
        let judgement = judge(&self.durability, stock, (size(), BlockCount(BLOCKS as u64)));
        let mut outcome = None;
        if let Judgement::Rewrite { log, .. } = &judgement {
            outcome = loop {
                match self.replay(log) {
                    Some(outcome) => break Some(outcome),
                    None => self.target.crash(&mut self.random),
                }
            };
        }
        judgement.enter(&self.durability, outcome.unwrap_or(ReplayOutcome::Durable));
        if outcome.is_some() {
            let is_idle = |block: &usize| !self.busy[*block] && !self.target.bad.contains(block);
            for block in (0..BLOCKS).filter(is_idle) {
                let (expected, on_disk) = (self.expected[block], self.target.disk[block]);
                assert_eq!(self.target.memory[block], expected, "block {block}");
                let is_durable = !matches!(outcome, Some(ReplayOutcome::Unflushed(_)));
                assert!(!is_durable || on_disk == expected, "block {block}");
            }
        }
        self.connect();
        outcome
    }

    /// The outcome; `None` if the target crashed again before the end.
    fn replay(&mut self, log: &ReplayLog) -> Option<ReplayOutcome> {
        let region = buffers(wish()).unwrap();
        let path = self.target.connect(&region);
        let mut replay = Replayer::new(log, path, region, wish(), self.now);
        let dies_after = if self.random.one_in(3) { self.random.below(60) } else { usize::MAX };
        for step in 0..100_000 {
            if step == dies_after {
                return None;
            }
            self.now += Duration::from_micros(10);
            self.target.turn(&mut self.random);
            if let Progress::Done(outcome) = replay.turn(self.now).unwrap() {
                return Some(outcome);
            }
        }
        panic!("the replay is stuck");
    }
}

#[test]
fn retained_writes_are_never_lost() {
    let (mut rewritten, mut ahead) = (0, 0);
    for seed in 0..60 {
        let retain_bytes = [2048, 16 << 10, 256 << 10][usize::try_from(seed % 3).unwrap()];
        println!("seed {seed}, {retain_bytes} bytes per queue");
        let mut bed = Bed::new(OnLoss::UntilRemount, seed, Some(retain_bytes));
        for _ in 0..4 {
            for _ in 0..bed.random.below(400) {
                bed.submit_any();
                if bed.random.one_in(2) {
                    bed.step();
                }
            }
            bed.recover();
        }
        bed.settle();
        bed.submit(0, IoOp::Flush);
        bed.settle();
        assert!(bed.flushed.iter().all(|result| *result == 0), "{:?}", bed.flushed);
        assert_eq!(bed.target.memory, bed.expected);
        assert_eq!(bed.target.disk, bed.expected);
        assert_eq!((bed.durability.unflushed(), bed.durability.losses()), (0, 0));
        rewritten += bed.durability.writes_rewritten();
        ahead += bed.queues.iter().map(|q| q.stats.snapshot().flushes_ahead).sum::<u64>();
    }
    assert!(rewritten > 1000 && ahead > 100, "{rewritten} rewritten, {ahead} flushes ahead");
}

#[test]
fn writes_without_copies_are_reported_once() {
    let mut waited = 0;
    for seed in 0..30 {
        println!("seed {seed}");
        let mut bed = Bed::new(OnLoss::Once, seed, None);
        for _ in 0..200 {
            bed.submit(bed.queues.len() - 1, IoOp::Write);
            bed.step();
        }
        bed.settle();
        assert!(bed.durability.unflushed() > 0);
        // In some runs, FLUSHes are under way at the crash.
        let flushes = bed.random.below(3);
        for queue in 0..flushes {
            bed.submit(queue, IoOp::Flush);
        }
        bed.recover();
        bed.settle();
        let told = std::mem::take(&mut bed.flushed);
        assert_eq!(told, vec![EIO; flushes], "each covered what is lost");
        assert_eq!(bed.durability.has_untold_loss(), flushes == 0);
        waited += flushes;
        bed.submit(0, IoOp::Flush);
        bed.settle();
        bed.submit(1, IoOp::Flush);
        bed.settle();
        let after = if flushes == 0 { EIO } else { 0 };
        assert_eq!(bed.flushed, [after, 0]);
        // Later writes are safe again, and a restart without unflushed writes is no loss.
        bed.recover();
        bed.submit(0, IoOp::Flush);
        bed.settle();
        assert_eq!((bed.flushed.pop(), bed.durability.losses()), (Some(0), 1));
    }
    assert!(waited > 10);
}

/// FLUSHes on all queues by turns. Returns their results, in order.
fn flushed_by_turns(bed: &mut Bed) -> Vec<i32> {
    for turn in 0..2 * QUEUES {
        bed.submit(turn % QUEUES, IoOp::Flush);
        bed.settle();
    }
    std::mem::take(&mut bed.flushed)
}

#[test]
fn every_flush_reports_a_loss_until_the_remount() {
    for seed in 0..30 {
        println!("seed {seed}");
        let mut bed = Bed::new(OnLoss::UntilRemount, seed, None);
        assert_eq!(flushed_by_turns(&mut bed), [0; 2 * QUEUES]);
        for _ in 0..50 {
            bed.submit_any();
            bed.step();
        }
        bed.settle();
        bed.flushed.clear();
        bed.submit(0, IoOp::Write);
        bed.settle();
        assert!(bed.durability.unflushed() > 0);
        let waiting = bed.random.below(3);
        for queue in 0..waiting {
            bed.submit(queue, IoOp::Flush);
        }
        bed.recover();
        bed.settle();
        assert_eq!(std::mem::take(&mut bed.flushed), vec![EIO; waiting]);
        // Another restart, without unflushed writes, ends nothing.
        for _ in 0..2 {
            assert_eq!(flushed_by_turns(&mut bed), [EIO; 2 * QUEUES]);
            // FLUSHes are sent nevertheless: later writes are as durable as they can be.
            assert_eq!(bed.target.disk, bed.target.memory);
            assert_eq!(bed.durability.unflushed(), 0);
            bed.recover();
        }
        assert_eq!((bed.durability.losses(), bed.durability.has_untold_loss()), (1, true));
        // The process dies, and the next one takes over with its note.
        let heir = Durability::inheriting_loss(OnLoss::UntilRemount, bed.random.one_in(2));
        let mut bed = Bed::over(heir, seed, None);
        if bed.random.one_in(2) {
            bed.durability.arrived();
        }
        assert_eq!(flushed_by_turns(&mut bed), [EIO; 2 * QUEUES]);
        bed.submit_any();
        bed.settle();
        bed.flushed.clear();
        assert_eq!(flushed_by_turns(&mut bed), [EIO; 2 * QUEUES]);
        assert!(bed.durability.has_untold_loss());
    }
}

#[test]
fn a_failed_flush_is_reported_for_good_and_its_writes_are_saved() {
    for (on_loss, after) in [(OnLoss::UntilRemount, EIO), (OnLoss::Once, 0)] {
        for seed in 0..30 {
            println!("seed {seed}, {on_loss}");
            let mut bed = Bed::new(on_loss, seed, Some(256 << 10));
            for _ in 0..30 {
                bed.submit(bed.queues.len() - 1, IoOp::Write);
                bed.step();
            }
            bed.settle();
            bed.target.fails_flushes = true;
            bed.submit(0, IoOp::Flush);
            bed.settle();
            assert_eq!(bed.flushed.pop(), Some(EIO));
            assert!(bed.durability.unflushed() > 0, "the copies are there");
            // The target starts again without its memory: `recover` checks every write.
            bed.recover();
            assert_eq!(bed.target.disk, bed.expected);
            assert!(bed.durability.writes_rewritten() > 0);
            assert_eq!(flushed_by_turns(&mut bed), [after; 2 * QUEUES]);
            let losses = u64::from(on_loss == OnLoss::UntilRemount);
            assert_eq!((bed.durability.unflushed(), bed.durability.losses()), (0, losses));
        }
    }
}

#[test]
fn writes_of_a_predecessor_are_reported_lost_unless_flushed() {
    for seed in 0..32 {
        println!("seed {seed}");
        let retain_bytes = (seed & 1 != 0).then_some(256 << 10);
        let (flushed, forgot, wrote) = (seed & 2 != 0, seed & 4 != 0, seed & 8 != 0);
        let mut bed = Bed::over(Durability::inheriting(OnLoss::Once), seed, retain_bytes);
        bed.durability.arrived();
        if flushed {
            bed.submit(0, IoOp::Flush);
            bed.settle();
            assert_eq!(bed.flushed.pop(), Some(0));
        }
        for _ in 0..if wrote { 20 } else { 0 } {
            bed.submit(1, IoOp::Write);
        }
        bed.settle();
        if forgot {
            // With copies, this also checks that our own writes are back.
            bed.recover();
        }
        let unretained = wrote && retain_bytes.is_none();
        let lost = forgot && (!flushed || unretained);
        assert_eq!(bed.durability.has_untold_loss(), lost);
        for result in [if lost { EIO } else { 0 }, 0] {
            bed.submit(0, IoOp::Flush);
            bed.settle();
            assert_eq!(bed.flushed.pop(), Some(result));
        }
        assert!(!bed.durability.inherits_doubt());
        assert_eq!(bed.durability.unflushed(), 0);
        // Reported or covered, the doubt is over.
        bed.recover();
        bed.submit(0, IoOp::Flush);
        bed.settle();
        assert_eq!(bed.flushed.pop(), Some(0));
    }
}

/// Makes some writes, some of them to blocks that will be refused. Returns these blocks.
fn written_on_bad_blocks(bed: &mut Bed) -> Vec<usize> {
    bed.submit_any();
    bed.settle();
    bed.submit(0, IoOp::Flush);
    bed.settle();
    let before = bed.expected.clone();
    for _ in 0..40 {
        bed.submit(bed.queues.len() - 1, IoOp::Write);
        bed.submit(0, IoOp::Write);
        bed.step();
    }
    bed.settle();
    bed.flushed.clear();
    // Only writes that are surely lost are checked.
    let written: Vec<usize> = (0..BLOCKS).filter(|at| before[*at] != bed.expected[*at]).collect();
    let bad: Vec<usize> = written.into_iter().filter(|_| bed.random.one_in(6)).collect();
    bed.target.bad.extend(&bad);
    bad
}

#[test]
fn a_refused_write_takes_no_other_with_it() {
    let (mut refused, mut in_order) = (0, 0);
    for seed in 0..60 {
        for on_loss in [OnLoss::UntilRemount, OnLoss::Once] {
            println!("seed {seed}, {on_loss}");
            let mut bed = Bed::new(on_loss, seed, Some(256 << 10));
            // A store that fails, or has lost its device.
            let store = [Status::StoreError, Status::VolumeGone][usize::from(seed % 2 == 1)];
            bed.target.bad_status = store;
            let bad = written_on_bad_blocks(&mut bed);
            // `recover` checks every other block, on the disk.
            let outcome = bed.recover();
            let Some(ReplayOutcome::Refused { blocks, errno, flushed: true }) = outcome else {
                assert_eq!((outcome, bed.durability.losses()), (Some(ReplayOutcome::Durable), 0));
                in_order += 1;
                continue;
            };
            assert_eq!(errno, store.errno());
            assert!((1..=bad.len() as u64).contains(&blocks), "{blocks} of {bad:?}");
            refused += 1;
            assert_eq!(bed.durability.losses(), 1);
            let until_remount = on_loss == OnLoss::UntilRemount;
            assert_eq!(bed.durability.unflushed() > 0, until_remount);
            if bed.random.one_in(2) {
                // FLUSH succeeds at the target, and makes no refused block durable.
                let told = flushed_by_turns(&mut bed);
                assert_eq!(told[1..], [if until_remount { EIO } else { 0 }; 2 * QUEUES - 1]);
            }
            // The store is repaired, and the target starts again, or the mount connects again.
            bed.target.bad.clear();
            let old: Vec<u64> = bad.iter().map(|at| bed.target.memory[*at]).collect();
            let outcome = match bed.random.one_in(2) {
                true if until_remount => bed.settle_account(),
                _ => bed.recover(),
            };
            if until_remount {
                assert_eq!(outcome, Some(ReplayOutcome::Durable));
                assert_eq!(bed.target.disk, bed.expected, "every acknowledged write is back");
                assert_eq!((bed.durability.unflushed(), bed.durability.losses()), (0, 1));
            } else {
                let now: Vec<u64> = bad.iter().map(|at| bed.target.memory[*at]).collect();
                assert_eq!((outcome, now), (None, old), "the user was told, and has read it");
            }
        }
    }
    assert!(refused > 80, "{refused} refused, {in_order} in order");
}

#[test]
fn writes_go_on_while_copies_are_held_and_take_their_room_at_last() {
    for seed in 0..20 {
        println!("seed {seed}");
        let mut bed = Bed::new(OnLoss::UntilRemount, seed, Some(8 << 10));
        for _ in 0..3 {
            bed.submit(0, IoOp::Write);
        }
        bed.settle();
        bed.target.bad.extend(0..BLOCKS);
        if !matches!(bed.recover(), Some(ReplayOutcome::Refused { .. })) {
            continue;
        }
        bed.target.bad.clear();
        // No request waits for ever, even if the FLUSHes ahead of it fail.
        for _ in 0..200 {
            bed.submit_any();
            bed.step();
        }
        bed.settle();
        for _ in 0..3 {
            bed.submit(0, IoOp::Write);
            bed.settle();
        }
        let told = bed.durability.losses();
        assert!(matches!(bed.recover(), None | Some(ReplayOutcome::Durable)));
        assert_eq!((bed.durability.unflushed(), bed.durability.losses()), (0, told));
        assert!(told >= 1 && bed.durability.fails_every_flush());
    }
}

#[test]
fn a_flush_after_the_replay_that_fails_keeps_every_copy() {
    for on_loss in [OnLoss::UntilRemount, OnLoss::Once] {
        for seed in 0..20 {
            println!("seed {seed}, {on_loss}");
            let mut bed = Bed::new(on_loss, seed, Some(256 << 10));
            for _ in 0..20 {
                bed.submit(0, IoOp::Write);
                bed.step();
            }
            bed.settle();
            let written = bed.durability.unflushed();
            assert!(written > 0);
            bed.target.crash(&mut bed.random);
            bed.target.fails_flushes = true;
            if bed.settle_account() == Some(ReplayOutcome::Durable) {
                // The target crashed again in between, and its store works.
                continue;
            }
            assert_eq!((bed.durability.unflushed(), bed.durability.losses()), (written, 1));
            assert_eq!(bed.recover(), Some(ReplayOutcome::Durable));
            assert_eq!(bed.target.disk, bed.expected);
            assert_eq!((bed.durability.unflushed(), bed.durability.losses()), (0, 1));
        }
    }
}

#[test]
fn a_replay_ends_with_its_path_and_goes_on_after_a_refusal() {
    let mut target = Target::new(1);
    let mut random = Random(1);
    let entry = Retained {
        number: 0,
        what: RangeContent::Data,
        lba: Lba(3),
        count: BlockCount(1),
        data: vec![1; 512],
    };
    let log = ReplayLog::merge(vec![entry], size());
    for says in [Some(Status::ReadOnly), Some(Status::Fenced), Some(Status::VolumeGone), None] {
        let region = buffers(wish()).unwrap();
        let path = target.connect(&region);
        let mut now = Instant::now();
        let mut replay = Replayer::new(&log, path, region, wish(), now);
        let end = loop {
            now += Duration::from_micros(10);
            target.network.advance(1);
            let end = target.connections.last_mut().unwrap();
            end.hear();
            if let Some((command, _)) = end.pending.pop() {
                match says {
                    _ if command.opcode == Opcode::Flush => end.answer(&command, Status::Ok),
                    Some(status) => end.answer(&command, status),
                    None => target.crash(&mut random),
                }
            }
            match replay.turn(now) {
                Ok(Progress::Done(outcome)) => break Ok(outcome),
                Ok(_) => {}
                Err(error) => break Err(error),
            }
            if target.connections.is_empty() {
                // The cut is noticed at the next poll.
                target.connect(&buffers(wish()).unwrap());
            }
        };
        match (says, end) {
            (Some(Status::ReadOnly), Ok(outcome)) => {
                let refused = ReplayOutcome::Refused { blocks: 1, errno: 30, flushed: true };
                assert_eq!(outcome, refused);
            }
            // A store without its device reports this, too.
            (Some(Status::VolumeGone), Ok(outcome)) => {
                let refused = ReplayOutcome::Refused { blocks: 1, errno: 19, flushed: true };
                assert_eq!(outcome, refused);
            }
            // `Fenced` is no answer to the write: the next OPEN names the holder.
            (Some(Status::Fenced), Err(ReplayError::Fenced)) => {}
            (None, Err(ReplayError::Path(_))) => {}
            other => panic!("{other:?}"),
        }
    }
}
