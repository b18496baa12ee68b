//! The services of docs/install.md: both ends on one host that systemd boots, with every command
//! and file word by word. Then the tests of a mount below a file system whose process dies, is
//! restarted, stands still, is stopped and goes down with the host, and of the names of its disk
//! (`services.sh`).
//!
//! `RBLK_SYSTEMD_GUEST` names a command that boots a host with systemd and ublk, runs the script in
//! its last argument there as root, prints the output, and ends with the script's status. The root
//! of that host shows this checkout, and forgets changes.

use std::path::Path;
use std::process::Command;

use rblk_tests::guide::{FUNCTIONS, shell_word, typed};
use rblk_tests::program::program;

const AFTER: &str = include_str!("services.sh");

/// The whole script: the steps of the guide, then the checks.
fn script(programs: &Path) -> String {
    let typed = typed(&[
        ("Install the programs", 1),
        ("Keys", 1),
        // The configuration, then the commands. Later blocks are for other cases.
        ("On the target", 2),
        ("On the initiator", 2),
        ("Mount at boot", 3),
    ]);
    format!(
        "cd {}\nPROGRAMS={}\n{FUNCTIONS}\n{AFTER}\n{typed}see\n",
        shell_word(&format!("{}/..", env!("CARGO_MANIFEST_DIR"))),
        shell_word(&programs.display().to_string())
    )
}

#[test]
fn the_guide_has_the_blocks_of_the_script() {
    let script = script(Path::new("/programs"));
    for part in [
        "install -m 644 packaging/system/*.{service,target} /etc/systemd/system/",
        "install -D -m 755 packaging/system/rblk-generator",
        "file /etc/rblk/target.toml",
        "chown rblk",
        "rblk-target host add client1 --key @HOST_KEY@",
        "systemctl enable --now rblk-target",
        "file /etc/rblk/mounts.d/data.toml",
        "systemctl enable --now rblk-mount@data",
        "LABEL=data  /data  ext4",
        "systemctl start data.automount",
    ] {
        assert!(script.contains(part), "{part} is not in:\n{script}");
    }
}

/// The generator of this checkout, with a directory of mounts: the units that it starts, and its
/// messages.
fn generated(mounts: &Path) -> (Vec<String>, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/system/rblk-generator");
    let mut command = Command::new("/bin/sh");
    // systemd gives three directories, and a generator uses one of them.
    command.arg(script).args([dir.path(), Path::new("/nowhere"), Path::new("/nowhere")]);
    let output = command.env("RBLK_MOUNTS_DIR", mounts).output().expect("the generator");
    assert!(output.status.success(), "{output:?}");
    let wants = std::fs::read_dir(dir.path().join("rblk-automount.target.wants"));
    let entries = wants.into_iter().flatten().map(|entry| entry.expect("an entry"));
    let mut units: Vec<String> = entries
        .map(|entry| {
            let link = std::fs::read_link(entry.path()).expect("a link");
            assert_eq!(link, Path::new("../rblk-mount@.service"));
            entry.file_name().into_string().expect("a name")
        })
        .collect();
    units.sort();
    (units, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn the_generator_starts_a_unit_for_each_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let mounts = dir.path().join("mounts.d");
    let nothing = (Vec::new(), String::new());
    assert_eq!(generated(&mounts), nothing, "no directory");
    std::fs::create_dir(&mounts).expect("a directory");
    assert_eq!(generated(&mounts), nothing, "no file");
    for name in ["data.toml", "a-b_c.1.toml", "-x.toml", ".toml", ".x.toml", "a b.toml", "x.conf"] {
        std::fs::write(mounts.join(name), "").expect("a file");
    }
    std::fs::create_dir(mounts.join("dir.toml")).expect("a directory");
    let (units, messages) = generated(&mounts);
    assert_eq!(units, ["rblk-mount@a-b_c.1.service", "rblk-mount@data.service"]);
    for bad in ["-x.toml", "a b.toml"] {
        assert!(messages.contains(bad), "{bad} is not named: {messages}");
    }
}

#[test]
#[ignore = "needs a host with systemd and ublk: RBLK_SYSTEMD_GUEST names a command that boots one"]
fn the_services_of_the_guide_survive_and_end() {
    let guest = std::env::var("RBLK_SYSTEMD_GUEST")
        .expect("RBLK_SYSTEMD_GUEST: a command that boots a host with systemd, and runs a script");
    let programs = program("rblk-target").parent().expect("a directory").to_owned();
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("script");
    std::fs::write(&path, script(&programs)).expect("the script");
    let mut words = guest.split_whitespace();
    let mut command = Command::new(words.next().expect("a command"));
    let output = command.args(words).arg(&path).output().expect("the guest");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    assert!(said.lines().any(|line| line == "all is well"), "{errors}");
}
