use super::*;

#[test]
fn a_daemon_that_is_not_there_has_no_status() {
    let dir = tempfile::tempdir().unwrap();
    assert!(target_status(&dir.path().join("none.sock")).is_none());
    assert!(mount_status("no-such-mount").is_none());
    let name = "no-such-mount-of-this-test";
    unmount(Path::new("/bin/false"), name, "no-such-tag-of-this-test").unwrap();
}
