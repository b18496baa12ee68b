//! Random events against the rules. The judge is a model of the poll groups: the connections that
//! exist, and those that can have brought a command for a volume.

use std::collections::{BTreeMap, BTreeSet};

use rblk_protocol::{DropRequest, Join};

use super::*;
use crate::control::peers::session::EndedEpochs;

/// Every other one has hosts with ways.
const SEEDS: u64 = 900;
const STEPS: usize = 400;
const HOSTS: u64 = 3;

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let len = u64::try_from(from.len()).unwrap();
        (len > 0).then(|| from[usize::try_from(self.below(len)).unwrap()])
    }
}

/// Prints the seed of a failure.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("seed {}", self.0);
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Asked {
    Login { ends: EndedEpochs },
    Drop { ends: EndedEpochs },
    Open { host: u8, volume: u16, mode: AccessMode, named: Generation },
    Other,
}

/// The facts about the volumes over all runs of the target.
#[derive(Default)]
struct History {
    /// The highest generation that any host got, by volume, with the host if it was exclusive.
    told: BTreeMap<u16, (Generation, Option<u8>)>,
}

#[derive(Default, Debug)]
struct Counts {
    logins: u32,
    late_logins: u32,
    joins: u32,
    late_joins: u32,
    drops: u32,
    late_drops: u32,
    refused_logins: u32,
    opens: u32,
    late_opens: u32,
    fenced: u32,
    in_use: u32,
    take_overs: u64,
    restarts: u32,
}

/// One run, and the state of the poll groups in it.
struct Run {
    w: World,
    asked: BTreeMap<(u32, u16), (Link, Asked, bool)>,
    // Sessions' volumes as the poll groups have them.
    open: BTreeMap<SessionIndex, BTreeMap<u16, AccessMode>>,
    // By connection: volumes for which it may have brought commands, and the mode of each then.
    touched: BTreeMap<u32, BTreeMap<u16, AccessMode>>,
    // Epochs of sessions that the target said to be over.
    over: BTreeMap<SessionId, Vec<EndedEpochs>>,
    seen: usize,
    tag: u16,
}

fn excludes(a: AccessMode, b: AccessMode) -> bool {
    let writes = |mode| mode != AccessMode::ReadOnly;
    writes(a) && writes(b) && (a, b) != (AccessMode::Shared, AccessMode::Shared)
}

impl Run {
    fn new(w: World) -> Self {
        Self {
            w,
            asked: BTreeMap::new(),
            open: BTreeMap::new(),
            touched: BTreeMap::new(),
            over: BTreeMap::new(),
            seen: 0,
            tag: 0,
        }
    }

    /// Applies the notices as the poll groups do, and checks each reply.
    fn look(&mut self, history: &mut History, counts: &mut Counts) {
        for notice in &self.w.notices[self.seen..] {
            match *notice {
                Notice::Open { session, volume, mode } => {
                    self.open.entry(session).or_default().insert(volume.0, mode);
                }
                Notice::Close { session, volume, .. } => {
                    self.open.entry(session).or_default().remove(&volume.0);
                }
                Notice::ForgetSession { session } => {
                    self.open.remove(&session);
                    assert!(
                        self.w.links.iter().all(|link| link.session != session),
                        "a session was forgotten that has connections"
                    );
                }
                Notice::EndConnections { .. } | Notice::EndEpoch { .. } | Notice::Host { .. } => {}
            }
        }
        self.seen = self.w.notices.len();
        for link in &self.w.links {
            let touched = self.touched.entry(link.at.connection.generation).or_default();
            if let Some(open) = self.open.get(&link.session) {
                touched.extend(open.iter().map(|(volume, mode)| (*volume, *mode)));
            }
        }
        self.never_two_writers();
        self.never_ahead_of_the_disk();
        for said in std::mem::take(&mut self.w.replies) {
            let key = (said.to.connection.generation, said.tag.0);
            let (link, asked, at_once) =
                self.asked.remove(&key).expect("answered twice, or unasked");
            match asked {
                Asked::Login { ends } if said.status == Status::Ok => {
                    self.over.entry(link.id).or_default().push(ends);
                    let (all, late) = match ends {
                        EndedEpochs::Below(_) => (&mut counts.logins, &mut counts.late_logins),
                        _ => (&mut counts.joins, &mut counts.late_joins),
                    };
                    *all += 1;
                    *late += u32::from(!at_once);
                }
                Asked::Drop { ends } if said.status == Status::Ok => {
                    self.over.entry(link.id).or_default().push(ends);
                    counts.drops += 1;
                    counts.late_drops += u32::from(!at_once);
                }
                Asked::Open { host, volume, mode, named } => {
                    counts.fenced += u32::from(said.status == Status::Fenced);
                    counts.in_use += u32::from(said.status == Status::InUse);
                    if said.status == Status::Ok {
                        counts.opens += 1;
                        counts.late_opens += u32::from(!at_once);
                        let given = said.generation();
                        self.opened(link, volume, mode);
                        if mode != AccessMode::ReadOnly {
                            history.told_of(host, volume, mode, named, given);
                        }
                    }
                }
                Asked::Login { .. } => {
                    counts.refused_logins += u32::from(said.status == Status::NoSuchSession);
                }
                Asked::Drop { .. } | Asked::Other => {}
            }
        }
        self.never_again();
    }

    /// No connection is of an epoch that is over, now or ever.
    fn never_again(&self) {
        for link in self.w.links.iter().filter(|link| link.session != SessionIndex::NONE) {
            let over = self.over.get(&link.id).into_iter().flatten();
            assert!(!over.clone().any(|ended| ended.has(link.epoch)), "{link:?} is over");
        }
    }

    /// A writer that is let in meets no other writer, neither now nor by a connection that still
    /// lives.
    fn opened(&self, link: Link, volume: u16, mode: AccessMode) {
        for other in self.w.links.iter().filter(|other| other.session != link.session) {
            let touched = &self.touched[&other.at.connection.generation];
            if let Some(theirs) = touched.get(&volume) {
                assert!(!excludes(mode, *theirs), "OPEN answered too early: {other:?} is there");
            }
        }
    }

    /// The next run would fence every host that this one fences.
    fn never_ahead_of_the_disk(&self) {
        for record in self.w.core.holders().records() {
            let durable = self.w.durable.get(&record.volume).map(|record| record.generation);
            assert!(durable >= Some(record.generation), "{record:?}, on the disk {durable:?}");
        }
    }

    fn never_two_writers(&self) {
        for volume in 0..VOLUMES {
            let live: BTreeSet<_> = self.w.links.iter().map(|link| link.session).collect();
            let modes: Vec<_> =
                live.iter().filter_map(|s| self.open.get(s)?.get(&volume)).copied().collect();
            for (at, a) in modes.iter().enumerate() {
                assert!(
                    !modes[at + 1..].iter().any(|b| excludes(*a, *b)),
                    "two writers: {modes:?}"
                );
            }
        }
    }

    /// A command with a reply that is checked later.
    fn ask(&mut self, link: Link, asked: Asked, send: impl FnOnce(&mut World, u16)) {
        self.tag += 1;
        let key = (link.at.connection.generation, self.tag);
        self.asked.insert(key, (link, asked, false));
        send(&mut self.w, self.tag);
        let answered = |said: &Replied| (said.to, said.tag) == (link.at, Tag(key.1));
        if self.w.replies.iter().any(answered)
            && let Some(entry) = self.asked.get_mut(&key)
        {
            entry.2 = true;
        }
    }

    fn admins(&self) -> Vec<Link> {
        let admins = self.w.links.iter().filter(|link| link.kind == ConnectionKind::Admin);
        admins.copied().collect()
    }

    /// Drops the replies to connections that are gone.
    fn forget_the_buried(&mut self) {
        let alive: BTreeSet<u32> =
            self.w.links.iter().map(|link| link.at.connection.generation).collect();
        self.asked.retain(|(connection, _), _| alive.contains(connection));
        self.w.replies.retain(|said| alive.contains(&said.to.connection.generation));
    }
}

impl History {
    /// A host may write in a generation.
    fn told_of(
        &mut self,
        host: u8,
        volume: u16,
        mode: AccessMode,
        named: Generation,
        given: Generation,
    ) {
        let (highest, of) = self.told.get(&volume).copied().unwrap_or_default();
        assert!(given >= highest, "generation {given} after {highest}");
        let alone = (mode == AccessMode::Exclusive).then_some(host);
        if named.is_fresh() {
            assert!(given > highest || (alone, of) == (None, None), "a second holder in {given}");
        } else {
            assert_eq!(named, given, "one that came back was let in to another generation");
            assert!(given > highest || of == alone, "another's generation {given}");
        }
        self.told.insert(volume, (given, alone));
    }
}

/// Generations that a host was given, by volume, to come back with.
type Given = BTreeMap<(u8, u16), Generation>;

/// How a LOGIN joins the session that its hello named, if it does. Mostly the epochs are true.
fn some_join(run: &Run, rng: &mut Rng, link: Link) -> Option<Join> {
    if !run.w.has_ways || link.session != SessionIndex::NONE || rng.below(5) == 0 {
        return None;
    }
    let session = run.w.core.sessions().iter().find(|session| session.id == link.id)?;
    let live: Vec<Epoch> = session.live_epochs().collect();
    let beside = match rng.below(8) {
        0 => Epoch(1 + u32::try_from(rng.below(4)).unwrap()),
        _ => rng.pick(&live)?,
    };
    let ends = rng.pick(&live).filter(|ends| *ends != beside && rng.below(2) == 0);
    Some(Join { beside, ends })
}

/// A way dies and is dropped, or one more is on its way.
fn step_of_ways(run: &mut Run, rng: &mut Rng, hosts: &mut BTreeMap<u32, u8>) {
    let members = |l: &&Link| l.session != SessionIndex::NONE && l.kind == ConnectionKind::Admin;
    let members: Vec<Link> = run.w.links.iter().filter(members).copied().collect();
    let Some(member) = rng.pick(&members) else { return };
    let known = run.w.core.sessions().get(member.session);
    let Some((newest, of)) = known.map(|session| (session.newest, session.host.0[0])) else {
        return;
    };
    match rng.below(4) {
        0 => {
            let queue = u16::try_from(rng.below(3)).unwrap();
            let _ = run.w.connect(ConnectionKind::Io { queue }, member.id, member.epoch);
        }
        1 | 2 => {
            let epoch = Epoch(newest.0 + 1 + u32::try_from(rng.below(2)).unwrap());
            if let Ok(link) = run.w.connect(ConnectionKind::Admin, member.id, epoch) {
                hosts.insert(link.at.connection.generation, of);
            }
        }
        _ => {
            let mut near = || {
                let back = u32::try_from(rng.below(5)).unwrap();
                Epoch((newest.0 + 1).saturating_sub(back).max(1))
            };
            let request = DropRequest::new(&[near(), near()]).unwrap();
            let ends = EndedEpochs::Of(request);
            run.ask(member, Asked::Drop { ends }, |w, tag| {
                w.send(member, tag, Opcode::Drop, 0, &request.to_wire());
            });
        }
    }
}

#[expect(clippy::too_many_lines, reason = "one arm for each event")]
fn step(run: &mut Run, rng: &mut Rng, hosts: &mut BTreeMap<u32, u8>, given: &Given) {
    let host = u8::try_from(1 + rng.below(HOSTS)).unwrap();
    let admins = run.admins();
    let admin = rng.pick(&admins);
    let links = run.w.links.clone();
    if run.w.has_ways && rng.below(4) == 0 {
        return step_of_ways(run, rng, hosts);
    }
    match rng.below(100) {
        0..8 => {
            if let Ok(link) = run.w.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)) {
                hosts.insert(link.at.connection.generation, host);
            }
        }
        8..16 => {
            let ids: Vec<_> =
                run.w.core.sessions().iter().map(|s| (s.id, s.newest, s.host)).collect();
            if let Some((id, epoch, of)) = rng.pick(&ids) {
                let epoch = Epoch(epoch.0 + u32::try_from(rng.below(3)).unwrap());
                if let Ok(link) = run.w.connect(ConnectionKind::Admin, id, epoch) {
                    // Sometimes a host that has only heard of the session.
                    let of = if rng.below(8) == 0 { host } else { of.0[0] };
                    hosts.insert(link.at.connection.generation, of);
                }
            }
        }
        16..32 => {
            if let Some(link) = admin {
                let host = hosts[&link.at.connection.generation];
                let join = some_join(run, rng, link);
                let ends = match join {
                    None => EndedEpochs::Below(link.epoch),
                    Some(Join { ends, .. }) => ends.map_or(EndedEpochs::None, EndedEpochs::One),
                };
                let login = LoginRequest { join, ..login_of(host) };
                run.ask(link, Asked::Login { ends }, |w, tag| {
                    w.send(link, tag, Opcode::Login, 0, &login.to_wire());
                });
            }
        }
        32..54 => {
            if let Some(link) = admin {
                let host = hosts[&link.at.connection.generation];
                let volume = u16::try_from(rng.below(u64::from(VOLUMES))).unwrap();
                let mode = match rng.below(8) {
                    0 => AccessMode::ReadOnly,
                    1 | 2 => AccessMode::Shared,
                    _ => AccessMode::Exclusive,
                };
                let named = match rng.below(4) {
                    0 | 1 => given.get(&(host, volume)).copied().unwrap_or_default(),
                    2 => Generation::FRESH,
                    _ => Generation(rng.below(6)),
                };
                let take_over = rng.below(3) == 0;
                let request = OpenRequest { take_over, generation: named, ..open_as(volume, mode) };
                run.ask(link, Asked::Open { host, volume, mode, named }, |w, tag| {
                    w.send(link, tag, Opcode::OpenVolume, 0, &request.to_wire());
                });
            }
        }
        54..64 => {
            if let Some(link) = admin {
                let queue = u16::try_from(rng.below(3)).unwrap();
                let _ = run.w.connect(ConnectionKind::Io { queue }, link.id, link.epoch);
            }
        }
        64..67 => {
            if let Some(link) = admin {
                let handle = 1 + u32::try_from(rng.below(u64::from(VOLUMES))).unwrap();
                run.ask(link, Asked::Other, |w, tag| {
                    w.send(link, tag, Opcode::CloseVolume, handle, &[]);
                });
            }
        }
        67..70 => {
            if let Some(link) = admin {
                run.ask(link, Asked::Other, |w, tag| w.send(link, tag, Opcode::Logout, 0, &[]));
            }
        }
        70..88 => {
            let dying: Vec<Link> = links.iter().filter(|link| link.dying).copied().collect();
            if let Some(link) = rng.pick(&dying) {
                run.w.bury(link);
            }
        }
        88..91 => {
            if let Some(link) = rng.pick(&links) {
                run.w.bury(link);
            }
        }
        91..94 => {
            let long = rng.below(4) == 0;
            run.w.pass(Duration::from_millis(if long { rng.below(40_000) } else { 500 }));
        }
        94..95 => run.w.slow_disk = !run.w.slow_disk,
        _ => {
            if run.w.on_their_way.is_empty() {
                return;
            }
            // The disk takes the oldest change, or reports a failure; then it may have the change
            // all the same.
            let (ticket, record) = run.w.on_their_way.remove(0);
            let fails = rng.below(8) == 0;
            if !fails || rng.below(2) == 0 {
                run.w.durable.insert(record.volume, record);
            }
            let result = if fails { Err("disk".to_owned()) } else { Ok(()) };
            run.w.core.persisted(ticket, result);
            run.w.carry_out();
        }
    }
}

fn one(seed: u64, counts: &mut Counts) {
    let _seed = Seed(seed);
    let mut rng = Rng(seed);
    let mut history = History::default();
    let mut given = Given::new();
    let mut hosts = BTreeMap::new();
    let mut run = Run::new(World { has_ways: seed % 2 == 1, ..World::new() });
    for _ in 0..STEPS {
        if rng.below(120) == 0 {
            counts.restarts += 1;
            counts.take_overs += run.w.core.decisions().take_overs;
            run = Run::new(run.w.restart());
        }
        step(&mut run, &mut rng, &mut hosts, &given);
        run.forget_the_buried();
        // An answered host remembers its generation, so that old ones come back later.
        for said in run.w.replies.iter().filter(|said| said.status == Status::Ok) {
            let key = (said.to.connection.generation, said.tag.0);
            if let Some((_, Asked::Open { host, volume, mode, .. }, _)) = run.asked.get(&key)
                && *mode != AccessMode::ReadOnly
                && rng.below(2) == 0
            {
                given.insert((*host, *volume), said.generation());
            }
        }
        run.look(&mut history, counts);
    }
    // Nothing waits for ever: when every end is buried and the disk has caught up, all are
    // answered.
    run.w.slow_disk = false;
    run.w.write_all();
    run.w.bury_the_dying();
    run.forget_the_buried();
    run.look(&mut history, counts);
    assert!(run.asked.is_empty(), "never answered: {:?}", run.asked);
    counts.take_overs += run.w.core.decisions().take_overs;
}

#[test]
fn the_rules_hold_under_random_events() {
    let mut counts = Counts::default();
    for seed in 0..SEEDS {
        one(seed, &mut counts);
    }
    println!("{counts:?}");
    // Otherwise the test did not reach its purpose.
    assert!(counts.late_logins > 500 && counts.late_opens > 500, "{counts:?}");
    assert!(counts.refused_logins > 100, "{counts:?}");
    assert!(counts.fenced > 500 && counts.in_use > 500 && counts.take_overs > 500, "{counts:?}");
    assert!(counts.restarts > 500, "{counts:?}");
    assert!(counts.joins > 500 && counts.late_joins > 100, "{counts:?}");
    assert!(counts.drops > 500 && counts.late_drops > 100, "{counts:?}");
}
