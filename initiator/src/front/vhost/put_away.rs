//! [`put_away`]: closes unneeded descriptors of a front end, on threads of their own.
//!
//! close(2) may wait: a file of FUSE for its daemon (FLUSH), a TCP socket with `SO_LINGER` for its
//! peer. Both may be the front end's. The close of a socket waits, too, if such a TCP socket is in
//! an unread message.
//!
//! A front end that blocks all of these threads is served again only after one has finished. Its
//! disk can be removed all the same.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::Duration;

/// Limit of the threads that close.
const THREADS_MAX: usize = 8;
/// How often a wait for a thread checks for a finished one, and for the end of the disk.
const LOOK: Duration = Duration::from_millis(20);

static THREADS: AtomicUsize = AtomicUsize::new(0);

/// The count of a closing thread.
struct Counted;

impl Counted {
    fn new() -> Option<Self> {
        let more = |threads: usize| (threads < THREADS_MAX).then_some(threads + 1);
        THREADS.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok().map(|_| Self)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Closes descriptors. Waits for a thread while all are blocked, unless the disk `ends`: then the
/// descriptors stay open, and the end of this process closes them.
pub(super) fn put_away(descriptors: Vec<OwnedFd>, ends: &AtomicBool) {
    if descriptors.is_empty() {
        return;
    }
    let counted = loop {
        match Counted::new() {
            Some(counted) => break counted,
            None if ends.load(Ordering::Acquire) => return std::mem::forget(descriptors),
            None => std::thread::sleep(LOOK),
        }
    };
    let close = move || {
        drop(descriptors);
        drop(counted);
    };
    // Without a free thread on the host, this thread closes them, when `close` is dropped.
    if let Err(error) = Builder::new().name("rblk-refused".into()).spawn(close) {
        tracing::warn!(%error, "cannot start the thread that closes descriptors of a front end");
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::lingering::lingering;
    use super::*;

    #[test]
    fn threads_that_are_held_up_have_a_bound_and_keep_no_end() {
        let ends = AtomicBool::new(false);
        let begun = Instant::now();
        let held: Vec<_> = (0..THREADS_MAX).map(|_| lingering()).collect();
        let (mut peers, mut sockets) = (Vec::new(), Vec::new());
        for (socket, peer) in held {
            peers.push(peer);
            sockets.push(socket);
        }
        for socket in sockets {
            put_away(vec![socket], &ends);
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "nobody waited for a close");
        let (another, _peer) = lingering();
        ends.store(true, Ordering::Release);
        put_away(vec![another], &ends);
        assert!(begun.elapsed() < Duration::from_secs(5), "nobody waits when the disk is to go");
        assert!(THREADS.load(Ordering::Acquire) <= THREADS_MAX);
        // A peer that resets its connection ends the wait.
        drop(peers);
        let until = Instant::now() + Duration::from_secs(10);
        while THREADS.load(Ordering::Acquire) > 0 {
            assert!(Instant::now() < until, "the threads end with what they wait for");
            std::thread::sleep(LOOK);
        }
    }
}
