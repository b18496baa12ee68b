//! [`Route`]: resolves an address to a device, and connects.
//!
//! A librdmacm call starts each step, and an event ends it. Every wait has a deadline. Calls that
//! may block in the kernel or in ibacm run on a thread of their own that owns the id. So giving up
//! on a call never frees an id in use, and never delays a runtime that shuts down.

use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rblk_protocol::width::wide64;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::cm::cm_id::{CmId, ConnectParams};
use super::cm::event_channel::{CmReply, Role};
use super::completion_queue::PollerHandle;
use super::device::Device;
use super::event_task;
use super::ffi::event;
use super::protection_domain::ProtectionDomain;
use super::queue_pair::{Connection, retire};
use super::threads::{Call, Threads};
use crate::address::Address;
use crate::connect::Established;
use crate::connect::{ConnectOptions, ConnectionHello, QpLimits};
use crate::error::{FabricError, FirewallPort, Result};

/// Longest call of `rdma_resolve_addr`.
const ADDRESS_WINDOW: Duration = Duration::from_millis(500);

/// Shortest call of `rdma_resolve_addr`: each costs an event channel and a question on the network.
const ADDRESS_WINDOW_MIN: Duration = Duration::from_millis(50);

/// A resolved route to a peer, not connected.
#[derive(Debug)]
pub struct Route {
    id: CmId,
    device: Device,
    address: Address,
    timeout: Duration,
}

impl Route {
    /// Resolves name, route and device, trying the addresses of a name in turn.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`], [`FabricError::Unreachable`] or [`FabricError::TimedOut`].
    pub(crate) async fn resolve(address: &Address, options: &ConnectOptions) -> Result<Self> {
        let deadline = Instant::now() + options.timeout;
        let expired = || silent(address, options.timeout, None);
        let addresses = timeout_at(deadline, address.look_up()).await.map_err(|_| expired())??;
        let mut last = None;
        for to in addresses {
            // An address of the other family cannot be reached from the address to bind to.
            if options.bind.is_some_and(|bind| bind.is_ipv4() != to.is_ipv4()) {
                continue;
            }
            match Self::resolve_one(address, to, options, deadline).await {
                Ok(route) => return Ok(route),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| FabricError::Unreachable {
            address: address.to_string(),
            reason: "the name has no address of the family to bind to".to_owned(),
        }))
    }

    async fn resolve_one(
        address: &Address,
        to: SocketAddr,
        options: &ConnectOptions,
        deadline: Instant,
    ) -> Result<Self> {
        let expired = || silent(address, options.timeout, None);
        let unreachable =
            |reason| FabricError::Unreachable { address: address.to_string(), reason };
        let mut id = timeout_at(deadline, resolve_address(address, to, options, deadline))
            .await
            .map_err(|_| expired())??;

        // One call is enough: within the time the kernel repeats its question to the subnet
        // manager.
        let timeout_ms = milliseconds(deadline.saturating_duration_since(Instant::now()));
        let reply = id.expect();
        let started = on_thread(move || {
            let rc = id.resolve_route(timeout_ms);
            (id, rc)
        });
        let (id, rc) = timeout_at(deadline, started).await.map_err(|_| expired())??;
        rc.map_err(|e| unreachable(no_route(&e, to)))?;
        let reply = timeout_at(deadline, reply).await.map_err(|_| expired())?;
        let reply = reply.map_err(|_| unreachable(CHANNEL_BROKE.to_owned()))?;
        if reply.event != event::ROUTE_RESOLVED {
            return Err(unreachable(no_route(&reply.error(), to)));
        }

        if id.verbs().is_null() {
            return Err(unreachable("the route does not use an RDMA device".to_owned()));
        }
        let device = Device::of_id(&id)?;
        Ok(Self { id, device, address: address.clone(), timeout: options.timeout })
    }

    /// The device the route leaves by.
    #[must_use]
    pub(crate) fn device(&self) -> Device {
        self.device.clone()
    }

    /// Makes a QP and connects it, with `hello` in the request.
    ///
    /// # Errors
    /// [`FabricError::Rejected`] with the peer's reply, [`FabricError::Unreachable`] when nothing
    /// listens, [`FabricError::TimedOut`], [`FabricError::Limit`], [`FabricError::Mixed`], or a
    /// failed call.
    pub(crate) async fn connect(
        self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
        hello: &ConnectionHello,
    ) -> Result<Established<Connection>> {
        let Self { id, device, address, timeout } = self;
        let caps = device.caps();
        if hello.0.len() > ConnectionHello::REQUEST_MAX {
            return Err(FabricError::Limit {
                device: caps.name.clone(),
                what: "bytes of hello in a connection request",
                limit: wide64(ConnectionHello::REQUEST_MAX),
                asked: wide64(hello.0.len()),
            });
        }
        let reads_out = limits.reads_out.min(caps.max_reads_out);
        let reads_in = limits.reads_in.min(caps.max_reads_in);
        let mut connection =
            Connection::create(id, pd, poller, limits).map_err(|(_id, error)| error)?;

        let deadline = Instant::now() + timeout;
        let port = FirewallPort::of(caps.transport, address.port);
        let expired = || silent(&address, timeout, port);
        let reply = connection.id().expect();
        let words = hello.0.clone();
        let started = on_thread(move || {
            let rc = connection.connect(&ConnectParams { hello: &words, reads_out, reads_in });
            (connection, rc)
        });
        let (connection, rc) = timeout_at(deadline, started).await.map_err(|_| expired())??;
        if let Err(error) = rc {
            return Err(connect_error(error, &address, expired));
        }
        let connection = Unestablished(Some(connection));
        let reply = timeout_at(deadline, reply).await.map_err(|_| expired())?;
        let reply = reply.map_err(|_| FabricError::Unreachable {
            address: address.to_string(),
            reason: CHANNEL_BROKE.to_owned(),
        })?;
        if reply.event != event::ESTABLISHED {
            return Err(refusal(reply, &address, expired));
        }
        Ok(Established {
            connection: connection.established()?,
            // Named from the side of the receiver (rdma_get_cm_event(3)): READs that this side may
            // have outstanding, and READs that it serves.
            reads_out: reads_out.min(reply.initiator_depth),
            reads_in: reads_in.min(reply.responder_resources),
            hello: ConnectionHello(reply.private_data),
        })
    }
}

/// No answer in time. `port` is the port that firewalls must pass, once the device of the route is
/// known.
fn silent(address: &Address, after: Duration, port: Option<FirewallPort>) -> FabricError {
    FabricError::TimedOut { what: address.to_string(), after, port }
}

const CHANNEL_BROKE: &str = "the RDMA connection manager of the kernel stopped";

/// IB CM reject reasons (InfiniBand specification, volume 1, table "REJ reason codes").
mod reject_reason {
    pub(super) const INVALID_SERVICE_ID: i32 = 8;
    pub(super) const STALE_CONNECTION: i32 = 10;
    pub(super) const CONSUMER_DEFINED: i32 = 28;
}

/// The error for an answer other than ESTABLISHED. The status is a REJ reason on InfiniBand and
/// RoCE, a negative errno on iWARP.
fn refusal(
    reply: CmReply,
    address: &Address,
    expired: impl FnOnce() -> FabricError,
) -> FabricError {
    let address = address.to_string();
    let reason = match (reply.event, reply.status) {
        // Of the kernel itself, padded: the port has a listener, but not at that address; or the
        // listener has too many peers waiting.
        (event::REJECTED, reject_reason::CONSUMER_DEFINED)
            if reply.private_data.iter().all(|byte| *byte == 0) =>
        {
            NOT_AT_THAT_ADDRESS_OR_BUSY.to_owned()
        }
        (event::REJECTED, reject_reason::CONSUMER_DEFINED) => {
            return FabricError::Rejected { address, hello: reply.private_data };
        }
        // Of a listener of rblk that had no words: see `cm_id`.
        (event::REJECTED, status)
            if status < 0
                && !reply.private_data.is_empty()
                && reply.private_data.iter().all(|byte| *byte == 0) =>
        {
            return FabricError::Busy { address };
        }
        (event::REJECTED, status) if status < 0 && !reply.private_data.is_empty() => {
            return FabricError::Rejected { address, hello: reply.private_data };
        }
        (event::REJECTED, reject_reason::INVALID_SERVICE_ID) => NOTHING_LISTENS.to_owned(),
        (event::REJECTED, status) if status == -libc::ECONNREFUSED => NOTHING_LISTENS.to_owned(),
        (event::REJECTED, reject_reason::STALE_CONNECTION) => {
            "the peer still has an older connection with the same number: try again".to_owned()
        }
        (event::REJECTED, status) if status > 0 => {
            format!("refused by the peer's CM, reason {status}")
        }
        (event::UNREACHABLE, status) if status == -libc::ETIMEDOUT || status == 0 => {
            return expired();
        }
        (event::DEVICE_REMOVAL, _) => "the local RDMA device was removed".to_owned(),
        _ => format!("the connection failed: {}", reply.error()),
    };
    FabricError::Unreachable { address, reason }
}

const NOT_AT_THAT_ADDRESS_OR_BUSY: &str = "nothing listens at that address on that port, or too many hosts connect \
     at once there: try again; does rblk-target listen on another address, such as 0.0.0.0, which takes no IPv6?";
const NOTHING_LISTENS: &str = "nothing listens on that port: is rblk-target running there?";

/// The error of a failed `rdma_connect`. Soft iWARP connects its socket in that call.
fn connect_error(
    error: FabricError,
    address: &Address,
    expired: impl FnOnce() -> FabricError,
) -> FabricError {
    let FabricError::Call { ref source, .. } = error else { return error };
    let reason = match source.raw_os_error() {
        Some(libc::ECONNREFUSED) => NOTHING_LISTENS.to_owned(),
        Some(libc::ETIMEDOUT) => return expired(),
        Some(libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ECONNRESET) => source.to_string(),
        _ => return error,
    };
    FabricError::Unreachable { address: address.to_string(), reason }
}

fn no_address(error: &io::Error, to: SocketAddr, options: &ConnectOptions) -> String {
    let ip = to.ip();
    match (error.raw_os_error(), options.bind) {
        (Some(libc::EADDRNOTAVAIL | libc::ENODEV), Some(bind)) => format!(
            "{} is not an address of an RDMA device of this host, or has no route to {ip}: see `rdma link`",
            bind.ip()
        ),
        (Some(libc::ENODEV | libc::EADDRNOTAVAIL | libc::EINVAL), None) => no_device(ip),
        (Some(libc::ENETUNREACH | libc::EHOSTUNREACH), _) => {
            format!("no route to {ip}: {error}; see `ip route get {ip}`")
        }
        (Some(libc::ETIMEDOUT), _) => {
            format!(
                "{ip} does not answer on its network (ARP or neighbour discovery): is the host up?"
            )
        }
        _ => format!("address resolution failed: {error}"),
    }
}

fn no_device(ip: IpAddr) -> String {
    format!(
        "the route to {ip} does not use an RDMA device: see `ip route get {ip}` and `rdma link`, or use a tcp:// address"
    )
}

fn no_route(error: &io::Error, to: SocketAddr) -> String {
    let ip = to.ip();
    match error.raw_os_error() {
        Some(libc::ETIMEDOUT) => {
            format!("no path to {ip}: the subnet manager did not answer; is it running?")
        }
        // Soft-RoCE reports it only here, for example for a loopback address.
        Some(libc::ENODEV) => no_device(ip),
        _ => format!("no path to {ip}: {error}"),
    }
}

/// A connection that is not established yet. On iWARP its destroy waits for the answer of the peer
/// or for a timeout of about ten seconds. So when the deadline passes or the caller gives up,
/// another thread destroys it.
struct Unestablished(Option<Connection>);

impl Unestablished {
    fn established(mut self) -> Result<Connection> {
        self.0.take().ok_or(FabricError::Mixed("a connection was used twice"))
    }
}

impl Drop for Unestablished {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            retire(connection, ());
        }
    }
}

/// An id that is bound to the device by which `to` is reached.
///
/// The kernel is asked again, with a new id, every [`ADDRESS_WINDOW`]. It checks its neighbours
/// only when one of them changes and when the time of a call is over. So it misses an answer that
/// comes between its question and the start of its wait, which happens over a veth pair.
async fn resolve_address(
    address: &Address,
    to: SocketAddr,
    options: &ConnectOptions,
    deadline: Instant,
) -> Result<CmId> {
    let unreachable = |reason| FabricError::Unreachable { address: address.to_string(), reason };
    loop {
        let id = event_task::open_id(Role::Active(None), None)?;
        id.set_ack_timeout(options.ack_timeout());
        if let Some(tos) = options.tos {
            id.set_tos(tos);
        }
        let reply = id.expect();
        let left = deadline.saturating_duration_since(Instant::now());
        id.resolve_addr(options.bind_for(to), to, milliseconds(address_window(left)))
            .map_err(|e| unreachable(no_address(&e, to, options)))?;
        let reply = reply.await.map_err(|_| unreachable(CHANNEL_BROKE.to_owned()))?;
        if reply.event == event::ADDR_RESOLVED {
            return Ok(id);
        }
        let error = reply.error();
        if error.raw_os_error() != Some(libc::ETIMEDOUT) {
            return Err(unreachable(no_address(&error, to, options)));
        }
    }
}

/// How long one call may take when so much time is left. Never all of it, because the kernel checks
/// once more when the time of a call is over.
fn address_window(left: Duration) -> Duration {
    (left / 2).clamp(ADDRESS_WINDOW_MIN, ADDRESS_WINDOW)
}

/// Runs a blocking call on another thread. If the caller gives up, that thread drops the
/// result.
async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    static THREADS: Threads<Call> = Threads::new("verbs-connect", 1024);
    let (sender, receiver) = oneshot::channel();
    THREADS.begin();
    THREADS.serve(Box::new(move || drop(sender.send(work()))));
    receiver.await.map_err(|_| FabricError::Call {
        call: "thread",
        source: io::Error::other("the thread ended without a result"),
    })
}

fn milliseconds(time: Duration) -> c_int {
    c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caps::Transport;

    #[test]
    fn an_address_is_resolved_in_windows() {
        for ms in [200, 300, 500, 999, 1000, 5000, 60_000] {
            let mut left = Duration::from_millis(ms);
            let mut windows = 0;
            while let Some(rest) = left.checked_sub(address_window(left)) {
                left = rest;
                windows += 1;
            }
            // At least two in full before the deadline, and not more than a few at its end.
            assert!((2..=ms / 500 + 8).contains(&windows), "{windows} windows in {ms} ms");
            assert!(left < ADDRESS_WINDOW_MIN, "{ms} ms: no call covers the last {left:?}");
        }
        assert!(!address_window(Duration::ZERO).is_zero());
    }

    #[test]
    fn refusals() {
        let address: Address = "rdma://10.0.0.1:7720".parse().unwrap();
        let meaning = |event, status, private_data: &[u8]| {
            let reply = CmReply {
                event,
                status,
                private_data: private_data.to_vec(),
                responder_resources: 0,
                initiator_depth: 0,
            };
            let port = FirewallPort::of(Transport::Roce, address.port);
            refusal(reply, &address, || silent(&address, Duration::from_secs(1), port))
        };
        let is_rejected =
            |e: FabricError| matches!(e, FabricError::Rejected { hello, .. } if hello == b"why");
        assert!(is_rejected(meaning(event::REJECTED, 28, b"why")));
        assert!(is_rejected(meaning(event::REJECTED, -libc::ECONNRESET, b"why")));
        assert!(is_rejected(meaning(event::REJECTED, -libc::ECONNREFUSED, b"why")));
        // A byte that stands for no words, as the connection manager of iWARP hands it on.
        let wordless = meaning(event::REJECTED, -libc::ECONNRESET, &[0]);
        assert!(matches!(wordless, FabricError::Busy { .. }), "{wordless}");
        let padded = meaning(event::REJECTED, 28, &[0; 148]).to_string();
        assert!(padded.contains("try again"), "{padded}");
        for nobody in [
            meaning(event::REJECTED, 8, &[0; 148]),
            meaning(event::REJECTED, -libc::ECONNREFUSED, b""),
        ] {
            assert!(nobody.to_string().contains("nothing listens"), "{nobody}");
        }
        let silent = meaning(event::UNREACHABLE, -libc::ETIMEDOUT, b"").to_string();
        assert!(silent.contains("every firewall pass UDP port 4791 (RoCE)"), "{silent}");
        assert!(matches!(
            meaning(event::CONNECT_ERROR, i32::MIN, b""),
            FabricError::Unreachable { .. }
        ));
        assert!(matches!(meaning(4711, 4711, b""), FabricError::Unreachable { .. }));
    }
}
