//! Builds a target from its configuration, runs it, and takes it apart: the only place that knows
//! all parts.
//!
//! Order of the start: limits, control socket, listeners bound, stores, memory, poll groups,
//! devices, ready; connections are taken only then, after everything that can fail. The end is the
//! reverse, and each step waits.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use rblk_config::{Backing as BackingConfig, DirectIo, Spin, TargetConfig, VolumeConfig};
use rblk_fabric::spin::SpinMode;
use rblk_fabric::{Address, FabricError, Listener, PageKind, Region};
use rblk_protocol::{BlockCount, BlockSize, InstanceId, Name};
use sha2::{Digest, Sha256};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::arena::Arena;
use crate::cache::{Shard, ShardOptions};
use crate::control::socket::ControlSocket;
use crate::control::status::VolumeNotes;
use crate::control::{Control, Limits, Parts, Request};
use crate::memory::{self, Demand, Host};
use crate::poll_group::peers::Peers;
use crate::poll_group::thread::{self, Tuning};
use crate::store::backing::{Backing, Direct, OpenOptions};
use crate::store::uring::{UringOptions, UringStore};
use crate::store::{Losses, StoreError, VolumeIndex};
use crate::verifier::LineageFile;
use crate::volume::{CacheMode, Placement, Volume};

/// How long to wait for the lock of a store: a killed predecessor holds it until its last I/O has
/// ended.
const LOCK_WAIT: std::time::Duration = std::time::Duration::from_secs(5);

/// A volume that was opened.
#[derive(Debug)]
pub struct OpenedVolume {
    /// What is exported.
    pub volume: Arc<Volume>,
    /// Its file, where it has one.
    pub backing: Option<Arc<Backing>>,
    /// For people.
    pub notes: VolumeNotes,
}

/// Opens every volume of a configuration: files are locked, memory is mapped.
///
/// # Errors
/// The first volume that cannot be had, with name and cause.
pub fn open_volumes(config: &TargetConfig, target: &Name) -> anyhow::Result<Vec<OpenedVolume>> {
    config
        .volumes
        .iter()
        .enumerate()
        .map(|(index, volume)| {
            open_volume(index, volume, target).with_context(|| format!("volume `{}`", volume.name))
        })
        .collect()
}

fn open_volume(index: usize, config: &VolumeConfig, target: &Name) -> anyhow::Result<OpenedVolume> {
    let name = Name::new(&config.name)?;
    let block_size = BlockSize::new(config.block_size).context("block size")?;
    let index = VolumeIndex(u16::try_from(index).context("more than 65535 volumes")?);
    let mut hash = Sha256::new();
    hash.update(target.as_str());
    hash.update([0]);
    hash.update(name.as_str());
    let digest = hash.finalize();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&digest[..16]);
    let mut volume = Volume {
        index,
        name,
        uuid,
        block_size,
        blocks: BlockCount(0),
        read_only: config.read_only,
        placement: Placement::Null,
        cache: CacheMode::None,
        read_ahead_bytes: 0,
        discard: true,
        discard_granularity_bytes: block_size.bytes(),
    };
    let blocks = |bytes: u64| {
        block_size.blocks_in(bytes).filter(|b| b.0 > 0).with_context(|| {
            format!(
                "size of {bytes} bytes is not a multiple of the block size {}",
                config.block_size
            )
        })
    };
    let mut notes = VolumeNotes::default();
    let mut backing = None;
    match config.backing()? {
        BackingConfig::File { path, size, direct, cache, read_ahead } => {
            let options = OpenOptions {
                read_only: config.read_only,
                direct: match direct {
                    DirectIo::Required => Direct::Required,
                    DirectIo::Preferred => Direct::Preferred,
                    DirectIo::Off => Direct::Off,
                },
                block_size: config.block_size,
                lock_wait: LOCK_WAIT,
                losses: Losses::HeldUntilNoted,
            };
            let opened = Backing::open(path, &options)?;
            let bytes = opened.size_bytes();
            if let Some(size) = size
                && size.0 != bytes
            {
                return Err(WrongSize {
                    path: path.display().to_string(),
                    bytes,
                    configured: size.0,
                }
                .into());
            }
            if !opened.direct() && direct == DirectIo::Preferred {
                tracing::warn!(volume = %name, path = %path.display(), "no direct I/O there: going through the page cache");
            }
            volume.blocks = blocks(bytes)?;
            volume.placement = Placement::Store;
            volume.cache = cache;
            volume.read_ahead_bytes = u32::try_from(read_ahead.0).context("read_ahead")?;
            if opened.memory_alignment() > config.block_size {
                // Blocks of the volume that are cached in parts would be read and written in parts.
                tracing::warn!(
                    volume = %name, path = %path.display(), alignment = opened.memory_alignment(),
                    "direct I/O there needs memory aligned to more than block_size: no cache for this volume"
                );
                volume.cache = CacheMode::None;
            }
            volume.discard = opened.can_discard();
            volume.discard_granularity_bytes = opened.discard_granularity();
            volume.read_only |= opened.read_only();
            notes = VolumeNotes {
                path: Some(path.display().to_string()),
                direct: Some(opened.direct()),
            };
            backing = Some(Arc::new(opened));
        }
        BackingConfig::Memory { size } => {
            volume.blocks = blocks(size.0)?;
            let len = usize::try_from(size.0).context("size")?;
            volume.placement = Placement::Memory(Region::allocate(len, PageKind::Normal)?);
        }
        BackingConfig::Null { size } => volume.blocks = blocks(size.0)?,
    }
    Ok(OpenedVolume { volume: Arc::new(volume), backing, notes })
}

/// A file that is not as long as the configuration says.
#[derive(Debug, thiserror::Error)]
#[error(
    "{path}: {bytes} bytes, but the configuration says size = {configured}: correct one of them"
)]
pub struct WrongSize {
    path: String,
    bytes: u64,
    configured: u64,
}

fn spin_mode(spin: Spin) -> SpinMode {
    match spin {
        Spin::Adaptive => SpinMode::ADAPTIVE,
        Spin::Always => SpinMode::Always,
        Spin::For(time) => SpinMode::Fixed(time.into()),
    }
}

/// Half of the CPUs: interrupts, the fabric's own threads and the stores need the others, and fewer
/// groups mean fewer requests that another group's shard must be asked for.
fn default_poll_groups() -> usize {
    std::thread::available_parallelism().map_or(1, |cpus| (cpus.get() / 2).clamp(1, 4))
}

fn default_name() -> Name {
    let host =
        nix::unistd::gethostname().ok().and_then(|h| h.into_string().ok()).unwrap_or_default();
    let clean: String = host
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' })
        .take(64)
        .collect();
    Name::new(&clean)
        .or_else(|_| Name::new("target"))
        .unwrap_or_else(|_| unreachable!("a fixed name"))
}

/// Serves until SIGTERM or SIGINT, drains, and returns. SIGHUP does not end it.
///
/// # Errors
/// Anything that keeps the target from starting, or a poll group that broke.
pub fn serve(config: &TargetConfig) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(run(config));
    // Tasks that still hold sockets must not outlive their files.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    result
}

async fn run(config: &TargetConfig) -> anyhow::Result<()> {
    // Before the arena is registered, which takes seconds: a terminal may close meanwhile.
    crate::hang_up::outlive().context("SIGHUP")?;
    let name = match &config.name {
        Some(name) => Name::new(name)?,
        None => default_name(),
    };
    let addresses =
        config.listen.iter().map(|a| a.parse::<Address>()).collect::<Result<Vec<_>, _>>()?;
    let groups = config.poll_groups.map_or_else(default_poll_groups, usize::from);
    let demand = Demand::of(config, groups);
    memory::raise_limits();
    demand.check(&Host::read())?;
    let socket = ControlSocket::bind(&config.control_socket).await.with_context(|| {
        format!(
            "control socket {} (choose another with --control-socket)",
            config.control_socket.display()
        )
    })?;
    let mut listeners = Vec::new();
    for address in &addresses {
        listeners.push(bind(address).await?);
    }
    let mut devices = Vec::new();
    for listener in &listeners {
        devices.extend(listener.devices()?);
    }
    for device in &devices {
        demand.registers_with(device.caps())?;
    }
    let listening: Vec<String> = listeners.iter().map(|l| l.address().to_string()).collect();
    let opened = open_volumes(config, &name)?;
    let lineage = Arc::new(if opened.iter().any(|o| o.backing.is_some()) {
        // The stores' locks are ours, so the predecessor is gone.
        LineageFile::open(&config.state_dir, &name)?
    } else {
        LineageFile::forgetful()?
    });

    let io_max = u32::try_from(config.max_io.0).context("max_io")?;
    let extent_max = io_max.max(crate::arena::MIN_EXTENT_BYTES);
    let share = usize::try_from(demand.share())?;
    let arena = demand.allocate(&Host::read())?;
    let zeros = Region::allocate(io_max as usize, PageKind::Normal)?;
    let (from_groups, outbox) = mpsc::unbounded_channel();
    let mut handles = Vec::new();
    let mut seed = [0; 8];
    getrandom::fill(&mut seed)?;
    let shard_options = ShardOptions {
        dirty_max_bytes: usize::try_from(config.dirty_limit().0)? / groups,
        write_back_delay: config.write_back_delay.into(),
        write_back_max_bytes: io_max,
        seed: u64::from_ne_bytes(seed),
    };
    for (index, peers) in Peers::connect(groups)?.into_iter().enumerate() {
        let range = index * share..(index + 1) * share;
        let options = UringOptions {
            volumes: u16::try_from(opened.len().max(1))?,
            registered: Some(range.clone()),
            ..UringOptions::default()
        };
        let store = UringStore::new(Arc::clone(&arena), &options)?;
        for warning in store.warnings() {
            tracing::warn!(poll_group = index, "{warning}");
        }
        let cpu = config.cpus.as_ref().and_then(|cpus| cpus.get(index).copied());
        let tuning = Tuning { cpu, spin: spin_mode(config.spin) };
        let arena = Arena::over(Arc::clone(&arena), range, extent_max)?;
        let shard = Shard::new(store, arena, shard_options, Instant::now());
        let mut handle = thread::start(index, shard, peers, tuning, from_groups.clone())?;
        for opened in &opened {
            handle.add_volume(Arc::clone(&opened.volume), opened.backing.clone())?;
        }
        handles.push(handle);
    }
    drop(from_groups);

    let mut instance = [0; 16];
    getrandom::fill(&mut instance)?;
    let mut control = Control::new(Parts {
        name,
        instance: InstanceId(instance),
        lineage: Arc::clone(&lineage),
        limits: Limits {
            queue_depth_max: config.queue_depth_max,
            in_capsule_bytes: u32::try_from(config.inline.0).context("inline")?,
            io_max_bytes: io_max,
            sessions_max: config.sessions_max,
            lease: config.lease.into(),
        },
        groups: handles,
        arena,
        zeros,
        volume_notes: opened
            .iter()
            .map(|o| (o.volume.name.to_string(), o.notes.clone()))
            .collect::<HashMap<_, _>>(),
        stores: opened
            .iter()
            .filter_map(|o| {
                let backing = o.backing.as_ref()?;
                Some((o.volume.uuid, backing.identity().cloned()))
            })
            .collect(),
        volumes: opened.into_iter().map(|o| o.volume).collect(),
        listening: listening.clone(),
        drain_timeout: config.drain_timeout.into(),
    })
    .context("control")?;
    // Registering takes seconds when the arena is large: before anybody connects.
    // Control alone keeps them: one that is unplugged is let go.
    for device in devices {
        control.device(&device).with_context(|| format!("device {}", device.caps().name))?;
    }
    let (request_sender, requests) = mpsc::channel(64);
    let (incoming_sender, incoming) = mpsc::channel(64);
    for mut listener in listeners {
        let incoming = incoming_sender.clone();
        tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok(connection) => {
                        if incoming.send(connection).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        tracing::error!(address = %listener.address(), %error, "listener");
                        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                    }
                }
            }
        });
    }
    tokio::spawn(socket.serve(request_sender.clone()));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            if request_sender.send(Request::Drain).await.is_err() {
                return;
            }
        }
    });
    tracing::info!(?listening, poll_groups = groups, "ready");
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let begun = Instant::now();
    let result = control.run(incoming, outbox, requests).await;
    match result {
        Ok(true) => lineage.mark_clean(),
        _ => lineage.try_again(),
    }
    tracing::info!(served_for = ?begun.elapsed(), "stopped");
    result.map(|_| ())
}

async fn bind(address: &Address) -> anyhow::Result<Listener> {
    let deadline = Instant::now() + std::time::Duration::from_secs(5);
    loop {
        match Listener::bind(address).await {
            // At boot the interface may not have its address yet.
            Err(FabricError::Listen { source, .. })
                if source.kind() == std::io::ErrorKind::AddrNotAvailable
                    && Instant::now() < deadline =>
            {
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            }
            result => return Ok(result?),
        }
    }
}

/// Opens every store of a configuration and closes it again.
///
/// # Errors
/// As [`serve`] would refuse it.
pub fn check(config: &TargetConfig) -> anyhow::Result<Vec<OpenedVolume>> {
    let name = match &config.name {
        Some(name) => Name::new(name)?,
        None => default_name(),
    };
    for address in &config.listen {
        address.parse::<Address>()?;
    }
    open_volumes(config, &name)
}

const _: fn(StoreError) -> anyhow::Error = anyhow::Error::from;
