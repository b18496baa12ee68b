//! [`Probe`]: one try to use a target, by `rblk-initiatord`: connect, LOGIN, LIST, and an I/O
//! connection with its self-test. No volume is opened, so nobody is disturbed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::{DigestWish, Encrypt};
use rblk_fabric::{Address, ConnectOptions, FabricError, PageKind, Region};
use rblk_protocol::width::wide;
use rblk_protocol::{Features, QueueDepth, RejectReason, VolumeHandle, limits};
use serde::{Deserialize, Serialize};

use super::whole;
use crate::engine::{Engine, PathEnd, QueueStats};
use crate::error::SessionError;
use crate::identity::host_identity;
use crate::session::{Credentials, HostIdentity, MESSAGES, QueueWish, Session};

/// How often to look whether the self-test has ended.
const STEP: Duration = Duration::from_millis(1);
/// How long a target may take to answer a LOGOUT.
const LOGOUT: Duration = Duration::from_secs(1);
/// Commands of the queue that is tried.
const DEPTH: u16 = 2;

/// Why a try failed, as far as the fix depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeError {
    /// Built without RDMA.
    NoVerbs,
    /// Nothing listens on that port.
    Refused,
    /// No answer.
    TimedOut,
    /// Something else answers.
    NotRblk,
    /// The target has another key than it should.
    WrongTargetKey,
    /// The target does not know the key of this host.
    HostNotAllowed,
    /// The target wants keys, and there are none here.
    KeysWanted,
    /// The target has no keys, and they are wanted here.
    NoProof,
    /// The connection would not be encrypted.
    NotEncrypted,
    /// No version in common.
    Version,
    /// The target has no room, or stops.
    Busy,
    /// Memory cannot be locked.
    Memlock,
    /// An agreed verb does not work.
    SelfTest,
    /// Something else; the text says what.
    Other,
}

/// How a try ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Probe {
    /// Everything works.
    Works {
        /// Name of the target.
        target: String,
        /// What carries the messages.
        transport: String,
        /// The device of this host.
        device: String,
        /// Volumes that this host may see.
        volumes: Vec<String>,
    },
    /// It does not.
    Failed {
        /// Why, for the fix.
        error: ProbeError,
        /// Why, for people.
        text: String,
    },
}

impl Probe {
    /// A failure that no rule knows.
    pub(super) fn other(text: String) -> Self {
        Self::Failed { error: ProbeError::Other, text }
    }
}

/// Tries a target. Each step takes at most `timeout`.
///
/// # Errors
/// No runtime can be had.
pub fn probe(
    address: &Address,
    credentials: Option<Credentials>,
    encrypt: Encrypt,
    timeout: Duration,
) -> anyhow::Result<Probe> {
    let credentials = credentials.map(|credentials| credentials.encrypting(encrypt));
    let host = match host_identity(None) {
        Ok(host) => host,
        Err(error) => return Ok(Probe::other(error.to_string())),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(async {
        let tried = try_all(address, &host, credentials.as_ref(), timeout);
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
    timeout: Duration,
) -> Result<Probe, SessionError> {
    let options = ConnectOptions { timeout, ..ConnectOptions::default() };
    let mut session = Session::connect(address, &options, host, credentials, None).await?;
    let volumes = session.list().await?.iter().map(|v| v.name.to_string()).collect();
    let (caps, target) = (session.device().caps().clone(), session.login().target_name.to_string());
    let tested = self_test(&mut session).await;
    session.logout(LOGOUT).await;
    Ok(match tested? {
        Ok(()) => {
            let (device, transport) = (caps.name, caps.transport.to_string());
            Probe::Works { target, transport, device, volumes }
        }
        Err(end) => Probe::Failed {
            error: ProbeError::SelfTest,
            text: format!("the self-test of an I/O connection failed ({end:?})"),
        },
    })
}

/// Connects one I/O queue, whose self-test begins at once, and waits for the end of that.
async fn self_test(session: &mut Session) -> Result<Result<(), PathEnd>, SessionError> {
    let depth = QueueDepth::new(DEPTH).ok_or(SessionError::Protocol("the depth of a queue"))?;
    let wish = QueueWish {
        depth,
        io_max_bytes: limits::IO_MIN_BYTES,
        in_capsule_bytes: limits::IO_MIN_BYTES,
        features: Features::WRITE_WITH_IMM.or(MESSAGES),
        digest: DigestWish::Auto,
        lanes: Some(1),
        queues: 1,
    };
    let bytes = usize::from(DEPTH) * wish.buffer_stride();
    let buffers = Region::allocate(bytes, PageKind::Normal)
        .map_err(|error| SessionError::Memory(error.to_string()))?;
    let stride = wish.buffer_stride();
    let path = session.connect_queue(0, wish, VolumeHandle(0), &buffers.into()).await?;
    let mut engine = Engine::new(depth, stride, Arc::new(QueueStats::default()))
        .with_data_max(wide(wish.io_max_bytes));
    engine.connect(path, Instant::now());
    // The engine has a deadline of its own for the self-test.
    let result = loop {
        engine.turn(Instant::now(), |_, _| {});
        if engine.is_connected() {
            break Ok(());
        }
        if let Some((end, dead)) = engine.take_ended() {
            drop(dead);
            break Err(end);
        }
        tokio::time::sleep(STEP).await;
    };
    engine.disconnect();
    while engine.take_ended().is_some() {}
    Ok(result)
}

/// What a fix depends on.
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
        // Both providers say it in these words.
        FabricError::Unreachable { reason, .. } if reason.contains("nothing listens") => {
            ProbeError::Refused
        }
        _ => ProbeError::Other,
    }
}
