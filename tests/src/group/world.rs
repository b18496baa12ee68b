//! [`World`]: the members, the hosts and the cluster of a run, and the faults that strike them.

use std::collections::VecDeque;
use std::fmt;

use super::air::{Air, Event, Healing, Question, Timer, Whose};
use super::cluster::of;
use super::initiator::Initiator;
use super::member::Member;
use super::plan::{Fault, Plan};
use super::{HOSTS, OBJECTS};

/// Milliseconds between two ticks, and during a long pause.
const TICK: u64 = 100;
const LONG_TICK: u64 = 5_000;
/// Milliseconds for an answer to a question, and to one that nobody hears.
const ANSWER: u64 = 4_000;
const NOBODY: u64 = 1_000;
/// Milliseconds until everything goes on after the last fault.
const RECOVERY: u64 = 200_000;

/// Counts of runs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// Requests that ended.
    pub requests: u64,
    /// Claims that ended with the image.
    pub owners: u64,
    /// Mounts that came back.
    pub resumed: u64,
    /// Mounts that lost the volume to another.
    pub fenced: u64,
    /// Changes of the write verifier.
    pub losses: u64,
    /// Calls of fenced clients.
    pub refused: u64,
    /// Events.
    pub events: u64,
    /// The longest time that a request took, in milliseconds.
    pub longest: u64,
    /// A hash of all events.
    pub fingerprint: u64,
}

impl Report {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.owners += other.owners;
        self.resumed += other.resumed;
        self.fenced += other.fenced;
        self.losses += other.losses;
        self.refused += other.refused;
        self.events += other.events;
        self.longest = self.longest.max(other.longest);
        self.fingerprint ^= other.fingerprint;
    }
}

/// See the module.
pub struct World {
    plan: Plan,
    air: Air,
    members: Vec<Option<Member>>,
    lives: u64,
    // By member: what waits until it goes on.
    deferred: Vec<VecDeque<Event>>,
    hosts: Vec<Initiator>,
    fault: usize,
    owned: u64,
    events: u64,
    // The end of the faults.
    calm_at: Option<u64>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() && std::env::var_os("RBLK_MUTATION").is_none() {
            eprintln!(
                "seed {}: RBLK_SEED={} runs it again\n{:?}\nlast events (ms, what, of whom, numbers):\n{}",
                self.plan.seed, self.plan.seed, self.plan, self.air.log
            );
        }
    }
}

impl World {
    /// Runs a plan to its end.
    ///
    /// # Panics
    /// A result is wrong.
    #[must_use]
    pub fn run(plan: Plan) -> Report {
        let mut world = Self::new(plan);
        while world.calm_at.is_none() {
            world.step();
        }
        world.recover();
        world.report()
    }

    fn new(plan: Plan) -> Self {
        let air = Air::new(&plan);
        let host = |host| Initiator::new(host, plan.members, plan.write_back, plan.retain);
        let mut world = Self {
            air,
            members: (0..plan.members).map(|_| None).collect(),
            lives: 0,
            deferred: vec![VecDeque::new(); plan.members],
            hosts: (0..HOSTS).map(host).collect(),
            fault: 0,
            owned: 0,
            events: 0,
            calm_at: None,
            plan,
        };
        (0..world.plan.members).for_each(|member| world.start(member));
        world.hosts[0].mount(&mut world.air, false);
        world.air.after(TICK, Event::Tick);
        world.air.after(2_000, Event::Fault);
        world
    }

    fn report(&self) -> Report {
        let sum = |count: fn(&Initiator) -> u64| self.hosts.iter().map(count).sum();
        Report {
            requests: sum(|host| host.done),
            owners: self.air.owned,
            resumed: sum(|host| host.resumed),
            fenced: sum(|host| host.fenced),
            losses: self.air.register.losses,
            refused: of(&self.air.cluster).refused,
            events: self.events,
            longest: self.hosts.iter().map(|host| host.longest).max().unwrap_or(0),
            fingerprint: self.air.log.hash(),
        }
    }

    fn start(&mut self, member: usize) {
        self.lives += 1;
        let whose = Whose { member, life: self.lives };
        self.members[member] = Some(Member::start(&mut self.air, whose, self.plan.write_back));
    }

    /// Lets one thing happen.
    fn step(&mut self) {
        let event = self.air.next_event().expect("there is a tick");
        self.events += 1;
        self.happens(event);
        let late = of(&self.air.cluster).late_write.take();
        if let Some(late) = late {
            self.air.wrong(&late);
        }
        if self.air.owned != self.owned {
            self.owned = self.air.owned;
            self.check_owners();
        }
    }

    fn check_owners(&self) {
        let images = self.members.iter().flatten().flat_map(|member| member.images.values());
        let cluster = of(&self.air.cluster);
        let owns = images.filter(|it| !it.is_lost && !it.closes && !cluster.is_fenced(&it.client));
        let owners: Vec<&str> = owns.map(|image| image.client.as_str()).collect();
        if owners.len() > 1 {
            self.air.wrong(&format!("there are several owners: {owners:?}"));
        }
    }

    /// The process that an event is for, if it is for one.
    fn whose(event: &Event) -> Option<Whose> {
        match event {
            Event::Answered(by, ..)
            | Event::Job(by, _)
            | Event::JobLate(by, _)
            | Event::Asked(by, ..)
            | Event::AskAnswered(by, ..)
            | Event::Member(by, ..)
            | Event::Timer(by, _) => Some(*by),
            _ => None,
        }
    }

    fn happens(&mut self, event: Event) {
        if let Some(whose) = Self::whose(&event) {
            if !self.air.lives(whose) {
                return;
            }
            let is_cut = self.air.cut[whose.member];
            if is_cut && matches!(event, Event::Answered(..) | Event::Job(..)) {
                return self.air.hold(event);
            }
            if let Event::Member(_, host, ..) = &event
                && self.air.links[*host][whose.member].is_some()
            {
                return self.air.after(TICK, event);
            }
            if self.air.paused[whose.member] {
                return self.deferred[whose.member].push_back(event);
            }
            return self.of_member(whose, event);
        }
        match event {
            Event::Arrives(sent) => self.air.arrives(sent),
            Event::Notifies(question) => self.notifies(question),
            Event::Host((member, host), connection, message) => {
                match self.air.links[host][member] {
                    Some(_) => {
                        let event = Event::Host((member, host), connection, message);
                        self.air.after(TICK, event);
                    }
                    None => self.hosts[host].hears(&mut self.air, connection, message),
                }
            }
            Event::Learns(object, map) => of(&self.air.cluster).learn(object, map),
            Event::ClientLearns(client, map) => self.client_learns(&client, map),
            Event::TakesAgain(client) => {
                let mut cluster = of(&self.air.cluster);
                match client.is_empty() {
                    true => drop(cluster.drop_lock()),
                    false => cluster.take_again(&client),
                }
            }
            Event::Stops(member, time) => self.strike(Fault::Pause(member, time)),
            Event::Heals(healing) => self.heals(healing),
            Event::Fault => self.next_fault(),
            Event::Tick => self.tick(),
            _ => unreachable!("of a member"),
        }
    }

    fn of_member(&mut self, whose: Whose, event: Event) {
        let (air, Some(member)) = (&mut self.air, &mut self.members[whose.member]) else { return };
        match event {
            Event::Answered(_, client, purpose, answer) => {
                member.called(air, &client, purpose, answer);
            }
            Event::Job(_, number) => member.work(air, number),
            Event::JobLate(_, number) => member.work_late(air, number),
            Event::Asked(_, client, question) => member.asked(air, &client, &question),
            Event::AskAnswered(_, question, epoch, answer) => {
                member.ask_answered(air, question, epoch, answer);
            }
            Event::Member(_, host, connection, message) => {
                member.hears(air, (host, connection), message);
            }
            Event::Timer(_, timer) => member.timer(air, timer),
            _ => unreachable!("of no member"),
        }
    }

    fn client_learns(&mut self, client: &str, map: u64) {
        let mut cluster = of(&self.air.cluster);
        let Some(it) = cluster.clients.get_mut(client) else { return };
        let member = it.member;
        if !self.air.cut[member] && !self.air.paused[member] {
            it.map = it.map.max(map);
        }
    }

    /// A question of a member goes to all that watch the object beside the image.
    fn notifies(&mut self, question: Question) {
        let Whose { member, .. } = question.by;
        if self.air.cut[member] {
            return self.air.hold(Event::Notifies(question));
        }
        let cluster = of(&self.air.cluster);
        let watchers = cluster
            .clients
            .iter()
            .filter(|(name, it)| it.watches_state && cluster.is_watched(name));
        let watchers: Vec<(String, usize)> =
            watchers.map(|(name, it)| (name.clone(), it.member)).collect();
        drop(cluster);
        let wait = if watchers.is_empty() { NOBODY } else { ANSWER };
        let over = Timer::AskOver(question.number);
        self.air.after(wait, Event::Timer(question.by, over));
        for (client, member) in watchers {
            let Some(life) = self.air.lives[member].filter(|_| !self.air.cut[member]) else {
                continue;
            };
            let delay = self.air.random.within(1, 6);
            let whose = Whose { member, life };
            self.air.after(delay, Event::Asked(whose, client, question.clone()));
        }
    }

    fn tick(&mut self) {
        of(&self.air.cluster).end_fences();
        self.air.spread_maps();
        for member in 0..self.members.len() {
            if self.air.paused[member] {
                continue;
            }
            if let Some(it) = &mut self.members[member] {
                it.tick(&mut self.air);
            }
        }
        // In the end nothing new begins.
        let begins = self.calm_at.is_none_or(|at| self.air.now < at + RECOVERY / 2);
        for host in &mut self.hosts {
            host.tick(&mut self.air, begins);
        }
        let is_long =
            |since: &Option<u64>| since.is_some_and(|since| self.air.now > since + 60_000);
        let is_slow = self.air.paused_since.iter().any(is_long);
        // Looks are made at whole seconds.
        let tick = if is_slow { LONG_TICK } else { TICK };
        let until = self.air.now.next_multiple_of(tick).max(self.air.now + 1);
        let until = if until == self.air.now { until + tick } else { until };
        let next = if self.air.now.is_multiple_of(tick) { self.air.now + tick } else { until };
        self.air.after(next - self.air.now, Event::Tick);
    }

    // Faults.

    fn owner(&self) -> Option<usize> {
        self.members.iter().position(|it| it.as_ref().is_some_and(Member::serves))
    }

    fn is_owner(&self, member: usize) -> bool {
        self.members[member].as_ref().is_some_and(Member::serves)
    }

    fn next_fault(&mut self) {
        let Some((_, fault)) = self.plan.faults.get(self.fault).copied() else {
            self.calm_at = Some(self.air.now);
            return;
        };
        self.fault += 1;
        let next = self.plan.faults.get(self.fault).map_or(15_000, |(gap, _)| *gap);
        self.air.after(next, Event::Fault);
        let owner = self.owner();
        let of_owner = |fault: fn(usize, u64) -> Fault, time| owner.map(|at| fault(at, time));
        let fault = match fault {
            Fault::KillOwner(time) => of_owner(Fault::Kill, time),
            Fault::PauseOwner(time) => of_owner(Fault::Pause, time),
            Fault::CutOwner(time) => of_owner(Fault::Cut, time),
            Fault::LinkOwner(time) => {
                let host = self.air.random.index(HOSTS);
                owner.map(|at| Fault::Link(host, at, time))
            }
            Fault::LinkUsed(time) => {
                self.hosts[0].member().map(|member| Fault::Link(0, member, time))
            }
            fault => Some(fault),
        };
        if let Some(fault) = fault {
            self.strike(fault);
        }
    }

    fn strike(&mut self, fault: Fault) {
        let air = &mut self.air;
        match fault {
            Fault::Kill(member, time) => {
                air.log.add("kill", [member as u64, time, 0]);
                self.kill(member, time);
            }
            Fault::Pause(member, time) if !air.paused[member] && air.lives[member].is_some() => {
                air.log.add("pause", [member as u64, time, 0]);
                (air.paused[member], air.paused_since[member]) = (true, Some(air.now));
                air.after(time, Event::Heals(Healing::Continue(member)));
            }
            Fault::Cut(member, time) if !air.cut[member] => {
                air.log.add("cut", [member as u64, time, 0]);
                air.cut[member] = true;
                air.after(time, Event::Heals(Healing::Cluster(member)));
            }
            Fault::Link(host, member, time) if air.links[host][member].is_none() => {
                air.log.add("link", [host as u64, member as u64, time]);
                air.links[host][member] = Some(air.now);
                air.after(time, Event::Heals(Healing::Link(host, member)));
            }
            Fault::Move => {
                air.log.add("move", [0; 3]);
                for member in self.members.iter_mut().flatten() {
                    if member.serves() && !self.air.paused[member.whose.member] {
                        member.order_move(&mut self.air);
                    }
                }
            }
            Fault::Mount(host, take_over) => self.hosts[host].mount(air, take_over),
            Fault::Host(host, time) => self.hosts[host].crash(air, time),
            Fault::DropLock(time) => {
                let dropped = of(&air.cluster).drop_lock();
                air.log.add("lock lost", [time, 0, 0]);
                if let Some(client) = dropped {
                    air.after(time, Event::TakesAgain(client));
                }
            }
            Fault::DropNextLock(time) => air.drop_after_lock = Some(time),
            Fault::StopNextClaim(time) => air.stop_claim = Some(time),
            Fault::KillOthers(time) => {
                let others = (0..self.members.len()).filter(|at| !self.is_owner(*at));
                let others: Vec<usize> = others.collect();
                others.into_iter().for_each(|member| self.kill(member, time));
            }
            Fault::Watch(time) => {
                let mut cluster = of(&air.cluster);
                let owner = cluster.note().client;
                if let Some(it) = cluster.clients.get_mut(&owner) {
                    it.watches_state = false;
                }
                drop(cluster);
                air.log.add("watch lost", [time, 0, 0]);
                air.after(time, Event::Heals(Healing::Watch(0)));
            }
            Fault::Slow(time) => air.slow_until = air.now + time,
            _ => {}
        }
        self.hears_of_members();
    }

    /// The cluster hears of the members that run and reach it.
    fn hears_of_members(&mut self) {
        let now = self.air.now;
        let mut cluster = of(&self.air.cluster);
        for member in 0..self.members.len() {
            let is_silent = self.air.cut[member] || self.air.paused[member];
            let since = &mut cluster.silent_since[member];
            *since = is_silent.then(|| since.unwrap_or(now));
        }
    }

    fn kill(&mut self, member: usize, time: u64) {
        let Some(killed) = self.members[member].take() else { return };
        killed.die(&mut self.air);
        self.deferred[member].clear();
        (self.air.paused[member], self.air.paused_since[member]) = (false, None);
        self.air.release(member);
        self.air.after(time.max(200), Event::Heals(Healing::Start(member)));
    }

    fn heals(&mut self, healing: Healing) {
        match healing {
            Healing::Start(member) if self.members[member].is_none() => self.start(member),
            Healing::Continue(member) if self.air.paused[member] => {
                self.air.log.add("continue", [member as u64, 0, 0]);
                (self.air.paused[member], self.air.paused_since[member]) = (false, None);
                let deferred = std::mem::take(&mut self.deferred[member]);
                deferred.into_iter().for_each(|event| self.happens(event));
            }
            Healing::Cluster(member) if self.air.cut[member] => {
                self.air.log.add("reaches the cluster", [member as u64, 0, 0]);
                self.air.cut[member] = false;
                self.air.release(member);
            }
            Healing::Link(host, member) => self.air.links[host][member] = None,
            Healing::Watch(_) => {
                let mut cluster = of(&self.air.cluster);
                let owner = cluster.note().client;
                if let Some(it) = cluster.clients.get_mut(&owner).filter(|it| it.is_open) {
                    it.watches_state = true;
                }
            }
            Healing::Host(host) => self.hosts[host].recover(&self.air),
            _ => {}
        }
        self.hears_of_members();
    }

    // The end.

    /// Ends all faults, and waits until every request has ended.
    fn recover(&mut self) {
        let calm = self.air.now;
        self.air.log.add("calm", [0; 3]);
        (self.air.slow_until, self.air.drop_after_lock) = (0, None);
        self.air.stop_claim = None;
        for member in 0..self.members.len() {
            self.heals(Healing::Start(member));
            self.heals(Healing::Continue(member));
            self.heals(Healing::Cluster(member));
            (0..HOSTS).for_each(|host| self.heals(Healing::Link(host, member)));
        }
        (0..HOSTS).for_each(|host| self.heals(Healing::Host(host)));
        while self.air.now < calm + RECOVERY {
            if !self.hosts.iter().any(Initiator::is_mounting) {
                self.hosts[0].mount(&mut self.air, true);
            }
            self.step();
        }
        self.check_end("a request does not end");
        let holder = self.hosts.iter().position(Initiator::has_volume);
        let Some(holder) = holder else { self.air.wrong("nobody can mount the volume") };
        self.hosts[holder].read_all(&mut self.air);
        let until = self.air.now + RECOVERY / 4;
        while self.air.now < until && self.hosts[holder].outstanding() > 0 {
            self.step();
        }
        self.check_end("the last reads do not end");
        let fenced = self.hosts.iter().any(|host| host.fenced > 0);
        if self.plan.is_gentle() && fenced {
            self.air.wrong("a mount is fenced for nothing");
        }
    }

    fn check_end(&self, what: &str) {
        let late = self.hosts.iter().position(|host| host.outstanding() > 0);
        if let Some(late) = late {
            let cluster = of(&self.air.cluster);
            let (lock, note) = (cluster.lock().cloned(), cluster.note());
            self.air.wrong(&format!("{what}: host {late}, lock {lock:?}, {note:?}"));
        }
    }
}

/// The objects of a cluster: of the image, beside it, and its header.
pub const ALL_OBJECTS: usize = OBJECTS + 2;
