//! [`Air`]: everything between the parts of a simulation: the clock, the events that are due, the
//! cluster, and the faults that are in force.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rblk_protocol::{HelloRequest, LoginReply, Opcode, Status};
use rblk_rig::seed::Random;
use rblk_target::store::rbd::image_claim::AskAnswer;
use rblk_target::store::rbd::owner_question::Ask;

use super::cluster::{Answer, Call, Cluster, SharedCluster, of};
use super::plan::Plan;
use super::register::{MountId, Register};
use super::{HOSTS, OBJECTS};
use crate::sim::log::Log;

/// A process of a member: its number, and how often it was started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whose {
    /// The member.
    pub member: usize,
    /// Its life.
    pub life: u64,
}

/// Why a member calls the cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// For its claim.
    Claim,
    /// To see whether a new owner still has the lock, when no former one answers any more.
    StillHas(u64),
    /// To look after the lock of an image.
    Look(u64),
    /// To see whether an image may be given back.
    Close(u64),
    /// For an op of a block of an image: a write-back has no number.
    Data(u64, usize, Option<u64>),
}

/// A call under way to the cluster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sent {
    /// The process.
    pub by: Whose,
    /// The client.
    pub client: String,
    /// The map that the client had.
    pub map: u64,
    /// The call.
    pub call: Call,
    /// Why.
    pub purpose: Purpose,
}

/// A question of a member to the owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    /// The process that asks.
    pub by: Whose,
    /// The number of the question.
    pub number: u64,
    /// The question.
    pub ask: Ask,
}

/// A request of a host for blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Io {
    /// Read a block.
    Read(usize),
    /// Write a block.
    Write(usize, u64),
    /// Make all durable.
    Flush,
}

/// A message of a host.
#[derive(Clone, Debug)]
pub enum ToMember {
    /// Connect, for a mount.
    Hello(HelloRequest, MountId),
    /// An admin command.
    Admin(Opcode, Vec<u8>),
    /// A request.
    Io(u64, Io),
    /// The connection is over.
    Close,
}

/// A message of a member.
#[derive(Clone, Debug)]
pub enum ToHost {
    /// The connection is made.
    Accepted,
    /// The connection is refused; the flag: the session is gone.
    Refused(bool),
    /// The answer to an admin command.
    Admin(Status, Vec<u8>),
    /// A request has ended, with the value that was read.
    Io(u64, u64),
    /// The connection is over.
    Closed,
}

/// A moment that a member waits for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Timer {
    /// A pause of the claim.
    Pause(u64),
    /// A question was not answered in time.
    AskOver(u64),
    /// Nobody waits for the claim any more.
    ClaimLate(u64),
    /// No former owner of an image answers any more.
    FormerOver(u64),
    /// A former owner of that image answers nobody any more, and it may be given back.
    ForHolderOver(u64),
    /// Dirty blocks are to be written.
    WriteBack(u64),
    /// Control has news.
    Control(ControlNews),
}

/// News for the control of a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ControlNews {
    /// An image is open.
    Opened(u64),
    /// An image cannot be had.
    NotOpened(String),
    /// An image is lost.
    Lost(u64),
    /// A step of the change of this number is done.
    Stepped(u64),
    /// Something else may go on.
    GoOn,
}

/// What happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// A call reaches the cluster.
    Arrives(Sent),
    /// The answer reaches the member.
    Answered(Whose, String, Purpose, Answer),
    /// The thread of the records works.
    Job(Whose, u64),
    /// A record was not written in time.
    JobLate(Whose, u64),
    /// A question reaches the cluster.
    Notifies(Question),
    /// A question reaches the owner, with this client.
    Asked(Whose, String, Question),
    /// The answer reaches the member that asked: the epoch of the owner.
    AskAnswered(Whose, u64, u64, AskAnswer),
    /// A message reaches a member.
    Member(Whose, usize, u64, ToMember),
    /// A message of a member reaches a host.
    Host((usize, usize), u64, ToHost),
    /// A moment that a member waits for.
    Timer(Whose, Timer),
    /// An OSD learns of a map.
    Learns(usize, u64),
    /// A client learns of a map.
    ClientLearns(String, u64),
    /// librbd takes the lock again.
    TakesAgain(String),
    /// A member is stopped.
    Stops(usize, u64),
    /// A fault ends.
    Heals(Healing),
    /// The next fault of the plan.
    Fault,
    /// Every part looks at the time.
    Tick,
}

/// The end of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Healing {
    /// A member starts again.
    Start(usize),
    /// A member goes on.
    Continue(usize),
    /// A member reaches the cluster.
    Cluster(usize),
    /// A host reaches a member.
    Link(usize, usize),
    /// Other members reach the owner.
    Watch(usize),
    /// The process of a mount starts again.
    Host(usize),
}

struct Due(u64, u64, Event);

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.1 == other.1
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.0, other.1).cmp(&(self.0, self.1))
    }
}

/// See the module.
pub struct Air {
    /// The time in milliseconds.
    pub now: u64,
    base: Instant,
    queue: BinaryHeap<Due>,
    count: u64,
    /// The cluster.
    pub cluster: SharedCluster,
    /// All choices.
    pub random: Random,
    /// The last events.
    pub log: Log,
    /// The judge.
    pub register: Register,
    /// By member: its life, if it is alive.
    pub lives: Vec<Option<u64>>,
    /// By member: it is stopped.
    pub paused: Vec<bool>,
    /// By member: it does not reach the cluster.
    pub cut: Vec<bool>,
    /// By host and member: the link is broken, since when.
    pub links: Vec<Vec<Option<u64>>>,
    /// By member: since when it is stopped.
    pub paused_since: Vec<Option<u64>>,
    /// Calls and answers that wait for the link to the cluster.
    held: Vec<Event>,
    /// Until then some writes take long.
    pub slow_until: u64,
    /// How long OSDs and clients take to learn of a map.
    pub map_delay: u64,
    /// The next lock that is taken is lost for so long, soon.
    pub drop_after_lock: Option<u64>,
    /// The next member that has the lock and waits for the map is stopped for so long.
    pub stop_claim: Option<u64>,
    known_map: u64,
    /// Clients made so far.
    pub made: u64,
    /// Questions, connections and others.
    pub numbers: u64,
    /// Claims that ended with an image.
    pub owned: u64,
}

impl std::fmt::Debug for Air {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Air").field("now", &self.now).finish_non_exhaustive()
    }
}

impl Air {
    /// The air of a plan, before any event.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        Self {
            now: 0,
            base: Instant::now(),
            queue: BinaryHeap::new(),
            count: 0,
            cluster: Arc::new(Mutex::new(Cluster::new(plan.members))),
            random: Random::new(plan.seed ^ 0x6772_6f75_7021),
            log: Log::new(),
            register: Register::new(!plan.write_back),
            lives: vec![None; plan.members],
            paused: vec![false; plan.members],
            cut: vec![false; plan.members],
            links: vec![vec![None; plan.members]; HOSTS],
            paused_since: vec![None; plan.members],
            held: Vec::new(),
            slow_until: 0,
            map_delay: plan.map_delay,
            drop_after_lock: None,
            stop_claim: None,
            known_map: 1,
            made: 0,
            numbers: 0,
            owned: 0,
        }
    }

    /// The time for the product's code.
    #[must_use]
    pub fn instant(&self) -> Instant {
        self.base + Duration::from_millis(self.now)
    }

    /// A new number.
    pub fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// An event, so many milliseconds from now.
    pub fn after(&mut self, delay: u64, event: Event) {
        self.count += 1;
        self.queue.push(Due(self.now + delay, self.count, event));
    }

    /// The next event.
    pub fn next_event(&mut self) -> Option<Event> {
        let Due(at, _, event) = self.queue.pop()?;
        self.now = at;
        self.log.at(at);
        let mut cluster = of(&self.cluster);
        cluster.now = at;
        drop(cluster);
        Some(event)
    }

    /// Whether a process lives.
    #[must_use]
    pub fn lives(&self, whose: Whose) -> bool {
        self.lives[whose.member] == Some(whose.life)
    }

    /// A client calls the cluster.
    pub fn call(&mut self, by: Whose, client: &str, call: Call, purpose: Purpose) {
        let map = of(&self.cluster).clients[client].map;
        let is_slow = matches!(call, Call::Write(..)) && self.now < self.slow_until;
        let delay = match is_slow && self.random.chance(500) {
            true => self.random.within(500, 25_000),
            false => self.random.within(1, 6),
        };
        let sent = Event::Arrives(Sent { by, client: client.to_owned(), map, call, purpose });
        match self.cut[by.member] {
            true => self.held.push(sent),
            false => self.after(delay, sent),
        }
    }

    /// A call reaches the cluster, or waits for the link. Calls that are under way when their
    /// process dies may still arrive.
    pub fn arrives(&mut self, sent: Sent) {
        if self.cut[sent.by.member] && self.lives(sent.by) && self.random.chance(500) {
            return self.held.push(Event::Arrives(sent));
        }
        let Sent { by, client, map, call, purpose } = sent;
        let answer = of(&self.cluster).carry_out(&client, map, &call);
        let is_lock = call == Call::Acquire && answer == Answer::Done(true);
        let purpose_is_claim = purpose == Purpose::Claim;
        let reply = Event::Answered(by, client.clone(), purpose, answer);
        let delay = self.random.within(1, 6);
        self.after(delay, reply);
        let waits = call == Call::NewestMap && purpose_is_claim;
        if let (true, Some(long)) = (waits && self.has_lock(&client), self.stop_claim) {
            self.stop_claim = None;
            let lost = Event::TakesAgain(String::new());
            self.after(0, lost);
            self.after(0, Event::Stops(by.member, long));
        }
        if let (true, Some(long)) = (is_lock, self.drop_after_lock) {
            self.drop_after_lock = None;
            let delay = self.random.within(0, 20);
            self.after(delay, Event::TakesAgain(String::new()));
            self.after(delay + long, Event::TakesAgain(client));
        }
        self.spread_maps();
    }

    fn has_lock(&self, client: &str) -> bool {
        of(&self.cluster).lock().is_some_and(|lock| lock.address == client)
    }

    /// OSDs and clients will learn of new maps.
    pub fn spread_maps(&mut self) {
        let map = of(&self.cluster).map;
        if map == self.known_map {
            return;
        }
        self.known_map = map;
        for object in 0..OBJECTS + 2 {
            let delay = self.random.within(5, self.map_delay);
            self.after(delay, Event::Learns(object, map));
        }
        let is_open = |it: &super::cluster::Client| it.is_open;
        let clients = of(&self.cluster);
        let names: Vec<String> = clients
            .clients
            .iter()
            .filter(|(_, it)| is_open(it))
            .map(|(name, _)| name.clone())
            .collect();
        drop(clients);
        for name in names {
            let delay = self.random.within(5, self.map_delay);
            self.after(delay, Event::ClientLearns(name, map));
        }
    }

    /// Keeps an event until the member reaches the cluster.
    pub fn hold(&mut self, event: Event) {
        self.held.push(event);
    }

    /// A member reaches the cluster again, or its process is gone. Librados sends its calls again,
    /// with the map that it has then.
    pub fn release(&mut self, member: usize) {
        for event in std::mem::take(&mut self.held) {
            let by = match &event {
                Event::Arrives(sent) => sent.by,
                Event::Answered(by, ..) | Event::Job(by, _) => *by,
                Event::Notifies(question) => question.by,
                _ => unreachable!("only these are held"),
            };
            if by.member != member {
                self.held.push(event);
                continue;
            }
            if !self.lives(by) {
                continue;
            }
            let delay = self.random.within(1, 200);
            let event = match event {
                Event::Arrives(sent) => {
                    let map = of(&self.cluster).clients[&sent.client].map;
                    Event::Arrives(Sent { map, ..sent })
                }
                event => event,
            };
            self.after(delay, event);
        }
    }

    /// A message to a member. On a broken link it waits.
    pub fn to_member(&mut self, whose: Whose, host: usize, connection: u64, message: ToMember) {
        let delay = self.random.within(1, 4);
        self.after(delay, Event::Member(whose, host, connection, message));
    }

    /// A message of a member to a host.
    pub fn to_host(&mut self, ends: (usize, usize), connection: u64, message: ToHost) {
        let delay = self.random.within(1, 4);
        self.after(delay, Event::Host(ends, connection, message));
    }

    /// Stops with a reason.
    ///
    /// # Panics
    /// Always.
    pub fn wrong(&self, what: &str) -> ! {
        panic!("{} ms: {what}", self.now)
    }
}

/// The reply to a LOGIN.
#[must_use]
pub fn login_of(payload: &[u8]) -> Option<LoginReply> {
    LoginReply::from_wire(payload.get(..LoginReply::BYTES)?).ok()
}
