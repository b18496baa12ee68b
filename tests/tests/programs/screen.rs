//! `top` on a terminal, ended by a signal: the terminal is restored, and the parent process sees
//! the signal.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use nix::pty::{OpenptyResult, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{LocalFlags, Termios, tcgetattr};
use nix::unistd::Pid;
use rblk_tests::program::{Target, program, wait_for};

/// `top` of a target on a terminal.
struct Top {
    child: Child,
    terminal: OwnedFd,
    before: Termios,
    drawn: Arc<Mutex<String>>,
}

impl Top {
    /// Starts `top`, and waits until it has switched the terminal.
    fn start(target: &Target, terminal: &str) -> Self {
        let OpenptyResult { master, slave } = openpty(None, None).expect("a terminal");
        // Reads the output, since `top` draws more than a terminal buffers.
        let drawn = Arc::new(Mutex::new(String::new()));
        let all = Arc::clone(&drawn);
        std::thread::spawn(move || {
            let (mut master, mut bytes) = (File::from(master), [0; 4096]);
            while let Ok(count @ 1..) = master.read(&mut bytes) {
                *all.lock().unwrap() += &String::from_utf8_lossy(&bytes[..count]);
            }
        });
        let before = tcgetattr(&slave).expect("a terminal");
        // The parent of the tests may ignore signals, as nohup does.
        let mut command = Command::new("env");
        command.arg("--default-signal").arg(program("rblk-target")).env("TERM", terminal);
        command.args(["top", "--control-socket"]).arg(&target.socket);
        let end = || slave.try_clone().expect("another descriptor");
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("top");
        let top = Self { child, terminal: slave, before, drawn };
        let has_it = || !top.now().local_flags.contains(LocalFlags::ICANON);
        wait_for("keys that come at once", || has_it().then_some(()));
        top
    }

    fn now(&self) -> Termios {
        tcgetattr(&self.terminal).expect("a terminal")
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_signal_ends_top_and_the_terminal_is_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT] {
        let mut top = Top::start(&target, "xterm");
        let pid = Pid::from_raw(i32::try_from(top.child.id()).unwrap());
        kill(pid, signal).unwrap();
        let status = wait_for("the end of top", || top.child.try_wait().unwrap());
        assert_eq!(status.signal(), Some(signal as i32), "{status:?}");
        assert_eq!(top.now(), top.before, "{signal}");
    }
}

#[test]
fn long_lines_are_cut_and_the_keys_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::start(dir.path(), &["--memory", "m=1MiB"]);
    let frame = |terminal: &str| {
        let top = Top::start(&target, terminal);
        wait_for("a frame", || {
            let drawn = top.drawn.lock().unwrap();
            drawn.contains("q or ctrl-C: end").then(|| drawn.clone())
        })
    };
    // Line wrap is off while `top` draws, and on again after it.
    let drawn = frame("xterm");
    let (cut, whole) = (drawn.find("\x1b[?7l").unwrap(), drawn.find("VOLUME").unwrap());
    assert!(cut < whole && drawn[whole..].contains("\x1b[?7h"), "{drawn:?}");
    let drawn = frame("dumb");
    assert!(drawn.contains("VOLUME") && !drawn.contains('\x1b'), "{drawn:?}");
}
