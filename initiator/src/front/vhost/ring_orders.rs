//! [`Orders`]: what the thread of the front end has the thread of a ring do.
//!
//! A front end may ask for more than a ring's thread gets to, in any number and at any pace. Two
//! rules bound what waits, so that there is always room:
//!
//! - A setting takes the place of an older one of its kind that was not taken.
//! - Whoever asks a question waits for its answer before the next order.
//!
//! The end of the thread is a flag: no message has to find room for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use rblk_fabric::mailbox::{Receiver, Refused, Sender, mailbox};

use super::event::Event;
use super::guest_memory::GuestMemory;
use super::guest_ring::RingParts;

/// Orders that may wait: a setting of each kind, a question, and the three questions of a front end
/// that leaves because one was not answered in time.
const ORDERS_MAX: usize = 8;

/// What a ring is to do.
#[derive(Debug)]
pub(super) enum Order {
    /// Take requests, or leave them in the ring.
    Enable(bool),
    /// The guest makes its writes durable by itself, or each has to be.
    Flushed(bool),
    /// Tell the guest by this what is done.
    SetCall(Option<Event>),
    /// Tell the front end by this that the ring is broken.
    SetError(Option<Event>),
    /// Serve a ring, if the memory is there. Say whether that can be, and whether it is served: one
    /// in doubt is not.
    Start(Box<RingParts>, SyncSender<io::Result<bool>>),
    /// Use this memory from now on, and say when no device touches what was not in it.
    Memory(Option<Arc<GuestMemory>>, SyncSender<()>),
    /// Serve the ring no longer, and say which request would be the next, when none is under way.
    Stop {
        /// How long to wait for answers.
        patience: Duration,
        /// For the answer.
        reply: SyncSender<u16>,
    },
    /// Have the target make durable what the guest wrote, and say whether it did. No ring is
    /// served.
    Flush(SyncSender<bool>),
}

impl Order {
    /// Whether it takes the place of an earlier order that was not taken.
    fn supersedes(&self, earlier: &Self) -> bool {
        match self {
            Self::Enable(_) => matches!(earlier, Self::Enable(_)),
            Self::Flushed(_) => matches!(earlier, Self::Flushed(_)),
            Self::SetCall(_) => matches!(earlier, Self::SetCall(_)),
            Self::SetError(_) => matches!(earlier, Self::SetError(_)),
            Self::Start(..) | Self::Memory(..) | Self::Stop { .. } | Self::Flush(_) => false,
        }
    }
}

/// The orders of one ring, at the end that gives them.
#[derive(Debug)]
pub(super) struct Orders {
    sender: Sender<Order>,
    ends: Arc<AtomicBool>,
}

/// The same, at the end of the ring's thread.
#[derive(Debug)]
pub(super) struct Given {
    receiver: Receiver<Order>,
    ends: Arc<AtomicBool>,
}

impl Orders {
    /// Both ends.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(super) fn pair() -> io::Result<(Self, Given)> {
        let (sender, receiver) = mailbox(ORDERS_MAX)?;
        let ends = Arc::new(AtomicBool::new(false));
        Ok((Self { sender, ends: Arc::clone(&ends) }, Given { receiver, ends }))
    }

    /// Gives an order.
    ///
    /// # Errors
    /// The thread is gone, or has answered no question for so long that there is no room.
    pub(super) fn give(&self, order: Order) -> Result<(), Refused<Order>> {
        self.sender.send_over(order, Order::supersedes).map(drop)
    }

    /// The thread is to end, whatever waits.
    pub(super) fn end(&self) {
        self.ends.store(true, Ordering::Release);
        self.sender.wake();
    }
}

impl Given {
    /// The next order.
    pub(super) fn take(&mut self) -> Option<Order> {
        self.receiver.receive()
    }

    /// Whether there is something to look at.
    pub(super) fn has_some(&self) -> bool {
        self.receiver.has_some() || self.ends()
    }

    /// Whether the thread is to end.
    pub(super) fn ends(&self) -> bool {
        self.ends.load(Ordering::Acquire)
    }

    /// Resets what wakes the thread. Look afterwards.
    pub(super) fn clear_event(&mut self) {
        self.receiver.clear_event();
    }
}

impl AsFd for Given {
    /// Readable when something came.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn any_number_of_settings_leaves_room_for_questions_and_the_last_setting_counts() {
        let (orders, mut given) = Orders::pair().unwrap();
        for number in 0..5000 {
            orders.give(Order::Enable(number % 2 == 1)).unwrap();
            orders.give(Order::SetCall(None)).unwrap();
            orders.give(Order::Flushed(number % 3 == 0)).unwrap();
            orders.give(Order::SetError(None)).unwrap();
        }
        for _ in 0..4 {
            orders.give(Order::Flush(sync_channel(1).0)).unwrap();
        }
        assert!(orders.give(Order::Flush(sync_channel(1).0)).is_err());
        orders.give(Order::Enable(false)).unwrap();
        assert!(!given.ends());
        orders.end();
        assert!(given.ends() && given.has_some());
        let taken: Vec<_> = std::iter::from_fn(|| given.take()).collect();
        assert_eq!(taken.len(), 8);
        let settings = taken.iter().filter(|order| !matches!(order, Order::Flush(_)));
        assert_eq!(settings.count(), 4);
        assert!(taken.iter().any(|order| matches!(order, Order::Flushed(false))));
        assert!(matches!(taken.last(), Some(Order::Enable(false))), "the newest");
        drop(given);
        assert!(orders.give(Order::Enable(true)).is_err());
    }
}
