//! The beginning of a mount: session, volume, buffers, I/O connections, ublk device, queue threads.
//! What fails here leaves nothing behind.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::{MountConfig, Spin};
use rblk_fabric::spin::SpinMode;
use rblk_fabric::{Address, PageKind, Region};
use rblk_protocol::{Features, Name, QueueDepth, Status, VolumeFlags, limits};
use tokio::sync::mpsc;

use super::course::Course;
use super::known::Known;
use super::signals::Signals;
use super::status::MountStatus;
use super::{EIO, Mount, access_mode, device, link, neighbour, options, pulse, send};
use crate::durability::{Durability, Ledger};
use crate::error::SessionError;
use crate::path::Path;
use crate::queue::{FromQueue, QueueParts, ToQueue};
use crate::retain::RetainRing;
use crate::session::{Claim, HostIdentity, LISTS, QueueWish, Session};
use crate::ublk::{Buffers, Control, Device};

/// Time for START_DEV, which reads the partition table through us.
const START_DEADLINE: Duration = Duration::from_secs(30);
// How a start goes: it runs, its target is lost, it is of no use any more.
const RUNS: u8 = 0;
const LOST: u8 = 1;
const OVER: u8 = 2;
/// Longest pause between two rounds of the addresses while a mount waits for its target.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// What the service manager is asked for while a mount waits: more than a round of 16 addresses
/// takes by default.
const ROUND_USEC: u32 = 300_000_000;

fn spin_mode(spin: Spin) -> SpinMode {
    match spin {
        Spin::Adaptive => SpinMode::ADAPTIVE,
        Spin::Always => SpinMode::Always,
        Spin::For(time) => SpinMode::Fixed(time.get()),
    }
}

impl Mount {
    /// Connects, opens the volume and connects its queues. Waits for a target that cannot be
    /// reached as long as `config.wait` says, and leaves in `why` what keeps it; tries every
    /// address once at least.
    pub(super) async fn connect_first(
        config: &MountConfig,
        name: &str,
        host: HostIdentity,
        take_over: bool,
        why: &RefCell<Option<String>>,
    ) -> anyhow::Result<(Self, Vec<Path>)> {
        let begun = Instant::now();
        let mut round = 1u32;
        loop {
            let error = match Self::connect_once(config, name, host, take_over).await {
                Ok(connected) => {
                    if round > 1 {
                        let status = sd_notify::NotifyState::Status("connected");
                        let _ = sd_notify::notify(&[status]);
                    }
                    return Ok(connected);
                }
                Err(error) => error,
            };
            let may_pass =
                error.downcast_ref::<SessionError>().is_some_and(SessionError::is_transient);
            if !may_pass || begun.elapsed() >= config.wait.get() {
                return Err(error);
            }
            let text = format!("{error:#}");
            tracing::warn!(round, error = text, "waiting for the target");
            why.replace(Some(text.clone()));
            // Each round asks for the time of the next one.
            let _ = sd_notify::notify(&[
                sd_notify::NotifyState::Status(&format!("waiting for the target: {text}")),
                sd_notify::NotifyState::ExtendTimeoutUsec(ROUND_USEC),
            ]);
            tokio::time::sleep(config.reconnect_delay.get().min(PAUSE_MAX)).await;
            round = round.saturating_add(1);
        }
    }

    async fn connect_once(
        config: &MountConfig,
        name: &str,
        host: HostIdentity,
        take_over: bool,
    ) -> anyhow::Result<(Self, Vec<Path>)> {
        let addresses =
            config.target.iter().map(|t| t.parse()).collect::<Result<Vec<Address>, _>>()?;
        let volume_name = Name::new(&config.volume)?;
        let claim = Claim { take_over, ..access_mode(config).into() };
        let (address, mut session) = connect_any(&addresses, config, &host).await?;
        let opened = match may_open(config, name, &host, take_over, &session) {
            Ok(()) => open_first(config, host, addresses, volume_name, claim, &mut session).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok((known, paths)) => {
                let mut mount = Self::from_known(config, name, known);
                mount.begin_connected(session, address);
                Ok((mount, paths))
            }
            Err(error) => {
                // Else the target keeps it for the lease.
                session.logout(Duration::from_secs(1)).await;
                Err(error)
            }
        }
    }

    /// A mount whose target is lost, and which will have it again by what is known. Next:
    /// `start_queues`, and the device's start; `serve` then connects.
    pub(super) fn from_known(config: &MountConfig, name: &str, known: Known) -> Self {
        let volume = &known.volume;
        let status = MountStatus {
            name: name.to_owned(),
            volume: config.volume.clone(),
            target: config.target.clone(),
            address: known.address.clone(),
            target_name: known.target_name.to_string(),
            rdma_device: known.rdma_device.clone(),
            transport: known.transport.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            size_bytes: volume.blocks.bytes(volume.block_size).unwrap_or(0),
            block_size: volume.block_size.bytes(),
            read_only: volume.flags.has(VolumeFlags::READ_ONLY),
            volatile_cache: volume.flags.has(VolumeFlags::VOLATILE_CACHE),
            queues: known.queues,
            queue_depth: known.wish.depth.get(),
            max_io_bytes: known.wish.io_max_bytes,
            in_capsule_bytes: known.wish.in_capsule_bytes,
            write_with_imm: known.wish.features.has(Features::WRITE_WITH_IMM),
            epoch: known.resume.map_or(0, |(_, epoch)| epoch.0),
            generation: volume.generation.0,
            ephemeral: volume.flags.has(VolumeFlags::EPHEMERAL),
            last_loss: known.fenced.clone(),
            ..MountStatus::default()
        };
        let now = Instant::now();
        let mut course = Course::lost(link::rules(config, &known), link::facts(&known), now);
        let last =
            known.addresses.iter().position(|known_as| known_as.to_string() == known.address);
        course.prefer(last.unwrap_or(0));
        Self {
            config: config.clone(),
            name: name.to_owned(),
            device: None,
            durability: Durability::new(config.on_loss),
            noted_loss: false,
            session: None,
            queues: Vec::new(),
            status,
            since: now,
            course,
            again: None,
            trying: String::new(),
            said: Vec::new(),
            steps: mpsc::channel(1),
            probing: None,
            probed: 0,
            paths: Vec::new(),
            quiet: Vec::new(),
            stopped: 0,
            known,
        }
    }

    /// Adds the device, starts its queues with their paths, and exposes it.
    pub(super) async fn build_device(
        &mut self,
        control: Control,
        paths: Vec<Path>,
        outbox: &mpsc::UnboundedSender<FromQueue>,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
        signals: &mut Signals,
    ) -> anyhow::Result<Device> {
        let device = self.add_device(control)?;
        self.start_queues(&device, outbox)?;
        self.connect_queues(paths);
        let mut device = self.start_device(device, from_queues, signals).await?;
        device::tune_disk(&mut device);
        Ok(device)
    }

    /// Starts a thread for every queue of the device, which fetches every tag. They have no paths:
    /// requests wait.
    pub(super) fn start_queues(
        &mut self,
        device: &Device,
        outbox: &mpsc::UnboundedSender<FromQueue>,
    ) -> anyhow::Result<()> {
        // The driver may have cut the number of queues to that of the CPUs.
        self.status.queues = device.info().queues;
        let retain_bytes = self.retain_bytes(device.info().queues);
        self.status.retain_bytes = retain_bytes as u64 * u64::from(device.info().queues);
        let wish = self.known.wish;
        for queue in 0..device.info().queues {
            let Some(config) = device.queue_config(queue) else { continue };
            let region = self.known.buffers.get(usize::from(queue)).context("a queue too many")?;
            let buffers =
                Buffers::new(Arc::clone(region), 0, wish.io_max_bytes as usize, wish.depth.get())?;
            let parts = QueueParts {
                config,
                buffers,
                block_size: self.known.volume.block_size,
                ledger: self.ledger(retain_bytes),
                pulse: Some(pulse(&self.config)),
                spin: spin_mode(self.config.spin),
                outbox: outbox.clone(),
            };
            let handle = crate::queue::start(parts)?;
            if self.known.fenced.is_some() {
                // For good: not a request of it waits.
                send(&handle, ToQueue::Fail(Some(Status::Fenced.errno())));
            }
            self.queues.push(handle);
            self.paths.push(0);
        }
        Ok(())
    }

    /// Exposes a device whose queues are started, or ends the recovery of one. A new one may be
    /// read meanwhile: its session is kept, and had again when it is lost, for which there is no
    /// deadline here. Told to end, it goes on with requests that fail; whoever serves is told
    /// again.
    pub(super) async fn start_device(
        &mut self,
        mut device: Device,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
        signals: &mut Signals,
    ) -> anyhow::Result<Device> {
        let is_new = self.status.recovered == 0;
        let halt = Arc::new(AtomicU8::new(RUNS));
        let halted = Arc::clone(&halt);
        // START_DEV waits for the queue threads, and on older kernels reads the disk: not on this
        // thread.
        let mut starting = tokio::task::spawn_blocking(move || {
            let mut patience = Patience::new(START_DEADLINE);
            let started = device.start_while(&mut |waited| match halted.load(Ordering::Relaxed) {
                OVER => false,
                halt => patience.lasts(waited, halt == LOST),
            });
            (device, started)
        });
        let (mut broke, mut told) = (None, false);
        let (device, started) = loop {
            // Whom nothing reaches any more, nothing waits for.
            let lost = is_new && self.session.is_none() && !self.course.is_over() && !told;
            let now = match (&broke, lost) {
                (Some(_), _) => OVER,
                (None, true) => LOST,
                (None, false) => RUNS,
            };
            halt.store(now, Ordering::Relaxed);
            tokio::select! {
                done = &mut starting => break done?,
                Some(message) = from_queues.recv() => {
                    if let Err(error) = self.on_queue(message) {
                        broke = Some(error);
                    }
                }
                // One that is recovered has requests of before given again now, and no path before
                // they are there.
                () = self.attend(), if is_new => {}
                () = signals.next(), if !told => {
                    told = true;
                    if is_new {
                        self.fail_all(Some(EIO));
                    }
                }
            }
        };
        if told {
            signals.keep();
        }
        if let Some(error) = broke {
            return Err(error);
        }
        self.status.device = started?.display().to_string();
        Ok(device)
    }

    /// Memory for retained writes of each queue; 0 when none are to be kept.
    fn retain_bytes(&self, queues: u16) -> usize {
        let asked = self.config.retain;
        // What others may have written since must not be replaced by what is written again.
        if asked.0 == 0 || self.status.read_only || self.config.shared {
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
        if share < self.known.wish.io_max_bytes as usize {
            tracing::warn!(
                retain = %asked,
                queues,
                "longer writes than {share} bytes do not fit a queue's share of retain, and are made durable one by one"
            );
        }
        share
    }

    /// A queue's account of what is durable. Without a volatile cache everything is that is
    /// acknowledged.
    fn ledger(&self, retain_bytes: usize) -> Option<Ledger> {
        if !self.status.volatile_cache {
            return None;
        }
        let ring =
            (retain_bytes > 0).then(|| RetainRing::for_queue(retain_bytes, self.known.wish.depth));
        Some(Ledger::new(Arc::clone(&self.durability), self.known.wish.depth, ring))
    }
}

/// Whether no mount of this host holds the volume: now that the target has said who it is.
fn may_open(
    config: &MountConfig,
    name: &str,
    host: &HostIdentity,
    take_over: bool,
    session: &Session,
) -> anyhow::Result<()> {
    if take_over {
        return Ok(());
    }
    neighbour::must_not_hold(name, config, host.id, Some(&session.target_name))
}

/// Opens the volume and connects its queues.
async fn open_first(
    config: &MountConfig,
    host: HostIdentity,
    addresses: Vec<Address>,
    volume_name: Name,
    claim: Claim,
    session: &mut Session,
) -> anyhow::Result<(Known, Vec<Path>)> {
    let volume = session.open(&volume_name, claim).await?;
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
        features: Features::WRITE_WITH_IMM.or(LISTS),
        lanes: config.lanes,
        queues,
    };
    let mut buffers = Vec::new();
    let mut paths = Vec::new();
    for queue in 0..queues {
        let region = queue_memory(&wish)?;
        let path = session.connect_queue(queue, wish, volume.handle, &region).await?;
        if queue == 0
            && (path.accept.depth != wish.depth || path.accept.io_max_bytes != wish.io_max_bytes)
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
    let known = Known {
        volume_name,
        addresses,
        host,
        volume,
        resume: Some((session.id, session.epoch)),
        instance: session.instance,
        target_name: session.target_name,
        wish,
        queues,
        buffers,
        address: session.address.to_string(),
        rdma_device: caps.name.clone(),
        transport: caps.transport.to_string(),
        fenced: None,
    };
    Ok((known, paths))
}

/// A time that stands still while the target is lost.
#[derive(Debug)]
struct Patience {
    left: Duration,
    seen: Duration,
}

impl Patience {
    fn new(left: Duration) -> Self {
        Self { left, seen: Duration::ZERO }
    }

    /// Whether it lasts, when that much has passed since it began. `lost` holds for what passed
    /// since the last question.
    fn lasts(&mut self, passed: Duration, lost: bool) -> bool {
        let step = passed.saturating_sub(self.seen);
        self.seen = passed;
        if !lost {
            self.left = self.left.saturating_sub(step);
        }
        !self.left.is_zero()
    }
}

/// Memory for the data of one queue.
pub(super) fn queue_memory(wish: &QueueWish) -> anyhow::Result<Arc<Region>> {
    let bytes = usize::from(wish.depth.get()) * wish.io_max_bytes as usize;
    Ok(Region::allocate(bytes, PageKind::Normal)?)
}

/// The first address that answers, by index too; each is tried once.
async fn connect_any(
    addresses: &[Address],
    config: &MountConfig,
    host: &HostIdentity,
) -> Result<(usize, Session), SessionError> {
    let mut last = None;
    for (at, address) in addresses.iter().enumerate() {
        match Session::begin(address, &options(config), host).await {
            Ok(session) => return Ok((at, session)),
            Err(error) => {
                tracing::debug!(%address, %error, "no session");
                last = Some(error);
            }
        }
    }
    Err(last.unwrap_or(SessionError::Protocol("no address")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_with_a_start_ends_only_while_the_target_is_there() {
        let mut patience = Patience::new(Duration::from_secs(30));
        let mut lasts = |seconds, lost| patience.lasts(Duration::from_secs(seconds), lost);
        assert!(lasts(10, false));
        // Lost for a day.
        assert!(lasts(86_400, true));
        assert!(lasts(86_419, false));
        assert!(!lasts(86_420, false));
        assert!(!lasts(90_000, true), "it is over");
    }
}
