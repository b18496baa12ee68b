//! The first connect of a mount: session, volume, buffers, I/O connections. A failure here leaves
//! nothing behind.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::{DigestWish, Encrypt, MountConfig};
use rblk_fabric::soft::tls::kernel_has_tls;
use rblk_fabric::{Address, PageKind, Region};
use rblk_operate::said_once;
use rblk_protocol::width::narrow;
use rblk_protocol::{Features, Generation, Name, QueueDepth, Status, limits};

use super::Volume;
use super::course::Facts;
use super::error::SessionError;
use super::link::{access_mode, options};
use super::reconnect::NotTested;
use super::session::{HostIdentity, MESSAGES, QueueWish, Session, VolumeClaim};
use super::setup::{Endpoint, KnownBy, Setup, credentials_of, digest_wish};
use super::shared_memory::SharedMemory;
use super::ways::may_be_ways;
use crate::engine::PathEnd;
use crate::engine::path::{Path, QueueMemory};
use crate::engine::ways::WayIndex;
use rblk_operate::mount::configured::KeysFile;

/// Longest pause between two rounds of the addresses while a mount waits for its target.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// The time requested from the service manager while a mount waits: more than a round of 16
/// addresses takes by default.
const ROUND_USEC: u32 = 300_000_000;
/// Most queues of a mount that names no number.
const QUEUES_DEFAULT_MAX: usize = 4;

/// Whether a volume may be opened by this host at the target of that name.
pub(crate) type MayOpen<'f> = &'f dyn Fn(&HostIdentity, &Name) -> anyhow::Result<()>;

/// The parameters of the first connect.
#[derive(Clone, Copy)]
pub(crate) struct First<'f> {
    /// The configuration of the mount.
    pub(crate) config: &'f MountConfig,
    /// The file with the keys that the target may prove.
    pub(crate) keys_file: Option<&'f KeysFile>,
    /// Fence another host that holds the volume.
    pub(crate) take_over: bool,
    /// Asked before the volume is opened, unless its holder is to be fenced.
    pub(crate) may_open: MayOpen<'f>,
    /// What has the queues.
    pub(crate) front: Front,
    /// The generation of the volume in the process before; the volume must still have it.
    pub(crate) generation: Generation,
}

/// What a front end needs of its volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Front {
    /// Control tests the paths of the queues.
    pub(crate) tests_paths: bool,
    /// Other programs may have their data in shared memory.
    pub(crate) shares_memory: bool,
    /// There is room for a digest behind the data of a READ.
    pub(crate) has_room_for_digests: bool,
    /// Buffers of each queue beyond its depth.
    pub(crate) spare_buffers: u16,
}

impl First<'_> {
    /// The memory of other programs.
    fn shared_memory(&self) -> anyhow::Result<SharedMemory> {
        match self.front.shares_memory {
            true => SharedMemory::map(&self.config.shared_memory),
            false => Ok(SharedMemory::default()),
        }
    }

    /// Whether the queues ask for digests.
    fn digest(&self, shared: &SharedMemory) -> DigestWish {
        match self.front.has_room_for_digests {
            true => digest_wish(self.config, shared),
            false => DigestWish::Off,
        }
    }
}

/// Connects, opens the volume and connects its queues. Waits at most `config.wait` for an
/// unreachable target, reports the wait to the service manager, and leaves the reason in `why`.
/// Tries every address at least once.
pub(crate) async fn connect_first(
    first: First<'_>,
    host: HostIdentity,
    why: &RefCell<Option<String>>,
) -> anyhow::Result<(Volume, Vec<Path>)> {
    let waits = |text: &str| {
        why.replace(Some(text.to_owned()));
        // Each round requests the time of the next one.
        let _ = sd_notify::notify(&[
            sd_notify::NotifyState::Status(&format!("waiting for the target: {text}")),
            sd_notify::NotifyState::ExtendTimeoutUsec(ROUND_USEC),
        ]);
    };
    try_encryption(first.config);
    let connected = connect_patiently(first, host, waits).await?;
    if why.borrow().is_some() {
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Status("connected")]);
    }
    Ok(connected)
}

/// Tries TLS of the kernel now, while no disk is there. The kernel loads what it needs by modprobe,
/// and modules may lie on the disk that this mount makes: a trial when that disk waits for its
/// target would wait for itself. Also without keys, as a reload may bring them. A mount that shall
/// not encrypt never asks, in this process or in one that takes over.
fn try_encryption(config: &MountConfig) {
    if config.transport.encrypt != Encrypt::Off {
        // Who needs the answer asks again, and gets the same one.
        let _ = kernel_has_tls();
    }
}

/// Connects like [`connect_first`], and passes each reason to wait to `waits`.
pub(crate) async fn connect_patiently(
    first: First<'_>,
    host: HostIdentity,
    waits: impl Fn(&str),
) -> anyhow::Result<(Volume, Vec<Path>)> {
    let begun = Instant::now();
    let config = first.config;
    let known_by = KnownBy { host, credentials: credentials_of(config)? };
    let mut round = 1u32;
    let mut logged = String::new();
    loop {
        let error = match connect_once(first, &known_by).await {
            Ok(connected) => return Ok(connected),
            Err(error) => error,
        };
        if !may_pass(&error) || begun.elapsed() >= config.wait.get() {
            return Err(error);
        }
        let text = said_once(error.as_ref());
        // A target may be away for days, and systemd begins this again and again: not a line for
        // each round, but for each new reason, and ever more rarely for the same one.
        if text != logged || round.is_power_of_two() {
            tracing::warn!(round, error = text, "waiting for the target");
            logged.clone_from(&text);
        }
        waits(&text);
        tokio::time::sleep(config.reconnect_delay.get().min(PAUSE_MAX)).await;
        round = round.saturating_add(1);
    }
}

/// Whether a later try may succeed. A path that failed its test may have lost its target.
pub(crate) fn may_pass(error: &anyhow::Error) -> bool {
    error.downcast_ref::<SessionError>().is_some_and(SessionError::is_transient)
        || error.is::<NotTested>()
}

async fn connect_once(first: First<'_>, known_by: &KnownBy) -> anyhow::Result<(Volume, Vec<Path>)> {
    let First { config, .. } = first;
    let addresses = config.target.iter().map(|t| t.parse()).collect::<Result<Vec<Address>, _>>()?;
    let volume_name = Name::new(&config.volume)?;
    // The failures of the addresses before the next one.
    let (mut faults, mut elsewhere) = (Vec::new(), None);
    loop {
        let connected = connect_any(&addresses, config, known_by, &mut faults).await;
        let mut session = match (connected, elsewhere) {
            (Ok(session), _) => session,
            // The target that answered may serve the volume later.
            (Err(error), Some(elsewhere)) if error.is_transient() => return Err(elsewhere),
            (Err(error), _) => return Err(of_all_addresses(error, &faults)),
        };
        let opened = match may_open(first, &known_by.host, &session) {
            Ok(()) => {
                let addresses = addresses.clone();
                open_first(first, known_by, addresses, volume_name, &mut session).await
            }
            Err(error) => Err(error),
        };
        let error = match opened {
            Ok((setup, facts, paths)) => {
                let volume = Volume::connected(config, setup, facts, (session, faults));
                return Ok((volume, paths));
            }
            Err(error) => error,
        };
        // Without this the target would keep the session until its lease ends.
        session.logout(Duration::from_secs(1)).await;
        if !is_elsewhere(&error) || faults.len() + 1 >= addresses.len() {
            return Err(error);
        }
        faults.push(said_once(error.as_ref()));
        elsewhere = Some(error);
    }
}

/// The last error, with those of the addresses before it.
fn of_all_addresses(last: SessionError, faults: &[String]) -> anyhow::Error {
    match faults {
        [] | [_] => last.into(),
        all => anyhow::Error::from(last).context(all.join("; ")),
    }
}

/// Whether another address may lead to a target that serves the volume: a member of a group says
/// so, and a target that stops.
fn is_elsewhere(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(SessionError::Status { status: Status::ShuttingDown, .. }))
}

/// Whether the volume may be opened, now that the target has told its name.
fn may_open(first: First<'_>, host: &HostIdentity, session: &Session) -> anyhow::Result<()> {
    match first.take_over {
        true => Ok(()),
        false => (first.may_open)(host, &session.login().target_name),
    }
}

/// Opens the volume and connects its queues.
async fn open_first(
    first: First<'_>,
    known_by: &KnownBy,
    addresses: Vec<Address>,
    volume_name: Name,
    session: &mut Session,
) -> anyhow::Result<(Setup, Facts, Vec<Path>)> {
    let First { config, keys_file, take_over, front, generation, .. } = first;
    let claim = VolumeClaim { take_over, generation, ..access_mode(config).into() };
    let volume = session.open(&volume_name, claim).await?;
    let login = session.login();
    let shared = first.shared_memory()?;
    let mut wish = first_wish(first, &shared, login.queues_max)?;
    let (mut buffers, mut paths) = (Vec::new(), Vec::new());
    for queue in 0..wish.queues {
        let shared = Arc::clone(shared.regions());
        let memory = QueueMemory { buffers: queue_memory(&wish, front.spare_buffers)?, shared };
        let mut path = session.connect_queue(queue, wish, volume.handle, &memory).await?;
        if front.tests_paths {
            path = match path.test().await {
                Err(PathEnd::SelfTest) if wish.features.has(Features::WRITE_WITH_IMM) => {
                    tracing::warn!("WRITE_WITH_IMM does not work on this path; going on without");
                    wish.features = wish.features.without(Features::WRITE_WITH_IMM);
                    let path = session.connect_queue(queue, wish, volume.handle, &memory).await?;
                    path.test().await
                }
                tested => tested,
            }
            .map_err(NotTested)?;
        }
        let (depth, io_max_bytes) = (path.accept.depth, path.accept.io_max_bytes);
        if queue == 0 && (depth, io_max_bytes) != (wish.depth, wish.io_max_bytes) {
            // The other queues, and later connections, ask for the granted values.
            tracing::info!(
                depth = depth.get(),
                io_max_bytes,
                "the target grants less than was asked"
            );
            (wish.depth, wish.io_max_bytes) = (depth, io_max_bytes);
        }
        buffers.push(Some(memory.buffers));
        paths.push(path);
    }
    wish.in_capsule_bytes = paths[0].accept.in_capsule_bytes;
    let facts = Facts {
        resume: Some((login.session, login.epoch)),
        volume,
        instance: login.instance,
        target_name: login.target_name,
        fenced: None,
    };
    let (queues, endpoint) = (wish.queues, Endpoint::of(session, &paths));
    let KnownBy { host, credentials } = known_by.clone();
    let setup = Setup {
        volume_name,
        addresses,
        host,
        credentials,
        keys_file: keys_file.cloned(),
        wish,
        queues,
        buffers,
        shared,
        tests_paths: front.tests_paths,
        endpoint,
    };
    Ok((setup, facts, paths))
}

/// The wish of the first queue.
fn first_wish(
    first: First<'_>,
    shared: &SharedMemory,
    queues_max: u16,
) -> anyhow::Result<QueueWish> {
    let config = first.config;
    let queues = config.queues.unwrap_or_else(|| {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        narrow(cpus.min(QUEUES_DEFAULT_MAX))
    });
    Ok(QueueWish {
        depth: QueueDepth::new(config.queue_depth).context("queue_depth")?,
        io_max_bytes: u32::try_from(config.max_io.0).context("max_io")?,
        in_capsule_bytes: limits::IN_CAPSULE_MAX_BYTES,
        features: Features::WRITE_WITH_IMM.or(MESSAGES),
        digest: first.digest(shared),
        lanes: config.lanes,
        queues: queues.min(queues_max),
    })
}

/// Memory for the data of one queue: a buffer for each request, and spare ones.
pub(crate) fn queue_memory(wish: &QueueWish, spare: u16) -> anyhow::Result<Arc<Region>> {
    let bytes = (usize::from(wish.depth.get()) + usize::from(spare)) * wish.buffer_stride();
    Ok(Region::allocate(bytes, PageKind::Normal)?)
}

/// Opens a session by the first address that answers, behind those that have failed already. Tries
/// each once, and adds the failures to `faults`.
async fn connect_any(
    addresses: &[Address],
    config: &MountConfig,
    known_by: &KnownBy,
    faults: &mut Vec<String>,
) -> Result<Session, SessionError> {
    let asks_ways = config.uses_all_paths() && may_be_ways(addresses.len());
    let mut last = None;
    for address in addresses.iter().skip(faults.len()) {
        let (host, credentials) = (&known_by.host, known_by.credentials());
        let known_by = (host, credentials);
        match Session::begin_by(address, &options(config), known_by, asks_ways).await {
            Ok(mut session) => {
                if let Some(way) = WayIndex::new(faults.len()).filter(|_| asks_ways) {
                    session.set_way(way);
                }
                return Ok(session);
            }
            Err(error) => {
                tracing::debug!(%address, %error, "no session");
                faults.push(said_once(&error));
                last = Some(error);
            }
        }
    }
    Err(last.unwrap_or(SessionError::Protocol("no address")))
}
