//! A mount that uses all its addresses at once shows each path.

use rblk_operate::mount::mount_status::MountStatus;

use super::*;

/// The mount, when so many of its paths are in use.
fn with_paths(served: &Served, in_use: &str) -> MountStatus {
    wait_for(in_use, || {
        let status: MountStatus = serde_json::from_value(served.status()).expect("a status");
        (status.paths_in_use().as_deref() == Some(in_use)).then_some(status)
    })
}

#[test]
#[ignore = "needs root: the mounts of a host are root's"]
fn as_root_every_command_shows_each_path() {
    let bed = Bed::new();
    let served = bed.serve(&["--paths", "all"]);
    let (name, relay) = (served.name(), bed.relay.address.to_string());
    let status = with_paths(&served, "2 of 2");
    let addresses: Vec<&str> = status.paths.iter().map(|path| &*path.address).collect();
    assert_eq!(addresses, [&*relay, &*bed.target.address.to_string()]);
    assert_eq!((status.fallback, status.one_path), (None, false));
    let metric = |what: &str, value| {
        format!("rblk_mount_path_{what}{{mount=\"{name}\",address=\"{relay}\"}} {value}\n")
    };
    let listed = initiator(&["list"]);
    assert!(listed.stdout.contains("PATHS") && listed.stdout.contains("2 of 2"), "{listed:?}");
    assert!(!listed.stderr.contains(name), "{listed:?}");
    let metrics = initiator(&["metrics"]).stdout;
    assert!(metrics.contains(&metric("up", 1)), "{metrics}");
    assert!(metrics.contains(&metric("losses_total", 0)), "{metrics}");

    bed.relay.refuse();
    bed.relay.cut();
    let status = with_paths(&served, "1 of 2");
    assert_eq!((&*status.state, status.paths[0].lost), ("connected", 1));
    let lost = served.line_with("lost a path");
    assert!(lost.contains(&relay) && lost.contains("others=1"), "{lost}");
    let listed = initiator(&["list"]);
    let line = format!("{name}: its path to {relay} is not in use (for ");
    assert!(listed.stdout.contains("1 of 2") && listed.stderr.contains(&line), "{listed:?}");
    let shown = initiator(&["status", name]).stdout;
    assert!(shown.contains("PATH ") && shown.contains("1 of 2 in use"), "{shown}");
    let metrics = initiator(&["metrics"]).stdout;
    assert!(metrics.contains(&metric("up", 0)), "{metrics}");
    assert!(metrics.contains(&metric("losses_total", 1)), "{metrics}");
    println!("{}{shown}", listed.stdout);

    bed.relay.listen();
    let status = with_paths(&served, "2 of 2");
    assert_eq!((status.paths[0].lost, &status.paths[0].reason), (1, &None));
    let joined = served.log().matches("one more path carries requests").count();
    assert!(joined >= 2, "{}", served.log());
    assert!(!served.log().contains("lost the target"), "{}", served.log());
}
