//! [`Wake`]: the events that wake the thread of a poller: sockets, and completions without a
//! socket.
//!
//! epoll has every socket, and an eventfd that is written when something completes and no socket
//! says so. If the only QP is not blocked, [`event_fds`](crate::DataPath::event_fds) returns its
//! socket itself, and epoll does not watch it: data then wakes the thread without a detour. epoll
//! takes the socket back when the QP is blocked or another QP comes. `event_fds` always returns
//! epoll too, so a thread that watches earlier descriptors misses nothing.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::qp_set::{AttachedPair, Interest, QpSet};
use crate::error::{FabricError, Result};
use crate::soft::queue_pair::QpState;

/// Names the eventfd among the QPs in the data of epoll.
const KICK: u64 = u64::MAX;

/// epoll and the eventfd of a poller.
#[derive(Debug)]
pub(super) struct Wake {
    epoll: Epoll,
    // Readable through epoll when something completed and no socket says so.
    kick: Arc<EventFd>,
    // The poller wrote to `kick` since it was last read.
    kicked: bool,
    // Links without a descriptor write to `kick` at any time.
    kicked_by_links: bool,
    // `event_fds` returned the socket of the only QP.
    direct: Cell<bool>,
    // The caller wants an event at the next completion.
    armed: bool,
}

fn call(call: &'static str) -> impl Fn(nix::Error) -> FabricError {
    move |errno| FabricError::Call { call, source: errno.into() }
}

impl Wake {
    pub(super) fn new() -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(call("epoll_create1"))?;
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let kick = EventFd::from_value_and_flags(0, flags).map_err(call("eventfd"))?;
        epoll
            .add(kick.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, KICK))
            .map_err(call("epoll_ctl"))?;
        Ok(Self {
            epoll,
            kick: Arc::new(kick),
            kicked: false,
            kicked_by_links: false,
            direct: Cell::new(false),
            armed: false,
        })
    }

    /// The eventfd that a link without a descriptor writes to.
    pub(super) fn kick_event(&self) -> &Arc<EventFd> {
        &self.kick
    }

    /// Watches the socket of a QP that comes to the poller. A link without a descriptor writes to
    /// the eventfd instead.
    ///
    /// # Errors
    /// epoll does not take the socket.
    pub(super) fn add(&mut self, attached: &AttachedPair) -> Result<()> {
        self.watch(attached, false);
        if attached.pair.link().fd().is_none() {
            self.kicked_by_links = true;
        } else if attached.interest.get() == Interest::None
            && attached.pair.state() != QpState::Dead
        {
            return Err(FabricError::last_os("epoll_ctl"));
        }
        Ok(())
    }

    /// Stops watching the socket of a QP that leaves the poller.
    pub(super) fn remove(&self, attached: &AttachedPair) {
        if let (true, Some(fd)) =
            (attached.interest.replace(Interest::None) != Interest::None, attached.pair.link().fd())
        {
            // SAFETY: the descriptor belongs to the link, which is still here.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            // epoll_ctl fails only without the socket.
            let _ = self.epoll.delete(fd);
        }
    }

    /// Updates the readiness of a QP that epoll watches. Returns the number of calls.
    pub(super) fn update(&self, attached: &AttachedPair) -> u64 {
        self.watch(attached, self.direct.get())
    }

    /// As [`Self::update`]. With `direct` the thread watches the socket itself. A call fails only
    /// when the kernel lacks memory, and then the next change tries again.
    fn watch(&self, attached: &AttachedPair, direct: bool) -> u64 {
        let wanted = match (attached.pair.state(), attached.pair.is_blocked()) {
            (QpState::Dead, _) => Interest::None,
            (_, true) => Interest::Both,
            (_, false) if direct => Interest::None,
            _ => Interest::Readable,
        };
        let present = attached.interest.get();
        if wanted == present {
            return 0;
        }
        let Some(fd) = attached.pair.link().fd() else { return 0 };
        // SAFETY: the descriptor belongs to the link, which outlives this borrow.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let mut flags = EpollFlags::EPOLLIN;
        if wanted == Interest::Both {
            flags |= EpollFlags::EPOLLOUT;
        }
        let mut event = EpollEvent::new(flags, attached.pair.index().0.into());
        let done = match (present, wanted) {
            (Interest::None, _) => self.epoll.add(fd, event),
            (_, Interest::None) => self.epoll.delete(fd),
            _ => self.epoll.modify(fd, &mut event),
        };
        if done.is_ok() {
            attached.interest.set(wanted);
        }
        1
    }

    /// Gives every socket to epoll.
    pub(super) fn gather(&self, qps: &QpSet) {
        if self.direct.replace(false) {
            for attached in qps.iter() {
                self.watch(attached, false);
            }
        }
    }

    /// The descriptors that wake the thread: epoll, and the socket of the only QP.
    pub(super) fn fds(&self, qps: &QpSet) -> [Option<BorrowedFd<'_>>; 2] {
        let alone = qps.only().filter(|attached| {
            attached.pair.state() != QpState::Dead && !attached.pair.is_blocked()
        });
        let Some((attached, fd)) = alone.and_then(|a| a.pair.link().fd().map(|fd| (a, fd))) else {
            self.gather(qps);
            return [Some(self.epoll.0.as_fd()), None];
        };
        self.direct.set(true);
        self.watch(attached, true);
        // SAFETY: the descriptor belongs to the link of a QP of the poller that owns `self`. The
        // caller returns it only for as long as the poller is borrowed.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        [Some(self.epoll.0.as_fd()), Some(socket)]
    }

    /// The events that are ready now, without waiting. Returns how many.
    ///
    /// # Errors
    /// The errno of `epoll_wait`, except EINTR.
    pub(super) fn ready(&self, events: &mut [EpollEvent]) -> Result<usize> {
        match self.epoll.wait(events, EpollTimeout::ZERO) {
            Ok(ready) => Ok(ready),
            Err(nix::Error::EINTR) => Ok(0),
            Err(errno) => Err(call("epoll_wait")(errno)),
        }
    }

    /// Wants an event at the next completion. Returns whether none was wanted before.
    pub(super) fn arm(&mut self) -> bool {
        !std::mem::replace(&mut self.armed, true)
    }

    /// Wants no event any more. Returns whether one was wanted.
    pub(super) fn disarm(&mut self) -> bool {
        std::mem::take(&mut self.armed)
    }

    /// Whether an event is wanted at the next completion.
    pub(super) fn is_armed(&self) -> bool {
        self.armed
    }

    /// Wakes the thread.
    pub(super) fn kick(&mut self) {
        self.kicked = true;
        // EAGAIN means that it is readable already.
        let _ = self.kick.write(1);
    }

    /// Drains the eventfd.
    pub(super) fn clear_kick(&mut self) {
        if std::mem::take(&mut self.kicked) || self.kicked_by_links {
            // EAGAIN means that nothing kicked.
            let _ = self.kick.read();
        }
    }
}
