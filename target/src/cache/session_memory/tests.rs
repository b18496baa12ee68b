use crate::cache::session_memory::*;

const ONE: SessionIndex = SessionIndex { index: 1, life: 1 };
const TWO: SessionIndex = SessionIndex { index: 2, life: 1 };
const THREE: SessionIndex = SessionIndex { index: 3, life: 1 };
const A: HostIndex = HostIndex::new(1);
const B: HostIndex = HostIndex::new(2);

/// Sessions of these hosts, over this many slots.
fn sessions(slots: usize, of: &[(SessionIndex, HostIndex)]) -> Sessions {
    let mut sessions = Sessions::default();
    sessions.set_slots(slots);
    of.iter().for_each(|(session, host)| sessions.set_host(*session, *host));
    sessions
}

/// Each session has a host of its own.
fn strangers(slots: usize) -> Sessions {
    sessions(slots, &[(ONE, A), (TWO, B), (THREE, HostIndex::new(3))])
}

fn number(index: u16) -> SessionIndex {
    SessionIndex { index, life: 1 }
}

/// The slots that a session gets, one by one. None come back.
fn fill(sessions: &mut Sessions, session: SessionIndex, pinned: &mut usize) -> usize {
    let before = *pinned;
    while sessions.take(session, 1, *pinned) {
        *pinned += 1;
    }
    *pinned - before
}

#[test]
fn each_further_host_gets_a_part_of_the_rest() {
    let mut sessions = strangers(1900);
    let mut pinned = 0;
    assert_eq!(fill(&mut sessions, ONE, &mut pinned), 400);
    let second = fill(&mut sessions, TWO, &mut pinned);
    assert_eq!(second, 316);
    assert!((245..=252).contains(&fill(&mut sessions, THREE, &mut pinned)));
    assert_eq!(sessions.kept(), pinned);
    // The first host gets more when others keep less.
    sessions.give_back(TWO, second);
    pinned -= second;
    assert_eq!(fill(&mut sessions, ONE, &mut pinned), 0);
    sessions.give_back(ONE, 200);
    assert!(sessions.take(ONE, 1, pinned - 200));
}

#[test]
fn a_host_keeps_a_quarter_whatever_the_number_of_its_sessions() {
    for count in [1, 2, 10, 1000] {
        let of: Vec<_> = (10..10 + count).map(|index| (number(index), A)).collect();
        let mut sessions = sessions(4096, &of);
        let mut pinned = 0;
        // Each asks for the largest request first, as often as possible.
        for need in [256, 16, 1] {
            for (session, _) in &of {
                while sessions.take(*session, need, pinned) {
                    pinned += need;
                }
            }
        }
        assert!((860..=1024).contains(&pinned), "{count} sessions keep {pinned}");
        assert_eq!(sessions.kept(), pinned);
        // Another host gets its part, and its first request is served in any case.
        sessions.set_host(ONE, B);
        assert!(sessions.take(ONE, 256, pinned), "{count}");
        assert!(sessions.take(ONE, 256, pinned + 256), "{count}");
    }
}

#[test]
fn a_host_that_keeps_no_memory_gets_its_first_request() {
    let mut sessions = strangers(16);
    assert!(sessions.promise(ONE, 7, 256, 0));
    assert!(!sessions.promise(ONE, 8, 1, 0));
    assert!(sessions.promise(TWO, 9, 16, 0));
    // Another session of a host that keeps memory gets none.
    sessions.set_host(number(4), A);
    assert!(!sessions.promise(number(4), 10, 1, 0));
    sessions.end_promise(ONE, 256);
    sessions.end_promise(TWO, 16);
    assert_eq!(sessions.promise_next(0), Some((8, 1)));
    assert_eq!((sessions.promised(), sessions.kept(), sessions.waiting()), (1, 1, 1));
    assert_eq!(sessions.promise_next(0), Some((10, 1)));
    assert_eq!((sessions.promised(), sessions.kept(), sessions.waiting()), (2, 2, 0));
}

#[test]
fn jobs_of_a_session_go_on_in_order_and_hosts_in_turn() {
    let mut sessions = strangers(36);
    for session in [ONE, TWO] {
        assert!(sessions.promise(session, 0, 7, 0));
    }
    // A large request is in front of a small one, which does not overtake it.
    for (job, need) in [(1, 8), (2, 1)] {
        assert!(!sessions.promise(ONE, job, need, 0));
        assert!(!sessions.promise(TWO, 10 + job, need, 0));
    }
    assert!(!sessions.take(ONE, 1, 0));
    assert_eq!((sessions.waiting(), sessions.promise_next(0)), (2, None));
    sessions.end_promise(ONE, 7);
    sessions.end_promise(TWO, 7);
    let all: Vec<_> = std::iter::from_fn(|| sessions.promise_next(0)).collect();
    assert_eq!(all, [(1, 8), (11, 8)]);
    sessions.end_promise(TWO, 8);
    assert_eq!(sessions.promise_next(0), Some((12, 1)));
    // The session keeps the most that a session may have of its host's memory.
    assert_eq!(sessions.promise_next(0), None);
    sessions.end_promise(ONE, 8);
    assert_eq!(sessions.promise_next(0), Some((2, 1)));
    assert_eq!((sessions.promise_next(0), sessions.waiting()), (None, 0));
}

#[test]
fn small_requests_of_one_session_do_not_delay_a_large_one_of_another() {
    let mut sessions = sessions(120, &[(ONE, A), (TWO, A), (THREE, A)]);
    assert!(sessions.take(ONE, 8, 0) && sessions.take(ONE, 8, 8));
    // The whole memory that the host may keep.
    assert!(!sessions.promise(TWO, 1, 30, 16));
    assert_eq!(sessions.promise_next(16), None);
    // No session of the host overtakes it, not even with a small request.
    sessions.give_back(ONE, 8);
    assert!(!sessions.promise(ONE, 2, 1, 8));
    assert!(!sessions.take(THREE, 1, 8));
    assert_eq!(sessions.promise_next(8), None);
    sessions.give_back(ONE, 8);
    assert_eq!(sessions.promise_next(0), Some((1, 30)));
    sessions.end_promise(TWO, 30);
    assert_eq!(sessions.promise_next(0), Some((2, 1)));
    assert_eq!((sessions.waiting(), sessions.kept()), (0, 1));
}

#[test]
fn a_session_at_its_own_limit_does_not_delay_others() {
    let mut sessions = sessions(1200, &[(ONE, A), (TWO, A)]);
    let mut pinned = 0;
    let kept = fill(&mut sessions, ONE, &mut pinned);
    assert!(!sessions.promise(ONE, 1, 4, pinned));
    assert_eq!((sessions.promise_next(pinned), sessions.waits(TWO)), (None, true));
    assert!(sessions.take(TWO, 4, pinned), "{kept} slots of {pinned}");
    assert_eq!(sessions.promise_next(pinned + 4), None);
}

#[test]
fn the_memory_of_a_session_moves_with_it_to_its_host() {
    // The session appears before its host is known.
    let mut sessions = sessions(1200, &[(TWO, A)]);
    assert!(sessions.take(ONE, 200, 0));
    assert!(!sessions.promise(ONE, 1, 200, 200));
    assert!(sessions.take(TWO, 150, 200));
    sessions.set_host(ONE, A);
    assert_eq!((sessions.kept(), sessions.waiting()), (350, 1));
    assert!(!sessions.take(TWO, 100, 350), "the host has more than it may");
    sessions.give_back(ONE, 200);
    sessions.give_back(TWO, 150);
    assert_eq!(sessions.promise_next(0), Some((1, 200)));
    sessions.end_promise(ONE, 200);
    // A request of control belongs to no host.
    assert!(sessions.take(SessionIndex::NONE, 10, 0));
    sessions.give_back(SessionIndex::NONE, 10);
    assert_eq!((sessions.kept(), sessions.waiting()), (0, 0));
}
