//! A mount by an address that is not its best reports that, and leaves the address when it can.

use std::time::{Duration, Instant};

use super::*;

/// Whether the mount uses the address of the relay, which is its best.
fn is_on_best(served: &Served, bed: &Bed) -> bool {
    served.status()["address"] == bed.relay.address.to_string().as_str()
}

#[test]
fn a_mount_by_its_second_address_warns_in_its_log() {
    let bed = Bed::new();
    bed.relay.refuse();
    let served = bed.serve(&[]);
    let warning = served.line_with("WARN");
    let preferred = format!("preferred={:?}", bed.relay.address.to_string());
    for piece in ["the path is not the preferred one", &preferred, "nothing listens"] {
        assert!(warning.contains(piece), "{piece}: {warning}");
    }
}

#[test]
#[ignore = "needs root: the mounts of a host are root's"]
fn as_root_every_command_says_that_a_path_is_not_the_best() {
    let bed = Bed::new();
    bed.relay.refuse();
    let (relay, own) = (bed.relay.address.to_string(), bed.target.address.to_string());
    let served = bed.serve(&["--failback", "300ms"]);
    let (name, line) =
        (served.name(), format!("its path is {own}, and not the preferred {relay} ("));
    let listed = initiator(&["list"]);
    assert!(listed.stderr.contains(&format!("{name}: {line}")), "{listed:?}");
    let shown = initiator(&["status", name]);
    assert!(shown.stdout.contains("fallback") && shown.stdout.contains(&relay), "{shown:?}");
    let fallback = served.status()["fallback"].clone();
    assert_eq!(fallback["preferred"], relay.as_str());
    assert!(fallback["reason"].as_str().is_some_and(|why| why.contains("nothing listens")));
    let metric = |value| format!("rblk_mount_fallback{{mount=\"{name}\"}} {value}\n");
    assert!(initiator(&["metrics"]).stdout.contains(&metric(1)));
    // With the best address back, the report ends.
    bed.relay.listen();
    wait_for("the way back", || is_on_best(&served, &bed).then_some(()));
    assert_eq!(served.status()["fallback"], serde_json::Value::Null);
    assert!(initiator(&["metrics"]).stdout.contains(&metric(0)));
    assert!(!initiator(&["list"]).stderr.contains(name));
    // A path that dies later is reported as well.
    bed.relay.refuse();
    bed.relay.cut();
    wait_for("the second address", || {
        let status = served.status();
        (status["address"] == own.as_str() && status["state"] == "connected").then_some(())
    });
    assert_eq!(served.status()["fallback"]["preferred"], relay.as_str());
    wait_for("the second warning", || {
        let log = served.log();
        (log.matches("the path is not the preferred one").count() == 2).then_some(())
    });
}

#[test]
#[ignore = "needs root: the mounts of a host are root's"]
fn as_root_the_mount_command_reports_it_too() {
    let bed = Bed::new();
    bed.relay.refuse();
    let (relay, own) = (bed.relay.address.to_string(), bed.target.address.to_string());
    let name = format!("ways-{}", std::process::id());
    let socket = bed.dir.path().join("guest.sock").display().to_string();
    let mounted =
        initiator(&["vhost", &relay, "v", "--path", &own, "--name", &name, "--socket", &socket]);
    let unmounted = initiator(&["umount", "--force", &name]);
    assert_eq!((mounted.code, mounted.stdout.trim()), (Some(0), &*socket), "{mounted:?}");
    assert!(mounted.stderr.contains("WARN"), "{mounted:?}");
    assert!(mounted.stderr.contains(&format!("not the preferred {relay}")), "{mounted:?}");
    assert_eq!(unmounted.code, Some(0), "{unmounted:?}");
}

/// A relay stands for RDMA's listener, which ends with the program, while the sockets of TCP are
/// handed on.
#[test]
#[ignore = "needs root: the mounts of a host are root's"]
fn as_root_after_an_upgrade_of_the_target_a_mount_is_back_on_its_best_path() {
    let bed = Bed::new();
    let served = bed.serve(&[]);
    assert!(is_on_best(&served, &bed));
    bed.relay.refuse();
    std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| bed.upgrade());
        wait_for("the mount to leave", || (served.status()["state"] != "connected").then_some(()));
        bed.relay.cut();
        std::thread::sleep(Duration::from_millis(700));
        bed.relay.listen();
        let listening = Instant::now();
        wait_for("the mount", || (served.status()["state"] == "connected").then_some(()));
        assert!(is_on_best(&served, &bed), "{:#}", served.status());
        assert!(listening.elapsed() < Duration::from_secs(2), "{:?}", listening.elapsed());
        upgrade.join().unwrap();
    });
    assert_eq!(served.status()["fallback"], serde_json::Value::Null);
    // The mount looks for a slow listener long before `failback`, which is 30 s.
    bed.relay.refuse();
    std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| bed.upgrade());
        wait_for("the mount to leave", || (served.status()["state"] != "connected").then_some(()));
        bed.relay.cut();
        wait_for("the second address", || (served.status()["state"] == "connected").then_some(()));
        assert!(!is_on_best(&served, &bed));
        upgrade.join().unwrap();
    });
    bed.relay.listen();
    let listening = Instant::now();
    wait_for("the way back", || is_on_best(&served, &bed).then_some(()));
    assert!(listening.elapsed() < Duration::from_secs(6), "{:?}", listening.elapsed());
}
