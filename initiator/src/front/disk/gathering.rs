//! [`Gathering`]: the number of events that a sleep waits for, with many requests under way. Pure.
//!
//! Each sleep and each doorbell is a system call (on a software device). With many requests under
//! way, a thread that wakes for the first event finds little work, and is back in the kernel for
//! the next event at once. So the thread lets the kernel gather some events before it wakes: the
//! client's requests after the last completions come together, and share a message, a doorbell and
//! a system call.
//!
//! A gathering costs latency, so it is bounded by a small part of the present latency, which is
//! measured with one request at a time. On a fast device that part is too short to be worth a
//! timer, and the thread does not gather.

use std::time::{Duration, Instant};

use rblk_protocol::Tag;

use crate::front::ublk::TurnSleep;

/// With at most so many requests under way, no request waits for another.
const FEW: usize = 8;
/// The part of the latency that a gathering may add.
const PART: u32 = 16;
/// A gathering is not worth a timer below `SHORTEST`, and never takes longer than `LONGEST`.
const SHORTEST: Duration = Duration::from_micros(10);
const LONGEST: Duration = Duration::from_micros(500);
/// Limit of the events of a gathering. (Tried: with 16 there are a tenth fewer system calls, and
/// less I/O, because more of the requests wait at one end.)
const EVENTS: usize = 8;

/// The measured latency of requests, and the sleeps that follow from it.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    // The measured request, and the time when it came.
    sample: Option<(Tag, Instant)>,
    // The average over about eight samples.
    latency: Duration,
    // The most requests under way lately, reduced by a tenth with every sleep: of a burst, many are
    // just answered, and come again.
    peak: usize,
}

impl Gathering {
    /// Records a request.
    #[inline]
    pub(super) fn request(&mut self, tag: Tag, now: Instant) {
        if self.sample.is_none() {
            self.sample = Some((tag, now));
        }
    }

    /// Records an answer.
    #[inline]
    pub(super) fn answer(&mut self, tag: Tag, now: Instant) {
        if let Some((sample, since)) = self.sample
            && sample == tag
        {
            self.sample = None;
            self.latency = (self.latency * 7 + now.saturating_duration_since(since)) / 8;
        }
    }

    /// Whether many requests are under way; `outstanding` are at the moment.
    #[inline]
    pub(super) fn is_many(&self, outstanding: usize) -> bool {
        outstanding > FEW || self.peak > FEW
    }

    /// The wait of a sleep with so many requests under way.
    #[inline]
    pub(super) fn wait(&mut self, longest: Duration, outstanding: usize) -> TurnSleep {
        self.peak = outstanding.max(self.peak.saturating_sub(1 + self.peak / 10));
        let within = (self.latency / PART).min(LONGEST);
        if self.peak <= FEW || within < SHORTEST {
            return TurnSleep::For(longest);
        }
        TurnSleep::Gather { events: (self.peak / 4).min(EVENTS), within, longest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The state after requests with that latency.
    fn after(latency: Duration) -> Gathering {
        let (mut gathering, now) = (Gathering::default(), Instant::now());
        for _ in 0..100 {
            gathering.request(Tag(3), now);
            gathering.request(Tag(4), now);
            gathering.answer(Tag(4), now);
            gathering.answer(Tag(3), now + latency);
        }
        gathering
    }

    fn within(wait: TurnSleep) -> Option<(usize, Duration)> {
        match wait {
            TurnSleep::Gather { events, within, longest } => {
                assert_eq!(longest, SECOND);
                Some((events, within))
            }
            TurnSleep::For(longest) => {
                assert_eq!(longest, SECOND);
                None
            }
            TurnSleep::No => panic!("no sleep"),
        }
    }

    #[test]
    fn it_adds_a_part_of_the_latency() {
        let mut gathering = after(Duration::from_micros(3200));
        let (events, least) = within(gathering.wait(SECOND, 32)).unwrap();
        assert_eq!(events, 8);
        assert!(least.abs_diff(Duration::from_micros(200)) < Duration::from_micros(5), "{least:?}");
        // Most of a burst are answered: they come again.
        let (events, _) = within(gathering.wait(SECOND, 2)).unwrap();
        assert_eq!(events, 7);
    }

    #[test]
    fn few_requests_do_not_wait_for_each_other() {
        let mut gathering = after(Duration::from_micros(3200));
        assert_eq!(within(gathering.wait(SECOND, 8)), None);
        assert!(gathering.is_many(9) && !gathering.is_many(8));
        // The peak forgets a burst soon.
        gathering.wait(SECOND, 32);
        let bursts = (0..100).take_while(|_| within(gathering.wait(SECOND, 1)).is_some()).count();
        assert!((1..20).contains(&bursts), "{bursts}");
    }

    #[test]
    fn fast_devices_are_not_waited_for_and_slow_ones_not_long() {
        assert_eq!(within(after(Duration::from_micros(80)).wait(SECOND, 32)), None);
        assert_eq!(within(Gathering::default().wait(SECOND, 32)), None, "nothing is known");
        let (_, least) = within(after(SECOND).wait(SECOND, 32)).unwrap();
        assert_eq!(least, LONGEST);
    }
}
