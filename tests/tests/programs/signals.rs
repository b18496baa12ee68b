//! SIGHUP to a target without a configuration file: it only logs a line. The signal itself, and the
//! terminal that sends it by closing.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command, Stdio};

use nix::fcntl::OFlag;
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use rblk_tests::bed::pattern;
use rblk_tests::program::{Client, Target, free_port, program, run, wait_for};

/// The line in the log.
const LINE: &str =
    "SIGHUP: the target was started without a configuration file, so nothing was reloaded";

fn discover(address: &str) -> Result<(), String> {
    let ended = run(Command::new(program("rblk-initiator")).args(["discover", address]));
    if ended.code == Some(0) { Ok(()) } else { Err(format!("{ended:?}")) }
}

#[test]
fn sighup_does_not_end_a_target() {
    let dir = tempfile::tempdir().unwrap();
    let mut target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let mut client = Client::connect(&target.address, "m", 1).unwrap();
    client.write(0, &pattern(1, 4096));
    let pid = target.status().pid;
    assert_eq!(target.log().matches(LINE).count(), 0);
    for times in 1..=2 {
        target.hang_up();
        wait_for("a line in the log of the target", || {
            (target.log().matches(LINE).count() == times).then_some(())
        });
        assert!(client.read(0, 4096) == pattern(1, 4096), "the session goes on");
    }
    assert_eq!((target.status().pid, target.status().draining), (pid, false));
    discover(&target.address.to_string()).unwrap();
    client.logout();
    target.terminate();
    assert_eq!(target.wait(), Some(0), "SIGTERM ends it as before:\n{}", target.log());
}

/// A target that was started in a terminal. Drop kills it.
struct InTerminal(Child);

impl Drop for InTerminal {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A terminal: the end of its window, and that of the programs in it. No child may inherit the
/// first end, or the window would stay open while the child lives.
fn terminal() -> (File, File) {
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let window = posix_openpt(flags).unwrap();
    grantpt(&window).unwrap();
    unlockpt(&window).unwrap();
    let name = ptsname_r(&window).unwrap();
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(OFlag::O_NOCTTY.bits());
    let programs = options.open(name).unwrap();
    (File::from(OwnedFd::from(window)), programs)
}

/// The target is started in a window or by ssh, which is then closed.
#[test]
fn a_target_outlives_its_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("c.sock");
    let port = free_port();
    let address = format!("tcp://127.0.0.1:{}", port.number);
    let (mut screen, programs) = terminal();
    let end = || Stdio::from(programs.try_clone().unwrap());
    // A session of its own, with this controlling terminal: the kernel then sends SIGHUP when the
    // terminal closes.
    let mut command = Command::new("setsid");
    command.arg("--ctty").arg(program("rblk-target"));
    command.args(["serve", "--listen", &address, "--memory", "m=1MiB", "-v", "--control-socket"]);
    command.arg(&socket).stdin(end()).stdout(end()).stderr(end());
    let mut target = InTerminal(command.spawn().unwrap());
    drop(command);
    drop(programs);
    let mut shown = String::new();
    while !shown.contains("ready") {
        let mut bytes = [0; 1024];
        // Fails when no process has the other end open, because the target ended.
        let count = screen.read(&mut bytes).unwrap_or_else(|e| panic!("{e}; it said:\n{shown}"));
        shown.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
    discover(&address).unwrap();
    drop(screen);
    // Each of these logs a line, which no process can read any more.
    for _ in 0..3 {
        discover(&address).unwrap();
    }
    assert!(target.0.try_wait().unwrap().is_none(), "the target ended with its terminal");
    let ended =
        run(Command::new(program("rblk-target")).arg("drain").arg("--control-socket").arg(&socket));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let code = wait_for("the target to end", || target.0.try_wait().unwrap()).code();
    assert_eq!(code, Some(0));
}
