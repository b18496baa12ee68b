//! [`FabricError`]: why a control call failed. [`PostError`]: why WRs could not be posted.

use std::fmt;
use std::io;
use std::time::Duration;

use crate::caps::Transport;

/// Result of a control call.
pub type Result<T> = std::result::Result<T, FabricError>;

/// The port that a firewall must pass for a connection. Only some transports send packets to the
/// port of the address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FirewallPort {
    /// A TCP port: of `tcp://`, and of iWARP.
    Tcp(u16),
    /// The UDP port of RoCE v2. Both the connection manager and the data use it, and the port of
    /// the address is inside of the packets.
    RoceUdp,
}

impl FirewallPort {
    /// The port of a transport. InfiniBand has none.
    #[must_use]
    pub fn of(transport: Transport, port: u16) -> Option<Self> {
        match transport {
            Transport::Roce => Some(Self::RoceUdp),
            Transport::Iwarp | Transport::SoftTcp => Some(Self::Tcp(port)),
            Transport::InfiniBand | Transport::SoftMemory | Transport::Unknown => None,
        }
    }
}

impl fmt::Display for FirewallPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(port) => write!(f, "TCP port {port}"),
            Self::RoceUdp => f.write_str("UDP port 4791 (RoCE)"),
        }
    }
}

/// A failed control call. The text names the thing, its value and, if there is one, the fix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The host has no RDMA device at all.
    #[error(
        "no RDMA device on this host: install the card's driver, or make a Soft-RoCE device with `rdma link add rxe0 type rxe netdev IFACE`, or use a tcp:// address"
    )]
    NoDevice,
    /// No route, no device for the address, or name resolution failed.
    #[error("cannot reach {address}: {reason}")]
    Unreachable {
        /// The address as given.
        address: String,
        /// Why.
        reason: String,
    },
    /// The peer did not answer in time.
    #[error("{what} did not answer within {after:?}{}", silence(*port))]
    TimedOut {
        /// The peer or device.
        what: String,
        /// How long was waited.
        after: Duration,
        /// The port that firewalls must pass; none if firewalls cannot be the cause.
        port: Option<FirewallPort>,
    },
    /// The peer refused the connection. Its reply says why.
    #[error("{address} refused the connection")]
    Rejected {
        /// The address as given.
        address: String,
        /// The private data of the peer. The CM may have padded it.
        hello: Vec<u8>,
    },
    /// The peer refused the connection without a reply: too many peers connect at once, or the
    /// listener ends.
    #[error("{address} is busy and took no connection at this moment: try again")]
    Busy {
        /// The address as given.
        address: String,
    },
    /// The peer does not use the framing of rblk.
    #[error("{peer} does not speak rblk: {reason}")]
    NotRblk {
        /// The other end.
        peer: String,
        /// The violation of the framing.
        reason: String,
    },
    /// Cannot listen on a local address.
    #[error("cannot listen on {address}: {}", listen_problem(error))]
    Listen {
        /// The address as given.
        address: String,
        /// The error of the system.
        error: io::Error,
    },
    /// The memlock limit is too small for a registration.
    #[error(
        "cannot register {bytes} bytes: the memlock limit is {limit} bytes. Raise it: `ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit"
    )]
    MemlockTooSmall {
        /// Size of the region.
        bytes: u64,
        /// RLIMIT_MEMLOCK, soft, in bytes.
        limit: u64,
    },
    /// A device, or the kernel for it, has no room for one more registration at this moment.
    #[error(
        "cannot register {bytes} bytes with {device}: {source}, and the memlock limit is not the reason. The device or the kernel has no room left: end other RDMA programs, register less (smaller `arena`, fewer or shallower queues), or give the memory more huge pages"
    )]
    NoRoomToRegister {
        /// Device name.
        device: String,
        /// Size of the region.
        bytes: u64,
        /// ENOMEM, ENOSPC or EAGAIN.
        source: io::Error,
    },
    /// A variable of the environment with which a driver breaks the program.
    #[error(
        "{0}=1 is set: the driver of the card would take no locks, and would end this program, in which several threads use one card. Unset it"
    )]
    Environment(&'static str),
    /// A limit of the device or of the provider is below the requested number.
    #[error("{device}: the limit of {what} is {limit}, asked for {asked}")]
    Limit {
        /// Device name.
        device: String,
        /// Which limit.
        what: &'static str,
        /// Its value.
        limit: u64,
        /// The requested number.
        asked: u64,
    },
    /// An object of one provider was given to another provider, or of one device to another device.
    #[error("objects of different providers or devices were mixed: {0}")]
    Mixed(&'static str),
    /// The connection cannot be encrypted.
    #[error("cannot encrypt the connection with {peer}: {reason}")]
    Encrypt {
        /// The other end.
        peer: String,
        /// Why, with the fix.
        reason: String,
    },
    /// Built without the `verbs` feature.
    #[error(
        "{0}: this program was built without RDMA. Use a tcp:// address, or build the program with `--features verbs`"
    )]
    NoVerbs(String),
    /// A verbs, rdma_cm or system call failed.
    #[error("{call} failed: {source}")]
    Call {
        /// The call.
        call: &'static str,
        /// Its errno.
        source: io::Error,
    },
}

fn silence(port: Option<FirewallPort>) -> String {
    match port {
        Some(port) => {
            format!(": is rblk-target running there, and does every firewall pass {port}?")
        }
        None => ": is the host up, and rblk-target running there?".to_owned(),
    }
}

fn listen_problem(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "in use by another program; stop it (`ss -ltnp` shows programs that use TCP), or choose another port".to_owned()
        }
        io::ErrorKind::AddrNotAvailable => {
            "not an address of this host; see `ip address`, and `rdma link` for rdma://".to_owned()
        }
        io::ErrorKind::PermissionDenied => {
            format!("{error}; ports below 1024 need root or CAP_NET_BIND_SERVICE")
        }
        _ => error.to_string(),
    }
}

impl FabricError {
    /// A failed call, with the current errno.
    #[must_use]
    pub(crate) fn last_os(call: &'static str) -> Self {
        Self::Call { call, source: io::Error::last_os_error() }
    }
}

/// Not all WRs of a batch could be posted. The WRs before `posted` are on the queue. The others
/// were not taken and do not complete.
#[derive(Debug, thiserror::Error)]
#[error("posting stopped after {posted} work requests: {source}")]
pub struct PostError {
    /// How many WRs of the batch were taken.
    pub posted: usize,
    /// Why the next WR was not taken: ENOMEM when the queue is full, EINVAL for a WR that the
    /// provider cannot take.
    pub source: io::Error,
}

impl PostError {
    /// The queue has no room for WR `posted`.
    #[must_use]
    #[cold]
    pub(crate) fn full(posted: usize) -> Self {
        Self { posted, source: io::Error::from_raw_os_error(libc::ENOMEM) }
    }

    /// WR `posted` is one that the provider cannot take, or the QP is unknown.
    #[must_use]
    #[cold]
    pub(crate) fn invalid(posted: usize) -> Self {
        Self { posted, source: io::Error::from_raw_os_error(libc::EINVAL) }
    }
}
