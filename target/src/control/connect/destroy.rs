//! [`Destroyer`]: destroys the QPs of connections that ended, without a wait in control.
//!
//! Some drivers destroy the QP of a silent peer only after a timeout. A host that was cut off has
//! such a QP for every queue. Control does not wait for them, because every other host needs it for
//! LOGIN and OPEN.
//!
//! The order stays: first the QP is destroyed. Then its poll group gets back the memory that it
//! lent to the device. Then the connection's memory is freed. Only then control hears of it, and
//! may give the volume to another host.

use rblk_fabric::Connection;
use tokio::sync::mpsc;

use crate::volume::ids::{AdmissionId, ConnectionId};

/// A destroyed resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::control) enum Destroyed {
    /// A connection, with its memory: all of it is unused.
    Connection {
        /// Its name for control.
        admission: AdmissionId,
    },
    /// The QP of a connection that ended. Its poll group waits for this.
    Qp {
        /// The poll group.
        group: usize,
        /// The connection.
        connection: ConnectionId,
    },
}

/// Destroys QPs, and says when each is destroyed.
#[derive(Debug)]
pub(in crate::control) struct Destroyer {
    news: mpsc::UnboundedSender<Destroyed>,
}

/// Sends its news when it is dropped.
#[derive(Debug)]
pub(in crate::control) struct OnDrop {
    news: mpsc::UnboundedSender<Destroyed>,
    destroyed: Destroyed,
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        // An error means that control has ended, and nothing waits for the news.
        let _ = self.news.send(self.destroyed);
    }
}

impl Destroyer {
    /// A destroyer, and the receiver of its news.
    pub(in crate::control) fn new() -> (Self, mpsc::UnboundedReceiver<Destroyed>) {
        let (news, destroyed) = mpsc::unbounded_channel();
        (Self { news }, destroyed)
    }

    /// Destroys a QP, if there still is one, and drops its memory. Sends the news when both are
    /// done.
    pub(in crate::control) fn destroy<M: Send + 'static>(
        &self,
        qp: Option<Connection>,
        memory: M,
        destroyed: Destroyed,
    ) {
        self.begin(memory, destroyed, |rest| match qp {
            Some(qp) => qp.retire(rest),
            None => drop(rest),
        });
    }

    /// `retire` destroys the QP, then drops its argument, perhaps later.
    fn begin<M>(&self, memory: M, destroyed: Destroyed, retire: impl FnOnce((M, OnDrop))) {
        // Fields of a tuple are dropped in their order: the memory, then the news.
        retire((memory, OnDrop { news: self.news.clone(), destroyed }));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;

    type Told = Arc<Mutex<mpsc::UnboundedReceiver<Destroyed>>>;

    fn next(told: &Told) -> Option<Destroyed> {
        told.lock().unwrap().try_recv().ok()
    }

    /// Notes that it is freed, if no news came before.
    struct Memory(Told, Arc<AtomicBool>);

    impl Drop for Memory {
        fn drop(&mut self) {
            self.1.store(next(&self.0).is_none(), Ordering::Relaxed);
        }
    }

    #[test]
    fn the_news_comes_when_everything_is_destroyed() {
        let (destroyer, told) = Destroyer::new();
        let told = Arc::new(Mutex::new(told));
        let freed = Arc::new(AtomicBool::new(false));
        let gone = |number| Destroyed::Connection { admission: AdmissionId(number) };
        // A kernel that needs long.
        let mut slow = None;
        let memory = Memory(Arc::clone(&told), Arc::clone(&freed));
        destroyer.begin(memory, gone(1), |rest| slow = Some(rest));
        assert_eq!(next(&told), None);
        // Another QP does not wait for it.
        destroyer.destroy(None, (), gone(2));
        assert_eq!(next(&told), Some(gone(2)));
        assert_eq!(next(&told), None);
        assert!(!freed.load(Ordering::Relaxed));
        drop(slow);
        assert!(freed.load(Ordering::Relaxed), "the memory first");
        assert_eq!(next(&told), Some(gone(1)));
    }
}
