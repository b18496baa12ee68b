//! [`Queue`]: an I/O queue of a session, driven by the thread that measures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::path::Path;
use rblk_initiator::engine::{Engine, QueueStats};
use rblk_protocol::{BlockSize, QueueDepth, Tag};

use crate::histogram::Histogram;
use crate::interrupt;

pub(super) const IO_MAX: u32 = 128 << 10;
pub(super) const BLOCK: u64 = 4096;
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(20);
const IO_LIMIT: Duration = Duration::from_secs(20);

/// How long a sleep takes at most: between two looks at the deadline.
const NAP_MS: u8 = 100;

pub(super) struct Queue {
    engine: Engine,
    block_size: BlockSize,
}

impl Queue {
    /// A queue on a connected path. It may not be ready.
    pub(super) fn new(path: Path, depth: QueueDepth, block_size: BlockSize) -> Result<Self> {
        let mut engine = Engine::new(depth, IO_MAX as usize, Arc::new(QueueStats::default()));
        engine.connect(path, Instant::now());
        Ok(Self { engine, block_size })
    }

    pub(super) fn until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + CONNECT_LIMIT;
        while !self.engine.is_connected() {
            self.turn(deadline, |_| {})?;
        }
        Ok(())
    }

    /// One turn, and if it found nothing, a sleep until an event. A client that yielded instead
    /// would get its processor back only after its neighbours.
    fn turn(&mut self, deadline: Instant, mut done: impl FnMut(i32)) -> Result<()> {
        let now = Instant::now();
        let mut found = self.engine.turn(now, |_, result| done(result));
        if !found {
            self.engine.arm();
            found = self.engine.turn(now, |_, result| done(result));
        }
        if !found {
            if let Some((end, _)) = self.engine.take_ended() {
                bail!("the queue was lost: {end:?}");
            }
            ensure!(now < deadline, "the target does not answer");
            interrupt::check()?;
            let fds = self.engine.event_fds();
            let mut fds: Vec<_> =
                fds.iter().flatten().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
            match poll(&mut fds, NAP_MS) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => bail!("poll: {errno}"),
            }
            self.engine.clear_event();
        }
        Ok(())
    }

    pub(super) fn submit(&mut self, tag: u16, op: IoOp, offset: u64, len: u64) -> Result<()> {
        let io = Io::new(op, offset, len, self.block_size)
            .with_context(|| format!("{len} bytes at {offset} are no whole blocks"))?;
        self.engine.submit(Tag(tag), io).ok().context("the tag is in use")
    }

    /// Gives the tags of ended I/Os to `done`. True if anything happened.
    pub(super) fn look(&mut self, mut done: impl FnMut(u16)) -> Result<bool> {
        let mut failed = None;
        let busy = self.engine.turn(Instant::now(), |tag, result| {
            failed = failed.or((result < 0).then_some(result));
            done(tag.0);
        });
        if let Some((end, _)) = self.engine.take_ended() {
            bail!("the queue was lost: {end:?}");
        }
        ensure!(failed.is_none(), "an I/O gave {failed:?}");
        Ok(busy)
    }

    pub(super) fn read(&mut self, offset: u64, len: u64) -> Result<()> {
        let io = Io::new(IoOp::Read, offset, len, self.block_size)
            .with_context(|| format!("{len} bytes at {offset} are no whole blocks"))?;
        self.engine.submit(Tag(0), io).ok().context("one request at a time")?;
        let deadline = Instant::now() + IO_LIMIT;
        let mut result = None;
        while result.is_none() {
            self.turn(deadline, |outcome| result = Some(outcome))?;
        }
        ensure!(
            result == i32::try_from(len).ok(),
            "a read of {len} bytes at {offset} gave {result:?}"
        );
        Ok(())
    }

    /// Reads blocks at the offsets of `next`, until there is none or the time is over.
    pub(super) fn latency(
        &mut self,
        time: Duration,
        mut next: impl FnMut() -> Option<u64>,
    ) -> Result<Histogram> {
        let mut histogram = Histogram::new();
        let end = Instant::now() + time;
        while let Some(offset) = next() {
            let begin = Instant::now();
            if begin >= end {
                break;
            }
            self.read(offset, BLOCK)?;
            histogram.record(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        ensure!(histogram.count() > 0, "nothing was read");
        Ok(histogram)
    }
}
