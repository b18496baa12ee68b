//! [`OtherGroups`]: the other poll groups, from the view of one: a bounded queue for each, without
//! locks.
//!
//! Messages from one group to another arrive in order. A sender never waits: messages that do not
//! fit are kept and sent with the next turn. An eventfd wakes the receiver only if it may be
//! asleep, so busy groups make no system calls for each other.
//!
//! Invariant (sleeping): the receiver marks itself asleep, then looks once more; the sender puts
//! its message in, then checks whether the receiver sleeps. The later one of the two sees the
//! other.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam_queue::ArrayQueue;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::cache::{ShardReply, ShardRequest, SlotsOf};

/// Messages that a group's queue holds.
const CAPACITY: usize = 4096;

/// A message between poll groups.
#[derive(Debug)]
pub enum GroupMail {
    /// To the group's shard.
    Request(ShardRequest),
    /// From a shard.
    Reply(ShardReply),
    /// The sender's shard is short of memory: these sessions should return its slots.
    ReturnMemory(SlotsOf),
    /// After a stop: the sender acknowledges nothing any more, but may still send requests.
    Silent,
    /// After a stop: the sender has no connection left and sends no more requests.
    Quiet,
}

#[derive(Debug)]
struct Inbox {
    queue: ArrayQueue<GroupMail>,
    asleep: AtomicBool,
    event: EventFd,
}

/// The other poll groups, and their messages. See the module.
#[derive(Debug)]
pub struct OtherGroups {
    own: usize,
    inboxes: Vec<Arc<Inbox>>,
    // By group: messages that did not fit.
    kept: Vec<VecDeque<GroupMail>>,
    keeps: bool,
    sent: u64,
}

impl OtherGroups {
    /// Connects `groups` poll groups with each other. Returns one value for each.
    ///
    /// # Errors
    /// No eventfd could be made.
    pub fn connect(groups: usize) -> io::Result<Vec<Self>> {
        let inboxes = (0..groups)
            .map(|_| {
                let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
                let event = EventFd::from_value_and_flags(0, flags)?;
                let queue = ArrayQueue::new(CAPACITY);
                Ok(Arc::new(Inbox { queue, asleep: AtomicBool::new(false), event }))
            })
            .collect::<io::Result<Vec<_>>>()?;
        let of = |own| Self {
            own,
            inboxes: inboxes.clone(),
            kept: (0..groups).map(|_| VecDeque::new()).collect(),
            keeps: false,
            sent: 0,
        };
        Ok((0..groups).map(of).collect())
    }

    /// Number of poll groups, including this one.
    #[must_use]
    pub(crate) fn groups(&self) -> usize {
        self.inboxes.len()
    }

    /// Messages sent since the start.
    #[must_use]
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends to another group.
    pub fn send(&mut self, group: usize, mail: GroupMail) {
        let (Some(inbox), Some(kept)) = (self.inboxes.get(group), self.kept.get_mut(group)) else {
            return;
        };
        self.sent += 1;
        if !kept.is_empty() {
            return kept.push_back(mail);
        }
        match inbox.queue.push(mail) {
            Ok(()) => wake(inbox),
            Err(mail) => {
                kept.push_back(mail);
                self.keeps = true;
            }
        }
    }

    /// Sends kept messages. Returns whether some still do not fit.
    #[inline]
    pub(crate) fn flush(&mut self) -> bool {
        self.keeps && self.flush_kept()
    }

    #[cold]
    fn flush_kept(&mut self) -> bool {
        self.keeps = false;
        for (inbox, kept) in self.inboxes.iter().zip(&mut self.kept) {
            while let Some(mail) = kept.pop_front() {
                if let Err(mail) = inbox.queue.push(mail) {
                    kept.push_front(mail);
                    self.keeps = true;
                    break;
                }
                wake(inbox);
            }
        }
        self.keeps
    }

    /// Whether messages wait for [`Self::flush`].
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.keeps
    }

    /// The next message to this group.
    #[inline]
    pub(crate) fn receive(&mut self) -> Option<GroupMail> {
        self.inboxes.get(self.own)?.queue.pop()
    }

    /// Readable when a message came while this group slept.
    #[must_use]
    pub(crate) fn event_fd(&self) -> Option<RawFd> {
        self.inboxes.get(self.own).map(|inbox| inbox.event.as_raw_fd())
    }

    /// Announces a sleep. False: a message is there, and the group must not sleep.
    pub(crate) fn fall_asleep(&mut self) -> bool {
        let Some(inbox) = self.inboxes.get(self.own) else { return true };
        inbox.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let empty = inbox.queue.is_empty() && !self.keeps;
        if !empty {
            inbox.asleep.store(false, Ordering::SeqCst);
        }
        empty
    }

    /// Ends the announcement of a sleep.
    pub(crate) fn wake_up(&mut self) {
        if let Some(inbox) = self.inboxes.get(self.own) {
            inbox.asleep.store(false, Ordering::SeqCst);
        }
    }

    /// Resets the event after it was readable. Must be called before the look for messages, never
    /// after.
    pub(crate) fn clear_event(&mut self) {
        if let Some(inbox) = self.inboxes.get(self.own) {
            let _ = inbox.event.read();
        }
    }
}

fn wake(inbox: &Inbox) {
    fence(Ordering::SeqCst);
    // The plain load keeps the line shared while the receiver is awake.
    if inbox.asleep.load(Ordering::SeqCst) && inbox.asleep.swap(false, Ordering::SeqCst) {
        let _ = inbox.event.write(1);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::volume::ids::VolumeIndex;

    fn message(offset: u64) -> GroupMail {
        let volume = VolumeIndex(0);
        GroupMail::Request(ShardRequest::Prefetch { volume, offset, len: 0 })
    }

    fn offset(mail: &GroupMail) -> u64 {
        match mail {
            GroupMail::Request(ShardRequest::Prefetch { offset, .. }) => *offset,
            _ => panic!("{mail:?}"),
        }
    }

    #[test]
    fn messages_stay_in_order_beyond_the_queue() {
        let mut groups = OtherGroups::connect(2).unwrap();
        let (mut second, mut first) = (groups.pop().unwrap(), groups.pop().unwrap());
        let count = 3 * CAPACITY as u64;
        for at in 0..count {
            first.send(1, message(at));
        }
        let mut seen = 0;
        while seen < count {
            if let Some(mail) = second.receive() {
                assert_eq!(offset(&mail), seen);
                seen += 1;
            } else {
                first.flush();
            }
        }
        assert!(!first.flush() && second.receive().is_none());
    }

    #[test]
    fn no_group_sleeps_through_a_message() {
        let mut groups = OtherGroups::connect(2).unwrap();
        let (mut second, mut first) = (groups.pop().unwrap(), groups.pop().unwrap());
        let rounds = 20_000;
        let sender = std::thread::spawn(move || {
            for at in 0..rounds {
                first.send(1, message(at));
                while first.flush() {
                    std::thread::yield_now();
                }
            }
            first
        });
        let (mut seen, mut sleeps) = (0, 0);
        while seen < rounds {
            while let Some(mail) = second.receive() {
                assert_eq!(offset(&mail), seen);
                seen += 1;
            }
            if seen < rounds && second.fall_asleep() {
                let event = second.inboxes[1].event.as_fd();
                let mut polled = [nix::poll::PollFd::new(event, nix::poll::PollFlags::POLLIN)];
                sleeps += 1;
                // Every third sleep ends by itself, as after a completion, without a check of the
                // event.
                if sleeps % 3 == 0 {
                    second.wake_up();
                    continue;
                }
                let woken = nix::poll::poll(&mut polled, 10_000u16).unwrap();
                assert_eq!(woken, 1, "slept through message {seen}");
                second.wake_up();
                second.clear_event();
            }
        }
        sender.join().unwrap();
        // All messages are written by now: an event that stays set would wake the group again and
        // again.
        second.clear_event();
        assert!(second.fall_asleep());
        let mut polled =
            [nix::poll::PollFd::new(second.inboxes[1].event.as_fd(), nix::poll::PollFlags::POLLIN)];
        assert_eq!(nix::poll::poll(&mut polled, 0u16).unwrap(), 0);
    }
}
