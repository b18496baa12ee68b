use super::*;

#[test]
fn a_time_is_that_of_one_call() {
    let mut calls = 0_u32;
    let time = best(ROUND_BYTES / 4, || calls += 1);
    assert_eq!(calls, 4 * ROUNDS);
    assert!(time < f64::MAX);
}
