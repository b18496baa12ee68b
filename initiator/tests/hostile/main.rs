//! Malicious targets, and attackers between an initiator and its target: a session with them is an
//! error, in bounded time and memory.

mod handshake;
mod list;
mod slow;
mod target;

use rblk_fabric::{Address, ConnectOptions};
use rblk_initiator::volume::error::SessionError;
use rblk_initiator::volume::session::{Credentials, HostIdentity, Session};
use rblk_protocol::{Epoch, HostId, InstanceId, LoginReply, Name, SessionId};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn host() -> HostIdentity {
    HostIdentity { id: HostId([1; 16]), name: Name::new("host1").unwrap() }
}

fn login_reply() -> LoginReply {
    LoginReply {
        session: SessionId([2; 16]),
        epoch: Epoch(1),
        instance: InstanceId([1; 16]),
        queues_max: 4,
        target_name: Name::new("store1").unwrap(),
    }
}

async fn connect(
    address: &Address,
    options: &ConnectOptions,
    credentials: Option<&Credentials>,
) -> Result<Session, SessionError> {
    Session::connect(address, options, &host(), credentials, None).await
}
