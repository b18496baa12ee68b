//! [`Publisher`]: publishes what the poller of a queue's path counts.

use std::sync::Arc;

use rblk_fabric::PollerCounters;

use crate::engine::{Engine, QueueStats};

/// Busy turns after which the poller's counters are published. They are published before every
/// sleep, too.
const PUBLISH_TURNS: u32 = 64;

/// Which counters of the path's poller are published.
#[derive(Debug)]
pub(super) struct Publisher {
    stats: Arc<QueueStats>,
    published: PollerCounters,
    busy_turns: u32,
}

impl Publisher {
    /// For a queue without a path.
    pub(super) fn new(stats: Arc<QueueStats>) -> Self {
        Self { stats, published: PollerCounters::default(), busy_turns: 0 }
    }

    /// Where the counters go.
    pub(super) fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// The queue has a new path, whose poller counted nothing yet.
    pub(super) fn new_path(&mut self) {
        self.published = PollerCounters::default();
    }

    /// A turn did something.
    pub(super) fn after_work(&mut self, engine: &mut Engine) {
        self.busy_turns += 1;
        if self.busy_turns >= PUBLISH_TURNS {
            self.publish(engine);
        }
    }

    /// Publishes what the path's poller counted since the last time.
    pub(super) fn publish(&mut self, engine: &mut Engine) {
        self.busy_turns = 0;
        self.stats.in_flight.set(engine.outstanding() as u64);
        // What the last path counted since then is not published.
        let Some(poller) = engine.poller_mut() else { return };
        let (counters, published) = (poller.counters(), &self.published);
        self.stats.arms.add(counters.arms - published.arms);
        self.stats.events.add(counters.events - published.events);
        self.stats.link_calls.add(counters.link_calls - published.link_calls);
        self.published = counters;
    }
}
