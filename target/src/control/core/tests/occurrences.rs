//! The occurrences of hosts that come, go, come back and are lost.

use super::*;
use rblk_operate::target::events::EventKind;

/// The occurrences since the last call, each with its host and volume.
fn told(w: &mut World) -> Vec<(EventKind, String, String)> {
    let next = || {
        let what = w.core.next_occurrence()?;
        Some((what.kind, what.host.unwrap_or_default(), what.volume.unwrap_or_default()))
    };
    std::iter::from_fn(next).collect()
}

fn kinds(w: &mut World) -> Vec<EventKind> {
    told(w).into_iter().map(|(kind, ..)| kind).collect()
}

#[test]
fn a_host_is_lost_only_if_it_held_a_volume_and_did_not_log_out() {
    let mut w = World::new();
    let first = w.session(1);
    assert_eq!(told(&mut w), [(EventKind::Connect, "host1".to_owned(), String::new())]);
    w.bury(first);
    assert_eq!(kinds(&mut w), [EventKind::Leave], "it held nothing");

    let second = w.session(2);
    assert_eq!(w.open(second, 1, exclusive(0)).unwrap().status, Status::Ok);
    w.log_out(second);
    w.bury(second);
    assert_eq!(kinds(&mut w), [EventKind::Connect, EventKind::Leave]);

    let third = w.session(3);
    assert_eq!(w.open(third, 1, exclusive(0)).unwrap().status, Status::Ok);
    w.bury(third);
    assert_eq!(kinds(&mut w), [EventKind::Connect, EventKind::Loss]);
    w.pass(LEASE + Duration::from_secs(1));
    w.write_all();
    assert_eq!(kinds(&mut w), [EventKind::Expire], "and nothing of the first one");
}

#[test]
fn a_host_that_comes_back_before_its_old_connections_are_gone_was_not_lost() {
    let mut w = World::new();
    let first = w.session(1);
    assert_eq!(w.open(first, 1, exclusive(0)).unwrap().status, Status::Ok);
    let again = w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(again, 1, 1), None);
    w.bury(first);
    assert_eq!(kinds(&mut w), [EventKind::Connect, EventKind::Resume]);
    w.bury(again);
    let third = w.connect(ConnectionKind::Admin, first.id, Epoch(3)).unwrap();
    w.log_in(third, 1, 1);
    assert_eq!(kinds(&mut w), [EventKind::Loss, EventKind::Resume]);
}

#[test]
fn a_host_that_leaves_a_draining_target_is_not_lost() {
    let mut w = World::new();
    let first = w.session(1);
    assert_eq!(w.open(first, 1, exclusive(0)).unwrap().status, Status::Ok);
    w.core.drain(w.now);
    w.bury(first);
    assert_eq!(kinds(&mut w), [EventKind::Connect, EventKind::Drain]);
}

#[test]
fn a_take_over_event_names_the_volume_and_the_host_that_lost_it() {
    let mut w = World::new();
    let first = w.session(1);
    assert_eq!(w.open(first, 1, exclusive(0)).unwrap().status, Status::Ok);
    let second = w.session(2);
    w.open(second, 2, taking_over(0));
    w.write_all();
    let all = told(&mut w);
    let fence = (EventKind::Fence, "host1".to_owned(), volume_name(0).to_string());
    assert_eq!(all.last(), Some(&fence), "{all:?}");
    w.bury(first);
    assert!(told(&mut w).is_empty(), "it was told already");
}

#[test]
fn a_caller_that_takes_none_costs_no_memory() {
    let mut w = World::new();
    for host in 0..300_u16 {
        let session = w.session(host.to_le_bytes()[0]);
        w.log_out(session);
        w.bury(session);
    }
    assert_eq!(told(&mut w).len(), 256);
}
