//! A volume as the disk of a virtual machine ([`crate::front::vhost`]): a mount that has a socket
//! instead of a device. Name, lock, control socket, session, course, epochs, retained writes and
//! losses are those of a disk. The note is a [`GuestNote`] beside the socket: the next process
//! serves the same guest and accounts for its writes. A killed process loses its requests under
//! way, so the rings of its guest are left alone until the guest is reset.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::{ByteSize, MountConfig};
use rblk_protocol::{Generation, VolumeFlags};
use tokio::sync::mpsc;

use super::end_signals::EndSignals;
use super::guest_end::GuestEnd;
use super::mounted::Mount;
use super::note::guest::{GuestNote, InheritedGuestState};
use super::note::leftovers::{Purpose, claim};
use super::note::neighbour;
use super::serving::LAST_WORDS;
use super::socket::{Asked, MountSocket};
use super::{OnReady, first_connect, recover};
use crate::engine::path::Path as QueuePath;
use crate::front::vhost::{FRONT, GuestDisk, GuestLeft, Memories, Served, ThreadParts};
use crate::queue::FromQueue;
use crate::volume::begin::{First, MayOpen, connect_first};
use crate::volume::error::SessionError;
use crate::volume::host_identity::id_of_guest;
use crate::volume::queues::spin_mode;
use crate::volume::session::HostIdentity;
use crate::volume::{FORCE_LOGOUT, LOGOUT, Volume, task};
use rblk_operate::mount::configured::Configured;
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_ask::{Ask, Response};

/// The delay before the next try, after a note could not be written.
const NOTE_AGAIN: Duration = Duration::from_secs(1);

/// The path cannot be the socket of a front end.
#[derive(Debug, thiserror::Error)]
#[error("--socket {}: {problem}", path.display())]
pub(crate) struct BadSocket {
    path: PathBuf,
    problem: String,
}

/// The socket by which the front end of a guest connects.
#[derive(Debug)]
pub struct GuestSocket {
    listener: UnixListener,
    memory_max: Option<ByteSize>,
    path: PathBuf,
    unlinked: Cell<bool>,
    // A killed process left the socket.
    was_left: bool,
}

impl GuestSocket {
    /// Listens at a path. A socket that a dead process left there is replaced.
    ///
    /// # Errors
    /// Another process listens at the path, or the path is no socket, or no socket can be made.
    pub fn bind(path: &Path) -> anyhow::Result<Self> {
        let bad = |problem: String| BadSocket { path: path.to_owned(), problem };
        let was_left = match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(bad(error.to_string()).into()),
            Ok(found) if !found.file_type().is_socket() => {
                let problem = "it is there, and is no socket; name another path, or remove it";
                return Err(bad(problem.to_owned()).into());
            }
            Ok(_) if UnixStream::connect(path).is_ok() => {
                let problem = "another process listens there; see `rblk-initiator list`, or name another path";
                return Err(bad(problem.to_owned()).into());
            }
            Ok(_) => {
                std::fs::remove_file(path).map_err(|error| bad(error.to_string()))?;
                true
            }
        };
        let listener = UnixListener::bind(path)
            .map_err(|error| bad(format!("{error}; the directory has to be there")))?;
        let path = std::path::absolute(path).map_err(|error| bad(error.to_string()))?;
        Ok(Self { listener, memory_max: None, path, unlinked: Cell::new(false), was_left })
    }

    /// Limits the memory of a guest at this socket.
    #[must_use]
    pub fn with_memory_max(mut self, most: Option<ByteSize>) -> Self {
        self.memory_max = most;
        self
    }

    /// Removes the socket's file, once: a later file at that path belongs to another process.
    fn unlink(&self) {
        if !self.unlinked.replace(true) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for GuestSocket {
    fn drop(&mut self) {
        self.unlink();
    }
}

/// Serves a volume to front ends, until it is unmounted.
///
/// # Errors
/// Any reason why the volume cannot be opened, or a queue that broke.
pub async fn run_guest(
    configured: &Configured,
    name: &str,
    socket: GuestSocket,
    host: HostIdentity,
    take_over: bool,
    on_ready: OnReady<'_>,
) -> anyhow::Result<()> {
    let Configured { config, keys_file } = configured;
    let mut signals = EndSignals::listen()?;
    let listed = match nix::unistd::geteuid().is_root() {
        true => Some(ListedMount::new(name).await?),
        // Only root may write to the run directory.
        false => None,
    };
    let before = GuestNote::read(&socket.path)?;
    // Each socket counts as a holder of its own: the target takes no mount of this host for this
    // guest.
    let host = HostIdentity { id: id_of_guest(host.id, &socket.path), ..host };
    if !take_over {
        neighbour::must_not_hold(name, config, host.id, None)?;
    }
    let same = before.as_ref().filter(|note| note.is_of(&config.volume));
    let generation = same.map_or(Generation::FRESH, GuestNote::generation);
    let keys_file = keys_file.as_ref();
    let may_open = neighbour::may_open(name, config);
    let may_open: MayOpen<'_> = &may_open;
    let mut first = First { config, keys_file, take_over, may_open, front: FRONT, generation };
    let connected = match connect(name, first, host, listed.as_ref(), &mut signals).await {
        Err(error) if !generation.is_fresh() && is_fenced(&error) => {
            first.generation = Generation::FRESH;
            connect(name, first, host, listed.as_ref(), &mut signals).await
        }
        connected => connected,
    };
    let (mut volume, paths) = connected?;
    let (outbox, mut from_queues) = mpsc::unbounded_channel();
    let facts = volume.facts();
    if let Some(Err(error)) = before.as_ref().map(|its| its.must_not_be_needed(facts, &socket.path))
    {
        drop(paths);
        volume.end(LOGOUT, &mut from_queues).await;
        return Err(error.into());
    }
    let mut mount = Mount::new(name, volume);
    let was_away = first.generation != generation;
    let left = match before {
        Some(note) => inherit(&mut mount, &note, was_away),
        None if socket.was_left => inherit_unknown(&mut mount),
        None => GuestLeft::default(),
    };
    mount.set_guest(&socket.path, &left)?;
    let (memories, asked_memories) = mpsc::unbounded_channel();
    let listener = socket.listener.try_clone().context("the socket of the front end");
    let served = listener.map(|listener| (listener, socket.memory_max)).and_then(|listener| {
        serve_rings(mount.volume_mut(), config, &left, listener, (&outbox, memories))
    });
    mount.volume_mut().connect_queues(paths);
    mount.set_disk(&socket.path);
    let guest = Guest { mount, from_queues, memories: asked_memories };
    let control = listed.as_ref().map(|listed| &listed.socket);
    guest.serve((served, left), &socket, control, &mut signals, on_ready).await
}

/// Connects for the first time. Meanwhile the control socket answers, if there is one.
async fn connect(
    name: &str,
    first: First<'_>,
    host: HostIdentity,
    listed: Option<&ListedMount>,
    signals: &mut EndSignals,
) -> anyhow::Result<(Volume, Vec<QueuePath>)> {
    let why = RefCell::new(None);
    match listed {
        Some(listed) => first_connect::connect(&listed.socket, name, first, host, signals).await,
        None => tokio::select! {
            connected = connect_first(first, host, &why) => connected,
            () = signals.next() => Err(first_connect::ToldToEnd { name: name.to_owned() }.into()),
        },
    }
}

fn is_fenced(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(SessionError::Fenced { .. }))
}

/// Takes over the note of the process before, and logs the consequences.
fn inherit(mount: &mut Mount, note: &GuestNote, was_away: bool) -> GuestLeft {
    let on_loss = mount.volume().durability().on_loss();
    let InheritedGuestState { account, left, is_new_loss, other } =
        note.inherit(mount.volume().facts(), on_loss, was_away);
    mount.inherit(&account);
    let consequence = account.on_loss().consequence();
    if is_new_loss {
        tracing::error!(
            rblk_event = "lost-writes",
            "lost: the target lost its memory, so writes that the process before this one acknowledged may be lost; \
             {consequence}"
        );
    } else if account.has_untold_loss() {
        tracing::error!("a loss from before is still to be told to the guest; {consequence}");
    } else if account.inherits_doubt() {
        tracing::info!(
            "the process before this one may have acknowledged writes that no FLUSH covered; this one watches over them"
        );
    }
    if let Some(why) = other {
        tracing::warn!(
            why,
            "the volume is not the one that the guest used before, so no guest can continue with it: reset the guest"
        );
    }
    left
}

/// Inherits from a process without a note: it was killed.
fn inherit_unknown(mount: &mut Mount) -> GuestLeft {
    let InheritedGuestState { account, left, .. } =
        InheritedGuestState::unknown(mount.volume().durability().on_loss());
    mount.inherit(&account);
    left
}

/// The name and the control socket of the mount, by which other commands know it.
#[derive(Debug)]
struct ListedMount {
    // Dropped first, so that the socket is gone when the name is free.
    socket: MountSocket,
    _lock: MountLock,
}

impl ListedMount {
    async fn new(name: &str) -> anyhow::Result<Self> {
        let lock = recover::lock(name, false).await?;
        claim(&lock, |_| Purpose::Mount { same: false })?;
        let socket = MountSocket::bind(&lock).context("the control socket")?;
        Ok(Self { socket, _lock: lock })
    }
}

/// Makes the rings of the disk, and serves them.
fn serve_rings(
    volume: &mut Volume,
    config: &MountConfig,
    left: &GuestLeft,
    listener: (UnixListener, Option<ByteSize>),
    (outbox, memories): (&mpsc::UnboundedSender<FromQueue>, mpsc::UnboundedSender<Memories>),
) -> anyhow::Result<Served> {
    let targets = volume.give_queues(outbox)?;
    let disk = disk_of(volume, config);
    let block_size = volume.facts().volume.block_size;
    let buffers = volume.setup().buffers.iter().flatten();
    let parts = targets.into_iter().zip(buffers).map(|(target, buffers)| ThreadParts {
        target,
        buffers: Arc::clone(buffers),
        block_size,
        id: disk.id,
    });
    let parts = (parts.collect(), disk.volatile_cache.then(|| Arc::clone(volume.durability())));
    Served::start(listener, disk, parts, left, spin_mode(config.transport.spin), memories)
        .context("the disk of the guest")
}

/// The disk of a volume, for guests.
fn disk_of(volume: &Volume, config: &MountConfig) -> GuestDisk {
    let (facts, setup) = (volume.facts(), volume.setup());
    let volume = &facts.volume;
    let has = |flag| volume.flags.has(flag);
    let block = volume.block_size.bytes();
    GuestDisk {
        size_bytes: facts.size_bytes(),
        block,
        read_only: has(VolumeFlags::READ_ONLY) || config.read_only,
        volatile_cache: has(VolumeFlags::VOLATILE_CACHE),
        discard: has(VolumeFlags::DISCARD).then(|| volume.discard_granularity_bytes.max(block)),
        write_zeroes: has(VolumeFlags::WRITE_ZEROES),
        max_io: setup.wish.io_max_bytes,
        queues: setup.queues,
        id: GuestDisk::id_of(&config.volume),
    }
}

/// A mount that a guest uses.
#[derive(Debug)]
struct Guest {
    mount: Mount,
    from_queues: mpsc::UnboundedReceiver<FromQueue>,
    memories: mpsc::UnboundedReceiver<Memories>,
}

impl Guest {
    /// Serves until an unmount, a signal or a broken ring.
    async fn serve(
        mut self,
        (served, left): (anyhow::Result<Served>, GuestLeft),
        guest_socket: &GuestSocket,
        socket: Option<&MountSocket>,
        signals: &mut EndSignals,
        on_ready: OnReady<'_>,
    ) -> anyhow::Result<()> {
        let served = match served {
            Ok(served) => served,
            Err(error) => {
                self.mount.volume_mut().end(LOGOUT, &mut self.from_queues).await;
                // Nothing was served: the state is that of the process before.
                self.mount.leave_guest(left);
                return Err(error);
            }
        };
        announce(&self.mount, on_ready);
        let (asked_sender, mut asked) = mpsc::channel(16);
        let answering = async {
            match socket {
                Some(socket) => socket.serve(asked_sender).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(answering);
        let mut end = GuestEnd::default();
        let mut note_at = None;
        let result = loop {
            let deadline = end.deadline();
            tokio::select! {
                () = &mut answering => {}
                going_on = self.next(&mut asked, &served, (&mut end, &mut note_at)) => match going_on {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                },
                () = signals.next() => end.on_signal(&served),
                () = task::until(deadline) => {
                    break Err(end.held_up(self.mount.disk()).into());
                }
            }
            let facts = self.mount.volume().facts();
            served.news().tell(facts.size_bytes(), facts.has(VolumeFlags::READ_ONLY));
        };
        let limit = if end.is_forced() { FORCE_LOGOUT } else { LOGOUT };
        self.mount.volume_mut().end(limit, &mut self.from_queues).await;
        match &result {
            Ok(()) => self.mount.leave_guest(served.news().left()),
            // The note already describes a killed process.
            Err(_) if self.mount.note().owes_loss() => self.mount.write_note(),
            Err(_) => {}
        }
        // Before the reply, so that its receiver finds no socket.
        guest_socket.unlink();
        if let Some(socket) = socket {
            socket.unlink();
        }
        if end.answer() {
            let _ = tokio::time::timeout(LAST_WORDS, &mut answering).await;
        }
        result
    }

    /// Handles the next event. Returns whether the disk goes on.
    async fn next(
        &mut self,
        asked: &mut mpsc::Receiver<Asked>,
        served: &Served,
        (end, note_at): (&mut GuestEnd, &mut Option<Instant>),
    ) -> anyhow::Result<bool> {
        let Self { mount, from_queues, memories } = self;
        let (rates_due, durability) = (mount.rates_due(), Arc::clone(mount.volume().durability()));
        tokio::select! {
            Some(message) = from_queues.recv() => mount.volume_mut().on_queue(message)?,
            () = mount.attend() => {}
            memory = memories.recv() => match memory {
                None => {
                    GuestEnd::on_gone(mount.disk(), served)?;
                    return Ok(false);
                }
                Some(Memories { regions, reply }) => {
                    mount.volume_mut().replace_shared(regions);
                    // The receiver of the reply may be gone.
                    let _ = reply.try_send(());
                }
            },
            Some(request) = asked.recv() => on_ask(request, mount, served, end),
            () = task::until(rates_due) => mount.take_rates(),
            () = durability.loss_changed(), if note_at.is_none() => {
                *note_at = Some(Instant::now() + mount.note().step());
            }
            () = task::until(*note_at) => {
                if mount.note().owes_loss() {
                    mount.write_note();
                }
                // A failed write is tried again.
                *note_at = mount.note().owes_loss().then(|| Instant::now() + NOTE_AGAIN);
            }
        }
        Ok(true)
    }
}

/// Answers a question of the control socket, now or after the end of the disk.
fn on_ask(request: Asked, mount: &mut Mount, served: &Served, end: &mut GuestEnd) {
    let response = match &request.ask {
        Ask::Status => {
            mount.ask_rates();
            Response::Status(Box::new(mount.status()))
        }
        Ask::Reload { target_keys } => mount.reload_keys(target_keys),
        Ask::Upgrade { .. } => Response::Error(format!(
            "{}: the disk of a guest cannot be handed over: end the virtual machine, and start the new program",
            mount.disk()
        )),
        Ask::Unmount { force: false } if served.news().has_front_end() => Response::Busy(format!(
            "{} is in use by a front end; end the virtual machine first, or use --force",
            mount.disk()
        )),
        Ask::Unmount { force } => {
            let force = *force;
            end.on_unmount(request, force, mount.disk(), served);
            return;
        }
    };
    let _ = request.reply.send(response);
}

fn announce(mount: &Mount, on_ready: OnReady<'_>) {
    let status = mount.status();
    tracing::info!(
        rblk_event = "mount",
        socket = status.device,
        volume = status.volume,
        address = status.address,
        "front ends may connect"
    );
    on_ready(&status);
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
}
