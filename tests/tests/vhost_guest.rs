//! A guest under QEMU whose data is on a volume. It writes while its target is killed and comes
//! back.
//!
//! It needs QEMU, busybox and the kernel of the lab, which is fetched once. `RBLK_SKIP_QEMU=1` goes
//! without, and says so.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rblk_tests::built::xtask_of_all;
use rblk_tests::guest::Served;
use rblk_tests::program::{Target, run};

/// How long the guest may take for everything: an emulated CPU on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);
const SIZE: u64 = 64 << 20;

/// A guest that runs; killed when it is dropped.
struct Qemu {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
    deadline: Instant,
}

impl Qemu {
    fn start(files: &Path, socket: &Path) -> Self {
        // QEMU runs both CPUs in one thread. With two threads, one CPU sometimes runs code while
        // the other CPU patches that code, and the guest's kernel dies (`Oops: int3`).
        let mut child = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg,thread=single", "-cpu", "max", "-m", "256", "-smp", "2"])
            .args(["-object", "memory-backend-memfd,id=m,size=256M,share=on"])
            .args(["-numa", "node,memdev=m"])
            .args(["-chardev", &format!("socket,id=c,path={}", socket.display())])
            .args(["-device", "vhost-user-blk-pci,chardev=c,num-queues=2"])
            .arg("-kernel")
            .arg(files.join("vmlinux"))
            .arg("-initrd")
            .arg(files.join("initramfs.cpio"))
            .args(["-append", "console=ttyS0 panic=-1 mitigations=off nokaslr rdinit=/init"])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("QEMU is not installed: apt-get install qemu-system-x86, or RBLK_SKIP_QEMU=1");
        let console = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in console.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines, said: Vec::new(), deadline: Instant::now() + LIMIT }
    }

    /// Waits until the guest says something that begins like this.
    fn wait_for(&mut self, beginning: &str) {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                panic!("the guest does not say `{beginning}`:\n{}", self.said.join("\n"));
            };
            let line = line.trim_end().to_owned();
            self.said.push(line.clone());
            assert!(!line.starts_with("guest: failed"), "{}", self.said.join("\n"));
            if line.starts_with(beginning) {
                return;
            }
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs root, QEMU and the kernel of the lab: `cargo xtask test` runs it"]
fn as_root_a_guest_keeps_its_files_while_its_target_is_killed() {
    if std::env::var_os("RBLK_SKIP_QEMU").is_some() {
        println!("skipped: RBLK_SKIP_QEMU is set");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let init = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest-init.sh");
    let mut files = xtask_of_all("guest-files");
    let made = files.arg("--init").arg(&init).arg("--out").arg(dir.path()).status().unwrap();
    assert!(made.success(), "no kernel for the guest");
    let store = dir.path().join("v.img");
    File::create(&store).unwrap().set_len(SIZE).unwrap();
    let seed = dir.path().join("seed");
    std::fs::create_dir(&seed).unwrap();
    std::fs::write(seed.join("hello"), "from the host\n").unwrap();
    let made = run(Command::new("mkfs.ext4").arg("-q").arg("-d").arg(&seed).arg(&store));
    assert_eq!(made.code, Some(0), "{made:?}");

    let volume = format!("v={}", store.display());
    let args = ["--file", &volume, "--block-size", "512"];
    let mut target = Target::start(dir.path(), &args);
    let address = target.address.to_string();
    let mut served = Served::start(dir.path(), &address, "v", &["--queues", "2"]);
    let mut guest = Qemu::start(dir.path(), &served.socket);
    guest.wait_for("guest: disk 131072 sectors, id v");
    for file in [1, 5] {
        guest.wait_for(&format!("guest: wrote {file}"));
        target.kill();
        std::thread::sleep(Duration::from_millis(300));
        target.start_again(dir.path(), &args);
    }
    guest.wait_for("guest: done");
    assert!(guest.child.wait().unwrap().success());
    assert_eq!(served.terminate(), Some(0), "{}", served.log());
    target.terminate();
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    compare(&store, dir.path(), &guest.said);
}

/// The store has the files that the guest wrote, by the sums that the guest said.
fn compare(store: &Path, dir: &Path, said: &[String]) {
    let checked = run(Command::new("e2fsck").arg("-fn").arg(store));
    assert_eq!(checked.code, Some(0), "{checked:?}");
    let sums: Vec<_> = said.iter().filter_map(|line| line.split_once("  file")).collect();
    assert_eq!(sums.len(), 12, "{said:?}");
    for (sum, number) in sums {
        let copy = dir.join("copy");
        let dump = format!("dump /file{number} {}", copy.display());
        let dumped = run(Command::new("debugfs").args(["-R", &dump]).arg(store));
        assert_eq!(dumped.code, Some(0), "{dumped:?}");
        let found = run(Command::new("sha256sum").arg(&copy));
        assert!(found.stdout.starts_with(sum), "file{number}: {found:?}, not {sum}");
        assert_eq!(std::fs::metadata(&copy).unwrap().len(), 1 << 20);
    }
}
