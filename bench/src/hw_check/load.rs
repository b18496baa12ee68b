//! [`Load`]: WRITEs or READs, many at once, over some QPs, and the time of each.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::{MemoryRegion, SendOp, SendWr, WcStatus};

use super::ends::{Ends, Link, WAIT_LIMIT, wr};
use crate::histogram::Histogram;
use crate::interrupt;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Load {
    pub(super) is_read: bool,
    pub(super) bytes: u32,
    /// Outstanding on each QP. READs no more than the connection was granted.
    pub(super) depth: usize,
    /// Anywhere in the peer's memory, or always the same place for the same WR.
    pub(super) is_random: bool,
}

#[derive(Debug)]
pub(super) struct Moved {
    pub(super) bytes_per_s: f64,
    pub(super) per_s: f64,
    pub(super) times: Histogram,
}

/// Bytes of an end's memory for so many QPs.
pub(super) fn window(load: &Load, qps: usize) -> usize {
    qps * load.depth * load.bytes as usize
}

/// Work requests, each with a place of its own in the memory of this end.
struct Slots<'m> {
    load: Load,
    own: &'m MemoryRegion,
    far: &'m MemoryRegion,
    /// Transfers that the peer's memory has room for.
    places: usize,
    random: u64,
    began: Vec<Instant>,
}

impl<'m> Slots<'m> {
    fn new(
        load: Load,
        qps: usize,
        (own, far): (&'m MemoryRegion, &'m MemoryRegion),
    ) -> Result<Self> {
        let places = far.region().len() / load.bytes as usize;
        ensure!(places > 0, "the peer's memory is smaller than a transfer");
        let began = vec![Instant::now(); qps * load.depth];
        Ok(Self { load, own, far, places, random: 0x9e37_79b9_7f4a_7c15, began })
    }

    fn next(&mut self, slot: usize) -> Result<SendWr> {
        let Load { bytes, is_read, is_random, .. } = self.load;
        let place = match is_random {
            true => self.random() % self.places,
            false => slot % self.places,
        };
        let far = self.far.remote(place * bytes as usize);
        let sge = self.own.sge(slot * bytes as usize, bytes).context("a place of its own")?;
        let op = if is_read { SendOp::Read(far) } else { SendOp::Write(far) };
        Ok(wr(slot as u64, op, sge))
    }

    fn random(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 1).unwrap_or(0)
    }

    /// The time of the work request of a slot, which is posted again now.
    fn took(&mut self, slot: usize, now: Instant) -> Result<Duration> {
        let began = self.began.get_mut(slot).context("a completion of no WR")?;
        let took = now.duration_since(*began);
        *began = now;
        Ok(took)
    }
}

/// Moves data for some time. `own` has room for the [`window`]; `far` is the peer's memory.
pub(super) fn run(
    ends: &mut Ends,
    links: &[Link],
    memory: (&MemoryRegion, &MemoryRegion),
    load: Load,
    time: Duration,
) -> Result<Moved> {
    let mut slots = Slots::new(load, links.len(), memory)?;
    let mut outstanding = 0_usize;
    for (index, link) in links.iter().enumerate() {
        let depth = match load.is_read {
            true => load.depth.min(usize::from(link.reads_out.max(1))),
            false => load.depth,
        };
        let first = index * load.depth;
        let wrs = (first..first + depth).map(|slot| slots.next(slot));
        let wrs: Vec<SendWr> = wrs.collect::<Result<_>>()?;
        outstanding += wrs.len();
        ends.a.poller.post_send(link.a, &wrs)?;
    }
    let mut times = Histogram::new();
    let mut done = Vec::with_capacity(64);
    let start = Instant::now();
    let mut last = start;
    while outstanding > 0 {
        let mut bad = None;
        ends.turn_a(|completion| {
            if completion.status != WcStatus::Success {
                bad = Some(completion.status);
            }
            done.push(completion.id.0);
        })?;
        if let Some(status) = bad {
            bail!("a completion says {status:?}");
        }
        let now = Instant::now();
        let is_over = now.duration_since(start) >= time;
        if !done.is_empty() {
            last = now;
        }
        for id in done.drain(..) {
            let slot = usize::try_from(id).unwrap_or(usize::MAX);
            let took = slots.took(slot, now)?;
            times.record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            outstanding -= 1;
            if !is_over {
                let link = links.get(slot / load.depth).context("a completion of no QP")?;
                ends.a.poller.post_send(link.a, &[slots.next(slot)?])?;
                outstanding += 1;
            }
        }
        ensure!(now.duration_since(last) < WAIT_LIMIT, "nothing came within {WAIT_LIMIT:?}");
        interrupt::check()?;
    }
    let took = last.duration_since(start).as_secs_f64().max(1e-9);
    let per_s = super::judge::float(times.count()) / took;
    Ok(Moved { bytes_per_s: per_s * f64::from(load.bytes), per_s, times })
}
