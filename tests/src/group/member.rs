//! [`Member`]: a process of a target of the group: the product's control and records, and between
//! them the calls of the control's threads. Its claims, its image and its blocks are in other
//! files.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use rblk_config::VolumeConfig;
use rblk_protocol::{
    BlockCount, BlockSize, CommandCapsule, Epoch, Generation, HelloRequest, InstanceId, Opcode,
    OpenReply, RejectReason, Sequence, SessionId, Status, Tag, WriteVerifier,
};
use rblk_target::control::claims::answer_to;
use rblk_target::control::core::{
    Admitted, Capacity, ConnectionRef, Core, CoreParts, Effect, Knock, Ticket, VolumeChange,
};
use rblk_target::data::poll_group::{Notice, VolumeStep};
use rblk_target::record::holders::{HolderRecord, Holders};
use rblk_target::record::{
    AtRisk, BootId, GroupKeepers, Records, ServedVolume, SharedPlaces, StateDirectory,
};
use rblk_target::store::StoreIdentity;
use rblk_target::store::rbd::image_claim::{AskAnswer, FormerHosts};
use rblk_target::store::rbd::lock_look::Verdict;
use rblk_target::store::rbd::ownership::lock_proof::BeforeClose;
use rblk_target::store::rbd::state_record::StateRecord;
use rblk_target::volume::ids::{AdmissionId, ConnectionId, SessionIndex, VolumeIndex};
use rblk_target::volume::{CacheMode, Placement, Volume};

use super::air::{Air, ControlNews, Event, Io, Purpose, Question, Timer, ToHost, ToMember, Whose};
use super::claiming::{Claiming, Course};
use super::cluster::{Answer, Call, of};
use super::image::OpenImage;
use super::register::MountId;
use super::serving::{MemberOp, Serving};
use super::{BLOCK_BYTES, BLOCKS, UUID, volume_name};

/// Milliseconds for which a member that lost an image by force takes none back by force.
const DAMPING: u64 = 30_000;
/// Milliseconds for which a record is waited for.
const RECORD_LATE: u64 = 10_000;
/// Milliseconds of silence after which a connection of a host is over.
const SILENCE: u64 = 6_000;

/// A connection of a host.
#[derive(Debug)]
pub struct Connection {
    /// The host.
    pub host: usize,
    mount: MountId,
    admission: AdmissionId,
    session: SessionIndex,
    epoch: Epoch,
    /// Its requests that have not ended.
    pub ops: BTreeSet<u64>,
    /// It ends.
    pub is_dying: bool,
}

/// A change that waits for its turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DueChange {
    Serve(u64),
    // The flag: a client has ordered it.
    Yield(bool),
}

/// A change under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Changing {
    Serve(u64),
    Yield,
    Lose,
}

/// Work of the thread of the records.
#[derive(Debug)]
enum Job {
    Load(u64),
    Put(u64),
    Holder(Ticket, HolderRecord),
    Store(Option<StoreIdentity>),
    Lower(u64),
    GiveBack(u64),
}

/// See the module.
#[derive(Debug)]
pub struct Member {
    /// Which one.
    pub whose: Whose,
    core: Core,
    records: Records,
    shared: SharedPlaces,
    write_back: bool,
    /// By number.
    pub connections: BTreeMap<u64, Connection>,
    opened: BTreeSet<SessionIndex>,
    ever_opened: BTreeSet<SessionIndex>,
    /// By number.
    pub images: BTreeMap<u64, OpenImage>,
    pub(super) serving: Option<Serving>,
    claiming: Option<Claiming>,
    due: Vec<DueChange>,
    changing: Option<Changing>,
    // The step under way, and its number.
    step: Option<(VolumeStep, u64)>,
    lost_volume: Option<VolumeIndex>,
    next_index: u16,
    lost_at: Option<u64>,
    jobs: VecDeque<(u64, Job)>,
    sequence: u64,
    /// A settle of core's waits for dirty blocks.
    settles: Vec<rblk_target::data::poll_group::SettleTicket>,
}

fn volume_of(index: u16, write_back: bool) -> Arc<Volume> {
    Arc::new(Volume {
        index: VolumeIndex(index),
        name: volume_name(),
        uuid: UUID,
        block_size: BlockSize::new(BLOCK_BYTES).expect("a size"),
        blocks: BlockCount(BLOCKS as u64),
        read_only: false,
        placement: Placement::Store,
        cache: if write_back { CacheMode::WriteBack } else { CacheMode::WriteThrough },
        cache_min_bytes: 0,
        cache_max_bytes: None,
        read_ahead_bytes: 0,
        discard: true,
        discard_granularity_bytes: BLOCK_BYTES,
        is_durable_at_once: true,
        limits: None,
    })
}

fn id(air: &mut Air) -> [u8; 16] {
    let mut bytes = [1; 16];
    air.random.fill(&mut bytes[1..]);
    bytes
}

impl Member {
    /// A process that starts.
    #[must_use]
    pub fn start(air: &mut Air, whose: Whose, write_back: bool) -> Self {
        air.lives[whose.member] = Some(whose.life);
        let parts = CoreParts {
            name: super::target_name(),
            instance: InstanceId(id(air)),
            volumes: Vec::new(),
            capacity: Capacity::new(64, None, 64 << 30),
            lease: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
            holders: Holders::durable([]),
            auth: None,
        };
        let mut core = Core::new(parts, air.instant());
        core.ready(air.instant());
        core.leave_to_others(volume_name(), None);
        let shared = SharedPlaces::default();
        let keepers = GroupKeepers::new(StateDirectory::nothing(), shared.clone());
        let mut fresh = air.random.clone();
        air.random.bits();
        let verifier = move || {
            let mut bytes = [2; 16];
            fresh.fill(&mut bytes[1..]);
            WriteVerifier(bytes)
        };
        let boot = BootId::new(&format!("boot {}", whose.member));
        let records = Records::new(Box::new(keepers), boot, Box::new(verifier));
        Self {
            whose,
            core,
            records,
            shared,
            write_back,
            connections: BTreeMap::new(),
            opened: BTreeSet::new(),
            ever_opened: BTreeSet::new(),
            images: BTreeMap::new(),
            serving: None,
            claiming: None,
            due: Vec::new(),
            changing: None,
            step: None,
            lost_volume: None,
            next_index: 0,
            lost_at: None,
            jobs: VecDeque::new(),
            sequence: 0,
            settles: Vec::new(),
        }
    }

    /// The process dies.
    pub fn die(self, air: &mut Air) {
        let mut cluster = of(&air.cluster);
        for image in self.images.values() {
            image.text.close();
            cluster.died(&image.client);
        }
        if let Some(claiming) = &self.claiming {
            cluster.died(&claiming.client);
        }
        drop(cluster);
        air.lives[self.whose.member] = None;
        for (number, connection) in &self.connections {
            air.to_host((self.whose.member, connection.host), *number, ToHost::Closed);
        }
    }

    /// Whether it serves the volume, as far as it knows.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.serving.is_some()
    }

    fn news(&self, air: &mut Air, news: ControlNews) {
        let delay = air.random.below(4);
        air.after(delay, Event::Timer(self.whose, Timer::Control(news)));
    }

    /// A client orders that the volume is handed over.
    pub fn order_move(&mut self, air: &mut Air) {
        self.yield_soon(true);
        self.go_on(air);
    }

    // Hosts.

    /// A message of a host.
    pub fn hears(&mut self, air: &mut Air, (host, number): (usize, u64), message: ToMember) {
        match message {
            ToMember::Hello(asked, mount) => self.connect(air, (host, number), &asked, mount),
            ToMember::Admin(opcode, body) => {
                let Some(connection) = self.connections.get(&number) else { return };
                self.sequence += 1;
                let sequence = Sequence(u32::try_from(self.sequence % 60_000 + 1).unwrap_or(1));
                let capsule = CommandCapsule::new(opcode, Tag(1), connection.epoch, sequence);
                let (at, admission) = (reference(number), connection.admission);
                self.core.command(at, admission, &capsule, &body, air.instant());
            }
            ToMember::Io(op, io) => self.io(air, number, (op, io)),
            ToMember::Close => {
                if let Some(connection) = self.connections.get_mut(&number) {
                    connection.is_dying = true;
                }
            }
        }
        self.go_on(air);
    }

    fn connect(
        &mut self,
        air: &mut Air,
        (host, number): (usize, u64),
        asked: &HelloRequest,
        mount: MountId,
    ) {
        let knock = Knock {
            asked,
            introduction: None,
            peer: &format!("host{host}"),
            memory_bytes: 1 << 16,
            fresh: SessionId(id(air)),
            is_encrypted: false,
            has_ways: false,
        };
        match self.core.connect(&knock, air.instant()) {
            Ok(Admitted { id: admission, epoch, .. }) => {
                let (session, ops, is_dying) = (SessionIndex::NONE, BTreeSet::new(), false);
                let made = Connection { host, mount, admission, session, epoch, ops, is_dying };
                self.connections.insert(number, made);
                air.to_host((self.whose.member, host), number, ToHost::Accepted);
            }
            Err(refused) => {
                let gone = [RejectReason::NoSuchSession, RejectReason::StaleEpoch];
                air.to_host(
                    (self.whose.member, host),
                    number,
                    ToHost::Refused(gone.contains(&refused.reason)),
                );
            }
        }
    }

    fn io(&mut self, air: &mut Air, number: u64, (op, io): (u64, Io)) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.is_dying {
            return;
        }
        if !self.opened.contains(&connection.session) {
            connection.is_dying = true;
            return;
        }
        connection.ops.insert(op);
        self.begin_op(air, MemberOp { connection: number, op, io });
    }

    fn opens(&self, connection: &Connection) -> bool {
        self.ever_opened.contains(&connection.session)
    }

    // Time.

    /// A tenth of a second, or more, has passed.
    pub fn tick(&mut self, air: &mut Air) {
        if self.core.needs_ticks() {
            self.core.tick(air.instant());
        }
        let is_late = |since: Option<u64>| since.is_some_and(|since| air.now >= since + SILENCE);
        for connection in self.connections.values_mut() {
            connection.is_dying |= is_late(air.links[connection.host][self.whose.member]);
        }
        let now = air.now;
        let looks = now.is_multiple_of(1000);
        let mut calls = Vec::new();
        for image in self.images.values_mut() {
            if looks && image.looking.is_none() && !image.is_lost && !image.closes {
                image.looking = Some(now);
                calls.push((image.client.clone(), image.number));
            }
        }
        for (client, number) in calls {
            air.call(self.whose, &client, Call::ReadLock, Purpose::Look(number));
        }
        self.end_silence(air);
        self.go_on(air);
    }

    /// A moment that it waits for has come.
    pub fn timer(&mut self, air: &mut Air, timer: Timer) {
        match timer {
            Timer::Pause(claim) => {
                if let Some(claiming) = self.claiming.as_mut().filter(|it| it.number == claim) {
                    let course = claiming.paused(air);
                    self.on_course(air, course);
                }
            }
            Timer::AskOver(question) => {
                if let Some(claiming) = &mut self.claiming {
                    let course = claiming.answered(air, question, None);
                    self.on_course(air, course);
                }
            }
            Timer::ClaimLate(claim) => {
                let is_it = |it: &&mut Claiming| it.number == claim && !it.is_abandoned;
                if let Some(claiming) = self.claiming.as_mut().filter(|it| is_it(it)) {
                    claiming.is_abandoned = true;
                    self.core.claim_ended(volume_name(), &Err("no answer".to_owned()));
                }
            }
            Timer::FormerOver(number) => {
                if let Some(image) = self.images.get_mut(&number) {
                    image.looking = Some(air.now);
                    let client = image.client.clone();
                    air.call(self.whose, &client, Call::ReadLock, Purpose::StillHas(number));
                }
            }
            Timer::ForHolderOver(number) => self.end_image(air, number),
            Timer::WriteBack(image) => self.write_back(air, image),
            Timer::Control(news) => self.on_news(air, news),
        }
        self.go_on(air);
    }

    fn on_news(&mut self, air: &mut Air, news: ControlNews) {
        match news {
            ControlNews::Opened(image) => self.due.push(DueChange::Serve(image)),
            ControlNews::NotOpened(why) => self.core.claim_ended(volume_name(), &Err(why)),
            ControlNews::Lost(image) => self.on_image_lost(air, image),
            ControlNews::Stepped(number) => {
                if self.step.is_some_and(|(_, at)| at == number) {
                    self.stepped(air, Ok(()));
                }
            }
            ControlNews::GoOn => {}
        }
    }

    // Claims.

    fn begin_claim(&mut self, air: &mut Air, wish: rblk_target::store::rbd::image_claim::Wish) {
        let is_serve = |due: &DueChange| matches!(due, DueChange::Serve(_));
        // An image that is open and not served yet: its claim has not been reported.
        let is_opening = self.images.values().any(|it| !it.closes && !it.is_loss_heard);
        if is_opening
            || self.due.iter().any(is_serve)
            || matches!(self.changing, Some(Changing::Serve(_)))
        {
            return;
        }
        match &mut self.claiming {
            Some(claiming) if claiming.is_abandoned => {
                self.news(air, ControlNews::NotOpened("it is being opened".to_owned()));
            }
            Some(claiming) => claiming.raise(wish),
            None => {
                let may_break = self.lost_at.is_none_or(|at| air.now >= at + DAMPING);
                air.log.add("claims", [self.whose.member as u64, u64::from(may_break), 0]);
                let (claiming, course) = Claiming::begin(air, self.whose, wish, may_break);
                self.claiming = Some(claiming);
                self.on_course(air, course);
            }
        }
    }

    fn on_course(&mut self, air: &mut Air, course: Course) {
        if matches!(course, Course::Waits) {
            return;
        }
        let Some(claiming) = self.claiming.take() else { return };
        let is_abandoned = claiming.is_abandoned;
        match course {
            Course::Waits => {}
            Course::Ended(why) => {
                of(&air.cluster).close(&claiming.client);
                if !is_abandoned {
                    self.news(air, ControlNews::NotOpened(why));
                }
            }
            Course::Owned(note, owner, proven_at, (former, until)) => {
                air.owned += 1;
                let (left, for_holder_until) = match former {
                    FormerHosts::Nobody => (0, 0),
                    FormerHosts::Holder => (0, until),
                    FormerHosts::All => (until.saturating_sub(air.now), 0),
                };
                air.log.add("owns", [self.whose.member as u64, note.epoch, left]);
                let number = air.number();
                let mut cluster = of(&air.cluster);
                if let Some(client) = cluster.clients.get_mut(&claiming.client) {
                    (client.epoch, client.watches_state) = (note.epoch, true);
                }
                drop(cluster);
                let place = (&air.cluster, claiming.client.as_str());
                let mut image = OpenImage::new(number, place, (note, owner), proven_at);
                image.for_holder_until = for_holder_until;
                self.images.insert(number, image);
                match (is_abandoned, left) {
                    (true, 0) => self.close(air, number),
                    (false, 0) => self.news(air, ControlNews::Opened(number)),
                    (_, left) => {
                        let timer = Timer::FormerOver(number);
                        // Also if nobody waits: the next owner would not know.
                        air.after(left, Event::Timer(self.whose, timer));
                    }
                }
            }
        }
    }

    /// A call to the cluster has ended.
    pub fn called(&mut self, air: &mut Air, client: &str, purpose: Purpose, answer: Answer) {
        match purpose {
            Purpose::Claim => {
                if let Some(claiming) = self.claiming.as_mut().filter(|it| it.client == client) {
                    let course = claiming.called(air, answer);
                    self.on_course(air, course);
                }
            }
            Purpose::StillHas(number) => self.still_has(air, number, &answer),
            Purpose::Look(number) => self.looked(air, number, answer),
            Purpose::Close(number) => {
                let own = self.images.get(&number).map(|image| image.owner.clone());
                match answer == Answer::Lock(own) {
                    true => self.job(air, Job::GiveBack(number)),
                    false => self.keeps_note(air, number),
                }
            }
            Purpose::Data(number, block, op) => {
                if let Some(image) = self.images.get_mut(&number) {
                    image.ops -= 1;
                }
                self.data_done(air, number, (block, op), &answer);
            }
        }
        self.go_on(air);
    }

    fn still_has(&mut self, air: &mut Air, number: u64, answer: &Answer) {
        let Some(image) = self.images.get_mut(&number) else { return };
        let began = image.looking.take().unwrap_or(air.now);
        let is_own =
            |owner: &rblk_target::store::rbd::header_lock::LockOwner| owner.address == image.client;
        match answer {
            Answer::Lock(Some(owner)) if is_own(owner) => {
                image.proof.proven(began);
                self.news(air, ControlNews::Opened(number));
            }
            _ => {
                image.is_lost = true;
                self.close(air, number);
                self.news(air, ControlNews::NotOpened("another client took its lock".to_owned()));
            }
        }
    }

    fn looked(&mut self, air: &mut Air, number: u64, answer: Answer) {
        let Some(image) = self.images.get_mut(&number) else { return };
        let began = image.looking.take().unwrap_or(air.now);
        let owner = match answer {
            Answer::Lock(owner) => Ok(owner),
            Answer::Failed(errno) => Err(errno),
            other => unreachable!("{other:?}"),
        };
        let is_own = of(&air.cluster).lock().is_some_and(|lock| lock.address == image.client);
        match image.looks.judge(owner, Ok(is_own)).0 {
            Verdict::Held => image.proof.proven(began),
            Verdict::Unknown => {}
            Verdict::Fenced | Verdict::Lost(_) => self.lose(air, number),
        }
    }

    /// An image belongs to somebody else.
    pub(super) fn lose(&mut self, air: &mut Air, number: u64) {
        let Some(image) = self.images.get_mut(&number) else { return };
        if std::mem::replace(&mut image.is_lost, true) {
            return;
        }
        air.log.add("loses", [self.whose.member as u64, image.note.epoch, 0]);
        if image.is_loss_heard {
            self.news(air, ControlNews::Lost(number));
        }
    }

    fn on_image_lost(&mut self, air: &Air, number: u64) {
        let Some(serving) = self.serving.as_mut().filter(|it| it.image == number) else { return };
        let index = serving.volume.index;
        // No poll group answers, and then the ops of the image may end.
        serving.let_go();
        let sessions = &self.ever_opened;
        let of_volume = self.connections.values_mut().filter(|it| sessions.contains(&it.session));
        for connection in of_volume {
            connection.is_dying = true;
            connection.ops.clear();
        }
        self.core.lose(index);
        self.lost_at = Some(air.now);
        self.core.leave_to_others(volume_name(), None);
        self.lost_volume = Some(index);
    }

    /// Another member asks for the image of this client.
    pub fn asked(&mut self, air: &mut Air, client: &str, question: &Question) {
        let is_it = |image: &&OpenImage| image.client == client && !image.closes;
        let Some(image) = self.images.values().find(is_it) else { return };
        let (epoch, number) = (image.note.epoch, image.number);
        let serving = self.serving.as_ref().filter(|it| it.image == number && image.listens);
        let answer = match serving {
            None => AskAnswer::Stays,
            Some(serving) => {
                let answer = answer_to(&question.ask, serving.volume.index, &self.core, None).0;
                match answer {
                    AskAnswer::HandsOver => self.yield_soon(false),
                    AskAnswer::Stays => self.due.retain(|due| *due != DueChange::Yield(false)),
                }
                answer
            }
        };
        if !of(&air.cluster).is_fenced(client) {
            let delay = air.random.within(1, 8);
            let by = question.by;
            air.after(delay, Event::AskAnswered(by, question.number, epoch, answer));
        }
        self.go_on(air);
    }

    /// The owner has answered a question of this member.
    pub fn ask_answered(&mut self, air: &mut Air, question: u64, epoch: u64, answer: AskAnswer) {
        if let Some(claiming) = &mut self.claiming {
            let course = claiming.answered(air, question, Some((epoch, answer)));
            self.on_course(air, course);
        }
        self.go_on(air);
    }

    fn yield_soon(&mut self, is_ordered: bool) {
        let is_yield = |due: &DueChange| matches!(due, DueChange::Yield(_));
        if self.serving.is_some()
            && self.changing != Some(Changing::Yield)
            && !self.due.iter().any(is_yield)
        {
            self.due.push(DueChange::Yield(is_ordered));
        }
    }

    // Images.

    /// Nothing uses an image any more.
    fn close(&mut self, air: &mut Air, number: u64) {
        let Some(image) = self.images.get_mut(&number) else { return };
        if std::mem::replace(&mut image.closes, true) {
            return;
        }
        let left = image.for_holder_until.saturating_sub(air.now);
        match left {
            0 => self.end_image(air, number),
            left => air.after(left, Event::Timer(self.whose, Timer::ForHolderOver(number))),
        }
    }

    /// An image that is to close is given back, if it may be.
    fn end_image(&mut self, air: &mut Air, number: u64) {
        let Some(image) = self.images.get(&number) else { return };
        match BeforeClose::of(image.is_lost, image.is_silent(air.now)) {
            BeforeClose::GiveBack => self.job(air, Job::GiveBack(number)),
            BeforeClose::Look => {
                let client = image.client.clone();
                air.call(self.whose, &client, Call::ReadLock, Purpose::Close(number));
            }
            BeforeClose::Nothing => self.keeps_note(air, number),
        }
    }

    /// An image is not given back.
    fn keeps_note(&mut self, air: &Air, number: u64) {
        let Some(image) = self.images.get_mut(&number) else { return };
        image.text.close();
        image.is_noted = true;
        if let Some(it) = of(&air.cluster).clients.get_mut(&image.client) {
            it.watches_state = false;
        }
    }

    /// Closes images that nothing uses, when their ops have ended.
    fn close_quiet(&mut self, air: &Air) {
        let is_over = |image: &OpenImage| {
            image.closes && image.ops == 0 && image.is_noted && image.looking.is_none()
        };
        let over: Vec<u64> =
            self.images.values().filter(|it| is_over(it)).map(|it| it.number).collect();
        for number in over {
            if let Some(image) = self.images.remove(&number) {
                of(&air.cluster).close(&image.client);
            }
        }
    }

    // Records.

    fn job(&mut self, air: &mut Air, job: Job) {
        let number = air.number();
        self.jobs.push_back((number, job));
        if self.jobs.len() == 1 {
            self.begin_job(air);
        }
    }

    fn begin_job(&self, air: &mut Air) {
        if let (Some((number, _)), delay) = (self.jobs.front(), air.random.within(2, 12)) {
            air.after(delay, Event::Job(self.whose, *number));
            air.after(RECORD_LATE, Event::JobLate(self.whose, *number));
        }
    }

    /// The thread of the records reaches the cluster.
    pub fn work(&mut self, air: &mut Air, number: u64) {
        self.images.values().for_each(|image| image.text.set_late(false));
        if self.jobs.front().is_some_and(|(front, _)| *front == number) {
            self.do_job(air);
        }
        self.go_on(air);
    }

    /// The thread of the records has not reached the cluster in time.
    pub fn work_late(&mut self, air: &mut Air, number: u64) {
        let is_late = self
            .jobs
            .front()
            .is_some_and(|(front, job)| *front == number && !matches!(job, Job::GiveBack(_)));
        if is_late {
            self.images.values().for_each(|image| image.text.set_late(true));
            self.do_job(air);
        }
        self.go_on(air);
    }

    fn do_job(&mut self, air: &mut Air) {
        let Some((_, job)) = self.jobs.pop_front() else { return };
        let volume = BTreeSet::from([UUID]);
        match job {
            Job::Load(step) => {
                let served = ServedVolume::from(&*volume_of(0, self.write_back));
                match self.records.load(&served) {
                    Ok(_) => {
                        self.records.put_at_risk(&served);
                        let number = air.number();
                        self.jobs.push_front((number, Job::Put(step)));
                    }
                    Err(error) => self.loaded(air, step, Err(error.to_string())),
                }
            }
            Job::Put(step) => {
                let failed = self.records.write(&volume).remove(&UUID);
                self.loaded(air, step, failed.map_or(Ok(()), Err));
            }
            Job::Holder(ticket, record) => {
                self.records.set_holder(record);
                let failed = self.records.write(&volume).remove(&UUID);
                self.core.persisted(ticket, failed.map_or(Ok(()), Err));
            }
            Job::Store(identity) => {
                self.records.set_store(&UUID, identity);
                drop(self.records.write(&volume));
            }
            Job::Lower(step) => {
                self.records.lower_risk(&UUID, AtRisk::Nothing);
                let failed = self.records.write(&volume).remove(&UUID);
                if self.step.is_some_and(|(_, at)| at == step) {
                    self.stepped(air, failed.map_or(Ok(()), Err));
                }
            }
            Job::GiveBack(number) => {
                if let Some(image) = self.images.get_mut(&number) {
                    image.text.give_back();
                }
                self.keeps_note(air, number);
            }
        }
        self.begin_job(air);
    }

    /// The record says that hosts may write, or it cannot be written.
    fn loaded(&mut self, air: &mut Air, step: u64, result: Result<(), String>) {
        if self.step.is_none_or(|(_, at)| at != step) {
            return;
        }
        let Some(Changing::Serve(image)) = self.changing else { return };
        let altered = self.core.altered().map(Arc::clone);
        if let (Ok(()), Some(volume), Some(image)) = (&result, altered, self.images.get(&image)) {
            let record = self.records.record(&UUID);
            let holder = record.and_then(|record| record.holder().cloned());
            let store = record.and_then(|record| record.store().cloned());
            let verifier = record.and_then(|record| record.verifier());
            let base = Generation(1_000_000 + air.now * 1000);
            self.core.adopt_shared(UUID, (holder, store), base);
            let left = Duration::from_millis(image.for_holder_until.saturating_sub(air.now));
            self.core.keep_for_holder(volume.index, air.instant() + left);
            if let Some(verifier) = verifier {
                self.core.vouch(UUID, verifier);
            }
            let identity = match image.note.lineage {
                0 => "rbd:cluster/1//image".to_owned(),
                lineage => format!("rbd:cluster/1//image~{lineage}"),
            };
            let identity = StoreIdentity::parse(&identity);
            self.core.serve_from(&volume, identity.as_ref());
            self.job(air, Job::Store(identity));
        }
        self.stepped(air, result);
    }

    // Changes.

    /// Carries out all that is due.
    fn go_on(&mut self, air: &mut Air) {
        loop {
            let mut is_busy = false;
            while let Some(effect) = self.core.next_effect() {
                self.carry_out(air, effect);
                is_busy = true;
            }
            while self.core.next_occurrence().is_some() {}
            is_busy |= self.bury(air) | self.look_at_step(air) | self.begin_change(air);
            if !is_busy {
                break;
            }
        }
        self.settle(air);
        self.close_quiet(air);
    }

    fn settle(&mut self, air: &mut Air) {
        if !self.settles.is_empty() && self.serving.as_ref().is_none_or(|it| !it.has_dirty()) {
            let is_lost = self.serving.as_ref().is_some_and(|it| it.is_let_go);
            let result = if is_lost { Err("the image is lost".to_owned()) } else { Ok(()) };
            for ticket in std::mem::take(&mut self.settles) {
                self.core.settled(ticket, result.clone());
            }
            self.news(air, ControlNews::GoOn);
        }
    }

    /// Connections of which nothing is under way any more are gone.
    fn bury(&mut self, air: &mut Air) -> bool {
        let dying = |it: &&u64| {
            let connection = &self.connections[*it];
            connection.is_dying
        };
        let numbers: Vec<u64> = self.connections.keys().filter(dying).copied().collect();
        let mut is_busy = false;
        for number in numbers {
            if let (Some(serving), Some(connection)) =
                (&mut self.serving, self.connections.get_mut(&number))
            {
                for op in serving.forget_waiting(number) {
                    connection.ops.remove(&op);
                }
            }
            if !self.connections[&number].ops.is_empty() {
                continue;
            }
            if let Some(connection) = self.connections.remove(&number) {
                air.to_host((self.whose.member, connection.host), number, ToHost::Closed);
                self.core.gone(connection.admission, air.instant());
                is_busy = true;
            }
        }
        is_busy
    }

    /// The next change, if no other one is under way.
    fn begin_change(&mut self, air: &mut Air) -> bool {
        if self.changing.is_some() {
            return false;
        }
        if let Some(which) = self.lost_volume.take()
            && self.core.volume(which).is_some()
        {
            let name = volume_name().to_string();
            return self.change(air, &VolumeChange::Lose { name, which }, Changing::Lose);
        }
        if self.due.is_empty() {
            return false;
        }
        match self.due.remove(0) {
            DueChange::Serve(image) => {
                let add = VolumeConfig::rbd(volume_name().as_str(), "rbd/v");
                self.next_index += 1;
                let volume = volume_of(self.next_index, self.write_back);
                self.serving = Some(Serving::new(image, volume));
                self.change(air, &VolumeChange::Add(add), Changing::Serve(image))
            }
            DueChange::Yield(_) if self.serving.is_some() => {
                let name = volume_name().to_string();
                self.change(air, &VolumeChange::Yield { name }, Changing::Yield)
            }
            DueChange::Yield(_) => false,
        }
    }

    fn change(&mut self, air: &mut Air, change: &VolumeChange, what: Changing) -> bool {
        let Some(serving) = &self.serving else { return false };
        let volume = Arc::clone(&serving.volume);
        if let Changing::Serve(number) = what
            && let Some(image) = self.images.get(&number)
        {
            let place = "the state of an image".to_owned();
            let record = StateRecord::new(UUID, image.text.clone(), place);
            self.shared.put(UUID, Arc::new(record));
        }
        match self.core.change(change, volume, air.instant()) {
            Ok(()) => self.changing = Some(what),
            Err(error) => air.wrong(&format!("{change:?}: {error}")),
        }
        true
    }

    fn stepped(&mut self, air: &Air, result: Result<(), String>) {
        self.step = None;
        self.core.stepped(result, air.instant());
    }

    fn begin_step(&mut self, air: &mut Air, step: VolumeStep) {
        let number = air.number();
        self.step = Some((step, number));
        match step {
            VolumeStep::Record => self.job(air, Job::Load(number)),
            VolumeStep::Lower => self.job(air, Job::Lower(number)),
            VolumeStep::Add | VolumeStep::Access | VolumeStep::Drop | VolumeStep::Abandon => {
                self.news(air, ControlNews::Stepped(number));
            }
            VolumeStep::Close => {
                let sessions = &self.ever_opened;
                let its = self.connections.values_mut().filter(|it| sessions.contains(&it.session));
                its.for_each(|connection| connection.is_dying = true);
            }
            VolumeStep::WriteBack => self.write_all_back(air),
            VolumeStep::Quiet => {}
            other => unreachable!("{other:?} is no step of these changes"),
        }
    }

    /// The step under way may be done.
    fn look_at_step(&mut self, air: &Air) -> bool {
        let Some((step, _)) = self.step else { return false };
        let serving = self.serving.as_ref();
        let is_done = match step {
            VolumeStep::Close => !self.connections.values().any(|it| self.opens(it)),
            VolumeStep::WriteBack => serving.is_none_or(|it| !it.has_dirty()),
            VolumeStep::Quiet => serving.is_none_or(|it| !it.is_busy()),
            _ => return false,
        };
        // Dirty blocks of an image that is lost are not written.
        let is_lost = step == VolumeStep::WriteBack && serving.is_some_and(|it| it.is_let_go);
        if is_done {
            let result = if is_lost { Err("the image is lost".to_owned()) } else { Ok(()) };
            self.stepped(air, result);
        }
        is_done
    }

    fn altered(&mut self, air: &mut Air, result: Result<(), String>) {
        self.step = None;
        let Some(changing) = self.changing.take() else { return };
        match (changing, result) {
            (Changing::Serve(number), Ok(())) => {
                air.log.add("serves", [self.whose.member as u64, number, 0]);
                if let Some(image) = self.images.get_mut(&number) {
                    (image.listens, image.is_loss_heard) = (true, true);
                    if image.is_lost {
                        self.news(air, ControlNews::Lost(number));
                    }
                }
                self.core.claim_ended(volume_name(), &Ok(()));
            }
            (Changing::Serve(number), Err(why)) => {
                self.serving = None;
                self.records.take_back(&UUID);
                self.close(air, number);
                self.core.claim_ended(volume_name(), &Err(why));
            }
            (Changing::Yield | Changing::Lose, Ok(())) => {
                air.log.add("serves no longer", [self.whose.member as u64, 0, 0]);
                if let Some(serving) = self.serving.take() {
                    self.close(air, serving.image);
                }
            }
            (Changing::Yield | Changing::Lose, Err(_)) => {}
        }
    }

    fn carry_out(&mut self, air: &mut Air, effect: Effect) {
        match effect {
            Effect::Reply { to, status, payload, value, .. } => {
                self.reply(air, to, (status, value), payload);
            }
            Effect::Adopt { connection, session, epoch, .. } => {
                if let Some(it) =
                    self.connections.get_mut(&u64::from(connection.connection.generation))
                {
                    (it.session, it.epoch) = (session, epoch);
                }
            }
            Effect::Expel { connection } => {
                let number = u64::from(connection.connection.generation);
                self.end_those(|at, _| at == number);
            }
            Effect::Evict { admission } => self.end_those(|_, it| it.admission == admission),
            Effect::LimitHost { .. } | Effect::GivenUp(_) => {}
            Effect::All(notice) => self.notice(notice),
            Effect::Persist { ticket, record } => self.job(air, Job::Holder(ticket, record)),
            Effect::Claim { wish, .. } => self.begin_claim(air, wish),
            Effect::Settle { ticket, .. } => {
                self.settles.push(ticket);
                self.write_all_back(air);
            }
            Effect::Step(step) => self.begin_step(air, step),
            Effect::GiveUpStep => self.step = None,
            Effect::Altered(result) => self.altered(air, result),
            Effect::StopGroups => unreachable!("no member drains here"),
        }
    }

    fn end_those(&mut self, which: impl Fn(u64, &Connection) -> bool) {
        let connections = self.connections.iter_mut();
        connections.filter(|(at, it)| which(**at, it)).for_each(|(_, it)| it.is_dying = true);
    }

    fn reply(
        &mut self,
        air: &mut Air,
        to: ConnectionRef,
        (status, value): (Status, u32),
        mut payload: Vec<u8>,
    ) {
        let number = u64::from(to.connection.generation);
        let Some(connection) = self.connections.get(&number).filter(|it| !it.is_dying) else {
            return;
        };
        let open =
            payload.get(..OpenReply::BYTES).and_then(|bytes| OpenReply::from_wire(bytes).ok());
        let open = open.filter(|open| open.uuid == UUID);
        if let (Status::Ok, Some(open)) = (status, open) {
            air.log
                .add("OPEN", [connection.host as u64, self.whose.member as u64, open.generation.0]);
            let (mount, verifier, now) = (connection.mount, open.verifier, air.now);
            air.register.opened(mount, verifier, now);
        }
        if status == Status::Fenced && value == 0 {
            payload.clear();
        }
        air.to_host((self.whose.member, connection.host), number, ToHost::Admin(status, payload));
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Open { session, .. } => {
                self.opened.insert(session);
                self.ever_opened.insert(session);
            }
            Notice::Close { session, .. } => drop(self.opened.remove(&session)),
            Notice::EndConnections { session, before } => {
                self.end_those(|_, it| it.session == session && it.epoch < before);
            }
            Notice::EndEpoch { session, epoch } => {
                self.end_those(|_, it| (it.session, it.epoch) == (session, epoch));
            }
            Notice::Host { .. } => {}
            Notice::ForgetSession { session } => {
                self.opened.remove(&session);
                self.ever_opened.remove(&session);
            }
        }
    }
}

fn reference(number: u64) -> ConnectionRef {
    let generation = u32::try_from(number).expect("few connections");
    ConnectionRef { group: 0, connection: ConnectionId { index: 0, generation } }
}

/// Whether a call failed since its client is fenced.
#[must_use]
pub fn is_fenced(answer: &Answer) -> bool {
    *answer == Answer::Failed(Errno::ESHUTDOWN)
}

/// The opcode of OPEN, for messages.
pub const OPEN: Opcode = Opcode::OpenVolume;
