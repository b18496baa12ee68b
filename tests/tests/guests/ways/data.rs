//! A network that passes small packets only.

use super::*;

const MIB: u64 = 1 << 20;

#[test]
#[ignore = "needs root: the mounts of a host are root's"]
fn as_root_logins_that_pass_and_data_that_does_not_are_named() {
    let bed = Bed::new();
    let address = bed.relay.address.to_string();
    let args = ["--queues", "1", "--detect", "1s"];
    let served = Served::start(bed.dir.path(), &address, "v", &args);
    let mut guest = Guest::connect(&served, 1);
    assert_eq!(guest.one(0, Ask::Read, 0, &[(AT, 64 << 10)]), OK);
    assert_eq!(served.status()["hint"], serde_json::Value::Null);
    bed.relay.pass_small_only();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| guest.one(0, Ask::Read, MIB / 512, &[(AT, 64 << 10)]));
        let hint = wait_for("a hint", || served.status()["hint"].as_str().map(str::to_owned));
        assert!(hint.starts_with("logins pass, data does not: MTU?"), "{hint}");
        let listed = initiator(&["list"]);
        assert!(listed.stderr.contains(&format!("{}: {hint}", served.name())), "{listed:?}");
        wait_for("its log", || served.log().contains("logins pass, data does not").then_some(()));
        // The doctor finds the fault, too, before any mount.
        let doctor = initiator(&["doctor", &address, "--timeout", "2s", "-o", "json"]);
        let report: serde_json::Value = serde_json::from_str(&doctor.stdout).unwrap();
        let data = report["findings"].as_array().unwrap().iter().find(|f| f["subject"] == "data");
        let data = data.unwrap_or_else(|| panic!("{report:#}"));
        assert_eq!(data["verdict"], "fail", "{report:#}");
        assert!(data["found"].as_str().unwrap().contains("MTU"), "{data}");
        assert!(!read.is_finished());
        scope.spawn(|| initiator(&["umount", "--force", served.name()]));
    });
}

#[test]
fn the_doctor_times_a_large_read() {
    let bed = Bed::new();
    let address = bed.target.address.to_string();
    let doctor = initiator(&["doctor", &address, "-o", "json"]);
    let report: serde_json::Value = serde_json::from_str(&doctor.stdout).unwrap();
    let data = report["findings"].as_array().unwrap().iter().find(|f| f["subject"] == "data");
    let data = data.unwrap_or_else(|| panic!("{report:#}"));
    let found = data["found"].as_str().unwrap();
    assert_eq!(data["verdict"], "ok", "{found}");
    assert!(found.starts_with("256KiB of v read in "), "{found}");
}
