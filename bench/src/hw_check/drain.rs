//! Completions and data after a QP is in the error state, and after it is destroyed.
//!
//! A peer's memory is READ into a sink of zeros while the QP moves to the error state. Three things
//! are checked: completions after the CQ was empty, bytes that land after that, and bytes that land
//! after the QP was destroyed. rblk relies on the last only.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rblk_fabric::{Access, Completion, MemoryRegion, RecvWr, SendOp, SendWr, WrId};

use super::Out;
use super::ends::{Ends, limits, wr};
use super::judge::{self, Drained, float};
use super::site::Site;
use crate::interrupt;

const RECVS: u64 = 16;
const WRITES: u64 = 16;
const READ: u32 = 128 << 10;
const WRITE: u32 = 4 << 10;
const PACKET: usize = 256;
const READS_MAX: usize = 16;
/// Wait for completions and bytes after the CQ was empty.
const AFTER: Duration = Duration::from_millis(100);

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let rounds = site.by_effort(3_u32, 20, 200);
    let mut seen = Drained::default();
    for index in 0..rounds {
        interrupt::check()?;
        let lead = Duration::from_micros(u64::from(index % 8) * 20);
        round(site, lead, &mut seen).with_context(|| format!("round {}", index + 1))?;
    }
    out.add_all(judge::drained(&seen));
    for (name, value) in [
        ("rounds", u64::from(rounds)),
        ("outstanding", seen.outstanding),
        ("completions_before_empty", seen.before),
        ("completions_after_empty", seen.late),
        ("never_completed", seen.missing),
        ("rounds_data_after_empty", seen.changed_late),
        ("rounds_data_after_flush", seen.changed_flushed),
        ("rounds_data_after_destroy", seen.changed_destroyed),
    ] {
        out.figure(name, float(value));
    }
    out.figure("longest_delay_us", seen.delay.as_secs_f64() * 1e6);
    Ok(())
}

fn round(site: &Site, lead: Duration, seen: &mut Drained) -> Result<()> {
    let mut ends = Ends::new(site, 512)?;
    let source = ends.b.memory(READS_MAX * READ as usize, Access::REMOTE)?;
    let sink = ends.a.memory(READS_MAX * READ as usize, Access::REMOTE)?;
    let spare = ends.a.memory(1 << 20, Access::REMOTE)?;
    source.region().write(0, &vec![0xa5; source.region().len()]);
    let link = ends.connect(site, limits(site.device.caps(), 64), &[])?;

    let place = spare.sge(0, 4096).context("a place")?;
    let recvs: Vec<RecvWr> = (0..RECVS).map(|id| RecvWr::one(WrId(id), place)).collect();
    ends.a.poller.post_recv(link.a, &recvs)?;
    let mut wrs: Vec<SendWr> = Vec::new();
    for index in 0..usize::from(link.reads_out.max(1)).min(READS_MAX) {
        let at = index * READ as usize;
        let sge = sink.sge(at, READ).context("a place")?;
        wrs.push(wr(100, SendOp::Read(source.remote(at)), sge));
    }
    // WRITEs go to memory of their own, behind the READs.
    let unseen = ends.b.memory(1 << 20, Access::REMOTE)?;
    for _ in 0..WRITES {
        let sge = spare.sge(8192, WRITE).context("a place")?;
        wrs.push(wr(200, SendOp::Write(unseen.remote(0)), sge));
    }
    ends.a.poller.post_send(link.a, &wrs)?;
    let outstanding = RECVS + wrs.len() as u64;
    std::thread::sleep(lead);
    ends.a.poller.fail(link.a);
    // After this, an empty CQ would mean that nothing is outstanding.
    let mut out = [Completion::default(); 64];
    let mut before = 0;
    loop {
        let count = ends.a.poller.poll(&mut out)?;
        if count == 0 {
            break;
        }
        before += count as u64;
    }
    let empty = Instant::now();
    let at_empty = sum(&sink);
    let (mut late, mut delay) = (0, Duration::ZERO);
    let mut at_flushed = None;
    while empty.elapsed() < AFTER {
        let count = ends.a.poller.poll(&mut out)?;
        if count > 0 {
            late += count as u64;
            delay = empty.elapsed();
        }
        if before + late >= outstanding && at_flushed.is_none() {
            at_flushed = Some(sum(&sink));
        }
        if count == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    let at_end = sum(&sink);
    drop(ends.a.poller.detach(link.a));
    let destroyed = sum(&sink);
    std::thread::sleep(AFTER / 2);
    let after = sum(&sink);
    ends.b.poller.fail(link.b);
    drop(ends.b.poller.detach(link.b));
    seen.outstanding += outstanding;
    seen.before += before;
    seen.late += late;
    seen.delay = seen.delay.max(delay);
    seen.missing += outstanding.saturating_sub(before + late);
    seen.changed_late += u64::from(at_end != at_empty);
    seen.changed_flushed += u64::from(at_flushed.is_some_and(|sum| sum != at_end));
    seen.changed_destroyed += u64::from(after != destroyed);
    Ok(())
}

/// Packets that landed: one byte of each is read, to take little time.
fn sum(sink: &MemoryRegion) -> u32 {
    let region = sink.region();
    region.sum(0, region.len(), |bytes| {
        let looked_at = bytes.iter().step_by(PACKET);
        looked_at.fold(0_u32, |count, byte| count.wrapping_add(u32::from(*byte != 0)))
    })
}
