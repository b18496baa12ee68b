//! [`Plan`]: the parts of a simulation and its faults, from a seed.

use std::time::Duration;

use rblk_config::OnLoss;
use rblk_fabric::soft::network::Conditions;
use rblk_initiator::engine::ways::choice::ChoicePolicy;
use rblk_protocol::Features;
use rblk_rig::inprocess::QueueOptions;
use rblk_rig::ram_store::StoreConditions;
use rblk_rig::seed::Random;
use rblk_target::volume::CacheMode;

use crate::storm::{Mix, data_first, digests, landing_bytes, lanes, lists, with_landing};

/// How a link fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Break {
    /// Both ends see the break.
    Cut,
    /// Messages in flight and later ones are lost.
    Silence,
    /// Messages arrive only after the link heals, and then all of them do.
    Stall,
}

/// How a process ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Death {
    /// The process is killed; its machine closes its connections.
    Program,
    /// Its machine loses its power.
    Machine,
}

/// A fault. Times are in steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A host's link to an address of the target.
    Link {
        /// Which host.
        host: usize,
        /// Which address; all of them if there is none.
        address: Option<usize>,
        /// How.
        how: Break,
        /// When it heals.
        steps: u64,
    },
    /// A break of one connection of a serving host, after a number of bytes.
    Wire {
        /// Which host.
        host: usize,
        /// Which of its queues.
        queue: usize,
        /// The initiator's bytes count.
        near: bool,
        /// How many.
        bytes: usize,
    },
    /// The target.
    Target {
        /// How it ends.
        death: Death,
        /// When it is back.
        steps: u64,
    },
    /// The target drains, and comes back later.
    Drain {
        /// When it is back.
        steps: u64,
    },
    /// A host's server process; the next one recovers the device.
    Server {
        /// Which host.
        host: usize,
        /// When the next one begins.
        steps: u64,
    },
    /// A host loses its power, and its mount with it.
    Host {
        /// Which host.
        host: usize,
        /// When it mounts again, if the volume is free.
        steps: u64,
    },
    /// A host's server is stopped, and continues later.
    Freeze {
        /// Which host.
        host: usize,
        /// When it continues.
        steps: u64,
    },
    /// Another host mounts the volume.
    Mount {
        /// Which host.
        host: usize,
        /// The mount fences the present holder.
        take_over: bool,
    },
    /// The store is as slow as this.
    Slow {
        /// Until when.
        steps: u64,
        /// No op completes meanwhile. Otherwise every op takes longer.
        stalled: bool,
    },
    /// Holds the ops in flight at the store, once there are any. Later ops overtake them.
    Hold {
        /// Until when.
        steps: u64,
    },
    /// Ops of the store fail.
    Errors {
        /// Until when.
        steps: u64,
        /// How many of a thousand.
        per_mille: u32,
    },
    /// The kernels of both ends delay the destruction of QPs.
    Jam {
        /// Until when.
        steps: u64,
    },
}

/// A moment of a simulation at which a fault tests more than elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Moment {
    /// LOGIN was sent.
    Login,
    /// LOGIN was answered by the target; the answer is under way.
    LoggedIn,
    /// OPEN was sent.
    Open,
    /// The record of a change of holder is to be made durable.
    Persist,
    /// OPEN was answered by the target; the answer is under way.
    Opened,
    /// Writing again has begun.
    Settle,
    /// Part of it has been done.
    Rewrite,
    /// A queue has its connection, others do not.
    Queue,
    /// The queues serve.
    Arrived,
    /// The store holds ops.
    Held,
    /// DROP was sent.
    Drop,
    /// DROP was answered by the target; the answer is under way.
    Dropped,
    /// A connection of the target is gone, with everything that was done for it.
    Buried,
}

/// When the next fault comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// After this number of steps.
    Steps(u64),
    /// At the next such moment, or after many steps without one.
    At(Moment),
    /// So many steps after that moment.
    After(Moment, u64),
}

/// A simulation.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// Decides everything else.
    pub seed: u64,
    /// Hosts; the first one mounts at the beginning.
    pub hosts: usize,
    /// Addresses of the target.
    pub addresses: usize,
    /// A mount uses all of them at once.
    pub ways: bool,
    /// How it spreads requests over them.
    pub policy: ChoicePolicy,
    /// I/O queues of a mount.
    pub queues: usize,
    /// Commands outstanding on each.
    pub depth: u16,
    /// Most data of a request.
    pub io_max_bytes: u32,
    /// Most in-capsule data of a command.
    pub in_capsule_bytes: u32,
    /// Optional verbs, and lists of capsules.
    pub features: Features,
    /// RDMA READs outstanding on a connection.
    pub reads_out: u8,
    /// QPs of a queue.
    pub lanes: u16,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Bytes of the volume.
    pub volume_bytes: usize,
    /// Poll groups of the target.
    pub groups: usize,
    /// Turns that they miss.
    pub skipped_turns_per_mille: u32,
    /// Memory of the target.
    pub arena_bytes: usize,
    /// How the volume is cached.
    pub cache: CacheMode,
    /// Most dirty bytes of write-back.
    pub dirty_max_bytes: usize,
    /// How long write-back may keep them.
    pub write_back_delay: Duration,
    /// Unflushed bytes that a mount retains, for each queue.
    pub retain_bytes: Option<usize>,
    /// Which flushes of a mount fail after a loss.
    pub on_loss: OnLoss,
    /// The network, in steps.
    pub network: Conditions,
    /// Steps until the QP of a connection that ended is destroyed, at most.
    pub destroy_steps: u64,
    /// Another host reads a volume of its own.
    pub neighbour: bool,
    /// The store, in turns.
    pub store: StoreConditions,
    /// Silence that counts as a loss.
    pub detect: Duration,
    /// How long a lost session keeps the volume.
    pub lease: Duration,
    /// When requests fail for want of a target.
    pub fail_after: Option<Duration>,
    /// Requests, at least.
    pub requests: u64,
    /// The mix of requests.
    pub mix: Mix,
    /// Requests outstanding at a time, at most.
    pub outstanding: usize,
    /// The faults, one after the other.
    pub faults: Vec<(When, Fault)>,
}

impl Plan {
    /// The options of an I/O queue.
    #[must_use]
    pub fn queue_options(&self) -> QueueOptions {
        QueueOptions {
            depth: self.depth,
            io_max_bytes: self.io_max_bytes,
            in_capsule_bytes: self.in_capsule_bytes,
            features: self.features,
            reads_out: self.reads_out,
            lanes: self.lanes,
        }
    }

    /// The plan of a seed.
    #[must_use]
    pub fn random(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x51_3a7e);
        let mut plan = Self::base(seed, &mut random);
        for _ in 0..random.within(3, 9) {
            let when = plan.when(&mut random);
            let fault = plan.fault(&mut random);
            plan.faults.push((when, fault));
            plan.break_a_way();
            // A held op tests most when its connection dies, and its sender comes back and
            // continues.
            if let Fault::Hold { .. } = fault {
                let (when, then) = plan.orphan(&mut random);
                plan.faults.push((when, then));
            }
            // The host that lost the volume asks for it first, at a target that has just answered
            // the new holder's OPEN.
            if let Fault::Mount { take_over: true, .. } = fault
                && random.chance(300)
            {
                let death = [Death::Program, Death::Machine][random.index(2)];
                let steps = random.below(200);
                plan.faults.push((When::At(Moment::Opened), Fault::Target { death, steps }));
            }
            // A take-over tests most when the holder cannot learn of it, or is in the middle of an
            // operation.
            if let Fault::Freeze { host, .. } = fault
                && plan.hosts > 1
                && random.chance(700)
            {
                let to = (host + 1) % plan.hosts;
                let take_over = random.chance(700);
                plan.faults
                    .push((When::Steps(random.below(40)), Fault::Mount { host: to, take_over }));
            }
        }
        if let Some(fault) = failing_store(seed) {
            plan.faults.insert(0, fault);
        }
        plan
    }

    /// With ways, a way breaks before some faults: then the mount goes on by the others, and the
    /// fault meets a DROP or a join.
    fn break_a_way(&mut self) {
        let mut random = Random::new(self.seed ^ 0x7761_7973 ^ self.faults.len() as u64);
        let Some((when, fault)) = self.faults.pop() else { return };
        if self.ways && random.chance(600) {
            let address = Some(random.index(self.addresses));
            let how = [Break::Cut, Break::Silence, Break::Stall][random.index(3)];
            let (host, steps) = (random.index(self.hosts), self.steps(&mut random));
            let held = random.chance(400).then_some(When::At(Moment::Held));
            if held.is_some() {
                let hold = Fault::Hold { steps: random.within(50, 2000) };
                self.faults.push((when, hold));
            }
            self.faults.push((held.unwrap_or(when), Fault::Link { host, address, how, steps }));
            let moments = [Moment::Drop, Moment::Dropped, Moment::Login, Moment::LoggedIn];
            let at = When::At(moments[random.index(moments.len())]);
            self.faults.push((if random.chance(500) { at } else { when }, fault));
        } else {
            self.faults.push((when, fault));
        }
    }

    fn base(seed: u64, random: &mut Random) -> Self {
        let cache =
            [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack, CacheMode::WriteBack]
                [random.index(4)];
        let block_bytes: u32 = [512, 512, 4096][random.index(3)];
        let io_max_bytes: u32 = [8 << 10, 16 << 10][random.index(2)];
        let volume_bytes = [16 << 10, 32 << 10, 128 << 10][random.index(3)];
        let groups = [1, 1, 2, 3][random.index(4)];
        let more: usize = [0, volume_bytes / 2, 2 * volume_bytes][random.index(3)];
        let arena_bytes =
            groups * (4 * io_max_bytes as usize + more.next_multiple_of(io_max_bytes as usize));
        let arena_bytes = arena_bytes + groups * landing_bytes(seed);
        let delay_min = random.below(3);
        let detect = Duration::from_millis([100, 200, 400, 1000][random.index(4)]);
        Self {
            seed,
            hosts: [1, 2, 2][random.index(3)],
            addresses: addresses(seed, [1, 2, 2][random.index(3)]),
            ways: ways(seed).is_some(),
            policy: ways(seed).unwrap_or_default(),
            queues: 1 + random.index(2),
            depth: [1, 2, 4, 8][random.index(4)],
            io_max_bytes,
            in_capsule_bytes: with_landing(seed, [0, 512, 4096][random.index(3)]),
            features: [Features::WRITE_WITH_IMM, Features::default()][random.index(2)]
                .or(lists(seed))
                .or(data_first(seed))
                .or(digests(seed)),
            reads_out: [1, 4, 16][random.index(3)],
            lanes: lanes(seed),
            block_bytes,
            volume_bytes,
            groups,
            skipped_turns_per_mille: if groups == 1 { 0 } else { [0, 300][random.index(2)] },
            arena_bytes,
            cache,
            dirty_max_bytes: [4 << 10, 16 << 10, arena_bytes / 2][random.index(3)],
            write_back_delay: Duration::from_millis([0, 2, 20, 500][random.index(4)]),
            retain_bytes: [None, Some(8 << 10), Some(64 << 10)][random.index(3)],
            on_loss: on_loss(seed),
            network: Conditions {
                fragment: random.chance(200),
                delay_min,
                delay_max: delay_min + random.below(5),
                ..Conditions::default()
            },
            destroy_steps: [0, 30, 500, 3000][Random::new(seed ^ 0x64_6573).index(4)],
            neighbour: Random::new(seed ^ 0x6e_6569).chance(500),
            store: StoreConditions {
                delay_min: random.below(3),
                delay_max: [2, 8, 30][random.index(3)],
                capacity: [4, 4096][random.index(2)],
                ..StoreConditions::default()
            },
            detect,
            lease: Duration::from_millis([300, 1000, 3000][random.index(3)]),
            fail_after: random.chance(150).then(|| Duration::from_millis(random.within(100, 4000))),
            requests: random.within(100, 260),
            mix: Mix {
                flush: [10, 40, 120][random.index(3)],
                erase: [0, 30][random.index(2)],
                fua: [0, 100, 400][random.index(3)],
                begins: [1, 2, 4][random.index(3)],
                pause: [0, 20, 100][random.index(3)],
            },
            outstanding: [2, 6, 16][random.index(3)],
            faults: Vec::new(),
        }
    }

    fn when(&self, random: &mut Random) -> When {
        if random.chance(400) {
            let moments = [
                Moment::Login,
                Moment::LoggedIn,
                Moment::Open,
                Moment::Persist,
                Moment::Opened,
                Moment::Settle,
                Moment::Rewrite,
                Moment::Queue,
                Moment::Arrived,
            ];
            return When::At(moments[random.index(moments.len())]);
        }
        When::Steps(match random.index(4) {
            0 => random.below(10),
            1 => random.below(100),
            2 => random.below(400),
            _ => random.below(1500),
        })
    }

    /// A fault that ends the connections of a host. The host continues at once, or another host
    /// does.
    fn orphan(&self, random: &mut Random) -> (When, Fault) {
        let host = random.index(self.hosts);
        let steps = random.below(60);
        let fault = match random.index(4) {
            0 => Fault::Wire { host, queue: random.index(self.queues), near: true, bytes: 0 },
            1 => Fault::Link { host, address: None, how: Break::Cut, steps },
            2 => Fault::Server { host, steps },
            _ => Fault::Mount { host, take_over: true },
        };
        (When::At(Moment::Held), fault)
    }

    /// A duration: shorter or longer than the time limits that detect a fault.
    fn steps(&self, random: &mut Random) -> u64 {
        let detect = u64::try_from(self.detect.as_millis()).unwrap_or(0);
        let lease = u64::try_from(self.lease.as_millis()).unwrap_or(0);
        match random.index(5) {
            0 => random.below(30),
            1 => random.below(detect),
            2 => detect + random.below(detect),
            3 => lease + random.below(600),
            _ => random.below(3000),
        }
    }

    fn fault(&self, random: &mut Random) -> Fault {
        let host = random.index(self.hosts);
        let steps = self.steps(random);
        let take_over = random.chance(600);
        let detect = u64::try_from(self.detect.as_millis()).unwrap_or(0);
        match random.index(22) {
            0 | 1 => Fault::Link {
                host,
                address: random.chance(500).then(|| random.index(self.addresses)),
                how: [Break::Cut, Break::Silence, Break::Stall][random.index(3)],
                steps,
            },
            // Messages under way arrive after the host is back by another address.
            2 | 3 => Fault::Link {
                host,
                address: Some(random.index(self.addresses)),
                how: Break::Stall,
                steps: detect + random.below(detect + 200),
            },
            4 | 5 => Fault::Wire {
                host,
                queue: random.index(self.queues),
                near: random.chance(500),
                bytes: random.index(20_000),
            },
            6..=8 => {
                Fault::Target { death: [Death::Program, Death::Machine][random.index(2)], steps }
            }
            9 => Fault::Drain { steps: random.below(500) },
            10..=12 => Fault::Server { host, steps },
            13 => Fault::Host { host, steps },
            14 => Fault::Freeze { host, steps },
            15 | 16 => Fault::Mount { host, take_over },
            17 => Fault::Slow { steps: random.below(400), stalled: random.chance(500) },
            18 | 19 => Fault::Hold { steps: random.within(50, 2000) },
            _ => match random.index(3) {
                0 => Fault::Errors { steps: random.below(200), per_mille: 100 },
                _ => Fault::Jam { steps: random.below(300) },
            },
        }
    }
}

/// How requests are spread over the ways of a mount, in one plan of three. Depends on the seed
/// alone.
fn ways(seed: u64) -> Option<ChoicePolicy> {
    let mut random = Random::new(seed ^ 0x77_6179_7321);
    let policy = [ChoicePolicy::Least, ChoicePolicy::RoundRobin][random.index(2)];
    random.chance(333).then_some(policy)
}

/// The addresses of the target: with ways two to four, else as many as that.
fn addresses(seed: u64, without: usize) -> usize {
    let with = 2 + Random::new(seed ^ 0x6164_6472).index(3);
    if ways(seed).is_some() { with } else { without }
}

/// Depends on the seed alone, not on other draws, so the rest of a plan stays as it was.
fn on_loss(seed: u64) -> OnLoss {
    let lasts = Random::new(seed ^ 0x6f6e_5f6c_6f73).chance(500);
    if lasts { OnLoss::UntilRemount } else { OnLoss::Once }
}

/// In one plan of ten the store fails many ops, also FLUSHes, and then works again. Depends on the
/// seed alone, too.
fn failing_store(seed: u64) -> Option<(When, Fault)> {
    let mut random = Random::new(seed ^ 0x66_6169_6c73);
    random.chance(100).then(|| {
        let when = When::Steps(random.below(200));
        (when, Fault::Errors { steps: random.within(20, 400), per_mille: 400 })
    })
}
