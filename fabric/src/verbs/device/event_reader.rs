//! Asynchronous events of a device. One thread per opened device reads them, logs them, acts and
//! acknowledges. It also looks now and then whether the device is still there ([`Presence`]).
//!
//! The thread borrows the context; [`EventReader`] joins it on drop, before the context can be
//! closed. An object that an event names stays allocated until the event is acknowledged, because
//! its destroy call waits for that (ibv_get_async_event(3)). So the pointer in an event may be used
//! until then.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::cq_health::CqHealth;
use super::presence::{self, Presence};
use crate::error::{FabricError, Result};
use crate::verbs::ffi;
use crate::verbs::nonblocking::set_nonblocking;
use crate::verbs::qp_state;

/// How often the thread looks whether the device is still there, in milliseconds. A device that is
/// being removed works until it is given up, so there is no hurry, and every idle mount has such a
/// thread.
const LOOK_MS: u16 = 5000;

/// The thread that reads the events of one device.
#[derive(Debug)]
pub(super) struct EventReader {
    shared: Arc<WatchedDevice>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct WatchedDevice {
    device: String,
    stop: EventFd,
    queues: Mutex<Vec<Weak<CqHealth>>>,
}

/// A context on its way into the thread.
struct Context(NonNull<ffi::ibv_context>);

// SAFETY: reading async events is allowed from any thread.
unsafe impl Send for Context {}

impl EventReader {
    /// Starts the thread. The context must stay open until the value is dropped.
    pub(super) fn start(context: NonNull<ffi::ibv_context>, device: String) -> Result<Self> {
        // SAFETY: the context is open.
        set_nonblocking(unsafe { (*context.as_ptr()).async_fd })?;
        let stop = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC)
            .map_err(|e| FabricError::Call { call: "eventfd", source: e.into() })?;
        let shared = Arc::new(WatchedDevice { device, stop, queues: Mutex::new(Vec::new()) });
        // SAFETY: as above.
        let presence = unsafe { Presence::of(context) };
        let (context, for_thread) = (Context(context), Arc::clone(&shared));
        let thread = thread::Builder::new()
            .name("verbs-events".into())
            .spawn(move || run(&context, presence.as_ref(), &for_thread))
            .map_err(|source| FabricError::Call { call: "thread", source })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Marks the CQ broken when an event says that it or the device is.
    pub(super) fn watch(&self, queue: &Arc<CqHealth>) {
        let mut queues = self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|q| q.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    /// Marks every CQ of the device broken.
    pub(super) fn mark_all_broken(&self) {
        self.shared.mark_broken(None);
    }
}

impl Drop for EventReader {
    fn drop(&mut self) {
        // An eventfd takes one write of 1 for as long as it exists.
        let _ = self.shared.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl WatchedDevice {
    /// Marks one CQ, or all.
    fn mark_broken(&self, which: Option<*mut ffi::ibv_cq>) {
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        for queue in queues.iter().filter_map(Weak::upgrade) {
            if which.is_none_or(|cq| queue.is_of(cq)) {
                queue.mark_broken();
            }
        }
    }
}

fn run(context: &Context, presence: Option<&Presence>, shared: &WatchedDevice) {
    let context = context.0.as_ptr();
    // SAFETY: the context is open until the thread is joined, and its fd with it.
    let events = unsafe { BorrowedFd::borrow_raw((*context).async_fd) };
    loop {
        let mut fds = [
            PollFd::new(events, PollFlags::POLLIN),
            PollFd::new(shared.stop.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, PollTimeout::from(LOOK_MS)) {
            Ok(0) => {
                presence::look_around();
                if presence.is_none_or(Presence::is_there) {
                    continue;
                }
                // The kernel waits until everything on it is destroyed.
                tracing::error!(
                    device = shared.device,
                    "the device is being removed: it is given up"
                );
                return shared.mark_broken(None);
            }
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => {
                tracing::error!(device = shared.device, %error, "poll for device events failed");
                return;
            }
        }
        if fds[1].any().unwrap_or(true) {
            return;
        }
        if let Err(error) = drain(context, shared) {
            // EIO: the device was unplugged and the kernel took the context back.
            tracing::error!(device = shared.device, %error, "the device gives no more events; it is gone");
            shared.mark_broken(None);
            return;
        }
    }
}

fn drain(context: *mut ffi::ibv_context, shared: &WatchedDevice) -> io::Result<()> {
    loop {
        // SAFETY: an all-zero event is a value: integers and a null pointer.
        let mut event: ffi::ibv_async_event = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open and the fd nonblocking.
        if unsafe { ffi::ibv_get_async_event(context, &raw mut event) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock => Ok(()),
                io::ErrorKind::Interrupted => continue,
                _ => Err(error),
            };
        }
        handle(&event, shared);
        // SAFETY: the event came from ibv_get_async_event and is acknowledged once.
        unsafe { ffi::ibv_ack_async_event(&raw mut event) };
    }
}

fn handle(event: &ffi::ibv_async_event, shared: &WatchedDevice) {
    let device = shared.device.as_str();
    // SAFETY: the function returns a static string for every value.
    let what =
        unsafe { CStr::from_ptr(ffi::ibv_event_type_str(event.event_type)) }.to_string_lossy();
    match event.event_type {
        ffi::IBV_EVENT_QP_FATAL | ffi::IBV_EVENT_QP_REQ_ERR | ffi::IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: these events name a QP, which stays allocated until the acknowledgement.
            let qp = unsafe { event.element.qp };
            if let Some(qp) = NonNull::new(qp) {
                // SAFETY: as above.
                let number = unsafe { (*qp.as_ptr()).qp_num };
                tracing::warn!(device, event = %what, qp = number, "connection broken by the device");
                // SAFETY: as above.
                unsafe { qp_state::move_to_error(qp.as_ptr()) };
            }
        }
        ffi::IBV_EVENT_CQ_ERR => {
            tracing::error!(device, event = %what, "completion queue overrun");
            // SAFETY: this event names a CQ; the pointer is only compared.
            shared.mark_broken(Some(unsafe { event.element.cq }));
        }
        ffi::IBV_EVENT_DEVICE_FATAL => {
            tracing::error!(device, event = %what, "the device failed");
            shared.mark_broken(None);
        }
        _ => tracing::info!(device, event = %what, "device event"),
    }
}
