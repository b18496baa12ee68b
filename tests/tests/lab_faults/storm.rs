//! Hosts that connect and leave by the thousand, with a card whose verbs take milliseconds.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rblk_fabric::Address;
use rblk_tests::hostile::end::keep_device;
use rblk_tests::hostile::visitor::Visitor;
use rblk_tests::hostile::wire::{Hello, feature};
use rblk_tests::lab::{Cards, DEADLINE, Lab, Mounted, StallMeter, Target, Witness, run, start};

use super::providers::PROFILES;
use super::{MIB, flags, serve_file, steady_fio, wait_for_io};

const TARGET: &str = "rblk-targetd";
/// A card like mlx5, with verbs that take 2 ms.
const SLOW: &str =
    "round late=1000 shuffle slow-accept=2 slow-modify=2 slow-create=2 slow-destroy=2";
/// Hosts that connect at once: fewer than one address may have strangers, because a place becomes
/// free only when the old QP is destroyed.
const AT_ONCE: usize = 12;

/// Connects and leaves, `count` times in all. Returns the slowest host's time for both, and the
/// number of refusals for want of a place.
fn storm(address: &Address, count: usize) -> (Duration, usize) {
    let refused = AtomicUsize::new(0);
    let left = AtomicUsize::new(count);
    let take =
        || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    let host = || {
        let (visitor, mut slowest) = (Visitor::new(address), Duration::ZERO);
        while take().is_ok() {
            let begun = Instant::now();
            let often = visitor.visit(&Hello::admin(feature::AUTH));
            refused.fetch_add(often, Ordering::Relaxed);
            slowest = slowest.max(begun.elapsed());
        }
        slowest
    };
    let hosts = || {
        // Real strangers would have their own CPUs. Here they get the CPUs that the ends leave: a
        // thread inherits the priority of its parent.
        let thread = nix::unistd::gettid().to_string();
        let _ = start(&["renice", "-n", "19", "-p", &thread]).finish(DEADLINE).ok();
        std::thread::scope(|scope| {
            let hosts: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(host)).collect();
            hosts.into_iter().map(|host| host.join().expect("a host")).max().unwrap_or_default()
        })
    };
    let slowest = std::thread::scope(|scope| scope.spawn(hosts).join().expect("the hosts"));
    (slowest, refused.into_inner())
}

/// A storm on devices with that plan, beside a working host.
fn beside_a_host(lab: &Lab, plan: &str, count: usize) {
    let cards = Cards::new(lab, plan);
    // Enough room for the whole storm.
    let serves = serve_file(lab, 256 * MIB).environment(cards.environment());
    let target = Target::start(lab, &serves);
    let mounted = Mounted::new(lab, &flags(lab.rdma()));
    // An answer each 12 ms shows a pause as well as one each 5 ms, and leaves CPUs to the storm.
    let fio = steady_fio(&mounted).with("rate_iops", "40,40").start();
    let (meter, witness) = (StallMeter::start(mounted.device()), Witness::start());
    wait_for_io(&mounted, &meter);
    let before = cards.asked(TARGET, "by").len();
    let _ = meter.longest();
    std::thread::sleep(Duration::from_secs(1));
    let (alone, moment, begun) = (meter.longest(), witness.now(), Instant::now());
    let (slowest, refused) = storm(&lab.rdma().parse().expect("an address"), count);
    println!(
        "{plan}: {count} connects and disconnects in {:.2?}, the slowest {slowest:.2?}, no place {refused} \
         times; another host's I/O was without an answer for {:.2?} at most, alone {alone:.2?}; the machine stood still {:.2?}",
        begun.elapsed(),
        meter.longest(),
        witness.lost_since(&moment),
    );
    fio.stop(DEADLINE).ok();
    assert_eq!(mounted.status().total.errors, 0, "requests failed");
    mounted.umount();
    drop(target);
    judge(&cards.asked(TARGET, "by")[before..], count);
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn a_storm_of_connects_stops_no_poll_group() {
    keep_device();
    run("a_storm_of_connects_stops_no_poll_group", |lab| {
        beside_a_host(lab, SLOW, lab.times(120, 300));
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn storms_on_devices_like_cards() {
    keep_device();
    run("storms_on_devices_like_cards", |lab| {
        for (_, plan) in PROFILES {
            beside_a_host(lab, plan, lab.times(24, 60));
        }
    });
}

/// Checks that every connection was accepted and ended, and that these verbs blocked neither a
/// thread that serves data nor the one that answers all hosts.
fn judge(calls: &[String], count: usize) {
    let mut by = BTreeMap::<&str, usize>::new();
    calls.iter().for_each(|call| *by.entry(call).or_default() += 1);
    println!("{by:#?}");
    let of = |call: &str| calls.iter().filter(|line| line.ends_with(call)).count();
    for call in ["rdma_accept", "ibv_create_qp", "ibv_destroy_qp"] {
        assert!(of(call) >= count, "{call} was called {} times", of(call));
    }
    let serves = |call: &&&str| call.starts_with("poll-group") || call.starts_with(TARGET);
    let kept: Vec<_> = by.keys().filter(serves).collect();
    assert!(kept.is_empty(), "threads that hosts wait for made {kept:?}");
}
