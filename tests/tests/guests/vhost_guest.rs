//! A guest under QEMU with its data on a volume. It writes while its target is killed and comes
//! back, and while the program that serves its disk ends or is killed, too. The guest hears of
//! every loss before it can rely on lost data: its synced files are there, and its file system is
//! consistent. `RBLK_LONG=1` ends and kills the program 40 times, `RBLK_ROUNDS=N` N times.
//!
//! The tests need QEMU, busybox and the kernel of the lab, which is fetched once.
//! `RBLK_SKIP_QEMU=1` skips them, with a line that says so.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rblk_tests::built::xtask_of_all;
use rblk_tests::guest::Served;
use rblk_tests::long::times;
use rblk_tests::program::{Target, run, wait_for};

/// Time for everything that the guest does: an emulated CPU on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);
const SIZE: u64 = 64 << 20;

/// A running guest. Drop kills it.
struct Qemu {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
    deadline: Instant,
}

impl Qemu {
    fn start(files: &Path, socket: &Path) -> Self {
        Self::start_with(files, &format!("socket,id=c,path={}", socket.display()), &["-no-reboot"])
    }

    /// A guest with a front end that reconnects. It can be reset.
    fn start_to_last(files: &Path, socket: &Path) -> Self {
        let front_end = format!("socket,id=c,path={},reconnect=1", socket.display());
        let monitor = format!("unix:{},server=on,wait=off", files.join("monitor").display());
        Self::start_with(files, &front_end, &["-monitor", &monitor])
    }

    fn start_with(files: &Path, front_end: &str, args: &[&str]) -> Self {
        // QEMU runs both CPUs in one thread. With two threads, one CPU sometimes runs code while
        // the other CPU patches that code, and the guest's kernel dies (`Oops: int3`).
        let mut child = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg,thread=single", "-cpu", "max", "-m", "256", "-smp", "2"])
            .args(["-object", "memory-backend-memfd,id=m,size=256M,share=on"])
            .args(["-numa", "node,memdev=m"])
            .args(["-chardev", front_end])
            .args(["-device", "vhost-user-blk-pci,chardev=c,num-queues=2"])
            .arg("-kernel")
            .arg(files.join("vmlinux"))
            .arg("-initrd")
            .arg(files.join("initramfs.cpio"))
            .args(["-append", "console=ttyS0 panic=-1 mitigations=off nokaslr rdinit=/init"])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
            .args(args)
            .stdin(Stdio::piped())
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

    /// The next line of the guest.
    fn next(&mut self) -> String {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                panic!("the guest says nothing more:\n{}", self.said.join("\n"));
            };
            if let Some(said) = self.understand(&line) {
                self.deadline = Instant::now() + LIMIT;
                return said;
            }
        }
    }

    /// The next line of the guest, if one has arrived.
    fn next_if_any(&mut self) -> Option<String> {
        while let Ok(line) = self.lines.try_recv() {
            if let Some(said) = self.understand(&line) {
                return Some(said);
            }
        }
        None
    }

    fn understand(&mut self, line: &str) -> Option<String> {
        let line = line.trim_end();
        self.said.push(line.to_owned());
        assert!(!line.contains("guest: failed"), "{}", self.said.join("\n"));
        // Messages of the kernel may be on the same line.
        line.find("guest: ").map(|at| line[at + "guest: ".len()..].to_owned())
    }

    /// Resets the guest.
    fn reset(&self, files: &Path) {
        let mut monitor = UnixStream::connect(files.join("monitor")).unwrap();
        monitor.write_all(b"system_reset\n").unwrap();
        monitor.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        // QEMU echoes the command after it has read it.
        let mut heard = String::new();
        let mut bytes = [0; 256];
        while heard.matches("(qemu)").count() < 2 {
            let read = monitor.read(&mut bytes).unwrap();
            assert_ne!(read, 0, "{heard}");
            heard.push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
    }

    /// Waits until the guest prints a line that begins like this.
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

/// Makes the kernel and the files of a guest. Its first process begins with the common script, and
/// continues with this one.
fn make_guest(dir: &Path, script: &str) {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guests");
    let parts = ["guest-begin.sh", script].map(|part| std::fs::read(scripts.join(part)).unwrap());
    let init = dir.join("first-process");
    std::fs::write(&init, parts.concat()).unwrap();
    let mut files = xtask_of_all("guest-files");
    let made = files.arg("--init").arg(&init).arg("--out").arg(dir).status().unwrap();
    assert!(made.success(), "no kernel for the guest");
}

#[test]
#[ignore = "needs root, QEMU and the kernel of the lab: `cargo xtask test` runs it"]
fn as_root_a_guest_keeps_its_files_while_its_target_is_killed() {
    if std::env::var_os("RBLK_SKIP_QEMU").is_some() {
        println!("skipped: RBLK_SKIP_QEMU is set");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    make_guest(dir.path(), "guest-files.sh");
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

/// Checks that the store has the guest's files, by the sums that the guest printed.
fn compare(store: &Path, dir: &Path, said: &[String]) {
    let checked = run(Command::new("e2fsck").arg("-fn").arg(store));
    assert_eq!(checked.code, Some(0), "{checked:?}");
    let sums: Vec<_> = said.iter().filter_map(|line| line.split_once("  file")).collect();
    assert_eq!(sums.len(), 12, "{said:?}");
    for (sum, number) in sums {
        must_have(store, dir, &format!("file{number}"), sum);
        assert_eq!(std::fs::metadata(dir.join("copy")).unwrap().len(), 1 << 20);
    }
}

/// The fate of the target while the program is away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Lives,
    /// Killed after the end of the program.
    DiesMeanwhile,
    /// Killed before the program ends, and back before the next program starts.
    DiesBefore,
}

/// The target, the program and the guest, and the files that the guest knows to be durable.
struct Rounds {
    guest: Qemu,
    served: Served,
    target: Target,
    address: String,
    // By number: the sums of synced files.
    synced: BTreeMap<u32, String>,
    told: u32,
    checks: u32,
    dir: tempfile::TempDir,
}

const PROGRAM: [&str; 2] = ["--queues", "2"];

impl Rounds {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        make_guest(dir.path(), "guest-rounds.sh");
        let store = dir.path().join("v.img");
        File::create(&store).unwrap().set_len(4 * SIZE).unwrap();
        // Small groups of blocks, so that directories have their metadata in many places.
        let groups = ["-b", "4096", "-g", "2048", "-O", "^flex_bg"];
        let made = run(Command::new("mkfs.ext4").arg("-q").args(groups).arg(&store));
        assert_eq!(made.code, Some(0), "{made:?}");
        let text = format!(
            "write_back_delay = '1h'\n[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\ncache = 'write-back'\nblock_size = 512\n",
            store.display()
        );
        std::fs::write(dir.path().join("target.toml"), text).unwrap();
        let config = dir.path().join("target.toml").display().to_string();
        let target = Target::start(dir.path(), &["--config", &config]);
        let address = target.address.to_string();
        let served = Served::start(dir.path(), &address, "v", &PROGRAM);
        let guest = Qemu::start_to_last(dir.path(), &served.socket);
        let (synced, told, checks) = (BTreeMap::new(), 0, 0);
        let mut rounds = Self { guest, served, target, address, synced, told, checks, dir };
        assert!(rounds.hear_until("boots").is_none());
        rounds
    }

    fn start_target(&mut self) {
        let config = self.dir.path().join("target.toml").display().to_string();
        self.target.start_again(self.dir.path(), &["--config", &config]);
    }

    fn start_program(&mut self) {
        self.served = Served::start(self.dir.path(), &self.address, "v", &PROGRAM);
    }

    /// Reads the guest's lines up to one that begins with `what`. Returns the guest's report if it
    /// heard of a loss instead.
    fn hear_until(&mut self, what: &str) -> Option<String> {
        loop {
            let said = self.guest.next();
            self.learn(&said);
            if said.starts_with("told") {
                return Some(said);
            }
            if said.starts_with(what) {
                return None;
            }
            assert!(!said.starts_with("boots"), "the guest died:\n{}", self.guest.said.join("\n"));
        }
    }

    fn learn(&mut self, said: &str) {
        if let Some(file) = said.strip_prefix("wrote ") {
            let (number, sum) = file.split_once(' ').unwrap();
            self.synced.insert(number.parse().unwrap(), sum.to_owned());
        }
    }

    /// One round: the program is told to end, or is killed, and the next one starts.
    fn round(&mut self, graceful: bool, fate: Fate) {
        let before = self.served.log().len();
        wait_for("writes that no FLUSH covered", || {
            (self.served.unflushed_writes() > 0).then_some(())
        });
        if fate == Fate::DiesBefore {
            self.target.kill();
        }
        if graceful {
            assert_eq!(self.served.terminate(), Some(0), "{}", self.served.log());
        } else {
            self.served.kill();
        }
        if fate == Fate::DiesMeanwhile {
            self.target.kill();
        }
        if fate != Fate::Lives {
            self.start_target();
        }
        // Without a program no further file is synced.
        let mut told = None;
        while let Some(said) = self.guest.next_if_any() {
            self.learn(&said);
            told = told.or_else(|| said.starts_with("told").then_some(said));
        }
        self.start_program();
        if !graceful {
            wait_for("QEMU to connect again", || {
                self.served.log()[before..].contains("reset the guest").then_some(())
            });
            self.guest.reset(self.dir.path());
        }
        let told = match graceful {
            _ if told.is_some() => told,
            // The first line may be about a file that was synced before.
            true => self.hear_until("wrote").or_else(|| self.hear_until("wrote")),
            false => self.hear_until("boots").or_else(|| self.hear_until("wrote")),
        };
        println!("graceful {graceful}, target {fate:?}: {told:?}, {} synced", self.synced.len());
        let may_be_told = if graceful { fate == Fate::DiesBefore } else { fate != Fate::Lives };
        assert!(told.is_none() || may_be_told, "{told:?}\n{}", self.served.log());
        if told.is_some() {
            self.told += 1;
            self.next_guest();
        } else if !graceful {
            assert!(!may_be_told, "a loss was not told:\n{}", self.served.log());
        }
    }

    /// A guest that heard of a loss has ended. Its store must be consistent, and the next guest
    /// uses it.
    fn next_guest(&mut self) {
        assert!(self.guest.child.wait().unwrap().success());
        self.check();
        self.start_target();
        self.start_program();
        self.guest = Qemu::start_to_last(self.dir.path(), &self.served.socket);
        let told = self.hear_until("boots").or_else(|| self.hear_until("wrote"));
        assert_eq!(told, None, "a guest that lost nothing:\n{}", self.served.log());
    }

    /// Ends the program and the target, and checks the store: synced files are there, and the file
    /// system is consistent after a replay of its journal.
    fn check(&mut self) {
        let log = self.served.log();
        assert_eq!(self.served.terminate(), Some(0), "{log}");
        self.target.terminate();
        assert_eq!(self.target.wait(), Some(0), "{}", self.target.log());
        let store = self.dir.path().join("v.img");
        let replayed = run(Command::new("e2fsck").arg("-fp").arg(&store));
        assert!(matches!(replayed.code, Some(0 | 1)), "{replayed:?}\n{log}");
        let checked = run(Command::new("e2fsck").arg("-fn").arg(&store));
        assert_eq!(checked.code, Some(0), "{checked:?}\n{log}");
        for (number, sum) in &self.synced {
            must_have(&store, self.dir.path(), &format!("d{number}/file"), sum);
        }
        self.checks += 1;
        println!("e2fsck: {:?}, then clean; {} files are right", replayed.code, self.synced.len());
    }
}

/// Checks that the store has a file with that sum.
fn must_have(store: &Path, dir: &Path, file: &str, sum: &str) {
    let copy = dir.join("copy");
    // `debugfs` exits with 0 for a missing file, too.
    let _ = std::fs::remove_file(&copy);
    let dump = format!("dump /{file} {}", copy.display());
    let dumped = run(Command::new("debugfs").args(["-R", &dump]).arg(store));
    assert_eq!(dumped.code, Some(0), "{dumped:?}");
    assert!(copy.exists(), "{file} was synced, and is not there: {dumped:?}");
    let found = run(Command::new("sha256sum").arg(&copy));
    assert!(found.stdout.starts_with(sum), "{file}: {found:?}, not {sum}");
}

/// The program is told to end or killed in turns, and the target is killed in between.
#[test]
#[ignore = "needs root, QEMU and the kernel of the lab: `cargo xtask test` runs it"]
fn as_root_a_guest_goes_on_with_the_next_program_or_hears_of_a_loss() {
    if std::env::var_os("RBLK_SKIP_QEMU").is_some() {
        println!("skipped: RBLK_SKIP_QEMU is set");
        return;
    }
    let asked = std::env::var("RBLK_ROUNDS").ok().map(|rounds| rounds.parse().unwrap());
    let rounds: usize = asked.unwrap_or_else(|| times(6, 40).try_into().unwrap());
    let mut bed = Rounds::start();
    assert!(bed.hear_until("wrote").is_none());
    for round in 0..rounds {
        let turn = round / 2;
        let (graceful, fate) = match round % 2 {
            0 => (true, [Fate::DiesMeanwhile, Fate::DiesBefore, Fate::Lives][turn % 3]),
            _ => (false, [Fate::Lives, Fate::DiesMeanwhile, Fate::DiesBefore][turn % 3]),
        };
        bed.round(graceful, fate);
    }
    bed.guest.child.stdin.as_mut().unwrap().write_all(b"end\n").unwrap();
    assert_eq!(bed.hear_until("done"), None, "{}", bed.served.log());
    assert!(bed.guest.child.wait().unwrap().success());
    bed.check();
    println!("{rounds} rounds, {} losses told, {} checks of the store", bed.told, bed.checks);
}
