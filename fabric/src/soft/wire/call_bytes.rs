//! [`CallBytes`]: how many bytes one send call into a socket takes.
//!
//! A call of 1 MiB moves half as much again in the same time as one of 128 KiB. But a kernel that
//! does not preempt its own code keeps every other thread of the processor waiting for the whole of
//! a call: about 200 us for 1 MiB. So calls grow while no other thread takes the processor from
//! this one, and are short again when one did.
//!
//! A call takes a quarter of the bytes that wait. With one call for all of them, the two ends of
//! 16 writes of 128 KiB work by turns: while one sends, the other runs out of work. That was a
//! quarter slower.

use nix::sys::resource::{UsageWho, getrusage};

/// The shortest call: about 30 us.
pub(super) const LEAST: usize = 128 << 10;
/// The longest call. Longer ones move no more.
const MOST: usize = 1 << 20;
/// A call takes one of this many parts of the bytes that wait.
const PART: usize = 4;
/// Bytes sent between two questions to the kernel, which take 0.3 us each.
const ASK_EVERY: usize = 1 << 20;

/// The bytes of the next call.
#[derive(Debug)]
pub(super) struct CallBytes {
    most: usize,
    // Bytes sent since the kernel was last asked.
    sent: usize,
    // Times that another thread took the processor from this one, until then.
    displaced: i64,
}

impl CallBytes {
    pub(super) fn new() -> Self {
        Self { most: LEAST, sent: 0, displaced: 0 }
    }

    /// Bytes that the next call may take, where `waiting` bytes wait.
    #[inline]
    pub(super) fn most(&self, waiting: usize) -> usize {
        self.most.min((waiting / PART).max(LEAST))
    }

    /// A call sent bytes.
    #[inline]
    pub(super) fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
        if self.sent >= ASK_EVERY {
            self.sent = 0;
            self.follow(times_displaced());
        }
    }

    /// Follows the number of times that this thread lost the processor to another, or, behind a
    /// change of threads, any other number.
    fn follow(&mut self, displaced: Option<i64>) {
        let alone = displaced == Some(self.displaced);
        self.displaced = displaced.unwrap_or(self.displaced);
        self.most = if alone { (self.most * 2).min(MOST) } else { LEAST };
    }
}

/// Times that the kernel took the processor from this thread and gave it to another. `None` if the
/// kernel does not count them.
fn times_displaced() -> Option<i64> {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).ok()?;
    Some(usage.involuntary_context_switches())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_grow_while_the_thread_is_alone() {
        let mut call = CallBytes::new();
        let mut after = |displaced| {
            call.follow(displaced);
            call.most(usize::MAX) >> 10
        };
        assert_eq!(after(Some(7)), 128, "nothing is known of the time before");
        assert_eq!([after(Some(7)), after(Some(7)), after(Some(7))], [256, 512, 1024]);
        assert_eq!(after(Some(7)), 1024, "no longer");
        assert_eq!(after(Some(8)), 128, "another thread ran");
        assert_eq!(after(Some(8)), 256);
        assert_eq!([after(None), after(None)], [128, 128], "nothing is known");
    }

    #[test]
    fn a_call_takes_a_quarter_of_the_bytes_that_wait() {
        let mut call = CallBytes::new();
        (0..4).for_each(|_| call.follow(Some(7)));
        let most = |waiting: usize| call.most(waiting << 10) >> 10;
        assert_eq!([most(0), most(512), most(1024)], [128, 128, 256]);
        assert_eq!([most(2048), most(4096), most(8192)], [512, 1024, 1024]);
    }

    #[test]
    fn the_kernel_counts() {
        assert!(times_displaced().is_some());
    }
}
