//! [`Client`]: a session with one queue and no block device, as an initiator has it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::{Address, ConnectOptions, PageKind, Region};
use rblk_initiator::engine::{Engine, QueueStats};
use rblk_initiator::io::{Io, IoOp};
use rblk_initiator::session::{Credentials, HostIdentity, QueueWish, Session};
use rblk_protocol::{AccessMode, BlockSize, Features, HostId, Name, QueueDepth, Tag};
use tokio::runtime::Runtime;

use super::target::Target;
use crate::histogram::Histogram;
use crate::interrupt;
use crate::keys::Keys;

/// Commands outstanding.
const DEPTH: u16 = 16;
/// Most bytes of one command.
pub(super) const IO_MAX: u32 = 128 << 10;
/// How long the target keeps a silent session: longer than any measurement, as no thread keeps it
/// alive.
const DETECT: Duration = Duration::from_secs(600);
/// Deadline of each step of connecting.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// Deadline of one I/O.
const IO_LIMIT: Duration = Duration::from_secs(20);

/// Bytes of the smallest I/O here.
pub(super) const BLOCK: u64 = 4096;

/// What a client opens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    /// How it opens the volume.
    pub(super) mode: AccessMode,
    /// Commands that its queue holds.
    pub(super) depth: u16,
}

impl Wish {
    /// A client that reads.
    pub(super) const READ: Self = Self { mode: AccessMode::ReadOnly, depth: DEPTH };
}

/// Memory for the data of a queue; queues that move no data may share one.
pub(super) fn buffers() -> Result<Arc<Region>> {
    buffers_of(DEPTH)
}

/// Memory for the data of a queue of this depth.
pub(super) fn buffers_of(depth: u16) -> Result<Arc<Region>> {
    Ok(Region::allocate(IO_MAX as usize * usize::from(depth), PageKind::Normal)?)
}

/// A session and its queue.
pub(super) struct Client {
    session: Session,
    engine: Engine,
    block_size: BlockSize,
}

impl Client {
    /// Connects, logs in, opens a volume, connects a queue and waits until it is ready.
    pub(super) fn connect(
        runtime: &Runtime,
        target: &Target,
        volume: &str,
        number: u32,
        buffers: &Arc<Region>,
    ) -> Result<Self> {
        Self::connect_to(runtime, target, (volume, Wish::READ), number, buffers)
    }

    /// The same with a wish.
    pub(super) fn connect_to(
        runtime: &Runtime,
        target: &Target,
        volume: (&str, Wish),
        number: u32,
        buffers: &Arc<Region>,
    ) -> Result<Self> {
        let credentials = target.keys().map(Keys::credentials).transpose()?;
        let address = target.address();
        let begun = Self::begin_to(address, credentials.as_ref(), volume, number, buffers);
        let mut client = runtime.block_on(begun)?;
        client.until_ready()?;
        Ok(client)
    }

    /// [`Self::connect`] without the end: the queue is connected, and may not be ready.
    pub(super) async fn begin(
        address: &Address,
        credentials: Option<&Credentials>,
        volume: &str,
        number: u32,
        buffers: &Arc<Region>,
    ) -> Result<Self> {
        Self::begin_to(address, credentials, (volume, Wish::READ), number, buffers).await
    }

    async fn begin_to(
        address: &Address,
        credentials: Option<&Credentials>,
        (volume, wish): (&str, Wish),
        number: u32,
        buffers: &Arc<Region>,
    ) -> Result<Self> {
        let mut id = [0xbe; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        id[4..8].copy_from_slice(&std::process::id().to_le_bytes());
        let name = Name::new(&format!("bench-{number}")).context("a name")?;
        let host = HostIdentity { id: HostId(id), name };
        let options =
            ConnectOptions { timeout: CONNECT_LIMIT, detect: DETECT, ..ConnectOptions::default() };
        let depth = QueueDepth::new(wish.depth).context("a depth")?;
        let volume = Name::new(volume).context("a volume's name")?;
        let mut session = Session::connect(address, &options, &host, credentials, None).await?;
        let opened = session.open(&volume, wish.mode).await?;
        let queue = QueueWish {
            depth,
            io_max_bytes: IO_MAX,
            in_capsule_bytes: 4096,
            features: Features::WRITE_WITH_IMM,
            digest: rblk_config::DigestWish::Off,
            lanes: None,
            queues: 1,
        };
        let path = session.connect_queue(0, queue, opened.handle, buffers).await?;
        let block_size = BlockSize::new(opened.block_size.bytes()).context("a block size")?;
        let mut engine = Engine::new(depth, IO_MAX as usize, Arc::new(QueueStats::default()));
        engine.connect(path, Instant::now());
        Ok(Self { session, engine, block_size })
    }

    /// Waits until the queue is ready.
    pub(super) fn until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + CONNECT_LIMIT;
        while !self.engine.is_connected() {
            self.turn(deadline, |_| {})?;
        }
        Ok(())
    }

    fn turn(&mut self, deadline: Instant, mut done: impl FnMut(i32)) -> Result<()> {
        let now = Instant::now();
        if !self.engine.turn(now, |_, result| done(result)) {
            if let Some((end, _)) = self.engine.take_ended() {
                bail!("the queue was lost: {end:?}");
            }
            ensure!(now < deadline, "the target does not answer");
            interrupt::check()?;
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Begins an I/O.
    pub(super) fn submit(&mut self, tag: u16, op: IoOp, offset: u64, len: u64) -> Result<()> {
        let io = Io::new(op, offset, len, self.block_size)
            .with_context(|| format!("{len} bytes at {offset} are no whole blocks"))?;
        self.engine.submit(Tag(tag), io).ok().context("the tag is in use")
    }

    /// Gives the tags of I/Os that ended to `done`, and says whether anything happened.
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

    /// Reads once, to nowhere in particular.
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

    /// Reads a block after the other, where `next` says, until it says nothing or the time is over.
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

    /// Says goodbye.
    pub(super) fn leave(self, runtime: &Runtime) {
        let Self { session, engine, .. } = self;
        drop(engine);
        runtime.block_on(session.logout(Duration::from_secs(1)));
    }
}
