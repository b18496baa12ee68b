//! [`Server`]: the process that serves a device without a note. A signal ends it.
//!
//! The driver reports a process id, which may be of another PID namespace: here it is a different
//! process then, or none. So a process counts only if it has `/dev/ublkcN` open, which the driver
//! lets one process do. The signal goes to the process that was checked, even if its id has been
//! reused. A live device without a visible process is served elsewhere, and is not dead.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::block_device::entries;
use crate::front::ublk::{DeviceInfo, DeviceState};

/// The server of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServedBy {
    /// No process: the server died.
    Nobody,
    /// A process of this namespace.
    Process(i32),
    /// A process that is not visible here: of another PID namespace, such as a container's.
    Elsewhere,
}

impl ServedBy {
    /// Finds the server of a device.
    #[must_use]
    pub fn of(info: &DeviceInfo) -> Self {
        match (info.state, Server::of(info)) {
            (_, Some(server)) => Self::Process(server.pid),
            (DeviceState::Live, None) => Self::Elsewhere,
            (_, None) => Self::Nobody,
        }
    }
}

/// A process that serves a device.
#[derive(Debug)]
pub struct Server {
    pid: i32,
    process: OwnedFd,
}

impl Server {
    /// The process that serves that device, if it lives and is visible here.
    #[must_use]
    pub fn of(info: &DeviceInfo) -> Option<Self> {
        let pid = info.server_pid.filter(|_| info.state == DeviceState::Live)?;
        // Before the check: then the checked process is this one, or this one has ended.
        let process = open(pid).ok()?;
        serves(Path::new("/proc"), pid, info.id).then_some(Self { pid, process })
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Sends a signal to the process.
    ///
    /// # Errors
    /// The system's: the process may have ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let (process, signal) = (self.process.as_raw_fd(), signal as libc::c_int);
        let none = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: numbers, and no pointer that the kernel follows.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process, signal, none, 0) };
        Errno::result(sent).map(drop).map_err(io::Error::from)
    }

    /// Whether the process has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let mut polled = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

/// A descriptor of a process.
fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers only.
    let process = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let process = i32::try_from(process).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor, and no other owner has its number.
    Ok(unsafe { OwnedFd::from_raw_fd(process) })
}

/// Whether a process has the node of a device open, even if a container's `/dev` shows it as a path
/// of one word.
fn serves(proc: &Path, pid: i32, device: u32) -> bool {
    let fds = proc.join(pid.to_string()).join("fd");
    let node = format!("ublkc{device}");
    let is_node = |to: &Path| {
        let is_near =
            to.parent().is_some_and(|dir| dir == Path::new("/dev") || dir == Path::new("/"));
        is_near && to.file_name().is_some_and(|name| name == node.as_str())
    };
    entries(&fds).iter().any(|fd| std::fs::read_link(fds.join(fd)).is_ok_and(|to| is_node(&to)))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;
    use crate::front::ublk::Features;

    fn info(state: DeviceState, server_pid: Option<i32>) -> DeviceInfo {
        let token = None;
        let flags = Features::default();
        DeviceInfo {
            id: 77,
            queues: 1,
            depth: 1,
            max_io_bytes: 4096,
            state,
            flags,
            server_pid,
            token,
        }
    }

    /// A process with the name of a server.
    fn process(dir: &Path) -> Child {
        let program = dir.join("rblk-initiatord");
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let child = Command::new(program).arg("60").spawn().unwrap();
        // The name changes when the child has become the program.
        let name = format!("/proc/{}/comm", child.id());
        while std::fs::read_to_string(&name).unwrap().trim() != "rblk-initiatord" {
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn a_process_without_the_node_open_is_not_the_server() {
        let dir = tempfile::tempdir().unwrap();
        let mut other = process(dir.path());
        let pid = i32::try_from(other.id()).unwrap();
        // The reported id belongs to another namespace; here it is the id of another mount.
        let live = info(DeviceState::Live, Some(pid));
        assert!(Server::of(&live).is_none());
        assert_eq!(ServedBy::of(&live), ServedBy::Elsewhere);
        // The id is unused here, or the driver does not report it.
        assert_eq!(ServedBy::of(&info(DeviceState::Live, Some(i32::MAX))), ServedBy::Elsewhere);
        assert_eq!(ServedBy::of(&info(DeviceState::Live, None)), ServedBy::Elsewhere);
        for state in [DeviceState::Quiesced, DeviceState::FailIo] {
            assert_eq!(ServedBy::of(&info(state, Some(pid))), ServedBy::Nobody);
        }
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_server_is_the_process_with_the_node_open() {
        let dir = tempfile::tempdir().unwrap();
        let fds = dir.path().join("5/fd");
        std::fs::create_dir_all(&fds).unwrap();
        let link =
            |number: &str, to: &str| std::os::unix::fs::symlink(to, fds.join(number)).unwrap();
        link("0", "/dev/ublkb77");
        link("1", "/dev/ublkc7");
        link("2", "/tmp/ublkc77");
        assert!(!serves(dir.path(), 5, 77));
        link("3", "/dev/ublkc77");
        assert!(serves(dir.path(), 5, 77));
        assert!(!serves(dir.path(), 6, 77));
        link("4", "/ublkc8");
        assert!(serves(dir.path(), 5, 8), "of a container");
    }

    #[test]
    fn a_signal_reaches_the_process_that_was_opened() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let server = Server { pid, process: open(pid).unwrap() };
        assert!(!server.has_ended());
        server.signal(Signal::SIGTERM).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGTERM));
        assert!(server.has_ended());
        assert!(server.signal(Signal::SIGTERM).is_err(), "nobody else gets it");
    }
}
