//! The cost of one I/O by the ends' own counters: messages, completions, doorbells, copies,
//! allocations.
//!
//! Nothing here is timed. The numbers are the ends' own counters over a closed loop of I/Os through
//! a [`Rig`], so they are exact, the same on every host, and hold for every provider with the same
//! abilities.

use anyhow::{Context, Result, ensure};
use rblk_fabric::Transport;
use rblk_operate::mount::queue_counts::QueueCounts;
use rblk_operate::target::group_counts::StatsSnapshot;
use rblk_protocol::{AccessMode, Features, Tag};
use rblk_rig::allocations;
use rblk_rig::inprocess::{Allocations, QueueId, QueueOptions, Rig, RigOptions, VolumeSpec};
use rblk_rig::ram_store::RamStore;
use rblk_target::volume::ids::VolumeIndex;
use serde::{Deserialize, Serialize};

use super::{Case, Op, Report, Volume};

/// Steps one I/O may take.
const STEPS_PER_IO: u64 = 10_000;
/// Distance of the ranges of I/Os that are outstanding together: those of random I/O on a large
/// volume are seldom neighbours, which matters to locks on ranges.
const SPREAD_BYTES: u64 = 1 << 20;
/// Smallest arena.
const ARENA_MIN: usize = 64 << 20;
/// I/Os before those that are measured, at least: every list has grown to its length, and the cache
/// is warm.
const WARM_UP: u64 = 1024;

/// The cases to measure, and the setting.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Reads, writes, or both.
    pub ops: Vec<Op>,
    /// Bytes per I/O.
    pub sizes: Vec<u32>,
    /// I/Os outstanding.
    pub depths: Vec<u16>,
    /// Depth of the queue; deeper where more are outstanding.
    pub queue_depth: u16,
    /// I/Os of each case.
    pub ios: u64,
    /// Kinds of volumes.
    pub volumes: Vec<Volume>,
    /// Most write data inside a command.
    pub in_capsule_bytes: u32,
    /// Whether READs may be answered by WRITE_WITH_IMM.
    pub immediates: bool,
    /// Whether a message may hold several capsules.
    pub lists: bool,
    /// Whether several of them may have data.
    pub data_lists: bool,
    /// The data of a message comes first, and lands in slots of the cache.
    pub data_first: bool,
    /// Whether capsules and data have digests.
    pub digests: bool,
    /// READs the target may have outstanding.
    pub reads_out: u8,
    /// Decides how the network behaves.
    pub seed: u64,
}

/// One end's cost of one I/O, on average.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct EndCost {
    /// Work requests posted on the send queue: SENDs, RDMA WRITEs and READs.
    pub messages: f64,
    /// Send work requests that asked for a completion.
    pub signaled: f64,
    /// Completions reaped.
    pub completions: f64,
    /// Posts of a list of send work requests.
    pub send_doorbells: f64,
    /// Posts of a list of RECVs.
    pub recv_doorbells: f64,
    /// Bytes the CPU copied between buffers.
    pub copied_bytes: f64,
    /// Allocations, the fabric's included; absent where they are not counted.
    pub allocations: Option<f64>,
}

/// The cost of one case.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cost {
    /// Which I/O.
    #[serde(flatten)]
    pub case: Case,
    /// I/Os measured.
    pub ios: u64,
    /// Commands that named a key of the initiator, per I/O.
    pub keyed: f64,
    /// The initiator.
    pub initiator: EndCost,
    /// The target.
    pub target: EndCost,
}

impl Plan {
    /// The arguments that make this program measure this plan by its own counters.
    pub(super) fn arguments(&self) -> Result<[String; 3]> {
        Ok(["cost".to_owned(), "--plan".to_owned(), serde_json::to_string(self)?])
    }

    fn features(&self) -> Features {
        let if_wanted = |wanted, feature| if wanted { feature } else { Features::default() };
        if_wanted(self.immediates, Features::WRITE_WITH_IMM)
            .or(if_wanted(self.lists, Features::CAPSULE_LISTS))
            .or(if_wanted(self.data_lists, Features::DATA_LISTS))
            .or(if_wanted(self.data_first, Features::DATA_FIRST))
            .or(if_wanted(self.digests, Features::DIGEST))
    }

    /// Its cases, in the order in which they are measured.
    pub fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for volume in self.volumes.iter().copied() {
            for op in self.ops.iter().copied() {
                for bytes in self.sizes.iter().copied() {
                    for depth in self.depths.iter().copied() {
                        cases.push(Case { op, bytes, depth, volume });
                    }
                }
            }
        }
        cases
    }
}

/// Measures every case of a plan.
pub fn measure(plan: &Plan) -> Result<Report> {
    let mut costs = Vec::new();
    for case in plan.cases() {
        costs.push(measure_one(plan, case).with_context(|| case.to_string())?);
    }
    Ok(Report {
        transport: Transport::SoftMemory.to_string(),
        queue_depth: plan.queue_depth,
        immediates: plan.immediates,
        in_capsule_bytes: plan.in_capsule_bytes,
        costs,
        ..Report::default()
    })
}

fn measure_one(plan: &Plan, case: Case) -> Result<Cost> {
    let (mut rig, queue) = warm(plan, case)?;
    let before = Counts::of(&rig, queue);
    measured_loop(&mut rig, queue, case, plan.ios)?;
    let after = Counts::of(&rig, queue);
    Ok(Cost {
        case,
        ios: plan.ios,
        keyed: per_io(plan.ios, after.initiator.keyed_commands, before.initiator.keyed_commands),
        initiator: initiator_cost(plan.ios, &before, &after),
        target: target_cost(plan.ios, &before, &after),
    })
}

/// Both ends in their steady state.
pub(super) fn warm(plan: &Plan, case: Case) -> Result<(Rig<RamStore>, QueueId)> {
    let Case { bytes, depth, .. } = case;
    ensure!(plan.ios > 0, "no I/O to measure");
    ensure!(bytes > 0 && bytes.is_multiple_of(512), "the size is not whole blocks of 512 bytes");
    let io_max_bytes = bytes.next_power_of_two().max(rblk_protocol::limits::IO_MIN_BYTES);
    let volume_bytes = SPREAD_BYTES.max(bytes.into()) * u64::from(depth);
    let (kind, cache) = case.volume.kind();
    let options = RigOptions {
        seed: plan.seed,
        // All of the volume stays in the cache, and everything may be in flight at once, as in the
        // arena of a real target: one session keeps up to a third.
        arena_bytes: (io_max_bytes as usize * (usize::from(depth) + 20) * 12).max(ARENA_MIN),
        io_max_bytes,
        volumes: vec![VolumeSpec { cache, ..VolumeSpec::new(kind, volume_bytes) }],
        ..RigOptions::default()
    };
    let volume = VolumeIndex(0);
    let len = usize::try_from(volume_bytes)?;
    let mut rig = Rig::new(&options, |arena| {
        let mut store = RamStore::new(arena, plan.seed);
        store.set_volume(volume, vec![0; len]);
        store
    })?;
    let session = rig.begin_session();
    rig.open(session, volume, AccessMode::Exclusive);
    let queue = rig.add_queue(
        session,
        volume,
        QueueOptions {
            depth: depth.max(plan.queue_depth),
            io_max_bytes,
            in_capsule_bytes: plan.in_capsule_bytes,
            features: plan.features(),
            reads_out: plan.reads_out,
            lanes: 1,
        },
    )?;
    rig.settle(STEPS_PER_IO)?;
    // The steady state is measured. All blocks are read once, so that the cache has them.
    run(&mut rig, queue, Case { op: Op::Read, ..case }, u64::from(depth))?;
    run(&mut rig, queue, case, WARM_UP.max(2 * u64::from(depth.max(plan.queue_depth))))?;
    Ok((rig, queue))
}

struct Counts {
    initiator: QueueCounts,
    target: StatsSnapshot,
    allocations: Allocations,
}

impl Counts {
    fn of(rig: &Rig<RamStore>, queue: QueueId) -> Self {
        Self {
            initiator: rig.queue_counts(queue),
            target: rig.target_counts(),
            allocations: rig.allocations(),
        }
    }
}

/// The name of the measured function in profiles.
pub(super) const MEASURED: &str = concat!(module_path!(), "::measured_loop");

#[inline(never)]
fn measured_loop(rig: &mut Rig<RamStore>, queue: QueueId, case: Case, ios: u64) -> Result<()> {
    // Not the last call: profiles see where this function ends.
    std::hint::black_box(run(rig, queue, case, ios))
}

/// A closed loop: as many I/Os as the depth are outstanding until the last have begun.
pub(super) fn run(rig: &mut Rig<RamStore>, queue: QueueId, case: Case, ios: u64) -> Result<()> {
    let Case { op, bytes, depth, .. } = case;
    let io = |rig: &Rig<RamStore>, tag: u16| {
        let offset = u64::from(tag) * SPREAD_BYTES.max(bytes.into());
        rig.request(queue, op.io(), offset, bytes.into())
    };
    let mut begun = 0;
    for tag in 0..depth {
        if begun < ios {
            let request = io(rig, tag);
            rig.submit(queue, Tag(tag), request)?;
            begun += 1;
        }
    }
    let mut ended = 0;
    let mut idle = 0;
    while ended < ios {
        rig.step();
        let outcomes = rig.take_outcomes();
        idle = if outcomes.is_empty() { idle + 1 } else { 0 };
        ensure!(idle < STEPS_PER_IO, "no I/O ended in {idle} steps");
        for outcome in outcomes {
            ensure!(outcome.result >= 0, "an I/O failed with errno {}", -outcome.result);
            ended += 1;
            if begun < ios {
                let request = io(rig, outcome.tag.0);
                rig.submit(queue, outcome.tag, request)?;
                begun += 1;
            }
        }
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
fn per_io(ios: u64, after: u64, before: u64) -> f64 {
    (after - before) as f64 / ios as f64
}

fn allocations_per_io(ios: u64, after: u64, before: u64) -> Option<f64> {
    allocations::are_counted().then(|| per_io(ios, after, before))
}

fn initiator_cost(ios: u64, before: &Counts, after: &Counts) -> EndCost {
    let allocated = (after.allocations.initiator, before.allocations.initiator);
    let (before, after) = (&before.initiator, &after.initiator);
    EndCost {
        messages: per_io(ios, after.sends, before.sends),
        signaled: per_io(ios, after.signaled, before.signaled),
        completions: per_io(ios, after.completions, before.completions),
        send_doorbells: per_io(ios, after.send_doorbells, before.send_doorbells),
        recv_doorbells: per_io(ios, after.recv_doorbells, before.recv_doorbells),
        copied_bytes: per_io(ios, after.copied_bytes, before.copied_bytes),
        allocations: allocations_per_io(ios, allocated.0, allocated.1),
    }
}

fn target_cost(ios: u64, before: &Counts, after: &Counts) -> EndCost {
    let allocated = (after.allocations.target, before.allocations.target);
    let (before, after) = (&before.target, &after.target);
    let messages =
        |s: &StatsSnapshot| s.sends + s.rdma_writes + s.rdma_writes_with_imm + s.rdma_reads;
    EndCost {
        messages: per_io(ios, messages(after), messages(before)),
        signaled: per_io(ios, after.signaled, before.signaled),
        completions: per_io(ios, after.completions, before.completions),
        send_doorbells: per_io(ios, after.send_doorbells, before.send_doorbells),
        recv_doorbells: per_io(ios, after.recv_doorbells, before.recv_doorbells),
        copied_bytes: per_io(ios, after.copied_bytes, before.copied_bytes),
        allocations: allocations_per_io(ios, allocated.0, allocated.1),
    }
}
