//! [`EventChannel`]: an rdma_cm event channel, and the table of the ids on it.
//!
//! There is one channel per listener, which the ids that it accepts share, and one per route. An id
//! stays on the channel it was made on, and its events are assigned by a table. The alternative is
//! to move ids with `rdma_migrate_id`. That waits for events in flight and costs a descriptor and a
//! task per connection, and gains nothing here.
//!
//! # Why no event outlives its id
//!
//! librdmacm turns the cookie of an event into a pointer to the id, and follows that pointer and
//! the QP of the id, without a lock. So one lock per channel covers here: fetching an event, acting
//! on it and acknowledging it; making ids and naming their QPs; and taking both away. Taken away
//! means: the id is not in the table, so its events are acknowledged and nothing else, and it names
//! no QP. QPs are made before the lock, and both are destroyed after it: the device may take long.
//! `rdma_destroy_id` waits for the acknowledgement of an event that was fetched, and the kernel
//! drops the others.

use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use super::slow_verbs::SlowVerbs;
use crate::error::{FabricError, Result};
use crate::verbs::ffi;
use crate::verbs::nonblocking::set_nonblocking;

/// With 1, libmlx5 takes no locks, and ends the program where it would have had to wait for one.
const SINGLE_THREADED: &str = "MLX5_SINGLE_THREADED";

/// A full backlog is logged at most this often.
const LOG_EVERY: Duration = Duration::from_secs(5);

/// An open event channel.
#[derive(Debug)]
pub(in crate::verbs) struct EventChannel {
    raw: NonNull<ffi::RawEventChannel>,
    ids: Mutex<Ids>,
    // Notified when the table has become empty.
    idle: Notify,
}

/// The ids that are alive, by address. Only read and changed under the lock of the channel.
#[derive(Debug, Default)]
pub(in crate::verbs) struct Ids {
    known: HashMap<usize, Known>,
    last_log: Option<Instant>,
}

/// An id that is alive.
#[derive(Debug)]
pub(in crate::verbs) struct Known {
    /// The role of the id.
    pub(in crate::verbs) role: Role,
    /// The events that an id asks for.
    pub(in crate::verbs) verbs: Arc<SlowVerbs>,
}

/// The role of an id. It decides where its events go.
#[derive(Debug)]
pub(in crate::verbs) enum Role {
    /// Connects, or has connected. The sender is the one that waits for the present step.
    Active(Option<oneshot::Sender<CmReply>>),
    /// A peer asked for this connection.
    Passive,
    /// Listens. The task of the channel knows where requests go.
    Listening,
}

/// An event that an active id waited for.
#[derive(Debug)]
pub(in crate::verbs) struct CmReply {
    pub(in crate::verbs) event: u32,
    pub(in crate::verbs) status: i32,
    pub(in crate::verbs) private_data: Vec<u8>,
    pub(in crate::verbs) responder_resources: u8,
    pub(in crate::verbs) initiator_depth: u8,
}

// SAFETY: librdmacm allows a channel on any thread; its unserialised parts are under the lock of
// `ids`.
unsafe impl Send for EventChannel {}
// SAFETY: as for Send.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    /// Opens a channel without ids. Its descriptor is nonblocking.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`], [`FabricError::Environment`], or the errno of the call, with the
    /// usual cause where it is known.
    pub(in crate::verbs) fn open() -> Result<Arc<Self>> {
        if std::env::var_os(SINGLE_THREADED).is_some_and(|value| value == "1") {
            return Err(FabricError::Environment(SINGLE_THREADED));
        }
        // SAFETY: plain call.
        let raw = unsafe { ffi::rdma_create_event_channel() };
        let raw = NonNull::new(raw).ok_or_else(|| open_error(io::Error::last_os_error()))?;
        let channel = Self { raw, ids: Mutex::default(), idle: Notify::new() };
        set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    /// The channel, valid while `self` lives.
    pub(in crate::verbs) fn raw(&self) -> *mut ffi::RawEventChannel {
        self.raw.as_ptr()
    }

    /// The descriptor of the channel, open while `self` lives.
    pub(in crate::verbs) fn fd(&self) -> RawFd {
        // SAFETY: the channel is open while `self` lives.
        unsafe { (*self.raw()).fd }
    }

    /// Keeps events away while ids are made, and while they begin or cease to name a QP.
    pub(in crate::verbs) fn lock(&self) -> MutexGuard<'_, Ids> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the last id is gone. Only one task may wait.
    pub(in crate::verbs) async fn idle(&self) {
        self.idle.notified().await;
    }

    /// Whether a refused connection may be logged now.
    pub(in crate::verbs) fn may_log(&self) -> bool {
        let mut ids = self.lock();
        let due = ids.last_log.is_none_or(|last| last.elapsed() >= LOG_EVERY);
        if due {
            ids.last_log = Some(Instant::now());
        }
        due
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
    /// Adds an id that was just made.
    pub(in crate::verbs) fn insert(
        &mut self,
        id: NonNull<ffi::RawCmId>,
        role: Role,
    ) -> Arc<SlowVerbs> {
        let verbs = SlowVerbs::of(id);
        let known = Known { role, verbs: Arc::clone(&verbs) };
        self.known.insert(id.as_ptr() as usize, known);
        verbs
    }

    /// Removes an id that is about to be destroyed.
    pub(super) fn remove(&mut self, id: NonNull<ffi::RawCmId>, channel: &EventChannel) {
        self.known.remove(&(id.as_ptr() as usize));
        if self.known.is_empty() {
            channel.idle.notify_one();
        }
    }

    /// An id that is alive. The pointer is only compared.
    pub(in crate::verbs) fn find(&mut self, id: *mut ffi::RawCmId) -> Option<&mut Known> {
        self.known.get_mut(&(id as usize))
    }

    /// A receiver for the next event of an active id.
    pub(super) fn expect(&mut self, id: NonNull<ffi::RawCmId>) -> oneshot::Receiver<CmReply> {
        let (sender, receiver) = oneshot::channel();
        match self.find(id.as_ptr()).map(|known| &mut known.role) {
            Some(role @ Role::Active(_)) => *role = Role::Active(Some(sender)),
            // The receiver says at once that no event will come.
            other => debug_assert!(false, "an event was expected of an id that is {other:?}"),
        }
        receiver
    }

    /// Ends the wait of every active id: no more events will come.
    pub(in crate::verbs) fn abandon(&mut self) {
        for known in self.known.values_mut() {
            if let Role::Active(waiter) = &mut known.role {
                // Dropping the sender ends the wait.
                drop(waiter.take());
            }
        }
    }
}

impl Role {
    /// Gives an event to the task that waits for it, if the id is active.
    pub(in crate::verbs) fn wake(&mut self, reply: CmReply) {
        if let Self::Active(waiter) = self
            && let Some(waiter) = waiter.take()
        {
            // The send fails when the step has timed out. The id is then about to be destroyed.
            let _ = waiter.send(reply);
        }
    }
}

impl CmReply {
    /// Copies the needed fields of an event.
    pub(in crate::verbs) fn copy(event: &ffi::CmEvent) -> Self {
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

    /// The status as an errno. iWARP and address resolution give negative ones.
    pub(in crate::verbs) fn error(&self) -> io::Error {
        match self.status {
            0 => io::Error::from_raw_os_error(libc::EHOSTUNREACH),
            status => io::Error::from_raw_os_error(status.saturating_abs()),
        }
    }
}

/// Why no channel could be opened. The common case is a host without any RDMA device.
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
