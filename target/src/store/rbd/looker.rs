//! [`Looker`]: the thread that looks after the lock of an image, once a second.
//!
//! It asks the cluster for the owner of the lock. So a target without I/O learns that it has lost
//! the image, too, and a question without an answer shows that the image is stalled. A question
//! may take as long as the cluster cannot be reached; meanwhile nothing proves the lock
//! ([`Shared::is_silent`]).

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{io, ptr};

use nix::errno::Errno;

use super::cluster::checked;
use super::library::{Handle, Library};
use super::lock_look::{LockLooks, Verdict};
use super::open_image::{Shared, boot_ms};

/// Time between two looks at the lock.
const LOOK: Duration = Duration::from_secs(1);
/// Most owners of a lock.
const OWNERS_MOST: usize = 8;

/// See the module. The drop ends the thread, and waits for the look under way.
#[derive(Debug)]
pub(super) struct Looker {
    // None while the thread is told to end.
    order: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Looker {
    /// Begins to look after an open image. The image must not close before the looker has ended.
    pub(super) fn begin(shared: Arc<Shared>) -> io::Result<Self> {
        let (order, end) = mpsc::channel();
        let thread = thread::Builder::new().name("rblk-lock".to_owned());
        let thread = thread.spawn(move || look_until(&end, &shared))?;
        Ok(Self { order: Some(order), thread: Some(thread) })
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        self.order = None;
        // An error means that the thread has panicked, and it looks no more.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn look_until(end: &Receiver<()>, shared: &Shared) {
    let (mut looks, mut ended) = (LockLooks::default(), 0);
    while end.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        ended = look_at_ops(shared, ended);
        look_at_lock(shared, &mut looks);
    }
}

/// Notes whether any op has ended since the last look, if some are under way.
fn look_at_ops(shared: &Shared, last: u64) -> u64 {
    let ended = shared.ended.load(Ordering::Relaxed);
    let is_stuck = shared.begun.load(Ordering::Relaxed) != ended && ended == last;
    match (is_stuck, shared.stuck_since.load(Ordering::Relaxed)) {
        (true, 0) => shared.stuck_since.store(shared.now_ms(), Ordering::Relaxed),
        (true, _) => {}
        (false, _) => shared.stuck_since.store(0, Ordering::Relaxed),
    }
    ended
}

fn look_at_lock(shared: &Shared, looks: &mut LockLooks) {
    let own = shared.facts.own_address.as_ref();
    let Some(own) = own.filter(|_| !shared.is_lost()) else { return };
    let (library, image) = (shared.facts.library, shared.facts.handle);
    shared.asked_at.store(shared.now_ms(), Ordering::Relaxed);
    let began = boot_ms();
    let (owner, is_owner) = (lock_owner(library, image), is_owner(library, image));
    shared.asked_at.store(0, Ordering::Relaxed);
    let (verdict, news) = looks.judge(own, owner, is_owner);
    if let Some(errno) = news {
        tracing::warn!(image = %shared.facts.name, %errno, "cannot read the owner of a lock");
    }
    match verdict {
        Verdict::Held => shared.proven(began),
        Verdict::Unknown => {}
        Verdict::Fenced => shared.lose_by_fence(),
        Verdict::Lost(why) => shared.lose(&why),
    }
}

/// The address of the owner of the lock, as the cluster has it now.
pub(super) fn lock_owner(library: &Library, handle: Handle) -> Result<Option<String>, Errno> {
    let (mut mode, mut count): (c_int, usize) = (0, OWNERS_MOST);
    let mut owners = [ptr::null_mut::<c_char>(); OWNERS_MOST];
    // SAFETY: an open image; the list has room for as many texts as `count` says.
    let read = unsafe {
        (library.rbd_lock_get_owners)(handle, &raw mut mode, owners.as_mut_ptr(), &raw mut count)
    };
    match checked(read) {
        Ok(_) => {}
        Err(Errno::ENOENT) => return Ok(None),
        Err(errno) => return Err(errno),
    }
    let first = owners.first().filter(|owner| count > 0 && !owner.is_null()).map(|owner| {
        // SAFETY: a text that the call made, which ends with a zero.
        unsafe { std::ffi::CStr::from_ptr(*owner) }.to_string_lossy().into_owned()
    });
    // SAFETY: the texts that the call made, which nothing uses any more.
    unsafe { (library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
    Ok(first)
}

/// Whether librbd believes that this client has the lock.
fn is_owner(library: &Library, handle: Handle) -> Result<bool, Errno> {
    let mut owner: c_int = 0;
    // SAFETY: an open image; the call writes a number.
    let asked = unsafe { (library.rbd_is_exclusive_lock_owner)(handle, &raw mut owner) };
    checked(asked).map(|_| owner != 0)
}
