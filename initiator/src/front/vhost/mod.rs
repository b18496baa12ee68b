//! A volume as the disk of a virtual machine: virtio-blk over vhost-user. A front end, such as
//! QEMU, connects to a socket and shares the memory of its guest. The target moves data between its
//! own memory and the guest's pages: nothing is copied on this host.
//!
//! ```text
//! guest   ring --kick--> rblk-ring-N: GuestRing -> UnderWay -> EngineDriver -> Engine -> path
//!              <--call--                  ^ orders
//! QEMU    socket ------> rblk-front-end: FrontEnd -> GuestDevice
//!                                         | memories    ^ news
//!                        control (tokio): Mount -> TargetLink -> Course
//! ```
//!
//! From [`EngineDriver`](crate::queue::EngineDriver) and `Mount` on, the parts are those of the
//! disk of a mount. The guest and its front end are not trusted: all their input is checked.

mod cut_memory;
mod event;
mod front_end_socket;
mod frontend;
#[cfg(feature = "fuzzing")]
mod fuzzed;
mod guest_device;
mod guest_disk;
mod guest_memory;
mod guest_news;
mod guest_request;
mod guest_ring;
#[cfg(test)]
mod lingering;
#[cfg(feature = "fuzzing")]
mod pace;
mod put_away;
mod received;
mod ring_orders;
mod ring_thread;
mod under_way;
mod vhost_user;

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rblk_config::ByteSize;
use rblk_runtime::spin::SpinMode;
use tokio::sync::mpsc::UnboundedSender;

use crate::engine::durability::Durability;
use crate::volume::begin::Front;
use frontend::FrontEnd;
#[cfg(feature = "fuzzing")]
pub use fuzzed::FuzzedDisk;
use guest_device::GuestDevice;
pub(crate) use guest_disk::GuestDisk;
pub(crate) use guest_news::{GuestLeft, GuestNews, Memories};
pub(crate) use ring_thread::ThreadParts;

/// A guest's memory comes and goes, and has no room for digests behind the data of a READ.
pub(crate) const FRONT: Front = Front {
    tests_paths: true,
    shares_memory: false,
    has_room_for_digests: false,
    spare_buffers: 0,
};

/// The disk of a guest, in service.
#[derive(Debug)]
pub(crate) struct Served {
    news: Arc<GuestNews>,
}

impl Served {
    /// Serves a disk by a socket that listens, to one front end after the other. `parts` has the
    /// threads, and the account of durable writes, if there is one. `left` is the state of the
    /// rings after the process before. `memories` gets the memory of the guest, which has at most
    /// `memory_max`. It is closed when the disk is gone.
    ///
    /// # Errors
    /// The system has no descriptor or no thread.
    pub(crate) fn start(
        (listener, memory_max): (UnixListener, Option<ByteSize>),
        disk: GuestDisk,
        parts: (Vec<ThreadParts>, Option<Arc<Durability>>),
        left: &GuestLeft,
        spin: SpinMode,
        memories: UnboundedSender<Memories>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let news = Arc::new(GuestNews::new(&disk, left)?);
        let device = GuestDevice::start_threads(
            disk,
            Arc::clone(&news),
            parts,
            spin,
            (memories, memory_max),
        )?;
        let told = Arc::clone(&news);
        let serve = move || serve(&listener, device, &told);
        std::thread::Builder::new().name("rblk-front-end".to_owned()).spawn(serve)?;
        Ok(Self { news })
    }

    /// The news for the disk.
    pub(crate) fn news(&self) -> &GuestNews {
        &self.news
    }

    /// Ends the disk: requests under way are answered, if the target answers. By `force` there is
    /// less time for that.
    pub(crate) fn end(&self, force: bool) {
        self.news.end(force);
    }
}

/// The thread of the front ends.
fn serve(listener: &UnixListener, mut device: GuestDevice, news: &GuestNews) {
    // Flush the writes that the process before left in doubt. A ring reports the end of its thread
    // itself.
    let _ = device.flush();
    let ended = serve_all(listener, &mut device, news);
    let is_broken = ended.is_err();
    news.ended(ended.map_err(|error| error.to_string()));
    match is_broken {
        true => device.give_up(),
        false => device.end(),
    }
}

/// Serves one front end after the other, until the disk ends.
///
/// # Errors
/// The device is broken.
fn serve_all(
    listener: &UnixListener,
    device: &mut GuestDevice,
    news: &GuestNews,
) -> io::Result<()> {
    while !news.ends() {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                sleep(&[news.event(), std::os::fd::AsFd::as_fd(listener)])?;
                news.clear();
                continue;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot take a front end's connection");
                std::thread::sleep(std::time::Duration::from_millis(100));
                continue;
            }
        };
        serve_one(stream, device, news)?;
    }
    Ok(())
}

/// Serves a front end until it leaves.
///
/// # Errors
/// The device is broken.
fn serve_one(
    stream: std::os::unix::net::UnixStream,
    device: &mut GuestDevice,
    news: &GuestNews,
) -> io::Result<()> {
    let mut front_end = FrontEnd::new(stream, device);
    tracing::info!(rblk_event = "front-end", "a front end has connected");
    news.set_front_end(true);
    let end = loop {
        let event = match sleep(&[news.event(), front_end.socket()]) {
            Ok(ready) => ready,
            Err(error) => break Err(error),
        };
        if event[0] {
            news.clear();
            if news.ends() {
                break Ok(false);
            }
            if let Err(error) = front_end.tell_changes() {
                tracing::warn!(%error, "the front end does not hear that the disk has changed");
            }
        }
        if event[1] {
            match front_end.take_message() {
                Ok(true) => {}
                Ok(false) => break Ok(true),
                Err(error) => break Err(error),
            }
        }
    };
    let gone = end.as_ref().is_ok_and(|by_itself| *by_itself);
    match end {
        Ok(_) => tracing::info!(rblk_event = "front-end", "the front end has gone"),
        Err(error) => tracing::warn!(%error, "hung up on the front end"),
    }
    let has_served = front_end.has_served();
    let left = front_end.leave();
    // A front end leaves by itself when its virtual machine ends. A front end that started no ring
    // knows nothing about the guest.
    if has_served {
        news.set_guest_stays(!gone);
    }
    news.set_front_end(false);
    left
}

/// Sleeps until one of two descriptors is readable. Returns which are.
fn sleep(descriptors: &[std::os::fd::BorrowedFd<'_>; 2]) -> io::Result<[bool; 2]> {
    let mut polled = descriptors.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN));
    match poll(&mut polled, PollTimeout::NONE) {
        Ok(_) | Err(Errno::EINTR) => Ok(polled.map(|polled| polled.any().unwrap_or(true))),
        Err(error) => Err(error.into()),
    }
}
