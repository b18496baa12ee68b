//! [`WayProbes`]: the probes of ways under way. A way whose address is silent delays no other.

use std::collections::BTreeMap;

use rblk_operate::said_once;
use tokio::task::{Id, JoinSet};

use crate::engine::ways::WayIndex;

/// See the module. A way has one probe at most.
#[derive(Debug, Default)]
pub(super) struct WayProbes {
    running: JoinSet<Option<String>>,
    ways: BTreeMap<Id, WayIndex>,
}

impl WayProbes {
    /// Begins a probe of a way.
    pub(super) fn begin(
        &mut self,
        way: WayIndex,
        probe: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        let fault = async move { probe.await.err().map(|error| said_once(error.as_ref())) };
        let task = self.running.spawn(fault);
        self.ways.insert(task.id(), way);
    }

    /// Ends all of them. None is reported.
    pub(super) fn abort(&mut self) {
        self.running = JoinSet::new();
        self.ways.clear();
    }

    /// The next way whose probe has ended, and why this run of the target does not answer there;
    /// `None` if it does. Waits for ever without a probe. Cancel safe.
    pub(super) async fn next(&mut self) -> (WayIndex, Option<String>) {
        while let Some(ended) = self.running.join_next_with_id().await {
            let (id, fault) = match ended {
                Ok(ended) => ended,
                Err(error) => (error.id(), Some(error.to_string())),
            };
            if let Some(way) = self.ways.remove(&id) {
                return (way, fault);
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn way(place: usize) -> WayIndex {
        WayIndex::new(place).unwrap()
    }

    #[tokio::test]
    async fn a_probe_that_waits_outlives_those_that_begin_later() {
        let mut probes = WayProbes::default();
        let (answer, silent) = tokio::sync::oneshot::channel::<()>();
        probes.begin(way(1), async move { Ok(silent.await?) });
        probes.begin(way(2), async { anyhow::bail!("refused") });
        assert_eq!(probes.next().await, (way(2), Some("refused".to_owned())));
        probes.begin(way(3), async { Ok(()) });
        assert_eq!(probes.next().await, (way(3), None));
        answer.send(()).unwrap();
        assert_eq!(probes.next().await, (way(1), None), "its probe was never given up");
        // Without a probe, nothing comes.
        let idle = tokio::time::timeout(Duration::from_millis(10), probes.next()).await;
        assert!(idle.is_err());
    }

    #[tokio::test]
    async fn a_probe_that_panics_is_a_fault_of_its_way() {
        let mut probes = WayProbes::default();
        probes.begin(way(4), async { panic!("this is a test") });
        let (at, fault) = probes.next().await;
        assert!(at == way(4) && fault.is_some_and(|why| why.contains("panic")));
        probes.begin(way(5), std::future::pending());
        probes.abort();
        probes.begin(way(6), async { Ok(()) });
        assert_eq!(probes.next().await, (way(6), None));
    }
}
