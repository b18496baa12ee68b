//! [`Ways`]: the ways of a process that uses several at once: its joins, DROPs and the deaths of
//! ways, in the order of the product's link.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::soft::network::FaultyWire;
use rblk_initiator::engine::path::Path;
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::volume::admin::AdminChannel;
use rblk_initiator::volume::course::CourseState;
use rblk_initiator::volume::ways::{JoinFailure, Lives, WayAct, WayRules, WayTry};
use rblk_protocol::{
    ConnectionKind, DropRequest, Epoch, LoginReply, LoginRequest, Opcode, SessionId, Status,
};

use super::phase::Destination;
use super::{Ground, Process, Session};
use crate::sim::admin::{self, AdminEnd, Heard};
use crate::sim::plan::Moment;

/// The time limit of a LOGIN, which may wait for the last life of its way.
const LOGIN_LIMIT: Duration = Duration::from_secs(35);

/// See the module.
#[derive(Debug)]
pub(super) struct Ways {
    lives: Lives,
    joining: Option<Joining>,
    dropping: Option<(WayIndex, DropRequest)>,
    // The way of each epoch that paths were made in, until the target has ended it.
    places: BTreeMap<Epoch, WayIndex>,
}

/// A way that comes back.
#[derive(Debug)]
struct Joining {
    attempt: WayTry,
    since: Instant,
    phase: JoinPhase,
    admin: Option<AdminEnd>,
}

#[derive(Debug)]
enum JoinPhase {
    // The connect request is under way.
    Knock { due: u64 },
    // The connect request has no answer.
    Unanswered,
    Login,
    // The next queue's connect request is under way.
    Queue { due: u64, paths: Vec<(Path, Vec<FaultyWire>)> },
    // The queues have their paths.
    Test,
}

/// The progress of a join in one turn.
enum Joined {
    On,
    Failed(JoinFailure),
    Lives,
}

/// The way of an address.
pub(super) fn way_of(address: usize) -> WayIndex {
    WayIndex::new(address).expect("few addresses")
}

impl Ways {
    /// The links of a join under way by that address.
    pub(super) fn wires(&self, address: usize) -> Vec<FaultyWire> {
        let Some(joining) = &self.joining else { return Vec::new() };
        if joining.attempt.way.get() != address {
            return Vec::new();
        }
        let mut wires: Vec<_> = joining.admin.iter().map(|admin| admin.wire().clone()).collect();
        if let JoinPhase::Queue { paths, .. } = &joining.phase {
            wires.extend(paths.iter().flat_map(|(_, wires)| wires.clone()));
        }
        wires
    }

    /// Whether its next message is due within a few steps.
    pub(super) fn is_hasty(&self) -> bool {
        let is_due = |joining: &Joining| {
            matches!(joining.phase, JoinPhase::Knock { .. } | JoinPhase::Queue { .. })
        };
        self.joining.as_ref().is_some_and(is_due)
    }

    /// The way that paths of an epoch were made for, until the target has ended it.
    pub(super) fn place(&self, epoch: Epoch) -> Option<WayIndex> {
        self.places.get(&epoch).copied()
    }

    /// The number of living ways.
    pub(super) fn living(&self) -> usize {
        self.lives.living().count()
    }

    /// Nothing is under way any more.
    pub(super) fn leave(&mut self) {
        (self.joining, self.dropping) = (None, None);
    }
}

impl Process {
    /// The mount has its first way, or is back by one. The queues are about to get their paths.
    pub(super) fn begin_ways(&mut self, address: usize, epoch: Epoch, now: Instant) {
        if !self.plan.ways {
            return;
        }
        let (way, places) = (way_of(address), BTreeMap::from([(epoch, way_of(address))]));
        match &mut self.ways {
            Some(ways) => {
                ways.lives.restarted(way, epoch, now);
                ways.places = places;
            }
            None => {
                let reconnect_delay = self.rules().reconnect_delay;
                let rules = WayRules { ways: self.plan.addresses, reconnect_delay };
                let lives = Lives::new(rules, way, epoch, now);
                self.ways = Some(Ways { lives, joining: None, dropping: None, places });
            }
        }
    }

    /// The path of a way ended, or its admin connection.
    pub(super) fn way_dies(&mut self, way: WayIndex, ground: &mut Ground<'_>) {
        let Some(ways) = &mut self.ways else { return self.lose(ground) };
        let (now, random) = (ground.site.rig.now(), self.random.bits());
        ground.log.add("a way dies", [self.mount.0.into(), way.get() as u64, 0]);
        self.sessions.retain(|session| way_of(session.address) != way);
        ways.joining.take_if(|joining| joining.attempt.way == way);
        ways.dropping.take_if(|(by, _)| *by == way);
        ways.lives.died(way, now, random);
        for queue in &self.queues {
            ground.site.rig.end_way(*queue, way);
        }
        if ways.lives.are_lost() {
            self.lose(ground);
        }
    }

    /// DROP was answered by a way.
    pub(super) fn drop_answered(
        &mut self,
        address: usize,
        status: Status,
        ground: &mut Ground<'_>,
    ) {
        let by = way_of(address);
        let Some(ways) = &mut self.ways else { panic!("an answer to nothing") };
        let (_, request) = ways.dropping.take_if(|(asked, _)| *asked == by).expect("a DROP");
        ground.log.add("DROP came", [self.mount.0.into(), by.get() as u64, status as u64]);
        if status == Status::TimedOut {
            return ways.lives.drop_failed(by);
        }
        assert_eq!(status, Status::Ok, "DROP");
        let over = ways.lives.dropped(by, &request);
        self.are_over(over, ground);
    }

    /// The target has ended these epochs.
    fn are_over(&mut self, epochs: impl IntoIterator<Item = Epoch>, ground: &mut Ground<'_>) {
        let Some(ways) = &mut self.ways else { return };
        for epoch in epochs {
            if let Some(way) = ways.places.remove(&epoch) {
                for queue in &self.queues {
                    ground.site.rig.engine_mut(*queue).way_dropped(way);
                }
            }
        }
    }

    /// One turn of the ways beside the living one.
    pub(super) fn turn_ways(&mut self, ground: &mut Ground<'_>) {
        self.go_on_joining(ground);
        let now = ground.site.rig.now();
        loop {
            let serves = |course: &&mut super::Course| {
                course.state() == CourseState::Connected && !course.is_holding()
            };
            let Some(course) = self.course.as_mut().filter(serves) else { return };
            let newest = course.facts().resume.map_or(Epoch(1), |(_, epoch)| epoch);
            let Some(act) = self.ways.as_mut().and_then(|ways| ways.lives.due(newest, now)) else {
                return;
            };
            match act {
                WayAct::Join(attempt) => {
                    course.joins(attempt.epoch);
                    // The epoch is noted before it is tried.
                    self.write_note();
                    self.begin_join(attempt, ground);
                }
                WayAct::Drop { by, epochs } => self.begin_drop(by, epochs, ground),
                WayAct::Probe(way) => {
                    let answers = ground.links[way.get()].broken.is_none()
                        && ground.site.is_up()
                        && !ground.site.is_draining();
                    let random = self.random.bits();
                    if let Some(ways) = &mut self.ways {
                        ways.lives.probed(way, answers, now, random);
                    }
                }
            }
        }
    }

    fn begin_drop(&mut self, by: WayIndex, epochs: DropRequest, ground: &mut Ground<'_>) {
        let its = |session: &&mut Session| way_of(session.address) == by;
        let Some(session) = self.sessions.iter_mut().find(its) else { panic!("a living way") };
        session.admin.call(Opcode::Drop, &epochs.to_wire());
        let first = epochs.epochs().first().map_or(0, |epoch| epoch.0);
        ground.log.add("drops", [self.mount.0.into(), by.get() as u64, first.into()]);
        if let Some(ways) = &mut self.ways {
            ways.dropping = Some((by, epochs));
        }
    }

    fn begin_join(&mut self, attempt: WayTry, ground: &mut Ground<'_>) {
        let (way, epoch) = (attempt.way.get() as u64, attempt.epoch.0);
        ground.log.add("joins", [self.mount.0.into(), way, epoch.into()]);
        let (due, since) = (self.soon(ground), ground.site.rig.now());
        if let Some(ways) = &mut self.ways {
            let phase = JoinPhase::Knock { due };
            ways.joining = Some(Joining { attempt, since, phase, admin: None });
        }
    }

    fn go_on_joining(&mut self, ground: &mut Ground<'_>) {
        let Some(mut joining) = self.ways.as_mut().and_then(|ways| ways.joining.take()) else {
            return;
        };
        let (now, random) = (ground.site.rig.now(), self.random.bits());
        let way = joining.attempt.way;
        let joined = self.step_join(&mut joining, ground);
        let Some(ways) = &mut self.ways else { return };
        match joined {
            Joined::On => ways.joining = Some(joining),
            Joined::Lives => {
                ground.log.add("joined", [self.mount.0.into(), way.get() as u64, 0]);
                let _ = ways.lives.joined(&joining.attempt, now);
                let admin = joining.admin.expect("a session");
                self.sessions.push(Session { admin, address: way.get() });
                ground.moments.push(Moment::Arrived);
            }
            Joined::Failed(why) => {
                ground.log.add("join failed", [self.mount.0.into(), way.get() as u64, 0]);
                ways.lives.join_failed(way, why, now, random);
                for queue in &self.queues {
                    ground.site.rig.end_way(*queue, way);
                }
                if ways.lives.are_lost() {
                    self.lose(ground);
                }
            }
        }
    }

    fn step_join(&mut self, joining: &mut Joining, ground: &mut Ground<'_>) -> Joined {
        let now = ground.site.rig.now();
        if let Some(admin) = &mut joining.admin {
            match admin.turn(now, self.pulse(), matches!(joining.phase, JoinPhase::Test)) {
                Ok(None) => {}
                Ok(Some(Heard::Draining)) | Err(admin::Lost) => {
                    return Joined::Failed(JoinFailure::Transient);
                }
                Ok(Some(Heard::Answer { status, payload, .. })) => {
                    return self.join_answered(joining, status, &payload, ground);
                }
            }
        }
        let limit = match joining.phase {
            JoinPhase::Login => LOGIN_LIMIT,
            _ => self.rules().try_limit(),
        };
        if now.saturating_duration_since(joining.since) >= limit {
            return Joined::Failed(JoinFailure::Transient);
        }
        let steps = ground.site.rig.steps();
        match &joining.phase {
            JoinPhase::Knock { due } if *due <= steps => self.knock_again(joining, ground),
            JoinPhase::Queue { due, .. } if *due <= steps => self.join_queue(joining, ground),
            JoinPhase::Test => {
                let way = joining.attempt.way;
                let rig = &mut ground.site.rig;
                let is_live = |queue| rig.engine_mut(queue).live_ways().has(way);
                if self.queues.iter().copied().all(is_live) { Joined::Lives } else { Joined::On }
            }
            _ => Joined::On,
        }
    }

    fn session_id(&self) -> SessionId {
        let resume = self.course.as_ref().and_then(|course| course.facts().resume);
        resume.map_or(SessionId::default(), |(session, _)| session)
    }

    fn knock_again(&mut self, joining: &mut Joining, ground: &mut Ground<'_>) -> Joined {
        let WayTry { way, epoch, join } = joining.attempt;
        let hello = self.hello(ConnectionKind::Admin, self.session_id(), epoch);
        let admitted = match self.ask_in(way.get(), &hello, ground) {
            Ok(Some(admitted)) => admitted,
            Ok(None) => {
                joining.phase = JoinPhase::Unanswered;
                return Joined::On;
            }
            Err(_) => return Joined::Failed(JoinFailure::Transient),
        };
        let sizes = AdminChannel::qp_limits();
        let end = ground.site.rig.raw_end(admitted, self.admin_options(), sizes);
        let now = ground.site.rig.now();
        let mut admin = AdminEnd::new(end.expect("a connection"), admitted.epoch, now);
        let login = LoginRequest { join: Some(join), ..self.login() };
        admin.call(Opcode::Login, &login.to_wire());
        (joining.admin, joining.phase, joining.since) = (Some(admin), JoinPhase::Login, now);
        Joined::On
    }

    fn join_answered(
        &mut self,
        joining: &mut Joining,
        status: Status,
        payload: &[u8],
        ground: &mut Ground<'_>,
    ) -> Joined {
        assert!(matches!(joining.phase, JoinPhase::Login), "an unexpected answer: {status:?}");
        if status != Status::Ok {
            return Joined::Failed(JoinFailure::Misled);
        }
        let login = LoginReply::from_wire(&payload[..LoginReply::BYTES]).expect("a LOGIN reply");
        let run = self.course.as_ref().map(|course| course.facts().instance);
        let leads_to = |run| joining.attempt.leads_to(self.session_id(), run, &login);
        if !run.is_some_and(leads_to) {
            return Joined::Failed(JoinFailure::Misled);
        }
        self.are_over(joining.attempt.join.ends, ground);
        let (due, paths) = (self.soon(ground), Vec::new());
        (joining.phase, joining.since) = (JoinPhase::Queue { due, paths }, ground.site.rig.now());
        Joined::On
    }

    fn join_queue(&mut self, joining: &mut Joining, ground: &mut Ground<'_>) -> Joined {
        let WayTry { way, epoch, .. } = joining.attempt;
        let JoinPhase::Queue { paths, .. } = &mut joining.phase else { return Joined::On };
        let mut paths = std::mem::take(paths);
        let queue = paths.len();
        let buffers = Arc::clone(ground.site.rig.buffers(self.queues[queue]));
        let number = u16::try_from(queue).unwrap_or(u16::MAX);
        let Some(volume) = self.course.as_ref().map(|course| course.facts().volume.handle) else {
            return Joined::Failed(JoinFailure::Transient);
        };
        let to = Destination { address: way.get(), session: self.session_id(), epoch, volume };
        match self.path(&to, number, self.queue_options(), &buffers, ground) {
            Ok(Some((path, wires))) => paths.push((Path { way, ..path }, wires)),
            Ok(None) => {
                joining.phase = JoinPhase::Unanswered;
                return Joined::On;
            }
            Err(_) => return Joined::Failed(JoinFailure::Transient),
        }
        if paths.len() < self.queues.len() {
            ground.moments.push(Moment::Queue);
            let due = self.soon(ground);
            joining.phase = JoinPhase::Queue { due, paths };
            return Joined::On;
        }
        // From now on requests go by it.
        if let Some(ways) = &mut self.ways {
            ways.places.insert(epoch, way);
        }
        for (queue, (path, wires)) in self.queues.iter().zip(paths) {
            ground.site.rig.join_path(*queue, path, wires);
        }
        (joining.phase, joining.since) = (JoinPhase::Test, ground.site.rig.now());
        Joined::On
    }
}
