//! [`Undestroyed`]: the undestroyed paths among a queue's dead ones.
//!
//! A QP in the error state takes no new packet of its peer, but its device may still process one: a
//! card has several in its pipeline, and the driver of a software device may be kept from its CPU
//! for longer than a reconnect takes. The rest of that packet then lands in a buffer that belongs
//! to another request by then. The destruction of the QP waits for the packet. So a queue takes its
//! next path, and fails waiting requests, only when all earlier paths are destroyed
//! ([`PathChange`](crate::queue::path_change::PathChange)).
//!
//! Devices that finish at once are not counted
//! ([`touches_until_destroyed`](rblk_fabric::DeviceCaps::touches_until_destroyed)): the thread that
//! ends a QP of the software provider also serves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::engine::path::DeadPath;

/// The number of undestroyed dead paths of a queue.
#[derive(Debug, Default)]
pub(crate) struct Undestroyed(Arc<AtomicUsize>);

/// Counts one dead path until it is dropped: give it to [`DeadPath::retire`], which drops it once
/// the path is destroyed.
#[derive(Debug)]
pub struct UndestroyedPath(Arc<AtomicUsize>);

impl Undestroyed {
    /// Counts a dead path, if its device may still touch the buffers.
    #[must_use]
    pub(crate) fn count(&self, dead: &DeadPath) -> Option<UndestroyedPath> {
        dead.is_touched().then(|| self.add())
    }

    fn add(&self) -> UndestroyedPath {
        self.0.fetch_add(1, Ordering::Relaxed);
        UndestroyedPath(Arc::clone(&self.0))
    }

    /// Whether every counted path is destroyed.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        // Pairs with the drop: writes of the device are seen before later writes.
        self.0.load(Ordering::Acquire) == 0
    }
}

impl Drop for UndestroyedPath {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_to_be_destroyed() {
        let undestroyed = Undestroyed::default();
        assert!(undestroyed.is_empty());
        let (first, second) = (undestroyed.add(), undestroyed.add());
        assert!(!undestroyed.is_empty());
        // On the thread that destroys the path.
        std::thread::spawn(move || drop(first)).join().unwrap();
        assert!(!undestroyed.is_empty());
        drop(second);
        assert!(undestroyed.is_empty());
    }
}
