use super::*;

#[test]
fn only_connected_devices_are_touched() {
    assert!(!is_connected(Path::new("/dev/no-such-device")));
    assert!(!is_connected(Path::new("/")));
    assert!(disconnect(Path::new("/dev/no-such-device")).is_ok());
    assert_eq!(attribute(Path::new("/dev/no-such-device"), "size"), None);
}
