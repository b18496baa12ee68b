//! [`Counter`]: a number that one data thread writes and any thread reads;
//! [`counters!`](crate::counters): many of them.
//!
//! `add` is a relaxed load and store, not an atomic addition: a counter has one writer, and a
//! reader may see a slightly old value.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// 0.
    #[must_use]
    pub const fn zero() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds. Only the owning thread may call it.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Takes away. Only the owning thread may call it.
    #[inline(always)]
    pub fn sub(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_sub(n), Ordering::Relaxed);
    }

    /// Sets. Only the owning thread may call it.
    #[inline(always)]
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// The value now.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A struct of [`Counter`]s, and a struct of plain numbers with the same fields: their values at
/// one moment, or a sum of several.
///
/// Both have the named fields, public and with docs. The first has `snapshot`, the second has
/// `add`, which wraps, and `since`.
///
/// ```
/// rblk_runtime::counters! {
///     /// Written by one thread.
///     #[derive(Debug, Default)]
///     pub struct Traffic;
///     /// At one moment, or the sum over threads.
///     #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
///     pub struct TrafficCounts;
///     /// Messages sent.
///     sent,
///     /// Messages received.
///     received,
/// }
///
/// let (one, other) = (Traffic::default(), Traffic::default());
/// one.sent.add(2);
/// other.sent.add(3);
/// let mut sum = one.snapshot();
/// sum.add(&other.snapshot());
/// assert_eq!(sum, TrafficCounts { sent: 5, received: 0 });
/// ```
#[macro_export]
macro_rules! counters {
    (
        $(#[$live:meta])* pub struct $Live:ident;
        $(#[$plain:meta])* pub struct $Plain:ident;
        $($(#[$doc:meta])* $name:ident,)*
    ) => {
        $(#[$live])*
        pub struct $Live {
            $($(#[$doc])* pub $name: $crate::Counter,)*
        }

        $(#[$plain])*
        pub struct $Plain {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl $Live {
            /// Reads all counters, one after the other, so they are not of exactly one moment.
            #[must_use]
            pub fn snapshot(&self) -> $Plain {
                $Plain { $($name: self.$name.get(),)* }
            }
        }

        impl $Plain {
            /// Adds the numbers of another, field by field.
            pub fn add(&mut self, other: &Self) {
                $(self.$name = self.$name.wrapping_add(other.$name);)*
            }

            /// The difference to an earlier moment, field by field.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }
    };
}
