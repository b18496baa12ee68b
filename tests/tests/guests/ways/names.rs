//! The names of the ends in messages: addresses of peers, and the name of a target.

use rblk_tests::program::Client;

use super::*;

#[test]
fn a_peer_of_ipv4_is_shown_as_one_by_every_listener() {
    let dir = tempfile::tempdir().unwrap();
    let port = rblk_tests::program::free_port();
    let listen = format!("tcp://[::]:{}", port.number);
    let args = ["--memory", "v=1MiB", "--insecure", "--listen", &listen];
    let target = Target::start(dir.path(), &args);
    let address = format!("tcp://127.0.0.1:{}", port.number).parse().unwrap();
    let client = Client::connect(&address, "v", 1).unwrap();
    let other = Client::connect(&address, "v", 2).unwrap_err().to_string();
    let (status, log) = (target.status(), target.log());
    let peer = &status.sessions[0].peer;
    assert!(peer.parse::<std::net::SocketAddrV4>().is_ok(), "{peer}");
    let mut shown = Command::new(program("rblk-target"));
    let shown = run(shown.args(["status", "-o", "json", "--control-socket"]).arg(&target.socket));
    for text in [&log, &other, &shown.stdout] {
        assert!(text.contains(peer.as_str()) && !text.contains("ffff"), "{text}");
    }
    client.logout();
}

#[test]
fn a_target_under_a_new_name_warns_with_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let volume = dir.path().join("v.img");
    File::create(&volume).unwrap().set_len(1 << 20).unwrap();
    let volume = format!("v={}", volume.display());
    let as_name = |name| ["--file", volume.as_str(), "--name", name];
    let mut target = Target::start(dir.path(), &as_name("alpha"));
    let address = target.address.to_string();
    let served = Served::start(dir.path(), &address, "v", &["--queues", "1", "--detect", "1s"]);
    target.kill();
    target.start_again(dir.path(), &as_name("beta"));
    let log = target.log();
    let warning = log.lines().find(|line| line.contains("records of a target of another name"));
    let warning = warning.unwrap_or_else(|| panic!("{log}"));
    assert!(warning.contains("start it with `--name alpha`"), "{warning}");
    wait_for("the mount's answer", || {
        served.log().contains("start it with `--name alpha`").then_some(())
    });
    // With the old name the warning ends.
    target.kill();
    target.start_again(dir.path(), &as_name("alpha"));
    wait_for("the mount", || served.log().contains("connected again").then_some(()));
    assert_eq!(target.log().matches("of another name").count(), 1, "{}", target.log());
}

#[test]
fn a_mount_whose_record_is_gone_does_not_blame_another_host() {
    let mut bed = Bed::new();
    let own = bed.target.address.to_string();
    let served = Served::start(bed.dir.path(), &own, "v", &["--queues", "1", "--detect", "1s"]);
    let mut guest = Guest::connect(&served, 1);
    assert_eq!(guest.one(0, Ask::Write, 0, &[(AT, 4096)]), OK);
    bed.target.kill();
    for entry in std::fs::read_dir(bed.dir.path()).unwrap().flatten() {
        // The second extension is that of earlier versions.
        if entry.path().extension().is_some_and(|e| e == "volume" || e == "holders") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    let config = bed.dir.path().join("target.toml").display().to_string();
    bed.target.start_again(bed.dir.path(), &["--config", &config]);
    wait_for("the end of the mount", || served.log().contains("fenced").then_some(()));
    let log = served.log();
    assert!(log.contains("its holders are not known any more"), "{log}");
    assert!(!log.contains("another host"), "{log}");
}
