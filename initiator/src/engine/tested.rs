//! The self-test of a path before a queue has the path: [`Path::test`].
//!
//! A target with keys gives a connection 30 s to prove itself, or 5 s if it comes from an address
//! other than its session's. The proof is in the self-test, which the engine of a queue sends. The
//! queue of a program may be driven much later than that. Then its connection is dead, and with it
//! the session of all queues. So control tests the paths of programs itself, and a tested path
//! waits for its queue as long as the session lives.

use std::time::{Duration, Instant};

use rblk_fabric::{Completion, WcStatus};

use super::active_path::{ActivePath, LaneArrival, broken};
use super::answer::CommandAnswer;
use super::path::{DeadPath, Path};
use super::stats::QueueStats;
use super::{EIO, PathEnd, SELF_TEST_DEADLINE};

/// How often control polls for the answers of its self-tests.
const LOOK: Duration = Duration::from_millis(1);
/// Completions taken at once.
const REAP: usize = 16;

/// A path under test. If the test is given up, nothing is left of the path.
struct Testing(Option<ActivePath>);

impl Testing {
    fn end(&mut self) -> Option<DeadPath> {
        self.0.take().map(ActivePath::end)
    }
}

impl Drop for Testing {
    fn drop(&mut self) {
        if let Some(dead) = self.end() {
            dead.retire(());
        }
    }
}

impl Path {
    /// Tests the path, and returns it. The remains of a path that fails are destroyed.
    ///
    /// # Errors
    /// The reason for the failure.
    pub async fn test(self) -> Result<Self, PathEnd> {
        if self.tested.is_some() {
            return Ok(self);
        }
        let begun = Instant::now();
        let path = ActivePath::begin(self, true, begun).map_err(|dead| {
            dead.retire(());
            PathEnd::Unusable
        })?;
        let stats = QueueStats::default();
        let mut testing = Testing(Some(path));
        loop {
            // The path is set until the loop ends.
            let Some(path) = testing.0.as_mut() else { return Err(PathEnd::Unusable) };
            if path.test_turn(&stats)? {
                break;
            }
            if begun.elapsed() > SELF_TEST_DEADLINE {
                return Err(PathEnd::SelfTest);
            }
            tokio::time::sleep(LOOK).await;
        }
        testing.0.take().map(ActivePath::into_path).ok_or(PathEnd::Unusable)
    }
}

impl ActivePath {
    /// Posts WRs and takes completions. Returns whether every lane has passed its test.
    fn test_turn(&mut self, stats: &QueueStats) -> Result<bool, PathEnd> {
        let not_posted = |_| PathEnd::Lost(WcStatus::Other(EIO.unsigned_abs()));
        self.post(stats).map_err(not_posted)?;
        // No CQ was armed, so the poller must be made to look.
        self.poller_mut().clear_event();
        let mut completions = [Completion::default(); REAP];
        loop {
            let polled = self.poller_mut().poll(&mut completions);
            let polled = polled.map_err(|_| PathEnd::Lost(WcStatus::Other(0)))?;
            for completion in &completions[..polled] {
                match self.take(completion)? {
                    LaneArrival::None => {}
                    LaneArrival::Immediate(answer) => self.test_answer(&answer)?,
                    LaneArrival::Responses { by, mut list, at } => {
                        while let Some(answer) = self.next_answer(by, &mut list, at) {
                            self.test_answer(&answer?)?;
                        }
                    }
                }
            }
            if polled < completions.len() {
                break;
            }
        }
        self.post(stats).map_err(not_posted)?;
        Ok(self.is_ready())
    }

    fn test_answer(&mut self, answer: &CommandAnswer) -> Result<(), PathEnd> {
        if answer.tag != self.terms().connection_tag() {
            return Err(broken("an answer to a command that was not sent"));
        }
        self.own_answer(answer).map(drop)
    }
}
