//! The task that serves an event channel: it fetches each rdma_cm event and acts on it.
//!
//! The task runs on the runtime that opened the channel. It ends when the last id is gone or the
//! runtime shuts down, and it never delays a shutdown. Connections may outlive the runtime. Then
//! only the retries of a QP detect that the peer has disconnected.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;

use super::cm::cm_id::CmId;
use super::cm::event_channel::{CmReply, EventChannel, Ids, Known, Role};
use super::cm::slow_verbs::SlowVerbs;
use super::device::Device;
use super::device::presence;
use super::ffi::{self, event};
use super::incoming::Incoming;
use crate::connect::ConnectionHello;
use crate::error::{FabricError, Result};

/// Events that are handled before other tasks may run.
const EVENTS_PER_TURN: usize = 64;

/// Where peers of a listener go.
#[derive(Debug)]
pub(super) struct ListenerDoor {
    /// Where the listener gets them from, or the error that ends it.
    pub(super) requests: mpsc::Sender<Result<Incoming>>,
    /// The reply to peers for which there is no room.
    pub(super) busy: ConnectionHello,
}

/// An id of the role, on a channel of its own with a running task. Call it on a tokio runtime. A
/// listening id needs a `door`.
pub(super) fn open_id(role: Role, door: Option<ListenerDoor>) -> Result<CmId> {
    // Where no device is open, no thread of one looks.
    presence::look_around_at_times();
    let channel = EventChannel::open()?;
    // SAFETY: the descriptor is the channel's, which `Readable` keeps open, and never another.
    let readiness = unsafe {
        AsyncFd::register_with_interest(Readable(Arc::clone(&channel)), Interest::READABLE)
    };
    let readiness = readiness.map_err(|e| FabricError::Call { call: "epoll", source: e.into() })?;
    let id = CmId::create(&channel, role)?;
    let door = Mutex::new(door);
    tokio::spawn(serve(readiness, EventTask { channel, door }));
    Ok(id)
}

/// The channel as tokio sees it. It holds the channel, so the descriptor is registered only while
/// the channel is open.
#[derive(Debug)]
struct Readable(Arc<EventChannel>);

impl AsRawFd for Readable {
    fn as_raw_fd(&self) -> RawFd {
        self.0.fd()
    }
}

async fn serve(readiness: AsyncFd<Readable>, task: EventTask) {
    loop {
        let mut ready = tokio::select! {
            biased;
            () = task.channel.idle() => return,
            ready = readiness.readable() => match ready {
                Ok(ready) => ready,
                // The runtime shuts down.
                Err(_) => return,
            },
        };
        let mut more = true;
        for _ in 0..EVENTS_PER_TURN {
            more = match task.turn() {
                Ok(more) => more,
                Err(error) => {
                    tracing::error!(%error, "an rdma_cm event channel broke");
                    task.abandon(error);
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

/// The state of the task.
struct EventTask {
    channel: Arc<EventChannel>,
    // Of the channel of a listener that works.
    door: Mutex<Option<ListenerDoor>>,
}

/// The work left after the lock is released: opening devices and dropping ids.
enum Unlocked {
    Nothing,
    Request { id: CmId, reply: CmReply, wanted: bool },
    DeviceGone { context: *mut ffi::ibv_context, was_listening: bool },
    AddressMoved,
}

impl EventTask {
    /// Handles at most one event. False when there was none.
    fn turn(&self) -> io::Result<bool> {
        let rest = {
            let mut ids = self.channel.lock();
            let mut event = ptr::null_mut();
            // SAFETY: the channel is open; no id is freed while the lock is held.
            if unsafe { ffi::rdma_get_cm_event(self.channel.raw(), &raw mut event) } != 0 {
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
    fn handle(&self, ids: &mut Ids, event: &ffi::CmEvent) -> Unlocked {
        let reply = CmReply::copy(event);
        if event.event == event::CONNECT_REQUEST {
            return self.request(ids, event, reply);
        }
        let Some(Known { role, verbs }) = ids.find(event.id) else {
            tracing::debug!(event = event.event, "an rdma_cm event of an id that is destroyed now");
            return Unlocked::Nothing;
        };
        follow(event, verbs);
        let was_listening = matches!(role, Role::Listening);
        role.wake(reply);
        if event.event == event::DEVICE_REMOVAL {
            // SAFETY: as above.
            let context = unsafe { (*event.id).verbs };
            return Unlocked::DeviceGone { context, was_listening };
        }
        if event.event == event::ADDR_CHANGE && was_listening {
            return Unlocked::AddressMoved;
        }
        Unlocked::Nothing
    }

    /// Enters the id of a peer that asks to connect in the table.
    fn request(&self, ids: &mut Ids, event: &ffi::CmEvent, reply: CmReply) -> Unlocked {
        let Some(id) = NonNull::new(event.id) else {
            debug_assert!(false, "a CONNECT_REQUEST without an id");
            return Unlocked::Nothing;
        };
        let listening = ids.find(event.listen_id).map(|known| &known.role);
        let wanted = matches!(listening, Some(Role::Listening));
        let verbs = ids.insert(id, Role::Passive);
        // SAFETY: a new id that librdmacm gives to the receiver of the event, entered in the table.
        let id = unsafe { CmId::adopt(id, verbs, Arc::clone(&self.channel)) };
        // An unwanted id is rejected after the lock is released: dropping an id takes the lock.
        Unlocked::Request { id, reply, wanted }
    }

    /// Work that must not run under the lock.
    fn finish(&self, rest: Unlocked) {
        match rest {
            Unlocked::Nothing => {}
            Unlocked::DeviceGone { context, was_listening } => {
                tracing::warn!("an RDMA device was removed");
                Device::mark_gone(context);
                presence::look_around();
                if was_listening {
                    let source = io::Error::from_raw_os_error(libc::ENODEV);
                    self.end_listener(FabricError::Call { call: "rdma_listen", source });
                }
            }
            Unlocked::AddressMoved => {
                // A bond failed over, and the id hears nothing by the other card.
                let source = io::Error::from_raw_os_error(libc::EADDRNOTAVAIL);
                self.end_listener(FabricError::Call { call: "rdma_listen", source });
            }
            Unlocked::Request { id, reply, wanted } => {
                let peer = id.peer();
                // Reserved first, so that a flood of requests costs no device call.
                let door = self.door.lock().unwrap_or_else(PoisonError::into_inner);
                let door = door.as_ref().filter(|_| wanted);
                let Some(Ok(place)) = door.map(|door| door.requests.try_reserve()) else {
                    id.reject(door.map_or(&[], |door| &door.busy.0));
                    if self.channel.may_log() {
                        tracing::warn!(peer, "connection refused: too many peers wait already");
                    }
                    return;
                };
                let hello = ConnectionHello(reply.private_data);
                let reads = (reply.initiator_depth, reply.responder_resources);
                match Incoming::new(id, hello, peer, reads) {
                    Ok(incoming) => place.send(Ok(incoming)),
                    Err(error) => {
                        if self.channel.may_log() {
                            tracing::warn!(%error, "connection refused: cannot use its device");
                        }
                    }
                }
            }
        }
    }

    /// Tells the listener why it ends. Where its queue has no room for that, it reads the end of
    /// the queue, behind the peers that wait.
    fn end_listener(&self, error: FabricError) {
        let door = self.door.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(door) = door {
            let _ = door.requests.try_send(Err(error));
        }
    }

    /// Tells everything that waits that no more events will come.
    fn abandon(&self, source: io::Error) {
        self.channel.lock().abandon();
        self.end_listener(FabricError::Call { call: "rdma_get_cm_event", source });
    }
}

/// Has QP and connection brought into the state that the event tells of.
fn follow(event: &ffi::CmEvent, verbs: &Arc<SlowVerbs>) {
    if ends_connection(event.event) {
        tracing::debug!(event = event.event, status = event.status, "rdma_cm ended a connection");
    }
    match event.event {
        event::ESTABLISHED => verbs.established(),
        event::DISCONNECTED => verbs.disconnected(),
        event if ends_connection(event) => verbs.error(),
        _ => {}
    }
}

fn ends_connection(event: u32) -> bool {
    matches!(
        event,
        event::DISCONNECTED
            | event::TIMEWAIT_EXIT
            | event::ADDR_CHANGE
            | event::DEVICE_REMOVAL
            | event::REJECTED
            | event::UNREACHABLE
            | event::CONNECT_ERROR
    )
}
