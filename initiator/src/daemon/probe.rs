//! [`Probe`]: one try to use a target, by `rblk-initiatord`: connect, LOGIN, LIST, an I/O
//! connection with its self-test, and one READ of a volume as large as a mount's. The volume is
//! opened read-only: that excludes no other host, and no other host can prevent it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::{DigestWish, Encrypt};
use rblk_fabric::{Address, ConnectOptions, FabricError, PageKind, Region};
use rblk_operate::mount::probe_result::{LargeRead, Probe, ProbeError, ReadFault};
use rblk_protocol::width::wide;
use rblk_protocol::{
    AccessMode, Features, Name, OpenReply, QueueDepth, RejectReason, Tag, VolumeHandle, limits,
};

use crate::engine::io::{Io, IoOp};
use crate::engine::{Engine, PathEnd, QueueStats};
use crate::volume::error::SessionError;
use crate::volume::host_identity::host_identity;
use crate::volume::session::{Credentials, HostIdentity, MESSAGES, QueueWish, Session};

/// How often to check whether the self-test has ended.
const STEP: Duration = Duration::from_millis(1);
/// Time for the LOGOUT.
const LOGOUT: Duration = Duration::from_secs(1);
/// The depth of the tried queue.
const DEPTH: u16 = 2;

/// Time for a whole probe, from the time for a step.
fn whole(step: Duration) -> Duration {
    step.saturating_mul(3)
}

/// The data to read.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// The volume; if it is empty, the first volume of the target's list.
    pub volume: String,
    /// Bytes.
    pub bytes: u32,
}

/// Tries a target. Each step takes at most `timeout`.
///
/// # Errors
/// The runtime cannot be made.
pub fn probe(
    address: &Address,
    credentials: Option<Credentials>,
    encrypt: Encrypt,
    wanted: &Wanted,
    timeout: Duration,
) -> anyhow::Result<Probe> {
    let credentials = credentials.map(|credentials| credentials.encrypting(encrypt));
    let host = match host_identity(None) {
        Ok(host) => host,
        Err(error) => return Ok(Probe::other(error.to_string())),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(async {
        let tried = try_all(address, &host, credentials.as_ref(), wanted, timeout);
        tokio::time::timeout(whole(timeout), tried).await
    });
    runtime.shutdown_timeout(LOGOUT);
    Ok(match found {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => Probe::Failed { error: kind_of(&error), text: error.to_string() },
        Err(_) => Probe::Failed {
            error: ProbeError::TimedOut,
            text: format!("{address} did not answer within {:?}", whole(timeout)),
        },
    })
}

async fn try_all(
    address: &Address,
    host: &HostIdentity,
    credentials: Option<&Credentials>,
    wanted: &Wanted,
    timeout: Duration,
) -> Result<Probe, SessionError> {
    let options = ConnectOptions { timeout, ..ConnectOptions::default() };
    let mut session = Session::connect(address, &options, host, credentials, None).await?;
    let volumes: Vec<_> = session.list().await?.iter().map(|v| v.name).collect();
    let (caps, target) = (session.device().caps().clone(), session.login().target_name.to_string());
    let chosen = volumes.iter().find(|v| v.as_str() == wanted.volume || wanted.volume.is_empty());
    let opened = match chosen {
        // A host without the right to open it learns that from the mount.
        Some(name) => session.open(name, AccessMode::ReadOnly).await.ok().map(|v| (*name, v)),
        None => None,
    };
    let tested = test(&mut session, opened, wanted.bytes, timeout).await;
    session.logout(LOGOUT).await;
    Ok(match tested? {
        Ok(data) => {
            let (device, transport) = (caps.name, caps.transport.to_string());
            let volumes = volumes.iter().map(ToString::to_string).collect();
            Probe::Works { target, transport, device, volumes, data }
        }
        Err(end) => Probe::Failed {
            error: ProbeError::SelfTest,
            text: format!("the self-test of an I/O connection failed: {end}"),
        },
    })
}

/// Connects one I/O queue, waits for the end of its self-test, and reads the volume.
async fn test(
    session: &mut Session,
    opened: Option<(Name, OpenReply)>,
    bytes: u32,
    timeout: Duration,
) -> Result<Result<Option<LargeRead>, PathEnd>, SessionError> {
    let depth = QueueDepth::new(DEPTH).ok_or(SessionError::Protocol("the depth of a queue"))?;
    let io_max_bytes = bytes.max(limits::IO_MIN_BYTES);
    let wish = QueueWish {
        depth,
        io_max_bytes,
        in_capsule_bytes: limits::IO_MIN_BYTES,
        features: Features::WRITE_WITH_IMM.or(MESSAGES),
        digest: DigestWish::Auto,
        lanes: Some(1),
        queues: 1,
    };
    let stride = wish.buffer_stride();
    let buffers = Region::allocate(usize::from(DEPTH) * stride, PageKind::Normal)
        .map_err(|error| SessionError::Memory(error.to_string()))?;
    let handle = opened.as_ref().map_or(VolumeHandle(0), |(_, volume)| volume.handle);
    let path = session.connect_queue(0, wish, handle, &buffers.into()).await?;
    let io_max = path.accept.io_max_bytes.min(io_max_bytes);
    let mut engine = Engine::new(depth, stride, Arc::new(QueueStats::default()))
        .with_data_max(wide(wish.io_max_bytes));
    engine.connect(path, Instant::now());
    // The engine has a deadline of its own for the self-test.
    let mut result = loop {
        engine.turn(Instant::now(), |_, _| {});
        if engine.is_connected() {
            break Ok(None);
        }
        if let Some((end, dead)) = engine.take_ended() {
            drop(dead);
            break Err(end);
        }
        tokio::time::sleep(STEP).await;
    };
    if let (Ok(data), Some((name, volume))) = (&mut result, opened) {
        *data = read(&mut engine, &name, &volume, io_max, timeout).await;
    }
    engine.disconnect();
    while engine.take_ended().is_some() {}
    Ok(result)
}

/// Reads the start of a volume, as much as one command does.
async fn read(
    engine: &mut Engine,
    name: &Name,
    volume: &OpenReply,
    io_max: u32,
    timeout: Duration,
) -> Option<LargeRead> {
    let bytes = volume.blocks.bytes(volume.block_size)?.min(io_max.into());
    let io = Io::new(IoOp::Read, 0, bytes, volume.block_size)?;
    engine.submit(Tag(0), io).ok()?;
    let begun = Instant::now();
    let mut answer = None;
    let fault = loop {
        engine.turn(Instant::now(), |_, result| answer = Some(result));
        match answer {
            Some(errno @ ..0) => break Some(ReadFault::Errno(-errno)),
            Some(_) => break None,
            None if begun.elapsed() >= timeout => break Some(ReadFault::Silent),
            None => {}
        }
        if let Some((end, dead)) = engine.take_ended() {
            drop(dead);
            break Some(ReadFault::Ended(end.to_string()));
        }
        tokio::time::sleep(STEP).await;
    };
    Some(LargeRead { volume: name.to_string(), bytes, took: begun.elapsed(), fault })
}

/// The kind of an error, which selects the fix.
fn kind_of(error: &SessionError) -> ProbeError {
    match error {
        SessionError::Fabric(error) => kind_of_fabric(error),
        SessionError::Refused { reject, .. } => match reject.reason {
            Some(RejectReason::Version) => ProbeError::Version,
            Some(RejectReason::NotAllowed) => ProbeError::KeysWanted,
            Some(RejectReason::NotEncrypted) => ProbeError::NotEncrypted,
            Some(
                RejectReason::LimitReached | RejectReason::ShuttingDown | RejectReason::Crowded,
            ) => ProbeError::Busy,
            _ => ProbeError::Other,
        },
        SessionError::NotRblk { .. } => ProbeError::NotRblk,
        SessionError::TimedOut { .. } => ProbeError::TimedOut,
        SessionError::NoProof { .. } => ProbeError::NoProof,
        SessionError::NotEncrypted { .. } => ProbeError::NotEncrypted,
        SessionError::WrongTargetKey { .. } => ProbeError::WrongTargetKey,
        SessionError::HostNotAllowed { .. } => ProbeError::HostNotAllowed,
        _ => ProbeError::Other,
    }
}

fn kind_of_fabric(error: &FabricError) -> ProbeError {
    match error {
        FabricError::NoVerbs(_) => ProbeError::NoVerbs,
        FabricError::TimedOut { .. } => ProbeError::TimedOut,
        FabricError::NotRblk { .. } => ProbeError::NotRblk,
        FabricError::Busy { .. } => ProbeError::Busy,
        FabricError::MemlockTooSmall { .. } => ProbeError::Memlock,
        // Both providers use these words.
        FabricError::Unreachable { reason, .. } if reason.contains("nothing listens") => {
            ProbeError::Refused
        }
        _ => ProbeError::Other,
    }
}
