//! [`Upkeep`]: keeps the volume of a program open: session, course, epochs, retained writes and
//! losses, as those of a disk. There is no note and no recovery, because the requests of a program
//! end with it.

use std::sync::Arc;

use rblk_config::MountConfig;
use rblk_fabric::Region;
use rblk_protocol::{Generation, HostId, Name, OpenReply, VolumeFlags};
use rblk_runtime::spin::SpinMode;
use tokio::sync::{mpsc, oneshot};

use crate::engine::durability::Durability;
use crate::queue::{EngineDriverParts, FromQueue};
use crate::volume::begin::{First, Front, connect_patiently};
use crate::volume::course::CourseState;
use crate::volume::queues::spin_mode;
use crate::volume::session::HostIdentity;
use crate::volume::{LOGOUT, Volume};

/// The volume that a program asks for.
#[derive(Debug)]
pub struct VolumeWish {
    /// How it is to be used. `device_id` has no effect.
    pub config: MountConfig,
    /// By which targets know the program; a random id if it is absent.
    pub host_id: Option<HostId>,
    /// Fence another host that holds the volume.
    pub take_over: bool,
    /// Buffers of each queue beyond its depth.
    pub spare_buffers: u16,
    /// Asked before the volume is opened, unless its holder is to be fenced: whether this host may
    /// have it, now that the target has told its name.
    pub may_open: fn(&MountConfig, &HostIdentity, &Name) -> anyhow::Result<()>,
}

/// The parts of a queue for the program, and its memory.
#[derive(Debug)]
pub(crate) struct GivenQueue {
    /// The parts of the engine driver.
    pub(crate) parts: EngineDriverParts,
    /// Depth + spare buffers of `parts.stride` bytes each.
    pub(crate) memory: Arc<Region>,
    /// The time to poll before a sleep.
    pub(crate) spin: SpinMode,
}

/// What control keeps of a volume that a program has.
#[derive(Debug)]
pub(super) struct Upkeep {
    volume: Volume,
    from_queues: mpsc::UnboundedReceiver<FromQueue>,
}

/// The state of a volume that the program follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Standing {
    /// Where it stands.
    pub(crate) state: CourseState,
    /// Bytes of the volume.
    pub(crate) size_bytes: u64,
    /// Whether the volume refuses writes.
    pub(crate) read_only: bool,
}

impl Upkeep {
    /// Connects, opens the volume and makes its queues. Waits for an unreachable target as long as
    /// the configuration allows.
    ///
    /// # Errors
    /// Any reason why the volume cannot be opened. Nothing is left then.
    pub(crate) async fn begin(
        wish: VolumeWish,
        host: HostIdentity,
    ) -> anyhow::Result<(Self, Vec<GivenQueue>)> {
        let VolumeWish { config, take_over, spare_buffers, may_open, .. } = wish;
        let first = First {
            config: &config,
            keys_file: None,
            take_over,
            may_open: &|host, target_name| may_open(&config, host, target_name),
            front: Front {
                tests_paths: true,
                shares_memory: false,
                has_room_for_digests: true,
                spare_buffers,
            },
            generation: Generation::FRESH,
        };
        let (mut volume, paths) = connect_patiently(first, host, |_| {}).await?;
        let (outbox, mut from_queues) = mpsc::unbounded_channel();
        let parts = match volume.give_queues(&outbox) {
            Ok(parts) => parts,
            Err(error) => {
                volume.end(LOGOUT, &mut from_queues).await;
                return Err(error);
            }
        };
        volume.connect_queues(paths);
        let memory = volume.setup().buffers.iter().flatten();
        let given = parts.into_iter().zip(memory);
        let spin = spin_mode(config.transport.spin);
        let given =
            given.map(|(parts, memory)| GivenQueue { parts, memory: Arc::clone(memory), spin });
        let given = given.collect();
        Ok((Self { volume, from_queues }, given))
    }

    /// The volume as it was opened.
    pub(crate) fn volume(&self) -> &OpenReply {
        &self.volume.facts().volume
    }

    /// Which acknowledged writes are durable.
    pub(crate) fn durability(&self) -> &Arc<Durability> {
        self.volume.durability()
    }

    /// The present state.
    pub(crate) fn standing(&self) -> Standing {
        let facts = self.volume.facts();
        let read_only = facts.has(VolumeFlags::READ_ONLY);
        Standing { state: self.volume.link().state(), size_bytes: facts.size_bytes(), read_only }
    }

    /// Keeps the session, and reconnects, until the program has dropped the volume and every queue.
    /// Logs out then. `tell` gets the state of the volume whenever it may have changed.
    pub(crate) async fn serve(mut self, closed: oneshot::Receiver<()>, tell: impl Fn(Standing)) {
        tokio::pin!(closed);
        // A queue that was never made reports no stop.
        let (mut is_closed, mut are_gone) = (false, false);
        while !(is_closed && (are_gone || self.volume.queues().have_stopped())) {
            tokio::select! {
                message = self.from_queues.recv(), if !are_gone => match message {
                    None => are_gone = true,
                    Some(message) => if let Err(error) = self.volume.on_queue(message) {
                        tracing::error!(%error, "a queue broke; its requests are not answered");
                    }
                },
                () = self.volume.attend_without_note() => {}
                // The sender is dropped with the volume.
                _ = &mut closed, if !is_closed => is_closed = true,
            }
            tell(self.standing());
        }
        self.volume.end(LOGOUT, &mut self.from_queues).await;
    }
}
