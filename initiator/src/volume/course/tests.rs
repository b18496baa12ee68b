use proptest::prelude::*;
use rblk_protocol::{
    BlockCount, BlockSize, Epoch, Generation, InstanceId, Name, SessionId, VolumeHandle,
    WriteVerifier,
};

use super::*;

const SESSION: SessionId = SessionId([1; 16]);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn volume() -> OpenReply {
    OpenReply {
        handle: VolumeHandle(3),
        flags: VolumeFlags::default(),
        block_size: BlockSize::new(4096).unwrap(),
        blocks: BlockCount(1024),
        discard_granularity_bytes: 4096,
        uuid: [7; 16],
        verifier: WriteVerifier([1; 16]),
        generation: Generation(5),
    }
}

fn facts() -> Facts {
    Facts {
        resume: Some((SESSION, Epoch(1))),
        volume: volume(),
        instance: InstanceId([1; 16]),
        target_name: name("store1"),
        fenced: None,
    }
}

fn rules(addresses: usize) -> Rules {
    Rules {
        addresses,
        detect: ms(2000),
        connect_timeout: ms(5000),
        reconnect_delay: ms(1000),
        fail_after: None,
        failback: Duration::from_secs(30),
    }
}

fn login(session: SessionId, epoch: Epoch) -> LoginReply {
    LoginReply {
        session,
        epoch,
        instance: InstanceId([1; 16]),
        queues_max: 4,
        target_name: name("store1"),
    }
}

/// A course in virtual time.
struct Way {
    course: Course,
    now: Instant,
}

impl Way {
    fn connected(rules: Rules) -> Self {
        let now = Instant::now();
        Self { course: Course::connected(rules, facts(), 0, now), now }
    }

    fn lost(rules: Rules) -> Self {
        let now = Instant::now();
        Self { course: Course::lost(rules, facts(), now), now }
    }

    fn after(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self
    }

    fn due(&mut self) -> Option<Act> {
        self.course.due(self.now, u64::MAX)
    }

    #[track_caller]
    fn attempt(&mut self) -> Attempt {
        match self.due() {
            Some(Act::Try(attempt)) => attempt,
            other => panic!("no try is due, but {other:?}"),
        }
    }

    /// Sleeps until the deadline. Returns the time slept.
    #[track_caller]
    fn sleep(&mut self) -> Duration {
        let deadline = self.course.deadline().expect("a deadline");
        let slept = deadline.saturating_duration_since(self.now);
        self.now += slept;
        slept
    }

    fn lose(&mut self) {
        self.course.lose(LossKind::Path, self.now, u64::MAX);
    }

    fn fail(&mut self) {
        self.course.failed(Failure::Transient, self.now, u64::MAX);
    }

    #[track_caller]
    fn arrive(&mut self, attempt: Attempt) -> Arrival {
        let (session, epoch) = attempt.resume.unwrap_or((SessionId([2; 16]), Epoch(1)));
        self.course.logged_in(&login(session, epoch)).unwrap();
        assert_eq!(self.course.opened(&volume()), OpenVerdict::Go);
        self.course.arrived(self.now).expect("an arrival")
    }
}

#[test]
fn a_lost_path_is_tried_again_at_once_and_then_with_growing_pauses() {
    let mut way = Way::connected(rules(1));
    assert_eq!(way.due(), None);
    assert_eq!(way.course.deadline(), None, "one address: nothing to go back to");
    way.after(ms(60_000)).lose();
    assert_eq!(way.course.state(), CourseState::Lost);
    let first = way.attempt();
    assert_eq!(first.resume, Some((SESSION, Epoch(2))));
    assert_eq!(first.generation, Generation(5));
    assert_eq!(first.limit, ms(2000));
    assert_eq!(way.due(), None, "one try at a time");
    let mut pauses = Vec::new();
    for _ in 0..4 {
        way.fail();
        assert_eq!(way.due(), None);
        pauses.push(way.sleep());
        way.attempt();
    }
    assert_eq!(pauses, [ms(1000), ms(1500), ms(1500), ms(1500)]);
    // A long outage: a pause is a thirtieth of it, and never longer than 10 s.
    way.after(ms(90_000)).fail();
    assert_eq!(way.sleep(), way.now.duration_since(way.course.lost_at().unwrap()) * 30 / 31 / 30);
    way.attempt();
    way.after(ms(3_600_000)).fail();
    assert_eq!(way.sleep(), ms(10_000));
    let attempt = way.attempt();
    let arrival = way.arrive(attempt);
    assert!(arrival.stalled > ms(3_600_000) && !arrival.was_failing);
    assert_eq!(way.course.facts().resume, Some((SESSION, Epoch(8))));
}

#[test]
fn jitter_at_most_halves_a_pause_and_a_long_configured_pause_holds() {
    for (random, pause) in [(0, ms(500)), (u64::MAX, ms(1000))] {
        let mut way = Way::lost(rules(1));
        way.attempt();
        way.course.failed(Failure::Transient, way.now, random);
        assert_eq!(way.sleep(), pause);
    }
    let mut way = Way::lost(Rules { reconnect_delay: ms(20_000), ..rules(1) });
    for _ in 0..5 {
        way.attempt();
        way.fail();
        assert_eq!(way.sleep(), ms(20_000));
    }
}

#[test]
fn the_other_addresses_come_first_and_without_a_pause() {
    let mut way = Way::connected(rules(3));
    way.after(ms(10_000)).lose();
    for (address, time) in [(1, 0), (2, 2000), (0, 2000)] {
        assert_eq!(way.attempt().address, address);
        way.after(ms(time)).fail();
        if address != 0 {
            assert_eq!(way.sleep(), ms(0));
        }
    }
    assert!(way.sleep() > ms(0), "a pause after a round");
    // Addresses 2 and 0 did not answer in time; 1 refused at once.
    let order: Vec<usize> = (0..3)
        .map(|_| {
            let attempt = way.attempt();
            way.fail();
            attempt.address
        })
        .collect();
    assert_eq!(order, [1, 0, 2]);
    // All refuse: the target itself is gone, and the preferred address is first again.
    way.sleep();
    let attempt = way.attempt();
    assert_eq!(attempt.address, 0);
    way.arrive(attempt);
}

#[test]
fn a_successor_begins_at_the_last_address() {
    let mut way = Way::lost(rules(3));
    way.course.prefer(7);
    way.course.prefer(2);
    for address in [2, 0, 1] {
        assert_eq!(way.attempt().address, address);
        way.fail();
    }
    way.sleep();
    assert_eq!(way.attempt().address, 0);
}

#[test]
fn a_session_that_does_not_last_is_a_failed_try() {
    let mut way = Way::connected(rules(2));
    way.after(ms(10_000)).lose();
    let attempt = way.attempt();
    assert_eq!(attempt.address, 1);
    way.arrive(attempt);
    way.after(ms(100)).lose();
    let attempt = way.attempt();
    assert_eq!(attempt.address, 0, "the rest of the round");
    way.arrive(attempt);
    way.after(ms(100)).lose();
    assert_eq!(way.due(), None);
    assert_eq!(way.sleep(), ms(1000));
    let attempt = way.attempt();
    assert_eq!(attempt.address, 1);
    way.arrive(attempt);
    way.after(LASTING).lose();
    assert_eq!(way.attempt().address, 0);
    // A remade path with fewer features is no failure: try at once, at this address.
    let mut way = Way::connected(rules(2));
    way.course.lose(LossKind::Renegotiate, way.now, 0);
    assert_eq!(way.attempt().address, 0);
}

#[test]
fn a_session_that_is_gone_is_begun_anew_with_the_old_generation() {
    let mut way = Way::lost(rules(2));
    let attempt = way.attempt();
    assert_eq!((attempt.address, attempt.resume), (0, Some((SESSION, Epoch(2)))));
    way.course.failed(Failure::SessionGone, way.now, 0);
    let attempt = way.attempt();
    assert_eq!((attempt.address, attempt.resume), (0, None), "at once, there");
    assert_eq!(attempt.generation, Generation(5));
    // The path dies between LOGIN and OPEN: the next try names the new session.
    let new = SessionId([9; 16]);
    way.course.logged_in(&login(new, Epoch(1))).unwrap();
    way.fail();
    assert_eq!(way.attempt().resume, Some((new, Epoch(2))));
    // A target that does not know a session it has just made is not tried in a hurry.
    way.course.failed(Failure::SessionGone, way.now, u64::MAX);
    assert_eq!(way.attempt().resume, None);
    way.course.failed(Failure::SessionGone, way.now, u64::MAX);
    assert_eq!(way.sleep(), ms(1000));
}

#[test]
fn the_last_epoch_is_followed_by_a_new_session() {
    let mut way = Way::lost(rules(1));
    way.course.facts.resume = Some((SESSION, Epoch(u32::MAX - 1)));
    assert_eq!(way.attempt().resume, Some((SESSION, Epoch(u32::MAX))));
    way.fail();
    way.sleep();
    assert_eq!(way.attempt().resume, None);
}

#[test]
fn fenced_is_final() {
    let mut way = Way::connected(Rules { fail_after: Some(ms(10)), ..rules(2) });
    way.after(ms(5000)).lose();
    let attempt = way.attempt();
    way.course.logged_in(&login(SESSION, attempt.resume.unwrap().1)).unwrap();
    way.course.fenced("held by b");
    assert_eq!(way.course.state(), CourseState::Fenced);
    assert_eq!(way.course.facts().fenced.as_deref(), Some("held by b"));
    assert_eq!(way.course.arrived(way.now), None);
    way.after(ms(100_000)).fail();
    assert_eq!((way.due(), way.course.deadline()), (None, None));
    // The next process inherits this.
    let mut next = Course::connected(rules(2), way.course.facts().clone(), 0, way.now);
    assert_eq!(next.state(), CourseState::Fenced);
    assert_eq!((next.due(way.now, 0), next.deadline()), (None, None));
}

#[test]
fn another_volume_is_final_and_another_verifier_is_settled() {
    let memory = |flags| OpenReply { flags, ..volume() };
    let ephemeral = VolumeFlags::default().with(VolumeFlags::EPHEMERAL, true);
    for (reply, instance, verdict) in [
        (volume(), 1, OpenVerdict::Go),
        (volume(), 2, OpenVerdict::Go),
        (memory(ephemeral), 1, OpenVerdict::Go),
        (memory(ephemeral), 2, OpenVerdict::Changed("was in the memory of a target that ended")),
        (
            OpenReply { verifier: WriteVerifier([2; 16]), ..volume() },
            2,
            OpenVerdict::ResolveUnflushed,
        ),
        (OpenReply { blocks: BlockCount(1023), ..volume() }, 1, OpenVerdict::Go),
        (OpenReply { blocks: BlockCount(4096), ..volume() }, 2, OpenVerdict::Go),
        (
            OpenReply { uuid: [8; 16], ..volume() },
            1,
            OpenVerdict::Changed("came back as another volume or block size"),
        ),
        (
            OpenReply { block_size: BlockSize::new(512).unwrap(), ..volume() },
            1,
            OpenVerdict::Changed("came back as another volume or block size"),
        ),
    ] {
        let mut way = Way::lost(rules(1));
        way.attempt();
        let login = LoginReply { instance: InstanceId([instance; 16]), ..login(SESSION, Epoch(2)) };
        way.course.logged_in(&login).unwrap();
        assert_eq!(way.course.opened(&reply), verdict);
        match verdict {
            OpenVerdict::Changed(_) => {
                assert_eq!(way.course.state(), CourseState::Changed);
                assert_eq!((way.due(), way.course.deadline()), (None, None));
            }
            _ => {
                assert_eq!(way.course.facts().volume, volume(), "not before the end");
                let arrival = way.course.arrived(way.now).unwrap();
                assert_eq!(arrival.verifier_changed, verdict == OpenVerdict::ResolveUnflushed);
                assert_eq!(way.course.facts().volume, reply);
                assert_eq!(way.course.facts().instance, login.instance);
            }
        }
    }
}

#[test]
fn a_volume_may_grow_and_become_read_only_but_its_writes_stay_to_be_flushed() {
    let is = |read_only, volatile| {
        VolumeFlags::default()
            .with(VolumeFlags::READ_ONLY, read_only)
            .with(VolumeFlags::VOLATILE_CACHE, volatile)
    };
    let mut facts = facts();
    facts.volume.flags = is(false, true);
    let mut course = Course::connected(rules(1), facts.clone(), 0, Instant::now());
    let entry = VolumeEntry {
        name: name("v"),
        flags: is(true, false).with(VolumeFlags::IN_USE, true),
        block_size: volume().block_size,
        blocks: BlockCount(4096),
        uuid: [7; 16],
    };
    assert!(course.seen(&entry));
    let now = OpenReply { blocks: BlockCount(4096), flags: is(true, true), ..volume() };
    assert_eq!(course.facts().volume, now);
    assert!(course.seen(&VolumeEntry { flags: is(false, true), ..entry }));
    assert_eq!(course.facts().volume.flags, is(false, true));
    assert!(!course.seen(&VolumeEntry { uuid: [8; 16], ..entry }));
    assert!(!course.seen(&VolumeEntry { block_size: BlockSize::new(512).unwrap(), ..entry }));
    // An OPEN changes the volume in this way, too.
    let mut way =
        Way { course: Course::lost(rules(1), facts, Instant::now()), ..Way::lost(rules(1)) };
    let attempt = way.attempt();
    way.course.logged_in(&login(SESSION, attempt.resume.unwrap().1)).unwrap();
    let opened = OpenReply { flags: is(true, false), blocks: BlockCount(9), ..volume() };
    assert_eq!(way.course.opened(&opened), OpenVerdict::Go);
    way.course.arrived(way.now).unwrap();
    assert_eq!(way.course.facts().volume, OpenReply { flags: is(true, true), ..opened });
}

#[test]
fn requests_fail_while_the_volume_is_removed_and_go_on_when_it_is_back() {
    let mut way = Way::connected(rules(1));
    way.after(ms(5000));
    way.course.removed(way.now, 0);
    assert_eq!(way.course.state(), CourseState::Removed);
    assert!(!way.course.is_over());
    // The volume is still missing.
    let attempt = way.attempt();
    way.course.logged_in(&login(SESSION, attempt.resume.unwrap().1)).unwrap();
    assert!(!way.course.missing(), "no news");
    way.fail();
    assert_eq!(way.course.state(), CourseState::Removed);
    way.after(ms(20_000));
    let attempt = way.attempt();
    assert_eq!(attempt.generation, volume().generation);
    way.course.logged_in(&login(SESSION, attempt.resume.unwrap().1)).unwrap();
    assert_eq!(way.course.opened(&volume()), OpenVerdict::Go);
    assert!(way.course.arrived(way.now).unwrap().was_failing);
}

#[test]
fn a_volume_is_removed_if_the_same_run_of_the_target_had_it() {
    for (instance, is_removed) in [(1, true), (2, false)] {
        let mut way = Way::lost(rules(1));
        assert!(!way.course.missing(), "nobody was asked");
        let attempt = way.attempt();
        let login = login(SESSION, attempt.resume.unwrap().1);
        let login = LoginReply { instance: InstanceId([instance; 16]), ..login };
        way.course.logged_in(&login).unwrap();
        assert_eq!(way.course.missing(), is_removed);
        let state = if is_removed { CourseState::Removed } else { CourseState::Lost };
        way.fail();
        assert_eq!(way.course.state(), state, "a target that starts may have it soon");
    }
}

#[test]
fn another_target_is_a_failed_try_and_its_session_is_not_used() {
    let mut way = Way::lost(rules(2));
    way.attempt();
    let other = LoginReply { target_name: name("store2"), ..login(SessionId([8; 16]), Epoch(1)) };
    let error = way.course.logged_in(&other).unwrap_err();
    assert!(error.to_string().contains("store2") && error.to_string().contains("store1"));
    way.fail();
    let attempt = way.attempt();
    assert_eq!((attempt.address, attempt.resume), (1, Some((SESSION, Epoch(3)))));
}

#[test]
fn requests_fail_after_a_while_and_wait_again_when_the_target_is_back() {
    let mut way = Way::connected(Rules { fail_after: Some(ms(3000)), ..rules(1) });
    way.after(ms(5000)).lose();
    way.attempt();
    assert_eq!(way.sleep(), ms(3000), "also while a try is under way");
    assert_eq!(way.due(), Some(Act::Fail));
    assert_eq!(way.course.state(), CourseState::Failing);
    assert_eq!(way.due(), None, "once");
    way.fail();
    way.sleep();
    let attempt = way.attempt();
    assert!(way.arrive(attempt).was_failing);
    assert_eq!(way.course.state(), CourseState::Connected);
}

#[test]
fn a_mount_that_uses_every_address_goes_back_to_none() {
    let mut way = Way::connected(rules(2));
    way.after(ms(10_000)).lose();
    let attempt = way.attempt();
    assert_eq!(attempt.address, 1);
    way.arrive(attempt);
    way.course.uses_all_addresses(true);
    assert_eq!(way.course.deadline(), None);
    assert_eq!(way.after(ms(60_000)).due(), None);
    way.course.uses_all_addresses(false);
    assert_eq!(way.due(), Some(Act::Probe(0)));
}

#[test]
fn a_better_address_is_gone_back_to_when_it_answered_twice() {
    let mut way = Way::connected(rules(3));
    way.after(ms(10_000)).lose();
    way.attempt();
    way.fail();
    let attempt = way.attempt();
    assert_eq!(attempt.address, 2);
    way.arrive(attempt);
    // First only address 1 answers; then 0 answers, too.
    for (probes, next) in [(&[(0, false), (1, true)][..], true), (&[(0, true)], true)] {
        assert_eq!(way.sleep(), ms(30_000));
        for &(address, answers) in probes {
            assert_eq!(way.due(), Some(Act::Probe(address)));
            assert_eq!(way.due(), None);
            assert_eq!(way.course.deadline(), None, "a probe has its own deadline");
            way.course.probed(address, answers, way.now);
        }
        assert_eq!(way.due().is_none(), next);
    }
    way.sleep();
    assert_eq!(way.due(), Some(Act::Probe(0)));
    way.course.probed(1, true, way.now);
    assert_eq!(way.due(), None, "an answer that was not asked for");
    way.course.probed(0, true, way.now);
    assert_eq!(way.due(), Some(Act::Hold));
    assert!(way.course.is_holding());
    assert_eq!(way.due(), None);
    way.course.quiet();
    assert_eq!(way.due(), Some(Act::Leave(Leaving::Back { to: 0 })));
    let attempt = way.attempt();
    assert_eq!(attempt.address, 0);
    way.arrive(attempt);
    assert_eq!(way.course.deadline(), None, "there is none better");
    // The connection does not hold: the next probes are rarer.
    way.after(ms(20_000)).lose();
    let attempt = way.attempt();
    assert_eq!(attempt.address, 1);
    way.arrive(attempt);
    assert_eq!(way.sleep(), ms(60_000));
}

#[test]
fn a_hold_that_does_not_get_quiet_ends() {
    let mut way = Way::connected(rules(2));
    way.after(ms(10_000));
    way.course.draining(way.now);
    assert_eq!(way.sleep(), ms(0));
    way.course.quiet();
    assert_eq!(way.due(), Some(Act::Hold), "nobody was asked to be quiet before");
    assert_eq!(way.sleep(), ms(1500));
    assert_eq!(way.due(), Some(Act::Leave(Leaving::Drain)));
    let attempt = way.attempt();
    assert_eq!(attempt.address, 1, "the others first");
    assert_eq!(attempt.resume, Some((SESSION, Epoch(2))), "in the same session");
    way.fail();
    assert_eq!(way.attempt().address, 0);
    // The path dies meanwhile: the hold is over.
    let mut way = Way::connected(rules(1));
    way.after(ms(10_000));
    way.course.draining(way.now);
    assert_eq!(way.due(), Some(Act::Hold));
    way.lose();
    assert!(!way.course.is_holding());
    assert_eq!(way.due(), None);
    assert_eq!(way.sleep(), ms(1000), "no other address, and the target needs a while");
    way.attempt();
}

#[test]
fn a_target_that_is_upgraded_is_asked_at_once_and_often() {
    let mut way = Way::connected(rules(2));
    way.after(ms(10_000));
    way.course.upgrading(way.now);
    assert_eq!(way.due(), Some(Act::Hold));
    assert_eq!(way.due(), None, "something is unanswered");
    way.course.quiet();
    assert_eq!(way.due(), Some(Act::Leave(Leaving::Upgrade)));
    // First the address and the session of before, without a pause: the upgrade may fail.
    let attempt = way.attempt();
    assert_eq!((attempt.address, attempt.resume), (0, Some((SESSION, Epoch(2)))));
    // The listener of that address may return later than the socket of another address.
    for _ in 0..30 {
        way.fail();
        assert_eq!(way.sleep(), ms(100), "shorter than any pause of the configuration");
        assert_eq!(way.attempt().address, 0);
    }
    way.fail();
    assert_eq!(way.attempt().address, 1, "but not for long");
    way.fail();
    assert_eq!(way.sleep(), ms(100), "shorter than any pause of the configuration");
    // A hold that does not get quiet ends.
    let mut way = Way::connected(rules(1));
    way.course.upgrading(way.now);
    assert_eq!(way.due(), Some(Act::Hold));
    assert_eq!(way.sleep(), ms(1000));
    assert_eq!(way.due(), Some(Act::Leave(Leaving::Upgrade)));
    for _ in 0..40 {
        way.attempt();
        way.fail();
        assert_eq!(way.sleep(), ms(100));
    }
    // A target that stays away is tried more rarely after a while.
    way.attempt();
    way.after(ms(10_000)).fail();
    assert!(way.sleep() >= ms(500));
    // A loss after the return counts as any other loss.
    let mut way = Way::connected(rules(1));
    way.course.upgrading(way.now);
    assert_eq!(way.due(), Some(Act::Hold));
    way.course.quiet();
    assert_eq!(way.due(), Some(Act::Leave(Leaving::Upgrade)));
    let attempt = way.attempt();
    way.arrive(attempt);
    way.lose();
    assert_eq!(way.due(), None);
    assert!(way.sleep() >= ms(500));
}

#[test]
fn a_better_address_is_looked_for_at_once_after_a_start_of_the_target() {
    let arrived_at_the_worse = |instance| {
        let mut way = Way::connected(rules(2));
        way.after(ms(10_000)).lose();
        let attempt = way.attempt();
        assert_eq!(attempt.address, 1, "the path of the other one died");
        let (session, epoch) = (SessionId([2; 16]), Epoch(1));
        let login = LoginReply { instance: InstanceId(instance), ..login(session, epoch) };
        way.course.logged_in(&login).unwrap();
        assert_eq!(way.course.opened(&volume()), OpenVerdict::Go);
        way.course.arrived(way.now).expect("an arrival");
        assert_eq!((way.course.address(), way.due()), (1, None));
        way
    };
    let mut way = arrived_at_the_worse([2; 16]);
    for answers in [false, true, true] {
        assert_eq!(way.sleep(), ms(1000));
        assert_eq!(way.due(), Some(Act::Probe(0)));
        way.course.probed(0, answers, way.now);
    }
    assert_eq!(way.due(), Some(Act::Hold), "back to it");
    // A better address that stays away is probed at the normal rate.
    let mut way = arrived_at_the_worse([2; 16]);
    let pauses: Vec<Duration> = (0..20)
        .map(|_| {
            let pause = way.sleep();
            assert_eq!(way.due(), Some(Act::Probe(0)));
            way.course.probed(0, false, way.now);
            pause
        })
        .collect();
    assert_eq!(pauses.iter().filter(|pause| **pause == ms(1000)).count(), 15, "{pauses:?}");
    assert_eq!(pauses.last(), Some(&ms(30_000)));
    // The target did not restart: the way to it is broken, and may break again.
    let mut way = arrived_at_the_worse([1; 16]);
    assert_eq!(way.sleep(), ms(30_000));
}

#[derive(Clone, Debug)]
enum Event {
    Wait(u16),
    WaitDeadline,
    Lose(bool),
    Login { other: bool, low: bool },
    Open { generation: u64, verifier: u8, changed: bool },
    Arrive,
    Fail(bool),
    Fenced,
    Removed,
    Drain,
    Upgrade,
    Quiet,
    Probed(usize, bool),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => any::<u16>().prop_map(Event::Wait),
        6 => Just(Event::WaitDeadline),
        3 => any::<bool>().prop_map(Event::Lose),
        6 => (prop::bool::weighted(0.1), prop::bool::weighted(0.2))
            .prop_map(|(other, low)| Event::Login { other, low }),
        6 => (1u64..9, 0u8..3, prop::bool::weighted(0.02)).prop_map(
            |(generation, verifier, changed)| Event::Open { generation, verifier, changed }
        ),
        6 => Just(Event::Arrive),
        4 => any::<bool>().prop_map(Event::Fail),
        1 => prop::bool::weighted(0.05).prop_map(|yes| if yes { Event::Fenced } else { Event::Quiet }),
        1 => Just(Event::Removed),
        1 => Just(Event::Drain),
        1 => Just(Event::Upgrade),
        2 => Just(Event::Quiet),
        3 => (0usize..4, any::<bool>()).prop_map(|(at, ok)| Event::Probed(at, ok)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// The invariants of the module hold for any order of events.
    #[test]
    fn no_order_of_events_breaks_the_promises(
        events in prop::collection::vec((event(), any::<u64>()), 1..120),
        addresses in 1usize..4,
        begins_lost in any::<bool>(),
        fail_after in prop::option::of(0u64..20_000),
        failback in prop_oneof![Just(0u64), 100u64..60_000],
    ) {
        let rules = Rules {
            fail_after: fail_after.map(ms),
            failback: ms(failback),
            ..rules(addresses)
        };
        let mut now = Instant::now();
        let mut course = if begins_lost {
            Course::lost(rules, facts(), now)
        } else {
            Course::connected(rules, facts(), 0, now)
        };
        let mut epochs = std::collections::BTreeMap::new();
        epochs.insert(SESSION, Epoch(1));
        let mut newest = Generation(5);
        let mut trying: Option<Attempt> = None;
        let mut has_opened = false;
        let mut fresh = 10u8;
        for (event, random) in events {
            let was_over = course.is_over();
            match event {
                Event::Wait(time) => now += ms(u64::from(time)),
                Event::WaitDeadline => now = course.deadline().map_or(now, |at| at.max(now)),
                Event::Lose(path) => {
                    let loss = if path { LossKind::Path } else { LossKind::Renegotiate };
                    course.lose(loss, now, random);
                }
                Event::Login { other, low } => {
                    if let Some(attempt) = trying {
                        fresh = fresh.wrapping_add(1);
                        let (session, epoch) =
                            attempt.resume.unwrap_or((SessionId([fresh; 16]), Epoch(1)));
                        // The target may reply with a lower epoch.
                        let mut login = login(session, if low { Epoch(1) } else { epoch });
                        if other {
                            login.target_name = name("store2");
                        }
                        let result = course.logged_in(&login);
                        prop_assert_eq!(result.is_err(), other);
                        if !other {
                            epochs.insert(session, epoch);
                        }
                    }
                }
                Event::Open { generation, verifier, changed } => {
                    let reply = OpenReply {
                        generation: Generation(generation),
                        verifier: WriteVerifier([verifier; 16]),
                        blocks: BlockCount(1024 + u64::from(verifier)),
                        uuid: if changed { [8; 16] } else { volume().uuid },
                        ..volume()
                    };
                    let verdict = course.opened(&reply);
                    if trying.is_some() {
                        prop_assert_eq!(matches!(verdict, OpenVerdict::Changed(_)), changed);
                        if changed {
                            trying = None;
                            prop_assert_eq!(course.state(), CourseState::Changed);
                        } else {
                            newest = reply.generation;
                            has_opened = true;
                        }
                    }
                }
                Event::Arrive => {
                    let arrival = course.arrived(now);
                    prop_assert_eq!(arrival.is_some(), trying.is_some() && has_opened);
                    if arrival.is_some() {
                        trying = None;
                        prop_assert_eq!(course.state(), CourseState::Connected);
                    }
                }
                Event::Fail(gone) => {
                    let why = if gone { Failure::SessionGone } else { Failure::Transient };
                    course.failed(why, now, random);
                    trying = None;
                }
                Event::Fenced => {
                    course.fenced("b");
                    trying = None;
                    prop_assert!(course.is_over());
                }
                Event::Removed => {
                    course.removed(now, random);
                    if course.missing() {
                        prop_assert_eq!(course.state(), CourseState::Removed);
                    }
                }
                Event::Drain => course.draining(now),
                Event::Upgrade => course.upgrading(now),
                Event::Quiet => course.quiet(),
                Event::Probed(at, ok) => course.probed(at, ok, now),
            }
            prop_assert!(!was_over || course.is_over(), "what is over stays so");
            let mut acts = 0;
            while let Some(act) = course.due(now, random) {
                acts += 1;
                prop_assert!(acts < 6, "it ends");
                prop_assert!(!course.is_over());
                match act {
                    Act::Try(attempt) => {
                        prop_assert!(trying.is_none(), "one at a time");
                        prop_assert!(attempt.address < addresses);
                        prop_assert_eq!(attempt.generation, newest);
                        if let Some((id, epoch)) = attempt.resume {
                            let last = epochs.insert(id, epoch);
                            prop_assert!(last.is_none_or(|last| last < epoch), "epochs rise");
                        }
                        trying = Some(attempt);
                        has_opened = false;
                    }
                    Act::Fail => prop_assert_eq!(course.state(), CourseState::Failing),
                    Act::Hold => prop_assert!(course.is_holding()),
                    Act::Leave(_) => prop_assert_eq!(course.state(), CourseState::Lost),
                    Act::Probe(at) => prop_assert!(at < course.address),
                }
            }
            let deadline = course.deadline();
            prop_assert!(deadline.is_none_or(|at| at > now), "nothing that is due is left");
            match course.state() {
                CourseState::Lost | CourseState::Failing | CourseState::Removed => {
                    prop_assert!(trying.is_some() || deadline.is_some(), "lost and idle");
                    prop_assert!(course.lost_at().is_some());
                }
                CourseState::Connected => {
                    prop_assert!(trying.is_none() && course.lost_at().is_none());
                    prop_assert!(!course.is_holding() || deadline.is_some(), "held for ever");
                }
                CourseState::Fenced | CourseState::Changed => prop_assert!(deadline.is_none()),
            }
        }
    }
}
