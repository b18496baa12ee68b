//! [`Storm`]: random overlapping requests on one volume of a [`CrashStore`], compared with an
//! [`Oracle`].
//!
//! The seed of its [`StormOptions`] decides everything. A storm ends well ([`Storm::calm`]) or at
//! any moment ([`Storm::crash`]). The next one begins with the remaining contents of the volume.

use std::ops::Range;
use std::time::Duration;

use rblk_config::ByteRate;
use rblk_fabric::soft::network::Conditions;
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::{AccessMode, Features, Tag};
use rblk_rig::crash_store::{CrashStore, Fault};
use rblk_rig::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::ram_store::{Kind, StoreConditions};
use rblk_rig::seed::Random;
use rblk_target::cache::STRIPE_BYTES;
use rblk_target::data::poll_group::ToGroup;
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::VolumeIndex;
use rblk_target::volume::limits::Limits;

use crate::bed::PATIENCE;
use crate::long;
use crate::oracle::{Begin, ChangeId, CrashCount, Oracle, Survives};

/// The volume.
pub const VOLUME: VolumeIndex = VolumeIndex(0);

/// Fills the buffers of reads before their answers.
const UNREAD: u8 = 0xee;

/// Every way a volume can be cached.
pub const MODES: [CacheMode; 3] = [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack];

/// How often each kind of request is made. Of the rest, half are reads and half are writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mix {
    /// FLUSH, of a thousand requests.
    pub flush: u32,
    /// DISCARD and WRITE_ZEROES, of a thousand requests each.
    pub erase: u32,
    /// Writes with FUA, of a thousand writes.
    pub fua: u32,
    /// Most attempts to begin a request in a step.
    pub begins: u64,
    /// Most steps of an occasional pause.
    pub pause: u64,
}

/// The parameters of a [`Storm`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StormOptions {
    /// Decides everything.
    pub seed: u64,
    /// How the volume is cached.
    pub cache: CacheMode,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Poll groups of the target.
    pub groups: usize,
    /// Memory of the target.
    pub arena_bytes: usize,
    /// The longest READ and WRITE.
    pub io_max_bytes: u32,
    /// How far the target reads ahead.
    pub read_ahead_bytes: u32,
    /// Most dirty bytes of write-back.
    pub dirty_max_bytes: usize,
    /// How long write-back may keep them.
    pub write_back_delay: Duration,
    /// I/O queues.
    pub queues: usize,
    /// The options of each queue.
    pub queue: QueueOptions,
    /// The network.
    pub network: Conditions,
    /// The store.
    pub store: StoreConditions,
    /// The requests.
    pub mix: Mix,
}

/// Whether the ends agree on lists of capsules: every other seed, independent of other draws. Every
/// other of these seeds agrees on lists with data.
#[must_use]
pub fn lists(seed: u64) -> Features {
    let mut random = Random::new(seed ^ 0x6c69_7374);
    let [agreed, data] = [random.chance(500), random.chance(500)];
    match (agreed, data) {
        (false, _) => Features::default(),
        (true, false) => Features::CAPSULE_LISTS,
        (true, true) => Features::CAPSULE_LISTS.or(Features::DATA_LISTS),
    }
}

/// Whether the data of a message comes first: every other seed, independent of other draws.
#[must_use]
pub fn data_first(seed: u64) -> Features {
    let agreed = Random::new(seed ^ 0x6672_7374).chance(500) || lands(seed);
    if agreed { Features::DATA_FIRST } else { Features::default() }
}

/// Whether the arena is large enough to reserve slots for landing data: every third seed.
fn lands(seed: u64) -> bool {
    Random::new(seed ^ 0x6c61_6e64).chance(333)
}

/// The extra arena bytes of a poll group that reserve these slots.
#[must_use]
pub fn landing_bytes(seed: u64) -> usize {
    if lands(seed) { 2 << 20 } else { 0 }
}

/// The in-capsule size: a block with reserved slots, else `in_capsule_bytes`.
#[must_use]
pub fn with_landing(seed: u64, in_capsule_bytes: u32) -> u32 {
    if lands(seed) { 4096 } else { in_capsule_bytes }
}

/// Whether the ends agree on digests: every other seed, independent of other draws.
#[must_use]
pub fn digests(seed: u64) -> Features {
    let agreed = Random::new(seed ^ 0x6469_6765).chance(500);
    if agreed { Features::DIGEST } else { Features::default() }
}

/// Limits of the volume: some in every third seed, else none, independent of other draws. `slowest`
/// is the lowest rate of commands.
#[must_use]
pub fn volume_limits(seed: u64, slowest: u32) -> Limits {
    let mut random = Random::new(seed ^ 0x6c69_6d69);
    if !random.chance(333) {
        return Limits::default();
    }
    let iops = Some(slowest * [1, 3, 10][random.index(3)]);
    let bandwidth = random.chance(500).then_some(ByteRate(u64::from(slowest) << 14));
    Limits { iops, bandwidth, iops_burst: Some([1, 4][random.index(2)]), bandwidth_burst: None }
}

/// QPs of each queue: one to three, independent of other draws.
#[must_use]
pub fn lanes(seed: u64) -> u16 {
    [1, 1, 2, 3][Random::new(seed ^ 0x6c61_6e65).index(4)]
}

impl StormOptions {
    /// The options of a seed.
    #[must_use]
    pub fn random(seed: u64, cache: CacheMode, block_bytes: u32, volume_bytes: usize) -> Self {
        let mut random = Random::new(seed ^ 0x0057_a7e5);
        let io_max_bytes: u32 = [8 << 10, 16 << 10, 64 << 10][random.index(3)];
        // One poll group owns a volume of one stripe; its connections may be in other groups.
        let groups = [1, 1, 2, 3][random.index(4)];
        // From a few slots to more than the volume.
        let more = [0, 0, volume_bytes / 2, 2 * volume_bytes][random.index(4)];
        let arena_bytes = groups * (4 * io_max_bytes as usize + more.next_multiple_of(1 << 16));
        let arena_bytes = arena_bytes + groups * landing_bytes(seed);
        let delay_min = random.below(3);
        Self {
            seed,
            cache,
            block_bytes,
            groups,
            arena_bytes,
            io_max_bytes,
            read_ahead_bytes: [0, 0, 8 << 10, 64 << 10][random.index(4)],
            dirty_max_bytes: [4 << 10, 16 << 10, arena_bytes / 2, arena_bytes][random.index(4)],
            write_back_delay: Duration::from_micros([0, 200, 1000, 4000][random.index(4)]),
            queues: 1 + random.index(3),
            queue: QueueOptions {
                depth: [1, 3, 8, 16][random.index(4)],
                io_max_bytes,
                in_capsule_bytes: with_landing(seed, [0, 512, 4096][random.index(3)]),
                features: [Features::WRITE_WITH_IMM, Features::default()][random.index(2)]
                    .or(lists(seed))
                    .or(data_first(seed))
                    .or(digests(seed)),
                reads_out: [1, 4, 16][random.index(3)],
                lanes: lanes(seed),
            },
            network: Conditions {
                fragment: random.chance(200),
                delay_min,
                delay_max: delay_min + random.below(4),
                ..Conditions::default()
            },
            store: StoreConditions {
                delay_min: random.below(3),
                delay_max: [2, 8, 40][random.index(3)],
                capacity: [2, 8, 4096, 4096][random.index(4)],
                ..StoreConditions::default()
            },
            mix: Mix {
                flush: [5, 30, 120][random.index(3)],
                erase: [0, 20, 60][random.index(3)],
                fua: [0, 100, 500][random.index(3)],
                begins: [1, 3, 8][random.index(3)],
                pause: [0, 30, 600][random.index(3)],
            },
        }
    }
}

/// The seeds of a test: `RBLK_SEED` (a seed, or `FIRST..END`), by default those below `count`.
///
/// # Panics
/// `RBLK_SEED` has another form.
#[must_use]
pub fn seeds(count: u64) -> Range<u64> {
    let Ok(text) = std::env::var("RBLK_SEED") else { return 0..count };
    let seed = |text: &str| -> u64 { text.parse().expect("RBLK_SEED is N, or FIRST..END") };
    match text.split_once("..") {
        Some((first, end)) => seed(first)..seed(end),
        None => seed(&text)..seed(&text) + 1,
    }
}

/// Whether this build is quick enough for the long form of a test: it is optimised, or tests may
/// take their time (`RBLK_LONG`).
#[must_use]
pub fn is_thorough() -> bool {
    cfg!(optimised) || long::factor().is_some()
}

#[derive(Debug)]
enum Expect {
    Read(Begin),
    Change(ChangeId),
    Flush(Begin),
}

#[derive(Debug)]
struct Flight {
    queue: QueueId,
    tag: Tag,
    op: IoOp,
    fua: bool,
    range: Range<usize>,
    expect: Expect,
}

/// How a target ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The machine loses its power.
    Machine,
    /// The program dies; the machine and its disks live on.
    Program,
}

/// A request that failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Its operation.
    pub op: IoOp,
    /// Its range in bytes.
    pub range: Range<usize>,
    /// The errno.
    pub errno: i32,
}

/// A session with its queues.
fn mount(rig: &mut Rig<CrashStore>, options: &StormOptions) -> Vec<QueueId> {
    let session = rig.begin_session();
    rig.open(session, VOLUME, AccessMode::Shared);
    let queue = |_| rig.add_queue(session, VOLUME, options.queue).expect("a queue");
    let queues = (0..options.queues).map(queue).collect();
    rig.settle(PATIENCE).expect("paths");
    queues
}

/// The free tags of each queue.
fn tags(options: &StormOptions) -> Vec<Vec<Tag>> {
    vec![(0..options.queue.depth).rev().map(Tag).collect(); options.queues]
}

/// Random requests and their oracle.
#[derive(Debug)]
pub struct Storm {
    /// The rig under it.
    pub rig: Rig<CrashStore>,
    /// Checks the results.
    pub oracle: Oracle,
    /// Chooses the requests.
    pub random: Random,
    /// The requests it makes.
    pub mix: Mix,
    options: StormOptions,
    queues: Vec<QueueId>,
    free: Vec<Vec<Tag>>,
    flights: Vec<Flight>,
    pause: u64,
    ended: u64,
    failures: Vec<Failure>,
    may_fail: bool,
}

impl Storm {
    /// A storm on a target that has just started with the oracle's volume.
    ///
    /// # Panics
    /// The rig cannot be made.
    #[must_use]
    pub fn new(options: &StormOptions, oracle: Oracle, image: &[u8]) -> Self {
        let volume = VolumeSpec {
            block_size: options.block_bytes,
            blocks: (oracle.len() / oracle.block_bytes()) as u64,
            cache: options.cache,
            read_ahead_bytes: options.read_ahead_bytes,
            limits: volume_limits(options.seed, 20_000),
            ..VolumeSpec::new(VolumeKind::Store, oracle.len() as u64)
        };
        let rig_options = RigOptions {
            seed: options.seed,
            conditions: options.network,
            groups: options.groups,
            // The groups run out of step, as threads do.
            skipped_turns_per_mille: match options.groups {
                1 => 0,
                _ => [0, 300, 700][usize::try_from(options.seed % 3).unwrap_or(0)],
            },
            arena_bytes: options.arena_bytes,
            io_max_bytes: options.io_max_bytes,
            volumes: vec![volume],
            dirty_max_bytes: options.dirty_max_bytes,
            write_back_delay: options.write_back_delay,
            ..RigOptions::default()
        };
        let stores = CrashStore::shared(|region| {
            let mut store = CrashStore::new(region, options.seed);
            store.set_volume(VOLUME, image.to_vec());
            store.set_conditions(options.store);
            if options.cache != CacheMode::None {
                // The cache promises that overlapping ops take turns at the store.
                store.set_exclusive();
            }
            store
        });
        let mut rig = Rig::new(&rig_options, stores).expect("a rig");
        let queues = mount(&mut rig, options);
        Self {
            rig,
            oracle,
            random: Random::new(options.seed ^ 0x5eed),
            mix: options.mix,
            free: tags(options),
            queues,
            options: options.clone(),
            flights: Vec::new(),
            pause: 0,
            ended: 0,
            failures: Vec::new(),
            may_fail: false,
        }
    }

    /// Requests that ended.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// Requests outstanding.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.flights.len()
    }

    /// Permits requests to fail. [`Self::take_failures`] returns the failures.
    pub fn tolerate(&mut self) {
        self.may_fail = true;
    }

    /// Requests that failed since the last call.
    pub fn take_failures(&mut self) -> Vec<Failure> {
        std::mem::take(&mut self.failures)
    }

    /// Makes parts of the volume bad for ops of some kinds.
    pub fn set_faults(&mut self, kinds: &[Kind], ranges: &[Range<u64>], errno: nix::errno::Errno) {
        let faults = kinds.iter().flat_map(|kind| {
            ranges.iter().map(|range| Fault {
                kind: *kind,
                volume: VOLUME,
                range: range.clone(),
                errno,
            })
        });
        self.rig.store_mut().set_faults(faults.collect());
    }

    fn random_range(&mut self, longest: usize) -> Range<usize> {
        let block = self.oracle.block_bytes();
        let longest = [block, 4096, 8192, longest][self.random.index(4)].min(longest).max(block);
        let blocks = 1 + self.random.index(longest / block);
        let all = self.oracle.len() / block;
        let blocks = blocks.min(all);
        // Half of the requests fall into one part of the volume: around the end of a stripe, if
        // there is one.
        let (hot, count) = if self.random.chance(500) {
            let count = (all / 8).min((256 << 10) / block).max(blocks);
            let seam = usize::try_from(STRIPE_BYTES).unwrap_or(usize::MAX) / block;
            let seam = if seam < all { seam } else { 0 };
            (seam.saturating_sub(count / 2).min(all - count), count)
        } else {
            (0, all)
        };
        let first = hot + self.random.index(count - blocks + 1);
        first * block..(first + blocks) * block
    }

    /// Begins a random request, if a tag is free.
    pub fn begin(&mut self) {
        let io_max = self.options.io_max_bytes as usize;
        let kind = u32::try_from(self.random.below(1000)).unwrap_or(0);
        let (flush, erase) = (self.mix.flush, self.mix.erase);
        let (op, range) = if kind < flush {
            (IoOp::Flush, 0..0)
        } else if kind < flush + erase {
            (IoOp::Discard, self.random_range(4 * io_max))
        } else if kind < flush + 2 * erase {
            (IoOp::WriteZeroes, self.random_range(4 * io_max))
        } else if self.random.chance(500) {
            (IoOp::Read, self.random_range(io_max))
        } else {
            (IoOp::Write, self.random_range(io_max))
        };
        let at = self.random.index(self.queues.len());
        let fua = self.random.chance(self.mix.fua);
        self.begin_this(at, op, range, fua);
    }

    /// Begins a request on the queue at index `at`, and returns whether a tag was free.
    ///
    /// # Panics
    /// There is no such queue, or the range is not whole blocks of the volume.
    pub fn begin_this(&mut self, at: usize, op: IoOp, range: Range<usize>, fua: bool) -> bool {
        let queue = self.queues[at];
        let Some(tag) = self.free[at].pop() else { return false };
        let fua = fua && op == IoOp::Write;
        let expect = match op {
            IoOp::Read => {
                self.rig.fill_buffer(queue, tag, &vec![UNREAD; range.len()]);
                Expect::Read(self.oracle.begin_read())
            }
            IoOp::Write => {
                let id = self.oracle.begin_change(&range, false);
                let mut data = vec![0; range.len()];
                Oracle::fill(id, range.start, &mut data);
                self.rig.fill_buffer(queue, tag, &data);
                Expect::Change(id)
            }
            IoOp::Discard | IoOp::WriteZeroes => {
                Expect::Change(self.oracle.begin_change(&range, true))
            }
            IoOp::Flush => Expect::Flush(self.oracle.begin_flush()),
        };
        let request = self.rig.request(queue, op, range.start as u64, range.len() as u64);
        let io = Io { fua, may_unmap: self.random.chance(500), ..request };
        self.rig.submit(queue, tag, io).expect("a free tag");
        self.flights.push(Flight { queue, tag, op, fua, range, expect });
        true
    }

    /// Takes the outcomes and compares them with the oracle.
    ///
    /// # Panics
    /// A result is wrong.
    pub fn reap(&mut self) {
        for outcome in self.rig.take_outcomes() {
            let seed = self.options.seed;
            let is = |f: &Flight| f.queue == outcome.queue && f.tag == outcome.tag;
            let at = self.flights.iter().position(is);
            let at = at.unwrap_or_else(|| panic!("seed {seed}: no request has {outcome:?}"));
            let flight = self.flights.swap_remove(at);
            let queue = self.queues.iter().position(|q| *q == flight.queue);
            self.free[queue.expect("a queue of ours")].push(flight.tag);
            self.ended += 1;
            let Flight { op, fua, range, expect, .. } = flight;
            let ok = outcome.result >= 0;
            if ok {
                let moves = matches!(op, IoOp::Read | IoOp::Write);
                let moved = if moves { range.len() } else { 0 };
                let right = usize::try_from(outcome.result) == Ok(moved);
                assert!(right, "seed {seed}: {op:?} of {range:?} moved {}", outcome.result);
            } else {
                let errno = -outcome.result;
                assert!(self.may_fail, "seed {seed}: {op:?} of {range:?}: errno {errno}");
                self.failures.push(Failure { op, range: range.clone(), errno });
            }
            match expect {
                Expect::Read(begin) if ok => {
                    let data = self.rig.buffer(flight.queue, flight.tag, range.len());
                    if let Err(wrong) = self.oracle.end_read(begin, range.start, &data) {
                        panic!("seed {seed}: a read of {range:?}, request {}: {wrong}", self.ended);
                    }
                }
                Expect::Read(begin) => self.oracle.drop_read(begin),
                Expect::Change(id) => {
                    let ended = self.oracle.end_change(id, ok, fua);
                    assert_eq!(ended, Ok(()), "seed {seed}");
                }
                Expect::Flush(begin) => {
                    let ended = self.oracle.end_flush(begin, ok);
                    assert_eq!(ended, Ok(()), "seed {seed}");
                }
            }
        }
    }

    /// One step, with new requests or in a pause.
    ///
    /// # Panics
    /// A result is wrong.
    pub fn step(&mut self) {
        if self.pause > 0 {
            self.pause -= 1;
        } else {
            for _ in 0..self.random.within(0, self.mix.begins) {
                self.begin();
            }
            if self.random.chance(5) {
                self.pause = self.random.within(0, self.mix.pause);
            }
        }
        self.rig.step();
        self.reap();
    }

    /// Steps until `requests` more requests have ended.
    ///
    /// # Panics
    /// No request ends any more, or a result is wrong.
    pub fn run(&mut self, requests: u64) {
        let until = self.ended + requests;
        let mut idle = 0;
        while self.ended < until {
            let before = self.ended;
            self.step();
            idle = if self.ended > before { 0 } else { idle + 1 };
            assert!(
                idle < PATIENCE,
                "seed {}: stuck with {:?} after {}: {:?}",
                self.options.seed,
                self.flights,
                self.ended,
                self.rig
            );
        }
    }

    /// Waits until no request is outstanding.
    ///
    /// # Panics
    /// A request does not end, or its result is wrong.
    pub fn settle(&mut self) {
        for _ in 0..PATIENCE {
            if self.flights.is_empty() {
                return;
            }
            self.rig.step();
            self.reap();
        }
        panic!("seed {}: {:?} do not end: {:?}", self.options.seed, self.flights, self.rig);
    }

    /// Runs one request alone.
    ///
    /// # Panics
    /// The request does not end, or its result is wrong.
    pub fn io(&mut self, op: IoOp, range: Range<usize>) {
        self.settle();
        let at = self.random.index(self.queues.len());
        assert!(self.begin_this(at, op, range, false), "a free tag");
        self.settle();
    }

    /// Reads every block, over all queues.
    ///
    /// # Panics
    /// A result is wrong.
    pub fn read_all(&mut self) {
        self.settle();
        let (len, longest) = (self.oracle.len(), self.options.io_max_bytes as usize);
        let mut start = 0;
        let mut at = 0;
        while start < len {
            let range = start..(start + longest).min(len);
            if self.begin_this(at % self.queues.len(), IoOp::Read, range.clone(), false) {
                start = range.end;
            } else {
                self.rig.step();
                self.reap();
            }
            at += 1;
        }
        self.settle();
    }

    /// Ends well: all requests end, reads agree with the oracle, and after a FLUSH the store holds
    /// the returned bytes durably. Returns the volume's bytes.
    ///
    /// # Panics
    /// A check fails.
    pub fn calm(&mut self) -> Vec<u8> {
        let seed = self.options.seed;
        self.read_all();
        self.io(IoOp::Flush, 0..0);
        let store = self.rig.store_mut();
        let (now, durable) = (store.bytes(VOLUME), store.durable(VOLUME));
        assert!(now == durable, "seed {seed}: a FLUSH left something volatile in the store");
        let begin = self.oracle.begin_read();
        if let Err(wrong) = self.oracle.end_read(begin, 0, &now) {
            panic!("seed {seed}: the store after a FLUSH: {wrong}");
        }
        self.read_all();
        self.check_lending();
        now
    }

    /// Checks that the store's memory was used as the contract demands.
    ///
    /// # Panics
    /// The contract was broken.
    pub fn check_lending(&mut self) {
        let breaches = self.rig.store_mut().breaches();
        assert!(breaches.is_empty(), "seed {}: {breaches:?}", self.options.seed);
    }

    /// Ends the target in good order, as for an upgrade, and starts another one with the same disk.
    ///
    /// # Panics
    /// The target does not end, or an acknowledged write is not durable then.
    pub fn upgrade(&mut self) {
        self.settle();
        let seed = self.options.seed;
        let begin = self.oracle.begin_flush();
        self.rig.mail(ToGroup::Stop);
        let mut steps = 0;
        while self.rig.stopped().is_none() {
            steps += 1;
            assert!(steps < PATIENCE, "seed {seed}: the target does not stop: {:?}", self.rig);
            self.rig.step();
        }
        assert_eq!(self.rig.stopped(), Some(true), "seed {seed}: a stop without faults");
        assert_eq!(self.oracle.end_flush(begin, true), Ok(()), "seed {seed}");
        self.check_lending();
        self.queues.iter().for_each(|queue| self.rig.drop_queue(*queue, false));
        let disk = self.rig.store_mut().another();
        let (now, durable) = (disk.bytes(VOLUME), disk.durable(VOLUME));
        assert!(now == durable, "seed {seed}: a stop left something volatile in the store");
        self.rig.kill_target(false);
        let stores = CrashStore::shared(|region| disk.over(region));
        self.rig.start_target(stores).expect("a target");
        let options = &self.options;
        self.queues = mount(&mut self.rig, options);
        self.free = tags(options);
    }

    /// Ends the target by a crash. Checks the remaining contents of the volume, and returns them
    /// with the oracle.
    ///
    /// # Panics
    /// More is lost than the crash allows.
    #[must_use]
    pub fn crash(mut self, crash: Crash) -> (Oracle, Vec<u8>, CrashCount) {
        self.check_lending();
        let (seed, chance) = (self.options.seed, self.random.bits());
        let store = self.rig.store_mut();
        let image = match crash {
            Crash::Machine => store.crash(VOLUME, chance),
            Crash::Program => store.kill(VOLUME, chance),
        };
        let cached = self.options.cache == CacheMode::WriteBack;
        let survives = if cached || crash == Crash::Machine {
            Survives::Durable
        } else {
            Survives::Acknowledged
        };
        match self.oracle.crash(image.clone(), survives) {
            Ok(count) => (self.oracle, image, count),
            Err(wrong) => panic!("seed {seed}: {crash:?} crash after {}: {wrong}", self.ended),
        }
    }
}
