//! The beginning of a mount: session, volume, buffers, I/O connections, ublk device, queue threads. What fails here
//! leaves nothing behind.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::MountConfig;
use rblk_fabric::{Address, PageKind, Region};
use rblk_protocol::{Features, Name, QueueDepth, VolumeFlags, limits};
use tokio::sync::mpsc;

use super::status::MountStatus;
use super::{Mount, access_mode, device, options, send};
use crate::durability::{Durability, Ledger};
use crate::engine::QueueCounts;
use crate::error::SessionError;
use crate::path::Path;
use crate::queue::{FromQueue, QueueParts, ToQueue};
use crate::retain::RetainRing;
use crate::session::{HostIdentity, QueueWish, Session};
use crate::ublk::{Buffers, Control, Device};

/// Time for START_DEV, which reads the partition table through us.
const START_DEADLINE: Duration = Duration::from_secs(30);

impl Mount {
    pub(super) async fn connect_first(
        config: &MountConfig,
        name: &str,
        host: HostIdentity,
    ) -> anyhow::Result<(Self, Vec<Path>)> {
        let addresses =
            config.target.iter().map(|t| t.parse()).collect::<Result<Vec<Address>, _>>()?;
        let volume_name = Name::new(&config.volume)?;
        let mut session = connect_any(&addresses, config, &host).await?;
        match Self::open_first(config, name, host, addresses, volume_name, &mut session).await {
            Ok((mut mount, paths)) => {
                mount.session = Some(session);
                Ok((mount, paths))
            }
            Err(error) => {
                // Else the target keeps it for the lease.
                session.logout(Duration::from_secs(1)).await;
                Err(error)
            }
        }
    }

    async fn open_first(
        config: &MountConfig,
        name: &str,
        host: HostIdentity,
        addresses: Vec<Address>,
        volume_name: Name,
        session: &mut Session,
    ) -> anyhow::Result<(Self, Vec<Path>)> {
        let volume = session.open(&volume_name, access_mode(config)).await?;
        let queues = config
            .queues
            .unwrap_or_else(|| {
                let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
                u16::try_from(cpus.min(4)).unwrap_or(1)
            })
            .min(session.queues_max);
        let io_max_bytes = u32::try_from(config.max_io.0).context("max_io")?;
        let depth = QueueDepth::new(config.queue_depth).context("queue_depth")?;
        let mut wish = QueueWish {
            depth,
            io_max_bytes,
            in_capsule_bytes: limits::IN_CAPSULE_MAX_BYTES,
            features: Features::WRITE_WITH_IMM,
        };
        let mut buffers = Vec::new();
        let mut paths = Vec::new();
        for queue in 0..queues {
            let bytes = usize::from(wish.depth.get()) * wish.io_max_bytes as usize;
            let region = Region::allocate(bytes, PageKind::Normal)?;
            let path = session.connect_queue(queue, wish, volume.handle, &region).await?;
            if queue == 0
                && (path.accept.depth != wish.depth
                    || path.accept.io_max_bytes != wish.io_max_bytes)
            {
                // The target gives less: what it gives is what every queue asks for, now and later.
                tracing::info!(
                    depth = path.accept.depth.get(),
                    io_max_bytes = path.accept.io_max_bytes,
                    "the target grants less than was asked"
                );
                wish.depth = path.accept.depth;
                wish.io_max_bytes = path.accept.io_max_bytes;
            }
            buffers.push(region);
            paths.push(path);
        }
        wish.in_capsule_bytes = paths[0].accept.in_capsule_bytes;
        let caps = session.device().caps();
        let size_bytes = volume.blocks.bytes(volume.block_size).unwrap_or(0);
        let status = MountStatus {
            name: name.to_owned(),
            device: String::new(),
            volume: config.volume.clone(),
            target: config.target.clone(),
            address: session.address.to_string(),
            target_name: session.target_name.to_string(),
            rdma_device: caps.name.clone(),
            transport: caps.transport.to_string(),
            state: String::new(),
            last_loss: None,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: 0,
            size_bytes,
            block_size: volume.block_size.bytes(),
            read_only: volume.flags.has(VolumeFlags::READ_ONLY),
            volatile_cache: volume.flags.has(VolumeFlags::VOLATILE_CACHE),
            queues,
            queue_depth: wish.depth.get(),
            max_io_bytes: wish.io_max_bytes,
            in_capsule_bytes: wish.in_capsule_bytes,
            write_with_imm: paths[0].accept.features.has(Features::WRITE_WITH_IMM),
            retain_bytes: 0,
            unflushed_writes: 0,
            verifier_changes: 0,
            writes_rewritten: 0,
            losses: 0,
            loss_untold: false,
            epoch: session.epoch.0,
            total: QueueCounts::default(),
            by_queue: Vec::new(),
        };
        let mount = Self {
            config: config.clone(),
            name: name.to_owned(),
            volume_name,
            addresses,
            host,
            features: wish.features,
            wish,
            volume,
            resume: Some((session.id, session.epoch)),
            instance: session.instance,
            durability: Durability::new(),
            session: None,
            connected_at: Instant::now(),
            queues: Vec::new(),
            buffers,
            status,
            since: Instant::now(),
            lost_at: None,
            failing: false,
            changed: false,
            attempt: 0,
            stopped: 0,
            again: None,
            retry_at: None,
        };
        Ok((mount, paths))
    }

    pub(super) async fn build_device(
        &mut self,
        control: Control,
        paths: Vec<Path>,
        outbox: &mpsc::UnboundedSender<FromQueue>,
    ) -> anyhow::Result<Device> {
        let queues = u16::try_from(paths.len()).context("queues")?;
        let device = device::add(control, &self.config, &self.volume, queues, &self.wish)?;
        self.status.queues = device.info().queues;
        let retain_bytes = self.retain_bytes(device.info().queues);
        self.status.retain_bytes = retain_bytes as u64 * u64::from(device.info().queues);
        for (queue, path) in (0u16..).zip(paths) {
            // The driver may have cut the number of queues to that of the CPUs; their paths just end.
            let Some(config) = device.queue_config(queue) else { continue };
            let region = Arc::clone(&self.buffers[usize::from(queue)]);
            let buffers =
                Buffers::new(region, 0, self.wish.io_max_bytes as usize, self.wish.depth.get())?;
            let parts = QueueParts {
                config,
                buffers,
                block_size: self.volume.block_size,
                ledger: self.ledger(retain_bytes),
                spin: self.config.spin.get(),
                outbox: outbox.clone(),
            };
            let handle = crate::queue::start(parts)?;
            send(&handle, ToQueue::Connect(Box::new(path)));
            self.queues.push(handle);
        }
        // START_DEV waits for the queue threads, and on older kernels reads the disk: not on this thread.
        let (device, started) = tokio::task::spawn_blocking(move || {
            let mut device = device;
            let started = device.start(START_DEADLINE);
            (device, started)
        })
        .await?;
        self.status.device = started?.display().to_string();
        Ok(device)
    }

    /// Memory for retained writes of each queue; 0 when none are to be kept.
    fn retain_bytes(&self, queues: u16) -> usize {
        let asked = self.config.retain;
        if asked.0 == 0 || self.status.read_only {
            return 0;
        }
        if !self.status.volatile_cache {
            tracing::info!(
                "writes of this volume need not be retained: they are durable at once, or gone with it"
            );
            return 0;
        }
        let share = asked.0 / u64::from(queues.max(1));
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        if share < self.wish.io_max_bytes as usize {
            tracing::warn!(
                retain = %asked,
                queues,
                "longer writes than {share} bytes do not fit a queue's share of retain, and are made durable one by one"
            );
        }
        share
    }

    /// A queue's account of what is durable. Without a volatile cache everything is that is acknowledged.
    fn ledger(&self, retain_bytes: usize) -> Option<Ledger> {
        if !self.status.volatile_cache {
            return None;
        }
        let ring = (retain_bytes > 0).then(|| RetainRing::for_queue(retain_bytes, self.wish.depth));
        Some(Ledger::new(Arc::clone(&self.durability), self.wish.depth, ring))
    }
}

/// The first address that answers; each is tried once.
async fn connect_any(
    addresses: &[Address],
    config: &MountConfig,
    host: &HostIdentity,
) -> Result<Session, SessionError> {
    let mut last = None;
    for address in addresses {
        match Session::begin(address, &options(config), host).await {
            Ok(session) => return Ok(session),
            Err(error) => {
                tracing::debug!(%address, %error, "no session");
                last = Some(error);
            }
        }
    }
    Err(last.unwrap_or(SessionError::Protocol("no address")))
}
