//! From a connect request to an accepted connection, or a refusal that says why.

use std::time::Instant;

use rblk_fabric::{AcceptParams, ConnectionHello, Incoming, MAX_SGE, QpLimits, Transport};
use rblk_protocol::{
    ConnectionKind, Features, HelloReject, HelloRequest, Offer, QueueDepth, RejectReason,
    SessionId, Version, limits, negotiate,
};

use super::Control;
use super::core::Admitted;
use crate::connection::{ConnectionParams, SessionSlot, patience};
use crate::poll_group::ToGroup;
use crate::terms::Terms;

/// READs a target has outstanding on one connection at most, where device and peer have more.
const READS_OUT_MAX: u8 = 16;
/// What a peer is told when no QP can be made for it, or its poll group cannot take it; the log
/// says which.
const NO_ROOM: &str = "no room: use fewer --queues or --lanes, less --queue-depth, or more --poll-groups at the target";

const _: () = assert!(NO_ROOM.len() <= limits::REJECT_TEXT_BYTES, "it would be cut");

impl Control {
    /// Answers a connect request.
    pub(super) fn admit(&mut self, incoming: Incoming) {
        let peer = incoming.peer();
        let asked = match HelloRequest::from_wire(&incoming.hello().0) {
            Ok(asked) => asked,
            Err(error) => {
                tracing::warn!(peer, %error, "refused a connection");
                return incoming.reject(&refusal(RejectReason::Malformed, &error.to_string()));
            }
        };
        if let Err((incoming, reason, text)) = self.try_admit(incoming, &asked, &peer) {
            tell(&asked, &peer, reason, &text);
            if let Some(incoming) = incoming {
                incoming.reject(&refusal(reason, &text));
            }
        }
    }

    fn offer(&self, incoming: &Incoming) -> Offer {
        let device = incoming.device();
        let imm = if device.caps().write_with_imm {
            Features::WRITE_WITH_IMM
        } else {
            Features::default()
        };
        // Data of several commands in a message takes larger receive slots. It pays where a message
        // has a price of its own: not over a stream.
        let lists = match device.caps().transport {
            Transport::SoftTcp | Transport::SoftMemory => Features::CAPSULE_LISTS,
            _ => Features::CAPSULE_LISTS.or(Features::DATA_LISTS),
        };
        // The bounds were checked by the configuration.
        let depth = QueueDepth::new(self.limits.queue_depth_max.clamp(1, limits::QUEUE_DEPTH_MAX));
        Offer {
            depth: depth.unwrap_or_else(|| unreachable!("clamped")),
            features: imm.or(lists),
            in_capsule_bytes: self.limits.in_capsule_bytes,
            io_max_bytes: self.limits.io_max_bytes,
            instance: self.instance,
        }
    }

    fn try_admit(
        &mut self,
        mut incoming: Incoming,
        asked: &HelloRequest,
        peer: &str,
    ) -> Result<(), (Option<Box<Incoming>>, RejectReason, String)> {
        let mut offer = self.offer(&incoming);
        if asked.kind == ConnectionKind::Admin {
            offer.in_capsule_bytes = limits::IN_CAPSULE_DEFAULT_BYTES;
            offer.features = Features::default();
        }
        let accept = match negotiate(asked, &offer) {
            Ok(accept) => accept,
            Err(reason) => {
                let text = match reason {
                    RejectReason::Version => format!(
                        "no common version: we speak {} to {}, you {} to {}",
                        Version::OLDEST.0,
                        Version::NEWEST.0,
                        asked.oldest.0,
                        asked.newest.0
                    ),
                    _ => format!(
                        "max I/O of {} bytes is below {}",
                        asked.io_max_bytes,
                        limits::IO_MIN_BYTES
                    ),
                };
                return Err((Some(Box::new(incoming)), reason, text));
            }
        };
        let device_at = match self.device(&incoming.device()) {
            Ok(at) => at,
            Err(error) => {
                tracing::error!(%error, "cannot serve by this device");
                return Err((
                    Some(Box::new(incoming)),
                    RejectReason::LimitReached,
                    error.to_string(),
                ));
            }
        };
        let mut fresh = [0; 16];
        if let Err(error) = getrandom::fill(&mut fresh) {
            return Err((Some(Box::new(incoming)), RejectReason::LimitReached, error.to_string()));
        }
        let Admitted { session, epoch, queue } =
            match self.core.connect(asked, peer, SessionId(fresh), Instant::now()) {
                Ok(admitted) => admitted,
                Err(refused) => {
                    return Err((Some(Box::new(incoming)), refused.reason, refused.text));
                }
            };
        // What it ends goes to the poll groups before the new connection does.
        self.carry_out();
        let device = incoming.device();
        let caps = device.caps();
        let (peer_serves, _) = incoming.peer_reads();
        let reads_out = peer_serves.min(caps.max_reads_out).min(READS_OUT_MAX);
        if queue.is_some() && reads_out == 0 {
            let text = "the initiator's device serves no RDMA READ, which writes need".to_owned();
            self.core.gone(session, epoch, asked.kind, Instant::now());
            return Err((Some(Box::new(incoming)), RejectReason::LimitReached, text));
        }
        // Answers gather slots of the cache.
        let most = u32::try_from(MAX_SGE).unwrap_or(1);
        let send_sges = most.min(caps.max_sges).max(1);
        let turn = queue.map_or(self.next_group, |queue| of_queue(session, queue));
        let group = turn % self.groups.len();
        let (pd, poller) = match self.poller(device_at, group) {
            Ok(made) => made,
            Err(text) => {
                self.core.gone(session, epoch, asked.kind, Instant::now());
                return Err((Some(Box::new(incoming)), RejectReason::LimitReached, text));
            }
        };
        // From here on it may end where nobody can say more, as in a poll group that has no room.
        incoming.refuse_with(refusal(RejectReason::LimitReached, NO_ROOM));
        let prepared = Terms::new(&pd, accept, queue.is_none())
            .map_err(|error| error.to_string())
            .and_then(|terms| {
                let sizes = QpLimits {
                    send_wrs: terms.layout.send_wrs(),
                    recv_wrs: terms.layout.recv_wrs(),
                    send_sges,
                    inline_bytes: 64,
                    reads_out,
                    reads_in: 0,
                };
                let connection =
                    incoming.prepare(&pd, &poller, sizes).map_err(|e| e.to_string())?;
                Ok((connection, terms))
            });
        let (connection, Terms { accept, layout, memory }) = match prepared {
            Ok(prepared) => prepared,
            Err(text) => {
                self.core.gone(session, epoch, asked.kind, Instant::now());
                return Err((None, RejectReason::LimitReached, text));
            }
        };
        // The heart-beats of several mounts then prove all poll groups.
        self.next_group = self.next_group.wrapping_add(usize::from(queue.is_none()));
        let params = ConnectionParams {
            kind: asked.kind,
            session,
            epoch,
            layout,
            in_capsule_bytes: accept.in_capsule_bytes,
            io_max_bytes: accept.io_max_bytes,
            features: accept.features,
            reads_out,
            send_sges,
            memory,
            patience: patience(self.core.sessions().get(session).and_then(|s| s.detect)),
            peer: peer.to_owned(),
        };
        let accept = AcceptParams {
            hello: ConnectionHello(accept.to_wire().to_vec()),
            reads_out,
            reads_in: 0,
        };
        tracing::info!(peer, kind = ?asked.kind, session = session.0, epoch = epoch.0, group, "connection");
        self.hand_over(
            group,
            ToGroup::AddConnection {
                poller: device_at,
                connection,
                params: Box::new(params),
                accept,
            },
        );
        Ok(())
    }
}

/// Whose turn it is among the poll groups to serve a queue. By its number, not in the order of
/// arrival: an initiator that gives each queue several connections numbers the second ones behind
/// all first ones, so the first ones, which have most of the work, are on all poll groups, whatever
/// comes in between.
fn of_queue(session: SessionSlot, queue: u16) -> usize {
    usize::from(session.0) + 1 + usize::from(queue)
}

/// Says in the log that a connection was refused. What initiators do after every start of a target
/// is no warning.
fn tell(asked: &HelloRequest, peer: &str, reason: RejectReason, text: &str) {
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

fn refusal(reason: RejectReason, text: &str) -> ConnectionHello {
    let reject = HelloReject {
        reason: Some(reason),
        newest: Version::NEWEST,
        oldest: Version::OLDEST,
        text: text.to_owned(),
    };
    ConnectionHello(reject.to_wire())
}
