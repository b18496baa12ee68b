//! [`Counter`]: a number that one data thread writes and any thread reads;
//! [`counters!`](crate::counters): many of them, each described once.
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

/// How a counter changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CounterKind {
    /// Only rises.
    Counter,
    /// Rises and falls: a current value.
    Gauge,
}

/// The unit of a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CounterUnit {
    /// Things that are counted.
    Number,
    /// Bytes.
    Bytes,
    /// Microseconds; seconds in a metric.
    Micros,
}

/// The description of one counter of a `T`. The metric and the help of counters that
/// volumes, sessions and devices have hold `{subject}` in place of that word.
#[derive(Debug)]
pub struct CounterDescription<T> {
    /// The name of its field: its name in JSON.
    pub name: &'static str,
    /// How it changes.
    pub kind: CounterKind,
    /// Its unit.
    pub unit: CounterUnit,
    /// The name of its metric, if it has one. Counters of one metric stand next to each other.
    pub metric: Option<&'static str>,
    /// The label that tells it from other counters of its metric, and the value of the label.
    pub label: Option<(&'static str, &'static str)>,
    /// The doc comment of its field, or the help of a metric of several counters.
    pub doc: &'static str,
    /// Its value.
    pub value: fn(&T) -> u64,
}

impl<T> CounterDescription<T> {
    /// The help of its metric: the first paragraph of the doc comment, in one line.
    #[must_use]
    pub fn help(&self) -> String {
        let lines = self.doc.lines().map(str::trim).take_while(|line| !line.is_empty());
        lines.collect::<Vec<_>>().join(" ")
    }
}

/// Counters with descriptions. [`counters!`](crate::counters) implements it.
pub trait Described: Sized + 'static {
    /// A description of each counter, in the order of their fields.
    const COUNTERS: &'static [CounterDescription<Self>];
}

/// A struct of [`Counter`]s, and a struct of plain numbers with the same fields: their values at
/// one moment, or a sum of several. Without the first, only the second.
///
/// Both have the named fields, public and with docs. The first has `snapshot` and `set`, the second
/// has `add`, which wraps, `since`, and the descriptions of its counters: it is [`Described`].
///
/// A counter has a kind and a unit, and behind `=>` the name of its metric. Several counters may
/// share a metric: each has a label with a value, and the first one the help of the metric. The
/// help of other metrics is the first paragraph of the doc comment.
///
/// ```
/// use rblk_runtime::Described;
///
/// rblk_runtime::counters! {
///     /// Written by one thread.
///     #[derive(Debug, Default)]
///     pub struct Traffic;
///     /// At one moment, or the sum over threads.
///     #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
///     pub struct TrafficCounts;
///     /// Reads answered.
///     reads: Counter Number => "commands_total" { op = "read" } "Commands answered, by kind.",
///     /// Writes answered.
///     writes: Counter Number => "commands_total" { op = "write" },
///     /// Bytes of the answers.
///     ///
///     /// Headers count, too.
///     bytes: Counter Bytes => "bytes_total",
///     /// Messages that wait. No metric.
///     waiting: Gauge Number,
/// }
///
/// let (one, other) = (Traffic::default(), Traffic::default());
/// one.reads.add(2);
/// other.reads.add(3);
/// let mut sum = one.snapshot();
/// sum.add(&other.snapshot());
/// assert_eq!(sum, TrafficCounts { reads: 5, ..TrafficCounts::default() });
/// let bytes = &TrafficCounts::COUNTERS[2];
/// assert_eq!((bytes.name, bytes.metric), ("bytes", Some("bytes_total")));
/// assert_eq!(bytes.help(), "Bytes of the answers.");
/// ```
#[macro_export]
macro_rules! counters {
    (
        $(#[$live:meta])* pub struct $Live:ident;
        $(#[$plain:meta])* pub struct $Plain:ident;
        $(
            $(#[doc = $doc:literal])+ $name:ident: $kind:ident $unit:ident
            $(=> $metric:literal $({ $label:ident = $value:literal })? $($help:literal)?)?,
        )*
    ) => {
        $(#[$live])*
        pub struct $Live {
            $($(#[doc = $doc])+ pub $name: $crate::Counter,)*
        }

        impl $Live {
            /// Reads all counters, one after the other, so they are not of exactly one moment.
            #[must_use]
            pub fn snapshot(&self) -> $Plain {
                $Plain { $($name: self.$name.get(),)* }
            }

            /// Sets all counters, one after the other. Only the owning thread may call it.
            pub fn set(&self, counts: &$Plain) {
                $(self.$name.set(counts.$name);)*
            }
        }

        $crate::counters! {
            $(#[$plain])* pub struct $Plain;
            $(
                $(#[doc = $doc])+ $name: $kind $unit
                $(=> $metric $({ $label = $value })? $($help)?)?,
            )*
        }
    };
    (
        $(#[$plain:meta])* pub struct $Plain:ident;
        $(
            $(#[doc = $doc:literal])+ $name:ident: $kind:ident $unit:ident
            $(=> $metric:literal $({ $label:ident = $value:literal })? $($help:literal)?)?,
        )*
    ) => {
        $(#[$plain])*
        pub struct $Plain {
            $($(#[doc = $doc])+ pub $name: u64,)*
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

        impl $crate::Described for $Plain {
            const COUNTERS: &'static [$crate::CounterDescription<Self>] = &[$(
                $crate::CounterDescription {
                    name: stringify!($name),
                    kind: $crate::CounterKind::$kind,
                    unit: $crate::CounterUnit::$unit,
                    metric: $crate::counters!(@first $($metric)?),
                    label: $crate::counters!(@first $($((stringify!($label), $value))?)?),
                    doc: $crate::counters!(@help $($($help)?)?; concat!($($doc, "\n"),+)),
                    value: |counts| counts.$name,
                },
            )*];
        }
    };
    (@first) => { None };
    (@first $it:expr) => { Some($it) };
    (@help; $doc:expr) => { $doc };
    (@help $help:literal; $doc:expr) => { $help };
}
