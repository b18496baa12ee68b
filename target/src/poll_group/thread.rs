//! The thread around a [`PollGroup`]: mailbox, ring, spinning and sleeping.
//!
//! A turn takes mail, lets the engine reap and post, and enters the kernel at most once. While
//! there is work it does not sleep; without, it looks for more as long as its [`Patience`] says,
//! then arms every CQ, looks once more, and sleeps in the ring, which wakes for I/O, CQ events and
//! mail alike. An idle target uses no CPU.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rblk_fabric::mailbox::{Receiver, Sender, mailbox};
use rblk_fabric::patience::{Hint, Idle, Patience, SpinMode, measure_wake_cost};
use tokio::sync::mpsc;

use super::peers::Peers;
use super::{FromGroup, PollGroup, ToGroup};
use crate::cache::Shard;
use crate::stats::Stats;
use crate::store::VolumeIndex;
use crate::store::backing::Backing;
use crate::store::uring::{MAX_WATCHES, UringStore, Wait, WatchSet, WatchToken};
use crate::volume::Volume;
use crate::volume_stats::VolumeStats;

const MAIL: WatchToken = WatchToken(0);
const PEERS: WatchToken = WatchToken(MAX_WATCHES - 1);
/// Pollers that a poll group can sleep for: the others of its watches are for mail and peers.
pub const POLLERS_MAX: usize = MAX_WATCHES as usize - 2;
/// How long the end may take: what executes ends, and what is dirty goes to the stores.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Longest sleep without connections.
const LONG_SLEEP: Duration = Duration::from_secs(60);
/// Longest sleep with connections: a net under devices that lose an event.
const IDLE_SLEEP: Duration = Duration::from_secs(1);
/// Least time between two looks for peers that are silent or take nothing.
const LISTEN_INTERVAL: Duration = Duration::from_millis(250);
/// A thread with connections that did not come by for so long was stopped: a debugger, a paused
/// machine.
const PAUSE: Duration = Duration::from_secs(4);
/// Least time between two publications of the counters while there is work; they are published
/// before a sleep, too.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(1);
/// Busy turns without one.
const PUBLISH_TURNS: u32 = 64;
/// Sleep while a deadline of the engine runs.
const SHORT_SLEEP: Duration = Duration::from_millis(100);

/// Control's end of a running poll group.
#[derive(Debug)]
pub struct Handle {
    /// Mail to the thread.
    pub mail: Sender<ToGroup>,
    /// Its counters.
    pub stats: Arc<Stats>,
    volumes: Vec<(VolumeIndex, Arc<VolumeStats>)>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    /// Has the poll group serve another volume.
    ///
    /// # Errors
    /// It takes no mail.
    pub fn add_volume(
        &mut self,
        volume: Arc<Volume>,
        backing: Option<Arc<Backing>>,
    ) -> io::Result<()> {
        let (index, stats) = (volume.index, Arc::new(VolumeStats::default()));
        let mail = ToGroup::AddVolume { volume, backing, stats: Arc::clone(&stats) };
        self.mail.send(mail).map_err(|_| io::Error::other("a poll group takes no mail"))?;
        self.volumes.push((index, stats));
        Ok(())
    }

    /// What the poll group tells of a volume.
    #[must_use]
    pub fn volume_stats(&self, volume: VolumeIndex) -> Option<&VolumeStats> {
        self.volumes.iter().find(|(index, _)| *index == volume).map(|(_, stats)| &**stats)
    }

    /// Waits for the thread to end, after [`ToGroup::Stop`].
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // It reported what broke it by `FromGroup::Stopped`.
            let _ = thread.join();
        }
    }
}

/// Placement and patience of a poll group's thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// CPU to pin to.
    pub cpu: Option<u16>,
    /// How long to look for work before sleeping.
    pub spin: SpinMode,
}

/// Starts a poll group.
///
/// # Errors
/// No thread or eventfd could be made.
pub fn start(
    index: usize,
    shard: Shard<UringStore>,
    peers: Peers,
    tuning: Tuning,
    outbox: mpsc::UnboundedSender<FromGroup>,
) -> io::Result<Handle> {
    let (mail, receiver) = mailbox(4096)?;
    let stats = Arc::new(Stats::default());
    let group = PollGroup::new(index, shard, peers, Arc::clone(&stats), Instant::now());
    let thread =
        std::thread::Builder::new().name(format!("poll-group-{index}")).spawn(move || {
            if let Some(cpu) = tuning.cpu {
                pin(cpu);
            }
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run(group, receiver, tuning, &outbox)
            }));
            let (clean, error) = match result {
                Ok(Ok(clean)) => (clean, None),
                Ok(Err(error)) => (false, Some(error.to_string())),
                Err(_) => (false, Some("it panicked".to_owned())),
            };
            let _ = outbox.send(FromGroup::Stopped { group: index, clean, error });
        })?;
    Ok(Handle { mail, stats, volumes: Vec::new(), thread: Some(thread) })
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

fn run(
    mut group: PollGroup<UringStore>,
    mut mail: Receiver<ToGroup>,
    tuning: Tuning,
    outbox: &mpsc::UnboundedSender<FromGroup>,
) -> io::Result<bool> {
    group.store_mut().watch(mail.event_fd(), MAIL)?;
    if let Some(fd) = group.peers_mut().event_fd() {
        group.store_mut().watch(fd, PEERS)?;
    }
    let mut stop_by = None;
    let mut woken = WatchSet::default();
    let mut patience = Patience::new(tuning.spin, measure_wake_cost());
    let mut served = Served::default();
    let mut published = Instant::now();
    let mut unpublished = 0;
    // Some counters are older than the last busy turn.
    let mut behind = false;
    let mut listened = Instant::now();
    loop {
        let now = Instant::now();
        let since = now.saturating_duration_since(listened);
        if since > LISTEN_INTERVAL {
            listened = now;
            if since > PAUSE {
                // Others may have spoken while nobody listened.
                group.forgive(since);
            } else {
                group.check_silence(now);
            }
        }
        while let Some(message) = mail.receive() {
            let mut message = message;
            if let ToGroup::AddVolume { volume, backing: Some(backing), .. } = &mut message {
                let added = group.store_mut().add_volume(volume.index, Arc::clone(backing));
                if let Err(error) = added {
                    tracing::error!(volume = %volume.name, %error, "cannot serve a volume");
                    continue;
                }
            }
            let added = match &message {
                ToGroup::AddPoller { place, .. } => Some(*place),
                _ => None,
            };
            group.take_mail(message, now);
            if let Some(place) = added {
                watch_poller(&mut group, place)?;
            }
        }
        let mut busy = group.turn(now);
        if busy {
            behind = true;
            unpublished += 1;
            if unpublished >= PUBLISH_TURNS || now > published + PUBLISH_INTERVAL {
                (published, unpublished) = (now, 0);
                group.publish_turn();
            }
        }
        while let Some((volume, backing)) = group.store_mut().take_lost() {
            let _ = outbox.send(FromGroup::LostWrites { volume, backing });
        }
        if group.has_outbox() {
            tell_control(&mut group, outbox);
            busy = true;
        }
        if let Some(clean) = group.stopped() {
            group.publish_stats();
            return Ok(clean);
        }
        if group.is_stopping() {
            let by = *stop_by.get_or_insert(now + STOP_DEADLINE);
            if now > by {
                let index = group.index();
                tracing::error!(
                    poll_group = index,
                    connections = group.has_connections(),
                    "a store has not finished its I/O, or the kernel has not destroyed a QP (`connections` says \
                     so): giving up"
                );
                return Ok(false);
            }
        }
        let io = group.take_io();
        let next = match busy || !group.has_connections() {
            true => Idle::Sleep,
            false => patience.next(now, served.hint(group.stats())),
        };
        let wait = if busy {
            patience.worked(now, io);
            Wait::No
        } else if next == Idle::Look {
            // Software devices make progress on this very CPU.
            let given_up = Instant::now();
            std::thread::yield_now();
            patience.yielded(given_up.elapsed());
            group.stats().yields.add(1);
            Wait::No
        } else {
            let mut empty = !mail.has_some();
            group.arm();
            // Something may have come between the last look and the arming.
            empty &= !group.turn(now) && !group.has_outbox() && !mail.has_some();
            empty = empty && group.peers_mut().fall_asleep();
            if empty {
                if behind {
                    (published, unpublished, behind) = (now, 0, false);
                    group.publish_stats();
                }
                group.stats().sleeps.add(1);
                let short = group.has_deadline() || group.is_stopping();
                let longest = match (short, group.has_connections()) {
                    (true, _) => SHORT_SLEEP,
                    (false, true) => IDLE_SLEEP,
                    (false, false) => LONG_SLEEP,
                };
                Wait::Until(group.next_deadline().map_or(longest, |at| at.min(longest)))
            } else {
                let io = group.take_io();
                patience.worked(now, io);
                behind = true;
                Wait::No
            }
        };
        woken.clear();
        group.store_mut().turn(wait, &mut woken)?;
        let enters = group.store_mut().counters().enters;
        group.stats().ring_enters.set(enters);
        if wait != Wait::No {
            group.peers_mut().wake_up();
        }
        // Asking whether it is set is a system call in each wake-up.
        if woken.contains(PEERS) {
            group.peers_mut().clear_event();
        }
        if woken.contains(MAIL) {
            mail.clear_event();
        }
        // Whoever slept its time out asks the devices again, should one have lost the event.
        let timed_out = wait != Wait::No && woken.is_empty();
        for (place, poller) in group.pollers_mut() {
            if woken.contains(poller_token(place)) || timed_out {
                poller.clear_event();
            }
        }
        if wait != Wait::No {
            patience.slept(Instant::now());
        }
    }
}

/// Names the descriptor of the poller at a place; one that no watch can have where it is beyond
/// [`POLLERS_MAX`].
fn poller_token(place: usize) -> WatchToken {
    WatchToken(if place < POLLERS_MAX {
        u8::try_from(place + 1).unwrap_or(MAX_WATCHES)
    } else {
        MAX_WATCHES
    })
}

/// Has sleeps end when a poller that was just added has something.
fn watch_poller(group: &mut PollGroup<UringStore>, place: usize) -> io::Result<()> {
    // A second descriptor would be that of a lone QP; a poller begins with none.
    let fd = group
        .pollers_mut()
        .find(|(at, _)| *at == place)
        .and_then(|(_, poller)| poller.event_fds()[0].map(|fd| fd.as_raw_fd()));
    match fd {
        Some(fd) => group.store_mut().watch_asleep(fd, poller_token(place)),
        None => Ok(()),
    }
}

/// Sends control what the turn has for it. The descriptor of a broken CQ may be readable for ever:
/// it is not watched any more.
fn tell_control(group: &mut PollGroup<UringStore>, outbox: &mpsc::UnboundedSender<FromGroup>) {
    let messages: Vec<FromGroup> = group.take_outbox().collect();
    for message in messages {
        if let FromGroup::PollerBroken { poller, .. } = message {
            group.store_mut().unwatch(poller_token(poller));
        }
        // Control is gone only when the process ends.
        let _ = outbox.send(message);
    }
}

/// What was served until the last wait.
#[derive(Default)]
struct Served {
    commands: u64,
    bytes: u64,
}

impl Served {
    /// What was served since the last call tells what is awaited now.
    fn hint(&mut self, stats: &Stats) -> Hint {
        let commands = stats.reads.get() + stats.writes.get();
        let bytes = stats.read_bytes.get() + stats.written_bytes.get();
        let served = commands - self.commands;
        if served == 0 {
            return Hint { wire_bytes: 0, outstanding: 1 };
        }
        let wire_bytes = bytes - self.bytes;
        (self.commands, self.bytes) = (commands, bytes);
        // What is under way with the clients is not known. About as many as were served will come.
        let outstanding = u32::try_from(served).unwrap_or(u32::MAX);
        Hint { wire_bytes, outstanding }
    }
}
