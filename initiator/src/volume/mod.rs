//! An open volume: the session with its target, its queues, and the course of both when the target
//! is lost and comes back.

pub mod admin;
pub(crate) mod begin;
pub mod course;
pub mod error;
mod history;
pub mod host_identity;
pub(crate) mod link;
mod link_lines;
pub(crate) mod queues;
pub(crate) mod reconnect;
pub mod replay;
pub mod resolve_unflushed;
pub mod session;
pub(crate) mod setup;
pub(crate) mod shared_memory;
mod stuck_data;
pub(crate) mod target_keys;
pub(crate) mod task;
pub mod ways;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use rblk_config::MountConfig;
use rblk_fabric::Region;
use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{Status, VolumeFlags};
use tokio::sync::mpsc;

use crate::engine::DigestFailure;
use crate::engine::durability::Durability;
use crate::engine::path::Path;
use crate::queue::{EngineDriverParts, FromQueue};
use course::Facts;
use link::{AfterNote, TargetLink};
use queues::{QueuePlan, Queues};
use session::{Credentials, Session};
use setup::Setup;

/// Errno for a request that failed.
const EIO: i32 = 5;
/// Errno for requests to a removed volume.
const ENODEV: i32 = 19;
/// Time for the target to flush what is left at the end, and again to hear of the end.
pub(crate) const LOGOUT: Duration = Duration::from_secs(2);
/// These times by force.
pub(crate) const FORCE_LOGOUT: Duration = Duration::from_millis(250);

/// An open volume: the link to its target and its queues. A disk, a program and a guest have the
/// same one.
#[derive(Debug)]
pub(crate) struct Volume {
    config: Arc<MountConfig>,
    link: TargetLink,
    queues: Queues,
    durability: Arc<Durability>,
    // Acknowledged writes may be in the target's memory only.
    volatile_cache: bool,
    // Memory of all queues for retained writes.
    retain_bytes: u64,
}

impl Volume {
    /// A volume with its first session, and why each address before that of the session does not
    /// work.
    fn connected(
        config: &MountConfig,
        setup: Setup,
        facts: Facts,
        session: (Session, Vec<String>),
    ) -> Self {
        let config = Arc::new(config.clone());
        let durability = Durability::new(config.on_loss);
        let link = TargetLink::connected(&config, setup, facts, &durability, session);
        Self::of(config, link, durability)
    }

    /// A volume whose target is lost, and which reconnects when it is attended.
    pub(crate) fn lost(
        config: &MountConfig,
        setup: Setup,
        facts: Facts,
        durability: Arc<Durability>,
    ) -> Self {
        let config = Arc::new(config.clone());
        let link = TargetLink::lost(&config, setup, facts, &durability, Instant::now());
        Self::of(config, link, durability)
    }

    fn of(config: Arc<MountConfig>, link: TargetLink, durability: Arc<Durability>) -> Self {
        let volatile_cache = link.facts().has(VolumeFlags::VOLATILE_CACHE);
        let queues = Queues::default();
        Self { config, link, queues, durability, volatile_cache, retain_bytes: 0 }
    }

    /// How it is used.
    pub(crate) fn config(&self) -> &Arc<MountConfig> {
        &self.config
    }

    /// The link to its target.
    pub(crate) fn link(&self) -> &TargetLink {
        &self.link
    }

    /// How it is reached.
    pub(crate) fn setup(&self) -> &Setup {
        self.link.setup()
    }

    /// What is known of it and of its target.
    pub(crate) fn facts(&self) -> &Facts {
        self.link.facts()
    }

    /// Its queues.
    pub(crate) fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Which acknowledged writes are durable.
    pub(crate) fn durability(&self) -> &Arc<Durability> {
        &self.durability
    }

    /// Whether acknowledged writes may be in the target's memory only.
    pub(crate) fn has_volatile_cache(&self) -> bool {
        self.volatile_cache
    }

    /// Memory of all queues for retained writes.
    pub(crate) fn retain_bytes(&self) -> u64 {
        self.retain_bytes
    }

    /// Whether requests wait for the target. They do not when the volume is over, for then they
    /// fail.
    pub(crate) fn waits_for_target(&self) -> bool {
        !self.link.is_connected() && !self.link.is_over()
    }

    /// What is durable is known from this account from now on. Told before there are queues.
    pub(crate) fn inherit(&mut self, account: &Arc<Durability>) {
        self.durability = Arc::clone(account);
        self.link.inherit(account);
    }

    /// Every session from the next one on is made with these keys.
    pub(crate) fn change_keys(
        &mut self,
        config: Arc<MountConfig>,
        credentials: Option<Arc<Credentials>>,
    ) {
        self.link.change_keys(&config, credentials);
        self.config = config;
    }

    /// The driver has the shared memory, and made so many queues.
    ///
    /// # Errors
    /// The system does not tell which pages the shared memory has.
    pub(crate) fn is_registered(&mut self, queues: u16) -> anyhow::Result<()> {
        self.link.shared_memory_is_registered()?;
        self.link.set_queues(queues);
        Ok(())
    }

    /// Does what is due, and then the next thing that happens between the volume and its target.
    /// Returns what follows as soon as the note is written. Cancel safe.
    pub(crate) async fn attend(&mut self) -> Option<AfterNote> {
        self.link.attend(&mut self.queues).await
    }

    /// The note is written, or could not be: what follows is done now.
    pub(crate) fn go_on(&mut self, after: AfterNote, is_noted: bool) {
        self.link.go_on(after, is_noted, &mut self.queues);
    }

    /// As [`Self::attend`], for a volume that has no note.
    pub(crate) async fn attend_without_note(&mut self) {
        if let Some(after) = self.attend().await {
            self.go_on(after, true);
        }
    }

    /// Keeps the session alive, and does nothing that is due. Cancel safe.
    pub(crate) async fn keep_alive(&mut self) {
        self.link.keep_alive(&mut self.queues).await;
    }

    /// Takes what a queue says.
    ///
    /// # Errors
    /// The queue broke.
    pub(crate) fn on_queue(&mut self, message: FromQueue) -> anyhow::Result<()> {
        match message {
            FromQueue::PathEnded { queue, end, dead, undestroyed } => {
                let way = dead.way;
                dead.retire(undestroyed);
                self.link.on_path_end((queue, way), end, &mut self.queues);
                Ok(())
            }
            FromQueue::DigestFailure { queue, failure } => {
                self.tell_digest_failure(queue, failure);
                Ok(())
            }
            FromQueue::Quiet { queue } => {
                self.link.on_quiet(queue, &mut self.queues);
                Ok(())
            }
            FromQueue::Stopped { queue, error } => {
                self.queues.stopped(queue);
                self.link.forget_queue(queue);
                match error {
                    Some(error) => Err(anyhow!("queue {queue} broke: {error}")),
                    None => Ok(()),
                }
            }
        }
    }

    /// Logs the requests that failed with damaged data.
    fn tell_digest_failure(&self, queue: u16, failure: DigestFailure) {
        let DigestFailure { io, count } = failure;
        tracing::error!(
            volume = self.config.volume,
            queue,
            op = ?io.op,
            lba = io.lba.0,
            bytes = io.data_bytes,
            count,
            "EIO: data did not come through, twice: its digest does not fit. Memory, a driver, a switch or a card on the way changes data"
        );
    }

    /// Makes so many queues, by `make`, and says what each is made of.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn make_queues<Q>(
        &mut self,
        count: u16,
        outbox: &mpsc::UnboundedSender<FromQueue>,
        make: impl FnOnce(&mut Queues, &QueuePlan<'_>) -> anyhow::Result<Q>,
    ) -> anyhow::Result<Q> {
        let retain_bytes = self.retain_bytes_of_each(count);
        self.retain_bytes = wide64(retain_bytes) * u64::from(count);
        let plan = QueuePlan {
            setup: self.link.setup(),
            block_size: self.link.facts().volume.block_size,
            durability: self.volatile_cache.then_some(&self.durability),
            retain_bytes,
            ways: self.link.way_policy(),
            pulse: link::pulse(&self.config),
            spin: self.config.transport.spin,
            outbox,
        };
        let made = make(&mut self.queues, &plan);
        if self.link.facts().fenced.is_some() {
            // Permanent: no request waits.
            self.queues.fail(Some(Status::Fenced.errno()));
        }
        made
    }

    /// Makes the queues for a front end that drives them itself.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(crate) fn give_queues(
        &mut self,
        outbox: &mpsc::UnboundedSender<FromQueue>,
    ) -> anyhow::Result<Vec<EngineDriverParts>> {
        self.make_queues(self.setup().queues, outbox, Queues::give)
    }

    /// Memory for retained writes of each queue; 0 retains none.
    fn retain_bytes_of_each(&self, queues: u16) -> usize {
        let asked = self.config.retain;
        // With other writers, an older copy must not replace a newer write of another host.
        if asked.0 == 0 || self.facts().has(VolumeFlags::READ_ONLY) || self.config.shared {
            return 0;
        }
        if !self.volatile_cache {
            tracing::info!(
                "writes of this volume need not be retained: they are durable at once, or gone with it"
            );
            return 0;
        }
        let share = wide(asked.0 / u64::from(queues.max(1)));
        if share < wide(self.setup().wish.io_max_bytes) {
            tracing::warn!(
                retain = %asked,
                queues,
                "longer writes than {share} bytes do not fit a queue's share of retain, and are made durable one by one"
            );
        }
        share
    }

    /// Gives the queues their first paths.
    pub(crate) fn connect_queues(&mut self, paths: Vec<Path>) {
        self.queues.connect((0..).zip(paths).collect());
    }

    /// Replaces the memories that hold the queues' data. The queues know the new ones already, and
    /// have no path that was made with others.
    pub(crate) fn replace_shared(&mut self, regions: Arc<[Arc<Region>]>) {
        self.link.replace_shared(regions, &mut self.queues);
    }

    /// Fails every request, also the later ones.
    pub(crate) fn fail_requests(&mut self) {
        self.queues.fail(Some(EIO));
    }

    /// Fails waiting requests, and waits for no answers to sent ones.
    pub(crate) fn give_up_requests(&mut self) {
        if !self.link.is_over() {
            self.fail_requests();
        }
        self.queues.disconnect();
    }

    /// A try to connect goes no further.
    pub(crate) fn dismiss_tries(&mut self) {
        self.link.dismiss_tries();
    }

    /// The queues leave their device, when what was sent is answered or after that time. A session
    /// that a try has can be resumed.
    pub(crate) fn leave(&mut self, within: Duration) {
        self.link.abort_tries();
        self.queues.leave(within);
    }

    /// Waits for the threads of the queues to end.
    pub(crate) fn join_queues(&mut self) {
        self.queues.join();
    }

    /// Takes what the queues said until now. What is left of their paths is destroyed here.
    pub(crate) fn take_last_words(&mut self, from_queues: &mut mpsc::UnboundedReceiver<FromQueue>) {
        while let Ok(message) = from_queues.try_recv() {
            let _ = self.on_queue(message);
        }
    }

    /// Has the target make the acknowledged writes durable. Returns whether it did. No queue has a
    /// path any more.
    pub(crate) async fn flush(&mut self, within: Duration) -> bool {
        self.link.flush(&self.queues, within).await
    }

    /// Ends the session. With `logout` the target hears of it, within that time; without, the
    /// session can be resumed.
    pub(crate) async fn end_session(&mut self, logout: Option<Duration>) {
        self.link.end_session(logout).await;
    }

    /// Ends a volume whose queues have left: what is left of their paths is destroyed, what was
    /// acknowledged is flushed as far as the target does that in time, and the target hears that
    /// the session is over.
    pub(crate) async fn end(
        &mut self,
        limit: Duration,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) {
        self.link.dismiss_tries();
        self.take_last_words(from_queues);
        self.flush(limit).await;
        self.end_session(Some(limit)).await;
    }

    /// The link and the queues, for tests that stand between them.
    #[cfg(test)]
    pub(crate) fn parts_mut(&mut self) -> (&mut TargetLink, &mut Queues) {
        (&mut self.link, &mut self.queues)
    }

    /// Sets what the volume retains.
    #[cfg(test)]
    pub(crate) fn set_retain_bytes(&mut self, bytes: u64) {
        self.retain_bytes = bytes;
    }

    /// Sets the account of what is durable, but not that of the link.
    #[cfg(test)]
    pub(crate) fn set_durability(&mut self, durability: Arc<Durability>) {
        self.durability = durability;
    }
}
