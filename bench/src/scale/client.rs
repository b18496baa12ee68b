//! [`Client`]: a session with queues and no block device, as an initiator has it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rblk_fabric::{Address, ConnectOptions, PageKind, Region};
use rblk_initiator::volume::session::{Credentials, HostIdentity, QueueWish, Session};
use rblk_protocol::{AccessMode, Features, HostId, Name, OpenReply, QueueDepth};
use tokio::runtime::Runtime;

pub(super) use super::queue::{BLOCK, IO_MAX};
use super::queue::{CONNECT_LIMIT, Queue};
use crate::keys::Keys;
use crate::peer::target::Target;

const DEPTH: u16 = 16;
/// Deadline of a silent session at the target: no thread keeps the session alive here.
const DETECT: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) mode: AccessMode,
    pub(super) depth: u16,
}

impl Wish {
    pub(super) const READ: Self = Self { mode: AccessMode::ReadOnly, depth: DEPTH };
}

/// Memory for the data of a queue; queues that move no data may share one.
pub(super) fn buffers() -> Result<Arc<Region>> {
    buffers_of(DEPTH)
}

pub(super) fn buffers_of(depth: u16) -> Result<Arc<Region>> {
    Ok(Region::allocate(IO_MAX as usize * usize::from(depth), PageKind::Normal)?)
}

pub(super) struct Client {
    session: Session,
    opened: OpenReply,
    depth: QueueDepth,
    // The number of its last queue.
    queues: u16,
    queue: Queue,
}

fn wish(depth: QueueDepth) -> QueueWish {
    QueueWish {
        depth,
        io_max_bytes: IO_MAX,
        in_capsule_bytes: 4096,
        features: Features::WRITE_WITH_IMM,
        digest: rblk_config::DigestWish::Off,
        lanes: None,
        queues: 1,
    }
}

impl Client {
    /// Connects, logs in, opens a volume, connects a queue and waits until it is ready.
    pub(super) fn connect(
        runtime: &Runtime,
        target: &Target,
        volume: (&str, Wish),
        number: u32,
        buffers: &Arc<Region>,
    ) -> Result<Self> {
        let credentials = target.keys().map(Keys::credentials).transpose()?;
        let address = target.address()?;
        let begun = Self::begin(&address, credentials.as_ref(), volume, number, buffers);
        let mut client = runtime.block_on(begun)?;
        client.queue.until_ready()?;
        Ok(client)
    }

    /// [`Self::connect`] without the end: the queue is connected, and may not be ready.
    pub(super) async fn begin(
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
        let path = session
            .connect_queue(0, self::wish(depth), opened.handle, &Arc::clone(buffers).into())
            .await?;
        let queue = Queue::new(path, depth, opened.block_size)?;
        Ok(Self { session, opened, depth, queues: 0, queue })
    }

    pub(super) fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// One more queue of the session, which is ready.
    pub(super) fn add_queue(&mut self, runtime: &Runtime, buffers: &Arc<Region>) -> Result<Queue> {
        self.queues += 1;
        let path = runtime.block_on(self.session.connect_queue(
            self.queues,
            wish(self.depth),
            self.opened.handle,
            &Arc::clone(buffers).into(),
        ))?;
        let mut queue = Queue::new(path, self.depth, self.opened.block_size)?;
        queue.until_ready()?;
        Ok(queue)
    }

    pub(super) fn leave(self, runtime: &Runtime) {
        let Self { session, queue, .. } = self;
        drop(queue);
        runtime.block_on(session.logout(Duration::from_secs(1)));
    }
}
