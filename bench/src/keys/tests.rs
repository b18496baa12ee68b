use super::*;

#[test]
fn a_target_reads_what_is_written_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let keys = Keys::generate(dir.path(), "tcp://127.0.0.1:7721").unwrap();
    let flags = Keys::of_target(Some(&keys));
    assert_eq!(flags[0], "--config");
    let config = TargetConfig::load(Path::new(&flags[1])).unwrap();
    assert_eq!(config.auth, Some(Auth::Required));
    let [host] = &config.hosts[..] else { panic!("{:?}", config.hosts) };
    let key = key_file::read(&dir.path().join("host.key"), Side::Initiator).unwrap();
    assert_eq!(host.keys, [key.public()]);
    let mount = Keys::of_mount(Some(&keys), &[]);
    assert_eq!(mount[3..], [keys.target.to_string(), "--encrypt=off".to_owned()]);
    assert_eq!(Keys::of_mount(Some(&keys), &["--encrypt=required".to_owned()]), mount[..4]);
    keys.credentials().unwrap();
    let file = dir.path().join("mount.toml");
    let text = Keys::file_of_mount(Some(&keys), "tcp://127.0.0.1:7721", "bench");
    std::fs::write(&file, text).unwrap();
    let mount = rblk_config::MountConfig::load(&file).unwrap();
    assert_eq!((mount.target_keys, mount.transport.encrypt), (vec![keys.target], Encrypt::Off));
    assert_eq!(Keys::of_target(None), ["--insecure"]);
    assert!(Keys::of_mount(None, &[]).is_empty());
}
