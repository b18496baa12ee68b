//! Epochs, leases, holders, and connections without a proof.

use super::*;

const LEASE: Duration = Duration::from_secs(30);

fn id(n: u8) -> SessionId {
    SessionId([n; 16])
}

fn of_host(n: u8) -> LoggingIn {
    LoggingIn {
        host: HostId([n; 16]),
        account: Payer::Host(HostId([n; 16])),
        host_name: Name::new("h").unwrap(),
        detect: Duration::from_secs(5),
        peer: "p".into(),
        has_ways: true,
    }
}

fn has_older(table: &SessionTable, index: SessionIndex, than: Epoch) -> bool {
    table.get(index).unwrap().has_connections_of(&EndedEpochs::Below(than))
}

fn logged_in(table: &mut SessionTable, n: u8, from: u8, now: Instant) -> SessionIndex {
    let index = table.begin(id(n), of_host(from), now).unwrap();
    table.connection_added(index, (Epoch(1), None, true), 0);
    table.get_mut(index).unwrap().let_in(Epoch(1)).unwrap();
    index
}

#[test]
fn a_new_epoch_waits_for_the_old_connections() {
    let now = Instant::now();
    let mut table = SessionTable::new(4, LEASE);
    let index = logged_in(&mut table, 1, 1, now);
    assert_eq!(table.join(id(1), Epoch(1), 0), Ok(index));
    table.connection_added(index, (Epoch(1), Some(0), true), 0);
    assert_eq!(table.join(id(1), Epoch(1), 0), Err(RejectReason::DuplicateQueue));
    assert_eq!(table.resume(id(1), Epoch(1), of_host(1)), Err(RejectReason::StaleEpoch));
    assert_eq!(table.resume(id(1), Epoch(2), of_host(2)), Err(RejectReason::NoSuchSession));
    assert_eq!(table.get(index).unwrap().newest, Epoch(1), "another host changes nothing");
    assert_eq!(table.resume(id(1), Epoch(2), of_host(1)), Ok(index));
    table.connection_added(index, (Epoch(2), None, true), 0);
    assert!(has_older(&table, index, Epoch(2)));
    assert_eq!(table.join(id(1), Epoch(1), 1), Err(RejectReason::StaleEpoch));
    assert_eq!(
        table.join(id(1), Epoch(2), 1),
        Err(RejectReason::NoSuchSession),
        "not logged in yet"
    );
    assert_eq!(table.connection_gone(index, (Epoch(1), None, true), 0, now), After::Lives);
    assert_eq!(table.connection_gone(index, (Epoch(1), Some(0), true), 0, now), After::Quiesced);
    assert!(!has_older(&table, index, Epoch(2)));
}

#[test]
fn a_lost_session_keeps_its_volume_for_the_lease() {
    let now = Instant::now();
    let mut table = SessionTable::new(4, LEASE);
    let (a, b) = (logged_in(&mut table, 1, 1, now), logged_in(&mut table, 2, 2, now));
    let volume = VolumeIndex(0);
    assert_eq!(table.open(a, volume, AccessMode::Exclusive), Ok(vec![]));
    assert_eq!(table.open(a, volume, AccessMode::Exclusive), Ok(vec![]), "again by the holder");
    assert!(table.open(b, volume, AccessMode::Exclusive).is_err());
    assert!(table.open(b, volume, AccessMode::Shared).is_err());
    assert_eq!(table.open(b, volume, AccessMode::ReadOnly), Ok(vec![]));
    assert_eq!(table.connection_gone(a, (Epoch(1), None, true), 0, now), After::Lives);
    assert!(table.open(b, volume, AccessMode::Exclusive).is_err(), "lost, but the lease runs");
    assert!(table.expire(now + LEASE).is_empty());
    assert_eq!(table.expire(now + LEASE + Duration::from_secs(1)), vec![a]);
    assert_eq!(table.open(b, volume, AccessMode::Exclusive), Ok(vec![]));
    assert_eq!(table.resume(id(1), Epoch(2), of_host(1)), Err(RejectReason::NoSuchSession));
}

#[test]
fn the_same_host_gets_its_volume_back_at_once() {
    let now = Instant::now();
    let mut table = SessionTable::new(4, LEASE);
    let a = logged_in(&mut table, 1, 7, now);
    table.open(a, VolumeIndex(0), AccessMode::Exclusive).unwrap();
    let b = logged_in(&mut table, 2, 7, now);
    assert!(
        table.open(b, VolumeIndex(0), AccessMode::Exclusive).is_err(),
        "the old process is connected"
    );
    table.connection_gone(a, (Epoch(1), None, true), 0, now);
    assert_eq!(table.open(b, VolumeIndex(0), AccessMode::Exclusive), Ok(vec![a]));
}

#[test]
fn sessions_end_by_logout() {
    let now = Instant::now();
    let mut table = SessionTable::new(2, LEASE);
    let a = logged_in(&mut table, 1, 1, now);
    table.open(a, VolumeIndex(3), AccessMode::Shared).unwrap();
    table.logout(a);
    assert!(!table.is_open(VolumeIndex(3)));
    assert_eq!(table.connection_gone(a, (Epoch(1), None, true), 0, now), After::Ended);
    let b = table.begin(id(3), of_host(1), now).unwrap();
    assert_eq!((b.index, b.life), (a.index, a.life + 1), "the place, but not the session");
    assert!(table.get(a).is_none() && table.get(b).is_some());
    assert!(!table.is_full());
    table.begin(id(4), of_host(1), now).unwrap();
    assert!(table.is_full());
    assert_eq!(table.begin(id(5), of_host(1), now), Err(RejectReason::LimitReached));
}

#[test]
fn an_unproven_connection_keeps_nothing() {
    let now = Instant::now();
    let mut table = SessionTable::new(2, LEASE);
    let a = logged_in(&mut table, 1, 1, now);
    let (admin, unproven, proven) =
        ((Epoch(1), None, true), (Epoch(1), Some(0), false), (Epoch(1), Some(0), true));
    table.open(a, VolumeIndex(0), AccessMode::Exclusive).unwrap();
    table.connection_added(a, unproven, 5);
    table.connection_added(a, unproven, 5);
    assert_eq!(table.join(id(1), Epoch(1), 0), Ok(a), "nobody has the number");
    assert!(table.connection_proved(a, (Epoch(1), 0, 5)));
    assert!(!table.connection_proved(a, (Epoch(1), 0, 0)), "the first has it");
    assert_eq!(table.join(id(1), Epoch(1), 0), Err(RejectReason::DuplicateQueue));
    let session = |table: &SessionTable| {
        let session = table.get(a).unwrap();
        (session.connections(), session.all_connections(), session.memory_bytes())
    };
    assert_eq!(session(&table), (2, 3, 5));
    // The unproven connection does not stop the lease, but a new epoch waits for it.
    table.connection_gone(a, admin, 0, now);
    table.connection_gone(a, proven, 5, now);
    assert_eq!(session(&table), (0, 1, 0));
    assert_eq!(table.resume(id(1), Epoch(2), of_host(1)), Ok(a));
    assert!(has_older(&table, a, Epoch(2)));
    assert_eq!(table.expire(now + LEASE + Duration::from_secs(1)), vec![a]);
    assert_eq!(table.connection_gone(a, unproven, 5, now), After::Lives, "it ended before");
}

#[test]
fn a_session_without_a_volume_ends_with_its_last_proven_connection() {
    let now = Instant::now();
    let mut table = SessionTable::new(2, LEASE);
    let admin = (Epoch(1), None, true);
    let a = logged_in(&mut table, 1, 1, now);
    table.connection_added(a, (Epoch(1), Some(0), false), 5);
    assert_eq!(table.connection_gone(a, admin, 0, now), After::Ended, "nobody can come back to it");
    // A session with a volume lives on, and so does one that is resumed in time.
    let b = logged_in(&mut table, 2, 1, now);
    table.open(b, VolumeIndex(0), AccessMode::ReadOnly).unwrap();
    assert_eq!(table.connection_gone(b, admin, 0, now), After::Lives);
    let c = logged_in(&mut table, 3, 1, now);
    table.resume(id(3), Epoch(2), of_host(1)).unwrap();
    table.connection_added(c, (Epoch(2), None, true), 0);
    assert_eq!(table.connection_gone(c, admin, 0, now), After::Quiesced);
}

/// Metrics name a session by its place: a host that returns makes no new series.
#[test]
fn a_session_has_the_lowest_free_place_of_its_host() {
    let now = Instant::now();
    let mut table = SessionTable::new(8, LEASE);
    let named = |n: u8, name: &str| LoggingIn {
        host_name: Name::new(name).unwrap(),
        peer: format!("10.9.0.1:{n}"),
        ..of_host(n)
    };
    let begin = |table: &mut SessionTable, n: u8, name: &str| {
        table.begin(id(n), named(n, name), now).unwrap()
    };
    let place = |table: &SessionTable, index| table.get(index).unwrap().place;
    let [a, b, c] = [1, 2, 3].map(|n| begin(&mut table, n, "db1"));
    let other = begin(&mut table, 4, "db2");
    assert_eq!([a, b, c, other].map(|index| place(&table, index)), [0, 1, 2, 0]);
    table.end(b);
    let again = begin(&mut table, 5, "db1");
    assert_eq!(place(&table, again), 1, "the place that was left");
    // A renamed host does not take the place of another session with that name.
    table.resume(id(4), Epoch(2), named(4, "db1")).unwrap();
    assert_eq!(place(&table, other), 3);
    table.resume(id(1), Epoch(2), named(1, "db1")).unwrap();
    assert_eq!(place(&table, a), 0, "the same name: the same place");
}
