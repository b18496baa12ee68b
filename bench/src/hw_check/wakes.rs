//! Sleeping until a completion, over and over: no wake-up may be lost.
//!
//! Two threads send a message to and fro. Each sleeps as a data thread does: arm the CQ, look once
//! more, wait for the descriptor. A wake-up is lost if a completion is in the CQ and the descriptor
//! stays silent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rblk_fabric::{
    Access, Completion, MemoryRegion, Poller, QpIndex, RecvWr, SendOp, WcOpcode, WcStatus, WrId,
};

use super::Out;
use super::ends::{Ends, limits, wr};
use super::judge::{self, float};
use super::site::Site;
use crate::interrupt;

/// One sleep. After it, the CQ shows whether there was a reason to wake up.
const SLEEP: Duration = Duration::from_millis(500);
/// How much later than its completion an event may come. Threads of a busy host are late.
const LATE: Duration = Duration::from_millis(500);
const STUCK: Duration = Duration::from_secs(30);
const ENOUGH: u64 = 10;
const WORD: u64 = 100_000;

struct Player<'a> {
    poller: &'a mut dyn Poller,
    qp: QpIndex,
    memory: MemoryRegion,
    stop: &'a AtomicBool,
    slept: u64,
    lost: u64,
}

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let rounds = site.by_effort(2_000_u64, 100_000, 10_000_000);
    let mut ends = Ends::new(site, 64)?;
    let a = ends.a.memory(4096, Access::LOCAL_WRITE)?;
    let b = ends.b.memory(4096, Access::LOCAL_WRITE)?;
    let sge = b.sge(0, 64).context("a place")?;
    let recv = RecvWr::one(WrId(1), sge);
    let link = ends.connect(site, limits(site.device.caps(), 16), &[recv; 4])?;
    let recv_a = RecvWr::one(WrId(1), a.sge(0, 64).context("a place")?);
    ends.a.poller.post_recv(link.a, &[recv_a; 4])?;
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let player = |poller, qp, memory| Player { poller, qp, memory, stop: &stop, slept: 0, lost: 0 };
    let mut first = player(&mut *ends.a.poller, link.a, a);
    let mut second = player(&mut *ends.b.poller, link.b, b);
    let begun = Instant::now();
    let played = std::thread::scope(|scope| {
        let (stop, done) = (&stop, &done);
        let far =
            std::thread::Builder::new().name("waker".into()).spawn_scoped(scope, move || {
                let played = second.answer();
                stop.store(true, Ordering::Relaxed);
                played.map(|()| (second.slept, second.lost))
            })?;
        let played = first.play(rounds, done, out);
        stop.store(true, Ordering::Relaxed);
        let far = far.join().map_err(|_| anyhow!("the other end's thread failed"))??;
        played.map(|()| (first.slept + far.0, first.lost + far.1))
    });
    let done = done.load(Ordering::Relaxed);
    ends.close(link);
    let (slept, lost) = played.with_context(|| format!("after {done} round trips"))?;
    out.add(judge::wakes(done, slept, lost));
    out.figure("round_trips", float(done));
    out.figure("sleeps", float(slept));
    out.figure("lost", float(lost));
    out.figure("us_per_round_trip", begun.elapsed().as_secs_f64() * 1e6 / float(done.max(1)));
    Ok(())
}

impl Player<'_> {
    fn play(&mut self, rounds: u64, done: &AtomicU64, out: &Out) -> Result<()> {
        for round in 1..=rounds {
            self.send()?;
            if !self.await_message()? {
                bail!("the other end stopped");
            }
            done.store(round, Ordering::Relaxed);
            if round.is_multiple_of(WORD) && round < rounds {
                out.tell(&format!("  {round} of {rounds} round trips"));
            }
            if self.lost >= ENOUGH {
                break;
            }
        }
        Ok(())
    }

    /// Answers until the stop.
    fn answer(&mut self) -> Result<()> {
        while self.await_message()? {
            self.send()?;
        }
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        let sge = self.memory.sge(64, 64).context("a place")?;
        Ok(self.poller.post_send(self.qp, &[wr(2, SendOp::Send, sge)])?)
    }

    /// Sleeps until a message is there. False after the stop.
    fn await_message(&mut self) -> Result<bool> {
        let deadline = Instant::now() + STUCK;
        loop {
            if self.look()?.1 {
                return Ok(true);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            interrupt::check()?;
            if Instant::now() >= deadline {
                bail!("no message within {STUCK:?}");
            }
            self.poller.arm()?;
            let (count, is_there) = self.look()?;
            if is_there {
                return Ok(true);
            }
            // A completion of a SEND disarmed the CQ, perhaps.
            if count > 0 {
                continue;
            }
            if self.is_woken(SLEEP)? {
                self.slept += 1;
            } else {
                let (count, is_there) = self.look()?;
                if count > 0 && !self.is_woken(LATE)? {
                    self.lost += 1;
                }
                if is_there {
                    self.poller.clear_event();
                    return Ok(true);
                }
            }
            self.poller.clear_event();
        }
    }

    /// Takes the completions: how many, and whether a message is among them.
    fn look(&mut self) -> Result<(usize, bool)> {
        let mut out = [Completion::default(); 8];
        let count = self.poller.poll(&mut out)?;
        let mut is_there = false;
        for completion in &out[..count] {
            match (completion.status, completion.opcode) {
                (WcStatus::Success, WcOpcode::Recv) => {
                    is_there = true;
                    let sge = self.memory.sge(0, 64).context("a place")?;
                    self.poller.post_recv(self.qp, &[RecvWr::one(WrId(1), sge)])?;
                }
                (WcStatus::Success, _) => {}
                // The other end may be gone already.
                _ if self.stop.load(Ordering::Relaxed) => {}
                (status, _) => bail!("a completion says {status:?}"),
            }
        }
        Ok((count, is_there))
    }

    fn is_woken(&self, limit: Duration) -> Result<bool> {
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::ZERO);
        let fds = self.poller.event_fds();
        let mut all: Vec<PollFd<'_>> =
            fds.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        match poll(&mut all, limit) {
            Ok(count) => Ok(count > 0),
            Err(Errno::EINTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}
