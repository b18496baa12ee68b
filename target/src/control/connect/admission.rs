//! The terms that a connect request is granted, and the form of a refusal. Control decides
//! ([`crate::control::Control`] and [`crate::control::core`]); the steps that need none of its
//! state are here.

use std::time::Instant;

use rblk_config::Encrypt;
use rblk_fabric::{
    AcceptParams, AckTimeout, CipherKey, CipherKeys, Connection, ConnectionHello, Device, Incoming,
    MAX_SGE, PollerHandle, ProtectionDomain, QpLimits, Transport,
};
use rblk_protocol::auth::{self, Carrier, Hellos, PROOF_BYTES, QueueKey};
use rblk_protocol::width::narrow;
use rblk_protocol::{
    ConnectionKind, Features, HelloAccept, HelloReject, HelloRequest, InstanceId, Nonce, Offer,
    QueueDepth, RejectReason, Version, limits, negotiate,
};

use crate::control::ConnectionLimits;
use crate::control::connect::grant::Terms;
use crate::control::core::{Admitted, ConnectRefusal, Introduction, NO_KEYS};
use crate::control::peers::peer_lines::{PeerLine, PeerLines};
use crate::data::connection::{
    BounceMemory, ConnectionParams, INLINE_BYTES, Layout, ProofDue, SpareMemory, slots_of_recv,
};

/// Most RDMA READs that a target has outstanding on one connection, if device and peer allow as
/// many.
const READS_OUT_MAX: u8 = 16;
/// The text for a peer when no QP can be made for it, or its poll group cannot take it. The log has
/// the reason.
const NO_ROOM: &str = "no room: use fewer --queues or --lanes, less --queue-depth, or more --poll-groups at the target";

/// The text for a peer over TCP that does not encrypt, although it must.
const NOT_ENCRYPTED: &str =
    "tcp:// is encrypted here (encrypt = \"required\"), and the initiator does not offer it";
/// The text for a peer over TCP when the target must encrypt and cannot.
const CANNOT_ENCRYPT: &str =
    "tcp:// is encrypted here (encrypt = \"required\"), and this kernel cannot: `modprobe tls`";

const _: () = {
    assert!(NO_ROOM.len() <= limits::REJECT_TEXT_BYTES, "it would be cut");
    assert!(NOT_ENCRYPTED.len() <= limits::REJECT_TEXT_BYTES, "it would be cut");
    assert!(CANNOT_ENCRYPT.len() <= limits::REJECT_TEXT_BYTES, "it would be cut");
};

/// The terms of this target for all its peers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::control) struct House {
    /// The parameters that it offers.
    pub(in crate::control) limits: ConnectionLimits,
    /// Its run.
    pub(in crate::control) instance: InstanceId,
    /// Hosts must prove their keys.
    pub(in crate::control) requires_proof: bool,
}

/// A connection that control has decided to make.
#[derive(Debug)]
pub(in crate::control) struct Granted {
    /// The terms that the peer and this target agreed on.
    pub(in crate::control) accept: HelloAccept,
    /// The admission by core.
    pub(in crate::control) admitted: Admitted,
    /// The place of its device.
    pub(in crate::control) place: usize,
    /// The poll group that will serve it.
    pub(in crate::control) group: usize,
    /// READs that may be outstanding on it.
    pub(in crate::control) reads_out: u8,
    /// How long the device waits for an acknowledgement.
    pub(in crate::control) ack_timeout: AckTimeout,
    /// The domain of its device.
    pub(in crate::control) pd: ProtectionDomain,
    /// For an admin connection: memory that earlier ones left in that domain.
    pub(in crate::control) spares: Option<SpareMemory>,
    /// Its CQ.
    pub(in crate::control) poller: PollerHandle,
}

/// The offer of this target for a connection by a device.
fn offer(house: &House, nonce: Nonce, device: &Device, kind: ConnectionKind) -> Offer {
    let House { limits, instance, requires_proof } = *house;
    let proof = if requires_proof { Features::AUTH } else { Features::default() };
    let depth_max = match kind {
        ConnectionKind::Admin => limits::ADMIN_DEPTH,
        // The check of the configuration bounds it.
        ConnectionKind::Io { .. } => limits.queue_depth_max,
    };
    let depth = QueueDepth::new(depth_max.clamp(1, limits::QUEUE_DEPTH_MAX))
        .unwrap_or_else(|| unreachable!("clamped"));
    let io_max_bytes = limits.io_max_bytes;
    if kind == ConnectionKind::Admin {
        let in_capsule_bytes = limits::IN_CAPSULE_DEFAULT_BYTES;
        let features = proof.or(Features::WAYS);
        return Offer { depth, features, in_capsule_bytes, io_max_bytes, instance, nonce };
    }
    let imm = match device.caps().write_with_imm {
        true => Features::WRITE_WITH_IMM,
        false => Features::default(),
    };
    // Data of several commands in one message needs larger receive slots. That pays if each message
    // has a cost of its own, which is not so over a stream.
    let lists = match device.caps().transport {
        Transport::SoftTcp | Transport::SoftMemory => Features::CAPSULE_LISTS,
        _ => Features::CAPSULE_LISTS.or(Features::DATA_LISTS),
    };
    let lists = lists.or(Features::DATA_FIRST);
    let encrypts = requires_proof && limits.encrypt != Encrypt::Off && device.encrypts();
    let encrypt = if encrypts { Features::ENCRYPT } else { Features::default() };
    // The trailer of a READ is one more piece to gather.
    let digests = match device.caps().max_sges {
        0..=1 => Features::default(),
        _ => Features::DIGEST,
    };
    let in_capsule_bytes = limits.in_capsule_bytes;
    Offer {
        depth,
        features: imm.or(lists).or(digests).or(proof).or(encrypt),
        in_capsule_bytes,
        io_max_bytes,
        instance,
        nonce,
    }
}

/// Negotiates the terms of a connection.
///
/// # Errors
/// Why there are no common terms.
pub(in crate::control) fn agree(
    asked: &HelloRequest,
    house: &House,
    device: &Device,
) -> Result<HelloAccept, ConnectRefusal> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce.0).map_err(|error| no_room(error.to_string()))?;
    let agreed = negotiate(asked, &offer(house, nonce, device, asked.kind)).map_err(|reason| {
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
        ConnectRefusal { reason, text }
    })?;
    if house.requires_proof && !agreed.features.has(Features::AUTH) {
        return Err(ConnectRefusal { reason: RejectReason::NotAllowed, text: NO_KEYS.to_owned() });
    }
    check_encryption(asked.kind, house, device, agreed.features)?;
    Ok(agreed)
}

/// Whether a connection may have these features, if the configuration asks for encryption. An admin
/// connection seals its commands itself.
fn check_encryption(
    kind: ConnectionKind,
    house: &House,
    device: &Device,
    agreed: Features,
) -> Result<(), ConnectRefusal> {
    let caps = device.caps();
    let must = house.limits.encrypt == Encrypt::Required
        && caps.transport == Transport::SoftTcp
        && kind != ConnectionKind::Admin;
    if !must || agreed.has(Features::ENCRYPT) {
        return Ok(());
    }
    let text = if device.encrypts() { NOT_ENCRYPTED } else { CANNOT_ENCRYPT };
    Err(ConnectRefusal { reason: RejectReason::NotEncrypted, text: text.to_owned() })
}

/// The part of an agreed admin connection that its handshake covers.
pub(in crate::control) fn introduction(
    incoming: &Incoming,
    accept: &HelloAccept,
) -> Result<Option<Introduction>, ConnectRefusal> {
    if !accept.features.has(Features::AUTH) {
        return Ok(None);
    }
    let carrier = match incoming.device().caps().transport {
        Transport::SoftTcp => Carrier::Tcp,
        Transport::SoftMemory => Carrier::Memory,
        Transport::Iwarp => Carrier::Iwarp,
        Transport::InfiniBand | Transport::Roce | Transport::Unknown => Carrier::Verbs,
    };
    Ok(Some(Introduction { hellos: hellos(incoming, accept)?, carrier }))
}

/// Both hellos as they are sent.
fn hellos(incoming: &Incoming, accept: &HelloAccept) -> Result<Hellos, ConnectRefusal> {
    Hellos::from_private_data(&incoming.hello().0, &accept.to_wire()).map_err(|error| {
        ConnectRefusal { reason: RejectReason::Malformed, text: error.to_string() }
    })
}

/// Bytes of memory that a connection on these terms takes by a device.
pub(in crate::control) fn memory_bytes(
    accept: &HelloAccept,
    kind: ConnectionKind,
    device: &Device,
) -> usize {
    let bounce = match kind {
        ConnectionKind::Io { .. } if data_passes_through(device) => {
            BounceMemory::bytes(accept.io_max_bytes)
        }
        ConnectionKind::Io { .. } | ConnectionKind::Admin => 0,
    };
    layout(accept, kind).bytes() + bounce
}

/// Entries of a CQ that a connection on these terms takes.
pub(in crate::control) fn cq_entries(accept: &HelloAccept, kind: ConnectionKind) -> u32 {
    let layout = layout(accept, kind);
    layout.send_wrs() + layout.recv_wrs()
}

fn layout(accept: &HelloAccept, kind: ConnectionKind) -> Layout {
    Layout::new(accept.depth, accept.message_data_bytes(), kind == ConnectionKind::Admin)
}

/// READs that may be outstanding on a connection.
///
/// # Errors
/// The peer's device serves no READs, which an I/O queue needs.
pub(in crate::control) fn reads_out(
    incoming: &Incoming,
    asked: &HelloRequest,
) -> Result<u8, ConnectRefusal> {
    if asked.kind == ConnectionKind::Admin {
        return Ok(0);
    }
    // A driver may report its own device's limit here (irdma).
    let (of_cm, _) = incoming.peer_reads();
    let peer_serves = asked.reads_out(of_cm);
    let reads_out = peer_serves.min(incoming.device().caps().max_reads_out).min(READS_OUT_MAX);
    if reads_out == 0 {
        return Err(no_room("the initiator's device serves no RDMA READ, which writes need"));
    }
    Ok(reads_out)
}

/// Makes the QP of a connection, and the rest that its poll group needs to serve it.
///
/// # Errors
/// Why there is no QP. The peer got [`NO_ROOM`].
pub(in crate::control) fn prepare(
    mut incoming: Incoming,
    asked: &HelloRequest,
    granted: Granted,
    progress_max: std::time::Duration,
) -> Result<(Connection, ConnectionParams, AcceptParams), String> {
    let Granted { accept, admitted, reads_out, ack_timeout, pd, spares, poller, .. } = granted;
    incoming.set_ack_timeout(ack_timeout);
    let peer = incoming.peer();
    // Replies gather slots of the cache.
    let send_sges = narrow::<u32, _>(MAX_SGE).min(incoming.device().caps().max_sges).max(1);
    // From here on the request may end at a place without a better text, for example in a poll
    // group without room.
    incoming.refuse_with(refusal(RejectReason::LimitReached, NO_ROOM));
    let is_queue = admitted.queue.is_some();
    let own = own_domain(&incoming.device(), &pd, is_queue, accept.io_max_bytes)?;
    let (pd, bounce) = own.map_or((pd, None), |(pd, bounce)| (pd, Some(bounce)));
    let terms = Terms::new(&pd, accept, spares.as_ref()).map_err(|e| e.to_string())?;
    // Of the final terms.
    let hellos = hellos(&incoming, &terms.accept).map_err(|refused| refused.text)?;
    let stream_keys = stream_keys(&admitted, &terms.accept, &hellos);
    let proof = proof_due(&admitted, hellos);
    // A domain of its own does not reach the slots of the arena.
    let landing_slots = match bounce {
        None => landing_slots(&admitted, &terms.accept, incoming.device().caps().max_sges),
        Some(_) => 0,
    };
    let sizes = QpLimits {
        send_wrs: terms.memory.layout().send_wrs(),
        recv_wrs: terms.memory.layout().recv_wrs(),
        send_sges,
        recv_sges: landing_slots + 1,
        inline_bytes: INLINE_BYTES,
        reads_out,
        reads_in: 0,
    };
    let mut connection = incoming.prepare(&pd, &poller, sizes).map_err(|e| e.to_string())?;
    if let Some(keys) = stream_keys {
        connection.secure(keys).map_err(|e| e.to_string())?;
    }
    let Terms { accept, memory } = terms;
    let io = std::sync::Arc::default();
    let params = ConnectionParams {
        kind: asked.kind,
        admission: admitted.id,
        session: admitted.session,
        epoch: admitted.epoch,
        proof,
        in_capsule_bytes: most_in_capsule(&accept),
        io_max_bytes: accept.io_max_bytes,
        features: accept.features,
        reads_out,
        send_sges,
        landing_slots,
        memory,
        spares,
        bounce,
        progress_max,
        io,
        peer,
    };
    let hello = ConnectionHello(accept.to_wire().to_vec());
    Ok((connection, params, AcceptParams { hello, reads_out, reads_in: 0 }))
}

/// Slots of the cache that a RECV of a connection names. A stranger gets none, since hosts need
/// them for writes.
fn landing_slots(admitted: &Admitted, accept: &HelloAccept, device_sges: u32) -> u32 {
    if admitted.is_stranger { 0 } else { slots_of_recv(accept, device_sges) }
}

/// A domain for one connection alone, with memory that its data passes through, if
/// [`data_passes_through`]. An admin connection posts no READs: no peer can write to its memory in
/// any domain.
///
/// # Errors
/// The device makes no more domains, or there is no memory.
fn own_domain(
    device: &Device,
    shared: &ProtectionDomain,
    is_queue: bool,
    io_max_bytes: u32,
) -> Result<Option<(ProtectionDomain, BounceMemory)>, String> {
    if !is_queue || !data_passes_through(device) {
        return Ok(None);
    }
    let pd = shared.another().map_err(|error| error.to_string())?;
    let bounce = BounceMemory::register(&pd, io_max_bytes).map_err(|error| error.to_string())?;
    Ok(Some((pd, bounce)))
}

/// Whether the data of a connection passes through memory of its own: on devices where a READ lands
/// only in memory that is open to remote writes (iWARP).
fn data_passes_through(device: &Device) -> bool {
    device.caps().read_sink_needs_remote_write
}

/// The proof that a connection owes in its self-test, if any.
fn proof_due(admitted: &Admitted, hellos: Hellos) -> Option<Box<ProofDue>> {
    let (secret, within) = admitted.secret.as_ref()?;
    let key = QueueKey::new(secret, admitted.epoch, admitted.queue?);
    Some(Box::new(ProofDue { key, hellos, within: *within }))
}

/// The keys of a connection that is encrypted.
fn stream_keys(admitted: &Admitted, accept: &HelloAccept, hellos: &Hellos) -> Option<CipherKeys> {
    let (secret, _) =
        admitted.secret.as_ref().filter(|_| accept.features.has(Features::ENCRYPT))?;
    let (epoch, queue) = (admitted.epoch, admitted.queue?);
    let keys = auth::StreamKeys::new(secret, epoch, queue, accept.nonce, hellos);
    let cipher = |key: &auth::StreamKey| CipherKey::new(key.key(), key.iv());
    Some(CipherKeys { send: cipher(&keys.to_initiator), receive: cipher(&keys.to_target) })
}

/// Most in-capsule data of one command: of a write, or the proof in a self-test.
fn most_in_capsule(accept: &HelloAccept) -> u32 {
    match accept.features.has(Features::AUTH) {
        true => accept.in_capsule_bytes.max(narrow(PROOF_BYTES)),
        false => accept.in_capsule_bytes,
    }
}

/// A refusal for lack of resources.
pub(in crate::control) fn no_room(text: impl Into<String>) -> ConnectRefusal {
    ConnectRefusal { reason: RejectReason::LimitReached, text: text.into() }
}

/// Logs that a connection was refused. The usual retries of initiators after a start of the target
/// are no warnings.
pub(in crate::control) fn log_refusal(
    lines: &mut PeerLines,
    asked: &HelloRequest,
    peer: &str,
    refused: &ConnectRefusal,
) {
    let ConnectRefusal { reason, text } = refused;
    if !lines.may_say(PeerLine::Refused, peer, text, Instant::now()) {
        return;
    }
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

/// A refusal in the form for the peer.
pub(in crate::control) fn refusal(reason: RejectReason, text: &str) -> ConnectionHello {
    let reject = HelloReject {
        reason: Some(reason),
        newest: Version::NEWEST,
        oldest: Version::OLDEST,
        text: text.to_owned(),
    };
    ConnectionHello(reject.to_wire())
}

#[cfg(test)]
mod tests {
    use rblk_fabric::soft;
    use rblk_fabric::soft::network::Network;
    use rblk_fabric::soft::tls::kernel_has_tls;
    use rblk_protocol::auth::SessionSecret;
    use rblk_protocol::width::wide64;
    use rblk_protocol::{Epoch, SessionId};

    use super::*;
    use crate::control::core::Capacity;
    use crate::volume::ids::{AdmissionId, SessionIndex};

    fn house(requires_proof: bool) -> House {
        let limits = ConnectionLimits {
            queue_depth_max: 512,
            in_capsule_bytes: 4096,
            io_max_bytes: 1 << 20,
            capacity: Capacity::new(4, None, 1 << 30),
            lease: std::time::Duration::from_secs(30),
            encrypt: Encrypt::Auto,
        };
        House { limits, instance: InstanceId([9; 16]), requires_proof }
    }

    fn asked(kind: ConnectionKind) -> HelloRequest {
        HelloRequest {
            kind,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(limits::QUEUE_DEPTH_MAX).unwrap(),
            features: Features::default(),
            in_capsule_bytes: limits::IN_CAPSULE_MAX_BYTES,
            io_max_bytes: limits::IO_MAX_BYTES,
            epoch: Epoch(0),
            reads_in: 0,
            session: SessionId::default(),
        }
    }

    #[test]
    fn a_peer_without_keys_is_refused_with_the_reason() {
        let device = Device::Soft(Network::new(1).device());
        for kind in [ConnectionKind::Admin, ConnectionKind::Io { queue: 0 }] {
            let refused = agree(&asked(kind), &house(true), &device).unwrap_err();
            assert_eq!(refused.reason, RejectReason::NotAllowed);
            assert!(refused.text.contains("prove their keys"), "{}", refused.text);
            let able = HelloRequest { features: Features::AUTH, ..asked(kind) };
            assert!(agree(&able, &house(true), &device).unwrap().features.has(Features::AUTH));
            // A target that asks for no proof says so, and the initiator decides.
            assert!(!agree(&able, &house(false), &device).unwrap().features.has(Features::AUTH));
        }
    }

    #[test]
    fn data_over_tcp_is_encrypted_where_the_kernel_can() {
        let (tcp, memory) = (soft::Device::tcp(), Network::new(1).device());
        let (tcp, memory) = (Device::Soft(tcp), Device::Soft(memory));
        let can = kernel_has_tls().is_ok();
        let io = ConnectionKind::Io { queue: 0 };
        let both = Features::AUTH.or(Features::ENCRYPT);
        let house = |encrypt| {
            let House { limits, .. } = house(true);
            House { limits: ConnectionLimits { encrypt, ..limits }, ..house(true) }
        };
        let agreed = |encrypt, device: &Device, kind, features| {
            let asked = HelloRequest { features, ..asked(kind) };
            agree(&asked, &house(encrypt), device).map(|a| a.features.has(Features::ENCRYPT))
        };
        assert_eq!(agreed(Encrypt::Auto, &tcp, io, both), Ok(can));
        assert_eq!(agreed(Encrypt::Auto, &tcp, io, Features::AUTH), Ok(false));
        assert_eq!(agreed(Encrypt::Off, &tcp, io, both), Ok(false));
        // This concerns TCP, and data: admin commands have seals.
        assert_eq!(agreed(Encrypt::Required, &memory, io, both), Ok(false));
        assert_eq!(agreed(Encrypt::Required, &tcp, ConnectionKind::Admin, both), Ok(false));
        let refused = agreed(Encrypt::Required, &tcp, io, Features::AUTH).unwrap_err();
        assert_eq!(refused.reason, RejectReason::NotEncrypted);
        let why = if can { "the initiator does not offer it" } else { "`modprobe tls`" };
        assert!(refused.text.contains(why), "{}", refused.text);
        match agreed(Encrypt::Required, &tcp, io, both) {
            Ok(encrypted) => assert!(can && encrypted),
            Err(refused) => assert!(!can && refused.text == CANNOT_ENCRYPT),
        }
    }

    #[test]
    fn both_ends_have_the_keys_of_a_stream() {
        let accept = agree(
            &HelloRequest { features: Features::AUTH, ..asked(ConnectionKind::Io { queue: 3 }) },
            &house(true),
            &Device::Soft(Network::new(1).device()),
        )
        .unwrap();
        let hellos = Hellos::new(&asked(ConnectionKind::Io { queue: 3 }), &accept);
        let secret = SessionSecret::from_bytes(&[5; 32]);
        let admitted = Admitted {
            id: AdmissionId(1),
            session: SessionIndex::NONE,
            epoch: Epoch(7),
            queue: Some(3),
            is_stranger: false,
            secret: Some((secret, std::time::Duration::from_secs(1))),
        };
        assert!(stream_keys(&admitted, &accept, &hellos).is_none(), "it was not agreed");
        let features = Features::AUTH.or(Features::ENCRYPT);
        let accept = HelloAccept { features, ..accept };
        assert!(stream_keys(&admitted, &accept, &hellos).is_some());
        let strange = Admitted { secret: None, ..admitted };
        assert!(stream_keys(&strange, &accept, &hellos).is_none(), "nobody proves anything");
        // Data lands in slots of the cache by the queues of hosts, and not by those of strangers.
        let features = Features::CAPSULE_LISTS.or(Features::DATA_LISTS).or(Features::DATA_FIRST);
        let accept = HelloAccept { features, in_capsule_bytes: 4096, ..accept };
        assert!(landing_slots(&strange, &accept, 30) > 0);
        let strange = Admitted { is_stranger: true, ..strange };
        assert_eq!(landing_slots(&strange, &accept, 30), 0);
    }

    #[test]
    fn an_admin_connection_has_the_admin_depth() {
        let device = Device::Soft(Network::new(1).device());
        let granted = |kind| agree(&asked(kind), &house(false), &device).unwrap();
        let admin = granted(ConnectionKind::Admin);
        assert_eq!(admin.depth.get(), limits::ADMIN_DEPTH);
        let bytes = wide64(memory_bytes(&admin, ConnectionKind::Admin, &device));
        assert!(bytes < 160 << 10, "{bytes} bytes for one that has not logged in");
        assert_eq!(granted(ConnectionKind::Io { queue: 0 }).depth.get(), 512);
    }

    #[test]
    fn memory_that_data_passes_through_counts() {
        let kinds = [ConnectionKind::Admin, ConnectionKind::Io { queue: 0 }];
        let [elsewhere, iwarp] = [Network::new(1), Network::with_iwarp_rules(1)]
            .map(|network| Device::Soft(network.device()));
        let more = kinds.map(|kind| {
            // The terms that both agree on.
            let granted = agree(&asked(kind), &house(false), &iwarp).unwrap();
            let bytes = |device| memory_bytes(&granted, kind, device);
            bytes(&iwarp) - bytes(&elsewhere)
        });
        assert_eq!(more, [0, 8 * (1 << 20) + 4096]);
    }
}
