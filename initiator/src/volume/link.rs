//! [`TargetLink`]: a mount's connection to its target. Carries out the acts of its
//! [`Course`](super::course::Course), and reports events to it.

mod path_report;
mod several;
mod way_join;
mod way_links;
mod way_probes;
mod way_session;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::MountConfig;
use rblk_fabric::{AckTimeout, ConnectOptions, MemoryOrder, Region, WcStatus};
use rblk_operate::said_once;
use rblk_protocol::{
    AccessMode, AsyncEvent, Features, OpenReply, Status, VolumeEntry, VolumeFlags, VolumeHandle,
};

use super::admin::TargetNews;
use super::course::{
    Act, Arrival, Attempt, Course, CourseState, Facts, Failure, Leaving, LossKind, OpenVerdict,
    Rules,
};
use super::error::SessionError;
use super::history::{History, millis};
use super::link_lines::{LinkLine, LinkLines};
use super::queues::Queues;
use super::reconnect::{
    NotTested, Reconnected, StepAnswer, Tries, Try, TryNews, TryStep, VolumeChanged,
};
use super::resolve_unflushed::{UnflushedParts, flush};
use super::session::{Credentials, Entry, Session, VolumeClaim};
use super::setup::{Endpoint, Setup};
use super::shared_memory::SharedMemory;
use super::stuck_data::StuckData;
use super::task;
use super::ways::WayTry;
use super::{EIO, ENODEV};
use way_links::{WayEvent, WayLinks};

use crate::engine::PathEnd;
use crate::engine::durability::Durability;
use crate::engine::path::Path;
use crate::engine::pulse::Pulse;
use crate::engine::ways::WayIndex;
use rblk_operate::mount::mount_status::{Fallback, MountStatus, auth};

/// A mount's connection to its target.
#[derive(Debug)]
pub(crate) struct TargetLink {
    config: Arc<MountConfig>,
    setup: Setup,
    course: Course,
    // `None` while the target is lost, and with several ways.
    session: Option<Session>,
    // The sessions of a mount that uses several ways, once it has one.
    ways: Option<WayLinks>,
    tries: Tries,
    // The mount wants all paths, and its target knows one at a time.
    one_path: bool,
    // The address of the last try.
    trying: usize,
    history: History,
    stuck: StuckData,
    // For each address, the reason for its last failure; `None` if it worked or was not tried.
    faults: Vec<Option<String>>,
    // Limits the log lines that the target causes.
    lines: LinkLines,
    durability: Arc<Durability>,
}

/// What the link does as soon as the note of its mount, if it has one, says how the link stands.
#[derive(Debug)]
#[must_use]
pub(crate) enum AfterNote {
    /// Nothing.
    Nothing,
    /// A try to connect.
    Try(Attempt),
    /// A try of one more way.
    Join(WayTry),
    /// A try goes on.
    GoOn(StepAnswer),
    /// The queues get their paths. They failed requests until now, or not.
    Connect { paths: Vec<(u16, Path)>, was_failing: bool, stalled: Duration },
    /// Every request fails with that errno.
    Fail(i32),
}

fn random() -> u64 {
    // For jitter only. Without random numbers the pause is the shortest.
    getrandom::u64().unwrap_or(0)
}

fn rules(config: &MountConfig, setup: &Setup) -> Rules {
    Rules {
        addresses: setup.addresses.len(),
        detect: config.detect.get(),
        connect_timeout: config.connect_timeout.get(),
        reconnect_delay: config.reconnect_delay.get(),
        fail_after: config.fail_after.map(|after| after.get()),
        failback: config.failback.get(),
    }
}

/// The access mode of a mount.
pub(crate) fn access_mode(config: &MountConfig) -> AccessMode {
    match (config.read_only, config.shared) {
        (true, _) => AccessMode::ReadOnly,
        (false, true) => AccessMode::Shared,
        (false, false) => AccessMode::Exclusive,
    }
}

/// The options of a mount's connections, unless a try has a limit of its own.
pub(crate) fn options(config: &MountConfig) -> ConnectOptions {
    ConnectOptions {
        timeout: config.connect_timeout.get(),
        bind: None,
        detect: config.detect.get(),
        order: match config.transport.relaxed_ordering {
            true => MemoryOrder::Relaxed,
            false => MemoryOrder::Strict,
        },
        tos: config.transport.tos,
        ack_timeout: config.transport.ack_timeout.map(|time| AckTimeout::of(time.get())),
    }
}

/// The KEEP_ALIVE pulse of a mount.
pub(crate) fn pulse(config: &MountConfig) -> Pulse {
    Pulse::of(config.detect.get())
}

/// Whether the target does not have the volume.
fn is_missing(error: &SessionError) -> bool {
    match error {
        SessionError::NoSuchVolume { .. } => true,
        SessionError::Status { status, .. } => *status == Status::VolumeGone,
        _ => false,
    }
}

/// The next news of the target, or the loss of the session. Without a session, waits for ever.
async fn next_event(
    session: &mut Option<Session>,
    volume: VolumeHandle,
    pulse: Pulse,
    queues: &Queues,
) -> Result<TargetNews, SessionError> {
    match session {
        Some(session) => session.admin.news_of_disk(pulse, volume, || queues.ios()).await,
        None => std::future::pending().await,
    }
}

enum Happened {
    Event(Result<TargetNews, SessionError>),
    News(TryNews),
    Way(WayEvent),
    Deadline,
}

impl TargetLink {
    /// The link of a mount that has lost its target. The first try is due at once.
    pub(crate) fn lost(
        config: &Arc<MountConfig>,
        setup: Setup,
        facts: Facts,
        durability: &Arc<Durability>,
        now: Instant,
    ) -> Self {
        let history = History::new(facts.fenced.clone());
        let last_address = |a: &rblk_fabric::Address| a.to_string() == setup.endpoint.address;
        let last = setup.addresses.iter().position(last_address).unwrap_or(0);
        let mut course = Course::lost(rules(config, &setup), facts, now);
        course.prefer(last);
        let faults = vec![None; setup.addresses.len()];
        Self {
            config: Arc::clone(config),
            setup,
            course,
            session: None,
            ways: None,
            one_path: false,
            tries: Tries::new(),
            trying: 0,
            history,
            stuck: StuckData::default(),
            faults,
            lines: LinkLines::default(),
            durability: Arc::clone(durability),
        }
    }

    /// The link of a new mount, with its first session at the address of that index. `faults` are
    /// the failures of the addresses before it.
    pub(crate) fn connected(
        config: &Arc<MountConfig>,
        setup: Setup,
        facts: Facts,
        durability: &Arc<Durability>,
        (session, faults): (Session, Vec<String>),
    ) -> Self {
        let (now, address) = (Instant::now(), faults.len());
        let course = Course::connected(rules(config, &setup), facts.clone(), address, now);
        let mut link = Self::lost(config, setup, facts, durability, now);
        for (fault, why) in link.faults.iter_mut().zip(faults) {
            *fault = Some(why);
        }
        link.stuck.connected(now);
        let mut link = Self { course, session: Some(session), ..link };
        link.say_fallback();
        link
    }

    /// The preferred address, if the mount uses another.
    fn fallback(&self) -> Option<Fallback> {
        let spreads = |session: &Session| self.asks_ways() && session.has_ways();
        // With several ways, each address is in use or has a row of its own in the status.
        let is_one = self.ways.is_none() && !self.session.as_ref().is_some_and(spreads);
        let is_connected = self.course.state() == CourseState::Connected;
        let is_worse = is_connected && is_one && self.course.address() > 0;
        let preferred = self.setup.addresses.first().filter(|_| is_worse)?.to_string();
        let reason = self.faults.first().cloned().flatten();
        Some(Fallback { preferred, reason })
    }

    /// Logs that the mount uses an address that is not its best, if so.
    fn say_fallback(&mut self) {
        let Some(Fallback { preferred, reason }) = self.fallback() else { return };
        if !self.may_log(LinkLine::Fallback) {
            return;
        }
        tracing::warn!(
            rblk_event = "fallback",
            address = self.setup.endpoint.address,
            preferred,
            reason = reason.as_deref().unwrap_or("it was not tried"),
            failback = %self.config.failback,
            "the path is not the preferred one, and may be slower; the mount goes back as `failback` says, unless this is \
             another member of a group"
        );
    }

    /// Records that the address with that index works.
    fn note_works(&mut self, address: usize) {
        if let Some(fault) = self.faults.get_mut(address) {
            *fault = None;
        }
    }

    /// Records why the address with that index does not work.
    fn note_fault(&mut self, address: usize, why: &str) {
        if let Some(fault) = self.faults.get_mut(address) {
            *fault = Some(why.to_owned());
        }
    }

    /// Replaces the account of durable writes.
    pub(crate) fn inherit(&mut self, account: &Arc<Durability>) {
        self.durability = Arc::clone(account);
    }

    /// The setup of the mount.
    pub(crate) fn setup(&self) -> &Setup {
        &self.setup
    }

    /// The known facts about volume and target.
    pub(crate) fn facts(&self) -> &Facts {
        self.course.facts()
    }

    /// Makes every later session with these keys. The present one goes on.
    pub(crate) fn change_keys(
        &mut self,
        config: &Arc<MountConfig>,
        credentials: Option<Arc<Credentials>>,
    ) {
        self.config = Arc::clone(config);
        self.setup.credentials = credentials;
    }

    /// Sets the number of queues that the driver made.
    pub(crate) fn set_queues(&mut self, queues: u16) {
        self.setup.queues = queues;
    }

    /// Records that the driver has registered the shared memory of the mount.
    ///
    /// # Errors
    /// The system does not report the page numbers.
    pub(crate) fn shared_memory_is_registered(&mut self) -> anyhow::Result<()> {
        self.setup.shared.registered()
    }

    /// Replaces the memories of other programs that every path registers. Present paths end.
    pub(crate) fn replace_shared(&mut self, regions: Arc<[Arc<Region>]>, queues: &mut Queues) {
        if Arc::ptr_eq(self.setup.shared.regions(), &regions) {
            return;
        }
        self.setup.shared = SharedMemory::of_guest(regions);
        if self.is_connected() {
            self.course.lose(LossKind::Renegotiate, Instant::now(), random());
            self.disconnect(None, queues);
        }
    }

    /// A queue has left: it needs no path, and only devices use its memory.
    pub(crate) fn forget_queue(&mut self, queue: u16) {
        if let Some(buffers) = self.setup.buffers.get_mut(usize::from(queue)) {
            *buffers = None;
        }
    }

    /// Whether there is a session.
    pub(crate) fn is_connected(&self) -> bool {
        self.session.is_some() || self.has_ways()
    }

    /// The state of the mount.
    pub(crate) fn state(&self) -> CourseState {
        self.course.state()
    }

    /// Whether no session will come.
    pub(crate) fn is_over(&self) -> bool {
        self.course.is_over()
    }

    /// Does what is due, and then the next thing that happens between the mount and its target.
    /// Returns what follows as soon as the note is written. Cancel safe.
    pub(crate) async fn attend(&mut self, queues: &mut Queues) -> Option<AfterNote> {
        if let Some(after) = self.carry_out(queues).or_else(|| self.carry_out_ways(queues)) {
            return Some(after);
        }
        let deadline = [self.course.deadline(), self.ways_deadline()].into_iter().flatten().min();
        let (pulse, volume) = (pulse(&self.config), self.facts().volume.handle);
        let happened = tokio::select! {
            event = next_event(&mut self.session, volume, pulse, queues) => Happened::Event(event),
            event = way_links::next(&mut self.ways) => Happened::Way(event),
            news = self.tries.next() => Happened::News(news),
            () = task::until(deadline) => Happened::Deadline,
        };
        match happened {
            Happened::Event(event) => self.on_event(event, queues).then_some(AfterNote::Nothing),
            Happened::Way(event) => self.on_way_event(event, queues).then_some(AfterNote::Nothing),
            Happened::News(TryNews::Step(step)) => Some(self.on_step(step)),
            Happened::News(TryNews::Tried(result)) => self.on_try(result, queues),
            Happened::News(TryNews::Probed(address, fault)) => {
                let answers = fault.is_none();
                if let Some(why) = fault {
                    self.note_fault(address, &why);
                }
                self.course.probed(address, answers, Instant::now());
                None
            }
            Happened::Deadline => None,
        }
    }

    /// The note says how the link stands, or could not be written: what follows is done now.
    pub(crate) fn go_on(&mut self, after: AfterNote, is_noted: bool, queues: &mut Queues) {
        match after {
            AfterNote::Nothing => {}
            AfterNote::Try(attempt) => self.begin_try(attempt, is_noted, queues),
            AfterNote::Join(attempt) => self.begin_join(attempt, is_noted, queues),
            AfterNote::GoOn(answer) => answer.send(),
            AfterNote::Connect { paths, was_failing, stalled } => {
                self.connect(paths, was_failing, stalled, queues);
            }
            AfterNote::Fail(errno) => queues.fail(Some(errno)),
        }
    }

    /// Keeps the session alive and takes its events, but carries out no acts. Cancel safe.
    pub(crate) async fn keep_alive(&mut self, queues: &mut Queues) {
        let (pulse, volume) = (pulse(&self.config), self.facts().volume.handle);
        let happened = tokio::select! {
            event = next_event(&mut self.session, volume, pulse, queues) => Happened::Event(event),
            event = way_links::next(&mut self.ways) => Happened::Way(event),
        };
        match happened {
            Happened::Event(event) => self.on_event(event, queues),
            Happened::Way(event) => self.on_way_event(event, queues),
            Happened::News(_) | Happened::Deadline => false,
        };
    }

    /// Does what is due, up to a try to connect, which the note comes before. The next thing is due
    /// at the course's deadline, or when something happens.
    pub(crate) fn carry_out(&mut self, queues: &mut Queues) -> Option<AfterNote> {
        while let Some(act) = self.course.due(Instant::now(), random()) {
            match act {
                Act::Try(attempt) => return Some(AfterNote::Try(attempt)),
                Act::Fail => {
                    let after = self.config.fail_after.unwrap_or_default();
                    tracing::error!(
                        rblk_event = "fail-after",
                        %after,
                        "the target is gone for too long: requests fail until it is back"
                    );
                    queues.fail(Some(EIO));
                }
                Act::Hold => queues.hold(),
                Act::Leave(leaving) => self.leave(leaving, queues),
                Act::Probe(address) => self.begin_probe(address),
            }
        }
        None
    }

    fn leave(&mut self, leaving: Leaving, queues: &mut Queues) {
        let why = match leaving {
            Leaving::Drain => "the target drains".to_owned(),
            Leaving::Upgrade => "the target is being upgraded".to_owned(),
            Leaving::Back { to } => {
                let better = self.setup.addresses.get(to).map(ToString::to_string);
                format!("going back to {}", better.unwrap_or_default())
            }
        };
        tracing::info!(
            rblk_event = "leave",
            why,
            "leaving the target; requests wait until it is connected again"
        );
        // A return to a better address, or to the next version of the target, is no loss, and takes
        // a moment.
        let shown = matches!(leaving, Leaving::Drain).then_some(why.as_str());
        self.disconnect(shown, queues);
    }

    fn begin_try(&mut self, attempt: Attempt, is_noted: bool, queues: &Queues) {
        // A process that recovers the mount by an older note cannot have this session. In a new
        // session, commands of this process may arrive late. A shared volume does not keep the
        // new session out until those commands are over.
        if !is_noted && self.config.shared {
            self.course.failed(Failure::Transient, Instant::now(), random());
            return;
        }
        let Attempt { address, resume, generation, limit } = attempt;
        self.trying = address;
        self.tries.begin(Try {
            address: self.setup.addresses[address].clone(),
            options: ConnectOptions { timeout: limit, ..options(&self.config) },
            known_by: self.setup.known_by(),
            entry: Entry { resume, join: None, asks_ways: self.asks_ways() },
            way: self.way_of(address),
            volume_name: self.setup.volume_name,
            claim: VolumeClaim { generation, ..access_mode(&self.config).into() },
            wish: self.setup.wish,
            buffers: self.setup.buffers[..queues.len()].to_vec(),
            shared: Arc::clone(self.setup.shared.regions()),
            tests_paths: self.setup.tests_paths,
            account: self.account(queues),
        });
    }

    /// The arguments to settle which acknowledged writes are durable.
    fn account(&self, queues: &Queues) -> UnflushedParts {
        UnflushedParts {
            durability: Arc::clone(&self.durability),
            queues: queues.mail(),
            wish: self.setup.wish,
            pulse: pulse(&self.config),
        }
    }

    fn begin_probe(&mut self, index: usize) {
        let timeout = self.course.rules().try_limit();
        let options = ConnectOptions { timeout, ..options(&self.config) };
        let address = self.setup.addresses[index].clone();
        let (known_by, instance) = (self.setup.known_by(), self.course.facts().instance);
        self.tries.begin_probe(index, address, options, known_by, instance);
    }

    fn on_step(&mut self, step: TryStep) -> AfterNote {
        AfterNote::GoOn(match step {
            TryStep::LoggedIn(login, answer) => {
                StepAnswer::LoggedIn(self.course.logged_in(&login), answer)
            }
            TryStep::Opened(volume, answer) => {
                let verdict = match self.course.opened(&volume) {
                    // The target may take the copies now.
                    OpenVerdict::Go if self.durability.holds_copies() => {
                        OpenVerdict::ResolveUnflushed
                    }
                    verdict => verdict,
                };
                StepAnswer::Opened(verdict, answer)
            }
        })
    }

    fn on_try(
        &mut self,
        result: anyhow::Result<Box<Reconnected>>,
        queues: &mut Queues,
    ) -> Option<AfterNote> {
        let now = Instant::now();
        match result {
            Ok(reconnected) => {
                let Reconnected { session, paths } = *reconnected;
                match self.course.arrived(now) {
                    Some(arrival) => return Some(self.arrive(session, paths, arrival)),
                    None => {
                        session.admin.close();
                        self.course.failed(Failure::Transient, now, random());
                    }
                }
            }
            Err(error) if error.is::<VolumeChanged>() => {
                tracing::error!(rblk_event = "volume-lost", "{error}");
                self.history.over(error.to_string());
                queues.fail(Some(EIO));
            }
            Err(error) if matches!(error.downcast_ref(), Some(NotTested(PathEnd::SelfTest))) => {
                self.ask_for_less();
                self.on_failure(&said_once(error.as_ref()), false, now);
            }
            Err(error) => match error.downcast_ref::<SessionError>() {
                Some(SessionError::Fenced { by, .. }) => {
                    return Some(self.on_fenced(by, said_once(error.as_ref())));
                }
                Some(missing) if is_missing(missing) => {
                    if self.course.missing() {
                        self.say_removed(queues);
                    }
                    self.on_failure(&said_once(error.as_ref()), false, now);
                }
                session_error => {
                    let is_gone = session_error.is_some_and(SessionError::is_session_gone);
                    self.on_failure(&said_once(error.as_ref()), is_gone, now);
                }
            },
        }
        None
    }

    fn on_fenced(&mut self, by: &str, text: String) -> AfterNote {
        tracing::error!(
            rblk_event = "fence",
            by,
            "fenced: the target does not let this mount go on with its volume, and every request fails, permanently. \
             Unmount, and mount again when the volume is free"
        );
        self.course.fenced(by);
        self.history.over(text);
        AfterNote::Fail(Status::Fenced.errno())
    }

    fn on_failure(&mut self, text: &str, session_is_gone: bool, now: Instant) {
        self.note_fault(self.trying, text);
        self.stuck.failed();
        let address = self.tries.address();
        if session_is_gone {
            // The target restarted. The reason for the loss is known already.
            if self.lines.may_write(LinkLine::Session, now) {
                tracing::info!(
                    address,
                    answer = text,
                    "the target does not know the session any more; beginning a new one"
                );
            }
            self.history.session_gone(self.epoch());
            self.course.failed(Failure::SessionGone, now, random());
            return;
        }
        if self.history.failed(text) {
            tracing::warn!(address, error = text, "cannot connect again yet");
        } else {
            tracing::debug!(address, error = text, "cannot connect again yet");
        }
        self.course.failed(Failure::Transient, now, random());
    }

    fn arrive(&mut self, session: Session, paths: Vec<(u16, Path)>, arrival: Arrival) -> AfterNote {
        let Arrival { stalled, was_failing, verifier_changed, .. } = arrival;
        self.history.connected(stalled, verifier_changed);
        self.note_works(arrival.address);
        self.stuck.connected(Instant::now());
        if let Some(hint) = self.stuck.hint(Instant::now()).filter(|_| self.stuck.is_news()) {
            tracing::warn!("{hint}");
        }
        self.setup.endpoint = Endpoint::of(&session, paths.iter().map(|(_, path)| path));
        self.session = Some(session);
        self.durability.arrived();
        AfterNote::Connect { paths, was_failing, stalled }
    }

    fn connect(
        &mut self,
        paths: Vec<(u16, Path)>,
        was_failing: bool,
        stalled: Duration,
        queues: &mut Queues,
    ) {
        self.spread(queues);
        queues.connect(paths);
        if was_failing {
            queues.fail(None);
        }
        if self.may_log(LinkLine::Resume) {
            let (epoch, address) = (self.epoch(), &self.setup.endpoint.address);
            tracing::info!(rblk_event = "resume", ?stalled, epoch, address, "connected again");
        }
        self.say_fallback();
    }

    /// The path of a queue ended.
    pub(crate) fn on_path_end(
        &mut self,
        (queue, way): (u16, WayIndex),
        end: PathEnd,
        queues: &mut Queues,
    ) {
        let has_newer = queues.path_ended(queue, way);
        // Without several ways, a path of any address takes the place of this one.
        let is_replaced = has_newer || !self.has_ways() && queues.has_path(queue);
        match end {
            PathEnd::Dropped => {}
            // This path was given up before.
            _ if is_replaced => {}
            _ if self.has_ways() => self.way_died(way, &format!("queue {queue}: {end}"), queues),
            PathEnd::SelfTest if self.setup.wish.features.has(Features::WRITE_WITH_IMM) => {
                self.ask_for_less();
                self.lose("the self-test failed", LossKind::Renegotiate, queues);
            }
            end => {
                let is_silence =
                    matches!(end, PathEnd::Silent | PathEnd::Lost(WcStatus::RetryExceeded));
                let waits = queues.counts().iter().any(|counts| counts.in_flight > 0);
                let detect = self.course.rules().detect;
                self.stuck.lost(is_silence && waits, detect, Instant::now());
                self.lose(&format!("queue {queue}: {end}"), LossKind::Path, queues);
            }
        }
    }

    /// A self-test failed.
    fn ask_for_less(&mut self) {
        let features = self.setup.wish.features;
        if features.has(Features::WRITE_WITH_IMM) {
            tracing::warn!("WRITE_WITH_IMM does not work on this path; going on without");
            self.setup.wish.features = features.without(Features::WRITE_WITH_IMM);
        }
    }

    /// A held queue has no unanswered request.
    pub(crate) fn on_quiet(&mut self, queue: u16, queues: &mut Queues) {
        if queues.quiet(queue) {
            self.course.quiet();
        }
    }

    /// Returns whether the facts about the volume changed.
    pub(crate) fn on_event(
        &mut self,
        news: Result<TargetNews, SessionError>,
        queues: &mut Queues,
    ) -> bool {
        match news {
            Ok(TargetNews::Event(Some(AsyncEvent::Draining))) => {
                if self.may_log(LinkLine::News) {
                    tracing::info!("the target drains: finishing the requests in flight");
                }
                self.course.draining(Instant::now());
            }
            Ok(TargetNews::Event(Some(AsyncEvent::Upgrading))) => {
                if self.may_log(LinkLine::News) {
                    tracing::info!(
                        "the target is being upgraded: finishing the requests in flight"
                    );
                }
                self.course.upgrading(Instant::now());
            }
            // The next OPEN says which host has the volume.
            Ok(TargetNews::Event(Some(AsyncEvent::Fenced))) => {
                self.lose("the volume was taken over", LossKind::Path, queues);
            }
            Ok(TargetNews::Event(event)) => tracing::debug!(?event, "event of the target"),
            Ok(TargetNews::Volume(entry)) => return self.on_volume(&entry, queues),
            Ok(TargetNews::Gone) => {
                self.course.removed(Instant::now(), random());
                self.say_removed(queues);
                self.disconnect(Some("the volume was removed at the target"), queues);
            }
            // An answer for `several`, where it went if its way lives.
            Ok(TargetNews::Dropped(..)) => {}
            Err(error) => self.lose(&error.to_string(), LossKind::Path, queues),
        }
        false
    }

    fn on_volume(&mut self, entry: &VolumeEntry, queues: &mut Queues) -> bool {
        let known = self.facts().volume;
        if !self.course.seen(entry) {
            // The next OPEN shows the new volume.
            self.lose("the volume was replaced by a different one", LossKind::Path, queues);
        }
        let is_read_only = |volume: &OpenReply| volume.flags.has(VolumeFlags::READ_ONLY);
        let is_writable_again = is_read_only(&known) && !is_read_only(&self.facts().volume);
        if is_writable_again && self.is_connected() && self.durability.holds_copies() {
            tracing::info!(
                "the volume is writable again: the writes that the target refused are sent again"
            );
            self.course.lose(LossKind::Renegotiate, Instant::now(), random());
            self.disconnect(None, queues);
        }
        self.facts().volume != known
    }

    fn say_removed(&self, queues: &mut Queues) {
        tracing::error!(
            rblk_event = "volume-removed",
            volume = %self.setup.volume_name,
            "the target removed the volume: requests fail until it serves the volume again. Unmount, or add the \
             volume again at the target"
        );
        queues.fail(Some(ENODEV));
    }

    /// Whether a log line that the target can cause may be written now.
    fn may_log(&mut self, line: LinkLine) -> bool {
        self.lines.may_write(line, Instant::now())
    }

    fn lose(&mut self, why: &str, loss: LossKind, queues: &mut Queues) {
        // With several ways, the last one may be lost already.
        let had_ways = self.ways.is_some() && self.course.state() == CourseState::Connected;
        if self.session.is_none() && !had_ways {
            return;
        }
        let address = self.setup.endpoint.address.clone();
        self.note_fault(self.course.address(), why);
        self.course.lose(loss, Instant::now(), random());
        if self.may_log(LinkLine::Loss) {
            tracing::warn!(rblk_event = "loss", why, address, "lost the target; requests wait");
        }
        self.disconnect(Some(why), queues);
    }

    /// The session is over: every queue keeps its requests, and the course decides about the next
    /// one. `loss` is the reason, if this is a loss.
    fn disconnect(&mut self, loss: Option<&str>, queues: &mut Queues) {
        let session = self.session.take();
        match &mut self.ways {
            Some(ways) => ways.leave(),
            None if session.is_none() => return,
            None => {}
        }
        self.stuck.lost(false, self.course.rules().detect, Instant::now());
        if let Some(why) = loss {
            self.history.lost(why);
        }
        if let Some(session) = session {
            session.admin.close();
        }
        queues.disconnect();
        queues.release();
    }

    /// The mount ends: a try ends at its next step, and probes end.
    pub(crate) fn dismiss_tries(&mut self) {
        self.tries.dismiss();
    }

    /// Ends tries and probes at once. Their sessions can be resumed.
    pub(crate) fn abort_tries(&mut self) {
        self.tries.abort();
    }

    /// Ends the session, or the try that may have one. With `logout`, sends LOGOUT within that
    /// time; without, the session can be resumed.
    pub(crate) async fn end_session(&mut self, logout: Option<Duration>) {
        self.gather().await;
        match (self.session.take(), logout) {
            (Some(session), Some(within)) => session.logout(within).await,
            (Some(session), None) => session.admin.close(),
            (None, Some(within)) => self.tries.end(within).await,
            (None, None) => {}
        }
    }

    /// Has the target make the acknowledged writes durable. Returns whether it did. No queue has a
    /// path any more.
    pub(crate) async fn flush(&mut self, queues: &Queues, within: Duration) -> bool {
        if self.durability.unflushed() == 0 {
            return true;
        }
        self.gather().await;
        let account = self.account(queues);
        let flushed = match &mut self.session {
            Some(session) => {
                let flushing = flush(session, &self.course.facts().volume, &account);
                match tokio::time::timeout(within, flushing).await {
                    Ok(result) => result.map_err(|error| said_once(error.as_ref())),
                    Err(_) => Err("it takes too long".to_owned()),
                }
            }
            None => Err("the target is not connected".to_owned()),
        };
        let Err(error) = flushed else { return true };
        let writes = self.durability.unflushed();
        tracing::warn!(error, writes, "acknowledged writes are not flushed, and this process ends");
        false
    }

    /// The mount ends: the session of some way stands for all.
    async fn gather(&mut self) {
        if self.session.is_none()
            && let Some(ways) = &mut self.ways
        {
            self.session = ways.give_back().await;
        }
    }

    fn epoch(&self) -> u32 {
        self.facts().resume.map_or(self.history.epoch(), |(_, epoch)| epoch.0)
    }

    /// Fills in its part of the status.
    pub(crate) fn report(&self, status: &mut MountStatus) {
        let state = match self.course.state() {
            CourseState::Connected => "connected",
            CourseState::Lost => "reconnecting",
            CourseState::Failing => "failing",
            CourseState::Removed => "volume removed",
            CourseState::Fenced => "fenced",
            CourseState::Changed => "volume lost",
        };
        state.clone_into(&mut status.state);
        let lost_ms_ago = self.course.lost_at().map(|at| millis(at.elapsed()));
        self.history.report(status, lost_ms_ago);
        let Endpoint { address, rdma_device, transport, is_encrypted } = &self.setup.endpoint;
        status.address.clone_from(address);
        status.fallback = self.fallback();
        status.hint = self.stuck.hint(Instant::now()).map(str::to_owned);
        status.rdma_device.clone_from(rdma_device);
        status.transport.clone_from(transport);
        status.encrypted = *is_encrypted;
        status.auth = auth(self.setup.credentials.is_some()).to_owned();
        status.write_with_imm = self.setup.wish.features.has(Features::WRITE_WITH_IMM);
        status.epoch = self.epoch();
        status.generation = self.facts().volume.generation.0;
        self.report_paths(status);
    }

    /// The course.
    #[cfg(test)]
    pub(crate) fn course(&self) -> &Course {
        &self.course
    }

    /// The session.
    #[cfg(test)]
    pub(crate) fn session_mut(&mut self) -> Option<&mut Session> {
        self.session.as_mut()
    }
}
