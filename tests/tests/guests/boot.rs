//! A host whose root file system is on a volume: Debian 13 under QEMU boots by initramfs-tools and
//! by dracut, with the files of `packaging/`. Its target is killed while it writes. Then it moves
//! the mount to another program and powers off, and its file system is clean.
//!
//! The test needs root, QEMU, mmdebstrap and Debian's archive, and takes some minutes.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rblk_tests::program::{Target, program, run};

use crate::emulated_host::{EmulatedHost, make_images};

/// How long the target is away.
const AWAY: Duration = Duration::from_secs(6);

fn boots(dir: &Path, kind: &str) {
    let image = dir.join(format!("{kind}.img"));
    let host_key = std::fs::read_to_string(dir.join("host.pub")).unwrap();
    let key_file = dir.join(format!("{kind}.key"));
    let made =
        run(Command::new(program("rblk-target")).args(["key", "new", "--file"]).arg(&key_file));
    assert_eq!(made.code, Some(0), "{made:?}");
    let volume = format!("root1={}", image.display());
    let host = format!("guest1={}", host_key.trim());
    let key_file = key_file.display().to_string();
    let args = ["--file", &volume, "--host", &host, "--key-file", &key_file, "--auth", "required"];
    let mut target = Target::start(dir, &args);
    let address = target.address.to_string();
    let port = address.rsplit(':').next().unwrap();
    let key = made.stdout.trim();
    let words = format!("ip=dhcp root=rblk:root1@tcp://10.0.2.2:{port} rblk.target_key={key}");
    let mut guest = EmulatedHost::boot(dir, &format!("{kind}.initrd"), &words, &[]);

    let root = guest.wait_for("guest: root");
    assert!(root.contains("/dev/ublkb0 ext4"), "{root}");
    let server = guest.wait_for("guest: server");
    assert!(server.contains("server @rblk-initiatord mount --root-disk"), "{server}");
    guest.wait_for("guest: holds nothing of its disk");
    guest.wait_for("guest: wrote 2");
    target.kill();
    std::thread::sleep(AWAY);
    target.start_again(dir, &args);
    guest.wait_for("guest: verified");
    guest.wait_for("guest: upgraded");
    guest.wait_for("guest: done");
    let unmounted = match kind {
        "dracut" => "rblk: the disk of the root file system was removed",
        _ => "systemd-shutdown[1]: All filesystems unmounted.",
    };
    guest.wait_for(unmounted);
    guest.wait_for("reboot: Power down");
    guest.must_end();
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    let checked = run(Command::new("e2fsck").arg("-fn").arg(&image));
    assert_eq!(checked.code, Some(0), "{checked:?}\n{}", guest.said().join("\n"));
    println!("{kind}: {} lines of the console, and a clean file system", guest.said().len());
}

#[test]
#[ignore = "takes minutes and downloads a Debian: `cargo xtask test --long` runs it, as root"]
fn long_only_a_host_boots_from_a_volume() {
    let dir = tempfile::tempdir().unwrap();
    let programs = program("rblk-initiator");
    make_images(dir.path(), "boot-image.sh", programs.parent().unwrap());
    for kind in ["initramfs-tools", "dracut"] {
        boots(dir.path(), kind);
    }
}
