//! Several ways of one host to the real target: see [`several_ways`].

use rblk_tests::storm::seeds;
use rblk_tests::{long, several_ways};

/// 1000 times with `RBLK_LONG=1`.
#[test]
fn a_write_that_the_store_holds_is_never_seen_after_a_newer_one() {
    for seed in seeds(long::times(100, 1000)) {
        println!("seed {seed}");
        several_ways::held_write(seed);
    }
}

#[test]
fn a_join_waits_for_the_last_life_of_its_way_and_a_return_for_all() {
    for seed in seeds(long::times(30, 300)) {
        println!("seed {seed}");
        several_ways::joins_and_returns(seed);
    }
}

#[test]
fn a_login_that_was_given_up_comes_too_late() {
    for seed in seeds(long::times(10, 100)) {
        println!("seed {seed}");
        several_ways::late_login(seed);
    }
}

#[test]
fn a_dead_way_delays_no_request_of_another() {
    let mut waited = 0;
    for seed in seeds(long::times(60, 600)) {
        println!("seed {seed}");
        waited += u64::from(several_ways::others_go_on(seed));
    }
    // Otherwise no request was on the way that died.
    assert!(std::env::var_os("RBLK_SEED").is_some() || waited > 10, "{waited}");
}

#[test]
fn two_equal_ways_carry_equal_halves_of_the_data() {
    for seed in seeds(long::times(10, 200)) {
        println!("seed {seed}");
        several_ways::equal_halves(seed);
    }
}

#[test]
fn reads_see_the_last_write_whichever_ways_die() {
    let mut resent = 0;
    for seed in seeds(long::times(60, 2000)) {
        println!("seed {seed}");
        resent += several_ways::drive(seed);
    }
    // Otherwise the test did not reach its purpose.
    assert!(
        std::env::var_os("RBLK_SEED").is_some() || resent > 100,
        "{resent} requests sent again"
    );
}
