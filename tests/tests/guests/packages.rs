//! The packages on a host that systemd boots: Debian 13 under QEMU. An administrator installs them
//! by the commands of README.md, configures both ends by those of docs/install.md, upgrades them
//! below running I/O, restarts the host three times, puts layers above and below them by
//! docs/layers.md, removes and purges them (`packages-work.sh`).
//! One mount has its target on this machine: the test starts it late, and kills it before and
//! during a shutdown.
//!
//! The test needs root, QEMU, mmdebstrap and Debian's archive, and the packages: those of the
//! directory `RBLK_PACKAGES`, or else `cargo xtask dist` makes them. It takes an hour without them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rblk_tests::guide::{layers, typed, walk};
use rblk_tests::program::{Target, program, run};

use crate::emulated_host::{EmulatedHost, make_images};

/// Limit on a shutdown whose target is away. docs/install.md says 97 s, on a machine without an
/// emulator; the services of the host have limits of 120 s and twice 120 s.
const SHUTDOWN: Duration = Duration::from_secs(400);

/// The packages.
fn packages(dir: &Path) -> PathBuf {
    if let Some(packages) = std::env::var_os("RBLK_PACKAGES") {
        return PathBuf::from(packages);
    }
    let out = dir.join("packages");
    let mut dist = Command::new(env!("CARGO"));
    dist.args(["xtask", "dist", "--out"]).arg(&out);
    let made = dist.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).status();
    assert!(made.expect("cargo").success(), "cargo xtask dist");
    out
}

/// The target of the mount `far`, on this machine.
struct Far<'a> {
    dir: &'a Path,
    key: String,
    target: Target,
    args: Vec<String>,
}

impl<'a> Far<'a> {
    /// It lets nobody in yet.
    fn new(dir: &'a Path) -> Self {
        let file = |name: &str| dir.join(name).display().to_string();
        let key = file("far.key");
        let made = run(Command::new(program("rblk-target")).args(["key", "new", "--file", &key]));
        assert_eq!(made.code, Some(0), "{made:?}");
        std::fs::File::create(dir.join("far.img")).unwrap().set_len(256 << 20).unwrap();
        let volume = format!("far={}", file("far.img"));
        let args = ["--file", &volume, "--key-file", &key, "--auth", "required"];
        let target = Target::start(dir, &args);
        let args = args.map(str::to_owned).to_vec();
        Self { dir, key: made.stdout.trim().to_owned(), target, args }
    }

    /// Kills it, if it runs, and starts it.
    fn start(&mut self) {
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        self.target.kill();
        self.target.start_again(self.dir, &args);
    }

    /// Does what a line of the guest's console asks for.
    fn hear(&mut self, line: &str) {
        let Some((_, asked)) = line.split_once("guest: please ") else { return };
        match asked.split_whitespace().collect::<Vec<_>>()[..] {
            ["let", host, "in"] => {
                self.args.extend(["--host".to_owned(), format!("client1={host}")]);
                self.start();
            }
            ["start"] => self.start(),
            ["kill"] => self.target.kill(),
            _ => panic!("{line}"),
        }
    }
}

/// One life of the guest. Gives the time of its shutdown.
fn live(dir: &Path, far: &mut Far<'_>) -> Duration {
    // No colours between the words of the console.
    let words = format!(
        "root=/dev/vda TERM=dumb systemd.show_status=1 systemd.journald.forward_to_console=0 \
         rblk_far=tcp://10.0.2.2:{} rblk_far_key={}",
        far.target.address.port, far.key
    );
    let disk = format!("file={},if=virtio,format=raw", dir.join("root.img").display());
    let mut guest = EmulatedHost::boot(dir, "initrd", &words, &["-drive", &disk]);
    let (mut ends, mut dies) = (None, false);
    loop {
        let line = guest.next_line();
        println!("{line}");
        far.hear(&line);
        if line.contains("guest: restart") || line.contains("guest: done") {
            ends = Some(Instant::now());
            dies = line.contains("a far target that dies");
        }
        if dies && line.contains("Unmounting far.mount") {
            far.target.kill();
            dies = false;
        }
        if line.contains("reboot: ") {
            break;
        }
    }
    assert!(!dies, "the target outlived the file system");
    guest.must_end();
    ends.expect("the guest says what it does").elapsed()
}

#[test]
#[ignore = "takes an hour and downloads a Debian: `cargo xtask test --long` runs it, as root"]
fn long_only_packages_live_on_a_host_with_systemd() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // The configuration, then the commands. Later blocks are for other cases.
    let typed = typed(&[("On the target", 2), ("On the initiator", 2), ("Mount at boot", 3)]);
    std::fs::write(dir.join("typed"), typed).unwrap();
    std::fs::write(dir.join("walk"), walk()).unwrap();
    std::fs::write(dir.join("layers"), layers()).unwrap();
    make_images(dir, "packages-image.sh", &packages(dir));
    let mut far = Far::new(dir);
    live(dir, &mut far);
    // Late: the guest asks for it.
    far.target.kill();
    let without = live(dir, &mut far);
    far.start();
    let dying = live(dir, &mut far);
    far.start();
    live(dir, &mut far);
    println!("shutdown without the far target: {without:?}, with one that dies: {dying:?}");
    assert!(without < SHUTDOWN && dying < SHUTDOWN);
}
