//! [`Orders`]: the orders of the front end's thread to the thread of a ring.
//!
//! A front end may send orders faster than a ring's thread takes them. Two rules bound the number
//! of waiting orders, so that there is always room:
//!
//! - A setting replaces an older one of its kind that was not taken.
//! - The sender of a question waits for its answer before the next order.
//!
//! The end of the thread is a flag: it needs no room for a message.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use rblk_runtime::mailbox::{Receiver, Refused, Sender, mailbox};

use super::event::NotifyFd;
use super::guest_memory::GuestMemory;
use super::guest_ring::RingParts;

/// Limit of the waiting orders: a setting of each kind, a question, and the three questions of a
/// front end that leaves after a late answer.
const ORDERS_MAX: usize = 8;

/// An order to a ring.
#[derive(Debug)]
pub(super) enum RingOrder {
    /// Take requests, or leave them in the ring.
    Enable(bool),
    /// `true`: the guest makes its writes durable by itself. `false`: each write must be durable.
    Flushed(bool),
    /// Notify the guest of completions by this event.
    SetCall(Option<NotifyFd>),
    /// Notify the front end by this event that the ring is broken.
    SetError(Option<NotifyFd>),
    /// Serve a ring, if its memory is mapped. The reply is an error, or whether the ring is served:
    /// a ring in doubt is not.
    Start(Box<RingParts>, SyncSender<io::Result<bool>>),
    /// Use this memory, and reply when no device touches memory outside it.
    Memory(Option<Arc<GuestMemory>>, SyncSender<()>),
    /// Stop serving the ring. Reply with the index of the next request, once none is under way.
    Stop {
        /// Time to wait for answers.
        patience: Duration,
        /// The channel for the answer.
        reply: SyncSender<u16>,
    },
    /// Have the target make the guest's writes durable, and reply whether it did. No ring is
    /// served.
    Flush(SyncSender<bool>),
}

impl RingOrder {
    /// Whether it replaces an earlier order that was not taken.
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

/// The sending end of a ring's orders.
#[derive(Debug)]
pub(super) struct Orders {
    sender: Sender<RingOrder>,
    ends: Arc<AtomicBool>,
}

/// The receiving end, in the ring's thread.
#[derive(Debug)]
pub(super) struct Given {
    receiver: Receiver<RingOrder>,
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

    /// Sends an order.
    ///
    /// # Errors
    /// The thread has ended, or has left so many questions unanswered that there is no room.
    pub(super) fn give(&self, order: RingOrder) -> Result<(), Refused<RingOrder>> {
        self.sender.send_over(order, RingOrder::supersedes).map(drop)
    }

    /// Ends the thread, even if orders wait.
    pub(super) fn end(&self) {
        self.ends.store(true, Ordering::Release);
        self.sender.wake();
    }
}

impl Given {
    /// The next order.
    pub(super) fn take(&mut self) -> Option<RingOrder> {
        self.receiver.receive()
    }

    /// Whether an order waits, or the thread has to end.
    pub(super) fn has_some(&self) -> bool {
        self.receiver.has_some() || self.ends()
    }

    /// Whether the thread has to end.
    pub(super) fn ends(&self) -> bool {
        self.ends.load(Ordering::Acquire)
    }

    /// Resets the event that wakes the thread. Check for orders afterwards.
    pub(super) fn clear_event(&mut self) {
        self.receiver.clear_event();
    }
}

impl AsFd for Given {
    /// Readable after a message.
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
            orders.give(RingOrder::Enable(number % 2 == 1)).unwrap();
            orders.give(RingOrder::SetCall(None)).unwrap();
            orders.give(RingOrder::Flushed(number % 3 == 0)).unwrap();
            orders.give(RingOrder::SetError(None)).unwrap();
        }
        for _ in 0..4 {
            orders.give(RingOrder::Flush(sync_channel(1).0)).unwrap();
        }
        assert!(orders.give(RingOrder::Flush(sync_channel(1).0)).is_err());
        orders.give(RingOrder::Enable(false)).unwrap();
        assert!(!given.ends());
        orders.end();
        assert!(given.ends() && given.has_some());
        let taken: Vec<_> = std::iter::from_fn(|| given.take()).collect();
        assert_eq!(taken.len(), 8);
        let settings = taken.iter().filter(|order| !matches!(order, RingOrder::Flush(_)));
        assert_eq!(settings.count(), 4);
        assert!(taken.iter().any(|order| matches!(order, RingOrder::Flushed(false))));
        assert!(matches!(taken.last(), Some(RingOrder::Enable(false))), "the newest");
        drop(given);
        assert!(orders.give(RingOrder::Enable(true)).is_err());
    }
}
