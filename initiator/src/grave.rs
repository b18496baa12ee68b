//! [`Graves`]: which of a queue's paths are not destroyed yet.
//!
//! A QP in the error state begins with no packet of its peer any more, but the driver of a software device may be amid
//! one, and may be kept from its processor for longer than it takes to have another path. What is left of that packet
//! then lands in a buffer that is another request's by then. Destroying the QP waits for it, so a queue takes its next
//! path, and gives up requests that wait, when all before it are destroyed.
//!
//! There is none for iWARP, where destroying waits for a silent peer, and the QP's state changes between packets only;
//! nor for the software provider, whose QPs are served by the thread that ends them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rblk_fabric::Transport;

use crate::path::DeadPath;

/// The open graves of one queue.
#[derive(Debug, Default)]
pub struct Graves(Arc<AtomicUsize>);

/// Open until it is dropped: give it to [`DeadPath::retire`].
#[derive(Debug)]
pub struct Grave(Arc<AtomicUsize>);

impl Graves {
    /// One for that path, if it needs one.
    #[must_use]
    pub fn dig(&self, dead: &DeadPath) -> Option<Grave> {
        dead.connections.first().and_then(|_| self.open(dead.poller.caps().transport))
    }

    fn open(&self, transport: Transport) -> Option<Grave> {
        let needed = match transport {
            Transport::Iwarp | Transport::SoftTcp | Transport::SoftMemory => false,
            Transport::InfiniBand | Transport::Roce | Transport::Unknown => true,
        };
        needed.then(|| {
            self.0.fetch_add(1, Ordering::Relaxed);
            Grave(Arc::clone(&self.0))
        })
    }

    /// Whether all paths that were given one are destroyed.
    #[must_use]
    pub fn are_closed(&self) -> bool {
        // With `Grave::drop`: what the driver wrote is seen before what is written afterwards.
        self.0.load(Ordering::Acquire) == 0
    }
}

impl Drop for Grave {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_them_have_to_be_closed() {
        let graves = Graves::default();
        assert!(graves.are_closed());
        let first = graves.open(Transport::Roce);
        let second = graves.open(Transport::InfiniBand);
        assert!(first.is_some() && second.is_some() && !graves.are_closed());
        // Wherever the path is destroyed.
        std::thread::spawn(move || drop(first)).join().unwrap();
        assert!(!graves.are_closed());
        drop(second);
        assert!(graves.are_closed());
    }

    #[test]
    fn who_would_wait_for_the_peer_or_for_himself_has_none() {
        let graves = Graves::default();
        for transport in [Transport::Iwarp, Transport::SoftTcp, Transport::SoftMemory] {
            assert!(graves.open(transport).is_none());
        }
        assert!(graves.are_closed());
    }
}
