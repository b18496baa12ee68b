//! [`Looker`]: the thread that looks after the lock of an image, once a second.
//!
//! It asks the cluster for the owner of the lock. So a target without I/O learns that it has lost
//! the image, too, and a question without an answer shows that the image is stalled. A question
//! may take as long as the cluster cannot be reached; meanwhile nothing proves the lock
//! ([`Shared::is_silent`]).
//!
//! A caller that needs a newer proof than the last one [asks](ProofOrders::ask) for it, and gets
//! it by a look of its own, at once. A look that finds nothing is no loss: librbd may be about to
//! rename its lock. Then the looks of each second decide.

use std::ffi::c_int;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::cluster::checked;
use super::header_lock::{HeaderLock, LockOwner};
use super::library::{Handle, Library};
use super::lock_look::{LockLooks, Verdict};
use super::look_order::{LookOrder, ProofOrders};
use super::open_image::{Shared, boot_ms};

/// Time between two looks at the lock.
const LOOK: Duration = Duration::from_secs(1);

/// See the module. The drop ends the thread, and waits for the look under way.
#[derive(Debug)]
pub(super) struct Looker {
    proofs: ProofOrders,
    thread: Option<JoinHandle<()>>,
}

impl Looker {
    /// Begins to look after an open image, and after its lock, which had this owner when it was
    /// taken. The image must not close before the looker has ended.
    pub(super) fn begin(
        shared: Arc<Shared>,
        lock: Option<(HeaderLock, LockOwner)>,
    ) -> io::Result<Self> {
        let (orders, received) = mpsc::channel();
        let thread = thread::Builder::new().name("rblk-lock".to_owned());
        let thread = thread.spawn(move || look_until_end(&received, &shared, lock))?;
        Ok(Self { proofs: ProofOrders::new(orders), thread: Some(thread) })
    }

    /// A way to ask for proofs of the lock.
    pub(super) fn proofs(&self) -> ProofOrders {
        self.proofs.clone()
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        // An error below means that the thread has panicked, and it looks no more.
        self.proofs.end();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn look_until_end(
    orders: &Receiver<LookOrder>,
    shared: &Shared,
    lock: Option<(HeaderLock, LockOwner)>,
) {
    let mut lock = lock.map(|(lock, owner)| (lock, owner.clone(), LockLooks::since(owner)));
    let (mut ended, mut unproven) = (0, Vec::new());
    let mut next = Instant::now() + LOOK;
    loop {
        match orders.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(LookOrder::Prove(on_proof)) => {
                unproven.push(on_proof);
                let own = lock.as_ref().filter(|_| !shared.is_lost());
                if own.is_some_and(|(lock, own, _)| is_proven(shared, lock, own)) {
                    unproven.drain(..).for_each(|on_proof| on_proof());
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                next = Instant::now() + LOOK;
                ended = look_at_ops(shared, ended);
                if let Some((lock, _, looks)) = lock.as_mut().filter(|_| !shared.is_lost())
                    && look_at_lock(shared, lock, looks)
                {
                    unproven.drain(..).for_each(|on_proof| on_proof());
                }
            }
            Ok(LookOrder::End) | Err(RecvTimeoutError::Disconnected) => return,
        }
        if shared.is_lost() {
            unproven.clear();
        }
    }
}

/// Looks whether this client has the lock. The looks of each second find out what else is true.
fn is_proven(shared: &Shared, lock: &HeaderLock, own: &LockOwner) -> bool {
    shared.asked_at.store(shared.now_ms(), Ordering::Relaxed);
    let began = boot_ms();
    let is_own = lock.owner().is_ok_and(|owner| owner.as_ref() == Some(own));
    shared.asked_at.store(0, Ordering::Relaxed);
    if is_own {
        shared.proven(began);
    }
    is_own
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

/// Returns whether this client has the lock.
fn look_at_lock(shared: &Shared, lock: &HeaderLock, looks: &mut LockLooks) -> bool {
    let (library, image) = (shared.facts.library, shared.facts.handle);
    shared.asked_at.store(shared.now_ms(), Ordering::Relaxed);
    let began = boot_ms();
    let (owner, is_owner) = (lock.owner(), is_owner(library, image));
    shared.asked_at.store(0, Ordering::Relaxed);
    let (verdict, news) = looks.judge(owner, is_owner);
    if let Some(errno) = news {
        tracing::warn!(image = %shared.facts.name, %errno, "cannot read the owner of a lock");
    }
    let is_held = verdict == Verdict::Held;
    match verdict {
        Verdict::Held => shared.proven(began),
        Verdict::Unknown => {}
        Verdict::Fenced => shared.lose_by_fence(),
        Verdict::Lost(why) => shared.lose(&why),
    }
    is_held
}

/// Whether librbd believes that this client has the lock.
fn is_owner(library: &Library, handle: Handle) -> Result<bool, Errno> {
    let mut owner: c_int = 0;
    // SAFETY: an open image; the call writes a number.
    let asked = unsafe { (library.rbd_is_exclusive_lock_owner)(handle, &raw mut owner) };
    checked(asked).map(|_| owner != 0)
}
