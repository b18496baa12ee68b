use super::*;

#[test]
fn what_is_not_there_is_removed() {
    let nqn = "nqn.2026-11.rblk:bench-test-that-is-not-there";
    remove_subsystem(nqn).unwrap();
    remove_port(PORTS_MAX, nqn).unwrap();
    disconnect(nqn).unwrap();
    assert_eq!(disk(nqn), None);
}

#[test]
fn a_failure_says_what_was_done() {
    let error = set(Path::new("/proc/no-such-file"), "1").unwrap_err();
    assert!(format!("{error:#}").contains("setting /proc/no-such-file to 1"), "{error:#}");
}
