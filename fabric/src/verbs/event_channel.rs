//! [`EventChannel`]: an rdma_cm event channel, the table of the ids on it, and the task that serves
//! it.
//!
//! One channel per listener, shared by the ids it accepted, and one per route. Ids stay on the
//! channel they were made on and are found by table, rather than moved with `rdma_migrate_id`: a
//! move has to wait for events in flight, costs a descriptor and a task per connection, and gains
//! nothing here.
//!
//! # Why no event outlives its id
//!
//! librdmacm turns an event's cookie into a pointer to the id, and follows it and its QP, without a
//! lock. So here one lock per channel covers fetching an event, acting on it and acknowledging it,
//! and equally making and freeing ids and QPs. Under that lock an id is either in the table and
//! alive, or destroyed, in which case the kernel has dropped its events.
//!
//! # The task
//!
//! It runs on the runtime that made the channel and ends when the last id is gone or the runtime
//! is; it never keeps a runtime from shutting down. Connections may outlive the runtime, but then
//! nobody notices that a peer disconnected except by the QP's own retries.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc, oneshot};

use super::cm_id::CmId;
use super::completion_queue::set_nonblocking;
use super::device::Device;
use super::ffi::{self, event};
use super::listener::Incoming;
use super::queue_pair;
use crate::device::ConnectionHello;
use crate::error::{FabricError, Result};

/// Events handled before the task lets others run.
const EVENTS_PER_TURN: usize = 64;

/// How often a full backlog is logged at most.
const LOG_EVERY: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct EventChannel {
    raw: NonNull<ffi::EventChannel>,
    ids: Mutex<Ids>,
    // Told once the table has become empty.
    idle: Notify,
}

/// The ids that are alive, by address. Only looked at under the lock.
#[derive(Debug, Default)]
pub(super) struct Ids {
    roles: HashMap<usize, Role>,
    last_log: Option<Instant>,
}

/// What an id is for, so where its events go.
#[derive(Debug)]
pub(super) enum Role {
    /// Connects, or did: the one who waits for the present step.
    Active(Option<oneshot::Sender<Reply>>),
    /// Was accepted or is to be.
    Passive,
    /// Listens: where requests go.
    Listening(mpsc::Sender<Result<Incoming>>),
}

/// An event an active id waited for.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) event: u32,
    pub(super) status: i32,
    pub(super) private_data: Vec<u8>,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

/// What is left to do once the lock is released.
enum Rest {
    Nothing,
    Request { id: CmId, reply: Reply, to: mpsc::Sender<Result<Incoming>> },
    DeviceGone { context: *mut ffi::ibv_context, listener: Option<mpsc::Sender<Result<Incoming>>> },
}

// SAFETY: librdmacm allows a channel on any thread; what it does not serialise is under `ids`.
unsafe impl Send for EventChannel {}
// SAFETY: as for Send.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    /// Opens a channel, makes its first id and starts the task. Must run on a tokio runtime.
    pub(super) fn open(role: Role) -> Result<CmId> {
        // SAFETY: plain call.
        let raw = unsafe { ffi::rdma_create_event_channel() };
        let raw = NonNull::new(raw).ok_or_else(|| open_error(io::Error::last_os_error()))?;
        let channel = Arc::new(Self { raw, ids: Mutex::default(), idle: Notify::new() });
        // SAFETY: the channel was just made.
        set_nonblocking(unsafe { (*raw.as_ptr()).fd })?;
        // SAFETY: the descriptor is the channel's, which `Readable` keeps open, and never another.
        let readiness = unsafe {
            AsyncFd::register_with_interest(Readable(Arc::clone(&channel)), Interest::READABLE)
        };
        let readiness =
            readiness.map_err(|e| FabricError::Call { call: "epoll", source: e.into() })?;
        let id = CmId::create(&channel, role)?;
        tokio::spawn(serve(readiness));
        Ok(id)
    }

    /// The channel, valid while `self` lives.
    pub(super) fn raw(&self) -> *mut ffi::EventChannel {
        self.raw.as_ptr()
    }

    /// Keeps events away while ids or QPs are made or freed.
    pub(super) fn lock(&self) -> MutexGuard<'_, Ids> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles at most one event; false when there was none.
    fn turn(self: &Arc<Self>) -> io::Result<bool> {
        let rest = {
            let mut ids = self.lock();
            let mut event = ptr::null_mut();
            // SAFETY: the channel is open; under the lock no id is freed meanwhile.
            if unsafe { ffi::rdma_get_cm_event(self.raw(), &raw mut event) } != 0 {
                let error = io::Error::last_os_error();
                return match error.kind() {
                    io::ErrorKind::WouldBlock => Ok(false),
                    io::ErrorKind::Interrupted => Ok(true),
                    _ => Err(error),
                };
            }
            // SAFETY: librdmacm returned it and it is acknowledged only below.
            let rest = self.handle(&mut ids, unsafe { &*event });
            // SAFETY: as above; once.
            unsafe { ffi::rdma_ack_cm_event(event) };
            rest
        };
        self.finish(rest);
        Ok(true)
    }

    /// Acts on one event, under the lock.
    fn handle(self: &Arc<Self>, ids: &mut Ids, event: &ffi::CmEvent) -> Rest {
        let reply = Reply::copy(event);
        if event.event == event::CONNECT_REQUEST {
            let Some(id) = NonNull::new(event.id) else { return Rest::Nothing };
            let listener = ids.roles.get(&(event.listen_id as usize));
            let to = match listener {
                Some(Role::Listening(to)) => Some(to.clone()),
                _ => None,
            };
            ids.roles.insert(id.as_ptr() as usize, Role::Passive);
            // SAFETY: a new id that librdmacm gives to the receiver of the event, entered in the
            // table.
            let id = unsafe { CmId::adopt(id, Arc::clone(self)) };
            return match to {
                Some(to) => Rest::Request { id, reply, to },
                // Cannot be, but `id` must not be dropped under the lock: with a closed sender it
                // is dropped, and so rejected, after.
                None => Rest::Request { id, reply, to: mpsc::channel(1).0 },
            };
        }
        let Some(role) = ids.roles.get_mut(&(event.id as usize)) else { return Rest::Nothing };
        // SAFETY: in the table, so alive, and stays so under the lock.
        let (context, qp) = unsafe { ((*event.id).verbs, (*event.id).qp) };
        match event.event {
            event::DISCONNECTED
            | event::TIMEWAIT_EXIT
            | event::ADDR_CHANGE
            | event::DEVICE_REMOVAL
            | event::REJECTED
            | event::UNREACHABLE
            | event::CONNECT_ERROR => {
                tracing::debug!(
                    event = event.event,
                    status = event.status,
                    "rdma_cm ended a connection"
                );
                if !qp.is_null() {
                    // SAFETY: a QP is freed under the lock only, and the id still has it.
                    unsafe { queue_pair::move_to_error(qp) };
                }
            }
            _ => {}
        }
        // SAFETY: a QP is freed under the lock only, and the id still has it.
        let given_up = event.event == event::ESTABLISHED
            && matches!(role, Role::Passive)
            && !qp.is_null()
            && unsafe { queue_pair::is_in_error(qp) };
        if given_up {
            // It was before the peer's last word came, and until then the kernel could not tell the
            // peer so. SAFETY: the id is alive.
            let _ = unsafe { ffi::rdma_disconnect(event.id) };
        }
        if event.event == event::DISCONNECTED {
            // Answers the peer, who waits for that before it frees its side.
            // SAFETY: the id is alive.
            let _ = unsafe { ffi::rdma_disconnect(event.id) };
        }
        if event.event == event::DEVICE_REMOVAL {
            let listener = match role {
                Role::Listening(to) => Some(to.clone()),
                Role::Active(waiter) => {
                    Self::wake(waiter, reply);
                    None
                }
                Role::Passive => None,
            };
            return Rest::DeviceGone { context, listener };
        }
        if let Role::Active(waiter) = role {
            Self::wake(waiter, reply);
        }
        Rest::Nothing
    }

    fn wake(waiter: &mut Option<oneshot::Sender<Reply>>, reply: Reply) {
        if let Some(waiter) = waiter.take() {
            // Nobody there: the step timed out and the id is about to go.
            let _ = waiter.send(reply);
        }
    }

    /// What must not run under the lock: opening devices, dropping ids.
    fn finish(&self, rest: Rest) {
        match rest {
            Rest::Nothing => {}
            Rest::DeviceGone { context, listener } => {
                tracing::warn!("an RDMA device was removed");
                Device::mark_gone(context);
                if let Some(listener) = listener {
                    let source = io::Error::from_raw_os_error(libc::ENODEV);
                    let _ =
                        listener.try_send(Err(FabricError::Call { call: "rdma_listen", source }));
                }
            }
            Rest::Request { id, reply, to } => {
                let peer = id.peer();
                // Reserved first: a flood of requests costs no device call.
                let Ok(place) = to.try_reserve() else {
                    id.reject(&[]);
                    if self.may_log() {
                        tracing::warn!(peer, "connection refused: too many wait to be accepted");
                    }
                    return;
                };
                match Incoming::new(
                    id,
                    ConnectionHello(reply.private_data),
                    peer,
                    (reply.initiator_depth, reply.responder_resources),
                ) {
                    Ok(incoming) => place.send(Ok(incoming)),
                    Err(error) => {
                        if self.may_log() {
                            tracing::warn!(%error, "connection refused: its device cannot be used");
                        }
                    }
                }
            }
        }
    }

    fn may_log(&self) -> bool {
        let mut ids = self.lock();
        let due = ids.last_log.is_none_or(|last| last.elapsed() >= LOG_EVERY);
        if due {
            ids.last_log = Some(Instant::now());
        }
        due
    }

    /// Wakes all who wait: no more events will come.
    fn abandon(&self, error: &io::Error) {
        let listeners: Vec<_> = {
            let mut ids = self.lock();
            let mut listeners = Vec::new();
            for role in ids.roles.values_mut() {
                match role {
                    // Dropping the sender ends the wait.
                    Role::Active(waiter) => drop(waiter.take()),
                    Role::Listening(to) => listeners.push(to.clone()),
                    Role::Passive => {}
                }
            }
            listeners
        };
        for listener in listeners {
            let source = error
                .raw_os_error()
                .map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error);
            let _ = listener.try_send(Err(FabricError::Call { call: "rdma_get_cm_event", source }));
        }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: every id on the channel holds an Arc of this value and is gone, and so is the
        // task's registration of the descriptor.
        unsafe { ffi::rdma_destroy_event_channel(self.raw()) };
    }
}

impl Ids {
    pub(super) fn insert(&mut self, id: NonNull<ffi::CmId>, role: Role) {
        self.roles.insert(id.as_ptr() as usize, role);
    }

    /// Forgets an id that is about to be destroyed.
    pub(super) fn remove(&mut self, id: NonNull<ffi::CmId>, channel: &EventChannel) {
        self.roles.remove(&(id.as_ptr() as usize));
        if self.roles.is_empty() {
            channel.idle.notify_one();
        }
    }

    /// A place for the next event of an active id.
    pub(super) fn expect(&mut self, id: NonNull<ffi::CmId>) -> oneshot::Receiver<Reply> {
        let (sender, receiver) = oneshot::channel();
        if let Some(role @ Role::Active(_)) = self.roles.get_mut(&(id.as_ptr() as usize)) {
            *role = Role::Active(Some(sender));
        }
        receiver
    }
}

impl Reply {
    fn copy(event: &ffi::CmEvent) -> Self {
        let conn = &event.conn;
        let private_data = if conn.private_data.is_null() || conn.private_data_len == 0 {
            Vec::new()
        } else {
            // SAFETY: librdmacm points to that many bytes inside the event, which is not
            // acknowledged yet.
            unsafe {
                std::slice::from_raw_parts(
                    conn.private_data.cast::<u8>(),
                    usize::from(conn.private_data_len),
                )
            }
            .to_vec()
        };
        Self {
            event: event.event,
            status: event.status,
            private_data,
            responder_resources: conn.responder_resources,
            initiator_depth: conn.initiator_depth,
        }
    }
}

/// The channel as tokio sees it. Holds the channel, so the descriptor is registered only while
/// open.
#[derive(Debug)]
struct Readable(Arc<EventChannel>);

impl AsRawFd for Readable {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the channel is open while its Arc lives.
        unsafe { (*self.0.raw()).fd }
    }
}

async fn serve(readiness: AsyncFd<Readable>) {
    let channel = &readiness.get_ref().0;
    loop {
        let mut ready = tokio::select! {
            biased;
            () = channel.idle.notified() => return,
            ready = readiness.readable() => match ready {
                Ok(ready) => ready,
                // The runtime shuts down.
                Err(_) => return,
            },
        };
        let mut more = true;
        for _ in 0..EVENTS_PER_TURN {
            more = match channel.turn() {
                Ok(more) => more,
                Err(error) => {
                    tracing::error!(%error, "an rdma_cm event channel broke");
                    channel.abandon(&error);
                    return;
                }
            };
            if !more {
                ready.clear_ready();
                break;
            }
        }
        if more {
            tokio::task::yield_now().await;
        }
    }
}

/// Why no channel could be had: no device at all is the common case and has its own words.
fn open_error(source: io::Error) -> FabricError {
    if ibverbs::devices().map_or(true, |devices| devices.is_empty()) {
        return FabricError::NoDevice;
    }
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => FabricError::Call {
            call: "opening /dev/infiniband/rdma_cm (is the module loaded? `modprobe rdma_ucm`)",
            source,
        },
        Some(libc::EACCES | libc::EPERM) => FabricError::Call {
            call: "opening /dev/infiniband/rdma_cm (may this user read and write it?)",
            source,
        },
        _ => FabricError::Call { call: "rdma_create_event_channel", source },
    }
}
