//! [`Outages`]: the unreachable addresses of a target: their listener broke and is not made anew
//! yet.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rblk_operate::target::status::ListenerStatus;

/// Pause before the first try to make a listener anew. Each later pause is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// Longest pause. A device may be away for long, and comes back without notice.
const PAUSE_MAX: Duration = Duration::from_secs(8);

/// The listeners that broke, by address. The tasks that accept write it, and control shows it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outages(Arc<Mutex<BTreeMap<String, Outage>>>);

#[derive(Debug)]
struct Outage {
    since: Instant,
    why: String,
    tries: u32,
}

impl Outages {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Outage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A listener broke.
    pub(crate) fn begin(&self, address: &str, why: String) {
        let outage = Outage { since: Instant::now(), why, tries: 0 };
        self.lock().insert(address.to_owned(), outage);
    }

    /// A try to make the listener anew failed. Returns whether the reason is a new one.
    pub(crate) fn failed(&self, address: &str, why: String) -> bool {
        let mut outages = self.lock();
        let Some(outage) = outages.get_mut(address) else { return true };
        let is_new = outage.why != why;
        outage.why = why;
        outage.tries = outage.tries.saturating_add(1);
        is_new
    }

    /// The address has a listener again.
    pub(crate) fn end(&self, address: &str) {
        self.lock().remove(address);
    }

    /// The outage of an address; `None` if it has a listener.
    pub(crate) fn of(&self, address: &str) -> Option<ListenerStatus> {
        let outages = self.lock();
        let outage = outages.get(address)?;
        Some(ListenerStatus {
            address: address.to_owned(),
            down_s: outage.since.elapsed().as_secs(),
            tries: outage.tries,
            why: outage.why.clone(),
        })
    }
}

/// How long to wait before the next try, after this many failed ones.
pub(crate) fn pause(tries: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << tries.min(16)).min(PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_stay_bounded() {
        let all: Vec<_> = (0..40).chain([u32::MAX]).map(pause).collect();
        assert!(all.is_sorted() && all[0] == PAUSE_MIN, "{all:?}");
        assert_eq!((all[5], all.last().copied()), (PAUSE_MAX, Some(PAUSE_MAX)));
        // A device that is reset is back within seconds.
        assert!(all[..4].iter().sum::<Duration>() < Duration::from_secs(5));
    }

    #[test]
    fn an_outage_is_shown_until_it_ends() {
        let outages = Outages::default();
        let why = || outages.of("a").map(|told| (told.why, told.tries));
        assert_eq!(why(), None);
        outages.begin("a", "the device is gone".to_owned());
        assert_eq!(why(), Some(("the device is gone".to_owned(), 0)));
        assert!(outages.failed("a", "no address".to_owned()), "another reason");
        assert!(!outages.failed("a", "no address".to_owned()), "the same reason");
        assert_eq!(why(), Some(("no address".to_owned(), 2)));
        assert_eq!(outages.of("b"), None);
        outages.end("a");
        assert_eq!(why(), None);
    }
}
