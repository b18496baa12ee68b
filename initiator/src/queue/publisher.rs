//! [`CounterPublisher`]: publishes the poller's counters of a queue's path.

use std::sync::Arc;

use rblk_fabric::PollerCounters;

use crate::engine::ways::{PLACES, WayIndex};
use crate::engine::{Engine, QueueStats};

/// Busy turns after which the poller's counters are published. Every sleep publishes them, too.
const PUBLISH_TURNS: u32 = 64;

/// The published counters of the pollers of the paths.
#[derive(Debug)]
pub(super) struct CounterPublisher {
    stats: Arc<QueueStats>,
    // Of the path of each way.
    published: [PollerCounters; PLACES],
    busy_turns: u32,
}

impl CounterPublisher {
    /// For a queue without a path.
    pub(super) fn new(stats: Arc<QueueStats>) -> Self {
        Self { stats, published: Default::default(), busy_turns: 0 }
    }

    /// The published counters.
    pub(super) fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// The queue has a new path of that way. The counters of its poller are zero.
    pub(super) fn new_path(&mut self, way: WayIndex) {
        self.published[way.get()] = PollerCounters::default();
    }

    /// Counts a busy turn.
    pub(super) fn after_work(&mut self, engine: &mut Engine) {
        self.busy_turns += 1;
        if self.busy_turns >= PUBLISH_TURNS {
            self.publish(engine);
        }
    }

    /// Publishes the growth of the poller's counters since the last time.
    pub(super) fn publish(&mut self, engine: &mut Engine) {
        self.busy_turns = 0;
        self.stats.in_flight.set(engine.outstanding() as u64);
        let Self { stats, published, .. } = self;
        // The last counts of a path that ended are not published.
        engine.each_poller(|way, poller| {
            let (counters, published) = (poller.counters(), &mut published[way.get()]);
            stats.arms.add(counters.arms - published.arms);
            stats.events.add(counters.events - published.events);
            stats.link_calls.add(counters.link_calls - published.link_calls);
            *published = counters;
        });
    }
}
