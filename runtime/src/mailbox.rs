//! A bounded mailbox between a control thread and a data thread.
//!
//! Invariants: messages arrive in order. A full box refuses a message and does not block. A message
//! may take the place of earlier ones that were not read, so a box whose receiver does not look
//! holds no more than its sender has kinds of messages. The receiver's check for messages is one
//! load. Every message writes the eventfd, so that no message is slept through. The lock is taken
//! only when there is a message, which on a data thread is never part of an I/O.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

#[derive(Debug)]
struct Letters<T> {
    queue: Mutex<VecDeque<T>>,
    // Length of the queue, so that an idle receiver need not take the lock.
    waiting: AtomicUsize,
    event: EventFd,
    capacity: usize,
}

/// The box is full or the receiver is gone. The message comes back.
#[derive(Debug)]
pub struct Refused<T>(pub T);

/// Sending end; clone it freely.
#[derive(Debug)]
pub struct Sender<T>(Arc<Letters<T>>);

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// Receiving end; one owner.
#[derive(Debug)]
pub struct Receiver<T>(Arc<Letters<T>>);

/// A mailbox of at most `capacity` messages.
///
/// # Errors
/// No eventfd could be made.
pub fn mailbox<T>(capacity: usize) -> io::Result<(Sender<T>, Receiver<T>)> {
    let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
    let shared = Arc::new(Letters {
        queue: Mutex::new(VecDeque::with_capacity(capacity)),
        waiting: AtomicUsize::new(0),
        event,
        capacity,
    });
    Ok((Sender(Arc::clone(&shared)), Receiver(shared)))
}

impl<T> Sender<T> {
    /// Puts a message in and wakes the receiver.
    ///
    /// # Errors
    /// [`Refused`] with the message when the box is full or the receiver is gone.
    pub fn send(&self, message: T) -> Result<(), Refused<T>> {
        self.send_over(message, |_, _| false).map(drop)
    }

    /// Sends a message and takes back every unreceived message that the new one `supersedes`, a
    /// function of the new message and an earlier one.
    ///
    /// # Errors
    /// As of [`Self::send`]. Nothing is taken back then.
    pub fn send_over(
        &self,
        message: T,
        mut supersedes: impl FnMut(&T, &T) -> bool,
    ) -> Result<Vec<T>, Refused<T>> {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let over = queue.iter().filter(|earlier| supersedes(&message, earlier)).count();
        let is_closed = self.0.waiting.load(Ordering::Relaxed) == usize::MAX;
        if is_closed || queue.len() - over >= self.0.capacity {
            return Err(Refused(message));
        }
        let mut taken = Vec::new();
        for _ in 0..if over > 0 { queue.len() } else { 0 } {
            let Some(earlier) = queue.pop_front() else { break };
            if supersedes(&message, &earlier) {
                taken.push(earlier);
            } else {
                queue.push_back(earlier);
            }
        }
        queue.push_back(message);
        self.0.waiting.store(queue.len(), Ordering::Release);
        drop(queue);
        // EAGAIN means the counter is at its top: the receiver is awake already.
        let _ = self.0.event.write(1);
        Ok(taken)
    }
}

impl<T> Sender<T> {
    /// Wakes the receiver without a message: it has something else to look at.
    pub fn wake(&self) {
        // A full event already wakes the receiver.
        let _ = self.0.event.write(1);
    }

    /// Whether the receiver is gone: no message will be taken any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.waiting.load(Ordering::Acquire) == usize::MAX
    }
}

impl<T> AsFd for Receiver<T> {
    /// The descriptor of [`Receiver::event_fd`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

impl<T> Receiver<T> {
    /// Whether a message may be there.
    #[must_use]
    pub fn has_some(&self) -> bool {
        self.0.waiting.load(Ordering::Acquire) != 0
    }

    /// The next message.
    pub fn receive(&mut self) -> Option<T> {
        if !self.has_some() {
            return None;
        }
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let message = queue.pop_front();
        self.0.waiting.store(queue.len(), Ordering::Release);
        message
    }

    /// Readable when messages came in since [`Self::clear_event`].
    #[must_use]
    pub fn event_fd(&self) -> RawFd {
        self.0.event.as_raw_fd()
    }

    /// Resets the event. Call it before looking for messages, never after.
    pub fn clear_event(&mut self) {
        let _ = self.0.event.read();
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.waiting.store(usize::MAX, Ordering::Release);
        // Messages may hold QPs and files. Dropped outside of the lock: no one will receive them.
        let left = std::mem::take(&mut *queue);
        drop(queue);
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_order_and_refuses_when_full_or_closed() {
        let (sender, mut receiver) = mailbox(2).unwrap();
        assert!(!receiver.has_some());
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert!(matches!(sender.send(3), Err(Refused(3))));
        receiver.clear_event();
        assert_eq!(
            (receiver.receive(), receiver.receive(), receiver.receive()),
            (Some(1), Some(2), None)
        );
        sender.send(4).unwrap();
        assert!(!sender.is_closed());
        drop(receiver);
        assert!(sender.is_closed());
        assert!(matches!(sender.send(5), Err(Refused(5))));
        assert!(matches!(sender.send_over(6, |_, _| true), Err(Refused(6))));
    }

    #[test]
    fn a_message_takes_the_place_of_those_that_it_supersedes() {
        let (sender, mut receiver) = mailbox(3).unwrap();
        let same_kind = |new: &(char, u32), earlier: &(char, u32)| new.0 == earlier.0;
        for message in [('a', 1), ('b', 2), ('c', 3)] {
            assert!(sender.send_over(message, same_kind).unwrap().is_empty());
        }
        // A full box has room for one that takes the place of another. The others keep their order.
        assert_eq!(sender.send_over(('b', 4), same_kind).unwrap(), [('b', 2)]);
        assert!(matches!(sender.send_over(('d', 5), same_kind), Err(Refused(('d', 5)))));
        for number in 6..5000 {
            assert_eq!(sender.send_over(('a', number), same_kind).unwrap().len(), 1);
        }
        let left: Vec<_> = std::iter::from_fn(|| receiver.receive()).collect();
        assert_eq!(left, [('c', 3), ('b', 4), ('a', 4999)]);
    }
}
