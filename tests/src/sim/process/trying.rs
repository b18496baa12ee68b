//! [`Trying`]: one attempt of a process to reach the target: connect, LOGIN, OPEN, settle, connect
//! every queue.
//!
//! An attempt ends when every queue is connected, when it fails, or when it lost the volume. The
//! process's course hears the result. Every message takes some steps, in which any fault may occur.

use std::sync::Arc;
use std::time::Duration;

use rblk_fabric::Region;
use rblk_fabric::soft::network::FaultyWire;
use rblk_initiator::engine::path::Path;
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::volume::admin::AdminChannel;
use rblk_initiator::volume::course::{Attempt, Course, Facts, Failure, OpenVerdict};
use rblk_initiator::volume::error::SessionError;
use rblk_protocol::{
    AccessMode, ConnectionKind, Epoch, Features, HelloReject, HelloRequest, LoginReply,
    LoginRequest, Opcode, OpenReply, OpenRequest, RejectReason, SessionId, Status, Version,
};
use rblk_rig::inprocess::{Join, QueueOptions};

use super::phase::{Destination, Going, Phase, Trying};
use super::ways::way_of;
use super::{EBADE, Ground, Process, Session};
use crate::sim::admin::{self, AdminEnd, Heard};
use crate::sim::plan::{Break, Moment};
use crate::sim::site::{self, Knock};

/// The time limit of a LOGIN or OPEN that waits for the end of older connections.
const WAITING_LIMIT: Duration = Duration::from_secs(35);

impl Process {
    pub(super) fn begin_try(&mut self, attempt: Attempt, take_over: bool, ground: &mut Ground<'_>) {
        let (id, epoch) = attempt.resume.map_or((0, 0), |(id, epoch)| (id.0[1], epoch.0));
        ground.log.add("tries", [self.mount.0.into(), id.into(), epoch.into()]);
        let due = self.soon(ground);
        self.trying = Some(Trying {
            attempt,
            take_over,
            since: ground.site.rig.now(),
            phase: Phase::Knock { due },
            admin: None,
            login: None,
            volume: None,
        });
    }

    /// The step at which a message over the network arrives.
    pub(super) fn soon(&mut self, ground: &Ground<'_>) -> u64 {
        ground.site.rig.steps() + 1 + self.random.below(6)
    }

    pub(super) fn go_on_trying(&mut self, ground: &mut Ground<'_>) {
        let Some(mut trying) = self.trying.take() else { return };
        let going = self.step(&mut trying, ground);
        let now = ground.site.rig.now();
        let random = self.random.bits();
        match going {
            Going::On => self.trying = Some(trying),
            Going::Failed(why) => {
                ground.log.add("try failed", [self.mount.0.into(), why as u64, 0]);
                match &mut self.course {
                    Some(course) => course.failed(why, now, random),
                    None => self.gave_up = true,
                }
            }
            Going::Fenced(by) => {
                ground.log.add("fenced", [self.mount.0.into(), 0, 0]);
                if let Some(course) = &mut self.course {
                    course.fenced(by);
                    self.write_note();
                    self.fail_all(Some(EBADE), ground);
                } else {
                    self.gave_up = true;
                }
            }
            Going::Changed(how) => panic!("the volume {how}"),
            Going::Arrived(paths) => self.arrive(trying, paths, ground),
        }
    }

    fn arrive(
        &mut self,
        trying: Trying,
        paths: Vec<(Path, Vec<FaultyWire>)>,
        ground: &mut Ground<'_>,
    ) {
        let now = ground.site.rig.now();
        let address = trying.attempt.address;
        let (Some(login), Some(volume)) = (trying.login, trying.volume) else {
            panic!("arrived without a volume")
        };
        let was_failing = match &mut self.course {
            Some(course) => {
                let arrival = course.arrived(now).expect("a try is under way");
                assert_eq!(arrival.address, address);
                arrival.was_failing
            }
            None => {
                let facts = Facts {
                    resume: Some((login.session, login.epoch)),
                    volume,
                    instance: login.instance,
                    target_name: login.target_name,
                    fenced: None,
                };
                self.course = Some(Course::connected(self.rules(), facts, address, now));
                false
            }
        };
        ground.log.add("arrived", [self.mount.0.into(), address as u64, 0]);
        ground.moments.push(Moment::Arrived);
        self.durability.arrived();
        // Every write that had to be repeated has been repeated by now.
        let settled = ground.oracle.go_on(self.mount, None, true);
        assert_eq!(settled, Ok(()));
        self.sessions = trying.admin.map(|admin| Session { admin, address }).into_iter().collect();
        self.begin_ways(address, login.epoch, now);
        self.hold_all(false, ground);
        for (queue, (path, wires)) in self.queues.clone().into_iter().zip(paths) {
            let way = if self.plan.ways { way_of(address) } else { WayIndex::FIRST };
            ground.site.rig.give_path(queue, Path { way, ..path }, wires);
        }
        if was_failing {
            self.fail_all(None, ground);
        }
        self.write_note();
    }

    fn step(&mut self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let now = ground.site.rig.now();
        if let Some(admin) = &mut trying.admin {
            let parks = matches!(trying.phase, Phase::Settle(_));
            match admin.turn(now, self.pulse(), parks) {
                Ok(None) => {}
                Ok(Some(Heard::Draining)) | Err(admin::Lost) => {
                    return Going::Failed(Failure::Transient);
                }
                Ok(Some(Heard::Answer { status, value, payload })) => {
                    return self.answered(trying, status, value, &payload, ground);
                }
            }
        }
        let waited = now.saturating_duration_since(trying.since);
        let limit = match &trying.phase {
            Phase::Login if trying.attempt.resume.is_some() => WAITING_LIMIT,
            Phase::Open => WAITING_LIMIT,
            Phase::Settle(_) => Duration::MAX,
            _ => trying.attempt.limit,
        };
        if waited >= limit {
            return Going::Failed(Failure::Transient);
        }
        match &mut trying.phase {
            Phase::Knock { due } if *due <= ground.site.rig.steps() => self.knock(trying, ground),
            Phase::Queue { due, .. } if *due <= ground.site.rig.steps() => {
                self.connect_queue(trying, ground)
            }
            Phase::Settle(_) => self.rewrite(trying, ground),
            _ => Going::On,
        }
    }

    /// The options of an admin connection.
    pub(super) fn admin_options(&self) -> QueueOptions {
        let features = if self.plan.ways { Features::WAYS } else { Features::default() };
        QueueOptions { features, ..admin::options() }
    }

    pub(super) fn login(&self) -> LoginRequest {
        LoginRequest {
            host: self.host_id,
            host_name: rblk_protocol::Name::new("host").expect("a name"),
            keep_alive_ms: u32::try_from(self.plan.detect.as_millis()).unwrap_or(u32::MAX),
            join: None,
        }
    }

    pub(super) fn hello(
        &self,
        kind: ConnectionKind,
        session: SessionId,
        epoch: Epoch,
    ) -> HelloRequest {
        let options = match kind {
            ConnectionKind::Admin => self.admin_options(),
            ConnectionKind::Io { .. } => self.queue_options(),
        };
        admin::hello(kind, &options, session, epoch)
    }

    /// Delivers a connect request to the target, unless a fault prevents that.
    pub(super) fn ask_in(
        &self,
        address: usize,
        hello: &HelloRequest,
        ground: &mut Ground<'_>,
    ) -> Result<Option<Join>, Failure> {
        match ground.links[address].broken {
            None => {}
            Some(Break::Cut) => return Err(Failure::Transient),
            Some(Break::Silence | Break::Stall) => return Ok(None),
        }
        if ground.dark {
            return Ok(None);
        }
        match ground.site.knock(hello, self.mount, ground.log) {
            Knock::Nobody => Err(Failure::Transient),
            Knock::Admitted(join) => Ok(Some(join)),
            Knock::Refused(refused) => {
                // Each number is noted before it is tried, also for the next process of the mount.
                let is_again = hello.kind == ConnectionKind::Admin
                    && refused.reason == RejectReason::StaleEpoch;
                assert!(!is_again, "{:?} was tried before", hello.epoch);
                let reject = HelloReject {
                    reason: Some(refused.reason),
                    newest: Version::NEWEST,
                    oldest: Version::OLDEST,
                    text: refused.text,
                };
                let address = "site".to_owned();
                Err(failure(&SessionError::Refused { address, reject }))
            }
        }
    }

    fn knock(&self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let (session, epoch) = trying.attempt.resume.unwrap_or((SessionId::default(), Epoch(0)));
        let hello = self.hello(ConnectionKind::Admin, session, epoch);
        let join = match self.ask_in(trying.attempt.address, &hello, ground) {
            Ok(Some(join)) => join,
            Ok(None) => {
                trying.phase = Phase::Unanswered;
                return Going::On;
            }
            Err(why) => return Going::Failed(why),
        };
        let sizes = AdminChannel::qp_limits();
        let options = self.admin_options();
        let end = ground.site.rig.raw_end(join, options, sizes).expect("a connection");
        let now = ground.site.rig.now();
        let mut admin = AdminEnd::new(end, join.epoch, now);
        admin.call(Opcode::Login, &self.login().to_wire());
        trying.admin = Some(admin);
        trying.phase = Phase::Login;
        trying.since = now;
        Going::On
    }

    fn answered(
        &mut self,
        trying: &mut Trying,
        status: Status,
        value: u32,
        payload: &[u8],
        ground: &mut Ground<'_>,
    ) -> Going {
        let now = ground.site.rig.now();
        let len = usize::try_from(value).unwrap_or(0).min(payload.len()).min(256);
        let text = String::from_utf8_lossy(&payload[..len]).into_owned();
        match trying.phase {
            Phase::Login => {
                if status != Status::Ok {
                    let what = "login".to_owned();
                    return Going::Failed(failure(&SessionError::Status { what, status, text }));
                }
                let login =
                    LoginReply::from_wire(&payload[..LoginReply::BYTES]).expect("a LOGIN reply");
                if let Some(course) = &mut self.course {
                    course.logged_in(&login).expect("the same target");
                    self.write_note();
                }
                trying.login = Some(login);
                let open = OpenRequest {
                    name: site::volume_name(),
                    mode: AccessMode::Exclusive,
                    take_over: trying.take_over,
                    generation: trying.attempt.generation,
                };
                if let Some(admin) = &mut trying.admin {
                    admin.call(Opcode::OpenVolume, &open.to_wire());
                }
                trying.phase = Phase::Open;
                trying.since = now;
                Going::On
            }
            Phase::Open => {
                match status {
                    Status::Ok => {}
                    // Without a text the session is gone, but the volume was not taken.
                    Status::Fenced if !text.is_empty() => return Going::Fenced(text),
                    _ => {
                        let what = "open".to_owned();
                        return Going::Failed(failure(&SessionError::Status {
                            what,
                            status,
                            text,
                        }));
                    }
                }
                let volume =
                    OpenReply::from_wire(&payload[..OpenReply::BYTES]).expect("an OPEN reply");
                trying.volume = Some(volume);
                trying.since = now;
                let verdict = match &mut self.course {
                    Some(course) => course.opened(&volume),
                    None => OpenVerdict::Go,
                };
                match verdict {
                    OpenVerdict::Go => self.begin_queues(trying, ground),
                    OpenVerdict::ResolveUnflushed => self.settle(trying, &volume, ground),
                    OpenVerdict::Changed(how) => Going::Changed(how),
                }
            }
            _ => panic!("an unexpected answer: {status:?}"),
        }
    }

    pub(super) fn begin_queues(&mut self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let due = self.soon(ground);
        trying.since = ground.site.rig.now();
        trying.phase = Phase::Queue { due, paths: Vec::new() };
        Going::On
    }

    pub(super) fn path(
        &self,
        to: &Destination,
        queue: u16,
        options: QueueOptions,
        buffers: &Arc<Region>,
        ground: &mut Ground<'_>,
    ) -> Result<Option<(Path, Vec<FaultyWire>)>, Failure> {
        let mut joins = Vec::new();
        for lane in 0..options.lanes {
            let queue = if options.lanes > 1 { QueueOptions::lane(queue, lane) } else { queue };
            let hello = self.hello(ConnectionKind::Io { queue }, to.session, to.epoch);
            match self.ask_in(to.address, &hello, ground) {
                Ok(Some(join)) => joins.push(join),
                Ok(None) if lane == 0 => return Ok(None),
                Err(why) if lane == 0 => return Err(why),
                // The queue works without lanes that fail.
                Ok(None) | Err(_) => break,
            }
        }
        let rig = &mut ground.site.rig;
        Ok(Some(rig.path(&joins, to.volume, options, buffers).expect("a path")))
    }

    fn connect_queue(&mut self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let Phase::Queue { paths, .. } = &mut trying.phase else { return Going::On };
        let mut paths = std::mem::take(paths);
        let Some(volume) = trying.volume else { return Going::Failed(Failure::Transient) };
        if self.queues.is_empty() {
            self.make_queues(&volume, ground);
        }
        let queue = paths.len();
        let buffers = Arc::clone(ground.site.rig.buffers(self.queues[queue]));
        let number = u16::try_from(queue).unwrap_or(u16::MAX);
        let Some(to) = trying.destination() else { return Going::Failed(Failure::Transient) };
        match self.path(&to, number, self.queue_options(), &buffers, ground) {
            Ok(Some(made)) => paths.push(made),
            Ok(None) => {
                trying.phase = Phase::Unanswered;
                return Going::On;
            }
            Err(why) => return Going::Failed(why),
        }
        if paths.len() == self.queues.len() {
            return Going::Arrived(paths);
        }
        ground.moments.push(Moment::Queue);
        let due = self.soon(ground);
        trying.phase = Phase::Queue { due, paths };
        Going::On
    }
}

fn failure(error: &SessionError) -> Failure {
    if error.is_session_gone() { Failure::SessionGone } else { Failure::Transient }
}
