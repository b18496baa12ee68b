use super::*;

#[test]
fn fio_is_told_the_way() {
    let disk = Access::Disk("/dev/ublkb0".into());
    assert_eq!(disk.words()[0], "--filename=/dev/ublkb0");
    assert!(disk.words().contains(&"--direct=1".to_owned()));
    assert_eq!(disk.disk(), Some(Path::new("/dev/ublkb0")));
    let url = "tcp://127.0.0.1:7730";
    let engine = Access::rblk(Path::new("/x/e.so"), url, "bench", Path::new("/x/m.toml"));
    let words = engine.words();
    assert_eq!(words[0], "--ioengine=external:/x/e.so");
    assert_eq!(words[2], r"--filename=tcp\://127.0.0.1\:7730/bench");
    assert_eq!((engine.disk(), engine.to_string()), (None, words[0].clone()));
    let nbd = Access::nbd_unix(Path::new("/x/s"));
    assert_eq!(nbd.words()[1], "--uri=nbd+unix:///?socket=/x/s");
}
