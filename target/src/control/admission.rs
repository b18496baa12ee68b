//! What a connect request is granted, and how a refusal is sent. Control decides
//! ([`super::Control`] and [`super::core`]); the steps that need none of its state are here.

use rblk_fabric::{
    AcceptParams, Connection, ConnectionHello, Device, Incoming, MAX_SGE, PollerHandle,
    ProtectionDomain, QpLimits, Transport,
};
use rblk_protocol::width::narrow;
use rblk_protocol::{
    ConnectionKind, Features, HelloAccept, HelloReject, HelloRequest, InstanceId, Offer,
    QueueDepth, RejectReason, Version, limits, negotiate,
};

use super::Limits;
use super::core::{Admitted, Refused};
use crate::connection::{BounceMemory, ConnectionParams};
use crate::terms::Terms;

/// Most RDMA READs that a target has outstanding on one connection, where device and peer allow
/// more.
const READS_OUT_MAX: u8 = 16;
/// The text for a peer when no QP can be made for it, or its poll group cannot take it. The log
/// says which.
const NO_ROOM: &str = "no room: use fewer --queues or --lanes, less --queue-depth, or more --poll-groups at the target";

const _: () = assert!(NO_ROOM.len() <= limits::REJECT_TEXT_BYTES, "it would be cut");

/// A connection that control has decided to make.
#[derive(Debug)]
pub(super) struct Granted {
    /// What the peer and this target agreed on.
    pub(super) accept: HelloAccept,
    /// Its session.
    pub(super) admitted: Admitted,
    /// The place of its device.
    pub(super) place: usize,
    /// The poll group that will serve it.
    pub(super) group: usize,
    /// READs that may be outstanding on it.
    pub(super) reads_out: u8,
    /// The domain of its device.
    pub(super) pd: ProtectionDomain,
    /// Its CQ.
    pub(super) poller: PollerHandle,
}

/// What this target offers on a connection by a device.
fn offer(limits: &Limits, instance: InstanceId, device: &Device, kind: ConnectionKind) -> Offer {
    // The configuration was checked.
    let depth = QueueDepth::new(limits.queue_depth_max.clamp(1, limits::QUEUE_DEPTH_MAX))
        .unwrap_or_else(|| unreachable!("clamped"));
    let io_max_bytes = limits.io_max_bytes;
    if kind == ConnectionKind::Admin {
        let in_capsule_bytes = limits::IN_CAPSULE_DEFAULT_BYTES;
        let features = Features::default();
        return Offer { depth, features, in_capsule_bytes, io_max_bytes, instance };
    }
    let imm = match device.caps().write_with_imm {
        true => Features::WRITE_WITH_IMM,
        false => Features::default(),
    };
    // Data of several commands in one message needs larger receive slots. That pays where each
    // message has a cost of its own, and over a stream it has none.
    let lists = match device.caps().transport {
        Transport::SoftTcp | Transport::SoftMemory => Features::CAPSULE_LISTS,
        _ => Features::CAPSULE_LISTS.or(Features::DATA_LISTS),
    };
    let in_capsule_bytes = limits.in_capsule_bytes;
    Offer { depth, features: imm.or(lists), in_capsule_bytes, io_max_bytes, instance }
}

/// What a peer that asked for this gets.
///
/// # Errors
/// Why there is nothing to agree on.
pub(super) fn agree(
    asked: &HelloRequest,
    limits: &Limits,
    instance: InstanceId,
    device: &Device,
) -> Result<HelloAccept, Refused> {
    negotiate(asked, &offer(limits, instance, device, asked.kind)).map_err(|reason| {
        let text = match reason {
            RejectReason::Version => format!(
                "no common version: we speak {} to {}, you {} to {}",
                Version::OLDEST.0,
                Version::NEWEST.0,
                asked.oldest.0,
                asked.newest.0
            ),
            _ => {
                format!("max I/O of {} bytes is below {}", asked.io_max_bytes, limits::IO_MIN_BYTES)
            }
        };
        Refused { reason, text }
    })
}

/// READs that may be outstanding on a connection.
///
/// # Errors
/// The peer's device serves none, and a queue needs them.
pub(super) fn reads_out(incoming: &Incoming, is_queue: bool) -> Result<u8, Refused> {
    let (peer_serves, _) = incoming.peer_reads();
    let reads_out = peer_serves.min(incoming.device().caps().max_reads_out).min(READS_OUT_MAX);
    if is_queue && reads_out == 0 {
        return Err(no_room("the initiator's device serves no RDMA READ, which writes need"));
    }
    Ok(reads_out)
}

/// Makes the QP of a connection, and what its poll group needs to serve it.
///
/// # Errors
/// Why there is no QP. The peer was told [`NO_ROOM`].
pub(super) fn prepare(
    mut incoming: Incoming,
    asked: &HelloRequest,
    granted: Granted,
    progress_max: std::time::Duration,
) -> Result<(Connection, ConnectionParams, AcceptParams), String> {
    let Granted { accept, admitted, reads_out, pd, poller, .. } = granted;
    let peer = incoming.peer();
    // Answers gather slots of the cache.
    let send_sges = narrow::<u32, _>(MAX_SGE).min(incoming.device().caps().max_sges).max(1);
    // From here on the request may end where no better text is known, as in a poll group that has
    // no room.
    incoming.refuse_with(refusal(RejectReason::LimitReached, NO_ROOM));
    let is_queue = admitted.queue.is_some();
    let own = own_domain(&incoming.device(), is_queue, accept.io_max_bytes)?;
    let (pd, bounce) = own.map_or((pd, None), |(pd, bounce)| (pd, Some(bounce)));
    let terms = Terms::new(&pd, accept, !is_queue).map_err(|e| e.to_string())?;
    let sizes = QpLimits {
        send_wrs: terms.layout.send_wrs(),
        recv_wrs: terms.layout.recv_wrs(),
        send_sges,
        inline_bytes: 64,
        reads_out,
        reads_in: 0,
    };
    let connection = incoming.prepare(&pd, &poller, sizes).map_err(|e| e.to_string())?;
    let Terms { accept, layout, memory } = terms;
    let params = ConnectionParams {
        kind: asked.kind,
        session: admitted.session,
        epoch: admitted.epoch,
        layout,
        in_capsule_bytes: accept.in_capsule_bytes,
        io_max_bytes: accept.io_max_bytes,
        features: accept.features,
        reads_out,
        send_sges,
        memory,
        bounce,
        progress_max,
        peer,
    };
    let hello = ConnectionHello(accept.to_wire().to_vec());
    Ok((connection, params, AcceptParams { hello, reads_out, reads_in: 0 }))
}

/// A domain for one connection alone, and memory in it that the data of the connection passes
/// through, on devices where READs land only in memory that can be written from afar (iWARP). An
/// admin connection READs nothing: nothing of it can be written from afar in any domain.
///
/// # Errors
/// The device makes no more domains, or there is no memory.
fn own_domain(
    device: &Device,
    is_queue: bool,
    io_max_bytes: u32,
) -> Result<Option<(ProtectionDomain, BounceMemory)>, String> {
    if !is_queue || !device.caps().read_sink_needs_remote_write {
        return Ok(None);
    }
    let pd = device.alloc_pd().map_err(|error| error.to_string())?;
    let bounce = BounceMemory::register(&pd, io_max_bytes).map_err(|error| error.to_string())?;
    Ok(Some((pd, bounce)))
}

/// A refusal because something is short.
pub(super) fn no_room(text: impl Into<String>) -> Refused {
    Refused { reason: RejectReason::LimitReached, text: text.into() }
}

/// Says in the log that a connection was refused. What initiators do after every start of a target
/// is no warning.
pub(super) fn log_refusal(asked: &HelloRequest, peer: &str, refused: &Refused) {
    let Refused { reason, text } = refused;
    match reason {
        RejectReason::NoSuchSession if asked.kind == ConnectionKind::Admin => tracing::info!(
            peer,
            "an initiator comes back with a session that this target does not know, as after a restart of the target: \
             it begins a new session"
        ),
        RejectReason::NoSuchSession | RejectReason::StaleEpoch | RejectReason::ShuttingDown => {
            tracing::info!(peer, ?reason, text, "refused a connection; the initiator tries again");
        }
        _ => tracing::warn!(peer, ?reason, text, "refused a connection"),
    }
}

/// A refusal as the peer gets it.
pub(super) fn refusal(reason: RejectReason, text: &str) -> ConnectionHello {
    let reject = HelloReject {
        reason: Some(reason),
        newest: Version::NEWEST,
        oldest: Version::OLDEST,
        text: text.to_owned(),
    };
    ConnectionHello(reject.to_wire())
}
