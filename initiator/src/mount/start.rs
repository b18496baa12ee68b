//! [`start_device`]: exposes a device with running queues, while the mount goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;

use super::end_signals::EndSignals;
use super::mounted::Mount;
use crate::front::ublk::Device;
use crate::queue::FromQueue;

/// Time for START_DEV, which reads the partition table through this process.
const START_DEADLINE: Duration = Duration::from_secs(30);
// The states of a start: running, target lost, given up.
const RUNS: u8 = 0;
const LOST: u8 = 1;
const OVER: u8 = 2;

/// Exposes a device with running queues, or ends the recovery of one.
///
/// The kernel may read a new disk meanwhile. So the mount keeps its session, and reconnects a lost
/// one without a deadline. On a signal to end, the start finishes with failing requests; the signal
/// is kept for the serving that follows.
///
/// # Errors
/// The driver refuses, a queue broke, or the start takes too long with a connected target.
pub(super) async fn start_device(
    mount: &mut Mount,
    mut device: Device,
    from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    signals: &mut EndSignals,
) -> anyhow::Result<Device> {
    let is_new = !mount.is_recovered();
    let progress = Arc::new(AtomicU8::new(RUNS));
    let watched = Arc::clone(&progress);
    // START_DEV waits for the queue threads, and on older kernels reads the disk: so it runs on
    // another thread.
    let mut starting = tokio::task::spawn_blocking(move || {
        let mut budget = StartBudget::new(START_DEADLINE);
        let started = device.start_while(&mut |waited| match watched.load(Ordering::Relaxed) {
            OVER => false,
            progress => budget.lasts(waited, progress == LOST),
        });
        (device, started)
    });
    let (mut broke, mut told) = (None, false);
    let (device, started) = loop {
        // Once requests fail, nothing waits for the target.
        let lost = is_new && mount.volume().waits_for_target() && !told;
        let now = match (&broke, lost) {
            (Some(_), _) => OVER,
            (None, true) => LOST,
            (None, false) => RUNS,
        };
        progress.store(now, Ordering::Relaxed);
        tokio::select! {
            done = &mut starting => break done?,
            Some(message) = from_queues.recv() => {
                if let Err(error) = mount.volume_mut().on_queue(message) {
                    broke = Some(error);
                }
            }
            // A recovered device gets its old requests now. They must come before any path.
            () = mount.attend(), if is_new => {}
            () = signals.next(), if !told => {
                told = true;
                if is_new {
                    mount.volume_mut().fail_requests();
                }
            }
        }
    };
    if told {
        signals.keep();
    }
    if let Some(error) = broke {
        return Err(error);
    }
    mount.set_disk(&started?);
    // By the sequence number of the disk, udev finds the names of the disk after this process is
    // dead, too.
    mount.write_note();
    Ok(device)
}

/// The time left for a start. It stands still while the target is lost.
#[derive(Debug)]
struct StartBudget {
    left: Duration,
    seen: Duration,
}

impl StartBudget {
    fn new(left: Duration) -> Self {
        Self { left, seen: Duration::ZERO }
    }

    /// Whether time is left after `passed`. `lost`: the target was lost since the last call.
    fn lasts(&mut self, passed: Duration, lost: bool) -> bool {
        let step = passed.saturating_sub(self.seen);
        self.seen = passed;
        if !lost {
            self.left = self.left.saturating_sub(step);
        }
        !self.left.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_for_a_start_runs_only_while_the_target_is_there() {
        let mut budget = StartBudget::new(Duration::from_secs(30));
        let mut lasts = |seconds, lost| budget.lasts(Duration::from_secs(seconds), lost);
        assert!(lasts(10, false));
        // Lost for a day.
        assert!(lasts(86_400, true));
        assert!(lasts(86_419, false));
        assert!(!lasts(86_420, false));
        assert!(!lasts(90_000, true), "it is over");
    }
}
