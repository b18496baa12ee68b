//! The files for systemd and udev: the rights that they leave to the programs. What each key is for
//! is in the units and in docs/rights.md.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "rblk-target.service";
const MOUNT: &str = "rblk-mount@.service";

/// What both programs do without.
const BOTH: [(&str, &str); 8] = [
    ("NoNewPrivileges", "yes"),
    ("AmbientCapabilities", ""),
    ("UMask", "0077"),
    ("DevicePolicy", "closed"),
    ("LockPersonality", "yes"),
    ("MemoryDenyWriteExecute", "yes"),
    ("RestrictRealtime", "yes"),
    ("RestrictSUIDSGID", "yes"),
];

/// What the target does without, besides.
const OF_TARGET: [(&str, &str); 21] = [
    ("User", "rblk"),
    ("Group", "rblk"),
    ("CapabilityBoundingSet", ""),
    ("StateDirectory", "rblk"),
    ("StateDirectoryMode", "0700"),
    // A service that owned /run/rblk could lead root's processes astray with links there.
    ("RuntimeDirectory", "rblk/target"),
    ("ProtectSystem", "strict"),
    ("ProtectHome", "yes"),
    ("ProtectProc", "invisible"),
    ("PrivateTmp", "yes"),
    ("PrivateIPC", "yes"),
    ("RemoveIPC", "yes"),
    ("RestrictNamespaces", "yes"),
    ("ProtectClock", "yes"),
    ("ProtectControlGroups", "yes"),
    ("ProtectHostname", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("SystemCallArchitectures", "native"),
    ("LimitMEMLOCK", "infinity"),
];

fn file(name: &str) -> PathBuf {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    packaging.join(if name.contains(".rules") { "udev" } else { "system" }).join(name)
}

/// The values of a key of a unit, in order.
fn values(text: &str, key: &str) -> Vec<String> {
    let of_key = |line: &str| line.strip_prefix(key)?.strip_prefix('=').map(str::to_owned);
    text.lines().filter_map(of_key).collect()
}

fn unit(name: &str) -> String {
    fs::read_to_string(file(name)).unwrap()
}

fn assert_has(name: &str, keys: &[(&str, &str)]) {
    let text = unit(name);
    for (key, value) in keys {
        assert_eq!(values(&text, key), [*value], "{name}: {key}");
    }
}

#[test]
fn each_unit_is_sandboxed() {
    assert_has(TARGET, &BOTH);
    assert_has(TARGET, &OF_TARGET);
    assert_has(MOUNT, &BOTH);
    // The driver wants CAP_SYS_ADMIN, and a server of a disk a mount namespace of its own. A mount
    // namespace with more mounts in it could hold a file system of the disk that it serves.
    assert_has(
        MOUNT,
        &[
            ("CapabilityBoundingSet", "CAP_SYS_ADMIN CAP_SYS_RESOURCE CAP_IPC_LOCK"),
            ("RestrictNamespaces", "mnt"),
            ("PrivateMounts", "yes"),
            ("SystemCallArchitectures", "native"),
        ],
    );
    for key in ["ProtectHome", "ProtectSystem", "PrivateTmp", "ReadWritePaths", "PrivateDevices"] {
        assert_eq!(values(&unit(MOUNT), key), [""; 0], "{key}");
    }
    for name in [TARGET, MOUNT] {
        let filters = values(&unit(name), "SystemCallFilter");
        assert!(
            filters[0].starts_with("@system-service"),
            "a list of what is allowed: {filters:?}"
        );
        assert!(filters[0].contains("io_uring_enter"), "{filters:?}");
        assert!(filters[1].starts_with('~'), "{filters:?}");
        // What a process without the rights to load it needs is loaded before.
        let wants = values(&unit(name), "Wants").concat();
        assert!(wants.contains("modprobe@rdma_ucm.service"), "{wants}");
        assert!(wants.contains("modprobe@tls.service"), "{wants}");
    }
}

#[test]
fn every_session_of_the_default_has_its_sockets() {
    let files: u64 = values(&unit(TARGET), "LimitNOFILE")[0].parse().unwrap();
    let config = rblk_config::TargetConfig::default();
    let connections = u64::from(rblk_protocol::limits::QUEUES_MAX) + 1;
    assert!(files > u64::from(config.sessions_max) * connections + 1024, "{files}");
}

#[test]
fn the_users_and_directories_of_the_units_are_made() {
    let users = unit("rblk.sysusers");
    assert!(users.lines().any(|line| line.starts_with("u rblk - ")), "{users}");
    let directories = unit("rblk.tmpfiles");
    for line in [
        "d /run/rblk        0755 root root -",
        "d /run/rblk/mounts 0700 root root -",
        "d /run/rblk/log    0700 root root -",
        "d /etc/rblk/target.d 2755 root rblk -",
    ] {
        assert!(directories.lines().any(|own| own == line), "{line}");
    }
}

#[test]
fn a_remote_disk_takes_no_link_from_a_local_one() {
    let rules = unit("60-rblk.rules");
    assert!(rules.lines().any(|line| line == r#"OPTIONS+="link_priority=-100""#), "{rules}");
}

/// systemd's own opinion of the units: 0 is none exposed, 10 is all.
#[test]
fn systemd_calls_the_exposure_small() {
    for (name, most) in [(TARGET, 3.0), (MOUNT, 4.5)] {
        let mut command = Command::new("systemd-analyze");
        command.args(["security", "--offline=true", "--no-pager"]).arg(file(name));
        let output = command.output().unwrap_or_else(|error| {
            panic!("systemd-analyze (250 or later) cannot run: {error}; `apt install systemd`")
        });
        let text = String::from_utf8_lossy(&output.stdout);
        let exposure = text.lines().find_map(|line| {
            let (_, level) = line.split_once("Overall exposure level for ")?;
            level.split_whitespace().nth(1)?.parse::<f64>().ok()
        });
        let exposure = exposure.unwrap_or_else(|| {
            panic!("no exposure level: {text}{}", String::from_utf8_lossy(&output.stderr))
        });
        println!("{name}: {exposure}");
        assert!(exposure <= most, "{name}: {exposure}, at most {most} is wanted\n{text}");
    }
}

/// A start that lasts as long as the target is away would keep a boot waiting: logins come after
/// remote-fs.target, and that after this unit. systemd gives up a disk after 90 s, too.
#[test]
fn a_start_of_a_mount_ends_and_is_tried_again() {
    let text = unit(MOUNT);
    let command = values(&text, "ExecStart").concat();
    let words: Vec<&str> = command.split_whitespace().collect();
    let wait = words.iter().find_map(|word| word.strip_prefix("--wait=")).expect("a bounded wait");
    assert!(!words.contains(&"--wait"), "{command}");
    let seconds = |duration: rblk_config::Duration| duration.get().as_secs();
    let wait = seconds(wait.parse().unwrap());
    assert!(wait < 90, "systemd does not wait longer for the disk: {wait}");
    let start: u64 = values(&text, "TimeoutStartSec")[0].parse().unwrap();
    let config = rblk_config::MountConfig::default();
    let one_try = seconds(config.connect_timeout);
    assert!(start >= wait + 2 * one_try + 30, "{start} for {wait} and 2 tries and the partitions");
    assert_eq!(values(&text, "Restart"), ["on-failure"]);
    assert_eq!(values(&text, "StartLimitIntervalSec"), ["0"]);
    // 6 is a target that cannot be reached.
    assert!(!values(&text, "RestartPreventExitStatus").concat().contains('6'));
}

/// `systemctl enable --now` without the file fails and says so. A condition would be a quiet
/// nothing.
#[test]
fn a_unit_without_its_configuration_fails() {
    for (name, path) in [(TARGET, "/etc/rblk/target.toml"), (MOUNT, "/etc/rblk/mounts.d/%i.toml")] {
        assert_has(name, &[("AssertPathExists", path)]);
        assert_eq!(values(&unit(name), "ConditionPathExists"), [""; 0]);
    }
}

/// A file system on LUKS, LVM, RAID or a loop device is synced through that device.
#[test]
fn a_mount_may_sync_what_stands_on_its_disk() {
    let text = unit(MOUNT);
    let allowed = values(&text, "DeviceAllow");
    for class in ["block-device-mapper", "block-md", "block-loop"] {
        assert!(allowed.contains(&format!("{class} r")), "{class}: {allowed:?}");
    }
    // systemd ignores the class of a driver that is not loaded when the unit starts.
    for key in ["Wants", "After"] {
        assert!(values(&text, key).concat().contains("modprobe@dm_mod.service"), "{key}");
    }
}

/// A target and a mount on one host: systemd stops what starts after the target before the target.
/// The file systems of the disk go first. `Restart=` passes on a restart to what requires the unit,
/// so nothing may require it: to unmount a file system waits for the process that is dead.
#[test]
fn a_mount_stops_after_its_file_systems_and_before_its_target() {
    let text = unit(MOUNT);
    assert!(values(&text, "After").iter().any(|after| after == TARGET), "after the target");
    let stop = values(&text, "ExecStop").concat();
    let (prefix, command) = stop.split_at(2);
    assert!(prefix.contains('-') && prefix.contains('+'), "may fail, with all rights: {stop}");
    // systemd 252 makes a mount namespace for it in spite of the `+`.
    assert!(command.contains("exec nsenter --target 1 --mount --root "), "{stop}");
    assert!(command.contains("test -z \"$MAINPID\" || "), "not after a crash: {stop}");
    assert!(command.contains("rblk-initiator umount --file-systems %i"), "{stop}");
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/install.md");
    let guide = fs::read_to_string(guide).unwrap();
    let line = guide.lines().find(|line| line.starts_with("LABEL=data")).expect("the fstab line");
    assert!(line.contains("x-systemd.after=rblk-mount@data.service"), "{line}");
    assert!(!line.contains("x-systemd.requires"), "{line}");
}
