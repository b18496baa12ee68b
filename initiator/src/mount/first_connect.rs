//! A mount without a device yet: it connects for the first time, which may take long, and answers
//! its socket meanwhile.

use std::cell::RefCell;

use rblk_config::MountConfig;
use tokio::sync::mpsc;

use super::end_signals::EndSignals;
use super::serving::LAST_WORDS;
use super::socket::{Asked, MountSocket};
use crate::engine::path::Path;
use crate::volume::Volume;
use crate::volume::begin::{First, connect_first};
use crate::volume::session::HostIdentity;
use rblk_operate::mount::mount_ask::{Ask, Response};
use rblk_operate::mount::mount_status::{MountStatus, auth};

/// An unmount came before the device existed.
#[derive(Debug, thiserror::Error)]
#[error("`{name}` was unmounted while it waited for its target")]
pub(super) struct UnmountedEarly {
    name: String,
}

/// SIGTERM or SIGINT came before the device existed.
#[derive(Debug, thiserror::Error)]
#[error("told to end before `{name}` had a device")]
pub struct ToldToEnd {
    /// The mount.
    pub name: String,
}

/// Connects for the first time. Meanwhile the socket reports that the mount waits, and the reason.
/// An unmount ends the connect.
pub(super) async fn connect(
    socket: &MountSocket,
    name: &str,
    first: First<'_>,
    host: HostIdentity,
    signals: &mut EndSignals,
) -> anyhow::Result<(Volume, Vec<Path>)> {
    let why = RefCell::new(None);
    tokio::select! {
        connected = connect_first(first, host, &why) => connected,
        () = until_unmounted(socket, first.config, name, &why) => {
            Err(UnmountedEarly { name: name.to_owned() }.into())
        }
        () = signals.next() => Err(ToldToEnd { name: name.to_owned() }.into()),
    }
}

/// Answers requests until an unmount.
async fn until_unmounted(
    socket: &MountSocket,
    config: &MountConfig,
    name: &str,
    why: &RefCell<Option<String>>,
) {
    let (asked_sender, mut asked) = mpsc::channel::<Asked>(16);
    let serving = socket.serve(asked_sender);
    tokio::pin!(serving);
    loop {
        let request = tokio::select! {
            () = &mut serving => return std::future::pending().await,
            Some(request) = asked.recv() => request,
        };
        let response = match &request.ask {
            Ask::Status => Response::Status(Box::new(status(config, name, why.borrow().clone()))),
            Ask::Unmount { .. } => {
                let _ = request.reply.send(Response::Done);
                // Time to deliver the answer.
                let _ = tokio::time::timeout(LAST_WORDS, &mut serving).await;
                return;
            }
            _ => Response::Error(format!("{name} waits for its target and has no device yet")),
        };
        // An error means that the client is gone.
        let _ = request.reply.send(response);
    }
}

fn status(config: &MountConfig, name: &str, why: Option<String>) -> MountStatus {
    MountStatus {
        name: name.to_owned(),
        volume: config.volume.clone(),
        target: config.target.clone(),
        address: config.target.first().cloned().unwrap_or_default(),
        auth: auth(!config.target_keys.is_empty()).to_owned(),
        state: "waiting".to_owned(),
        last_loss: why,
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        read_only: config.read_only,
        on_loss: config.on_loss,
        ..MountStatus::default()
    }
}
