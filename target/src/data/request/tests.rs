//! A request against a model of its surroundings: shards and a device that answer in any order,
//! fail, or lose their connection at any time.

use proptest::prelude::*;
use rblk_protocol::{Epoch, Sequence, Tag};

use super::*;

fn command(opcode: Opcode, in_capsule_bytes: u32) -> CommandCapsule {
    let bare = CommandCapsule::new(opcode, Tag(3), Epoch(1), Sequence(1));
    CommandCapsule { in_capsule_bytes, ..bare }
}

fn started(opcode: Opcode) -> Request {
    let mut request = Request::new();
    let command = command(opcode, 0);
    let _ = request.step(RequestEvent::Command { command: &command, message: 1, data: None });
    let span = Span { volume: VolumeIndex(0), offset: 0, len: 4096 };
    request.names(span);
    request
}

fn with_parts(opcode: Opcode, parts: u8) -> Request {
    let mut request = started(opcode);
    for part in 0..parts {
        let at = 4096 * u32::from(part);
        let _ = request.step(RequestEvent::Part(Part::new(0, at.into(), at, 4096)));
        let _ = request.step(RequestEvent::Asked);
    }
    request
}

fn finishes(action: Action) -> Option<Status> {
    match action {
        Action::Finish(status) => Some(status),
        _ => None,
    }
}

/// The next event from outside for each part of a WRITE.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Outside {
    Reserve,
    PostRead,
    CompleteRead,
    Write,
    Nothing,
}

proptest! {
    /// For every order of answers, a WRITE finishes once, with its last answer and its first
    /// failure; and never after its connection ended.
    #[test]
    fn a_write_finishes_once(
        parts in 1u8..6,
        order in proptest::collection::vec(any::<prop::sample::Index>(), 40),
        fails in proptest::collection::vec(proptest::bool::weighted(0.2), 6),
        ends_at in proptest::option::of(0usize..20),
    ) {
        let mut request = with_parts(Opcode::Write, parts);
        let mut next = vec![Outside::Reserve; usize::from(parts)];
        let (mut finished, mut failed, mut ended) = (None, false, false);
        for (step, index) in order.iter().enumerate() {
            if ends_at == Some(step) {
                let _ = request.step(RequestEvent::Abandon);
                ended = true;
            }
            let open: Vec<usize> =
                (0..next.len()).filter(|at| next[*at] != Outside::Nothing).collect();
            if open.is_empty() {
                break;
            }
            let at = open[index.index(open.len())];
            let part = PartIndex(narrow_u8(at));
            match next[at] {
                Outside::Reserve => {
                    let job = JobId::test(u32::from(part.0));
                    let action = request.step(RequestEvent::OfPart(part, PartEvent::Reserved(job, Segments::default())));
                    if ended {
                        prop_assert_eq!(action, Action::GiveBack(part));
                        let (taken, memory) = request.parts_mut()[at].take_memory();
                        prop_assert!(taken == Some(job) && memory.is_empty());
                        next[at] = Outside::Nothing;
                    } else {
                        prop_assert!(matches!(action, Action::Fetch(p) if p == part));
                        next[at] = Outside::PostRead;
                    }
                }
                // The device of an ended connection reports nothing.
                _ if ended && next[at] != Outside::Write => next[at] = Outside::Nothing,
                Outside::PostRead => {
                    let _ = request.step(RequestEvent::OfPart(part, PartEvent::ReadPosted(4096)));
                    next[at] = Outside::CompleteRead;
                }
                Outside::CompleteRead => {
                    prop_assert!(matches!(request.step(RequestEvent::OfPart(part, PartEvent::ReadDone)), Action::Place));
                    let (job, memory) = request.parts_mut()[at].take_memory();
                    prop_assert!(job.is_some() && memory.is_empty());
                    let _ = request.step(RequestEvent::OfPart(part, PartEvent::WriteAsked));
                    next[at] = Outside::Write;
                }
                Outside::Write => {
                    let result = if fails[at] { Err(Errno::EIO) } else { Ok(()) };
                    failed |= fails[at];
                    next[at] = Outside::Nothing;
                    let is_last = !request.is_executing_more_than_one();
                    let status = finishes(request.step(RequestEvent::Done(part, result)));
                    prop_assert!(status.is_none() || is_last, "an answer before the last shard's");
                    prop_assert!(status.is_none() || finished.is_none(), "a second answer");
                    prop_assert!(status.is_none() || !ended, "an answer on no connection");
                    finished = status.or(finished);
                }
                Outside::Nothing => {}
            }
        }
        if !ended {
            prop_assert_eq!(finished.map(|status| status == Status::Ok), Some(!failed));
        }
        prop_assert!(!request.has_shards());
    }

    /// The answer of a READ rides on the last sent part, and only when all parts are available.
    #[test]
    fn the_last_part_of_a_read_answers(
        parts in 1u8..6,
        order in proptest::collection::vec(any::<prop::sample::Index>(), 6),
    ) {
        let mut request = with_parts(Opcode::Read, parts);
        let mut asked: Vec<u8> = (0..parts).collect();
        let mut sent = 0;
        for index in order.iter().take(usize::from(parts)) {
            let part = PartIndex(asked.swap_remove(index.index(asked.len())));
            let action = request.step(RequestEvent::OfPart(part, PartEvent::Lent(Ok(Segments::default()))));
            prop_assert!(matches!(action, Action::Send));
            let Some((next, is_last)) = request.next_to_send() else {
                return Err(TestCaseError::fail("nothing to send"));
            };
            sent += 1;
            prop_assert_eq!((next, is_last), (part, sent == parts));
            let half = request.step(RequestEvent::OfPart(part, PartEvent::Sent(2048)));
            prop_assert!(matches!(half, Action::Wait), "memory is read by one more WR");
            prop_assert!(matches!(request.step(RequestEvent::OfPart(part, PartEvent::Sent(2048))), Action::Pin));
        }
        prop_assert!(request.next_to_send().is_none() && !request.has_failed());
    }
}

fn narrow_u8(at: usize) -> u8 {
    rblk_protocol::width::narrow(at)
}

impl Request {
    fn is_executing_more_than_one(&self) -> bool {
        self.pending > 1
    }
}

#[test]
fn a_read_fails_when_no_shard_works_for_it() {
    let mut request = with_parts(Opcode::Read, 2);
    let action = request.step(RequestEvent::OfPart(PartIndex(1), PartEvent::Lent(Err(Errno::EIO))));
    assert!(matches!(action, Action::Send) && !request.has_failed());
    let _ =
        request.step(RequestEvent::OfPart(PartIndex(0), PartEvent::Lent(Ok(Segments::default()))));
    assert_eq!(request.next_to_send(), Some((PartIndex(0), false)), "no answer of OK");
    let _ = request.step(RequestEvent::OfPart(PartIndex(0), PartEvent::Sent(4096)));
    assert!(request.has_failed());
    assert_eq!(request.outcome().status, Status::from_store_errno(Errno::EIO as i32));
}

#[test]
fn a_flush_syncs_after_every_shard_and_not_after_a_failure() {
    for (results, expected) in [
        ([Ok(()), Ok(())], None),
        ([Ok(()), Err(Errno::EIO)], Some(Status::from_store_errno(5))),
        ([Err(Errno::EIO), Ok(())], Some(Status::from_store_errno(5))),
    ] {
        let mut request = started(Opcode::Flush);
        let _ = request.step(RequestEvent::FlushBegan);
        let _ = request.step(RequestEvent::Asked);
        let _ = request.step(RequestEvent::Asked);
        let first = request.step(RequestEvent::Done(PartIndex::FIRST, results[0]));
        assert!(matches!(first, Action::Wait), "{first:?}");
        let second = request.step(RequestEvent::Done(PartIndex::FIRST, results[1]));
        match expected {
            Some(status) => assert_eq!(finishes(second), Some(status)),
            None => {
                assert!(matches!(second, Action::Sync), "{second:?}");
                let _ = request.step(RequestEvent::Asked);
                let done = request.step(RequestEvent::Done(PartIndex::FIRST, Ok(())));
                assert_eq!(finishes(done), Some(Status::Ok));
            }
        }
    }
}

#[test]
fn a_change_locks_every_shard_and_ends_every_lock() {
    let mut request = started(Opcode::Discard);
    assert!(matches!(request.step(RequestEvent::LocksBegan), Action::LockRange(0)));
    for shard in 0..2u16 {
        let _ = request.step(RequestEvent::Asked);
        let locked = LockedRange { shard, job: JobId::test(shard.into()) };
        let action = request.step(RequestEvent::Locked(locked));
        assert!(matches!(action, Action::LockRange(next) if next == shard + 1), "{action:?}");
    }
    assert!(matches!(request.step(RequestEvent::AllLocked), Action::Change));
    let _ = request.step(RequestEvent::Asked);
    let action = request.step(RequestEvent::Done(PartIndex::FIRST, Err(Errno::EIO)));
    assert!(matches!(action, Action::UnlockRange(Changed::Unknown)), "{action:?}");
    let locks = request.take_locks();
    assert_eq!(locks.len(), 2);
    request.reuse_locks(locks);
    let _ = request.step(RequestEvent::Asked);
    let _ = request.step(RequestEvent::Asked);
    assert_eq!(finishes(request.step(RequestEvent::Done(PartIndex::FIRST, Ok(())))), None);
    let last = finishes(request.step(RequestEvent::Done(PartIndex::FIRST, Ok(()))));
    assert_eq!(last, Some(Status::from_store_errno(5)), "the first failure counts");
}

#[test]
fn a_change_whose_connection_ended_lets_others_in_again() {
    let mut request = started(Opcode::WriteZeroes);
    let _ = request.step(RequestEvent::LocksBegan);
    let _ = request.step(RequestEvent::Asked);
    let _ = request.step(RequestEvent::Abandon);
    let locked = LockedRange { shard: 0, job: JobId::test(0) };
    let action = request.step(RequestEvent::Locked(locked));
    assert!(matches!(action, Action::UnlockRange(Changed::No)), "{action:?}");
    assert_eq!(request.take_locks(), [locked]);
    let _ = request.step(RequestEvent::Asked);
    assert!(matches!(request.step(RequestEvent::Done(PartIndex::FIRST, Ok(()))), Action::Wait));
    assert!(!request.has_shards());
}

#[test]
fn a_read_that_was_not_posted_is_impossible() {
    let mut request = with_parts(Opcode::Write, 1);
    assert!(matches!(
        request.step(RequestEvent::OfPart(PartIndex(0), PartEvent::ReadDone)),
        Action::Impossible
    ));
    assert!(matches!(
        request.step(RequestEvent::OfPart(PartIndex(9), PartEvent::ReadDone)),
        Action::Impossible
    ));
}

#[test]
fn a_tag_is_free_when_answered_and_in_a_later_message() {
    let mut request = Request::new();
    assert!(request.may_start_in(1));
    let command = command(Opcode::Flush, 0);
    let _ = request.step(RequestEvent::Command { command: &command, message: 1, data: None });
    assert!(!request.may_start_in(2), "its command waits for an answer");
    let _ = request.step(RequestEvent::Outcome(CommandOutcome::OK));
    assert!(request.awaits_credits() && !request.may_start_in(2));
    let _ = request.step(RequestEvent::Answered);
    assert!(request.may_start_in(2) && !request.may_start_in(1));
}

#[test]
fn a_command_over_a_limit_begins_once_and_never_after_the_end_of_its_connection() {
    let limited = || {
        let mut request = started(Opcode::Read);
        let _ = request.step(RequestEvent::OverLimit);
        assert!(!request.is_answered() && !request.is_executing() && !request.has_shards());
        request
    };
    let mut request = limited();
    assert_eq!(request.step(RequestEvent::MayBegin), Action::Begin);
    assert_eq!(request.step(RequestEvent::MayBegin), Action::Impossible);
    let mut request = limited();
    let _ = request.step(RequestEvent::Abandon);
    assert_eq!(request.step(RequestEvent::MayBegin), Action::Impossible);
}
