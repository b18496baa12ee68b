//! [`Lanes`]: connects the QPs (lanes) of an I/O queue, and makes a [`Path`] of them.

use std::time::Instant;

use rblk_config::DigestWish;
use rblk_config::Encrypt;
use rblk_fabric::soft::tls::kernel_has_tls;
use rblk_fabric::{
    Address, CipherKey, CipherKeys, ConnectOptions, Connection, ConnectionHello, Device, Poller,
    PollerHandle, ProtectionDomain, QpLimits, Route, Scheme, Transport,
};
use rblk_protocol::auth::{self, Hellos, QueueKey, SessionSecret};
use rblk_protocol::{
    ConnectionKind, Epoch, Features, HelloAccept, HelloRequest, Nonce, SessionId, Version,
    VolumeHandle, limits,
};

use super::crowded::Crowded;
use super::wish::QueueWish;
use super::{explain, parse_accept};
use crate::engine::path::memory_registration::MemoryRegistration;
use crate::engine::path::{DATA_LIST_SGES, LaneProof, Path, PathLayout, PathMemory, retire};
use crate::engine::ways::WayIndex;
use crate::engine::ways::choice::WayTerms;
use crate::volume::error::SessionError;

/// Limit of the target's RDMA READs that a queue serves at once, if the device can.
const READS_IN_MAX: u8 = 16;

/// Connections with their CQ, before they are a path. If they do not become one they are destroyed,
/// and nothing waits for that.
struct UnprovenLanes {
    connections: Vec<Connection>,
    proofs: Vec<LaneProof>,
    poller: Option<Box<dyn Poller>>,
}

impl UnprovenLanes {
    fn take(&mut self) -> Option<(Box<dyn Poller>, Vec<Connection>)> {
        self.poller.take().map(|poller| (poller, std::mem::take(&mut self.connections)))
    }
}

impl Drop for UnprovenLanes {
    fn drop(&mut self) {
        if let Some((poller, connections)) = self.take() {
            retire(connections, poller);
        }
    }
}

/// A connected QP.
struct Connected {
    connection: Connection,
    accept: HelloAccept,
    proof: Option<LaneProof>,
}

/// The target of a session's I/O connections, apart from its admin connection.
#[derive(Debug)]
pub(super) struct Lanes<'s> {
    pub(super) address: &'s Address,
    pub(super) options: &'s ConnectOptions,
    pub(super) device: &'s Device,
    pub(super) pd: &'s ProtectionDomain,
    pub(super) session: SessionId,
    pub(super) epoch: Epoch,
    /// The secret for the lanes' proofs, if the ends proved their keys.
    pub(super) secret: Option<&'s SessionSecret>,
    /// The encryption of lanes over TCP.
    pub(super) encrypt: Encrypt,
}

impl Lanes<'_> {
    /// Connects a queue with as many of its lanes as the target takes, at least one.
    ///
    /// # Errors
    /// [`SessionError`].
    pub(super) async fn connect_queue(
        &self,
        queue: u16,
        wish: QueueWish,
        volume: VolumeHandle,
        memory: MemoryRegistration,
    ) -> Result<Path, SessionError> {
        self.can_encrypt()?;
        let asked = self.hello(queue, wish);
        let caps = self.device.caps();
        let layout = PathLayout { depth: wish.depth };
        let sizes = layout.qp_limits(caps.inline_bytes, asked.reads_in, asked.features);
        let entries = u32::from(wish.lanes(caps)) * (sizes.send_wrs + sizes.recv_wrs);
        let (poller, handle) = self.pd.poller(entries)?;
        let first = self.connect_lane(&handle, sizes, &asked).await?;
        let Connected { connection, accept, proof } = first;
        let mut made = UnprovenLanes {
            connections: vec![connection],
            proofs: proof.into_iter().collect(),
            poller: Some(poller),
        };
        // An encrypted stream detects every change by itself.
        let is_checked = accept.features.0 & Features::DIGEST.or(Features::ENCRYPT).0 != 0;
        if wish.digest == DigestWish::Crc32c && !is_checked {
            return Err(SessionError::NoDigests { address: self.address.to_string() });
        }
        self.add_lanes(&mut made, wish, &handle, sizes, (&asked, &accept)).await;
        let layout = PathLayout { depth: accept.depth };
        let memory = PathMemory::finish(self.pd, memory, layout, made.connections.len()).await?;
        let proofs = std::mem::take(&mut made.proofs);
        let Some((poller, connections)) = made.take() else {
            return Err(SessionError::Lost("the queue has no CQ".to_owned()));
        };
        Ok(Path {
            poller,
            connections,
            proofs,
            tested: None,
            memory,
            accept,
            epoch: self.epoch,
            volume,
            lane_bytes: limits::LANE_BYTES,
            way: WayIndex::FIRST,
            // TCP is for the time when no way over RDMA lives.
            way_terms: WayTerms { tier: u8::from(self.address.scheme == Scheme::Tcp), speed: 0 },
        })
    }

    /// A route on the device of the session.
    async fn route(&self) -> Result<Route, SessionError> {
        let route = Route::resolve(self.address, self.options).await?;
        if !route.device().same_as(self.device) {
            return Err(SessionError::Lost("the route changed to another device".to_owned()));
        }
        Ok(route)
    }

    /// The wish of a queue, as far as the device can fulfil it.
    fn hello(&self, queue: u16, wish: QueueWish) -> HelloRequest {
        let caps = self.device.caps();
        let mut features = wish.features.without(Features::DIGEST);
        if wish.asks_for_digests(caps) {
            features = features.or(Features::DIGEST);
        }
        if !caps.write_with_imm {
            features = features.without(Features::WRITE_WITH_IMM);
        }
        if caps.max_sges < DATA_LIST_SGES {
            features = features.without(Features::DATA_LISTS);
        }
        if self.secret.is_some() {
            features = features.or(Features::AUTH);
            if self.encrypt != Encrypt::Off && self.device.encrypts() {
                features = features.or(Features::ENCRYPT);
            }
        }
        HelloRequest {
            kind: ConnectionKind::Io { queue },
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: wish.depth,
            features,
            in_capsule_bytes: wish.in_capsule_bytes,
            io_max_bytes: wish.io_max_bytes,
            epoch: self.epoch,
            reads_in: caps.max_reads_in.min(READS_IN_MAX),
            session: self.session,
        }
    }

    /// Checks that this end can encrypt, if it must.
    fn can_encrypt(&self) -> Result<(), SessionError> {
        if !self.must_encrypt() {
            return Ok(());
        }
        kernel_has_tls().map_err(|why| self.not_encrypted(format!("on this host, {why}")))
    }

    fn must_encrypt(&self) -> bool {
        self.encrypt == Encrypt::Required && self.device.caps().transport == Transport::SoftTcp
    }

    fn not_encrypted(&self, why: String) -> SessionError {
        SessionError::NotEncrypted { address: self.address.to_string(), why }
    }

    /// Connects the lanes after the first one, with its agreed values. They are for speed: the
    /// queue does without a lane that cannot be connected, and without those after it. Their block
    /// commands carry no data.
    async fn add_lanes(
        &self,
        made: &mut UnprovenLanes,
        wish: QueueWish,
        poller: &PollerHandle,
        sizes: QpLimits,
        (first, accept): (&HelloRequest, &HelloAccept),
    ) {
        let ConnectionKind::Io { queue } = first.kind else { return };
        let without_data = |features: Features| features.without(Features::DATA_LISTS);
        let features = without_data(accept.features);
        let wanted = HelloAccept { in_capsule_bytes: 0, features, ..*accept };
        let is_wanted = |got: &HelloAccept| *got == HelloAccept { nonce: got.nonce, ..wanted };
        for lane in 1..wish.lanes(self.device.caps()) {
            let queue = wish.number(queue, lane);
            let asked = HelloRequest {
                kind: ConnectionKind::Io { queue },
                in_capsule_bytes: 0,
                features: without_data(first.features),
                ..*first
            };
            let connect = self.connect_lane(poller, sizes, &asked);
            match tokio::time::timeout(self.options.timeout, connect).await {
                Ok(Ok(lane)) if is_wanted(&lane.accept) => {
                    made.connections.push(lane.connection);
                    made.proofs.extend(lane.proof);
                }
                Ok(Ok(lane)) => {
                    lane.connection.retire(());
                    return tracing::warn!(queue, "a lane has other limits: going without it");
                }
                Ok(Err(error)) => {
                    return tracing::warn!(queue, %error, "cannot connect another lane: going without it");
                }
                Err(_) => {
                    return tracing::warn!(
                        queue,
                        "a lane took too long to connect: going without it"
                    );
                }
            }
        }
    }

    /// Connects one QP, and waits for room at the target if it must.
    async fn connect_lane(
        &self,
        poller: &PollerHandle,
        sizes: QpLimits,
        asked: &HelloRequest,
    ) -> Result<Connected, SessionError> {
        let crowded = Crowded::new(self.options.timeout, Instant::now());
        loop {
            let tried = self.try_lane(poller, sizes, asked).await;
            let Some(pause) = crowded.pause_after(&tried, Instant::now()) else { return tried };
            tokio::time::sleep(pause).await;
        }
    }

    /// Connects one QP.
    async fn try_lane(
        &self,
        poller: &PollerHandle,
        sizes: QpLimits,
        asked: &HelloRequest,
    ) -> Result<Connected, SessionError> {
        let request = asked.to_wire();
        let route = self.route().await?;
        let mut established = route
            .connect(self.pd, poller, sizes, &ConnectionHello(request.to_vec()))
            .await
            .map_err(|error| explain(self.address, error))
            .map_err(|error| if self.secret.is_some() { error.before_proof() } else { error })?;
        let accept = parse_accept(self.address, &established.hello.0, asked)?;
        let hellos = Hellos::from_private_data(&request, &established.hello.0)?;
        let proof = self.proof(asked, &accept, &hellos)?;
        match self.stream_keys(asked, &accept, &hellos) {
            Some(keys) => established.secure(keys)?,
            None if self.must_encrypt() => {
                let why = "the target does not encrypt: its configuration has encrypt = \"off\", or \
                           its kernel has no TLS (`modprobe tls` there, and restart it)";
                return Err(self.not_encrypted(why.to_owned()));
            }
            None => {}
        }
        Ok(Connected { connection: established.connection, accept, proof })
    }

    /// The keys of an encrypted lane.
    fn stream_keys(
        &self,
        asked: &HelloRequest,
        accept: &HelloAccept,
        hellos: &Hellos,
    ) -> Option<CipherKeys> {
        let ConnectionKind::Io { queue } = asked.kind else { return None };
        let secret = self.secret.filter(|_| accept.features.has(Features::ENCRYPT))?;
        let keys = auth::StreamKeys::new(secret, asked.epoch, queue, accept.nonce, hellos);
        let cipher = |key: &auth::StreamKey| CipherKey::new(key.key(), key.iv());
        Some(CipherKeys { send: cipher(&keys.to_target), receive: cipher(&keys.to_initiator) })
    }

    /// The proof of a lane, and the proof that the target owes on it.
    fn proof(
        &self,
        asked: &HelloRequest,
        accept: &HelloAccept,
        hellos: &Hellos,
    ) -> Result<Option<LaneProof>, SessionError> {
        let (Some(secret), ConnectionKind::Io { queue }) = (self.secret, asked.kind) else {
            return Ok(None);
        };
        if !accept.features.has(Features::AUTH) {
            return Err(SessionError::NoProof { address: self.address.to_string() });
        }
        let mut nonce = Nonce::default();
        getrandom::fill(&mut nonce.0).map_err(|error| SessionError::System {
            what: "random bytes for the proof of a connection",
            source: std::io::Error::other(error.to_string()),
        })?;
        let (ours, theirs) = QueueKey::new(secret, asked.epoch, queue).prove(hellos, nonce);
        Ok(Some(LaneProof { ours, theirs }))
    }
}
