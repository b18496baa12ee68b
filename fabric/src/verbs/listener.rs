//! [`Listener`]: waits for peers on one address.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::ptr::NonNull;

use tokio::sync::{mpsc, watch};

use super::cm::cm_id::CmId;
use super::cm::event_channel::Role;
use super::device::Device;
use super::device::presence::{self, Presence};
use super::event_task::{self, ListenerDoor};
use super::incoming::Incoming;
use crate::address::Address;
use crate::connect::ListenOptions;
use crate::error::{FabricError, Result};

/// Peers that may wait to be accepted. More are rejected at once; they may try again.
const BACKLOG: u16 = 128;

/// Waits for peers on one address. Dropping it rejects the peers that still wait. Connections stay.
#[derive(Debug)]
pub struct Listener {
    address: Address,
    requests: mpsc::Receiver<Result<Incoming>>,
    // Of the device of the address, if the id is bound to one.
    presence: Option<Presence>,
    // Tells that a device has gone.
    gone: watch::Receiver<u64>,
    // Last: no new request comes once the id is destroyed.
    id: CmId,
}

impl Listener {
    /// Starts to listen. An unspecified address listens on every RDMA device, also on devices that
    /// are plugged in later.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`], [`FabricError::Listen`] or, for an unknown name,
    /// [`FabricError::Unreachable`].
    pub(crate) async fn bind(address: &Address, options: &ListenOptions) -> Result<Self> {
        let mut last = None;
        for to in address.look_up().await? {
            let (sender, requests) = mpsc::channel(usize::from(BACKLOG));
            let door = ListenerDoor { requests: sender, busy: options.busy.clone() };
            let gone = presence::changes();
            let mut id = event_task::open_id(Role::Listening, Some(door))?;
            if let Some(tos) = options.tos {
                id.set_tos(tos);
            }
            match id.bind(to).and_then(|()| id.listen(i32::from(BACKLOG))) {
                Ok(()) => {
                    let address = Address { port: id.local_port(), ..address.clone() };
                    // SAFETY: the id keeps the context of its device open.
                    let presence =
                        NonNull::new(id.verbs()).and_then(|c| unsafe { presence::note(c) });
                    return Ok(Self { address, requests, presence, gone, id });
                }
                Err(error) => last = Some(in_use_if_local(error, to)),
            }
        }
        let error = last.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into());
        Err(FabricError::Listen { address: address.to_string(), error })
    }

    /// The address it listens on.
    #[must_use]
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Whether the address is unspecified: peers come by any device.
    #[must_use]
    pub(crate) fn is_everywhere(&self) -> bool {
        self.id.verbs().is_null()
    }

    /// The device of the address, or every device that peers can reach if the address is
    /// unspecified.
    ///
    /// # Errors
    /// The query of the device failed.
    pub(crate) fn devices(&self) -> Result<Vec<Device>> {
        if self.is_everywhere() {
            return Ok(Device::all());
        }
        Device::of_id(&self.id).map(|device| vec![device])
    }

    /// The next peer. Cancel safe.
    ///
    /// # Errors
    /// The device is gone or the event channel broke.
    pub(crate) async fn accept(&mut self) -> Result<Incoming> {
        loop {
            let peer = tokio::select! {
                biased;
                // The wait never fails: the sender is a static value.
                _ = self.gone.changed() => match &self.presence {
                    Some(presence) if !presence.is_there() => {
                        // A later accept fails the same way.
                        self.gone.mark_changed();
                        // The kernel waits for this id, too.
                        let source = io::Error::from_raw_os_error(libc::ENODEV);
                        return Err(FabricError::Call { call: "rdma_listen", source });
                    }
                    _ => continue,
                },
                peer = self.requests.recv() => peer,
            };
            return peer.unwrap_or_else(|| {
                // The task of the channel ended, or had no room for the reason.
                Err(FabricError::Call {
                    call: "rdma_listen",
                    source: io::ErrorKind::NotConnected.into(),
                })
            });
        }
    }
}

/// The CM says EADDRNOTAVAIL of an address that is not there, and of a port that is taken. Where
/// the host has the address, the port is taken.
fn in_use_if_local(error: io::Error, to: SocketAddr) -> io::Error {
    let is_here = || {
        // With its interface, if it is a link-local one.
        let mut any_port = to;
        any_port.set_port(0);
        UdpSocket::bind(any_port).is_ok()
    };
    match error.raw_os_error() {
        Some(libc::EADDRNOTAVAIL) if is_here() => io::Error::from_raw_os_error(libc::EADDRINUSE),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_taken_is_told_from_an_address_that_is_not_there() {
        let kind = |errno: i32, to: &str| {
            in_use_if_local(io::Error::from_raw_os_error(errno), to.parse().unwrap()).kind()
        };
        assert_eq!(kind(libc::EADDRNOTAVAIL, "127.0.0.1:7720"), io::ErrorKind::AddrInUse);
        assert_eq!(kind(libc::EADDRNOTAVAIL, "0.0.0.0:7720"), io::ErrorKind::AddrInUse);
        assert_eq!(kind(libc::EADDRNOTAVAIL, "192.0.2.77:7720"), io::ErrorKind::AddrNotAvailable);
        // The loopback never has a link-local address, but the call needs an interface.
        assert_eq!(kind(libc::EADDRNOTAVAIL, "[fe80::77%1]:7720"), io::ErrorKind::AddrNotAvailable);
        assert_eq!(kind(libc::EACCES, "127.0.0.1:7720"), io::ErrorKind::PermissionDenied);
    }
}
