//! [`Completions`]: the ops that librbd has ended, from its threads to a poll group.
//!
//! A callback of librbd puts the op's place and result into the queue. The queue has room for all
//! ops of the poll group, so it is never full. The callback writes to the eventfd of the poll group
//! only while that thread sleeps: the thread says that it will sleep, and then looks at the queue
//! once more; the callback fills the queue, and then looks whether the thread sleeps. The later of
//! the two sees the other.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam_queue::ArrayQueue;
use rblk_protocol::width::wide;

use super::library::{Handle, Library};
use crate::store::syncs::Door;

/// An op that has ended: its place, and the result of librbd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ended {
    pub place: u32,
    pub result: i64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Completions {
    ended: ArrayQueue<Ended>,
    asleep: AtomicBool,
    door: Door,
}

impl Completions {
    /// Room for the ops of so many places. `door` wakes the poll group.
    pub(super) fn new(places: u32, door: Door) -> Self {
        Self { ended: ArrayQueue::new(wide(places.max(1))), asleep: AtomicBool::new(false), door }
    }

    /// An op has ended. Any thread.
    pub(super) fn push(&self, ended: Ended) {
        let pushed = self.ended.push(ended);
        debug_assert!(pushed.is_ok(), "more ops ended than there are places");
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            self.door.ring();
        }
    }

    /// The next op that has ended. The poll group alone.
    pub(super) fn pop(&self) -> Option<Ended> {
        self.ended.pop()
    }

    /// The poll group is about to sleep. False: it may not, since an op has ended.
    pub(super) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.ended.is_empty() {
            return true;
        }
        self.wake_up();
        false
    }

    /// The poll group does not sleep any more.
    pub(super) fn wake_up(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }
}

/// The argument of the callback of one place. It stays where it is as long as librbd has an op of
/// the place.
#[derive(Debug)]
pub(super) struct CallArgument {
    pub library: &'static Library,
    pub completions: Arc<Completions>,
    pub place: u32,
}

/// librbd calls this when an op has ended.
///
/// # Safety
/// `completion` is a completion that was made with this function and with `argument`, which points
/// to a [`CallArgument`].
pub(super) unsafe extern "C" fn on_completion(completion: Handle, argument: *mut c_void) {
    // SAFETY: promised by the caller; the place keeps its argument until the op is in the queue.
    let argument = unsafe { &*argument.cast::<CallArgument>() };
    let library = argument.library;
    // SAFETY: the op of the completion has ended. Nobody else releases it.
    let result = unsafe {
        let result = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        result
    };
    // The store may drop the argument as soon as the op is in the queue.
    let (completions, place) = (Arc::clone(&argument.completions), argument.place);
    completions.push(Ended { place, result: result as i64 });
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    fn completions(places: u32) -> (Arc<Completions>, Door) {
        let door = Door::new().unwrap();
        (Arc::new(Completions::new(places, door.clone())), door)
    }

    fn is_readable(door: &Door) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        // SAFETY: the door lives longer than the borrowed descriptor.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(door.fd()) };
        poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() > 0
    }

    #[test]
    fn only_a_sleeping_thread_is_woken_and_only_once() {
        let (completions, door) = completions(4);
        let ended = |place| Ended { place, result: 4096 };
        completions.push(ended(0));
        assert!(!is_readable(&door), "an awake thread looks by itself");
        assert!(!completions.fall_asleep(), "an op has ended already");
        completions.push(ended(1));
        assert!(!is_readable(&door), "it stayed awake");
        assert_eq!((completions.pop(), completions.pop()), (Some(ended(0)), Some(ended(1))));
        assert!(completions.fall_asleep());
        completions.push(ended(2));
        assert!(is_readable(&door));
        door.answer();
        completions.push(ended(3));
        assert!(!is_readable(&door), "one ring wakes it");
        completions.wake_up();
        assert_eq!((completions.pop(), completions.pop()), (Some(ended(2)), Some(ended(3))));
        assert_eq!(completions.pop(), None);
    }

    #[test]
    fn no_ended_op_is_missed_by_a_thread_that_falls_asleep() {
        const OPS: u32 = 20_000;
        let (completions, door) = completions(OPS);
        let pushers: Vec<_> = (0..2)
            .map(|first| {
                let completions = Arc::clone(&completions);
                thread::spawn(move || {
                    for place in (first..OPS).step_by(2) {
                        completions.push(Ended { place, result: 0 });
                        if place % 64 == 0 {
                            thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let (mut seen, deadline) =
            (vec![false; wide(OPS)], Instant::now() + Duration::from_secs(60));
        let mut left = OPS;
        while left > 0 {
            assert!(Instant::now() < deadline, "{left} ops were never seen");
            while let Some(Ended { place, .. }) = completions.pop() {
                assert!(!std::mem::replace(&mut seen[wide(place)], true), "twice");
                left -= 1;
            }
            if left > 0 && completions.fall_asleep() {
                // Without a missed wake-up this returns at once after the next push.
                let slept = Instant::now();
                door.wait();
                let was_missed =
                    slept.elapsed() >= Duration::from_millis(900) && !completions.ended.is_empty();
                assert!(!was_missed, "a wake-up was missed");
                completions.wake_up();
            }
        }
        pushers.into_iter().for_each(|pusher| pusher.join().unwrap());
    }
}
