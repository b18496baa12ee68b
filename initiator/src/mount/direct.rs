//! [`Direct`]: a mount without a device. A program has its queues ([`crate::front::program`]). The
//! rest is what a disk has: the same session, course, epochs, retained writes and losses. There is
//! no note and no recovery, because the requests of a program end with it.

use std::sync::Arc;

use rblk_config::MountConfig;
use rblk_fabric::Region;
use rblk_fabric::spin::SpinMode;
use rblk_protocol::{Generation, OpenReply, VolumeFlags};
use tokio::sync::{mpsc, oneshot};

use super::begin::{First, User, connect_patiently};
use super::mounted::{Mount, size_bytes};
use crate::engine::durability::Durability;
use crate::queue::{FromQueue, TargetParts};
use crate::volume::course::State;
use crate::volume::queues::spin_mode;
use crate::volume::session::HostIdentity;

/// What a program asks for.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The configuration of the mount.
    pub(crate) config: MountConfig,
    /// This host.
    pub(crate) host: HostIdentity,
    /// Another host that holds the volume is fenced.
    pub(crate) take_over: bool,
    /// Buffers of each queue beyond its depth.
    pub(crate) spare_buffers: u16,
}

/// A queue for the program: what it is made of, and its memory.
#[derive(Debug)]
pub(crate) struct GivenQueue {
    /// What the side of the target is made of.
    pub(crate) parts: TargetParts,
    /// Depth + spare buffers of `parts.stride` bytes each.
    pub(crate) memory: Arc<Region>,
    /// How long it looks for work before it sleeps.
    pub(crate) spin: SpinMode,
}

/// A mount without a device.
#[derive(Debug)]
pub(crate) struct Direct {
    mount: Mount,
    from_queues: mpsc::UnboundedReceiver<FromQueue>,
}

/// What changes in the life of a volume, for the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Standing {
    /// Where the mount stands.
    pub(crate) state: State,
    /// Bytes of the volume.
    pub(crate) size_bytes: u64,
    /// Whether it refuses writes.
    pub(crate) read_only: bool,
}

impl Direct {
    /// Connects, opens the volume and makes its queues. Waits for a target that cannot be reached
    /// as long as the configuration says.
    ///
    /// # Errors
    /// Anything that keeps the volume from being opened. Nothing is left then.
    pub(crate) async fn begin(asked: Asked) -> anyhow::Result<(Self, Vec<GivenQueue>)> {
        let Asked { config, host, take_over, spare_buffers } = asked;
        let user = User::Program;
        let generation = Generation::FRESH;
        let (config, keys_file) = (&config, None);
        let first =
            First { config, keys_file, name: "", take_over, spare_buffers, user, generation };
        let (mut mount, paths) = connect_patiently(first, host, |_| {}).await?;
        let (outbox, from_queues) = mpsc::unbounded_channel();
        let parts = match mount.give_queues(&outbox) {
            Ok(parts) => parts,
            Err(error) => {
                let mut direct = Self { mount, from_queues };
                direct.mount.end(&mut direct.from_queues).await;
                return Err(error);
            }
        };
        mount.connect_queues(paths);
        let memory = mount.link().setup().buffers.iter().flatten();
        let given = parts.into_iter().zip(memory);
        let spin = spin_mode(config.spin);
        let given =
            given.map(|(parts, memory)| GivenQueue { parts, memory: Arc::clone(memory), spin });
        let given = given.collect();
        Ok((Self { mount, from_queues }, given))
    }

    /// The volume as it was opened.
    pub(crate) fn volume(&self) -> &OpenReply {
        &self.mount.link().facts().volume
    }

    /// Which acknowledged writes are durable.
    pub(crate) fn durability(&self) -> &Arc<Durability> {
        self.mount.durability()
    }

    /// How the volume is now.
    pub(crate) fn standing(&self) -> Standing {
        let link = self.mount.link();
        let facts = link.facts();
        let read_only = facts.volume.flags.has(VolumeFlags::READ_ONLY);
        Standing { state: link.state(), size_bytes: size_bytes(facts), read_only }
    }

    /// Keeps the session, and reconnects, until the program has dropped the volume and every queue.
    /// Then the target hears that the session is over. `tell` hears how the volume is whenever that
    /// may have changed.
    pub(crate) async fn serve(mut self, closed: oneshot::Receiver<()>, tell: impl Fn(Standing)) {
        tokio::pin!(closed);
        // A queue that never came to be is gone without a word.
        let (mut is_closed, mut are_gone) = (false, false);
        while !(is_closed && (are_gone || self.mount.have_queues_stopped())) {
            tokio::select! {
                message = self.from_queues.recv(), if !are_gone => match message {
                    None => are_gone = true,
                    Some(message) => if let Err(error) = self.mount.on_queue(message) {
                        tracing::error!(%error, "a queue broke; its requests are not answered");
                    }
                },
                () = self.mount.attend() => {}
                // The sender is dropped with the volume.
                _ = &mut closed, if !is_closed => is_closed = true,
            }
            tell(self.standing());
        }
        self.mount.end(&mut self.from_queues).await;
    }
}
