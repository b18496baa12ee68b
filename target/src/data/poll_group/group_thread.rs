//! The thread around a [`PollGroup`]: its mailbox, its ring, and its messages to control.
//!
//! A turn takes mail, lets the engine reap and post, and enters the ring at most once. While
//! there is work, the thread does not sleep. The thread sleeps in the ring, which wakes for I/O, CQ
//! events and mail. An idle target uses no CPU.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rblk_protocol::width::narrow;
use rblk_runtime::data_thread::{self, DataThread, Found, Turn, Woken};
use rblk_runtime::mailbox::{Receiver, Sender, mailbox};
use rblk_runtime::spin::{Hint, SpinMode};
use rblk_runtime::{Micros, Moment};
use tokio::sync::mpsc;

use super::other_groups::OtherGroups;
use super::{FromGroup, PollGroup, StepTicket, ToGroup};
use crate::cache::{ArenaEnds, Shard, Unsaved};
use crate::store::OpenStore;
use crate::store::uring::{FdToken, MAX_WATCHES, TurnSleep, UringStore, WatchSet};
use crate::volume::Volume;
use crate::volume::ids::VolumeIndex;
use rblk_operate::target::group_counts::Stats;
use rblk_operate::target::volume_counts::VolumeStats;

const MAIL: FdToken = FdToken(0);
const OTHERS: FdToken = FdToken(MAX_WATCHES - 1);
/// Pollers for which a poll group can sleep: its other watches are for mail and peers.
pub const POLLERS_MAX: usize = MAX_WATCHES as usize - 2;
/// Least time between two checks for refusals of the stores while the thread stops.
const REFUSALS_INTERVAL: Duration = Duration::from_millis(250);
/// Longest sleep without connections.
const LONG_SLEEP: Duration = Duration::from_secs(60);
/// Longest sleep with connections: a safety net for devices that lose an event.
const IDLE_SLEEP: Duration = Duration::from_secs(1);
/// Least time between two checks for peers that are silent or take no data, in microseconds.
const LISTEN_INTERVAL_US: u64 = 250_000;
/// A thread with connections that did not run for this many microseconds was stopped: by a
/// debugger, or with a paused machine.
const PAUSE_US: u64 = 4_000_000;
/// Least time between two publications of the counters while there is work, in microseconds. A
/// sleep also publishes them.
const PUBLISH_INTERVAL_US: u64 = 1000;
/// Most busy turns without a publication.
const PUBLISH_TURNS: u32 = 64;
/// Sleep while a deadline of the engine runs.
const SHORT_SLEEP: Duration = Duration::from_millis(100);

/// Control's end of a running poll group.
#[derive(Debug)]
pub struct GroupHandle {
    /// Mail to the thread.
    pub mail: Sender<ToGroup>,
    /// Its counters.
    pub stats: Arc<Stats>,
    volumes: Vec<(VolumeIndex, Arc<VolumeStats>)>,
    thread: Option<JoinHandle<()>>,
}

impl GroupHandle {
    /// Makes the poll group serve another volume.
    ///
    /// # Errors
    /// The thread takes no mail.
    pub(crate) fn add_volume(
        &mut self,
        volume: Arc<Volume>,
        backing: Option<OpenStore>,
    ) -> io::Result<()> {
        let stats = self.new_stats(volume.index);
        let mail =
            ToGroup::AddVolume { volume, backing, stats, registered: Vec::new(), step: None };
        self.mail.send(mail).map_err(|_| io::Error::other("a poll group takes no mail"))
    }

    /// New counters for the poll group's part of a volume.
    pub(crate) fn new_stats(&mut self, volume: VolumeIndex) -> Arc<VolumeStats> {
        let stats = Arc::new(VolumeStats::default());
        // A resized volume in memory is made again.
        self.forget_volume(volume);
        self.volumes.push((volume, Arc::clone(&stats)));
        stats
    }

    /// Drops the counters of a volume that the poll group no longer serves.
    pub(crate) fn forget_volume(&mut self, volume: VolumeIndex) {
        self.volumes.retain(|(index, _)| *index != volume);
    }

    /// The poll group's counters of a volume.
    #[must_use]
    pub(crate) fn volume_stats(&self, volume: VolumeIndex) -> Option<&VolumeStats> {
        self.volumes.iter().find(|(index, _)| *index == volume).map(|(_, stats)| &**stats)
    }

    /// A poll group that only has a mailbox.
    #[cfg(test)]
    pub(crate) fn without_thread(mail: Sender<ToGroup>) -> Self {
        Self { mail, stats: Arc::default(), volumes: Vec::new(), thread: None }
    }

    /// Waits for the thread to end, after [`ToGroup::Stop`].
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // `FromGroup::Stopped` has reported its failure.
            let _ = thread.join();
        }
    }
}

/// Placement and spin policy of a poll group's thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// CPU to pin to.
    pub cpu: Option<u16>,
    /// Time to look for work before a sleep.
    pub spin: SpinMode,
    /// Commands that take at least this long are reported; `None`: no reports.
    pub slow_io: Option<Duration>,
    /// Time limit of a stop, in which running work ends and dirty blocks go to the stores.
    pub stop_timeout: Duration,
}

/// Starts a poll group.
///
/// # Errors
/// No thread, eventfd or ring could be made.
pub fn start(
    index: usize,
    shard: Shard<UringStore>,
    others: OtherGroups,
    tuning: Tuning,
    to_control: mpsc::UnboundedSender<FromGroup>,
) -> io::Result<GroupHandle> {
    let (mail, receiver) = mailbox(4096)?;
    let stats = Arc::new(Stats::default());
    let mut group = PollGroup::new(index, shard, others, Arc::clone(&stats), Instant::now());
    if let Some(threshold) = tuning.slow_io {
        group.tell_slow_ios(threshold);
    }
    let thread_stats = Arc::clone(&stats);
    let (begin, begun) = std::sync::mpsc::sync_channel(1);
    let thread =
        std::thread::Builder::new().name(format!("poll-group-{index}")).spawn(move || {
            if let Some(cpu) = tuning.cpu {
                pin(cpu);
            }
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let made = GroupThread::new(group, receiver, thread_stats, to_control.clone());
                let (made, result) = match made {
                    Ok(thread) => (Some(thread), Ok(())),
                    Err(error) => (None, Err(error)),
                };
                // An error means that no caller waits for it.
                let _ = begin.send(result);
                let Some(mut thread) = made else { return Ok(Vec::new()) };
                thread.stop.timeout = tuning.stop_timeout;
                let ended = data_thread::run(&mut thread, tuning.spin);
                // A thread that failed may still have lent memory, and its shard goes with it.
                let _ends = ArenaEnds::begin();
                drop(thread);
                ended
            }));
            let (unsaved, error) = match result {
                Ok(Ok(unsaved)) => (unsaved, None),
                Ok(Err(error)) => (Vec::new(), Some(error.to_string())),
                Err(_) => (Vec::new(), Some("it panicked".to_owned())),
            };
            let _ = to_control.send(FromGroup::Stopped { group: index, unsaved, error });
        })?;
    // A missing resource must keep the target from starting, not end it later.
    begun.recv().map_err(|_| io::Error::other("the thread of a poll group ended"))??;
    Ok(GroupHandle { mail, stats, volumes: Vec::new(), thread: Some(thread) })
}

fn pin(cpu: u16) {
    use nix::sched::{CpuSet, sched_setaffinity};
    let mut set = CpuSet::new();
    let pinned = set
        .set(usize::from(cpu))
        .and_then(|()| sched_setaffinity(nix::unistd::Pid::from_raw(0), &set));
    if let Err(error) = pinned {
        tracing::warn!(cpu, %error, "cannot pin a poll group; it runs anywhere");
    }
}

/// A poll group with the other state of its thread: the loop is [`data_thread::run`].
struct GroupThread {
    group: PollGroup<UringStore>,
    mail: Receiver<ToGroup>,
    to_control: mpsc::UnboundedSender<FromGroup>,
    stats: Arc<Stats>,
    publisher: PublishTimes,
    served: ServedCounts,
    // The last check for silent peers.
    listened: Micros,
    stop: Stop,
    // The cause of the last wake-up.
    woken: WatchSet,
    // A device does its work in threads of this host.
    has_software_device: bool,
}

impl GroupThread {
    fn new(
        mut group: PollGroup<UringStore>,
        mail: Receiver<ToGroup>,
        stats: Arc<Stats>,
        to_control: mpsc::UnboundedSender<FromGroup>,
    ) -> io::Result<Self> {
        group.store_mut().watch(mail.event_fd(), MAIL)?;
        if let Some(fd) = group.others_mut().event_fd() {
            group.store_mut().watch(fd, OTHERS)?;
        }
        let now = Moment::from(Instant::now());
        Ok(Self {
            group,
            mail,
            to_control,
            stats,
            publisher: PublishTimes { published: now.us(), busy_turns: 0, is_behind: false },
            served: ServedCounts::default(),
            listened: now.us(),
            stop: Stop::default(),
            woken: WatchSet::default(),
            has_software_device: false,
        })
    }

    /// Checks for silent peers at intervals.
    #[inline]
    fn listen(&mut self, now: Moment) {
        if now.us().since(self.listened) > LISTEN_INTERVAL_US {
            self.look_for_silent(now);
        }
    }

    #[cold]
    fn look_for_silent(&mut self, now: Moment) {
        let since_us = now.us().since(std::mem::replace(&mut self.listened, now.us()));
        if since_us > PAUSE_US {
            // The peers may have sent while this thread did not run.
            self.group.forgive(Duration::from_micros(since_us));
        } else {
            self.group.check_silence(now.instant());
        }
    }

    fn take_mail(&mut self, now: Instant) -> io::Result<()> {
        while let Some(message) = self.mail.receive() {
            if let Some((volume, backing, ticket)) = brought(&message) {
                let store = self.group.store_mut();
                if let Err(error) = store.add_volume(volume.index, backing.clone()) {
                    tracing::error!(volume = %volume.name, %error, "cannot serve a volume");
                    if let Some(ticket) = ticket {
                        let group = self.group.index();
                        let result = Err(error.to_string());
                        let _ = self.to_control.send(FromGroup::Stepped { group, ticket, result });
                    }
                    continue;
                }
            }
            let added = match &message {
                ToGroup::AddPoller { place, .. } => Some(*place),
                _ => None,
            };
            self.group.take_mail(message, now);
            if let Some(place) = added {
                self.watch_poller(place)?;
            }
        }
        Ok(())
    }

    /// Makes sleeps end when a newly added poller has an event.
    fn watch_poller(&mut self, place: usize) -> io::Result<()> {
        // A second descriptor would belong to a lone QP. A new poller has none.
        let Some((_, poller)) = self.group.pollers_mut().find(|(at, _)| *at == place) else {
            return Ok(());
        };
        self.has_software_device |= poller.caps().kernel_software;
        let fd = poller.event_fds()[0].map(|fd| fd.as_raw_fd());
        match fd {
            Some(fd) => self.group.store_mut().watch_asleep(fd, poller_token(place)),
            None => Ok(()),
        }
    }

    /// Sends the turn's messages to control. Returns whether the engine had a message.
    fn tell_control(&mut self, now: Instant) -> bool {
        while let Some((volume, backing)) = self.group.store_mut().take_lost() {
            let _ = self.to_control.send(FromGroup::LostWrites { volume, backing });
        }
        if let Some(slow) = self.group.take_slow_io(now) {
            let group = self.group.index();
            let _ = self.to_control.send(FromGroup::SlowIo { group, slow });
        }
        while let Some(failure) = self.group.take_store_failure() {
            let _ = self.to_control.send(FromGroup::StoreFailed(failure));
        }
        if !self.group.has_outbox() {
            return false;
        }
        let messages: Vec<FromGroup> = self.group.take_outbox().collect();
        for message in messages {
            if let FromGroup::PollerBroken { poller, .. } = message {
                // The descriptor of a broken CQ may stay readable, so its watch ends.
                self.group.store_mut().unwatch(poller_token(poller));
            }
            // Control is gone only when the process ends.
            let _ = self.to_control.send(message);
        }
        true
    }

    /// The volumes that are not safe, once the group is stopped or its stop took too long.
    fn ended(&mut self, now: Instant) -> Option<Vec<Unsaved>> {
        if !self.group.is_stopping() {
            return None;
        }
        if self.group.stopped().is_none() {
            let by = *self.stop.by.get_or_insert(now + self.stop.timeout);
            if now <= by {
                self.tell_refusals(now);
                return None;
            }
            tracing::error!(
                poll_group = self.group.index(),
                connections = self.group.has_connections(),
                "a store has not taken the dirty blocks or has not finished its I/O, or the kernel has not destroyed \
                 a QP (`connections` says so): giving up"
            );
        }
        self.group.publish_stats();
        Some(self.group.unsaved())
    }

    /// Reports the refusals of the stores to control, when they have changed.
    fn tell_refusals(&mut self, now: Instant) {
        let since = self.stop.looked.map(|at| now.saturating_duration_since(at));
        if since.is_some_and(|since| since < REFUSALS_INTERVAL) {
            return;
        }
        self.stop.looked = Some(now);
        let unsaved = self.group.refused();
        if unsaved != self.stop.told {
            self.group.publish_stats();
            self.stop.told.clone_from(&unsaved);
            let group = self.group.index();
            let _ = self.to_control.send(FromGroup::Refused { group, unsaved });
        }
    }
}

impl DataThread for GroupThread {
    // The volumes with acknowledged data that was not made durable.
    type End = Vec<Unsaved>;
    type Error = io::Error;

    fn turn(&mut self, moment: Moment) -> io::Result<ControlFlow<Vec<Unsaved>, Turn>> {
        let now = moment.instant();
        self.listen(moment);
        self.take_mail(now)?;
        let mut busy = self.group.turn(moment);
        if busy {
            self.publisher.after_work(&mut self.group, moment.us());
        }
        busy |= self.tell_control(now);
        if let Some(unsaved) = self.ended(now) {
            return Ok(ControlFlow::Break(unsaved));
        }
        // Taken in each turn, so that it covers this turn alone.
        let io = self.group.take_io();
        let found = Found::of(busy, busy && io);
        Ok(ControlFlow::Continue(Turn { found, may_sleep: !busy }))
    }

    fn awaited(&mut self) -> Option<Hint> {
        self.group.has_connections().then(|| self.served.hint(&self.stats))
    }

    fn arm(&mut self) {
        self.group.arm();
    }

    fn look_again(&mut self, now: Moment) -> Found {
        let mail = self.mail.has_some();
        let busy = self.group.turn(now) || self.group.has_outbox();
        // The peers come last: a message sent after this call writes to our event.
        let empty =
            !mail && !busy && !self.mail.has_some() && self.group.others_mut().fall_asleep();
        if empty {
            return Found::Nothing;
        }
        self.publisher.is_behind = true;
        Found::of(true, self.group.take_io())
    }

    fn publish(&mut self, now: Moment) {
        self.publisher.before_sleep(&self.group, now.us());
    }

    fn has_software_device(&mut self) -> bool {
        self.has_software_device
    }

    fn longest_sleep(&self, _: Instant) -> Duration {
        let short = self.group.has_deadline() || self.group.is_stopping();
        let longest = match (short, self.group.has_connections()) {
            (true, _) => SHORT_SLEEP,
            (false, true) => IDLE_SLEEP,
            (false, false) => LONG_SLEEP,
        };
        self.group.next_deadline().map_or(longest, |at| at.min(longest))
    }

    fn enter(&mut self, sleep: Option<Duration>) -> io::Result<Woken> {
        let store = self.group.store_mut();
        self.woken.clear();
        store.turn(sleep.map_or(TurnSleep::No, TurnSleep::Until), &mut self.woken)?;
        self.stats.ring_enters.set(store.counters().enters);
        if sleep.is_some() {
            self.stats.sleeps.add(1);
            self.group.others_mut().wake_up();
        }
        // The check of an event is a system call in each wake-up.
        if self.woken.contains(OTHERS) {
            self.group.others_mut().clear_event();
        }
        if self.woken.contains(MAIL) {
            self.mail.clear_event();
        }
        if !self.woken.is_empty() {
            for (place, poller) in self.group.pollers_mut() {
                if self.woken.contains(poller_token(place)) {
                    poller.clear_event();
                }
            }
        }
        Ok(match sleep {
            None => Woken::DidNotSleep,
            Some(_) if self.woken.is_empty() => Woken::ByTime,
            Some(_) => Woken::ByEvent,
        })
    }

    fn ask_devices(&mut self) {
        for (_, poller) in self.group.pollers_mut() {
            poller.clear_event();
        }
    }

    fn yielded(&mut self) {
        self.stats.yields.add(1);
    }
}

/// The end of the thread.
#[derive(Default)]
struct Stop {
    timeout: Duration,
    // From the moment when the end began.
    by: Option<Instant>,
    // The last check for refusals, and the last report to control.
    looked: Option<Instant>,
    told: Vec<Unsaved>,
}

/// The volume with a store that a message brings, and its step, if the message is a step.
fn brought(message: &ToGroup) -> Option<(&Arc<Volume>, &OpenStore, Option<StepTicket>)> {
    match message {
        ToGroup::AddVolume { volume, backing, step, .. } => {
            Some((volume, backing.as_ref()?, *step))
        }
        _ => None,
    }
}

/// The times at which the counters of a poll group are published.
struct PublishTimes {
    published: Micros,
    busy_turns: u32,
    // Some counters are older than the last busy turn.
    is_behind: bool,
}

impl PublishTimes {
    /// Publishes after a busy turn, if it is time.
    fn after_work(&mut self, group: &mut PollGroup<UringStore>, now: Micros) {
        self.is_behind = true;
        self.busy_turns += 1;
        if self.busy_turns >= PUBLISH_TURNS || now.since(self.published) > PUBLISH_INTERVAL_US {
            (self.published, self.busy_turns) = (now, 0);
            group.publish_turn();
        }
    }

    /// Publishes before a sleep.
    fn before_sleep(&mut self, group: &PollGroup<UringStore>, now: Micros) {
        if self.is_behind {
            (self.published, self.busy_turns, self.is_behind) = (now, 0, false);
            group.publish_stats();
        }
    }
}

/// The token of the poller at a place. Beyond [`POLLERS_MAX`] the token belongs to no watch.
fn poller_token(place: usize) -> FdToken {
    FdToken(if place < POLLERS_MAX { narrow(place + 1) } else { MAX_WATCHES })
}

/// The work served until the last wait.
#[derive(Default)]
struct ServedCounts {
    commands: u64,
    bytes: u64,
}

impl ServedCounts {
    /// Derives a hint for the next wait from the work served since the last call.
    fn hint(&mut self, stats: &Stats) -> Hint {
        let commands = stats.reads.get() + stats.writes.get();
        let bytes = stats.read_bytes.get() + stats.written_bytes.get();
        let served = commands - self.commands;
        if served == 0 {
            return Hint { wire_bytes: 0, outstanding: 1 };
        }
        let wire_bytes = bytes - self.bytes;
        (self.commands, self.bytes) = (commands, bytes);
        // The commands under way at the clients are unknown: about as many will come as were
        // served.
        Hint { wire_bytes, outstanding: narrow(served) }
    }
}
