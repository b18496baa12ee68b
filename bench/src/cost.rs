//! What one I/O costs on the wire and in the CPU: messages, completions, doorbells, copies.
//!
//! Nothing here is timed. The numbers are the ends' own counters over a closed loop of I/Os through a
//! [`Rig`], so they are exact, the same on every host, and hold for every provider with the same abilities.

use anyhow::{Context, Result, ensure};
use rblk_fabric::Transport;
use rblk_initiator::engine::QueueCounts;
use rblk_initiator::io::IoOp;
use rblk_protocol::{AccessMode, Features, Tag};
use rblk_target::stats::StatsSnapshot;
use rblk_target::store::VolumeIndex;
use serde::Serialize;

use crate::inprocess::{QueueId, QueueOptions, Rig, RigOptions, VolumeKind, VolumeSpec};
use crate::ram_store::RamStore;

/// Steps one I/O may take.
const STEPS_PER_IO: u64 = 10_000;

/// What to measure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Reads, writes, or both.
    pub ops: Vec<IoOp>,
    /// Bytes per I/O.
    pub sizes: Vec<u32>,
    /// I/Os outstanding.
    pub depths: Vec<u16>,
    /// Depth of the queue; deeper where more are outstanding.
    pub queue_depth: u16,
    /// I/Os of each case.
    pub ios: u64,
    /// What the volume is.
    pub volume: VolumeKind,
    /// Most write data inside a command.
    pub in_capsule_bytes: u32,
    /// Whether READs may be answered by WRITE_WITH_IMM.
    pub immediates: bool,
    /// READs the target may have outstanding.
    pub reads_out: u8,
    /// Decides how the network behaves.
    pub seed: u64,
}

/// One end's cost of one I/O, on average.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
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
}

/// The cost of one case.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Cost {
    /// READ or WRITE.
    #[serde(serialize_with = "as_word")]
    pub op: IoOp,
    /// Bytes per I/O.
    pub bytes: u32,
    /// I/Os outstanding.
    pub depth: u16,
    /// I/Os measured.
    pub ios: u64,
    /// Commands that named a key of the initiator, per I/O.
    pub keyed: f64,
    /// The initiator.
    pub initiator: EndCost,
    /// The target.
    pub target: EndCost,
}

/// The word for an operation.
#[must_use]
pub fn word(op: IoOp) -> &'static str {
    match op {
        IoOp::Read => "read",
        IoOp::Write => "write",
        IoOp::Flush => "flush",
        IoOp::Discard => "discard",
        IoOp::WriteZeroes => "write-zeroes",
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
fn as_word<S: serde::Serializer>(op: &IoOp, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(word(*op))
}

/// Everything that was measured, for programs.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// What carried the messages.
    pub transport: String,
    /// Depth of the queue.
    pub queue_depth: u16,
    /// Whether READs were answered by WRITE_WITH_IMM.
    pub immediates: bool,
    /// Most write data inside a command.
    pub in_capsule_bytes: u32,
    /// The cases.
    pub costs: Vec<Cost>,
}

/// Measures every case of a plan.
///
/// # Errors
/// The sizes do not fit each other, or the I/O does not end.
pub fn measure(plan: &Plan) -> Result<Report> {
    let mut costs = Vec::new();
    for op in &plan.ops {
        for bytes in &plan.sizes {
            for depth in &plan.depths {
                let cost = measure_one(plan, *op, *bytes, *depth)
                    .with_context(|| format!("{} of {bytes} bytes at depth {depth}", word(*op)))?;
                costs.push(cost);
            }
        }
    }
    Ok(Report {
        transport: Transport::SoftMemory.to_string(),
        queue_depth: plan.queue_depth,
        immediates: plan.immediates,
        in_capsule_bytes: plan.in_capsule_bytes,
        costs,
    })
}

fn measure_one(plan: &Plan, op: IoOp, bytes: u32, depth: u16) -> Result<Cost> {
    ensure!(plan.ios > 0, "no I/O to measure");
    ensure!(bytes > 0 && bytes.is_multiple_of(512), "the size is not whole blocks of 512 bytes");
    let io_max_bytes = bytes.next_power_of_two().max(rblk_protocol::limits::IO_MIN_BYTES);
    let volume_bytes = u64::from(bytes) * u64::from(depth);
    let options = RigOptions {
        seed: plan.seed,
        arena_bytes: io_max_bytes as usize * (usize::from(depth) + 1) * 2,
        io_max_bytes,
        volumes: vec![VolumeSpec::new(plan.volume, volume_bytes)],
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
            features: if plan.immediates { Features::WRITE_WITH_IMM } else { Features::default() },
            reads_out: plan.reads_out,
        },
    )?;
    rig.settle(STEPS_PER_IO)?;
    // Not from the very beginning: what is measured is the steady state.
    run(&mut rig, queue, op, bytes, depth, u64::from(depth.max(plan.queue_depth)))?;
    let before = (rig.queue_counts(queue), rig.target_counts());
    run(&mut rig, queue, op, bytes, depth, plan.ios)?;
    let after = (rig.queue_counts(queue), rig.target_counts());
    Ok(Cost {
        op,
        bytes,
        depth,
        ios: plan.ios,
        keyed: per_io(plan.ios, after.0.keyed_commands, before.0.keyed_commands),
        initiator: initiator_cost(plan.ios, &before.0, &after.0),
        target: target_cost(plan.ios, &before.1, &after.1),
    })
}

/// A closed loop: as many I/Os as the depth are outstanding until the last have begun.
fn run(
    rig: &mut Rig<RamStore>,
    queue: QueueId,
    op: IoOp,
    bytes: u32,
    depth: u16,
    ios: u64,
) -> Result<()> {
    let io = |rig: &Rig<RamStore>, tag: u16| {
        rig.request(queue, op, u64::from(tag) * u64::from(bytes), bytes.into())
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

fn initiator_cost(ios: u64, before: &QueueCounts, after: &QueueCounts) -> EndCost {
    EndCost {
        messages: per_io(ios, after.sends, before.sends),
        signaled: per_io(ios, after.signaled, before.signaled),
        completions: per_io(ios, after.completions, before.completions),
        send_doorbells: per_io(ios, after.send_doorbells, before.send_doorbells),
        recv_doorbells: per_io(ios, after.recv_doorbells, before.recv_doorbells),
        copied_bytes: per_io(ios, after.copied_bytes, before.copied_bytes),
    }
}

fn target_cost(ios: u64, before: &StatsSnapshot, after: &StatsSnapshot) -> EndCost {
    let messages =
        |s: &StatsSnapshot| s.sends + s.rdma_writes + s.rdma_writes_with_imm + s.rdma_reads;
    EndCost {
        messages: per_io(ios, messages(after), messages(before)),
        signaled: per_io(ios, after.signaled, before.signaled),
        completions: per_io(ios, after.completions, before.completions),
        send_doorbells: per_io(ios, after.send_doorbells, before.send_doorbells),
        recv_doorbells: per_io(ios, after.recv_doorbells, before.recv_doorbells),
        copied_bytes: per_io(ios, after.copied_bytes, before.copied_bytes),
    }
}

/// The report as a table for people.
#[must_use]
pub fn table(report: &Report) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    let immediates = if report.immediates { "with" } else { "without" };
    let _ = writeln!(
        text,
        "per I/O over {}, {immediates} immediates, {} bytes in capsule, queue depth {} (I: initiator, T: target)",
        report.transport, report.in_capsule_bytes, report.queue_depth
    );
    let _ = writeln!(
        text,
        "{:<6}{:>8}{:>4}{:>7}  {:>13}  {:>13}  {:>13}  {:>13}  {:>13}  {:>15}",
        "",
        "",
        "",
        "",
        "messages",
        "signaled",
        "completions",
        "send bells",
        "recv bells",
        "copied bytes"
    );
    let _ = write!(text, "{:<6}{:>8}{:>4}{:>7}", "op", "bytes", "qd", "keyed");
    for width in [6, 6, 6, 6, 6, 7] {
        let _ = write!(text, "  {:>width$} {:>width$}", "I", "T");
    }
    text.push('\n');
    for cost in &report.costs {
        let (i, t) = (&cost.initiator, &cost.target);
        let _ = write!(
            text,
            "{:<6}{:>8}{:>4}{:>7.2}",
            word(cost.op),
            cost.bytes,
            cost.depth,
            cost.keyed
        );
        for (i, t) in [
            (i.messages, t.messages),
            (i.signaled, t.signaled),
            (i.completions, t.completions),
            (i.send_doorbells, t.send_doorbells),
            (i.recv_doorbells, t.recv_doorbells),
        ] {
            let _ = write!(text, "  {i:>6.3} {t:>6.3}");
        }
        let _ = writeln!(text, "  {:>7.0} {:>7.0}", i.copied_bytes, t.copied_bytes);
    }
    text
}
