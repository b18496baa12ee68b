//! A host whose root file system is on a volume: Debian 13 under QEMU boots by initramfs-tools and
//! by dracut, with the files of `packaging/`. Its target is killed while it writes. Then it moves
//! the mount to another program and powers off, and its file system is clean.
//!
//! The test needs root, QEMU, mmdebstrap and Debian's archive, and takes some minutes.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rblk_tests::program::{Target, program, run};

/// Time to make the images: most of it is the download.
const IMAGES: Duration = Duration::from_secs(1800);
/// Time between two lines of an emulated guest.
const SILENCE: Duration = Duration::from_secs(400);
/// How long the target is away.
const AWAY: Duration = Duration::from_secs(6);

/// A guest that boots from a volume. Drop kills it.
struct Host {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Host {
    fn boot(dir: &Path, kind: &str, words: &str) -> Self {
        let log = File::create(dir.join(format!("{kind}.qemu"))).unwrap();
        let command_line = format!("console=ttyS0 ip=dhcp panic=-1 nokaslr rw {words}");
        let mut child = Command::new("nice")
            .args(["-n", "10", "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-smp", "2"])
            .args(["-cpu", "max,la57=off,smap=off,smep=off", "-m", "1536", "-nodefaults"])
            .args(["-display", "none", "-no-reboot", "-serial", "stdio"])
            .args(["-nic", "user,model=virtio-net-pci", "-device", "virtio-rng-pci"])
            .arg("-kernel")
            .arg(dir.join("vmlinuz"))
            .arg("-initrd")
            .arg(dir.join(format!("{kind}.initrd")))
            .args(["-append", &command_line])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("QEMU");
        let mut console = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            // Bytes, as the console shows progress by control characters.
            let mut line = Vec::new();
            while console.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
                line.clear();
            }
        });
        Self { child, lines, said: Vec::new() }
    }

    /// Waits for a line with these words, and returns the line.
    fn wait_for(&mut self, words: &str) -> String {
        loop {
            let Ok(line) = self.lines.recv_timeout(SILENCE) else {
                panic!("the guest does not say `{words}`:\n{}", self.said.join("\n"));
            };
            self.said.push(line.clone());
            assert!(!line.contains("guest: failed"), "{}", self.said.join("\n"));
            if line.contains(words) {
                return line;
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes kernel, images and root file systems.
fn make_images(dir: &Path) {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let programs = program("rblk-initiator");
    let log = File::create(dir.join("images.log")).unwrap();
    let mut child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash"])
        .arg(checkout.join("tests/tests/guests/boot-image.sh"))
        .arg(checkout)
        .arg(programs.parent().unwrap())
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .expect("unshare");
    let begun = Instant::now();
    let ended = loop {
        if let Some(ended) = child.try_wait().unwrap() {
            break ended.success();
        }
        if begun.elapsed() > IMAGES {
            let _ = child.kill();
            break false;
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    assert!(ended, "{}", std::fs::read_to_string(dir.join("images.log")).unwrap());
}

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
    let words = format!("root=rblk:root1@tcp://10.0.2.2:{port} rblk.target_key={key}");
    let mut guest = Host::boot(dir, kind, &words);

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
    assert!(guest.child.wait().unwrap().success());
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    let checked = run(Command::new("e2fsck").arg("-fn").arg(&image));
    assert_eq!(checked.code, Some(0), "{checked:?}\n{}", guest.said.join("\n"));
    println!("{kind}: {} lines of the console, and a clean file system", guest.said.len());
}

#[test]
#[ignore = "takes minutes and downloads a Debian: `cargo xtask test --long` runs it, as root"]
fn long_only_a_host_boots_from_a_volume() {
    let dir = tempfile::tempdir().unwrap();
    make_images(dir.path());
    for kind in ["initramfs-tools", "dracut"] {
        boots(dir.path(), kind);
    }
}
