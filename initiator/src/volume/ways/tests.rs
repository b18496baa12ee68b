//! Lives of ways by hand, and against a model of the target that follows the rules of its sessions.

use proptest::prelude::*;

use super::*;

const DELAY: Duration = Duration::from_secs(1);

fn way(place: usize) -> WayIndex {
    WayIndex::new(place).unwrap()
}

fn lives(ways: usize, now: Instant) -> Lives {
    Lives::new(WayRules { ways, reconnect_delay: DELAY }, way(0), Epoch(1), now)
}

fn joining(act: Option<WayAct>) -> WayTry {
    match act {
        Some(WayAct::Join(joining)) => joining,
        other => panic!("{other:?}"),
    }
}

fn dropping(act: Option<WayAct>) -> (usize, Vec<u32>, DropRequest) {
    match act {
        Some(WayAct::Drop { by, epochs }) => {
            (by.get(), epochs.epochs().iter().map(|epoch| epoch.0).collect(), epochs)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_other_ways_join_one_after_the_other() {
    let now = Instant::now();
    let mut all = lives(3, now);
    let second = joining(all.due(Epoch(1), now));
    assert_eq!((second.way, second.epoch), (way(1), Epoch(2)));
    assert_eq!(second.join, Join { beside: Epoch(1), ends: None });
    assert_eq!((all.due(Epoch(2), now), all.deadline()), (None, None), "one at a time");
    assert_eq!(all.joined(&second, now), None);
    let third = joining(all.due(Epoch(2), now));
    assert_eq!((third.way, third.epoch), (way(2), Epoch(3)));
    all.joined(&third, now);
    assert_eq!((all.due(Epoch(3), now), all.deadline()), (None, None));
    assert_eq!(all.living().count(), 3);
}

#[test]
fn a_dead_way_is_dropped_at_once_and_joins_after_good_probes() {
    let now = Instant::now();
    let mut all = lives(2, now);
    let second = joining(all.due(Epoch(1), now));
    all.joined(&second, now);
    all.died(way(1), now, 0);
    let (by, epochs, request) = dropping(all.due(Epoch(2), now));
    assert_eq!((by, epochs), (0, vec![2]));
    assert_eq!(all.due(Epoch(2), now), None);
    // A way that has just fallen: twice the delay.
    let later = all.deadline().unwrap();
    assert_eq!(later, now + 2 * DELAY);
    assert_eq!(all.due(Epoch(2), later), Some(WayAct::Probe(way(1))));
    assert_eq!((all.due(Epoch(2), later), all.deadline()), (None, None));
    all.probed(way(1), true, later, 0);
    assert_eq!(all.due(Epoch(2), later), None);
    let later = all.deadline().unwrap();
    assert_eq!(all.due(Epoch(2), later), Some(WayAct::Probe(way(1))));
    all.probed(way(1), true, later, 0);
    // The DROP is not answered: the join ends the last life, too.
    let again = joining(all.due(Epoch(2), later));
    assert_eq!(again.join, Join { beside: Epoch(1), ends: Some(Epoch(2)) });
    assert_eq!(all.joined(&again, later), Some(Epoch(2)));
    assert_eq!(all.dropped(way(0), &request), [] as [Epoch; 0], "that is over already");
    assert_eq!(all.due(Epoch(3), later), None);
}

#[test]
fn a_drop_whose_way_dies_is_asked_by_the_next() {
    let now = Instant::now();
    let mut all = lives(3, now);
    for newest in [1, 2] {
        let next = joining(all.due(Epoch(newest), now));
        all.joined(&next, now);
    }
    all.died(way(2), now, 0);
    let (by, epochs, first) = dropping(all.due(Epoch(3), now));
    assert_eq!((by, epochs), (0, vec![3]));
    all.died(way(0), now, 0);
    assert_eq!(all.dropped(way(0), &first), [] as [Epoch; 0], "nobody heard of it");
    let (by, epochs, second) = dropping(all.due(Epoch(3), now));
    assert_eq!((by, epochs), (1, vec![1, 3]));
    // The target takes too long.
    all.drop_failed(way(1));
    assert_eq!(dropping(all.due(Epoch(3), now)).1, [1, 3]);
    assert_eq!(all.dropped(way(1), &second), [Epoch(1), Epoch(3)]);
    assert_eq!(all.due(Epoch(3), now), None);
}

#[test]
fn a_refused_drop_ends_no_way_and_is_asked_again_ever_more_seldom() {
    let now = Instant::now();
    let mut all = lives(2, now);
    let second = joining(all.due(Epoch(1), now));
    all.joined(&second, now);
    all.died(way(1), now, 0);
    let (mut at, mut pauses) = (now, Vec::new());
    for _ in 0..3 {
        let (by, epochs, _) = dropping(all.due(Epoch(2), at));
        assert_eq!((by, epochs), (0, vec![2]));
        all.drop_refused(way(0), at, 0);
        assert_eq!(all.state(way(0)), WayState::Live(Epoch(1)));
        // The other way is probed meanwhile.
        while let Some(act) = all.due(Epoch(2), at) {
            assert_eq!(act, WayAct::Probe(way(1)));
        }
        let next = at + DELAY * 2u32.pow(u32::try_from(pauses.len()).unwrap());
        assert!(all.deadline().unwrap() <= next, "nothing asks again");
        pauses.push(next - at);
        at = next;
    }
    let (by, _, request) = dropping(all.due(Epoch(2), at));
    assert_eq!(all.dropped(way(by), &request), [Epoch(2)]);
    // The next DROP does not wait.
    all.probed(way(1), true, at, 0);
    at += DELAY;
    assert_eq!(all.due(Epoch(2), at), Some(WayAct::Probe(way(1))));
    all.probed(way(1), true, at, 0);
    let again = joining(all.due(Epoch(2), at));
    all.join_failed(again.way, JoinFailure::Transient, at, 0);
    assert_eq!(dropping(all.due(Epoch(3), at)).1, [3]);
}

#[test]
fn the_epoch_of_a_failed_try_is_dropped() {
    let now = Instant::now();
    let mut all = lives(2, now);
    let second = joining(all.due(Epoch(1), now));
    all.join_failed(way(1), JoinFailure::Transient, now, 0);
    assert_eq!(all.joined(&second, now), None, "too late");
    let (_, epochs, request) = dropping(all.due(Epoch(2), now));
    assert_eq!(epochs, [2]);
    assert_eq!(all.dropped(way(0), &request), [Epoch(2)]);
    // A way that leads elsewhere is tried seldom.
    let mut misled = lives(2, now);
    joining(misled.due(Epoch(1), now));
    misled.join_failed(way(1), JoinFailure::Misled, now, 0);
    assert!(misled.deadline().unwrap() >= now + 64 * DELAY);
}

#[test]
fn a_join_may_bring_the_mount_back() {
    let now = Instant::now();
    let mut all = lives(2, now);
    let second = joining(all.due(Epoch(1), now));
    all.died(way(0), now, 0);
    assert!(!all.are_lost());
    assert_eq!((all.due(Epoch(2), now), all.deadline()), (None, None), "nobody lives");
    all.joined(&second, now);
    assert_eq!(dropping(all.due(Epoch(2), now)).1, [1]);
    all.died(way(1), now, 0);
    assert!(all.are_lost());
    all.restarted(way(1), Epoch(3), now);
    let first = joining(all.due(Epoch(3), now));
    assert_eq!((first.way, first.join), (way(0), Join { beside: Epoch(3), ends: None }));
}

/// The epochs of one session, as `SessionTable` of the target has them.
#[derive(Clone, Debug, Default)]
struct TargetModel {
    base: u32,
    newest: u32,
    live: BTreeSet<u32>,
}

impl TargetModel {
    fn login(&mut self, epoch: u32) {
        (self.base, self.newest) = (epoch, epoch);
        self.live = BTreeSet::from([epoch]);
    }

    fn join(&mut self, joining: &WayTry) -> bool {
        let ends = joining.join.ends.map(|ends| ends.0);
        let stay = self.live.iter().filter(|live| Some(**live) != ends).count();
        let is_taken = joining.epoch.0 > self.newest
            && (self.base..=self.newest).contains(&joining.join.beside.0)
            && stay < wide(WAYS_MAX);
        if is_taken {
            ends.map(|ends| self.live.remove(&ends));
            self.live.insert(joining.epoch.0);
            self.newest = joining.epoch.0;
        }
        is_taken
    }

    fn drop_epochs(&mut self, request: &DropRequest) {
        request.epochs().iter().for_each(|epoch| {
            self.live.remove(&epoch.0);
        });
        self.newest = self.newest.max(request.highest().0);
    }
}

struct World {
    all: Lives,
    ways: usize,
    target: TargetModel,
    newest: u32,
    now: Instant,
    join: Option<WayTry>,
    drop: Option<(WayIndex, DropRequest)>,
    probe: BTreeSet<WayIndex>,
    // LOGINs on their way that the mount has given up.
    late: Vec<WayTry>,
}

impl World {
    fn new(ways: usize) -> Self {
        let now = Instant::now();
        let mut target = TargetModel::default();
        target.login(1);
        let (all, probe, late) = (lives(ways, now), BTreeSet::new(), Vec::new());
        Self { all, ways, target, newest: 1, now, join: None, drop: None, probe, late }
    }

    /// Takes every due act.
    fn settle(&mut self) {
        for _ in 0..64 {
            match self.all.due(Epoch(self.newest), self.now) {
                None => return self.check(),
                Some(WayAct::Join(joining)) => {
                    assert!(self.join.is_none(), "two joins at a time");
                    assert!(joining.epoch.0 > self.newest, "an epoch again");
                    self.newest = joining.epoch.0;
                    self.join = Some(joining);
                }
                Some(WayAct::Drop { by, epochs }) => {
                    assert!(matches!(self.all.state(by), WayState::Live(_)), "by a dead way");
                    let lives = |epoch: &Epoch| self.all.living().any(|(_, live)| live == *epoch);
                    assert!(!epochs.epochs().iter().any(lives), "a living way is dropped");
                    self.drop = Some((by, epochs));
                }
                Some(WayAct::Probe(way)) => assert!(self.probe.insert(way), "two probes"),
            }
        }
        panic!("acts without an end");
    }

    fn check(&self) {
        for (way, epoch) in self.all.living() {
            assert!(self.target.live.contains(&epoch.0), "the target ended {way:?} in {epoch:?}");
        }
        let all_live = self.all.living().count() == self.ways;
        let waits = self.join.is_some() || !self.probe.is_empty() || self.drop.is_some();
        let moves = waits || self.all.deadline().is_some();
        assert!(all_live || self.all.are_lost() || moves, "stuck: {:?}", self.all);
    }

    /// The target gets the LOGIN of the join; its answer comes or not.
    fn deliver_join(&mut self, is_answered: bool) {
        let Some(joining) = self.join.take() else { return };
        let is_taken = self.target.join(&joining);
        assert!(is_taken, "a join in its time is refused: {joining:?}, {:?}", self.target);
        if is_answered {
            let over = self.all.joined(&joining, self.now);
            assert!(over.is_none_or(|over| !self.target.live.contains(&over.0)));
        } else {
            self.all.join_failed(joining.way, JoinFailure::Transient, self.now, 7);
        }
    }

    fn lose_join(&mut self) {
        let Some(joining) = self.join.take() else { return };
        self.late.push(joining);
        self.all.join_failed(joining.way, JoinFailure::Transient, self.now, 7);
    }

    fn deliver_drop(&mut self, is_answered: bool, is_refused: bool) {
        let Some((by, request)) = self.drop.take() else { return };
        if is_refused {
            return self.all.drop_refused(by, self.now, 9);
        }
        self.target.drop_epochs(&request);
        if is_answered {
            for over in self.all.dropped(by, &request) {
                assert!(!self.target.live.contains(&over.0), "{over:?} is not over");
            }
        } else {
            self.all.drop_failed(by);
        }
    }

    fn kill(&mut self, at: usize) {
        let way = way(at % self.ways);
        if matches!(self.all.state(way), WayState::Live(_)) {
            self.all.died(way, self.now, 3);
            self.drop = self.drop.filter(|(by, _)| *by != way);
        }
    }

    /// Brings a mount back that has lost all its ways.
    fn come_back(&mut self, at: usize) {
        if self.all.are_lost() {
            self.newest += 1;
            self.target.login(self.newest);
            self.all.restarted(way(at % self.ways), Epoch(self.newest), self.now);
            (self.join, self.drop) = (None, None);
            self.probe.clear();
        }
    }

    fn act(&mut self, act: u8, number: usize) {
        match act {
            0..2 => self.deliver_join(true),
            2 => self.deliver_join(false),
            3 => self.lose_join(),
            4..6 => self.deliver_drop(true, false),
            6 => self.deliver_drop(false, number > 3),
            7..10 => self.kill(number),
            10 => {
                if let Some(late) = (!self.late.is_empty()).then(|| self.late.remove(0)) {
                    self.target.join(&late);
                }
            }
            11..14 => {
                if let Some(way) = self.probe.pop_first() {
                    self.all.probed(way, number > 0, self.now, 5);
                }
            }
            _ => self.now += Duration::from_millis(500 << number),
        }
        self.come_back(number);
        self.settle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    /// A way that lives is never ended by anything that the mount sent, early or late. A join in
    /// its time is never refused. And when the network is well again, all ways live, and the target
    /// keeps nothing else.
    #[test]
    fn the_mount_and_the_target_agree(
        ways in 1usize..=8,
        acts in proptest::collection::vec((0u8..18, 0usize..8), 0..200),
    ) {
        let mut world = World::new(ways);
        world.settle();
        for (act, number) in acts {
            world.act(act, number);
        }
        for _ in 0..2000 {
            world.deliver_join(true);
            world.deliver_drop(true, false);
            while let Some(way) = world.probe.pop_first() {
                world.all.probed(way, true, world.now, 0);
            }
            world.settle();
            let is_idle = world.join.is_none() && world.drop.is_none() && world.probe.is_empty();
            match world.all.deadline().filter(|_| is_idle) {
                Some(at) => world.now = world.now.max(at),
                None if is_idle => break,
                None => {}
            }
            world.settle();
        }
        let living: BTreeSet<u32> = world.all.living().map(|(_, epoch)| epoch.0).collect();
        prop_assert_eq!(living.len(), ways);
        let late: BTreeSet<u32> = world.target.live.difference(&living).copied().collect();
        prop_assert!(late.is_empty(), "{:?} are left of {:?}", late, world.target);
        // LOGINs that come after all that change nothing for the living.
        while let Some(late) = world.late.pop() {
            world.target.join(&late);
        }
        world.check();
    }
}
