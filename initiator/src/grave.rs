//! [`Graves`]: which of a queue's paths are not destroyed yet.
//!
//! A QP in the error state takes no new packet of its peer, but its device may be amid one: a card
//! has several in its pipeline, and the driver of a software device may be kept from its processor
//! for longer than it takes to have another path. What is left of that packet then lands in a
//! buffer that is another request's by then. Destroying the QP waits for it, so a queue takes its
//! next path, and gives up requests that wait, when all before it are destroyed
//! ([`Succession`](crate::succession::Succession)).
//!
//! There is none for devices without such a delay
//! ([`touches_until_destroyed`](rblk_fabric::DeviceCaps::touches_until_destroyed)): the software
//! provider's QPs are served by the thread that ends them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
        let needed = !dead.connections.is_empty() && dead.poller.caps().touches_until_destroyed;
        needed.then(|| self.open())
    }

    fn open(&self) -> Grave {
        self.0.fetch_add(1, Ordering::Relaxed);
        Grave(Arc::clone(&self.0))
    }

    /// Whether all paths that were given one are destroyed.
    #[must_use]
    pub fn are_closed(&self) -> bool {
        // With `Grave::drop`: what the device wrote is seen before what is written afterwards.
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
        let (first, second) = (graves.open(), graves.open());
        assert!(!graves.are_closed());
        // Wherever the path is destroyed.
        std::thread::spawn(move || drop(first)).join().unwrap();
        assert!(!graves.are_closed());
        drop(second);
        assert!(graves.are_closed());
    }
}
