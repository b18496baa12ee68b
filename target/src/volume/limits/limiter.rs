//! [`Limiter`]: the commands and the bytes of one volume or of one host, limited over all poll
//! groups together. Pure.
//!
//! A command is charged to both buckets at once, and the later of the two times counts. So a
//! command that waits for one bucket has already taken its share of the other: where both limit, a
//! window may have one command more for each waiting one.

use std::sync::Arc;

use rblk_config::Limits;

use super::bucket::{Bucket, Ticks};

/// See the module. Two limiters are equal if their limits are.
#[derive(Debug)]
pub struct Limiter {
    limits: Limits,
    commands: Option<Bucket>,
    bytes: Option<Bucket>,
}

impl Limiter {
    /// The limiter for these limits: the limiter `before`, with its state, if the limits are equal.
    /// `None` if nothing is limited.
    #[must_use]
    pub fn renewed(before: Option<&Arc<Self>>, limits: Limits) -> Option<Arc<Self>> {
        if limits.is_none() {
            return None;
        }
        if let Some(same) = before.filter(|before| before.limits == limits) {
            return Some(Arc::clone(same));
        }
        let bucket = |(rate, burst)| Bucket::new(rate, burst);
        let (commands, bytes) = (limits.commands().map(bucket), limits.bytes().map(bucket));
        Some(Arc::new(Self { limits, commands, bytes }))
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Charges a command of `bytes`, and returns the time at which it may start.
    #[inline]
    pub(crate) fn take(&self, bytes: u32, now: Ticks) -> Ticks {
        let commands = self.commands.as_ref().map_or(now, |bucket| bucket.take(1, now));
        match &self.bytes {
            Some(bucket) if bytes > 0 => commands.max(bucket.take(bytes, now)),
            _ => commands,
        }
    }

    /// Returns the charge of a command of `bytes` that will not start.
    #[cold]
    pub(crate) fn give_back(&self, bytes: u32) {
        if let Some(bucket) = &self.commands {
            bucket.give_back(1);
        }
        if let Some(bucket) = self.bytes.as_ref().filter(|_| bytes > 0) {
            bucket.give_back(bytes);
        }
    }
}

impl PartialEq for Limiter {
    fn eq(&self, other: &Self) -> bool {
        self.limits == other.limits
    }
}

impl Eq for Limiter {}

#[cfg(test)]
mod tests {
    use rblk_config::ByteRate;
    use rblk_runtime::Micros;

    use super::*;

    fn at(us: u64) -> Ticks {
        Ticks::of(Micros::new(us))
    }

    #[test]
    fn the_tighter_limit_counts() {
        let limits = Limits {
            iops: Some(1000),
            iops_burst: Some(1),
            bandwidth: Some(ByteRate(1 << 20)),
            bandwidth_burst: Some(rblk_config::ByteSize(1 << 20)),
        };
        let limiter = Limiter::renewed(None, limits).unwrap();
        assert_eq!(limiter.take(1 << 20, at(0)), at(0));
        assert_eq!(limiter.take(0, at(0)), at(1000), "the commands");
        assert_eq!(limiter.take(1 << 20, at(0)), at(1_000_000), "the bytes");
    }

    #[test]
    fn equal_limits_keep_their_state() {
        let limits = Limits { iops: Some(10), ..Limits::default() };
        let first = Limiter::renewed(None, limits).unwrap();
        assert!(Arc::ptr_eq(&first, &Limiter::renewed(Some(&first), limits).unwrap()));
        let other = Limits { iops: Some(20), ..limits };
        assert_ne!(first, Limiter::renewed(Some(&first), other).unwrap());
        assert!(Limiter::renewed(Some(&first), Limits::default()).is_none());
    }
}
