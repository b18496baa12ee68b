//! One try to have the session again: a task of its own, so that the mount goes on answering meanwhile and can
//! give the try up.

use std::sync::Arc;

use rblk_fabric::{Address, ConnectOptions, Region};
use rblk_protocol::{AccessMode, Epoch, InstanceId, Name, OpenReply, SessionId, VolumeFlags};

use super::settle::{Account, settle};
use crate::path::Path;
use crate::session::{HostIdentity, QueueWish, Session};

/// The volume came back as another one.
#[derive(Debug, thiserror::Error)]
#[error(
    "volume `{volume}` {how}; its requests fail now: unmount it, check the target, mount again"
)]
pub(super) struct VolumeChanged {
    volume: String,
    how: &'static str,
}

/// What a try needs to know.
#[derive(Debug)]
pub(super) struct Try {
    pub(super) address: Address,
    pub(super) options: ConnectOptions,
    pub(super) host: HostIdentity,
    /// The session and the epoch to raise it to; `None` begins a new session.
    pub(super) resume: Option<(SessionId, Epoch)>,
    pub(super) volume_name: Name,
    pub(super) mode: AccessMode,
    pub(super) wish: QueueWish,
    pub(super) buffers: Vec<Arc<Region>>,
    /// What the volume was.
    pub(super) volume: OpenReply,
    /// The target's run then.
    pub(super) instance: InstanceId,
    /// Which of its acknowledged writes are durable.
    pub(super) account: Account,
}

/// A session with a path for every queue.
#[derive(Debug)]
pub(super) struct Again {
    pub(super) session: Session,
    pub(super) volume: OpenReply,
    pub(super) paths: Vec<Path>,
}

impl Try {
    /// Connects, logs in, opens the volume, checks that it is the same, settles what became of acknowledged writes,
    /// and connects every queue.
    pub(super) async fn run(self) -> anyhow::Result<Again> {
        let mut session =
            Session::connect(&self.address, &self.options, &self.host, self.resume).await?;
        let volume = session.open(&self.volume_name, self.mode).await?;
        let changed = |how| VolumeChanged { volume: self.volume_name.to_string(), how };
        let same = volume.blocks == self.volume.blocks
            && volume.block_size == self.volume.block_size
            && volume.uuid == self.volume.uuid;
        if !same {
            return Err(changed("came back as another volume or size").into());
        }
        if volume.flags.has(VolumeFlags::EPHEMERAL) && session.instance != self.instance {
            return Err(changed("was in the memory of a target that ended").into());
        }
        if volume.verifier != self.volume.verifier {
            settle(&mut session, &volume, &self.account).await?;
        }
        let mut paths = Vec::new();
        for (queue, buffers) in (0u16..).zip(&self.buffers) {
            let path = session.connect_queue(queue, self.wish, volume.handle, buffers).await?;
            let (depth, io_max) = (path.accept.depth, path.accept.io_max_bytes);
            if depth != self.wish.depth || io_max < self.wish.io_max_bytes {
                anyhow::bail!(
                    "the target now grants depth {} and {io_max} bytes per command; this mount was made with {} and {}. Restore its queue_depth_max and max_io, or mount anew",
                    depth.get(),
                    self.wish.depth.get(),
                    self.wish.io_max_bytes
                );
            }
            paths.push(path);
        }
        Ok(Again { session, volume, paths })
    }
}
