//! [`Round`]: a volume, mounted twice, with its writers and its fault.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rblk_rig::seed::Random;
use rblk_tests::lab::{
    DEADLINE, Diary, FaultyDisk, Lab, MountFlags, Mounted, Target, begin, until,
};

use super::plan::{Plan, Scene};
use super::writer::{Shared, Writer};
use super::{WRITERS, by_turns};

/// Time for writers to reach their syncs, and for syncs to end. No judgement depends on it, only
/// the number of syncs that overlap.
const GATHER: Duration = Duration::from_millis(30);

/// The volume of a round, mounted twice, with its writers at work.
pub(super) struct Round<'l> {
    plan: Arc<Plan>,
    mounts: [Mounted<'l>; 2],
    shared: Arc<Shared>,
    ready: Receiver<()>,
    go: Vec<Sender<()>>,
    diaries: Vec<Receiver<Diary>>,
}

impl<'l> Round<'l> {
    pub(super) fn start(lab: &'l Lab, plan: &Arc<Plan>, volume: &str) -> Self {
        let address = if plan.rdma { lab.rdma() } else { lab.tcp() };
        let mounts = ["a", "b"].map(|mount| {
            let flags = MountFlags::new(address.clone(), volume).name(&format!("{volume}{mount}"));
            // The path survives even if the machine stands still.
            let flags = flags.flag("--detect", "30s").flag("--queue-depth", "16");
            Mounted::new(lab, &flags.switch("--shared"))
        });
        let shared = Arc::new(Shared::default());
        let (sender, ready) = channel();
        let (mut go, mut diaries) = (Vec::new(), Vec::new());
        for (number, way) in (0u64..).zip(plan.ways) {
            let device = mounts[by_turns(number, 2)].device();
            let (file, durable) = Writer::open(device, way)
                .unwrap_or_else(|e| panic!("{plan}: opening {}: {e}", device.display()));
            let (go_sender, go_receiver) = channel();
            let writer = Writer {
                plan: Arc::clone(plan),
                way,
                diary: Diary::new(plan.seed, number),
                random: Random::new(plan.seed ^ (number + 1) << 56),
                file,
                durable,
                shared: Arc::clone(&shared),
                ready: Some(sender.clone()),
                go: go_receiver,
            };
            go.push(go_sender);
            diaries.push(begin(move || writer.work()));
        }
        Self { plan: Arc::clone(plan), mounts, shared, ready, go, diaries }
    }

    /// Waits until `writers` are ready for the fault, or have ended.
    fn wait_ready(&self, writers: usize) {
        for _ in 0..writers {
            match self.ready.recv_timeout(2 * DEADLINE) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => panic!("{}: the writers hang", self.plan),
            }
        }
    }

    pub(super) fn fault_comes(&self, target: &Target<'_>, volume: &str, disk: &FaultyDisk) {
        let held = || {
            std::thread::sleep(GATHER);
            self.plan.standstill.then(|| target.freeze())
        };
        let still = match self.plan.scene {
            Scene::DuringSyncs => {
                self.wait_ready(1);
                disk.begin(held)
            }
            Scene::BetweenSyncs => {
                self.wait_ready(WRITERS);
                if self.plan.direct {
                    // The kernel has no pages to lose. The fault stays, for writes and syncs.
                    disk.begin(|| self.go());
                    None
                } else {
                    until("the cache to have written back", DEADLINE, || {
                        let status = target.status();
                        let found = status.volumes.iter().find(|v| v.name == volume);
                        found.filter(|v| v.counts.dirty_bytes == 0).map(|_| ())
                    });
                    disk.begin(|| {});
                    // This caller gets the error, too; the test knows it already.
                    let _ = disk.write_back();
                    disk.mend(|| {
                        self.go();
                        held()
                    })
                }
            }
        };
        if still.is_some() {
            std::thread::sleep(GATHER);
        }
        drop(still);
        self.shared.faulty.store(true, Ordering::Relaxed);
    }

    /// Lets writers that wait for the fault continue.
    fn go(&self) {
        for go in &self.go {
            // A writer that has ended does not listen.
            let _ = go.send(());
        }
    }

    pub(super) fn finish(self) -> Vec<Diary> {
        let Self { plan, mounts, diaries, .. } = self;
        let diary = |receiver: Receiver<Diary>| {
            receiver.recv_timeout(3 * DEADLINE).unwrap_or_else(|e| panic!("{plan}: a writer: {e}"))
        };
        let diaries = diaries.into_iter().map(diary).collect();
        for mounted in mounts {
            mounted.umount_by_force();
        }
        diaries
    }
}
