//! [`CounterPublisher`]: publishes the poller's counters of a queue's path.

use std::sync::Arc;

use rblk_fabric::PollerCounters;

use crate::engine::{Engine, QueueStats};

/// Busy turns after which the poller's counters are published. Every sleep publishes them, too.
const PUBLISH_TURNS: u32 = 64;

/// The published counters of the path's poller.
#[derive(Debug)]
pub(super) struct CounterPublisher {
    stats: Arc<QueueStats>,
    published: PollerCounters,
    busy_turns: u32,
}

impl CounterPublisher {
    /// For a queue without a path.
    pub(super) fn new(stats: Arc<QueueStats>) -> Self {
        Self { stats, published: PollerCounters::default(), busy_turns: 0 }
    }

    /// The published counters.
    pub(super) fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// The queue has a new path. The counters of its poller are zero.
    pub(super) fn new_path(&mut self) {
        self.published = PollerCounters::default();
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
        // The last counts of a path that ended are not published.
        let Some(poller) = engine.poller_mut() else { return };
        let (counters, published) = (poller.counters(), &self.published);
        self.stats.arms.add(counters.arms - published.arms);
        self.stats.events.add(counters.events - published.events);
        self.stats.link_calls.add(counters.link_calls - published.link_calls);
        self.published = counters;
    }
}
